"""Which attention backend is chosen and why, what a forced one says when it cannot run, and flash-attn's calls."""

import sys
import types

import pytest
import tiny_models
import torch
from fake_flash_attn import install
from test_attention import MIXES, dense, make_case

from minivllm import LLM, SamplingParams, attention
from minivllm.attention import trial
from minivllm.attention.torch_sdpa import TorchSDPABackend
from minivllm.worker import device as devices
from minivllm.worker.device import PROFILES, capability, device_profile, select_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_found_yet(monkeypatch):
    monkeypatch.setattr(trial, "_FOUND", {})
    monkeypatch.delenv(devices.PROFILE_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed, until a test installs the fake


@pytest.fixture
def gpu_of(monkeypatch):
    """Pretend that backends run on a GPU of that capability: only the choice is looked at."""
    def pretend(major, minor, runs=lambda name: None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(trial, "trial", lambda backend, *_: runs(backend.name))
    return pretend


def test_on_a_cpu_it_is_torch():
    backend, why = attention.select("auto", CPU)
    assert backend.name == "torch_sdpa" and "cpu" in why


def test_on_sm80_and_newer_it_is_flash_attn_where_that_is_installed_and_runs(gpu_of, monkeypatch):
    gpu_of(8, 0)
    backend, why = attention.select("auto", CUDA)
    assert backend.name == "triton" and "flash_triton does not run here: " in why and "flash_attn" in why
    install(monkeypatch)
    assert attention.select("auto", CUDA)[0].name == "flash_triton" and attention.select("flash_attn", CUDA)[0].name == "flash_attn"
    gpu_of(8, 0, runs=lambda name: "RuntimeError: planted" if name.startswith("flash") else None)
    backend, why = attention.select("auto", CUDA)
    assert backend.name == "triton" and "flash_triton does not run here: RuntimeError: planted" in why
    gpu_of(8, 0, runs=lambda name: "planted")
    backend, why = attention.select("auto", CUDA)
    assert backend.name == "torch_sdpa" and "triton does not run here: planted" in why


def test_on_a_t4_it_is_never_flash_attn(gpu_of, monkeypatch):
    install(monkeypatch)
    gpu_of(7, 5)
    assert attention.select("auto", CUDA)[0].name == "triton_t4"
    with pytest.raises(ValueError, match="'flash_attn' does not run on cuda:0: it needs a GPU of sm80 or newer"):
        attention.select("flash_attn", CUDA)


def test_a_forced_backend_that_cannot_run_says_why(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="'flash_attn' does not run on cpu: .*flash_attn"):
        attention.select("flash_attn", CPU)

    def broken(self, *args):
        raise RuntimeError("planted\nand more")

    monkeypatch.setattr("minivllm.attention.triton_paged.TritonBackend.attend", broken)
    tiny_models.save("llama", tmp_path)
    with pytest.raises(ValueError, match="'triton' does not run on cpu: RuntimeError: planted$"):
        LLM(tmp_path, device="cpu", num_kv_blocks=8, attention_backend="triton")


@pytest.mark.parametrize("wrong, message", [(lambda out: out + 0.1, "its result is off by 0.1"), (lambda out: out * float("nan"), "its result is off by nan")])
def test_a_trial_finds_wrong_numbers(monkeypatch, wrong, message):
    class Wrong(TorchSDPABackend):
        name = "wrong"

        def attend(self, *args):
            return wrong(super().attend(*args))

    assert message in trial.trial(Wrong(), CPU)
    assert trial.trial(TorchSDPABackend(), CPU) is None


@pytest.mark.parametrize("shape", [(9, 3, 64), (16, 8, 128), (6, 6, 24)])
@pytest.mark.parametrize("block_size", [1, 4, 256])
def test_a_trial_takes_the_models_shape_and_block_size(shape, block_size):
    class Seen(TorchSDPABackend):
        name = "seen"

        def attend(self, q, k_cache, v_cache, metadata, scale):
            assert q.shape[1:] == (shape[0], shape[2]) and k_cache.shape[1] == shape[1] and metadata.block_size == block_size
            return super().attend(q, k_cache, v_cache, metadata, scale)

    assert trial.trial(Seen(), CPU, torch.float32, shape, block_size) is None


@pytest.mark.parametrize("name", ["flash_attn", "flash_triton"])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_flash_attn_is_called_as_it_wants(mix, name, monkeypatch):
    install(monkeypatch)
    backend, _ = attention.select(name, CPU)
    _, metadata, rows, queries, keys, values, k_cache, v_cache = make_case(mix, 256 if len(mix) <= 4 else 128, 4, 2, 16)
    metadata.plan = backend.prepare(metadata, [len(row.token_ids) for row in rows], [row.context_len for row in rows])
    new_k, new_v = (torch.cat([x[row.start:] for x, row in zip(of, rows)]) for of in (keys, values))
    backend.store(new_k, new_v, k_cache, v_cache, metadata)
    if metadata.block_size % 256:
        with pytest.raises(RuntimeError, match="divisible by 256"):
            backend.attend(torch.cat(queries), k_cache, v_cache, metadata, 0.3)
        return
    got = backend.attend(torch.cat(queries), k_cache, v_cache, metadata, 0.3)
    expected = torch.cat([dense(q, k, v, row.start, 0.3) for q, k, v, row in zip(queries, keys, values, rows)])
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["flash_attn", "flash_triton"])
def test_padding_without_context_gives_zeros(name, monkeypatch):
    install(monkeypatch)
    backend, _ = attention.select(name, CPU)
    _, metadata, _, queries, _, _, k_cache, v_cache = make_case([(4, 1), (0, 1)], 256, 4, 2, 16)
    metadata.context_lens = torch.tensor([5, 0], dtype=torch.int32)
    metadata.plan = backend.prepare(metadata, [1, 1], [1, 1])
    out = backend.attend(torch.cat(queries), k_cache, v_cache, metadata, 0.3)
    assert out[0].any() and not out[1].any()


def test_a_flash_attn_that_is_only_half_there_is_passed_over(gpu_of, monkeypatch):
    gpu_of(9, 0)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    backend, why = attention.select("auto", CUDA)
    assert backend.name == "triton" and "flash_triton does not run here: cannot import name 'flash_attn_varlen_func'" in why


def test_an_llm_on_flash_attn_gives_the_same_tokens(monkeypatch, tmp_path):
    install(monkeypatch)
    tiny_models.save("llama", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [list(range(3, 25)), [7, 8, 9], list(range(3, 20))]
    tokens = []
    for name in ("torch_sdpa", "flash_attn", "flash_triton"):
        with LLM(tmp_path, device="cpu", num_kv_blocks=4, attention_backend=name) as llm:
            tokens.append([out["token_ids"] for out in llm.generate(prompts, params, use_tqdm=False)])
            assert llm.config.block_size == (16 if name == "torch_sdpa" else 256)
    assert tokens[0] == tokens[1] == tokens[2]
    with pytest.raises(ValueError, match="'flash_attn' does not run on cpu: .*divisible by 256"):
        LLM(tmp_path, device="cpu", num_kv_blocks=4, attention_backend="flash_attn", block_size=16)


def test_a_profile_is_what_the_environment_names(monkeypatch):
    assert device_profile() is None
    monkeypatch.setenv(devices.PROFILE_VARIABLE, "T4")
    assert device_profile() == PROFILES["t4"]
    monkeypatch.setenv(devices.PROFILE_VARIABLE, "t5")
    with pytest.raises(ValueError, match="MINIVLLM_DEVICE_PROFILE is 't5': unset it, or use one of t4"):
        device_profile()


def test_under_the_t4_profile_a_large_gpu_is_a_small_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (130 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 << 30)
    assert select_dtype("auto", CUDA, "bfloat16") is torch.bfloat16
    monkeypatch.setenv(devices.PROFILE_VARIABLE, "t4")
    assert capability(CUDA) == (7, 5) and select_dtype("auto", CUDA, "bfloat16") is torch.float16
    assert devices.gpu_memory(CUDA) == (13 << 30, 15 << 30) and devices.shared_memory(CUDA) == 64 << 10
    assert devices.default_max_num_batched_tokens(CUDA) == 2048 and devices.default_gpu_memory_utilization(CUDA) == 0.85
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a large one")
    with pytest.raises(ValueError, match="only emulates it"):
        select_dtype("bfloat16", CUDA, None)
