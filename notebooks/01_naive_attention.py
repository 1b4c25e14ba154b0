# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["header"]
# # 01 Naive attention
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/01_naive_attention.ipynb)
#
# Attention without a cache, where every step computes the whole past again.
#
# Previous: [00 Tour](00_tour.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/00_tour.ipynb)) · Next: [02 KV cache](02_kv_cache.ipynb) ([in Colab](https://colab.research.google.com/github/OWNER/minivllm/blob/v0.1.0/notebooks/02_kv_cache.ipynb)) · 70 minutes with the exercises · runs on a CPU, on Colab's free T4 and on larger GPUs

# %% [markdown]
# **You will build** attention from three matrix products up to what a current model runs: several heads, grouped kv heads, a causal mask, rotary
# positions. Then you put it into a real model with 30 layers and let it write, recomputing everything for every token.
#
# **You will learn** what a query, a key and a value are good for; why a language model never looks ahead; and why an engine that remembers nothing gets
# slower with every token it writes.
#
# **You need** matrix multiplication and a little torch. No earlier notebook.

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

# float32, so that two ways of computing can be compared token by token; blocks are notebook 02's subject
settings = {"enforce_eager": True, "block_size": 16, "num_kv_blocks": 64, "max_model_len": 1024}
llm = LLM(notebook.model(), dtype="float32", **settings)
model, config, device = llm.runner.model, llm.model_config, llm.runner.device
H, K, D, L = config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers
print(f"{L} layers, {H} query heads, {K} kv heads, head dim {D}")

# %% [markdown]
# ## 1. The problem: a token alone knows nothing
#
# A language model turns each token into a vector and sends the vectors through its layers. Almost everything in a layer treats one position at a
# time: the same matrices, applied to each vector by itself. If that were all, the model's guess after "The capital of France is" could depend on the
# word "is" alone.
#
# Let us see that happen. Below we ask the real model for its next token twice: once with the whole sentence, once with the last token only. (On a CPU it is SmolLM2-135M, the
# small model that comes with this package.)

# %%
sentence = llm.tokenizer.encode("The capital of France is")
greedy = SamplingParams(temperature=0, max_tokens=1)
with_all, alone = llm.generate([sentence, sentence[-1:]], greedy, use_tqdm=False)
print("after the whole sentence:", repr(with_all["text"]))
print("after its last token:    ", repr(alone["text"]))

# %% [markdown]
# The one place where positions exchange anything is **attention**. It is also the one place where the past has to be kept or computed again, so everything
# that makes an inference engine difficult (cache, blocks, scheduling) starts here.
#
# ## 2. The idea, drawn
#
# Each token makes three vectors out of its own: a **query** ("what am I looking for?"), a **key** ("what do I have to offer?") and a **value** ("what do I
# hand over?"). A token compares its query with the keys of all tokens up to itself. The comparison is a dot product; large means "relevant". A softmax
# turns the row of scores into weights that sum to one, and the token receives that mixture of values.
#
# Three tokens, vectors of length 2, numbers you can check with a pencil:

# %%
q = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 2.0]])
k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
v = torch.tensor([[10.0, 0.0], [0.0, 10.0], [20.0, 20.0]])
scores = q @ k.T  # [T, T]: row i holds what token i thinks of each token
scores

# %%
from minivllm.teach import sketch

causal = torch.ones(3, 3).tril().bool()
weights = scores.masked_fill(~causal, -torch.inf).softmax(dim=-1)
words = ["The", "cat", "sat"]
sketch.heatmaps({"scores = q kᵀ": scores,
                 "causal: no look ahead": scores.masked_fill(~causal, torch.nan),
                 "weights = softmax of a row": weights}, rows=words, columns=words)

# %% [markdown]
# Read the last row. "sat" has the query (2, 2). Its scores are 2 for "The", 2 for "cat" and 4 for itself. The softmax gives weights 0.11, 0.11
# and 0.79, so "sat" receives mostly its own value, (20, 20), mixed with a little of the others. The first row has nothing to choose: "The" can only look at itself, with weight 1.

# %%
weights @ v  # [T, D]: what each token receives


# %% [markdown]
# The upper triangle is crossed out because of how the model is used: it writes from left to right, so while it writes token 2, token 3 does not exist. A model
# trained with a look ahead would have learned to copy the answer. This is what *causal* means, and it has a consequence that notebook 02 lives on:
# **what an early token computed can never be changed by a later one.**
#
# ## 3. The naive version: loops
#
# The same in the plainest code there is, with one detail that the drawing left out. A dot product of D random numbers grows like the square root of D, and a softmax of large
# numbers puts nearly everything on one token. So scores are divided by the square root of D, the number of numbers in a vector. For D = 2 that softens the weights: "cat" now
# has 0.20 and 0.80 where the drawing has 0.12 and 0.88.

# %%
def attention_by_loops(q, k, v):  # one head: q, k, v [T, D] -> [T, D]
    out = torch.zeros_like(q)
    for i in range(len(q)):
        scores = torch.stack([q[i] @ k[j] for j in range(i + 1)]) / q.shape[-1] ** 0.5
        for weight, value in zip(scores.softmax(dim=0), v):
            out[i] += weight * value
    return out


attention_by_loops(q, k, v)


# %% [markdown]
# ## 4. Build it
#
# ### Three matrix products
#
# All dot products at once are one matrix product, the mixing of values is another. (The third makes q, k and v from the tokens; it comes below.) Masked
# scores become minus infinity, because exp(-inf) is an exact zero.

# %%
def attention_one_head(q, k, v):  # [T, D] -> [T, D]
    scores = q @ k.T / q.shape[-1] ** 0.5                                  # [T, T]
    future = torch.ones_like(scores).triu(diagonal=1).bool()
    return scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v      # [T, D]


torch.allclose(attention_one_head(q, k, v), attention_by_loops(q, k, v))


# %% [markdown]
# ### Several heads, and fewer kv heads than query heads
#
# One softmax can express one relation: "which noun does this verb belong to", say. A layer wants several, so q, k and v are made H times, each by matrices of their own, and
# each of these **heads** runs its own attention. Nothing else changes; H becomes a batch dimension.
#
# Keys and values are what a cache will have to keep, so models save on them: **grouped-query attention** lets a group of query heads share one kv head.
# SmolLM2 has 9 query heads and 3 kv heads: heads 0, 1, 2 read kv head 0, heads 3, 4, 5 read kv head 1, and so on. That is a third of the memory.
# In code each kv head is repeated H // K times, side by side. The check below compares one head of the result with the function above.

# %%
def attention(q, k, v):  # q [T, H, D], k and v [T, K, D] -> [T, H, D]
    group = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)      # [H, T, D], [K, T, D]
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)  # [H, T, D]
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5                    # [H, T, T]
    future = torch.ones_like(scores).triu(diagonal=1).bool()
    return (scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v).transpose(0, 1)


torch.manual_seed(0)
q, k, v = torch.randn(7, H, D), torch.randn(7, K, D), torch.randn(7, K, D)
head, kv_head = 4, 4 // (H // K)
print(attention(q, k, v).shape)
one_head = attention_one_head(q[:, head], k[:, kv_head], v[:, kv_head])
print(torch.allclose(attention(q, k, v)[:, head], one_head, atol=1e-5))


# %% [markdown]
# ### Where am I? Rotary positions
#
# Swap two earlier tokens and a later one receives the same mixture: the scores hold no distance. Current models put the position into q and k by **turning** them. The D numbers of
# a head form D/2 pairs: number i goes with number i + D/2. Each pair is a point in a plane, and it is turned by an angle that grows with the position. The first pair turns fast
# (one radian a token), the last one hardly at all.
#
# ```
# position       0            1            2
# first pair     →            ↗ 57°        ↖ 115°      angle = position × 1 radian
# last pair      →            → 0.001°     → 0.002°    angle = position × almost nothing
# ```

# %%
def rope(x, positions, theta=config.rope_theta):  # x [T, heads, D], positions [T] -> the same shape, turned
    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, device=x.device) / half)   # [D / 2]: 1, ..., almost 0
    angles = positions[:, None, None] * frequencies                        # [T, 1, D / 2]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)                             # a pair: numbers i and i + D / 2
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


# %% [markdown]
# Why turning? Because the dot product of two turned vectors depends only on the *difference* of their angles. A query at position 5 and a key at position 3 get the
# same score as the same query at 105 and key at 103; another distance gives another score. (The vectors are random; whether a score is negative means nothing.)

# %%
def score(query_at, key_at):
    query, key = q[:1, 0:1], k[:1, 0:1]  # any two vectors, [1, 1, D]
    return (rope(query, torch.tensor([query_at])) * rope(key, torch.tensor([key_at]))).sum().item()


print(f"positions   5 and   3: {score(5, 3):.3f}")
print(f"positions 105 and 103: {score(105, 103):.3f}")
print(f"positions   5 and   4: {score(5, 4):.3f}")


# %% [markdown]
# ### A real layer
#
# Now with the real weights. `qkv_proj` is the third matrix product: it makes q, k and v of all heads from the token's vector in one go. One more, `o_proj`, mixes what the heads
# bring back into one vector. (Qwen3 also normalises every head of q and k; SmolLM2 does not.)

# %%
def attention_layer(layer, x):  # x [T, hidden] -> [T, hidden]
    own, positions = layer.self_attn, torch.arange(len(x), device=x.device)
    q, k, v = own.qkv_proj(x).view(len(x), H + 2 * K, D).split((H, K, K), dim=1)
    if own.q_norm is not None:
        q, k = own.q_norm(q), own.k_norm(k)
    out = attention(rope(q, positions), rope(k, positions), v)             # [T, H, D]
    return own.o_proj(out.flatten(1))


# %% [markdown]
# The whole model around it is short. Vectors come out of a table. Every layer adds two corrections to them: attention, then a small network (`mlp`) that treats each position
# alone; before each the vectors are brought to one length (`layernorm`). At the end the last position's vector is compared with every token of the vocabulary. The results are
# the **logits**, one number for each token that could come next; the largest is the likeliest.

# %%
@torch.inference_mode()
def forward(token_ids):  # a list of T ids -> logits [V] of the next token
    x = model.model.embed_tokens(torch.tensor(token_ids, device=device))   # [T, hidden]
    for layer in model.model.layers:
        x = x + attention_layer(layer, layer.input_layernorm(x))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.compute_logits(model.model.norm(x[-1:]))[0]               # [V]


best = forward(sentence).topk(3)
for logit, token in zip(best.values.tolist(), best.indices.tolist()):
    print(f"{llm.tokenizer.decode([token])!r:12} {logit:.2f}")


# %% [markdown]
# ### Let it write
#
# Take the best token, append it, run everything again. This is the whole of text generation. Note what goes into `forward` each time: the entire sequence.

# %%
def generate(token_ids, num_tokens):
    token_ids, computed = list(token_ids), 0
    for _ in range(num_tokens):
        computed += len(token_ids)
        token_ids.append(forward(token_ids).argmax().item())
    return token_ids, computed


ours, computed = generate(sentence, 16)
print(llm.tokenizer.decode(ours))
print(f"{computed} positions computed for a sequence of {len(ours)}")

# %% [markdown]
# ## 5. The same answer?
#
# Two judges that we did not write for this notebook: torch's own attention, on random numbers, and the engine, on the sentence.

# %%
q, k, v = torch.randn(50, H, D), torch.randn(50, K, D), torch.randn(50, K, D)
batched = (x.transpose(0, 1)[None] for x in (q, k, v))                     # [1, heads, T, D] each
torchs = F.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
print("as torch's attention:", torch.allclose(attention(q, k, v), torchs, atol=1e-5))
greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
[output] = llm.generate([sentence], greedy, use_tqdm=False)
print("as the engine's tokens:", ours[len(sentence):] == output["token_ids"])

# %% [markdown]
# ## 6. The finished module
#
# The package does the same in three files that you can now read: `minivllm/layers/attention.py`, `minivllm/layers/rotary.py` and
# `minivllm/attention/torch_sdpa.py`. What they add:
#
# - **One fused call.** The kernels behind `scaled_dot_product_attention` never write the [T, T] scores to memory. For 8,000 tokens and 9 heads in float32 those would be 2.3 GB, in
#   every layer.
# - **Angles from a table.** The cosines and sines of all positions are computed once, not in each of 30 layers.
# - **A batch of sequences, and a cache.** Keys and values are written to memory that outlives the step; that is the subject of notebooks 02 to 04.
#
# The rotary layer agrees with ours to within rounding:

# %%
from minivllm.layers.rotary import RotaryEmbedding

rotary = RotaryEmbedding(D, max_positions=64, theta=config.rope_theta)
torch.allclose(rotary(q, torch.arange(50)), rope(q, torch.arange(50)), atol=1e-5)

# %% [markdown]
# ## 7. Watch it: the same keys and values, again and again
#
# The view below fills while the model writes. A row is one step, a column one position. Every cell is a position whose keys and values were computed in that
# step. Blue cells with a thick border were needed: that token is new. Hatched cells repeat what an earlier step had already computed and thrown away, the same numbers up to rounding.

# %%
from minivllm.teach import RecomputeView

view = RecomputeView(num_steps=12, num_positions=len(sentence) + 11)
display(view)
sequence = list(sentence)
for _ in range(12):
    token = forward(sequence).argmax().item()
    view.step(computed=len(sequence))
    sequence.append(token)

# %%
view.figure()

# %% [markdown]
# Twelve tokens were written and 126 positions computed, of which 16 were new. The triangle is what a KV cache removes.
#
# ## 8. Measure: what does forgetting cost?
#
# Predict first. A position costs two floating-point operations for every weight it passes (one multiplication, one addition). Attention adds, in each of L layers, 4 H D operations
# for every pair of positions: 2 for the score, 2 for the mixing, times H heads of D numbers (our naive code computes the masked half as well). The vocabulary is asked once a
# step, for the last position. The matrices dominate: for SmolLM2 attention reaches a tenth of the work at about 340 tokens. So one step over n tokens should take time
# proportional to n, and writing m tokens after a prompt of p takes p + (p + 1) + ... positions: **quadratic in the length of the answer**.

# %%
weights = sum(parameter.numel() for parameter in model.model.layers.parameters())


def pair_flops(n):
    return 4 * H * D * L * n * n


def predicted_flops(n):
    return 2 * weights * n + pair_flops(n) + 2 * config.vocab_size * config.hidden_size


for n in (16, 128, 1024):
    total = predicted_flops(n)
    print(f"{n:5} tokens: {total / 1e9:7.1f} GFLOP, attention's share {pair_flops(n) / total:.0%}")

# %% [markdown]
# To turn operations into seconds we need this machine's speed at a large matrix product, and the time it takes to read all weights once: no step can be
# faster than that, however short the sequence.

# %% tags=["nbval-ignore-output"]
from minivllm.bench.limits import Machine

machine = Machine.measure(llm.runner.device, llm.runner.dtype)
lengths = [1, 4, 16, 64, 128]
tokens = (sentence * 40)[:max(lengths)]
measured = [notebook.median_seconds(lambda: forward(tokens[:n]), repeats=2) for n in lengths]
reading = llm.runner.weight_bytes / machine.read_bandwidth
predicted = [max(predicted_flops(n) / machine.matmul_flops, reading) for n in lengths]
print(f"weights {llm.runner.weight_bytes / 1e9:.2f} GB")
for n, seconds, bound in zip(lengths, measured, predicted):
    print(f"{n:4} tokens: {1e3 * seconds:6.0f} ms measured, {1e3 * bound:6.0f} ms predicted")

# %% tags=["nbval-ignore-output"]
curves = {"measured": measured, "predicted: FLOPs or bytes": predicted}
sketch.lines(lengths, {name: [1e3 * seconds for seconds in curve] for name, curve in curves.items()},
             x="tokens in the sequence", y="milliseconds for one more token")


# %% [markdown]
# The predicted curve starts flat: for a few tokens reading all weights is the longer of the two, and computing one position or eight costs the same. Then it rises in a straight
# line. On a CPU the measured line does the same from a higher start: products with few rows do not reach the speed of a large one, and some two thousand small operations a step
# (60 a layer) have costs of their own. On a GPU the line stays almost flat at these sizes: starting the operations takes longer than doing them.
#
# ## 9. Exercises
#
# Each has a checker that says what is wrong. You can skip them; nothing below depends on your code.

# %% [markdown] tags=["exercise-1-statement"]
# ### Exercise 1: the mask (easy, 5 minutes)
#
# Write `causal_mask(num_queries, num_keys)`. It returns a bool tensor `[num_queries, num_keys]`, True where a query may read a key. So far there was a
# query for every key. Later there will be fewer: a cache holds the old keys, and only the last `num_queries` tokens ask. **The queries are the last positions**, so the triangle
# hangs at the lower right:
#
# For 2 queries and 5 keys, the queries stand at positions 3 and 4:
#
# ```
# [[ True,  True,  True,  True, False],
#  [ True,  True,  True,  True,  True]]
# ```
#
# <details><summary>Hint: where to start</summary>Write down the position of query i. It is not i.</details>
# <details><summary>Hint: torch</summary>`torch.arange(...)` twice, one of them as a column (`[:, None]`), and one comparison.</details>

# %% tags=["exercise-1-stub"]
def causal_mask(num_queries: int, num_keys: int) -> torch.Tensor:
    raise NotImplementedError


# %% tags=["exercise-1-check"]
from minivllm.teach import check

check.causal_mask(causal_mask)


# %% tags=["exercise-1-solution"]
def causal_mask_solution(num_queries, num_keys):
    positions = torch.arange(num_keys)
    return positions <= positions[num_keys - num_queries:, None]


check.causal_mask(causal_mask_solution)


# %% [markdown] tags=["exercise-2-statement"]
# ### Exercise 2: grouped-query attention for fewer queries than keys (medium, 20 minutes)
#
# Write `grouped_query_attention(q, k, v)` for `q [Tq, H, D]`, `k` and `v` `[Tk, K, D]` with `Tq <= Tk`. It returns `[Tq, H, D]`. Causal as in exercise 1;
# scores divided by the square root of D; query head h reads kv head `h // (H // K)`. You may start from `attention` in section 4: only the mask changes.
#
# With `Tq = 1` and one key, every weight is 1 and the answer is that key's value, once for each query head of its group. Use that as your first test.
#
# <details><summary>Hint: shapes</summary>Bring the heads to the front with `transpose(0, 1)`; then every head is one matrix product, as in `attention` above.</details>
# <details><summary>Hint: the wrong numbers with the right shape</summary>`repeat` gives kv heads 0, 1, 2, 0, 1, 2; you want 0, 0, 1, 1, 2, 2.</details>

# %% tags=["exercise-2-stub"]
def grouped_query_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


# %% tags=["exercise-2-check"]
check.grouped_query_attention(grouped_query_attention)


# %% tags=["exercise-2-solution"]
def grouped_query_attention_solution(q, k, v):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, D]
    mask = causal_mask_solution(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


check.grouped_query_attention(grouped_query_attention_solution)

# %% [markdown]
# **Optional: your attention in the real model.** This runs the engine with your function in place of its own, in every layer and every step. The engine asks with
# the whole prompt first (as many queries as keys), then with one query at a time.

# %% tags=["exercise-2-plug"]
from minivllm.teach import plug

plug.attention(grouped_query_attention, llm, "The capital of France is", max_tokens=8)

# %% [markdown] tags=["exercise-3-statement"]
# ### Exercise 3: break it (easy, 5 minutes)
#
# A colleague shortened exercise 2 with torch's own flag (heads first, as torch wants them):
#
# ```
# F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
# ```
#
# All tests were green. In the engine the first token of every answer was right, and the second was nonsense. Torch's triangle starts at the *upper left*: it takes query i to
# stand at position i.
#
# Give a number of queries and of keys for which the colleague's version is wrong. Then say why the tests were green, and why the first token was right.
#
# <details><summary>Hint</summary>Draw both masks for 2 queries and 3 keys.</details>
# <details><summary>Why the tests were green</summary>They had as many queries as keys, as a prompt has in its first step; then both triangles are the same. The second token is one query with many keys.</details>

# %% tags=["exercise-3-stub"]
num_queries, num_keys = None, None

# %% tags=["exercise-3-check"]
check.break_it("upper_left_mask", num_queries=num_queries, num_keys=num_keys)

# %% tags=["exercise-3-solution"]
check.break_it("upper_left_mask", num_queries=2, num_keys=6)

# %% [markdown]
# ## 10. Recap
#
# - Attention is a product that makes q, k and v, one that scores, a softmax, one that mixes, and `o_proj`; it is the only place where tokens meet.
# - Heads are a batch dimension. Query heads share kv heads to save what has to be kept.
# - The causal mask belongs to *positions*: a token reads itself and what stands before it.
# - Without memory, writing m tokens costs a number of positions quadratic in m.
#
# The ladder grows with every notebook. Blue is what you just measured; grey was measured with SmolLM2 on one core of a CPU. The last bar is the finished engine of notebook 00: it
# writes eight sequences at once, so that one reading of the weights serves eight tokens.

# %% tags=["nbval-ignore-output"]
from minivllm.teach import ladder

prompt = (sentence * 7)[:32]
seconds = notebook.median_seconds(lambda: generate(prompt, 8), repeats=1, warmup=0)
ladder.show("01", tokens_per_second=8 / seconds, bytes_per_token=llm.runner.weight_bytes)

# %%
llm.close()

# %% [markdown]
# **How vLLM does it.** The same layer is `Attention` in `vllm/model_executor/layers/attention`, called by most model files with q, k and v; the kernels behind it
# are backends (FlashAttention, FlashInfer, Triton) in `vllm/v1/attention/backends`. None of them ever materialises the scores, and all of them read keys and
# values from a paged cache.
#
# **Next:** [02 KV cache](02_kv_cache.ipynb) keeps what this notebook threw away 110 times.
