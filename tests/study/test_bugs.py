"""The exercises: each line and its evidence, the quiz judges correctly, and the command works."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llama.cli import main
from llama.errors import UsageError
from llama.study.bugs import BUGS, THEMES, find, number, theme
from llama.study.bugs.quiz import Number, evaluate, judge
from llama.study.topics import TOPICS
from llama.study.topics import find as find_topic

NAMES = list(BUGS)


# ------------------------------------------------------------------------------------------------------ the exercises
def test_the_exercises_are_in_the_order_of_the_themes() -> None:
    assert len(NAMES) == 27
    assert [bug.name for bugs in BUGS.themes.values() for bug in bugs] == NAMES
    assert list(BUGS.themes) == list(THEMES.values())
    assert [theme(bug) for bug in BUGS.values()] == [title for title, bugs in BUGS.themes.items() for _ in bugs]


@pytest.mark.parametrize("name", NAMES)
def test_an_exercise_has_all_its_texts(name: str) -> None:
    bug = BUGS[name]
    assert re.fullmatch(r"[a-z-]{4,16}", name)
    assert len(bug.code) <= 85
    assert bug.predict.endswith("?")
    assert bug.why.endswith(".")
    for text in (bug.line, bug.predict, bug.ask, bug.why):
        assert text == text.strip()
        assert "  " not in text.replace("  # ", " # ")
    assert bug.wrong != bug.right
    assert bug.right not in f"{bug.predict} {bug.ask}"  # the exercise does not state its repair


@pytest.mark.parametrize("name", NAMES)
def test_an_exercise_needs_no_other_text(name: str) -> None:
    """No ids and no mention of notes: a reader has only what the exercise states."""
    bug = BUGS[name]
    shown = " ".join([bug.line, bug.predict, bug.ask, bug.why, *(what for what, *_ in bug.evidence())])
    assert not re.search(r"\b(E\d\d|OK\d|\d{3}-\d\d|[Nn]otes?)\b", shown)


# For each exercise: numbers of its evidence by the wrong line and by the right one, measured or derived elsewhere.
EVIDENCE: dict[str, list[tuple[Any, Any]]] = {
    "exponent": [(1, 32), (3.16e-11, 2.0)],
    "step": [(math.sin(1), math.sin(1)), (math.sin(0.01), math.sin(0.1)), (1e-4, 0.01), (1e-6, 1e-3)],
    "div-term": [("RuntimeError", 0.0), (0.0, 0.0), (0.84115, 0.0)],
    "power": [(math.log(10000), 1.0), (10.4367, 0.316228), (13.401, 0.0316228)],
    "first-axis": [(0.0, math.pi / 2), (0.1, -0.1)],
    "how-many": [(8, 4), (1e-7, 1e-3)],
    "pair-index": [(10, 1), (1, 0.1), (0.1, 0.01), (0.01, 0.001)],
    "slowest": [(6.28319, 54410.1), (325.949, 0.0376400)],
    "falling": [(0.984129, 0.865964), (-0.0158712, -1.78740e-5), (1, 32)],
    "lowest": [(1e-4, 1e-3), (1e-4, 1.33352e-4), (1e-4, 1.03663e-4)],
    "radix": [(7.25571, 1.15478), (54.2228, 3.93750)],
    "speed": [(0.0, 1.0), (1.0, 1.0), (5.0, 1.0)],
    "clock-base": [(60, 60), (234.892, 3600), (919.571, 216000)],
    "last-row": [(-1.1 * math.cos(0.003) - 1.1 * math.sin(0.003), -1.1 * math.cos(0.003) + 0.8 * math.sin(0.003))],
    "moved": [(0.1, 0.0999583), (0.6, 0.591040), (6.0, 0.282240), (44.0, 0.0177026)],
    "kv-heads": [(512, 1024), (8, 4)],
    "own-key": [("0, 1, 2, 3, 4", "1, 2, 3, 4, 5"), (5, 0)],
    "cached-row": [(0, 7), (1.0, math.cos(7)), (math.cos(6), math.cos(1))],
    "twice": [(1 + 0.1 * math.log(4), (1 + 0.1 * math.log(4)) ** 2)],
    "interpolation": [(4, 0.25), (400, 25), (32768, 2048)],
    "new-base": [(500000, 40889.94), (47.0353, 4)],
    "middle-pairs": [(1, 1), (1, 4 ** (20 / 63)), (1, 4 ** (41 / 63)), (1, 4 ** (62 / 63)), (22.4331, 9.10066)],
    "dynamic-factor": [(2, 3), (4, 13), (8, 57)],
}


@pytest.mark.parametrize("name", EVIDENCE)
def test_the_evidence_has_the_expected_numbers(name: str) -> None:
    rows = BUGS[name].evidence()
    for (_, *found), expected in zip(rows, EVIDENCE[name], strict=name != "exponent" and name != "last-row"):
        for value, other in zip(found, expected, strict=True):
            assert value == (other if isinstance(other, str) else pytest.approx(other, rel=2e-3, abs=1e-12))


def test_the_evidence_of_the_other_exercises() -> None:
    low, high, residual = BUGS["cosine"].evidence()
    assert low[1] < 0.02 < 0.999 < low[2]
    assert high[1] > 1.98 > 1.001 > high[2]
    assert residual[1] > 0.1 > 1e-9 > residual[2]
    assert BUGS["exponent"].evidence()[2][1] > 0.6 > 1e-9 > BUGS["exponent"].evidence()[2][2]
    here, ahead, behind = BUGS["direction"].evidence()
    assert here[1] == pytest.approx(here[2])
    assert ahead[1] == pytest.approx(behind[2])  # the score of the mirrored distance
    assert behind[1] == pytest.approx(ahead[2]) != pytest.approx(ahead[1], abs=1)
    first, shifted = BUGS["complex-product"].evidence()
    assert first[2] == pytest.approx(shifted[2])
    assert abs(first[1] - shifted[1]) > 1
    assert [row[2] for row in BUGS["last-row"].evidence()[1::2]] == [1.0, 1.0]
    assert abs(BUGS["last-row"].evidence()[3][1] - 1) > 0.05
    variance, largest = BUGS["divisor"].evidence()
    assert variance[1] == pytest.approx(1 / 8, abs=0.005)
    assert variance[2] == pytest.approx(1, abs=0.03)
    assert largest[2] > 3 * largest[1]


def test_the_evidence_is_reproducible_and_does_not_change_torchs_state() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = [list(bug.evidence()) for bug in BUGS.values()]
    assert torch.equal(torch.get_rng_state(), state)
    assert [list(bug.evidence()) for bug in BUGS.values()] == first


def test_the_topic_checks_every_exercise() -> None:
    assert list(TOPICS)[-1] == "bugs"
    report = find_topic("bugs").report()
    assert find_topic("errata") is find_topic("bugs")
    assert report.passed
    assert len(report.checks) == 3 * len(NAMES)
    assert list(dict.fromkeys(check.what.split(":")[0] for check in report.checks)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_checks_of_an_exercise_fail_if_its_lines_are_exchanged(name: str) -> None:
    bug = BUGS[name]
    assert all(check.passed for check in bug.checks())
    exchanged = replace(bug, wrong=bug.right, right=bug.wrong, evidence=lambda: [("same", 1.0, 1.0)])
    assert [check.passed for check in exchanged.checks()] == [False, False, False]


def test_find_accepts_a_number_or_a_name() -> None:
    assert find("1") is find("EXPONENT") is BUGS["exponent"]
    assert number(find("27")) == 27
    for word in ("0", "28", "-1", "E33", "", "1.0", "9999", "²"):
        with pytest.raises(UsageError, match=r"^unknown exercise '.*'; expected 1 to 27 or a name: exponent, step, "):
            find(word)


# ----------------------------------------------------------------------------------------------------------- the quiz
@pytest.mark.parametrize("name", NAMES)
def test_the_quiz_accepts_its_answer_and_rejects_the_wrong_line(name: str) -> None:
    bug = BUGS[name]
    for seed in range(10):
        assert judge(bug, bug.right, seed).right
        verdict = judge(bug, bug.wrong, seed)
        assert not verdict.right
        assert verdict.computed == evaluate(bug.wrong, verdict.values) != verdict.expected
    assert not judge(bug, f"({bug.right}) * 1.0001").right
    assert not judge(bug, repr(judge(bug, bug.wrong).expected)).right  # a constant matches only one draw


# equivalent forms of the answers
EQUIVALENT = {
    "exponent": "cos(pi/2 - pos * exp(-2*i/d * log(10000)))",
    "pair-index": "exp(-2*i/d * log(10000))",
    "how-many": "theta ** (2/d) / theta",
    "kv-heads": "1 / (g / heads)",
    "moved": "sqrt(2 - 2*cos(m*w))",
    "direction": "(q1*cos(m*w) - q2*sin(m*w)) * (k1*cos(n*w) - k2*sin(n*w))"
    " + (q1*sin(m*w) + q2*cos(m*w)) * (k1*sin(n*w) + k2*cos(n*w))",
    "complex-product": "q2*k2 - -q1*k1",
    "slowest": "0.5*d - 1",
    "clock-base": "exp(p * log(r))",
    "interpolation": "pos / L_test * L_train",
    "new-base": "theta * exp(log(s) * d / (d-2))",
    "middle-pairs": "exp(2*i*log(s)/(d-2))",
    "dynamic-factor": "(f - 1)*f + 1",
    "step": "sin(pos * 100**(-2*i/d))",
    "cosine": "sin(pi/2 + pos / 10000**(i/d))",
    "twice": "a * a",
    "last-row": "sqrt(x**2 + y**2 - (x*cos(a) - y*sin(a))**2) * (x*sin(a) + y*cos(a)) / sqrt((x*sin(a) + y*cos(a))**2)",
    "radix": "100 ** (4/d)",
    "divisor": "(hidden/h) ** 0.5",
    "div-term": "d_model * 0.5",
    "power": "exp(-log(10000) * 2 * i / d)",
    "falling": "0.0001 ** (2*i/d)",
    "lowest": "10000 ** (2/d) / 10000",
    "first-axis": "sin(a + pi/2)",
    "speed": "(1/10000) ** (2*i/d)",
    "own-key": "1 + m",
    "cached-row": "j + start",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_quiz_accepts_an_equivalent_form_of_the_answer(name: str) -> None:
    for seed in range(5):
        assert judge(BUGS[name], EQUIVALENT[name], seed).right


def test_draws_cover_the_complete_range() -> None:
    rng = np.random.default_rng(0)
    assert {Number("", 2, 8, 2).draw(rng) for _ in range(100)} == {2, 4, 6, 8}
    assert all(2 <= Number("", 2, 8).draw(rng) <= 8 for _ in range(100))


# ------------------------------------------------------------------------------------------------------ the calculator
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2*3 - 4/8", 6.5),
        ("-2**2", -4),
        ("+(-2)**2", 4),
        ("2**-1", 0.5),
        ("7 % 4", 3),
        (" sqrt(16) + log(exp(2)) ", 6),
        ("sin(pi/2) + cos(0)", 2),
        ("d**2 / x_1", 4.5),
        ("1e3", 1000),
        ("0x10", 16),
        ("-" * 30 + "1", 1),
    ],
)
def test_the_calculator_evaluates_arithmetic(text: str, value: float) -> None:
    assert evaluate(text, {"d": 3.0, "x_1": 2.0}) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("9**9**9**9", "exceeds 1e\\+100"),
        ("9" * 150, "exceeds 1e\\+100"),
        ("1e999", "exceeds 1e\\+100"),
        ("1e999 - 1e999", "exceeds 1e\\+100"),
        ("exp(1000)", "exceeds 1e\\+100"),
        ("10.0**60 * 10**60", "exceeds 1e\\+100"),
        ("().__class__", "contains something else"),
        ("().__class__.__bases__[0].__subclasses__()", "contains something else"),
        ("__import__('os').system('true')", "contains something else"),
        ("sin.__call__(1)", "contains something else"),
        ("(lambda: 1)()", "contains something else"),
        ("open('x')", "contains something else"),
        ("abs(1)", "contains something else"),
        ("sin(1, 2)", "contains something else"),
        ("sin(x=1)", "contains something else"),
        ("sin(*(1,))", "contains something else"),
        ("'1' * 3", "contains something else"),
        ("b'1'", "contains something else"),
        ("1j", "contains something else"),
        ("True", "contains something else"),
        ("None", "contains something else"),
        ("...", "contains something else"),
        ("[1][0]", "contains something else"),
        ("1 < 2", "contains something else"),
        ("1 if 1 else 2", "contains something else"),
        ("not 1", "contains something else"),
        ("~1", "contains something else"),
        ("7 // 2", "contains something else"),
        ("1 << 2", "contains something else"),
        ("(d := 3)", "contains something else"),
        ("f'{d}'", "contains something else"),
        ("2 ^ 3", "power is written \\*\\*"),
        ("sin", "unknown name 'sin'; known: pi, d"),
        ("q", "unknown name 'q'"),
        ("θ", "unknown name 'θ'"),
        ("1/0", "divides by zero"),
        ("1 % 0", "divides by zero"),
        ("0**-1", "divides by zero"),
        ("sqrt(0-1)", "root of a negative number"),
        ("log(0)", "logarithm of a number that is not positive"),
        ("(-8)**0.5", "not a real number"),
        ("2t", "write a product as 2\\*t"),
        ("w = 3", "not an expression"),
        ("1; 2", "not an expression"),
        ("1 +", "not an expression"),
        ("", "not an expression"),
        ("\0", "not an expression"),
        ("\ud800", "not an expression"),
        ("(" * 99 + "1" + ")" * 99, None),
        ("-" * 60 + "1", "nested 40 levels"),
        ("sin(" * 45 + "1" + ")" * 45, "200 characters|nested 40 levels"),
        ("1+" * 60 + "1", "nested 40 levels"),
        ("1" + " " * 300 + "+ 1", "200 characters"),
        ("(" * 5000, "200 characters"),
    ],
)
def test_the_calculator_rejects(text: str, reason: str | None) -> None:
    if reason is None:  # parentheses do not add a level
        assert evaluate(text, {}) == 1
        return
    with pytest.raises(UsageError, match=reason) as error:
        evaluate(text, {"d": 3.0})
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 300


@given(st.text(max_size=60) | st.text("0123456789.+-*/%()e dsincoxplgrt_,'[]", max_size=60))
def test_any_text_is_a_finite_number_or_a_one_line_error(text: str) -> None:
    try:
        output = repr(evaluate(text, {"d": 3.0}))
    except UsageError as error:
        output = f"1 {error}"
    assert len(output.splitlines()) == 1
    assert abs(float(output.split()[0])) <= 1e100


# --------------------------------------------------------------------------------------------------------- the command
Study = Callable[..., tuple[int, str, str]]


@pytest.fixture
def study(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Study:
    """Run `clearllama study ..` with a text as standard input: exit code, stdout, stderr."""

    def run(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            code = main(["study", *args])
        except SystemExit as exit:
            code = int(exit.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_list_and_its_checks(study: Study) -> None:
    code, out, err = study("bugs")
    listed = [line.split()[:2] for line in out.splitlines() if line.startswith(" ")]
    assert (code, listed) == (0, [[str(number(bug)), bug.name] for bug in BUGS.values()])
    assert [line for line in out.splitlines() if not line.startswith(" ")] == list(BUGS.themes)
    assert "clearllama study bugs 1" in err
    code, out, _ = study("bugs", "--checks")
    assert (code, out.count("\n  PASS  ")) == (0, 3 * len(NAMES))
    found = json.loads(study("bugs", "--json")[1])
    assert [row["name"] for row in found["exercises"]] == NAMES
    assert found["exercises"][0]["evidence"][0] == {"what": "different sine columns, of 32", "line": 1, "right": 32}


def test_one_exercise_has_a_text_and_a_json_form(study: Study) -> None:
    code, out, err = study("bugs", "own-key", "--checks")
    assert code == 0
    labels = [line.split()[0] for line in out.splitlines() if re.match("  [a-z]", line)]
    assert labels == ["line", "predict", "evidence", "find", "repair", "why"]
    assert out.count("\n  PASS  ") == 3
    assert "clearllama study bugs own-key --quiz" in err
    found = json.loads(study("bugs", "21", "--json")[1])
    assert (found["name"], found["repair"], found["passed"], len(found["checks"])) == ("own-key", "m + 1", True, 3)
    keys = ["number", "name", "theme", "line", "predict", "ask", "names", "evidence", "repair", "why"]
    assert list(found)[: len(keys)] == keys


def test_a_failing_check_gives_exit_code_1(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = replace(BUGS["radix"], right=BUGS["radix"].wrong)
    monkeypatch.setattr(BUGS, "themes", {"One theme": (failing,)})
    monkeypatch.setattr(BUGS, "_bugs", {"radix": failing})
    code, out, _ = study("bugs", "radix")
    assert (code, "  FAIL  right line" in out) == (1, True)
    assert study("bugs", "--checks")[0] == 1
    assert json.loads(study("bugs", "--json")[1])["passed"] is False


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("bugs", "E99"), "unknown exercise 'E99'"),
        (("bugs", "--context", "0"), "study bugs does not accept --context"),
        (("bugs", "step", "--seed", "1"), "--seed needs --quiz"),
        (("bugs", "--quiz", "--json"), "--quiz does not accept --json"),
        (("bugs", "step", "speed"), "unrecognized arguments: speed"),
        (("example", "step"), "belong to the topic bugs"),
        (("example", "--seed", "1"), "belong to the topic bugs"),
        (("--quiz",), "belong to the topic bugs"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(study: Study, words: tuple[str, ...], reason: str) -> None:
    code, out, err = study(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert reason in err


def test_the_quiz_shows_the_repair_after_the_prediction(study: Study) -> None:
    def asked(*words: str, stdin: str) -> list[str]:
        return re.findall(r"^bugs \d+ of \d+, ([a-z-]+): ", study("bugs", "--quiz", *words, stdin=stdin)[1], re.M)

    everything = "no idea\n" * len(NAMES)
    assert asked(stdin=everything) == NAMES
    assert asked(stdin="\n") == NAMES[:2]  # the end of the input ends the quiz
    shuffled = asked("--seed", "1", stdin=everything)
    assert shuffled == asked("--seed", "1", stdin=everything) != asked("--seed", "2", stdin=everything) != NAMES
    assert sorted(shuffled) == sorted(NAMES)
    assert "RuntimeError" not in study("bugs", "div-term", "--quiz")[1]
    out = study("bugs", "div-term", "--quiz", stdin="it fails\n")[1]
    assert "RuntimeError" in out
    assert "d_model / 2" in out
