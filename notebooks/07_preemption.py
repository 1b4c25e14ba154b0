# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["header"]
# # 07 Preemption and admission
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/07_preemption.ipynb)
#
# What happens when the blocks run out, and why nothing starves.
#
# Previous: [06 Scheduler](06_scheduler.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/06_scheduler.ipynb)) · Next: [08 Sampling](08_sampling.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/08_sampling.ipynb)) · 65 minutes with the exercises · runs on a CPU, on Colab's free T4 and on larger GPUs

# %% [markdown]
# **You will build** what an engine does when its blocks run out: take them from the newest request, put it at the head of the queue, compute it again later. It decides as the
# package's scheduler does, step for step.
#
# **You will learn** to predict who is preempted, and when; what it costs, in tokens and in milliseconds; why a request must not start just because its first tokens fit; and why
# nobody waits for ever.
#
# **You need** blocks and block tables ([notebook 04](04_paged_attention.ipynb)), and the idea that every step gives each running request a token ([notebook 06](06_scheduler.ipynb)). The prefix
# cache (notebook 05) comes in once.

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
from dataclasses import dataclass, field, replace

import torch

from minivllm import LLM, SamplingParams
from minivllm.engine.engine import Engine

# float32, so that tokens can be compared; blocks of 4, so that a small pool is full after a few steps
pool_size = 1024 if torch.cuda.is_available() else 64  # on a GPU longer texts are measured in section 8
settings = {"enforce_eager": True, "block_size": 4, "num_kv_blocks": pool_size, "max_model_len": 4 * pool_size}
llm = LLM(notebook.model(), dtype="float32", **settings)
encode = llm.tokenizer.encode


# %% [markdown]
# ## 1. The problem, measured
#
# An engine with a paged cache reserves nothing for the tokens to come (in notebook 02, reserving for `max_tokens` left 56% of the slots empty half-way
# through an answer). So it starts more requests than it
# could carry to their ends, and hopes that some end before others grow. Here that hope fails: four requests of 8, 12, 6 and 10 tokens, each to be answered with 16.
#
# `fresh` makes an engine over the loaded model, with bookkeeping of its own; it uses only the first `num_blocks` blocks of the model's pool. `run` takes requests to their ends.

# %%
def fresh(num_blocks, caching=False, **limits):
    config = replace(llm.config, num_kv_blocks=num_blocks, max_model_len=4 * num_blocks,
                     enable_prefix_caching=caching, **limits)
    return Engine(config, llm.runner, llm.engine.vocab_size)


def run(engine, prompts, answer):
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    sequences = [engine.add(prompt, params) for prompt in prompts]
    while engine.has_unfinished_requests():
        engine.step()
    return sequences


# %%
texts = ["The capital of France is a large city on the river",
         "Once upon a time, in a village by the sea, there lived an old man",
         "The first ten prime numbers are easy to write down",
         "My favourite recipe for a cold winter evening begins with onions"]
prompts = [encode(text)[:length] for text, length in zip(texts, (8, 12, 6, 10))]
engine = fresh(num_blocks=32)
wanted = run(engine, prompts, answer=16)
ends = [-(-(len(seq) - 1) // 4) for seq in wanted]  # an answer's last token is never fed back
print(f"32 blocks: {engine.stats.num_steps} steps; blocks at the end {ends}, together {sum(ends)}")


# %% [markdown]
# At the end they hold 26 blocks. Now give them 16.

# %%
def told(trace):
    for e in trace.events:
        name, data = "ABCDEFGH"[e.seq_id or 0], e.data
        if e.kind == "preempt":
            print(f"step {e.step:2}: {name} is preempted, {'ABCDEFGH'[data['for_seq']]} needs a block;",
                  f"the K/V of {data['computed_tokens']} tokens are lost")
        elif e.kind == "admit" and data["again"]:
            print(f"step {e.step:2}: {name} starts again with {data['tokens']} tokens,",
                  f"{data['cached_tokens']} found")


engine = fresh(num_blocks=16)
trace, stats = engine.scheduler.start_trace(), engine.stats
squeezed = run(engine, prompts, answer=16)
told(trace)
print(f"{stats.num_steps} steps, {stats.num_preemptions} preemptions,",
      f"{stats.recomputed_tokens} tokens computed again")
print("the same tokens:", [a.token_ids for a in squeezed] == [b.token_ids for b in wanted])


# %% [markdown]
# Nobody got an error and nobody got another answer. D and C lost all that was computed for them, waited until A and B had ended, and came back with a longer prompt: their own and what they
# had already written. **A preempted request loses its K/V, never its tokens.** The price is 34 tokens computed twice, and 25 steps in place of 16.
#
# ## 2. The idea, drawn
#
# Two requests in a pool of 5 blocks of 4: A has 5 tokens of prompt, B 6. A dot is a free slot.
#
# ```
# step 0   [A A A A][A . . .][B B B B][B B . .][. . . .]     room for 5 and 6 tokens
# step 3   [A A A A][A A A A][B B B B][B B B B][B . . .]     room for 8 and 9: the pool is full
# step 4   A has 9 tokens and needs a third block. None is free. B is the newest: it gives back all three.
#          [A A A A][A A A A][. . . .][. . . .][A . . .]     B waits, with its 6 + 4 tokens
# ```
#
# Three choices hide in this picture. The *victim* is the newest: nobody loses anything to somebody who came later. It gives back *everything*: attention needs all of a sequence's
# K/V or cannot run, so a part would be held for nothing. And it goes to the *head* of the queue, because it came before all who wait there. Section 10 shows what these choices are good for.
#
# ## 3. The naive version: wait for a block
#
# Why take anything from anybody? A request could wait until somebody ends and leaves a block. Two requests, five blocks:

# %%
def everybody_waits(num_blocks, size, tokens, ends):
    """tokens: how many each request has; ends: how many it will have. Who has room writes one."""
    step, held = 0, [-(-n // size) for n in tokens]
    while any(held):
        moved = False
        for i, n in enumerate(tokens):
            extra = -(-n // size) - held[i]
            if held[i] and sum(held) + extra <= num_blocks:  # room for its newest token
                held[i], tokens[i], moved = held[i] + extra, n + 1, True
                if tokens[i] == ends[i]:
                    held[i] = 0                              # it has ended: its blocks are free
        if not moved:
            return f"step {step}: nobody moves; tokens {tokens}, blocks {held}"
        step += 1
    return f"all ended after {step} steps"


print(everybody_waits(5, 4, tokens=[5, 6], ends=[12, 12]))
print(everybody_waits(5, 4, tokens=[5, 6], ends=[12, 14]))


# %% [markdown]
# In the first run B ends in time. In the second A holds two blocks and needs a third, B holds three and needs a fourth; each waits for the other, and the server hangs: a **deadlock**.
# Somebody has to give.
#
# ## 4. Build it
#
# Tokens themselves do not matter for these decisions, only how many there are. A request, and a pool that hands out blocks:

# %%
@dataclass(eq=False)
class Request:
    name: str
    prompt: int                                # tokens
    answer: int                                # tokens to be written
    written: int = 0
    computed: int = 0                          # tokens whose K/V are in the pool
    table: list = field(default_factory=list)  # its blocks

    @property
    def tokens(self):
        return self.prompt + self.written


class Pool:
    def __init__(self, num_blocks, size):
        self.free, self.size = list(range(num_blocks)), size

    def blocks_for(self, request):
        return -(-request.tokens // self.size)

    def grow(self, request):                   # room for all its tokens; or False, and nothing has changed
        missing = self.blocks_for(request) - len(request.table)
        if missing > len(self.free):
            return False
        request.table += [self.free.pop(0) for _ in range(missing)]
        return True

    def give_back(self, request):
        while request.table:                   # the tail first, as in notebook 05
            self.free.append(request.table.pop())


# %%
pool, a, b = Pool(5, 4), Request("A", 5, 14), Request("B", 6, 14)
print("A", pool.grow(a), a.table, "| B", pool.grow(b), b.table, "| free", pool.free)
a.written = b.written = 3
print("A", pool.grow(a), a.table, "| B", pool.grow(b), b.table, "| free", pool.free)
a.written = b.written = 4
print("A", pool.grow(a))
pool.give_back(b)
print("B gives back; A", pool.grow(a), a.table, "| free", pool.free)


# %% [markdown]
# Now the scheduler. Running requests come first, oldest first; who finds no block makes the newest give back its own, at worst itself. Only in a step in which nobody was preempted may
# somebody from the queue start. `log` keeps what we want to compare: step, victim, and how many of its tokens had K/V.

# %%
class ByHand(Pool):
    def __init__(self, num_blocks, size, requests):
        super().__init__(num_blocks, size)
        self.running, self.waiting = [], list(requests)
        self.steps, self.recomputed, self.log = 0, 0, []

    def may_start(self, request):  # all its tokens fit, with a block left for each that runs
        return self.blocks_for(request) + len(self.running) <= len(self.free)

    def preempt(self):
        victim = self.running.pop()                         # the newest
        self.log.append((self.steps, victim.name, victim.computed))
        self.recomputed += victim.computed
        self.give_back(victim)
        victim.computed = 0                                 # `written` stays: tokens are not lost
        return victim

    def step(self):
        preempted = []
        for request in list(self.running):
            while request in self.running and not self.grow(request):
                preempted.append(self.preempt())
        while not preempted and self.waiting and self.may_start(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
            self.grow(self.running[-1])
        self.waiting = preempted[::-1] + self.waiting       # the head of the queue, the oldest first
        for request in list(self.running):                  # "compute": all have K/V, one more is known
            request.computed, request.written = request.tokens, request.written + 1
            if request.written == request.answer:
                self.running.remove(request)
                self.give_back(request)
        self.steps += 1


# %% [markdown]
# Two requests as drawn, with answers of 8 tokens. The drawing shows a step's beginning; the lines show its end, when each that ran has a token more:

# %%
requests = [Request("A", 5, 8), Request("B", 6, 8)]
engine = ByHand(5, 4, requests)
while engine.running or engine.waiting:
    engine.step()
    line = [f"{r.name}: {r.tokens:2} tokens, blocks {str(r.table):12}" for r in requests]
    print(f"step {engine.steps - 1:2} ", " | ".join(line), "| waiting", [r.name for r in engine.waiting])

# %% [markdown]
# ## 5. The same answer?
#
# **Predict** section 1 before the real engine is asked. In step t each request has t tokens of answer and needs room for prompt + t:

# %%
for t in range(9):
    blocks = [-(-(length + t) // 4) for length in (8, 12, 6, 10)]
    print(f"step {t}: {blocks} = {sum(blocks)}", "" if sum(blocks) <= 16 else "> 16: the newest, D, has to go")
    if sum(blocks) > 16:
        break

# %% [markdown]
# Step 7, and D has 10 + 7 tokens then, of which 16 have K/V: as it was. After that it gets tedious; that is what `ByHand` is for. It and the package's engine now get 300 random workloads
# each (without a model, since it decides with numbers only; `NoModel` answers every step with token 7):

# %%
import random

from minivllm.bench.scheduler import NoModel
from minivllm.config import EngineConfig


def simulated(num_blocks, size, requests, manager=None, **limits):  # -> the package's engine, requests added
    config = EngineConfig(block_size=size, num_kv_blocks=num_blocks, max_model_len=num_blocks * size,
                          enable_prefix_caching=False,
                          **{"max_num_batched_tokens": 4096, "max_num_seqs": 64, **limits})
    engine = Engine(config, NoModel(), vocab_size=1000)
    if manager is not None:
        engine.blocks = engine.scheduler.blocks = manager(num_blocks, size, False)
    for prompt, answer in requests:
        engine.add([1] * prompt, SamplingParams(max_tokens=answer))
    return engine


def finish(engine):
    while engine.has_unfinished_requests():
        engine.step()
    return engine.stats


# %%
def both(num_blocks, size, lengths):  # what was decided: by hand, and by the package
    ours = ByHand(num_blocks, size, [Request(i, *pair) for i, pair in enumerate(lengths)])
    while ours.running or ours.waiting:
        ours.step()
    engine = simulated(num_blocks, size, lengths)
    trace = engine.scheduler.start_trace()
    stats = finish(engine)
    theirs = [(e.step, e.seq_id, e.data["computed_tokens"]) for e in trace.events if e.kind == "preempt"]
    return (ours.log, ours.steps, ours.recomputed), (theirs, stats.num_steps, stats.recomputed_tokens)


rng, agree, preemptions = random.Random(0), 0, 0
for _ in range(300):
    size, num_blocks = rng.choice([1, 2, 4, 8]), rng.randrange(6, 30)
    draw = lambda: rng.randrange(1, num_blocks * size // 2 + 1)
    ours, theirs = both(num_blocks, size, [(draw(), draw()) for _ in range(rng.randrange(1, 9))])
    agree, preemptions = agree + (ours == theirs), preemptions + len(theirs[0])
print(f"{agree} of 300 workloads: the same {preemptions} preemptions, steps and recomputed tokens")
print("section 1 by hand:", both(16, 4, [(8, 16), (12, 16), (6, 16), (10, 16)])[0])

# %% [markdown]
# ## 6. The finished module
#
# In `minivllm/engine/scheduler.py` this is `_make_room` (preempt), `_admit` (may start) and `_requeue` (the head of the queue); blocks are given in `block_manager.py`. It adds:
#
# - **A token budget.** A step computes at most `max_num_batched_tokens`; a long prompt takes several steps (notebook 06), and may be preempted between two of them.
# - **Other policies.** With priorities a newer request may already be in the step's plan when it loses its blocks; its tokens then leave the plan.
# - **The prefix cache.** Full blocks that are given back can still be found, until they are reused. A preempted request looks for its own.
#
# The last of these makes preemption cheaper, as the next section shows.
#
# ## 7. Watch it: a pool under pressure
#
# The run of section 1 again, with the prefix cache on. When it is over, move the slider: until step 6 the pool fills; in step 7 D loses its blocks.

# %%
from minivllm.teach import BlockView, TimelineView

engine = fresh(num_blocks=16, caching=True)
view = BlockView(engine)
display(view)
found = run(engine, prompts, answer=16)
told(view.trace)
print(f"{engine.stats.recomputed_tokens} tokens computed again, {stats.recomputed_tokens} without the cache")
print("the same tokens:", [a.token_ids for a in found] == [b.token_ids for b in wanted])

# %% [markdown]
# C waited for three steps and found 12 of the 18 tokens that it had lost. D waited for nine, while the others grew into its blocks, and found nothing. A victim's blocks are reused from its tail on, so what
# survives is a beginning, which is the useful part.
#
# D goes, C goes, A and B end, both come back. Dotted blocks are free and can still be found; dashed ones were just reused.

# %%
view.figure(steps=[7, 13, 15, 16])

# %% [markdown]
# The same steps in time: D in a cell is a decode, X stands from the step in which a request loses its blocks, a number where a prompt (or what was lost) is computed.

# %%
TimelineView(view.trace).figure()

# %% [markdown]
# ## 8. Compute again, or swap?
#
# The other way to make room is **swapping**: copy the victim's K/V to the host's memory, and back later. What is cheaper? Predict from bytes and FLOPs. For n tokens,
#
# - computing again takes 2 FLOPs for each weight of the layers and token, and attention over n²/2 pairs, at the GPU's rate;
# - swapping moves the K/V twice, out and in, over PCIe.
#
# Peak figures of the data sheets: T4 65 TFLOP/s and 16 GB/s (PCIe 3), H200 989 TFLOP/s and 64 GB/s (PCIe 5). Both are upper limits, so this compares best cases.

# %%
shapes = {  # layers, hidden, heads, kv heads, head dim, intermediate
    "Qwen3-0.6B": (28, 1024, 16, 8, 128, 3072), "Qwen3-8B": (36, 4096, 32, 8, 128, 12288)}
devices = {"T4": (65e12, 16e9), "H200": (989e12, 64e9)}


def predicted_ms(shape, device, n):
    layers, hidden, heads, kv_heads, dim, wide = shapes[shape]
    weights = layers * hidden * (2 * heads * dim + 2 * kv_heads * dim + 3 * wide)
    flops = 2 * weights * n + 4 * layers * heads * dim * n * n / 2
    moved = 2 * n * (2 * layers * kv_heads * dim * 2)  # out and in; K and V, 2 bytes a number
    rate, pcie = devices[device]
    return 1e3 * flops / rate, 1e3 * moved / pcie


for shape, device in (("Qwen3-0.6B", "T4"), ("Qwen3-0.6B", "H200"), ("Qwen3-8B", "H200")):
    for n in (1000, 8000):
        again, swapped = predicted_ms(shape, device, n)
        print(f"{shape + ' on ' + device:18} {n:,} tokens: computed again {again:5.1f} ms,",
              f"swapped {swapped:5.1f} ms")

# %% [markdown]
# There is no winner. The small model on the fast GPU computes faster than PCIe copies; the larger one is cheaper to move, and so is a long context on the T4. vLLM once had both; its scheduler now
# only computes again. What speaks for that stands outside the table: the prefix cache returns a part for nothing; recomputed tokens share a step with decodes, which leave the arithmetic
# idle; swapping needs a second pool and its bookkeeping; and a server that preempts so often that this matters is set up wrongly (section 9).
#
# Now measure. On a CPU "swapping" is a copy within the same memory, so only the first column means something; on a GPU both do.

# %% tags=["nbval-ignore-output"]
from minivllm.teach import swap

lengths, repeats = ((256, 1024, 2000), 3) if torch.cuda.is_available() else ((32, 128), 1)
print(f"here, {llm.runner.device}, float32:", *swap.lines(swap.measure(llm, lengths, repeats)), sep="\n")
print(*swap.saved_lines(), sep="\n")

# %% [markdown]
# The H200 turns the prediction round. Out and back took 17.7 + 18.7 = 36.4 ms for 8,192 tokens, near the sheet's 28.7. Computing them again took 41.9 where the sheet says 14.5, and 512 tokens took 16.8: a prefill reaches about
# a third of the peak, and its launches have a price of their own, however few tokens there are. Best cases are no measurement.
#
# ## 9. Thrashing, and its cures
#
# One preemption is a nuisance. **Thrashing** is when work is thrown away faster than it is done. The rule for starting decides. Three rules, over the 64 requests of notebook 02 with their
# real lengths, which all arrive at once:
#
# - *first chunk*: start if the tokens of the next step fit. Natural, if a prompt takes its blocks chunk by chunk;
# - *all tokens*: start if the whole remaining prompt fits;
# - *all and a reserve*: that, and one block left for each request that runs. This is the package's.
#
# First one long prompt. Three requests of 200 tokens write answers of 200; behind them waits a prompt of 640 tokens. 80 blocks of 16, 64 tokens a step:

# %%
from minivllm.engine.block_manager import BlockManager


class AllTokens(BlockManager):
    def can_allocate(self, seq, hits, reserve=0):
        return super().can_allocate(seq, hits)


class FirstChunk(BlockManager):
    chunk = 64                                              # tokens that a step computes at most

    def next_blocks(self, seq):
        return self.num_blocks_for(min(len(seq), seq.num_computed_tokens + self.chunk))

    def can_allocate(self, seq, hits, reserve=0):
        return self.next_blocks(seq) <= self.num_free_blocks

    def allocate(self, seq, hits):
        self._extend(seq, self.next_blocks(seq))

    def grow(self, seq):
        missing = self.next_blocks(seq) - len(seq.block_table)
        if missing > self.num_free_blocks:
            return False
        self._extend(seq, missing)
        return True


rules = {"first chunk": FirstChunk, "all tokens": AllTokens, "all and a reserve": BlockManager}
for name, manager in rules.items():
    lengths = [(200, 200)] * 3 + [(640, 20)]
    stats = finish(simulated(80, 16, lengths, manager, max_num_batched_tokens=64))
    print(f"{name:17} {stats.num_steps} steps, {stats.num_preemptions:2} preemptions,",
          f"{stats.recomputed_tokens:5,} tokens again")

# %% [markdown]
# The prompt needs 40 blocks; the others hold 39 of 80 after their own prompts, and grow. *First chunk* lets it in again and again: some of its chunks are computed, the pool is full, it
# is the newest, it loses all. That costs as much as 14 such prompts, to end three steps earlier. *All tokens* lets it in too early once: it takes 40 of the 41
# free blocks, and the second block that the others need throws it out. With the reserve it waits until it can stay. Now the 64 requests, in pools of different size:

# %%
import json
from importlib import resources

from minivllm.teach import sketch

rows = json.loads(resources.files("minivllm.teach").joinpath("lengths.json").read_text())
lengths = [(row["prompt"], row["answer"]) for row in rows]
needed = sum(prompt + answer - 1 for prompt, answer in lengths)
print(f"{needed:,} tokens have to be computed once; pools of 80, 160, 320 and 640 blocks:")


def again(rule, num_blocks, **limits):
    FirstChunk.chunk = 512
    stats = finish(simulated(num_blocks, 16, lengths, rules[rule], max_num_batched_tokens=512, **limits))
    return stats.num_steps, stats.num_preemptions, stats.recomputed_tokens


pools = [80, 160, 320, 640]
swept = {rule: [again(rule, num_blocks) for num_blocks in pools] for rule in rules}
for rule, results in swept.items():
    print(f"{rule:17}  steps        ", "".join(f"{steps:9,}" for steps, _, _ in results))
    print(f"{'':17}  tokens again ", "".join(f"{tokens:9,}" for _, _, tokens in results))

# %%
sketch.lines(pools, {rule: [100 * result[2] / needed for result in results] for rule, results in swept.items()},
             x="blocks in the pool", y="tokens computed again, %")

# %% [markdown]
# The number of steps hardly differs: the same blocks serve the same answers. What differs is the work in them. At 80 blocks *first chunk* computes each token more than five times on average.
#
# Is that much? For Qwen3-0.6B on a T4, at section 8's 15.3 µs a token, 130,865 tokens are 2.0 s; the 6,286 steps read 1.19 GB of weights each at 320 GB/s, together 23 s. With prompts this short the
# harm is in the waiting, not in the throughput: each answer that runs waits for those chunks. With prompts of thousands of tokens, the chunks are most of the work.
#
# **Cures**, in the order in which to try them. *A larger pool* (`gpu_memory_utilization`, smaller weights, a second GPU): it shortens everything. *Fewer at once* (`max_num_seqs`): nobody is let
# in who would be thrown out. With 160 blocks:

# %%
for at_once in (2, 4, 8, 16, 64):
    steps, preemptions, tokens = again("all and a reserve", 160, max_num_seqs=at_once)
    print(f"max_num_seqs {at_once:2}: {steps:5,} steps, {preemptions:2} preemptions, {tokens:6,} tokens again")

# %% [markdown]
# Not too few: with 2 nothing is preempted, and it takes three times as many steps, since much of the pool stays empty. A few preemptions are what full use of the memory costs. Reserving less
# than everything is a bet, and a bet that is never lost was too small.
#
# ## 10. Why nobody waits for ever
#
# **What can never fit is refused at the door.** If a sequence could need more blocks than there are, it would preempt everybody, and then itself, for ever. So `max_model_len` never exceeds the
# pool, a prompt leaves room for an answer, and a queue may have a limit:

# %%
from minivllm.config import PoolTooSmallError
from minivllm.engine.engine import QueueFullError

small = simulated(16, 4, [(5, 5)] * 2, max_num_queued_requests=2)
too_long = EngineConfig(num_kv_blocks=16, block_size=4, max_model_len=100)
attempts = [lambda: too_long.complete(num_kv_blocks=16, max_positions=2048),  # as LLM(...) does
            lambda: small.add([1] * 64, SamplingParams()),
            lambda: small.add([1] * 5, SamplingParams())]
for attempt in attempts:
    try:
        attempt()
    except (PoolTooSmallError, QueueFullError, ValueError) as error:
        print(f"{type(error).__name__}: {error}\n")

# %% [markdown]
# **What is admitted ends.** Running, then waiting, is always the order of arrival: victims leave running at its end and enter the queue at its head. So the oldest request of all
# stands first in `running`, is never a victim while another runs, and fits when it runs alone. It moves on in every step, so it ends; and then another is the oldest. Nobody starves.
#
# The queue's order is needed for this. An overloaded engine (a new request every three steps), with the rule, and with victims sent to the *tail* of the queue:

# %%
from minivllm.engine.scheduler import Scheduler


class ToTheTail(Scheduler):
    def _requeue(self, preempted):
        super()._requeue([])
        self.waiting.extend(preempted[::-1])


def overloaded(kind, steps=600):
    engine, done, in_order = simulated(24, 4, []), [], True
    engine.scheduler = kind(engine.blocks, 64, 512, engine.scheduler.stop_check)
    for step in range(steps):
        if step % 3 == 0:
            engine.add([1] * 8, SamplingParams(max_tokens=24))
        done += [seq.seq_id for seq in engine.step()]
        order = [seq.seq_id for seq in (*engine.scheduler.running, *engine.scheduler.waiting)]
        in_order = in_order and order == sorted(order)
    return done, min(engine.scheduler.sequences), in_order


for kind in (Scheduler, ToTheTail):
    done, oldest, in_order = overloaded(kind)
    print(f"{kind.__name__:10} {len(done)} ended, the last to arrive of them was number {max(done)};",
          f"the first that has not: {oldest}; always in order: {in_order}")


# %% [markdown]
# With the rule, requests end as they came. Without it, some that came later are served first, and number 27 is still there at the end: each time it comes back it is the newest again, and
# the first to go.
#
# ## 11. Exercises

# %% [markdown] tags=["exercise-1-statement"]
# ### Exercise 1: the first preemption (easy, 10 minutes)
#
# Write `first_preemption(prompt_lens, num_blocks, block_size)`. The requests all start in step 0, and their answers never end. How many tokens of its answer does each request have when
# somebody is preempted for the first time? The check asks the real engine.
#
# Example: prompts of 5 and 6 tokens, 5 blocks of 4: 4, as drawn in section 2. With 3 tokens each, 8 and 9 tokens fit into 2 + 3 blocks; with 4, they need 3 + 3.
#
# <details><summary>Hint: far too large</summary>Requests do not share blocks. Round up for each of them, then add.</details>
# <details><summary>Hint: off by one</summary>In step t each request has t tokens of answer, and needs room for prompt + t. Start with t = 0, and return the first t that does not fit.</details>

# %% tags=["exercise-1-stub"]
def first_preemption(prompt_lens: list[int], num_blocks: int, block_size: int) -> int:
    raise NotImplementedError


# %% tags=["exercise-1-check"]
from minivllm.teach import check

check.first_preemption(first_preemption)


# %% tags=["exercise-1-solution"]
def first_preemption_solution(prompt_lens, num_blocks, block_size):
    t = 0
    while sum(-(-(prompt + t) // block_size) for prompt in prompt_lens) <= num_blocks:
        t += 1
    return t


check.first_preemption(first_preemption_solution)


# %% [markdown] tags=["exercise-2-statement"]
# ### Exercise 2: who may start (easy, 10 minutes)
#
# Write the rule of section 9, `may_admit(num_free_blocks, candidate_tokens, num_running, block_size)`: True if a waiting request may start. `candidate_tokens` counts all that it has, the
# tokens written before a preemption too; nothing of it is in the prefix cache. All of them must fit, and a block must be left for each request that runs.
#
# Example: 3 free blocks of 4 and a candidate of 8 tokens: with one request running, True (2 + 1); with two, False.
#
# <details><summary>Hint: tokens or blocks?</summary>Count everything in blocks. Only the candidate's tokens need to be turned into blocks, rounded up.</details>
# <details><summary>Hint: exactly enough</summary>Exactly enough is enough: compare with <=.</details>

# %% tags=["exercise-2-stub"]
def may_admit(num_free_blocks: int, candidate_tokens: int, num_running: int, block_size: int) -> bool:
    raise NotImplementedError


# %% tags=["exercise-2-check"]
check.may_admit(may_admit)


# %% tags=["exercise-2-solution"]
def may_admit_solution(num_free_blocks, candidate_tokens, num_running, block_size):
    return -(-candidate_tokens // block_size) + num_running <= num_free_blocks


check.may_admit(may_admit_solution)

# %% [markdown]
# **Optional: your rule in the real engine.** The four requests of section 1, with 10 blocks. Try other rules too: the tokens stay the same, the work does not.

# %% tags=["exercise-2-plug"]
from minivllm.teach import plug_admission

plug_admission.may_admit(may_admit, llm, prompts, num_blocks=10, max_tokens=16)

# %% [markdown] tags=["exercise-3-statement"]
# ### Exercise 3: break it: blocks that come back twice (medium, 10 minutes)
#
# A block manager gives back a sequence's blocks like this:
#
# ```
# def free(self, seq):
#     for block_id in reversed(seq.block_table):
#         block = self.blocks[block_id]
#         block.ref_count -= 1
#         if block.ref_count == 0:
#             self.free_blocks[block_id] = None
# ```
#
# Compare with `give_back` in section 4: something is left out. It passes every test in which requests start, run and end. Give requests and a pool for which the engine gives other tokens than the right one,
# or crashes. `requests` is a list of `(prompt, max_tokens)`, all there at the start; a prompt is a list of token ids below 1000. Blocks hold 4 tokens, two requests run at a time. For example
# `requests = [([1, 2, 3], 5), ([4, 5, 6], 5)]` and `num_kv_blocks = 8`.
#
# <details><summary>Hint: what is left out?</summary>After `free`, what does `seq.block_table` hold? For whom does that matter?</details>
# <details><summary>Hint: how many blocks</summary>Two requests must fit when they start, with a block to spare, and not when they have grown. Exercise 1 tells when.</details>

# %% tags=["exercise-3-stub"]
requests, num_kv_blocks = None, None

# %% tags=["exercise-3-check"]
check.break_it("freed_block_in_table", requests=requests, num_kv_blocks=num_kv_blocks)

# %% tags=["exercise-3-solution"]
two = [([1, 2, 3, 4, 5], 12), ([6, 7, 8, 9, 10], 12)]
check.break_it("freed_block_in_table", requests=two, num_kv_blocks=5)

# %% [markdown]
# ## 12. Recap
#
# - When blocks run out, the newest running request gives back all of its blocks, goes to the head of the queue, and is computed again. It loses K/V, never tokens.
# - Who is preempted, when, and what it costs follow from lengths, block size and pool alone.
# - A request starts only if all its tokens fit, with a block left for each that runs; else it thrashes.
# - Order of arrival, a pool that holds the longest sequence, and refusal at the door: nobody waits for ever.
#
# The ladder gets no rung here: preemption makes nothing faster. It lets the pool be used to its last block, without a request lost.

# %%
llm.close()

# %% [markdown]
# **How vLLM does it.** `vllm/v1/core/sched/scheduler.py` preempts from the end of `running` (with priorities, the least important), sets `num_computed_tokens` to 0 and puts the request at the head
# of the queue; in a step that preempts, nobody starts. `scheduler_reserve_full_isl` is its "all tokens" (on by default); `watermark` can keep a share of the pool free. Swapping is gone from the
# engine; connectors in `vllm/distributed/kv_transfer/` can keep blocks in the host's memory, as a second prefix cache. Watch `vllm:num_preemptions`.
#
# **Next:** 08 looks at how a token is chosen from the logits, and at four answers that share one prompt's blocks.
