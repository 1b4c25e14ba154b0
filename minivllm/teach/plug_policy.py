"""Run the real engine with a learner's policy, and compare order and tokens with first come, first served.

Requests come in given steps, and the engine's clock counts steps, so the order is the same on every machine. Used by the optional cell
after the exercise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minivllm.engine.engine import Engine
from minivllm.engine.sequence import Sequence
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams
from minivllm.teach.exercise import one_line
from minivllm.teach.exercises.policies_on_trial import Checked, PolicyProblem
from minivllm.teach.views.history import letter_name
from minivllm.teach.plug import PlugError, _borrowed
from minivllm.teach.stub import is_stub, not_attempted

Request = tuple[int, list[int], int]  # the step in which it comes, token ids of its prompt, tokens of its answer


def policy(function: Any, llm: LLM, requests: list[Request], max_num_seqs: int = 2, budget: int = 32) -> None:
    """Print in which order the requests get their first tokens, with the learner's policy and without, and whether the answers agree."""
    if function is None or is_stub(function):
        print(not_attempted(function))
        return
    try:
        yours = _run(llm, requests, max_num_seqs, budget, Checked(function))
    except NotImplementedError:
        print(not_attempted(function))
    except PlugError as error:
        print(error)
    else:
        print(_compared(yours, _run(llm, requests, max_num_seqs, budget, "fcfs")))


def _run(llm: LLM, requests: list[Request], max_num_seqs: int, budget: int, chosen: str | Callable) -> list[Sequence]:
    """The sequences, finished, in the order of `requests`. Raises PlugError with one line where a learner's policy fails."""
    size, steps = llm.config.block_size, [0]
    num_blocks = sum(-(-(len(prompt) + answer) // size) + 1 for _, prompt, answer in requests)
    config = replace(llm.config, num_kv_blocks=num_blocks, max_model_len=min(llm.config.max_model_len, num_blocks * size), policy=chosen,
                     enable_prefix_caching=False, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    sequences: list[Sequence] = []
    with _borrowed(llm, llm.runner.backend, num_blocks):
        engine = Engine(config, llm.runner, llm.engine.vocab_size, clock=lambda: float(steps[0]))
        while len(sequences) < len(requests) or engine.has_unfinished_requests():
            while len(sequences) < len(requests) and requests[len(sequences)][0] <= steps[0]:
                _, prompt, answer = requests[len(sequences)]
                sequences.append(engine.add(prompt, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)))
            _step(engine)
            steps[0] += 1
    return sequences


def _step(engine: Engine) -> None:
    try:
        engine.step()
    except NotImplementedError:
        raise
    except PolicyProblem as problem:
        raise PlugError(f"your policy gave {problem.got}: {problem.cause}") from None
    except Exception as error:
        raise PlugError(f"with your policy the engine raised {one_line(error)}: run the check above first") from None


def _compared(yours: list[Sequence], package: list[Sequence]) -> str:
    lines = [f"{name} first tokens in the order {_order(sequences)}" for name, sequences in (("yours:   ", yours), ("minivllm:", package))]
    other = [letter_name(i) for i, (a, b) in enumerate(zip(yours, package)) if a.generated_token_ids != b.generated_token_ids]
    return "\n".join([*lines, f"other tokens for {', '.join(other)}" if other else f"the same tokens for each of the {len(yours)} "
                f"requests"])


def _order(sequences: list[Sequence]) -> str:
    return " ".join(letter_name(i) for i in sorted(range(len(sequences)), key=lambda i: (sequences[i].first_token_time, i)))
