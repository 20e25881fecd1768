"""The tokenizer of a GGUF file: its metadata as a tokenizer.json or as a SentencePiece model, run by those readers.

LLaMA files have one of two kinds (key tokenizer.ggml.model):
    gpt2   byte-level BPE with a merge list; the key tokenizer.ggml.pre names the rule that splits text into words
    llama  SentencePiece BPE: pieces with scores; a space is written U+2581, unknown characters fall back to bytes
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..checks import boolean, is_integer
from ..errors import TokenizerError
from .base import Tokenizer
from .common import BYTE_OF, Named, library_errors
from .huggingface import HuggingFaceTokenizer
from .sentencepiece import (
    ADD_DUMMY_PREFIX,
    NORMALIZER_SPEC,
    PIECE,
    TRAINER_SPEC,
    SentencePieceModelTokenizer,
    write_field,
)
from .words import DEFAULT, PRE

__all__ = ["BYTE_OF", "PRE", "ByteLevelTokenizer", "GGUFTokenizer", "SentencePieceTokenizer", "from_metadata"]

# llama.cpp's token types (llama.h, enum llama_token_type)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Other tokens that metadata keys name: they are control tokens even if their type is user-defined
SPECIAL_NAMES = (
    "padding", "seperator", "separator", "cls", "mask", "prefix", "suffix", "middle", "fim_pre", "fim_suf", "fim_mid",
    "fim_pad", "fim_rep", "fim_sep",
)  # fmt: skip

# Fields of SentencePiece's TrainerSpec and NormalizerSpec; BPE is a value of MODEL_TYPE
MODEL_TYPE, BYTE_FALLBACK, REMOVE_EXTRA_WHITESPACES = 3, 35, 4
BPE = 2


def from_metadata(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer described by a GGUF file's metadata. `where` names the file in errors. Raises TokenizerError."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise TokenizerError(
            f"{where}: the file has no tokenizer (no key tokenizer.ggml.model); name one with --tokenizer PATH"
        )
    if not isinstance(model, str) or model not in KINDS:
        raise TokenizerError(
            f"{where}: tokenizer model {model!r:.60} is not supported; supported:"
            f" {', '.join(KINDS)}; use the model's Hugging Face folder, or name another tokenizer with --tokenizer"
        )
    with library_errors(where, "the vocabulary can't be built"):
        return KINDS[model](metadata, where)


class GGUFTokenizer(Tokenizer):
    """Common to both kinds: the tokens, their types and the ids that the file names.

    tokens, types  one per id; the types are corrected: every control token has the type CONTROL
    metadata       the metadata of the file
    """

    def __init__(self, metadata: Mapping[str, Any], where: str):
        self.metadata, self._where = metadata, where
        self.tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        self.n_vocab = len(self.tokens)
        types = metadata.get("tokenizer.ggml.token_type", np.full(self.n_vocab, NORMAL))
        self.types: list[int] = np.asarray(types).tolist()
        ends = {name: self._id(name) for name in ("bos", "eos", "eot", "eom")}
        for name in SPECIAL_NAMES:
            id = self._id(name)
            if id is not None and self.types[id] == USER_DEFINED:  # not a normal one, such as "!"
                self.types[id] = CONTROL
        token = {name: None if id is None else self.tokens[id] for name, id in ends.items()}
        settings = {"bos_token": token["bos"], "eos_token": token["eos"]}
        template = metadata.get("tokenizer.chat_template")
        stops = [id for name, id in ends.items() if name != "bos" and id is not None]
        inner = self._read(settings, Named((), stops, template if isinstance(template, str) else ""))
        inner.n_vocab = self.n_vocab  # the last ids may have no token
        for name in ("kind", "bos_id", "control", "stop_ids", "strips_leading_space", "strips"):
            setattr(self, name, getattr(inner, name))
        self._inner, self.eos_id = inner, ends["eos"]
        for id in self.control.values():
            if not inner.token_bytes(id):
                self.types[id] = CONTROL

    @abstractmethod
    def _read(self, settings: dict[str, Any], named: Named) -> Tokenizer:
        """The tokenizer of the same vocabulary in another format."""

    def _id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        id = self.metadata.get(key)
        if id is None:
            return None
        if not (is_integer(id) and 0 <= id < self.n_vocab):
            raise TokenizerError(f"{self._where}: {key} is {id!r}, outside the vocabulary of {self.n_vocab} tokens")
        return id

    def _flag(self, name: str, default: bool) -> bool:
        key = f"tokenizer.ggml.{name}"
        return boolean(f"{self._where}: {key}", self.metadata.get(key, default), TokenizerError)

    def _content(self) -> bytes:
        entries = {key: value for key, value in self.metadata.items() if key.startswith("tokenizer.")}
        return json.dumps(entries, default=lambda array: array.tolist()).encode()

    def _encode(self, text: str) -> list[int]:
        return self._inner._encode(text)

    def _encode_special(self, text: str) -> list[int]:
        return self._inner._encode_special(text)

    def _encode_after_control(self, text: str) -> list[int]:
        return self._inner._encode_after_control(text)

    def token_bytes(self, id: int) -> bytes:
        return self._inner.token_bytes(id)


class ByteLevelTokenizer(GGUFTokenizer):
    """GPT-2's scheme: bytes are written as printable characters, text is split into words, words are merged by BPE."""

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs of tokens, in the order in which they are merged."""
        return [(left, right) for left, right in map(str.split, self.metadata["tokenizer.ggml.merges"])]

    def _read(self, settings: dict[str, Any], named: Named) -> Tokenizer:
        pre = self.metadata.get("tokenizer.ggml.pre", DEFAULT)
        if not isinstance(pre, str) or pre not in PRE:
            raise TokenizerError(
                f"{self._where}: pre-tokenizer {pre!r:.60} is not supported, and another one would split text"
                f" differently; supported: {', '.join(PRE)}; use the model's Hugging Face folder"
            )
        rule = PRE[pre]
        self.pre: str = pre
        self.add_bos = self._flag("add_bos_token", rule.add_bos)
        kinds = list(zip(self.tokens, self.types, strict=True))
        source = {
            "model": {
                "type": "BPE",
                "vocab": {
                    token: id for id, (token, type) in enumerate(kinds) if type in (NORMAL, CONTROL, USER_DEFINED)
                },
                "merges": self.metadata["tokenizer.ggml.merges"],
                "ignore_merges": rule.ignore_merges,
            },
            "added_tokens": [
                {"content": token, "special": type == CONTROL}
                for token, type in kinds
                if type in (CONTROL, USER_DEFINED)
            ],
            "normalizer": state(rule.normalizer()),
            "pre_tokenizer": state(rule.words()),
            "decoder": {"type": "ByteLevel"},
        }
        return HuggingFaceTokenizer(source, self._where, settings, named)


def state(step: Any) -> Any:
    """A step of the library as it is written in a tokenizer.json."""
    return None if step is None else json.loads(step.__getstate__())


class SentencePieceTokenizer(GGUFTokenizer):
    """The scheme of Llama 1 and 2: the text is one word, merged in the order of the pieces' scores."""

    def _read(self, settings: dict[str, Any], named: Named) -> Tokenizer:
        self.add_bos = self._flag("add_bos_token", True)
        prefix = self._flag("add_space_prefix", True)
        scores = np.asarray(self.metadata["tokenizer.ggml.scores"], "<f4")
        if not np.isfinite(scores).all():
            raise TokenizerError(f"{self._where}: tokenizer.ggml.scores has a value that is not finite")
        packed = [scores[i : i + 1].tobytes() for i in range(len(scores))]
        # A piece: its text (field 1), score (2, four bytes) and type (3)
        pieces = [
            write_field(PIECE, write_field(1, token.encode()) + b"\x15" + score + bytes([0x18, type]))
            for token, score, type in zip(self.tokens, packed, self.types, strict=True)
        ]
        trainer = write_field(MODEL_TYPE, BPE) + write_field(BYTE_FALLBACK, int(BYTE in self.types))
        normalizer = write_field(ADD_DUMMY_PREFIX, int(prefix)) + write_field(REMOVE_EXTRA_WHITESPACES, 0)
        model = [*pieces, write_field(TRAINER_SPEC, trainer), write_field(NORMALIZER_SPEC, normalizer)]
        # As in llama.cpp, a space is added only before a text, or after every control token
        return SentencePieceModelTokenizer(b"".join(model), self._where, named, {**settings, "legacy": True})


KINDS = {"gpt2": ByteLevelTokenizer, "llama": SentencePieceTokenizer}
