"""The official models: their architectures in configs/, and their repositories on the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from types import MappingProxyType

from ..config import ModelConfig

# Meta's repositories on the hub; the first one whose name begins like a given one is suggested for it.
REPOSITORIES = (
    *(f"meta-llama/Llama-2-{n}b{chat}{hf}" for n in (7, 13, 70) for chat in ("", "-chat") for hf in ("", "-hf")),
    *(f"meta-llama/Meta-Llama-3-{n}B{instruct}" for n in (8, 70) for instruct in ("", "-Instruct")),
    *(f"meta-llama/Llama-3.1-{n}B{instruct}" for n in (8, 70, 405) for instruct in ("", "-Instruct")),
    *(f"meta-llama/Llama-3.2-{n}B{instruct}" for n in (3, 1) for instruct in ("", "-Instruct")),
    "meta-llama/Llama-3.3-70B-Instruct",
    *(f"codellama/CodeLlama-{n}b{kind}-hf" for n in (7, 13, 34, 70) for kind in ("", "-Python", "-Instruct")),
)


def repository_of(name: str) -> str | None:
    """The repository of an official model on the hub, or None: 'llama-3-8b' -> 'meta-llama/Meta-Llama-3-8B'.

    name  a name or path, in the spelling of Meta, Hugging Face or Ollama
    """

    def spelled(path: str) -> str:
        return re.sub("[^a-z0-9]", "", path.rstrip("/").rpartition("/")[2].lower()).removeprefix("meta")

    begun = [one for one in REPOSITORIES if spelled(one).startswith(spelled(name))]
    return begun[0] if begun and len(spelled(name)) >= len("llama2") else None


@cache
def official() -> MappingProxyType[str, ModelConfig]:
    """Name -> architecture of every model in configs/."""
    package = Path(__file__).resolve().parents[1]
    files = sorted((package / "configs").glob("*.json")) or sorted((package.parent / "configs").glob("*.json"))
    return MappingProxyType({file.stem: ModelConfig(**json.loads(file.read_text())) for file in files})


def names_of(config: ModelConfig) -> list[str]:
    """The official models with this configuration, else those equal in all but what Meta's files lack or changed.

    Several models can share one architecture: LLaMA 1 and Llama 2 with 7 billion parameters differ in their weights.
    """

    def loose(one: ModelConfig) -> ModelConfig:
        return dataclasses.replace(one, max_seq_len=1, norm_eps=1e-5, tie_embeddings=False)

    exact = [name for name, other in official().items() if other == config]
    return exact or [name for name, other in official().items() if loose(other) == loose(config)]
