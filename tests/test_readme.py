"""README.md: short, its commands parse, its numbers are those of their sources."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PERFORMANCE = (ROOT / "docs" / "evidence" / "performance.md").read_text()
DECODER = ("config", "rope_scaling", "rope", "attention", "cache", "model", "sampling", "generate")


def lines(*names: str) -> int:
    return sum(len((ROOT / "llama" / f"{name}.py").read_text().splitlines()) for name in names)


def table(text: str, title: str) -> list[list[str]]:
    """The rows below the table's header, each as a list of cells."""
    rows = text[text.index(title) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def speeds(page: str) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """Processor and model of each row of the table of speeds, and its numbers."""
    processor = ""
    for name, model, *numbers in table(page, "| processor | model | decode"):
        processor = name or processor
        yield (processor, model), numbers


def test_it_is_short_and_shows_the_two_commands_that_ci_runs() -> None:
    assert len(README.splitlines()) <= 110
    assert len(README.split()) <= 700
    assert re.findall(r"^pip install -e .* && .*", README, re.MULTILINE) == [
        'pip install -e . && clearllama generate "What is the capital of Japan?"',
        "pip install -e '.[test]' && pytest",
    ]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_every_link_and_picture_exists(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    links = re.findall(r"(?:\]\(|srcset=\"|src=\"|href=\")(?!https?:)([^)\"\s]+)", text)
    assert not [link for link in links if not (ROOT / link.partition("#")[0]).exists()]


@pytest.mark.parametrize("command", re.findall(r"^clearllama [a-z].*", README, re.MULTILINE))
def test_its_commands_parse(command: str) -> None:
    cli.build_parser().parse_args(shlex.split(command, comments=True)[1:])


def test_its_counts_are_those_of_the_files() -> None:
    assert f"eight files in `llama/`, {lines(*DECODER):,} lines in all; `model.py` has {lines('model')}." in README
    one_file = (ROOT / "scripts" / "one_file.py").read_text()
    assert f"(scripts/one_file.py) is a whole LLaMA in {len(one_file.splitlines())} lines" in README
    assert re.findall(r"```python\n(def .*?)```", README, re.DOTALL)[0] in one_file
    assert len(list((ROOT / "docs" / "learn").glob("[0-9][0-9]-*.md"))) == 12
    assert "twelve lessons" in README


def test_its_speeds_are_those_of_the_page_on_performance() -> None:
    measured, quoted = (dict(speeds(page)) for page in (PERFORMANCE, README))
    assert quoted
    assert quoted.items() <= measured.items()
    for page in (README, PERFORMANCE):
        assert re.search(r"1\.37 for greedy and\s1\.65 for sampled tokens", page)
    assert re.search(r"In\sbfloat16, it is 0\.94–1\.02 \(AVX-512\)", README)
    assert "| bfloat16 | 11.1 (0.94–1.02) |" in PERFORMANCE
