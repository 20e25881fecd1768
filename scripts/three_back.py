"""Train a tiny Transformer to repeat the token three back: without positions, with added sinusoids, and with RoPE.

usage: python scripts/three_back.py [--steps 240] [--layers 1]

Each text is random, so only the position of a token says which token is three back. The model is llama.Transformer. All
encodings start from the same weights and read the same texts of 32 tokens; "added" multiplies the embeddings by sqrt(C)
before the sum. A line of the curve is the mean loss since the line before, over three models, one for each seed. All
texts are new. At the end each model reads texts of 128 tokens. Each run on the same processor prints equal digits.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from compare_encodings import sinusoidal, without_rope
from torch import Tensor
from train_tiny import initialize

from llama.config import ModelConfig
from llama.model import Transformer

BACK, VOCAB, TRAINED, LONGEST = 3, 32, 32, 128  # tokens back, vocabulary, tokens of a text in training, in the test
ENCODINGS: dict[str, Any] = {"none": without_rope, "added": sinusoidal, "RoPE": lambda model: None}
SEEDS = (0, 1, 2)


def build(encoding: str, seed: int, layers: int) -> Transformer:
    config = ModelConfig(
        dim=64, n_layers=layers, n_heads=2, n_kv_heads=2, head_dim=32, hidden_dim=128, vocab_size=VOCAB,
        max_seq_len=LONGEST,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Transformer(config)
    initialize(model)
    ENCODINGS[encoding](model)
    return model


def learn(model: Transformer, optimizer: torch.optim.Optimizer, draw: torch.Generator) -> float:
    """One step on new texts. Returns the mean loss of the positions that have a token three back."""
    tokens = torch.randint(VOCAB, (32, TRAINED), generator=draw)  # (B, T)
    logits = model(tokens)[:, BACK:]  # (B, T - BACK, V)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, :-BACK].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def right(model: Transformer) -> Tensor:
    """The share of right tokens at each position from BACK on: (LONGEST - BACK,)."""
    tokens = torch.randint(VOCAB, (128, LONGEST), generator=torch.Generator().manual_seed(1000))  # (B, T)
    return (model(tokens)[:, BACK:].argmax(-1) == tokens[:, :-BACK]).float().mean(0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train three encodings to repeat the token three back.")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--layers", type=int, default=1)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    mark, runs = max(1, args.steps // 6), {}
    for encoding in ENCODINGS:
        models = [build(encoding, seed, args.layers) for seed in SEEDS]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95)) for model in models]
        draws = [torch.Generator().manual_seed(seed) for seed in SEEDS]
        runs[encoding] = list(zip(models, optimizers, draws, strict=True))
    print(f"step         loss (a guess has {math.log(VOCAB):.2f})")
    for end in range(mark, args.steps + 1, mark):
        for encoding, three in runs.items():
            losses = torch.tensor([learn(*one) for _ in range(mark) for one in three])
            bar = "#" * round(10 * losses.mean().item())
            print(f"{end:4}  {encoding:<5}  {losses.mean():.2f}  {bar}".rstrip(), flush=True)
    print(f"\nright tokens   positions {BACK}..{TRAINED - 1}   {TRAINED}..{LONGEST - 1}  (lowest, highest seed)")
    for encoding, three in runs.items():
        share = torch.stack([right(model) for model, *_ in three])  # (seeds, LONGEST - BACK)
        near, far = (part.mean(1) for part in share.split([TRAINED - BACK, LONGEST - TRAINED], 1))  # (seeds,) each
        print(f"{encoding:<12}   {near.min():.2f} {near.max():.2f}         {far.min():.2f} {far.max():.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
