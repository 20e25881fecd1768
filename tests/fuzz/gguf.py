"""GGUF files: the header up to ModelConfig and RoPE scaling, then every tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llama.checkpoint import gguf, open_checkpoint
from llama.config import ModelConfig
from llama.tools import verify

from .. import tiny
from . import law

CONFIG = ModelConfig(32, 1, 2, 1, 16, 32, 8, max_seq_len=64)


class Harness(law.Harness):
    words = (
        *(key.encode() for key in (*tiny.architecture(), *(f"llama.{key}" for key in gguf.PLAIN_VALUES))),
        b"general.architecture", b"general.alignment", b"split.count", b"split.no", b"llama.rope.scaling.type",
        b"llama.rope.scaling.factor", b"llama.rope.scaling.attn_factor", b"longrope", b"yarn", b"linear",
        b"llama.rope.scale_linear", b"llama.expert_count", b"rope_freqs.weight", b"rope_factors_long.weight",
    )  # fmt: skip

    def seeds(self) -> Iterable[bytes]:
        none = dict.fromkeys((*tiny.byte_vocabulary(), "general.name"))
        yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
        divisors = {"rope_freqs.weight": torch.linspace(1, 8, 8)}
        path = self.folder / "seed.gguf"
        variants: tuple[tuple[str, dict[str, Any], Any], ...] = (
            ("Q4_0", {}, None), ("Q8_0", yarn, None), ("F16", {}, divisors), ("F32", {"split.count": 1}, None),
        )  # fmt: skip
        for quantization, more, extra in variants:
            tiny.write_gguf(path, CONFIG, quantization=quantization, metadata={**none, **more}, extra=extra)
            yield path.read_bytes()
        path.unlink()

    def calls(self, data: bytes) -> Iterator[law.Call]:
        path = self.put("model.gguf", data)
        yield partial(read, path)
        yield partial(list, verify.verify(path))


def read(path: Path) -> None:
    """Read everything that a checkpoint contains; the model is not built."""
    checkpoint = open_checkpoint(path)
    law.inspect(checkpoint)
    for name in checkpoint.shapes:
        checkpoint.stored(name)
        if checkpoint.tensor(name).shape != checkpoint.shapes[name]:
            raise law.Finding(f"{name}: the shape differs from the one in the header")
        checkpoint.blocks(name)
        checkpoint.release(name)
