"""What a decode step costs on a CUDA GPU, launch by launch and as a graph: a model of Qwen3-0.6B's shape with random weights.

Owns the measurements that notebook 09 shows, live or from saved/h200_graphs.json. Draws nothing and knows no notebook.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minivllm.engine.step import PlanRow, StepPlan
from minivllm.sampling_params import SamplingParams
from minivllm.teach import fusion_bench
from minivllm.teach.gpu_trace import by_name, in_total, one_layer, traced

if TYPE_CHECKING:
    from minivllm import LLM

MODEL = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
         "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
         "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "tie_word_embeddings": True,
         "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645}
BATCHES = (1, 8, 64, 256)
CONTEXT, BLOCK = 251, 16           # tokens each row attends to
BLOCKS_A_ROW = -(-CONTEXT // BLOCK)
PADDED = ((33, 40), (65, 80), (129, 144))
_NAMED = 8                         # the batch whose kernels are listed by name
_GREEDY = SamplingParams(temperature=0)
_UNFUSED = ("kernels.rms_norm", "kernels.silu_and_mul", "kernels.rope_store", "kernels.store_kvcache", "layers.attention")


def saved() -> dict[str, Any]:
    """What `measure` gave on an H200; {} where the file is not there."""
    file = resources.files("minivllm.teach").joinpath("saved", "h200_graphs.json")
    return json.loads(file.read_text()) if file.is_file() else {}


def measure(model: dict[str, Any] = MODEL, batches: tuple[int, ...] = BATCHES) -> dict[str, Any]:
    """Everything, on this CUDA GPU; times in microseconds. A part that fails is {"error": why}, and the others are there all the same."""
    if not torch.cuda.is_available():
        raise RuntimeError("graph_bench.measure() needs a CUDA GPU, which alone has graphs; saved() has an H200's figures")
    begin = time.perf_counter()
    traced(lambda: torch.ones(1, device="cuda"))  # the first trace of a process is slow, and may lose what it was to show
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": model["num_hidden_layers"],
                             "context": CONTEXT, "batches": list(batches)}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        with _engine(folder, enforce_eager=True) as llm:
            found["dtype"], found["backend"] = str(llm.runner.dtype).removeprefix("torch."), llm.runner.backend.name
            _measure_engine(llm, found, batches)
        _part(found, "generate_compiled", lambda: _compiled_speed(folder, batches))
    _part(found, "fusion", lambda: fusion_bench.measure(model))
    _part(found, "errors", fusion_bench.errors_of_captures)
    found["seconds"] = round(time.perf_counter() - begin, 1)
    return found


def _measure_engine(llm: LLM, found: dict[str, Any], batches: tuple[int, ...]) -> None:
    runner = llm.runner
    _part(found, "eager", lambda: {str(count): eager_step(runner, count) for count in batches})
    _part(found, "eager_kernels", lambda: kernels_of(runner, _NAMED))
    _part(found, "captures", lambda: capture_all(runner, max(batches)))
    if runner.graphs is None:
        return
    _part(found, "replay", lambda: {str(count): replayed_step(runner, count) for count in batches})
    _part(found, "replay_kernels", lambda: kernels_of(runner, _NAMED))
    _part(found, "padding", lambda: [padding(runner, count, size) for count, size in PADDED if size <= max(batches)])
    _part(found, "generate", lambda: {str(count): tokens_per_second(llm, count) for count in batches})
    runner.graphs = None
    with plain_torch(runner):
        _part(found, "unfused", lambda: {str(count): eager_step(runner, count) for count in batches})
        _part(found, "unfused_kernels", lambda: kernels_of(runner, _NAMED))


def _part(found: dict[str, Any], name: str, run: Callable[[], Any]) -> None:
    try:
        found[name] = run()
    except Exception as error:  # one thing that a device or a version cannot do must not cost the rest
        found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}


def _engine(folder: str, **settings: Any) -> LLM:
    from minivllm import LLM

    most = max(BATCHES)
    return LLM(folder, load_format="dummy", block_size=BLOCK, num_kv_blocks=most * BLOCKS_A_ROW, max_model_len=BLOCKS_A_ROW * BLOCK,
               max_num_seqs=most, **settings)


def decode_plan(count: int) -> StepPlan:
    """`count` rows that decode one token each, after the same length of context, each over its own blocks."""
    tables = [list(range(row * BLOCKS_A_ROW, (row + 1) * BLOCKS_A_ROW)) for row in range(count)]
    return StepPlan([PlanRow(row, CONTEXT - 1, [row], table, 0, True, _GREEDY, 0) for row, table in enumerate(tables)])


def eager_step(runner: Any, count: int) -> dict[str, Any]:
    """A whole step without a graph: batch built, model run, tokens drawn and read. allocations: how often torch was asked for memory."""
    plan = decode_plan(count)
    wall = wall_us(lambda: runner.execute(plan))
    before = torch.cuda.memory_stats()
    runner.execute(plan)
    after = torch.cuda.memory_stats()
    made = {name: after[key] - before[key] for name, key in
            (("allocations", "allocation.all.allocated"), ("allocated_bytes", "allocated_bytes.all.allocated"))}
    return {"wall_us": wall, **in_total(traced(lambda: runner.execute(plan))), **made}


def replayed_step(runner: Any, count: int) -> dict[str, Any]:
    """The same step by replay; graph_us: the graph alone, on the device. load_us, launch_us: what the host spends before it can wait."""
    plan, graphs = decode_plan(count), runner.graphs
    step = eager_step(runner, count)
    size = next(size for size in graphs.sizes if size >= count)
    graph, _ = graphs.graphs[size]
    with torch.inference_mode():
        load = wall_us(lambda: graphs.batch.load(plan, size), wait=False)
        launch = wall_us(graph.replay, wait=False)
    return {**step, "size": size, "graph_us": device_us(graph.replay), "load_us": load, "launch_us": launch}


def kernels_of(runner: Any, count: int) -> dict[str, Any]:
    """Which kernels a step is made of, by name; and one layer of it as [name, start, duration]."""
    plan = decode_plan(count)
    runner.execute(plan)
    done = traced(lambda: runner.execute(plan))
    return {"batch": count, "by_name": by_name(done), "layer": one_layer(done, runner.model_config.num_layers)}


@torch.inference_mode()
def capture_all(runner: Any, most: int) -> list[dict[str, Any]]:
    """Capture every size as the engine does, the largest first: milliseconds and bytes of the device's memory for each."""
    from minivllm.worker.cuda_graphs import DecodeGraphs, graph_sizes
    from minivllm.worker.decode_batch import DecodeBatch

    batch = DecodeBatch(most, BLOCKS_A_ROW, BLOCK, runner.device)
    graphs = DecodeGraphs(runner.model, runner.backend, batch, graph_sizes(most))
    pool, readings = None, []
    for size in sorted(graphs.sizes, reverse=True):
        free, begin = _free_bytes(), time.perf_counter()
        pool = graphs._capture_one(size, pool)
        torch.cuda.synchronize()
        readings.append({"size": size, "ms": round(1e3 * (time.perf_counter() - begin), 1), "bytes": free - _free_bytes()})
    runner.graphs = graphs
    return readings


def _free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@torch.inference_mode()
def padding(runner: Any, count: int, size: int) -> dict[str, Any]:
    """A graph of `size` with `count` real rows, against a graph of just `count`, and one of `size` that is full."""
    from minivllm.worker.cuda_graphs import DecodeGraphs

    graphs, plan = runner.graphs, decode_plan(count)
    exact = DecodeGraphs(runner.model, runner.backend, graphs.batch, [count])
    exact._capture_one(count, None)
    found = {"rows": count, "size": size}
    for name, graph, rows in (("exact_us", exact.graphs[count][0], plan), ("padded_us", graphs.graphs[size][0], plan),
                              ("full_us", graphs.graphs[size][0], decode_plan(size))):
        graphs.batch.load(rows, count if name == "exact_us" else size)
        found[name] = device_us(graph.replay)
    return found


def tokens_per_second(llm: LLM, count: int, prompt: int = 128, out: int = 96) -> float:
    """Output tokens a second of `generate`: the better of two runs after one that does not count."""
    params = SamplingParams(temperature=0.6, max_tokens=out, ignore_eos=True)
    speeds = []
    for run in range(3):
        draw = random.Random(f"{count}, {run}")  # no prompt twice: its blocks would be found
        prompts = [[draw.randrange(10_000) for _ in range(prompt)] for _ in range(count)]
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        speeds.append(count * out / (time.perf_counter() - begin))
    return round(max(speeds[1:]), 1)


def _compiled_speed(folder: str, batches: tuple[int, ...]) -> dict[str, float]:
    with _engine(folder, torch_compile=True) as llm:
        return {str(count): tokens_per_second(llm, count) for count in batches}


@contextlib.contextmanager
def plain_torch(runner: Any) -> Iterator[None]:
    """The layers in torch alone: every sum, norm and rotation a launch of its own, attention by gathered pages."""
    from minivllm.attention.torch_sdpa import TorchSDPABackend

    modules, backend = [importlib.import_module(f"minivllm.{name}") for name in _UNFUSED], runner.backend
    kept = [module.uses_triton for module in modules]
    try:
        for module in modules:
            module.uses_triton = lambda tensor: False
        runner.backend = TorchSDPABackend()
        runner.pool.bind(runner.model, runner.backend)
        yield
    finally:
        for module, uses_triton in zip(modules, kept):
            module.uses_triton = uses_triton
        runner.backend = backend
        runner.pool.bind(runner.model, backend)


def wall_us(run: Callable[[], object], wait: bool = True, repeats: int = 21) -> float:
    """Median time of a call until the device is done, or, without `wait`, until the host has it back."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if wait:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return round(1e6 * statistics.median(times[1:]), 1)


def device_us(run: Callable[[], object], calls: int = 20) -> float:
    """Time of a call on the device, one behind the other: the median of five rounds."""
    times = []
    for _ in range(5):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(calls):
            run()
        last.record()
        last.synchronize()
        times.append(1e3 * first.elapsed_time(last) / calls)
    return round(statistics.median(times), 1)
