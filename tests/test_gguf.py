"""The embedded GGUF file against transformers' reading of it: weights, tokenizer, chat template."""

import gguf
import gguf.quants
import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFWriter

from minivllm import LLM
from minivllm.weights.gguf import hf_name, open_gguf, read_tensors, unpermute
from minivllm.weights.hub import embedded_model_file
from minivllm.weights.load import parameter_slots

TEXTS = [
    "Hello world", "I'm here,  don't\n\n\tgo", "caf\u00e9 \u65e5\u672c\u8a9e \U0001f389\U0001f389", " 12345 3.14 2,000", "",
    "<|im_start|>user\nhi<|im_end|>\n", "a\u0301 \ufb01", "def f(x):\n    return x**2  # square\r\n",
]


@pytest.fixture(scope="module")
def transformers_tokenizer():
    file = embedded_model_file()
    return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def test_every_weight_equals_transformers(embedded, transformers_model):
    expected = dict(transformers_model.named_parameters())
    slots = parameter_slots(embedded.runner.model)
    assert set(slots) == set(expected) and len(slots) == 272
    for name, parameter in expected.items():
        assert torch.equal(slots[name], parameter), name


@pytest.mark.parametrize("text", TEXTS)
def test_token_ids_equal_transformers(embedded, transformers_tokenizer, text):
    ids = embedded.tokenizer.encode(text)
    assert ids == transformers_tokenizer.encode(text)
    assert embedded.tokenizer.decode(ids) == transformers_tokenizer.decode(ids, skip_special_tokens=True)


def test_every_digit_stands_alone_the_unusual_ones_too(embedded):
    """As the model was trained, and as llama.cpp splits; transformers' reading of the file joins a space to such a digit."""
    assert embedded.tokenizer.encode(" \u00bd") == embedded.tokenizer.encode(" ") + embedded.tokenizer.encode("\u00bd")


def test_the_chat_template_and_the_special_tokens_equal_transformers(embedded, transformers_tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"}]
    expected = transformers_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert embedded.tokenizer.render_chat(messages) == expected
    assert embedded.chat_prompt(messages) == transformers_tokenizer.encode(expected, add_special_tokens=False)
    assert embedded.tokenizer.eos_token_id == transformers_tokenizer.eos_token_id == 2
    assert embedded.model_config.eos_token_ids == {2}


def test_names():
    assert hf_name("blk.3.attn_q") == "model.layers.3.self_attn.q_proj"
    assert hf_name("token_embd") == "model.embed_tokens"
    assert hf_name("blk.0.unheard_of") == "model.layers.0.unheard_of"


def test_unpermute_undoes_llama_cpps_order():
    heads, dim = 3, 8
    weight = torch.arange(heads * dim * 2, dtype=torch.float32).view(heads * dim, 2)
    permuted = weight.view(heads, 2, dim // 2, 2).transpose(1, 2).reshape(weight.shape)  # what its converter does
    assert not torch.equal(permuted, weight) and torch.equal(unpermute(permuted, heads), weight)


def write_gguf(path, architecture="llama", pre="smollm", extra_tensor=None):
    """A GGUF file of one tiny layer."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<end>", "a", "b", "ab"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    sizes = {"token_embd": (4, 32), "output_norm": (32,), "output": (4, 32), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
             "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32),
             "blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32), "blk.0.ffn_down": (32, 48)}
    if extra_tensor:
        sizes[extra_tensor] = (3,)
    random = np.random.default_rng(0)
    for name, size in sizes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(size).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_any_gguf_file_works_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    with LLM(tmp_path / "tiny.gguf", num_kv_blocks=4, device="cpu") as llm:
        assert llm.tokenizer.encode("abba<end>") == [3, 2, 1, 0]
        assert not llm.model_config.tie_word_embeddings
        assert len(llm.generate("ab", use_tqdm=False)[0]["token_ids"]) > 0


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits, key=lambda kind: kind.name), ids=lambda kind: kind.name)
def test_every_quantization_that_gguf_can_undo_is_read(kind, tmp_path):
    """Random bytes in that format, read back as the gguf package's own dequantization gives them."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(int(kind)).integers(0, 256, (4, 512 // elements * size), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "one.gguf", "qwen3")
    writer.add_tensor("blk.0.ffn_down.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = {"num_attention_heads": 2, "num_key_value_heads": 2}
    [(name, tensor)] = read_tensors(gguf.GGUFReader(tmp_path / "one.gguf"), config, "qwen3")
    assert name == "model.layers.0.mlp.down_proj.weight" and tensor.shape == (4, 512) and tensor.dtype == torch.float32
    np.testing.assert_array_equal(tensor.numpy(), gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("options, named", [({"architecture": "mamba"}, "'mamba'"), ({"pre": "tekken"}, "'tekken'"),
                                            ({"extra_tensor": "rope_freqs"}, "unexpected: rope_freqs.weight")])
def test_a_gguf_file_that_is_not_supported_is_refused_by_name(tmp_path, monkeypatch, options, named):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "odd.gguf", **options)
    with pytest.raises(ValueError, match=named):
        LLM(tmp_path / "odd.gguf", num_kv_blocks=4, device="cpu")


@pytest.mark.parametrize("keep", [0, 3, 100, 5000])
def test_a_truncated_gguf_file_is_named(tmp_path, keep):
    write_gguf(tmp_path / "cut.gguf")
    data = (tmp_path / "cut.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:keep])
    with pytest.raises(ValueError, match=r"cut\.gguf cannot be read as GGUF.*cut short"):
        open_gguf(tmp_path / "cut.gguf")
