# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["header"]
# # 02 KV cache
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/02_kv_cache.ipynb)
#
# One contiguous buffer of keys and values for each sequence, and how much of it is never used.
#
# Previous: [01 Naive attention](01_naive_attention.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/01_naive_attention.ipynb)) · Next: [03 Slot-mapped cache write](03_slot_mapped_write.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/03_slot_mapped_write.ipynb)) · 60 minutes with the exercises · runs on a CPU, on Colab's free T4 and on larger GPUs

# %% [markdown]
# **You will build** the memory that notebook 01 lacked: a contiguous buffer of keys and values for each sequence. The model writes exactly the same tokens,
# and each costs one position instead of all.
#
# **You will learn** why old keys and values may be kept; what they cost in bytes; and why one buffer for each sequence wastes most of the memory set aside for the cache, which is
# the problem that paged attention was invented for.
#
# **You need** [01 Naive attention](01_naive_attention.ipynb), or an idea of queries, keys, values and the causal mask.

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
import torch
from torch.nn import functional as F

from minivllm import LLM, SamplingParams

# float32, so that two ways of computing can be compared token by token; one block holds a sequence (section 6)
settings = {"enforce_eager": True, "block_size": 256, "num_kv_blocks": 10, "max_model_len": 256}
llm = LLM(notebook.model(), dtype="float32", **settings)
model, config, device = llm.runner.model, llm.model_config, llm.runner.device
H, K, D, L = config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers
sentence = llm.tokenizer.encode("The capital of France is")


# %% [markdown]
# ## 1. The problem, measured
#
# Notebook 01 ended with a triangle: to write 12 tokens after a prompt of 5, it computed 126 positions, of which 16 were new. For an answer of 500 tokens the
# ratio is worse. Count it:

# %%
def positions_computed(prompt, answer):
    naive = sum(prompt + i for i in range(answer))  # the whole sequence, for every token
    return naive, prompt + answer - 1               # each position once (the last token is never fed back)


for prompt, answer in ((5, 12), (100, 100), (500, 500)):
    naive, needed = positions_computed(prompt, answer)
    print(f"prompt {prompt:3}, answer {answer:3}: {naive:7,} positions computed,",
          f"{needed:3} needed: {naive / needed:.0f} times as many")

# %% [markdown]
# ## 2. The idea, drawn
#
# The causal mask says that a token reads only what stands before it. So nothing that comes later can change it: its vector, and with it its key and its value, in
# every layer, are final. We may keep them. The query is different: only the token being computed asks, once, and is done.
#
# ```
# step       naive: computes k, v of       with a cache: computes     and reads from it
#  1         The                           The                        -
#  2         The capital                       capital                The
#  3         The capital of                            of             The capital
#  4         The capital of France                        France      The capital of
# ```
#
# (Drawn one token at a time; a prompt may go in at once, as section 4 shows.)
#
# Is it true of a real model? We take keys of all layers, once for five tokens, once with a sixth behind them, and compare the first five positions.

# %%
from minivllm.layers.rotary import RotaryEmbedding

rotary = RotaryEmbedding(D, llm.config.max_model_len, config.rope_theta).to(device)


def project(layer, x, positions):  # x [T, hidden] -> q [T, H, D], k and v [T, K, D]
    own = layer.self_attn
    q, k, v = own.qkv_proj(layer.input_layernorm(x)).view(len(x), H + 2 * K, D).split((H, K, K), dim=1)
    if own.q_norm is not None:
        q, k = own.q_norm(q), own.k_norm(k)
    return rotary(q, positions), rotary(k, positions), v


# %%
def attention(q, k, v):  # q [Tq, H, D] are the last of the Tk positions of k and v [Tk, K, D] -> [Tq, H, D]
    key_positions = torch.arange(len(k), device=k.device)                  # [Tk]
    query_positions = key_positions[len(k) - len(q):]                      # [Tq]: the last ones
    mask = key_positions <= query_positions[:, None]                       # [Tq, Tk]: what each query may read
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def finish_layer(layer, x, attended):  # both corrections of a layer: attention's, then the small network's
    x = x + layer.self_attn.o_proj(attended.flatten(1))
    return x + layer.mlp(layer.post_attention_layernorm(x))


# %%
@torch.inference_mode()
def all_keys(token_ids):  # -> [L, T, K, D]
    positions, keys = torch.arange(len(token_ids), device=device), []
    x = model.model.embed_tokens(torch.tensor(token_ids, device=device))
    for layer in model.model.layers:
        q, k, v = project(layer, x, positions)
        keys.append(k)
        x = finish_layer(layer, x, attention(q, k, v))
    return torch.stack(keys)


five, six = all_keys(sentence), all_keys(sentence + llm.tokenizer.encode(" Paris"))
print("shapes:", tuple(five.shape), tuple(six.shape))
print("the first five positions agree:", torch.allclose(five, six[:, :5], atol=1e-3))

# %% [markdown]
# (They may differ in the last digits: a product of six rows can be summed in another order than one of five.)
#
# ## 3. The naive version: torch.cat
#
# The obvious way to keep keys is to glue the new one to the old ones. It gives the right tokens. But `cat` makes a new tensor and copies everything that was there:

# %%
kept = five[0]                                    # [5, K, D], the first layer's keys
grown = torch.cat([kept, six[0, 5:]])             # [6, K, D]
print("one more key:", torch.equal(grown[:5], kept), "| the same memory:", grown.data_ptr() == kept.data_ptr())

# %% [markdown]
# For a sequence of n tokens that is again a sum 1 + 2 + ... + n, this time of copied bytes.

# %%
bytes_per_token = 2 * L * K * D * llm.runner.dtype.itemsize
print(f"K and V of one token: 2 x {L} layers x {K} kv heads x {D} numbers x {llm.runner.dtype.itemsize} bytes",
      f"= {bytes_per_token:,} bytes")
for n in (100, 1000):
    kept, copied = n * bytes_per_token, n * (n + 1) / 2 * bytes_per_token
    print(f"{n:5} tokens: {kept / 1e6:5.1f} MB kept, {copied / 1e6:8,.0f} MB copied by torch.cat")


# %% [markdown]
# ## 4. Build it: a buffer with a length
#
# So reserve the room at the start and write into it. The buffer holds K and V of every layer for `capacity` positions; `length` says how many are real. Nothing is
# ever moved.

# %%
class KVCache:
    """One sequence's keys and values: buffer [2, L, capacity, K, D], of which `length` positions are real."""

    def __init__(self, capacity):
        self.buffer = torch.zeros(2, L, capacity, K, D, dtype=llm.runner.dtype, device=device)
        self.length = 0

    def append(self, index, k, v):  # layer `index`: k, v [T, K, D] -> all so far, [length + T, K, D] each
        end = self.length + len(k)
        self.buffer[0, index, self.length:end], self.buffer[1, index, self.length:end] = k, v
        return self.buffer[:, index, :end]


cache = KVCache(capacity=256)
print(tuple(cache.buffer.shape), f"{cache.buffer.nbytes:,} bytes reserved")


# %% [markdown]
# The forward pass takes only the **new** tokens. Their positions start where the cache ends; their keys and values go into the buffer; their queries read
# everything in it. The same function serves the first step, when the whole prompt is new (**prefill**), and all later ones, when a single token is new (**decode**).

# %%
@torch.inference_mode()
def forward(new_ids, cache):  # T new ids -> logits [V] of the next token
    positions = torch.arange(cache.length, cache.length + len(new_ids), device=device)
    x = model.model.embed_tokens(torch.tensor(new_ids, device=device))     # [T, hidden]
    for index, layer in enumerate(model.model.layers):
        q, k, v = project(layer, x, positions)
        keys, values = cache.append(index, k, v)                           # [length + T, K, D]
        x = finish_layer(layer, x, attention(q, keys, values))
    cache.length += len(new_ids)                                           # only now: every layer has written
    return model.compute_logits(model.model.norm(x[-1:]))[0]


# %%
def generate(token_ids, num_tokens, cache):
    token_ids, new_ids = list(token_ids), list(token_ids)
    for _ in range(num_tokens):
        new_ids = [forward(new_ids, cache).argmax().item()]
        token_ids += new_ids
    return token_ids


cache = KVCache(capacity=256)
ours = generate(sentence, 16, cache)
print(llm.tokenizer.decode(ours))
print(f"{len(ours)} tokens, {cache.length} of them in the cache: the last one was never fed back")


# %% [markdown]
# Keep that last line in mind. **A token's key and value are written in the step after the one that produced it.** The cache is always one token behind the text;
# this is where most off-by-one mistakes in engines come from, and notebook 04 meets it again at the end of a block.
#
# ## 5. The same answer?
#
# The naive engine is the cached one with a memory that is emptied before every step. Both must give exactly the same tokens, and so must the package.

# %%
def generate_naively(token_ids, num_tokens):
    token_ids = list(token_ids)
    for _ in range(num_tokens):
        token_ids.append(forward(token_ids, KVCache(len(token_ids))).argmax().item())
    return token_ids


greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
[output] = llm.generate([sentence], greedy, use_tqdm=False)
print("naive:  ", ours[:len(sentence) + 8] == generate_naively(sentence, 8))
print("package:", ours == sentence + output["token_ids"])

# %% [markdown]
# ## 6. The finished module
#
# In the package the buffers of all sequences are one tensor, `KVCachePool` in `minivllm/worker/kv_cache.py`, and who owns which part of it is decided elsewhere,
# in `minivllm/engine/block_manager.py`. What this adds:
#
# - **One allocation.** The pool is made once, as large as the memory allows, so the cache never asks for more later. A full pool is then no error but a decision: who waits.
# - **Parts of equal size, called blocks.** This notebook's engine was made with `block_size=256` and `max_model_len=256`: one block holds the longest possible
#   sequence, so every sequence has exactly one contiguous buffer, as in section 4.
# - **Bookkeeping apart from tensors.** The engine moves block numbers; only the worker touches memory.

# %%
pool = llm.runner.pool.cache
print("the pool [2, L, N, S, K, D]:", tuple(pool.shape))
print("one block as large as our buffer:", pool[:, :, 0].numel() == cache.buffer.numel())

# %% [markdown]
# ## 7. Watch it: reserved against used
#
# Five requests in an engine with ten buffers. A buffer is taken as soon as its sequence starts, and all of it, whatever the sequence will need. The filled part of a cell is
# what holds keys and values; the rest is reserved and empty. When the run is over, move the slider. (Block 0 is empty because the run before used it last, and blocks are
# handed out in the order in which they became free. Shared, cached and evicted blocks belong to later notebooks.)

# %%
from minivllm.teach import BlockView, MemoryView

prompts = ["The capital of France is", "Once upon a time, in a village by the sea, there lived", "2 + 2 =",
           "The first ten prime numbers are", "My favourite recipe for a cold winter evening begins with"]
params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (8, 24, 4, 16, 12)]
view = BlockView(llm)
display(view)
outputs = llm.generate(prompts, params, use_tqdm=False)

# %% [markdown]
# Step 6 as a picture: C has finished and given its buffer back, the others hold 256 slots each and use a few.

# %%
view.figure(step=6)

# %% [markdown]
# The same step as an account of memory. "Reserved" is memory that nobody uses now and nobody else may use.

# %%
MemoryView(view.trace).figure(step=6)

# %% [markdown]
# ## 8. Measure: time
#
# Predict. A decode step over n tokens must read every weight once and the K/V of n tokens once. For SmolLM2 in float32 that is 538 MB of weights and 46 kB for
# each token: at 128 tokens the cache adds 1%. So with a cache the step should take *the same time* at 8 tokens and at 128, and without one it should grow.

# %% tags=["nbval-ignore-output"]
from minivllm.bench.limits import Machine
from minivllm.teach import sketch

machine = Machine.measure(llm.runner.device, llm.runner.dtype)
lengths = [8, 48, 128]
text = (sentence * 40)[:max(lengths)]
cached, naive = [], []
for n in lengths:
    cache = KVCache(256)
    forward(text[:n], cache)
    one_more = lambda: forward([text[0]], cache)  # each run adds a token: n + 1, n + 2, ...
    cached.append(1e3 * notebook.median_seconds(one_more, repeats=5))
    naive.append(1e3 * notebook.median_seconds(lambda: forward(text[:n], KVCache(n)), repeats=2))
predicted = [1e3 * (llm.runner.weight_bytes + n * bytes_per_token) / machine.read_bandwidth for n in lengths]
for row in zip(lengths, naive, cached, predicted):
    print("{:4} tokens: {:5.0f} ms without a cache, {:4.0f} ms with, {:4.0f} ms predicted".format(*row))

# %% tags=["nbval-ignore-output"]
curves = {"without a cache": naive, "with a cache": cached, "predicted: bytes / bandwidth": predicted}
sketch.lines(lengths, curves, x="tokens in the sequence", y="milliseconds for one more token")

# %% [markdown]
# With a cache the line is flat. It lies above the prediction for two reasons: products with one row do not reach the bandwidth of a large reading, and a step is some
# two thousand small operations, each of which costs time however little it does. Notebooks 03 and 09 go after those.
#
# ## 9. Measure: memory
#
# Time is solved; memory now hurts. How much of the reserved room is ever used? For this we need lengths as they really occur. The package brings a file of them: 64
# requests (questions as people ask them, and Python functions to be explained), answered by SmolLM2 until it stopped by itself or after 512 tokens, as 20 of them did.

# %%
import json
import statistics
from importlib import resources

rows = json.loads(resources.files("minivllm.teach").joinpath("lengths.json").read_text())
lengths = [row["prompt"] + row["answer"] for row in rows]
print(f"{len(lengths)} requests; tokens with answer: shortest {min(lengths)},",
      f"median {statistics.median(lengths):.0f}, longest {max(lengths)}")


# %% [markdown]
# The engine does not know how long an answer will become. It can reserve for the worst case (here a context of 2,048 tokens), or for the prompt and the `max_tokens` of
# the request (here 512), or, in blocks of 16, only as it goes. A **slot** is room for one token's K and V in all layers. We count slots that hold a token, against slots that
# are reserved, at the moment when an answer is half written, and at its end.

# %%
def used_share(reserve):  # reserve(row, tokens so far) -> slots; -> (half-way, at the end)
    shares = []
    for part in (0.5, 1.0):
        used = [row["prompt"] + int(part * row["answer"]) for row in rows]
        shares.append(sum(used) / sum(reserve(row, tokens) for row, tokens in zip(rows, used)))
    return shares


ways = {"context of 2,048": lambda row, tokens: 2048,
        "prompt + max_tokens": lambda row, tokens: row["prompt"] + 512,
        "blocks of 16": lambda row, tokens: -(-tokens // 16) * 16}
for name, reserve in ways.items():
    half, end = used_share(reserve)
    print(f"{name:20} wasted half-way {1 - half:4.0%}, at the end {1 - end:4.0%}")

# %% [markdown]
# The two kinds of waste have names: what is reserved for tokens that will come is *reservation*; what is reserved and never needed is *internal fragmentation*.

# %%
half_way = [row["prompt"] + row["answer"] // 2 for row in rows]
now, at_the_end = sum(half_way) / len(rows), sum(lengths) / len(rows)
slots = {"used": [], "reserved for later": [], "reserved, never needed": []}
for reserve in ways.values():
    reserved = sum(reserve(row, tokens) for row, tokens in zip(rows, half_way)) / len(rows)
    later = min(reserved, at_the_end) - now
    for name, value in zip(slots, (now, later, reserved - now - later)):
        slots[name].append(value)
sketch.stacked(list(ways), slots, x="slots a request, half-way through its answer (mean of 64)")


# %% [markdown]
# "30 to 50%" is what articles often quote. The PagedAttention paper measured more: the systems before it kept tokens in only 20.4 to 38.2% of their KV memory, so 62 to 80% was wasted,
# and its authors give under 4% for paged memory. Our 86%, 56% and 2% tell the same story on another workload: nobody knows the length in advance. In numbers that matter: with 86%
# wasted, memory that could hold the tokens of 100 requests holds those of 14.
#
# ### Fragmentation
#
# Could we reserve exactly what each request needs? Suppose somebody who knows the future tells us. Then buffers have different sizes, and they end at different times. What is left
# is a row of holes. Below: a memory of 4,000 slots, requests from the file in order, each in the lowest hole that is large enough (*first fit*), where it stays for as
# many steps as its answer has tokens.

# %%
def first_fit(taken, need, size):  # taken: {start: length} -> where `need` slots in a row are free, or None
    begin = 0
    for start in sorted(taken):
        if start - begin >= need:
            return begin
        begin = start + taken[start]
    return begin if size - begin >= need else None


def run_until_blocked(size):
    """Place requests as they come until one does not fit although enough slots are free in all."""
    taken, ends, step = {}, {}, 0
    for row in rows:
        need = row["prompt"] + row["answer"]
        while (start := first_fit(taken, need, size)) is None:
            free = size - sum(taken.values())
            if free >= need:
                return taken, need, free
            step = min(ends.values())
            for done in [s for s, end in ends.items() if end <= step]:
                del taken[done], ends[done]
        taken[start], ends[start] = need, step + row["answer"]


taken, need, free = run_until_blocked(4000)
print(f"a request needs {need} slots; {free} are free, but not in a row")

# %%
sketch.strip(4000, taken, title=f"{free} slots are free, {need} in a row are wanted")


# %% [markdown]
# This is *external fragmentation*: memory is there and cannot be used. Moving the buffers together would mean copying gigabytes while everybody waits.
#
# All three wastes have one cause: a sequence must lie in one piece. Give that up, cut the memory into small blocks of equal size, let a table say which blocks belong to
# whom, and there are no holes (every free block fits) and nothing is reserved ahead (at most 15 slots of each sequence's last block). That is the paged KV cache.
#
# ## 10. Exercises

# %% [markdown] tags=["exercise-1-statement"]
# ### Exercise 1: append, safely (easy, 10 minutes)
#
# Write `append(cache, length, k, v)` for one layer: `cache` is a buffer `[2, C, K, D]` (K first, then V) with `length` tokens in it; `k` and `v` are `[T, K, D]`. It writes them
# behind what is there, in place, and returns the new length. If they do not fit into the C slots, it raises `ValueError` and writes nothing.
#
# Example: capacity 8, length 5, two new tokens: they go to positions 5 and 6, and 7 is returned. Four new tokens: ValueError.
#
# <details><summary>Hint: nothing arrives in the cache</summary>`cache = torch.cat(...)` gives a new tensor a name; the caller's buffer is untouched. Assign to a slice.</details>

# %% tags=["exercise-1-stub"]
def append(cache: torch.Tensor, length: int, k: torch.Tensor, v: torch.Tensor) -> int:
    raise NotImplementedError


# %% tags=["exercise-1-check"]
from minivllm.teach import check

check.append(append)


# %% tags=["exercise-1-solution"]
def append_solution(cache, length, k, v):
    end = length + len(k)
    if end > cache.shape[1]:
        raise ValueError(f"{len(k)} tokens behind {length} do not fit into {cache.shape[1]} slots")
    cache[0, length:end], cache[1, length:end] = k, v
    return end


check.append(append_solution)


# %% [markdown]
# **Optional: the real model with your `append`.** Each layer writes its keys and values through your function.

# %% tags=["exercise-1-plug"]
class YourCache(KVCache):
    def append(self, index, k, v):
        end = append(self.buffer[:, index], self.length, k, v)
        return self.buffer[:, index, :end]


try:
    print("the same tokens:", generate(sentence, 8, YourCache(64)) == ours[:len(sentence) + 8])
except NotImplementedError:
    print("not attempted yet")
except (TypeError, ValueError) as error:
    print("run the check above first:", error)


# %% [markdown] tags=["exercise-2-statement"]
# ### Exercise 2: the wasted share (easy, 5 minutes)
#
# Write `wasted_share(lengths, max_model_len)`: every sequence reserves `max_model_len` slots, `lengths` says how many tokens each one really holds. Return the share of
# all reserved slots that hold nothing, between 0 and 1.
#
# Example: lengths 100 and 300 with `max_model_len` 400: 800 reserved, 400 used, so 0.5.

# %% tags=["exercise-2-stub"]
def wasted_share(lengths: list[int], max_model_len: int) -> float:
    raise NotImplementedError


# %% tags=["exercise-2-check"]
check.wasted_share(wasted_share)


# %% tags=["exercise-2-solution"]
def wasted_share_solution(lengths, max_model_len):
    return 1 - sum(lengths) / (len(lengths) * max_model_len)


check.wasted_share(wasted_share_solution)

# %% [markdown] tags=["exercise-3-statement"]
# ### Exercise 3: break it (easy, 5 minutes)
#
# An engine keeps one buffer and reuses it: when a sequence has finished, the next one writes into the same memory from position 0. The fault: attention takes the
# length from the *buffer*, which remembers the most it ever held, and not from the sequence. Both sequences are prompts, each written in one prefill; we look at the
# second one's result right after its prefill.
#
# Give the number of tokens of the first and of the second sequence so that the second one's result is wrong. Then answer for yourself: would it help to fill the buffer
# with zeros in between?
#
# <details><summary>Hint</summary>What lies behind the second sequence's last token, and whose is it?</details>
# <details><summary>Would zeros help?</summary>No. A key of zeros has the score 0, and exp(0) is 1: it takes its share of the weights like any other key. Only the right length helps.</details>

# %% tags=["exercise-3-stub"]
first_tokens, second_tokens = None, None

# %% tags=["exercise-3-check"]
check.break_it("stale_buffer", first_tokens=first_tokens, second_tokens=second_tokens)

# %% tags=["exercise-3-solution"]
check.break_it("stale_buffer", first_tokens=20, second_tokens=5)

# %% [markdown]
# ## 11. Recap
#
# - Causality makes old keys and values final, so they are computed once and kept.
# - Prefill and decode are the same function; they differ in how many tokens are new.
# - The cache is one token behind the text.
# - One contiguous buffer for each sequence wastes what is reserved and not used, and leaves holes that nobody fits into.
#
# On the ladder the second rung reads a little more (the cache) and computes far less. Fewer bytes for each token come only with a batch, as the last bar shows.

# %% tags=["nbval-ignore-output"]
from minivllm.teach import ladder

prompt = (sentence * 7)[:32]
cache = KVCache(64)
forward(prompt, cache)
seconds = notebook.median_seconds(lambda: forward([prompt[0]], cache), repeats=9)
read = llm.runner.weight_bytes + cache.length * bytes_per_token
ladder.show("02", tokens_per_second=1 / seconds, bytes_per_token=read)

# %%
llm.close()

# %% [markdown]
# **How vLLM does it.** It never had contiguous buffers: the paper that introduced it is "Efficient Memory Management for Large Language Model Serving with PagedAttention"
# (Kwon and others, 2023), whose figures section 9 quotes. The worker runs the largest batch once and reports what memory is left (`vllm/v1/worker/gpu_worker.py`); that is
# turned into a number of blocks, which `vllm/v1/core/kv_cache_manager.py` and `block_pool.py` hand out.
#
# **Next:** 03 writes keys and values into a pool by slot number, with a Triton kernel of a dozen lines; 04 adds the block table.
