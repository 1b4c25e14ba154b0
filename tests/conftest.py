"""Shared by the tests: the embedded model and its reference, tiny random models, and the rule for GPU tests."""

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes: threads would only wait for each other
    torch.set_num_threads(1)

#: The longest files, so that in several processes they begin first.
LONGEST = ("test_greedy_matrix.py", "test_setup.py", "test_llm.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


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
