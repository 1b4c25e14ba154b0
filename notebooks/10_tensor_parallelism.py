# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["header"]
# # 10 Tensor parallelism
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/10_tensor_parallelism.ipynb)
# [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/OWNER/minivllm/blob/v0.1.0/notebooks/10_tensor_parallelism.ipynb)
#
# One model on several ranks, each with its own pool.
#
# Previous: [09 CUDA graphs and torch.compile](09_cuda_graphs.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/09_cuda_graphs.ipynb)) · Next: 11 LoRA and quantized weights (planned) · 75 minutes with the exercises · runs on a CPU, on Colab's free T4 and on larger GPUs

# %% [markdown]
# **You will build** one layer that several processes, **ranks**, compute together: by hand, on threads, with an **all-reduce** (their sum, for all) of your own. Then the embedded model runs on three real
# processes and generates the same tokens.
#
# **You will learn** which matrix is cut which way, and why a layer needs just two all-reduces; what each rank holds of weights and KV cache; how many bytes the ranks exchange; and to predict
# when two GPUs are faster than one, and when slower.
#
# **You need** heads and kv heads ([notebook 01](01_naive_attention.ipynb)), the pool ([04](04_paged_attention.ipynb)) and the idea that a decode step reads all weights ([02](02_kv_cache.ipynb)).
# No GPU: the ranks are processes on this machine.

# %% tags=["setup"]
import importlib, os, subprocess
from importlib.util import find_spec

kaggle, colab = "KAGGLE_KERNEL_RUN_TYPE" in os.environ, find_spec("google") and find_spec("google.colab")
if (kaggle or colab) and not find_spec("minivllm"):  # a fresh Kaggle or Colab
    clone = "git clone -q --depth 1 -b v0.1.0 https://github.com/OWNER/minivllm minivllm-source"
    command = f"(test -d minivllm-source || {clone}) && bash minivllm-source/colab_setup.sh"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    print(done.stdout)
    if done.returncode:
        raise RuntimeError(f"minivllm could not be set up: {done.stderr.strip() or 'no reason given'}")
    importlib.invalidate_caches()
from minivllm.teach import notebook
notebook.where()

# %%
import torch
from torch.nn import functional as F

import minivllm
from minivllm import LLM, SamplingParams
from minivllm.teach import scaling

# Small blocks, so that a short text fills some. On the CPU everywhere: section 10 is for GPUs.
settings = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_kv_blocks": 32, "max_model_len": 64,
            "enable_prefix_caching": False}
llm = LLM("smollm2", max_num_seqs=4, **settings)
model = llm.runner.model

# %% [markdown]
# ## 1. The problem, measured
#
# A decode step reads every weight of the layers once. That is a limit to its speed, and before that the weights have to fit. In 16 bit:

# %%
for name in ("qwen3-0.6b", "qwen3-8b"):
    for gpu, gigabytes, rate in (("T4", 16, 320), ("H200", 141, 4800)):
        for ranks in (1, 2):
            own = scaling.rank_bytes(scaling.SHAPES[name], ranks)
            room = "fits" if own.held < gigabytes * 1e9 else "does not fit"
            print(f"{name:10} on {ranks} x {gpu:4}: {own.held / 1e9:5.2f} GB a GPU, {room:12};",
                  f"read in {own.read / 1e6 / rate:5.2f} ms at least")

# %% [markdown]
# An 8B model does not fit a T4 (16 GB), and no kernel reads faster than its GPU's memory. With more than one GPU there are three ways:
#
# - **A copy on each**: twice the requests a second, but a model that does not fit still does not, and a token takes as long.
# - **Some layers on each** (pipeline parallelism): it fits, but a token still passes through all layers, one GPU after the other.
# - **A part of every layer on each** (tensor parallelism): it fits, and the parts are read at the same time. The price: the GPUs must talk in every layer.
#
# A process with its GPU is called a **rank**. This notebook is about the third way.
#
# ## 2. The idea, drawn
#
# Two matrix products in a row, x A B, on two ranks. A is cut between its columns, B between its rows:
#
# ```
# x = [1 2]    A = [1 0 | 2 1]      x A = [1 4 | 4 1]      rank 0 has [1 4], rank 1 has [4 1]
#                  [0 2 | 1 0]
#
# B = [1 0]                        rank 0:  [1 4] [1 0]  =  [9 4]
#     [2 1]                                       [2 1]
#     -----                        rank 1:  [4 1] [0 1]  =  [1 5]
#     [0 1]                                       [1 1]
#     [1 1]                        the sum:                [10 9]  =  x A B
# ```
#
# The first cut gives pieces that lie **side by side**: finished numbers of the result, some on each rank. The second gives **summands**: each rank has something for every number of the result. And what
# the first cut leaves on a rank is exactly what the second one needs there. So only the sum at the end has to travel. The operation that gives every rank the sum of all is an **all-reduce**.
#
# ## 3. Two ways to cut
#
# The same in torch. Its weights are stored [out, in], and y = x W^T, so columns of the product are *rows* of the weight:

# %%
x = torch.tensor([[1.0, 2.0]])                                            # [1, 2]
A = torch.tensor([[1.0, 0.0], [0.0, 2.0], [2.0, 1.0], [1.0, 0.0]])        # [4, 2]: out, in
B = torch.tensor([[1.0, 2.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0]])            # [2, 4]
pieces = [x @ part.T for part in A.chunk(2, dim=0)]                       # column-parallel: cut the outputs
print("side by side:", [piece.tolist() for piece in pieces])
summands = [piece @ part.T for piece, part in zip(pieces, B.chunk(2, dim=1))]  # row-parallel: cut the inputs
print("summands:", [one.tolist() for one in summands], "sum:", sum(summands).tolist())
print("x A B:", (x @ A.T @ B.T).tolist())

# %% [markdown]
# **The naive way** is to cut each matrix alone and put the result together each time: two exchanges for two products. Column first, then row, needs one. Row first, then column, needs two: between the
# products of an MLP stands an activation, which works on single numbers. Pieces side by side can bear it, summands cannot:

# %%
silu = F.silu
print("of pieces:  ", torch.allclose(torch.cat([silu(piece) for piece in pieces], dim=1), silu(x @ A.T)))
first, second = torch.tensor([2.0]), torch.tensor([-1.0])
print(f"of summands: silu(2) + silu(-1) = {(silu(first) + silu(second)).item():.3f},",
      f"silu(2 - 1) = {silu(first + second).item():.3f}")

# %% [markdown]
# ## 4. Build it
#
# Our ranks are threads first. They meet at a table: each lays its tensor down, waits until all have, and adds up what lies there. The second wait keeps a fast rank from laying down
# its next tensor while a slow one still reads.

# %%
import threading
from concurrent.futures import ThreadPoolExecutor


class Table:
    def __init__(self, size):
        self.laid, self.barrier = [None] * size, threading.Barrier(size, timeout=60)

    def all_reduce(self, rank, x):
        self.laid[rank] = x
        self.barrier.wait()              # all have laid theirs down
        total = sum(self.laid)
        self.barrier.wait()              # all have read
        return total


def on_ranks(size, work):                # work(rank, table) on each rank; all results
    table = Table(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: work(rank, table), range(size)))


print(on_ranks(3, lambda rank, table: table.all_reduce(rank, torch.tensor(10 ** rank)).item()))

# %% [markdown]
# ### The MLP
#
# The embedded model's first MLP on three ranks. It has three matrices: gate and up are cut by columns, down by rows.

# %%
layer = model.model.layers[0]
gate, up = layer.mlp.gate_up_proj.weight.chunk(2)                         # [1536, 576] each
down = layer.mlp.down_proj.weight                                         # [576, 1536]
x = torch.randn(5, 576, generator=torch.Generator().manual_seed(0))       # 5 tokens
wanted = (silu(x @ gate.T) * (x @ up.T)) @ down.T


def mlp(rank, table):
    g, u, d = gate.chunk(3)[rank], up.chunk(3)[rank], down.chunk(3, dim=1)[rank]
    hidden = silu(x @ g.T) * (x @ u.T)                                    # [5, 512]: pieces
    return table.all_reduce(rank, hidden @ d.T)                           # [5, 576]: summands, then the sum


print("on all ranks:", [torch.allclose(y, wanted, atol=1e-4) for y in on_ranks(3, mlp)])

# %% [markdown]
# **The trap of merged weights.** Engines keep gate and up as one matrix, so that one kernel does both. Cut *that* into three, and rank 0 gets 1024 rows of gate and none of up. The shapes fit, so nobody complains:

# %%
merged, numbers = torch.cat((gate, up)), torch.arange(3072)               # gate's rows are 0 to 1535
needed = torch.cat((numbers[:1536].chunk(3)[0], numbers[1536:].chunk(3)[0]))
for name, rows in (("a cut of the merged matrix", numbers.chunk(3)[0]), ("what rank 0 needs", needed)):
    print(f"{name:26} {len(rows)} rows, {(rows < 1536).sum()} of them gate's")


def wrong(rank, table):
    g, u = merged.chunk(3)[rank].chunk(2)
    return table.all_reduce(rank, (silu(x @ g.T) * (x @ u.T)) @ down.chunk(3, dim=1)[rank].T)


print("by such a cut:", [torch.allclose(y, wanted, atol=1e-4) for y in on_ranks(3, wrong)])

# %% [markdown]
# ### Attention
#
# Heads do not look at each other. So q, k and v are cut by columns *between heads*, every rank attends with its own, and the output projection is cut by rows: again one all-reduce. (Norms of a head and
# rotary positions happen inside of a head.) The 9 query heads share 3 kv heads, three and three; a rank needs the kv head of its query heads.

# %%
from minivllm.teach.exercises.attention import grouped_query_attention

q, k, v = layer.self_attn.qkv_proj.weight.split([9 * 64, 3 * 64, 3 * 64])
o = layer.self_attn.o_proj.weight                                         # [576, 576]
heads = lambda weight: (x @ weight.T).view(5, -1, 64)                     # [T, heads, D]
wanted = grouped_query_attention(heads(q), heads(k), heads(v)).flatten(1) @ o.T


def attention(rank, table):
    mine = [heads(weight.chunk(3)[rank]) for weight in (q, k, v)]         # [5, 3, 64], twice [5, 1, 64]
    out = grouped_query_attention(*mine).flatten(1)                       # [5, 192]: the rank's heads
    return table.all_reduce(rank, out @ o.chunk(3, dim=1)[rank].T)


print("on all ranks:", [torch.allclose(y, wanted, atol=1e-4) for y in on_ranks(3, attention)])

# %% [markdown]
# Two all-reduces a layer, then: one for attention, one for the MLP. Between them x and the norms are whole on every rank; each computes them for itself.
#
# **The two ends.** The embedding and the output layer are cut by the vocabulary. A rank looks up the ids that it holds and takes zeros for the others; an all-reduce adds up. For the logits each rank computes its part of the
# vocabulary, and the parts are put side by side: an **all-gather**.
#
# ### What does not divide
#
# The number of ranks must divide the query heads and the MLP's width. Kv heads may be fewer than ranks: then neighbouring ranks hold the same one, and the cache a rank holds stops shrinking.

# %%
from minivllm.models import ModelConfig
from minivllm.worker.parallel_checks import check_size, valid_sizes

shape = scaling.SHAPES["qwen3-0.6b"]                                      # 16 heads, 8 kv heads
print("Qwen3-0.6B:", valid_sizes(ModelConfig.from_dict(shape, {})), "| here:", valid_sizes(llm.model_config))
print("kv head of each of 16 ranks:", [rank * 8 // 16 for rank in range(16)])
print("K/V bytes a token and rank:", {ranks: scaling.rank_bytes(shape, ranks).kv for ranks in (1, 2, 4, 8, 16)})
try:
    check_size(llm.model_config, 2)         # LLM(..., tensor_parallel_size=2) asks this first
except ValueError as error:
    print(error)

# %% [markdown]
# ## 5. The same answer?
#
# First one rank. We keep its tokens, its weights and its pool, and close it.

# %%
texts = ["The capital of France is", "Once upon a time, in a village by the sea,", "2 + 2 ="]
prompts = [llm.tokenizer.encode(text) for text in texts]
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def answers():
    return [out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)]


wanted, pool = answers(), llm.runner.pool.cache.clone()
llm.close()
print("pool [2, L, N, S, K, D]:", tuple(pool.shape))

# %% [markdown]
# Now three. `tensor_parallel_size=3` starts two processes beside this one; rank 0 is this kernel. On CPUs they talk through torch's gloo, on GPUs through NVIDIA's NCCL. (`close_all` is for those who run the cell twice. Ranks
# end with the `LLM`, and with this kernel, however it ends.)

# %%
minivllm.close_all()
llm = LLM("smollm2", tensor_parallel_size=3, max_num_seqs=4, **settings)
print("ranks beside this process:", len(llm.runner.crew.processes))
print("the same tokens:", answers() == wanted)

# %% [markdown]
# `everywhere` runs a function of a module on every rank. So we can ask what each of them holds:

# %%
from minivllm.teach import rank_probes

ask = llm.runner.everywhere
norms = 4 * 576 * (2 * 30 + 1)                # bytes: two a layer and the last, whole on every rank
whole_bytes = sum(parameter.nbytes for parameter in model.parameters())
print("weights of one rank:", f"{whole_bytes:,} bytes; of each of three:", ask(rank_probes.weight_bytes))
print("expected:", (whole_bytes - norms) // 3 + norms)
name = "model.layers.0.mlp.down_proj.weight"
print("down, side by side, is the whole:", torch.equal(torch.cat(ask(rank_probes.weight, name), dim=1), down))
pools = ask(rank_probes.blocks, list(range(32)))
print("each rank's pool:", ask(rank_probes.pool_shape)[0], "; side by side they are the one pool:",
      torch.allclose(torch.cat(pools, dim=4), pool, atol=1e-3))

# %% [markdown]
# The last line tells most: the three pools, side by side at their heads, are the pool of one rank, every slot of every block.
#
# **Other numbers of ranks**, for a small random model with 8 heads and 2 kv heads. `ThreadRunner` runs its ranks on threads, as in section 4, so it starts at once. On 4 ranks two share each kv head:

# %%
from minivllm.teach.thread_runner import ThreadRunner, random_model

some = [[5, 6, 7, 8, 9], list(range(20, 37)), [3]]
with random_model() as directory:
    for size in (1, 2, 4):
        with ThreadRunner(directory, size, load_format="dummy") as runner:  # the same random weights
            tokens = runner.generate(some, [6, 6, 6])
            caches = [rank.pool.cache for rank in runner.runners]
            first = tokens if size == 1 else first
            print(f"{size} ranks: the same tokens {tokens == first}; pools equal to rank 0's:",
                  [torch.equal(cache, caches[0]) for cache in caches], tuple(caches[0].shape))

# %% [markdown]
# ## 6. The finished module
#
# `minivllm/layers/linear.py` holds the layers: `ColumnParallelLinear`, `RowParallelLinear`, and the merged ones that know their parts. What the package adds:
#
# - **Loading.** Each layer says which part of which tensor of the file is its own (`layers/parallel.py`); a rank reads only that.
# - **Processes** (`worker/crew.py`). Rank 0 starts the others, sees at once when one fails or dies, and ends the rest: no rank can go on alone.
# - **One decision for all.** Engine, scheduler and block manager live in rank 0 alone. It sends each step's plan to the others (`worker/wire.py`), and draws the tokens.
#
# ## 7. Watch it: one pool a rank
#
# The same requests again, with answers of 6, 3 and 4 tokens. Move the slider when it is over.

# %%
from minivllm.teach import RankView

view = RankView(llm)
display(view)
lengths = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (6, 3, 4)]
with rank_probes.listening(llm) as said:    # what rank 0 tells the others, for section 8
    again = llm.generate(prompts, lengths, use_tqdm=False)
print("the same tokens:", [out["token_ids"] for out in again] == [ids[:n] for ids, n in zip(wanted, (6, 3, 4))])

# %%
view.figure(step=view.steps[0] + 1)


# %% [markdown]
# Every rank has the same blocks for the same sequences, and one block table serves all. What differs is what lies in the slots: K and V of another head. That is why sharing prefixes, preemption and eviction
# needed no change: they are about blocks.
#
# ## 8. Count the bytes
#
# Of a large tensor an all-reduce does not send everything to everybody. In a **ring** each of N ranks cuts its tensor into N chunks and passes chunks on to its neighbour: N - 1 times to add up, N - 1 times to hand round the sums.

# %%
def ring_all_reduce(tensors):
    n, sent = len(tensors), 0
    chunks = [list(x.chunk(n)) for x in tensors]                          # chunks[rank][which]
    for step in range(2 * (n - 1)):
        going = [(rank - step) % n for rank in range(n)]                  # the chunk that each rank passes on
        passed = [chunks[rank][going[rank]] for rank in range(n)]
        for rank in range(n):
            which, came = going[rank - 1], passed[rank - 1]
            chunks[rank][which] = chunks[rank][which] + came if step < n - 1 else came
        sent += passed[0].nbytes
    return [torch.cat(parts) for parts in chunks], sent


for n in (2, 3, 4, 8):
    tensors = [torch.randint(100, (840,)).float() for _ in range(n)]
    sums, sent = ring_all_reduce(tensors)
    right, size = all(torch.equal(one, sum(tensors)) for one in sums), tensors[0].nbytes
    print(f"{n} ranks: right {right}; of {size:,} bytes a rank sends {sent:,},",
          f"{sent / size:.2f} = 2 x {n - 1} / {n} times as many")

# %% [markdown]
# Never more than twice the tensor, however many ranks. (NCCL knows other ways, too, and chooses by size.) Now **predict** a step of the real engine with T tokens, of which R rows sample: 2 x 30 layers + 1 embedding = 61 all-reduces of [T, 576], and one all-gather of
# [R, 49152 / 3]. `said` holds what rank 0 did in section 7:

# %%
from collections import Counter

steps = []
for one in said:
    if one.what == "step":
        steps.append((one.num_bytes, Counter()))
    else:
        steps[-1][1][one.what, one.shape] += 1
running = [(5 + 12 + 5, 3), (3, 3), (3, 3), (2, 2), (1, 1), (1, 1)]      # T, R of each step
for (message, calls), (tokens, rows) in zip(steps, running):
    as_predicted = calls == {("all-reduce", (tokens, 576)): 61, ("all-gather", (rows, 49152 // 3)): 1}
    gathered = 2 * 4 * rows * 49152 // 3  # bytes: a ring of 3 passes each rank's part on twice
    sent = 61 * scaling.ring_bytes(4 * tokens * 576, 3) + gathered
    told = "below 1,000" if 100 <= message < 1000 else message  # whole requests, as pickle writes them
    print(f"{tokens:2} tokens: as predicted {as_predicted}; in a ring a rank sends {sent:9,.0f} bytes;",
          f"the step's message {told} bytes")

# %% [markdown]
# The step's description is nearly nothing: a row that goes on from the last step is sent as its token (4 bytes), and new blocks as they come; only new requests are described whole. With 256 running
# sequences:

# %%
from minivllm.bench.communication import wire_cost

cost = wire_cost(256, steps=8)
print(f"256 decodes: a message of {cost['bytes']:,.0f} bytes;",
      f"61 all-reduces: {61 * scaling.ring_bytes(4 * 256 * 576, 3):,.0f} bytes from each rank")
llm.close()

# %% [markdown]
# ## 9. Predict, then measure
#
# On two GPUs a decode step reads half the weights and half the K/V on each. What stays whole: launching hundreds of kernels, and the host's work. What is new: 2 L + 1 all-reduces and a gather, each with a **latency** (however small it is)
# and its bytes. Datasheets give 16 GB/s each way for the T4's PCIe 3 and 450 for an H200's NVLink. The latencies are assumptions: 25 us over PCIe, 10 us over NVLink. Memory is read at 88% of what its datasheet says, launches and host take 1.2 ms or more: both as on an H200. One sequence on H200s, in full:

# %%
for name, calls in (("qwen3-0.6b", 2 * 28 + 1 + 1), ("qwen3-8b", 2 * 36 + 1 + 1)):
    for ranks in (1, 2):
        parts = scaling.decode_ms(scaling.SHAPES[name], scaling.PAIRS["H200"], ranks, rows=1)
        told = "; ".join(f"{part} {ms:.2f}" for part, ms in parts.items() if ms > 0.005)
        print(f"{name:10} {ranks} GPU, ms: {told}", f"({calls} calls of 10 us)" if ranks > 1 else "")
print("", *scaling.lines(), sep="\n")

# %% [markdown]
# Three things to take from the table, before anything is measured:
#
# - **A small model on fast GPUs gets slower.** Qwen3-0.6B reads its weights in 0.28 ms on an H200; halving that saves 0.14, and 58 latencies cost 0.58.
# - **It is the latency, not the bytes**, at few sequences: an all-reduce of one row of Qwen3-8B is 4,096 x 2 = 8 KB.
# - **Slow memory gains more.** A T4 reads 15 times as slowly as an H200, so there is more to halve.
#
# **A published pair of T4** is said to have gone from 45 to 78 tokens/s, and from 14 to 8 GB a card. (We know neither its model nor its settings, and did not repeat it.) Does that fit?

# %%
one, two = 1e3 / 45, 1e3 / 78                                             # ms a token
left = two - one / 2                                                      # what does not halve
print(f"{78 / 45:.2f} times as fast: {one:.1f} ms, {two:.1f} ms;",
      f"half of the first is {one / 2:.1f}: {left:.1f} ms are left")
for layers in (28, 36):
    print(f"over the {2 * layers + 1} calls of {layers} layers: {1e3 * left / (2 * layers + 1):.0f} us each")
print(f"in {one:.1f} ms a T4 reads {0.32 * one:.1f} GB at most: if a step is a token, 14 is not all weights")
print(f"memory: 14 / 2 = {14 // 2} GB, so {8 - 14 // 2} GB a card is not split")

# %% [markdown]
# It can: what is left is 23 to 30 us a call, if all of it is latency. Our 25 us come from there, so this does not test them. And about 1 GB a card that is not split is what CUDA, NCCL and buffers take.
#
# ## 10. Two GPUs, for real
#
# The next cell shows what was saved from two H200, and measures where torch sees two GPUs. In the figure bars are predicted, diamonds measured.

# %% tags=["nbval-ignore-output"]
from minivllm.teach import two_gpus

found = [two_gpus.saved()] + ([two_gpus.measure()] if torch.cuda.device_count() >= 2 else [])
print(*(line for one in found for line in two_gpus.lines(one)), sep="\n")
for row in found[0]["shapes"]["qwen3-8b"]["prefill"]:
    if row["overlap_chunk_size"]:
        print(f"qwen3-8b's prompts, chunks of {row['overlap_chunk_size']:,}: {row['ms']:.1f} ms on 2 GPUs")
scaling.figure({key: ms for one in found for key, ms in two_gpus.step_times(one).items()})

# %% [markdown]
# On the two H200:
#
# - **The direction was right.** Qwen3-0.6B gets slower, one sequence from 1.46 to 2.18 ms (predicted 1.49 to 1.93). Qwen3-8B gets faster, 1.18 times (predicted 1.28). So was the latency: 11.6 us for the smallest all-reduce.
# - **Something is missing in the prediction.** In a step of the small model NCCL takes 0.37 ms, and halving saves 0.14: 2.18 - (1.46 - 0.14) - 0.37 = 0.49 ms are neither. Two ranks do not start a step at the same moment,
#   and a kernel with half the work is not twice as fast. We did not measure which.
# - **With many sequences bytes count.** At 256 the 8B model gains nothing, 10.96 instead of 10.74 ms: 73 all-reduces of 2 MB, 37 us each, are 2.70 ms.
# - **Long prompts gain most.** 8,192 tokens of prompts take 116 ms instead of 190 with the 8B model, 1.64 times as fast: arithmetic halves, and each latency is paid once for all of them. (The small model loses even there.)
#   Adding up in chunks beside the computation (`overlap_chunk_size`) gained nothing: 120 ms with two chunks, 152 with eight.
#
# **A pair for nothing:** Kaggle lends two T4. The badge at the top opens this notebook there; choose the accelerator "GPU T4 x2" and switch the internet on (Kaggle wants a verified phone number), then run all. The setup cell installs the package there as in Colab, and
# the cell below generates with `tensor_parallel_size=2`. This notebook was never run on Kaggle. If the setup fails there, its error says where.

# %% tags=["nbval-ignore-output"]
from minivllm.teach import notebook

if torch.cuda.device_count() < 2 or notebook.model() == "smollm2":        # its 9 heads do not divide by 2
    print(f"torch sees {torch.cuda.device_count()} GPUs here, model {notebook.model()}: nothing to run")
else:
    said_by = []
    for size in (1, 2):
        with LLM(notebook.model(), dtype="float32", tensor_parallel_size=size, max_model_len=512) as pair:
            said_by.append([out["token_ids"] for out in pair.generate(texts, params, use_tqdm=False)])
            print(pair.memory, "\n")
    print("the same tokens on one GPU and on two:", said_by[0] == said_by[1])


# %% [markdown]
# ## 11. Exercises

# %% [markdown] tags=["exercise-1-statement"]
# ### Exercise 1: a rank's rows of q, k and v (medium, 15 minutes)
#
# Write `shard_qkv(weight, num_heads, num_kv_heads, rank, size)`. `weight [(H + 2 K) * D, hidden]` is the merged matrix of the whole model: the rows of all query heads, then those of all k heads, then of all v heads. Return the rows that rank
# `rank` of `size` holds, in the same order. Heads stay whole, and neighbours stay together. Where there are fewer kv heads than ranks, a rank holds one: that of its query heads.
#
# Example: 4 query heads, 2 kv heads, D = 1: rows q0 q1 q2 q3 k0 k1 v0 v1. Rank 1 of 2 holds q2 q3 k1 v1. Rank 1 of 4 holds q1 k0 v0.
#
# <details><summary>Hint: D</summary>There are H + 2 K heads in the matrix: D = len(weight) // (num_heads + 2 * num_kv_heads).</details>
# <details><summary>Hint: which kv heads</summary>The first is rank * num_kv_heads // size; there are max(1, num_kv_heads // size). Try both with 8 heads, 2 kv heads, 4 ranks.</details>

# %% tags=["exercise-1-stub"]
def shard_qkv(weight: torch.Tensor, num_heads: int, num_kv_heads: int, rank: int, size: int) -> torch.Tensor:
    raise NotImplementedError


# %% tags=["exercise-1-check"]
from minivllm.teach import check

check.shard_qkv(shard_qkv)


# %% tags=["exercise-1-solution"]
def shard_qkv_solution(weight, num_heads, num_kv_heads, rank, size):
    dim = len(weight) // (num_heads + 2 * num_kv_heads)
    q, k, v = weight.split([num_heads * dim, num_kv_heads * dim, num_kv_heads * dim])
    first, count = rank * num_kv_heads // size, max(1, num_kv_heads // size)
    mine = slice(first * dim, (first + count) * dim)
    return torch.cat((q.chunk(size)[rank], k[mine], v[mine]))


check.shard_qkv(shard_qkv_solution)

# %% [markdown]
# **Optional: the real model, cut by you.** Three ranks, on threads; your function makes the q, k and v weights of all 30 layers.

# %% tags=["exercise-1-plug"]
from minivllm.teach import plug_parallel

plug_parallel.shard_qkv(shard_qkv, "smollm2", 3, prompts, wanted)


# %% [markdown] tags=["exercise-2-statement"]
# ### Exercise 2: a row-parallel layer with a bias (medium, 10 minutes)
#
# Write `row_parallel(x, weight, bias, rank, all_reduce)`, what one of N ranks computes: `x [T, in / N]` and `weight [out, in / N]` are its own parts, `bias [out]` is the whole one, or None. `all_reduce(tensor)` returns the sum of what all ranks
# give it. Return y [T, out], the whole result, the same on every rank. The check runs your function on 1 to 6 ranks at once.
#
# Example, two ranks, one input each: x = [1], weight = [[3]] on rank 0; x = [2], weight = [[4]] on rank 1; bias [10]. Both return 1 x 3 + 2 x 4 + 10 = 21.
#
# <details><summary>Hint: the bias is in it N times</summary>What every rank adds before the all-reduce is summed too. Who should add it, and when?</details>
# <details><summary>Hint: a rank waits for ever</summary>An all-reduce ends when all have called it. None of them may leave it out.</details>

# %% tags=["exercise-2-stub"]
def row_parallel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rank: int, all_reduce):
    raise NotImplementedError


# %% tags=["exercise-2-check"]
check.row_parallel(row_parallel)


# %% tags=["exercise-2-solution"]
def row_parallel_solution(x, weight, bias, rank, all_reduce):
    return all_reduce(F.linear(x, weight, bias if rank == 0 else None))


check.row_parallel(row_parallel_solution)

# %% [markdown]
# **Optional: the real model with your layer.** It serves as output projection and as down projection of every layer, on three ranks.

# %% tags=["exercise-2-plug"]
plug_parallel.row_parallel(row_parallel, "smollm2", 3, prompts, wanted)

# %% [markdown] tags=["exercise-3-statement"]
# ### Exercise 3: break it (easy, 10 minutes)
#
# The layer printed below was published, in a project that ran on one GPU. Which of its lines does not belong there? Give an input `x` (two whole numbers, -9 to 9) and a number of `ranks` (1, 2 or 4) for which an MLP with this layer gives another
# result than it should. The MLP: four units, relu, then two outputs, cut by rows with an all-reduce. For x = [a, b] the units are a - 2b, b - 2a, a - b and b - a.
#
# Try `x = [1, 1]` with `ranks = 2` first, and one rank with any x: the answers say why nobody noticed.
#
# <details><summary>Hint</summary>On two ranks the first holds two units and the second the other two. Which are added to which? Make one of them positive.</details>

# %% tags=["exercise-3-stub"]
from minivllm.teach import bugs

print(bugs.source("reduced_columns"))
numbers, ranks = None, None

# %% tags=["exercise-3-check"]
check.break_it("reduced_columns", x=numbers, ranks=ranks)

# %% tags=["exercise-3-solution"]
check.break_it("reduced_columns", x=[1, 0], ranks=2)

# %% [markdown]
# The sum has the shape that the next layer wants, so nothing fails; and shapes are all that many tests look at. Compare numbers with one rank, on two ranks at least.
#
# ## 12. Recap
#
# - Cut the first matrix by columns and the second by rows: pieces side by side, then summands. One all-reduce for attention and one for the MLP, in every layer.
# - Heads stay whole. Each rank holds its share of the weights, and a pool with the same blocks and other heads. One engine decides for all.
# - A ring all-reduce sends 2 (N - 1) / N of the tensor from each rank; at few sequences its latency counts, not its bytes.
# - Two GPUs help where reading weights is most of a step, or where the model does not fit. They harm a small model on fast GPUs.
#
# No rung for the ladder: three ranks on one machine's CPU share its cores.
#
# **How vLLM does it.** `vllm/model_executor/layers/linear.py` has the same layers under the same names, and `vocab_parallel_embedding.py` beside it the two ends. `vllm/distributed/parallel_state.py` owns the groups.
# For small tensors `vllm/distributed/device_communicators/custom_all_reduce.py` goes around NCCL: each GPU reads the others' memory directly, at a fraction of the latency. `vllm/v1/executor/multiproc_executor.py` starts the workers, and sends
# them each step through shared memory (`vllm/distributed/device_communicators/shm_broadcast.py`).
#
# **Next:** 11 makes weights smaller, and gives one model many adapters.
