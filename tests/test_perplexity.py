"""The perplexity command: consecutive windows, compared with a full pass over each of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from llama.cli import main
from llama.loader import load

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
    nats = []
    for start in range(0, len(ids), window or 256):
        part = torch.tensor([ids[start : start + (window or 256)]])
        logprobs = llm.model(part).log_softmax(-1)[0]
        nats += [-float(logprobs[t, part[0, t + 1]]) for t in range(part.shape[1] - 1)]
    assert facts["predicted"] == len(nats)
    assert facts["perplexity"] == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-4)
    assert facts["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / len(text.read_bytes()), rel=1e-4)


@pytest.mark.parametrize(
    ("content", "options", "code", "message"),
    [
        (b"hello", ["--window", "1"], 2, "--window must be an integer from 2 to 256"),
        (b"hello world " * 9, ["--window", "999"], 2, "--window must be an integer from 2 to 256"),
        (b"", [], 2, "has 0 tokens"),
        (b"\xff\xfe", [], 2, "not UTF-8: byte 0 is 0xff"),
        (None, [], 2, "No such file or directory; expected a text file"),
    ],
)
def test_bad_input_is_one_line(
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    options: list[str],
    code: int,
    message: str,
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    assert main(["perplexity", str(text), "-m", str(file), "-q", *options]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_a_longer_window_needs_an_extended_context(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello world " * 300)
    stretched = ["--rope-scaling", "yarn", "--rope-factor", "4", "--window", "1000", "--json"]
    assert main(["perplexity", str(text), "-m", str(file), *stretched]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["window"] == 1000
    assert "RoPE override: rope_type yarn" in err
