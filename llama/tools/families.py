"""The official models: their architectures in configs/."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ..config import ModelConfig


@cache
def official() -> Mapping[str, ModelConfig]:
    """Name -> architecture of every model in configs/."""
    package = Path(__file__).resolve().parents[1]
    files = sorted((package / "configs").glob("*.json")) or sorted((package.parent / "configs").glob("*.json"))
    return {file.stem: ModelConfig(**json.loads(file.read_text())) for file in files}


def names_of(config: ModelConfig) -> list[str]:
    """The official models with this configuration, else those equal in all but what Meta's files lack or changed.

    Several models can share one architecture: LLaMA 1 and Llama 2 with 7 billion parameters differ in their weights.
    """

    def loose(one: ModelConfig) -> ModelConfig:
        return dataclasses.replace(one, max_seq_len=1, norm_eps=1e-5, tie_embeddings=False)

    exact = [name for name, other in official().items() if other == config]
    return exact or [name for name, other in official().items() if loose(other) == loose(config)]
