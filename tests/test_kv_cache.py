"""The pool's shape, its views, and its size."""

import pytest
import torch

from minivllm.worker.device import GIB
from minivllm.worker.kv_cache import KVCachePool, KVCacheSpec, num_blocks_that_fit

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.float32)


def test_a_layers_view_is_addressed_by_slot_and_shares_memory():
    pool = KVCachePool(SPEC, num_blocks=5, block_size=4, device=torch.device("cpu"))
    assert pool.cache.shape == (2, 3, 5, 4, 2, 8) and not pool.cache.any()
    k, v = pool.layer(1)
    assert k.shape == v.shape == (20, 2, 8)
    k[4 * 3 + 2] = 1.0
    v[4 * 3 + 2] = 2.0
    assert (pool.cache[0, 1, 3, 2] == 1).all() and (pool.cache[1, 1, 3, 2] == 2).all() and pool.cache.sum() == 16 * 3
    assert pool.num_bytes == SPEC.bytes_per_token * 20


def test_bytes_of_the_embedded_model():
    assert KVCacheSpec(30, 3, 64, torch.float32).bytes_per_token == 46_080
    assert KVCacheSpec(28, 8, 128, torch.bfloat16).bytes_per_token == 114_688  # Qwen3-0.6B


def test_a_cpu_pool_is_one_gibibyte():
    assert num_blocks_that_fit(46_080 * 16, torch.device("cpu"), 0.9) == GIB // (46_080 * 16)


@pytest.mark.gpu
def test_a_gpu_pool_keeps_to_its_share_and_says_when_there_is_none():
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    assert 0 < num_blocks_that_fit(1 << 20, device, 0.5) <= total * 0.5 / (1 << 20)
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        num_blocks_that_fit(1 << 20, device, 0.001)
