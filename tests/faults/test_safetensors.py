"""Hugging Face folders: hostile headers and indexes, links, and files that were mixed up."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llama.tools.convert import convert

from ..scripts import make_tiny
from .conftest import Try

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = ("--raw", "a model", "-n", "8", "--temperature", "0", "--device", "cpu", "--dtype", "float32")
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.norm.weight"
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in one file (one/) and in three (many/)."""
    root = tmp_path_factory.mktemp("originals")
    make_tiny.make(root / "meta", "llama-3-8b")
    convert(root / "meta", root / "one", "hf")
    convert(root / "meta", root / "many", "hf", shards=3)
    return root


@pytest.fixture
def one(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "one", tmp_path / "one"))


@pytest.fixture
def many(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "many", tmp_path / "many"))


def shard(folder: Path, number: int = 1) -> Path:
    return folder / f"model-{number:05d}-of-00003.safetensors"


def assign(value: Any) -> Change:
    """Set the file of a tensor in the index."""

    def change(folder: Path) -> None:
        document = json.loads((folder / INDEX).read_text())
        document["weight_map"][NORM] = value
        (folder / INDEX).write_text(json.dumps(document))

    return change


OUTSIDE = ("../x.safetensors", "/etc/passwd", "", "..", "\0", "C:\\x", 5)
INDEXES: dict[str, tuple[Change, str]] = {
    **{repr(value): (assign(value), INDEX) for value in OUTSIDE},
    "another file of the folder": (assign("config.json"), "config.json"),
    "a file that is not there": (assign("x.safetensors"), "x.safetensors"),
    "a tensor in another shard": (assign("model-00001-of-00003.safetensors"), NORM),
    "a missing shard": (lambda d: shard(d, 2).unlink(), "model-00002"),
    "a list": (lambda d: (d / INDEX).write_text('{"weight_map": []}'), "weight_map"),
    "a folder": (lambda d: (shard(d).unlink(), shard(d).mkdir()), "model-00001"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_each_fault_of_the_index_is_refused(many: Path, attempt: Try, name: str) -> None:
    change, words = INDEXES[name]
    change(many)
    attempt("generate", *RUN, "-m", many).refused(words)


@pytest.mark.parametrize("damage", ["cut", "empty", "folder", "pipe", "torch"])
def test_a_pickle_never_replaces_a_damaged_file(one: Path, attempt: Try, damage: str) -> None:
    file, state = one / FILE, load_file(one / FILE)
    torch.save(state, one / "pytorch_model.bin")
    data = file.read_bytes()
    file.unlink()
    if damage in ("folder", "pipe"):
        (os.mkdir if damage == "folder" else os.mkfifo)(file)
    elif damage == "torch":
        torch.save(state, file)
    else:
        file.write_bytes({"cut": data[:-5], "empty": b""}[damage])
    attempt("generate", *RUN, "-m", one).refused(FILE)
