"""What notebooks use besides views and checks: the model's choice, questions, the clock, sketches, the ladder, lengths."""

import io
import json
import types

import pytest
import torch

from minivllm.teach import ladder, notebook, sketch
from minivllm.teach.views.recompute import RecomputeView


def png_size(figure):
    data = figure._repr_png_()
    assert data.startswith(b"\x89PNG")
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_without_a_gpu_the_embedded_model_is_taken(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert notebook.model() == "smollm2"
    notebook.where()
    assert capsys.readouterr().out == "device cpu, dtype float32, attention torch_sdpa, model smollm2\n"


@pytest.mark.parametrize("offline, answers, model", [("0", True, notebook.GPU_MODEL), ("0", False, "smollm2"), ("1", True, "smollm2")])
def test_on_a_gpu_the_larger_model_is_taken_if_the_hub_answers(monkeypatch, offline, answers, model):
    import huggingface_hub

    def model_info(self, name, timeout):
        assert name == notebook.GPU_MODEL
        if not answers:
            raise ConnectionError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    assert notebook.model() == model


def test_questions_are_typed_where_somebody_can_type(monkeypatch):
    typed = iter(["one", " two ", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert list(notebook.questions(["scripted"])) == ["one", "two"]


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_an_interrupt_ends_the_questions(monkeypatch, end):
    def stop(prompt):
        raise end

    monkeypatch.setattr("builtins.input", stop)
    assert list(notebook.questions(["scripted"])) == []


def test_questions_are_scripted_where_nobody_can_type(monkeypatch, capsys):
    import IPython

    monkeypatch.setattr(IPython, "get_ipython", lambda: types.SimpleNamespace(kernel=types.SimpleNamespace(_allow_stdin=False)))
    assert list(notebook.questions(["one", "two"])) == ["one", "two"]
    assert capsys.readouterr().out == "you> one\nyou> two\n"


def test_the_clock_leaves_out_the_warm_up_and_takes_the_median(monkeypatch):
    now, durations = [0.0], iter([100.0, 3.0, 1.0, 2.0])
    monkeypatch.setattr(notebook.time, "perf_counter", lambda: now[0])

    def run():
        now[0] += next(durations)

    assert notebook.median_seconds(run, repeats=3) == 2.0


def test_sketches_are_pictures():
    sizes = [png_size(sketch.heatmaps({"a": torch.eye(2), "b": torch.full((2, 2), torch.nan)}, ["x", "y"], ["x", "y"])),
             png_size(sketch.lines([1, 2, 4], {"one": [1, 2, 3], "two": [3, 2, 1]}, "x", "y")),
             png_size(sketch.lines([1, 2, 4], {"one": [1, 2, 3]}, "x", "y", log=True)),
             png_size(sketch.stacked(["a", "b"], {"used": [1, 2], "free": [3, 0]}, "slots")),
             png_size(sketch.strip(10, {2: 3, 6: 1}, "free"))]
    assert all(width > 500 and height > 150 for width, height in sizes)


def test_a_strip_names_every_free_piece():
    texts = [text.get_text() for text in sketch.strip(10, {2: 3, 6: 1}, "free").axes[0].texts]
    assert texts == ["2", "1", "3"]


@pytest.fixture
def ladder_file(monkeypatch, tmp_path):
    monkeypatch.setattr(ladder, "FILE", tmp_path / "ladder.json")
    return ladder.FILE


def bars(figure):
    speed, moved = figure.axes
    return [[bar.get_width() for bar in axis.patches] for axis in (speed, moved)], [label.get_text() for label in speed.get_yticklabels()]


def test_the_ladder_grows_and_ends_with_the_finished_engine(ladder_file, monkeypatch):
    monkeypatch.setenv(ladder.SAVE, "1")
    ladder.show("00", 50, 60e6)
    ladder.show("01", 2, 500e6)
    ladder.show("02", 9, 540e6)
    monkeypatch.delenv(ladder.SAVE)
    saved = ladder_file.read_text()
    widths, labels = bars(ladder.show("01", 3, 500e6))
    assert widths == [[3, 50], [500, 60]] and [label[:2] for label in labels] == ["01", "00"]
    widths, labels = bars(ladder.show("02", 9, 540e6))
    assert widths[0] == [2, 9, 50] and [label[:2] for label in labels] == ["01", "02", "00"]
    assert ladder_file.read_text() == saved, "saved without being asked to"
    with pytest.raises(ValueError, match="no rung"):
        ladder.show("77", 1, 1)


def test_the_ladder_was_measured_for_every_notebook_that_names_a_rung():
    assert set(ladder.rungs()) == set(ladder.NAMES)
    assert all(rung["tokens_per_second"] > 0 and rung["bytes_per_token"] > 0 for rung in ladder.rungs().values())


def test_the_lengths_are_a_mix():
    rows = json.loads((ladder.FILE.parent / "lengths.json").read_text())
    totals = [row["prompt"] + row["answer"] for row in rows]
    assert len(rows) == 64 and max(totals) > 5 * min(totals)
    assert {row["ended"] for row in rows} == {"stop", "length"}
    assert all((row["answer"] == 512) == (row["ended"] == "length") for row in rows)


def test_what_is_recomputed_is_counted():
    view = RecomputeView(num_steps=3, num_positions=6)
    for computed in (4, 5, 6):
        view.step(computed)
    [counts] = [item.text for item in view.scene().items if "positions computed" in getattr(item, "text", "")]
    assert counts == "15 positions computed, 6 of them new, 9 again"
    assert "9 positions computed: 5 new" not in view.scene(1).alt and "9 positions computed, 5 of them new" in view.scene(1).alt
    png_size(view.figure(step=1))
    with pytest.raises(ValueError, match="does not fit"):
        view.step(6)
    with pytest.raises(ValueError, match="1 to 60"):
        RecomputeView(61, 5)


def test_the_widget_of_the_recompute_view_follows():
    view = RecomputeView(2, 3)
    bundle = view._repr_mimebundle_()
    assert bundle["text/plain"] == "RecomputeView: 2 steps, 3 positions"
    before = view._panel.picture.value
    view.step(2)
    after = view._panel.picture.value
    view.step(3)
    assert before != after != view._panel.picture.value and view._panel.slider.value == 1
    view._panel.slider.value = 0
    assert view._panel.picture.value == after
    assert isinstance(view.html(), str) and io.StringIO(view.html())
