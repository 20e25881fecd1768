"""Open a tokenizer file. Its content determines its kind, because Llama 2's and Llama 3's files have the same name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import TokenizerError
from ..system.documents import LARGEST_TOKENIZER, read_file, read_json
from . import huggingface, sentencepiece, tiktoken
from .base import Tokenizer
from .common import NOTHING, Named


def open_tokenizer(path: Path, settings: Mapping[str, Any] | None = None, named: Named = NOTHING) -> Tokenizer:
    """The tokenizer of a file: a tokenizer.json, or a tokenizer.model of any LLaMA. Raises LlamaError.

    settings  the parsed tokenizer_config.json of the folder, if there is one
    named     what the other files of the checkpoint say about its tokens
    """
    data = read_file(path, LARGEST_TOKENIZER)
    where, start = str(path), data[:256]
    if huggingface.recognizes(start):
        return huggingface.HuggingFaceTokenizer(data, where, settings, named)
    if tiktoken.recognizes(start):
        return tiktoken.TiktokenTokenizer(data, where, named)
    if sentencepiece.recognizes(start):
        more = path.with_name("added_tokens.json")
        if more.is_file():  # token -> id; newer files list the same tokens in tokenizer_config.json
            listed = {str(id): {"content": token} for token, id in read_json(more).items()}
            settings = {"added_tokens_decoder": listed, **(settings or {})}
        return sentencepiece.SentencePieceModelTokenizer(data, where, named, settings)
    raise TokenizerError(f"{path} begins with {data[:8]!r}, expected a tokenizer.json or tokenizer.model of a LLaMA")
