"""One run of an engine on the mirror runner, with the scheduler and block manager that are on trial. No model, milliseconds.

Takes the requests of a "break it" exercise, checks them, and says how each one ended. A crash or a standstill is a result too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minivllm.config import EngineConfig
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.engine import Engine
from minivllm.engine.events import Trace
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.stats import Stats
from minivllm.sampling_params import SamplingParams
from minivllm.teach.exercise import one_line
from minivllm.teach.mirror import VOCAB, MirrorRunner

Request = tuple[list[int], int]  # token ids of the prompt, and max_tokens

_MOST = {"num_kv_blocks": 256, "block_size": 64, "max_num_seqs": 64}
_MOST_REQUESTS, _MOST_TOKENS = 64, 512


class BadInput(ValueError):
    """The learner's input cannot be run; the message is one line and says why."""


@dataclass
class Setup:
    """Waves of requests, each wave added once the one before has ended, and the engine's limits."""

    waves: list[list[Request]]
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int

    @property
    def requests(self) -> list[Request]:
        return [request for wave in self.waves for request in wave]


@dataclass
class Trial:
    """tokens: what each request generated, in order. ending: empty, or why the run did not come to its end."""

    tokens: list[list[int]] = field(default_factory=list)
    ending: str = ""
    stats: Stats = field(default_factory=Stats)
    trace: Trace | None = None

    def count(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.trace.events) if self.trace else 0


def run_trial(setup: Setup, block_manager: type[BlockManager] = BlockManager, scheduler: type[Scheduler] = Scheduler,
              traced: bool = False) -> Trial:
    """Run all waves. A faulty class may end the run early, which `ending` then tells."""
    engine = _engine(setup, block_manager, scheduler)
    trial = Trial(stats=engine.stats, trace=engine.scheduler.start_trace() if traced else None)
    steps_left = sum(len(prompt) + max_tokens for prompt, max_tokens in setup.requests) + 10  # the right engine needs fewer
    sequences = []
    try:
        for wave in setup.waves:
            sequences += [engine.add(prompt, SamplingParams(temperature=0, max_tokens=max_tokens)) for prompt, max_tokens in wave]
            while engine.has_unfinished_requests() and steps_left > 0:
                engine.step()
                steps_left -= 1
            if engine.has_unfinished_requests():
                trial.ending = "is still running long after the right one has ended: it never will"
                break
    except Exception as error:
        stuck = "chose nothing" in str(error)
        trial.ending = "stops for ever: requests are left, and no step computes anything" if stuck else f"crashes: {one_line(error)}"
    trial.tokens = [seq.generated_token_ids for seq in sequences]
    return trial


def _engine(setup: Setup, block_manager: type[BlockManager], scheduler: type[Scheduler]) -> Engine:
    config = EngineConfig(block_size=setup.block_size, num_kv_blocks=setup.num_kv_blocks, max_num_seqs=setup.max_num_seqs,
                          max_num_batched_tokens=max(64, setup.max_num_seqs), max_model_len=setup.num_kv_blocks * setup.block_size)
    engine = Engine(config, MirrorRunner(setup.block_size, setup.num_kv_blocks), VOCAB)
    engine.blocks = block_manager(config.num_kv_blocks, config.block_size)
    engine.scheduler = scheduler(engine.blocks, config.max_num_seqs, config.max_num_batched_tokens, engine.scheduler.stop_check)
    return engine


def require_int(name: str, value: Any, least: int, most: int) -> int:
    """`value` as an int within its limits; BadInput names what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(f"{name} must be a whole number, got {value!r:.60}")
    if not least <= value <= most:
        raise BadInput(f"{name} must be {least} to {most}, got {value}")
    return value


def read_setup(requests: Any, num_kv_blocks: Any, block_size: Any, max_num_seqs: Any) -> Setup:
    """The learner's inputs as a Setup: a list of (prompt, max_tokens), or a list of such lists. Raises BadInput."""
    limits = {"num_kv_blocks": num_kv_blocks, "block_size": block_size, "max_num_seqs": max_num_seqs}
    for name, value in limits.items():
        require_int(name, value, 1, _MOST[name])
    if not isinstance(requests, list) or not requests:
        raise BadInput(f"requests must be a list of (prompt, max_tokens), or a list of such lists, got {requests!r:.60}")
    waves = requests if all(isinstance(wave, list) for wave in requests) else [requests]
    setup = Setup([[_read_request(request) for request in wave] for wave in waves], **limits)
    if not setup.requests or len(setup.requests) > _MOST_REQUESTS:
        raise BadInput(f"there must be 1 to {_MOST_REQUESTS} requests, got {len(setup.requests)}")
    room = num_kv_blocks * block_size
    for prompt, max_tokens in setup.requests:
        if len(prompt) + max_tokens > room:
            raise BadInput(f"a prompt of {len(prompt)} tokens and an answer of {max_tokens} do not fit: the pool has {num_kv_blocks} "
                           "blocks "
                           f"of {block_size}, {room} slots in all")
    return setup


def _read_request(request: Any) -> Request:
    if not isinstance(request, tuple) or len(request) != 2:
        raise BadInput(f"a request is (prompt, max_tokens), such as ([1, 2, 3], 4), got {request!r:.60}")
    prompt, max_tokens = request
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    if not isinstance(ids, (list, tuple, range)) or not ids:
        raise BadInput(f"a prompt is a list of at least one token id, got {prompt!r:.60}")
    require_int("the length of a prompt", len(ids), 1, _MOST_TOKENS)
    return [require_int("a token id", token, 0, VOCAB - 1) for token in ids], require_int("max_tokens", max_tokens, 1, _MOST_TOKENS)
