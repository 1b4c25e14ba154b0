"""The benchmark behind notebook 09, as far as no GPU is needed: reading a trace, the plans, the arguments, the refusal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minivllm.teach import fusion_bench, gpu_trace, graph_bench, graph_figures


def _event(name: str, start: float, duration: float, device: str = "CUDA") -> SimpleNamespace:
    span = SimpleNamespace(start=start, elapsed_us=lambda: duration)
    return SimpleNamespace(name=name, time_range=span, device_type=SimpleNamespace(name=device))


def test_activities_are_the_devices_own_in_order() -> None:
    events = [_event("b", 5, 1), _event("cudaLaunchKernel", 0, 9, "CPU"), _event("void ns::a<int>(float*)", 2, 1),
              _event("ProfilerStep#1", 0, 9)]
    assert gpu_trace.activities(events) == [("a", 2.0, 1.0), ("b", 5.0, 1.0)]


def test_overlapping_kernels_count_once_and_copies_are_no_launches() -> None:
    done = [("a", 0.0, 10.0), ("b", 5.0, 2.0), ("c", 8.0, 4.0), ("Memcpy HtoD", 20.0, 1.0)]
    assert gpu_trace.in_total(done) == {"gpu_us": 13.0, "launches": 3, "copies": 1}


def test_one_layer_runs_from_a_marker_to_the_next() -> None:
    layers = [(name, start + 100.0 * layer, 2.0) for layer in range(4) for start, name in enumerate(("norm", "gemm", "rope", "gemm"))]
    found = gpu_trace.one_layer([("embed", -5.0, 1.0), *layers, ("gemm", 900.0, 1.0)], 4)
    assert [name for name, _, _ in found] == ["norm", "gemm", "rope", "gemm"] and found[0][1:] == [0.0, 2.0]
    assert gpu_trace.one_layer([("embed", 0.0, 1.0)], 4) == []


def test_names_lose_their_templates() -> None:
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int, float)"
    assert gpu_trace.short(name).startswith("vectorized_elementwise_kernel")
    assert gpu_trace.short("Memcpy HtoD (Pinned -> Device)") == "Memcpy HtoD"
    assert gpu_trace.short("_norm_kernel") == "_norm_kernel"


def test_every_row_of_a_plan_has_blocks_of_its_own() -> None:
    plan = graph_bench.decode_plan(5)
    blocks = [block for row in plan.rows for block in row.block_table]
    assert len(set(blocks)) == len(blocks) and all(row.context_len == graph_bench.CONTEXT for row in plan.rows)
    assert all(len(row.block_table) * graph_bench.BLOCK >= row.context_len for row in plan.rows)


@pytest.mark.parametrize("name", fusion_bench.PARTS)
def test_the_plain_parts_run_on_their_arguments(name: str) -> None:
    arguments = fusion_bench.arguments(name, graph_bench.MODEL, 3, torch.device("cpu"), torch.float32)
    out = fusion_bench.PARTS[name][0](*arguments)
    assert (out[0] if isinstance(out, tuple) else out).shape[0] == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        graph_bench.measure()


def test_a_part_that_fails_leaves_the_others() -> None:
    found: dict = {}
    graph_bench._part(found, "bad", lambda: 1 / 0)
    graph_bench._part(found, "good", lambda: 7)
    assert found == {"bad": {"error": "ZeroDivisionError: division by zero"}, "good": 7}


LINES = [graph_figures.steps, graph_figures.replays, graph_figures.captures, graph_figures.paddings, graph_figures.kernels,
         graph_figures.fusions, graph_figures.compiled, graph_figures.errors]


@pytest.mark.parametrize("lines", LINES)
def test_what_is_missing_is_said_in_one_line(lines) -> None:
    parts = ("eager", "replay", "captures", "padding", "eager_kernels", "fusion", "generate", "generate_compiled", "errors")
    assert list(lines({})) == ["no saved figures: run this notebook on a GPU to measure them"]
    [line] = lines({part: {"error": "RuntimeError: no"} for part in parts})
    assert "could not be measured: RuntimeError: no" in line
    [line] = lines({"device": "x"})
    assert line.startswith("not among these figures: ")


def test_figures_are_left_out_where_there_is_nothing_to_draw() -> None:
    assert graph_figures.layers({}) is None and graph_figures.waiting({}) is None


@pytest.mark.skipif(not graph_bench.saved(), reason="no saved figures")
def test_the_saved_figures_are_those_that_the_notebook_speaks_of() -> None:
    found = graph_bench.saved()
    printed = "\n".join(line for lines in LINES for line in lines(found)) + "\n".join(graph_figures.steps(found, "unfused"))
    for number in ("25,397", "3,094", "1,128", "1,883", "1,178", "2,355", "23,284", "315", "379", "913", "152 MiB", "670 MiB", "1.33 s", "1,456",
                   "1,448", "36.4 us of work in 805 us", "34.6", "185.7", "8.3", "64.4", "295.1", "80.8", "41.7", "-18.6%", "+26.8%"):
        assert number in printed, number
    assert graph_figures.layers(found)._repr_png_() and graph_figures.waiting(found)._repr_png_()
