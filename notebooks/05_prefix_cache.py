# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["header"]
# # 05 Prefix cache
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/05_prefix_cache.ipynb)
#
# Blocks found again by a hash of their whole prefix, shared and evicted.
#
# Previous: [04 Block table and paged attention](04_paged_attention.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/04_paged_attention.ipynb)) · Next: [06 Scheduler](06_scheduler.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/06_scheduler.ipynb)) · 75 minutes with the exercises · runs on a CPU, on Colab's free T4 and on larger GPUs

# %% [markdown]
# **You will build** a prefix cache: a table from hashes to blocks, a reference count for each block, and a free list that forgets the right things first. Then you
# watch the engine's own share, keep and evict.
#
# **You will learn** why the same words have other keys and values elsewhere; what must go into a block's hash; why a prompt that is found whole still computes one token; and
# how to predict, to the token, what a cache will save.
#
# **You need** blocks and block tables: a sequence's K/V lie in blocks of 16 slots, in any order, and a table says which (notebook 00 shows it, notebook 04 builds it).

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
from dataclasses import replace

import torch

from minivllm import LLM, SamplingParams
from minivllm.engine.engine import Engine

# float32, so that tokens can be compared; on a GPU a larger pool, for the longer prompts of section 9
settings = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 320 if torch.cuda.is_available() else 64}
llm = LLM(notebook.model(), dtype="float32", max_model_len=16 * settings["num_kv_blocks"], **settings)
encode, decode = llm.tokenizer.encode, llm.tokenizer.decode


# %% [markdown]
# ## 1. The problem, measured
#
# A library has an assistant on its web page. Every question is sent behind the same **system prompt**, and behind everything that was said before: a model
# remembers nothing, so a conversation is one growing prompt. Three people ask two questions each. (Counts in the text are those of SmolLM2's tokenizer.)
#
# `fresh` makes a new engine over the loaded model: new bookkeeping, the same weights and pool. `run` takes requests to their end; `play` lets all users ask at the
# same time, wait for the answers, and ask again.

# %%
def fresh(caching=True, **limits):
    config = replace(llm.config, enable_prefix_caching=caching, **limits)
    return Engine(config, llm.runner, llm.engine.vocab_size, decode=decode)


def run(engine, prompts, answers):  # answers: tokens to write for each prompt
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in answers]
    sequences = [engine.add(prompt, one) for prompt, one in zip(prompts, params)]
    while engine.has_unfinished_requests():
        engine.step()
    return sequences


def play(engine, system, talks):  # talks[user][turn] = (question ids, answer tokens) -> all sequences
    said, sequences = [list(system) for _ in talks], []
    for turn in zip(*talks):      # one question of every user
        prompts = [before + question for before, (question, _) in zip(said, turn)]
        sequences += run(engine, prompts, [answer for _, answer in turn])
        said = [seq.token_ids for seq in sequences[-len(talks):]]
    return sequences


# %%
system = encode("You are the assistant of a small public library. Answer politely, in one short sentence. "
                "The library is open from nine to six, on Saturdays from ten to two, and closed on Sundays. "
                "Books may be kept for four weeks. A library card is free for everyone who lives in town.")
talks = [["When do you open on Saturday?", "And on Sunday?"],
         ["How long may I keep a book?", "And after that?"],
         ["What does a library card cost?", "Who may have one?"]]
talks = [[(encode(f"\nUser: {question}\nAssistant:"), 5) for question in user] for user in talks]
engine = fresh(caching=False)
trace = engine.scheduler.start_trace()
without = play(engine, system, talks)
print("system prompt:", len(system), "tokens; prompts:", [seq.num_prompt_tokens for seq in without])
print("the first answer begins:", repr(decode(without[0].generated_token_ids)))


# %% [markdown]
# Now count. The engine records an event for everything it computes. A position's K/V depend on all tokens up to it: where these are equal, the same thing was computed twice.

# %%
def prefixes_computed(trace, sequences):  # one entry for each computed position: the tokens up to it
    ids = {seq.seq_id: seq.token_ids for seq in sequences}
    spans = [(ids[e.seq_id], e.data["start"], e.data["tokens"]) for e in trace.events if e.kind == "compute"]
    return [tuple(tokens[:p + 1]) for tokens, start, count in spans for p in range(start, start + count)]


prefixes = prefixes_computed(trace, without)
print(f"{len(prefixes)} positions computed, {len(set(prefixes))} of them different")
print(f"computed again and again: {1 - len(set(prefixes)) / len(prefixes):.0%}")

# %% [markdown]
# ## 2. The idea, drawn
#
# Keep the blocks of finished requests, and let a new prompt that begins in the same way use them. With blocks of 4 tokens, and a letter for a token:
#
# ```
# first prompt   [Y o u _][a r e _][k i n d]          blocks 0, 1, 2
# second prompt  [Y o u _][a r e _][o l d .]          blocks 0, 1 again, and 3
# third prompt   [W e _ _][a r e _][k i n d]          nothing: [a r e _] stands behind other words
# ```
#
# The third line is the important one. Why may it not use block 1, which holds exactly its four tokens? Ask the model. Two texts of 16 tokens, about Anna and about Bert, and a
# third one of 16 tokens behind each of them. We compare the keys that the pool holds for that third text.

# %%
anna = encode(" Anna has a red bicycle. She painted it bright red all over, in the spring")[:16]
bert = encode(" Bert has a blue bicycle. He painted it dark blue all over, in the summer")[:16]
both = encode(" and everybody in the whole town who ever saw it liked the colour very much.")[:16]


def keys_of_last_block(prompt):  # -> [L, S, K, D], read from the pool through the block table
    engine = fresh()
    seq = engine.add(prompt, SamplingParams(temperature=0, max_tokens=2))
    engine.step()
    return llm.runner.pool.cache[0, :, seq.block_table[-1]].clone()


after_anna, after_bert, earlier = (keys_of_last_block(prompt) for prompt in (anna + both, bert + both, both))
for name, other in {"behind Bert": after_bert, "at the start": earlier}.items():
    equal = [torch.allclose(a, b, atol=1e-4) for a, b in zip(after_anna, other)]
    print(f"behind Anna and {name}: keys are equal in {sum(equal)} of {len(equal)} layers")

# %%
from minivllm.teach import sketch

layers = list(range(0, len(after_anna), 3))
curves = {f"behind Anna's text and {name}": [
    ((after_anna[i] - other[i]).norm() / after_anna[i].norm()).item() for i in layers]
    for name, other in {"behind Bert's": after_bert, "at the start": earlier}.items()}
sketch.lines(layers, curves, x="layer", y="difference of the keys, relative")

# %% [markdown]
# In layer 0 a key is made from the token and its position alone, so behind texts of equal length it is the same. From layer 1 on, each vector has
# read what stands before it, and so have its keys: "it" is a red bicycle or a blue one. At another position even layer 0 differs, because positions are turned into the keys.
# **K/V belong to a prefix, not to a token.**
#
# ## 3. The naive version: a hash of the block's own tokens
#
# It is what one would write first, and it passes many tests: as long as prompts differ from the beginning, nothing bad happens. Here it is in the real engine. The first request leaves
# the third text's block behind Anna's, the second leaves Bert's. The last one asks about Bert's bicycle: it finds Bert's block, and then one that was computed for Anna.

# %%
from minivllm.engine.block_manager import BlockManager, block_hash


class OwnTokensOnly(BlockManager):
    def _hash_full_blocks(self, seq):
        blocks = [seq.token_ids[i:i + 16] for i in range(0, len(seq) - 15, 16)]
        seq.block_hashes[:] = [block_hash(b"", block) for block in blocks]


question = encode(" The colour of the bicycle is")
for manager in (BlockManager, OwnTokensOnly):
    engine = fresh()
    engine.blocks = engine.scheduler.blocks = manager(llm.config.num_kv_blocks, 16)
    run(engine, [anna + both], [1])
    run(engine, [bert], [1])
    [seq] = run(engine, [bert + both + question], [6])
    print(f"{manager.__name__:14} {seq.num_cached_tokens} tokens found:", repr(decode(seq.generated_token_ids)))

# %% [markdown]
# No crash, no warning: another answer, made from what was computed for somebody else.
#
# ## 4. Build it
#
# ### The hash chain
#
# The hash of a block must stand for all tokens up to its end. Hashing the whole prefix for each block would cost a quadratic number of tokens. A **chain** does it in one pass: each
# block's hash is made of its parent's hash and its own tokens, and the parent's hash already stands for the rest.
#
# ```
# root ──► hash(root, block 0) = h0 ──► hash(h0, block 1) = h1 ──► hash(h1, block 2) = h2
# ```
#
# The root holds whatever else changes K/V. With a LoRA adapter (notebook 11) the same tokens have other keys, so its name goes in there.

# %%
import hashlib
import struct


def chain(token_ids, size, extra=b""):
    hashes = [hashlib.sha256(extra).digest()]                              # the root
    for start in range(0, len(token_ids) - size + 1, size):                # full blocks only
        tokens = struct.pack(f"<{size}I", *token_ids[start:start + size])  # 4 bytes a token
        hashes.append(hashlib.sha256(hashes[-1] + tokens).digest())
    return hashes[1:]


you, we = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [0, 2, 3, 4, 5, 6, 7, 8, 9, 10]
for name, hashes in {"you": chain(you, 4), "you, other end": chain(you[:8] + [99], 4), "we": chain(we, 4),
                     "you, adapter": chain(you, 4, b"french")}.items():
    print(f"{name:15}", [digest.hex()[:8] for digest in hashes])

# %% [markdown]
# Ten tokens give two hashes. The last two tokens fill no block: others will follow, and what still changes cannot be shared.
#
# Two details that decide whether it is safe. **Encoding:** each token takes four bytes. With digits simply joined, the tokens 1, 23 and 12, 3 would both be "123". **Width:** two
# different prefixes with equal hashes would share K/V, as above. Among n random hashes of b bits the chance of any such pair is about n² / 2^(b+1):

# %%
print("joined digits:", "".join(map(str, [1, 23])) == "".join(map(str, [12, 3])))
print("four bytes each:", struct.pack("<2I", 1, 23) == struct.pack("<2I", 12, 3))
for bits in (64, 128, 256):
    print(f"{bits:3} bits, a billion blocks: {1e18 / 2 ** (bits + 1):.0e}")


# %% [markdown]
# Chance is the friendly case. Whoever can *construct* a collision can make a server read the wrong block, so it should be a cryptographic hash.
#
# ### Blocks that are found, shared and forgotten
#
# Four things are to be known: which blocks are free, and in which order they will be reused; how many sequences own each block; which hash a block was published under; which block a
# hash leads to.

# %%
class PrefixCache:
    """Which block holds what. `free` is in the order of reuse: what was free the longest comes first."""

    def __init__(self, num_blocks):
        self.free = dict.fromkeys(range(num_blocks))      # a dict keeps its order and finds quickly
        self.owners = [0] * num_blocks
        self.hash_of, self.block_of = [None] * num_blocks, {}

    def take(self, hashes, num_blocks):                   # -> block table, and how many of it were found
        hits = []
        for digest in hashes:
            if digest not in self.block_of:
                break                                     # behind the first gap nothing can be used
            hits.append(self.block_of[digest])
        for block in hits:
            self.free.pop(block, None)                    # it may be free, or somebody's
            self.owners[block] += 1
        return hits + [self.reuse() for _ in range(num_blocks - len(hits))], len(hits)

    def reuse(self):
        block = next(iter(self.free))
        del self.free[block]
        if self.hash_of[block] is not None:               # evicted: nobody may find it any more
            del self.block_of[self.hash_of[block]]
            self.hash_of[block] = None
        self.owners[block] = 1
        return block

    def publish(self, table, hashes):                     # only when the K/V are in the pool
        for block, digest in zip(table, hashes):
            if digest not in self.block_of:
                self.block_of[digest], self.hash_of[block] = block, digest

    def give_back(self, table):
        for block in reversed(table):                     # the tail first
            self.owners[block] -= 1
            if self.owners[block] == 0:
                self.free[block] = None


# %% [markdown]
# Two prompts of 10 tokens that share the first 8, in a pool of 6 blocks of 4:

# %%
cache = PrefixCache(6)
first, hits = cache.take(chain(you, 4), 3)
cache.publish(first, chain(you, 4))
print("first: ", first, "found", hits)
other = you[:8] + [50, 60]
second, hits = cache.take(chain(other, 4), 3)
cache.publish(second, chain(other, 4))
print("second:", second, "found", hits, "| owners of each block", cache.owners)
cache.give_back(first)
cache.give_back(second)
print("order of reuse:", list(cache.free), "| can be found:", sorted(cache.block_of.values()))
third, hits = cache.take([], 5)
print("third: ", third, "found", hits, "| can be found:", sorted(cache.block_of.values()))

# %% [markdown]
# A block that is given back keeps its contents and its hash: it is free *and* can be found, until somebody needs the room. Reuse takes
# the block that has been free the longest (*least recently used*), and each sequence gives its tail back first. Why? A lookup stops at the first gap.
# Without block 0, block 1 could never be reached again; without block 1, block 0 is as useful as before.
#
# ### Not before it is computed
#
# A block may be published only after the step that computes it; before, there is nothing to be read. So three equal prompts that arrive *together* find nothing of each other. Here is the package's
# engine, without a model, since it decides with numbers only (`NoModel` answers every step with token 7):

# %%
from minivllm.bench.scheduler import NoModel
from minivllm.config import EngineConfig


def simulated(num_blocks, size=16, at_once=16):
    config = EngineConfig(block_size=size, num_kv_blocks=num_blocks, max_model_len=num_blocks * size,
                          max_num_batched_tokens=8192, max_num_seqs=at_once)
    return Engine(config, NoModel(), vocab_size=1000)


engine = simulated(num_blocks=16, size=4)
for wave in ("together", "afterwards"):
    sequences = [engine.add(you, SamplingParams(max_tokens=2)) for _ in range(3)]
    engine.step()
    tables = [seq.block_table for seq in sequences]
    print(f"{wave:10} found {[seq.num_cached_tokens for seq in sequences]}, block tables {tables},",
          "published", sorted(engine.blocks.cached_blocks.values()))
    engine.step()

# %% [markdown]
# Blocks 3 and 4, 6 and 7 hold the same K/V as 0 and 1: **duplicates**, computed in the same step. Only the first of each is findable; the others serve their own sequence and then lie in the free list like
# empty ones. (vLLM remembers all of them under the one hash.) Nothing is merged afterwards: that would change the block tables of running sequences, for a little memory.
#
# ### A full hit still computes one token
#
# What if *every* token of a prompt is found? The answer's first token comes from the logits of the prompt's last position, and logits are not cached. So that one token is computed again. Its K/V exist
# already, in a block that others may be reading, so it writes nothing: slot -1. We run the steps by hand, with a prompt of exactly two blocks:

# %%
from minivllm.worker.batch import slot_mapping

engine = fresh()
run(engine, [anna + both], [1])
seq = engine.add(anna + both, SamplingParams(temperature=0, max_tokens=2))
plan = engine.scheduler.schedule()
[row] = plan.rows
print(f"prompt of {len(seq)}, cached {seq.num_cached_tokens}; this step computes {len(row.token_ids)}",
      f"token at position {row.start}, slot {slot_mapping(row, 16)}")
engine.scheduler.update(plan, llm.runner.execute(plan))
[row] = engine.scheduler.schedule().rows
print(f"next step: position {row.start}, slot {slot_mapping(row, 16)}, block table {row.block_table}")

# %% [markdown]
# ## 5. The same answer?
#
# The library again, with the cache. For the model a hit is nothing new: tokens read older K/V through the block table, as in every decode. So the answers must be equal.

# %%
engine = fresh()
trace, library_stats = engine.scheduler.start_trace(), engine.stats
cached = play(engine, system, talks)
print("the same tokens:", [a.token_ids for a in cached] == [b.token_ids for b in without])
print("found:", [seq.num_cached_tokens for seq in cached], "of", [seq.num_prompt_tokens for seq in cached])
prefixes = prefixes_computed(trace, cached)
print(f"{len(prefixes)} positions computed, {len(set(prefixes))} of them different")

# %% [markdown]
# The first three questions found nothing: they came together. The later ones found their conversation, up to its last full block. What is still computed twice is the first round, and what lay in
# unfinished blocks. Look at the first user: 75 tokens of prompt and 5 of answer are 80, which would fill five blocks, yet 64 were found. Section 8 says why.
#
# ## 6. The finished module
#
# `minivllm/engine/block_manager.py` is what you built, in less than 200 lines. It adds:
#
# - **A question before the deed.** `can_allocate` says whether a prompt fits. A hit that nobody owns is in the free list too, and may not be counted as free room as well.
# - **Growth.** A decode that crosses a block's end gets one more block, or is told that there is none (notebook 07).
# - **Care.** An entry is dropped only if it still leads to the block being reused. A sequence keeps its hashes, so that a new full block costs one more. The root is hashed twice, so that no adapter's name can
#   imitate a block.
#
# Both must make the same choices. A thousand random requests through each, up to four at a time:

# %%
import random

from minivllm.engine.sequence import Sequence

rng = random.Random(0)
ours, theirs, running, agree, found = PrefixCache(24), BlockManager(24, 4), [], 0, 0
for number in range(1000):
    tokens = [rng.choice([1, 2]) for _ in range(rng.randrange(1, 24))]
    hashes, seq = chain(tokens, 4), Sequence(number, tokens, SamplingParams())
    theirs.allocate(seq, theirs.find_prefix(seq))
    table, hits = ours.take(hashes, -(-len(tokens) // 4))
    agree, found = agree + (table == seq.block_table), found + hits
    seq.num_computed_tokens = len(tokens)                 # as if its prefill had run
    theirs.publish(seq, start=4 * hits)
    ours.publish(table, hashes)
    running.append((table, seq))
    if len(running) == 4:
        table, seq = running.pop(rng.randrange(4))
        ours.give_back(table)
        theirs.free(seq)
print(f"{agree} of 1000 block tables agree; {found} blocks were found")

# %% [markdown]
# ## 7. Watch it: shared, cached, evicted
#
# The real engine with 14 blocks. A asks alone. Then B and C ask at once. Then D, who has nothing to do with the library, brings a long text. At last E asks what A asked.

# %%
from minivllm.teach import BlockView

engine = fresh(num_kv_blocks=14, max_model_len=224)
view = BlockView(engine)
display(view)
library = [system + question for (question, _), *_ in talks]
long_text = encode("Once upon a time, by the sea, there lived an old man who mended nets. " * 14)[:180]
a = run(engine, library[:1], [2])
b_and_c = run(engine, library[1:], [4, 4])
d = run(engine, [long_text], [2])
e = run(engine, library[:1], [2])


# %% [markdown]
# Four moments. B and C share four blocks: the system prompt and the "User:" behind it (hatched, ×2). Both have ended, and every full block stays findable (dotted). D takes the twelve blocks that were free the
# longest: those never used, then the unfinished last blocks of A, B and C, and of what these had in common only the tail, 3 and 2, which are evicted (dashed). Last,
# E finds what is left of the chain, and takes 2, 3 and 6, D's tail: the full 3 and 6 are evicted.

# %%
def first_step(sequences):
    return min(event.step for event in view.trace.of_sequence(sequences[0].seq_id) if event.kind == "compute")


print("evicted, in this order:", [event.block for event in view.trace.events if event.kind == "evict"])
print("found by A to E:", [seq.num_cached_tokens for seq in (*a, *b_and_c, *d, *e)])
view.figure(steps=[first_step(b_and_c), first_step(d) - 1, first_step(d), first_step(e)])


# %% [markdown]
# ## 8. Measure: tokens saved, to the token
#
# Predict. A prompt finds the full blocks of what was computed before: ⌊known / S⌋ × S tokens, with S the block size. In a conversation, `known` is the last prompt with its answer, less one: **the last
# token of an answer was never fed back**, so it has no K/V (notebook 02). The first user's 80 tokens are 79 with K/V, four full blocks. For the first questions `known` is 0, since they came together.

# %%
def predicted_hits(sequences, users, size, known_at_first=0):
    earlier = [known_at_first] * users + [len(seq) - 1 for seq in sequences[:-users]]
    return sum(known // size * size for known in earlier)


stats, predicted = library_stats, predicted_hits(cached, len(talks), 16)
print(f"predicted {predicted}, counted {stats.prefix_cache_hits} of {stats.prefix_cache_queries} prompt tokens")

# %% [markdown]
# Now a larger workload, without the model: the 64 requests of notebook 02 with their real lengths, as 16 users who ask four questions each, behind a system prompt of 200 tokens
# that is in the cache already. The larger a block, the more tokens are lost at its end:

# %%
import json
from importlib import resources

rows = json.loads(resources.files("minivllm.teach").joinpath("lengths.json").read_text())
rng = random.Random(0)
draw = lambda n: [rng.randrange(1000) for _ in range(n)]
rules, users = draw(200), [rows[i:i + 4] for i in range(0, 64, 4)]
many_talks = [[(draw(row["prompt"]), row["answer"]) for row in user] for user in users]


def hit_rate(num_blocks, size):
    engine = simulated(num_blocks, size)
    run(engine, [rules], [1])
    before = replace(engine.stats)
    sequences = play(engine, rules, many_talks)
    queries = engine.stats.prefix_cache_queries - before.prefix_cache_queries
    return (engine.stats.prefix_cache_hits - before.prefix_cache_hits) / queries, queries, sequences


for size in (1, 16, 64, 256):
    rate, queries, sequences = hit_rate(32_768 // size, size)
    predicted = predicted_hits(sequences, 16, size, known_at_first=len(rules)) / queries
    print(f"block size {size:3}: predicted {predicted:.2%}, counted {rate:.2%} of {queries:,} prompt tokens")

# %% [markdown]
# That pool was large enough for everything. How large must it be? A user comes back after the 15 others; until then the pool must hold all 16 conversations, and they grow with each
# round. We count the blocks that this takes, then let the users be served one after the other in smaller pools.

# %%
rounds = [sequences[i:i + 16] for i in range(0, 64, 16)]
shared = len(rules) // 16
needed = [shared + sum(-(-len(seq) // 16) - shared for seq in one) for one in rounds]
print("blocks for all that was said after each round:", needed)


def rates(num_blocks):  # the share found in each round, in %
    engine = simulated(num_blocks, at_once=1)
    run(engine, [rules], [1])
    sequences = play(engine, rules, many_talks)
    found = [[(seq.num_cached_tokens, len(seq) - seq.num_generated_tokens) for seq in sequences[i:i + 16]]
             for i in range(0, 64, 16)]
    return [100 * sum(hit for hit, _ in one) / sum(prompt for _, prompt in one) for one in found]


pools = [250, 500, 750, 1000, 1250, 1500, 1750]
by_pool = [rates(num_blocks) for num_blocks in pools]
for num_blocks, row in zip(pools, by_pool):
    print(f"{num_blocks:5} blocks:", ", ".join(f"{rate:.0f}%" for rate in row))

# %%
names = ["first questions", "second", "third", "fourth"]
sketch.lines(pools, dict(zip(names, zip(*by_pool))), x="blocks in the pool", y="% of the prompt tokens found")

# %% [markdown]
# Each later round's rate climbs between two of the counts: the second from 502 blocks to 929, the third from 929 to 1,286. Left of that only the system prompt is found:
# every request touches it, so it never becomes the least recently used. A conversation does, shortly before its user comes back: where users return in turn, least recently used evicts
# exactly what is needed next, and more memory changes nothing until it is enough. A low
# hit rate of returning users is first a question of pool size.
#
# ## 9. Measure: time to the first token
#
# Predict. A prefill computes two operations for each weight and *new* token, and attention over the context; it cannot be faster than reading all weights once. If all but 16 of
# n tokens are found, there are 16 new ones, whatever n is. The clock is the engine's own, from arrival to first token.

# %% tags=["nbval-ignore-output"]
from minivllm.bench.limits import Machine
from minivllm.teach import ttft

config, machine = llm.model_config, Machine.measure(llm.runner.device, llm.runner.dtype)
weights = sum(parameter.numel() for parameter in llm.runner.model.model.layers.parameters())
# of one query and one key: a product for the score, one for the mixture, multiply and add each
pair_flops = 4 * config.num_heads * config.head_dim * config.num_layers


def predicted_ms(new, context):
    flops = 2 * weights * new + pair_flops * new * (context - new / 2)  # causal: half of its own square
    return 1e3 * max(flops / machine.matmul_flops, llm.runner.weight_bytes / machine.read_bandwidth)


lengths = [512, 1024, 2048, 4096] if torch.cuda.is_available() else [64, 128, 256]
measured = {"not in the cache": [], "all but 16 tokens found": []}
for n in lengths:
    engine, text = fresh(), (system * 80)[:n]
    run(engine, [long_text[:16]], [1])                    # the first step of anything is slower
    for times, prompt in zip(measured.values(), (text, text[:-16] + long_text[:16])):
        [seq] = run(engine, [prompt], [1])
        times.append(1e3 * (seq.first_token_time - seq.arrival_time))
    cold, warm = (times[-1] for times in measured.values())
    print(f"{n:5} tokens: {cold:5.0f} ms, predicted {predicted_ms(n, n):5.0f};",
          f"{seq.num_cached_tokens} of them found: {warm:4.0f} ms, predicted {predicted_ms(16, n):4.0f}")
print("\n".join(ttft.saved_lines()))

# %% tags=["nbval-ignore-output"]
bounds = {"predicted": [predicted_ms(n, n) for n in lengths],
          "predicted, found": [predicted_ms(16, n) for n in lengths]}
sketch.lines(lengths, measured | bounds, x="tokens in the prompt", y="milliseconds to the first token")


# %% [markdown]
# Without a hit the time grows with the prompt. With one it is flat, above its prediction for the reasons of notebook 02: products with few rows are slow, and every step starts the same operations. A hit does
# not make a step cheap; it makes the prompt's length not matter.
#
# Everybody with a clock sees that difference, and can find out which prompts others have sent. So servers with several tenants put a secret of each into the root of the chain: `extra` again.
#
# ## 10. Exercises

# %% [markdown] tags=["exercise-1-statement"]
# ### Exercise 1: the hashes of a sequence (medium, 15 minutes)
#
# Write `block_hashes(token_ids, block_size, extra=b"")`. It returns a list with one hash for each **full** block, in order. Two blocks, of any two sequences, have equal hashes
# exactly if all tokens up to their ends are equal, and `extra` too. Use any hash of 128 bits or more that you like; the check looks only at which hashes are equal.
#
# Example: block size 4, ten tokens: two hashes. Another sequence with the same first four tokens: its first hash is the same. Try it without looking at `chain`.
#
# <details><summary>Hint: where to start</summary>`hashlib.sha256(some_bytes).digest()` gives 32 bytes. The next block's input begins with them.</details>
# <details><summary>Hint: tokens to bytes</summary>`bytes([300])` fails and `str` joins digits. `token.to_bytes(4, "little")` and `struct.pack` give four bytes for each.</details>
# <details><summary>Hint: a hash too many</summary>`len(token_ids) // block_size` counts full blocks.</details>

# %% tags=["exercise-1-stub"]
def block_hashes(token_ids: list[int], block_size: int, extra: bytes = b"") -> list[bytes]:
    raise NotImplementedError


# %% tags=["exercise-1-check"]
from minivllm.teach import check

check.block_hashes(block_hashes)


# %% tags=["exercise-1-solution"]
def block_hashes_solution(token_ids, block_size, extra=b""):
    parent, hashes = hashlib.sha256(extra).digest(), []
    for i in range(len(token_ids) // block_size):
        block = token_ids[i * block_size:(i + 1) * block_size]
        parent = hashlib.sha256(parent + struct.pack(f"<{block_size}I", *block)).digest()
        hashes.append(parent)
    return hashes


check.block_hashes(block_hashes_solution)

# %% [markdown]
# **Optional: your hashes in the real engine.** The three requests about Anna and Bert from section 3, and one with a full hit.

# %% tags=["exercise-1-plug"]
from minivllm.teach import plug_prefix

prompts = [anna + both, bert, bert + both + question, anna + both]
plug_prefix.block_hashes(block_hashes, llm, prompts, max_tokens=6)

# %% [markdown] tags=["exercise-2-statement"]
# ### Exercise 2: break it: the stale entry (medium, 10 minutes)
#
# A block manager takes the block that was free the longest, as `reuse` does in section 4, and leaves something out:
#
# ```
# block_id, _ = self.free_blocks.popitem(last=False)
# block = self.blocks[block_id]
# block.hash = None
# block.ref_count = 1
# return block_id
# ```
#
# Give requests and a pool that show it. `requests` is a list of *waves*: each wave is a list of
# `(prompt, max_tokens)` and starts when the one before has ended; a prompt is a list of token ids below 1000. Blocks hold 4 tokens, two requests run at a time. For example two waves:
# `[[([1, 2, 3, 4, 5], 2)], [([7, 8], 3)]]`.
#
# <details><summary>Hint: three acts</summary>Somebody fills a block. Somebody else gets that very block. Somebody looks for the first one's contents.</details>
# <details><summary>Hint: which block?</summary>The pool's unused blocks go first. With a pool just large enough for the second request there is no choice.</details>

# %% tags=["exercise-2-stub"]
requests, num_kv_blocks = None, None

# %% tags=["exercise-2-check"]
check.break_it("stale_hash", requests=requests, num_kv_blocks=num_kv_blocks)

# %% tags=["exercise-2-solution"]
three_acts = [[([1, 2, 3, 4, 5], 2)], [(list(range(11, 23)), 4)], [([1, 2, 3, 4, 5], 2)]]
check.break_it("stale_hash", requests=three_acts, num_kv_blocks=4)


# %% [markdown] tags=["exercise-3-statement"]
# ### Exercise 3: a test that cannot be fooled (medium, 15 minutes)
#
# Two broken prefix caches that look like working ones: one counts every hit, reports it, and computes the whole prompt again. The other skips the tokens that it found, and then
# reads other blocks. Write `cache_works(ask, prompt)`, a test that passes an engine whose cache works and fails both of them, as well as an engine without a cache.
#
# `ask(prompt)` sends one request to the engine on trial, waits for its end, and returns what can be seen from outside:
#
# - `token_ids`: the answer, greedy;
# - `num_cached_tokens`: what the engine *says* that it found;
# - `num_computed_tokens`: how many prompt tokens it did compute, counted from its events.
#
# The engine starts empty; `prompt` is longer than a block. Return True or False.
#
# <details><summary>Hint: how often to ask</summary>Nothing can be found the first time.</details>
# <details><summary>Hint: one comparison is not enough</summary>The first impostor gives right answers, the second does little work.</details>

# %% tags=["exercise-3-stub"]
def cache_works(ask, prompt: list[int]) -> bool:
    raise NotImplementedError


# %% tags=["exercise-3-check"]
check.cache_works(cache_works)


# %% tags=["exercise-3-solution"]
def cache_works_solution(ask, prompt):
    first, second = ask(prompt), ask(prompt)
    return first.token_ids == second.token_ids and second.num_computed_tokens < first.num_computed_tokens


check.cache_works(cache_works_solution)

# %% [markdown]
# ## 11. Recap
#
# - K/V belong to a whole prefix. A block's hash must stand for all tokens up to its end, and for whatever else changes K/V.
# - A block is published after the step that computes it, shared by reference count, and findable until it is reused.
# - Least recently used goes first, and of one sequence the tail first: a chain without its head is worthless.
# - What is saved can be predicted exactly: full blocks of what was computed before, and never the last token.
#
# The ladder gets no rung here: it counts tokens a second of decode and the bytes they read, and a prefix cache changes neither. It saves prefill, and so the time to the first token.

# %%
llm.close()

# %% [markdown]
# **How vLLM does it.** `vllm/v1/core/block_pool.py` holds the table from hashes to blocks, the reference counts and the free queue; `vllm/v1/core/kv_cache_utils.py` computes the chain, with
# extra keys for adapters, images and a salt; `vllm/v1/core/kv_cache_manager.py` looks for the longest hit. After a full hit it computes the last *block* again, where we compute one token. It hashed with
# Python's `hash()` at first; since Python 3.12 a collision could be foreseen, which made it a security advisory (GHSA-rm76-4mrf-v9r8). SHA-256 is the default since version 0.10.2.
#
# **Next:** 06 looks at the scheduler: who computes how many tokens in which step.
