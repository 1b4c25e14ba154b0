"""The cache of converted models: filled once, whole or not at all, and no obstacle when it cannot be written."""

import json
import multiprocessing

import pytest
import torch
from test_gguf import write_gguf

from minivllm.weights import cache
from minivllm.weights.cache import cache_root, is_whole, open_gguf_cached


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def entries():
    return sorted(cache_root().iterdir())


def tensors_of(checkpoint):
    return {name: tensor.clone() for name, tensor in checkpoint.tensors()}


def assert_same(first, second):
    assert set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_the_second_opening_reads_what_the_first_wrote(source, monkeypatch):
    first = open_gguf_cached(source)
    assert [is_whole(entry) for entry in entries()] == [True]
    monkeypatch.setattr(cache, "open_gguf", lambda *_: pytest.fail("parsed again"))
    second = open_gguf_cached(source)
    assert_same(tensors_of(first), tensors_of(second))
    assert second.make_tokenizer().encode("abba") == [3, 2, 1] and second.config["eos_token_id"] == [0]


def test_another_content_is_another_entry(source):
    open_gguf_cached(source)
    source.write_bytes(source.read_bytes() + b"\0")
    open_gguf_cached(source)
    assert len(entries()) == 2


@pytest.mark.parametrize("damage", ["cut", "deleted", "no manifest", "broken manifest"])
def test_a_damaged_entry_is_made_again(source, damage):
    expected = tensors_of(open_gguf_cached(source))
    [entry] = entries()
    weights = entry / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "deleted":
        weights.unlink()
    elif damage == "no manifest":
        (entry / "manifest.json").unlink()
    else:
        (entry / "manifest.json").write_text("[")
    assert not is_whole(entry)
    assert_same(expected, tensors_of(open_gguf_cached(source)))
    assert entries() == [entry] and is_whole(entry)


def test_an_interrupted_conversion_leaves_nothing(source, monkeypatch):
    monkeypatch.setattr(cache, "_save_tensors", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        open_gguf_cached(source)
    assert entries() == []


@pytest.mark.parametrize("obstacle", ["a file in its place", "no space"])
def test_where_nothing_can_be_written_the_model_loads_all_the_same(source, monkeypatch, obstacle):
    if obstacle == "no space":
        def full(*_):
            raise OSError(28, "No space left on device")
        monkeypatch.setattr(cache, "_save_tensors", full)
    else:
        cache_root().write_text("in the way")
    with pytest.warns(UserWarning, match="cannot be kept.*MINIVLLM_CACHE"):
        checkpoint = open_gguf_cached(source)
    assert len(tensors_of(checkpoint)) == 12 and checkpoint.make_tokenizer().encode("ab") == [3]


def _open_in_a_process(source, barrier, results):
    barrier.wait()
    results.put(len(dict(open_gguf_cached(source).tensors())))


def test_two_processes_at_once_both_get_a_whole_model(source):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_open_in_a_process, args=(source, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=120) for _ in processes] == [12, 12]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert len(entries()) == 1 and is_whole(entries()[0])


def test_the_manifest_names_every_file(source):
    open_gguf_cached(source)
    [entry] = entries()
    named = set(json.loads((entry / "manifest.json").read_text()))
    assert named == {file.name for file in entry.iterdir()} - {"manifest.json"} and "tokenizer.json" in named


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "here"))
    assert cache_root() == tmp_path / "here"
    monkeypatch.delenv("MINIVLLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "minivllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "minivllm"
