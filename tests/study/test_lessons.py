"""The lessons of docs/learn: they run, results and figures are not stale, and every part and link is there."""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from llama.model import Attention

from ..scripts import lesson_svg, render_lessons

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "docs" / "learn"
LESSONS = render_lessons.lessons()
PARTS = ["Predict", "Run", "Explain", "Exercise", "Build it", "Ten questions", "Read next"]

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)


def section(text: str, name: str) -> str:
    return text.split(f"\n## {name}\n")[1].split("\n## ")[0]


def cells(lesson: Path) -> list[Any]:
    return [cell for cell in render_lessons.parse(lesson.read_text()) if cell.kind == "code"]


# ------------------------------------------------------------------------------------------- results and figures
@pytest.mark.parametrize(
    "lesson",
    [lesson if i == 3 else pytest.param(lesson, marks=pytest.mark.slow) for i, lesson in enumerate(LESSONS)],
    ids=lambda lesson: lesson.stem,
)
def test_a_lesson_runs_and_its_committed_results_are_the_present_ones(lesson: Path) -> None:
    files = render_lessons.render(lesson)
    stale = [file.name for file, content in files.items() if render_lessons.stale(file, content)]
    assert not stale, "run 'python scripts/render_lessons.py' and commit what it writes"


@pytest.mark.parametrize("lesson", [*LESSONS, render_lessons.EXPLAIN], ids=lambda lesson: lesson.stem)
def test_the_notebook_and_the_text_are_made_from_one_source(lesson: Path) -> None:
    """Without running: the notebook, and that every result stands behind a block."""
    text = lesson.read_text()
    if lesson == render_lessons.EXPLAIN:
        assert render_lessons.VOLATILE.sub("", render_lessons.console(text)) == render_lessons.VOLATILE.sub("", text)
        return
    made = render_lessons.notebook(render_lessons.parse(text))
    assert made == (STUDY / "notebooks" / f"{lesson.stem}.ipynb").read_text(), "run 'python scripts/render_lessons.py'"
    assert text.count("<!-- output -->") == text.count("<!-- end of output -->") > 0
    for where in re.split(r"<!-- output -->", text)[:-1]:
        assert re.search(r"(^```|<!-- figure \w+ -->)\n+\Z", where, re.MULTILINE)


def test_a_changed_result_is_stale(tmp_path: Path) -> None:
    file = tmp_path / "lesson.md"
    file.write_text("difference 1.2e-07, at most 1e-05 allowed\nq · k = 0.48\nllama/rope.py:55  angles")
    assert not render_lessons.stale(file, file.read_text().replace("1.2e-07", "3.4e-08").replace(":55", ":60"))
    assert render_lessons.stale(file, file.read_text().replace("0.48", "0.49"))
    assert render_lessons.stale(file, file.read_text().replace("angles", "angle"))
    assert render_lessons.stale(tmp_path / "no.md", "")


def test_a_changed_figure_is_stale_and_a_rounding_error_is_not() -> None:
    picture = (STUDY / "figures" / "order-light.svg").read_text()
    assert lesson_svg.same(picture, picture)
    place = re.search(r'x="(\d+\.\d)"', picture)
    assert place
    moved = [picture.replace(place[0], f'x="{float(place[1]) + by:.1f}"', 1) for by in (0.1, 1.0)]
    assert [lesson_svg.same(picture, other) for other in moved] == [True, False]
    assert not lesson_svg.same(picture, picture.replace("0.546", "0.547"))  # a number that the reader sees
    raster = lesson_svg.RASTER.findall(picture)
    assert not lesson_svg.same(picture, picture.replace(raster[0], lesson_svg._reversed_png(raster[0])))
    newer = re.sub(r"matplotlib [\d.]+", "matplotlib 9.9", picture).replace('x="', 'x="1')
    assert lesson_svg.same(picture, newer)
    assert not lesson_svg.same(picture, re.sub(r"data \w+", "data 0", newer))


def test_the_figures_are_small_and_used_and_both_themes_are_one_picture() -> None:
    files = {file.name for file in (STUDY / "figures").glob("*.svg")}
    used: set[str] = set()
    for page in [STUDY / "README.md", *LESSONS]:
        used |= set(re.findall(r'(?:src|srcset)="figures/([^"]+)"', page.read_text()))
    assert files == used, files ^ used
    for name in files:
        text = (STUDY / "figures" / name).read_text()
        assert len(text) < 100_000, name
        assert not re.search(r"<dc:date>|Matplotlib v|nan", text), name
        _, _, width, height = map(float, re.findall(r'viewBox="(\S+) (\S+) (\S+) (\S+)"', text)[0])
        for x, y in re.findall(r'<text[^>]* (?:x="|transform="translate\()(\S+?)"?\s(?:y=")?([-\d.]+)', text):
            assert 0 <= float(x) <= width, f"{name}: text outside the picture"
            assert 4 <= float(y) <= height, f"{name}: text outside the picture"  # y is the lower edge of a line
        if name.endswith("-light.svg"):
            assert lesson_svg.same(
                lesson_svg.dark(text), (STUDY / "figures" / name.replace("-light", "-dark")).read_text()
            )


@every_lesson
def test_a_lesson_shows_a_picture_before_it_explains_and_its_figures_follow_the_theme(lesson: Path) -> None:
    text = lesson.read_text()
    assert "<picture>" in text.split("\n## Explain\n")[0]
    for picture in re.findall(r"<picture>.*?</picture>", text, re.DOTALL):
        assert re.search(r'media="\(prefers-color-scheme: dark\)" srcset="figures/(\w+)-dark', picture)
        assert re.search(r'alt="[^"]{20,}"', picture)


@pytest.mark.slow  # a kernel
@pytest.mark.parametrize("name", ["04-rope-from-one-demand", "06-inside-a-llama"])
def test_a_notebook_runs_in_a_kernel(name: str) -> None:
    import nbformat
    from nbclient import NotebookClient

    made = nbformat.read(STUDY / "notebooks" / f"{name}.ipynb", 4)
    nbformat.validate(made)
    assert "%pip install" in made.cells[0].source
    made.cells = made.cells[1:]
    NotebookClient(made, timeout=120, kernel_name="python3").execute()
    shown = [cell for cell in made.cells if re.search(r"\.figure\([^)]*\)$", cell.source)]
    assert shown
    assert all(cell.outputs[0].data["image/png"].startswith("iVBORw0K") for cell in shown)


def test_the_links_of_a_notebook_are_absolute() -> None:
    for file in (STUDY / "notebooks").glob("*.ipynb"):
        for cell in json.loads(file.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                text = "".join(cell["source"])
                assert not re.search(r"\]\((?!https://)", text)
                assert text.count("<details>") == text.count("</details>")


def test_a_wrong_number_makes_a_lesson_fail() -> None:
    first = next(cell for cell in cells(STUDY / "05-from-formula-to-code.md") if "27.708604" in cell.source)
    render_lessons.execute([first])
    first.source = first.source.replace("27.708604", "27.718604")
    with pytest.raises(AssertionError):
        render_lessons.execute([first])


def test_a_lesson_does_not_see_names_of_the_previous_one() -> None:
    render_lessons.execute([render_lessons.Cell("code", "left_behind = 1\n")])
    with pytest.raises(NameError):
        render_lessons.execute([render_lessons.Cell("code", "left_behind\n")])


# -------------------------------------------------------------------------------------------------------- exercises
@pytest.mark.slow  # runs two lessons again
@pytest.mark.parametrize("name", ["04-rope-from-one-demand", "07-longer-than-trained"])
def test_the_judge_accepts_the_solution(name: str) -> None:
    """One exercise needs a function, the other a class; figures are left out."""
    run = [cell for cell in cells(STUDY / f"{name}.md") if ".figure(" not in cell.source or "import" in cell.source]
    solution = next(cell.source for cell in run if cell.solution)
    repair = re.sub(r"(def|class) [sS]olution", r"\1 mine", solution.split("\n\n\n")[0]).replace(
        "class mine", "class Mine"
    )
    for cell in run:
        if "# your repair goes here" in cell.source:
            cell.source = repair + "\n"
    render_lessons.execute(run)
    words = [line for cell in run for line in cell.printed.splitlines() if line.startswith("mine:")]
    assert words
    assert all("right" in word for word in words)


@every_lesson
def test_the_committed_exercises_are_unsolved(lesson: Path) -> None:
    words = re.findall(r"^(mine|build):(.*)$", lesson.read_text(), re.MULTILINE)
    assert {name for name, _ in words} == {"mine", "build"}
    assert all("right" not in word for _, word in words)


@every_lesson
def test_a_lesson_has_its_parts_in_order(lesson: Path) -> None:
    headings = re.findall(r"^## (.*)$", lesson.read_text(), re.MULTILINE)
    assert headings[-len(PARTS) :] == PARTS


@every_lesson
def test_an_exercise_quotes_a_bug_and_has_a_judge_and_a_solution(lesson: Path) -> None:
    exercise = section(lesson.read_text(), "Exercise")
    assert "**A bug people really write.**" in exercise
    assert "Predict" in exercise
    for name in (r"as_printed|AsPrinted", r"(def|class) (mine|Mine)", r"def judge", r"(def|class) (solution|Solution)"):
        assert re.search(name, exercise), name
    assert re.search(r"assert .*judge\((as_printed|AsPrinted)", exercise), "the judge must be able to fail"
    for part in (exercise, section(lesson.read_text(), "Build it")):
        folded = re.findall(r"<details>\n<summary>A solution</summary>\n(.*?)\n</details>", part, re.DOTALL)
        assert folded
        assert all("```python solution" in solution for solution in folded)


@every_lesson
def test_ten_questions_have_hidden_answers(lesson: Path) -> None:
    part = section(lesson.read_text(), "Ten questions")
    found = re.findall(r"^(\d+)\. (.+)\n<details><summary>Answer</summary>(.+)</details>$", part, re.MULTILINE)
    assert [int(number) for number, _, _ in found] == list(range(1, 11))


@every_lesson
def test_theta_is_the_base_and_no_ids_of_claims_appear(lesson: Path) -> None:
    text = lesson.read_text()
    assert not re.search(r"\\theta_\w|theta_i|θ_\w(?!i)", text)
    assert not re.search(r"\((?:E|OK)\d|\b[Nn]otes? 00\d|\b\d{3}-\d\d\b", render_lessons.source(text))


# ------------------------------------------------------------------------------------------------- links and quotes
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


def test_lesson_6_quotes_the_model() -> None:
    """The quoted text is exactly the body of the function, with its comments."""
    quoted = re.search(r"```text\n(q = self.*?)```", (STUDY / "06-inside-a-llama.md").read_text(), re.DOTALL)
    assert quoted
    source = inspect.getsource(Attention.forward)
    body = source[source.index(") -> Tensor:\n") :].split("\n", 1)[1]
    assert [line.split() for line in quoted[1].splitlines()] == [line.split() for line in body.splitlines()]


def test_the_readme_lists_every_lesson_and_its_minutes() -> None:
    readme = (STUDY / "README.md").read_text()
    rows = re.findall(r"^\| \[((?:\d+|Appendix)\. .*?)\]\((.*?)\) \| (\d+) \|", readme, re.MULTILINE)
    assert [file for _, file, _ in rows] == [lesson.name for lesson in LESSONS]
    for title, file, minutes in rows:
        text = (STUDY / file).read_text()
        assert text.startswith(f"# {title}\n")
        assert f"\n*{minutes} minutes." in text
    for text in [readme, *(lesson.read_text() for lesson in LESSONS)]:
        for link in re.findall(r"\]\((?!http)(.*?)\)", text):
            assert (STUDY / link.partition("#")[0]).exists(), link  # the site checks anchors
        for id, url in re.findall(r"arXiv:(\d{4}\.\d{5})\]\((.*?)\)", text):
            assert url == f"https://arxiv.org/abs/{id}"
