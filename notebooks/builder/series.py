"""The list of notebooks and the facts stamped into them. Owns the reading of series.toml and pyproject.toml; no notebook is opened here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib


@dataclass(frozen=True)
class Entry:
    """One notebook of the series."""

    number: str
    slug: str
    title: str
    topic: str
    minutes: int
    status: str
    kaggle: bool = False  # whether it is worth two GPUs: a badge of Kaggle, and a setup cell that works there

    @property
    def name(self) -> str:
        return f"{self.number}_{self.slug}"

    @property
    def heading(self) -> str:
        return f"{self.number} {self.title}"

    @property
    def ready(self) -> bool:
        return self.status == "ready"


@dataclass(frozen=True)
class Series:
    """All notebooks in order, the folder they are in, and where the repository is published."""

    folder: Path
    entries: tuple[Entry, ...]
    runs: str
    repository: str
    tag: str

    @classmethod
    def load(cls, folder: Path) -> Series:
        """Reads `folder`/series.toml and the pyproject.toml beside the folder."""
        folder = folder.resolve()
        listed = tomllib.loads((folder / "series.toml").read_text(encoding="utf-8"))
        own = tomllib.loads((folder.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["minivllm"]
        entries = tuple(Entry(**entry) for entry in listed["notebook"])
        for entry in entries:
            if entry.status not in ("ready", "planned"):
                raise ValueError(f"series.toml: status of {entry.number} is {entry.status!r}; write ready or planned")
        return cls(folder, entries, listed["runs"], own["repository"], own["tag"])

    def source(self, entry: Entry) -> Path:
        return self.folder / f"{entry.name}.py"

    def notebook(self, entry: Entry) -> Path:
        return self.folder / f"{entry.name}.ipynb"

    def neighbours(self, entry: Entry) -> tuple[Entry | None, Entry | None]:
        at = self.entries.index(entry)
        before = self.entries[at - 1] if at > 0 else None
        after = self.entries[at + 1] if at + 1 < len(self.entries) else None
        return before, after

    def select(self, names: list[str]) -> list[Entry]:
        """The named entries ("01", "01_naive_attention", or the path of either file); without names those that are ready."""
        if not names:
            return [entry for entry in self.entries if entry.ready]
        wanted = [Path(name).name.removesuffix(".py").removesuffix(".ipynb") for name in names]
        known = {key: entry for entry in self.entries for key in (entry.number, entry.name, entry.slug)}
        unknown = [name for name in wanted if name not in known]
        if unknown:
            there = ", ".join(entry.name for entry in self.entries)
            raise ValueError(f"no notebook {', '.join(unknown)} in series.toml; there are {there}")
        return [known[name] for name in wanted]
