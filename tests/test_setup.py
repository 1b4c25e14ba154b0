"""colab_setup.sh, pyproject.toml, environment.yml and the CI files, checked by running and reading them."""

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import yaml
from fake_colab import FACTS, PROJECT, ROOT, SCRIPT, FakeColab, command, environment, run_script
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
KEPT = ["torch", "triton", "numpy", "ipywidgets"]  # what the script may not touch inside Colab


def requirements(lines: list[str], python: str) -> dict[str, Requirement]:
    """Name -> requirement, of the lines whose marker holds for that Python; a name may stand once."""
    found = {}
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or marker.evaluate({"python_version": python, "python_full_version": f"{python}.0"}):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"two pins of {name} for Python {python}"
            found[name] = requirement
    return found


def pin(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator == "==" and "*" not in specifier.version, f"{requirement} is not an exact pin"
    return specifier.version


def wheel(folder: Path, name: str, version: str, source: str, requires: str = "") -> None:
    """Writes a wheel with one package of one file."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    requires = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{name}/__init__.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def offline(folder: Path) -> dict[str, str]:
    """Settings with which pip finds only the wheels in `folder`."""
    return {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONSTRAINT": ""}


# --- the files agree ----------------------------------------------------------------------------


def test_version_tag_and_embedded_model():
    import minivllm

    own = FACTS["tool"]["minivllm"]
    assert own["tag"] == f"v{PROJECT['version']}"
    assert minivllm.__version__ == PROJECT["version"]
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", own["repository"])
    assert pin(Requirement(own["embedded-model"]))


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_has_one_pin_inside_its_range(python):
    ranges = requirements(PROJECT["dependencies"], python)
    pins = requirements(PROJECT["optional-dependencies"]["pins"], python)
    assert pins.keys() == ranges.keys()
    for name, requirement in pins.items():
        assert pin(requirement) in ranges[name].specifier
    tests = requirements(PROJECT["optional-dependencies"]["test"], python)
    for requirement in tests.values():
        pin(requirement)
    for name, requirement in requirements(PROJECT["optional-dependencies"]["notebooks"], python).items():
        assert pin(tests[name]) in requirement.specifier


def test_supported_pythons_are_the_same_everywhere():
    supported = SpecifierSet(PROJECT["requires-python"])
    assert [minor for minor in range(8, 20) if f"3.{minor}" in supported] == [10, 11, 12, 13]
    assert f'SUPPORTED="{" ".join(PYTHONS)}"' in SCRIPT.read_text()


def test_conda_environment_agrees_with_pyproject():
    text = (ROOT / "environment.yml").read_text()
    *plain, through_pip = yaml.safe_load(text)["dependencies"]
    (python,) = [line.split("=")[-1] for line in plain if line.startswith("python=")]
    assert python in PYTHONS
    lines = through_pip["pip"]
    assert lines[-1] == "-e ."
    extras = PROJECT["optional-dependencies"]
    ours = {name: pin(r) for name, r in requirements(extras["pins"] + extras["test"], python).items()}
    theirs = {name: pin(r) for name, r in requirements(lines[:-1], python).items()}
    assert theirs == ours
    assert FACTS["tool"]["minivllm"]["embedded-model"] in text


def test_ci_runs_the_test_command_of_the_readme():
    test_command = "bash colab_setup.sh test"
    assert test_command in (ROOT / "README.md").read_text()
    assert test_command in (ROOT / ".ci" / "run").read_text()
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["test"]
    assert any(step.get("run") in (test_command, "bash .ci/run") for step in job["steps"])
    assert any(step.get("with", {}).get("python-version") == "3.11" for step in job["steps"])


# --- outside Colab ------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """A small copy of the checkout that has no .venv."""
    folder = tmp_path / "a checkout"
    (folder / "minivllm").mkdir(parents=True)
    (folder / "minivllm" / "__init__.py").write_text("")
    for name in ("colab_setup.sh", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def tools(tmp_path):
    """A folder for PATH with the ordinary commands that the script uses, and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in "bash cat cksum cut dirname grep head mktemp rm sed sort tail".split():
        (folder / name).symlink_to(shutil.which(name))
    return folder


def assert_fails_in_one_line(done: subprocess.CompletedProcess, *words: str) -> None:
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("colab_setup.sh: "), done.stderr
    for word in words:
        assert word in done.stderr


def test_the_script_parses():
    for script in (SCRIPT, ROOT / ".ci" / "run"):
        subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("arguments", [(), ("tset",)])
def test_usage_outside_colab(arguments):
    done = run_script(*arguments, MINIVLLM_PYTHON=sys.executable)
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.startswith("usage: bash colab_setup.sh demo")


def test_kaggle_is_set_up_as_colab_is(tmp_path):
    command(tmp_path, "python", 'case "$*" in *version_info*) echo 3.14 ;; *) exit 1 ;; esac')  # without google.colab
    done = run_script(KAGGLE_KERNEL_RUN_TYPE="Interactive", MINIVLLM_PYTHON=str(tmp_path / "python"))
    assert_fails_in_one_line(done, "this Kaggle runs Python 3.14")


def test_help():
    done = run_script("--help")
    assert done.returncode == 0 and "MINIVLLM_TORCH_INDEX" in done.stdout


def test_no_python(checkout, tools):
    done = run_script("demo", script=checkout / "colab_setup.sh", PATH=str(tools))
    assert_fails_in_one_line(done, "no Python from 3.10 to 3.13", "found: none")


def test_python_out_of_range(checkout, tools):
    command(tools, "python3", "echo 3.9")
    done = run_script("demo", script=checkout / "colab_setup.sh", PATH=str(tools))
    assert_fails_in_one_line(done, "no Python from 3.10 to 3.13", "found: 3.9")


def test_python_without_venv(checkout, tools):
    command(tools, "python3", 'case "$*" in *version_info*) echo 3.11 ;; *) exit 1 ;; esac')
    done = run_script("test", script=checkout / "colab_setup.sh", PATH=str(tools))
    assert_fails_in_one_line(done, "no venv module", "python3-venv")


def test_pip_failure_says_why_and_where_the_log_is(checkout, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run_script("demo", script=checkout / "colab_setup.sh", MINIVLLM_PYTHON=sys.executable, **offline(empty))
    log = checkout / ".venv" / "setup.log"
    assert_fails_in_one_line(done, "pip could not install minivllm[pins]", "setuptools", f"(log: {log})")
    assert "Making .venv" in done.stdout and log.exists()
    assert not (checkout / ".venv" / "setup.done").exists()


@pytest.fixture
def set_up(checkout, tools):
    """A checkout that is set up, whose Python says what it is asked to run and with which settings."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    says = 'for name in OMP_NUM_THREADS MINIVLLM_CACHE TRITON_INTERPRET; do echo "$name=${!name:-}"; done; echo "python $*"'
    command(checkout / ".venv" / "bin", "python", f'case "$*" in *version_info*) echo 3.11 ;; *"import pip"*) ;; *) {says} ;; esac')
    state = subprocess.run(["cksum"], input=(checkout / "pyproject.toml").read_bytes(), capture_output=True).stdout.decode().strip()
    (checkout / ".venv" / "setup.done").write_text(f"test {state} {checkout}\n")

    def run(*arguments):
        return run_script("test", *arguments, script=checkout / "colab_setup.sh", PATH=str(tools), TRITON_INTERPRET="", OMP_NUM_THREADS="", MINIVLLM_CACHE="")

    return run


def test_without_arguments_tests_and_notebooks_run_in_one_go(set_up, tools):
    command(tools, "google-chrome", "")
    done = set_up()
    assert done.returncode == 0, done.stderr
    (asked,) = [line for line in done.stdout.splitlines() if line.startswith("python ")]
    assert asked.startswith("python -m pytest -rs -n auto") and asked.endswith("--dist loadfile --no-loadscope-reorder --nbval tests notebooks")
    assert "OMP_NUM_THREADS=1\n" in done.stdout and "TRITON_INTERPRET=1\n" in done.stdout and re.search("MINIVLLM_CACHE=/.+/cache\n", done.stdout)


def test_the_interpreter_of_triton_is_left_out_on_a_gpu(set_up, tools):
    command(tools, "nvidia-smi", "")
    assert "TRITON_INTERPRET=\n" in set_up("tests/test_cli.py").stdout


@pytest.mark.parametrize("user, apt_get", [(0, False), (1000, True)])
def test_no_browser_and_no_way_to_install_one(set_up, tools, user, apt_get):
    command(tools, "id", f"echo {user}")
    if apt_get:
        command(tools, "apt-get", "exit 100")
    assert_fails_in_one_line(set_up(), "no browser on PATH (chromium, chromium-browser, google-chrome", "install chromium")
    assert "python -m pytest -rs tests/test_cli.py" in set_up("tests/test_cli.py").stdout  # named tests bring their own demands


def test_root_installs_chromium(set_up, tools, checkout):
    log = checkout / ".venv" / "setup.log"
    command(tools, "id", "echo 0")
    command(tools, "apt-get", 'echo "apt-get $*"; [ "$1" = update ] || echo "E: Unable to locate package"; [ "$1" = update ]')
    assert_fails_in_one_line(set_up(), "apt-get could not install chromium: Unable to locate package", f"(log: {log})")
    installs = f"{shutil.which('touch')} {tools}/chromium; {shutil.which('chmod')} +x {tools}/chromium"
    command(tools, "apt-get", f'echo "apt-get $*"; [ "$1" = update ] || {{ {installs}; }}')
    done = set_up()
    assert done.returncode == 0 and "Installing chromium" in done.stdout and "--nbval tests notebooks" in done.stdout
    assert "apt-get update\napt-get install -y --no-install-recommends chromium\n" in log.read_text()


@pytest.mark.parametrize("processes", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_ci_fails_where_a_test_is_skipped_that_needs_no_gpu(tmp_path, processes):
    assert "export MINIVLLM_ONLY_GPU_MAY_SKIP=1" in (ROOT / ".ci" / "run").read_text()
    for name in ("tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\ndef set_num_threads(number): pass\n")  # starts faster
    marked = '@pytest.mark.gpu\n@pytest.mark.skip(reason="no GPU")\ndef test_one(): pass\n@pytest.mark.xfail\ndef test_two(): assert False\n'
    (tmp_path / "test_marked.py").write_text("import pytest\n" + marked)
    (tmp_path / "test_bare.py").write_text('import pytest\ndef test_three(): pytest.skip("no mood")\n')

    fast = ["-p", "no:nbval", "-p", "no:hypothesispytest"]  # which take seconds to import

    def run(*files, **extra):
        return subprocess.run([sys.executable, "-m", "pytest", "-q", *fast, *processes, *files], cwd=tmp_path, env=environment(**extra),
                              capture_output=True, text=True)

    assert run("test_marked.py", MINIVLLM_ONLY_GPU_MAY_SKIP="1").returncode == 0
    assert run("test_bare.py", MINIVLLM_ONLY_GPU_MAY_SKIP="").returncode == 0
    done = run("test_marked.py", "test_bare.py", MINIVLLM_ONLY_GPU_MAY_SKIP="1")
    assert done.returncode == 1 and "test_bare.py::test_three: Skipped: no mood" in done.stdout and "test_marked.py::" not in done.stdout


@pytest.mark.slow
def test_demo_generates_text():
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("the tests run in another environment than the script's .venv")
    done = run_script("demo")
    assert done.returncode == 0, done.stderr
    assert "Already set up" in done.stdout and "Paris" in done.stdout


# --- inside a fake Colab ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def colab(tmp_path_factory, shared_folder):
    """The fake Colab before and after one run of the script."""
    fake = FakeColab(tmp_path_factory.mktemp("colab"), shared_folder)
    fake.before = fake.versions()
    fake.done = fake.set_up()
    assert fake.done.returncode == 0, fake.done.stdout + fake.done.stderr
    fake.after = fake.versions()
    return fake


@pytest.mark.slow
def test_colab_keeps_what_the_kernel_uses(colab):
    kept = [*KEPT, "ipython", "ipykernel", "traitlets"]
    assert {n: colab.after.get(n) for n in kept} == {n: colab.before.get(n) for n in kept}
    assert colab.after["ipywidgets"] == "7.7.1" and colab.after["ipython"] == "7.34.0"
    assert not (colab.site / "torch").exists() and not (colab.site / "numpy").exists()
    colab.ask("import IPython, ipywidgets, numpy, torch")


@pytest.mark.slow
def test_colab_installs_only_what_is_missing_or_out_of_range(colab):
    changed = {name for name in colab.after if colab.after[name] != colab.before.get(name)}
    assert changed == {"minivllm", "gguf", "tqdm"}
    assert "tqdm 4.65.0 is outside >=4.66" in colab.done.stdout
    assert "pip: Successfully installed" in colab.done.stdout


@pytest.mark.slow
def test_colab_installs_a_whole_copy_of_the_package(colab):
    installed = Path(colab.ask("import minivllm; print(minivllm.__file__)")).parent
    assert installed == colab.site / "minivllm"

    def files(folder):
        return {str(path.relative_to(folder)) for path in folder.rglob("*")
                if path.is_file() and "__pycache__" not in path.parts}

    assert files(installed) == files(ROOT / "minivllm")


@pytest.mark.slow
def test_colab_second_run_installs_nothing(colab):
    start = time.monotonic()
    again = colab.set_up()
    assert again.returncode == 0, again.stderr
    assert time.monotonic() - start < 60
    assert "Installing" not in again.stdout
    assert "minivllm is installed and up to date" in again.stdout
    assert colab.versions() == colab.after


@pytest.mark.slow
def test_colab_says_why_flash_attn_is_not_added(colab, tmp_path):
    assert "flash-attn is not added: no GPU here" in colab.done.stdout
    t4 = colab.set_up(nvidia_smi="echo 7.5")
    assert "flash-attn is not added: it needs compute capability 8.0, this GPU has 7.5" in t4.stdout
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    a100 = colab.set_up(nvidia_smi="echo 8.0", **offline(wheels))
    assert a100.returncode == 0 and "flash-attn is not added: there is no ready wheel for it" in a100.stdout
    wheel(wheels, "flash_attn", "0.1", "raise ImportError('undefined symbol')")
    broken = colab.set_up(nvidia_smi="echo 8.0", **offline(wheels))
    assert broken.returncode == 0 and "flash-attn is not added: its wheel does not load" in broken.stdout
    assert colab.versions() == colab.after


@pytest.mark.slow
def test_colab_adds_flash_attn_from_a_ready_wheel(colab, tmp_path):
    wheel(tmp_path, "flash_attn", "0.2", "", requires="torch==1.0")  # installed without what it asks for
    h100 = colab.set_up(nvidia_smi="echo 9.0", **offline(tmp_path))
    try:
        assert "Added flash-attn==0.2" in h100.stdout
        assert "flash-attn==0.2 is installed" in colab.set_up(nvidia_smi="echo 9.0").stdout
    finally:
        colab.pip("uninstall", "-y", "flash-attn")


@pytest.mark.slow
def test_colab_refuses_a_dependency_that_would_change_numpy(colab, tmp_path):
    (gguf_pin,) = [line for line in PROJECT["optional-dependencies"]["pins"] if line.startswith("gguf==")]
    wheel(tmp_path, "gguf", pin(Requirement(gguf_pin)), "", requires="numpy==1.0")
    wheel(tmp_path, "numpy", "1.0", "")
    (info,) = colab.site.glob("gguf-*.dist-info")
    info.rename(tmp_path / info.name)  # the script finds gguf missing
    try:
        done = colab.set_up(**offline(tmp_path))
        assert_fails_in_one_line(done, f"pip could not install {gguf_pin}", "conflicting")
        assert colab.versions()["numpy"] == colab.before["numpy"]
    finally:
        shutil.move(tmp_path / info.name, info)


@pytest.mark.slow
def test_colab_with_another_python_is_refused(colab, tmp_path):
    command(tmp_path, "python", 'case "$*" in *version_info*) echo 3.14 ;; *) exit 0 ;; esac')
    done = colab.set_up(MINIVLLM_PYTHON=str(tmp_path / "python"))
    assert_fails_in_one_line(done, "this Colab runs Python 3.14")
