"""Perplexity by position: the sums, and the CSV file from which a run resumes."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama.cli import main
from llama.errors import UsageError
from llama.loader import load_model
from llama.study import perplexity
from llama.study.perplexity import METHODS, Measurement, Row, measure, scaling_of, tiny_folder
from llama.study.topics import ppl

pytestmark = pytest.mark.usefixtures("one_thread")


def test_sums_equal_those_of_one_full_pass() -> None:
    """Each bucket against the complete window in one pass, with softmax and mean written out in numpy."""
    found = measure(windows=2, length=300, methods=("yarn:4",))
    text = (tiny_folder() / "held-out.txt").read_bytes()
    model = load_model(
        tiny_folder(), dtype="float32", rope_scaling={"rope_type": "yarn", "factor": 4.0}, max_seq_len=301
    )
    for window in range(2):
        start = (2 * window + 1) * (len(text) - 301) // 4  # the middle of each half
        tokens = torch.tensor([list(text[start : start + 301])])
        logits = model(tokens[:, :-1])[0].double().numpy()  # (300, V)
        shifted = logits - logits.max(-1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        nats = -logprobs[np.arange(300), tokens[0, 1:].numpy()]
        mine = [row for row in found.rows if row.window == window]
        edges = [0, 64, 128, 160, 192, 256, 300]
        assert [(row.first, row.last + 1) for row in mine] == list(itertools.pairwise(edges))
        for row in mine:
            assert row.nats == pytest.approx(nats[row.first : row.last + 1].sum(), rel=1e-4)


def test_perplexity_is_exp_of_the_mean_over_windows() -> None:
    rows = (Row("none", 0, 0, 63, 64 * 1.0), Row("none", 1, 0, 63, 64 * 2.0), Row("none", 0, 64, 127, 64 * 3.0))
    found = Measurement({"trained": "128"}, rows).perplexity("none")
    assert found == pytest.approx({0.5: math.exp(1.5), 1.0: math.exp(3.0)})


def test_dynamic_changes_nothing_up_to_the_trained_length() -> None:
    found = measure(windows=1, length=256, methods=("dynamic:1", "none"))
    dynamic, plain = found.perplexity("dynamic:1"), found.perplexity("none")
    assert [dynamic[end] for end in (0.5, 1.0)] == pytest.approx([plain[end] for end in (0.5, 1.0)], rel=1e-5)
    assert dynamic[2.0] < 0.5 * plain[2.0]


def test_a_run_resumes_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, options = tmp_path / "out.csv", {"windows": 3, "length": 140, "methods": ("none", "yarn:4")}
    uninterrupted = measure(**options)
    real, calls = perplexity.token_logprobs, []

    def fragile(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(args[1].shape[0])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(perplexity, "token_logprobs", fragile)
    with pytest.raises(KeyboardInterrupt):
        measure(output=file, **options)
    assert {row["method"] for row in csv.DictReader(file.open())} == {"none"}
    resumed = measure(output=file, **options)
    assert calls == [3, 3, 3]  # "none", the interrupted yarn, and yarn again: "none" was not measured twice
    assert [row.nats for row in resumed.rows] == pytest.approx([row.nats for row in uninterrupted.rows], abs=1e-5)
    assert measure(output=file, **options).rows == resumed.rows
    assert calls == [3, 3, 3]


def damaged(text: str, how: str) -> str:
    """A complete table of two windows of 140 tokens with one defect."""
    lines = text.splitlines(keepends=True)
    return {
        "another table": "a,b\r\n1,2\r\n",
        "a row missing": "".join([*lines[:3], *lines[4:]]),
        "a row twice": text + lines[-1],
        "cut in a line": text[:-20],
        "not a number": text.replace(lines[3], lines[3].rpartition(",")[0] + ",nan\r\n"),
        "another length": text.replace(",140,", ",130,"),
    }[how]


@pytest.mark.parametrize(
    "how", ["another table", "a row missing", "a row twice", "cut in a line", "not a number", "another length"]
)
def test_a_damaged_or_foreign_table_is_rejected_and_unchanged(tmp_path: Path, how: str) -> None:
    file, options = tmp_path / "out.csv", {"windows": 2, "length": 140, "methods": ("none",)}
    measure(output=file, **options)
    file.write_text(damaged(file.read_bytes().decode(), how), newline="")
    before = file.read_bytes()
    with pytest.raises(UsageError, match="delete this one"):
        measure(output=file, **options)
    assert file.read_bytes() == before


@pytest.mark.parametrize("method", ["yarn", "none:4", "yarn:x", "", "spiral:4", "longrope:4"])
def test_an_invalid_method_is_rejected(method: str) -> None:
    with pytest.raises(UsageError, match="KIND:FACTOR"):
        scaling_of(method)


# ------------------------------------------------------------------------------------------------------ command line
def test_the_command_prints_draws_and_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ppl._measured.cache_clear()
    output, picture = tmp_path / "ppl.csv", tmp_path / "ppl.png"
    options = ("--windows", "1", "--length", "256", "--output", str(output), "--figure", str(picture))
    assert main(["study", "ppl", "--json", "-q", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = {row[0]: row[1:] for row in report["tables"][0]["rows"]}
    assert list(rows) == list(METHODS)
    for row in csv.DictReader(output.open()):
        tokens = int(row["last"]) - int(row["first"]) + 1
        assert any(abs(math.exp(float(row["nats"]) / tokens) - value) < 1e-3 for value in rows[row["method"]])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--length", "1000000"], "enough for 0 windows of 1000000"),
        (["--text", "no-such-file"], "expected a text file in UTF-8: No such file"),
        (["--output", "no-such-folder/x.csv"], "expected a file name in an existing folder"),
        (["--windows", "0"], "--windows at least 1"),
        (["-m", "smollm2-135m-instruct"], "add --text FILE"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    assert main(["study", "--quiet", "ppl", *args]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
