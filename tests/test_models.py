"""Every model family against transformers: logits of tiny random models, in one piece, in chunks, and token by token."""

import json

import pytest
import tiny_models
import torch

from minivllm import LLM, SamplingParams
from minivllm.engine.step import PlanRow, StepPlan
from minivllm.models import ModelConfig, model_class, register_model
from minivllm.models.llama import LlamaForCausalLM
from minivllm.worker.batch import build_batch

TOLERANCE = 1e-4
CHUNKINGS = {"whole": [40], "chunks": [7, 16, 1, 1, 15], "one by one": [1] * 40}


@torch.inference_mode()
def logits_of(runner, token_ids, chunks, block_table):
    """Logits of every position [T, V], computed chunk by chunk through the paged cache."""
    rows, start = [], 0
    for size in chunks:
        row = PlanRow(0, start, token_ids[start:start + size], block_table, start, True, SamplingParams(), 0)
        batch = build_batch(StepPlan([row]), runner.block_size, runner.backend, runner.device)
        rows.append(runner.model.compute_logits(runner.model(batch.input_ids, batch.positions, batch.attention)))
        start += size
    return torch.cat(rows)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_logits_equal_transformers(family, device, tmp_path):
    reference = tiny_models.save(family, tmp_path)
    token_ids = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([token_ids])).logits[0]
    assert expected.std() > 0.1, "logits so small that a wrong model would pass"
    with LLM(tmp_path, dtype="float32", block_size=8, num_kv_blocks=20, max_model_len=160, device=device) as llm:
        for chunks in CHUNKINGS.values():
            got = logits_of(llm.runner, token_ids, chunks, block_table=[13, 2, 19, 0, 7])
            torch.testing.assert_close(got.cpu(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3-tied"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_logits_stay_near(family, dtype, tmp_path):
    reference = tiny_models.save(family, tmp_path)
    token_ids = list(range(40))
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([token_ids])).logits[0]
    with LLM(tmp_path, dtype=dtype, block_size=8, num_kv_blocks=20, max_model_len=160, device="cpu") as llm:
        got = logits_of(llm.runner, token_ids, [25, 15], block_table=[3, 1, 4, 0, 5]).float()
    # A rounding error is eps / 2 of a value; some dozens of roundings in a row add up like a random walk.
    tolerance = torch.finfo(getattr(torch, dtype)).eps * expected.abs().max() * 10
    assert (got - expected).abs().max() < tolerance


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_tokens_equal_transformers(family, tmp_path):
    from reference import GreedyReference

    reference = GreedyReference(tiny_models.save(family, tmp_path))
    prompts = [[5], list(range(20)), [9, 8, 7, 6] * 9, list(range(20)) + [3]]
    with LLM(tmp_path, block_size=4, num_kv_blocks=40, device="cpu") as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(prompts, outputs):
        reference.check(prompt, output["token_ids"])


def test_old_spellings_of_the_config_mean_the_same(tmp_path):
    tiny_models.save("llama-theta", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    new = ModelConfig.from_dict(config)
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    assert new.rope_theta == 500.0
    assert ModelConfig.from_dict({**old, "rope_theta": 500.0, "torch_dtype": "float32"}) == new
    assert ModelConfig.from_dict({**old, "rope_theta": 500.0, "rope_scaling": None, "dtype": "torch.float32"}) == new


def test_end_tokens_are_the_union_of_config_and_generation_config(tmp_path):
    tiny_models.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert ModelConfig.from_dict(config).eos_token_ids == {2}
    assert ModelConfig.from_dict(config, {"eos_token_id": [7, 2]}).eos_token_ids == {2, 7}


@pytest.mark.parametrize("change, named", [
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
    ({"sliding_window": 64}, "sliding_window"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window"),
    ({"num_key_value_heads": 4}, "num_key_value_heads"),
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    ({"architectures": []}, "architecture"),
    ({"hidden_size": None}, "hidden_size"),
])
def test_what_is_not_built_is_refused_by_name(change, named, tmp_path):
    tiny_models.save("llama", tmp_path)
    config = {**json.loads((tmp_path / "config.json").read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(ValueError, match=named):
        LLM(tmp_path, device="cpu")


def test_a_model_can_be_registered_from_outside(tmp_path):
    class LouderLlama(LlamaForCausalLM):
        def compute_logits(self, hidden):
            return 2 * super().compute_logits(hidden)

    reference = tiny_models.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LouderLlama"]}))
    register_model("LouderLlama", LouderLlama)
    assert model_class("LouderLlama") is LouderLlama
    with LLM(tmp_path, block_size=8, num_kv_blocks=20, max_model_len=160, device="cpu") as llm:
        got = logits_of(llm.runner, [1, 2, 3], [3], [0])
    with torch.no_grad():
        torch.testing.assert_close(got, 2 * reference(input_ids=torch.tensor([[1, 2, 3]])).logits[0], atol=2 * TOLERANCE, rtol=0)
