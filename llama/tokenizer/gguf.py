"""The tokenizer of a GGUF file. Its metadata are converted to a tokenizer.json or to a SentencePiece model, in memory.

LLaMA files have one of two kinds (key tokenizer.ggml.model):
    gpt2   byte-level BPE with a merge list; the key tokenizer.ggml.pre names the rule that splits text into words
    llama  SentencePiece BPE: pieces with scores; a space is written U+2581, unknown characters fall back to bytes
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tokenizers import decoders

from ..checks import boolean, is_integer
from ..errors import TokenizerError
from .base import Tokenizer
from .common import PREFIX, SUFFIX, Named, library_errors
from .huggingface import HuggingFaceTokenizer
from .sentencepiece import ADD_DUMMY_PREFIX, NORMALIZER, PIECE, TRAINER, SentencePieceModelTokenizer, write_field
from .words import DEFAULT, RULES

# llama.cpp's token types (llama.h, enum llama_token_type)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # ids that end an answer
FIM = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}  # infill ids -> their older names

# Fields of SentencePiece's TrainerSpec and NormalizerSpec; BPE is a value of MODEL_TYPE
MODEL_TYPE, BYTE_FALLBACK, UNK_SURFACE, REMOVE_EXTRA_WHITESPACES = 3, 35, 44, 4
BPE = 2


def from_metadata(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer described by a GGUF file's metadata. `where` names the file in errors. Raises TokenizerError."""
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in KINDS:
        found = "has no tokenizer" if model is None else f"has the tokenizer {model!r:.60}"
        raise TokenizerError(
            f"{where} {found}, expected {' or '.join(KINDS)}; name another one: tokenizer=PATH (--tokenizer PATH)"
        )
    with library_errors(where, "the vocabulary can't be built"):
        return KINDS[model](metadata, where)


class GGUFTokenizer(Tokenizer):
    """What both kinds share.

    tokens, types  one per id; the types are corrected: every control token has the type CONTROL
    metadata       the metadata of the file
    """

    def _read_metadata(self, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], Named]:
        """Set the attributes. Returns what tokenizer_config.json and config.json would say about the tokens."""
        self.metadata = metadata
        self.tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        types = metadata.get("tokenizer.ggml.token_type", np.full(len(self.tokens), NORMAL))
        self.types: list[int] = np.asarray(types).tolist()
        ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", *ENDS, *FIM)}
        ids |= {name: metadata.get(f"tokenizer.ggml.{old}_token_id") for name, old in FIM.items() if ids[name] is None}
        for name, id in ids.items():
            if id is not None and not (is_integer(id) and 0 <= id < len(self.tokens)):
                raise ValueError(f"{name}_token_id is {id!r}, outside the vocabulary of {len(self.tokens)} tokens")
        settings = {f"{name}_token": None if ids[name] is None else self.tokens[ids[name]] for name in ("bos", "eos")}
        keys = [key for key in metadata if key.startswith("tokenizer.chat_template")]  # one, or several by name
        template = "\n".join([metadata[key] for key in keys if isinstance(metadata[key], str)])
        stops = [id for name in ENDS if (id := ids[name]) is not None]
        if None not in (fim := [ids[name] for name in FIM]):
            pre, suf, mid = (self.tokens[id] for id in fim)
            self.infill = pre, PREFIX, suf, SUFFIX, mid
            self.types = [CONTROL if id in fim else type for id, type in enumerate(self.types)]
        return settings, Named((), stops, template)

    def _correct(self) -> None:
        """Correct types and ids after reading: two ids may share a token, and the last ids may have no token."""
        self.n_vocab = len(self.tokens)
        self.token_of = {id: token for id, token in enumerate(self.tokens) if self.types[id] != UNUSED}
        for token in self.hidden:
            self.types[self.control[token]] = CONTROL

    def _flag(self, name: str, default: bool) -> bool:
        return boolean(name, self.metadata.get(f"tokenizer.ggml.{name}", default))


class ByteLevelTokenizer(GGUFTokenizer, HuggingFaceTokenizer):
    """GPT-2's scheme: bytes are written as printable characters, text is split into words, words are merged by BPE."""

    def __init__(self, metadata: Mapping[str, Any], where: str):
        settings, named = self._read_metadata(metadata)
        self.pre = metadata.get("tokenizer.ggml.pre", DEFAULT)
        if self.pre not in RULES:
            raise TokenizerError(
                f"{where}: pre-tokenizer {self.pre!r:.60} is not supported, and another one would split text"
                f" differently; supported: {', '.join(RULES)}; use the model's Hugging Face folder"
            )
        rule, tokens = RULES[self.pre], list(zip(self.tokens, self.types, strict=True))
        settings["add_bos_token"] = self._flag("add_bos_token", rule.add_bos)
        source = {
            "model": {
                "vocab": {t: id for id, (t, type) in enumerate(tokens) if type in (NORMAL, CONTROL, USER_DEFINED)},
                "merges": metadata["tokenizer.ggml.merges"],
                "ignore_merges": rule.ignore_merges,
            },
            "added_tokens": [
                {"content": t, "special": type == CONTROL} for t, type in tokens if type in (CONTROL, USER_DEFINED)
            ],
            "normalizer": state(rule.normalizer),
            "pre_tokenizer": state(rule.words),
            "decoder": state(decoders.ByteLevel()),
        }
        super().__init__(source, where, settings, named)
        self.kind = f"byte-level BPE ({self.pre})"
        self._correct()


class SentencePieceTokenizer(GGUFTokenizer, SentencePieceModelTokenizer):
    """The scheme of Llama 1 and 2: the text is one word, merged in the order of the pieces' scores."""

    def __init__(self, metadata: Mapping[str, Any], where: str):
        settings, named = self._read_metadata(metadata)
        scores = np.asarray(metadata["tokenizer.ggml.scores"], "<f4")
        if not np.isfinite(scores).all():
            raise ValueError("tokenizer.ggml.scores has a value that is not finite")
        # The fields of a piece: its text has the number 1, its score (four bytes) 2, its type 3
        score_and_type = [b"\x15%b\x18%c" % pair for pair in zip(scores.view("V4").tolist(), self.types, strict=True)]
        pieces = [
            write_field(1, token.encode()) + more for token, more in zip(self.tokens, score_and_type, strict=True)
        ]
        trainer = write_field(MODEL_TYPE, BPE) + write_field(BYTE_FALLBACK, int(BYTE in self.types))
        trainer += write_field(UNK_SURFACE, b"")
        normalizer = write_field(ADD_DUMMY_PREFIX, int(self._flag("add_space_prefix", True)))
        normalizer += write_field(REMOVE_EXTRA_WHITESPACES, 0)
        model = {PIECE: pieces, TRAINER: [trainer], NORMALIZER: [normalizer]}
        settings |= {"add_bos_token": self._flag("add_bos_token", True), "legacy": True}
        super().__init__(model, where, settings, named)
        self.kind = "SentencePiece BPE with byte fallback"
        self._correct()


def state(step: Any) -> Any:
    """A step of the library as it is written in a tokenizer.json."""
    return None if step is None else json.loads(step.__getstate__())


KINDS: dict[str, Callable[[Mapping[str, Any], str], Tokenizer]] = {
    "gpt2": ByteLevelTokenizer,
    "llama": SentencePieceTokenizer,
}
