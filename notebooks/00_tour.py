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
# Previous: none, this is the first · Next: [01 Naive attention](01_naive_attention.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/01_naive_attention.ipynb)) · 45 minutes with the exercises · runs on a CPU, on Colab's free T4 and on larger GPUs

# %% [markdown]
# **You will run** the finished engine that this series builds: generate text, look at its memory while it works, and chat with it.
#
# **You will learn** the six words that everything later is about: prefill, decode, KV cache, block, block table, batch. They are vLLM's words. vLLM is the
# widely used open-source engine that serves language models; minivllm is a small, readable relative of it.
#
# **You need** nothing but a browser and some Python. Each later notebook takes one part of what you see here, builds it from nothing, and compares it with the finished one.

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

# %% [markdown]
# ## 1. Text comes out
#
# The line above says which device and which model you got. Without a GPU it is SmolLM2-135M, a small model that comes with the package (135 million parameters; do not
# trust what it says). In Colab with a T4 it is Qwen3-0.6B. A few lines load it and complete a sentence. The settings keep the memory small enough to see each part of
# it: 24 **blocks** of 16 tokens. (`enforce_eager=True` matters from notebook 09 on.) `temperature=0` means: always the likeliest next token, so the text is the same each time.

# %%
from minivllm import LLM, SamplingParams

llm = LLM(notebook.model(), enforce_eager=True, block_size=16, num_kv_blocks=24, max_model_len=384)
greedy = SamplingParams(temperature=0, max_tokens=12)
[output] = llm.generate(["The capital of France is"], greedy, use_tqdm=False)
print(output.prompt + output["text"])

# %% [markdown]
# The model does not see letters but **tokens**, numbers for frequent pieces of text. It read 5 of them and wrote 12, one at a time: each new token needs all tokens before it.
# It stopped because it had written `max_tokens`; that is what "length" means.

# %%
tokens = output.prompt_token_ids + output["token_ids"]
print([llm.tokenizer.decode([token]) for token in tokens])
print(len(output.prompt_token_ids), "tokens read,", len(output["token_ids"]), "written")
print("why it stopped:", output.outputs[0].finish_reason)

# %% [markdown]
# ## 2. The problem, measured: one at a time is slow
#
# Eight people ask at the same time. First we serve them one after the other, then all together. The texts are the same; look at the time.

# %%
import time

prompts = ["The capital of France is", "My favourite colour is", "Once upon a time", "Water boils at",
           "The opposite of hot is", "Two plus two is", "The largest planet is", "Good morning, how"]
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)  # 6 tokens, even if the text could end
llm.generate(prompts, params, use_tqdm=False)  # once without a clock: the first run of anything is slower
begin = time.perf_counter()
one_by_one = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
between = time.perf_counter()
together = llm.generate(prompts, params, use_tqdm=False)
end = time.perf_counter()
print("same tokens:", [a["token_ids"] for a in one_by_one] == [b["token_ids"] for b in together])

# %% tags=["nbval-ignore-output"]
written = len(prompts) * params.max_tokens
alone_rate, together_rate = written / (between - begin), written / (end - between)
print(f"one by one: {alone_rate:5.1f} tokens a second")
print(f"together:   {together_rate:5.1f} tokens a second, {together_rate / alone_rate:.1f} times as many")


# %% [markdown]
# Why? To write one token the machine reads every weight of the model from memory once: half a gigabyte for the small model, 1.2 GB for Qwen3. For eight
# sequences in one **batch** (what one step computes together) it is the same reading, for eight tokens. An engine's first duty is to keep many sequences going at once.
#
# What stops it from taking hundreds? Memory. For every token, each layer of the model keeps two lists of numbers, a *key* and a *value* (K and V), through which later
# tokens look back at it; notebook 01 shows how. All of them together are the **KV cache**. So the second duty, and the harder one, is to waste none of that memory.
#
# ## 3. The idea, drawn: blocks and a table
#
# The KV cache is one large array of **slots**; a slot holds the keys and values of one token. Slots are handed out in **blocks** (here 16 slots; in the drawing 4). A sequence gets a new block when its
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
story = "A long time ago, in a small house by the sea, there"
five_tokens = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
request = llm.add_request(story, five_tokens)
sequence = llm.engine.scheduler.waiting[-1]
print("tokens", len(sequence), "| block table", sequence.block_table, "|", sequence.status.value)

# %%
while llm.has_unfinished_requests():
    finished = llm.step()
    print(f"tokens {len(sequence)} | computed {sequence.num_computed_tokens} |",
          f"block table {sequence.block_table} | tokens in this step: {llm.stats.batch_size}")
print(repr(finished[0]["text"]))

# %% [markdown]
# Three things to see:
#
# - The first step computes all 14 tokens of the prompt at once: **prefill**. Every later step computes one: **decode**.
# - `computed` is always one behind `tokens`. The token that a step writes is fed to the model in the next step, and only then gets its slot.
# - The block table holds the numbers of blocks that happened to be free. One block has room for 16 tokens. The 17th token is written in the third row, but its slot is
#   needed one step later, in the row with `computed 17`: there the second block appears. At the end the table is empty: the blocks went back.
#
# ## 5. The same answer?
#
# Blocks, batches and tables must not change a single token. The tests of this project compare every model family with Hugging Face's transformers, token by
# token in float32. Here we check the claim that you can check in two seconds: a sequence gives the same tokens alone, in company, and stepped by hand.

# %%
[again] = llm.generate([story], five_tokens, use_tqdm=False)
print("stepped by hand and generated:", finished[0]["token_ids"] == again["token_ids"])

# %% [markdown]
# ## 6. The finished module
#
# What you just ran is about 1,500 lines of code in two halves that never mix:
#
# - `minivllm/engine/` **decides**: which sequence computes which tokens, in which blocks. Pure Python, no tensors. A step is planned as plain data.
# - `minivllm/worker/` **computes**: turns a plan into tensors, runs the model, writes the cache, picks the tokens. It never decides.
# - `minivllm/llm.py` joins them and is what you hold: `generate`, `chat`, `stream`, and `add_request`, `step`, `abort` for those who want to look.
#
# Another 600 lines in `minivllm/attention/`, `layers/` and `models/` hold the mathematics. Everything is meant to be read; when a notebook says "see scheduler.py", do.
#
# ## 7. Watch it
#
# Now the same engine with three prompts, and a view of its blocks that changes while it works. A letter is a sequence. The filled part of a cell is written, the rest is
# reserved. Grey dotted blocks are left over from earlier requests: free, but what they hold is kept in case a prompt begins the same way (that is notebook 05).
# When it is done, use the slider or the play button to go through it again.

# %%
from minivllm.teach import BlockView

view = BlockView(llm)
display(view)
prompts = ["The three most important inventions of the last century are",
           "Dear grandmother, thank you for", "The recipe needs two eggs, some flour and"]
params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (24, 10, 16)]
outputs = llm.generate(prompts, params, use_tqdm=False)

# %% [markdown]
# For readers of this page who do not run it, three moments of the same run: the prompts are in; A crosses into a new block; B has written its ten tokens and gives its
# block back.

# %%
view.figure(steps=[0, 7, 9])

# %% [markdown]
# The same run over time: a row for each sequence, a column for each step. The number in the first column is the length of the prompt, all of it computed in that step.

# %%
from minivllm.teach import TimelineView

TimelineView(view.trace).figure()

# %% [markdown]
# And as sentences, for B, the letter to grandmother:

# %% tags=["nbval-ignore-output"]
print(llm.explain(outputs[1].request_id))

# %% [markdown]
# ## 8. Measure: where memory and time go
#
# The **memory account**. Weights are fixed. Activations are what a step needs while it runs. The KV cache gets what we gave it; on a GPU, all that is left. What is missing
# from the sum belongs to other programs. The last line says how many requests of a given length would fit at once.

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
# One sequence stays below the bound: a step is many small operations, starting each one costs time, and a CPU does not read small matrices at full speed. Eight sequences go
# above it, since they share each reading of the weights.
#
# The same sum for other machines, from the bandwidth on their data sheets. These are **predictions of an upper bound, not measurements**:

# %%
weights = 1.19e9  # bytes of Qwen3-0.6B in 16 bit
machines = {"Colab T4": 320e9, "L4": 300e9, "A100 40 GB": 1555e9, "H200": 4800e9}  # bytes a second
for name, bandwidth in machines.items():
    print(f"{name:12} at most {bandwidth / weights:6,.0f} tokens a second for one sequence of Qwen3-0.6B")

# %% [markdown]
# On a T4 expect much less with `enforce_eager=True`: a step is some three hundred operations, and starting them all takes Colab's CPU longer than the reading takes the GPU. Nobody has
# measured this notebook on a real T4 yet. Notebook 09 closes that gap.
#
# ## 9. Chat
#
# A conversation is one growing prompt: the model's template around everything said so far. Type a question and press Enter; **an empty line ends the loop** and lets the notebook go
# on. (The two questions in the code are asked only where nobody can type.) This small engine has room for about seven answers; then it says so and ends.

# %%
short_answer = SamplingParams(temperature=0, max_tokens=60)
messages = []
for question in notebook.questions(["What is the capital of France?", "And of Italy?"]):
    messages.append({"role": "user", "content": question})
    prompt, answer = {"prompt_token_ids": llm.chat_prompt(messages)}, ""
    if len(prompt["prompt_token_ids"]) + short_answer.max_tokens > llm.config.max_model_len:
        print("the conversation is too long for this engine")
        break
    for piece in llm.stream(prompt, short_answer):
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
# Example: 3 layers, 2 kv heads, head dim 4, 4 bytes a number: 192 bytes.

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
# your two functions, if you have written them
try:
    config = llm.model_config
    shape = config.num_layers, config.num_kv_heads, config.head_dim
    yours = kv_bytes_per_token(*shape, llm.runner.dtype.itemsize)
    fit = 24 // blocks_needed(100, 16)
    print("bytes a token: yours", yours, "the engine's", llm.memory.bytes_per_token)
    print("requests of 100 tokens: yours", fit, "the engine's", llm.memory.requests_that_fit(100))
except (NotImplementedError, TypeError):
    print("not attempted yet")

# %% [markdown] tags=["exercise-3-statement"]
# ### Exercise 3: break it (medium, 10 minutes)
#
# Every notebook has an engine with a planted fault, one that happened somewhere. Your task is not to repair it but to find an input that shows it: a good test.
#
# This one gives a prompt the right blocks, but while it decodes it asks for a new block one token too late, when the last one is already overfull. Blocks here have 4 slots, and
# every request writes exactly **2 tokens**. For three prompt lengths out of four it works as if nothing were wrong. Give one with which it fails, and be able to say why.
#
# <details><summary>Hint</summary>Section 4 again: which of the two written tokens gets a slot, and at which position?</details>

# %% tags=["exercise-3-stub"]
prompt_tokens = None

# %% tags=["exercise-3-check"]
check.break_it("boundary_off_by_one", prompt_tokens=prompt_tokens, max_tokens=2)

# %% tags=["exercise-3-solution"]
check.break_it("boundary_off_by_one", prompt_tokens=8, max_tokens=2)

# %% [markdown]
# ## 11. Recap
#
# - Prefill computes a whole prompt at once, decode one token a step; each step reads every weight.
# - Sequences share that reading when they run in one batch.
# - What a sequence needs is its KV cache, kept in blocks that a block table strings together.
# - The engine decides, the worker computes.
#
# The ladder at the end of each notebook shows how far we are. Its grey bars were measured with SmolLM2 on one core of a CPU when the notebooks were built; the blue one is yours. At
# the bottom stands this engine with eight sequences at once, each reading of the weights shared by eight tokens; above it the engine of notebook 01, which remembers nothing.

# %% tags=["nbval-ignore-output"]
from minivllm.teach import ladder

one_reading = llm.runner.weight_bytes  # serves 8 tokens
ladder.show("00", tokens_per_second=together_rate, bytes_per_token=one_reading / 8)

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
