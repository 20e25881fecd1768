"""The tokenizer inside a GGUF file, built with the `tokenizers` library from the vocabulary the file carries.

Two kinds occur in LLaMA files (key tokenizer.ggml.model):
    gpt2   byte-level BPE with a merge list; key tokenizer.ggml.pre names how text is cut into words first
    llama  SentencePiece BPE: pieces with scores, a space is written U+2581, unknown characters fall back to bytes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ..errors import TokenizerError
from .base import Tokenizer
from .common import (
    BYTE_OF,
    CODE_LLAMA_CONTROL,
    LLAMA3_WORDS,
    byte_level_bytes,
    byte_piece,
    check_kept,
    library_errors,
    looks_control,
    missing_bytes,
    piece_bytes,
    stop_ids,
)

__all__ = ["BYTE_OF", "PRE", "ByteLevelTokenizer", "GGUFTokenizer", "SentencePieceTokenizer", "from_metadata"]

# llama.cpp's token types (llama.h, enum llama_token_type)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_words() -> pre_tokenizers.PreTokenizer:
    """Every digit is a word of its own, then GPT-2's pattern (tokenizer.json of HuggingFaceTB/SmolLM2)."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _llama3_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# tokenizer.ggml.pre -> (how words are cut, whether a word that is a token skips the merges, add_bos by default)
PRE = {
    "gpt-2": (_gpt2_words, False, False),
    "smollm": (_smollm_words, False, False),
    "llama-bpe": (_llama3_words, True, True),
    "llama3": (_llama3_words, True, True),
    "llama-v3": (_llama3_words, True, True),
}


def from_metadata(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer a GGUF's metadata describes; `where` is the file, for messages. Raises TokenizerError."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise TokenizerError(f"{where}: the file carries no tokenizer (no key tokenizer.ggml.model)")
    if not isinstance(model, str) or model not in KINDS:
        raise TokenizerError(f"{where}: tokenizer model {model!r:.60} is not supported; supported: {', '.join(KINDS)}")
    with library_errors(where, "the vocabulary can't be built"):
        return KINDS[model](metadata, where)


class GGUFTokenizer(Tokenizer):
    """What both kinds share: the vocabulary, its types, and the ids the file names."""

    always_control: frozenset[str] = frozenset()

    def __init__(self, metadata: Mapping[str, Any], where: str):
        self.where = where
        self.metadata = metadata
        self._backend: Backend
        self.tokens = _strings(metadata, "tokenizer.ggml.tokens", where)
        self.n_vocab = len(self.tokens)
        types = _numbers(metadata, "tokenizer.ggml.token_type", where, self.n_vocab, "token types")
        kinds = [NORMAL] * self.n_vocab if types is None else types.tolist()
        if odd := set(kinds) - set(range(BYTE + 1)):
            raise TokenizerError(f"{where}: tokenizer.ggml.token_type holds {min(odd)}; types go from 0 to {BYTE}")
        self.types: list[int] = kinds
        for id, token in enumerate(self.tokens):
            # Some converters mark control strings as user-defined; written like <|this|> they are control all the same.
            if token in self.always_control or (self.types[id] == USER_DEFINED and looks_control(token)):
                self.types[id] = CONTROL
        self.control = {token: id for id, token in enumerate(self.tokens) if self.types[id] == CONTROL}
        self.bos_id = self._id(metadata, "bos")
        self.eos_id = self._id(metadata, "eos")
        self.stop_ids = stop_ids(self.control, [self.eos_id, self._id(metadata, "eot"), self._id(metadata, "eom")])

    def _id(self, metadata: Mapping[str, Any], name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        id = metadata.get(key)
        if id is None:
            return None
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < self.n_vocab:
            raise TokenizerError(f"{self.where}: {key} is {id!r}, outside the vocabulary of {self.n_vocab} tokens")
        return id

    def _match_user_defined(self) -> None:
        """User-defined tokens are matched whole, before anything is cut or merged."""
        texts = [token for id, token in enumerate(self.tokens) if self.types[id] == USER_DEFINED]
        if texts:
            self._backend.add_tokens([AddedToken(text, normalized=False) for text in texts])

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _plain(self, *also: int) -> dict[str, int]:
        """The tokens that text may become: all but the control ones, so that no text can ever reach those."""
        allowed = {NORMAL, USER_DEFINED, *also}
        return {token: id for id, token in enumerate(self.tokens) if self.types[id] in allowed}


class ByteLevelTokenizer(GGUFTokenizer):
    """GPT-2's scheme: each byte is written as one printable character, words are cut, then merged pair by pair."""

    def __init__(self, metadata: Mapping[str, Any], where: str):
        super().__init__(metadata, where)
        pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
        if not isinstance(pre, str) or pre not in PRE:
            raise TokenizerError(f"{where}: pre-tokenizer {pre!r:.60} is not supported; supported: {', '.join(PRE)}")
        words, ignore_merges, add_bos = PRE[pre]
        self.pre: str = pre
        self.kind = f"byte-level BPE ({pre})"
        self.add_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", add_bos, where)
        plain = self._plain()
        self._missing = missing_bytes(plain)
        self.merges = [_pair(m, i, where) for i, m in enumerate(_strings(metadata, "tokenizer.ggml.merges", where))]
        for left, right in self.merges:
            if left not in plain or right not in plain or left + right not in plain:
                raise TokenizerError(f"{where}: merge {left!r} + {right!r} is not made of tokens of the vocabulary")
        self._backend = Backend(models.BPE(vocab=plain, merges=self.merges, ignore_merges=ignore_merges))
        self._backend.pre_tokenizer = words()
        self._match_user_defined()

    def _encode(self, text: str) -> list[int]:
        ids = super()._encode(text)
        check_kept(text, lambda: b"".join(map(self.token_bytes, ids)), self._missing, self.where)
        return ids

    def token_bytes(self, id: int) -> bytes:
        self._check(id)
        if self.types[id] == CONTROL:
            return b""
        if self.types[id] == USER_DEFINED:
            return self.tokens[id].encode()  # these are written as they are, not in the byte alphabet
        return byte_level_bytes(self.tokens[id])


class SentencePieceTokenizer(GGUFTokenizer):
    """Llama 1 and 2's scheme: the whole text is one word, merged in the order of the pieces' scores."""

    always_control = CODE_LLAMA_CONTROL

    def __init__(self, metadata: Mapping[str, Any], where: str):
        super().__init__(metadata, where)
        self.kind = "SentencePiece BPE with byte fallback"
        self.add_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", True, where)
        prefix = _flag(metadata, "tokenizer.ggml.add_space_prefix", True, where)
        self.strips_leading_space = prefix
        scores = _numbers(metadata, "tokenizer.ggml.scores", where, self.n_vocab, "scores")
        if scores is None:
            raise TokenizerError(f"{where}: {self.n_vocab} tokens but 0 scores; the vocabulary is damaged")
        unknown = next((token for id, token in enumerate(self.tokens) if self.types[id] == UNKNOWN), None)
        pieces = self._plain()
        # SentencePiece merges the neighbours whose union scores best; a merge list in order of score does the same.
        merges = sorted(
            (
                (-float(scores[id]), cut, piece[:cut], piece[cut:])
                for piece, id in pieces.items()
                for cut in range(1, len(piece))
                if piece[:cut] in pieces and piece[cut:] in pieces
            ),
            key=lambda merge: merge[:2],
        )
        self._backend = Backend(
            models.BPE(
                vocab=self._plain(UNKNOWN, BYTE),
                merges=[(left, right) for _, _, left, right in merges],
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        self._match_user_defined()

    def _encode(self, text: str) -> list[int]:
        # Done here and not by the library's normalizer, which would put a space behind every user-defined piece.
        start = "\u2581" if self.strips_leading_space and text else ""
        return super()._encode(start + text.replace(" ", "\u2581"))

    def _encode_joined(self, text: str) -> list[int]:
        return super()._encode(text.replace(" ", "\u2581"))

    def token_bytes(self, id: int) -> bytes:
        self._check(id)
        if self.types[id] in (CONTROL, UNKNOWN):
            return b""
        byte = byte_piece(self.tokens[id]) if self.types[id] == BYTE else None
        return piece_bytes(self.tokens[id]) if byte is None else bytes([byte])


KINDS = {"gpt2": ByteLevelTokenizer, "llama": SentencePieceTokenizer}


def _strings(metadata: Mapping[str, Any], key: str, where: str) -> Sequence[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        found = "nothing" if value is None else f"an array of something else ({type(value).__name__})"
        raise TokenizerError(f"{where}: {key} must be an array of strings, found {found}")
    return value


def _numbers(metadata: Mapping[str, Any], key: str, where: str, count: int, what: str) -> NDArray[np.generic] | None:
    """An array of `count` numbers, none of them NaN; None where the file has none."""
    value = metadata.get(key)
    if value is None:
        return None
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        found = "an array of something else" if array.ndim else f"{value!r:.60}"
        raise TokenizerError(f"{where}: {key} must be an array of numbers, found {found}; the vocabulary is damaged")
    if len(array) != count:
        raise TokenizerError(f"{where}: {count} tokens but {len(array)} {what}; the vocabulary is damaged")
    if np.isnan(array).any():
        raise TokenizerError(f"{where}: {key} holds NaN; the vocabulary is damaged, fetch the file again")
    return array


def _flag(metadata: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{where}: {key} must be true or false, got {value!r:.60}; the vocabulary is damaged")
    return value


def _pair(merge: str, line: int, where: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise TokenizerError(f"{where}: merge {line} is {merge!r}, expected two tokens with one space between")
    return left, right
