"""scripts/train_tiny.py is deterministic, and every reader of Hugging Face folders can load its output."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llama.loader import load_model, load_tokenizer
from llama.model import Transformer
from llama.study.perplexity import tiny_folder
from llama.tools.perplexity import nats

from ..scripts import train_tiny

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_tiny.py"
TEXT = "Genesis 1\n" + "the morning and the evening were the first day. " * 40 + "\nRevelation 1\nheld out words\n"


@pytest.mark.slow  # trains twice
def test_two_runs_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run in a new process, and one in this process, which has used random numbers before."""
    (tmp_path / "text.txt").write_text(TEXT)
    options = ["--text", str(tmp_path / "text.txt"), "--steps", "2", "--batch", "4"]
    one, other = ([str(SCRIPT), *options, "--out", str(tmp_path / name)] for name in "ab")
    assert subprocess.run([sys.executable, *one], capture_output=True, check=False).returncode == 0
    monkeypatch.setattr(sys, "argv", other)
    threads = torch.get_num_threads()
    try:
        with torch.enable_grad():
            assert train_tiny.main() == 0
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["config.json", "held-out.txt", "model.safetensors", "tokenizer.json"]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert (tmp_path / "a" / "held-out.txt").read_text() == "Revelation 1\nheld out words\n"


def test_the_saved_model_is_the_trained_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Transformer(train_tiny.CONFIG).requires_grad_(False)
    train_tiny.save(model, tmp_path)
    tokens = torch.randint(256, (1, 100))
    assert torch.equal(load_model(tmp_path, dtype="float32")(tokens), model(tokens))


def test_the_shipped_folder_has_the_same_logits_in_transformers() -> None:
    text = (tiny_folder() / "held-out.txt").read_bytes()[5000:5128]
    tokens = torch.tensor([list(text)])
    assert load_tokenizer(tiny_folder()).encode(text.decode()) == list(text)
    ours = load_model(tiny_folder(), dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    assert 0 < nats(ours, [tokens])[0].mean() < math.log(6)  # random weights would have about 256
