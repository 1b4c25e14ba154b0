# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["header"]
# # 00 Tour
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/00_tour.ipynb)
#
# The finished engine: text, chat, and the KV-cache blocks while three prompts run.
#
# Previous: none, this is the first · Next: [01 Naive attention](01_naive_attention.ipynb) · 20 minutes · runs on a CPU, on Colab's free T4 and on larger GPUs

# %% [markdown]
# **You will run** the finished engine that this series builds: generate text, look at its memory while it works, and chat with it.
#
# **You will learn** the six words that everything later is about: prefill, decode, KV cache, block, block table, batch.
#
# **You need** nothing but a browser and some Python. Each later notebook takes one part of what you see here, builds it from nothing, and compares it with the finished one.

# %% tags=["setup"]
import importlib, subprocess
from importlib.util import find_spec

if find_spec("google") and find_spec("google.colab") and not find_spec("minivllm"):  # a fresh Colab
    fetch = "test -d minivllm-source || git clone -q --depth 1 -b v0.1.0 https://github.com/OWNER/minivllm minivllm-source"
    done = subprocess.run(f"({fetch}) && bash minivllm-source/colab_setup.sh", shell=True, capture_output=True, text=True)
    print(done.stdout)
    if done.returncode:
        raise RuntimeError(f"minivllm could not be set up: {done.stderr.strip() or 'no reason given'}")
    importlib.invalidate_caches()
from minivllm.teach import notebook
notebook.where()

# %% [markdown]
# ## 1. Text comes out
#
# Two lines of code load a model and complete a sentence. Without a GPU it is a small model that comes with the package (135 million parameters; do not trust what it says).
# In Colab with a T4 it is Qwen3-0.6B. `enforce_eager=True` means: nothing is compiled or recorded ahead, every step runs as it is written.
# The other settings keep the memory small enough to see each part of it: 24 **blocks** of 16 tokens.

# %%
from minivllm import LLM, SamplingParams

llm = LLM(notebook.model(), enforce_eager=True, block_size=16, num_kv_blocks=24, max_model_len=384)
greedy = SamplingParams(temperature=0, max_tokens=12)
[output] = llm.generate(["The capital of France is"], greedy, use_tqdm=False)
print(output.prompt + output["text"])

# %% [markdown]
# The model does not see letters but **tokens**, numbers for frequent pieces of text. It read 5 of them and wrote 12, one at a time: each new token needs all tokens before it.

# %%
tokens = output.prompt_token_ids + output["token_ids"]
print([llm.tokenizer.decode([token]) for token in tokens])
print(len(output.prompt_token_ids), "tokens read,", len(output["token_ids"]), "written, finish reason:", output.outputs[0].finish_reason)

# %% [markdown]
# ## 2. The problem, measured: one at a time is slow
#
# Eight people ask at the same time. First we serve them one after the other, then all together. The texts are the same; look at the time.

# %%
import time

prompts = ["The capital of France is", "My favourite colour is", "Once upon a time", "Water boils at", "The opposite of hot is",
           "Two plus two is", "The largest planet is", "Good morning, how"]
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
begin = time.perf_counter()
one_by_one = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
between = time.perf_counter()
together = llm.generate(prompts, params, use_tqdm=False)
end = time.perf_counter()
print("same tokens:", [a["token_ids"] for a in one_by_one] == [b["token_ids"] for b in together])

# %% tags=["nbval-ignore-output"]
alone_rate, together_rate = 64 / (between - begin), 64 / (end - between)
print(f"one by one: {alone_rate:5.1f} tokens a second")
print(f"together:   {together_rate:5.1f} tokens a second, {together_rate / alone_rate:.1f} times as many")


# %% [markdown]
# Why? To write one token the machine reads every weight of the model from memory once. For one sequence that is half a gigabyte of reading for one token. For eight
# sequences in one **batch** it is the same half gigabyte, for eight tokens. An engine's first duty is to keep many sequences going at once.
#
# What stops it from taking hundreds? Memory. Each sequence drags along what the model remembers of its tokens, the **KV cache**. So the second duty, and the harder one,
# is to waste none of that memory.
#
# ## 3. The idea, drawn: blocks and a table
#
# The KV cache is one large array of **slots**, one slot for each token. Slots are handed out in **blocks** (here 16 slots; in the drawing 4). A sequence gets a new block when its
# last one is full, any block that is free, wherever it lies. A **block table** remembers which.
#
# ```
# sequence A, 10 tokens, block size 4, block table [6, 2, 3]
#
# position      0  1  2  3 | 4  5  6  7 | 8  9
# block         6  6  6  6 | 2  2  2  2 | 3  3
# slot         24 25 26 27 | 8  9 10 11 |12 13
#
# slot = block_table[position // block_size] * block_size + position % block_size
# ```
#
# It is how an operating system gives memory to programs: pages and a page table. A program believes its memory is one piece; so does a sequence.

# %%
def slot(position, block_table, block_size):
    return block_table[position // block_size] * block_size + position % block_size


[slot(position, [6, 2, 3], block_size=4) for position in range(10)]

# %% [markdown]
# ## 4. By hand: one step after the other
#
# `generate` is a loop around `step`. We run that loop ourselves and look at the sequence in between. The prompt has 14 tokens; watch `block_table`.

# %%
request = llm.add_request("A long time ago, in a small house by the sea, there", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
[sequence] = llm.engine.scheduler.waiting
print("tokens", len(sequence), "| block table", sequence.block_table, "| waiting:", llm.stats.num_requests_waiting)

# %%
while llm.has_unfinished_requests():
    finished = llm.step()
    print(f"tokens {len(sequence):2} | computed {sequence.num_computed_tokens:2} | block table {sequence.block_table} | tokens in this step: {llm.stats.batch_size}")
print(repr(finished[0]["text"]))

# %% [markdown]
# Three things to see:
#
# - The first step computes all tokens of the prompt at once: **prefill**. Every later step computes one: **decode**.
# - `computed` is always one behind `tokens`. The token that a step writes is fed to the model in the next step, and only then gets its slot.
# - The 17th token does not fit into the first block of 16, so a second block appears in the table. At the end the table is empty: the blocks went back.
#
# ## 5. The same answer?
#
# Blocks, batches and tables must not change a single token. The tests of this project compare every model family with Hugging Face's transformers, token by
# token in float32. Here we check the claim that you can check in two seconds: a sequence gives the same tokens alone, in company, and stepped by hand.

# %%
[again] = llm.generate(["A long time ago, in a small house by the sea, there"], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
print("stepped by hand and generated:", finished[0]["token_ids"] == again["token_ids"])

# %% [markdown]
# ## 6. The finished module
#
# What you just ran is about 1,700 lines of Python in two halves that never mix:
#
# - `minivllm/engine/` **decides**: which sequence computes which tokens, in which blocks. Pure Python, no tensors. A step is planned as plain data.
# - `minivllm/worker/` **computes**: turns a plan into tensors, runs the model, writes the cache, picks the tokens. It never decides.
# - `minivllm/llm.py` joins them and is what you hold: `generate`, `chat`, `stream`, and `add_request`, `step`, `abort` for those who want to look.
#
# And `minivllm/attention/`, `layers/`, `models/` hold the mathematics. Everything is meant to be read; when a notebook says "see scheduler.py", do.
#
# ## 7. Watch it
#
# Now the same engine with three prompts, and a view of its blocks that changes while it works. A letter is a sequence. Filled is written, the rest of a cell is
# reserved. When it is done, use the slider or the play button to go through it again.

# %%
from minivllm.teach import BlockView

view = BlockView(llm)
display(view)
prompts = ["The three most important inventions of the last century are", "Dear grandmother, thank you for", "The recipe needs two eggs, some flour and"]
params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (24, 10, 16)]
outputs = llm.generate(prompts, params, use_tqdm=False)

# %% [markdown]
# For readers of this page who do not run it, three moments of the same run: the prompts are in; one sequence crosses into a new block; the first one has finished.

# %%
view.figure(steps=[0, 7, 12])

# %%
from minivllm.teach import TimelineView

TimelineView(view.trace).figure()

# %% [markdown]
# And as sentences, for one of the requests:

# %% tags=["nbval-ignore-output"]
print(llm.explain(outputs[1].request_id))

# %% [markdown]
# ## 8. Measure: where memory and time go
#
# The **memory account**. Weights are fixed. Activations are what a step needs while it runs. The KV cache gets what we gave it; on a GPU, all that is left.

# %% tags=["nbval-ignore-output"]
print(llm.memory)

# %% [markdown]
# Time: predict first. A decode step has to read all weights once. Memory bandwidth divided by bytes is therefore the most steps a second that any engine can do on this
# machine.

# %% tags=["nbval-ignore-output"]
from minivllm.bench.limits import Machine

machine = Machine.measure(llm.runner.device, llm.runner.dtype)
bound = machine.read_bandwidth / llm.runner.weight_bytes
print(f"memory bandwidth, measured:           {machine.read_bandwidth / 1e9:6.1f} GB/s")
print(f"weights:                              {llm.runner.weight_bytes / 1e9:6.2f} GB")
print(f"so at most, one sequence:             {bound:6.1f} tokens a second")
print(f"measured, one sequence at a time:     {alone_rate:6.1f}")
print(f"measured, eight sequences together:   {together_rate:6.1f}")

# %% [markdown]
# One sequence stays below the bound: some hundred small operations a step have their own cost, and a CPU does not read small matrices at full speed. Eight sequences go above it, since they share
# each reading of the weights. That is the whole economy of serving.
#
# The same sum for other machines, from the bandwidth on their data sheets. These are **predictions of an upper bound, not measurements**:

# %%
machines = {"Colab T4": 320e9, "L4": 300e9, "A100 40 GB": 1555e9, "H200": 4800e9}  # bytes a second, from data sheets
weights = 1.19e9                                                                  # Qwen3-0.6B in 16 bit
for name, bandwidth in machines.items():
    print(f"{name:12} at most {bandwidth / weights:6,.0f} tokens a second for one sequence of Qwen3-0.6B")

# %% [markdown]
# On a T4 expect much less for now: this version's attention is written in plain torch, and the many small launches of a step take longer than the reading. Nobody has
# measured this notebook on a real T4 yet. Notebooks 03 and 09 are about closing that gap.
#
# ## 9. Chat
#
# A conversation is one growing prompt: the model's template around everything said so far. The loop ends with an empty line. `stream` gives the text piece by piece.

# %%
messages = []
for question in notebook.questions(["What is the capital of France?", "And of Italy?"]):
    messages.append({"role": "user", "content": question})
    answer = ""
    for piece in llm.stream({"prompt_token_ids": llm.chat_prompt(messages)}, SamplingParams(temperature=0, max_tokens=60)):
        print(piece, end="", flush=True)
        answer += piece
    print()
    messages.append({"role": "assistant", "content": answer})


# %% [markdown]
# ## 10. Exercises
#
# Three small ones, so that you know how exercises work here: fill in the function, run the check, read what it says. Nothing later depends on your code.

# %% [markdown] tags=["exercise-1-statement"]
# ### Exercise 1: how many blocks? (easy, 5 minutes)
#
# Write `blocks_needed(num_tokens, block_size)`: how many blocks a sequence of `num_tokens` tokens occupies. The last one may be partly empty.
#
# Examples: 16 tokens in blocks of 16 need 1 block, 17 tokens need 2.
#
# <details><summary>Hint</summary>What do you have to add before dividing, so that rounding down gives the right answer?</details>

# %% tags=["exercise-1-stub"]
def blocks_needed(num_tokens: int, block_size: int) -> int:
    raise NotImplementedError


# %% tags=["exercise-1-check"]
from minivllm.teach import check

check.blocks_needed(blocks_needed)


# %% tags=["exercise-1-solution"]
def blocks_needed_solution(num_tokens, block_size):
    return (num_tokens + block_size - 1) // block_size


check.blocks_needed(blocks_needed_solution)


# %% [markdown] tags=["exercise-2-statement"]
# ### Exercise 2: bytes of one token (easy, 5 minutes)
#
# The cache keeps one key and one value for each token, in every layer, for every kv head; each is a vector of `head_dim` numbers. Write
# `kv_bytes_per_token(num_layers, num_kv_heads, head_dim, bytes_per_element)`.
#
# Example: 2 layers, 1 kv head, head dim 4, 2 bytes a number: 32 bytes.

# %% tags=["exercise-2-stub"]
def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_element: int) -> int:
    raise NotImplementedError


# %% tags=["exercise-2-check"]
check.kv_bytes_per_token(kv_bytes_per_token)


# %% tags=["exercise-2-solution"]
def kv_bytes_per_token_solution(num_layers, num_kv_heads, head_dim, bytes_per_element):
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_element


check.kv_bytes_per_token(kv_bytes_per_token_solution)

# %% [markdown]
# **Optional: both functions against the real model.** How many requests of 100 tokens fit into this engine's pool at once?

# %% tags=["exercise-2-plug"]
try:
    config = llm.model_config
    yours = kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, llm.runner.dtype.itemsize)
    print("bytes a token, as the engine says:", yours == llm.memory.bytes_per_token)
    print("requests of 100 tokens:", 24 // blocks_needed(100, 16) == llm.memory.requests_that_fit(100))
except NotImplementedError:
    print("not attempted yet")

# %% [markdown] tags=["exercise-3-statement"]
# ### Exercise 3: break it (medium, 10 minutes)
#
# Every notebook has an engine with a planted fault, one that happened somewhere. Your task is not to repair it but to find an input that shows it: a good test.
#
# This one asks for a new block one token too late: it thinks 17 tokens still fit into a block of 16. (Blocks here have 4 slots, so the mistake comes sooner.) Most inputs work.
# Give a prompt length and a number of tokens to write, for a single request, with which the engine goes wrong.
#
# <details><summary>Hint</summary>Section 4 again: when does a token get its slot? The last token written never gets one.</details>

# %% tags=["exercise-3-stub"]
prompt_tokens, max_tokens = None, None

# %% tags=["exercise-3-check"]
check.break_it("boundary_off_by_one", prompt_tokens=prompt_tokens, max_tokens=max_tokens)

# %% tags=["exercise-3-solution"]
check.break_it("boundary_off_by_one", prompt_tokens=4, max_tokens=3)

# %% [markdown]
# ## 11. Recap
#
# - Prefill computes a whole prompt at once, decode one token a step; each step reads every weight.
# - Sequences share that reading when they run in one batch, so the number of sequences that fit in memory decides the speed.
# - What a sequence needs is its KV cache, kept in blocks that a block table strings together.
# - The engine decides, the worker computes.
#
# The ladder at the end of each notebook shows how far we are: from an engine that remembers nothing to this one.

# %% tags=["nbval-ignore-output"]
from minivllm.teach import ladder

ladder.show("00", tokens_per_second=together_rate, bytes_per_token=llm.runner.weight_bytes / 8)

# %%
llm.close()

# %% [markdown]
# **How vLLM does it.** The same names, on purpose: `vllm/v1/core/sched/scheduler.py`, `vllm/v1/core/block_pool.py`, `vllm/v1/worker/gpu_model_runner.py`. When you know the small ones
# you can find your way in the large ones.
#
# ### The map
#
# | | notebook | you build |
# | --- | --- | --- |
# | 00 | **tour** | nothing yet |
# | 01 | [naive attention](01_naive_attention.ipynb) | attention from matrix products; a model that recomputes everything |
# | 02 | [KV cache](02_kv_cache.ipynb) | one contiguous buffer a sequence; what it wastes |
# | 03 | slot-mapped cache write | a Triton kernel of a dozen lines |
# | 04 | block table and paged attention | the block manager; reading through the table |
# | 05 | prefix cache | hashes, sharing, eviction |
# | 06 | scheduler | continuous batching, chunked prefill |
# | 07 | preemption and admission | what happens when memory runs out |
# | 08 | sampling | from logits to a token |
# | 09 | CUDA graphs and torch.compile | the launches disappear |
# | 10 | tensor parallelism | one model on several GPUs |
# | 11 | LoRA and quantized weights | adapters, smaller weights |
# | 12 | serving and monitoring | an OpenAI-compatible server |
# | 13 | measuring against the limit | every claim measured again |
# | 14 | capstone | an engine of 150 lines from your own parts |
#
# **Next:** [01 Naive attention](01_naive_attention.ipynb) starts at the bottom of the ladder.
