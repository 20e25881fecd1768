"""Run the lessons of docs/learn; write their results and figures into them, and a notebook of each.

    python scripts/render_lessons.py             every lesson, docs/learn/explain.md and docs/learn/one-file.md
    python scripts/render_lessons.py 04 07       those whose file name begins with 04 or 07
    python scripts/render_lessons.py --check     write nothing; exit code 1 if a committed file is stale

A lesson is a Markdown file. Its ```python blocks are its cells and run in order, in one process and one namespace.
After each block stands what it printed and the figure that its last line returned, between two comments; this part is
replaced by every run. A comment that begins with <!-- check and ends with a line --> holds assertions: they run like a
cell, but no reader sees them, and later blocks don't see their names. A line <!-- figure NAME --> shows a picture of
scripts/lesson_figures.py. Figures go to docs/learn/figures, light and dark, notebooks to docs/learn/notebooks. In
docs/learn/explain.md the output of each `$ clearllama` command is replaced.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import linecache
import re
import shlex
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import annotated
import lesson_figures
import lesson_svg
import torch

from llama import cli
from llama.study.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
LEARN = ROOT / "docs" / "learn"
EXPLAIN, ONE_FILE = LEARN / "explain.md", LEARN / "one-file.md"
OUTPUT = re.compile(r"\n<!-- output -->\n.*?\n<!-- end of output -->\n", re.DOTALL)
OPEN = re.compile(r"\n<!-- open -->\n.*?\n<!-- end of open -->\n", re.DOTALL)
CELL = re.compile(
    r"^```python\n(?P<code>.*?)^```\n|^<!-- check\n(?P<check>.*?)^-->\n|^<!-- figure (?P<figure>\w+) -->\n",
    re.DOTALL | re.MULTILINE,
)
CONSOLE = re.compile(r"(?<=^```console\n)\$ clearllama (.*)\n(?:.*\n)*?(?=^```$)", re.MULTILINE)
VOLATILE = re.compile(r"(?<=difference )\d\.\de[+-]\d\d|(?<=\.py:)\d+")  # rounding errors and line numbers in `explain`

INSTALL = "# once: pip install -e '.[study]' in a checkout, or pip install 'FILE.whl[study]'"


@dataclass
class Cell:
    """One part of a lesson."""

    kind: str  # "markdown", "code", "check": code out of sight, or "figure": a picture of lesson_figures without code
    source: str
    printed: str = ""
    figures: list[Figure] = field(default_factory=list)


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
            cells.append(Cell("figure", match[0], figures=[lesson_figures.FIGURES[name]]))
        else:
            kind = "code" if match["check"] is None else "check"
            cells.append(Cell(kind, match[kind]))
        end = match.end()
    return [*cells, Cell("markdown", text[end:])]


def execute(cells: list[Cell], name: str = "lesson") -> dict[str, Any]:
    """Run the cells in order and fill in their results. Returns the names that the code defined.

    A check sees all names, and code only those of code: a notebook has no checks.
    """
    names: dict[str, Any] = {"__name__": name}
    hidden: dict[str, Any] = {}  # what the checks defined
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the results must not depend on the machine's cores
    torch.set_printoptions(profile="default")
    try:
        for number, cell in enumerate(cell for cell in cells if cell.kind in ("code", "check")):
            file = f"{name}, cell {number}"
            lines = cell.source.splitlines(keepends=True)
            linecache.cache[file] = (len(cell.source), None, lines, file)  # for tracebacks
            tree = ast.parse(cell.source, file)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            with redirect_stdout(io.StringIO()) as out:
                visible = names if cell.kind == "code" else {**hidden, **names}
                exec(compile(tree, file, "exec"), visible)
                value = eval(compile(ast.Expression(last.value), file, "eval"), visible) if last else None
                if isinstance(value, Figure):
                    cell.figures = [value]
                elif value is not None:
                    print(repr(value))
            cell.printed = out.getvalue()
            if cell.kind == "check":
                hidden = visible
    finally:
        torch.set_num_threads(threads)
        torch.set_printoptions(profile="default")
    return names


def markdown(cells: list[Cell], stem: str) -> str:
    """The lesson as it is committed: with its results, and the link to its notebook below the title."""
    fences = {"code": "```python\n{}```\n", "check": "<!-- check\n{}-->\n"}
    parts = []
    for cell in cells:
        parts.append(fences.get(cell.kind, "{}").format(cell.source))
        results = [f"```text\n{cell.printed.rstrip()}\n```\n"] if cell.kind == "code" and cell.printed.strip() else []
        for figure in cell.figures:  # the caption describes it: a longer alt would be read out twice
            results.append(
                "<picture>\n"
                f'  <source media="(prefers-color-scheme: dark)" srcset="figures/{figure.name}-dark.svg">\n'
                f'  <img alt="Figure, described below" src="figures/{figure.name}-light.svg">\n'
                f"</picture>\n\n*{figure.caption}*\n"
            )
        if results:
            parts.append("\n<!-- output -->\n" + "\n".join(results) + "\n<!-- end of output -->\n")
    here = f"[As a notebook](notebooks/{stem}.ipynb)"
    return re.sub(r"\A(# .*\n)", lambda m: f"{m[1]}\n<!-- open -->\n{here}\n<!-- end of open -->\n", "".join(parts))


def notebook(cells: list[Cell]) -> str:
    """The lesson as a notebook without results; its links and pictures are relative to docs/learn/notebooks."""
    made = [_notebook_cell("code", INSTALL)]
    for cell in cells:
        text = cell.source.strip("\n")
        if cell.kind == "figure":
            figure = cell.figures[0]
            text = f"![Figure, described below](../figures/{figure.name}-light.svg)\n\n*{figure.caption}*"
        elif cell.kind == "markdown":
            text = re.sub(r"\]\((?!https?:|#)([^)]*)\)", r"](../\1)", text)
        if text and cell.kind != "check":
            made.append(_notebook_cell("code" if cell.kind == "code" else "markdown", text))
    for number, cell in enumerate(made):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _notebook_cell(kind: str, text: str) -> dict[str, Any]:
    cell = {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell


def console(text: str) -> str:
    """A page with the present output of its commands."""

    def run(match: re.Match[str]) -> str:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()), chdir(ROOT):
            if code := cli.main(shlex.split(match[1])):
                raise RuntimeError(f"'clearllama {match[1]}' ended with exit code {code}")
        return f"$ clearllama {match[1]}\n{out.getvalue()}"

    return CONSOLE.sub(run, text)


def render(lesson: Path) -> dict[Path, str]:
    """Run a lesson or another page; every file that belongs to it, with its content."""
    if lesson == EXPLAIN:
        return {EXPLAIN: console(EXPLAIN.read_text())}
    if lesson == ONE_FILE:
        return {ONE_FILE: annotated.annotated(source(ONE_FILE.read_text()), annotated.recorded())}
    cells = parse(lesson.read_text())
    execute(cells, lesson.stem)
    files = {lesson: markdown(cells, lesson.stem), LEARN / "notebooks" / f"{lesson.stem}.ipynb": notebook(cells)}
    for figure in (figure for cell in cells for figure in cell.figures):
        drawn = lesson_svg.light(figure)
        files[LEARN / "figures" / f"{figure.name}-light.svg"] = drawn
        files[LEARN / "figures" / f"{figure.name}-dark.svg"] = lesson_svg.dark(drawn)
    return files


def stale(file: Path, content: str) -> bool:
    """Whether a committed file differs: by its text, but for VOLATILE, or a figure visibly."""
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
    known = [*lessons(), EXPLAIN, ONE_FILE]
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
