"""The engine on a GPU against the engine on a CPU: random mixes of requests, 16-bit logits, and the T4's path walked by any GPU."""

import random

import pytest
import tiny_models
import torch
from reference import GreedyReference
from test_models import logits_of

from minivllm import LLM, SamplingParams, attention
from minivllm.config import EngineConfig
from minivllm.engine.engine import Engine
from minivllm.worker import device as devices

pytestmark = pytest.mark.gpu
MIXES_A_TEST = 20
PATHS = {"normal": ("", "triton"), "T4": ("t4", "triton_t4")}


@pytest.fixture(scope="module", params=PATHS)
def engines(request, tmp_path_factory):
    """(profile, LLM on the CPU, LLM on the GPU, reference) of one random model, float32."""
    profile, backend = PATHS[request.param]
    path = tmp_path_factory.mktemp("qwen3")
    reference = tiny_models.save("qwen3", path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(devices.PROFILE_VARIABLE, profile)
        settings = {"dtype": "float32", "num_kv_blocks": 40, "block_size": 16, "max_model_len": 200}
        gpu = LLM(path, device="cuda", **settings)
    with gpu, LLM(path, device="cpu", **settings) as cpu:
        assert gpu.runner.backend.name == backend  # float32: never flash-attn
        yield profile, cpu, gpu, reference


@pytest.fixture
def pair(engines, monkeypatch):
    """(LLM on the CPU, LLM on the GPU, reference), with the profile that the GPU's was made with: kernels ask for it at every launch."""
    profile, *found = engines
    monkeypatch.setenv(devices.PROFILE_VARIABLE, profile)
    return found


def draw_mix(seed):
    """Settings of an engine, and requests with the step at which each arrives. Some share a prefix, some pools are too small for all."""
    rng = random.Random(seed)
    block_size = rng.choice([4, 16])
    settings = dict(block_size=block_size, num_kv_blocks=rng.randrange(64 // block_size + 1, 112 // block_size), max_num_seqs=rng.choice([2, 6]),
                    max_num_batched_tokens=rng.choice([8, 24, 200]), enable_prefix_caching=rng.random() < 0.8, enforce_eager=rng.random() < 0.3)
    shared = [rng.randrange(3, 97) for _ in range(24)]
    requests = []
    for index in range(rng.randrange(2, 9)):
        prompt = shared[:rng.choice([0, 8, 16, 24])] + [rng.randrange(3, 97) for _ in range(rng.randrange(1, 20))]
        sampled = dict(temperature=0.8, seed=seed * 100 + index, top_k=rng.choice([0, 5]), top_p=rng.choice([1.0, 0.8]))
        params = SamplingParams(max_tokens=rng.randrange(1, 20), ignore_eos=True, **(sampled if rng.random() < 0.3 else dict(temperature=0.0)))
        requests.append((rng.randrange(8), prompt, params))
    return settings, sorted(requests, key=lambda request: request[0])


def run_mix(llm, settings, requests):
    config = EngineConfig(**settings).complete(num_kv_blocks=1, max_positions=64)
    llm.runner.allocate(config.num_kv_blocks, config.block_size)
    llm.runner.capture(config)
    engine = Engine(config, llm.runner, llm.model_config.vocab_size)
    waiting, sequences, step = list(requests), [], 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][0] <= step:
            _, prompt, params = waiting.pop(0)
            sequences.append(engine.add(prompt, params))
        if engine.has_unfinished_requests():
            engine.step()
        step += 1
    assert engine.blocks.num_free_blocks == config.num_kv_blocks
    return [seq.generated_token_ids for seq in sequences], engine.stats


@pytest.mark.parametrize("first", range(0, 200, MIXES_A_TEST))
def test_two_hundred_random_mixes_give_the_tokens_of_the_cpu(pair, first):
    cpu, gpu, reference = pair
    greedy, sampled, differing, preemptions, replays = GreedyReference(reference), 0, 0, 0, 0
    for seed in range(first, first + MIXES_A_TEST):
        settings, requests = draw_mix(seed)
        want, _ = run_mix(cpu, settings, requests)
        got, stats = run_mix(gpu, settings, requests)
        preemptions += stats.num_preemptions
        replays += gpu.runner.graphs.num_replays if gpu.runner.graphs else 0
        for (_, prompt, params), ours, theirs in zip(requests, got, want):
            sampled += params.temperature > 0
            if params.temperature > 0:
                differing += ours != theirs
            elif ours != theirs:
                greedy.check(prompt, ours)  # allowed where the two best all but tie
    assert sampled > 10 and differing <= 0.01 * sampled + 1 and preemptions > 0 and replays > 100
    assert greedy.ties <= 2


@pytest.mark.parametrize("backend", ["torch_sdpa", "triton", "triton_t4", "flash_attn", "flash_triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_logits_are_as_near_as_transformers_own(backend, dtype, tmp_path):
    """The error against float32, in chunks through the cache, is at most twice that of transformers in the same dtype."""
    try:
        attention.select(backend, torch.device("cuda", 0), dtype, (6, 2, 16))
    except ValueError as error:
        pytest.skip(str(error))
    reference = tiny_models.save("qwen3", tmp_path).to("cuda")
    token_ids = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        exact = reference(input_ids=torch.tensor([token_ids], device="cuda")).logits[0]
        theirs = reference.to(dtype)(input_ids=torch.tensor([token_ids], device="cuda")).logits[0].float()
    off = (theirs - exact).abs()
    allowed = 2 * off.max()
    assert allowed < 0.2 * exact.abs().max(), f"transformers is off by up to {off.max():.4f} of {exact.abs().max():.3f}, by row {off.amax(1).tolist()}"
    with LLM(tmp_path, dtype=str(dtype).removeprefix("torch."), device="cuda", attention_backend=backend, num_kv_blocks=20, max_model_len=160) as llm:
        for chunks in ([40], [17, 1, 22], [1] * 40):
            blocks = -(-40 // llm.config.block_size)
            with torch.inference_mode():
                got = logits_of(llm.runner, token_ids, chunks, block_table=[13, 2, 19, 0, 7][:blocks]).float()
            errors = (got - exact).abs()
            assert errors.max() <= allowed, f"{chunks}: off by {errors.max():.4f}, transformers by {off.max():.4f}; by row {errors.amax(1).tolist()}"


def test_the_t4s_path_through_the_front_door(monkeypatch, tmp_path):
    monkeypatch.setenv(devices.PROFILE_VARIABLE, "t4")
    tiny_models.save("llama", tmp_path)
    with LLM(tmp_path, device="cuda") as llm:
        assert llm.runner.dtype is torch.float16 and llm.runner.backend.name == "triton_t4" and llm.runner.graphs is not None
        assert llm.runner.pool.num_bytes < 15 * 0.85 * 2**30 and llm.config.max_num_batched_tokens == 2048
        assert "15.000 GiB" in str(llm.memory)
        outputs = llm.generate([[5, 6, 7], list(range(3, 40))], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
        assert [len(out["token_ids"]) for out in outputs] == [5, 5]
