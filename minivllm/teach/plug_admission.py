"""Run the real engine with a learner's admission rule in a pool too small for all, and compare tokens, steps and preemptions.

The requests are all there at the start; the engine and its pool are made for the occasion. Used by the optional cell after the exercise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.engine import Engine
from minivllm.engine.sequence import Sequence
from minivllm.engine.stats import Stats
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams
from minivllm.teach.exercise import one_line
from minivllm.teach.plug import PlugError, _borrowed
from minivllm.teach.stub import is_stub, not_attempted, returned_none


class PluggedAdmission(BlockManager):
    """The block manager, asking `function(num_free_blocks, candidate_tokens, num_running, block_size)` who may start."""

    function: Callable

    def can_allocate(self, seq: Sequence, hits: list[int], reserve: int = 0) -> bool:
        args = self.num_free_blocks, len(seq), reserve, self.block_size
        given = f"({args[0]} free blocks, {args[1]} tokens, {args[2]} running, block_size {args[3]})"
        try:
            admitted = self.function(*args)
        except NotImplementedError:
            raise
        except Exception as error:
            raise PlugError(f"your function raised {one_line(error)} {given}") from None
        if admitted is None and is_stub(self.function):
            raise NotImplementedError
        if admitted is None:
            raise PlugError(f"{returned_none(self.function)} {given}")
        if admitted and self.num_blocks_for(len(seq)) > self.num_free_blocks:
            raise PlugError(f"your function admits a request that needs {self.num_blocks_for(len(seq))} blocks {given}")
        if not admitted and reserve == 0 and self.num_free_blocks == len(self.blocks):
            raise PlugError(f"your function refuses a request although nothing runs: the engine would stand still {given}")
        return bool(admitted)


def may_admit(function: Any, llm: LLM, prompts: list[list[int]], num_blocks: int, max_tokens: int = 16) -> None:
    """Print steps, preemptions and recomputed tokens under the learner's rule and the package's, and whether the answers are the same."""
    if function is None or function is ...:
        print(not_attempted(function))
        return
    try:
        yours, stats = _run(llm, prompts, num_blocks, max_tokens, function)
    except NotImplementedError:
        print(not_attempted(function))
    except PlugError as error:
        print(error)
    else:
        package, package_stats = _run(llm, prompts, num_blocks, max_tokens)
        print(f"yours:    {_told(stats)}\nminivllm: {_told(package_stats)}")
        print("same tokens" if yours == package else "the answers differ")


def _told(stats: Stats) -> str:
    return f"{stats.num_steps} steps, {stats.num_preemptions} preemptions, {stats.recomputed_tokens} tokens computed again"


def _run(llm: LLM, prompts: list[list[int]], num_blocks: int, max_tokens: int,
         function: Callable | None = None) -> tuple[list[list[int]], Stats]:
    """The answers, and what the engine counted. function None: the package's rule."""
    room = num_blocks * llm.config.block_size
    config = replace(llm.config, num_kv_blocks=num_blocks, max_model_len=min(llm.config.max_model_len, room), enable_prefix_caching=False,
                     policy="fcfs", max_num_queued_requests=None)
    with _borrowed(llm, llm.runner.backend, num_blocks):
        engine = Engine(config, llm.runner, llm.engine.vocab_size)
        if function is not None:
            engine.blocks = engine.scheduler.blocks = PluggedAdmission(num_blocks, config.block_size, False)
            engine.blocks.function = function
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        sequences = [engine.add(prompt, params) for prompt in prompts]
        while engine.has_unfinished_requests():
            engine.step()
    return [seq.generated_token_ids for seq in sequences], engine.stats
