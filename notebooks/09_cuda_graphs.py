# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["header"]
# # 09 CUDA graphs and torch.compile
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/09_cuda_graphs.ipynb)
#
# Steps without launch overhead: capture, replay and padding.
#
# Previous: [08 Sampling](08_sampling.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/08_sampling.ipynb)) · Next: [10 Tensor parallelism](10_tensor_parallelism.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/10_tensor_parallelism.ipynb)) · 70 minutes with the exercises · runs on a CPU, on Colab's free T4 and on larger GPUs

# %% [markdown]
# **You will build** a recorder: it notes what a decode step does, operation by operation, and does it again on the same memory, without the Python in between. That is what a CUDA graph is; ours
# runs on a CPU and keeps CUDA's rules, so that every rule can be broken and looked at.
#
# **You will learn** where the time of a decode step goes; what a capture forbids, and what it silently gets wrong; why batches are padded; what fusing small kernels saves; and what is left for `torch.compile`.
#
# **You need** slots and block tables, from [03](03_slot_mapped_write.ipynb) and [04](04_paged_attention.ipynb). No CUDA.

# %% tags=["setup"]
import importlib, subprocess
from importlib.util import find_spec

if find_spec("google") and find_spec("google.colab") and not find_spec("minivllm"):  # a fresh Colab
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
import inspect
import torch

from minivllm import LLM, SamplingParams
from minivllm.teach import graph_bench, graph_figures

# The recorder works on a CPU, so this model runs there, on every machine. A GPU is used where one is measured.
settings = {"block_size": 16, "num_kv_blocks": 32, "max_model_len": 64, "max_num_seqs": 4}
llm = LLM("smollm2", device="cpu", dtype="float32", enable_prefix_caching=False, **settings)
runner, model = llm.runner, llm.runner.model

# %% [markdown]
# ## 1. The problem, measured
#
# A GPU computes what the host asks for. The host asks by **launches**: start this kernel, with these addresses. A launch returns at once, and the kernel runs when the one before it has ended. So
# host and GPU work side by side, and the slower one sets the pace.
#
# Which one is it in a decode step? A GPU's trace tells. The next cell takes one on this machine's GPU, or shows an H200's: a model of
# Qwen3-0.6B's shape with random weights, in the package's engine without graphs.

# %% tags=["nbval-ignore-output"]
figures = graph_bench.measure() if torch.cuda.is_available() else graph_bench.saved()
print(*graph_figures.steps(figures), sep="\n")

# %% [markdown]
# On the H200 the GPU works for 4 to 13% of a step, and waits for the rest. At 8 rows the host takes 25,397 us for 315 kernels, 81 us each, for Python, torch, Triton and the driver. (That host is
# shared.) For 256 rows it takes as long, though the GPU has 3,094 / 1,128 = 2.7 times as much to do. And 379 times a step torch is asked for memory.
# (`copies`: what the GPU moves or clears without a kernel, memcpy and memset, such as the step's inputs on their way from the host.)
#
# One layer of that step, every kernel a box. (Below it, in a graph: later.)

# %% tags=["nbval-ignore-output"]
print(*graph_figures.kernels(figures), sep="\n")
graph_figures.layers(figures)

# %% [markdown]
# Eleven kernels: 36 us of work in 805 us. Number 7 runs for 1.1 us, then nothing happens for 55. (`nvjet` is a matrix product of cuBLAS;
# 8 and 9 are one product. In the graph 3 starts beside 2 and waits for it, as the package asks.)
#
# ## 2. The idea, drawn
#
# ```
# eager    host  |launch a|launch b|launch c|            GPU  |a|......|b|......|c|
# graph    host  |replay|                                GPU  |a|b|c|
# ```
#
# Every decode step launches the same kernels in the same order, with the same shapes, on the same weights. Only numbers in memory differ. So write the launches down once, and hand over the whole list by one
# call. CUDA has that: a **graph** is captured once (what is launched meanwhile is noted, not run), and replayed any number of times.
#
# What is noted of a launch? The kernel, its grid, and its arguments *as they are*: addresses and plain numbers. The rest of this notebook follows from that.
#
# ## 3. Build it: a recorder
#
# Every operation on tensors passes through torch's dispatcher, where a `TorchDispatchMode` sees it. Ours keeps operation, arguments and result. To replay, it runs the operation again and puts the outcome where the
# first one was.

# %%
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, result))
        return result

    def replay(self):
        for operation, args, kwargs, result in self.calls:
            again = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again)):
                old.copy_(new)


x = torch.tensor([1.0, 2.0, 3.0])
with Recorder() as recorder:
    y = (x * 2 + 1).relu()
print("recorded:", [str(call[0]) for call in recorder.calls], y.tolist())

# %% [markdown]
# New input goes *into the tensor that was recorded*, and the result appears *in the tensor that came out*.
#
# The package's `Tape` (`minivllm/teach/tape.py`) is this recorder with CUDA's prohibitions. `capture` gives a tape here and a real `torch.cuda.CUDAGraph` on a GPU; both print the same.

# %%
from minivllm.teach.tape import Tape, capture

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.zeros(3, device=device)
graph, y = capture(lambda: (x * 2 + 1).relu())
address = y.data_ptr()
for numbers in ([1.0, 2.0, 3.0], [-5.0, 0.0, 9.0], [0.5, 0.5, 0.5]):
    x.copy_(torch.tensor(numbers))
    graph.replay()
    print(numbers, "->", y.tolist(), "| in the same memory:", y.data_ptr() == address)

# %% [markdown]
# ### The stale buffer
#
# This is how everybody gets it wrong once. `x = ...` gives the *name* x to another tensor. The graph never knew names.

# %%
x.copy_(torch.tensor([1.0, 2.0, 3.0]))
x = torch.tensor([-5.0, 0.0, 9.0], device=device)     # rebound, not copied into
graph.replay()
print("wanted:", (x * 2 + 1).relu().tolist(), "| got:", y.tolist())

# %% [markdown]
# No error; the answer is that of the old input. `x = x + 1`, `x = x[rows]` and `torch.cat` do this; `x += 1` and `x.copy_(...)` do not. The same trap at the other end: the next replay overwrites y, so who wants to keep it
# must clone it.
#
# Plain numbers are worse, since nothing can be copied into them:

# %%
length = 2
values = torch.tensor([10.0, 20.0, 30.0, 40.0], device=device)
graph, total = capture(lambda: values[:length].sum())
length = 4
graph.replay()
print(f"sum of the first {length}:", total.item())


# %% [markdown]
# So whatever changes from step to step must be *in a tensor*, lengths too: read all four, and mask by a length that lies in memory.
#
# ## 4. What breaks a capture
#
# While a graph is captured nothing runs, so no number exists yet. Whoever asks for one gets an error:

# %%
def branch(x):
    return x + 1 if x.sum() > 0 else x


asking = {"x.sum().item()": lambda x: x.sum().item(), "if x.sum() > 0:": branch, "x[x > 0]": lambda x: x[x > 0],
          "x.tolist()": lambda x: x.tolist(), "torch.tensor([1.0])": lambda x: x + torch.tensor([1.0]),
          "torch.where(x > 0, x, 0)": lambda x: torch.where(x > 0, x, 0)}
for name, run in asking.items():
    try:
        with Tape():
            run(torch.ones(4))
        print(f"{name:25} fine")
    except RuntimeError as error:
        print(f"{name:25} {str(error).partition(': ')[2]}")

# %% [markdown]
# The last line is the way out: both branches computed, numbers on the device choose. What CUDA itself says:

# %% tags=["nbval-ignore-output"]
print(*graph_figures.errors(figures), sep="\n")

# %% [markdown]
# New memory is allowed, from a pool that the graph keeps as long as it lives: its addresses are noted, so nobody else may have them.
#
# ## 5. A decode step of the real model
#
# Three prompts, each with two blocks. The plan of a step is plain data (notebook 06), so we write it by hand. First the prompts:

# %%
from minivllm.engine.step import PlanRow, StepPlan
from minivllm.worker.batch import build_batch

greedy = SamplingParams(temperature=0)
texts = ["The capital of France is", "Once upon a time, in a village by the sea,", "2 + 2 ="]
prompts = [llm.tokenizer.encode(text) for text in texts]
tables = [[0, 1], [2, 3], [4, 5]]


def plan_of(tokens, starts):  # one row a sequence: its new tokens, and the position of the first
    rows = enumerate(zip(tokens, starts, tables))
    return StepPlan([PlanRow(i, start, new, table, 0, True, greedy, 0) for i, (new, start, table) in rows])


first = list(runner.execute(plan_of(prompts, [0, 0, 0])).tokens.values())
plan = plan_of([[token] for token in first], [len(prompt) for prompt in prompts])
print("the decode step:", plan.num_tokens, "tokens at positions", [row.start for row in plan.rows])

# %% [markdown]
# Can the next step be recorded as it is?

# %%
try:
    with torch.inference_mode(), Tape():
        runner.execute(plan)                          # 1: the whole step
except RuntimeError as error:
    print(error)

batch = build_batch(plan, 16, runner.backend, runner.device)  # built outside of the recording
batch.attention.writes_all = False                    # as with a row of padding, slot -1
try:
    with torch.inference_mode(), Tape():
        model(batch.input_ids, batch.positions, batch.attention)  # 2: the model alone
except RuntimeError as error:
    print(error)

# %% [markdown]
# Two refusals, and behind them a trap:
#
# 1. Building the batch turns lists into tensors. It stays outside, and fills buffers that are there already.
# 2. The cache write leaves padding out by a mask, so its shape depends on the data. It needs a rule for -1 with a fixed shape. (In a Triton kernel that token's program does nothing.)
# 3. Attention in plain torch gathers as many tokens as the longest context has: a plain number. In the next step it would be one too small, without an error. It must read the whole block table and mask by
#    `context_lens`.
#
# A backend that does both:

# %%
from minivllm.teach.tape_graphs import FixedShapes, new_batch

print(inspect.getsource(FixedShapes.store) + "\n" + inspect.getsource(FixedShapes.attend))

# %% [markdown]
# (The pool's last slot takes what the padding writes.) Now the buffers. `DecodeBatch` is the package's: ids, positions and slots in one tensor, context lengths and block tables beside it,
# as large as the largest batch, made once. Before the first plan every row is padding.

# %%
backend, buffers = FixedShapes(), new_batch(llm)
runner.pool.bind(model, backend)
for name in ("columns", "contexts", "tables"):
    print(f"{name:9}", tuple(getattr(buffers, name).shape))


def forward(size=4):  # hidden states of the buffers' first `size` rows
    metadata = buffers.attention(size)
    metadata.plan = backend.prepare(metadata, [1] * size, [1] * size)
    return model(buffers.columns[0, :size], buffers.columns[1, :size], metadata)


with torch.inference_mode(), Tape() as tape:
    hidden = forward()
print("hidden states", tuple(hidden.shape))


# %% [markdown]
# (Our tape runs what it records; a CUDA capture does not. So record with padding, which harms nobody.)
#
# Each step: fill the buffers, replay, compute the logits, a number for each token of the vocabulary, which every graph would keep for itself. Drawing the token stays outside too: each request has its own parameters, and `tolist()` asks the device.

# %%
@torch.inference_mode()
def decode(step, num_tokens):  # step(plan) -> logits [3, V]
    answers = [[token] for token in first]
    for n in range(num_tokens):
        plan = plan_of([answer[-1:] for answer in answers], [len(prompt) + n for prompt in prompts])
        for answer, token in zip(answers, step(plan).argmax(dim=-1).tolist()):
            answer.append(token)
    return answers


def by_replay(plan):
    buffers.load(plan, 4)                             # in place
    tape.replay()
    return model.compute_logits(hidden[:3])           # without the padding


answers = decode(by_replay, 5)
print(llm.tokenizer.decode(prompts[0] + answers[0]))

# %% [markdown]
# ## 6. The same answer?
#
# Against the same step without the tape, bit for bit. And against the package as it runs on a CPU otherwise, token by token.

# %%
seen = []


def by_both(plan):
    kept = by_replay(plan), hidden.clone()            # the next replay overwrites hidden
    seen.append(torch.equal(kept[1], forward()))
    return kept[0]


print("bit for bit:", decode(by_both, 2) == [answer[:3] for answer in answers] and all(seen))
params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * 3
runner.pool.bind(model, runner.backend)
print("package:", [out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)] == answers)

# %% [markdown]
# And with a buffer that is rebound? `load` fills the new tensor, and the tape reads the old one. A debug mode that compares addresses finds it; vLLM has one, and so has our tape:

# %%
runner.pool.bind(model, backend)
kept, buffers.columns = buffers.columns, buffers.columns.clone()
print("the same answers:", decode(by_replay, 2) == [answer[:3] for answer in answers])
try:
    tape.replay(columns=buffers.columns)
except RuntimeError as error:
    print(error)
buffers.columns = kept
runner.pool.bind(model, runner.backend)

# %% [markdown]
# ## 7. Padding
#
# We had three sequences and recorded four rows. The next cell prints the buffers: a column for each row, with its token id, position, slot and context length. The fourth is padding.
#
# Its token, id 0, is computed like any other, written nowhere (slot -1) and attends to nothing (context 0). Its logits are never computed.
#
# A graph has one batch size. 256 graphs would never pad; one alone would nearly always compute rows for nobody. The package takes small steps where rows are few and larger ones where they are many:

# %%
from minivllm.worker.cuda_graphs import graph_sizes

print(torch.cat((buffers.columns[:, :4], buffers.contexts[None, :4])))
choices = {"the package": graph_sizes(256), "vLLM": [1, 2, 4, *range(8, 257, 8)], "256 alone": [256],
           "powers of two": [1 << n for n in range(9)], "every size": list(range(1, 257))}
for name, sizes in choices.items():
    padded = [next(size for size in sizes if size >= rows) - rows for rows in range(1, 257)]
    shares = [extra / (extra + rows) for rows, extra in enumerate(padded, 1)]
    average, worst = sum(shares) / 256, max(shares)
    print(f"{name:14}{len(sizes):4} graphs, padded rows {average:5.1%} on average, {worst:5.1%} at worst")

# %% [markdown]
# ## 8. The finished module
#
# `DecodeGraphs` in `minivllm/worker/cuda_graphs.py` is what we did, on a GPU. Its `run(plan)` picks the size, loads, replays, and computes the logits of the rows that are no padding. What it adds:
#
# - **Many graphs, one memory.** The largest is captured first, and the others use its pool: only one runs at a time. A run before each capture compiles kernels and makes the libraries' workspaces.
# - **Only pure decodes.** A step with a prompt in it is eager: it has any number of tokens, and enough work for each launch.
# - **A way back.** If a capture fails, one warning says so and steps stay eager. `enforce_eager=True` asks for that.
#
# `recorded` puts tapes in the place of its graphs, so that the whole engine can be watched here. Same tokens?

# %%
from minivllm.teach import GraphView
from minivllm.teach.tape_graphs import recorded

requests = [*texts, "The first ten prime numbers are", "A recipe for a cold evening:"]
params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (7, 5, 3, 9, 5)]
eager = [out["token_ids"] for out in llm.generate(requests, params, use_tqdm=False)]
llm.start_trace()
with recorded(llm, [1, 2, 4]) as graphs:
    view = GraphView(llm, graphs.sizes)
    display(view)
    outputs = llm.generate(requests, params, use_tqdm=False)
print("the same tokens:", [out["token_ids"] for out in outputs] == eager)

# %% [markdown]
# ## 9. Watch it: padding, replay or eager
#
# Above, live: five requests, room for four. A column is a step. The first computes prompts, and so does the one in which the fifth finds room. As a picture:

# %%
print(f"{graphs.num_replays} replays, {graphs.num_padded_rows} rows of padding:",
      f"{view.padded_share():.0%} of the rows that they computed")
view.figure()

# %% [markdown]
# ## 10. Measure: what a replay saves
#
# Predict from the first table: in a graph the GPU does not wait for launches, so a step should take as long as the GPU works, plus what stays outside. Write down what you expect for 8 rows.

# %% tags=["nbval-ignore-output"]
parts = (graph_figures.replays, graph_figures.captures, graph_figures.paddings)
print(*(line for part in parts for line in part(figures)), sep="\n")
graph_figures.waiting(figures)


# %% [markdown]
# On the H200:
#
# - **A step is 6 to 14 times as fast.** At 8 rows 1,883 us instead of 25,397. The graph alone takes 1,178 of them, as long as the GPU works in an eager step, output layer and drawing included (1,128).
# - **What stays outside:** 135 us to fill the buffers, 570 us to send the graph, compute the logits, draw the tokens and read them (135 + 1,178 + 570 = 1,883). Of 379 requests for memory 5 are left.
# - **Padding is nearly free:** 33 rows take 1,456 us in a graph of 33 and 1,448 in one of 40. Matrix products work on tiles of rows, and a row of padding reads no K/V.
# - **The price** is 1.33 s at the start and 152 MiB. With the output layer inside, each graph would keep logits of its own: 670 MiB more.
#
# ## 11. Fewer kernels: what fusion saves
#
# A graph makes launches cheap. Each kernel still reads its inputs from memory and writes its result there, also where the next one reads it right back. **Fusion** joins neighbours, so that what
# lies between stays in registers. The bytes for one row of Qwen3-0.6B (hidden 1,024, feed-forward 3,072, 16 + 2 x 8 heads of 128) in 16 bit, without the norms' weights and the angles:

# %%
def bytes_moved(operations, kept):  # operations: "what it reads > what it writes" -> (apart, fused)
    operations = [[side.split() for side in operation.split(">")] for operation in operations]
    apart = sum(sizes[name] for reads, writes in operations for name in reads + writes)
    made = {name for _, writes in operations for name in writes}
    read = {name for reads, _ in operations for name in reads}
    return 2 * apart, 2 * sum(sizes[name] for name in (read - made) | (made & set(kept.split())))


numbers = {1024: "x residual sum normed k k1 k2 v K V", 16 * 128: "q q1 q2", 3072: "gate up silu out"}
sizes = {name: size for size, names in numbers.items() for name in names.split()}
parts = {"sum and norm": (["x residual > sum", "sum > normed"], "sum normed"),
         "q/k norms, rotary, write": (["q > q1", "k > k1", "q1 k1 > q2 k2", "k2 > K", "v > V"], "q2 K V"),
         "silu and product": (["gate > silu", "silu up > out"], "out")}
for name, part in parts.items():
    print("{:25} {:6,} bytes apart, {:6,} fused".format(name, *bytes_moved(*part)))

# %% [markdown]
# A layer has two norms: 2 x 10,240 + 32,768 + 30,720 = 83,968 bytes apart, 2 x 8,192 + 16,384 + 18,432 = 51,200 fused. Beside 31 MB of weights a layer that is nothing at 1 row; in a prompt of 2,048 tokens it is 172 MB against 105.
# So the prediction: at few rows fusion saves *launches*, in long prompts *bytes*. The package has a kernel for each of the three parts. Here they are beside plain torch and `torch.compile`, which makes such kernels itself:

# %% tags=["nbval-ignore-output"]
print(*graph_figures.fusions(figures), "", *graph_figures.steps(figures, "unfused"), sep="\n")

# %% [markdown]
# - **At 8 rows** the middle part takes one launch instead of 18, and 2.3 us instead of 34.6. A layer saves 2 x 1.8 + 32.3 + 3.3 = 39 us, 28 layers 1.1 ms. The step as a whole agrees: 2,355 us
#   of work in plain torch, 1,128 with the kernels; 913 launches against 315.
# - **At 2,048 rows** bytes should decide, and half are saved. But the middle part is 185.7 / 8.3 = 22 times as fast: plain torch turns through float32 copies, which our count left out.
# - **Without a graph** it saves nothing here: 25,397 us a step, 23,284 in plain torch. From Python one Triton launch took 64.4 us, torch's 295.1 / 18 = 16 each.
#
# ## 12. torch.compile
#
# `LLM(torch_compile=True)` compiles the MLPs. Whole runs, with graphs:

# %% tags=["nbval-ignore-output"]
print(*graph_figures.compiled(figures), *graph_figures.compiled_before(), sep="\n")


# %% [markdown]
# From -19% to +27%, without a pattern: no gain that stands out from the host's noise. What there is to fuse in an MLP is its middle, and that is a kernel already: 1.3 us, the compiler's 1.3. The matrix products
# beside it stay cuBLAS's. Attention is not handed over: what a backend does depends on the batch.
#
# It gains where nobody has written a kernel: of 18 launches and 34.6 us it makes 5 and 8.3. It wants a graph around it, too: called from Python, silu and product take 81 us by its code and 42 by plain torch, since it checks its
# arguments every time.
#
# ## 13. Exercises

# %% [markdown] tags=["exercise-1-statement"]
# ### Exercise 1: pick the graph, fill the padding (medium, 15 minutes)
#
# Write `pad_batch(buffer, columns, sizes)`. `columns [4, B]` is a decode step: token ids, positions, slots, context lengths; a column for each sequence. `buffer [4, most]` is what the graphs read. `sizes` are the
# captured sizes, ascending; the last is `most`. Copy the columns into the buffer **in place**, fill up with padding to the smallest size that holds B, leave what lies behind it, and return that size. If no size is large
# enough: `ValueError`, and the buffer stays as it was.
#
# Example: sizes [1, 2, 4], three columns: they go to columns 0 to 2, column 3 becomes (0, 0, -1, 0), and 4 is returned.
#
# <details><summary>Hint: a column of padding</summary>`torch.tensor([0, 0, -1, 0])[:, None]` is [4, 1] and fits any number of columns.</details>
# <details><summary>Hint: why fill at all?</summary>Columns of the last step are still there. The graph would write their slots once more, and these may be somebody else's by now.</details>

# %% tags=["exercise-1-stub"]
def pad_batch(buffer: torch.Tensor, columns: torch.Tensor, sizes: list[int]) -> int:
    raise NotImplementedError


# %% tags=["exercise-1-check"]
from minivllm.teach import check

check.pad_batch(pad_batch)


# %% tags=["exercise-1-solution"]
def pad_batch_solution(buffer, columns, sizes):
    count = columns.shape[1]
    if count > sizes[-1]:
        raise ValueError(f"{count} rows, and the largest graph has {sizes[-1]}")
    size = next(size for size in sizes if size >= count)
    buffer[:, :count] = columns
    buffer[:, count:size] = torch.tensor([0, 0, -1, 0])[:, None]
    return size


check.pad_batch(pad_batch_solution)

# %% [markdown]
# **Optional: the real model with your function.** It fills the buffers of every replay of the run in section 9.

# %% tags=["exercise-1-plug"]
from minivllm.teach import plug_graphs

plug_graphs.pad_batch(pad_batch, llm, requests, params, eager)

# %% [markdown] tags=["exercise-2-statement"]
# ### Exercise 2: break it (medium, 10 minutes)
#
# The decoder printed below records its step once. When some sequences end, `keep` moves the others up, so that the batch is dense again. Each sequence has a block of its own; the model is a toy of whole
# numbers that reads the block. Give lengths of answers (2 to 4 of them, 1 to 16 tokens each) for which somebody gets wrong tokens. Then say for which lengths nobody ever notices.
#
# <details><summary>Hint</summary>Which of the three buffers does the tape still read after `keep`? When is what it holds still true?</details>
# <details><summary>When does nobody notice?</summary>When those who end stand behind those who go on: nobody moves.</details>

# %% tags=["exercise-2-stub"]
from minivllm.teach import bugs

print(bugs.source("rebound_tensor"))
answer_lengths = None

# %% tags=["exercise-2-check"]
check.break_it("rebound_tensor", answers=answer_lengths)

# %% tags=["exercise-2-solution"]
check.break_it("rebound_tensor", answers=[2, 5, 4])


# %% [markdown] tags=["exercise-3-statement"]
# ### Exercise 3: bytes of a fused kernel (medium, 10 minutes)
#
# Write `fused_bytes(reads, writes, sizes, kept)` for operations that become one kernel. `reads` and `writes` are `[operations, tensors]`, True where an operation reads or writes a tensor; `sizes [tensors]` in bytes; `kept [tensors]` is
# True for what others want afterwards. An input is read once; what is made inside and not kept costs nothing; what is made and kept is written once. Return an int.
#
# Example, the sum and the norm, tensors (x, residual, sum, weight, out) of 64, 64, 64, 2 and 64 bytes, kept: sum and out. The first operation reads x and residual and writes sum; the second reads sum and weight and
# writes out. Read: 64 + 64 + 2. Written: 64 + 64. In all 258, where two kernels move 64 x 3 + 64 x 2 + 2 = 322.
#
# <details><summary>Hint</summary>`writes.any(dim=0)` says of every tensor whether it is made inside. Then `sizes[mask].sum()`, and `int(...)` around it.</details>

# %% tags=["exercise-3-stub"]
def fused_bytes(reads: torch.Tensor, writes: torch.Tensor, sizes: torch.Tensor, kept: torch.Tensor) -> int:
    raise NotImplementedError


# %% tags=["exercise-3-check"]
check.fused_bytes(fused_bytes)


# %% tags=["exercise-3-solution"]
def fused_bytes_solution(reads, writes, sizes, kept):
    made, read = writes.any(dim=0), reads.any(dim=0)
    return int(sizes[read & ~made].sum() + sizes[made & kept].sum())


check.fused_bytes(fused_bytes_solution)

# %% [markdown]
# ## 14. Recap
#
# - In a small model's decode step the GPU waits for the host. A graph holds all launches of a step and is sent by one call.
# - It notes addresses and plain numbers. So: fixed buffers filled in place, fixed shapes, no question to the data; batch building and sampling stay outside.
# - Padded rows have slot -1 and context 0, up to the next captured size.
# - Fusion saves launches where rows are few and bytes where they are many. torch.compile does it for plain torch; where kernels are fused already it has nothing left to do.
#
# No rung for the ladder: a CPU has no launches to save.

# %%
llm.close()

# %% [markdown]
# **How vLLM does it.** `vllm/compilation/cuda_graph.py` wraps a model or a piece of it (`CUDAGraphWrapper`: capture on first use, replay afterwards, and in debug mode the check of input addresses).
# `vllm/v1/cudagraph_dispatcher.py` picks the graph for a batch, `vllm/v1/worker/gpu_model_runner.py` owns the fixed buffers and captures at start. It has a mode more: *piecewise* graphs, cut at attention, which
# replay steps with prompts in them too, up to a size.
#
# **Next:** 10 puts one model on several GPUs.
