"""Run the real engine with a learner's `block_hashes` in its prefix cache, and compare hits and tokens with the package's.

The requests run one after the other in an engine of its own, on a pool of its own. Used by the optional cell after the exercise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.engine import Engine
from minivllm.engine.sequence import Sequence
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams
from minivllm.teach.compare import a_kind
from minivllm.teach.exercise import one_line
from minivllm.teach.plug import PlugError, _borrowed
from minivllm.teach.stub import is_stub, not_attempted, returned_none


class PluggedHashes(BlockManager):
    """The block manager with hashes from `function(token_ids, block_size, extra)`."""

    function: Callable

    def _hash_full_blocks(self, seq: Sequence) -> None:
        full = len(seq) // self.block_size
        if len(seq.block_hashes) >= full:
            return
        given = f"(it was given {len(seq)} tokens)"
        try:
            hashes = self.function(list(seq.token_ids), self.block_size, seq.cache_extra)
        except NotImplementedError:
            raise
        except Exception as error:
            raise PlugError(f"your function raised {one_line(error)} {given}") from None
        if hashes is None:
            raise PlugError(f"{returned_none(self.function)} {given}")
        if not isinstance(hashes, (list, tuple)) or len(hashes) != full:
            got = f"{len(hashes)} hashes" if isinstance(hashes, (list, tuple)) else a_kind(hashes)
            raise PlugError(f"your function returned {got}, the engine needs a list of {full} {given}")
        seq.block_hashes[:] = [hashlib.sha256(repr(digest).encode()).digest() for digest in hashes]  # equal where the learner's are equal


def block_hashes(function: Any, llm: LLM, prompts: list[list[int]], max_tokens: int = 4) -> None:
    """Print what each prompt, sent after the one before has ended, found in the cache, and whether the answers are the package's."""
    if function is None or is_stub(function):
        print(not_attempted(function))
        return
    try:
        yours = _run(llm, prompts, max_tokens, function)
    except NotImplementedError:
        print(not_attempted(function))
    except PlugError as error:
        print(error)
    else:
        print(_compared(llm, yours, _run(llm, prompts, max_tokens)))


def _run(llm: LLM, prompts: list[list[int]], max_tokens: int, function: Callable | None = None) -> list[Sequence]:
    """The sequences, finished. function None: the package's own hashes."""
    size = llm.config.block_size
    num_blocks = sum(-(-(len(prompt) + max_tokens) // size) for prompt in prompts)
    config = replace(llm.config, num_kv_blocks=num_blocks, max_model_len=min(llm.config.max_model_len, num_blocks * size))
    with _borrowed(llm, llm.runner.backend, num_blocks):
        engine = Engine(config, llm.runner, llm.engine.vocab_size)
        if function is not None:
            engine.blocks = engine.scheduler.blocks = PluggedHashes(num_blocks, size)
            engine.blocks.function = function
        sequences = []
        for prompt in prompts:
            sequences.append(engine.add(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)))
            while engine.has_unfinished_requests():
                engine.step()
    return sequences


def _compared(llm: LLM, yours: list[Sequence], package: list[Sequence]) -> str:
    found = [[seq.num_cached_tokens for seq in sequences] for sequences in (yours, package)]
    lines = [f"yours:    cached tokens {found[0]}", f"minivllm: cached tokens {found[1]}"]
    for number, (mine, right) in enumerate(zip(yours, package)):
        if mine.generated_token_ids != right.generated_token_ids:
            texts = [llm.tokenizer.decode(seq.generated_token_ids) if llm.tokenizer else seq.generated_token_ids for seq in (mine, right)]
            return "\n".join([*lines, f"prompt {number} got another answer: {texts[0]!r}, and {texts[1]!r} with minivllm"])
    return "\n".join([*lines, "same tokens" + ("" if found[0] == found[1] else ", but other hits")])
