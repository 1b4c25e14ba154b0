"""A small series of two notebooks for the tests of notebooks/build.py. They pass every check, so that each test can break one thing."""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

SERIES = """\
runs = "on a CPU"
[[notebook]]
number = "00"
slug = "first"
title = "First"
topic = "The first & the shortest."
minutes = 5
status = "ready"
[[notebook]]
number = "01"
slug = "second"
title = "Second"
topic = "The second."
minutes = 6
status = "ready"
[[notebook]]
number = "02"
slug = "third"
title = "Third"
topic = "Not there yet."
minutes = 7
status = "planned"
"""

EXERCISE = """
# %% [markdown] tags=["exercise-N-statement"]
# Exercise N: double a number.

# %% tags=["exercise-N-stub"]
def double_N(x):
    raise NotImplementedError

# %% tags=["exercise-N-check"]
def check_N(function):
    try:
        print("2 checks passed" if (function(2), function(0)) == (4, 0) else "wrong")
    except NotImplementedError:
        print("not attempted yet")
check_N(double_N)

# %% tags=["exercise-N-solution"]
check_N(lambda x: 2 * x)
"""


def source(anchor: str) -> str:
    """A notebook as its author writes it: no header, no setup cell."""
    words = "\n".join("# " + "word " * 20 for _ in range(61))
    cells = "\n".join(f"# %%\nprint({number})\n" for number in range(10))
    return f"""\
# %% [markdown]
# See [the idea](#The-idea), [the project](../pyproject.toml) and [`First`](00_first.ipynb#{anchor}).
#
{words}

# %%
import ipywidgets
view = ipywidgets.HTML("x")
view

# %%
for number in range(40):
    view.value = f"<b>{{number}}</b>"

# %% [markdown]
# ## The `idea`

{cells}
# %% tags=["nbval-ignore-output"]
import time
print(time.time())

# %% tags=["raises-exception"]
raise ValueError("as it should")
{EXERCISE.replace("N:", "1:").replace("-N-", "-1-").replace("_N", "_1")}
{EXERCISE.replace("N:", "2:").replace("-N-", "-2-").replace("_N", "_2")}"""


def make(folder: Path) -> Path:
    """Writes the series, not built, to `folder`/notebooks."""
    notebooks = folder / "notebooks"
    notebooks.mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(NOTEBOOKS / "jupytext.toml", notebooks)
    (notebooks / "series.toml").write_text(SERIES)
    (notebooks / "00_first.py").write_text(source("The-idea"))
    (notebooks / "01_second.py").write_text(source("The-idea").replace("print(3)", "print('three')"))
    return notebooks


def read_setup() -> tuple[str, str]:
    """The tag of the repository, and the setup cell that every real notebook has."""
    from builder import stamp
    from builder.series import Series

    series = Series.load(NOTEBOOKS)
    return series.tag, stamp.setup_text(series)
