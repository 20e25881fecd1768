"""Write any tokenizer in another format: tokenizer.json, tokenizer.model or GGUF metadata.

A tokenizer that was read from the requested format is returned unchanged. What a format can't express is an error.
Formats: the published files of Llama 2 and 3; google/sentencepiece src/sentencepiece_model.proto; ggml-org/llama.cpp
convert_hf_to_gguf.py and llama-vocab.cpp.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import TokenizerError
from .base import Tokenizer
from .common import BYTE_OF, EOT, all_splits, byte_level_bytes, byte_piece, missing_bytes, splits, stop_ids
from .gguf import BYTE, CONTROL, NORMAL, PRE, UNKNOWN, UNUSED, USER_DEFINED, GGUFTokenizer
from .huggingface import HuggingFaceTokenizer
from .sentencepiece import (
    ADD_DUMMY_PREFIX,
    NORMALIZER_SPEC,
    PIECE,
    TRAINER_SPEC,
    TYPE,
    SentencePieceModelTokenizer,
    write_field,
)
from .tiktoken import N_CONTROL, TiktokenTokenizer, control_strings
from .vocabulary import (
    BPE,
    BYTE_FALLBACK,
    LLAMA3,
    MODEL_TYPE,
    REMOVE_EXTRA_WHITESPACES,
    SCORE,
    SPACE,
    TEXT,
    Pair,
    Vocabulary,
    merges_of_ranks,
    padding,
    piece_normalizer,
    vocabulary,
)

# Control strings that end a turn; the first one in a vocabulary becomes its eot in GGUF.
EOT_NAMES = ("<|eot_id|>", "<|im_end|>", "<|end|>", EOT)
EOM_NAME = "<|eom_id|>"
PADDING_SCORE = -10000.0  # llama.cpp's score of padding tokens

# Settings copied from tokenizer_config.json; the others follow from the vocabulary.
COPIED_SETTINGS = ("unk_token", "pad_token", "padding_side")

TYPES = "tokenizer.ggml.token_type"

# Fields of TrainerSpec and NormalizerSpec that only a writer needs
VOCAB_SIZE, UNK_ID, BOS_ID, EOS_ID, PAD_ID = 4, 40, 41, 42, 43
UNK_PIECE, BOS_PIECE, EOS_PIECE = 45, 46, 47
NAME = 1
NO_ID = 2**64 - 1  # -1 as protobuf writes it


# ------------------------------------------------------------------------------------------------------ Hugging Face
def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The text of a tokenizer.json. Raises TokenizerError if the format can't express the vocabulary."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.data.decode(json.detect_encoding(tokenizer.data))
    found = vocabulary(tokenizer)
    source = _pieces_json(found) if found.pieces else _bytes_json(found)
    return json.dumps(source, ensure_ascii=False) + "\n"


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of a tokenizer_config.json for transformers 4 and 5, without the chat template.

    PreTrainedTokenizerFast uses tokenizer.json unchanged; LlamaTokenizer would replace its normalizer and decoder.
    """
    copied: dict[str, Any] = {}
    token_of: dict[Any, str]
    if isinstance(tokenizer, HuggingFaceTokenizer):
        token_of = dict(tokenizer.token_of)
        copied = {key: tokenizer.settings[key] for key in COPIED_SETTINGS if key in tokenizer.settings}
    else:
        token_of = {id: token for token, id in tokenizer.control.items()}
        if not isinstance(tokenizer, TiktokenTokenizer):
            found = vocabulary(tokenizer)
            copied = {} if found.unknown is None else {"unk_token": found.tokens[found.unknown]}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token_of.get(tokenizer.bos_id),
        "eos_token": token_of.get(tokenizer.eos_id),
        "add_bos_token": tokenizer.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **copied,
    }


def _bytes_json(found: Vocabulary) -> dict[str, Any]:
    rule = PRE[found.pre]
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    model = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": rule.ignore_merges}
    return _source(
        found,
        found.merges,
        model,
        normalizer={"type": "NFC"} if rule.nfc else None,
        pre_tokenizer=json.loads(rule.words().__getstate__()),
        post_processor={"type": "Sequence", "processors": [byte_level, *_template(found)]},
        decoder=byte_level,
    )


def _pieces_json(found: Vocabulary) -> dict[str, Any]:
    user_defined = found.of_type(USER_DEFINED)
    if spaced := [piece for piece in user_defined if " " in piece]:
        raise TokenizerError(f"the piece {spaced[0]!r} contains a plain space, expected U+2581; no text matches it")
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if found.prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _source(
        found,
        merges_of_scores(found),
        {"fuse_unk": True, "byte_fallback": True, "ignore_merges": False},
        normalizer=piece_normalizer(found.prefix, user_defined),
        pre_tokenizer=None,
        post_processor=next(iter(_template(found)), None),
        decoder={"type": "Sequence", "decoders": decoders},
    )


def merges_of_scores(found: Vocabulary) -> list[Pair]:
    """The list of merges equivalent to SentencePiece's scores: the best union first."""
    pieces = {token: id for id, token in enumerate(found.tokens) if found.types[id] == NORMAL}
    by_score = sorted(pieces.items(), key=lambda item: (-found.scores[item[1]], item[1]))
    return all_splits([piece for piece, _ in by_score], pieces, "the vocabulary")


def _source(found: Vocabulary, merges: Sequence[Pair], model: dict[str, Any], **steps: Any) -> dict[str, Any]:
    added_types = (CONTROL, USER_DEFINED, UNKNOWN)
    absent = (UNUSED,) if found.pieces else (UNUSED, BYTE)  # no text becomes one of these
    end = 1 + max(id for id, type in enumerate(found.types) if type not in (CONTROL, USER_DEFINED))
    if set(absent) & set(found.types):
        end = len(found.tokens)  # the library numbers added tokens after the others as if no id were missing
    vocab = {token: id for id, token in enumerate(found.tokens[:end]) if found.types[id] not in absent}
    added = [
        {
            "id": id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": found.pieces and found.types[id] == USER_DEFINED,
            "special": found.types[id] != USER_DEFINED,
        }
        for id, token in enumerate(found.tokens)
        if found.types[id] in added_types
    ]
    unknown = None if found.unknown is None else found.tokens[found.unknown]
    affixes = {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **steps,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            **affixes,
            **model,
            "vocab": vocab,
            "merges": list(merges),
        },
    }


def _template(found: Vocabulary) -> list[dict[str, Any]]:
    """The post-processor that adds bos before every text, if the vocabulary does."""
    if not found.add_bos or found.bos is None:
        return []
    bos = found.tokens[found.bos]

    def text(name: str, type: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": bos, "type_id": type}}, {"Sequence": {"id": name, "type_id": type}}]

    special = {bos: {"id": bos, "ids": [found.bos], "tokens": [bos]}}
    return [
        {
            "type": "TemplateProcessing",
            "single": text("A", 0),
            "pair": [*text("A", 0), *text("B", 1)],
            "special_tokens": special,
        }
    ]


# -------------------------------------------------------------------------------------------------------------- Meta
def tokenizer_model(tokenizer: Tokenizer) -> bytes:
    """Meta's tokenizer.model: tiktoken lines for Llama 3's kind, a SentencePiece model for Llama 2's.

    Raises TokenizerError if the vocabulary is of neither kind.
    """
    if isinstance(tokenizer, TiktokenTokenizer | SentencePieceModelTokenizer):
        _check_stops(tokenizer.stop_ids, tokenizer.control, tokenizer.eos_id)
        return tokenizer.data
    found = vocabulary(tokenizer)
    return _sentencepiece_model(found) if found.pieces else _tiktoken_lines(found)


def _check_stops(stops: frozenset[int], control: Mapping[str, int], *named: int | None) -> None:
    if lost := stops - stop_ids(control, named):
        name = next((token for token, id in control.items() if id == min(lost)), "no name")
        raise TokenizerError(f"id {min(lost)} ({name}) ends an answer, which Meta's tokenizer.model can't express")


def _check_rules(rules: Sequence[tuple[str, bool]], format: str) -> None:
    for violation, holds in rules:
        if not holds:
            raise TokenizerError(f"this vocabulary {violation}, which {format} can't express")


def _tiktoken_lines(found: Vocabulary) -> bytes:
    n = len(found.tokens) - N_CONTROL
    tokens, last_types = found.tokens[: max(n, 0)], set(found.types[max(n, 0) :])
    rules = [
        (f"splits words like {found.pre!r}", PRE[found.pre] == PRE[LLAMA3]),
        ("does not end with 256 control tokens", n > 0 and last_types == {CONTROL}),
        ("has tokens other than plain ones before the last 256", set(found.types[: max(n, 0)]) <= {NORMAL}),
        ("has tokens outside the byte alphabet", all(set(token) <= BYTE_OF.keys() for token in tokens)),
        ("has no token for some bytes", not missing_bytes(tokens)),
        ("has a begin-of-text id that is not the first control token", found.bos == n),
        ("does not begin every text with its begin-of-text id", found.add_bos),
    ]
    _check_rules(rules, "Meta's tokenizer.model of Llama 3")
    derived = merges_of_ranks(tokens)
    if list(found.merges) != derived and not _only_reordered(found.merges, derived):
        raise TokenizerError(
            "Meta's tokenizer.model of Llama 3 can express only the merges that follow from the order of the tokens,"
            f" here {len(derived):,}; this vocabulary has {len(found.merges):,} merges, which differ from them"
        )
    _check_stops(found.stops, {name: n + i for i, name in enumerate(control_strings())}, n + 1)
    return b"".join(base64.b64encode(byte_level_bytes(token)) + b" %d\n" % rank for rank, token in enumerate(tokens))


def _only_reordered(merges: Sequence[Pair], derived: Sequence[Pair]) -> bool:
    """Whether the merges produce the same tokens in the same order, with only the pairs of each token reordered."""
    found, expected = ([left + right for left, right in pairs] for pairs in (merges, derived))
    return found == expected and set(merges) == set(derived)


def _sentencepiece_model(found: Vocabulary) -> bytes:
    pieces = set(found.of_type(NORMAL))
    reachable = [piece for piece in found.of_type(UNUSED) if len(piece) == 1 or any(splits(piece, pieces))]
    rules = [
        ("does not have exactly one token for unknown characters", found.types.count(UNKNOWN) == 1),
        ("has no token for some bytes", {byte_piece(token) for token in found.of_type(BYTE)} == set(range(256))),
        ("has a token without text", all(found.tokens)),
        (f"marks the token {reachable[:1]} as unused although a text can contain it", not reachable),
        ("does not begin every text with its begin-of-text id", found.add_bos == (found.bos is not None)),
    ]
    _check_rules(rules, "a SentencePiece model")
    _check_stops(found.stops, found.control, found.eos)
    messages = [
        write_field(TEXT, token.encode()) + _float_field(SCORE, score) + write_field(TYPE, type)
        for token, score, type in zip(found.tokens, found.scores, found.types, strict=True)
    ]
    trainer: list[tuple[int, int | bytes]] = [
        (MODEL_TYPE, BPE),
        (VOCAB_SIZE, len(found.tokens)),
        (BYTE_FALLBACK, 1),
        (PAD_ID, NO_ID),
    ]
    named: list[tuple[int, int | bytes]] = []
    for id, number, piece in (
        (found.unknown, UNK_ID, UNK_PIECE),
        (found.bos, BOS_ID, BOS_PIECE),
        (found.eos, EOS_ID, EOS_PIECE),
    ):
        named += [(number, NO_ID if id is None else id), (piece, b"" if id is None else found.tokens[id].encode())]
    normalizer: list[tuple[int, int | bytes]] = [
        (NAME, b"identity"),
        (ADD_DUMMY_PREFIX, int(found.prefix)),
        (REMOVE_EXTRA_WHITESPACES, 0),
    ]
    return b"".join(
        [
            *(write_field(PIECE, message) for message in messages),
            write_field(TRAINER_SPEC, b"".join([write_field(*field) for field in sorted([*trainer, *named])])),
            write_field(NORMALIZER_SPEC, b"".join([write_field(*field) for field in normalizer])),
        ]
    )


def _float_field(number: int, value: float) -> bytes:
    return bytes([number << 3 | 5]) + struct.pack("<f", value)


# -------------------------------------------------------------------------------------------------------------- GGUF
def gguf_metadata(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The keys tokenizer.ggml.*, padded to the rows of the embedding. Raises TokenizerError."""
    if isinstance(tokenizer, GGUFTokenizer):
        entries = {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in tokenizer.metadata.items()
            if key.startswith("tokenizer.")
        }
        return (
            entries
            if tokenizer.n_vocab == vocab_size
            else _padded(entries, entries.get(TYPES, tokenizer.types), vocab_size)
        )
    found = vocabulary(tokenizer)
    entries = {
        "tokenizer.ggml.model": "llama" if found.pieces else "gpt2",
        "tokenizer.ggml.pre": "default" if found.pieces else found.pre,
        "tokenizer.ggml.tokens": list(found.tokens),
    }
    if found.pieces:
        entries["tokenizer.ggml.scores"] = list(found.scores)
    entries[TYPES] = list(found.types)
    if not found.pieces:
        if spaced := [pair for pair in found.merges if " " in "".join(pair)]:
            raise TokenizerError(f"GGUF can't express the merge {spaced[0]!r}: it separates the two tokens by a space")
        entries["tokenizer.ggml.merges"] = [" ".join(pair) for pair in found.merges]
    named = {"bos": found.bos, "eos": found.eos, **_end_ids(found), "unknown": found.unknown}
    entries |= {f"tokenizer.ggml.{name}_token_id": id for name, id in named.items() if id is not None}
    entries["tokenizer.ggml.add_bos_token"] = found.add_bos
    if found.pieces:
        entries["tokenizer.ggml.add_space_prefix"] = found.prefix
    return _padded(entries, found.types, vocab_size)


def _padded(entries: dict[str, Any], types: Sequence[int], vocab_size: int) -> dict[str, Any]:
    n = len(types)
    if n > vocab_size:
        raise TokenizerError(
            f"the vocabulary has {n} tokens and the embedding {vocab_size} rows, expected at least as many rows"
        )
    pad = vocab_size - n
    out = {**entries, "tokenizer.ggml.tokens": [*entries["tokenizer.ggml.tokens"], *map(padding, range(n, vocab_size))]}
    out[TYPES] = [*types, *[UNUSED] * pad]
    if "tokenizer.ggml.scores" in out:
        out["tokenizer.ggml.scores"] = [*out["tokenizer.ggml.scores"], *[PADDING_SCORE] * pad]
    return out


def _end_ids(found: Vocabulary) -> dict[str, int | None]:
    """The ids of eot and eom: by name, else other ids that end an answer."""
    control = found.control
    eot = next((control[name] for name in EOT_NAMES if name in control and control[name] != found.eos), None)
    ids = {"eot": eot, "eom": control.get(EOM_NAME)}
    for id in sorted(found.stops - stop_ids(control, [found.eos])):
        free = next((name for name, used in ids.items() if used is None), None)
        if free is None:
            raise TokenizerError(
                f"{len(found.stops)} ids end an answer, {id} ({found.tokens[id]!r}) among them; GGUF has keys for three"
            )
        ids[free] = id
    return ids
