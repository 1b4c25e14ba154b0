"""How a fault in the scheduler or the block manager is run: the same requests through the right engine and the faulty one.

The hint for an input that shows no difference comes from what the right engine did: evictions, hits, preemptions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.scheduler import Scheduler
from minivllm.teach.bugs.fault import Comparison, Fault
from minivllm.teach.trial import Setup, Trial, read_setup, run_trial

INPUTS = {"requests": ..., "num_kv_blocks": 8, "block_size": 4, "max_num_seqs": 2}
Hint = Callable[[Setup, Trial], str]


def compare_engines(fault: Fault, **inputs: Any) -> Comparison:
    return compare_setups(fault, read_setup(**inputs))


def compare_setups(fault: Fault, setup: Setup) -> Comparison:
    """Run both engines. They differ when a request got other tokens, or when the faulty one did not come to its end."""
    right = run_trial(setup, traced=True)
    if right.ending:
        raise RuntimeError(f"the right engine failed, which is a fault of the package: it {right.ending}")
    blocks, scheduler = (fault.faulty, Scheduler) if issubclass(fault.faulty, BlockManager) else (BlockManager, fault.faulty)
    faulty = run_trial(setup, blocks, scheduler)
    if faulty.ending:
        done = f"finishes all {len(right.tokens)} requests" if len(right.tokens) > 1 else "finishes the request"
        return Comparison(True, f"the right engine {done},", f"the faulty one {faulty.ending}")
    for index, (want, got) in enumerate(zip(right.tokens, faulty.tokens)):
        if want != got:
            at = next((i for i, (a, b) in enumerate(zip(want, got)) if a != b), min(len(want), len(got)))
            return Comparison(True, f"the right engine gives request {index} the tokens {_part(want, at)},",
                              f"the faulty one gives {_part(got, at)}")
    tokens = ", ".join(_part(tokens, 0) for tokens in right.tokens[:3]) + (", ..." if len(right.tokens) > 3 else "")
    return Comparison(False, tokens, tokens, fault.hint(setup, right))


def _part(tokens: list[int], at: int) -> str:
    """A few tokens around the first difference."""
    begin = max(0, at - 2)
    part = ", ".join(str(token) for token in tokens[begin:begin + 5])
    return f"[{'..., ' if begin else ''}{part}{', ...' if begin + 5 < len(tokens) else ''}]"
