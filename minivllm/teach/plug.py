"""Run the real model with a learner's function in place of the package's, and compare the tokens.

The function serves every layer and every sequence of an engine of its own, on a pool of its own and without a prefix cache: the LLM it
borrows the weights from stays exactly as it was. Used by the optional cell after an exercise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minivllm.attention import AttentionBackend
from minivllm.attention.metadata import AttentionMetadata
from minivllm.attention.torch_sdpa import TorchSDPABackend, slots_of
from minivllm.engine.engine import Engine
from minivllm.llm import LLM
from minivllm.prompts import Prompt
from minivllm.sampling_params import SamplingParams
from minivllm.teach.compare import a_kind
from minivllm.teach.exercise import one_line
from minivllm.teach.exercises.attention import grouped_query_attention
from minivllm.teach.stub import is_stub, not_attempted, returned_none
from minivllm.worker.kv_cache import KVCachePool

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


class PlugError(RuntimeError):
    """The learner's function cannot serve the model; the message is one line."""


class PluggedAttention(TorchSDPABackend):
    """Attention by `function(q [n, H, D], k [M, K, D], v [M, K, D]) -> [n, H, D]`, called for each sequence with its K/V gathered."""

    name = "plugged"

    def __init__(self, function: AttentionFunction):
        self.function = function

    def prepare(self, metadata: AttentionMetadata, query_lens: list[int], context_lens: list[int]) -> list[tuple[slice, Tensor]]:
        """For each sequence: where its tokens lie in the batch, and the slots of its context."""
        rows, begin = [], 0
        for row, (num_tokens, context) in enumerate(zip(query_lens, context_lens)):
            table = metadata.block_tables[row]
            slots = slots_of(table, torch.arange(context, device=table.device), metadata.block_size)
            rows.append((slice(begin, begin + num_tokens), slots))
            begin += num_tokens
        return rows

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        return torch.cat([self._call(q[tokens], k_cache[slots], v_cache[slots]) for tokens, slots in metadata.plan])

    def _call(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = f"(it was given q {list(q.shape)}, k and v {list(k.shape)})"
        out = _call(self.function, given, q.clone(), k, v)  # q is a view of the model's: a change in place would reach it
        if not isinstance(out, Tensor):
            raise PlugError(f"your function returned {a_kind(out)}, the model needs a tensor {given}")
        if out.shape != q.shape or out.dtype != q.dtype:
            raise PlugError(f"your function returned {out.dtype} {list(out.shape)}, the model needs {q.dtype} {list(q.shape)} {given}")
        return out


class PluggedCache(TorchSDPABackend):
    """One sequence's K/V in a contiguous buffer [2, C, K, D] a layer, written by `function(cache, length, k, v) -> new length`."""

    name = "plugged"

    def __init__(self, function: Callable):
        self.function = function
        self.buffers: dict[int, tuple[Tensor, int]] = {}  # by the address of the layer's pool, which tells the layers apart

    def prepare(self, metadata: AttentionMetadata, query_lens: list[int], context_lens: list[int]) -> None:
        """Nothing: there is one sequence, and its buffers know how long they are."""

    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> None:
        cache, length = self.buffers.get(k_cache.data_ptr()) or (k.new_zeros(2, *k_cache.shape), 0)
        given = f"(it was given cache {list(cache.shape)}, length {length}, k and v {list(k.shape)})"
        new_length = _call(self.function, given, cache, length, k, v)
        if new_length != length + len(k):
            raise PlugError(f"your function returned {new_length!r:.60}, the model needs the new length {length + len(k)} {given}")
        self.buffers[k_cache.data_ptr()] = cache, length + len(k)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        cache, length = self.buffers[k_cache.data_ptr()]
        return grouped_query_attention(q, cache[0, :length], cache[1, :length])


def _call(function: Callable, given: str, *args: Any) -> Any:
    """The learner's function. What it raises becomes one line, and so does None, unless it is a stub's.

    Tensors that it makes (a mask, say) land on the model's device: a beginner's code names none.
    """
    try:
        with next((arg.device for arg in args if isinstance(arg, Tensor)), torch.device("cpu")):
            out = function(*args)
    except NotImplementedError:
        raise
    except Exception as error:
        raise PlugError(f"your function raised {one_line(error)} {given}") from None
    if (out is None or out is ...) and is_stub(function):
        raise NotImplementedError
    if out is None:
        raise PlugError(f"{returned_none(function)} {given}")
    return out


def run_with_attention(llm: LLM | str, fn: AttentionFunction, prompt: Prompt, max_tokens: int = 8) -> list[int]:
    """The greedy tokens of `prompt` with `fn` as the attention of every layer. llm: an open LLM, or a model's name.

    Raises NotImplementedError for a stub, and PlugError with one line for a function that fails.
    """
    with _opened(llm) as opened:
        return _tokens(opened, PluggedAttention(_given(fn)), prompt, max_tokens)


def attention(fn: AttentionFunction, llm: LLM | str, prompt: Prompt, max_tokens: int = 8) -> None:
    """Print what the model says with the learner's `grouped_query_attention` and with the package's attention, and whether they agree."""
    _run_both(PluggedAttention, fn, llm, prompt, max_tokens)


def kv_append(fn: Callable, llm: LLM | str, prompt: Prompt, max_tokens: int = 8) -> None:
    """The same for the learner's `append(cache, length, k, v)`: it keeps the K/V of every layer in one contiguous buffer."""
    _run_both(PluggedCache, fn, llm, prompt, max_tokens)


def _given(fn: Any) -> Any:
    if fn is None or fn is ...:
        raise NotImplementedError
    return fn


@contextmanager
def _opened(llm: LLM | str) -> Iterator[LLM]:
    """The caller's LLM as it is, or one made for the occasion."""
    if not isinstance(llm, str):
        yield llm
        return
    with LLM(llm) as made:
        yield made


def _run_both(backend: type, fn: Any, llm: LLM | str, prompt: Prompt, max_tokens: int) -> None:
    try:
        plugged = backend(_given(fn))
        with _opened(llm) as opened:
            yours = _tokens(opened, plugged, prompt, max_tokens)
            print(_compared(opened, yours, _tokens(opened, None, prompt, max_tokens)))
    except NotImplementedError:
        print(not_attempted(fn))
    except PlugError as error:
        print(error)


def _compared(llm: LLM, yours: list[int], package: list[int]) -> str:
    def say(tokens: list[int]) -> str:
        return repr(llm.tokenizer.decode(tokens)) if llm.tokenizer else str(tokens)

    lines = [f"yours:    {say(yours)}", f"minivllm: {say(package)}"]
    if yours == package:
        return "\n".join([*lines, f"same tokens ({len(yours)})"])
    at = next((i for i, (a, b) in enumerate(zip(yours, package)) if a != b), min(len(yours), len(package)))
    mine, theirs = (say(tokens[at:at + 1]) if at < len(tokens) else "the end" for tokens in (yours, package))
    return "\n".join([*lines, f"first difference: token {at} of the answer is {mine}, and {theirs} with minivllm"])


def _tokens(llm: LLM, backend: AttentionBackend | None, prompt: Prompt, max_tokens: int) -> list[int]:
    """Greedy tokens from an engine beside the LLM's own. backend None: the LLM's."""
    [(ids, sampling)] = llm._checked([prompt], SamplingParams(temperature=0, max_tokens=max_tokens))
    limit = min(len(ids) + max_tokens, llm.config.max_model_len)
    num_blocks = -(-limit // llm.config.block_size)
    config = replace(llm.config, num_kv_blocks=num_blocks, max_model_len=limit, max_num_seqs=1, enable_prefix_caching=False, policy="fcfs",
                     max_num_queued_requests=None)
    with _borrowed(llm, backend or llm.runner.backend, num_blocks):
        engine = Engine(config, llm.runner, llm.engine.vocab_size, llm.engine.scheduler.stop_check.eos_token_ids)
        engine.blocks.free_blocks = OrderedDict.fromkeys(range(num_blocks)[::-1])  # out of order, so that an ignored block table shows
        seq = engine.add(ids, sampling)
        while engine.has_unfinished_requests():
            engine.step()
    if seq.error:
        raise PlugError("with your function the model's output is not finite (NaN or infinity)" if backend else seq.error)
    return seq.generated_token_ids


@contextmanager
def _borrowed(llm: LLM, backend: Any, num_blocks: int) -> Iterator[None]:
    """The runner with another backend, a pool of its own and no graphs, which hold the old ones; all are put back whatever happens."""
    runner = llm.runner
    before, pool, graphs = runner.backend, runner.pool, runner.graphs
    try:
        runner.graphs = None
        runner.backend, runner.pool = backend, KVCachePool(runner.spec, num_blocks, runner.block_size, runner.device)
        runner.pool.bind(runner.model, backend)
        yield
    finally:
        runner.backend, runner.pool, runner.graphs = before, pool, graphs
        pool.bind(runner.model, before)
