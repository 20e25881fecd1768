"""The common bugs: the evidence of each has the numbers computed by hand, and the command shows it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llama.cli import main
from llama.loader import load_model
from llama.study.bugs import BUGS
from llama.study.perplexity import tiny_folder

pytestmark = pytest.mark.usefixtures("one_thread")
LN4 = 1 + 0.1 * math.log(4)

# For each bug: its rows of evidence, by the wrong line and by the right one; None where the number is random.
EVIDENCE: dict[str, list[tuple[Any, Any]]] = {
    "step": [(math.sin(1), math.sin(1)), (math.sin(0.01), math.sin(0.1)), (1e-4, 0.01), (1e-6, 1e-3)],
    "direction": [(None, None)] * 3,
    "pairs": [(None, None)] * 4,
    "angles": [(2, 16), (4000, 4007), (None, 0.0)],
    "values": [(None, 0.0)],
    "quarter": [(64, 256), (1e6 ** (-126 / 128), 1e6 ** (-126 / 512)), (None, None)],
    "divisor": [(1 / 8, 1.0), (None, None)],
    "own-key": [("0, 1, 2, 3, 4", "1, 2, 3, 4, 5"), (5, 0)],
    "cached-row": [(0, 7), (1.0, math.cos(7)), (math.cos(6), math.cos(1))],
    "cached-mask": [("1, 2, 3", "1, 2, 3"), ("1", "8"), ("1, 2, 3", "8, 9, 10")],
    "new-base": [(500000, 10000 * 4 ** (128 / 126)), (50 ** (126 / 128), 4)],
    "twice": [(LN4, LN4**2)],
    "windows": [((1 + 0.1 * math.log(8)) ** 2, 1), (8, 1), (None, None)],
}


@pytest.mark.parametrize("name", BUGS)
def test_the_evidence_has_the_numbers_computed_by_hand(name: str) -> None:
    rows = list(BUGS[name].evidence())
    assert any(wrong != right for _, wrong, right in rows)
    assert rows == list(BUGS[name].evidence())
    for (what, *found), expected in zip(rows, EVIDENCE[name], strict=True):
        for value, other in zip(found, expected, strict=True):
            if other is not None:
                near = other if isinstance(other, str) else pytest.approx(other, rel=0.02, abs=1e-3)
                assert value == near, what


def test_laws_of_the_random_evidence() -> None:
    here, ahead, behind = BUGS["direction"].evidence()
    assert here[1] == here[2]
    assert ahead[1:] == behind[:0:-1]  # the score of the mirrored distance
    same, _, far, moved = BUGS["pairs"].evidence()
    assert same[1] == pytest.approx(same[2], abs=2e-3)
    assert far[1:] == pytest.approx(moved[1:], abs=2e-3)  # the distance alone, in both
    assert abs(far[1] - far[2]) > 1  # type: ignore[operator]


def test_the_measured_perplexities_are_those_of_the_model_loaded_with_the_scaling() -> None:
    """Where all layers are scaled alike. Half of the pairs suffice; other wrong lines cost more than right ones."""
    windows = torch.tensor(list((tiny_folder() / "held-out.txt").read_bytes()[:1024])).view(8, 128)

    def perplexity(kind: str, **parameters: float) -> float:
        model = load_model(tiny_folder(), "cpu", "float32", rope_scaling={"rope_type": kind, **parameters})
        logits = model(windows[:, :-1])  # (B, T, V)
        return float(F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).exp())

    unscaled, half = perplexity("default"), perplexity("proportional", partial_rotary_factor=0.5)
    *_, (_, wrong, right) = BUGS["quarter"].evidence()
    assert (right, half) == pytest.approx((half, unscaled), abs=0.006)
    assert wrong > 5 * right  # type: ignore[operator]
    *_, (_, wrong, right) = BUGS["windows"].evidence()
    assert wrong == pytest.approx(perplexity("yarn", factor=8.0), abs=0.006)
    assert unscaled < right < (unscaled + wrong) / 2  # type: ignore[operator]


Study = Callable[..., tuple[int, str, str]]


@pytest.fixture
def study(capsys: pytest.CaptureFixture[str]) -> Study:
    """Run `clearllama study ..`: exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        try:
            code = main(["study", *args])
        except SystemExit as exit:
            code = int(exit.code or 0)
        return (code, *capsys.readouterr())

    return run


def test_the_command_lists_and_shows(study: Study) -> None:
    assert re.findall(r"^    ([a-z]\S*)  ", study("bugs")[1], re.M) == ["name", *BUGS]
    code, out, _ = study("bugs", "own-key")
    assert (code, "0, 1, 2, 3, 4" in out, "mask = m >= n" in out) == (0, True, True)
    (found,) = json.loads(study("bugs", "OWN-KEY", "--json")[1])["bugs"]
    assert found["evidence"][1] == {"what": "weights of token 0 that are NaN, of 5", "wrong": 5, "right": 0}
    assert out.index("predict  ") < out.index("  effect\n") < out.index("right    ")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("bugs", "none-such"), "unknown bug 'none-such'"),
        (("bugs", "--context", "0"), "study bugs does not accept --context"),
        (("order", "step"), "BUG needs the topic bugs"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(study: Study, words: tuple[str, ...], reason: str) -> None:
    code, out, err = study(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert reason in err
