# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["header"]
# # 03 Slot-mapped cache write
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/03_slot_mapped_write.ipynb)
#
# A Triton kernel that writes each token's keys and values to its slot of one shared pool.
#
# Previous: [02 KV cache](02_kv_cache.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/02_kv_cache.ipynb)) · Next: [04 Block table and paged attention](04_paged_attention.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/04_paged_attention.ipynb)) · 60 minutes with the exercises · runs on a CPU, on Colab's free T4 and on larger GPUs

# %% [markdown]
# **You will build** a Triton kernel that writes the keys and values of a whole step, each token's to its own place in one shared pool, in one go for each layer.
#
# **You will learn** what a slot is; what a Triton program does, with addresses, tiles and masks; how to test a kernel without a GPU; and what such a kernel is really worth, in bytes and
# microseconds.
#
# **You need** [02 KV cache](02_kv_cache.ipynb), or an idea of what K and V are and why they are kept. No CUDA.

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
import os
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported: it decides what triton.jit makes
try:
    import triton
    import triton.language as tl
except ImportError:  # Triton exists for Linux; elsewhere the package's stand-in runs the same kernels
    from minivllm.teach.paper_triton import triton, tl

from minivllm import LLM, SamplingParams

settings = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 8, "max_model_len": 128}
llm = LLM(notebook.model(), dtype="float32", **settings)
device = llm.runner.device

# %% [markdown]
# ## 1. The problem, measured
#
# Notebook 02 ended with the cure for its waste: cut the memory into blocks of equal size, and let a sequence have any blocks, in any order. The price comes at once. In a contiguous
# buffer a sequence's new tokens lay side by side, and one slice assignment wrote them. Now each token's place must be looked up.
#
# A step of 64 sequences that decode brings 64 tokens, one a sequence, and every layer writes the K and the V of each. One row at a time that is:

# %%
layers, batch = 30, 64  # SmolLM2-135M has 30 layers
print(f"{layers} layers x {batch} tokens x 2 (K and V) = {layers * batch * 2:,} copies a step,",
      f"of {3 * 64 * 4} bytes each")


# %% [markdown]
# Each copy moves 768 bytes (3 kv heads of 64 numbers, 4 bytes each). The bytes are nothing: 2.9 MB in all. What costs time is *asking* for a copy, again and again (section 3 measures it).
#
# ## 2. The idea, drawn
#
# All blocks of a layer lie one behind the other in one tensor. Forget the blocks for a moment and number the places for one token, the **slots**, from 0 to the end. A token's
# place is then a single number. Three sequences, blocks of 4 slots, 6 blocks:
#
# ```
# block     0             1             2             3             4             5
# slot      0  1  2  3    4  5  6  7    8  9 10 11   12 13 14 15   16 17 18 19   20 21 22 23
# holds     C  C  .  .    A  A  A  A    B  B  B  B    .  .  .  .    A  A  .  .    B  .  .  .
#
# A has 6 tokens, block table [1, 4]      its next token, position 6:  4 * 4 + 6 % 4 = slot 18
# B has 5 tokens, block table [2, 5]      its next token, position 5:  5 * 4 + 5 % 4 = slot 21
# C has 2 tokens, block table [0]         its next token, position 2:  0 * 4 + 2 % 4 = slot  2
# ```

# %%
def slot(block_table, position, block_size):
    return block_table[position // block_size] * block_size + position % block_size


tables, lengths = {"A": [1, 4], "B": [2, 5], "C": [0]}, {"A": 6, "B": 5, "C": 2}
slot_mapping = [slot(table, lengths[name], 4) for name, table in tables.items()]
print("slot_mapping of the next step:", slot_mapping)


# %% [markdown]
# This list, one slot for each token of the step, is the **slot mapping**. Whoever writes the cache needs nothing else: no sequences, no positions, no blocks. Every layer uses the
# same list. A slot of **-1** means "write nothing": a token that only pads the batch to a fixed size, or one whose K/V is in the cache already.
#
# ## 3. The naive version: a loop, then an index
#
# Keys of a layer arrive as `k [T, K, D]`: T tokens, K kv heads of D numbers. The cache is `[N, S, K, D]`, N blocks of S slots; flattened it is `[N * S, K, D]`, addressed by slot.

# %%
def store_by_loop(k, v, k_cache, v_cache, slots):  # k, v [T, K, D]; caches [N * S, K, D]; slots [T]
    for token, slot in enumerate(slots.tolist()):
        if slot != -1:
            k_cache[slot], v_cache[slot] = k[token], v[token]


def store_by_index(k, v, k_cache, v_cache, slots):
    wanted = slots >= 0
    k_cache[slots[wanted]] = k[wanted]
    v_cache[slots[wanted]] = v[wanted]


def example(slots, K=2, D=4, num_slots=24):  # k and v hold the number of their token: 1, 2, ...
    slots = torch.tensor(slots, device=device)
    k = torch.arange(1.0, len(slots) + 1, device=device)[:, None, None].repeat(1, K, D)
    return k, -k, *torch.zeros(2, num_slots, K, D, device=device), slots


for store in (store_by_loop, store_by_index):
    k, v, k_cache, v_cache, slots = example(slot_mapping + [-1])
    store(k, v, k_cache, v_cache, slots)
    print({slot: int(row[0, 0]) for slot, row in enumerate(k_cache) if row.any()})

# %% [markdown]
# Slot 18 holds the first token, 21 the second, 2 the third; the fourth is padding and went nowhere. The index version is a few operations, whatever T is. Two things
# about it are awkward. Without the mask, -1 does not mean "nowhere" to torch but "the last one", and somebody's key is overwritten in silence. With the mask, torch must know *how
# many* tokens are wanted, because that is the shape of the next tensor: the CPU (the **host**) asks the GPU (the **device**) and waits, in every layer.

# %%
k, v, k_cache, v_cache, slots = example([-1])
k_cache[slots] = k
print("slot 23, the last one, now holds token", int(k_cache[23, 0, 0]))

# %% tags=["nbval-ignore-output"]
for tokens in (1, 64, 1024):
    case = example(torch.randperm(4096)[:tokens].tolist(), K=8, D=128, num_slots=4096)
    seconds = [notebook.median_seconds(lambda: store(*case)) for store in (store_by_loop, store_by_index)]
    print(f"{tokens:5} tokens: {1e6 * seconds[0]:8.0f} us by the loop, {1e6 * seconds[1]:6.0f} us by the index")


# %% [markdown]
# The loop asks once for every token. The index asks a few times, and then pays for the bytes; with a single token the loop may even win.
#
# ## 4. Build it: a Triton kernel
#
# A GPU runs one function, the **kernel**, many times at once; to start it is a **launch**. In Triton each of these runs is called a **program**. A program knows its own number and is
# given addresses. It loads a *tile* of numbers from memory (a row of them at once), computes, and stores a tile. It never sees a tensor: `source` below is the address of
# the first number, and `source + 4` that of the fifth. Here three programs copy a matrix of three rows.

# %%
@triton.jit
def copy_rows(source, target, WIDTH: tl.constexpr):
    row = tl.program_id(0)                           # which program am I? 0, 1 or 2
    offsets = row * WIDTH + tl.arange(0, WIDTH)      # WIDTH offsets, counted in numbers from the first
    tl.store(target + offsets, tl.load(source + offsets))


source = torch.arange(12.0, device=device).view(3, 4)
target = torch.zeros_like(source)
copy_rows[(3,)](source, target, WIDTH=4)             # [(3,)] is the grid: start three programs
target.cpu()

# %% [markdown]
# ```
# memory of source    0  1  2  3 |  4  5  6  7 |  8  9 10 11
# program             0  0  0  0    1  1  1  1    2  2  2  2
# row * WIDTH         0             4             8
# arange              0  1  2  3    0  1  2  3    0  1  2  3
# ```
#
# `WIDTH` is a `tl.constexpr`: Triton compiles a version of the kernel for each of its values, because the size of a tile must be known to the compiler.
#
# **Where does this run?** On a GPU, on the GPU. Without one, `TRITON_INTERPRET=1` (set in the second cell, before Triton was imported) makes `triton.jit` run the same code in Python, one
# program after the other. It finds wrong results. It says nothing about time, about what the compiler refuses, or about programs that get into each other's way because they run
# at once. It does not check addresses either: a wrong one can end the process, here as on a GPU.
#
# So this package brings a third way, Triton *on paper*: a small interpreter that checks each address and notes what every program does. The exercises use it, and where Triton cannot be
# installed (Windows, macOS) it stands in for it in every cell.

# %%
from minivllm.teach import paper_triton

notes = paper_triton.launch(copy_rows, (3,), source, target, WIDTH=4)
print(*paper_triton.told(notes), sep="\n")


# %% [markdown]
# ### A tile is a power of two
#
# Tiles have 1, 2, 4, 8, ... numbers. A row of three needs a tile of four, and a **mask** that says which of the four are real: where it is False, nothing is loaded and nothing stored.
# Without it, program 0 would write a fourth number, and that place belongs to program 1.

# %%
@triton.jit
def copy_any_rows(source, target, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    offsets = row * WIDTH + columns
    tl.store(target + offsets, tl.load(source + offsets, mask=mask), mask=mask)


source = torch.arange(6.0, device=device).view(2, 3)
target = torch.zeros_like(source)
copy_any_rows[(2,)](source, target, WIDTH=3, COLUMNS=4)
print("equal:", torch.equal(source, target))
print(*paper_triton.told(paper_triton.launch(copy_any_rows, (2,), source, target, 3, 4)), sep="\n")


# %% [markdown]
# ### One program, one token
#
# A cache write is such a copy with one change: the row that a program writes is not its own number but `slot_mapping[its number]`. It loads that first. A token's K heads of D
# numbers lie in a row, so to the kernel a token is WIDTH = K * D numbers, and slot s begins at s * WIDTH.

# %%
@triton.jit
def store_keys(k, k_cache, slot_mapping, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    columns = tl.arange(0, WIDTH)
    tl.store(k_cache + slot * WIDTH + columns, tl.load(k + token * WIDTH + columns))


k, v, k_cache, v_cache, slots = example(slot_mapping)
store_keys[(3,)](k, k_cache, slots, WIDTH=8)
print({slot: int(row[0, 0]) for slot, row in enumerate(k_cache) if row.any()})
print(*paper_triton.told(paper_triton.launch(store_keys, (3,), k, k_cache, slots, 8)), sep="\n")

# %% [markdown]
# ### Rows that are not side by side
#
# That worked because `k` was a tensor of its own. In a model it is not. One matrix product makes q, k and v of a token in one row, `[T, (H + 2 K) * D]`, and k is a *view* of a part of
# it. Its tokens are `k.stride(0)` numbers apart, not K * D. `k.contiguous()` would help, by one more copy and one more launch. Better to tell the kernel.

# %%
H, K, D = 4, 2, 4
qkv = torch.arange(3.0 * (H + 2 * K) * D, device=device).view(3, H + 2 * K, D)
k, v = qkv[:, H:H + K], qkv[:, H + K:]
print(f"K * D = {K * D}, but k.stride(0) = {k.stride(0)}; contiguous: {k.is_contiguous()}")
_, _, k_cache, v_cache, slots = example(slot_mapping)
store_keys[(3,)](k, k_cache, slots, WIDTH=8)
print("is it right?", torch.equal(k_cache[slots], k))


# %%
@triton.jit
def store_rows(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    columns = tl.arange(0, WIDTH)
    keys = tl.load(k + token * k_stride + columns)
    values = tl.load(v + token * v_stride + columns)
    tl.store(k_cache + slot * WIDTH + columns, keys)
    tl.store(v_cache + slot * WIDTH + columns, values)


def store_by_rows(k, v, k_cache, v_cache, slots):
    store_rows[(len(k),)](k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0), WIDTH=k[0].numel())


store_by_rows(k, v, k_cache, v_cache, slots)
print("is it right?", torch.equal(k_cache[slots], k), torch.equal(v_cache[slots], v))

# %% [markdown]
# K and V go in one launch: the slot is loaded once, and both loads are under way before the first store needs its numbers.
#
# What is still missing? Slot -1, and a WIDTH that is no power of two. The first is worth seeing. -1 * WIDTH is an address *before* the cache. Here we give the cache a neighbour there:

# %%
memory = torch.zeros(2, 25, 2, 4, device=device)     # K and V: a neighbour's row, then the cache's 24 slots
k_cache, v_cache = memory[0, 1:], memory[1, 1:]
k, v, _, _, slots = example([5, -1])
store_by_rows(k[:1], v[:1], k_cache, v_cache, slots[:1])
print("after slot  5 the neighbour holds", memory[0, 0, 0].tolist())
store_by_rows(k, v, k_cache, v_cache, slots)
print("after slot -1 the neighbour holds", memory[0, 0, 0].tolist())


# %% [markdown]
# No error, and somebody else's memory is damaged. In an engine the neighbour of layer 1 is the last slot of layer 0; the neighbour of the pool is whatever lies there. You close this hole in exercise 1
# and the other one in exercise 2.
#
# ## 5. The same answer?
#
# Against the loop, on 8 random cases: 1 to 6 tokens, slots at random places, k and v as parts of a wider row.

# %%
def random_case(seed, K=2, D=8, num_slots=32, padding=0):
    generator = torch.Generator().manual_seed(seed)
    T = 1 + seed % 6
    qkv = torch.randn(T, 3 * K, D, generator=generator).to(device)
    slots = torch.randperm(num_slots, generator=generator)[:T]
    slots[T - padding:] = -1
    return qkv[:, K:2 * K], qkv[:, 2 * K:], *torch.zeros(2, num_slots, K, D, device=device), slots.to(device)


def same(one, other, **shape):
    results = []
    for seed in range(8):
        first, second = random_case(seed, **shape), random_case(seed, **shape)
        one(*first), other(*second)
        results.append(all(torch.equal(a, b) for a, b in zip(first[2:4], second[2:4])))
    return results


print("equal to the loop, all 8 cases:", all(same(store_by_rows, store_by_loop)))

# %% [markdown]
# ## 6. The finished module
#
# `minivllm/kernels/store_kvcache.py` holds the package's kernel, beside a twin in plain torch. This is the kernel:

# %%
import inspect
from minivllm.kernels import store_kvcache as finished

print("@jit" + inspect.getsource(finished).split("@jit")[1].split("\n\n\n")[0])

# %% [markdown]
# (`@jit` is `triton.jit`; `changing` names an argument that is no reason to compile anew. `other` is what a load gives where its mask is False.) What it adds to ours:
#
# - **Several tokens a program.** A tile is TOKENS rows (4), so more bytes are under way for each program that is started; section 8 shows how little that brings. The last program may
#   have fewer: `tokens < num_tokens`.
# - **One mask, `wanted`, for all that must not be written:** padding, columns behind WIDTH, rows behind the last token. Slots are made 64 bits wide first: with 1,024 numbers a slot,
#   `slot * WIDTH` leaves 32 bits at slot 2,097,152.
# - **EARLY.** From an H100 on, a kernel can be started while the one before it still works, so that its start costs nothing later. `gdc_wait` then waits for what that one writes;
#   `gdc_launch_dependents` allows the next kernel the same.
# - **No checks.** A slot outside the pool is not noticed; whoever makes the mapping must not make one. `store_kvcache` takes the kernel on a GPU and the twin elsewhere.
#
# Equal to its twin, with padding, and with 3 kv heads of 80 numbers, so that 16 columns of each tile of 256 are masked:

# %%
there = hasattr(triton, "__version__")  # without Triton the twin is compared with itself
kernel = finished.store_kvcache_triton if there else finished.store_kvcache
print("equal to the twin, all 8 cases:", all(same(kernel, finished.store_kvcache_torch, K=3, D=80, padding=1)))

# %% [markdown]
# ## 7. Watch it: slots as they are written
#
# The real engine with 8 blocks of 16 slots and three requests. A row is a block, a cell a slot. Thick borders: written in this step. Below them is the step's slot mapping. (Blocks that are full when
# a sequence ends stay findable, dotted; that is notebook 05's subject.)

# %%
from minivllm.teach import SlotView

prompts = ["The capital of France is", "Once upon a time, in a village by the sea, there lived", "2 + 2 ="]
params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (20, 14, 8)]
view = SlotView(llm)
display(view)
outputs = llm.generate(prompts, params, use_tqdm=False)

# %% [markdown]
# Two steps as pictures. In the first all tokens of the three prompts are written at once, by one launch in each layer. Later each step brings one token for each sequence, each into another block.

# %%
view.figure(steps=[view.steps[0] + 0, view.steps[0] + 5])

# %% [markdown]
# ## 8. Measure
#
# Predict first. A copy must read and write every byte once. For Qwen3-0.6B (8 kv heads of 128 numbers, 2 bytes each) a token has 2,048 bytes of K and as many of V in each layer, so the
# write moves 8,192 bytes a token. An H200 copies at about 4 TB/s:

# %%
for tokens in (1, 16, 256, 2048, 8192):
    moved = tokens * 2 * 2 * 8 * 128 * 2  # read and write, K and V, kv heads, head dim, bytes
    print(f"{tokens:5,} tokens: {moved:11,} bytes, {1e6 * moved / 4e12:7.3f} us at 4 TB/s")

# %% [markdown]
# Starting a kernel from Python costs some ten microseconds, whatever it does. So for few tokens the time should be that of the launches, of which torch needs two (one for K, one for V);
# for thousands of tokens it should be that of the bytes, and these are the same for everybody. Articles about such kernels say "2.3 times as fast as torch". Write down what you expect.
#
# On a GPU the next cell measures; elsewhere it shows what an H200 gave. The pool has 1 GiB, so that no call finds its part in a cache of the device. Each way is timed twice: called from Python
# again and again, and replayed from a CUDA graph, which needs no Python (notebook 09).

# %% tags=["nbval-ignore-output"]
from minivllm.teach import sketch, store_bench

figures = store_bench.measure() if torch.cuda.is_available() else store_bench.saved()
print(*store_bench.table(figures), sep="\n")

# %% tags=["nbval-ignore-output"]
store_bench.figure(figures)


# %% [markdown]
# On the H200:
#
# - **Called from Python there is nothing to gain** up to 2,048 tokens: 31 us for torch's two copies at 256 tokens, 38 us for our kernel. The device waits for the host, and Triton's one launch takes the host
#   longer than torch's two. The prediction was wrong here.
# - **On the device the kernel is 4 to 6 times as fast:** 6.4 / 1.4 = 4.6 at 256 tokens, 79.2 / 18.0 = 4.4 at 8,192. The bytes are the same. Torch's kernel, made for any shape, works out
#   the address of every single number and gets to 15.7 / 79.2 = 20% of the copy bandwidth; ours reads a row's slot once, moves 16 bytes an instruction, and gets to 15.7 / 18.0 = 87%.
# - **The rule for -1 costs the most.** With a mask torch takes 249 us at 256 tokens, because each of its four selections asks the device and waits: in 28 layers that is 7.0 ms a step. A spare slot
#   for the padding avoids the question and costs two more operations. In the kernel the rule is free.
# - **Four tokens a program and EARLY, against one token and no EARLY:** 1.4 and 1.7 us at 256 tokens, 18.0 and 19.6 at 8,192. Small.
#
# So "2.3 times" is 0.8, 4.6, 4.4 or 249 / 38 = 6.5, depending on how many tokens, how it is called, and which torch code it is compared with.
# In a graph, at 256 sequences, the kernel saves 28 layers x 5.0 us = 0.14 ms of a step.
#
# ## 9. Exercises
#
# You write two kernels. The checkers run them on paper first, so a wrong address is a message and not a crash; what passes runs in Triton as well and must come to the same.

# %% [markdown] tags=["exercise-1-statement"]
# ### Exercise 1: leave out the padding (easy, 10 minutes)
#
# Write `store_kernel`: as `store_rows` in section 4, but a token whose slot is -1 writes nothing, neither K nor V. It is started with one program a token. `k` and `v` are addresses of rows of WIDTH
# numbers (a power of two), `k_stride` and `v_stride` numbers apart; the caches are addressed by slot.
#
# Example: WIDTH 4, slot_mapping [2, -1]. Program 0 stores to k_cache[8..11] and v_cache[8..11]; program 1 stores nothing.
#
# <details><summary>Hint: how</summary>`tl.store(..., mask=...)`; a mask may be a single True or False for the whole tile. Or an `if` around both stores.</details>
# <details><summary>Hint: see what your programs do</summary>`k, v, k_cache, v_cache, slots = example([2, -1])`, then
# `print(*paper_triton.told(paper_triton.launch(store_kernel, (2,), k, v, k_cache, v_cache, slots, 8, 8, 8)), sep="\n")`.</details>

# %% tags=["exercise-1-stub"]
@triton.jit
def store_kernel(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr):
    raise NotImplementedError


# %% tags=["exercise-1-check"]
from minivllm.teach import check

check.store_kernel(store_kernel)


# %% tags=["exercise-1-solution"]
@triton.jit
def store_kernel_solution(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    columns = tl.arange(0, WIDTH)
    keys = tl.load(k + token * k_stride + columns)
    values = tl.load(v + token * v_stride + columns)
    tl.store(k_cache + slot * WIDTH + columns, keys, mask=slot >= 0)
    tl.store(v_cache + slot * WIDTH + columns, values, mask=slot >= 0)


check.store_kernel(store_kernel_solution)


# %% [markdown] tags=["exercise-2-statement"]
# ### Exercise 2: any head_dim (medium, 15 minutes)
#
# SmolLM2 has 3 kv heads of 64 numbers: 192, no power of two. Other models have a head_dim of 80 or 96. Write `store_heads_kernel` with **a program for each token and each kv head**: the grid is
# `(T, K)`, so `tl.program_id(0)` is the token and `tl.program_id(1)` the head. A head has D numbers; TILE is D rounded up to a power of two. Slot -1 writes nothing.
#
# Head h of token t begins at `t * k_stride + h * D` in k. In the cache a slot holds K heads of D numbers, one behind the other.
#
# Example: K 2, D 3, TILE 4, token 0 to slot 5. Program (0, 1) loads k[3..5] and stores them to k_cache[33..35]: 5 * 6 + 1 * 3 = 33.
#
# <details><summary>Hint: two conditions in one mask</summary>`(columns < D) & (slot >= 0)`; the brackets are needed.</details>
# <details><summary>Hint: the numbers are right, but a neighbour's are not</summary>A tile has TILE numbers, a head in memory has D. Every step from head to head or slot to slot is made of D.</details>

# %% tags=["exercise-2-stub"]
@triton.jit
def store_heads_kernel(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride,
                       K: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    raise NotImplementedError


# %% tags=["exercise-2-check"]
check.store_heads_kernel(store_heads_kernel)


# %% tags=["exercise-2-solution"]
@triton.jit
def store_heads_solution(k, v, k_cache, v_cache, slot_mapping, k_stride, v_stride,
                         K: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    columns = tl.arange(0, TILE)
    mask = (columns < D) & (slot >= 0)
    to = slot * K * D + head * D + columns
    tl.store(k_cache + to, tl.load(k + token * k_stride + head * D + columns, mask=mask), mask=mask)
    tl.store(v_cache + to, tl.load(v + token * v_stride + head * D + columns, mask=mask), mask=mask)


check.store_heads_kernel(store_heads_solution)

# %% [markdown]
# **Optional: the real model with your kernel.** Every layer writes its keys and values by it: on a GPU by Triton, elsewhere on paper.

# %% tags=["exercise-2-plug"]
from minivllm.teach import plug_store

plug_store.store_heads_kernel(store_heads_kernel, llm, "The capital of France is", max_tokens=6)

# %% [markdown] tags=["exercise-3-statement"]
# ### Exercise 3: break it (easy, 5 minutes)
#
# Articles that explain nano-vLLM's kernel give a token's place in the cache as `slot * head_dim`. Below is a store that does so, a loop in place of programs. Give a number of kv heads and a slot mapping (slots 0 to 15, one for each
# token) for which it leaves another cache than the right one. Then say for which models nobody would ever notice.
#
# <details><summary>Hint</summary>How long is a slot? Which slot begins at 0 whatever its length?</details>
# <details><summary>Which models?</summary>Those with one kv head (multi-query attention), where K * D is D. There the formula is right.</details>

# %%
from minivllm.teach import bugs

print(bugs.source("slots_by_head_dim"))

# %% tags=["exercise-3-stub"]
num_kv_heads, slots = None, None

# %% tags=["exercise-3-check"]
check.break_it("slots_by_head_dim", num_kv_heads=num_kv_heads, slot_mapping=slots)

# %% tags=["exercise-3-solution"]
check.break_it("slots_by_head_dim", num_kv_heads=2, slot_mapping=[3, 4])

# %% [markdown]
# ## 10. Recap
#
# - A slot is a token's place in the pool, one number; the slot mapping lists the slots of a step's tokens, -1 for those that write nothing.
# - A Triton program loads and stores tiles at addresses that it computes. Tiles are powers of two; masks cut them to size.
# - Strides let a kernel read a view as it lies. A wrong offset is no error: it is somebody else's memory.
# - A cache write moves few bytes. A kernel of its own saves launches, addresses, and the question that a mask in torch asks the device.
#
# The ladder gets no rung here: the tokens are the same, and on a CPU so is the speed.

# %%
llm.close()

# %% [markdown]
# **How vLLM does it.** `reshape_and_cache_flash` in `csrc/cache_kernels.cu` is this kernel in CUDA, and `vllm/v1/attention/ops/triton_reshape_and_cache_flash.py` the same in Triton, a
# program for each token and tile; both skip slots below 0, and both can write an 8-bit cache. The slot mapping is made in `vllm/v1/worker/block_table.py`. This package's engine goes one step further on a
# GPU: `minivllm/kernels/rope_store.py` normalises, turns and stores in one pass.
#
# **Next:** 04 reads: attention finds a sequence's keys and values through its block table.
