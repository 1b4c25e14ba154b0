"""The torch backend against plain SDPA over contiguous K/V, for every mixture of prefill, chunk, hit and decode."""

import pytest
import tiny_models
import torch
from torch.nn import functional as F

from minivllm import LLM, SamplingParams, attention
from minivllm.attention.torch_sdpa import slots_of
from minivllm.engine.step import PlanRow, StepPlan
from minivllm.worker.batch import build_batch, slot_mapping

NUM_BLOCKS = 64

#: (tokens in the cache already, tokens computed now) of each row.
MIXES = {
    "one prefill": [(0, 9)],
    "one token": [(0, 1)],
    "prefills": [(0, 5), (0, 16), (0, 1)],
    "chunks": [(7, 3), (16, 16), (1, 20)],
    "decodes": [(3, 1), (4, 1), (31, 1), (32, 1)],
    "very different decodes": [(1, 1), (90, 1), (2, 1), (30, 1)],
    "all at once": [(0, 6), (40, 1), (13, 8), (5, 1), (0, 1), (63, 2)],
}


def dense(q, k, v, start, scale):
    """q [n, H, D], k and v [M, K, D] of the whole context; lower-right causal, from the definition."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mask = torch.arange(k.shape[0]) <= torch.arange(start, start + q.shape[0])[:, None]
    out = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask.to(q.device), scale=scale)
    return out.transpose(0, 1)


def make_case(mix, block_size, heads, kv_heads, head_dim, device="cpu", seed=0):
    """A batch of `mix` over shuffled blocks; the cache holds the earlier tokens, and poison everywhere else."""
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(NUM_BLOCKS * 16 // block_size, generator=generator).tolist()
    rows, queries, keys, values = [], [], [], []
    k_cache = torch.full((NUM_BLOCKS * 16, kv_heads, head_dim), 1e4)
    v_cache = k_cache.clone()
    for start, count in mix:
        context = start + count
        table = [free.pop() for _ in range(-(-context // block_size))]
        row = PlanRow(len(rows), start, [0] * count, table, start, True, SamplingParams(), 0)
        k, v = (torch.randn(context, kv_heads, head_dim, generator=generator) for _ in range(2))
        slots = slots_of(torch.tensor(table)[None], torch.arange(context)[None], block_size)[0]
        k_cache[slots[:start]], v_cache[slots[:start]] = k[:start], v[:start]
        rows.append(row)
        keys.append(k)
        values.append(v)
        queries.append(torch.randn(count, heads, head_dim, generator=generator))
    backend, _ = attention.select("auto", torch.device(device), torch.float32)
    batch = build_batch(StepPlan(rows), block_size, backend, torch.device(device))
    return backend, batch.attention, rows, queries, keys, values, k_cache.to(device), v_cache.to(device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(6, 2, 16), (4, 4, 24), (8, 1, 64)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_paged_attention_equals_sdpa(mix, block_size, heads, kv_heads, head_dim, device):
    backend, metadata, rows, queries, keys, values, k_cache, v_cache = make_case(mix, block_size, heads, kv_heads, head_dim, device)
    new_k = torch.cat([k[row.start:] for k, row in zip(keys, rows)]).to(device)
    new_v = torch.cat([v[row.start:] for v, row in zip(values, rows)]).to(device)
    backend.store(new_k, new_v, k_cache, v_cache, metadata)
    got = backend.attend(torch.cat(queries).to(device), k_cache, v_cache, metadata, scale=0.3).cpu()
    expected = torch.cat([dense(q, k, v, row.start, 0.3) for q, k, v, row in zip(queries, keys, values, rows)])
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


def test_somebody_elses_nan_does_not_spread():
    mix = [(40, 1), (30, 1), (2, 5)]
    backend, metadata, rows, queries, keys, values, k_cache, v_cache = make_case(mix, 4, 4, 2, 16)
    mine = torch.cat([slots_of(torch.tensor(row.block_table)[None], torch.arange(row.context_len)[None], 4)[0] for row in rows])
    poisoned = torch.ones(len(k_cache), dtype=torch.bool)
    poisoned[mine] = False
    k_cache[poisoned], v_cache[poisoned] = float("nan"), float("nan")
    backend.store(torch.zeros(7, 2, 16), torch.zeros(7, 2, 16), k_cache, v_cache, metadata)
    assert backend.attend(torch.cat(queries), k_cache, v_cache, metadata, 1.0).isfinite().all()


def test_slot_minus_one_writes_nothing():
    row = PlanRow(0, 7, [0], [3, 1], 8, True, SamplingParams(), 0)  # a full hit: the last of 8 tokens is computed, not written
    assert slot_mapping(row, 4) == [-1]
    backend, _ = attention.select("auto", torch.device("cpu"))
    other = PlanRow(1, 0, [0, 0], [2], 0, True, SamplingParams(), 0)
    metadata = build_batch(StepPlan([row, other]), 4, backend, torch.device("cpu")).attention
    assert metadata.slot_mapping.tolist() == [-1, 8, 9] and not metadata.writes_all
    k_cache, v_cache = torch.zeros(16, 1, 2), torch.zeros(16, 1, 2)
    backend.store(torch.ones(3, 1, 2), torch.ones(3, 1, 2), k_cache, v_cache, metadata)
    assert k_cache[:, 0, 0].nonzero().flatten().tolist() == [8, 9]


def test_decodes_of_like_length_share_a_call():
    backend, metadata, *_ = make_case([(9, 1), (8, 1), (60, 1), (50, 1), (0, 4)], 4, 4, 2, 16)
    assert sorted(len(group.slots) for group in metadata.plan) == [1, 2, 2]


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match="'nope'.*torch_sdpa"):
        attention.select("nope", torch.device("cpu"))


class Written(attention.AttentionBackend):
    """Attention from its definition, a row at a time: a backend of one's own in a dozen lines."""

    name, default_block_size = "written", 8

    def prepare(self, metadata, query_lens, context_lens):
        return list(zip(query_lens, context_lens))

    def store(self, k, v, k_cache, v_cache, metadata):
        kept = metadata.slot_mapping >= 0
        k_cache[metadata.slot_mapping[kept]], v_cache[metadata.slot_mapping[kept]] = k[kept], v[kept]

    def attend(self, q, k_cache, v_cache, metadata, scale):
        out, begin = torch.empty_like(q), 0
        for row, (num_tokens, context) in enumerate(metadata.plan):
            slots = slots_of(metadata.block_tables[row], torch.arange(context, device=q.device), metadata.block_size)
            end = begin + num_tokens
            out[begin:end] = dense(q[begin:end], k_cache[slots], v_cache[slots], context - num_tokens, scale)
            begin = end
        return out


class XFormers(Written):
    """The same rows, by xFormers' memory_efficient_attention with a lower-right causal mask."""

    name = "xformers"

    def attend(self, q, k_cache, v_cache, metadata, scale):
        from xformers.ops import fmha

        out, begin, groups = torch.empty_like(q), 0, q.shape[1] // k_cache.shape[1]
        for row, (num_tokens, context) in enumerate(metadata.plan):
            slots = slots_of(metadata.block_tables[row], torch.arange(context, device=q.device), metadata.block_size)
            end = begin + num_tokens
            k, v = (cache[slots].repeat_interleave(groups, 1)[None] for cache in (k_cache, v_cache))
            bias = fmha.attn_bias.LowerTriangularFromBottomRightMask()
            out[begin:end] = fmha.memory_efficient_attention(q[begin:end][None], k, v, attn_bias=bias, scale=scale)[0]
            begin = end
        return out


def tokens_with(backend, directory, device):
    with LLM(directory, device=device, dtype="float32", attention_backend=backend, num_kv_blocks=12, max_num_batched_tokens=8, max_num_seqs=3) as llm:
        prompts = [list(range(3, 25)), [7, 8, 9], list(range(3, 20))]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
        return llm.runner.backend.name, llm.config.block_size, [output["token_ids"] for output in outputs]


def test_a_backend_of_ones_own_is_used_by_its_name(tmp_path):
    tiny_models.save("llama", tmp_path)
    attention.register_backend("written", Written)
    name, block_size, tokens = tokens_with("written", tmp_path, "cpu")
    assert (name, block_size) == ("written", 8) and tokens == tokens_with("torch_sdpa", tmp_path, "cpu")[2]


@pytest.mark.gpu
def test_xformers_can_be_a_backend(tmp_path):
    pytest.importorskip("xformers", reason="xformers is not installed")
    tiny_models.save("llama", tmp_path)
    attention.register_backend("xformers", XFormers)
    assert tokens_with("xformers", tmp_path, "cuda")[2] == tokens_with("torch_sdpa", tmp_path, "cuda")[2]
