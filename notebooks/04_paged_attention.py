# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["header"]
# # 04 Block table and paged attention
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/04_paged_attention.ipynb)
#
# Attention that finds a sequence's keys and values through its block table.
#
# Previous: [03 Slot-mapped cache write](03_slot_mapped_write.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/03_slot_mapped_write.ipynb)) · Next: [05 Prefix cache](05_prefix_cache.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/05_prefix_cache.ipynb)) · 80 minutes with the exercises · runs on a CPU, on Colab's free T4 and on larger GPUs

# %% [markdown]
# **You will build** the paged KV cache: blocks handed out one by one, a table for each sequence that says which are its own, and attention that reads through that table without a copy. It
# is an operating system's page table: blocks are pages, and a sequence is a process that believes its memory to be in one piece.
#
# **You will learn** when exactly a sequence needs its next block; why a block table and not a table of slots; how a softmax is computed page by page; and what block
# size to choose.
#
# **You need** [02 KV cache](02_kv_cache.ipynb), and of [03](03_slot_mapped_write.ipynb) its first picture: every token's K and V go to a numbered slot.

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
from torch.nn import functional as F

if not torch.cuda.is_available():  # Triton's interpreter runs the kernels: say so before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
from minivllm import LLM, SamplingParams

S = 4  # block size: tiny, so that its end comes often
settings = {"enforce_eager": True, "block_size": S, "num_kv_blocks": 16, "max_num_seqs": 3, "max_model_len": 64}
llm = LLM(notebook.model(), dtype="float32", enable_prefix_caching=False, **settings)  # prefixes: notebook 05
device = llm.runner.device
sentence = llm.tokenizer.encode("The capital of France is")

# %% [markdown]
# ## 1. The problem, measured
#
# Notebook 02 ended with a memory of 4,000 slots and 64 requests. One contiguous buffer for each leaves holes, and whoever does not know the future reserves too much. What does it cost to serve
# all 64? In a step each running request writes one token, so fewer at a time means more steps.

# %%
import json
from importlib import resources

from minivllm.teach import fit

rows = json.loads(resources.files("minivllm.teach").joinpath("lengths.json").read_text())
taken, need, free = fit.until_blocked(rows, 4000)
print(f"exact buffers: at some point a request needs {need} slots in a row; {free} are free, but not in a row")
ways = {"a context of 2,048": lambda row: 2048, "prompt + max_tokens (512)": lambda row: row["prompt"] + 512,
        "exactly what it will need": lambda row: row["prompt"] + row["answer"]}
for name, reserve in ways.items():
    print(f"reserve {name:26} {fit.steps_needed(rows, 4000, reserve):6,} steps")

# %% [markdown]
# The last line is no real engine: nobody knows an answer's length in advance. Section 7 serves the same requests in the same memory without knowing anything.
#
# ## 2. The idea, drawn
#
# Cut the memory into **blocks** of S slots. A sequence owns some blocks, wherever they lie; its **block table** lists them in order.
#
# ```
# position        0   1   2   3 |  4   5   6   7 |  8   9
# block_table     7             |  2             |  5
# slot           28  29  30  31 |  8   9  10  11 | 20  21  (22  23: empty)
# ```
#
# Position 9 is in the table's entry 9 // 4 = 2, which is block 5, at place 9 % 4 = 1: slot 5 * 4 + 1 = 21. That is the whole address computation of a paged cache:

# %%
block_table = [7, 2, 5]
slots = [block_table[pos // S] * S + pos % S for pos in range(10)]
print(slots)

# %% [markdown]
# ## 3. The naive version: gather, then attend
#
# Write ten keys and values into a pool, each to its slot. To attend, fetch them in the order of positions (`cache[slots]` is a contiguous **copy**) and go on as in notebook 02. Slow and
# obviously right: our oracle.

# %%
torch.manual_seed(0)
H, K, D, N, n = 6, 2, 8, 12, 10
k, v = torch.randn(2, n, K, D)  # what a contiguous buffer would hold: [n, K, D] each
q = torch.randn(H, D)           # one query, the newest token's
k_cache, v_cache = torch.full((2, N * S, K, D), torch.nan)  # the pool, [N * S, K, D] each; NaN: nobody's
k_cache[slots], v_cache[slots] = k, v


def attend(q, k, v):  # q [H, D], k and v [n, K, D], contiguous -> [H, D]
    packed = q.view(k.shape[1], -1, q.shape[1])  # query heads of one kv head as its rows: [K, H / K, D]
    return F.scaled_dot_product_attention(packed, k.transpose(0, 1), v.transpose(0, 1)).flatten(0, 1)


def gather_then_attend(q, k_cache, v_cache, slots):
    return attend(q, k_cache[slots], v_cache[slots])


oracle = attend(q, k, v)
print("gathered as contiguous:", torch.equal(gather_then_attend(q, k_cache, v_cache, slots), oracle))

# %% [markdown]
# ### Why not a table of slots?
#
# `slots` did the job; why blocks at all? A table with an entry for each token would waste nothing. But it has S times as many entries, and these are paid for where an engine is slow: on the
# host (the CPU), in every step. In 32-bit numbers, for 256 sequences of 1,000 tokens:

# %%
for size in (1, 16, 256):
    entries = 256 * -(-1000 // size)
    print(f"blocks of {size:3}: {entries:7,} entries, {4 * entries:9,} bytes to the GPU in every step")


# %% [markdown]
# (Notebook 03's slot mapping is for the tokens that a step *writes*: one for each decode.)
#
# ## 4. Build it
#
# ### Allocate
#
# All that is needed is a list of free blocks, and a table for each sequence.

# %%
class TinyBlockManager:
    def __init__(self, num_blocks):
        self.free_blocks, self.tables = list(range(num_blocks)), {}

    def grow(self, name, num_tokens):  # room for num_tokens in all
        table = self.tables.setdefault(name, [])
        while len(table) * S < num_tokens:
            table.append(self.free_blocks.pop(0))

    def free(self, name):
        self.free_blocks += self.tables.pop(name)


# %%
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.sequence import Sequence

tiny, manager = TinyBlockManager(6), BlockManager(num_blocks=6, block_size=S)
a, b, c = (Sequence(number, [0] * tokens, SamplingParams()) for number, tokens in enumerate((6, 3, 9)))
for name, seq in (("A", a), ("B", b)):  # A: 6 tokens, B: 3
    tiny.grow(name, len(seq))
    manager.allocate(seq, hits=[])      # hits: blocks found in the prefix cache (05), here none
a.token_ids += [0] * 3                  # A grows to 9 tokens, B ends, C comes with 9
tiny.grow("A", 9), tiny.free("B"), tiny.grow("C", 9)
manager.grow(a), manager.free(b), manager.allocate(c, hits=[])
print("A", tiny.tables["A"], "C", tiny.tables["C"], "free", tiny.free_blocks)
print("the package says the same:", (a.block_table, c.block_table) == (tiny.tables["A"], tiny.tables["C"]))

# %% [markdown]
# C got what was left and B's old block, 4, 5 and 2. All pieces have the same size, so **every free block fits**. The package's manager
# (`minivllm/engine/block_manager.py`) adds reference counts and hashes, by which sequences share blocks (notebook 05), and its `grow` says False when no block is free (07).
#
# ### Append, at the end of a block
#
# A token's K and V are written in the step *after* the one that sampled it (notebook 02). So there are two counts, `len(tokens)` and
# `num_computed_tokens`, and between two decodes the second is one behind. Which of them decides when a block is needed?
#
# We drive the real engine by hand: `schedule` plans a step, `execute` computes it, `update` appends the sampled token. A has a prompt of 3 tokens and writes 4; B runs beside it, so that
# A's blocks do not lie in a row.

# %%
from minivllm.teach import boundary

engine, greedy = llm.engine, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
a, _ = engine.add(sentence[:3], greedy), engine.add(sentence[:5], greedy)
records = []
while engine.has_unfinished_requests():
    length = len(a)
    plan = engine.scheduler.schedule()
    row = next(row for row in plan.rows if row.seq_id == a.seq_id)
    table, end = tuple(row.block_table), row.context_len
    written = tuple(table[pos // S] * S + pos % S for pos in range(row.start, end))
    engine.scheduler.update(plan, llm.runner.execute(plan))
    records.append(boundary.StepRecord(length, row.start, end, table, written))
print(boundary.table(records))

# %%
boundary.figure(records, block_size=S)

# %% [markdown]
# - **Step 0** computes the prompt, positions 0 to 2, and samples a fourth token. Now A has as many tokens as its block has slots, but slot 3 is empty.
# - **Step 1** computes position 3, writes the last slot, and samples a fifth token. Five tokens, one block of four slots, and *all is well*: the fifth has no K and V yet.
# - **Step 2** will compute position 4. *When it is planned*, a block is needed: `schedule` calls `grow`, which takes block 3.
# - **Step 3** samples the seventh and last token. It is never computed and gets no slot: 7 tokens, 6 slots.
#
# So the rule: a step needs blocks for `num_computed_tokens` + the tokens that it computes. For a decode that is `len(tokens)` *at the time of planning*, and so `grow` is written. (A prompt gets all
# its blocks when it is admitted.) Test the length after appending, in `update`, and a block is taken even for a sequence that ends there. Test `num_computed_tokens` alone, and position 4
# goes to a block that does not exist.
#
# ### Read the pages where they lie
#
# The oracle copies every key and value. We want to read page by page and keep only a result. The difficulty is the softmax: it divides by a sum over *all* positions, and subtracts the largest
# score of all (so that exp cannot overflow). Neither is known before the last page.
#
# The way out: keep a running maximum, and when a page brings a larger one, rescale what was added up so far. Scores 1 and 2 on one page, 4 on the next, and for each a value of one number:

# %%
scores, values = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([10.0, 20.0, 30.0])
best, total, mixed = torch.tensor(-torch.inf), 0.0, 0.0
for page in (slice(0, 2), slice(2, 3)):
    higher = torch.maximum(best, scores[page].max())
    faded, weights = torch.exp(best - higher), torch.exp(scores[page] - higher)
    total, mixed, best = total * faded + weights.sum(), mixed * faded + weights @ values[page], higher
    print(f"maximum {best:.0f}, old part times {faded:.3f}, sum {total:.3f}, mixture {mixed:.2f}")
print(f"result {mixed / total:.3f}, by softmax {scores.softmax(0) @ values:.3f}")


# %% [markdown]
# The second page brings 4 in place of 2, so what was there counts exp(2 - 4) = 0.135 times as much. The result is no approximation. This **online softmax** (Milakov and Gimelshein, 2018) is
# what FlashAttention and every paged kernel are made of.
#
# With real shapes. Each kv head serves H / K = 3 query heads; the last page may be partly filled:

# %%
def attend_by_pages(q, k_pages, v_pages, block_table, context_len):  # q [H, D], pages [N, S, K, D] -> [H, D]
    size, num_kv_heads, head_dim = k_pages.shape[1:]
    q = q.view(num_kv_heads, -1, head_dim) * head_dim ** -0.5                     # [K, H / K, D]
    best = torch.full((*q.shape[:2], 1), -torch.inf, device=q.device)             # [K, H / K, 1]
    total, mixed = torch.zeros_like(best), torch.zeros_like(q)
    for index, block in enumerate(block_table):
        tokens = min(size, context_len - index * size)
        keys, values = (pages[block, :tokens].transpose(0, 1) for pages in (k_pages, v_pages))  # [K, tokens, D]
        scores = q @ keys.transpose(1, 2)                                         # [K, H / K, tokens]
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        faded, weights = torch.exp(best - higher), torch.exp(scores - higher)
        total, mixed = total * faded + weights.sum(-1, keepdim=True), mixed * faded + weights @ values
        best = higher
    return (mixed / total).flatten(0, 1)


pages = k_cache.view(N, S, K, D), v_cache.view(N, S, K, D)  # the same memory, seen as pages
by_pages = attend_by_pages(q, *pages, block_table, n)
print("as the oracle:", torch.allclose(by_pages, oracle, atol=1e-5))
full, swapped = (attend_by_pages(q, *pages, table, 8) for table in ([7, 2], [2, 7]))
print("two full pages in the other order:", torch.allclose(swapped, full, atol=1e-5))

# %% [markdown]
# The last line may surprise. A sum has no order, and a key brings its position along: it was rotated by it (notebook 01). Order matters for *writing*, for the causal
# mask of a prompt, and because the last page may be partly filled. So pages may also be read *at the same time*, as the kernel does.
#
# ### The Triton kernel
#
# `minivllm/kernels/paged_decode.py` is the loop above, with three changes:
#
# - **Many programs.** Each takes one kv head of one sequence and *a part* of its context, every n-th tile (flash-decoding); without parts, one sequence with 8 kv heads would keep 8 of an H200's 132 processors busy.
#   The parts are joined by the same rescaling.
# - **Heads packed.** The query heads of a kv head are the rows of one tile, so each key is read once for all of them.
# - **Tiles, not pages.** It takes up to 128 positions at a time and looks up each one's block. So one kernel serves every block size.
#
# On three sequences, in Triton's interpreter on a CPU, for real on a GPU:

# %%
from minivllm.kernels.jit import triton
from minivllm.kernels.paged_decode import paged_decode_torch, paged_decode_triton

cache = torch.randn(2, N * S, K, D).to(device)
queries = torch.randn(3, H, D).to(device)
int32 = {"dtype": torch.int32, "device": device}
block_tables = torch.tensor([[7, 2, 5, 0], [1, 10, 11, 0], [9, 8, 6, 4]], **int32)  # padded with 0
context_lens = torch.tensor([10, 9, 16], **int32)
arguments = queries, *cache, block_tables, context_lens, S, D ** -0.5
wanted = paged_decode_torch(*arguments)  # gathers
if triton is None:
    print("triton is not installed: pip install triton, then run this cell again")
else:
    for splits in (1, 2):  # dot=False: without tl.dot, the way for a T4
        got = paged_decode_triton(*arguments, dot=False, splits=splits, tile=4)
        print(f"context in {splits} part(s), as gathered:", torch.allclose(got, wanted, atol=1e-4))

# %% [markdown]
# ## 5. The same answer?
#
# On numbers, yes. In the real model? An attention backend of the package has three methods: `prepare` once a step, `store` and `attend` in every layer. We inherit the plain torch one, replace what
# it does with a step of one token, and bind the model's layers to it.

# %%
from minivllm.attention.torch_sdpa import TorchSDPABackend


class ByPages(TorchSDPABackend):
    name = "by_pages"

    def attend(self, q, k_cache, v_cache, metadata, scale):  # q [T, H, D]; caches [N * S, K, D]
        if len(q) > 1:
            return super().attend(q, k_cache, v_cache, metadata, scale)
        size, context = metadata.block_size, int(metadata.context_lens[0])
        pages = (cache.unflatten(0, (-1, size)) for cache in (k_cache, v_cache))
        table = metadata.block_tables[0, :-(-context // size)].tolist()
        return attend_by_pages(q[0], *pages, table, context)[None]


def tokens_with(backend):
    llm.runner.backend = backend
    llm.runner.pool.bind(llm.runner.model, backend)
    six = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return llm.generate([sentence], six, use_tqdm=False)[0]["token_ids"]


package = llm.runner.backend
ours, theirs = tokens_with(ByPages()), tokens_with(package)  # and leave the package's in place
print("page by page, the same tokens:", ours == theirs)

# %% [markdown]
# ## 6. The finished module
#
# The package keeps its backends in `minivllm/attention`: `torch_sdpa.py` gathers and runs everywhere, `triton_paged.py` reads pages on a GPU. What they add:
#
# - **Whole batches:** rows of different lengths, prompts and decodes mixed.
# - **Prompts through pages too,** by `paged_prefill.py`: a chunk of a prompt reads what is there through the same table.
# - **A choice by trial:** `attention.select` runs a backend on a small batch and compares it with torch before it takes it. (Your own: `attention.register_backend("by_pages", ByPages)`, then
#   `LLM(..., attention_backend="by_pages")`.)
#
# On our three ragged sequences:

# %%
from minivllm.attention.metadata import AttentionMetadata

metadata = AttentionMetadata(slot_mapping=torch.tensor([21, 44, 19], device=device), block_tables=block_tables,
                             context_lens=context_lens, block_size=S, writes_all=True,
                             cu_seqlens_q=torch.arange(4, **int32))  # where each row's queries begin
backend, contexts = llm.runner.backend, context_lens.tolist()
metadata.plan = backend.prepare(metadata, query_lens=[1, 1, 1], context_lens=contexts)
got = backend.attend(queries, *cache, metadata, scale=D ** -0.5)
for query, table, context, theirs in zip(queries, block_tables.tolist(), contexts, got):
    ours = attend_by_pages(query, *cache.view(2, N, S, K, D), table[:-(-context // S)], context)
    print(f"context {context:2}: the backend as ours:", torch.allclose(theirs, ours, atol=1e-4))

# %% [markdown]
# ## 7. Watch it
#
# Five requests, at most three at a time, in 16 blocks of 4. Move the slider afterwards and look for a block that fills and the new one in the next step; for a sequence that ends, and its blocks,
# free at once; for a later sequence in blocks that lie apart.

# %%
from minivllm.teach import BlockView

prompts = ["The capital of France is", "2 + 2 =", "Once upon a time, in a village by the sea,",
           "The first ten prime numbers are", "My favourite recipe"]
params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (10, 5, 11, 7, 4)]
view = BlockView(llm)
display(view)
outputs = llm.generate(prompts, params, use_tqdm=False)

# %% [markdown]
# Two steps as pictures. In the upper one two sequences fill a block to the last slot; in the lower one their next tokens are computed, each into a block that was taken for it.

# %%
view.figure(steps=[7, 8])

# %% [markdown]
# ### Fragmentation, before and after
#
# Now the 64 requests of section 1; 4,000 slots are 250 blocks of 16. The engine needs no model for this: any object with `execute` may compute, and ours always "samples" token 7. Scheduler, block
# manager and lengths are the real ones.

# %%
from minivllm.config import EngineConfig
from minivllm.engine.engine import Engine
from minivllm.engine.step import StepResult


class NoModel:
    def execute(self, plan):
        return StepResult({row.seq_id: 7 for row in plan.rows if row.samples})


def engine_with_blocks(size, slots=4000):
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 2048}
    config = EngineConfig(block_size=size, num_kv_blocks=slots // size, enable_prefix_caching=False, **limits)
    engine = Engine(config, NoModel(), vocab_size=100)
    for row in rows:
        engine.add([1] * row["prompt"], SamplingParams(max_tokens=row["answer"], ignore_eos=True))
    return engine


def steps_to_the_end(engine):
    count = 0
    while engine.has_unfinished_requests():
        engine.step()
        count += 1
    return count


engine = engine_with_blocks(16)
paged = BlockView(engine, sequences=0)
print(f"blocks of 16: {steps_to_the_end(engine):,} steps;",
      engine.stats.num_preemptions, "times a sequence had to give way")

# %%
paged.figure(step=700)

# %% [markdown]
# 1,823 steps, where exact buffers took 3,133, and buffers as a real engine must reserve them 3,969 or 18,330. It beats even the one that knew the future, because nothing is reserved ahead: while
# a sequence is short, others use the room. In the picture no sequence lies in one piece. (A step of more sequences takes longer, but far less than in proportion.)
#
# The price: the engine admits more than will fit when all have grown. When the blocks run out, the newest sequence gives its blocks back and is computed again later (notebook 07): 32 times here,
# included in the 1,823 steps.
#
# ## 8. Which block size?
#
# A large block wastes more: a sequence's last block is half empty on average. A small one makes longer tables. Of a prefix only whole blocks can be shared (notebook 05). For the 64 requests, at the end
# of their answers:

# %%
from minivllm.teach import sketch

sizes = [1, 8, 16, 64, 256]
lengths = [row["prompt"] + row["answer"] for row in rows]
wasted, entries = [], []
for size in sizes:
    blocks = [-(-tokens // size) for tokens in lengths]
    wasted.append(100 * (1 - sum(lengths) / (size * sum(blocks))))
    entries.append(sum(blocks) / len(rows))
    print(f"blocks of {size:3}: {wasted[-1]:4.1f}% wasted, {entries[-1]:5.1f} entries a sequence,",
          f"{100 // size * size:3} tokens of a prefix of 100 can be shared,",
          f"{steps_to_the_end(engine_with_blocks(size)):,} steps")
drawn = sketch.figure(10, 3)
panels = {"% of slots wasted": wasted, "table entries a sequence": entries}
for axis, (title, values) in zip(drawn.subplots(1, 2), panels.items()):
    bars = axis.bar([str(size) for size in sizes], values, color=[sketch.COLOURS[size == 16] for size in sizes])
    axis.bar_label(bars, [f"{value:.1f}" for value in values], fontsize=12)
    axis.set_title(title, fontsize=13, loc="left")
    axis.set_xlabel("block size", fontsize=13)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.12)
drawn

# %% [markdown]
# From 1 to 16 the waste stays under 2%, and the table shrinks to a sixteenth for 4% more steps. From 16 to 256 the table hardly matters any more, and a fifth of the memory is lost, at these lengths; for sequences of 10,000
# tokens it would be about 1%. **16** is the usual default. **256** is what FlashAttention-2 asks for: its paged kernel wants blocks of a multiple of 256 tokens, so that no tile crosses the end of one.
#
# ## 9. Measure
#
# Predict. A decode must read K and V of its context once, contiguous or not, and a page of 16 tokens is some kilobytes in a row. So *reading through pages costs nothing*. A gather reads everything,
# writes a copy, and attention reads the copy: **three times the bytes**. One layer, the shape of SmolLM2:

# %% tags=["nbval-ignore-output"]
heads, kv_heads, dim = 9, 3, 64


def milliseconds(n, size):  # of one decode: the bytes alone, contiguous, gathered, page by page in torch
    pool = torch.randn(2, 2 * n, kv_heads, dim, device=device)    # half of it belongs to others
    table = torch.randperm(2 * n // size)[:n // size]
    slots = (table[:, None] * size + torch.arange(size)).flatten().to(device)
    (k, v), q = pool[:, slots], torch.randn(heads, dim, device=device)
    pages, table = pool.unflatten(1, (-1, size)), table.tolist()
    ways = (lambda: k.sum() + v.sum(), lambda: attend(q, k, v), lambda: gather_then_attend(q, *pool, slots),
            lambda: attend_by_pages(q, *pages, table, n))
    return [1e3 * notebook.median_seconds(way, repeats=5) for way in ways]


contexts = [4096, 16384, 32768]
curves = {"reading the bytes once": [], "contiguous": [], "gathered, then attended": [], "page by page": []}
for n in contexts:
    for curve, value in zip(curves.values(), milliseconds(n, 256)):
        curve.append(value)
    print(f"{n:,} tokens, {n * 2 * kv_heads * dim * 4 / 1e6:4.1f} MB of K and V:",
          ", ".join(f"{name} {curve[-1]:.1f} ms" for name, curve in curves.items()))
print("blocks of 16, 4,096 tokens, page by page: {3:.1f} ms".format(*milliseconds(4096, 16)))
sketch.lines(contexts, curves, x="tokens in the context", y="milliseconds", log=True)

# %% [markdown]
# On a CPU the gather takes one and a half to four times as long as contiguous memory, not a clean three: there torch's attention is several times slower than reading its bytes, so bytes are only part of
# it. Walking pages of 256 in Python stays near contiguous memory, without a copy. With pages of 16 it is slow for another reason: a dozen small operations for each of 256 pages. That is why this loop
# belongs into a kernel. (On a GPU all of this cell is such overhead.)
#
# The kernel, on a GPU, or as saved from an H200. The limit is its bytes over the speed of a large copy:

# %% tags=["nbval-ignore-output"]
from minivllm.teach import decode_speed

result = decode_speed.measure() if torch.cuda.is_available() else decode_speed.saved()
print(f"{result['device']}, one layer of Qwen3-0.6B; a copy moves {result['copy_bandwidth'] / 1e12:.2f} TB/s")
for case in result["cases"]:
    limit = case["microseconds"] * case["share"]
    print(f"{case['case']:18} limit {limit:4.0f} us, measured {case['microseconds']:4.0f} us,",
          f"{case['microseconds'] - limit:+4.0f} us, {case['share']:4.0%} of the limit")
by_size = (f"{size}: {microseconds:.0f} us" for size, microseconds in result["block_sizes"].items())
print("64 x 1,000 in blocks of", ", ".join(by_size))


# %% [markdown]
# (The text speaks of the saved figures.) 256 sequences of some 1,000 tokens are read at a copy's speed. Scattered pages are read as
# fast as memory can be, and blocks of 1 as fast as blocks of 256. So the table of slots of section 3 would cost the kernel nothing; the host pays.
#
# One sequence of 8,000 reaches about 60%. Look at the differences: the three smaller cases take 4 to 8 microseconds more than their bytes, for starting the programs, waiting for the
# first bytes, programs that end later than others, and joining the parts. Beside 66 us that is little; beside the 8 us of 33 MB it is more than half as much again.
#
# ## 10. Exercises

# %% [markdown] tags=["exercise-1-statement"]
# ### Exercise 1: slot mapping (easy, 8 minutes)
#
# Write `slot_mapping(block_table, start, count, block_size)`: the slots of the `count` positions from `start` on, as a list of whole numbers. The worker computes it for every row of every step:
# a prompt (`start` 0), a chunk, or a decode (`count` 1).
#
# Example: `block_table` [7, 2, 5], block size 4, start 3, count 3: positions 3, 4, 5 are slots 31, 8, 9.
#
# <details><summary>Hint: right for prompts, wrong for chunks</summary>Both // and % want the position, not the index within the run.</details>

# %% tags=["exercise-1-stub"]
def slot_mapping(block_table: list[int], start: int, count: int, block_size: int) -> list[int]:
    raise NotImplementedError


# %% tags=["exercise-1-check"]
from minivllm.teach import check

check.slot_mapping(slot_mapping)

# %% tags=["exercise-1-solution"]
from minivllm.engine.step import PlanRow
from minivllm.worker import batch


def slot_mapping_solution(block_table, start, count, block_size):
    row = PlanRow(0, start, [0] * count, block_table, 0, samples=True, sampling=SamplingParams(), seed=0)
    return batch.slot_mapping(row, block_size)


check.slot_mapping(slot_mapping_solution)

# %% [markdown]
# **Optional: the real model writes where you say.** The package reads through its own table.

# %% tags=["exercise-1-plug"]
from minivllm.teach import plug_paged

plug_paged.slot_mapping(slot_mapping, llm, "The capital of France is", max_tokens=8)


# %% [markdown] tags=["exercise-2-statement"]
# ### Exercise 2: paged decode (medium, 20 minutes)
#
# Write `paged_decode(q, k_cache, v_cache, block_table, context_len)` for one sequence: `q [H, D]` is the newest token's query, `k_cache` and `v_cache` are `[N, S, K, D]`, so that `k_cache[b]` is page
# b; `block_table` is a list of block numbers, perhaps longer than needed; the first `context_len` positions count, the newest token's own included. As always,
# query head h reads kv head h // (H / K), and scores are scaled by 1 / sqrt(D). Return `[H, D]` in the dtype of q. Walk page by page with a
# running maximum and sum. (The checker cannot tell a gather from it.) Try without looking at `attend_by_pages`: the three scores of section 4 have everything.
#
# Example: S = 4, `context_len` 10: pages `block_table[0]` and `[1]` with four tokens each, then two tokens of page `block_table[2]`.
#
# <details><summary>Hint: nan</summary>What lies behind the last token is not zero. And exp(-inf - (-inf)) is nan: do not let a page be empty.</details>
# <details><summary>Hint: the numbers are a little off</summary>When the maximum rises, both the sum and the mixture are rescaled.</details>

# %% tags=["exercise-2-stub"]
def paged_decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                 block_table: list[int], context_len: int) -> torch.Tensor:
    raise NotImplementedError


# %% tags=["exercise-2-check"]
check.paged_decode(paged_decode)


# %% tags=["exercise-2-solution"]
def paged_decode_solution(q, k_cache, v_cache, block_table, context_len):
    size, (num_kv_heads, head_dim) = k_cache.shape[1], k_cache.shape[2:]
    query = q.float().view(num_kv_heads, -1, head_dim) * head_dim ** -0.5         # [K, H / K, D]
    best, total, mixed = -torch.inf, 0, 0
    for start in range(0, context_len, size):
        page, tokens = block_table[start // size], min(size, context_len - start)
        keys, values = (cache[page, :tokens].float().transpose(0, 1) for cache in (k_cache, v_cache))
        scores = query @ keys.transpose(1, 2)                                     # [K, H / K, tokens]
        higher = scores.amax(-1, keepdim=True).clamp(min=best)
        faded, weights = torch.exp(best - higher), torch.exp(scores - higher)
        total, mixed = total * faded + weights.sum(-1, keepdim=True), mixed * faded + weights @ values
        best = higher
    return (mixed / total).view(q.shape).to(q.dtype)


check.paged_decode(paged_decode_solution)

# %% [markdown]
# **Optional: your decode in the real model,** in all layers and every step after the prompt's.

# %% tags=["exercise-2-plug"]
plug_paged.paged_decode(paged_decode, llm, "The capital of France is", max_tokens=8)

# %% [markdown] tags=["exercise-3-statement"]
# ### Exercise 3: break it (medium, 10 minutes)
#
# A decode needs a new block exactly when its newest token is the first of one. So a colleague wrote `grow` without counting blocks:
#
# ```
# def grow(self, seq):
#     if len(seq) % self.block_size != 1:
#         return True
#     ...  # take one block
# ```
#
# nano-vLLM asks the same question, and there it is right. The engine below gives a prompt its blocks correctly and then grows like this, one token a step. Give a prompt length, a number of tokens to
# write and a block size (each 1 to 64) for which it fails. Then say: what if a step could bring two new tokens?
#
# <details><summary>Hint</summary>Write down n % block_size for n = 1, 2, 3, ..., for each of the block sizes of section 8.</details>
# <details><summary>Two tokens a step</summary>The length may jump over remainder 1, from 4 to 6 say, and the block is never taken. The package counts the blocks that are missing.</details>

# %% tags=["exercise-3-stub"]
prompt_tokens, max_tokens, size = None, None, None

# %% tags=["exercise-3-check"]
check.break_it("grows_at_remainder_one", prompt_tokens=prompt_tokens, max_tokens=max_tokens, block_size=size)

# %% tags=["exercise-3-solution"]
check.break_it("grows_at_remainder_one", prompt_tokens=3, max_tokens=4, block_size=1)

# %% [markdown]
# ## 11. Recap
#
# - A block table turns position into slot: `block_table[pos // S] * S + pos % S`. Every free block fits, and nothing is reserved ahead but the rest of one block.
# - A token is appended one step before its K and V are written. A block is needed when a step *computes* past the end of the last one.
# - A softmax can be taken page by page with a running maximum and sum, in any order, in parallel parts.
# - Reading through pages costs what contiguous reading costs; gathering moves three times the bytes.
#
# The ladder shows what paging did *not* change: one sequence is no faster. It bought room, for many at once, as in the last bar.

# %% tags=["nbval-ignore-output"]
from minivllm.teach import ladder

prompt = (sentence * 7)[:32]
runs = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 9)]
one, nine = (notebook.median_seconds(lambda run=run: llm.generate([prompt], run, use_tqdm=False), repeats=1)
             for run in runs)
read = llm.runner.weight_bytes + 36 * llm.runner.spec.bytes_per_token
ladder.show("04", tokens_per_second=8 / (nine - one), bytes_per_token=read)

# %%
llm.close()

# %% [markdown]
# **How vLLM does it.** `vllm/v1/core/kv_cache_manager.py` and `block_pool.py` hand out blocks; `allocate_slots` is our `grow`, called with the number of tokens that the step will compute.
# `vllm/v1/worker/block_table.py` keeps the tables and computes the slot mapping. The first paged kernels were `csrc/attention/paged_attention_v1.cu` and `_v2.cu` (the context split); today FlashAttention
# and FlashInfer read pages, and `vllm/v1/attention/ops` holds Triton kernels.
#
# **Next:** 05 lets sequences share blocks: a prefix that was computed once is found again by a hash of all that stands before it.
