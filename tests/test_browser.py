"""A person opens notebook 00 in JupyterLab, runs all of it, sees the live view move, and moves its slider: in a real browser.

The server listens on 127.0.0.1 alone, on a free port, with a token of its own, over a copy of the notebook without outputs.
"""

import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import chromium
import nbformat
import psutil
import pytest
from notebook_samples import NOTEBOOKS

SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": '{"windowingMode": "none"}',  # else what is scrolled out of sight is not in the page
    "@jupyterlab/apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}
#: Keeps every content that an HTML widget has shown.
WATCH = """
window.shown = new Set();
new MutationObserver(() => {
  for (const view of document.querySelectorAll('.widget-html-content')) if (view.innerHTML) window.shown.add(view.innerHTML);
}).observe(document.body, {subtree: true, childList: true, characterData: true, attributes: true});
"""
VIEWS = "[...document.querySelectorAll('.widget-html-content')].map(view => view.innerHTML).join('\\n')"
ALL_RAN = """[...document.querySelectorAll('.jp-CodeCell')].length > 0 && [...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')]
  .every(prompt => /\\[\\d+\\]/.test(prompt.textContent))"""
ASKED = "document.querySelector('.jp-Stdin-input')"
PATIENCE = 300_000  # ms; a limit for a page that hangs, not for a slow machine


def copy_to_run(notebook: Path, folder: Path) -> None:
    """The notebook as nobody has run it yet, with the settings of a new JupyterLab."""
    nb = nbformat.read(notebook, 4)
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    (folder / "notebooks").mkdir()
    nbformat.write(nb, folder / "notebooks" / notebook.name)
    for name, text in SETTINGS.items():
        file = folder / "settings" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def end(process: subprocess.Popen) -> None:
    """Ends a process and all that it started, its kernels too."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=15)
    for one in alive:
        one.kill()
    process.wait()


@contextmanager
def jupyterlab(folder: Path):
    """A server over `folder`/notebooks: its process, its address and its token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    own = {f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"), "IPYTHONDIR": str(folder / "ipython")}
    arguments = ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
                 f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder / 'notebooks'}"]
    with open(folder / "jupyterlab.log", "w") as log:
        process = subprocess.Popen([sys.executable, "-m", "jupyterlab", *arguments], cwd=folder, env=os.environ | own, stdin=subprocess.DEVNULL,
                                   stdout=log, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address + "/api", process, folder / "jupyterlab.log")
        yield process, address, token
    finally:
        end(process)


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    begin = time.monotonic()
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, OSError) as error:
            assert process.poll() is None, f"JupyterLab ended by itself:\n{log.read_text()}"
            assert time.monotonic() - begin < PATIENCE / 1000, f"JupyterLab does not answer ({error}):\n{log.read_text()}"
            time.sleep(0.2)


def listening(process: subprocess.Popen) -> set[str]:
    """The addresses at which the server and its kernels can be reached."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return {connection.laddr.ip for one in family for connection in one.net_connections(kind="inet") if connection.status == psutil.CONN_LISTEN}


def open_notebook(page, address: str, token: str, name: str) -> None:
    local = re.compile(r"(https?|wss?)://127\.0\.0\.1:|data:|blob:")
    page.context.route(lambda url: not local.match(url), lambda route: route.abort())
    page.set_default_timeout(PATIENCE)
    page.goto(f"{address}/lab/tree/{name}?token={token}")
    page.wait_for_selector("text=/\\| Idle/")
    page.evaluate(WATCH)


def run_all(page) -> None:
    page.click(".lm-MenuBar-itemLabel:text-is('Run')")
    page.click(".lm-Menu-itemLabel:text-is('Run All Cells')")


def answer_until_all_ran(page, lines: list[str]) -> None:
    """Types one line after the other where a cell asks for input, then empty ones, until every cell has run."""
    lines = list(lines)
    while True:
        page.wait_for_function(f"{ASKED} || ({ALL_RAN})")
        box = page.query_selector(".jp-Stdin-input")
        if box is None:
            return
        box.fill(lines.pop(0) if lines else "")
        box.press("Enter")
        page.wait_for_function("box => !box.isConnected", arg=box)


def move_a_slider(page) -> bool:
    """Presses keys on the handle of every slider until a view shows something else."""
    handles = page.locator(".widget-slider .noUi-handle, .widget-slider .ui-slider-handle")
    for number in range(handles.count()):
        before = page.evaluate(VIEWS)
        for key in ("Home", "ArrowRight", "End"):
            handles.nth(number).press(key)
        for _ in range(50):
            if page.evaluate(VIEWS) != before:
                return True
            page.wait_for_timeout(100)
    return False


def watch(notebook: Path, folder: Path, pictures: Path) -> dict:
    """Runs the notebook in a browser; what there was to see."""
    copy_to_run(notebook, folder)
    pictures.mkdir(parents=True, exist_ok=True)
    with jupyterlab(folder) as (process, address, token), chromium.launched() as browser:
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        try:
            open_notebook(page, address, token, notebook.name)
            run_all(page)
            page.wait_for_function("window.shown.size >= 3")
            answer_until_all_ran(page, ["What is the capital of France?"])
            page.wait_for_selector("text=/\\| Idle/")
            seen = {"shown": page.evaluate("window.shown.size"), "listening": listening(process), "moved": move_a_slider(page),
                    "text": page.inner_text(".jp-Notebook"), "errors": page.locator("[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts()}
            page.locator(".widget-html-content").first.scroll_into_view_if_needed()
        finally:
            page.screenshot(path=pictures / f"{notebook.stem}.png")
    seen["left"] = process.poll() is None
    return seen


@pytest.mark.slow
def test_the_live_view_of_notebook_00_moves_and_its_slider_works(tmp_path):
    seen = watch(NOTEBOOKS / "00_tour.ipynb", tmp_path, Path(os.environ.get("MINIVLLM_SCREENSHOTS") or tmp_path / "pictures"))
    assert seen["shown"] >= 5, "the live view showed the same all the time"
    assert seen["moved"], "no slider changed a view"
    assert "The capital of France is Paris" in seen["text"]
    assert seen["listening"] == {"127.0.0.1"} and not seen["left"]
    assert not [text for text in seen["errors"] if "Error" in text and "tagged" not in text], seen["errors"]
