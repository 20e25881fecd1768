"""Write a miniature of an official LLaMA checkpoint: the same files, names, keys and shard axes, with random weights.

usage: python scripts/make_tiny.py OUT --like llama-3.1-405b [--shards 16] [--format meta|hf|gguf]

The miniature has what makes a family hard to load: grouped heads, key/value heads stored twice if there are more
shards than heads, the embedding split along its columns or its rows, RoPE tables in the files of LLaMA 1 and 2, the
feed-forward width by Meta's formula, output matrices that repeat the embedding, row-scaled float8, 4-bit groups with
low-rank adapters, and the family's kind of tokenizer. Sizes are small and all different, so that a mix-up fails.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import hashlib
import itertools
import json
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama.config import ModelConfig

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
HEAD_DIM, MULTIPLE_OF = 16, 16

# The training text of the miniature tokenizers. Changing the text changes their vocabularies.
TEXT = """
A model that reads text without positions sees a bag of words: the dog bites the man, the man bites the dog. So each
word is given its place. One way adds a wave to every word; another turns the queries and the keys, each pair of
numbers by an angle that grows with the position, so that two words meet at an angle that depends on their distance
alone. Fast pairs tell neighbours apart, slow pairs tell chapters apart. Where a text is longer than any text before,
the slow pairs reach angles that nobody has seen, and the model is lost; scaling brings them back.
Ein Satz auf Deutsch, une phrase en français, una frase en español, 一句中文, предложение, 😀. x = 3.14 * 2024 + 1e-5;
def rotate(x, y, angle): return x * cos(angle) - y * sin(angle), x * sin(angle) + y * cos(angle)
"""

# ffn_dim_multiplier of params.json, by the start of the model's name; other families have none
MULTIPLIER = {
    "llama-2-70b": 1.3, "codellama-70b": 1.3, "codellama": 1.0, "llama-3.1-405b": 1.2, "llama-3.2-1b": 1.5,
    "llama-3.2-3b": 1.0, "llama-3": 1.3,
}  # fmt: skip


def names() -> list[str]:
    """Official models that have a miniature."""
    return sorted(path.stem for path in CONFIGS.glob("*.json") if "llama" in path.stem)


def real_config(like: str) -> ModelConfig:
    """The architecture of an official model."""
    return ModelConfig(**json.loads((CONFIGS / f"{like}.json").read_text()))


def tiny_config(like: str, shards: int = 1, n_layers: int = 2) -> ModelConfig:
    """The real architecture with small sizes. Kind of attention, tying, RoPE and context length are unchanged."""
    real = real_config(like)
    grouped = real.n_heads != real.n_kv_heads
    n_kv_heads = (8 if shards > 1 else 2) if grouped else max(4, shards)
    n_heads = 2 * n_kv_heads if grouped else n_kv_heads
    dim = n_heads * HEAD_DIM
    hidden = int(8 * dim / 3)
    multiplier = ffn_multiplier(like)
    hidden = int(multiplier * hidden) if multiplier else hidden
    return dataclasses.replace(
        real,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=HEAD_DIM,
        hidden_dim=MULTIPLE_OF * -(-hidden // MULTIPLE_OF),
        vocab_size={32000: 512, 32016: 528, 128256: 768}[real.vocab_size],
    )


def ffn_multiplier(like: str) -> float | None:
    """ffn_dim_multiplier in params.json of that model, or None."""
    return next((value for start, value in MULTIPLIER.items() if like.startswith(start)), None)


def params(like: str, config: ModelConfig, shards: int) -> dict[str, Any]:
    """params.json with exactly the keys of the family."""
    out: dict[str, Any] = {"dim": config.dim, "n_layers": config.n_layers, "n_heads": config.n_heads}
    if config.n_kv_heads != config.n_heads:
        out["n_kv_heads"] = max(config.n_kv_heads, shards)
    out |= {"multiple_of": MULTIPLE_OF, "norm_eps": config.norm_eps}
    if multiplier := ffn_multiplier(like):
        out["ffn_dim_multiplier"] = multiplier
    if like.startswith(("llama-1", "llama-2")):
        return out | {"vocab_size": -1}
    if like.startswith("codellama"):
        return out | {"rope_theta": config.rope_theta}
    out |= {"vocab_size": config.vocab_size, "rope_theta": config.rope_theta}
    return out | ({"use_scaled_rope": True} if config.rope_scaling else {})


def weights(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Random weights by Meta's names, scaled so that every part of the model affects the logits."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        return (1 + 0.2 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5).to(dtype)

    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    state = {"tok_embeddings.weight": random(config.vocab_size, config.dim)}
    for layer in range(config.n_layers):
        state |= {
            f"layers.{layer}.attention.wq.weight": random(q, config.dim),
            f"layers.{layer}.attention.wk.weight": random(kv, config.dim),
            f"layers.{layer}.attention.wv.weight": random(kv, config.dim),
            f"layers.{layer}.attention.wo.weight": random(config.dim, q),
            f"layers.{layer}.feed_forward.w1.weight": random(config.hidden_dim, config.dim),
            f"layers.{layer}.feed_forward.w2.weight": random(config.dim, config.hidden_dim),
            f"layers.{layer}.feed_forward.w3.weight": random(config.hidden_dim, config.dim),
            f"layers.{layer}.attention_norm.weight": random(config.dim),
            f"layers.{layer}.ffn_norm.weight": random(config.dim),
        }
    state["norm.weight"] = random(config.dim)
    tied = config.tie_embeddings
    state["output.weight"] = state["tok_embeddings.weight"] if tied else random(config.vocab_size, config.dim)
    return state


def split(name: str, tensor: Tensor, config: ModelConfig, shards: int, by_columns: bool) -> list[Tensor]:
    """The shards of a weight. by_columns: split the embedding along its columns, as the families up to Code Llama."""
    if shards == 1 or tensor.dim() == 1:
        return [tensor] * shards
    if name.endswith((".wk.weight", ".wv.weight")) and shards > config.n_kv_heads:
        heads = tensor.unflatten(0, (config.n_kv_heads, config.head_dim))
        tensor = heads.repeat_interleave(shards // config.n_kv_heads, 0).flatten(0, 1)
    columns = name.endswith((".wo.weight", ".w2.weight")) or (name == "tok_embeddings.weight" and by_columns)
    return [part.clone() for part in tensor.chunk(shards, 1 if columns else 0)]


def make(
    out: Path,
    like: str,
    *,
    shards: int = 1,
    format: str = "meta",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    quantization: str | None = None,
) -> Path:
    """Write a miniature to the folder `out` (for GGUF: to a file in it) and return the path to load.

    dtype: by default bfloat16, float16 for LLaMA 1. quantization: None, "fp8", "qlora" or "spinquant" (Meta only).
    """
    config = tiny_config(like, shards, n_layers=4 if quantization == "fp8" else 2)
    dtype = dtype or (torch.float16 if like.startswith("llama-1") else torch.bfloat16)
    if format == "meta":
        return write_meta(out, like, config, weights(config, seed, dtype), shards, quantization)
    if quantization or shards != 1:
        raise SystemExit("--shards and --quantization need Meta's format; use --format meta")
    import tempfile

    from llama.tools.convert import convert

    with tempfile.TemporaryDirectory() as folder:
        source = write_meta(Path(folder) / "meta", like, config, weights(config, seed, dtype), 1, None)
        target = out if format == "hf" else out / f"{like}.gguf"
        target.parent.mkdir(parents=True, exist_ok=True)
        convert(source, target, format, chat_template="none")
        return target


def write_meta(
    out: Path, like: str, config: ModelConfig, state: dict[str, Tensor], shards: int, quantization: str | None
) -> Path:
    """Write a folder in Meta's layout: shards, params.json, tokenizer.model, checklist.chk."""
    out.mkdir(parents=True, exist_ok=True)
    old = like.startswith(("llama-1", "llama-2", "codellama"))
    document = params(like, config, shards)
    extra: dict[str, Tensor] = {}
    if old:
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        tables = ["rope.freqs"]
        if like == "llama-1-7b":
            tables = [f"layers.{i}.attention.inner_attention.rope.freqs" for i in range(config.n_layers)]
        extra = {name: frequencies.to(state["norm.weight"].dtype) for name in tables}
    pieces = {name: split(name, tensor, config, shards, old) for name, tensor in state.items()}
    if quantization == "fp8":
        scales = quantize_fp8(pieces, config)
        for rank, entries in enumerate(scales):
            torch.save(entries, out / f"fp8_scales_{rank}.pt")
    elif quantization:
        document |= quantize_int4(pieces, spinquant=quantization == "spinquant")
    for rank in range(shards):
        shard = {name: parts[rank] for name, parts in pieces.items()}
        torch.save(shard | extra, out / f"consolidated.{rank:02d}.pth")
    (out / "params.json").write_text(json.dumps(document))
    (out / "tokenizer.model").write_bytes(sentencepiece_model(config.vocab_size) if old else tiktoken_model(512))
    listed = [*sorted(out.glob("*.pth")), out / "params.json"]
    lines = [f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.name}" for path in listed]
    (out / "checklist.chk").write_text("\n".join(lines) + "\n")
    return out


def quantize_fp8(pieces: dict[str, list[Tensor]], config: ModelConfig) -> list[dict[str, Tensor]]:
    """Quantize the feed-forward weights of the inner layers to float8 in place; return the row scales per shard."""
    shards = len(pieces["norm.weight"])
    scales: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for layer in range(1, config.n_layers - 1):
        for key in ("w1", "w2", "w3"):
            parts = pieces[f"layers.{layer}.feed_forward.{key}.weight"]
            for rank, part in enumerate(parts):
                scale = part.float().abs().amax(1, keepdim=True) / 448  # the largest float8_e4m3fn
                parts[rank] = (part.float() / scale).to(torch.float8_e4m3fn)
                scales[rank][f"{layer}_feed_forward.{key}_{rank}"] = scale.squeeze(1)
    return scales


def quantize_int4(pieces: dict[str, list[Tensor]], spinquant: bool, group: int = 32) -> dict[str, Any]:
    """Quantize linear layers to 4 bits in groups, embedding and output to 8 bits per row, all in place.

    Returns the entries of params.json for this quantization.
    """
    generator = torch.Generator().manual_seed(1)
    for name in [name for name, parts in pieces.items() if parts[0].dim() == 2]:
        weight, base = pieces[name][0].float(), name.removesuffix(".weight")
        large = base in ("tok_embeddings", "output")
        parts = weight.unflatten(1, (-1, weight.shape[1] if large else group))
        levels = 127 if large else 7
        scales = parts.abs().amax(-1, keepdim=True) / levels
        pieces[name] = [(parts / scales).round().to(torch.int8).flatten(1)]
        pieces[f"{base}.scales"] = [scales.squeeze(-1)]
        if not large and not spinquant:
            pieces[f"{base}.adaptor.A.weight"] = [0.1 * torch.randn(16, weight.shape[1], generator=generator)]
            pieces[f"{base}.adaptor.B.weight"] = [0.1 * torch.randn(weight.shape[0], 16, generator=generator)]
    scheme = {"scheme": "int4_weight_int8_dynamic_activation", "group_size": group, "spinquant": spinquant}
    return {"quantization_args": scheme} | ({} if spinquant else {"lora_args": {"rank": 16, "scale": 2.0}})


# ----------------------------------------------------------------------------------------------------- tokenizers
def tiktoken_model(size: int) -> bytes:
    """A file like Llama 3's: `size` lines with a token in base64 and its rank; bytes first, then pairs by frequency."""
    tokens = [bytes([i]) for i in range(256)]
    words = Counter(word.encode() for word in TEXT.replace(" ", " \0").split("\0"))
    split_words = {word: [bytes([b]) for b in word] for word in words}
    while len(tokens) < size:
        pairs = Counter({pair: 0 for parts in split_words.values() for pair in itertools.pairwise(parts)})
        for word, parts in split_words.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        tokens.append(best[0] + best[1])
        for word, parts in split_words.items():
            split_words[word] = list(_merged(parts, best))
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


def _merged(parts: list[bytes], pair: tuple[bytes, bytes]) -> Iterator[bytes]:
    i = 0
    while i < len(parts):
        both = tuple(parts[i : i + 2]) == pair
        yield parts[i] + parts[i + 1] if both else parts[i]
        i += 2 if both else 1


def sentencepiece_model(size: int) -> bytes:
    """A file like Llama 2's: SentencePiece BPE with byte fallback; size 528 has Code Llama's 16 additional pieces."""
    import io

    import sentencepiece

    infill = 16 if size % 32 == 16 else 0
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.strip().split("\n")),
        model_writer=model,
        vocab_size=size - infill,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    names = [f"▁<unused{i}>" for i in range(infill)]
    names[7:11] = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"][:infill]
    return model.getvalue() + b"".join(_piece(name) for name in names)


def _piece(text: str) -> bytes:
    """An additional entry of the repeated field `pieces` in a ModelProto: text, score 0, type 4 (user defined)."""
    raw = text.encode()
    body = b"\x0a" + bytes([len(raw)]) + raw + b"\x15" + struct.pack("<f", 0.0) + b"\x18\x04"
    return b"\x0a" + bytes([len(body)]) + body


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--like", required=True, choices=names(), metavar="MODEL", help=", ".join(names()))
    parser.add_argument("--shards", type=int, default=1, choices=(1, 2, 4, 8, 16))
    parser.add_argument("--format", default="meta", choices=("meta", "hf", "gguf"))
    parser.add_argument("--quantization", choices=("fp8", "qlora", "spinquant"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    path = make(
        args.out, args.like, shards=args.shards, format=args.format, seed=args.seed, quantization=args.quantization
    )
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
