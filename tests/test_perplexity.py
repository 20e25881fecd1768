"""The perplexity command: consecutive windows, compared with a full pass over each of them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from llama.cli import main
from llama.loader import load
from llama.tools.perplexity import nats

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("perplexity") / "tiny.gguf")


@pytest.mark.parametrize("window", [None, 2, 50, 256])
def test_perplexity_is_exp_of_the_mean_of_full_passes(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], window: int | None
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello, the other world: é 中 " * 20)
    options = [] if window is None else ["--window", str(window)]
    assert main(["perplexity", str(text), "-m", str(file), "--dtype", "float32", "--json", "-q", *options]) == 0
    facts = json.loads(capsys.readouterr().out)
    llm = load(file, dtype="float32")
    ids = llm.tokenizer.encode(text.read_text())
    expected = []
    for start in range(0, len(ids), window or 256):
        part = torch.tensor([ids[start : start + (window or 256)]])
        logprobs = llm.model(part).log_softmax(-1)[0]
        expected += [-float(logprobs[t, part[0, t + 1]]) for t in range(part.shape[1] - 1)]
    assert facts["predicted"] == len(expected)
    assert facts["perplexity"] == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-4)
    assert facts["bits_per_byte"] == pytest.approx(sum(expected) / math.log(2) / len(text.read_bytes()), rel=1e-4)


def test_progress_counts_the_predicted_tokens_of_all_windows() -> None:
    model, counts = tiny.model(dataclasses.replace(tiny.CONFIG, max_seq_len=600)), list[tuple[int, int]]()
    windows = [torch.ones(1, 600, dtype=torch.int64), torch.ones(2, 10, dtype=torch.int64)]
    nats(model, windows, progress=lambda *found: counts.append(found))
    assert counts == [(256, 617), (512, 617), (599, 617), (617, 617)]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"hello", ["--window", "1"], "--window must be an integer from 2 to 256"),
        (b"hello world " * 9, ["--window", "999"], "--window must be an integer from 2 to 256"),
        (b"", [], "has 0 tokens"),
        (b"\xff\xfe", [], "not UTF-8: byte 0 is 0xff"),
    ],
)
def test_bad_input_is_one_line(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, options: list[str], message: str
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    assert main(["perplexity", str(tmp_path / "text.txt"), "-m", str(file), "-q", *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
