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
# Previous: [00 Tour](00_tour.ipynb) · Next: [02 KV cache](02_kv_cache.ipynb) · 40 minutes · runs on a CPU, on Colab's free T4 and on larger GPUs

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
    fetch = "test -d minivllm-source || git clone -q --depth 1 -b v0.1.0 https://github.com/OWNER/minivllm minivllm-source"
    done = subprocess.run(f"({fetch}) && bash minivllm-source/colab_setup.sh", shell=True, capture_output=True, text=True)
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

llm = LLM(notebook.model(), enforce_eager=True, num_kv_blocks=64, block_size=16, max_model_len=1024)
model, config = llm.runner.model, llm.model_config
H, K, D, L = config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers
print(f"{L} layers, {H} query heads, {K} kv heads, head dim {D}")

# %% [markdown]
# ## 1. The problem: a token alone knows nothing
#
# A language model turns each token into a vector and sends the vectors through its layers. Almost everything in a layer treats one position at a
# time: the same matrices, applied to each vector by itself. If that were all, the model's guess after "The capital of France is" could depend on the
# word "is" alone.
#
# Let us see that happen. Below we ask the real model for its next token twice: once with the whole sentence, once with the last token only.

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
v = torch.tensor([[10.0, 0.0], [0.0, 10.0], [5.0, 5.0]])
scores = q @ k.T  # [T, T]: row i holds what token i thinks of each token
scores

# %%
from minivllm.teach import sketch

causal = torch.ones(3, 3).tril().bool()
weights = scores.masked_fill(~causal, -torch.inf).softmax(dim=-1)
sketch.heatmaps({"scores = q kᵀ": scores, "causal: no look ahead": scores.masked_fill(~causal, torch.nan), "weights = softmax of a row": weights},
                rows=["The", "cat", "sat"], columns=["The", "cat", "sat"])


# %% [markdown]
# Read the last row. "sat" has the query (2, 2). Its scores are 2 for "The", 2 for "cat" and 4 for itself. The softmax gives weights 0.11, 0.11
# and 0.79, so "sat" receives mostly its own value. The first row has nothing to choose: "The" can only look at itself, with weight 1.
#
# The upper triangle is crossed out because of how the model is used: it writes from left to right, so while it writes token 2, token 3 does not exist. A model
# trained with a look ahead would have learned to copy the answer. This is what *causal* means, and it has a gift for us that notebook 02 unpacks:
# **what an early token computed can never be changed by a later one.**
#
# ## 3. The naive version: loops
#
# The same in the plainest code there is, for one head. `D ** 0.5` keeps the scores from growing with the length of the vectors; without it, the softmax of
# long vectors would put everything on one token.

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
# All dot products at once are one matrix product, the mixing of values is another. (The third made q, k and v from the tokens; it comes below.) Masked
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
# One softmax can express one relation: "which noun does this verb belong to", say. A layer wants several, so the vector is cut into H **heads** and each runs
# its own attention. Nothing else changes; H becomes a batch dimension.
#
# Keys and values are what a cache will have to keep, so models save on them: **grouped-query attention** lets a group of query heads share one kv head. The
# embedded model has 9 query heads and 3 kv heads: heads 0, 1, 2 read kv head 0, heads 3, 4, 5 read kv head 1, and so on. That is a third of the memory.
# In code each kv head is repeated H // K times, side by side.

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
attention(q, k, v).shape


# %% [markdown]
# ### Where am I? Rotary positions
#
# Swap two tokens and their keys and values are swapped with them: the mixture stays the same. Attention by itself does not know the order. Current models
# put the position into q and k by **turning** them. The D numbers of a head form D/2 pairs, each pair is a point in a plane, and it is turned by an angle that
# grows with the position. The first pair turns fast (one radian a token), the last one hardly at all.

# %%
def rope(x, positions, theta=config.rope_theta):  # x [T, heads, D], positions [T] -> the same shape, turned
    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half) / half)                    # [D / 2]: 1, ..., almost 0
    angles = positions[:, None, None] * frequencies                        # [T, 1, D / 2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1).to(x.dtype)


# %% [markdown]
# Why turning? Because the dot product of two turned vectors depends only on the *difference* of their angles. Query at position 5 and key at position 3 get the
# same score as query at 105 and key at 103:

# %%
def score(query_at, key_at):
    return (rope(q[:1], torch.tensor([query_at])) * rope(q[1:2], torch.tensor([key_at]))).sum().item()


print(f"positions   5 and   3: {score(5, 3):.3f}")
print(f"positions 105 and 103: {score(105, 103):.3f}")
print(f"positions   5 and   4: {score(5, 4):.3f}")


# %% [markdown]
# ### A real layer
#
# Now with the real weights. `qkv_proj` is the third matrix product: it makes q, k and v of all heads from the token's vector in one go. (Qwen3 also
# normalises every head of q and k; the embedded Llama-style model does not.)

# %%
def attention_layer(layer, x):  # x [T, hidden] -> [T, hidden]
    own, positions = layer.self_attn, torch.arange(len(x))
    q, k, v = own.qkv_proj(x).view(len(x), H + 2 * K, D).split((H, K, K), dim=1)
    if own.q_norm is not None:
        q, k = own.q_norm(q), own.k_norm(k)
    out = attention(rope(q, positions), rope(k, positions), v)             # [T, H, D]
    return own.o_proj(out.flatten(1))


# %% [markdown]
# The whole model around it is short. Vectors come out of a table, every layer adds two corrections to them (attention, then a small network that treats each
# position alone), and the last position's vector is compared with every word of the vocabulary.

# %%
@torch.inference_mode()
def forward(token_ids):  # a list of T ids -> logits [V] of the next token
    x = model.model.embed_tokens(torch.tensor(token_ids))                  # [T, hidden]
    for layer in model.model.layers:
        x = x + attention_layer(layer, layer.input_layernorm(x))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.compute_logits(model.model.norm(x[-1:]))[0]               # [V]


best = forward(sentence).topk(3)
[(llm.tokenizer.decode([token]), round(logit, 2)) for logit, token in zip(best.values.tolist(), best.indices.tolist())]


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
torchs = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True)[0].transpose(0, 1)
print("as torch's attention:", torch.allclose(attention(q, k, v), torchs, atol=1e-5))
[output] = llm.generate([sentence], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
print("as the engine's tokens:", ours[len(sentence):] == output["token_ids"])

# %% [markdown]
# ## 6. The finished module
#
# The package does the same in three files that you can now read: `minivllm/layers/attention.py`, `minivllm/layers/rotary.py` and
# `minivllm/attention/torch_sdpa.py`. What they add:
#
# - **One fused call.** `scaled_dot_product_attention` never writes the [T, T] scores to memory. For 8,000 tokens and 9 heads in float32 those would be 2.3 GB.
# - **Angles from a table.** The cosines and sines of all positions are computed once, not in each of 30 layers.
# - **A batch of sequences, and a cache.** Keys and values are written to memory that outlives the step; that is the subject of notebooks 02 to 04.
#
# The rotary layer agrees with ours to the last digit that float32 offers:

# %%
from minivllm.layers.rotary import RotaryEmbedding

rotary = RotaryEmbedding(D, max_positions=64, theta=config.rope_theta)
torch.allclose(rotary(q, torch.arange(50)), rope(q, torch.arange(50)), atol=1e-5)

# %% [markdown]
# ## 7. Watch it: the same keys and values, again and again
#
# The view below fills while the model writes. A row is one step, a column one position. Every cell is a position whose keys and values were computed in that
# step. Dark cells were needed: that token is new. Hatched cells repeat, digit by digit, what an earlier step had already computed and thrown away.

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
# Predict first. A position costs two floating-point operations for every weight it passes (one multiplication, one addition), and attention adds 4 H D operations
# for every pair of positions. The small network and the projections dominate: for the embedded model attention reaches a tenth of the work at about 340
# tokens. So one step over n tokens should take time proportional to n, and writing m tokens after a prompt of p takes p + (p + 1) + ... positions:
# **quadratic in the length of the answer**.

# %%
weights = sum(parameter.numel() for parameter in model.model.layers.parameters())


def predicted_flops(n):
    body, pairs = 2 * weights * n, 4 * H * D * L * n * n
    return body + pairs + 2 * config.vocab_size * config.hidden_size


for n in (16, 128, 1024):
    print(f"{n:5} tokens: {predicted_flops(n) / 1e9:7.1f} GFLOP, attention's share {4 * H * D * L * n * n / predicted_flops(n):.0%}")

# %% [markdown]
# To turn operations into seconds we need this machine's speed at a large matrix product, and the time it takes to read all weights once: no step can be
# faster than that, however short the sequence.

# %% tags=["nbval-ignore-output"]
from minivllm.bench.limits import Machine

machine = Machine.measure(llm.runner.device, llm.runner.dtype)
lengths = [8, 16, 32, 64, 128]
tokens = (sentence * 40)[:max(lengths)]
measured = [notebook.median_seconds(lambda: forward(tokens[:n]), repeats=2) for n in lengths]
predicted = [max(predicted_flops(n) / machine.matmul_flops, llm.runner.weight_bytes / machine.read_bandwidth) for n in lengths]
for n, seconds, bound in zip(lengths, measured, predicted):
    print(f"{n:4} tokens: {1e3 * seconds:6.0f} ms measured, {1e3 * bound:6.0f} ms predicted")

# %% tags=["nbval-ignore-output"]
sketch.lines(lengths, {"measured": [1e3 * s for s in measured], "predicted: FLOPs or bytes": [1e3 * s for s in predicted]},
             x="tokens in the sequence", y="milliseconds for one more token")


# %% [markdown]
# The predicted curve starts flat: for a few tokens reading 0.5 GB of weights is the longer of the two, and computing one position or eight costs the same. Then it
# rises in a straight line. The measured line rises with the same slope, from a higher start: some 500 small operations a step have costs of their own, small
# matrices do not reach the speed of a large one, and our naive attention writes its scores out and reads them again.
#
# ## 9. Exercises
#
# Each has a checker that says what is wrong. You can skip them; nothing below depends on your code.

# %% [markdown] tags=["exercise-1-statement"]
# ### Exercise 1: the mask (easy, 5 minutes)
#
# Write `causal_mask(num_queries, num_keys)`. It returns a bool tensor `[num_queries, num_keys]`, True where a query may read a key. So far there was a
# query for every key. Later there will be fewer: a cache holds the old keys, and only the last `num_queries` tokens ask. **The queries are the last positions.**
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
# ### Exercise 2: grouped-query attention for fewer queries than keys (medium, 15 minutes)
#
# Write `grouped_query_attention(q, k, v)` for `q [Tq, H, D]`, `k` and `v` `[Tk, K, D]` with `Tq <= Tk`. It returns `[Tq, H, D]`. Causal as in exercise 1;
# scores divided by the square root of D; query head h reads kv head `h // (H // K)`.
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
# ### Exercise 3: break it (medium, 10 minutes)
#
# A colleague shortened exercise 2 with torch's own flag:
#
# ```
# F.scaled_dot_product_attention(q, k, v, is_causal=True)
# ```
#
# All tests were green, and the model still wrote nonsense on long prompts. Torch's triangle starts at the *upper left*: it takes query i to stand at position i.
#
# Give a number of queries and of keys (at most 64 keys) for which the colleague's version is wrong. Then think about why the tests were green.
#
# <details><summary>Hint</summary>Draw both masks for 2 queries and 3 keys.</details>

# %% tags=["exercise-3-stub"]
num_queries, num_keys = None, None

# %% tags=["exercise-3-check"]
check.break_it("upper_left_mask", num_queries=num_queries, num_keys=num_keys)

# %% tags=["exercise-3-solution"]
check.break_it("upper_left_mask", num_queries=2, num_keys=6)

# %% [markdown]
# ## 10. Recap
#
# - Attention is three matrix products and a softmax; it is the only place where tokens meet.
# - Heads are a batch dimension. Query heads share kv heads to save what has to be kept.
# - The causal mask belongs to *positions*, not to rows: with fewer queries than keys it hangs at the lower right.
# - Without memory, writing m tokens costs a number of positions quadratic in m.
#
# The ladder, which grows with every notebook: the naive engine writes a few tokens a second, and each one reads every weight. At the bottom stands the finished engine.

# %% tags=["nbval-ignore-output"]
from minivllm.teach import ladder

prompt = (sentence * 7)[:32]
seconds = notebook.median_seconds(lambda: generate(prompt, 8), repeats=1, warmup=0)
ladder.show("01", tokens_per_second=8 / seconds, bytes_per_token=llm.runner.weight_bytes)

# %%
llm.close()

# %% [markdown]
# **How vLLM does it.** The same layer is `Attention` in `vllm/model_executor/layers/attention`, called by every model file with q, k and v; the kernels behind it
# are backends (FlashAttention, FlashInfer, Triton) in `vllm/v1/attention/backends`. None of them ever materialises the scores, and all of them read keys and
# values from a paged cache.
#
# **Next:** [02 KV cache](02_kv_cache.ipynb) keeps what this notebook threw away 110 times.
