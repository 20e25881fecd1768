"""Run the lessons of docs/learn; write their results and figures into them, and a notebook of each.

    python scripts/render_lessons.py             every lesson, and docs/learn/one-file.md
    python scripts/render_lessons.py 04 07       those whose file name begins with 04 or 07
    python scripts/render_lessons.py --check     write nothing; exit code 1 if a committed file is stale

A lesson is a Markdown file. Its ```python blocks are its cells and run in order, in one process and one namespace.
After each block stands what it printed, between two comments; this part is replaced by every run. Other comments say
what else a lesson contains:

    <!-- check ... -->         assertions: they run like a cell, but no reader sees them, nor later blocks their names
    <!-- figure NAME: alt -->  a picture of a topic or of scripts/lesson_figures.py, with its alternative text
    <!-- task -->              the next block is a function to write, and the block after it the test
    <!-- solution -->          the next block is the function, folded; here it takes the place of the task

A test that passes with the task as it stands is an error. Figures go to docs/learn/figures, light and dark, and
notebooks to docs/learn/notebooks.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import linecache
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import annotated
import lesson_figures
import lesson_svg
import torch

from llama.study.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
LEARN = ROOT / "docs" / "learn"
ONE_FILE = LEARN / "one-file.md"
OUTPUT = re.compile(r"\n<!-- output -->\n.*?\n<!-- end of output -->\n", re.DOTALL)
OPEN = re.compile(r"\n<!-- open -->\n.*?\n<!-- end of open -->\n", re.DOTALL)
CELL = re.compile(
    r"^(?:<!-- (?P<role>task|solution) -->\n)?```python\n(?P<code>.*?)^```\n|^<!-- check\n(?P<check>.*?)^-->\n"
    r"|^<!-- figure (?P<figure>\w+): (?P<alt>.*?) -->\n",
    re.DOTALL | re.MULTILINE,
)
VOLATILE = re.compile(r"(?<=difference )\d\.\de[+-]\d\d")  # rounding errors

INSTALL = "# once: pip install -e '.[study]' in a checkout, or pip install 'FILE.whl[study]'"


@dataclass
class Cell:
    """One part of a lesson."""

    kind: str  # "markdown", "code", "check": code out of sight, "task", "solution", or "figure"
    source: str
    printed: str = ""
    figure: Figure | None = None
    alt: str = ""


def lessons() -> list[Path]:
    """The lessons in the order of the course; the appendix is last."""
    return [*sorted(LEARN.glob("[0-9][0-9]-*.md")), *sorted(LEARN.glob("appendix-*.md"))]


def source(text: str) -> str:
    """A lesson without everything that this script writes into it."""
    return OPEN.sub("", OUTPUT.sub("", text))


def parse(text: str) -> list[Cell]:
    """The cells of a lesson, without results."""
    cells, end = [], 0
    text = source(text)
    for match in CELL.finditer(text):
        cells.append(Cell("markdown", text[end : match.start()]))
        if name := match["figure"]:
            cells.append(Cell("figure", match[0], figure=lesson_figures.find(name), alt=" ".join(match["alt"].split())))
        elif match["check"] is not None:
            cells.append(Cell("check", match["check"]))
        else:
            cells.append(Cell(match["role"] or "code", match["code"]))
        end = match.end()
    return [*cells, Cell("markdown", text[end:])]


def execute(cells: list[Cell], name: str = "lesson") -> dict[str, Any]:
    """Run the cells in order and fill in what they print. Returns the names that the code defined.

    A check sees all names. Code sees only names of code, since a notebook has no checks. A solution replaces its task.
    """
    names: dict[str, Any] = {"__name__": name}
    hidden: dict[str, Any] = {}  # the names that checks defined
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the results must not depend on the machine's cores
    torch.set_printoptions(profile="default")
    try:
        for number, cell in enumerate(cells):
            file = f"{name}, cell {number}"
            if cell.kind == "code":
                cell.printed = _run(cell.source, file, names)
            elif cell.kind == "check":
                hidden = {**hidden, **names}
                _run(cell.source, file, hidden)
            elif cell.kind == "task":
                test, solution = (next(c for c in cells[number:] if c.kind == kind) for kind in ("code", "solution"))
                attempt = dict(names)
                try:
                    _run(cell.source + test.source, file, attempt)
                except Exception:
                    _run(solution.source, file, names)
                else:
                    raise RuntimeError(f"{file}: the test of this task passes without a solution")
    finally:
        torch.set_num_threads(threads)
        torch.set_printoptions(profile="default")
    return names


def _run(code: str, file: str, names: dict[str, Any]) -> str:
    """Run code as a notebook does. Return what it printed, and the value of its last line."""
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)  # for tracebacks
    tree = ast.parse(code, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, file, "exec"), names)
        value = eval(compile(ast.Expression(last.value), file, "eval"), names) if last else None
        if value is not None:
            print(repr(value))
    return out.getvalue()


def markdown(cells: list[Cell], stem: str) -> str:
    """The lesson as it is committed: with its results, and the link to its notebook below the title."""
    block = "```python\n{}```\n"
    fences = {"code": block, "check": "<!-- check\n{}-->\n"}
    fences |= {kind: f"<!-- {kind} -->\n{block}" for kind in ("task", "solution")}
    parts = []
    for cell in cells:
        parts.append(fences.get(cell.kind, "{}").format(cell.source))
        results = [f"```text\n{cell.printed.rstrip()}\n```\n"] if cell.kind == "code" and cell.printed.strip() else []
        if cell.figure:
            results.append(
                "<picture>\n"
                f'  <source media="(prefers-color-scheme: dark)" srcset="figures/{cell.figure.name}-dark.svg">\n'
                f'  <img alt="{cell.alt}" src="figures/{cell.figure.name}-light.svg">\n'
                f"</picture>\n\n*{cell.figure.caption}*\n"
            )
        if results:
            parts.append("\n<!-- output -->\n" + "\n".join(results) + "\n<!-- end of output -->\n")
    here = f"[As a notebook](notebooks/{stem}.ipynb)"
    return re.sub(r"\A(# .*\n)", lambda m: f"{m[1]}\n<!-- open -->\n{here}\n<!-- end of open -->\n", "".join(parts))


def notebook(cells: list[Cell]) -> str:
    """The lesson as a notebook without results; its links and pictures are relative to docs/learn/notebooks."""
    parts = [("code", INSTALL)]
    for cell in cells:
        text = cell.source
        if cell.figure:
            text = f"![{cell.alt}](../figures/{cell.figure.name}-light.svg)\n\n*{cell.figure.caption}*\n"
        elif cell.kind == "markdown":
            text = re.sub(r"\]\((?!https?:|#)([^)]*)\)", r"](../\1)", text)
        elif cell.kind == "solution":  # inside <details>
            text = f"```python\n{text}```\n"
        if cell.kind != "check":
            parts.append(("code" if cell.kind in ("code", "task") else "markdown", text))
    made = []
    for kind, group in itertools.groupby(parts, lambda part: part[0]):
        texts = [text for _, text in group]
        texts = [text.strip("\n") for text in (texts if kind == "code" else ["".join(texts)])]
        made += [_notebook_cell(kind, text) for text in texts if text]
    for number, cell in enumerate(made):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _notebook_cell(kind: str, text: str) -> dict[str, Any]:
    cell = {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell


def render(lesson: Path) -> dict[Path, str]:
    """Run a lesson or another page; every file that belongs to it, with its content."""
    if lesson == ONE_FILE:
        return {ONE_FILE: annotated.annotated(source(ONE_FILE.read_text()), annotated.recorded())}
    cells = parse(lesson.read_text())
    execute(cells, lesson.stem)
    files = {lesson: markdown(cells, lesson.stem), LEARN / "notebooks" / f"{lesson.stem}.ipynb": notebook(cells)}
    for figure in filter(None, (cell.figure for cell in cells)):
        drawn = lesson_svg.light(figure)
        files[LEARN / "figures" / f"{figure.name}-light.svg"] = drawn
        files[LEARN / "figures" / f"{figure.name}-dark.svg"] = lesson_svg.dark(drawn)
    return files


def stale(file: Path, content: str) -> bool:
    """Whether a committed file is out of date: a figure looks different, or a text differs outside of VOLATILE."""
    if not file.exists():
        return True
    if file.suffix == ".svg":
        return not lesson_svg.same(file.read_text(), content)
    return VOLATILE.sub("", file.read_text()) != VOLATILE.sub("", content)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lesson", nargs="*", help="beginnings of file names (default: every lesson)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a committed file is stale")
    args = parser.parse_args(arguments)
    known = [*lessons(), ONE_FILE]
    chosen = [file for file in known if not args.lesson or file.name.startswith(tuple(args.lesson))]
    if not chosen:
        parser.error(f"no file begins with {' or '.join(args.lesson)}; found {', '.join(file.name for file in known)}")
    outdated = 0
    for lesson in chosen:
        files = render(lesson)
        changed = [file for file, content in files.items() if stale(file, content)]
        for file in changed:
            print(f"{'stale' if args.check else 'written'}: {file.relative_to(ROOT)}")
            if not args.check:
                file.parent.mkdir(exist_ok=True)
                file.write_text(files[file])
        outdated += len(changed)
    if args.check and outdated:
        print("run 'python scripts/render_lessons.py' and commit what it writes", file=sys.stderr)
    return int(args.check and outdated > 0)


if __name__ == "__main__":
    sys.exit(main())
