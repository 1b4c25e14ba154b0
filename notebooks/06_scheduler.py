# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["header"]
# # 06 Scheduler
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/06_scheduler.ipynb)
#
# Static batches, waiting until full, continuous batching and chunked prefill.
#
# Previous: [05 Prefix cache](05_prefix_cache.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/05_prefix_cache.ipynb)) · Next: [07 Preemption and admission](07_preemption.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/07_preemption.ipynb)) · 85 minutes with the exercises · runs on a CPU, on Colab's free T4 and on larger GPUs

# %% [markdown]
# **You will build** a scheduler: static batches first, then one that decides in every step who computes how many tokens, and that agrees with the package's to the token.
#
# **You will learn** why a batch that waits for its slowest member, or until it is full, leaves much of a GPU idle; what a token budget is; why a long prompt makes everybody else
# stutter, and how cutting it into chunks cures that; and how a well-meant policy lets one request wait for ever.
#
# **You need** prefill and decode: a prompt's tokens are computed together, then one token in each step (notebook 02).

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
import json
import random
import time
from collections import deque
from dataclasses import dataclass, replace
from importlib import resources

import torch

from minivllm import LLM, SamplingParams
from minivllm.engine.engine import Engine
from minivllm.teach import lanes

# float32, so that tokens can be compared; on a GPU a larger pool, for the longer prompt of section 6
settings = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 640 if torch.cuda.is_available() else 64}
llm = LLM(notebook.model(), dtype="float32", max_model_len=16 * settings["num_kv_blocks"] // 2, **settings)

# %% [markdown]
# ## 1. The problem: a batch lasts as long as its longest answer
#
# A decode step reads all weights, for one sequence or for thirty-two. So sequences share steps: a **batch**, with a **row** for each sequence. The obvious way is to
# take 8 requests, run them until all have ended, and take the next 8: a **static batch**. Here it is with the 64 answers of `lengths.json` (notebook 02), of at most 512 tokens. (Prompts come in section 4.)

# %%
measured = json.loads(resources.files("minivllm.teach").joinpath("lengths.json").read_text())
answers = [row["answer"] for row in measured]


def static(answers, rows):  # -> a bar (row, first step, end) for each request
    bars, begin = [], 0
    for i in range(0, len(answers), rows):
        batch = answers[i:i + rows]
        bars += [(row, begin, begin + n) for row, n in enumerate(batch)]
        begin += max(batch)  # nobody starts before the longest has ended
    return bars


def report(name, bars, rows):
    steps, used = max(end for _, _, end in bars), sum(end - begin for _, begin, end in bars)
    print(f"{name:11} {steps:5,} steps x {rows} rows = {steps * rows:6,} cells, {used:,} used:",
          f"{1 - used / (steps * rows):.0%} idle")


print("the first batch:", answers[:8])
report("static", static(answers, 8), 8)


# %% [markdown]
# The first request needed 8 steps, and its row stood empty for 504. The GPU computed rows that nobody wanted.
#
# ## 2. Worse: waiting until the batch is full
#
# On a server requests come one by one, and somebody must decide when a batch is to start. A batcher of a kind that articles show takes eight as soon as eight are there, which makes the best of each step. Eleven people ask, one in each step:

# %%
class Batcher:
    def __init__(self, size):
        self.size, self.queue = size, deque()

    def next_batch(self):
        if len(self.queue) < self.size:
            return []                                          # not worth a step yet
        return [self.queue.popleft() for _ in range(self.size)]


batcher, started, busy_until = Batcher(8), {}, 0
for step in range(100_000):                                    # a fake clock: one turn, one step
    if step < 11:
        batcher.queue.append(step)                             # request number `step` comes
    if step >= busy_until:
        for request in batcher.next_batch():
            started[request], busy_until = step, step + 50     # answers of 50 tokens
print("started in step:", started)
print("still waiting after 100,000 steps:", list(batcher.queue))


# %% [markdown]
# The first waited for the eighth. The last three wait for ever. The usual patch is a timeout ("eight, or 50 ms"), which a lone user always pays.
#
# ## 3. The idea, drawn: decide in every step
#
# Nothing forces a batch to stay together. A sequence's state is its KV cache, which stays where it is; the batch is only a list of who computes now, and the next step can have another. With three rows, answers
# of 2, 6, 3, 3 and 2 tokens, and `.` for an idle cell:
#
# ```
#          static batches                decide in every step
# step     0 1 2 3 4 5 6 7 8             0 1 2 3 4 5
# row 0    A A . . . . D D D             A A D D D .
# row 1    B B B B B B E E .             B B B B B B
# row 2    C C C . . . . . .             C C C E E .
# ```
#
# A row that becomes free is taken in the next step by whoever waits. This is **continuous batching**, or iteration-level scheduling, in the paper that proposed it (Orca: Yu and others, OSDI 2022).

# %%
def continuous(answers, rows):
    free_from, bars = [0] * rows, []         # the step from which each row is free
    for n in answers:
        row = free_from.index(min(free_from))
        bars.append((row, free_from[row], free_from[row] + n))
        free_from[row] += n
    return bars


report("static", static(answers, 8), 8)
report("continuous", continuous(answers, 8), 8)
lanes.figure({"static": static(answers, 8), "continuous": continuous(answers, 8)}, rows=8)

# %% [markdown]
# Bars are requests, hatched is idle. What stays idle is at the end, when nobody waits any more.
#
# ## 4. Build it
#
# ### What a step costs
#
# Prompts are computed too, and a prompt of 300 tokens is 300 times the work of a decode. So the thing to share out in a step is not rows but **tokens**. What does a step of n tokens cost? The weights are read once,
# whatever n is; arithmetic grows with n. For a T4 and Qwen3-0.6B, predicted from datasheet figures by `minivllm.simulate` (attention left out):

# %%
from minivllm.simulate import StepWork, step_seconds

for n in (1, 16, 64, 128, 256, 1024, 4096):
    seconds = step_seconds("T4", StepWork(tokens=n, kv_tokens=0, attended=0, samples=1, rows=1))
    print(f"{n:5} tokens: {1e3 * seconds:6.1f} ms, {1e6 * seconds / n:7.1f} us a token")


# %% [markdown]
# Up to 128 tokens a step costs the same. At 256 it costs half as much again, and from there on it grows in proportion. So a step should carry a hundred tokens or two, and not many more if
# somebody waits for its end. The limit is called `max_num_batched_tokens`: the step's **token budget**.
#
# ### A scheduler
#
# A request has tokens, some of which are computed. What it lacks is computed next: a whole prompt at first, one token in decode. The scheduler need not know which of the two. In each step:
#
# 1. Everybody who runs gets one token: nobody stalls. (The budget is never smaller than the number of rows.)
# 2. What is left of the budget goes to those who run and lack more, the oldest first.
# 3. What is still left admits those who wait, in their order, while a row is free. The last prompt is cut where the budget ends, and goes on in the next step: a **chunk**.

# %%
@dataclass(eq=False)
class Request:
    name: str
    prompt: int              # tokens
    answer: int              # tokens to write
    written: int = 0
    computed: int = 0        # of its tokens, those whose K/V are in the cache

    @property
    def lacks(self):
        return self.prompt + self.written - self.computed


class OurScheduler:
    def __init__(self, max_num_seqs, max_num_batched_tokens):
        self.rows, self.budget = max_num_seqs, max_num_batched_tokens
        self.running, self.waiting = [], deque()

    def schedule(self):                                    # -> [(request, tokens in this step)]
        plan, left = [], self.budget - len(self.running)   # one token each is put aside
        for request in self.running:
            extra = min(request.lacks - 1, left)
            plan.append((request, 1 + extra))
            left -= extra
        while left and self.waiting and len(self.running) < self.rows:
            request = self.waiting.popleft()
            self.running.append(request)
            plan.append((request, min(request.lacks, left)))
            left -= plan[-1][1]
        return plan

    def update(self, plan):
        for request, tokens in plan:
            request.computed += tokens
            request.written += request.lacks == 0          # all is computed: there is a next token
        self.running = [request for request in self.running if request.written < request.answer]


# %% [markdown]
# Four requests, three rows, a budget of 8. B's prompt of 16 tokens arrives while A decodes:

# %%
def run_ours(arrivals, rows, budget):  # arrivals: (step, prompt tokens, answer tokens), in order
    scheduler, coming, plans, step = OurScheduler(rows, budget), deque(enumerate(arrivals)), [], 0
    while coming or scheduler.running or scheduler.waiting:
        while coming and coming[0][1][0] <= step:
            number, (_, prompt, answer) = coming.popleft()
            scheduler.waiting.append(Request("ABCD"[number % 4], prompt, answer))
        plan, step = scheduler.schedule(), step + 1
        scheduler.update(plan)
        plans += [plan] if plan else []
    return plans


arrivals = [(0, 3, 7), (1, 16, 3), (2, 4, 4), (3, 2, 2)]
for step, plan in enumerate(run_ours(arrivals, rows=3, budget=8)):
    total = sum(tokens for _, tokens in plan)
    print(f"step {step}: {total} tokens:", ", ".join(f"{request.name} {tokens}" for request, tokens in plan))

# %% [markdown]
# A got its token in every step. B's prompt went in as 7, 7 and 2 tokens, and the last chunk gave B's first token. C had to wait for the budget, D for a row.
#
# ## 5. The same answer? The package's engine
#
# The package's loop is the one above: `Scheduler.schedule()` gives a plan, a runner computes it, `Scheduler.update()` takes the result in. We put a recorder in front of the runner. It works with the model's, and with
# `NoModel`, which answers token 7 to everything.

# %%
from minivllm.bench.scheduler import NoModel


class Recorder:
    """Passes each plan on to a runner; keeps it, with the time at which its tokens were there."""

    def __init__(self, runner):
        self.runner, self.plans, self.times = runner, [], []

    def execute(self, plan):
        result = self.runner.execute(plan)
        self.plans.append(plan)
        self.times.append(time.perf_counter())
        return result


def fresh(runner, rows, budget, **others):  # a new engine over a runner, without a prefix cache
    limits = {"max_num_seqs": rows, "max_num_batched_tokens": budget, "enable_prefix_caching": False}
    config = replace(llm.config, **limits, **others)
    return Engine(config, Recorder(runner), llm.engine.vocab_size, decode=llm.tokenizer.decode)


def serve(engine, arrivals):  # arrivals: (step, prompt's ids, answer tokens), in order -> sequences
    coming, sequences, step = deque(arrivals), [], 0
    while coming or engine.has_unfinished_requests():
        while coming and coming[0][0] <= step:
            _, prompt, answer = coming.popleft()
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            sequences.append(engine.add(prompt, params))
        engine.step()
        step += 1
    return sequences


# %% [markdown]
# What passes between the two halves is a `StepPlan`, plain data. Step 1 of the example, with B's first chunk:

# %%
engine = fresh(NoModel(), rows=3, budget=8)
serve(engine, [(step, [1] * prompt, answer) for step, prompt, answer in arrivals])
for row in engine.runner.plans[1].rows:
    print(f"sequence {row.seq_id}: positions {row.start} to {row.context_len - 1},",
          f"block table {row.block_table}, samples {row.samples}")

# %% [markdown]
# A computes position 3, the token that step 0 gave it. B computes its first 7 positions, and nothing is sampled for it: in the middle of a prompt the next token is known. B has its block for 16 tokens
# already: only a prompt that fits whole is admitted.
#
# Is our scheduler the package's? Two hundred random workloads:

# %%
rng, same, steps, chunks = random.Random(0), 0, 0, 0
for _ in range(200):
    rows, count = rng.randint(1, 6), rng.randint(1, 12)
    budget, when = rng.randint(rows, 24), sorted(rng.randrange(20) for _ in range(count))
    arrivals = [(step, rng.randint(1, 40), rng.randint(1, 12)) for step in when]
    ours = [[tokens for _, tokens in plan] for plan in run_ours(arrivals, rows, budget)]
    engine = fresh(NoModel(), rows, budget)
    serve(engine, [(step, [1] * prompt, answer) for step, prompt, answer in arrivals])
    theirs = [[len(row.token_ids) for row in plan.rows] for plan in engine.runner.plans]
    same, steps = same + (ours == theirs), steps + len(theirs)
    chunks += sum(not row.samples for plan in engine.runner.plans for row in plan.rows)
print(f"{same} of 200 schedules are equal, in all {steps:,} steps; {chunks} rows were chunks")

# %% [markdown]
# `minivllm/engine/scheduler.py` from now on. What it adds to ours:
#
# - **Blocks.** Who is admitted needs blocks for its whole prompt, and one more for each that runs; when blocks run out, the newest is preempted (notebook 07). Found prefixes are not computed (notebook 05).
# - **Ends, errors, aborts.** A request can end in any step, for many reasons, and gives its blocks back at once.
# - **A policy.** Rules 1 to 3 are one small function that can be exchanged: `LLM(policy=...)`. It names sequences, with the most tokens that each may get, in the order in which they are served.

# %%
from minivllm.engine.policies import first_come_first_served
from minivllm.engine.sequence import SequenceStatus

print(inspect.getsource(first_come_first_served))


# %% [markdown]
# ## 6. Prompts first, or prompts and decodes together?
#
# Another policy was vLLM's first, and is nano-vLLM's: a step computes *either* prompts *or* decodes, prompts first and whole, so that a newcomer's first token comes as soon as it can.

# %%
def prefill_first(running, waiting, budget):
    prompts = [seq for seq in running if seq.num_uncomputed_tokens > 1]
    for seq in [*prompts, *waiting]:
        yield seq, budget
    # the scheduler admits while we yield, so `status` now tells whether it took one
    if not prompts and all(seq.status is SequenceStatus.WAITING for seq in waiting):  # none was admitted
        for seq in running:
            yield seq, 1


# %% [markdown]
# Three people read along while their answers are written (A, B, C). In step 3 somebody sends a prompt of 96 tokens (D), in step 4 another sends one of 48 (E). Predict: how many tokens does the
# engine compute, at most, between two tokens of A? We run the real model three times: prompts first; together, with a budget that cuts nothing; together, with a budget of 16.

# %%
sentence = "It was a bright morning, and the harbour was full of boats that had come home. "
words = llm.tokenizer.encode(sentence * 20)
readers = [(0, words[i:i + 10], 14) for i in range(3)]
ways = {"prefill first": {"policy": prefill_first, "budget": 512},
        "together": {"budget": 512}, "chunks": {"budget": 16}}


def run_ways(ways, arrivals):  # -> name: (engine, sequences)
    engines = {name: fresh(llm.runner, rows=8, **way) for name, way in ways.items()}
    return {name: (engine, serve(engine, arrivals)) for name, engine in engines.items()}


def tokens_of(engine, seq):  # the steps that gave `seq` a token
    return [step for step, plan in enumerate(engine.runner.plans)
            if any(row.seq_id == seq.seq_id and row.samples for row in plan.rows)]


runs = run_ways(ways, [*readers, (3, words[:96], 3), (4, words[40:88], 3)])
for name, (engine, sequences) in runs.items():
    steps, sizes = tokens_of(engine, sequences[0]), [plan.num_tokens for plan in engine.runner.plans]
    between = [sum(sizes[before + 1:now + 1]) for before, now in zip(steps, steps[1:])]
    print(f"{name:13} tokens computed between two of A's, at most {max(between):3};",
          "first tokens of D and E in steps", [tokens_of(engine, seq)[0] for seq in sequences[3:]])
answers_of = [[seq.generated_token_ids for seq in sequences] for _, sequences in runs.values()]
print("the same answers three times:", answers_of[0] == answers_of[1] == answers_of[2])


# %% [markdown]
# The batch of each step, hatched where it is prefill. Prompts first: two steps without a decode, so A, B and C stand still for both (96 + 48 + 5 = 149 tokens), and with more newcomers for longer. Together, every step
# has their decodes, but at the end of a long step. In chunks no step has more than 16 tokens.

# %%
def batches(engine):  # -> prefill and decode tokens of each step
    rows = [[(len(row.token_ids), row.samples and len(row.token_ids) == 1) for row in plan.rows]
            for plan in engine.runner.plans]
    return [[sum(n for n, decode in row if decode is kind) for row in rows] for kind in (False, True)]


lanes.batches({name: batches(engine) for name, (engine, _) in runs.items()})

# %% [markdown]
# Now with a clock. The wait for D's first token is the price of short gaps. (On a GPU 96 tokens are too few to be felt: there D has 4,096 and the budget of the chunks is 256.)

# %% tags=["nbval-ignore-output"]
from minivllm.teach import sketch, stall

if torch.cuda.is_available():
    long, budgets = (words * 14)[:4096], {"prefill first": 8192, "together": 8192, "chunks": 256}
    ways = {name: {**way, "budget": budgets[name]} for name, way in ways.items()}
    for _ in range(2):  # kernels are compiled in the first run
        runs = run_ways(ways, [*readers, (3, long, 3), (4, long[:2048], 3)])
curves = {}
for name, (engine, sequences) in runs.items():
    times = [1e3 * engine.runner.times[step] for step in tokens_of(engine, sequences[0])]
    curves[name] = [now - before for before, now in zip(times, times[1:])]
    d = sequences[3]
    print(f"{name:13} longest gap of A {max(curves[name]):5.0f} ms, first token of D after",
          f"{1e3 * (d.first_token_time - d.arrival_time):5.0f} ms")
print("\n".join(stall.saved_lines()))
sketch.lines(range(2, 15), curves, x="token of A's answer", y="milliseconds since the token before")

# %% [markdown]
# The gap is a **decode stall**, and the reader sees it: text that stops. Cutting prompts so that decodes can ride along in each step is **chunked prefill** (Sarathi: Agrawal and others, 2023; Sarathi-Serve,
# OSDI 2024). It costs D some waiting, and the prompt's K/V are read again for each chunk. The budget is a dial: longest gap against first token.
#
# On the H200 the dial ends early. Chunks of 2,048 tokens shorten the longest gap from 46 ms to 28, smaller ones no further: a step with a prompt in it is launched kernel by kernel, which takes that host over 20 ms. (Decodes alone
# are spared it: notebook 09.)
#
# ## 7. Watch it
#
# The real engine, 24 blocks, three rows, a budget of 16. Five requests come one after the other. Above, who computes how much in each step; below, the blocks that they take.

# %%
from minivllm.teach import BlockView, TimelineView

engine = fresh(llm.runner, rows=3, budget=16, num_kv_blocks=24, max_model_len=256)
timeline, pool = TimelineView(engine), BlockView(engine)
display(timeline, pool)
sequences = serve(engine, [(0, words[:10], 9), (1, words[20:64], 3), (2, words[5:25], 4),
                           (4, words[30:38], 2), (6, words[50:80], 2)])

# %%
timeline.figure()

# %% [markdown]
# In a cell, D is a decode. A gets its token in every step. B's prompt of 44 tokens goes in beside it, as 15, 15 and 14, and C gets what B leaves. D and E wait until a row is free.
#
# ## 8. Measure: many requests
#
# Thousands of users can be simulated: the real engine, scheduler and block manager, over a runner that only moves a clock on, by what each step would take on a T4 by its
# datasheet. Requests come at random, 2 or 6 a second on average, with the lengths of `lengths.json`; 32 rows. TTFT is the time to the first token, the longest gap that between two
# tokens of a request. Both are medians; "p95" is what 95 of 100 requests do not exceed.
#
# Predict for 2 a second. A static batch lasts as long as its longest answer, nearly always 512 steps of about 8 ms (5.4 for the weights, the rest for K/V): 4 s. Who comes in the middle waits for half of that, 2 s, before anything happens. Waiting until
# 32 are there takes 16 s, so half of that, 8 s. With continuous batching the wait is the rest of one step and one's own prefill: some 10 ms.

# %%
from minivllm.simulate import measured_lengths, poisson_requests, simulate
from minivllm.teach import traffic

print(traffic.HEAD)
for rate in (2, 6):
    requests = poisson_requests(200, rate, lengths=measured_lengths())
    for mode in ("wait_until_full", "static", "mixed"):
        result = simulate(requests, device="T4", mode=mode, max_num_seqs=32)
        print(traffic.line(f"{mode}, {rate} a second", result.summary()))

# %% [markdown]
# The predictions hold. At 6 a second the static batches fall behind: their idle cells are the capacity that is missing. `mixed`, the engine as it is, writes as fast as it is asked.
#
# Second, the dial. Prompts of up to 4,000 tokens, 4 a second. Predict from section 4: a step of 4,096 tokens takes 112 ms, one of 1,024 takes 29, one of 256 takes 8. These should be the longest gaps, with something
# on top for attention, which was left out. Is there a budget that is too small?

# %%
requests = poisson_requests(200, rate=4, prompt=(16, 4000), output=(16, 128))
budgets, found = (4096, 1024, 256, 64), []
print(traffic.HEAD)
for mode, budget in [("prefill_first", 4096), *(("mixed", budget) for budget in budgets)]:
    result = simulate(requests, device="T4", mode=mode, max_num_seqs=32, max_num_batched_tokens=budget)
    found.append(result.summary())
    print(traffic.line(f"{mode}, budget {budget}", found[-1]))
curves = {"first token, median": [1e3 * summary["ttft_median"] for summary in found[1:]],
          "longest gap of a request, median": [1e3 * summary["longest_gap_median"] for summary in found[1:]]}
sketch.lines(budgets, curves, x="max_num_batched_tokens", y="milliseconds", log=True)

# %% [markdown]
# From 1,024 to 256 the longest gap shrinks to less than a third, and the first token comes hardly later. At 64 everybody waits at the door: 64 tokens every 9 ms are 7,100 a second, and 4 prompts of 2,000 tokens on average
# are 8,000. The same with 10,000 requests, which shows how a waiting line grows, saved:

# %%
print("\n".join(traffic.saved_lines()))


# %% [markdown]
# At 6 a second 10,000 requests arrive within half an hour, and the median wait for a static server is nine and a half minutes. (All of this is predicted, with efficiencies measured on another GPU: good for comparing ways to
# schedule, not for promising milliseconds.)
#
# ## 9. Exercises

# %% [markdown] tags=["exercise-1-statement"]
# ### Exercise 1: the idle share (easy, 10 minutes)
#
# Write `idle_share(answers, batch_size)`: static batches take `answers` (tokens each) in their order, `batch_size` at a time; a batch lasts as long as its longest answer. Every batch computes `batch_size`
# rows, also the last one, which may have fewer requests. Return the share of all cells (rows times steps) in which nothing is written, from 0 to 1.
#
# Example: `[2, 8, 5, 5]`, batch size 2: two batches of 8 and 5 steps, 26 cells, 20 used: 6 / 26.
#
# <details><summary>Hint: the numbers are too small</summary>Is the last batch counted with all its rows?</details>
# <details><summary>Hint: close, but not right</summary>Add up all cells first, and divide once. A mean of shares gives a short batch the weight of a long one.</details>

# %% tags=["exercise-1-stub"]
def idle_share(answers: list[int], batch_size: int) -> float:
    raise NotImplementedError


# %% tags=["exercise-1-check"]
from minivllm.teach import check

check.idle_share(idle_share)


# %% tags=["exercise-1-solution"]
def idle_share_solution(answers, batch_size):
    batches = [answers[i:i + batch_size] for i in range(0, len(answers), batch_size)]
    return 1 - sum(answers) / (batch_size * sum(map(max, batches)))


check.idle_share(idle_share_solution)


# %% [markdown] tags=["exercise-2-statement"]
# ### Exercise 2: short prompts first, and nobody starves (medium, 25 minutes)
#
# Write `policy(running, waiting, budget)`. It returns, or yields, pairs `(sequence, most tokens)` in the order in which they are to be served; the scheduler stops when the budget is used up, and stops admitting at the
# first that does not fit. `running` is a tuple of sequences, the oldest first; `waiting` a queue of them, only to be looked at. Either may be empty.
#
# - Each sequence that runs gets a token in each step; what is left of the budget is used.
# - Of those who wait, shorter prompts go first; equal ones in the order in which they came.
# - Nobody starves: a long prompt gets its turn although shorter ones keep coming. A step of waiting should count for 1 to 10 tokens of prompt.
#
# Of a sequence you may use `num_prompt_tokens`, `num_uncomputed_tokens` (what it lacks), and `arrival_time`: in the check and the optional cell, the number of the step in which it came. You
# may use `first_come_first_served` (section 5) with another order of `waiting`.
#
# Example: prompts of 30, 10 and 20 tokens came in one step: they start as 10, 20, 30. Had the one of 30 come 25 steps before the others, it would go first.
#
# <details><summary>Hint: where is the age?</summary>A policy does not know the time. It need not: two that wait together age alike, so only the difference of their arrivals counts.</details>
# <details><summary>Hint: TypeError with '<'</summary>Sorting pairs of rank and sequence compares the sequences where ranks are equal. Use `sorted(waiting, key=...)`.</details>
# <details><summary>Hint: a stall</summary>Whoever is named first with the whole budget may take all of it.</details>

# %% tags=["exercise-2-stub"]
def policy(running, waiting, budget):
    raise NotImplementedError


# %% tags=["exercise-2-check"]
check.policy(policy)


# %% tags=["exercise-2-solution"]
def policy_solution(running, waiting, budget):
    queue = sorted(waiting, key=lambda seq: seq.num_prompt_tokens + 2 * seq.arrival_time)
    return first_come_first_served(running, queue, budget)


check.policy(policy_solution)

# %% [markdown]
# **Optional: your policy in the real engine**, two rows, a budget of 32. A policy decides *when* a token is computed, and never which: each answer must stay the same.

# %% tags=["exercise-2-plug"]
from minivllm.teach import plug_policy

prompts = [(0, 6), (1, 40), (1, 12), (2, 24), (2, 5)]  # (step in which it comes, tokens)
plug_policy.policy(policy, llm, [(step, words[7 * n:8 * n], 4) for step, n in prompts])

# %% [markdown] tags=["exercise-3-statement"]
# ### Exercise 3: break it: whoever fits (medium, 15 minutes)
#
# First come, first served stops admitting at the first request whose prompt does not fit into the free blocks, although a shorter one behind it would. Blocks lie idle meanwhile. Somebody changed that:
#
# ```
# fits = lambda seq: blocks.num_blocks_for(len(seq)) + len(running) <= blocks.num_free_blocks
# return first_come_first_served(running, [seq for seq in waiting if fits(seq)], budget)
# ```
#
# (`blocks` is the block manager.) In a benchmark the throughput rose. Give arrivals under which one request starves: at least 8 that come in later steps are started before it. (Fewer would be mere delay.)
#
# `arrivals` is a list of `(step, prompt tokens, answer tokens)` in the order of the steps, at most 64. There are 8 blocks of 4 tokens, four rows, and a budget of 64. Build it in code if you like:
# `[(0, 4, 8)] + [(i, 4, 8) for i in range(1, 5)]`.
#
# <details><summary>Hint: who is the victim?</summary>Somebody whose prompt needs most of the pool, and who comes when others run.</details>
# <details><summary>Hint: the others end, and it starts</summary>Then there was a moment when enough blocks were free. The next short one must come before that.</details>

# %% tags=["exercise-3-stub"]
arrivals = None

# %% tags=["exercise-3-check"]
check.break_it("whoever_fits", arrivals=arrivals)

# %% tags=["exercise-3-solution"]
stream = [(0, 4, 8), (0, 4, 8), (1, 24, 4)] + [(2 + 3 * i, 4, 8) for i in range(12)]
check.break_it("whoever_fits", arrivals=stream)

# %% [markdown]
# ## 10. Recap
#
# - A batch need not stay together. Who computes is decided in every step, so a free row is taken in the next one.
# - A step shares out tokens, not rows. Prefill and decode are the same thing: computing what a sequence lacks.
# - Everybody who runs gets a token in each step, and prompts are cut to what is left of the budget. The budget trades the longest gap against the first token.
# - A policy that reorders must let what waits grow older, and must not pass over what does not fit.
#
# A new rung: eight sequences a step, so each reading of the weights serves eight tokens. It is the first that reads fewer bytes for a token.

# %% tags=["nbval-ignore-output"]
from minivllm.teach import ladder

engine = fresh(llm.runner, rows=8, budget=512)
sequences = serve(engine, [(0, words[i:i + 16], 9) for i in range(8)])
times, bytes_per_token = engine.runner.times, llm.runner.spec.bytes_per_token
read = llm.runner.weight_bytes + sum(len(seq) for seq in sequences) * bytes_per_token
ladder.show("06", tokens_per_second=8 * 8 / (times[-1] - times[0]), bytes_per_token=read / 8)

# %%
llm.close()

# %% [markdown]
# **How vLLM does it.** `vllm/v1/core/sched/scheduler.py`: `schedule()` serves the running requests first, then admits from the queue (`request_queue.py` has first come, first served and priority) while tokens are left in the budget, and `update_from_output()`
# takes the results in. Its first version (V0) computed prompts first; V1 has no phases, and chunked prefill is on by default. Its budget is `max_num_batched_tokens`, as here; `long_prefill_token_threshold` limits the chunk of a
# single prompt as well. It ages nothing under its priority policy, so a stream of urgent requests can starve the others.
#
# **Next:** 07 asks what happens when the blocks run out in the middle.
