"""A path to a tokenizer file, its kind decided by what the file holds: Llama 2's and 3's have the same name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from . import huggingface, sentencepiece, tiktoken
from .base import Tokenizer
from .common import read_file

Settings = Mapping[str, Any] | None

# (does the file begin like this kind?, its reader): a new kind adds one line
KINDS: list[tuple[Callable[[bytes], bool], Callable[[bytes, str, Settings], Tokenizer]]] = [
    (huggingface.recognizes, huggingface.HuggingFaceTokenizer),
    (tiktoken.recognizes, lambda data, where, _: tiktoken.TiktokenTokenizer(data, where)),
    (sentencepiece.recognizes, lambda data, where, _: sentencepiece.SentencePieceModelTokenizer(data, where)),
]

# What people hand over by mistake, by its first bytes, and what to do about it.
MISTAKES = [
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself; run 'git lfs pull' where it came from"),
    (b"<!doctype", "a web page, probably an error page saved in place of the download; fetch it again"),
    (b"<html", "a web page, probably an error page saved in place of the download; fetch it again"),
    (b"gguf", "a GGUF file, which holds weights and tokenizer in one; open it as the checkpoint"),
    (b"pk\x03\x04", "a zip archive (a torch .pth, perhaps); name the tokenizer.model or tokenizer.json instead"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
]


def is_tokenizer(path: Path) -> bool:
    """Whether a file begins like one of the kinds."""
    with open(path, "rb") as file:
        start = file.read(256)
    return any(recognizes(start) for recognizes, _ in KINDS)


def open_tokenizer(path: Path, settings: Settings = None) -> Tokenizer:
    """The tokenizer in one file: tokenizer.json, or tokenizer.model of any LLaMA. Raises TokenizerError.

    settings is the parsed tokenizer_config.json, which goes with a tokenizer.json; a tokenizer.model needs none.
    """
    data = read_file(path)
    start = data[:256]
    for recognizes, reader in KINDS:
        if recognizes(start):
            return reader(data, str(path), settings)
    for sign, meaning in MISTAKES:
        if start.lstrip().lower().startswith(sign):
            raise TokenizerError(f"{path} is {meaning}")
    raise TokenizerError(
        f"{path} is no tokenizer file: it begins with {start[:8]!r}; expected tokenizer.json, Llama 3's tokenizer.model"
        f" (lines of base64 and rank) or Llama 2's (a SentencePiece model)"
    )
