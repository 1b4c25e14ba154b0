"""Shared by the tests: the embedded model and its reference, the cache, and which tests may be skipped."""

import fcntl
import os
import sys

import pytest
import torch

sys.modules.setdefault("rfc3987_syntax", None)  # jsonschema does without it, and importing it compiles a grammar for seconds; nbformat reads jsonschema
if not torch.cuda.is_available():  # before triton is first imported: kernels then run through its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # several processes: threads would only wait for each other
    torch.set_num_threads(1)

#: The longest files, so that in several processes they begin first; then the notebooks, in their order.
LONGEST = ("test_greedy_matrix.py", "test_colab_notebooks.py", "test_setup.py", "test_tensor_parallel.py", "test_notebooks.py", "test_browser.py",
           "test_llm.py", "test_views.py", "test_engine_properties.py", "test_life_cycle.py", "test_cli.py", "test_compile.py", "test_check.py")
#: What was skipped and is not marked gpu: (test, reason). With MINIVLLM_ONLY_GPU_MAY_SKIP it fails the run.
_skipped = []


def _rank(item):
    if item.path.suffix == ".ipynb":
        return len(LONGEST)
    return LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST) + 1


def pytest_collection_modifyitems(items):
    items.sort(key=_rank)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail") and "gpu" not in report.keywords:
        _skipped.append((report.nodeid, report.longrepr))


def pytest_collectreport(report):
    if report.skipped:
        _skipped.append((report.nodeid, report.longrepr))


def _may_not_skip(config):
    return os.environ.get("MINIVLLM_ONLY_GPU_MAY_SKIP") and not hasattr(config, "workerinput")


def pytest_terminal_summary(terminalreporter, config):
    if _skipped and _may_not_skip(config):
        terminalreporter.section("skipped, and not for want of a GPU", red=True, bold=True)
        for nodeid, reason in _skipped:
            terminalreporter.line(f"{nodeid}: {reason[-1] if isinstance(reason, tuple) else reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if _skipped and _may_not_skip(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if session.config.pluginmanager.hasplugin("dsession"):  # the process that started the others: pytest would keep half a GB of each of three runs
        (session.config._tmp_path_factory.getbasetemp() / "transformers.pt").unlink(missing_ok=True)


def _settings():
    return {name: value for name, value in os.environ.items() if name.startswith("MINIVLLM_") and name != "MINIVLLM_CACHE"}


_SETTINGS = _settings()


@pytest.fixture(autouse=True)
def settings_of_the_run():
    """What a fixture of a whole module sets in the environment would reach its neighbours, depending on their order."""
    assert _settings() == _SETTINGS, "an earlier test, or a fixture, has left a setting behind"
    yield
    assert _settings() == _SETTINGS, "this test has left a setting behind"


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory):
    """All tests share one cache, away from the user's own, unless MINIVLLM_CACHE is set."""
    if not os.environ.get("MINIVLLM_CACHE"):
        os.environ["MINIVLLM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Of several processes: a test marked gpu(alone=True) reads the device's free memory, so no other GPU test may run beside it.

    Around all of a test: a fixture of a whole module, which may make an engine, is set up before a fixture of the test.
    """
    marker = item.get_closest_marker("gpu")
    if marker is None or "PYTEST_XDIST_WORKER" not in os.environ or not torch.cuda.is_available():
        yield
        return
    with open(item.config._tmp_path_factory.getbasetemp().parent / "gpu.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if marker.kwargs.get("alone") else fcntl.LOCK_SH)
        yield


@pytest.fixture(scope="session")
def embedded():
    """An LLM of the embedded model on the CPU, for tests that read no state of it."""
    from minivllm import LLM

    llm = LLM("smollm2", device="cpu", num_kv_blocks=256)
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder that all processes of this run share, for what takes long to make; whoever makes it holds a lock."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def transformers_model(shared_folder):
    """The embedded model as transformers reads it, float32 on the CPU.

    That takes half a minute: of several processes one does it, and the others read what it kept.
    """
    import transformers
    from minivllm.weights.hub import embedded_model_file

    transformers.utils.logging.disable_progress_bar()
    file = embedded_model_file()
    saved = shared_folder / "transformers.pt"
    with open(shared_folder / "transformers.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if saved.exists():
            return torch.load(saved, weights_only=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
        if "PYTEST_XDIST_WORKER" in os.environ:
            torch.save(model, saved.with_suffix(".part"))
            saved.with_suffix(".part").rename(saved)  # whole, or not there
        return model
