"""The architectures of the official models, which are in configs/."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ..checkpoint import Checkpoint, huggingface, open_checkpoint
from ..config import ModelConfig
from ..errors import CheckpointError
from ..hub import models as hub
from ..system.documents import read_json


@cache
def official() -> Mapping[str, ModelConfig]:
    """Name -> architecture of every model in configs/."""
    package = Path(__file__).resolve().parents[1]
    files = sorted((package / "configs").glob("*.json")) or sorted((package.parent / "configs").glob("*.json"))
    return {file.stem: ModelConfig(**json.loads(file.read_text())) for file in files}


def architecture(
    name: str, tokenizer: str | None = None, quiet: bool = False, *, fetch: bool = True
) -> tuple[ModelConfig, Checkpoint | None]:
    """The configuration of a model, and its checkpoint; None for the latter if `name` is only a configuration."""
    path = Path(name)
    if name in official() and not path.exists() and not (name == hub.DEFAULT and (fetch or hub.find(name))):
        return official()[name], None
    if path.suffix == ".json":
        return huggingface.read_config(read_json(path), str(path))[0], None
    try:
        checkpoint = open_checkpoint(hub.resolve(name, quiet, fetch=fetch), tokenizer)
    except CheckpointError as error:
        if "/" in name:
            raise
        raise CheckpointError(f"{error}; models without files: {', '.join(official())}") from None
    return checkpoint.config, checkpoint


def names_of(config: ModelConfig) -> list[str]:
    """The names of the official models with this configuration.

    If there are none, the comparison leaves out the values that Meta's files lack or changed (`loose`). Several models
    can share one architecture: LLaMA 1 and Llama 2 with 7 billion parameters differ in their weights.
    """

    def loose(one: ModelConfig) -> ModelConfig:
        return dataclasses.replace(one, max_seq_len=1, norm_eps=1e-5, tie_embeddings=False)

    exact = [name for name, other in official().items() if other == config]
    return exact or [name for name, other in official().items() if loose(other) == loose(config)]
