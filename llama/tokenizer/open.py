"""Open a tokenizer file. Its content determines its kind, because Llama 2's and Llama 3's files have the same name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from . import huggingface, sentencepiece, tiktoken
from .base import Tokenizer
from .common import NOTHING, Named, read_file

Settings = Mapping[str, Any] | None

# (whether a file begins like this kind, the reader of the kind); a new kind adds one line
KINDS: list[tuple[Callable[[bytes], bool], Callable[[bytes, str, Settings, Named], Tokenizer]]] = [
    (huggingface.recognizes, huggingface.HuggingFaceTokenizer),
    (tiktoken.recognizes, lambda data, where, _, named: tiktoken.TiktokenTokenizer(data, where, named)),
    (
        sentencepiece.recognizes,
        lambda data, where, _, named: sentencepiece.SentencePieceModelTokenizer(data, where, named),
    ),
]

# Files opened by mistake: their first bytes, what they are and the remedy
MISTAKES = [
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself; run 'git lfs pull' in its repository"),
    (b"<!doctype", "a web page, probably an error page saved in place of the download; download it again"),
    (b"<html", "a web page, probably an error page saved in place of the download; download it again"),
    (b"gguf", "a GGUF file, which contains weights and tokenizer; pass it with --model"),
    (b"pk\x03\x04", "a zip archive (perhaps a torch .pth); name the tokenizer.model or tokenizer.json instead"),
    (b"\x1f\x8b", "a gzip archive; decompress it first"),
]


def is_tokenizer(path: Path) -> bool:
    """Whether a file begins like a tokenizer file of any kind."""
    with open(path, "rb") as file:
        start = file.read(256)
    return any(recognizes(start) for recognizes, _ in KINDS)


def open_tokenizer(path: Path, settings: Settings = None, named: Named = NOTHING) -> Tokenizer:
    """The tokenizer of a file: a tokenizer.json, or a tokenizer.model of any LLaMA. Raises TokenizerError.

    settings  the parsed tokenizer_config.json that belongs to a tokenizer.json; ignored for a tokenizer.model
    named     what the other files of the checkpoint say about its tokens
    """
    data = read_file(path)
    start = data[:256]
    for recognizes, reader in KINDS:
        if recognizes(start):
            return reader(data, str(path), settings, named)
    for prefix, meaning in MISTAKES:
        if start.lstrip().lower().startswith(prefix):
            raise TokenizerError(f"{path} is {meaning}")
    raise TokenizerError(
        f"{path} is not a tokenizer file: expected a tokenizer.json, Llama 3's tokenizer.model (lines of base64 and"
        f" rank) or Llama 2's (a SentencePiece model); it begins with {start[:8]!r}"
    )
