"""The official models: their architectures in configs/, and their repositories on the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig

# Fields ignored if no model matches exactly: Meta's files lack the context length, and epsilon differs by release.
LOOSE = ("max_seq_len", "norm_eps", "tie_embeddings")

# Meta's repositories on the hub; names are compared without case and separators.
REPOSITORIES = (
    *(f"meta-llama/Llama-2-{n}b{chat}{hf}" for hf in ("", "-hf") for n in (7, 13, 70) for chat in ("", "-chat")),
    *(f"meta-llama/Meta-Llama-3-{n}B{instruct}" for n in (8, 70) for instruct in ("", "-Instruct")),
    *(f"meta-llama/Llama-3.1-{n}B{instruct}" for n in (8, 70, 405) for instruct in ("", "-Instruct")),
    *(f"meta-llama/Llama-3.2-{n}B{instruct}" for n in (1, 3) for instruct in ("", "-Instruct")),
    "meta-llama/Llama-3.3-70B-Instruct",
    *(f"codellama/CodeLlama-{n}b{kind}-hf" for n in (7, 13, 34, 70) for kind in ("", "-Python", "-Instruct")),
)
# Names without a size, for the size that Ollama gives them, and one that has no base model
WITHOUT_SIZE = {
    "llama2": "meta-llama/Llama-2-7b-chat-hf",
    "llama3": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama31": "meta-llama/Llama-3.1-8B-Instruct",
    "llama32": "meta-llama/Llama-3.2-3B-Instruct",
    "llama33": "meta-llama/Llama-3.3-70B-Instruct",
    "llama3370b": "meta-llama/Llama-3.3-70B-Instruct",
    "codellama": "codellama/CodeLlama-7b-Instruct-hf",
}


def repository_of(name: str) -> str | None:
    """The repository of an official model on the Hugging Face hub, or None: 'llama-3-8b' -> its repository's name.

    name  a name or path, in the spelling of Meta, Hugging Face or Ollama
    """
    known = dict(WITHOUT_SIZE)
    for repository in REPOSITORIES:
        short = _spelled(repository)
        known |= {short: repository, short.removesuffix("hf"): known.get(short.removesuffix("hf"), repository)}
    return known.get(_spelled(name))


def _spelled(name: str) -> str:
    """The last part of a path in one spelling: 'meta-llama/Meta-Llama-3-8B' -> 'llama38b'."""
    return re.sub("[^a-z0-9]", "", name.rstrip("/").rpartition("/")[2].lower()).removeprefix("meta")


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
