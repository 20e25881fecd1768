"""scripts/three_back.py: its curve and its conclusions are those that lesson 3 shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from . import three_back

LESSON = Path(__file__).resolve().parents[2] / "docs" / "learn" / "03-why-adding-is-not-enough.md"
CURVE = re.compile(r"^ *(\d+)  (\w+) +(\d\.\d\d) *(#*)$", re.MULTILINE)
SHARES = re.compile(r"^(\w+) +(\d\.\d\d) (\d\.\d\d) +(\d\.\d\d) (\d\.\d\d)$", re.MULTILINE)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    with torch.enable_grad():
        yield


def test_a_short_training_prints_a_curve_and_shares(capsys: pytest.CaptureFixture[str]) -> None:
    assert three_back.main(["--steps", "2"]) == 0
    out = capsys.readouterr().out
    curve = CURVE.findall(out)
    assert [(step, name) for step, name, *_ in curve] == [(s, n) for s in "12" for n in three_back.ENCODINGS]
    assert all(abs(len(bar) - 10 * float(loss)) < 0.6 for *_, loss, bar in curve)
    assert [name for name, *_ in SHARES.findall(out)] == list(three_back.ENCODINGS)


def test_the_right_token_is_the_one_three_back() -> None:
    class Repeats(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = torch.nn.functional.one_hot(tokens, three_back.VOCAB).float()
            return logits.roll(3, 1)  # (B, T, V)

    assert (three_back.right(Repeats()) == 1).all()


def test_without_positions_one_layer_ignores_the_order_of_the_tokens_before() -> None:
    tokens = torch.tensor([[5, 7, 1, 2], [7, 1, 5, 2]])
    last = {name: three_back.build(name, 0, 1)(tokens)[:, -1] for name in three_back.ENCODINGS}  # (2, V) each
    assert torch.allclose(*last["none"], atol=1e-6)
    assert not any(torch.allclose(*last[name], atol=1e-6) for name in ("added", "RoPE"))


def read(text: str) -> tuple[dict[tuple[str, int], float], dict[str, list[float]]]:
    """The loss by encoding and step; the lowest and highest share within and beyond the trained length."""
    loss = {(name, int(step)): float(value) for step, name, value, _ in CURVE.findall(text)}
    return loss, {name: [float(x) for x in row] for name, *row in SHARES.findall(text)}


@pytest.mark.slow  # trains nine models, twice
def test_the_training_shows_what_the_lesson_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The conclusions, not the digits: another processor rounds otherwise."""
    shown = read(LESSON.read_text())
    three_back.main([])
    found = read(capsys.readouterr().out)
    assert [list(part) for part in found] == [list(part) for part in shown]
    for loss, share in (found, shown):
        assert loss["RoPE", 80] < 2 < 3 < loss["added", 80]
        assert loss["added", 160] < 0.5 < 2.5 < loss["none", 240]
        assert share["none"][1] < 0.2 < 0.95 < min(*share["added"][:2], *share["RoPE"])
        assert max(share["none"][3], share["added"][3]) < 0.15
    three_back.main(["--layers", "2"])
    within, _, _, beyond = read(capsys.readouterr().out)[1]["RoPE"]
    assert beyond < 0.8 < 0.99 < within
