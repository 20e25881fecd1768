"""A vocabulary apart from the file it came from: what every kind of tokenizer gives and every format is written from.

Spelled as GGUF spells it, with llama.cpp's token types (llama.h, enum llama_token_type): of all formats it says most.
Merges from ranks: all the ways to cut a token into two, as in Llama 3's published tokenizer.json.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import TokenizerError
from .base import Tokenizer
from .common import BYTE_OF, byte_piece
from .gguf import BYTE, CONTROL, NORMAL, PRE, UNKNOWN, UNUSED, USER_DEFINED, ByteLevelTokenizer, GGUFTokenizer
from .huggingface import HuggingFaceTokenizer, parse, parts
from .sentencepiece import (
    NORMALIZER_SPEC,
    PIECE,
    TRAINER_SPEC,
    TYPE,
    SentencePieceModelTokenizer,
    last_number,
    read_fields,
)
from .tiktoken import N_CONTROL, TiktokenTokenizer

SPACE = "\u2581"
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
LLAMA3 = "llama-bpe"

# Fields of SentencePiece, ModelProto, TrainerSpec and NormalizerSpec (google/sentencepiece, sentencepiece_model.proto)
TEXT, SCORE = 1, 2
DENORMALIZER_SPEC = 5
MODEL_TYPE, WHITESPACE_AS_SUFFIX, BYTE_FALLBACK = 3, 24, 35
CHARSMAP, REMOVE_EXTRA_WHITESPACES, ESCAPE_WHITESPACES = 2, 4, 5
BPE = 2  # a value of MODEL_TYPE

Pair = tuple[str, str]


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and how text becomes them.

    pieces   True for SentencePiece's kind, False for bytes written in GPT-2's alphabet
    tokens, types   of each id; user-defined tokens of the byte-level kind are spelled as they are
    scores   pieces: neighbours whose union scores best are merged first
    merges   bytes: pairs in the order in which they are merged
    pre      bytes: how text is cut into words first, a key of PRE
    stops    ids that end an answer
    add_bos  True if the model was trained with bos in front of every text
    prefix   pieces: True if a space is put in front of every text
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
        """The id of characters that can't be written otherwise."""
        return next((id for id, type in enumerate(self.types) if type == UNKNOWN), None)

    def of_type(self, *types: int) -> list[str]:
        """The tokens of some types, in the order of their ids."""
        return [token for id, token in enumerate(self.tokens) if self.types[id] in types]


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """What a tokenizer of any kind is made of. Raises TokenizerError for what no other format could say."""
    for kind, reader in READERS:
        if isinstance(tokenizer, kind):
            found = without_padding(reader(tokenizer))
            if twice := [token for token, times in Counter(found.tokens).items() if times > 1]:
                raise TokenizerError(f"{twice[0]!r} is the token of more than one id; other formats tell ids by tokens")
            return found
    raise TokenizerError(f"a tokenizer of the kind {tokenizer.kind!r} can't be written in another format")


def padding(id: int) -> str:
    """llama.cpp's name of an id that has a row in the embedding and no token."""
    return f"[PAD{id}]"


def without_padding(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary up to its last token that is not padding."""
    end = len(vocabulary.tokens)
    while end and vocabulary.types[end - 1] == UNUSED and vocabulary.tokens[end - 1] == padding(end - 1):
        end -= 1
    shorter = {name: getattr(vocabulary, name)[:end] for name in ("tokens", "types", "scores")}
    return replace(vocabulary, **shorter)


def common(tokenizer: Tokenizer) -> dict[str, Any]:
    """What every tokenizer says of itself."""
    return {
        "bos": tokenizer.bos_id,
        "eos": tokenizer.eos_id,
        "stops": tokenizer.stop_ids,
        "add_bos": tokenizer.add_bos,
    }


def splits(token: str, known: Collection[str]) -> Iterator[Pair]:
    """All the ways to cut a token into two known ones, the shortest left part first."""
    for cut in range(1, len(token)):
        if token[:cut] in known and token[cut:] in known:
            yield token[:cut], token[cut:]


# ---------------------------------------------------------------------------------------------- Llama 3's tiktoken file
def spelled(token: bytes) -> str:
    """A token in GPT-2's byte alphabet."""
    return "".join([CHARACTER_OF[byte] for byte in token])


def merges_of_ranks(tokens: Sequence[str]) -> list[Pair]:
    """The merges that do what ranks do: every pair whose union is a token, in the order of the union's rank.

    Of pairs with one union, the one with the lower ranks comes first, as in the published file.
    """
    rank = {token: i for i, token in enumerate(tokens)}
    return [
        pair
        for token in tokens
        for pair in sorted(splits(token, rank), key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    ]


def from_tiktoken(tokenizer: TiktokenTokenizer) -> Vocabulary:
    """Ranks become merges; the 256 control strings follow."""
    n = tokenizer.n_vocab - N_CONTROL
    tokens = [spelled(tokenizer.token_bytes(id)) for id in range(n)]
    return Vocabulary(
        pieces=False,
        tokens=[*tokens, *tokenizer.control],
        types=[NORMAL] * n + [CONTROL] * N_CONTROL,
        merges=merges_of_ranks(tokens),
        pre=LLAMA3,
        **common(tokenizer),
    )


# ----------------------------------------------------------------------------------------------- SentencePiece's file
def last_bytes(message: bytes, number: int) -> bytes:
    """The value of a field that is no plain number; where a message repeats one, the last counts."""
    return next((v for n, v, _ in reversed(list(read_fields(message))) if n == number and isinstance(v, bytes)), b"")


def check_plain(trainer: bytes, normalizer: bytes, denormalizer: bytes) -> None:
    """Raise TokenizerError if a model works otherwise than those of LLaMA 1, Llama 2 and Code Llama."""
    rules = [
        ("is not BPE", last_number(trainer, MODEL_TYPE, 1) != BPE),
        ("has no bytes to fall back to", not last_number(trainer, BYTE_FALLBACK, 0)),
        ("puts its space behind a text", bool(last_number(trainer, WHITESPACE_AS_SUFFIX, 0))),
        ("replaces characters of a text", bool(last_bytes(normalizer, CHARSMAP) or last_bytes(denormalizer, CHARSMAP))),
        ("removes spaces from a text", bool(last_number(normalizer, REMOVE_EXTRA_WHITESPACES, 1))),
        ("does not write spaces as U+2581", not last_number(normalizer, ESCAPE_WHITESPACES, 1)),
    ]
    for what, broken in rules:
        if broken:
            raise TokenizerError(f"the SentencePiece model {what}; expected one that works as Llama 2's does")


def from_model(tokenizer: SentencePieceModelTokenizer) -> Vocabulary:
    """Pieces, scores and types as the file has them, but for the pieces that are control to the model."""
    fields = [(number, value) for number, value, _ in read_fields(tokenizer.data) if isinstance(value, bytes)]
    messages = [value for number, value in fields if number == PIECE]
    trainer, normalizer, denormalizer = (
        b"".join([value for number, value in fields if number == wanted])
        for wanted in (TRAINER_SPEC, NORMALIZER_SPEC, DENORMALIZER_SPEC)
    )
    check_plain(trainer, normalizer, denormalizer)
    types = [last_number(message, TYPE, NORMAL) for message in messages]
    if UNUSED in types:
        raise TokenizerError(f"the SentencePiece model has an unused piece, id {types.index(UNUSED)}; expected none")
    for id in tokenizer.control.values():
        types[id] = CONTROL
    return Vocabulary(
        pieces=True,
        tokens=[last_bytes(message, TEXT).decode() for message in messages],
        types=types,
        scores=[struct.unpack("<f", last_bytes(message, SCORE) or bytes(4))[0] for message in messages],
        prefix=tokenizer.strips_leading_space,
        **common(tokenizer),
    )


# -------------------------------------------------------------------------------------------------------------- GGUF
def from_gguf(tokenizer: GGUFTokenizer) -> Vocabulary:
    """What the metadata says, but for the tokens that are control to the model."""
    same = {"tokens": tokenizer.tokens, "types": tokenizer.types, **common(tokenizer)}
    if isinstance(tokenizer, ByteLevelTokenizer):
        return Vocabulary(pieces=False, merges=tokenizer.merges, pre=tokenizer.pre, **same)
    scores = [float(score) for score in tokenizer.metadata["tokenizer.ggml.scores"]]
    return Vocabulary(pieces=True, scores=scores, prefix=tokenizer.strips_leading_space, **same)


# ------------------------------------------------------------------------------------------------------- tokenizer.json
def from_huggingface(tokenizer: HuggingFaceTokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer.json. Raises TokenizerError where the file asks for what no other format has."""
    source = parse(tokenizer.data, "tokenizer.json")
    model = source["model"]
    refused = [key for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if model.get("type", "BPE") != "BPE" or refused:
        raise TokenizerError(
            f"the model of tokenizer.json is {model.get('type')} {' '.join(refused)}; expected BPE without affixes,"
            f" which alone the other formats have"
        )
    added = {token["content"]: token for token in source.get("added_tokens") or []}
    for content, token in added.items():
        flags = [flag for flag in ("single_word", "lstrip", "rstrip") if token.get(flag)]
        if flags and content not in tokenizer.control:
            raise TokenizerError(f"tokenizer.json matches {content!r} with {flags[0]}, which no other format can say")
    tokens = [tokenizer.token_of.get(id, padding(id)) for id in range(tokenizer.n_vocab)]
    types = [
        UNUSED if id not in tokenizer.token_of
        else CONTROL if token in tokenizer.control
        else UNKNOWN if token == tokenizer.unknown
        else USER_DEFINED if token in added
        else BYTE if not tokenizer.byte_level and byte_piece(token) is not None
        else NORMAL
        for id, token in enumerate(tokens)
    ]  # fmt: skip
    found = Vocabulary(pieces=not tokenizer.byte_level, tokens=tokens, types=types, **common(tokenizer))
    listed = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or []]
    plain = set(found.of_type(NORMAL, USER_DEFINED, BYTE))  # no text is merged with or to a control token
    merges = [(left, right) for left, right in listed if left in plain and right in plain and left + right in plain]
    if tokenizer.byte_level:
        return replace(found, merges=merges, pre=pre_of(source))
    prefix = check_piece_steps(source, tokenizer, found)
    return replace(found, scores=scores_of_merges(found, merges), prefix=prefix)


def plain_steps(steps: Any) -> list[dict[str, Any]]:
    """Single steps without what does not change the ids: offsets, and values that are also the default."""
    defaults = {"trim_offsets": None, "use_regex": True, "add_prefix_space": True, "invert": False}
    return [{**defaults, **part, "trim_offsets": None} for part in parts(steps)]


def pre_of(source: Mapping[str, Any]) -> str:
    """The name of how a byte-level tokenizer.json cuts words. Raises TokenizerError where it has none."""
    if list(parts(source.get("normalizer"))):
        raise TokenizerError(
            "tokenizer.json normalizes text before it is cut into words, which no other format can say"
        )
    ignore_merges = bool(source["model"].get("ignore_merges"))
    steps = plain_steps(source.get("pre_tokenizer"))
    for name, (words, ignores, _) in PRE.items():
        if ignores == ignore_merges and steps == plain_steps(json.loads(words().__getstate__())):
            return name
    raise TokenizerError(
        f"tokenizer.json cuts words by {' and '.join(str(step.get('type')) for step in steps) or 'nothing'}"
        f" {'with' if ignore_merges else 'without'} ignore_merges in a way that has no name in GGUF;"
        f" known are those of {', '.join(PRE)}"
    )


def piece_normalizer(prefix: bool, user_defined: Collection[str]) -> dict[str, Any]:
    """The normalizer of a tokenizer.json of pieces: Llama 2's, and a step for pieces that are matched whole.

    Those are matched in the normalized text, and the library normalizes their own text too. So the space that it got in
    front is taken off again: the price is that a text which is one of these pieces and nothing else gets none.
    """
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    if prefix and user_defined:
        whole = "|".join(re.escape(piece) for piece in user_defined)
        pattern = {"Regex": rf"\A{SPACE}(?=(?:{whole})\z)"}
        steps.append({"type": "Replace", "pattern": pattern, "content": ""})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def check_piece_steps(source: Mapping[str, Any], tokenizer: HuggingFaceTokenizer, found: Vocabulary) -> bool:
    """Whether a space is put in front of a text. Raises TokenizerError unless all is done as in Llama 2's file."""
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
            "tokenizer.json handles spaces or added tokens otherwise than the SentencePiece model that it stands for"
            " (Metaspace doubles no leading space; a space follows each plain added token), which no other format can"
            " say; put the published tokenizer.json or tokenizer.model in its place"
        )
    return prefix


def scores_of_merges(found: Vocabulary, merges: Sequence[Pair]) -> list[float]:
    """Scores by which SentencePiece merges as a list of merges does. Raises TokenizerError where there are none.

    SentencePiece merges any two neighbours whose union is a piece, the best union first: so the list must have every
    pair for a union, all at one place. Unions whose pairs are mixed score the same, if that makes no difference.
    """
    pieces = set(found.of_type(NORMAL))
    listed = [pair for pair in merges if {*pair, "".join(pair)} <= pieces]
    known = set(listed)
    if typed := {"".join(pair) for pair in merges} & set(found.of_type(BYTE)):
        raise TokenizerError(f"tokenizer.json makes {min(typed)!r} of plain text, which is a byte in other formats")
    for piece in found.of_type(NORMAL):
        for left, right in splits(piece, pieces):
            if (left, right) not in known:
                raise TokenizerError(
                    f"tokenizer.json never merges {left!r} and {right!r} though {piece!r} is a piece, which"
                    f" SentencePiece and GGUF always do; its merges can't be written as scores"
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
                f"tokenizer.json merges pairs for {group[0]!r} and {group[1]!r} in turns, expected all pairs of one"
                f" piece together; its merges can't be written as scores"
            )
        score |= {union: -float(i + 1) for union in group}
    # Pieces that no merge makes score below all others, as in a trained model; no text depends on it.
    lowest = -float(len(groups) + 1)
    return [
        score.get(token, lowest) if type == NORMAL else 0.0
        for token, type in zip(found.tokens, found.types, strict=True)
    ]


# (a class, what gives its vocabulary): a new kind adds one line
READERS: list[tuple[Any, Callable[[Any], Vocabulary]]] = [
    (TiktokenTokenizer, from_tiktoken),
    (SentencePieceModelTokenizer, from_model),
    (GGUFTokenizer, from_gguf),
    (HuggingFaceTokenizer, from_huggingface),
]
