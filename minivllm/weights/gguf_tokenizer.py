"""A byte-level BPE tokenizer from the lists in a GGUF file: tokens, their types, merges, and the name of a splitting rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CONTROL, _USER_DEFINED = 3, 4
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: How text is split before merging, by the name in `tokenizer.ggml.pre`: a regular expression, or None for GPT-2's own.
_SPLITS = {"gpt-2": None, "smollm": None, "qwen2": _WORDS % "", "llama-bpe": _WORDS % "{1,3}"}


def build_tokenizer(get: Callable[..., Any]) -> Any:
    """A transformers PreTrainedTokenizerFast; `get(key, default)` reads the file's fields. Raises ValueError for an unknown kind."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    kind, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _SPLITS:
        raise ValueError(f"GGUF tokenizer {kind!r} with splitting {pre!r} is not supported; supported: 'gpt2' with {', '.join(_SPLITS)}")
    tokens = get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    types = get("tokenizer.ggml.token_type", [])
    added = [AddedToken(token, normalized=False, special=kind == _CONTROL)
             for token, kind in zip(tokens, types) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens(added)
    named = {role: get(f"tokenizer.ggml.{key}_token_id", None)
             for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}
    special = {f"{role}_token": tokens[index] for role, index in named.items() if index is not None}
    if get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):  # llama.cpp's default
        if named["bos"] is None:
            raise ValueError("the GGUF file wants a BOS token before each prompt and names none (tokenizer.ggml.bos_token_id)")
        _prepend(tokenizer, special["bos_token"], named["bos"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=get("tokenizer.chat_template", None),
                                   clean_up_tokenization_spaces=False, **special)


def _pre_tokenizer(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    split = _SPLITS[pre]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    first = {"gpt-2": [], "smollm": [pre_tokenizers.Digits(individual_digits=True)]}.get(pre)
    if first is None:
        first = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    return pre_tokenizers.Sequence([*first, byte_level])


def _prepend(tokenizer: Any, bos: str, bos_id: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)])
