"""`minivllm bench throughput` and `bench latency`: the engine beside transformers, rounds of each in turn, in one process.

Throughput is output tokens divided by wall time, over a whole workload. Latency is the same for one request at a time, as
milliseconds a token.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from minivllm.bench import baselines, limits, report
from minivllm.bench.workload import Workload
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams
from minivllm.weights.hub import open_model


def measure(llm: LLM, workload: Workload, *, rounds: int, temperature: float, max_token_id: int, with_baselines: bool = True,
            continuous: bool = True) -> dict[str, Any]:
    """Run `rounds` of each contestant in turn, each round with other tokens; one short round before them does not count."""
    meter = limits.StepMeter(llm)
    contestants: dict[str, Callable[[Workload], list[list[int]]]] = {"minivllm": lambda work: _ours(llm, work, temperature)}
    if with_baselines:
        model = baselines.transformers_model(llm, open_model(llm.config.model).config)
        cap = llm.config.max_num_seqs
        contestants["transformers static batches"] = lambda work: baselines.generate_static(model, work, cap, temperature)
        if continuous:
            contestants["transformers continuous batching"] = lambda work: baselines.generate_continuous(model, work, cap, temperature)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    failed: dict[str, str] = {}
    warm_up = Workload(workload.prompts[:2], [4] * len(workload.prompts[:2]))
    preemptions = llm.stats.num_preemptions
    for number in range(-1, rounds):
        work = warm_up if number < 0 else workload.shifted(number, max_token_id)
        for name, run in contestants.items():
            if name in failed:
                continue
            try:
                with meter if name == "minivllm" and number == 0 else contextlib.nullcontext():
                    seconds[name].append(_timed(run, work, llm))
            except Exception as error:  # a baseline that does not run here is said, and the others go on
                if name == "minivllm":
                    raise
                failed[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    machine = limits.Machine.measure(llm.runner.device, llm.runner.dtype)
    return _result(llm, workload, {name: times[1:] for name, times in seconds.items()}, failed, meter.limit_seconds(machine), machine,
                   llm.stats.num_preemptions - preemptions)


def show(result: dict[str, Any]) -> None:
    """Print the table: tokens a second, the ratio to ours, and the limit."""
    tokens = result["output_tokens"]
    ours = statistics.median(result["seconds"]["minivllm"])
    print(f"{result['requests']} requests, {result['prompt_tokens']:,} tokens in, {tokens:,} out; {result['engine']['dtype']}, "
          f"at most {result['engine']['max_num_seqs']} sequences at once, {result['environment']['device']}")
    for name, times in result["seconds"].items():
        if times:
            median = statistics.median(times)
            note = "" if name == "minivllm" else f"   minivllm is {median / ours:.2f} times as fast"
            print(f"  {name:<34}{tokens / median:10.1f} tokens/s  ({min(times):.2f} to {max(times):.2f} s){note}")
    for name, reason in result["failed"].items():
        print(f"  {name:<34}      does not run here: {reason}")
    limit = result["limit_seconds"]
    print(f"  {'the limit of bytes and FLOPs':<34}{tokens / limit:10.1f} tokens/s  (minivllm reaches {100 * limit / ours:.0f}% of it; "
          f"{result['machine']['read_bandwidth'] / 1e9:.1f} GB/s read, {result['machine']['matmul_flops'] / 1e9:.0f} GFLOP/s measured)")


def _ours(llm: LLM, workload: Workload, temperature: float) -> list[list[int]]:
    params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n) for n in workload.output_lens]
    return [output["token_ids"] for output in llm.generate(workload.prompts, params, use_tqdm=False)]


def _timed(run: Callable[[Workload], list[list[int]]], workload: Workload, llm: LLM) -> float:
    limits.synchronize(llm.runner.device)
    begin = time.perf_counter()
    answers = run(workload)
    limits.synchronize(llm.runner.device)
    seconds = time.perf_counter() - begin
    if [len(answer) for answer in answers] != workload.output_lens:
        raise RuntimeError("it did not return as many tokens as were asked for")
    return seconds


def _result(llm: LLM, workload: Workload, seconds: dict[str, list[float]], failed: dict[str, str], limit: float, machine: limits.Machine,
            preemptions: int) -> dict[str, Any]:
    return {"environment": report.environment(llm.runner.device), "engine": report.engine_settings(llm), "requests": len(workload.prompts),
            "prompt_tokens": workload.num_prompt_tokens, "output_tokens": workload.num_output_tokens, "seconds": seconds, "failed": failed,
            "limit_seconds": limit, "machine": {"read_bandwidth": machine.read_bandwidth, "matmul_flops": machine.matmul_flops},
            "preemptions": preemptions}
