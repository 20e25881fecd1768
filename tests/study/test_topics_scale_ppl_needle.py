"""The topics scale, ppl and needle against numpy."""

from __future__ import annotations

import csv
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama.cli import main
from llama.errors import UsageError
from llama.loader import load_model, load_tokenizer
from llama.study import needle, perplexity
from llama.study.perplexity import tiny_folder
from llama.study.topics import find, scale

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = 10000.0 ** (-np.arange(64) / 64)  # frequencies of LLaMA 1, trained on 2048 tokens
TURNS = 2048 * PLAIN / (2 * math.pi)


# ----------------------------------------------------------------------------------------------------- scale
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


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """The tiny model with another base and with Llama 3.1's scaling."""
    folder = shutil.copytree(tiny_folder(), tmp_path / "scaled")
    config = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config.pop("rope_parameters", None)
    config |= {"rope_theta": 5e4, "rope_scaling": {**scaling, "original_max_position_embeddings": 128}}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    return folder


def test_scale_takes_settings_and_frequencies_from_a_checkpoint(
    scaled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = find("scale").report(model=str(scaled))
    assert report.settings == {"head_dim": 32, "theta": 5e4, "context": 128, "factor": 8.0}
    assert "has the scaling llama3 and can use 1,024 tokens" in report.says
    keep = np.clip((128 * 5e4 ** (-np.arange(16) / 16) / (2 * math.pi) - 1) / 3, 0, 1)
    right = 1 / (keep + (1 - keep) / 8)
    pairs, methods = report.tables
    assert pairs.columns[-1] == "this model"
    np.testing.assert_allclose([row[-1] for row in pairs.rows], right[[row[0] for row in pairs.rows]], rtol=1e-5)
    assert methods.rows[-1] == ("this model", 0, 1.0)
    data = scale.divisor_data(model=str(scaled))
    np.testing.assert_allclose(data["divisor"][data["method"] == "this model"], right, rtol=1e-5)
    assert main(["study", "scale", "-q", "-m", str(scaled), "--rope-factor", "2"]) == 0
    assert "factor 2.0\n" in capsys.readouterr().out
    report = find("scale").report(model="tiny-kjv", factor=2.0)
    assert (report.settings["head_dim"], report.settings["context"]) == (32, 128)
    assert report.tables[1].title == "of 16 pairs, 10 make less than a turn in training"


@pytest.mark.parametrize(
    "options",
    [
        ["scale", "--rope-factor", "1"],
        ["scale", "--head-dim", "7"],
        ["scale", "-m", "tiny-kjv", "--head-dim", "64"],
        ["scale", "-m", "no-such-model"],
        ["order", "-m", "tiny-kjv"],
        ["ppl", "--length", "1000000"],
        ["ppl", "--text", "no-such-file"],
        ["ppl", "-m", "smollm2-135m-instruct"],
        ["needle", "--length", "4096"],
        ["decay", "--length", "1"],
        ["bands", "--length", "5000"],
        ["clock"],
    ],
)
def test_a_bad_option_is_one_line(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", *options, "-q"]) != 0
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


# ----------------------------------------------------------------------------------------------------------------- ppl
def test_perplexities_equal_those_of_one_full_pass() -> None:
    """Each bucket against the complete windows in one pass, with softmax and mean written out in numpy."""
    found = perplexity.measure(windows=2, length=300, methods=("yarn:4",))
    text = (tiny_folder() / "held-out.txt").read_bytes()
    scaling = {"rope_type": "yarn", "factor": 4.0}
    model = load_model(tiny_folder(), dtype="float32", rope_scaling=scaling, max_seq_len=301)
    nats = []
    for window in range(2):
        start = (2 * window + 1) * (len(text) - 301) // 4  # the middle of each half
        tokens = torch.tensor([list(text[start : start + 301])])
        logits = model(tokens[:, :-1])[0].double().numpy()  # (300, V)
        shifted = logits - logits.max(-1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        nats.append(-logprobs[np.arange(300), tokens[0, 1:].numpy()])
    edges = [0, 64, 128, 160, 192, 256, 300]
    expected = {end / 128: np.exp(np.mean(nats, 0)[first:end].mean()) for first, end in itertools.pairwise(edges)}
    assert found.perplexity("yarn:4") == pytest.approx(expected, rel=1e-4)


def test_dynamic_changes_nothing_up_to_the_trained_length() -> None:
    found = perplexity.measure(windows=1, length=256, methods=("dynamic:1", "none"))
    dynamic, plain = found.perplexity("dynamic:1"), found.perplexity("none")
    assert [dynamic[end] for end in (0.5, 1.0)] == pytest.approx([plain[end] for end in (0.5, 1.0)], rel=1e-5)
    assert dynamic[2.0] < 0.5 * plain[2.0]


@pytest.mark.parametrize("method", ["yarn", "none:4", "yarn:x", "", "spiral:4", "longrope:4"])
def test_an_invalid_method_is_rejected(method: str) -> None:
    with pytest.raises(UsageError, match="KIND:FACTOR"):
        perplexity.scaling_of(method)


def test_the_command_prints_and_draws_all_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, table = tmp_path / "ppl.png", tmp_path / "ppl.csv"
    for file in (picture, table):
        options = ("--windows", "1", "--length", "256", "--figure", str(file))
        assert main(["study", "ppl", "--json", "-q", *options]) == 0
        report = json.loads(capsys.readouterr().out)
        assert [row[0] for row in report["tables"][0]["rows"]] == list(perplexity.METHODS)
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = {row[0]: row[1:] for row in report["tables"][0]["rows"]}
    for method, values in itertools.groupby(csv.DictReader(table.open()), lambda row: row["method"]):
        assert [round(float(row["perplexity"]), 3) for row in values] == shown[method]


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
    [(8192, 128, "at most 4096"), (4000, 2000, "longer text"), (40, 32, "a fact has 38 tokens")],
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


def test_what_is_right_token_by_token_is_what_the_model_writes() -> None:
    model, text = load_model(tiny_folder(), dtype="float32"), list((tiny_folder() / "held-out.txt").read_bytes())
    cache = model.new_cache(128)
    whole = []
    for at in range(2000, 4000, 40):
        model.hidden(torch.tensor([text[at - 64 : at]]), cache=cache)
        ids = text[at : at + 8]
        _, right = needle.answer(model, cache, ids, 4)
        written = ids[:4]
        for _ in range(4):
            written.append(int(model(torch.tensor([text[at - 64 : at] + written]))[0, -1].argmax()))
        assert (right == 1) == (written == ids)
        whole.append(right == 1)
        cache.trim(0)
    assert 5 < sum(whole) < 45
    table = find("needle").report().tables[1]
    assert {row[0]: row[2] for row in table.rows} == {
        "unchanged": "5/8", "PI x2": "0/8", "NTK-aware x2": "2/8", "NTK-aware x4": "2/8", "YaRN x2": "2/8",
    }  # fmt: skip
