"""`minivllm bench parallel`: what several GPUs gain over one, and where the time goes.

For a model shape with random weights: whether the greedy tokens are those of one GPU (float32), decode steps a second for some batch sizes
with graphs and eager, one all-reduce against its prediction (the latency of the smallest one, and its bytes at the bandwidth of a large
one), a prefill with its all-reduces beside the computation and without, what the message of a step costs the host, and how long the ranks
take to start, to close, and to be missed when one is killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from minivllm.bench.communication import all_reduces, in_a_step, set_overlap, wire_cost
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams

_BASE = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
         "rope_theta": 1e6, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}
#: Shapes only: hidden, MLP, layers, heads, tied or not.
SHAPES = {
    "tiny": {**_BASE, "vocab_size": 1003, "head_dim": 16, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 8, "tie_word_embeddings": True, "max_position_embeddings": 2048},
    "qwen3-0.6b": {**_BASE, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "tie_word_embeddings": True},
    "qwen3-8b": {**_BASE, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "tie_word_embeddings": False},
}
_PROMPT, _ANSWER = 128, 128  # tokens of a request in the throughput part


def measure(shape: str, sizes: list[int], batches: list[int], device: str, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All parts for one shape, on each number of GPUs in `sizes`."""
    result: dict[str, Any] = {"shape": shape, "greedy": [], "throughput": [], "all_reduce": [], "in_a_step": [], "prefill": [], "life": [],
                              "wire": wire_cost(max(batches))}
    with model_directory(shape) as directory:
        result["greedy"] = greedy(directory, sizes, device)
        say(f"{shape}: greedy tokens equal one GPU's: {[row['equal'] for row in result['greedy']]}")
        for size in sizes:
            found = [throughput(directory, size, batches, device, eager, rounds) for eager in (False, True)]
            found.append({"prefill": prefill(directory, size, device, rounds), "life": [life(directory, size, device)] if size > 1 else []})
            for rows in found:
                for part, some in rows.items():
                    result[part] += some
                    for row in some:
                        say(f"  {size} GPU  {_told(part, row)}")
    return result


def _told(part: str, row: dict[str, Any]) -> str:
    """A row of a part in words."""
    if part == "throughput":
        return f"{'eager ' if row['eager'] else 'graphs'}  {row['sequences']:4d} sequences  {row['tokens_per_second']:10.0f} tokens/s"
    if part == "all_reduce":
        return (f"all-reduce of {row['rows']:4d} rows: {row['us']:.1f} us, predicted {row['predicted_us']:.1f}; "
                f"{row['count']} a step: {row['step_ms']:.2f} ms")
    if part == "prefill":
        return f"prefill of {row['tokens']} tokens, sums in chunks of {row['overlap_chunk_size']}: {row['ms']:.1f} ms"
    return str(row)


@contextlib.contextmanager
def model_directory(shape: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES[shape]))
        yield directory


def prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, min(10_000, vocab_size), (count, length), generator=generator).tolist()


def greedy(directory: str, sizes: list[int], device: str) -> list[dict[str, Any]]:
    """Float32 tokens of 16 ragged prompts on each number of GPUs, against the first; where they part, how near the two best were there."""
    want, rows = None, []
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2)
    for size in sizes:
        with LLM(directory, device=device, dtype="float32", load_format="dummy", tensor_parallel_size=size, max_model_len=1024, num_kv_blocks=512,
                 block_size=16, max_num_seqs=16) as llm:
            some = [ids[:17 + 7 * index] for index, ids in enumerate(prompts(16, 160, llm.model_config.vocab_size))]
            outputs = llm.generate(some, params, use_tqdm=False)
        got = [output["token_ids"] for output in outputs]
        want, gaps = (got, [_gaps(output) for output in outputs]) if want is None else (want, gaps)
        parted = [next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None) for ours, theirs in zip(got, want)]
        rows.append({"ranks": size, "equal": got == want, "tokens": sum(map(len, got)), "distinct_tokens": len(set(sum(got, []))),
                     "gaps_where_parted": [gaps[index][at] for index, at in enumerate(parted) if at is not None], "smallest_gap": min(map(min, gaps))})
    return rows


def _gaps(output: Any) -> list[float]:
    """By how much the best token's logit was above the next one's, at each step."""
    best = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in output.outputs[0].logprobs]
    return [values[0] - values[1] for values in best]


def throughput(directory: str, size: int, batches: list[int], device: str, eager: bool, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Output tokens a second at each batch size; beside it the all-reduces of such a step, and what they were predicted to take.

    `in_a_step`: the time of NCCL's kernels in real decode steps, on rank 0, waiting for the other ranks included.
    """
    rows: dict[str, list[dict[str, Any]]] = {"throughput": [], "all_reduce": [], "in_a_step": []}
    with LLM(directory, device=device, load_format="dummy", tensor_parallel_size=size, max_num_seqs=max(batches), enforce_eager=eager,
             max_model_len=min(2048, _PROMPT + _ANSWER + 16), **({"num_kv_blocks": 24 * max(batches)} if device == "cpu" else {})) as llm:
        model = llm.model_config
        for count in batches:
            times = [_timed(llm, count, number) for number in range(rounds + 1)][1:]
            rows["throughput"].append({"ranks": size, "eager": eager, "dtype": str(llm.runner.dtype), "graphs": llm.runner.graphs is not None,
                                       "sequences": count, "prompt": _PROMPT, "answer": _ANSWER, "seconds": times,
                                       "tokens_per_second": count * _ANSWER / statistics.median(times),
                                       "step_ms": 1e3 * statistics.median(times) / _ANSWER, "rank_weight_bytes": llm.runner.weight_bytes,
                                       "rank_kv_bytes_per_token": llm.runner.spec.bytes_per_token})
            if size > 1 and device != "cpu":
                requests = _decoding(llm, count, 1000)
                rows["in_a_step"].append({"ranks": size, "eager": eager, "sequences": count, **in_a_step(llm)})
                llm.engine.abort(requests)
        if size > 1 and not eager:
            rows["all_reduce"] = all_reduces(llm.runner, [(count, model.hidden_size) for count in batches], 2 * model.num_layers + 1)
    gc.collect()
    return rows


def _timed(llm: LLM, count: int, number: int) -> float:
    """Seconds of the decodes alone: from the step after the last prefill on."""
    requests = _decoding(llm, count, number)
    ahead = sum(seq.num_generated_tokens - 1 for seq in requests)  # decoded while others were still in prefill
    begin = time.perf_counter()
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    seconds = time.perf_counter() - begin
    return seconds * count * _ANSWER / (count * _ANSWER - ahead)


def _decoding(llm: LLM, count: int, number: int) -> list[Any]:
    """`count` requests whose prompts have just been computed."""
    params = SamplingParams(temperature=0, max_tokens=_ANSWER + 1, ignore_eos=True)
    requests = [llm.engine.add(ids, params) for ids in prompts(count, _PROMPT, llm.model_config.vocab_size, seed=number)]
    while any(seq.num_generated_tokens == 0 for seq in requests):
        llm.engine.step()
    return requests


def prefill(directory: str, size: int, device: str, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of a step of 8 new prompts: sums over the ranks after each product, and beside it in chunks; in turns, medians."""
    length = 1024 if device != "cpu" else 64
    chunks = [None, *(8 * length // parts for parts in (2, 4, 8))] if size > 1 else [None]
    times: dict[int | None, list[float]] = {chunk: [] for chunk in chunks}
    with LLM(directory, device=device, load_format="dummy", tensor_parallel_size=size, max_num_seqs=8, max_num_batched_tokens=8 * length,
             max_model_len=length + 1, num_kv_blocks=8 * (length // 16 + 1), block_size=16, enforce_eager=True, enable_prefix_caching=False) as llm:
        for number in range(rounds + 2):  # two that do not count
            for chunk in chunks:
                if size > 1:
                    llm.runner.everywhere(set_overlap, chunk)
                for ids in prompts(8, length, llm.model_config.vocab_size, seed=number):
                    llm.engine.add(ids, SamplingParams(temperature=0, max_tokens=1))
                begin = time.perf_counter()
                llm.engine.step()
                times[chunk].append(1e3 * (time.perf_counter() - begin))
                assert not llm.engine.has_unfinished_requests()
    return [{"ranks": size, "tokens": 8 * length, "overlap_chunk_size": chunk, "ms": statistics.median(found[2:]), "all_ms": found[2:]}
            for chunk, found in times.items()]


def life(directory: str, size: int, device: str) -> dict[str, float | str]:
    """Seconds to create, close and create again; and from a rank's death in a run to the error that says so."""
    settings = dict(device=device, load_format="dummy", tensor_parallel_size=size, max_model_len=2000, num_kv_blocks=300, block_size=16, max_num_seqs=16)
    found: dict[str, float | str] = {}
    for name in ("create", "create_again"):
        begin = time.perf_counter()
        llm = LLM(directory, **settings)
        found[name] = time.perf_counter() - begin
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        begin = time.perf_counter()
        llm.close()
        found[f"close_after_{name}"] = time.perf_counter() - begin
    found |= _killed(LLM(directory, **settings), size)
    with LLM(directory, **settings) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    return found


def _killed(llm: LLM, size: int) -> dict[str, float | str]:
    """The last rank is killed in the middle of a run."""
    from minivllm.worker.crew import RankError

    found: dict[str, float | str] = {}
    llm.engine.add([5, 6, 7], SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True))
    for _ in range(10):
        llm.engine.step()
    begin = time.perf_counter()
    llm.runner.crew.processes[size - 1].kill()
    try:
        while True:
            llm.engine.step()
    except RankError as error:
        found["error"] = str(error)
    found["killed_to_error"] = time.perf_counter() - begin
    llm.close()
    found["killed_to_closed"] = time.perf_counter() - begin
    return found
