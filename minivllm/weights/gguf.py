"""Reading a GGUF file (llama.cpp's format): its config, tensors and tokenizer under Hugging Face's names.

Parsing and dequantization are the `gguf` package's. Here is what differs between the two worlds: names, the order of the rows of
Llama's q and k, and a tokenizer made of lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.tokenizer import Tokenizer
from minivllm.weights.checkpoint import Checkpoint
from minivllm.weights.gguf_tokenizer import build_tokenizer

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
#: llama.cpp stores these with the two halves of each rotated pair side by side.
_PERMUTED = {"llama": ("attn_q", "attn_k")}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_gguf(file: Path, name: str | None = None) -> Checkpoint:
    """Read `file` with nothing kept between runs; `weights/cache.py` spares the second run the parsing."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ImportError(f"reading {file.name} needs the gguf package: pip install gguf") from None
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ValueError(f"{file} cannot be read as GGUF ({error}): it may be cut short; fetch it again") from error
    fields = _Fields(reader, file)
    config = read_config(fields, {tensor.name for tensor in reader.tensors})
    return Checkpoint(
        name=name or str(file),
        config=config,
        tensors=lambda: read_tensors(reader, config, fields.architecture),
        make_tokenizer=lambda: Tokenizer(build_tokenizer(fields.get)),
    )


class _Fields:
    """The file's key-value part. Keys that begin with "." belong to the file's architecture: ".block_count" is "llama.block_count"."""

    def __init__(self, reader: Any, file: Path):
        self.reader, self.file = reader, file
        self.architecture = self.get("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise ValueError(f"{file} holds architecture {self.architecture!r}; from GGUF only {', '.join(_ARCHITECTURES)} are supported")

    def get(self, key: str, default: Any = ...) -> Any:
        field = self.reader.get_field(self.architecture + key if key.startswith(".") else key)
        if field is None:
            if default is ...:
                raise ValueError(f"{self.file} lacks the field {key!r}")
            return default
        return field.contents()


def read_config(fields: _Fields, tensor_names: set[str]) -> dict[str, Any]:
    """The file's fields as a config.json of transformers would give them."""
    get = fields.get
    scaling = get(".rope.scaling.type", "none")
    heads, hidden = get(".attention.head_count"), get(".embedding_length")
    eos = {get("tokenizer.ggml.eos_token_id", None), get("tokenizer.ggml.eot_token_id", None)} - {None}
    return {
        "architectures": [_ARCHITECTURES[fields.architecture]],
        "vocab_size": get(".vocab_size", None) or len(get("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": get(".feed_forward_length"),
        "num_hidden_layers": get(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get(".attention.head_count_kv", heads),
        "head_dim": get(".attention.key_length", hidden // heads),
        "rms_norm_eps": float(get(".attention.layer_norm_rms_epsilon")),
        "rope_theta": float(get(".rope.freq_base", 10000.0)),
        "rope_scaling": None if scaling == "none" else {"rope_type": scaling},
        "max_position_embeddings": get(".context_length"),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "eos_token_id": sorted(eos),
        "bos_token_id": get("tokenizer.ggml.bos_token_id", None),
        "dtype": "float32",
    }


def read_tensors(reader: Any, config: dict[str, Any], architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor, dequantized to float32. A name that is not known is passed on as it is, for the loader to refuse."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)  # float32 as stored is handed back as the mapped file itself
        weight = torch.from_numpy(array if array.flags.writeable else array.copy())
        stem, _, kind = tensor.name.rpartition(".")
        if stem.rpartition(".")[2] in _PERMUTED.get(architecture, ()):
            weight = unpermute(weight, heads[stem.rpartition(".")[2]])
        yield f"{hf_name(stem)}.{kind}", weight


def hf_name(stem: str) -> str:
    """"blk.3.attn_q" -> "model.layers.3.self_attn.q_proj"."""
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{_NAMES.get(part, part)}"
    return _NAMES.get(stem, stem)


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from llama.cpp's order (0, D/2, 1, D/2 + 1, ...) back to (0, 1, ..., D - 1)."""
    rows = weight.unflatten(0, (num_heads, -1, 2))  # [heads, D / 2, 2, ...]
    return rows.transpose(1, 2).reshape(weight.shape)
