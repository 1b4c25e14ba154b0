"""Colab as far as a script can tell: a virtual environment with Colab's ipywidgets and IPython, a stub `google.colab`,
and the packages of the environment that runs the tests, seen through a .pth file. Also what runs the script and stands in for commands."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "colab_setup.sh"
FACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = FACTS["project"]
REAL_IN_COLAB = (
    ["ipywidgets==7.7.1", "ipython_genutils==0.2.0"],  # installed without their dependencies
    ["ipython==7.34.0", "ipykernel==6.17.1", "traitlets==5.7.1"],
)


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


class FakeColab:
    """Colab as far as the script can tell: `python3` on PATH, google.colab in it, a stand-in nvidia-smi."""

    def __init__(self, folder: Path, shared: Path):
        """In `folder`; `shared` keeps the environment as it was made for the next one: to copy it takes a second, to make it twenty."""
        self.folder = folder
        self.python = folder / "env" / "bin" / "python3"
        self.site = Path(sysconfig.get_path("purelib", "posix_prefix", vars={"base": str(folder / "env")}))  # a venv's, on Debian too
        kept = shared / "colab"
        with open(shared / "colab.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                self.make()
                shutil.copytree(folder / "env", shared / "colab.part", symlinks=True)
                (shared / "colab.part").rename(kept)  # whole, or not there
            else:
                shutil.copytree(kept, folder / "env", symlinks=True)
        self.borrow_packages()

    def make(self) -> None:
        """The environment with what Colab has of its own. Its pip is the test environment's: to install another takes longer than all the rest."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.folder / "env")], check=True, stdout=subprocess.DEVNULL)
        pip = metadata.distribution("pip")
        for name in ("pip", f"pip-{pip.version}.dist-info"):
            (self.site / name).symlink_to(pip.locate_file(name))
        without_dependencies, with_dependencies = REAL_IN_COLAB
        self.pip("install", *with_dependencies, "tqdm==4.65.0")  # this tqdm is older than the supported range
        self.pip("install", "--no-deps", *without_dependencies)
        (self.site / "google" / "colab").mkdir(parents=True)
        (self.site / "google" / "colab" / "__init__.py").write_text("")

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
        done = subprocess.run([str(self.python), "-m", "pip", *arguments], cwd=self.folder, env=environment(PIP_NO_COMPILE="1"),
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
