"""An example for CONTRIBUTING.md: a folder with the model's own names of tensors, its sizes and a tokenizer."""

from __future__ import annotations

from pathlib import Path

from llama.checkpoint.base import NAMES, Checkpoint, find_tokenizer
from llama.checkpoint.huggingface import StoredWeight, open_file
from llama.config import ModelConfig
from llama.system.documents import read_json
from llama.tokenizer import Tokenizer, open_tokenizer

WEIGHTS = "state.safetensors"


def recognizes(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


class OwnCheckpoint(Checkpoint):
    format = "own"
    names = {name: name for name in NAMES}  # noqa: RUF012

    def __init__(self, folder: Path):
        self.path, self.config = folder, ModelConfig(**read_json(folder / "sizes.json"))
        tensors = open_file(folder / WEIGHTS)
        self._weights = {name: StoredWeight({"": one}, one.shape, one.dtype) for name, one in tensors.items()}
        self.parts = {WEIGHTS: (folder / WEIGHTS).stat().st_size}

    def own_tokenizer(self) -> Tokenizer:
        return open_tokenizer(find_tokenizer(self.path, ["tokenizer.json"]))
