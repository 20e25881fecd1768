"""Train the study's tiny model with several position encodings, on the same data, and compare their losses.

usage: python scripts/compare_encodings.py --text kjv.txt --output encodings.jsonl

The text, the model, its initial weights and the optimizer are those of train_tiny.py. Only the encoding
differs: modules of a llama.Transformer are replaced, and no line of the model is changed. All encodings of one seed
train on the same windows of 128 tokens, in the same order. Each model then reads windows of 512 tokens of the held-out
book, and its loss is averaged by position.

`--encodings dropped` is another experiment (DroPE, arXiv:2512.12167): it takes the tiny model that comes with the
package, which was trained with RoPE, leaves RoPE out, and trains it further.

A finished run is one line of the output. The script skips runs that the output already has, so the command can be
interrupted and started again. The fifteen runs of the stored results took 161 minutes in all, on a Xeon with AVX-512.
The same processor repeats all digits; another processor sums in another order, and training enlarges the differences.
With AVX2 the loss of RoPE with seed 0 at positions 0 to 127 was 1.404 in place of 1.411.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_tiny import CONFIG, as_bytes, fit, initialize, split

from llama.attention import Attend
from llama.loader import load_model
from llama.model import Transformer
from llama.rope import Rope, RotaryEmb
from llama.study.measures import sinusoids
from llama.study.perplexity import tiny_folder

LONGEST = 512  # tokens of a test window
BUCKET = 16  # positions whose losses are averaged
SEEDS = (0, 1, 2)


class Placed(nn.Module):
    """An embedding that adds a vector for the position: tokens (B, T), at positions 0 .. T - 1, -> (B, T, C)."""

    def __init__(self, embedding: nn.Embedding, table: Tensor | nn.Parameter, scale: float = 1.0):
        super().__init__()
        self.embedding, self.table, self.scale = embedding, table, scale  # table (LONGEST, C)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scale * self.embedding(tokens) + self.table[: tokens.shape[1]]


def biased(slopes: Tensor) -> Callable[..., Tensor]:
    """Attention that subtracts slope * distance from the scores of each head; slopes (H,)."""

    def attend(q: Tensor, k: Any, v: Any, mask: Tensor | None = None) -> Tensor:
        query, key = torch.arange(q.shape[2]), torch.arange(k.shape[2])
        bias = -slopes[:, None, None] * (query[:, None] - key)  # (H, T, S)
        if mask is not None:
            bias = bias.masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, bias)  # (B, H, T, D)

    return attend


def without_rope(model: Transformer) -> None:
    for layer in range(model.config.n_layers):
        model.set_submodule(f"layers.{layer}.attention.apply_rotary_emb", RotaryEmb(rotates=False))


def sinusoidal(model: Transformer) -> None:
    """Attention Is All You Need (arXiv:1706.03762): the embedding times sqrt(C), plus the fixed table."""
    without_rope(model)
    table = sinusoids(torch.arange(LONGEST), model.config.dim).float()
    model.set_submodule("tok_embeddings", Placed(model.tok_embeddings, table, model.config.dim**0.5))


def learned(model: Transformer) -> None:
    """One vector per position, as in GPT-2. Training never uses a row after the trained length."""
    without_rope(model)
    table = nn.Parameter(0.02 * torch.randn(LONGEST, model.config.dim))
    model.set_submodule("tok_embeddings", Placed(model.tok_embeddings, table))


def alibi(model: Transformer) -> None:
    """Head h = 1 .. H has slope 2^(-8h/H) (arXiv:2108.12409)."""
    without_rope(model)
    heads = model.config.n_heads
    attend = biased(2 ** (-8 * torch.arange(1, heads + 1) / heads))
    for layer in range(model.config.n_layers):
        model.set_submodule(f"layers.{layer}.attention.attend", Attend(attend))


ENCODINGS: dict[str, Callable[[Transformer], None]] = {
    "none": without_rope,
    "sinusoidal": sinusoidal,
    "learned": learned,
    "alibi": alibi,
    "rope": lambda model: None,
}


def build(encoding: str, seed: int) -> Transformer:
    """A model with random weights. Matrices that two encodings share have the same values."""
    if encoding == "dropped":
        model = load_model(tiny_folder(), dtype="float32", max_seq_len=LONGEST).requires_grad_(True)
        without_rope(model)
        return model
    torch.manual_seed(seed)
    model = Transformer(CONFIG, max_seq_len=LONGEST)
    initialize(model)
    ENCODINGS[encoding](model)
    return model


@torch.inference_mode()
def loss_by_position(model: Transformer, text: Tensor) -> Tensor:
    """Mean loss in nats at each position of windows that tile a text of bytes: (LONGEST,) float64."""
    count = (len(text) - 1) // LONGEST
    inputs = text[: count * LONGEST].long().view(count, LONGEST)
    targets = text[1 : count * LONGEST + 1].long().view(count, LONGEST)
    total = torch.zeros(LONGEST, dtype=torch.float64)
    for x, y in zip(inputs.split(16), targets.split(16), strict=True):
        logits = model(x)  # (B, LONGEST, V)
        total += F.cross_entropy(logits.transpose(1, 2), y, reduction="none").double().sum(0)
    return total / count


def buckets(model: Transformer, text: bytes) -> list[float]:
    """The mean loss in each bucket of positions."""
    return [round(x, 5) for x in loss_by_position(model, as_bytes(text)).view(-1, BUCKET).mean(1).tolist()]


def run(encoding: str, seed: int, text: Path, steps: int, batch: int) -> dict[str, Any]:
    """Train one model and measure it: `loss` is the mean in each bucket; `loss_yarn` the same, with YaRN added."""
    training, held_out = split(text)
    model = build(encoding, seed)
    torch.manual_seed(seed)  # again, since `build` drew a different number of random values for each encoding
    started = time.perf_counter()
    losses = fit(model, as_bytes(training), steps, batch)
    seconds = time.perf_counter() - started
    model.eval()
    found = {"loss": buckets(model, held_out)}
    if encoding == "rope":
        scaling = {"rope_type": "yarn", "factor": LONGEST / CONFIG.max_seq_len}
        model.rope = Rope("complex", CONFIG.head_dim, LONGEST, CONFIG.rope_theta, scaling, CONFIG.max_seq_len)
        found["loss_yarn"] = buckets(model, held_out)
    return {
        "encoding": encoding,
        "seed": seed,
        "steps": steps,
        "batch": batch,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(seconds),
        "torch": torch.__version__,
        "training": [round(sum(losses[i : i + 50]) / len(losses[i : i + 50]), 4) for i in range(0, steps, 50)],
        **found,
    }


def finished(output: Path) -> list[dict[str, Any]]:
    if not output.exists():
        return []
    return [json.loads(line) for line in output.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare position encodings by training the tiny model.")
    parser.add_argument("--text", type=Path, required=True, help="the complete text; see scripts/train_tiny.py")
    parser.add_argument("--output", type=Path, required=True, help="a JSON line for each finished run")
    parser.add_argument("--encodings", default=",".join(ENCODINGS), help="names, separated by commas; also: dropped")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="numbers, separated by commas")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)  # with one thread, a seed gives the same losses in each run
    torch.use_deterministic_algorithms(True)
    for seed in map(int, args.seeds.split(",")):
        for encoding in args.encodings.split(","):
            setting = {"encoding": encoding, "seed": seed, "steps": args.steps, "batch": args.batch}
            if any(setting.items() <= line.items() for line in finished(args.output)):
                continue
            print(f"{encoding}, seed {seed}", file=sys.stderr, flush=True)
            line = run(encoding, seed, args.text, args.steps, args.batch)
            with args.output.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
