"""Perplexity by position: the sums, the CSV file they are stored in, and the claims on the tiny trained model."""

from __future__ import annotations

import csv
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
from llama.study.perplexity import METHODS, TINY, Measurement, Row, measure, scaling_of, tiny_folder
from llama.study.topics import find, ppl

from ..scripts import make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _clear_cache() -> None:
    ppl._measured.cache_clear()


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
        assert [(row.first, row.last) for row in mine] == [
            (0, 63),
            (64, 127),
            (128, 159),
            (160, 191),
            (192, 255),
            (256, 299),
        ]
        for row in mine:
            assert row.nats == pytest.approx(nats[row.first : row.last + 1].sum(), rel=1e-4)


def test_perplexity_is_exp_of_the_mean_over_windows() -> None:
    rows = (Row("none", 0, 0, 63, 64 * 1.0), Row("none", 1, 0, 63, 64 * 2.0), Row("none", 0, 64, 127, 64 * 3.0))
    found = Measurement({"trained": "128"}, rows).perplexity("none")
    assert found == pytest.approx({0.5: math.exp(1.5), 1.0: math.exp(3.0)})


def test_dynamic_changes_with_the_text_and_dynamic_whole_rereads_each_bucket() -> None:
    grown = measure(windows=1, length=256, methods=("dynamic:1", "dynamic-whole:1", "none"))
    curves = {method: grown.perplexity(method) for method in grown.methods}
    for end in (0.5, 1.0):  # up to the trained length the frequencies are unchanged
        assert curves["dynamic:1"][end] == pytest.approx(curves["none"][end], rel=1e-5)
        assert curves["dynamic-whole:1"][end] == pytest.approx(curves["none"][end], rel=1e-5)
    text = (tiny_folder() / "held-out.txt").read_bytes()
    tokens = torch.tensor([list(text[(len(text) - 257) // 2 :][:257])])
    at_end = load_model(
        tiny_folder(), dtype="float32", rope_scaling={"rope_type": "dynamic", "factor": 1.0}, max_seq_len=256
    )
    expected = -at_end(tokens[:, :-1]).log_softmax(-1)[0, range(192, 256), tokens[0, 193:]].double().mean()
    assert curves["dynamic-whole:1"][2.0] == pytest.approx(math.exp(expected), rel=1e-4)
    assert abs(curves["dynamic:1"][2.0] / curves["dynamic-whole:1"][2.0] - 1) > 1e-3


def test_a_run_resumes_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, options = tmp_path / "out.csv", {"windows": 3, "length": 140, "methods": ("none", "yarn:4")}
    uninterrupted = measure(**options)
    real, calls = perplexity._logprobs, []

    def fragile(*args: Any) -> torch.Tensor:
        calls.append(args[1].shape[0])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(perplexity, "_logprobs", fragile)
    with pytest.raises(KeyboardInterrupt):
        measure(output=file, **options)
    assert {row["method"] for row in csv.DictReader(file.open())} == {"none"}
    resumed = measure(output=file, **options)
    assert calls == [3, 3, 3]  # "none", the interrupted yarn, and yarn again: "none" was not measured twice
    expected = uninterrupted.rows
    assert [(r.method, r.window, r.first) for r in resumed.rows] == [(r.method, r.window, r.first) for r in expected]
    for a, b in zip(resumed.rows, expected, strict=True):
        assert a.nats == pytest.approx(b.nats, abs=1e-5)
    assert measure(output=file, **options).rows == resumed.rows
    assert calls == [3, 3, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"length": 130}, "has results with length 140, but this run has length 130"), ({"windows": 1}, "windows 2")],
)
def test_results_of_another_setting_are_not_mixed_in(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    file, options = tmp_path / "out.csv", {"windows": 2, "length": 140, "methods": ("none",)}
    measure(output=file, **options)
    before = file.read_bytes()
    with pytest.raises(UsageError, match=message):
        measure(output=file, **{**options, **changes})
    assert file.read_bytes() == before


def test_results_of_another_model_of_the_same_name_are_not_mixed_in(tmp_path: Path) -> None:
    folders = [tmp_path / name / "m" for name in "ab"]
    for seed, folder in enumerate(folders):
        make_tiny.make(folder, "llama-2-7b", format="hf", seed=seed)
    options = {"text": tiny_folder() / "held-out.txt", "windows": 1, "length": 40, "methods": ("none",)}
    file = tmp_path / "out.csv"
    measure(str(folders[0]), output=file, **options)
    with pytest.raises(UsageError, match="has results with model m@"):
        measure(str(folders[1]), output=file, **options)


def damaged(lines: list[str], how: str) -> str:
    """A complete table with one defect."""
    row = lines[3].split(",")
    if how == "no table":
        return "a,b\r\n1,2\r\n"
    if how == "one line of another file":
        return "# notes I need\r\n"
    if how == "a header of fewer columns":
        return ",".join(lines[0].split(",")[:-1]) + "\r\n"
    if how == "a row twice":
        return "".join([*lines, lines[-1]])
    if how == "a row missing":
        return "".join([*lines[:3], *lines[4:]])
    if how == "cut in a line":
        return "".join(lines)[:-20]
    column, value = {
        "negative": (10, "-5"),
        "nan": (10, "nan"),
        "words": (10, "many"),
        "bucket": (9, "10"),
        "window": (7, "7"),
    }[how]
    row[column] = value
    return "".join([*lines[:3], ",".join(row).rstrip() + "\r\n", *lines[4:]])


@pytest.mark.parametrize(
    "how",
    [
        "no table", "a row missing", "cut in a line", "nan",
        *(pytest.param(how, marks=pytest.mark.slow) for how in (
            "one line of another file", "a header of fewer columns", "a row twice", "negative", "words", "bucket",
            "window")),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_table_is_rejected_and_unchanged(tmp_path: Path, how: str) -> None:
    file, options = tmp_path / "out.csv", {"windows": 2, "length": 140, "methods": ("none", "yarn:4")}
    measure(output=file, **options)
    file.write_text(damaged(file.read_text().splitlines(keepends=True), how), newline="")
    before = file.read_bytes()
    with pytest.raises(UsageError, match="delete this one"):
        measure(output=file, **options)
    assert file.read_bytes() == before


def test_a_binary_file_is_rejected_as_a_table(tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    file.write_bytes(bytes(range(256)))
    with pytest.raises(UsageError, match="can't be read as a table"):
        measure(output=file, windows=1, length=140, methods=("none",))


def test_methods_without_a_claim_have_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "study", "ppl", "--methods", "none, ntk:8", "--windows", "1", "--length", "140")
    assert code == 0
    assert "nothing to check" in out
    assert "FAIL" not in out


@pytest.mark.parametrize("method", ["yarn", "none:4", "yarn:", "yarn:x", "", "spiral:4", "longrope:4"])
def test_an_invalid_method_is_rejected(method: str) -> None:
    with pytest.raises(UsageError, match="KIND:FACTOR"):
        scaling_of(method)


def test_the_claims_hold_on_the_tiny_model_and_fail_on_an_untrained_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = find("ppl").report()
    assert report.passed, [check for check in report.checks if not check.passed]
    assert len(report.checks) == 8
    ppl._measured.cache_clear()
    real = perplexity.build

    def untrained(*args: Any, **options: Any) -> Any:
        net = real(*args, **options)
        for block in net.layers:
            block.attention.wo.weight.data = torch.zeros_like(block.attention.wo.weight)
        return net

    monkeypatch.setattr(perplexity, "build", untrained)
    assert not find("ppl").report(windows=1).passed


def test_the_shipped_model_has_the_documented_size() -> None:
    model = load_model(tiny_folder(), dtype="float32")
    assert model.config.max_seq_len == 128
    assert model.config.n_params == sum(p.numel() for p in model.parameters()) == 857216
    assert (tiny_folder() / "model.safetensors").stat().st_size < 3.6e6


# ------------------------------------------------------------------------------------------------------ command line
def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(args)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_prints_draws_and_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("ppl.csv", "ppl.png", "data.csv")]
    common = ("study", "ppl", "--windows", "1", "--length", "512", "--output", str(files[0]))
    code, out, _ = run(capsys, *common, "--json", "--figure", str(files[1]))
    report = json.loads(out)
    assert code == (0 if report["passed"] else 1)
    assert [row[0] for row in report["tables"][0]["rows"]] == list(METHODS)
    assert files[1].read_bytes().startswith(b"\x89PNG")
    run(capsys, *common, "--json", "--figure", str(files[2]))
    curve = {(r["method"], float(r["end"])): float(r["perplexity"]) for r in csv.DictReader(files[2].open())}
    sums: dict[tuple[str, float], float] = {}
    for row in csv.DictReader(files[0].open()):
        tokens = int(row["last"]) - int(row["first"]) + 1
        sums[row["method"], (int(row["last"]) + 1) / 128] = math.exp(float(row["nats"]) / tokens)
    assert curve == pytest.approx(sums, rel=1e-4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ppl", "--methods", "spiral:4"], "kinds: linear, ntk, dynamic, yarn, llama3"),
        (["ppl", "--length", "1000000"], "enough for 0 windows of 1000000"),
        (["ppl", "--text", "no-such-file"], "expected a text file in UTF-8: No such file"),
        (["ppl", "--windows", "100"], "enough for 62 windows of 1024 tokens"),
        (["ppl", "--output", "no-such-folder/x.csv"], "there is no folder no-such-folder"),
        (["ppl", "--output", "."], "is a folder; expected a file name"),
        (["ppl", "--windows", "0"], "--windows at least 1"),
        (["ppl", "-m", "smollm2-135m-instruct"], "add --text FILE"),
        (["order", "--windows", "3"], "study order does not accept --windows"),
        (["ppl", "--head-dim", "64"], "study ppl does not accept --head-dim"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    code, out, err = run(capsys, "study", "--quiet", *args)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_tiny_is_found_by_name() -> None:
    assert tiny_folder().name == TINY
