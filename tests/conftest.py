"""Shared by the tests: the embedded model and its reference, the cache, and which tests may be skipped."""

import os

import pytest
import torch

if not torch.cuda.is_available():  # before triton is first imported: kernels then run through its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # several processes: threads would only wait for each other
    torch.set_num_threads(1)

#: The longest files, so that in several processes they begin first; then the notebooks, in their order.
LONGEST = ("test_greedy_matrix.py", "test_setup.py", "test_colab_notebooks.py", "test_notebooks.py", "test_llm.py")
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


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory):
    """All tests share one cache, away from the user's own, unless MINIVLLM_CACHE is set."""
    if not os.environ.get("MINIVLLM_CACHE"):
        os.environ["MINIVLLM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def embedded():
    """An LLM of the embedded model on the CPU, for tests that read no state of it."""
    from minivllm import LLM

    llm = LLM("smollm2", device="cpu", num_kv_blocks=256)
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def transformers_model():
    """The embedded model as transformers reads it, float32 on the CPU."""
    import transformers
    from minivllm.weights.hub import embedded_model_file

    transformers.utils.logging.disable_progress_bar()
    file = embedded_model_file()
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
