"""Runs a notebook and tidies what came out. Owns the kernel's environment and the rule for failing cells; writes no file."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from .cells import tags

WIDGET = "application/vnd.jupyter.widget-view+json"
TIMEOUT = 600  # seconds for one cell; a cell that hangs must not hang the build for ever


class Refused(Exception):
    """The notebook did not do what it says: nothing is written."""


def kernel_environment(root: Path) -> dict[str, str]:
    """The notebooks are built on the CPU, one thread, as the tests run them. A variable that is set wins."""
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **os.environ}
    if not shutil.which("nvidia-smi") or not env["CUDA_VISIBLE_DEVICES"]:
        env.setdefault("TRITON_INTERPRET", "1")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    return env


def execute(nb: NotebookNode, folder: Path) -> None:
    """Runs every cell, in place, with `folder` as the working directory. Raises Refused."""
    client = NotebookClient(nb, timeout=TIMEOUT, kernel_name="python3", record_timing=False, store_widget_state=False,
                            extra_arguments=["--log-level=ERROR"], resources={"metadata": {"path": str(folder)}})
    try:
        client.execute(env=kernel_environment(folder.parent))
    except CellExecutionError as error:
        raise Refused(f"a cell failed that is not tagged raises-exception:\n{error}") from None
    except (CellTimeoutError, DeadKernelError) as error:
        raise Refused(str(error)) from None
    for cell in nb.cells:
        said = "raises-exception" in tags(cell)
        errors = [output for output in cell.get("outputs", []) if output.output_type == "error"]
        if said and not errors:
            raise Refused(f"a cell tagged raises-exception did not raise:\n{cell.source}")
        if errors and not said:  # the cell went on, and what it shows could not be drawn
            raise Refused(f"a cell failed that is not tagged raises-exception:\n{cell.source}\n{errors[0].ename}: {errors[0].evalue}")
    tidy(nb, folder.parent)


def tidy(nb: NotebookNode, root: Path) -> None:
    """Removes what changes from run to run or names this machine; outputs and execution counts stay."""
    nb.metadata.pop("widgets", None)
    nb.metadata["language_info"] = {"name": "python"}
    for cell in nb.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
            for output in cell.outputs:
                tidy_output(output, root)


def joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Consecutive pieces of one stream made one: where the kernel cut them is chance."""
    whole: list[NotebookNode] = []
    for output in outputs:
        if whole and output.output_type == "stream" and whole[-1].output_type == "stream" and whole[-1].name == output.name:
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def tidy_output(output: NotebookNode, root: Path) -> None:
    if WIDGET in output.get("data", {}):
        output.data[WIDGET]["model_id"] = ""  # drawn at random, and names a widget that is gone: an empty one is not shown
    if output.output_type == "error":
        for prefix in (f"{root}/", f"{sys.prefix}/"):
            home = prefix.replace(f"{Path.home()}/", "~/", 1)
            output.traceback = [line.replace(prefix, "").replace(home, "") for line in output.traceback]
