"""The arguments of `minivllm bench`, and what each kind runs."""

from __future__ import annotations

import argparse
import statistics

#: nano-vLLM's benchmark, which `bench throughput` runs unless told otherwise; and a small one for `bench latency`.
_THROUGHPUT = {"num_requests": 256, "input_len": (100, 1024), "output_len": (100, 1024), "max_num_seqs": 256}
_LATENCY = {"num_requests": 4, "input_len": (32, 128), "output_len": (64, 64), "max_num_seqs": 1}


def add_parsers(bench: argparse.ArgumentParser) -> None:
    """Fill `minivllm bench` with its kinds."""
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    throughput = kinds.add_parser("throughput", help="output tokens a second over a workload, beside transformers")
    _generation_arguments(throughput, _THROUGHPUT)
    throughput.set_defaults(run=lambda args: _generation(args, throughput=True))
    latency = kinds.add_parser("latency", help="milliseconds a token, one request at a time, beside transformers")
    _generation_arguments(latency, _LATENCY)
    latency.set_defaults(run=lambda args: _generation(args, throughput=False))
    scheduler = kinds.add_parser("scheduler", help="what the host pays for a step")
    scheduler.add_argument("--running", type=int, default=256)
    scheduler.add_argument("--steps", type=int, default=300)
    scheduler.add_argument("--output", metavar="FILE", help="save raw figures as JSON")
    scheduler.set_defaults(run=_scheduler)
    kernels = kinds.add_parser("kernels", help="the Triton kernels against a copy's bandwidth and a matrix product's rate; needs a GPU")
    kernels.add_argument("--output", metavar="FILE", help="save raw figures as JSON")
    kernels.set_defaults(run=_kernels)
    attention = kinds.add_parser("attention", help="naive against paged and flash-style attention: time, memory, the longest prompt that fits")
    attention.add_argument("--device", default="auto")
    attention.add_argument("--memory-gib", type=float, help="as if the GPU had no more, for example 15 for a T4")
    attention.add_argument("--output", metavar="FILE", help="save raw figures as JSON")
    attention.set_defaults(run=_attention)
    _simulate_arguments(kinds.add_parser("simulate", help="batching modes compared on a GPU that need not be there, in simulated time"))
    _parallel_arguments(kinds.add_parser("parallel", help="several GPUs against one: tokens, throughput, all-reduces, the ranks' life"))


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="T4", help="T4, L4, A100 or H200")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second; inf: all at once")
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--input-len", type=int, nargs=2, default=(64, 512), metavar=("FROM", "TO"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(16, 192), metavar=("FROM", "TO"))
    parser.add_argument("--real-lengths", action="store_true", help="lengths of real questions and answers instead")
    parser.add_argument("--mode", action="append", help="only this mode; can be given several times")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--num-kv-blocks", type=int, help="left out: what the device's memory holds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibration", action="store_true", help="instead: the simulated H200 against the measured one")
    parser.add_argument("--output", metavar="FILE", help="save raw figures as JSON")
    parser.set_defaults(run=_simulate)


def _parallel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="qwen3-0.6b", help="qwen3-0.6b, qwen3-8b or tiny; random weights")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2], metavar="GPUS")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256], metavar="SEQUENCES")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", metavar="FILE", help="save raw figures as JSON")
    parser.set_defaults(run=_parallel)


def _generation_arguments(parser: argparse.ArgumentParser, defaults: dict) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--random-weights", action="store_true", help="a directory with a config.json is enough")
    parser.add_argument("--num-requests", type=int, default=defaults["num_requests"])
    parser.add_argument("--input-len", type=int, nargs=2, default=defaults["input_len"], metavar=("FROM", "TO"))
    parser.add_argument("--output-len", type=int, nargs=2, default=defaults["output_len"], metavar=("FROM", "TO"))
    parser.add_argument("--max-token-id", type=int, default=10_000)
    parser.add_argument("--max-num-seqs", type=int, default=defaults["max_num_seqs"], help="the cap on both sides")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--no-baselines", action="store_true", help="only minivllm and the limit")
    parser.add_argument("--output", metavar="FILE", help="save raw figures as JSON")


def _generation(args: argparse.Namespace, throughput: bool) -> int:
    from minivllm.bench import report
    from minivllm.bench.throughput import measure, show
    from minivllm.bench.workload import Workload
    from minivllm.llm import LLM

    workload = Workload.draw(args.num_requests, tuple(args.input_len), tuple(args.output_len), args.max_token_id)
    with LLM(args.model, device=args.device, dtype=args.dtype, max_num_seqs=args.max_num_seqs, enforce_eager=args.enforce_eager,
             load_format="dummy" if args.random_weights else "auto") as llm:
        result = measure(llm, workload, rounds=args.rounds, temperature=args.temperature, max_token_id=args.max_token_id,
                         with_baselines=not args.no_baselines, continuous=throughput)
    show(result)
    if not throughput:
        for name, times in result["seconds"].items():
            if times:
                print(f"  {name:<34}{1e3 * statistics.median(times) / result['output_tokens']:10.2f} ms a token, prefill included")
    report.save(result, args.output)
    return 0


def _simulate(args: argparse.Namespace) -> int:
    from minivllm.bench import report, simulation
    from minivllm.simulate import calibration

    if args.calibration:
        print("\n".join(calibration.show()))
        return 0
    result = simulation.measure(args.device, args.rate, args.num_requests, seed=args.seed, input_len=tuple(args.input_len),
                                output_len=tuple(args.output_len), real_lengths=args.real_lengths, modes=args.mode,
                                max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.max_num_batched_tokens,
                                num_kv_blocks=args.num_kv_blocks)
    print("\n".join(simulation.show(result)))
    report.save(result, args.output)
    return 0


def _kernels(args: argparse.Namespace) -> int:
    import torch

    from minivllm.bench import report

    if not torch.cuda.is_available():
        raise ValueError("bench kernels needs a CUDA GPU, and torch sees none here")
    from minivllm.bench.kernels import measure, show

    result = {"environment": report.environment(torch.device("cuda")), **measure()}
    print("\n".join(show(result)))
    report.save(result, args.output)
    return 0


def _attention(args: argparse.Namespace) -> int:
    from minivllm.bench import report
    from minivllm.bench.attention import measure, show
    from minivllm.worker.device import select_device

    device = select_device(args.device)
    result = {"environment": report.environment(device), **measure(device, args.memory_gib)}
    print("\n".join(show(result)))
    report.save(result, args.output)
    return 0


def _parallel(args: argparse.Namespace) -> int:
    from minivllm.bench import report
    from minivllm.bench.parallel import SHAPES, measure
    from minivllm.worker.device import select_device

    if args.shape not in SHAPES:
        raise ValueError(f"--shape must be one of {', '.join(SHAPES)}, got {args.shape!r}")
    result = {"environment": report.environment(select_device(args.device)),
              **measure(args.shape, args.sizes, args.batches, args.device, args.rounds, say=lambda line: print(line, flush=True))}
    report.save(result, args.output)
    return 0


def _scheduler(args: argparse.Namespace) -> int:
    import torch

    from minivllm.bench import report
    from minivllm.bench.scheduler import measure, show

    result = {"environment": report.environment(torch.device("cpu")), **measure(args.running, args.steps)}
    show(result)
    report.save(result, args.output)
    return 0
