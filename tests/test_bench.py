"""The benchmarks run, count right, and compare with what they say they compare with."""

import json

import pytest
import tiny_models
import torch

from minivllm import LLM, SamplingParams
from minivllm.__main__ import main
from minivllm.bench import baselines
from minivllm.bench.limits import Machine, StepMeter
from minivllm.bench.scheduler import measure as measure_scheduler
from minivllm.bench.workload import Workload


def test_the_default_workload_is_nano_vllms():
    workload = Workload.draw(256, (100, 1024), (100, 1024), 10_000)
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (142_827, 133_966)


def test_a_shifted_workload_has_the_same_lengths_and_other_tokens():
    workload = Workload.draw(5, (3, 9), (1, 4), 96)
    other = workload.shifted(1, 96)
    assert [len(p) for p in other.prompts] == [len(p) for p in workload.prompts] and other.output_lens == workload.output_lens
    assert all(a != b and 0 <= b <= 96 for old, new in zip(workload.prompts, other.prompts) for a, b in zip(old, new))


@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "qwen2", "mistral"])
def test_the_baseline_is_the_same_model(family, tmp_path):
    reference = tiny_models.save(family, tmp_path)
    workload = Workload([[5, 6, 7], list(range(20)), [9]], [6, 4, 5])
    with LLM(tmp_path, device="cpu", num_kv_blocks=32, max_model_len=128) as llm:
        config = json.loads((tmp_path / "config.json").read_text())
        model = baselines.transformers_model(llm, config)
        ids = torch.tensor([list(range(30))])
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits, reference(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.output_lens]
        ours = [output["token_ids"] for output in llm.generate(workload.prompts, params, use_tqdm=False)]
        model.generation_config.eos_token_id = None
        assert [len(answer) for answer in baselines.generate_static(model, workload, 2, 0.0)] == workload.output_lens
        assert baselines.generate_static(model, workload, 1, 0.0) == ours


def test_the_limit_counts_bytes_and_flops(tmp_path):
    tiny_models.save("llama", tmp_path)
    with LLM(tmp_path, device="cpu", num_kv_blocks=32, max_model_len=128) as llm:
        with StepMeter(llm) as meter:
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert meter.steps == [(3, 3, 1), (1, 4, 1), (1, 5, 1)]
        read = llm.runner.weight_bytes - 97 * 48 * 4  # all but the input embedding
        slow_memory = meter.limit_seconds(Machine(read_bandwidth=1.0, matmul_flops=1e30))
        assert slow_memory == pytest.approx(3 * read + (3 + 4 + 5) * llm.runner.spec.bytes_per_token)
        head = 97 * 48
        slow_compute = meter.limit_seconds(Machine(read_bandwidth=1e30, matmul_flops=1.0))
        assert slow_compute == pytest.approx(2 * ((read // 4 - head) * 5 + head * 3))
        assert llm.engine.runner is llm.runner


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_the_command_prints_ratio_and_limit_and_saves_raw_figures(kind, tmp_path, capsys):
    tiny_models.save("llama", tmp_path)
    raw = tmp_path / "raw.json"
    assert main(["bench", kind, "--model", str(tmp_path), "--device", "cpu", "--num-requests", "3", "--input-len", "3", "9", "--output-len", "2", "6",
                 "--max-token-id", "96", "--max-num-seqs", "2", "--rounds", "2", "--output", str(raw)]) == 0
    text = capsys.readouterr().out
    assert "times as fast" in text and "the limit of bytes and FLOPs" in text
    result = json.loads(raw.read_text())
    assert len(result["seconds"]["minivllm"]) == len(result["seconds"]["transformers static batches"]) == 2
    for key in ("environment", "engine", "prompt_tokens", "output_tokens", "limit_seconds", "machine", "preemptions", "failed"):
        assert key in result
    assert result["environment"]["versions"]["torch"] == torch.__version__


def test_a_config_is_enough_for_random_weights(tmp_path, capsys):
    tiny_models.save("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert main(["bench", "throughput", "--model", str(tmp_path), "--random-weights", "--device", "cpu", "--num-requests", "2", "--input-len", "3", "5",
                 "--output-len", "2", "3", "--max-token-id", "96", "--rounds", "1", "--no-baselines"]) == 0
    assert "minivllm" in capsys.readouterr().out


def test_the_hosts_cost_is_measured_for_each_variant():
    figures = measure_scheduler(num_running=4, steps=10, rounds=2)["microseconds_per_sequence"]
    assert set(figures) == {"10 waiting", "10,000 waiting", "10 waiting, traced"} and all(figure > 0 for figure in figures.values())


def test_attention_in_every_way_gives_the_same_and_is_shown(monkeypatch):
    from minivllm.bench import attention as bench

    cpu = torch.device("cpu")
    monkeypatch.setattr(bench, "CPU_LENGTHS", (20, 33))
    torch.manual_seed(0)
    case = bench.Case(33, cpu, torch.float32, block_size=16)
    from minivllm.attention.torch_sdpa import TorchSDPABackend

    torch.testing.assert_close(case.paged(TorchSDPABackend()), case.naive(), atol=1e-5, rtol=1e-5)
    result = bench.measure(cpu)
    assert {(row["way"], row["length"]) for row in result["rows"]} == {(way, n) for way in ("naive", "torch_sdpa") for n in (20, 33)}
    text = "\n".join(bench.show(result))
    assert "naive" in text and "33" in text and "ms" in text and "out of memory" not in text
    result["rows"][-1].update(seconds=None, extra_bytes=None)
    assert "out of memory" in "\n".join(bench.show(result))
