"""The notebooks in an environment like Colab's (ipywidgets 7.7.1, IPython 7.34): the setup cell installs, and every output is the committed one."""

import os
import shutil
import subprocess

import pytest
from fake_colab import ROOT, FakeColab, command, environment
from notebook_samples import NOTEBOOKS, read_setup

#: Tried in the old environment: what everybody opens first, one whose checks read a learner's source, and one with two live views.
#: The others use the same panel and the same package. With MINIVLLM_ALL_IN_COLAB set: every one.
TRIED = ("00_tour.ipynb", "03_slot_mapped_write.ipynb", "06_scheduler.ipynb")


@pytest.fixture(scope="module")
def colab(tmp_path_factory, shared_folder):
    """The fake Colab, with a `git` that copies this checkout instead of asking the network."""
    fake = FakeColab(tmp_path_factory.mktemp("colab"), shared_folder)
    copied = " ".join(f"'{ROOT / name}'" for name in ("colab_setup.sh", "pyproject.toml", "README.md", "LICENSE", "minivllm"))
    command(fake.folder / "bin", "git", f'folder="${{@: -1}}"\nmkdir "$folder"\ncp -r {copied} "$folder"\necho "$@" >"$folder/arguments"')
    command(fake.folder / "bin", "nvidia-smi", "exit 9")
    return fake


def run(colab, *arguments, cwd):
    path = os.pathsep.join([str(colab.python.parent), str(colab.folder / "bin"), os.environ["PATH"]])
    return subprocess.run([str(colab.python), *map(str, arguments)], cwd=cwd, env=environment(PATH=path, TMPDIR=str(colab.folder)),
                          capture_output=True, text=True)


@pytest.mark.slow
def test_the_setup_cell_installs_and_the_notebooks_give_the_committed_outputs(colab, tmp_path):
    """One test, since installing takes longer than anything that could be tried by itself."""
    tag, setup = read_setup()
    first = run(colab, "-c", setup, cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "Set up in" in first.stdout and first.stdout.splitlines()[-1].startswith("device cpu")
    assert f"-b {tag} " in (tmp_path / "minivllm-source" / "arguments").read_text()
    assert colab.versions()["ipywidgets"] == "7.7.1"
    again = run(colab, "-c", setup, cwd=tmp_path)
    assert again.returncode == 0 and len(again.stdout.splitlines()) == 1

    notebooks = shutil.copytree(NOTEBOOKS, tmp_path / "notebooks", ignore=shutil.ignore_patterns("*.py", "builder", "__pycache__", ".*"))
    names = ["."] if os.environ.get("MINIVLLM_ALL_IN_COLAB") else TRIED
    assert all((notebooks / name).exists() for name in names), "a notebook is not built"
    done = run(colab, "-m", "pytest", "-p", "no:cacheprovider", "--nbval", "-q", *names, cwd=notebooks)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout
