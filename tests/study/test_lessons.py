"""The lessons of docs/study: each runs as a notebook, and has the parts and links that it must have."""

from __future__ import annotations

import copy
import inspect
import os
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import jupytext
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from llama.model import Attention

from .errata import ERRATA

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "docs" / "study"
LESSONS = sorted(STUDY.glob("0*.md"))
PARTS = ["Predict", "Run", "Explain", "Exercise", "Read next"]

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)


def client(notebook: Any) -> NotebookClient:
    return NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(STUDY)}})


ONE_CORE = {**os.environ, "OMP_NUM_THREADS": "1"}


def execute_alone(notebook: Any) -> Any:
    """Run all cells in place, in the folder of the lessons, on one core. A failing cell raises CellExecutionError."""
    return client(notebook).execute(env=ONE_CORE)


@pytest.fixture(scope="module")
def execute() -> Iterator[Callable[[Any], Any]]:
    """Like execute_alone, but with one kernel for all lessons, whose names are deleted before each lesson."""
    shared = client(jupytext.reads("", fmt="md"))
    shared.create_kernel_manager()
    shared.start_new_kernel(env=ONE_CORE)
    shared.start_new_kernel_client()

    def run(notebook: Any) -> Any:
        for shared.nb in (jupytext.reads("```python\n%reset -f\n```", fmt="md"), notebook):
            shared.reset_execution_trackers()
            for index, cell in enumerate(shared.nb.cells):
                shared.execute_cell(cell, index)
        return notebook

    yield run
    shared._cleanup_kernel()


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def section(text: str, name: str) -> str:
    return text.split(f"\n## {name}\n")[1].split("\n## ")[0]


def check(notebook: Any) -> None:
    """Check the output of an executed lesson."""
    for cell in code_cells(notebook):
        if re.search(r"\.figure\([^)]*\)$", cell.source):
            assert [output.data.get("image/png", "")[:8] for output in cell.outputs] == ["iVBORw0K"], cell.source
        assert "FAIL" not in printed(cell)
    verdicts = [printed(cell) for cell in code_cells(notebook) if "mine:" in printed(cell)]
    assert verdicts, "the lesson has no judge"
    for verdict in verdicts:  # the committed exercise is unsolved, and the judge must reject it
        assert "right" not in verdict


@pytest.mark.parametrize(
    "lesson",
    [lesson if i % 3 == 0 else pytest.param(lesson, marks=pytest.mark.slow) for i, lesson in enumerate(LESSONS)],
    ids=lambda lesson: lesson.stem,
)
def test_a_lesson_runs_and_shows_its_figures(execute: Callable[[Any], Any], lesson: Path) -> None:
    check(execute(jupytext.read(lesson)))


@pytest.mark.slow  # the same in a new kernel
@every_lesson
def test_a_lesson_runs_alone(lesson: Path) -> None:
    check(execute_alone(jupytext.read(lesson)))


def test_a_lesson_does_not_see_names_of_the_previous_one(execute: Callable[[Any], Any]) -> None:
    execute(jupytext.reads("```python\nleft_behind = 1\n```", fmt="md"))
    with pytest.raises(CellExecutionError, match="NameError"):
        execute(jupytext.reads("```python\nleft_behind\n```", fmt="md"))


def test_a_wrong_number_makes_a_lesson_fail(execute: Callable[[Any], Any]) -> None:
    notebook = jupytext.read(STUDY / "06-from-formula-to-code.md")
    first = next(i for i, cell in enumerate(notebook.cells) if "27.7086" in cell.source or "27.708604" in cell.source)
    notebook.cells = notebook.cells[: first + 1]
    right, wrong = notebook.cells[first].source, notebook.cells[first].source.replace("27.708604", "27.718604")
    assert right != wrong
    execute(copy.deepcopy(notebook))
    notebook.cells[first].source = wrong
    with pytest.raises(CellExecutionError, match="AssertionError"):
        execute(notebook)


@pytest.mark.slow  # runs two lessons again
@pytest.mark.parametrize("name", ["05-rope-from-one-demand", "08-longer-than-trained"])
def test_the_judge_accepts_the_solution(name: str) -> None:
    """One exercise needs a function, the other a class; figures and reports are left out."""
    notebook = jupytext.read(STUDY / f"{name}.md")
    solution = next(cell for cell in code_cells(notebook) if cell.metadata.get("tags") == ["solution"])
    repair = re.sub(r"(def|class) [sS]olution", r"\1 mine", solution.source.split("\n\n\n")[0])
    repair = repair.replace("class mine", "class Mine")
    notebook.cells = [cell for cell in notebook.cells if not re.search(r"\.(figure|report)\(", cell.source)]
    for cell in code_cells(notebook):
        if "# your repair goes here" in cell.source:
            cell.source = repair
    words = [printed(cell) for cell in code_cells(execute_alone(notebook)) if "mine:" in printed(cell)]
    assert words
    assert all("right" in word for word in words)


@every_lesson
def test_a_lesson_has_its_parts_in_order(lesson: Path) -> None:
    headings = re.findall(r"^## (.*)$", lesson.read_text(), re.MULTILINE)
    assert headings[-len(PARTS) :] == PARTS


@every_lesson
def test_an_exercise_is_an_erratum_with_a_judge_and_a_solution(lesson: Path) -> None:
    exercise = section(lesson.read_text(), "Exercise")
    assert re.search(r"\(E\d\d", exercise)
    assert "Predict" in exercise
    for name in (r"as_printed|AsPrinted", r"(def|class) (mine|Mine)", r"def judge", r"(def|class) (solution|Solution)"):
        assert re.search(name, exercise), name
    assert re.search(r"assert judge\((as_printed|AsPrinted)|judge\(as_printed\)\)", exercise), (
        "the judge must be able to fail"
    )
    folded = re.findall(r"<details>\n<summary>A solution</summary>\n(.*?)\n</details>", exercise, re.DOTALL)
    assert folded
    assert all('tags=["solution"]' in part for part in folded)


@every_lesson
def test_the_errata_that_a_lesson_names_exist(lesson: Path) -> None:
    named = set(re.findall(r"\b(?:E\d\d|OK\d+)[a-z]?\b", lesson.read_text()))
    assert named
    assert named <= set(ERRATA)


@every_lesson
def test_the_names_under_read_next_exist(lesson: Path) -> None:
    bullets = re.findall(
        r"^- \[`(llama/[\w/]+)\.py`\]\((.*?)\)(.*?)(?=^- |\Z|^\w)",
        section(lesson.read_text(), "Read next"),
        re.M | re.S,
    )
    assert bullets
    for module, link, text in bullets:
        assert (STUDY / link).resolve() == ROOT / f"{module}.py"
        names = [name for name in re.findall(r"`([A-Za-z_][\w.]*)`", text) if name != "inv_freq"]
        assert names
        for name in names:  # a function, a class, or a method such as Rope.freqs_cis
            attrgetter(name)(import_module(module.replace("/", ".")))


def test_lesson_7_quotes_the_model() -> None:
    """The quoted text is exactly the body of the function, with its comments."""
    quoted = re.search(r"```text\n(q = self.*?)```", (STUDY / "07-inside-a-llama.md").read_text(), re.DOTALL)
    assert quoted
    source = inspect.getsource(Attention.forward)
    body = source[source.index(") -> Tensor:\n") :].split("\n", 1)[1]
    assert [line.split() for line in quoted[1].splitlines()] == [line.split() for line in body.splitlines()]


def test_the_readme_lists_every_lesson_and_its_minutes() -> None:
    readme = (STUDY / "README.md").read_text()
    rows = re.findall(r"^\| \[(\d\. .*?)\]\((.*?)\) \| (\d+) \|", readme, re.MULTILINE)
    assert [file for _, file, _ in rows] == [lesson.name for lesson in LESSONS]
    for title, file, minutes in rows:
        text = (STUDY / file).read_text()
        assert f"\n# {title}\n" in text
        assert f"\n*{minutes} minutes." in text
    for text in [readme, *(lesson.read_text() for lesson in LESSONS)]:
        for link in re.findall(r"\]\((?!http)(.*?)\)", text):
            assert (STUDY / link).exists(), link
