"""Write any tokenizer as GGUF metadata or as a tokenizer.json that gives exactly the same ids.

GGUF's metadata is the common form: every other kind is converted to it, and a tokenizer.json is built from it by the
`tokenizers` library. A tokenizer that was read from the requested format is copied. `check_equal` compares what was
written with the source; what a format can't express is an error.
Sources: ggml-org/llama.cpp, convert_hf_to_gguf.py and llama-vocab.cpp; the published tokenizer.json of Llama 2 and 3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from ..errors import TokenizerError
from .base import Tokenizer
from .common import BYTE_OF, byte_piece, stop_ids
from .gguf import BPE, BYTE, CONTROL, MODEL_TYPE, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, GGUFTokenizer, from_metadata
from .huggingface import HuggingFaceTokenizer, build
from .sentencepiece import (
    CHARSMAP,
    NORMALIZER,
    PIECE,
    TRAINER,
    TYPE,
    SentencePieceModelTokenizer,
    last_number,
    read_fields,
    read_messages,
)
from .tiktoken import N_CONTROL, TiktokenTokenizer
from .words import RULES

PADDING_SCORE = -10000.0  # as in llama.cpp
SPACE = "\u2581"
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}

# Texts whose ids are compared: white space, digits, scripts, composed characters, control strings, single bytes
SAMPLE = (
    "", " ", "  two  spaces ", " The dog bites the man, isn't it? I'LL see.", "\n\n a\tb\r\n  c", "x = 3.14*2024+1e-5;",
    "def f(x, y):\n    return x*cos(a) - y", "Über façade e\u0301 ﬀ ½ Ａ", "一句中文。предложение שלום ไทย 한국어",
    "😀👨‍👩‍👧 \u3000\xa0▁ ▁▁", "<s></s><|eot_id|><|im_end|><unk>", "<0x0A> [INST]", "it's we'RE 1234567 ... == //",
)  # fmt: skip
MOST_ADDED = 100  # added tokens that are tried in a text
UNKNOWN_BYTES = " \u2047 ".encode()  # SentencePiece's text of an unknown character, which other formats do not store
REMEDY = "pass the tokenizer (--tokenizer) to write, or convert to another format"

Pair = tuple[str, str]


# -------------------------------------------------------------------------------------------------------------- GGUF
def gguf_metadata(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The keys tokenizer.ggml.*, with a token for each row of the embedding. Raises TokenizerError."""
    if isinstance(tokenizer, GGUFTokenizer):
        own = {key: value for key, value in tokenizer.metadata.items() if key.startswith("tokenizer.")}
        lists = {key: value.tolist() for key, value in own.items() if isinstance(value, np.ndarray)}
        entries = {"tokenizer.ggml.token_type": tokenizer.types, **own, **lists}
    else:
        kind = vocabulary(tokenizer)
        types = kind["token_type"]
        ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
        ids["unknown"] = types.index(UNKNOWN) if UNKNOWN in types else None
        unnamed = tokenizer.stop_ids - stop_ids(tokenizer.control, [tokenizer.eos_id])  # the others are known by name
        ids |= dict(zip(("eot", "eom"), sorted(unnamed), strict=False))
        kind |= {f"{name}_token_id": id for name, id in ids.items() if id is not None}
        kind["add_bos_token"] = tokenizer.add_bos
        entries = {f"tokenizer.ggml.{key}": value for key, value in kind.items()}
    rows = range(len(entries["tokenizer.ggml.tokens"]), vocab_size)
    if rows.start > vocab_size:
        raise TokenizerError(f"the vocabulary has {rows.start} tokens, but the embedding only {vocab_size} rows")
    more = {"tokens": map(padding, rows), "token_type": [UNUSED] * len(rows), "scores": [PADDING_SCORE] * len(rows)}
    for key, values in more.items():
        if (name := f"tokenizer.ggml.{key}") in entries:
            entries[name] = [*entries[name], *values]
    return entries


def padding(id: int) -> str:
    """llama.cpp's name for an id that has a row in the embedding but no token."""
    return f"[PAD{id}]"


def _tokens(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token_of.get(id, padding(id)) for id in range(tokenizer.n_vocab)]


@singledispatch
def vocabulary(tokenizer: Tokenizer) -> dict[str, Any]:
    """The entries that describe the tokens and how text is encoded. Each class of tokenizers has its function."""
    raise TokenizerError(f"a {tokenizer.kind} vocabulary can't be written as GGUF or tokenizer.json; {REMEDY}")


@vocabulary.register
def _from_tiktoken(tokenizer: TiktokenTokenizer) -> dict[str, Any]:
    n = tokenizer.n_vocab - N_CONTROL
    tokens = ["".join([CHARACTER_OF[byte] for byte in tokenizer.token_bytes(id)]) for id in range(n)]
    return {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": [*tokens, *tokenizer.control],
        "token_type": [NORMAL] * n + [CONTROL] * N_CONTROL,
        "merges": [" ".join(pair) for pair in merges_of(tokens)],
    }


@vocabulary.register
def _from_sentencepiece(tokenizer: SentencePieceModelTokenizer) -> dict[str, Any]:
    messages = read_messages(tokenizer.data)
    trainer, normalizer = b"".join(messages[TRAINER]), b"".join(messages[NORMALIZER])
    replaces = any(value for number, value, _ in read_fields(normalizer) if number == CHARSMAP)
    if replaces or last_number(trainer, MODEL_TYPE, 1) != BPE:
        raise TokenizerError(f"the SentencePiece model is not BPE, or replaces characters of a text; {REMEDY}")
    pieces, added = messages[PIECE], range(len(messages[PIECE]), tokenizer.n_vocab)
    types = [last_number(piece, TYPE, NORMAL) for piece in pieces]
    types += [USER_DEFINED if id in tokenizer.token_of else UNUSED for id in added]
    tokens = _tokens(tokenizer)
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": [tokenizer.library.get_score(id) for id in range(len(pieces))] + [0.0] * len(added),
        "token_type": [CONTROL if t in tokenizer.hidden else type for t, type in zip(tokens, types, strict=True)],
        "add_space_prefix": tokenizer.strips_leading_space,
    }


@vocabulary.register
def _from_json(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    source = json.loads(tokenizer.data)
    model = source["model"]
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(f"the model of tokenizer.json is {model['type']}, expected BPE, the only one of GGUF")
    tokens = _tokens(tokenizer)
    types = [
        UNUSED if id not in tokenizer.token_of
        else CONTROL if token in tokenizer.hidden
        else UNKNOWN if token == tokenizer.unknown
        else USER_DEFINED if token in tokenizer.added
        else BYTE if not tokenizer.byte_level and byte_piece(token) is not None
        else NORMAL
        for id, token in enumerate(tokens)
    ]  # fmt: skip
    merged = (NORMAL, USER_DEFINED) if tokenizer.byte_level else (NORMAL,)
    plain = {token for token, type in zip(tokens, types, strict=True) if type in merged}
    listed = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model.get("merges") or []]
    merges = [pair for pair in listed if plain.issuperset((*pair, "".join(pair)))]  # others need a control token
    kind = {"tokens": tokens, "token_type": types}
    normalizer, words = _steps(tokenizer.backend.normalizer), _steps(tokenizer.backend.pre_tokenizer)
    if not tokenizer.byte_level:
        prefix = tokenizer.strips_leading_space
        if words or normalizer != _steps(_normalizer(prefix, tokens, types)):
            raise TokenizerError(f"tokenizer.json handles spaces in another way than a SentencePiece model; {REMEDY}")
        scores = _scores_of_merges(tokens, types, merges)
        return {"model": "llama", "pre": "default", **kind, "scores": scores, "add_space_prefix": prefix}
    rules = normalizer, words, bool(model.get("ignore_merges"))
    names = [name for name, r in RULES.items() if rules == (_steps(r.normalizer), _steps(r.words), r.ignore_merges)]
    if not names:
        raise TokenizerError(f"tokenizer.json splits text into words in a way that has no name in GGUF; {REMEDY}")
    return {"model": "gpt2", "pre": names[0], **kind, "merges": [" ".join(pair) for pair in merges]}


def _steps(step: Any) -> list[dict[str, Any]]:
    """The single steps of a normalizer or pre-tokenizer as the library writes them. trim_offsets changes no id."""
    state = {} if step is None else json.loads(step.__getstate__())
    listed = state.get("normalizers") or state.get("pretokenizers") or [state]
    return [{**one, "trim_offsets": None} for one in listed if one]


# ------------------------------------------------------------------------------------------------------------ merges
def merges_of(best_first: Sequence[str]) -> list[Pair]:
    """The merges equivalent to an order of the tokens: every pair whose union is a token, the best union first.

    Pairs with the same union are sorted by their own ranks, as in the published tokenizer.json of Llama 2 and 3.
    """
    rank = {token: i for i, token in enumerate(best_first)}
    cuts = ((token[:cut], token[cut:]) for token in best_first for cut in range(1, len(token)))
    pairs = [pair for pair in cuts if pair[0] in rank and pair[1] in rank]
    return sorted(pairs, key=lambda pair: (rank["".join(pair)], rank[pair[0]], rank[pair[1]]))


def merges_of_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[Pair]:
    """The merges equivalent to SentencePiece's scores."""
    pieces = [id for id, type in enumerate(types) if type == NORMAL]
    return merges_of([tokens[id] for id in sorted(pieces, key=lambda id: (-scores[id], id))])


def _scores_of_merges(tokens: Sequence[str], types: Sequence[int], merges: Sequence[Pair]) -> list[float]:
    """Scores that make SentencePiece merge as a list of merges does. Raises TokenizerError if none exist.

    SentencePiece merges any two neighbours whose union is a piece, the best union first. So all pairs with the same
    union must be in the list, next to each other.
    """
    unions = list(dict.fromkeys(map("".join, merges)))
    score = {union: -float(i + 1) for i, union in enumerate(unions)}
    lowest = -float(len(unions) + 1)  # of pieces without a merge; the ids do not depend on it
    scores = [score.get(token, lowest) if type == NORMAL else 0.0 for token, type in zip(tokens, types, strict=True)]
    derived = merges_of_scores(tokens, types, scores)
    if [*map("".join, derived)] != [*map("".join, merges)] or set(derived) != set(merges):
        raise TokenizerError(f"the merges of tokenizer.json do not follow from an order of its tokens; {REMEDY}")
    return scores


# ------------------------------------------------------------------------------------------------------ Hugging Face
def huggingface_files(tokenizer: Tokenizer) -> tuple[str, dict[str, Any]]:
    """The text of a tokenizer.json, and the content of a tokenizer_config.json without the chat template.

    PreTrainedTokenizerFast uses tokenizer.json unchanged; LlamaTokenizer would replace its normalizer and decoder.
    Raises TokenizerError if the format can't express the vocabulary.
    """
    found: Any = tokenizer
    if not isinstance(found, GGUFTokenizer):
        if isinstance(found, HuggingFaceTokenizer):
            settings = {key: value for key, value in found.settings.items() if key != "chat_template"}
            return found.data.decode(json.detect_encoding(found.data)), settings
        found = from_metadata(gguf_metadata(found, found.n_vocab), "the vocabulary")
    if isinstance(found, HuggingFaceTokenizer):
        backend = build(found.data, "the vocabulary")
        backend.decoder = decoders.ByteLevel()
    else:
        backend = _from_pieces(found)
    if found.add_bos and found.bos_id is not None:
        bos = found.tokens[found.bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, found.bos_id)]
        )
    ids = {"bos_token": found.bos_id, "eos_token": found.eos_id}
    ids |= {"unk_token": found.types.index(UNKNOWN)} if UNKNOWN in found.types else {}
    return str(backend.to_str()), {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": found.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **{name: None if id is None else found.tokens[id] for name, id in ids.items()},
    }


def _from_pieces(tokenizer: GGUFTokenizer) -> Backend:
    """The library's tokenizer of SentencePiece's pieces, in the form of Llama 2's tokenizer.json."""
    tokens, types, prefix = tokenizer.tokens, tokenizer.types, tokenizer.strips_leading_space
    merges = merges_of_scores(tokens, types, tokenizer.metadata["tokenizer.ggml.scores"])
    vocab = {token: id for id, token in enumerate(tokens) if types[id] != UNUSED}
    unknown = tokens[types.index(UNKNOWN)] if UNKNOWN in types else None
    backend = Backend(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.normalizer = _normalizer(prefix, tokens, types)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * prefix)])
    for token, type in zip(tokens, types, strict=True):
        if type in (CONTROL, UNKNOWN, USER_DEFINED):
            backend.add_tokens([AddedToken(token, normalized=type == USER_DEFINED, special=type != USER_DEFINED)])
    return backend


def _normalizer(prefix: bool, tokens: Sequence[str], types: Sequence[int]) -> normalizers.Normalizer:
    """The normalizer of Llama 2's tokenizer.json, with or without a space before every text.

    The library matches user-defined pieces in the normalized text, and normalizes the pieces too, so a step removes the
    leading space that a piece gets. As a side effect, a text that consists of one such piece gets no leading space.
    """
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    alternatives = "|".join(re.escape(t) for t, type in zip(tokens, types, strict=True) if type == USER_DEFINED)
    if prefix and alternatives:
        steps.append(normalizers.Replace(Regex(rf"\A{SPACE}(?=(?:{alternatives})\z)"), ""))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


# --------------------------------------------------------------------------------------------------------- the proof
def check_equal(source: Tokenizer, written: Tokenizer) -> None:
    """Raise TokenizerError unless a tokenizer that was written has the same ids, bytes and ends as its source."""
    for name in ("bos_id", "eos_id", "stop_ids", "add_bos", "strips_leading_space", "infill"):
        ours, theirs = getattr(source, name), getattr(written, name)
        if ours != theirs:
            raise TokenizerError(f"its {name} {ours} would become {theirs}; {REMEDY}")
    for id in range(source.n_vocab):
        if id >= written.n_vocab and id not in source.token_of:
            continue  # a row of the embedding without a token
        token, found = source.token_bytes(id), written.token_bytes(id)
        if token not in (found, UNKNOWN_BYTES) and found != padding(id).encode():
            raise TokenizerError(f"its token {id}, {token!r:.60}, would become {found!r:.60}; {REMEDY}")
    added = sorted({*source.strips, *written.strips} - source.control.keys())[:MOST_ADDED]  # matched in every text
    for text in (*SAMPLE, *(f"a {token} b{token}c" for token in added)):
        if _ids(source, text) != _ids(written, text):
            raise TokenizerError(f"the ids of {text!r:.60} would change; {REMEDY}")
    for control in list(source.control)[:MOST_ADDED]:
        pieces = [(control, True), ("the dog", False)]
        if source.encode_pieces(pieces) != written.encode_pieces(pieces):
            raise TokenizerError(f"the ids of a text after {control!r:.60} would change; {REMEDY}")


def _ids(tokenizer: Tokenizer, text: str) -> list[int] | None:
    try:
        return tokenizer.encode(text)
    except TokenizerError:  # the vocabulary lacks tokens for some bytes
        return None
