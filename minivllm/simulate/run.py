"""`simulate`: requests through the real engine over a simulated runner, in simulated time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence as Requests
from functools import lru_cache

from minivllm.config import EngineConfig
from minivllm.engine.engine import Engine
from minivllm.engine.sequence import Sequence
from minivllm.models.config import ModelConfig
from minivllm.sampling_params import SamplingParams
from minivllm.simulate.devices import QWEN3_0_6B, Cost, Device, find_device
from minivllm.simulate.modes import Mode, find_mode
from minivllm.simulate.requests import Request
from minivllm.simulate.results import Simulation, StepRecord
from minivllm.simulate.runner import PaddedBatch, SimulatedRunner


def simulate(requests: Requests[Request], device: str | Device = "T4", mode: str = "mixed", model: ModelConfig = QWEN3_0_6B, *,
             max_num_seqs: int = 64, max_num_batched_tokens: int = 2048, num_kv_blocks: int | None = None, block_size: int = 16,
             on_start: Callable[[Engine], None] | None = None) -> Simulation:
    """Serve `requests` and say how long everything took.

    model: any shape. num_kv_blocks: left out, what the device's memory holds. mode: see modes.py.
    on_start: gets the engine before its first step, for a trace or an observer (its clock is the simulated one).
    Raises ValueError for an unknown name, and where a request does not fit into the pool.
    """
    how, cost = find_mode(mode), Cost(find_device(device), model)
    if not requests:
        raise ValueError("there are no requests to simulate")
    config = _config(requests, how, max_num_seqs, max_num_batched_tokens, num_kv_blocks or cost.num_kv_blocks(block_size), block_size)
    runner = SimulatedRunner(cost)
    engine = Engine(config, runner, vocab_size=1, clock=lambda: runner.now)
    if on_start is not None:
        on_start(engine)
    return _Run(requests, how, engine, runner, Simulation(cost.device.label, mode)).to_the_end()


def _config(requests: Requests[Request], how: Mode, max_num_seqs: int, budget: int, num_kv_blocks: int, block_size: int) -> EngineConfig:
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    budget = {"given": budget, "prompt": max(budget, longest), "no limit": max_num_seqs * longest}[how.budget]
    config = EngineConfig(num_kv_blocks=num_kv_blocks, block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
                          max_model_len=longest, enable_prefix_caching=False, policy=how.make_policy())
    return config.complete(num_kv_blocks=num_kv_blocks, max_positions=longest)


@lru_cache(maxsize=None)
def _sampling(output_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)


class _Run:
    """One simulation under way: what has not arrived, what has but is held before the engine, and what the engine works on."""

    def __init__(self, requests: Requests[Request], how: Mode, engine: Engine, runner: SimulatedRunner, result: Simulation):
        self.how, self.engine, self.runner, self.result = how, engine, runner, result
        self.coming = deque(sorted(requests, key=lambda request: request.arrival))
        self.held: deque[Request] = deque()
        self.served: dict[int, Request] = {}
        self.ended: dict[int, tuple[Sequence, float]] = {}

    def to_the_end(self) -> Simulation:
        while True:
            self._receive()
            if self.engine.has_unfinished_requests():
                self._step()
            elif self.coming:
                self.runner.now = self.coming[0].arrival
            else:
                return self._finish()

    def _receive(self) -> None:
        """Let in who has arrived: to the engine, or in static modes to the queue before it and from there a batch at a time."""
        now = self.runner.now
        while self.coming and self.coming[0].arrival <= now:
            request = self.coming.popleft()
            if self.how.batches:
                self.held.append(request)
            else:
                self._add(request)
        if self.held and not self.engine.has_unfinished_requests():
            self._start_batch()

    def _start_batch(self) -> None:
        count, full = self._fitting()
        if self.how.only_full and not full:
            return
        batch = [self.held.popleft() for _ in range(count)]
        self.runner.padded = PaddedBatch(count, max(request.prompt_tokens for request in batch))
        for request in batch:
            self._add(request)

    def _fitting(self) -> tuple[int, bool]:
        """How many of the held make a batch, each with as many blocks as the longest prompt and the longest answer need; is it full?"""
        scheduler, prompt, output = self.engine.scheduler, 0, 0
        for count, request in enumerate(self.held):
            if count == scheduler.max_num_seqs:
                return count, True
            prompt, output = max(prompt, request.prompt_tokens), max(output, request.output_tokens)
            needed = (count + 1) * (scheduler.blocks.num_blocks_for(prompt + output) + 1)  # the one more is the scheduler's reserve
            if count and needed > len(scheduler.blocks.blocks):
                return count, True
        return len(self.held), len(self.held) == scheduler.max_num_seqs

    def _add(self, request: Request) -> None:
        seq = self.engine.add([0] * request.prompt_tokens, _sampling(request.output_tokens))
        self.served[seq.seq_id] = request

    def _step(self) -> None:
        runner, before = self.runner, self.runner.now
        for seq in self.engine.step():
            self.ended[seq.seq_id] = (seq, runner.forget(seq.seq_id))
            seq.token_ids = []  # a long simulation keeps only what it needs
        tokens = runner.prefill_tokens + runner.decode_tokens
        self.result.step_log.append(StepRecord(before, runner.seconds, runner.prefill_tokens, runner.decode_tokens,
                                               runner.work.tokens - tokens, runner.work.rows,
                                               len(self.engine.scheduler.waiting) + len(self.held)))

    def _finish(self) -> Simulation:
        result, stats = self.result, self.engine.stats
        for seq_id in sorted(self.ended):
            (seq, longest_gap), request = self.ended[seq_id], self.served[seq_id]
            result.requests.append(request)
            result.ttft.append(seq.first_token_time - request.arrival)
            result.latency.append(seq.finished_time - request.arrival)
            result.longest_gap.append(longest_gap)
            if request.output_tokens > 1:
                result.tpot.append((seq.finished_time - seq.first_token_time) / (request.output_tokens - 1))
        result.itl, result.unfinished = self.runner.gaps, len(self.held)
        result.num_steps, result.num_preemptions = stats.num_steps, stats.num_preemptions
        result.seconds = result.step_log[-1].time + result.step_log[-1].seconds if result.step_log else 0.0
        return result
