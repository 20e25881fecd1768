"""Open a tokenizer file. Its content determines its kind, because Llama 2's and Llama 3's files have the same name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from ..system.documents import LARGEST_TOKENIZER, read_file, read_optional
from . import huggingface, sentencepiece, tiktoken
from .base import Tokenizer
from .common import NOTHING, Named

# (whether a file that begins with these bytes has this kind, its reader); the first that fits is used
KINDS: list[tuple[Callable[[bytes], bool], Callable[[bytes, str, Mapping[str, Any], Named], Tokenizer]]] = [
    (huggingface.recognizes, huggingface.HuggingFaceTokenizer),
    (tiktoken.recognizes, tiktoken.TiktokenTokenizer),
    (sentencepiece.recognizes, sentencepiece.SentencePieceModelTokenizer),
]


def open_tokenizer(path: Path, settings: Mapping[str, Any] | None = None, named: Named = NOTHING) -> Tokenizer:
    """The tokenizer of a file: a tokenizer.json, or a tokenizer.model of any LLaMA. Raises LlamaError.

    settings  the parsed tokenizer_config.json of the folder, if there is one
    named     what the other files of the checkpoint say about its tokens
    """
    data, settings = read_file(path, LARGEST_TOKENIZER), settings or {}
    if settings.get("added_tokens_decoder") is None:  # it replaces the files in which older versions list the tokens
        settings = {**settings, **read_optional(path.with_name("special_tokens_map.json"))}
        ids = read_optional(path.with_name("added_tokens.json"))
        listed = {str(id): {"content": token} for token, id in ids.items()}
        settings |= {"added_tokens_decoder": listed} if listed else {}
    for recognizes, reader in KINDS:
        if recognizes(data[:256]):
            return reader(data, str(path), settings, named)
    raise TokenizerError(f"{path} begins with {data[:8]!r}, expected a tokenizer.json or tokenizer.model of a LLaMA")
