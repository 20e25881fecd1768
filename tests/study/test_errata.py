"""The errata: the list is complete, each proof can fail, the quiz judges correctly, and the command works."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Callable

import numpy as np
import pexpect
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llama.cli import main
from llama.errors import UsageError
from llama.study.errata import ERRATA, NOTES, find
from llama.study.errata.base import KINDS, Erratum, Number, Quiz, passes
from llama.study.errata.quiz import evaluate, judge
from llama.study.topics import TOPICS
from llama.study.topics import find as find_topic

CLASSES = {
    "A": "E01 E02 E03 E04 E09 E10 E11 E16 E24 E25 E27 E28 E29 E33 E34 E35 E39 E40 E41 E42 E44 E46",
    "B": "E05 E06 E07 E08 E12 E13 E53 E14 E15 E17 E18 E19 E20 E21 E22 E51 E52 E26 E30 E54 E31 E38 E43 E45 E47 E49 E50",
    "C": "E15b E23 E55 E32 E36 E37 E48",
    "OK": " ".join(f"OK{i}" for i in range(1, 13)),
}
IDS = [*(f"E{i:02}" for i in range(1, 16)), "E15b", *(f"E{i}" for i in range(16, 56)), *CLASSES["OK"].split()]
QUIZZED = [id for id in IDS if ERRATA[id].quiz is not None]


# ------------------------------------------------------------------------------------------------------- the entries
def test_every_erratum_is_listed_once_and_in_order() -> None:
    assert list(ERRATA) == IDS
    assert len(ERRATA) == 68
    modules = [__import__(f"llama.study.errata.{note}", fromlist=["ERRATA"]) for note in NOTES]
    assert Counter(erratum.id for module in modules for erratum in module.ERRATA) == Counter(IDS)


def test_the_classes_are_those_of_the_review() -> None:
    for kind, ids in CLASSES.items():
        assert sorted(ids.split()) == sorted(id for id in IDS if ERRATA[id].kind == kind)
    assert set(KINDS) == set(CLASSES)


@pytest.mark.parametrize("id", IDS)
def test_every_entry_has_all_its_texts(id: str) -> None:
    erratum = ERRATA[id]
    for text in (erratum.where, erratum.matter, erratum.printed, erratum.right, erratum.why):
        assert text == text.strip()
        assert text
        assert "  " not in text
    assert erratum.why.endswith(".")
    assert "\n" not in erratum.matter
    assert len(erratum.matter) <= 88  # one line of the list
    assert erratum.where.startswith("note 00") or id == "OK12"


# --------------------------------------------------------------------------------------------------------- the proofs
@pytest.mark.parametrize("id", IDS)
def test_proof(id: str) -> None:
    checks = ERRATA[id].proof()
    assert len(checks) >= 2
    assert [check for check in checks if not check.passed] == []
    assert all(id in check.claim.split() for check in checks)
    assert {type(value) for check in checks for value in (check.computed, check.expected)} <= {bool, int, float, str}
    assert {type(check.passed) for check in checks} == {bool}


@pytest.mark.parametrize("id", IDS)
def test_a_proof_fails_with_the_right_form_as_the_wrong_one(id: str) -> None:
    assert not passes(ERRATA[id].proof(wrong_form=ERRATA[id].right_form))


@pytest.mark.parametrize("id", IDS)
def test_a_proof_fails_with_the_wrong_form_as_the_right_one(id: str) -> None:
    assert not passes(ERRATA[id].proof(right_form=ERRATA[id].wrong_form))


# Numbers measured in the review of the notes: for each, a check must have computed the same number within 1%.
MEASURED = {
    "E01": (1, 0.680),
    "E03": (8, 1e-7),
    "E08": (0.282, 0.591, 27.94, 78.79),
    "E11": (6, 5),
    "E15": (1.15e-4, 1.24e-6, 5.59, 9.17),
    "E15b": (2020, 500),
    "E16": (6.28, 54410),
    "E18": (129600,),
    "E19": (32768,),
    "E20": (40889.94, 47.0),
    "E21": (2.46, 3.91, 9.10, 5.61),
    "E23": (13,),
    "E24": (0.848,),
    "E25": (1.98, 0.326),
    "E29": (2.50e-4, 1.00e-3, 0.0164),
    "E30": (10.0,),
    "E32": (1.1386, 1.2965),
    "E35": (1.1548, 64, 8660, 7.256, 109.3),
    "E37": (0.222,),
    "E41": (0.84,),
    "E42": (0.031623, 13.401),
    "E44": (0.8660, -0.134, -1.8e-5),
    "E49": (-0.100,),
    "E51": (133, 221),
    "E55": (23, 326, 64),
    "OK3": (60611.5,),
    "OK10": (0.969,),
    "OK11": (43200, 129600),
    "OK12": (1.733, 34),
}


@pytest.mark.parametrize("id", MEASURED)
def test_the_checks_compute_the_numbers_of_the_review(id: str) -> None:
    computed = [c.computed for c in ERRATA[id].proof() if isinstance(c.computed, int | float)]
    for number in MEASURED[id]:
        assert any(value == pytest.approx(number, rel=1e-2) for value in computed), number


def test_e45_lowest_frequency_by_width() -> None:
    lowest = {2: 1, 4: 1e-2, 8: 1e-3, 64: 1.33e-4, 512: 1.04e-4}
    for dim, value in lowest.items():
        assert ERRATA["E45"].right_form(dim) == pytest.approx(value, rel=1e-2)


def test_proofs_are_reproducible_and_do_not_change_torchs_state() -> None:
    torch.manual_seed(1)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first = [erratum.proof() for erratum in ERRATA.values()]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert [erratum.proof() for erratum in ERRATA.values()] == first


def test_a_proof_without_checks_does_not_pass() -> None:
    assert not passes(())


def test_find_ignores_case_and_lists_the_known_ids() -> None:
    assert find("e15B") is ERRATA["E15b"]
    assert find("ok3") is ERRATA["OK3"]
    with pytest.raises(UsageError, match="unknown erratum 'E56'; known: E01 to E55, E15b, OK1 to OK12"):
        find("E56")


def test_the_topic_runs_every_proof() -> None:
    assert list(TOPICS)[-1] == "errata"
    report = find_topic("errata").report()
    assert [check.claim for check in report.checks] == IDS
    assert report.passed
    assert sum(row[2] for row in report.tables[0].rows) == 68


# ----------------------------------------------------------------------------------------------------------- the quiz
def quiz_of(id: str) -> Quiz:
    quiz = ERRATA[id].quiz
    assert quiz is not None
    return quiz


def test_enough_errata_have_a_quiz() -> None:
    assert len(QUIZZED) >= 20
    assert {"E01", "E09", "E16", "E24", "E25", "E32", "E33", "E35", "E36", "E41", "E42", "E44", "E45"} <= set(QUIZZED)


@pytest.mark.parametrize("id", QUIZZED)
def test_the_quiz_accepts_its_answer_and_rejects_the_printed_line(id: str) -> None:
    quiz = quiz_of(id)
    for seed in range(10):
        assert judge(quiz, quiz.answer, seed).right
        verdict = judge(quiz, quiz.printed, seed)
        assert not verdict.right
        assert verdict.computed == evaluate(quiz.printed, verdict.values) != verdict.expected
    assert not judge(quiz, f"({quiz.answer}) * 1.0001").right
    assert not judge(quiz, repr(judge(quiz, quiz.printed).expected)).right  # a constant matches only one draw


# equivalent forms of the answers
EQUIVALENT = {
    "E01": "cos(pi/2 - i * exp(-2*t/d * log(10000)))",
    "E02": "(d - 2) / 2",
    "E03": "100 ** (4/d) / 10000",
    "E04": "1 / (g / heads)",
    "E08": "sqrt(2 - 2*cos(m*w))",
    "E09": "(q1*cos(m*theta) - q2*sin(m*theta)) * (k1*cos(n*theta) - k2*sin(n*theta))"
    " + (q1*sin(m*theta) + q2*cos(m*theta)) * (k1*sin(n*theta) + k2*cos(n*theta))",
    "E13": "q2*k2 - -q1*k1",
    "E16": "0.5*d - 1",
    "E17": "exp(p * log(r))",
    "E18": "129600/43200 * a*b / 3",
    "E19": "pos / L_test * L_train",
    "E20": "base * exp(log(s) * d / (d-2))",
    "E21": "exp(2*i*log(s)/(d-2))",
    "E23": "(f - 1)*f + 1",
    "E24": "sin(pos * 100**(-2*i/d))",
    "E25": "sin(pi/2 + pos / 10000**(i/d))",
    "E32": "a * a",
    "E33": "sqrt(x**2 + y**2 - (x*cos(a) - y*sin(a))**2) * (x*sin(a) + y*cos(a)) / sqrt((x*sin(a) + y*cos(a))**2)",
    "E35": "100 ** (4/d)",
    "E36": "(hidden/h) ** 0.5",
    "E41": "d_model * 0.5",
    "E42": "exp(-log(10000) * 2 * i / d)",
    "E44": "0.0001 ** (2*i/d)",
    "E45": "10000 ** (2/d) / 10000",
    "E46": "m*w - n*w + n*w",
    "E49": "sin(theta + pi/2)",
    "E50": "(1/10000) ** (2*i/d)",
    "E52": "1 + m",
    "E53": "j + start",
}


@pytest.mark.parametrize("id", QUIZZED)
def test_the_quiz_accepts_an_equivalent_form_of_the_answer(id: str) -> None:
    for seed in range(5):
        assert judge(quiz_of(id), EQUIVALENT[id], seed).right


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
    """Run `clearllama study errata ..` with bytes as standard input: exit code, stdout, stderr."""

    def run(*args: str, stdin: bytes = b"", topic: tuple[str, ...] = ("errata",)) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        try:
            code = main(["study", *topic, *args])
        except SystemExit as exit:
            code = int(exit.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_list_shows_every_erratum(study: Study) -> None:
    code, out, err = study()
    lines = out.splitlines()
    assert code == 0
    assert lines[-1] == "PASS: 68 of 68"
    assert [line.split()[:3] for line in lines[1:-1]] == [["PASS", id, ERRATA[id].kind] for id in IDS]
    assert all(ERRATA[id].matter in out for id in IDS)
    assert max(map(len, lines)) <= 110
    assert "errata E33" in err
    assert study("-q")[2] == ""


@pytest.mark.parametrize("id", ["E33", next(id for id in IDS if ERRATA[id].quiz is None)])
def test_one_erratum_names_its_quiz_if_it_has_one(study: Study, id: str) -> None:
    code, _, err = study(id)
    assert code == 0
    assert (f"clearllama study errata --quiz {id} asks" in err) == (ERRATA[id].quiz is not None)


def test_the_list_has_a_json_form(study: Study) -> None:
    code, out, _ = study("--json")
    found = json.loads(out)
    assert code == 0
    assert found["passed"] is True
    assert [row["id"] for row in found["errata"]] == IDS
    assert list(found["errata"][0]) == ["id", "class", "where", "matter", "checks", "quiz", "passed"]
    assert sum(row["quiz"] for row in found["errata"]) == len(QUIZZED)


def failing(erratum: Erratum) -> Erratum:
    """The erratum with the printed form as its right form."""
    return Erratum(**{**vars(erratum), "right_form": erratum.wrong_form})


def test_a_failing_proof_gives_exit_code_1(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ERRATA, "_entries", {"E33": failing(ERRATA["E33"]), "E34": ERRATA["E34"]})
    code, out, _ = study()
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["FAIL", "PASS", "FAIL:"]
    assert study("E33")[0] == 1
    assert json.loads(study("--json")[1])["passed"] is False
    assert not find_topic("errata").report().passed


@pytest.mark.parametrize("id", IDS)
def test_one_erratum_fits_on_a_screen(study: Study, id: str) -> None:
    code, out, _ = study(id)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == f"{id}: {ERRATA[id].matter}"
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 110
    for label in ("where", "class", "printed", "right", "why"):
        assert any(line.startswith(f"  {label} ") for line in lines)
    assert "FAIL" not in out
    assert lines[-1].startswith("PASS: ")


@pytest.mark.parametrize("words", [("E33", "--json"), ("--json", "E33"), ("--json", "e33")])
def test_one_erratum_has_a_json_form(study: Study, words: tuple[str, ...]) -> None:
    code, out, _ = study(*words)
    found = json.loads(out)
    assert code == 0
    assert found["id"] == "E33"
    assert found["class"] == "A"
    assert found["printed"] == ERRATA["E33"].printed
    assert found["why"] == ERRATA["E33"].why
    assert len(found["checks"]) == len(ERRATA["E33"].proof())
    assert all(check["passed"] for check in found["checks"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("E99",), "unknown erratum 'E99'"),
        (("--figure", "x.png"), "study errata does not accept --figure"),
        (("--which", "x"), "study errata does not accept --which"),
        (("--context", "0"), "study errata does not accept --context"),
        (("E33", "--rope-theta", "5"), "study errata does not accept --rope-theta"),
        (("--seed", "1"), "--seed needs --quiz"),
        (("E33", "--seed", "1"), "--seed needs --quiz"),
        (("--quiz", "--seed", "-1"), "--seed must be 0 or more"),
        (("--quiz", "--json"), "--quiz is interactive"),
        (("--quiz", "E05"), "E05 has no quiz, its answer is not one expression; entries with one: E01, E02"),
        (("--quiz", "E99"), "unknown erratum 'E99'"),
        (("E33", "--quiz", "E34"), "expected one erratum, found two: E33 and E34"),
        (("E33", "E34"), "unrecognized arguments: E34"),
        (("--json", "E33", "E34"), "unrecognized arguments"),
        (("--nonsense",), "unrecognized arguments: --nonsense"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(study: Study, words: tuple[str, ...], reason: str) -> None:
    code, out, err = study(*words)
    assert code == 2
    assert out == ""
    assert reason in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("topic", "words"),
    [(("example",), ("E33",)), (("example",), ("--quiz",)), (("example",), ("--seed", "1")), ((), ("--quiz",))],
)
def test_arguments_of_errata_are_errors_for_other_topics(
    study: Study, topic: tuple[str, ...], words: tuple[str, ...]
) -> None:
    code, out, err = study(*words, topic=topic)
    assert (code, out) == (2, "")
    assert "belongs to the topic errata" in err


def test_the_list_of_topics_includes_errata(study: Study) -> None:
    assert f"errata       {TOPICS['errata']}" in study(topic=())[1]


def test_the_quiz_counts_right_answers(study: Study) -> None:
    answers = "".join(f"{quiz_of(id).answer}\n" for id in QUIZZED)
    code, out, err = study("--quiz", stdin=answers.encode())
    assert code == 0
    assert err == ""
    assert [line.split()[0] for line in out.splitlines() if line.startswith("E")] == QUIZZED
    assert out.splitlines()[-1] == f"score: {len(QUIZZED)} of {len(QUIZZED)}"
    assert out.count("\n  right ") == len(QUIZZED)


def test_the_quiz_shows_the_answer_after_three_tries(study: Study) -> None:
    code, out, _ = study("--quiz", "E42", stdin=b"exp(2*i/d)*log(10000)\n1\n2\n3\n")
    assert code == 0
    assert out.count("  no (") == 3
    assert "no (3 of 3): at i = " in out
    assert "answer   exp(-(2*i/d) * log(10000))" in out
    assert "why      a^b is exp(b log a)." in out
    assert out.splitlines()[-1] == "score: 0 of 1"


def test_a_rejected_line_of_the_quiz_does_not_count_as_a_try(study: Study) -> None:
    hostile = b"9**9**9**9\n().__class__\n2*\xff\n" + b"x" * 5000 + b"\n"
    code, out, _ = study("E42", "--quiz", stdin=hostile + b"1\n2\n10000**(-2*i/d)\n")
    assert code == 0
    rejected = [line for line in out.splitlines() if line.startswith("  rejected: ")]
    assert len(rejected) == 5  # the long line is read in two pieces
    assert out.count("  no (") == 2
    assert out.splitlines()[-1] == "score: 1 of 1"


def test_the_quiz_moves_on_after_ten_rejected_lines(study: Study) -> None:
    code, out, _ = study("--quiz", "E42", stdin=b"nonsense\n" * 1000)
    assert code == 0
    assert out.count("rejected") == 10
    assert out.splitlines()[-1] == "score: 0 of 1"


def test_the_quiz_ends_at_the_end_of_the_input(study: Study) -> None:
    code, out, _ = study("--quiz")
    assert code == 0
    assert out.splitlines()[-1] == f"score: 0 of 0, {len(QUIZZED)} left"
    code, out, _ = study("--quiz", stdin=f"\n{quiz_of('E02').answer}\n1".encode())
    assert code == 0
    assert "answer   sin(i / 10000**(2*t/d))" in out  # shown for an empty line
    assert out.splitlines()[-1] == f"score: 1 of 2, {len(QUIZZED) - 2} left"


def test_the_seed_of_the_quiz_determines_the_order(study: Study) -> None:
    def order(*words: str) -> list[str]:
        _, out, _ = study("--quiz", *words, stdin=b"\n" * 100)
        return [line.split()[0] for line in out.splitlines() if line.startswith("E")]

    assert order() == QUIZZED
    assert order("--seed", "1") == order("--seed", "1")
    assert order("--seed", "1") != order("--seed", "2") != QUIZZED
    assert sorted(order("--seed", "1")) == sorted(QUIZZED)


def test_the_quiz_needs_standard_input(study: Study, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["study", "errata", "--quiz"]) == 2
    assert "standard input is closed" in capsys.readouterr().err


def test_the_quiz_works_at_a_terminal() -> None:
    child = pexpect.spawn(
        sys.executable, ["-m", "llama", "study", "errata", "--quiz"], encoding="utf-8", timeout=60, dimensions=(50, 120)
    )
    child.expect("E01 \\(1 of ")
    child.expect("> ")
    child.sendline("().__class__")
    child.expect("rejected: ")
    child.expect("> ")
    child.sendline("sin(i / 10000**(2*i/d))")
    child.expect("no \\(1 of 3\\)")
    child.expect("> ")
    child.sendline("sin(i / 10000**(2*t/d))")
    child.expect("right ")
    child.expect("E02 \\(2 of ")
    child.expect("> ")
    child.sendeof()
    child.expect("score: 1 of 1")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
