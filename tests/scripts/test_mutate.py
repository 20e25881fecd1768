"""scripts/mutate.py: mutants change one place, each kind occurs, and a test that fails is found."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from . import mutate

SOURCE = '''"""Docstring 1."""

from __future__ import annotations

import sys

LIMIT: int = 3
__all__ = ["f"]


@decorated(1)
def f(a: int = 1, b: str = "two words") -> int:
    """Docstring 2."""
    if a < LIMIT and not b:
        print("text", a)
        raise ValueError("text", 5)
    total = a + 1
    total -= 2
    return min(total, a) if g("key", 1.5) else sum(x for x in (a, 7) if x != 0)
'''


def found(source: str) -> list[tuple[str, str]]:
    """The kind of each mutant, and the line that it changes."""
    root = source.encode()
    pairs = []
    for mutant in mutate.Places("x.py", root).found:
        _, old, new = mutant.key(root).split(" | ", 2)
        pairs.append((mutant.kind, f"{old} -> {new}"))
        assert ast.dump(ast.parse(mutant.apply(root))) != ast.dump(ast.parse(root))
    return pairs


def test_each_kind_of_mutation_is_made() -> None:
    pairs = found(SOURCE)
    for kind, change in (
        ("constant", "LIMIT: int = 3 -> LIMIT: int = 4"),
        ("statement", "LIMIT: int = 3 -> pass"),
        ("compare", "if a < LIMIT and not b: -> if (a <= LIMIT) and not b:"),
        ("boolean", "if a < LIMIT and not b: -> if (a < LIMIT or not b):"),
        ("not", "if a < LIMIT and not b: -> if a < LIMIT and (b):"),
        ("condition", "if a < LIMIT and not b: -> if (not (a < LIMIT and (not b))):"),
        ("statement", 'raise ValueError("text", 5) -> pass'),
        ("arithmetic", "total = a + 1 -> total = (a - 1)"),
        ("arithmetic", "total -= 2 -> total += 2"),
    ):  # fmt: skip
        assert any(pair[0] == kind and pair[1].startswith(change) for pair in pairs), change
    changed = [change.partition(" -> ")[2] for _, change in pairs]
    assert any("(max(total, a))" in change for change in changed)
    assert any("(min(a, total))" in change for change in changed)
    assert any("g('keyx'" in change.replace('"', "'") for change in changed)
    assert "return None" in changed


def test_texts_annotations_decorators_and_imports_are_not_mutated() -> None:
    for _, change in found(SOURCE):
        before, _, after = change.partition(" -> ")
        assert "Docstring" not in before
        assert "import" not in before
        assert "decorated" not in before
        assert "__all__" not in before
        assert "textx" not in after
        assert "wordsx" not in after


def test_the_package_has_mutants_of_every_kind_and_a_seed_repeats_its_draw() -> None:
    mutants = mutate.places(mutate.ROOT, ["llama/sampling.py"])
    one, two, other = (mutate.draw(mutants, mutate.ROOT, 9, seed) for seed in (1, 1, 2))
    assert one == two != other
    assert len({(mutant.start, mutant.file) for mutant in one}) == 9


def test_wilson_interval() -> None:
    low, high = mutate.wilson(92, 100)
    assert (low, high) == (pytest.approx(0.8501, abs=1e-3), pytest.approx(0.9590, abs=1e-3))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.slow  # a process with pytest
def test_the_test_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import time\n\ndef test_a():\n    pass\n\ndef test_b():\n    assert 0\n\ndef test_c():\n    time.sleep(99)\n"
    )
    tests = [f"test_x.py::test_{name}" for name in "abc"]
    assert mutate.run_tests(tmp_path, tests[:1], 60) is None
    assert mutate.run_tests(tmp_path, tests[:2], 60) == tests[1]
    assert mutate.run_tests(tmp_path, tests[2:], 3) == "time"
