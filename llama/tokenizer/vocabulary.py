"""A vocabulary independent of its file format: extracted from every kind of tokenizer, written to every format.

Tokens are spelled as in GGUF, the most expressive format, with llama.cpp's token types (llama.h, llama_token_type).
Ranks become merges as in Llama 3's published tokenizer.json: all ways to split a token into two.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import TokenizerError
from .base import Tokenizer
from .common import BYTE_OF, all_splits, byte_piece, splits
from .gguf import BYTE, CONTROL, NORMAL, PRE, UNKNOWN, UNUSED, USER_DEFINED, ByteLevelTokenizer, GGUFTokenizer
from .huggingface import HuggingFaceTokenizer, parse
from .sentencepiece import (
    CHARSMAP,
    DENORMALIZER_SPEC,
    NORMALIZER_SPEC,
    PIECE,
    TRAINER_SPEC,
    TYPE,
    SentencePieceModelTokenizer,
    last_number,
    read_fields,
)
from .steps import parts
from .tiktoken import N_CONTROL, TiktokenTokenizer

SPACE = "\u2581"
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
LLAMA3 = "llama-bpe"

# Fields of SentencePiece, ModelProto, TrainerSpec and NormalizerSpec (google/sentencepiece, sentencepiece_model.proto)
TEXT, SCORE = 1, 2
MODEL_TYPE, WHITESPACE_AS_SUFFIX, BYTE_FALLBACK = 3, 24, 35
REMOVE_EXTRA_WHITESPACES, ESCAPE_WHITESPACES = 4, 5
BPE = 2  # a value of MODEL_TYPE

Pair = tuple[str, str]


@dataclass(frozen=True)
class Vocabulary:
    """Tokens, and the rules by which text becomes tokens.

    pieces         True for SentencePiece's kind, False for byte-level BPE in GPT-2's alphabet
    tokens, types  one per id; user-defined tokens are plain text, even in byte-level BPE
    bos, eos       ids of begin and end of text, or None
    stops          ids that end an answer
    add_bos        True if the model was trained with bos before every text
    scores         pieces only: neighbours whose union scores best are merged first
    merges         byte-level only: pairs in the order in which they are merged
    pre            byte-level only: the rule that splits text into words, a key of PRE
    prefix         pieces only: True if a space is added before every text
    """

    pieces: bool
    tokens: Sequence[str]
    types: Sequence[int]
    bos: int | None
    eos: int | None
    stops: frozenset[int]
    add_bos: bool
    scores: Sequence[float] = ()
    merges: Sequence[Pair] = ()
    pre: str = ""
    prefix: bool = False

    @property
    def control(self) -> dict[str, int]:
        """Control string -> id."""
        return {token: id for id, token in enumerate(self.tokens) if self.types[id] == CONTROL}

    @property
    def unknown(self) -> int | None:
        """The id of the token for unknown characters, or None."""
        return next((id for id, type in enumerate(self.types) if type == UNKNOWN), None)

    def of_type(self, *types: int) -> list[str]:
        """The tokens of these types, in the order of their ids."""
        return [token for id, token in enumerate(self.tokens) if self.types[id] in types]


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer of any kind. Raises TokenizerError if no other format could express it."""
    for kind, reader in READERS:
        if isinstance(tokenizer, kind):
            found = without_padding(reader(tokenizer))
            if repeated := [token for token, count in Counter(found.tokens).items() if count > 1]:
                raise TokenizerError(
                    f"{repeated[0]!r} is the token of more than one id; other formats identify ids by their tokens"
                )
            return found
    raise TokenizerError(f"a tokenizer of the kind {tokenizer.kind!r} can't be written in another format")


def padding(id: int) -> str:
    """llama.cpp's name for an id that has a row in the embedding but no token."""
    return f"[PAD{id}]"


def without_padding(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary up to its last token that is not padding."""
    end = len(vocabulary.tokens)
    while end and vocabulary.types[end - 1] == UNUSED and vocabulary.tokens[end - 1] == padding(end - 1):
        end -= 1
    shorter = {name: getattr(vocabulary, name)[:end] for name in ("tokens", "types", "scores")}
    return replace(vocabulary, **shorter)


def shared_fields(tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of a Vocabulary that every tokenizer has as attributes."""
    return {
        "bos": tokenizer.bos_id,
        "eos": tokenizer.eos_id,
        "stops": tokenizer.stop_ids,
        "add_bos": tokenizer.add_bos,
    }


# ---------------------------------------------------------------------------------------------- Llama 3's tiktoken file
def spelled(token: bytes) -> str:
    """A token in GPT-2's byte alphabet."""
    return "".join([CHARACTER_OF[byte] for byte in token])


def merges_of_ranks(tokens: Sequence[str]) -> list[Pair]:
    """The merges equivalent to ranks: every pair whose union is a token, in the order of the union's rank.

    Pairs with the same union are sorted by their own ranks, as in the published file.
    """
    rank = {token: i for i, token in enumerate(tokens)}
    pairs = all_splits(tokens, rank, "the vocabulary")
    return sorted(pairs, key=lambda pair: (rank["".join(pair)], rank[pair[0]], rank[pair[1]]))


def from_tiktoken(tokenizer: TiktokenTokenizer) -> Vocabulary:
    """The vocabulary of a tiktoken file: the ranks as merges, and the 256 control strings."""
    n = tokenizer.n_vocab - N_CONTROL
    tokens = [spelled(tokenizer.token_bytes(id)) for id in range(n)]
    return Vocabulary(
        pieces=False,
        tokens=[*tokens, *tokenizer.control],
        types=[NORMAL] * n + [CONTROL] * N_CONTROL,
        merges=merges_of_ranks(tokens),
        pre=LLAMA3,
        **shared_fields(tokenizer),
    )


# ----------------------------------------------------------------------------------------------- SentencePiece's file
def last_bytes(message: bytes, number: int) -> bytes:
    """The value of a field with a length or a fixed size; the last one counts if a message repeats it."""
    return next((v for n, v, _ in reversed(list(read_fields(message))) if n == number and isinstance(v, bytes)), b"")


def check_plain(trainer: bytes, normalizer: bytes, denormalizer: bytes) -> None:
    """Raise TokenizerError if a model works differently from those of LLaMA 1, Llama 2 and Code Llama."""
    rules = [
        ("is not BPE", last_number(trainer, MODEL_TYPE, 1) != BPE),
        ("has no byte fallback", not last_number(trainer, BYTE_FALLBACK, 0)),
        ("adds its space after a text", bool(last_number(trainer, WHITESPACE_AS_SUFFIX, 0))),
        ("replaces characters of a text", bool(last_bytes(normalizer, CHARSMAP) or last_bytes(denormalizer, CHARSMAP))),
        ("removes spaces from a text", bool(last_number(normalizer, REMOVE_EXTRA_WHITESPACES, 1))),
        ("does not write spaces as U+2581", not last_number(normalizer, ESCAPE_WHITESPACES, 1)),
    ]
    for what, broken in rules:
        if broken:
            raise TokenizerError(f"the SentencePiece model {what}; expected one that works like Llama 2's")


def from_model(tokenizer: SentencePieceModelTokenizer) -> Vocabulary:
    """The vocabulary of a SentencePiece model, with the types of control tokens corrected."""
    fields = [(number, value) for number, value, _ in read_fields(tokenizer.data) if isinstance(value, bytes)]
    messages = [value for number, value in fields if number == PIECE]
    trainer, normalizer, denormalizer = (
        b"".join([value for number, value in fields if number == spec])
        for spec in (TRAINER_SPEC, NORMALIZER_SPEC, DENORMALIZER_SPEC)
    )
    check_plain(trainer, normalizer, denormalizer)
    types = [last_number(message, TYPE, NORMAL) for message in messages]
    if UNUSED in types:
        raise TokenizerError(f"the SentencePiece model has an unused piece, id {types.index(UNUSED)}; expected none")
    for id in set(tokenizer.control.values()) - tokenizer.visible:
        types[id] = CONTROL
    return Vocabulary(
        pieces=True,
        tokens=[last_bytes(message, TEXT).decode() for message in messages],
        types=types,
        scores=[struct.unpack("<f", last_bytes(message, SCORE) or bytes(4))[0] for message in messages],
        prefix=tokenizer.strips_leading_space,
        **shared_fields(tokenizer),
    )


# -------------------------------------------------------------------------------------------------------------- GGUF
def from_gguf(tokenizer: GGUFTokenizer) -> Vocabulary:
    """The vocabulary of a GGUF file, with the types of control tokens corrected."""
    same = {"tokens": tokenizer.tokens, "types": tokenizer.types, **shared_fields(tokenizer)}
    if isinstance(tokenizer, ByteLevelTokenizer):
        return Vocabulary(pieces=False, merges=tokenizer.merges, pre=tokenizer.pre, **same)
    scores = [float(score) for score in tokenizer.metadata["tokenizer.ggml.scores"]]
    return Vocabulary(pieces=True, scores=scores, prefix=tokenizer.strips_leading_space, **same)


# ------------------------------------------------------------------------------------------------------- tokenizer.json
def from_huggingface(tokenizer: HuggingFaceTokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer.json. Raises TokenizerError if the file needs what no other format has."""
    source = parse(tokenizer.data, "tokenizer.json")
    model = source["model"]
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(
            f"the model of tokenizer.json is {model.get('type')}; expected BPE, the only model of the other formats"
        )
    added = {token["content"]: token for token in source.get("added_tokens") or []}
    hidden = tokenizer.control.keys() - tokenizer.visible
    for content, token in added.items():
        flags = [flag for flag in ("single_word", "lstrip", "rstrip") if token.get(flag)]
        if flags and content not in hidden:
            raise TokenizerError(
                f"tokenizer.json matches {content!r} with {flags[0]}, which no other format can express"
            )
    tokens = [tokenizer.token_of.get(id, padding(id)) for id in range(tokenizer.n_vocab)]
    types = [
        UNUSED if id not in tokenizer.token_of
        else CONTROL if token in hidden
        else UNKNOWN if token == tokenizer.unknown
        else USER_DEFINED if token in added
        else BYTE if not tokenizer.byte_level and byte_piece(token) is not None
        else NORMAL
        for id, token in enumerate(tokens)
    ]  # fmt: skip
    found = Vocabulary(pieces=not tokenizer.byte_level, tokens=tokens, types=types, **shared_fields(tokenizer))
    listed = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or []]
    plain = set(found.of_type(NORMAL, USER_DEFINED, BYTE))  # no text merges with or into a control token
    merges = [(left, right) for left, right in listed if left in plain and right in plain and left + right in plain]
    if tokenizer.byte_level:
        return replace(found, merges=merges, pre=pre_of(source))
    prefix = check_piece_steps(source, tokenizer, found)
    return replace(found, scores=scores_of_merges(found, merges), prefix=prefix)


def plain_steps(steps: Any) -> list[dict[str, Any]]:
    """Single steps in a comparable form: without options that do not change the ids, with defaults filled in."""
    defaults = {"trim_offsets": None, "use_regex": True, "add_prefix_space": True, "invert": False}
    return [{**defaults, **part, "trim_offsets": None} for part in parts(steps)]


def pre_of(source: Mapping[str, Any]) -> str:
    """GGUF's name for how a byte-level tokenizer.json splits words. Raises TokenizerError if there is none."""
    normalizers = [part.get("type") for part in parts(source.get("normalizer"))]
    if normalizers not in ([], ["NFC"]):
        raise TokenizerError(
            "tokenizer.json normalizes text before it is cut into words, which no other format can express"
        )
    ignore_merges = bool(source["model"].get("ignore_merges"))
    steps = plain_steps(source.get("pre_tokenizer"))
    for name, rule in PRE.items():
        same = (rule.ignore_merges, rule.nfc) == (ignore_merges, bool(normalizers))
        if same and steps == plain_steps(json.loads(rule.words().__getstate__())):
            return name
    raise TokenizerError(
        f"tokenizer.json splits text into words by {' and '.join(str(step.get('type')) for step in steps) or 'nothing'}"
        f" {'with' if ignore_merges else 'without'} ignore_merges{' after NFC' * bool(normalizers)} in a way that has"
        f" no name in GGUF; known: {', '.join(PRE)}"
    )


def piece_normalizer(prefix: bool, user_defined: Collection[str]) -> dict[str, Any]:
    """The normalizer of a SentencePiece-style tokenizer.json: Llama 2's, and a step for user-defined pieces.

    The library matches user-defined pieces in the normalized text, and normalizes the pieces too. So a step removes the
    leading space that a piece gets. As a side effect, a text that consists of one such piece gets no leading space.
    """
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    if prefix and user_defined:
        alternatives = "|".join(re.escape(piece) for piece in user_defined)
        pattern = {"Regex": rf"\A{SPACE}(?=(?:{alternatives})\z)"}
        steps.append({"type": "Replace", "pattern": pattern, "content": ""})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def check_piece_steps(source: Mapping[str, Any], tokenizer: HuggingFaceTokenizer, found: Vocabulary) -> bool:
    """Whether a space is added before every text. Raises TokenizerError if the steps differ from those of Llama 2."""
    model, prefix = source["model"], tokenizer.strips_leading_space
    user_defined = found.of_type(USER_DEFINED)
    added = source.get("added_tokens") or []
    as_published = (
        list(parts(source.get("normalizer"))) == list(parts(piece_normalizer(prefix, user_defined)))
        and not list(parts(source.get("pre_tokenizer")))
        and model.get("byte_fallback")
        and not model.get("ignore_merges")
        and all(token.get("normalized") for token in added if token["content"] in user_defined)
    )
    if not as_published:
        raise TokenizerError(
            "tokenizer.json handles spaces or added tokens differently from the SentencePiece model it represents"
            " (Metaspace never doubles a leading space; a space follows each plain added token), which no other format"
            " can express; replace it with the published tokenizer.json or tokenizer.model"
        )
    return prefix


def scores_of_merges(found: Vocabulary, merges: Sequence[Pair]) -> list[float]:
    """Scores that make SentencePiece merge as a list of merges does. Raises TokenizerError if none exist.

    SentencePiece merges any two neighbours whose union is a piece, the best union first. So the list must have every
    pair of a union, and these must follow each other. Unions with interleaved pairs get the same score if the ids do
    not change.
    """
    pieces = set(found.of_type(NORMAL))
    listed = [pair for pair in merges if {*pair, "".join(pair)} <= pieces]
    known = set(listed)
    if merged := {"".join(pair) for pair in merges} & set(found.of_type(BYTE)):
        raise TokenizerError(f"tokenizer.json merges plain text into {min(merged)!r}, which is a byte in other formats")
    for piece in found.of_type(NORMAL):
        for left, right in splits(piece, pieces):
            if (left, right) not in known:
                raise TokenizerError(
                    f"tokenizer.json never merges {left!r} and {right!r} although {piece!r} is a piece; SentencePiece"
                    f" and GGUF always do, so its merges can't be written as scores"
                )
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, (left, right) in enumerate(listed):
        first.setdefault(left + right, i)
        last[left + right] = i
    groups: list[list[str]] = []
    end = -1
    for union, start in first.items():
        if start > end:
            groups.append([])
        groups[-1].append(union)
        end = max(end, last[union])
    score: dict[str, float] = {}
    for i, group in enumerate(groups):
        pairs = listed[first[group[0]] : max(last[union] for union in group) + 1]
        if len(group) > 1 and {left for left, _ in pairs} & {right for _, right in pairs}:
            raise TokenizerError(
                f"tokenizer.json interleaves the merges for {group[0]!r} and {group[1]!r}, expected all merges for a"
                f" piece together; they can't be written as scores"
            )
        score |= {union: -float(i + 1) for union in group}
    # Pieces without a merge score below all others, as in a trained model; the ids do not depend on it.
    lowest = -float(len(groups) + 1)
    return [
        score.get(token, lowest) if type == NORMAL else 0.0
        for token, type in zip(found.tokens, found.types, strict=True)
    ]


# (tokenizer class, function that extracts its vocabulary); a new kind adds one line
READERS: list[tuple[Any, Callable[[Any], Vocabulary]]] = [
    (TiktokenTokenizer, from_tiktoken),
    (SentencePieceModelTokenizer, from_model),
    (GGUFTokenizer, from_gguf),
    (HuggingFaceTokenizer, from_huggingface),
]
