"""The errata of the notes: the list is complete, each proof can fail, and the numbers are those of the review."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from .errata import ERRATA, NOTES
from .errata.base import KINDS, passes

CLASSES = {
    "A": "E01 E02 E03 E04 E09 E10 E11 E16 E24 E25 E27 E28 E29 E33 E34 E35 E39 E40 E41 E42 E44 E46",
    "B": "E05 E06 E07 E08 E12 E13 E53 E14 E15 E17 E18 E19 E20 E21 E22 E51 E52 E26 E30 E54 E31 E38 E43 E45 E47 E49 E50",
    "C": "E15b E23 E55 E32 E36 E37 E48",
    "OK": " ".join(f"OK{i}" for i in range(1, 13)),
}
IDS = [*(f"E{i:02}" for i in range(1, 16)), "E15b", *(f"E{i}" for i in range(16, 56)), *CLASSES["OK"].split()]


# ------------------------------------------------------------------------------------------------------- the entries
def test_every_erratum_is_listed_once_and_in_order() -> None:
    assert list(ERRATA) == IDS
    assert len(ERRATA) == 68
    modules = [__import__(f"tests.study.errata.{note}", fromlist=["ERRATA"]) for note in NOTES]
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


def test_the_number_of_checks() -> None:
    """A check that is deleted must be missed."""
    assert sum(len(erratum.proof()) for erratum in ERRATA.values()) == 293


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
