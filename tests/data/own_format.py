"""An example for CONTRIBUTING.md: a folder with the model's own names of tensors, its sizes and a tokenizer."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from llama.checkpoint.base import NAMES, Checkpoint, find_tokenizer
from llama.checkpoint.huggingface import open_file
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
        self.stored_tensors = open_file(folder / WEIGHTS)
        self.shapes = {name: stored.shape for name, stored in self.stored_tensors.items()}
        self.parts = {WEIGHTS: (folder / WEIGHTS).stat().st_size}

    def tensor(self, name: str) -> Tensor:
        return self.stored_tensors[name].read()

    def stored(self, name: str) -> str:
        return self.stored_tensors[name].dtype

    def release(self, name: str) -> None:
        pass  # nothing is mapped

    def own_tokenizer(self) -> Tokenizer:
        return open_tokenizer(find_tokenizer(self.path, ["tokenizer.json"]))
