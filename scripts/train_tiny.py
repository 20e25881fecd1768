"""Train the tiny model of the study: tokens are bytes, the context is 128; it takes minutes on one core.

usage: python scripts/train_tiny.py --text kjv.txt --out checkpoints/tiny-kjv [--steps 1500]

The text is the King James Bible, in the public domain, as printed by Debian's packages bible-kjv and bible-kjv-text:

    apt-get install bible-kjv && bible -l100000 gen1:1-rev22:21 > kjv.txt

The last book, Revelation, is not used for training; it is written to the model's folder as the text on which perplexity
is measured. The model is llama.Transformer. With one thread, the same seed and the same version of torch the weights
are the same, bit for bit.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from llama.checkpoint.huggingface_write import write
from llama.checkpoint.write import Model
from llama.config import ModelConfig
from llama.model import Transformer
from llama.tokenizer.common import BYTE_OF

CONFIG = ModelConfig(
    dim=128,
    n_layers=4,
    n_heads=4,
    n_kv_heads=4,
    head_dim=32,
    hidden_dim=344,
    vocab_size=256,
    max_seq_len=128,
)
HELD_OUT = b"\nRevelation 1\n"


def train(data: Tensor, steps: int, batch: int, seed: int = 0) -> Transformer:
    """Train a model on bytes (N,) uint8."""
    torch.manual_seed(seed)
    model = Transformer(CONFIG)
    initialize(model)
    fit(model, data, steps, batch)
    return model.requires_grad_(False).eval()


def initialize(model: nn.Module) -> None:
    """Draw all matrices from a normal distribution; gains stay at 1."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)


def fit(model: nn.Module, data: Tensor, steps: int, batch: int, peak: float = 3e-3) -> list[float]:
    """Train a model on bytes (N,) uint8, in place, and return the loss of each step.

    Each step uses `batch` random windows of the context length. `peak` is the largest learning rate.
    """
    matrices = [p for p in model.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    offsets = torch.arange(CONFIG.max_seq_len + 1)
    started, losses = time.perf_counter(), []
    for step in range(steps):
        rate = peak * min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(data) - len(offsets), (batch, 1))
        window = data[starts + offsets].long()  # (B, T + 1)
        logits = model(window[:, :-1])  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0 or step + 1 == steps:
            seconds = time.perf_counter() - started
            print(f"step {step:5d}  loss {losses[-1]:.3f}  lr {rate:.1e}  {seconds:.0f} s", file=sys.stderr, flush=True)
    return losses


def save(model: Transformer, folder: Path) -> None:
    """Write a folder in Hugging Face's format, with a byte-level vocabulary that has no merges."""
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    write(folder, Model(CONFIG, shapes, dict.fromkeys(state, torch.float32), state.__getitem__))
    tokenizer = Tokenizer(models.BPE(dict(BYTE_OF), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def split(file: Path) -> tuple[bytes, bytes]:
    """The text to train on, and the text that is held out. Raises ValueError for another text."""
    text = file.read_bytes()
    if text.count(HELD_OUT) != 1:
        raise ValueError(f"{file}: expected the heading 'Revelation 1' once, found {text.count(HELD_OUT)}")
    start = text.index(HELD_OUT) + 1
    return text[:start], text[start:]


def as_bytes(text: bytes) -> Tensor:
    """The tokens of a text, one a byte: (N,) uint8."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the tiny model of the study.")
    parser.add_argument("--text", type=Path, required=True, help="the complete text; see the start of this file")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        training, held_out = split(args.text)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    torch.set_num_threads(1)  # threads change the order of sums, hence the last bits, and training amplifies this
    torch.use_deterministic_algorithms(True)
    model = train(as_bytes(training), args.steps, args.batch, args.seed)
    save(model, args.out)
    (args.out / "held-out.txt").write_bytes(held_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
