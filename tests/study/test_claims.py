"""docs/evidence/claims.md: every claim is listed once, and every test, topic and figure that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from llama.study import topics

ROOT = Path(__file__).resolve().parents[2]
# The others read files or other reports, or take long.
QUICK = [name for name in topics.TOPICS if name not in ("ppl", "heads", "bugs", "bands")]
CLAIMS = (ROOT / "docs" / "evidence" / "claims.md").read_text()
COUNTS = {"000": 55, "001": 35, "002": 43, "003": 24, "004": 17}
KINDS = ("law", "test", "demo", "figure", "statement")

ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in CLAIMS.splitlines() if re.match(r"\| \d", line)]
IDS = [row[0] for row in ROWS]


@cache
def functions_in(name: str) -> dict[str, ast.FunctionDef]:
    """The test functions of a file of tests/study."""
    tree = ast.parse((ROOT / "tests" / "study" / name).read_text())
    return {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@cache
def ids_with_a_test() -> frozenset[str]:
    """Every claim id in the name or the docstring of a test in tests/."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= {match.replace("_", "-") for match in re.findall(r"(?<=test_)00\d_\d\d", node.name)}
                found |= set(re.findall(r"\b00\d-\d\d\b", ast.get_docstring(node) or ""))
    return frozenset(found)


def ids_in(text: str) -> set[str]:
    """Claim ids in a text; ranges such as "001-32..35" and "000-46 to 000-50" are expanded."""
    found = set(re.findall(r"\b00\d-\d\d\b", text))
    for note, first, last in re.findall(r"\b(00\d)-(\d\d)(?:\.\.| to 00\d-)(\d\d)\b", text):
        found |= {f"{note}-{i:02d}" for i in range(int(first), int(last) + 1)}
    return found


def test_every_claim_of_every_note_is_listed_once_and_in_order() -> None:
    assert [f"{note}-{i:02d}" for note, count in COUNTS.items() for i in range(1, count + 1)] == IDS
    assert sum(COUNTS.values()) == 174
    for note in COUNTS:
        section = CLAIMS.split(f"## Note {note}\n")[1].split("\n## ")[0]
        assert [row[0] for row in ROWS if row[0] in section] == [id for id in IDS if id.startswith(note)]


def test_every_row_is_complete() -> None:
    for row in ROWS:
        assert len(row) == 4, row
        _, claim, kind, shown = row
        assert len(claim) > 20
        assert claim.endswith((".", ")."))
        assert kind in KINDS, row
        assert (shown == "-") == (kind == "statement"), row


@pytest.mark.parametrize("row", [row for row in ROWS if row[2] in ("law", "test")], ids=lambda row: row[0])
def test_a_law_or_test_has_a_test_with_its_id(row: list[str]) -> None:
    id, _, kind, shown = row
    assert id in ids_with_a_test()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", shown)
    assert named
    for file, name in named:
        assert name in functions_in(file), f"{id}: {file} has no {name}"
        test = functions_in(file)[name]
        assert id.replace("-", "_") in name or id in (ast.get_docstring(test) or "")
        assert any(isinstance(node, ast.Assert) for node in ast.walk(test)) or "assert_close" in ast.dump(test) \
            or "assert_allclose" in ast.dump(test) or "raises" in ast.dump(test)  # fmt: skip
    laws = [name for file, name in named if "LAW" in map(ast.unparse, functions_in(file)[name].decorator_list)]
    assert (kind == "law") == bool(laws)


def test_every_topic_and_figure_exists_and_names_the_claim() -> None:
    sources = {name: ids_in((ROOT / "llama" / "study" / "topics" / f"{name}.py").read_text()) for name in topics.TOPICS}
    for id, _, _, shown in ROWS:
        for part in shown.split("; "):
            match = re.fullmatch(r"`study (\w+)`((?:, figure `\w+`)*)", part)
            if match is None:
                if proof := re.fullmatch(r"`errata/(note00\d)\.py::(E\d\d[a-z]?)`", part):
                    module = import_module(f"tests.study.errata.{proof[1]}")
                    assert proof[2] in [erratum.id for erratum in module.ERRATA], part
                    continue
                assert re.fullmatch(r"-|`test_\w+\.py::test_\w+`", part), part
                continue
            figures = re.findall(r"figure `(\w+)`", match[2])
            assert match[1] in topics.TOPICS, f"{id}: no topic {match[1]}"
            assert set(figures) <= {figure.name for figure in topics.find(match[1]).figures}, f"{id}: {part}"
            assert figures or id in sources[match[1]], f"{id}: the topic {match[1]} does not name it"


def test_every_claim_named_in_the_study_is_listed() -> None:
    """No topic, erratum or lesson names an unknown id, and the list names the topics that have ids, and no others."""
    for path in [*(ROOT / "llama" / "study").rglob("*.py"), *(ROOT / "docs" / "learn").glob("*.md")]:
        assert ids_in(path.read_text()) <= set(IDS), path
    for name in topics.TOPICS:
        named = ids_in((ROOT / "llama" / "study" / "topics" / f"{name}.py").read_text())
        assert (f"`study {name}" in CLAIMS) == (name == "bugs" or bool(named)), name


def test_the_list_names_every_erratum_and_no_unknown_one() -> None:
    from .errata import ERRATA

    named = set(re.findall(r"\b(?:E\d\d[a-z]?|OK\d+)\b", " ".join(row[1] + row[3] for row in ROWS)))
    assert named <= set(ERRATA)
    assert {id for id in ERRATA if id.startswith("E")} <= named


def test_the_last_section_lists_every_erratum_and_every_exercise() -> None:
    from llama.study.bugs import BUGS

    from .errata import ERRATA

    section = CLAIMS.split("\n## Errata\n")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    assert [row[:3] for row in rows[2:]] == [[e.id, e.kind, e.matter] for e in ERRATA.values()]
    exercises = [match for row in rows for match in re.findall(r"^`study bugs ([a-z-]+)`$", row[3])]
    assert sorted(exercises) == sorted(BUGS)


def test_the_word_before_an_erratum_states_its_class() -> None:
    """Wrong is class A, Misleading is B, Incomplete is C, Right is OK."""
    from .errata import ERRATA

    kinds = {"Wrong": "A", "Misleading": "B", "Incomplete": "C", "Right": "OK"}
    for id, claim, *_ in ROWS:
        text, *rest = re.split(r"\*\*([\w ]+):?\*\*", claim)
        assert not re.search(r"\b(?:E\d\d|OK\d)", text), f"{id}: an erratum without a word before it"
        for word, remark in zip(rest[0::2], rest[1::2], strict=True):
            named = re.findall(r"\b(?:E\d\d[a-z]?|OK\d+)\b", remark)
            assert named or word == "Right", f"{id}: {word} without an erratum"
            assert {ERRATA[name].kind for name in named} <= {kinds[word]}, f"{id}: {word}, {named}"


def test_the_list_is_in_english_and_does_not_copy_the_notes() -> None:
    """The only Chinese text is the example sentences; nothing longer is copied from the notes."""
    assert set(re.findall(r"[\u4e00-\u9fff]+", CLAIMS)) == {"狗在追猫", "猫在追狗", "猫被狗追"}


@pytest.mark.parametrize("name", QUICK)
def test_a_check_is_narrow_enough_to_fail(name: str) -> None:
    """A tolerance is at most a fifth of the expected value, or 0.2. A bound is at most 500 times what it bounds."""
    for check in topics.find(name).report().checks:
        if check.tolerance:
            assert check.tolerance <= 0.2 * max(1, abs(complex(check.expected)))
        if check.relation == "<" and check.computed:
            assert check.expected <= 500 * check.computed


def test_figures_have_short_names_and_captions_of_sentences() -> None:
    for name in topics.TOPICS:
        for figure in topics.find(name).figures:
            assert re.fullmatch(r"\w+", figure.name)
            assert re.fullmatch(r"[A-Z].+ .+\.( .+\.)*", figure.caption, re.S), figure.caption
