"""colab_setup.sh, pyproject.toml, environment.yml and the CI files, checked by running and reading them.

The fake Colab is a virtual environment with Colab's ipywidgets and IPython, a stub `google.colab`,
and the packages of the environment that runs the tests, seen through a .pth file.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "colab_setup.sh"
FACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = FACTS["project"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
KEPT = ["torch", "triton", "numpy", "ipywidgets"]  # what the script may not touch inside Colab
REAL_IN_COLAB = (
    ["ipywidgets==7.7.1", "ipython_genutils==0.2.0"],  # installed without their dependencies
    ["ipython==7.34.0", "ipykernel==6.17.1", "traitlets==5.7.1"],
)


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


def environment(**extra: str) -> dict[str, str]:
    dropped = ("PYTHONPATH", "PYTHONHOME", "MINIVLLM_PYTHON", "MINIVLLM_TORCH_INDEX", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in dropped} | extra


def run_script(*arguments: str, script: Path = SCRIPT, **extra: str) -> subprocess.CompletedProcess:
    bash = shutil.which("bash")
    return subprocess.run([bash, str(script), *arguments], env=environment(**extra), stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=900)


def command(folder: Path, name: str, body: str) -> None:
    """A stand-in for a command: a shell script in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{shutil.which('bash')}\n{body}\n")
    (folder / name).chmod(0o755)


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
    for requirement in requirements(PROJECT["optional-dependencies"]["test"], python).values():
        pin(requirement)


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


@pytest.mark.slow
def test_demo_generates_text():
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("the tests run in another environment than the script's .venv")
    done = run_script("demo")
    assert done.returncode == 0, done.stderr
    assert "Already set up" in done.stdout and "Paris" in done.stdout


# --- inside a fake Colab ------------------------------------------------------------------------


class FakeColab:
    """Colab as far as the script can tell: `python3` on PATH, google.colab in it, a stand-in nvidia-smi."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.python = folder / "env" / "bin" / "python3"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True, stdout=subprocess.DEVNULL)
        self.site = Path(self.ask("import sysconfig; print(sysconfig.get_path('purelib'))"))
        without_dependencies, with_dependencies = REAL_IN_COLAB
        self.pip("install", *with_dependencies, "tqdm==4.65.0")  # this tqdm is older than the supported range
        self.pip("install", "--no-deps", *without_dependencies)
        (self.site / "google" / "colab").mkdir(parents=True)
        (self.site / "google" / "colab" / "__init__.py").write_text("")
        self.borrow_packages()

    def borrow_packages(self) -> None:
        """Links to the packages of the test environment, but for those that are here or have to be missing."""
        here = {canonicalize_name(path.name.split("-")[0]) for path in self.site.iterdir()}
        borrowed = self.folder / "borrowed"
        borrowed.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            name = canonicalize_name(path.name.split("-")[0])
            left_out = name in here | {"gguf", "minivllm", "flash-attn", "google"} or name.startswith("--editable")
            if not left_out and path.suffix not in (".pth", ".egg-link"):
                (borrowed / path.name).symlink_to(path)
        (self.site / "borrowed.pth").write_text(f"{borrowed}\n")

    def ask(self, code: str) -> str:
        return subprocess.run([str(self.python), "-c", code], cwd=self.folder, env=environment(), check=True,
                              capture_output=True, text=True).stdout.strip()

    def pip(self, *arguments: str) -> None:
        done = subprocess.run([str(self.python), "-m", "pip", *arguments], cwd=self.folder, env=environment(),
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def versions(self) -> dict[str, str]:
        code = ("import json; from importlib import metadata as m; "
                "print(json.dumps({d.metadata['Name'].lower(): m.version(d.metadata['Name'])"
                " for d in m.distributions()}))")
        return json.loads(self.ask(code))

    def set_up(self, nvidia_smi: str = "exit 9", **extra: str) -> subprocess.CompletedProcess:
        command(self.folder / "bin", "nvidia-smi", nvidia_smi)
        path = os.pathsep.join([str(self.python.parent), str(self.folder / "bin"), os.environ["PATH"]])
        return run_script(PATH=path, TMPDIR=str(self.folder), **extra)


@pytest.fixture(scope="module")
def colab(tmp_path_factory):
    """The fake Colab before and after one run of the script."""
    fake = FakeColab(tmp_path_factory.mktemp("colab"))
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
