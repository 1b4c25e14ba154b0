# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["header"]
# # 08 Sampling
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/08_sampling.ipynb)
#
# From logits to tokens, and four answers that share one prompt's blocks.
#
# Previous: [07 Preemption and admission](07_preemption.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/07_preemption.ipynb)) · Next: [09 CUDA graphs and torch.compile](09_cuda_graphs.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/09_cuda_graphs.ipynb)) · 60 minutes with the exercises · runs on a CPU, on Colab's free T4 and on larger GPUs

# %% [markdown]
# **You will build** a sampler: temperature, top_k, top_p, and a way to draw a token that needs no probabilities. Then you use the package's, which has the rest of what people ask for.
#
# **You will learn** what each option keeps of a real distribution; why one pass over the logits is enough; how a seed gives the same answer in whatever batch; what penalties, stop
# strings and log probabilities are good for; and why four answers to one prompt need far less memory than four requests.
#
# **You need** notebook 00. For section 6, what a preemption is, and for section 7, blocks that are shared ([05 Prefix cache](05_prefix_cache.ipynb)).

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
import math
from dataclasses import replace

import torch

from minivllm import LLM, SamplingParams
from minivllm.engine.engine import Engine
from minivllm.teach import sampling_figures, sketch

# The embedded model on every machine, so that the words and numbers below are the ones you see. No prefix
# cache, since other engines will use the same pool: what it remembers would be overwritten.
settings = {"enforce_eager": True, "block_size": 4, "num_kv_blocks": 160, "max_model_len": 256}
llm = LLM("smollm2", dtype="float32", enable_prefix_caching=False, **settings)
encode, decode, V = llm.tokenizer.encode, llm.tokenizer.decode, llm.model_config.vocab_size


def ask(prompts, *options, **common):  # options: a dict for each prompt, beside what is common to all
    params = [SamplingParams(**common, **own) for own in options or [{}] * len(prompts)]
    return llm.generate(prompts, params, use_tqdm=False)


# %% [markdown]
# ## 1. The problem, measured
#
# Since notebook 01 every answer took the most likely token (*greedy*), so that answers could be compared. Here is what it does to a text:

# %%
market = "I went to the market and bought"
[greedy] = ask([market], temperature=0, max_tokens=32, logprobs=0)  # logprobs are for section 6
threes = list(zip(*(greedy["token_ids"][i:] for i in range(3))))
print(greedy["text"])
print(f"{len(threes)} runs of three tokens, {len(set(threes))} of them different")

# %% [markdown]
# It goes in circles: what was said once makes itself more likely the next time. And all who ask the same get the same answer. Both change when the token is *drawn*.
#
# ## 2. The idea, drawn
#
# A model gives a number for each token of its vocabulary, a *logit*; softmax makes probabilities of them. We ask for the log probability of every token that may follow one
# sentence. (They are the logits less one constant, which softmax does not notice.) Then we let the package's sampler apply one option at a time.

# %%
from minivllm.engine.step import PlanRow
from minivllm.worker.filters import processed
from minivllm.worker.sampler import SamplingBatch, sample


def run(engine, prompts, params):
    sequences = [engine.add(prompt, one) for prompt, one in zip(prompts, params)]
    while engine.has_unfinished_requests():
        engine.step()
    return sequences


door = encode("She opened the door and saw a")
[seq] = run(llm.engine, [door], [SamplingParams(temperature=0, max_tokens=1, logprobs=V)])
ids, values, _ = seq.options.logprobs[0]   # the chosen token, then all, the most likely first
best, logits = ids[1:], torch.empty(V)
logits[best] = torch.tensor(values[1:])
names = [decode([token]) for token in best[:12]]
print(f"{V:,} tokens; the 12 best have {logits.exp()[best[:12]].sum():.0%} of the probability:", names)


# %%
def batch_of(rows):  # rows: (SamplingParams, seed, position) each
    plan = [PlanRow(i, at - 1, [0], [], 0, True, params, seed) for i, (params, seed, at) in enumerate(rows)]
    return SamplingBatch.of(plan, torch.device("cpu"))


def drawn_from(**options):  # -> [V]: the probabilities that a token is drawn from
    return processed(logits[None], batch_of([(SamplingParams(**options), 0, 1)])).softmax(-1)[0]


panels = {"greedy (temperature 0)": (logits == logits.max()).float(), "temperature 1": drawn_from(),
          "temperature 0.5": drawn_from(temperature=0.5), "top_k = 4": drawn_from(top_k=4),
          "top_p = 0.45": drawn_from(top_p=0.45), "min_p = 0.12": drawn_from(min_p=0.12)}
for name, probabilities in panels.items():
    print(f"{name:23} {(probabilities > 0).sum():6,} tokens can come, the best has {probabilities.max():4.0%}")
sampling_figures.kept(names, {name: p[best[:12]].tolist() for name, p in panels.items()})

# %% [markdown]
# - **temperature** divides the logits. Below 1 the large get larger; towards 0 it becomes greedy; above 1 all come closer. It drops nobody.
# - **top_k** keeps the k best, whether they are nearly alike or one of them has everything.
# - **top_p** keeps the best until their probabilities reach p: few tokens where the model is sure, many where it is not.
# - **min_p** keeps what is at least min_p times as likely as the best.
#
# What is left is scaled up to 100% again. Why drop anything? At temperature 1 the 49,140 tokens outside of the picture are hopeless one by one, and together they have
# nearly half of the probability. One odd token is enough to derail a text.

# %%
temperatures = [{"temperature": 0.5}, {"temperature": 1}, {"temperature": 2}]
for options, out in zip(temperatures, ask([door] * 3, *temperatures, seed=1, max_tokens=8)):
    print(options, repr(out["text"]))

# %% [markdown]
# ## 3. The naive version
#
# Take the five best tokens alone. Softmax, a running sum, one random number: drawn is the token in whose piece of the line from 0 to 1 the number falls.

# %%
five = logits[best[:5]]


def softmax(x, temperature=1.0):
    weights = ((x - x.max()) / temperature).exp()  # less the largest: exp never overflows
    return weights / weights.sum()


p = softmax(five)
ends = p.cumsum(0)
rounded = lambda x: [round(value, 3) for value in x.tolist()]
print("tokens     ", names[:5])
print("p          ", rounded(p), "at temperature 0.5", rounded(softmax(five, 0.5)))
print("running sum", rounded(ends))
for u in (0.2, 0.5, 0.95):
    print(f"the number {u} falls to", repr(names[torch.searchsorted(ends, u, right=True)]))

# %% [markdown]
# top_p has one detail that many get wrong: **the token that crosses the limit is kept.** Without it the sum would not reach the limit, and where the best token alone is above it,
# nothing would be left. So the question for each token is what those *before* it add up to. With top_p = 0.7:

# %%
before = ends - p
for name, own, sum_before, sum_with in zip(names, p, before, ends):
    print(f"{name:11} p {own:.3f}, before it {sum_before:.3f}, with it {sum_with:.3f}:",
          f"kept {bool(sum_before < 0.7)!s:5} | by the wrong rule {bool(sum_with <= 0.7)}")

# %% [markdown]
# ## 4. Build it: a race
#
# Now without sums. Give each token an alarm clock that rings after a random time: exponentially distributed, at the rate p. The first one to ring wins. Token i wins with
# probability p_i: with rates 3 and 1, the first clock is first three times out of four. Such a time is E / p with E an exponential random number of rate 1, and the smallest E / p is the largest p / E.
#
# Take logarithms: log p - log E. Now log p is a logit (divided by the temperature) less a constant that all tokens share, and who is the largest does not depend on it. So no softmax:
#
# ```
# token = argmax(logits / temperature + noise),   noise = -log(E),   E = -log(1 - u),   u uniform between 0 and 1
# ```
#
# That noise has the *Gumbel* distribution. 20,000 draws each way; chi-square adds up how far the counts are from the expected ones:

# %%
from minivllm.kernels.philox import uniform

draws = 20_000
u = uniform(torch.full((draws,), 4), torch.arange(draws), size=6)  # [draws, 6]; section 5 says what this is
clock = -torch.log1p(-u[:, :5])                                    # E
ways = {"running sum": torch.searchsorted(ends, u[:, 5].contiguous(), right=True).clamp(max=4),
        "race: p / E": (p / clock).argmax(-1),
        "logits + Gumbel noise": (five - clock.log()).argmax(-1)}
shares = {name: torch.bincount(tokens, minlength=5) / draws for name, tokens in ways.items()}
for name, share in shares.items():
    chi_square = (draws * (share - p) ** 2 / p).sum()
    print(f"{name:21} {rounded(share)}, chi-square {chi_square:.1f}")
print("exact                ", rounded(p), "| chance alone stays below 9.5 in 95 of 100 trials")
sampling_figures.counts(names[:5], p.tolist(), {name: share.tolist() for name, share in shares.items()})

# %% [markdown]
# All three draw from the same distribution; race and Gumbel are even the same draws, since the logarithm changes no order. What is saved? Count how often [B, V] numbers pass through memory, for 256 sequences, Qwen3's vocabulary and an H200, whose memory moves 4.8 TB/s:

# %%
one_pass = 256 * 151_936 * 4  # bytes, float32
passes = {"running sum": 5,   # logits for the maximum, for the sum; probabilities out, in again; sums out
          "Gumbel": 1}        # logits; the noise is made where it is needed, the largest is kept
for name, count in passes.items():
    print(f"{name:12} {count} passes of {one_pass / 1e6:.0f} MB = {count * one_pass / 1e6:4.0f} MB;",
          f"at 4.8 TB/s {1e6 * count * one_pass / 4.8e12:4.0f} us")


# %% [markdown]
# There is a second gain. `torch.multinomial` checks that its input holds probabilities, and the host waits for the answer. The race has nothing to check, so the host can go on.
#
# ## 5. Noise that knows no batch
#
# A request with a seed should get the same answer every time. The usual generator is a *sequence*: each draw moves it on, so what you get depends on who drew before you.

# %%
def by_generator(company, count=8):  # our request, behind `company` others; all draw from one generator
    generator = torch.Generator().manual_seed(7)
    rows = [torch.multinomial(p.repeat(company + 1, 1), 1, generator=generator) for _ in range(count)]
    return [row[-1].item() for row in rows]


print("alone, twice:                 ", by_generator(0) == by_generator(0))
print("alone, and behind one other:  ", by_generator(0) == by_generator(1))

# %% [markdown]
# A generator for each request would help, but then every row is a draw of its own, one after the other. Better: random numbers that are a *function*. Philox scrambles a counter with a key, ten
# times over; the same counter and key give the same words, in any order, on any device. The key is the request's seed (a request without one gets a random one from the engine); the counter holds the number of
# a group of four tokens, which share a call's four words, then the position, and the answer's number among its siblings (section 7):

# %%
from minivllm.kernels.philox import philox_4x32


def philox(counter, key):  # four 32-bit words and two -> four random words
    (a, b, c, d), (k, l) = counter, key
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32) ^ b ^ k, y & 0xFFFFFFFF, (x >> 32) ^ d ^ l, x & 0xFFFFFFFF
        k, l = (k + 0x9E3779B9) & 0xFFFFFFFF, (l + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


counter, key = (25, 7, 0, 0), (42, 0)  # tokens 100 to 103 at position 7, answer 0; seed 42
ours = philox(counter, key)
words = philox_4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
print(ours, "the package's:", ours == [word.item() for word in words])
print("position 8:", philox((25, 8, 0, 0), key), "| seed 43:", philox(counter, (43, 0)))


# %% [markdown]
# ### The same answer?
#
# Our sampler in three lines, against the package's on the full vocabulary: 60 draws, each by itself, then all of them in one batch, upside down.

# %%
def draw(logits, temperature, seed, position):
    u = uniform(torch.tensor([seed]), torch.tensor([position]), size=V)[0]
    return (logits / temperature - (-torch.log1p(-u)).log()).argmax().item()


wanted = [(SamplingParams(temperature=0.8), 1000 + i % 10, i) for i in range(1, 61)]
ours = [draw(logits, 0.8, seed, position) for _, seed, position in wanted]
alone = [sample(logits[None], batch_of([row])).item() for row in wanted]
together = sample(logits.expand(60, -1), batch_of(wanted[::-1])).flip(0).tolist()
print(f"{len(set(ours))} different tokens; package alone: {ours == alone}, in a batch: {ours == together}")

# %% [markdown]
# ## 6. The finished module
#
# - `kernels/sample.py` is that `draw` as a Triton kernel: logits in, a token out, the noise made in registers. `worker/filters.py` has top_k, top_p and min_p, for a GPU `kernels/floors.py`.
# - `worker/logits.py` changes logits before that: penalties, `logit_bias`, `allowed_token_ids`, `min_tokens`. `worker/logprobs.py` reports.
# - `engine/siblings.py` makes n sequences of a request; `engine/stopping.py` decides when a text ends.
#
# **Seeds in the real engine.** One request, four lives: alone; behind two others; its prompt in chunks of 8 tokens; and in a pool so small that it is preempted and recomputed.

# %%
prompt = encode("My favourite recipe for a cold winter evening begins with onions, butter and")
others = [encode(text) for text in ("The capital of France is", "Once upon a time, in a village by the sea")]
own, other = (SamplingParams(seed=s, max_tokens=6, ignore_eos=True) for s in (7, 8))
lives = {"alone": ([], {}), "in a batch": (others, {}),
         "in chunks": ([], {"max_num_batched_tokens": 8, "max_num_seqs": 4}),
         "preempted": (others, {"num_kv_blocks": 11, "max_model_len": 44})}
for name, (company, limits) in lives.items():
    engine = Engine(replace(llm.config, **limits), llm.runner, V)
    seq = run(engine, company + [prompt], [other] * len(company) + [own])[-1]
    stats = engine.stats
    print(f"{name:11} {stats.num_steps:2} steps, preemptions {stats.num_preemptions}:",
          repr(decode(seq.generated_token_ids)))

# %% [markdown]
# **The order of options** is part of their meaning: penalties and the other edits, temperature, top_k, top_p, min_p. top_p after temperature keeps fewer tokens the colder it is:

# %%
if_first = (drawn_from(top_p=0.6) > 0).sum()  # before the temperature
for temperature in (0.5, 1.0, 1.5):
    after = (drawn_from(temperature=temperature, top_p=0.6) > 0).sum()
    print(f"temperature {temperature}: top_p = 0.6 keeps {after:3} tokens; {if_first} if it came first")

# %% [markdown]
# **Penalties** change the logits of what was said. presence subtracts its value once, frequency as many times as the token was said; repetition divides (positive logits) or
# multiplies (negative ones), and looks at the prompt's tokens too. They work with greedy as well. The loop from section 1:

# %%
penalties = [{"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.2}]
for options, out in zip(penalties, ask([market] * 3, *penalties, temperature=0, max_tokens=26)):
    print(options, out["text"], sep="\n    ")

# %% [markdown]
# All three break the loop. presence and frequency part where "I" would come for the third time: presence counts it once, frequency twice. Each also punishes "the" and the full stop, so small values do.
#
# **Allowed tokens** make a classifier of any model, in one line: two tokens may come, one is to be written. **Log probabilities** say how sure it is; they are those of the raw logits, so the % below are of all tokens, not of the two. (`logit_bias` is the soft form: 2 added to a logit makes its token e² = 7.4 times as likely, against any other.)

# %%
examples = ("Review: I loved every minute of it.\nSentiment: positive\n"
            "Review: A waste of time and money.\nSentiment: negative\n")
reviews = ["The film was wonderful, I laughed all evening.", "The film was boring and far too long.",
           "The soup was cold and the waiter was rude.", "What a lovely day we had at the sea!"]
two = encode(" positive") + encode(" negative")
outputs = ask([f"{examples}Review: {review}\nSentiment:" for review in reviews],
              temperature=0, max_tokens=1, allowed_token_ids=two, logprobs=2)
for review, out in zip(reviews, outputs):
    print(f"{review:47} {out['text']} {torch.tensor(out['cumulative_logprob']).exp():.0%}")

# %% [markdown]
# **When does it end?** At the model's own end token, at one of `stop_token_ids`, at a stop string, or at a length; `finish_reason` says "stop" or "length". A stop string is a matter of text, and tokens do not care
# for it: it may begin and end in the middle of a token. What belongs to it is left out of the text, though its tokens were generated. `min_tokens` forbids every end before so many tokens; `ignore_eos` goes on behind the model's own.

# %%
quiz = "Q: What is the capital of Italy?\nA: Rome\nQ: What is the capital of Spain?\nA:"
full_stop = encode(".")
endings = [{"stop": "of bread"}, {"stop": "ad. I'"}, {"stop_token_ids": full_stop}, {},
           {}, {"min_tokens": 6}, {"ignore_eos": True}]
outputs = ask([market] * 4 + [quiz] * 3, *endings, temperature=0, max_tokens=8)
for text, options, out in zip(["market"] * 4 + ["quiz"] * 3, endings, outputs):
    print(f"{text:6} {options!s:25}{len(out['token_ids'])} tokens, {out['finish_reason']:6}", repr(out["text"]))


# %% [markdown]
# "ad. I'" begins inside of one token and ends inside of another. Whoever streams must therefore hold text back: " bre" may be shown, "ad" not yet.
#
# **Log probabilities.** `logprobs=k` returns, for each generated token, {token id: its log probability, rank and text}: its own first, then the k best; `cumulative_logprob` is the sum of its own. `prompt_logprobs` does the same for the prompt, so it measures a text that somebody else wrote. *Perplexity* is the
# inverse of the mean probability (the geometric mean): among how many equally likely tokens the model chose, so to speak. The darker a token below, the less likely it was; the % stands under it.

# %%
def with_probabilities(entries):  # of each token its own entry, which is the first
    own = [next(iter(entry.values())) for entry in entries]
    mean = torch.tensor([token.logprob for token in own]).mean()
    return [(token.decoded_token, math.exp(token.logprob)) for token in own], (-mean).exp().item()


sentences = ["She drank a cup of coffee.", "She drank a cup of gravel.",
             "The dog barked at the postman.", "The postman barked at the dog."]
texts = {}
for out in ask(sentences, temperature=0, max_tokens=1, prompt_logprobs=0):
    tokens, perplexity = with_probabilities(out.prompt_logprobs[1:])  # the first has nothing before it
    texts[f"{out.prompt} Perplexity {perplexity:.0f}"] = tokens
tokens, perplexity = with_probabilities(greedy["logprobs"])
texts[f"{market} ... (greedy) Perplexity {perplexity:.1f}"] = tokens
[(token, entry)] = greedy["logprobs"][0].items()
print(f"first of the last text: id {token}, {entry.decoded_token!r}, rank {entry.rank}, {entry.logprob:.2f}")
sampling_figures.text(texts)

# %% [markdown]
# The second and the fourth sentence have the words of their neighbours, all but one or in another order, and the model is more surprised. The last text shows the loop of section 1 from inside: "tomorrow" has
# 27%, then 58%, then 92%. That is why greedy cannot get out.

# %% [markdown]
# ## 7. Watch it: four answers, one prompt
#
# `n=4` asks for four answers. They have the prompt in common, and so its K/V. A is the leader: it computes the prompt, while B, C and D are held back. Once its full blocks are published, the others find them. Each
# then computes what fills no block, and writes its own answer with its own noise: the key is the seed, the counter holds the answer's number.

# %%
from minivllm.teach import BlockView

pier = encode("On the last evening of the summer, an old fisherman and his dog sat at the end of the pier and")
config = replace(llm.config, enable_prefix_caching=True, num_kv_blocks=32, max_model_len=64)
engine = Engine(config, llm.runner, V, decode=decode)
view = BlockView(engine)
display(view)
[leader] = run(engine, [pier], [SamplingParams(n=4, seed=3, max_tokens=10, ignore_eos=True)])
four = [leader, *leader.options.siblings]

# %% [markdown]
# Two moments: B, C and D arrive; and the last step with all four. 17 blocks are in use; without sharing 4 × 8 = 32 would be.

# %%
for seq in four:
    print(f"{seq.num_prompt_tokens} tokens, {seq.num_cached_tokens} found; blocks", end=" ")
    print(sorted({e.block for e in view.trace.of_sequence(seq.seq_id) if e.kind in ("allocate", "share")}),
          repr(decode(seq.generated_token_ids)))
view.figure(steps=[view.steps[0] + 1, view.steps[1] - 2])

# %% [markdown]
# Predict how many blocks n answers need. A sequence of P prompt tokens and A answer tokens ends with P + A - 1 tokens in the cache (the last is never fed back). Shared are only *full* blocks of the prompt, ⌊P / S⌋. We predict and then count, without a model, for a
# prompt of 1,000 tokens and answers of 100 in blocks of 16:

# %%
from minivllm.bench.scheduler import NoModel
from minivllm.config import EngineConfig


def most_blocks(n, P, A, S, sharing):  # counted after each step, when who ended has given back its blocks
    config = EngineConfig(block_size=S, num_kv_blocks=2000, max_model_len=4096, max_num_batched_tokens=8192,
                          max_num_seqs=64, enable_prefix_caching=sharing)
    engine, most = Engine(config, NoModel(), vocab_size=1000), 0
    engine.add(list(range(P)), SamplingParams(n=n, max_tokens=A))
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, engine.blocks.num_used_blocks)
    return most


def predicted(n, P, A, S, sharing):
    each, shared = -(-(P + A - 1) // S), P // S if sharing else 0
    return shared + n * (each - shared)


counts = [1, 2, 4, 8, 16]
for n in counts:
    each, shared = ([way(n, 1000, 100, 16, sharing) for way in (predicted, most_blocks)]
                    for sharing in (False, True))
    print("n = {:2}: predicted without sharing {:4}, counted {:4};".format(n, *each),
          "predicted with it {:3}, counted {:3}".format(*shared))

# %%
curves = {"each its own prompt": [predicted(n, 1000, 100, 16, False) for n in counts],
          "the prompt shared": [predicted(n, 1000, 100, 16, True) for n in counts]}
sketch.lines(counts, curves, x="answers to one prompt (n)", y="blocks of 16 tokens")

# %% [markdown]
# ## 8. Measure
#
# Predict, for a GPU, where logits have 16 bit. Greedy and temperature are one pass over them: 2 bytes each. top_p can sort. A radix sort of 32-bit numbers moves each with its 8-byte index once for every 8 bits, out of memory and back: 4 × 2 × 12 = 96 bytes; and reads
# it 4 times more to count digits, 16 bytes. Softmax, running sum and comparisons add some 50. Together about 160 bytes a logit.
#
# But nothing need be sorted: it is enough to know the smallest logit that stays, the *floor*. "How much is at or above this floor?" is one pass. Asked of three floors at once, it leaves a quarter of the interval, and 16 bits make 4^8 numbers: 8 passes.
# top_k and then top_p: 18, with one for the largest logit and one for all that top_k leaves. 36 bytes a logit. With 256 × 151,936 logits at 4.8 TB/s: one pass 16 us, floors 0.29 ms, a sort 1.3 ms. `kernels/floors.py` is that kernel; on a CPU the package sorts.
#
# First this machine (a CPU with 4 rows of this model's vocabulary, a GPU with 256 of Qwen3's), then an H200.

# %% tags=["nbval-ignore-output"]
from minivllm.teach import sampling_bench

shape = (256, 151_936) if torch.cuda.is_available() else (4, V)
print("here: {} rows of {:,} logits".format(*shape))
print(*sampling_bench.lines(sampling_bench.measure(*shape, llm.runner.device)), "", sep="\n")
print(*sampling_bench.saved_lines(), sep="\n")


# %% [markdown]
# On the H200 floors are 14 times as fast as the sort (0.64 ms against 8.94), not 4 times. Without the draw, which is 0.26, floors take 0.38 ms, a third more than bytes say; the sort takes seven times as long as they say. It goes 32 rows at a time, so as to need room for 32 rows of float32 instead of 256, and each of the 8 parts starts every operation of torch again.
# Penalties still do: 7.35 ms. Temperature also makes noise, ten rounds of multiplications for four logits, which is work and not bytes; greedy, without it, takes 0.11 ms. Is 0.64 ms much? To read all 1.2 GB of Qwen3-0.6B's weights takes 0.25 ms.
# Whoever serves 256 people with penalties has found what to make faster.
#
# On a CPU the noise dominates: there torch computes Philox, one operation after the other.
#
# ## 9. Exercises

# %% [markdown] tags=["exercise-1-statement"]
# ### Exercise 1: top_p, exactly (medium, 10 minutes)
#
# Write `top_p_keep(probabilities, p)`: `probabilities` is `[V]` float32, in the order of token ids. Return bool `[V]`, True where the token is kept: the *smallest* set of most likely tokens
# whose probabilities reach p. Of equally likely tokens the lower ids come first. p = 1 keeps everything.
#
# Example: `[0.25, 0.125, 0.5, 0.125]` with p = 0.6: 0.5 is not enough, with 0.25 it is. `[True, False, True, False]`. With p = 0.5 only token 2 is kept: reached is enough.
#
# <details><summary>Hint: the way back from sorted order</summary>`values, order = x.sort(descending=True, stable=True)`: order[i] is the id of the i-th best. `mask[order] = kept` puts kept[i] there.</details>
# <details><summary>Hint: the tail at p = 1</summary>In float32, 0.5 + 0.5 + 1e-9 is 1. A rule about sums drops what comes behind; p = 1 needs a line of its own.</details>

# %% tags=["exercise-1-stub"]
def top_p_keep(probabilities: torch.Tensor, p: float) -> torch.Tensor:
    raise NotImplementedError


# %% tags=["exercise-1-check"]
from minivllm.teach import check

check.top_p_keep(top_p_keep)


# %% tags=["exercise-1-solution"]
def top_p_keep_solution(probabilities, p):
    if p >= 1:
        return torch.ones_like(probabilities, dtype=torch.bool)
    ordered, order = probabilities.sort(descending=True, stable=True)
    mask = torch.zeros_like(probabilities, dtype=torch.bool)
    mask[order] = ordered.cumsum(0) - ordered < p  # the best has 0 before it, so it is always kept
    return mask


check.top_p_keep(top_p_keep_solution)

# %% [markdown]
# **Optional: the real engine with your top_p.** The same seed gives the same noise, so the same set gives the same tokens. (Equals of the last token the package keeps too; 16-bit logits have such.)

# %% tags=["exercise-1-plug"]
from minivllm.teach import plug_sampling

plug_sampling.top_p_keep(top_p_keep, llm, door, SamplingParams(top_p=0.8, seed=5, max_tokens=8))


# %% [markdown] tags=["exercise-2-statement"]
# ### Exercise 2: the repetition penalty (easy, 5 minutes)
#
# Write `repetition_penalty(logits, token_ids, penalty)`: `logits` `[V]`, `token_ids` a list of what prompt and answer hold so far, with repetitions. Return new logits `[V]`: of every token in the list, a positive logit divided by the penalty, another multiplied
# by it, once however often it was said.
#
# Example: logits `[4, 1, -2, 3]`, tokens `[0, 2, 0]`, penalty 2: `[2, 1, -4, 3]`.

# %% tags=["exercise-2-stub"]
def repetition_penalty(logits: torch.Tensor, token_ids: list[int], penalty: float) -> torch.Tensor:
    raise NotImplementedError


# %% tags=["exercise-2-check"]
check.repetition_penalty(repetition_penalty)


# %% tags=["exercise-2-solution"]
def repetition_penalty_solution(logits, token_ids, penalty):
    logits = logits.clone()
    seen = torch.tensor(sorted(set(token_ids)), dtype=torch.int64)
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    return logits


check.repetition_penalty(repetition_penalty_solution)

# %% [markdown] tags=["exercise-3-statement"]
# ### Exercise 3: break it: the neighbours change the noise (medium, 10 minutes)
#
# A sampler with Philox, seeds and positions, which gives the same answers whenever the same batch is run again:
#
# ```
# offsets = torch.arange(logits.numel()).view(logits.shape)      # [R, V], of each logit
# words = philox_4x32((offsets, positions[:, None], zero, zero), (seeds[:, None], zero))
# uniforms = (words[0] + 0.5) * 2.0**-32
# return (logits - (-uniforms.log()).log()).argmax(dim=-1)
# ```
#
# Give two batches that show its fault: each a list of `(seed, max_tokens)`. All requests have the same prompt, so a seed stands for a request: one that is in both batches must get the same tokens in both. A batch begins with a row for each request, in
# order; when a request has its tokens, those below it move up. For example `first, second = [(7, 5)], [(7, 5), (8, 5)]`.
#
# <details><summary>Hint</summary>Which numbers are in the counter of row 0, and which in that of row 1?</details>

# %% tags=["exercise-3-stub"]
first, second = None, None

# %% tags=["exercise-3-check"]
check.break_it("noise_by_place", first=first, second=second)

# %% tags=["exercise-3-solution"]
check.break_it("noise_by_place", first=[(7, 6)], second=[(3, 6), (7, 6)])

# %% [markdown]
# ## 10. Recap
#
# - Temperature changes a distribution; top_k, top_p and min_p cut its tail. The token that crosses p stays.
# - argmax(logits / temperature + Gumbel noise) is a draw: one pass, no softmax, no waiting host.
# - Noise is a function of seed, answer and position: no batch, chunk or preemption can change it. (An answer may still change where a
#   GPU, in another batch, rounds two nearly equal logits the other way.)
# - n answers share the prompt's full blocks: ⌊P / S⌋ of them once, not n times.
#
# The ladder gets no rung here: sampling adds time to a step and takes none away.

# %%
llm.close()

# %% [markdown]
# **How vLLM does it.** `vllm/v1/sample/sampler.py` has the order of options, `vllm/v1/sample/ops/topk_topp_sampler.py` the filters and the race with exponential noise (its comment names `torch.multinomial`'s synchronization as the reason), `vllm/v1/sample/ops/penalties.py` the penalties. A seeded
# request there has a `torch.Generator` of its own, and its rows are drawn one by one. min_p comes before top_k and top_p there; ours comes last, as in transformers. `vllm/v1/engine/parallel_sampling.py` turns n into child requests, which share blocks through the prefix cache.
#
# **Next:** 09 takes the launches out of a decode step: CUDA graphs.
