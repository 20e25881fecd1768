"""README.md: short, its commands parse, its numbers are those of their sources, its pictures are the present ones."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from llama import cli

from .scripts import lesson_svg, readme_pictures

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
GENERATE = (ROOT / "llama" / "cli" / "generate.py").read_text()
DECODER = ("config", "rope_scaling", "rope", "attention", "cache", "model", "sampling", "generate")


def lines(*names: str) -> int:
    return sum(len((ROOT / "llama" / f"{name}.py").read_text().splitlines()) for name in names)


def table(text: str, title: str) -> list[list[str]]:
    """The rows below the table's header, each as a list of cells."""
    rows = text[text.index(title) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_it_is_short_and_shows_the_two_commands_that_ci_runs() -> None:
    assert len(README.splitlines()) <= 170
    assert 'pip install -e . && clearllama generate "What is the capital of Japan?"' in README
    assert "pip install -e '.[test]' && pytest" in README
    assert len(re.findall(r"^pip install -e .* && ", README, re.MULTILINE)) == 2


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_every_link_and_picture_exists(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    links = re.findall(r"(?:\]\(|srcset=\"|src=\"|href=\")(?!https?:)([^)\"\s]+)", text)
    assert not [link for link in links if not (ROOT / link.partition("#")[0]).exists()]


def commands() -> list[str]:
    blocks = "".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
    return re.findall(r"\bclearllama [a-z].*", blocks)


@pytest.mark.parametrize("command", commands())
def test_its_commands_parse(command: str) -> None:
    cli.build_parser().parse_args(shlex.split(command, comments=True)[1:])


def test_it_names_every_command() -> None:
    (row,) = re.findall(r"^\| commands \| ([\w, ]+)\.", README, re.MULTILINE)
    assert row.split(", ") == list(cli.COMMANDS)


def test_its_counts_are_those_of_the_files() -> None:
    assert f"eight files, {lines(*DECODER):,} lines in all, {lines('model')} of them in `model.py`" in README
    claims = re.findall(r"^\| \d{3}-", (ROOT / "docs" / "evidence" / "claims.md").read_text(), re.MULTILINE)
    assert f"**{len(claims)}** claims" in README
    assert len(list((ROOT / "docs" / "learn").glob("[0-9][0-9]-*.md"))) == 10
    assert "ten lessons" in README


def test_its_speeds_are_rows_of_the_page_on_performance() -> None:
    source = table((ROOT / "docs/evidence/performance.md").read_text(), "| model, weights | engine |")
    speeds: dict[str, dict[str, str]] = {}
    for model, engine, decode, *_ in source:
        speeds[model or list(speeds)[-1]] = {**speeds.get(model or list(speeds)[-1], {}), engine.split(",")[0]: decode}
    engines = ("clearllama `--compile`", "llama.cpp", "transformers", "OpenVINO")
    rows = table(README, "| model, weights | clearllama")
    assert rows == [[model, *(found.get(engine, "") for engine in engines)] for model, found in speeds.items()]


def test_its_picture_of_memory_is_what_plan_computes() -> None:
    data = readme_pictures.memory_data()
    totals = data["weights"] + data["kv_cache"] + data["activations"]
    words = ", ".join(f"{name} {total:.1f} GB" for name, total in zip(data["format"], totals, strict=True))
    assert f"tokens on one GPU: {words}." in README
    drawn = lesson_svg.light(readme_pictures.MEMORY)
    assert lesson_svg.same(drawn, (ROOT / "docs" / "pictures" / "memory-light.svg").read_text())
    assert lesson_svg.same(lesson_svg.dark(drawn), (ROOT / "docs" / "pictures" / "memory-dark.svg").read_text())


def test_the_recorded_runs_are_of_the_present_questions_and_messages() -> None:
    shown = re.sub(r"<[^>]*>", "\n", (ROOT / "docs" / "pictures" / "generate.svg").read_text())
    assert [line for line in shown.splitlines() if line.startswith("$")] == [
        f'$ clearllama generate "{question}"' for question in readme_pictures.QUESTIONS
    ]
    message = next(line for line in shown.splitlines() if "chat template" in line).removeprefix("clearllama: ")
    for part in ("the prompt is one user message in", "(--raw continues it as plain text)"):
        assert part in message
        assert part in GENERATE
