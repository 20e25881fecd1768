"""The topics scale, clock and needle against numpy, and the numbers of lesson 7. ppl is in test_ppl.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import llama
from llama.cli import main
from llama.errors import UsageError
from llama.loader import load_model, load_tokenizer
from llama.study import measures, needle
from llama.study.perplexity import tiny_folder
from llama.study.stretch import Stretch
from llama.study.topics import find
from llama.study.topics import needle as needle_topic

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = 10000.0 ** (-np.arange(64) / 64)  # frequencies of LLaMA 1, trained on 2048 tokens
TURNS = 2048 * PLAIN / (2 * math.pi)


# ----------------------------------------------------------------------------------------------------- scale and clock
def test_scale_says_how_far_pairs_turn_and_which_meet_new_angles() -> None:
    pairs, methods = find("scale").report().tables
    i = np.array([row[0] for row in pairs.rows])
    assert i.tolist() == [0, 16, 32, 41, 48, 63]
    found = np.array([row[1:] for row in pairs.rows])
    np.testing.assert_allclose(found[:, 0], 2 * math.pi / PLAIN[i], rtol=1e-6)
    np.testing.assert_allclose(found[:, 1], TURNS[i], rtol=1e-6)
    keep = np.clip((TURNS[i] - 1) / 3, 0, 1)
    expected = {"PI": 4 + 0 * i, "NTK-aware": 4 ** (i / 63), "dynamic": 13 ** (i / 63)}
    expected["llama3"] = 1 / (keep + (1 - keep) / 4)
    for name, divisors in expected.items():
        np.testing.assert_allclose(found[:, pairs.columns.index(name) - 1], divisors, rtol=1e-6)
    assert {row[0]: row[1] for row in methods.rows} == {
        "unscaled": 23, "PI": 0, "NTK-aware": 22, "dynamic": 0, "YaRN": 0, "llama3": 0,
    }  # fmt: skip


def test_scale_takes_its_settings_from_a_checkpoint() -> None:
    report = find("scale").report(model="tiny-kjv", factor=2.0)
    assert (report.settings["head_dim"], report.settings["context"]) == (32, 128)
    assert report.tables[1].title == "of 16 pairs, 10 make less than a turn in training"


@pytest.mark.parametrize("factor", [1.5, 3.3, 4.0])
def test_only_ntk_aware_leaves_a_trained_arc(factor: float) -> None:
    data = find("scale").figure("seen_arc").data(factor=factor)
    new = data["met"] > data["seen"] * (1 + 1e-6)
    assert set(data["method"][new]) == {"unscaled", "NTK-aware"}
    slow = data["pair"] >= 41
    assert new[(data["method"] == "unscaled") & slow].all()
    assert not new[~slow].any()


def test_the_clock_slows_its_hands_by_the_divisors() -> None:
    rows = np.array([row[1:] for row in find("clock").report().tables[0].rows])
    np.testing.assert_allclose(rows[:, 0], [60, 3600, 43200])
    np.testing.assert_allclose(rows[:, 1] / rows[:, 0], [3, 3, 3], rtol=1e-6)
    np.testing.assert_allclose(rows[:, 2] / rows[:, 0], [1, math.sqrt(3), 3], rtol=1e-6)


@pytest.mark.parametrize("option", [["--rope-factor", "1"], ["--head-dim", "7"], ["--context", "2"]])
def test_a_setting_out_of_range_is_one_line(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "scale", "-q", *option]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ------------------------------------------------------------------------------------------------ numbers of lesson 7
def test_the_numbers_of_lesson_7() -> None:
    ntk = Stretch().frequencies("ntk").numpy()
    np.testing.assert_allclose(ntk, (10000 * 4 ** (128 / 126)) ** (-np.arange(64) / 64), rtol=1e-6)
    assert round(10000 * 4 ** (128 / 126)) == 40890
    assert (round(2047 * PLAIN[41], 2), round(8191 * ntk[41], 2)) == (5.61, 9.10)
    assert [round(x, 2) for x in TURNS[[0, 63]]] == [325.95, 0.04]
    yarn, a = Stretch().stretched("yarn")
    assert (round(a, 4), round(a**2, 4)) == (1.1386, 1.2965)
    np.testing.assert_allclose((PLAIN / yarn.numpy())[TURNS < 0.9], 4, rtol=1e-6)
    tiny = Stretch(32, 10000.0, 128, 4.0)
    assert round(float(measures.turns(tiny.frequencies(), 128)[0])) == 20
    assert bool((tiny.frequencies("yarn")[1:] < tiny.frequencies()[1:]).all())
    for factor, length, leave in ((4.0, 256, 2), (4.0, 512, 9), (16.0, 512, 2)):  # slow pairs that leave their arc
        scaled = measures.frequencies(32, scaling={"rope_type": "ntk", "factor": factor})
        far = (length / 128 * scaled / tiny.frequencies())[tiny.slow()]
        assert (int((far > 1.0001).sum()), float(far.max()) < 4 / 3) == (leave, leave == 2)
    for factor, divisor in ((1.0, 4), (4.0, 13)):
        scaling = {"rope_type": "dynamic", "factor": factor}
        last = llama.inverse_frequencies(128, 10000.0, scaling, seq_len=8192, max_seq_len=2048)[0][63]
        assert PLAIN[63] / float(last) == pytest.approx(divisor, rel=1e-5)
    assert round((500000 / 10000) ** (126 / 128)) == 47
    slow = [int((8192 * base ** (-np.arange(64) / 64) < 2 * math.pi).sum()) for base in (1e4, 5e5)]
    assert slow == [14, 29]


# -------------------------------------------------------------------------------------------------------------- needle
def test_a_haystack_has_its_facts_at_their_places() -> None:
    tokenizer, source = load_tokenizer(tiny_folder()), (tiny_folder() / "held-out.txt").read_text()
    hay = needle.haystack(tokenizer, source, 1000, 128)
    assert len(hay.ids) == len(hay.plain) == 1000
    assert [at for _, _, at, _ in hay.facts] == [64 + 128 * i for i in range(7)]
    for place, number, at, end in hay.facts:
        assert tokenizer.decode(hay.ids[at:end].tolist()) == f"\nThe magic number of {place} is {number}.\n"
    assert tokenizer.decode(hay.ids[hay.plain].tolist()) == source[: int(hay.plain.sum())]


@pytest.mark.parametrize(
    ("length", "every", "message"),
    [(8192, 128, "at most 4096"), (4000, 2000, "longer --text"), (40, 32, "a fact has 38 tokens")],
)
def test_a_text_without_room_is_rejected(length: int, every: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        needle.haystack(load_tokenizer(tiny_folder()), "word " * 100, length, every)


def test_recall_equals_that_of_complete_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needle, "PER_LENGTH", 1)
    found = needle.measure("tiny-kjv", length=300, methods=("none",), dtype="float32")
    tokenizer = load_tokenizer(tiny_folder())
    model = load_model(tiny_folder(), dtype="float32", max_seq_len=400)
    hay = needle.haystack(tokenizer, (tiny_folder() / "held-out.txt").read_text(), 300, 128)
    asked: dict[int, Any] = {at: needle.question(tokenizer, place, number) for place, number, at, _ in hay.facts}
    assert {(a.read, a.at) for a in found.answers} >= {(128, 64), (192, 64), (300, 64), (300, 192)}
    for answer in found.answers:
        ids, start = asked[answer.at]
        assert tokenizer.decode(ids[start:]).strip().isdigit()
        logits = model(torch.tensor([[*hay.ids[: answer.read].tolist(), *ids]]))[0, answer.read + start - 1 : -1]
        assert answer.right == float((logits.argmax(-1) == torch.tensor(ids[start:])).double().mean())


def test_the_stored_answers_recall_as_lesson_10_says(capsys: pytest.CaptureFixture[str]) -> None:
    recall, ppl = needle_topic.TOPIC.report().tables
    assert next(row for row in recall.rows if row[0] == "unchanged")[1:] == (0.9, 0.8, 0.45, 0.2, 0.03)
    assert next(row for row in ppl.rows if row[0] == "YaRN x2")[-1] == 11.3
    assert main(["study", "needle", "--length", "4096"]) == 2
    assert "add --model" in capsys.readouterr().err
