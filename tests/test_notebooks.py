"""notebooks/build.py: it builds, each of its checks can fail, its copies are fit for others; and the real notebooks pass."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import chromium
import nbformat
import notebook_samples
import pytest
from notebook_samples import NOTEBOOKS

build = importlib.import_module("build")
checks, execute, exercises, export, page, pair, prose, stamp = (
    importlib.import_module(f"builder.{name}") for name in ("checks", "execute", "exercises", "export", "page", "pair", "prose", "stamp"))
Series = importlib.import_module("builder.series").Series


def command(*arguments, folder=NOTEBOOKS):
    return subprocess.run([sys.executable, str(NOTEBOOKS / "build.py"), "--folder", str(folder), *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sample series, built once by the command."""
    folder = notebook_samples.make(tmp_path_factory.mktemp("series"))
    done = command(folder=folder)
    # Built in order, 00 is checked while 01 is not there yet.
    assert done.stdout.count(": built (") == 2, done.stdout + done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("0")] == ["00_first: the link 01_second.ipynb leads to no file"]
    return folder


@pytest.fixture
def series(built, tmp_path):
    """A copy of the built series that a test may break."""
    shutil.copytree(built.parent, tmp_path / "copy")
    return Series.load(tmp_path / "copy" / "notebooks")


def change(series, edit, also_source=True):
    """Edits notebook 00 and writes it, and its .py so that the pair still agrees."""
    entry = series.entries[0]
    nb = pair.read_notebook(series.notebook(entry))
    edit(nb)
    series.notebook(entry).write_text(nbformat.writes(nb))
    if also_source:
        series.source(entry).write_text(pair.source_text(nb, series.folder))
    return checks.problems(series, entry)


def cell(nb, tag):
    return next(cell for cell in nb.cells if tag in cell.metadata.get("tags", []))


# --- building -----------------------------------------------------------------------------------


def test_a_built_series_passes_every_check(built):
    done = command("check", folder=built)
    assert done.returncode == 0 and done.stderr == "" and done.stdout == "2 notebooks: every check passed\n"


def test_the_header_and_the_setup_cell_are_stamped_into_both_files(built):
    nb = nbformat.read(built / "01_second.ipynb", 4)
    source = (built / "01_second.py").read_text()
    own = Series.load(built)
    header = nb.cells[0].source
    assert header.startswith("# 01 Second\n") and "6 minutes" in header and "runs on a CPU" in header
    assert f"/github/{own.repository}/blob/{own.tag}/notebooks/01_second.ipynb)" in header
    assert re.search(r"Previous: \[00 First\]\(00_first\.ipynb\) \(\[in Colab\]\(\S+/00_first\.ipynb\)\) · Next: 02 Third \(planned\)", header)
    assert "".join(f"# {line}\n" if line else "#\n" for line in header.split("\n")) in source
    setup = cell(nb, "setup")
    assert setup.source in source and len(setup.source.splitlines()) <= 13 and nb.cells.index(setup) == 2
    assert [output.text for output in setup.outputs] and "device cpu" in setup.outputs[0].text


def test_building_again_changes_no_byte_but_the_time_that_a_cell_prints(series):
    def state():
        text = {path.name: path.read_bytes() for path in sorted(series.folder.glob("0*"))}
        return {name: re.sub(rb'"\d{10}\.\d+', b"a time", content) for name, content in text.items()}

    before = state()
    assert build.build(series, series.entries[0]) == []
    assert state() == before and len(before) == 4 and b"a time" in before["00_first.ipynb"]


def test_nothing_but_outputs_and_counts_is_kept(built):
    nb = nbformat.read(built / "00_first.ipynb", 4)
    assert set(nb.metadata) == {"kernelspec", "language_info"} and nb.metadata.language_info == {"name": "python"}
    for one in nb.cells:
        assert set(one.metadata) <= {"tags", "jupyter", "cellView"}
    solution = cell(nb, "exercise-1-solution")
    assert solution.metadata["jupyter"] == {"source_hidden": True} and solution.metadata["cellView"] == "form"
    (view,) = [output for one in nb.cells for output in one.get("outputs", []) if execute.WIDGET in output.get("data", {})]
    assert view.data["text/plain"] == "HTML(value='x')" and view.data[execute.WIDGET]["model_id"] == ""


@pytest.mark.parametrize("tag, code, reason", [
    ("", "class Odd:\n    def _repr_html_(self): return 1 / 0\nOdd()", "a cell failed that is not tagged raises-exception"),
    ("", "1 / 0", "a cell failed that is not tagged raises-exception"),
    (' tags=["raises-exception"]', "1 / 1", "a cell tagged raises-exception did not raise"),
])
def test_a_notebook_that_does_not_do_what_it_says_is_refused(tmp_path, capsys, tag, code, reason):
    folder = notebook_samples.make(tmp_path)
    (folder / "00_first.py").write_text(f"# %% tags=[\"setup\"]\nprint()\n\n# %%{tag}\n{code}\n")
    (folder / "00_first.ipynb").write_text("as it was")
    series = Series.load(folder)
    (problem,) = build.build_all(series, series.select(["00"]))
    assert problem.startswith("00_first: ") and reason in problem and code in problem
    assert "00_first: refused, the .ipynb is as it was" in capsys.readouterr().out
    assert (folder / "00_first.ipynb").read_text() == "as it was"


def test_a_title_that_stands_alone_gives_way_to_the_header(series):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# 00 Another title"), nbformat.v4.new_markdown_cell("# 00 Text\nfollows")])
    stamp.stamp(nb, series, series.entries[0])
    assert [one.source.split("\n")[0] for one in nb.cells] == ["# 00 First", "# 00 Text", "import importlib, subprocess"]


def test_names_of_notebooks(series):
    assert [entry.name for entry in series.select([])] == ["00_first", "01_second"]
    assert [entry.name for entry in series.select(["01", "notebooks/00_first.py", "second"])] == ["01_second", "00_first", "01_second"]
    with pytest.raises(ValueError, match="no notebook 77 in series.toml; there are 00_first"):
        series.select(["77"])


def test_paths_in_tracebacks_are_told_from_the_root_of_the_repository(tmp_path):
    error = nbformat.v4.new_output("error", ename="E", evalue="v", traceback=[f"File {tmp_path}/minivllm/llm.py:3", f"File {sys.prefix}/lib/x.py"])
    execute.tidy_output(error, tmp_path)
    assert error.traceback == ["File minivllm/llm.py:3", "File lib/x.py"]


@pytest.mark.parametrize("folder_there", [False, True])
def test_the_setup_cell_in_a_colab_where_setting_up_fails_says_why(series, tmp_path, monkeypatch, folder_there):
    source = stamp.setup_text(series).replace("find_spec(", "pretended(")
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\necho fatal: no such repository >&2\nexit 1\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    if folder_there:
        (tmp_path / "minivllm-source").mkdir()
        (tmp_path / "minivllm-source" / "colab_setup.sh").write_text("echo colab_setup.sh: no torch >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="minivllm could not be set up: " + ("colab_setup.sh: no torch" if folder_there else "fatal: no such repository")):
        exec(source, {"pretended": lambda name: name != "minivllm"})


def test_a_notebook_for_two_gpus_opens_in_kaggle_too_and_sets_itself_up_there(series, tmp_path, monkeypatch):
    without = stamp.header_text(series, series.entries[0])
    entry = replace(series.entries[0], kaggle=True)
    series = replace(series, entries=(entry, *series.entries[1:]))
    badges = stamp.header_text(series, entry).split("\n\n")[1].split("\n")
    assert badges[0] in without and "kaggle" not in without
    assert badges[1].startswith(stamp.KAGGLE_BADGE) and badges[1].endswith(f"/{series.repository}/blob/{series.tag}/notebooks/00_first.ipynb)")
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("\n".join(badges))])
    assert re.findall(r"\[([^]]+)\]\(", page.for_a_page(nb).cells[0].source) == ["Open in Colab", "Open in Kaggle"]
    plain, source = stamp.setup_text(series), stamp.setup_text(series, entry)
    assert "KAGGLE" not in plain and plain.splitlines()[4:] == source.splitlines()[5:] and len(source.splitlines()) <= 14
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\necho fatal: asked >&2\nexit 1\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    pretended = {"pretended": lambda name: None}
    exec(source.replace("find_spec(", "pretended("), pretended)  # neither: nothing is set up
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    with pytest.raises(RuntimeError, match="fatal: asked"):
        exec(source.replace("find_spec(", "pretended("), pretended)


# --- each check can fail ------------------------------------------------------------------------


def test_a_drifted_pair(series):
    source = series.source(series.entries[0])
    source.write_text(source.read_text().replace("print(3)", "print(3 + 0)"))
    (problem,) = checks.problems(series, series.entries[0])
    assert "the pair has drifted; run python notebooks/build.py 00" in problem and "-print(3 + 0)" in problem and "+print(3)" in problem


def header_of_another_version(nb):
    nb.cells[0].source = nb.cells[0].source.replace("/blob/v", "/blob/w")


def header_moved(nb):
    nb.cells.insert(2, nb.cells.pop(0))


def setup_edited(nb):
    cell(nb, "setup").source += "\nprint()"


def not_run(nb):
    nb.cells[6].execution_count = None


def run_out_of_order(nb):
    nb.cells[6].execution_count = 99


def widget_state(nb):
    nb.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {"state": {}}}


def times(nb):
    nb.cells[3].metadata.execution = {"iopub.status.busy": "2026-01-01"}


def silent(nb):
    cell(nb, "raises-exception").outputs = []


def loud(nb):
    nb.cells[3].outputs = [nbformat.v4.new_output("error", ename="E", evalue="v", traceback=[])]


def a_warning(nb):
    nb.cells[3].outputs = [nbformat.v4.new_output("stream", name="stderr", text="careful")]


def printed(text):
    def edit(nb):
        nb.cells[3].outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]

    return edit


def few_cells(nb):
    nb.cells = [one for one in nb.cells if "print" not in one.source or one.metadata.get("tags")]


def many_cells(nb):
    nb.cells += [nbformat.v4.new_code_cell("1", execution_count=count) for count in range(23, 50)]


def long_cells(nb):
    for one in nb.cells:
        if one.cell_type == "code" and "setup" not in one.metadata.get("tags", []):
            one.source += "\n0" * 9


def a_very_long_cell(nb):
    nb.cells[3].source += "\n0" * 41


def a_long_line(nb):
    nb.cells[3].source += "\n" + "0 + " * 30 + "0"


def few_words(nb):
    nb.cells[1].source = nb.cells[1].source.replace("word word", "word")


def many_words(nb):
    nb.cells[1].source += " word" * 1500


def wrote(text):
    def edit(nb):
        nb.cells[1].source += "\n\n" + text

    return edit


def drop(tag):
    def edit(nb):
        nb.cells.remove(cell(nb, tag))
        for count, one in enumerate((one for one in nb.cells if one.cell_type == "code"), start=1):
            one.execution_count = count

    return edit


def retag(tag, new):
    def edit(nb):
        cell(nb, tag).metadata.tags = [new]

    return edit


def one_exercise(nb):
    nb.cells = [one for one in nb.cells if not any("exercise-2" in tag for tag in one.metadata.get("tags", []))]


def swapped(nb):
    one, other = cell(nb, "exercise-1-check"), cell(nb, "exercise-1-solution")
    one.metadata.tags, other.metadata.tags = other.metadata.tags, one.metadata.tags


def solved(nb):
    cell(nb, "exercise-1-check").outputs[0].text = "2 checks passed"


def wrong_solution(nb):
    cell(nb, "exercise-2-solution").outputs[0].text = "wrong"


def eager_stub(nb):
    cell(nb, "exercise-1-stub").source = "def double_1(x):\n    return 0"


def uses_a_solution(nb):
    cell(nb, "exercise-1-solution").source += "\nanswer = 1"
    cell(nb, "exercise-2-check").source += "\nanswer"


HOME = "/" + "home"  # apart: no file of the repository names such a path
BROKEN = [
    (header_of_another_version, "the header cell is not what series.toml"), (header_moved, "the header cell is not what"),
    (setup_edited, "the setup cell is not what"), (not_run, "has the execution count None"), (run_out_of_order, "has the execution count 99"),
    (widget_state, "its metadata holds more"), (times, "the metadata of a cell holds execution"),
    (silent, "a cell tagged raises-exception holds no error"), (loud, "holds an error and is not tagged"), (a_warning, "a cell wrote to stderr"),
    (printed(f"saved to {HOME}/me/x"), f"names a path of one machine, {HOME}/me/x"), (printed("C:\\Users\\me"), "names a path of one machine"),
    (printed(f"in {sys.prefix}/lib"), "names a path of one machine"),
    (few_cells, "code cells; 20 to 35 are wanted"), (many_cells, "code cells; 20 to 35 are wanted"), (long_cells, "lines a code cell; at most 8"),
    (a_very_long_cell, "lines, the limit is 40"), (a_long_line, "a line of code of 121 characters, the limit is 112"), (few_words, "words of prose; 1200 to 2500"), (many_words, "words of prose; 1200 to 2500"),
    (wrote("[x](09_nothing.ipynb)"), "the link 09_nothing.ipynb leads to no file"), (wrote("[`x`](../nothing.py)"), "the link ../nothing.py leads"),
    (wrote("[x](#Nowhere)"), "the link #Nowhere leads to no heading"), (wrote("[x](01_second.ipynb#Nowhere)"), "#Nowhere leads to no heading"),
    (wrote("[![x](nothing.png)](#The-idea)"), "the link nothing.png leads to no file"), (wrote('<img src="nothing.svg">'), "nothing.svg leads to no file"),
    (wrote("[x](../../elsewhere.md)"), "leaves the repository"),
    (one_exercise, "1 exercises; 2 to 3 are wanted"), (drop("exercise-1-statement"), "exercise 1 has no statement cell"),
    (drop("exercise-2-stub"), "exercise 2 has no stub cell"), (drop("exercise-1-check"), "exercise 1 has no check cell"),
    (drop("exercise-2-solution"), "exercise 2 has no solution cell"), (swapped, "exercise 1 has its cells in another order"),
    (retag("exercise-1-stub", "exercise-1-stubb"), "the tag exercise-1-stubb is none of"), (retag("exercise-2-stub", "exercise-1-stub"), "two cells tagged"),
    (solved, "is not unsolved"), (wrong_solution, "has a solution cell that prints neither"), (eager_stub, "has a stub that neither raises"),
    (uses_a_solution, "the name answer is used, and only a solution defines it"),
]


@pytest.mark.parametrize("edit, expected", BROKEN, ids=[getattr(edit, "__name__", "") + f" {expected}" for edit, expected in BROKEN])
def test_a_check_fails(series, edit, expected):
    problems = change(series, edit)
    assert any(expected in problem for problem in problems), problems
    assert all(problem.startswith("00_first: ") for problem in problems)


def test_missing_and_stray_files(series):
    series.notebook(series.entries[0]).unlink()
    assert checks.problems(series, series.entries[0]) == ["00_first: 00_first.ipynb missing; write the .py and run python notebooks/build.py 00"]
    (series.folder / "02_third.py").write_text("")
    assert checks.strays(series) == ["02_third.py is there, but series.toml has no ready notebook 02_third"]


def test_harmless_outputs_pass(series):
    assert change(series, printed("3/4 of 20 tokens/s, minivllm/llm.py:3, a/b, [/INST]")) == []


def test_an_exercise_may_ask_for_an_input_that_exposes_a_fault(series):
    def edit(nb):
        cell(nb, "exercise-2-stub").source = "x = None"
        cell(nb, "exercise-2-solution").outputs[0].text = "exposed: 1 is not 2"

    assert change(series, edit) == []


def test_words_are_counted_as_a_reader_would():
    cells = [nbformat.v4.new_markdown_cell("# Header", metadata={"tags": ["header"]}), nbformat.v4.new_code_cell("x = 1"),
             nbformat.v4.new_markdown_cell("Two [words](a.py) - `three four`\n```\nnot these\n```\n<b>five</b> <svg><text>no</text></svg>")]
    assert prose.words(nbformat.v4.new_notebook(cells=cells)) == 5


# --- copies for others --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(built, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported")
    assert build.run(["export", str(out)], built) == []
    return out


def test_learner_copies_have_no_solutions_and_no_outputs(exported):
    nb = nbformat.read(exported / "learner" / "00_first.ipynb", 4)
    nbformat.validate(nb)
    tags = [tag for one in nb.cells for tag in one.metadata.get("tags", [])]
    assert "exercise-1-stub" in tags and not [tag for tag in tags if tag.endswith("-solution")]
    assert all(one.outputs == [] and one.execution_count is None for one in nb.cells if one.cell_type == "code")
    solved = nbformat.read(exported / "solutions" / "00_first.ipynb", 4)
    assert "2 checks passed\n" in [output.text for output in cell(solved, "exercise-1-solution").outputs]


def test_a_learner_copy_runs_unsolved(exported):
    nb = nbformat.read(exported / "learner" / "00_first.ipynb", 4)
    execute.execute(nb, exported / "learner")
    assert [output.text for output in cell(nb, "exercise-1-check").outputs] == ["not attempted yet\n"]


def test_links_of_copies_lead_to_copies_and_to_the_repository(built, exported):
    own = Series.load(built)
    text = nbformat.read(exported / "learner" / "01_second.ipynb", 4).cells[1].source
    assert f"(https://github.com/{own.repository}/blob/{own.tag}/pyproject.toml)" in text and "(00_first.ipynb#The-idea)" in text
    html = (exported / "html" / "01_second.html").read_text()
    assert 'href="00_first.html#The-idea"' in html
    assert all("/blob/" in address for address in re.findall(r'href="([^"]*\.ipynb)"', html)), "a link leads to a notebook that is not there"


def test_nothing_is_exported_while_a_check_fails(series, tmp_path):
    change(series, silent)
    with pytest.raises(ValueError, match="nothing is exported while a check fails"):
        build.run(["export", str(tmp_path / "out")], series.folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", [
    '<script src="//cdn/x.js"></script>', '<script>import("x")</script>', "<script>a = '//cdn/x.js'</script>", '<link rel="stylesheet" href="x.css">', '<img src="x.png">',
    "<style>@import 'x.css';</style>", '<p style="background: url(x.png)">', "<iframe></iframe>", '<svg><image xlink:href="x.png"/></svg>',
])
def test_what_a_page_would_fetch_is_found(text):
    assert len(page.network_references(f"<p>one</p>{text}")) == 1


def test_what_a_reader_may_click_is_no_reference():
    assert page.network_references('<a href="x.html">x</a><img src="data:image/png;base64,AA"><p style="fill: url(#a)"><svg><use href="#a"/></svg>'
                                   '<script>// important: "http:/' "/www.w3.org/2000/svg" '"</script>') == []


def test_tex_is_refused_on_pages():
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("costs `$5` or $x^2$")])
    assert export.unshown_math(nb) == ["TeX does not show offline, write it in words or code: $x^2$"]


def test_pages_work_without_a_network_in_light_and_dark_and_on_a_phone(exported):
    pages = sorted((exported / "html").glob("*.html"))
    assert [path.name for path in pages] == ["00_first.html", "01_second.html", "index.html"]
    papers, asked, errors = set(), [], []
    with chromium.launched() as browser:
        for scheme, width in (("light", 1200), ("dark", 390)):
            context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}, offline=True)
            tab = context.new_page()
            tab.on("request", lambda request: asked.append(request.url))
            tab.on("console", lambda message: errors.append(message.text))
            tab.on("pageerror", lambda error: errors.append(str(error)))
            for path in pages:
                tab.goto(path.as_uri())
                papers.add((scheme, tab.evaluate("getComputedStyle(document.body).backgroundColor")))
                assert tab.evaluate("document.documentElement.scrollWidth") <= width
            context.close()
    assert papers == {("light", "rgb(255, 255, 255)"), ("dark", "rgb(22, 24, 28)")}
    assert errors == [] and [url for url in asked if not url.startswith(("file:", "data:"))] == [] and len(asked) >= 6


def test_pages_lead_to_each_other(exported):
    with chromium.launched() as browser:
        tab = browser.new_page()
        tab.goto((exported / "html" / "index.html").as_uri())
        assert "02 Third (planned)" in tab.inner_text("main")
        tab.click("text=00 First")
        assert "Live view" in tab.inner_text("main") and tab.locator("text=Open in Colab").get_attribute("href").endswith("/00_first.ipynb")
        assert tab.locator("details").count() == 2 and not tab.locator("details .highlight").first.is_visible()
        tab.click("nav >> nth=0 >> text=01 Second")
        assert tab.url.endswith("01_second.html")
        tab.click("nav >> nth=1 >> text=00 First")
        assert tab.url.endswith("00_first.html")


# --- the real notebooks -------------------------------------------------------------------------


REAL = Series.load(NOTEBOOKS)


def test_the_series_is_whole():
    assert [entry.number for entry in REAL.entries] == [f"{number:02d}" for number in range(15)]
    assert len({entry.slug for entry in REAL.entries}) == 15
    assert checks.strays(REAL) == []


@pytest.mark.parametrize("entry", [entry for entry in REAL.entries if entry.ready], ids=lambda entry: entry.name)
def test_a_notebook_passes_its_checks(entry):
    assert checks.problems(REAL, entry) == []


@pytest.mark.parametrize("file", [NOTEBOOKS / "build.py", *sorted((NOTEBOOKS / "builder").glob("*.py"))], ids=lambda file: file.name)
def test_every_file_of_the_builder_is_short_and_says_what_it_is(file):
    assert len(file.read_text().splitlines()) <= 250 and ast.get_docstring(ast.parse(file.read_text()))
