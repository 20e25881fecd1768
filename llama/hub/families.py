"""The architectures of the official models in configs/, and which of them a configuration matches."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig

# Fields ignored if no model matches exactly: Meta's files lack the context length, and epsilon differs by release.
LOOSE = ("max_seq_len", "norm_eps", "tie_embeddings")


def folder() -> Path:
    """The folder configs/ of the installed package or the checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


@cache
def official() -> MappingProxyType[str, ModelConfig]:
    """Name -> architecture of every model in configs/."""
    files = sorted(folder().glob("*.json"))
    return MappingProxyType({file.stem: ModelConfig(**json.loads(file.read_text())) for file in files})


def named(config: ModelConfig) -> list[str]:
    """The official models with this configuration: those equal in every field, else those equal in all but LOOSE.

    Empty if there are none. Several models can share one architecture: LLaMA 1 and Llama 2 with 7 billion parameters
    differ in their weights, not in their shapes.
    """
    exact = [name for name, other in official().items() if _facts(other) == _facts(config)]
    return exact or [name for name, other in official().items() if _facts(other, LOOSE) == _facts(config, LOOSE)]


def _facts(config: ModelConfig, without: tuple[str, ...] = ()) -> dict[str, Any]:
    facts = dataclasses.asdict(config)
    scaling = facts["rope_scaling"]
    if scaling is not None:
        facts["rope_scaling"] = {key: float(v) if isinstance(v, int | float) else v for key, v in scaling.items()}
    return {key: value for key, value in facts.items() if key not in without}
