"""Kernels against their torch versions: through Triton's interpreter on a CPU, for real on a GPU."""

import pytest
import torch

from minivllm.kernels import paged_prefill
from minivllm.kernels.jit import INTERPRETED, cdiv, jit, next_power_of_2, tl
from minivllm.kernels.paged_decode import join_shape, launch_shape, paged_decode, paged_decode_torch, paged_decode_triton
from minivllm.kernels.paged_prefill import paged_prefill_torch, paged_prefill_triton
from minivllm.kernels.rms_norm import add_rms_norm_torch, add_rms_norm_triton, rms_norm_torch, rms_norm_triton
from minivllm.kernels.rope_store import norm_rope_store_torch, norm_rope_store_triton
from minivllm.kernels.sample import _noise, sample_tokens_torch, sample_tokens_triton
from minivllm.kernels.silu_and_mul import silu_and_mul_torch, silu_and_mul_triton
from minivllm.kernels.store_kvcache import store_kvcache, store_kvcache_torch, store_kvcache_triton

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
#: (H, K, D, block size): grouped and not, sizes that are no powers of two, the embedded model's.
SHAPES = [(4, 2, 8, 4), (9, 3, 64, 16), (2, 2, 80, 8), (3, 1, 24, 1)]
NUM_BLOCKS = 30


@pytest.fixture(autouse=True)
def interpreter_on_a_cpu(request):
    device = request.node.callspec.params.get("device", "cpu") if hasattr(request.node, "callspec") else "cpu"
    assert device == "cuda" or INTERPRETED or torch.cuda.is_available(), "set TRITON_INTERPRET=1 before triton is imported"
    if device == "cpu" and not INTERPRETED:
        pytest.skip("kernels run on the GPU here, not through the interpreter")
    torch.manual_seed(0)


def dtypes(device):
    return [torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]  # the interpreter is wrong in bfloat16


def close(got, want, factor=4):
    """As close as the dtype's rounding allows: `factor` roundings of the result, and in float32 those of the sums before it."""
    eps = torch.finfo(got.dtype).eps * (8 if got.dtype == torch.float32 else 1)
    torch.testing.assert_close(got.float(), want.float(), atol=factor * eps, rtol=factor * eps)


def pool(shape, dtype, device):
    _, kv_heads, head_dim, block_size = shape
    return (torch.randn(NUM_BLOCKS * block_size, kv_heads, head_dim, device=device, dtype=dtype) for _ in range(2))


def tables(count, width, device):
    return torch.randperm(NUM_BLOCKS)[:count * width].view(count, width).to(device, torch.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_store_writes_what_torch_writes(shape, device):
    heads, kv_heads, head_dim, _ = shape
    for dtype in dtypes(device):
        qkv = torch.randn(5, heads + 2 * kv_heads, head_dim, device=device, dtype=dtype)  # k and v as the projection leaves them
        k, v = qkv[:, heads:heads + kv_heads], qkv[:, heads + kv_heads:]
        slots = torch.tensor([3, -1, 7, 0, NUM_BLOCKS - 1], device=device)
        caches = [[torch.full((NUM_BLOCKS, kv_heads, head_dim), 7.0, device=device, dtype=dtype) for _ in range(2)] for _ in range(2)]
        store_kvcache_triton(k, v, *caches[0], slots)
        store_kvcache_torch(k, v, *caches[1], slots)
        assert torch.equal(caches[0][0], caches[1][0]) and torch.equal(caches[0][1], caches[1][1])
        assert (caches[0][0] == 7.0).all(dim=(1, 2)).sum() == NUM_BLOCKS - 4, "slots that are not in the mapping were written"


def test_store_of_nothing_is_nothing():
    empty, cache = torch.zeros(0, 1, 2), torch.ones(4, 1, 2)
    for store in (store_kvcache, store_kvcache_triton):
        store(empty, empty, cache, cache, torch.zeros(0, dtype=torch.int64))
        assert cache.eq(1).all()


@pytest.mark.parametrize("dot", [True, False], ids=["matrix unit", "without"])
@pytest.mark.parametrize("device, splits, shape", [  # 64 programs a row take the interpreter long: once, where several join a row's columns
    *(("cpu", splits, shape) for splits in (1, 4, 16) for shape in SHAPES), ("cpu", 64, SHAPES[2]),
    *(pytest.param("cuda", splits, shape, marks=pytest.mark.gpu) for splits in (1, 4, 16, 64) for shape in SHAPES)])
def test_decode_equals_gather_and_attend(shape, splits, dot, device):
    heads, _, head_dim, size = shape
    context = torch.tensor([0, 1, size + 1, 5 * size], device=device, dtype=torch.int32)  # 0: padding of a graph
    for dtype in dtypes(device):
        caches, table = list(pool(shape, dtype, device)), tables(4, 5, device)
        q = torch.randn(4, heads, head_dim, device=device, dtype=dtype)
        want = paged_decode_torch(q, *caches, table, context, size, head_dim**-0.5)
        got = paged_decode_triton(q, *caches, table, context, size, head_dim**-0.5, dot=dot, splits=splits, tile=16)
        close(got, want)
        assert not got[0].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", [1, 2])
def test_decode_of_some_rows_leaves_the_others(splits, device):
    shape = heads, _, head_dim, size = SHAPES[0]
    caches, table = list(pool(shape, torch.float32, device)), tables(4, 5, device)
    context, q = torch.tensor([9, 3, 20, 11], device=device, dtype=torch.int32), torch.randn(7, heads, head_dim, device=device)
    rows, tokens = (torch.tensor(values, device=device, dtype=torch.int32) for values in ([2, 0], [5, 1]))
    out = [torch.full_like(q, 9.0) for _ in range(2)]
    paged_decode_triton(q, *caches, table, context, size, 0.3, rows, tokens, out[0], splits=splits, tile=16)
    paged_decode_torch(q, *caches, table, context, size, 0.3, rows, tokens, out[1])
    close(out[0], out[1])
    assert (out[0] == 9.0).all(dim=(1, 2)).tolist() == [True, False, True, True, True, False, True]


def test_decode_without_a_gpu_is_torchs():
    shape = SHAPES[0]
    caches, table, context = list(pool(shape, torch.float32, "cpu")), tables(2, 3, "cpu"), torch.tensor([5, 9])
    q = torch.randn(2, shape[0], shape[2])
    assert torch.equal(paged_decode(q, *caches, table, context, 4, 0.5), paged_decode_torch(q, *caches, table, context, 4, 0.5))


@pytest.mark.parametrize("rows, kv_heads, most, splits, tile", [
    (256, 8, 32, 1, 128), (128, 8, 32, 2, 128), (64, 8, 32, 3, 128), (40, 8, 32, 4, 128), (8, 8, 32, 8, 64), (1, 8, 64, 64, 64), (1, 1, 1, 1, 64)])
def test_how_often_a_context_is_split_on_an_h200(rows, kv_heads, most, splits, tile):
    assert launch_shape(rows, kv_heads, 132, most, row_bytes=256, shared=227 << 10) == (splits, tile)


@pytest.mark.parametrize("splits, columns", [(2, 128), (16, 128), (17, 64), (64, 32), (512, 4), (4096, 1)])
def test_a_warp_that_joins_holds_few_numbers(splits, columns):
    parts, width = join_shape(splits, 128)
    assert width == columns and splits <= parts < 2 * splits and 128 % width == 0


@pytest.mark.parametrize("shared", [64 << 10, 99 << 10, 163 << 10])
@pytest.mark.parametrize("row_bytes", [16, 128, 192, 256, 512, 1024])
def test_tiles_fit_into_the_shared_memory(row_bytes, shared):
    for rows in (1, 1000):
        _, tile = launch_shape(rows, 8, 40, 32, row_bytes, shared)
        assert tile & (tile - 1) == 0 and (tile == 16 or 4 * tile * row_bytes <= shared)


def test_registers_are_limited_for_the_shape_found_for_them_alone():
    found, asked = (paged_prefill.launch_options(2, 128, 2, 227 << 10, True, queries) for queries in (None, 64))
    assert found[0]["TIGHT"] and found[1]["maxnreg"] == 128 and not asked[0]["TIGHT"] and "maxnreg" not in asked[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries, tile", [(None, None), (16, 16), (64, 16), (16, 64)], ids=["as for the device", "as many keys as queries", "fewer", "more"])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_equals_gather_and_attend(shape, queries, tile, device):
    heads, _, head_dim, size = shape
    counts = [5, 1, 2 * size + 3, 4]                                   # a prompt, a decode that is not asked for, a chunk, one token behind a hit
    contexts = [5, size + 1, 5 * size, size + 4]
    contexts = [max(context, count) for context, count in zip(contexts, counts)]
    table = tables(4, max(cdiv(context, size) for context in contexts), device)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], device=device, dtype=torch.int32)
    rows = torch.tensor([2, 0, 3], device=device, dtype=torch.int32)
    for dtype in dtypes(device):
        caches = list(pool(shape, dtype, device))
        q = torch.randn(sum(counts), heads, head_dim, device=device, dtype=dtype)
        arguments = (*caches, table, torch.tensor(contexts, device=device, dtype=torch.int32), starts, rows, max(counts), size, head_dim**-0.5)
        got, want = torch.full_like(q, 9.0), torch.full_like(q, 9.0)
        paged_prefill_triton(q, *arguments, got, tile=tile, queries=queries)
        paged_prefill_torch(q, *arguments, want)
        close(got, want)
        assert (got[5] == 9.0).all(), "a row that was not asked for was written"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 4])
def test_prefill_of_a_chunk_that_begins_anywhere(size, device):
    """Parts of 8 positions, the context before the chunk from 0 to 15: its first token lies inside of a part, or at its start or end."""
    for earlier in range(0, 18, 3):
        for count in (2, 8, 9, 16):
            caches = [torch.randn(160, 2, 8, device=device) for _ in range(2)]
            table = torch.randperm(160 // size, device=device)[:40 // size + 1].to(torch.int32)[None]
            numbers = ([earlier + count], [0, count], [0])
            context, starts, rows = (torch.tensor(values, device=device, dtype=torch.int32) for values in numbers)
            q = torch.randn(count, 4, 8, device=device)
            arguments = (q, *caches, table, context, starts, rows, count, size, 0.3)
            close(paged_prefill_triton(*arguments, queries=16, tile=16), paged_prefill_torch(*arguments))


@pytest.mark.parametrize("size, kv_heads, group, head_dim, counts, contexts, queries, tile", [
    (4, 1, 2, 16, [5, 1, 40], [5, 39, 70], 32, 16),      # parts as long as a tile
    (16, 2, 1, 16, [50, 3], [50, 131], 64, 16),          # four tiles beside the queries
    (3, 1, 3, 24, [7, 20], [64, 33], 16, 16),            # a tile that is no whole number of blocks; heads and lanes of which some are none
    (1, 1, 4, 16, [9], [41], 16, 64),                    # a tile longer than the context
    (24, 2, 2, 80, [2, 33], [25, 33], None, None),       # blocks and heads that are no powers of two
    (16, 1, 8, 128, [1, 17], [64, 48], None, None),      # contexts that end with a tile, and with a block
])
def test_prefill_touches_nothing_but_what_its_rows_own(size, kv_heads, group, head_dim, counts, contexts, queries, tile):
    """Slots of others hold NaN. Of a block table only those entries exist that the context needs, of the queries only those of the rows asked for."""
    if not INTERPRETED:
        pytest.skip("the interpreter's memory is watched")
    from interpreted_memory import only

    needed = [cdiv(context, size) for context in contexts]
    order = iter(torch.randperm(sum(needed) + 2, dtype=torch.int32))
    table = torch.full((len(counts), max(needed)), 2**30, dtype=torch.int32)
    caches = [torch.full(((sum(needed) + 2) * size, kv_heads, head_dim), torch.nan) for _ in range(2)]
    for row, context in enumerate(contexts):
        table[row, :needed[row]] = torch.stack([next(order) for _ in range(needed[row])])
        for cache in caches:
            for pos in range(context):
                cache[table[row, pos // size] * size + pos % size] = torch.randn(kv_heads, head_dim)
    q, starts = torch.randn(sum(counts), kv_heads * group, head_dim), torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    context, rows = torch.tensor(contexts, dtype=torch.int32), torch.arange(len(counts), dtype=torch.int32).flip(0)
    got, want = torch.full_like(q, 9.0), torch.full_like(q, 9.0)
    arguments = (table, context, starts, rows, max(counts), size, 0.2)
    with only(reads=[q, *caches, context, starts, rows, *(table[row, :count] for row, count in enumerate(needed))], writes=[got]):
        paged_prefill_triton(q, *caches, *arguments, got, tile=tile, queries=queries)
    paged_prefill_torch(q, *caches, *arguments, want)
    close(got, want)


def test_prefill_with_wide_offsets_is_the_same(monkeypatch):
    """What a cache of more than 2^31 elements takes, on a small one."""
    if not INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 is not set; a GPU has a test with such a cache")
    caches, table = list(pool(SHAPES[0], torch.float32, "cpu")), tables(1, 5, "cpu")
    context, starts, rows = (torch.tensor(values, dtype=torch.int32) for values in ([18], [0, 11], [0]))
    arguments = (torch.randn(11, 4, 8), *caches, table, context, starts, rows, 11, 4, 0.3)
    want = paged_prefill_triton(*arguments, queries=16, tile=16)
    monkeypatch.setattr(paged_prefill, "_WIDE_FROM", 0)
    assert torch.equal(paged_prefill_triton(*arguments, queries=16, tile=16), want)


@pytest.mark.gpu
def test_a_cache_with_more_elements_than_32_bits_count():
    heads, kv_heads, head_dim, size = 32, 8, 128, 16
    num_blocks = 2**31 // (size * kv_heads * head_dim) + 4
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    large = [torch.empty(num_blocks * size, kv_heads, head_dim, device="cuda", dtype=torch.float16) for _ in range(2)]
    small = [torch.randn(3 * size, kv_heads, head_dim, device="cuda", dtype=torch.float16) for _ in range(2)]
    store_kvcache_triton(*small, *large, torch.arange(3 * size, device="cuda") + (num_blocks - 3) * size)
    table, behind = (torch.tensor([[first, first + 1, first + 2]], device="cuda", dtype=torch.int32) for first in (0, num_blocks - 3))
    context, rows, starts = (torch.tensor(values, device="cuda", dtype=torch.int32) for values in ([44], [0], [0, 44]))
    q = torch.randn(44, heads, head_dim, device="cuda", dtype=torch.float16)
    for caches, where in ((small, table), (large, behind)):
        decoded = paged_decode_triton(q[:1], *caches, where, context, size, 0.1)
        prefilled = paged_prefill_triton(q, *caches, where, context, starts, rows, 44, size, 0.1)
        if caches is small:
            want = decoded, prefilled
    assert torch.equal(decoded, want[0]) and torch.equal(prefilled, want[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [64, 100, 576])
def test_norms(size, device):
    for dtype in dtypes(device):
        x, residual, weight = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((3, size), (3, size), (size,)))
        close(rms_norm_triton(x, weight, 1e-5), rms_norm_torch(x, weight, 1e-5), factor=8)
        (got, got_sum), (want, want_sum) = add_rms_norm_triton(x, residual, weight, 1e-5), add_rms_norm_torch(x, residual, weight, 1e-5)
        assert torch.equal(got_sum, want_sum)
        close(got, want, factor=8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [8, 1500])
def test_silu_and_mul(size, device):
    for dtype in dtypes(device):
        gate_up = 3 * torch.randn(3, 2 * size, device=device, dtype=dtype)
        close(silu_and_mul_triton(gate_up), silu_and_mul_torch(gate_up), factor=8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_rope_and_store_in_one_pass(shape, norm, device):
    heads, kv_heads, head_dim, _ = shape
    angles = torch.outer(torch.arange(50.0), torch.rand(head_dim // 2)).to(device)
    positions, slots = torch.tensor([0, 49, 7, 8], device=device), torch.tensor([3, -1, 0, 7], device=device)
    for dtype in dtypes(device):
        qkv = torch.randn(4, (heads + 2 * kv_heads) * head_dim, device=device, dtype=dtype)
        weights = [torch.rand(head_dim, device=device, dtype=dtype) + 0.5 for _ in range(2)] if norm else [None, None]
        results = []
        for run in (norm_rope_store_triton, norm_rope_store_torch):
            caches = [torch.full((9, kv_heads, head_dim), 7.0, device=device, dtype=dtype) for _ in range(2)]
            results.append([run(qkv, *weights, 1e-6, angles.cos(), angles.sin(), positions, *caches, slots, heads), *caches])
        for got, want in zip(*results):
            close(got, want, factor=8)
        assert torch.equal(results[0][2], results[1][2]), "v is copied, so it must be equal"
        assert (results[0][1] == 7.0).all(dim=(1, 2)).sum() == 6, "slots that are not in the mapping were written"


@pytest.mark.parametrize("device", DEVICES)
def test_sampled_tokens_are_those_of_torch(device):
    for dtype in dtypes(device):
        logits = (3 * torch.randn(6, 9001, device=device)).to(dtype)
        seeds = torch.tensor([3, -5, 2**62, 1, 1, 1], device=device)
        temperatures, positions = torch.tensor([0.0, 0.7, 1.5, 1e-45, 1.0, 0.0], device=device), torch.arange(6, device=device)
        positions[2:5] += torch.tensor([1, 5, 2**31 - 1], device=device) << 32  # of siblings
        assert torch.equal(sample_tokens_triton(logits, None, None, None), logits.argmax(dim=-1))
        got, want = (run(logits, temperatures, seeds, positions) for run in (sample_tokens_triton, sample_tokens_torch))
        assert torch.equal(got, want)


@jit
def _noise_of(out, bits, NUM: tl.constexpr):
    index = tl.arange(0, NUM)
    tl.store(out + index, _noise(tl.load(bits + index).to(tl.uint32)))


@pytest.mark.parametrize("device", DEVICES)
def test_the_noise_is_finite_and_right_at_both_ends(device):
    """Of the smallest uniforms 1 - u rounds to 1; a plain log(1 - u) would make an infinity of every 2^25th draw."""
    bits = torch.tensor([0, 1, 2, 5, 100, 127, 128, 1000, 2**20, 42949672, 42949673, 2**31, 2**32 - 2**20, 2**32 - 129, 2**32 - 2, 2**32 - 1], device=device)
    got = torch.empty(16, device=device)
    _noise_of[(1,)](got, bits, NUM=16)
    u = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2**-24)
    want = -(-torch.log1p(-u.double())).log().float()
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_not_finite_give_minus_one(device):
    logits = torch.randn(4, 5000, device=device)
    logits[0, 7], logits[1, 4999], logits[2] = torch.nan, torch.inf, -torch.inf
    for temperatures in (None, torch.ones(4, device=device)):
        extra = (torch.zeros(4, dtype=torch.int64, device=device),) * 2
        for run in (sample_tokens_triton, sample_tokens_torch):
            assert (run(logits, temperatures, *extra) < 0).tolist() == [True, True, True, False]


def test_sizes_of_tiles():
    assert [next_power_of_2(n) for n in (1, 2, 3, 576, 1024)] == [1, 2, 4, 1024, 1024] and cdiv(9, 4) == 3
