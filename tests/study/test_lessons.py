"""The lessons of docs/learn: they run, their results and figures are fresh, each is short and opens with a picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ..scripts import annotated, lesson_svg, render_lessons

ROOT = Path(__file__).resolve().parents[2]
LEARN = ROOT / "docs" / "learn"
LESSONS = render_lessons.lessons()
README = (LEARN / "README.md").read_text()
ONE_FILE = render_lessons.ONE_FILE
FAST = ("04-rope-from-one-demand", "05-from-formula-to-code")  # the others take seconds

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)


@pytest.mark.parametrize(
    "lesson",
    [page if page.stem in FAST else pytest.param(page, marks=pytest.mark.slow) for page in (*LESSONS, ONE_FILE)],
    ids=lambda lesson: lesson.stem,
)
def test_a_lesson_runs_and_its_committed_results_are_the_present_ones(lesson: Path) -> None:
    files = render_lessons.render(lesson)
    stale = [file.name for file, content in files.items() if render_lessons.stale(file, content)]
    assert not stale, "run 'python scripts/render_lessons.py' and commit what it writes"


def test_a_line_of_one_file_that_its_page_lacks_or_has_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page, code = ONE_FILE.read_text(), annotated.FILE.read_text()
    assert annotated.annotated(render_lessons.source(page), {}) == render_lessons.source(page)
    monkeypatch.setattr(annotated, "FILE", tmp_path / "one_file.py")
    for changed in (
        code.replace("/ D**0.5", "/ D"),
        code + "print()\n",
        code.replace("    token", "    x = 1\n    token", 1),
    ):
        annotated.FILE.write_text(changed)
        with pytest.raises(ValueError, match=r"line \d+"):
            annotated.annotated(render_lessons.source(page), {})


def read_words(text: str) -> int:
    """The words that a reader sees: not the comments, nor what belongs to a picture's file."""
    return len(re.sub(r"<!--.*?-->|<picture>.*?</picture>", "", text, flags=re.DOTALL).split())


@every_lesson
def test_a_lesson_is_short_and_opens_with_a_picture_and_ends_with_a_task(lesson: Path) -> None:
    text = lesson.read_text()
    cells = render_lessons.parse(text)
    assert read_words(text) <= 1500
    assert "<picture>" in text.split("\n## ")[0]
    assert all(len(cell.alt) >= 60 and "TODO" not in cell.alt for cell in cells if cell.figure)
    kinds = [cell.kind for cell in cells if cell.kind not in ("markdown", "check")]
    assert kinds[-3:] == ["task", "code", "solution"] or lesson.stem.startswith("appendix")
    assert text.count("<details>") == text.count("</details>") <= 4


@every_lesson
def test_a_notebook_has_no_checks(lesson: Path) -> None:
    text = lesson.read_text()
    cells = render_lessons.parse(text)
    assert any("assert" in cell.source for cell in cells if cell.kind == "check")
    made = render_lessons.notebook(cells)
    assert made == (LEARN / "notebooks" / f"{lesson.stem}.ipynb").read_text(), "run 'python scripts/render_lessons.py'"
    assert "<!-- check" not in made
    assert json.loads(made)["nbformat"] == 4
    assert text.count("<!-- output -->") == text.count("<!-- end of output -->") > 0


def test_a_solution_runs_in_place_of_its_task_and_a_test_that_cannot_fail_is_refused() -> None:
    lesson = (
        "<!-- task -->\n```python\ndef double(x): ...\n```\n```python\n{}\n```\n<details>\n\n<!-- solution -->\n"
        "```python\ndef double(x): return 2 * x\n```\n\n</details>\n"
    )
    cells = render_lessons.parse(lesson.format("assert double(3) == 6\n'right'"))
    names = render_lessons.execute(cells)
    assert names["double"](4) == 8
    assert [cell.printed for cell in cells if cell.kind == "code"] == ["'right'\n"]
    kinds = [cell["cell_type"] for cell in json.loads(render_lessons.notebook(cells))["cells"]]
    assert kinds == ["code", "code", "code", "markdown"]  # the solution stays folded
    with pytest.raises(RuntimeError, match="passes without a solution"):
        render_lessons.execute(render_lessons.parse(lesson.format("double(3)")))
    with pytest.raises(AssertionError):
        render_lessons.execute(render_lessons.parse(lesson.format("assert double(3) == 7")))


def test_a_wrong_number_out_of_sight_makes_a_lesson_fail() -> None:
    right = render_lessons.parse("```python\nx = 2\n```\n<!-- check\nassert x == 2\n-->\n")
    render_lessons.execute(right)
    with pytest.raises(AssertionError):
        render_lessons.execute(render_lessons.parse("```python\nx = 3\n```\n<!-- check\nassert x == 2\n-->\n"))
    with pytest.raises(NameError):  # the notebook has no checks, so that its code would not find their names
        render_lessons.execute(render_lessons.parse("<!-- check\nx = 2\n-->\n```python\nx\n```\n"))


def test_a_changed_result_or_figure_is_stale_and_a_rounding_error_is_not(tmp_path: Path) -> None:
    file = tmp_path / "lesson.md"
    file.write_text("difference 1.2e-07\nq · k = 0.48")
    assert not render_lessons.stale(file, file.read_text().replace("1.2e-07", "3.4e-08"))
    assert render_lessons.stale(file, file.read_text().replace("0.48", "0.49"))
    picture = (LEARN / "figures" / "arrows-light.svg").read_text()
    place = re.search(r'x="(\d+\.\d)"', picture)
    assert place
    moved = [picture.replace(place[0], f'x="{float(place[1]) + by:.1f}"', 1) for by in (0.0, 0.1, 1.0)]
    assert [lesson_svg.same(picture, other) for other in moved] == [True, True, False]


def test_the_figures_are_small_and_used_and_both_themes_are_one_picture() -> None:
    files = {file.name: file.read_text() for file in (LEARN / "figures").glob("*.svg")}
    pages = [README, *(lesson.read_text() for lesson in LESSONS)]
    used = {name for page in pages for name in re.findall(r'(?:src|srcset)="figures/([^"]+)"', page)}
    assert files.keys() == used, files.keys() ^ used
    for name, text in files.items():
        assert len(text) < 100_000, name
        assert not re.search(r"<dc:date>|Matplotlib v|nan", text), name
        if name.endswith("-light.svg"):
            assert lesson_svg.same(lesson_svg.dark(text), files[name.replace("-light", "-dark")]), name


def test_the_course_lists_every_lesson_and_papers_are_linked_by_their_numbers() -> None:
    rows = re.findall(r"^\| \[((?:\d+|Appendix)\. .*?)\]\((.*?)\) \| (\d+) \|", README, re.MULTILINE)
    assert [file for _, file, _ in rows] == [lesson.name for lesson in LESSONS]
    for title, file, minutes in rows:
        text = (LEARN / file).read_text()
        assert 0 <= int(minutes) - read_words(text) / 150 <= 2, title  # the cells take less than a minute
        assert text.startswith(f"# {title}\n")
        for id, url in re.findall(r"arXiv:(\d{4}\.\d{5})\]\((.*?)\)", text):
            assert url == f"https://arxiv.org/abs/{id}"
            assert id in (LEARN / "references.md").read_text(), title
