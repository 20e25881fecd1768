"""SECURITY.md agrees with the code: files, commands, limits."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from llama.chat import template
from llama.checkpoint import documents, gguf, open_checkpoint, safetensors_header, torch_pickle
from llama.engine import compiled, kernels
from llama.errors import CheckpointError
from llama.system import child, folders
from llama.tokenizer import common, patterns, steps

from . import fuzz
from .fuzz import law
from .scripts import make_tiny

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:tests|llama|\.ci)/[\w./]*|pyproject\.toml)`", TEXT))))
def test_files_it_names_exist(name: str) -> None:
    assert (ROOT / name).exists()


def test_numbers_it_names_are_correct() -> None:
    for row in (
        f"JSON document | {documents.LARGEST >> 20} MiB",
        f"tokenizer file | {common.MAX_FILE_BYTES >> 20} MiB",
        f"safetensors header | {safetensors_header.LARGEST >> 20} MiB",
        f"GGUF header | {gguf.LARGEST_HEADER >> 20} MiB, {gguf.MOST_STRINGS:,} strings",
        f"pickle in a torch file | {torch_pickle.LARGEST_PICKLE >> 20} MiB, {torch_pickle.MOST_OPERATIONS:,} operations",
        f"token | {common.LONGEST_TOKEN:,} characters",
        f"normalizer and pre-tokenizer of a `tokenizer.json` | {steps.MOST_STEPS} steps of known types; {steps.LARGEST_GROWTH} characters of output",
        f"all regular expressions of a `tokenizer.json` together | {patterns.LONGEST:,} characters, {patterns.MOST_CLASSES} character classes",
        f"chat template | {template.SECONDS:g} s of processor time, plus {child.PER_MEGABYTE:g} s per megabyte of the"
        f" conversation; {template.SPACE >> 20} MiB, plus {child.COPIES} times the size",
    ):
        assert f"| {row}" in TEXT, row
    assert f"stopped after {child.WAIT:g} seconds of real time" in TEXT
    assert f"{law.SECONDS:g} s of processor time, {law.MEMORY >> 20} MB" in TEXT
    assert f"tries {['', '', '', '', '', '', '', '', 'eight', 'nine', 'ten'][len(fuzz.NAMES)]} kinds" in TEXT
    assert "--seconds 20" in (ROOT / ".ci/run").read_text()


def test_nothing_is_unpickled() -> None:
    unpickles = re.compile(r"torch\.load\(|\bpickle\.(loads?|Unpickler)\b|weights_only=")
    assert not [path for path in (ROOT / "llama").rglob("*.py") if unpickles.search(path.read_text())]
    assert unpickles.search("torch.load(path)")


def test_code_is_loaded_only_from_the_checked_cache() -> None:
    loading = re.compile(r"ops\.load_library\((.*?)\)|CDLL\((.*?)\)|AOTIModelPackageLoader\((.*?),")
    found = {
        (path.name, next(filter(None, match.groups())))
        for path in (ROOT / "llama").rglob("*.py")
        for match in loading.finditer(path.read_text())
    }
    found = {(file, argument) for file, argument in found if argument != "None"}  # this process itself
    # OpenMP in runtime.py is already loaded.
    assert found == {("kernels.py", "path"), ("compiled.py", "path"), ("runtime.py", "path")}
    assert kernels.load_code is compiled.load_code is folders.load_code


@pytest.mark.parametrize(
    ("content", "size", "words"), [(b"ab\xff", 3, "not UTF-8 (byte 2)"), (b"", 2**30, "1,073,741,824 bytes")]
)
def test_a_chat_template_file_is_checked_for_size_and_encoding(
    content: bytes, size: int, words: str, tmp_path: Path
) -> None:
    path = make_tiny.make(tmp_path / "hf", "llama-3-8b", format="hf")
    file = path / "chat_template.jinja"
    file.write_bytes(content)
    os.truncate(file, size)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    assert str(file) in str(error.value)
    assert words in str(error.value)
