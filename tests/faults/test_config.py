"""config.json and the index of weights: hostile values, files that were mixed up."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llama.checkpoint import open_checkpoint
from llama.errors import LlamaError
from llama.tools.convert import convert

from ..scripts import make_tiny
from ..test_huggingface import edit
from .conftest import Try

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = ("--raw", "a", "-n", "3", "--device", "cpu", "--dtype", "float32", "--temperature", "0")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny.make(tmp_path_factory.mktemp("original") / "hf", "llama-3.1-8b", format="hf")


def test_code_that_a_configuration_names_is_not_run(original: Path, tmp_path: Path, attempt: Try) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "hf"))
    evil = "import os\nopen(os.environ['CANARY'], 'w').close()\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "evil.py", "__init__.py"):
        (folder / name).write_text(evil)
    expected = attempt("generate", *RUN, "-m", folder)
    assert expected.survived()
    edit(folder, auto_map={"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"},
         trust_remote_code=True, _attn_implementation_internal="evil/evil", _attn_implementation="evil/evil",
         custom_pipelines={"text-generation": {"impl": "evil.Evil"}})  # fmt: skip
    assert attempt("generate", *RUN, "-m", folder).stdout == expected.stdout != b""


FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM = "model.norm.weight"
Change = Callable[[Path], object]


@pytest.fixture
def many(original: Path, tmp_path: Path) -> Path:
    """The weights in three files."""
    return convert(original, tmp_path / "many", "hf", shards=3).path


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
def test_each_fault_of_the_index_is_refused(many: Path, name: str) -> None:
    change, words = INDEXES[name]
    change(many)
    with pytest.raises(LlamaError, match=re.escape(words)):
        open_checkpoint(many)


@pytest.mark.parametrize("damage", ["cut", "empty", "folder", "pipe", "torch"])
def test_a_pickle_never_replaces_a_damaged_file(original: Path, tmp_path: Path, attempt: Try, damage: str) -> None:
    one = Path(shutil.copytree(original, tmp_path / "one"))
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
