"""The tokenizer of a GGUF file, built with the `tokenizers` library from the file's metadata.

LLaMA files have one of two kinds (key tokenizer.ggml.model):
    gpt2   byte-level BPE with a merge list; the key tokenizer.ggml.pre names the rule that splits text into words
    llama  SentencePiece BPE: pieces with scores; a space is written U+2581, unknown characters fall back to bytes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from ..checks import boolean, is_integer
from ..errors import TokenizerError
from .base import Tokenizer
from .common import (
    BYTE_OF,
    CODE_LLAMA_CONTROL,
    all_splits,
    byte_level_bytes,
    byte_piece,
    check_length,
    check_no_byte_lost,
    library_errors,
    looks_control,
    missing_bytes,
    piece_bytes,
    stop_ids,
    written_by,
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
    """Common to both kinds: the tokens, their types and the ids that the file names."""

    always_control: frozenset[str] = frozenset()

    def __init__(self, metadata: Mapping[str, Any], where: str):
        self._where = where
        self.metadata = metadata
        self._backend: Backend
        self.tokens = _strings(metadata, "tokenizer.ggml.tokens", where)
        self.n_vocab = len(self.tokens)
        types = _numbers(metadata, "tokenizer.ggml.token_type", where, self.n_vocab, "token types")
        self.types: list[int] = [NORMAL] * self.n_vocab if types is None else types.tolist()
        if invalid := set(self.types) - set(range(BYTE + 1)):
            raise TokenizerError(
                f"{where}: tokenizer.ggml.token_type has the type {min(invalid)}, expected 0 to {BYTE}; download"
                " the file again"
            )
        for id, token in enumerate(self.tokens):
            check_length(token, id, where)
            # Some converters mark control strings such as <|this|> as user-defined.
            if token in self.always_control or (self.types[id] == USER_DEFINED and looks_control(token)):
                self.types[id] = CONTROL
        self.bos_id = self._id(metadata, "bos")
        self.eos_id = self._id(metadata, "eos")
        ends = [self.eos_id, self._id(metadata, "eot"), self._id(metadata, "eom")]
        for named in (self.bos_id, *ends):
            if named is not None:
                self.types[named] = CONTROL
        for name in SPECIAL_NAMES:
            named = self._id(metadata, name)
            if named is not None and self.types[named] == USER_DEFINED:  # not a normal one, such as "!"
                self.types[named] = CONTROL
        user_defined = [token for id, token in enumerate(self.tokens) if self.types[id] == USER_DEFINED]
        written = written_by(str(metadata.get("tokenizer.chat_template") or ""), user_defined)
        self.control = {t: id for id, t in enumerate(self.tokens) if self.types[id] == CONTROL or t in written}
        self.stop_ids = stop_ids(self.control, ends)

    def _id(self, metadata: Mapping[str, Any], name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        id = metadata.get(key)
        if id is None:
            return None
        if not (is_integer(id) and 0 <= id < self.n_vocab):
            raise TokenizerError(
                f"{self._where}: {key} is {id!r}, outside the vocabulary of {self.n_vocab} tokens;"
                " download the file again"
            )
        return int(id)

    def _match_user_defined(self) -> None:
        """Make the backend match user-defined tokens before it splits or merges text."""
        texts = [token for token, id in self._plain().items() if self.types[id] == USER_DEFINED]
        if texts:
            self._backend.add_tokens([AddedToken(text, normalized=False) for text in texts])

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _plain(self, *also: int) -> dict[str, int]:
        """Normal and user-defined tokens, and those of the types `also`: no control tokens, so no text becomes one."""
        allowed = {NORMAL, USER_DEFINED, *also}
        return {t: id for id, t in enumerate(self.tokens) if self.types[id] in allowed and self.control.get(t) != id}


class ByteLevelTokenizer(GGUFTokenizer):
    """GPT-2's scheme: bytes are written as printable characters, text is split into words, words are merged by BPE."""

    def __init__(self, metadata: Mapping[str, Any], where: str):
        super().__init__(metadata, where)
        pre = metadata.get("tokenizer.ggml.pre", DEFAULT)
        if not isinstance(pre, str) or pre not in PRE:
            raise TokenizerError(
                f"{where}: pre-tokenizer {pre!r:.60} is not supported, and another one would split text differently;"
                f" supported: {', '.join(PRE)}; use the model's Hugging Face folder, or run it in llama.cpp"
            )
        rule = PRE[pre]
        self.pre: str = pre
        self.kind = f"byte-level BPE ({pre})"
        self.add_bos = _flag(metadata, "add_bos_token", rule.add_bos, where)
        plain = self._plain()
        self._missing = missing_bytes(plain)
        self.merges = [_pair(m, i, where) for i, m in enumerate(_strings(metadata, "tokenizer.ggml.merges", where))]
        for left, right in self.merges:
            if left not in plain or right not in plain or left + right not in plain:
                raise TokenizerError(
                    f"{where}: merge {left!r} + {right!r} is not made of tokens of the vocabulary;"
                    " download the file again"
                )
        self._backend = Backend(models.BPE(vocab=plain, merges=self.merges, ignore_merges=rule.ignore_merges))
        self._backend.normalizer = rule.normalizer()
        self._backend.pre_tokenizer = rule.words()
        self._match_user_defined()

    def _encode(self, text: str) -> list[int]:
        ids = super()._encode(text)
        if self._missing and self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        check_no_byte_lost(text, lambda: b"".join(map(self.token_bytes, ids)), self._missing, self._where)
        return ids

    def token_bytes(self, id: int) -> bytes:
        id = self._check_id(id)
        if self.types[id] == CONTROL:
            return b""
        if self.types[id] == USER_DEFINED:
            return self.tokens[id].encode()  # plain text, not in the byte alphabet
        return byte_level_bytes(self.tokens[id])


class SentencePieceTokenizer(GGUFTokenizer):
    """The scheme of Llama 1 and 2: the text is one word, merged in the order of the pieces' scores."""

    always_control = CODE_LLAMA_CONTROL

    def __init__(self, metadata: Mapping[str, Any], where: str):
        super().__init__(metadata, where)
        self.kind = "SentencePiece BPE with byte fallback"
        self.add_bos = _flag(metadata, "add_bos_token", True, where)
        self.strips_leading_space = _flag(metadata, "add_space_prefix", True, where)
        scores = _numbers(metadata, "tokenizer.ggml.scores", where, self.n_vocab, "scores")
        if scores is None:
            raise TokenizerError(f"{where}: {self.n_vocab} tokens but 0 scores; download the file again")
        unknown = next((token for id, token in enumerate(self.tokens) if self.types[id] == UNKNOWN), None)
        pieces = self._plain()
        # SentencePiece merges the neighbours whose union scores best; a merge list sorted by score does the same.
        merges = sorted(
            all_splits(pieces, pieces, where),
            key=lambda pair: (-float(scores[pieces["".join(pair)]]), len(pair[0])),
        )
        self._backend = Backend(
            models.BPE(
                vocab=self._plain(UNKNOWN, BYTE),
                merges=merges,
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        self._match_user_defined()

    def _encode(self, text: str) -> list[int]:
        # Not done by the library's normalizer, which would add a space after every user-defined piece.
        start = "\u2581" if self.strips_leading_space and text else ""
        return super()._encode(start + text.replace(" ", "\u2581"))

    def _encode_joined(self, text: str) -> list[int]:
        return super()._encode(text.replace(" ", "\u2581"))

    def token_bytes(self, id: int) -> bytes:
        id = self._check_id(id)
        if self.types[id] in (CONTROL, UNKNOWN):
            return b""
        byte = byte_piece(self.tokens[id]) if self.types[id] == BYTE else None
        return piece_bytes(self.tokens[id]) if byte is None else bytes([byte])


KINDS = {"gpt2": ByteLevelTokenizer, "llama": SentencePieceTokenizer}


def _strings(metadata: Mapping[str, Any], key: str, where: str) -> Sequence[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        found = "nothing" if value is None else f"other values ({type(value).__name__})"
        raise TokenizerError(
            f"{where}: {key} must be an array of strings, found {found}; get another conversion of the model"
        )
    return value


def _numbers(metadata: Mapping[str, Any], key: str, where: str, count: int, what: str) -> NDArray[np.generic] | None:
    """An array of `count` numbers without NaN; None if the key is missing."""
    value = metadata.get(key)
    if value is None:
        return None
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        found = "other values" if array.ndim else f"{value!r:.60}"
        raise TokenizerError(f"{where}: {key} must be an array of numbers, found {found}; download the file again")
    if len(array) != count:
        raise TokenizerError(f"{where}: {count} tokens but {len(array)} {what}; download the file again")
    if np.isnan(array).any():
        raise TokenizerError(f"{where}: {key} contains NaN; the vocabulary is damaged, download the file again")
    return array


def _flag(metadata: Mapping[str, Any], name: str, default: bool, where: str) -> bool:
    key = f"tokenizer.ggml.{name}"
    return boolean(f"{where}: {key}", metadata.get(key, default), TokenizerError)


def _pair(merge: str, line: int, where: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise TokenizerError(
            f"{where}: merge {line} is {merge!r}, expected two tokens separated by one space; download the file again"
        )
    return left, right
