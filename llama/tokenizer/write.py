"""Write any tokenizer as GGUF metadata or as a tokenizer.json, for exactly the same ids.

GGUF's metadata is the common form: every other kind is converted to it, and a tokenizer.json is built from it by the
`tokenizers` library. A tokenizer that was read from the requested format is copied. `check_equal` compares what was
written with the source; what a format can't express is an error.
Sources: ggml-org/llama.cpp, convert_hf_to_gguf.py and llama-vocab.cpp; the published tokenizer.json of Llama 2 and 3.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from ..errors import TokenizerError
from . import sentencepiece
from .base import Tokenizer
from .common import BYTE_OF, EOT, all_splits, byte_piece, stop_ids
from .gguf import BYTE, CONTROL, NORMAL, PRE, UNKNOWN, UNUSED, USER_DEFINED, GGUFTokenizer, from_metadata
from .huggingface import HuggingFaceTokenizer
from .sentencepiece import SentencePieceModelTokenizer, read_fields
from .tiktoken import N_CONTROL, TiktokenTokenizer

TOKENS, TYPES, SCORES = (f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "scores"))
PADDING_SCORE = -10000.0  # llama.cpp's score of padding tokens
# Control strings that end a turn; the first one in a vocabulary becomes its eot in GGUF
EOT_NAMES = ("<|eot_id|>", "<|im_end|>", "<|end|>", EOT)
EOM_NAME = "<|eom_id|>"
SPACE = "\u2581"
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
# Fields of SentencePiece and TrainerSpec (google/sentencepiece, sentencepiece_model.proto); BPE is a MODEL_TYPE
TEXT, SCORE, MODEL_TYPE, BPE = 1, 2, 3, 2

# Texts whose ids are compared: white space, digits, scripts, composed characters, control strings, single bytes
SAMPLE = (
    "", " ", "  two  spaces ", " The dog bites the man, isn't it? I'LL see.", "\n\n a\tb\r\n  c", "x = 3.14*2024+1e-5;",
    "def f(x, y):\n    return x*cos(a) - y", "Über façade e\u0301 ﬀ ½ Ａ", "一句中文。предложение שלום ไทย 한국어",
    "😀👨‍👩‍👧 \u3000\xa0▁ ▁▁", "<s></s><|eot_id|><|im_end|><unk>", "<0x0A> [INST]", "it's we'RE 1234567 ... == //",
)  # fmt: skip
MOST_ADDED = 100  # plain added tokens that are tried in a text
UNKNOWN_BYTES = " \u2047 ".encode()  # SentencePiece's text of an unknown character, which other formats do not store
REMEDY = "pass the tokenizer to write with --tokenizer, or convert to another format"

Pair = tuple[str, str]


# -------------------------------------------------------------------------------------------------------------- GGUF
def gguf_metadata(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The keys tokenizer.ggml.*, padded to the rows of the embedding. Raises TokenizerError."""
    if isinstance(tokenizer, GGUFTokenizer):
        own = {key: value for key, value in tokenizer.metadata.items() if key.startswith("tokenizer.")}
        lists = {key: value.tolist() for key, value in own.items() if isinstance(value, np.ndarray)}
        return _padded({TYPES: tokenizer.types, **own, **lists}, vocab_size)
    if isinstance(tokenizer, TiktokenTokenizer):
        kind = _from_tiktoken(tokenizer)
    elif isinstance(tokenizer, SentencePieceModelTokenizer):
        kind = _from_sentencepiece(tokenizer)
    else:
        kind = _from_json(cast(HuggingFaceTokenizer, tokenizer))
    types = kind["token_type"]
    control = {token: id for id, token in enumerate(kind["tokens"]) if types[id] == CONTROL}
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, **_end_ids(tokenizer, control)}
    ids["unknown"] = types.index(UNKNOWN) if UNKNOWN in types else None
    named = {f"{name}_token_id": id for name, id in ids.items() if id is not None}
    entries = {**kind, **named, "add_bos_token": tokenizer.add_bos}
    return _padded({f"tokenizer.ggml.{key}": value for key, value in entries.items()}, vocab_size)


def _end_ids(tokenizer: Tokenizer, control: dict[str, int]) -> dict[str, int | None]:
    """The ids of eot and eom: by name, else other ids that end an answer."""
    others = (control[name] for name in EOT_NAMES if name in control and control[name] != tokenizer.eos_id)
    ends = {"eot": next(others, None), "eom": control.get(EOM_NAME)}
    unnamed = sorted(tokenizer.stop_ids - stop_ids(control, [tokenizer.eos_id]))
    for name, id in ends.items():
        if id is None and unnamed:
            ends[name] = unnamed.pop(0)
    return ends


def _padded(entries: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """The metadata with a token for each row of the embedding."""
    rows = range(len(entries[TOKENS]), vocab_size)
    if rows.start > vocab_size:
        raise TokenizerError(
            f"the vocabulary has {rows.start} tokens and the embedding {vocab_size} rows, expected at least as many"
        )
    pad: dict[str, list[Any]] = {
        TOKENS: [padding(id) for id in rows],
        TYPES: [UNUSED] * len(rows),
        SCORES: [PADDING_SCORE] * len(rows),
    }
    return {key: [*value, *pad[key]] if key in pad else value for key, value in entries.items()}


def padding(id: int) -> str:
    """llama.cpp's name for an id that has a row in the embedding but no token."""
    return f"[PAD{id}]"


def spelled(token: bytes) -> str:
    """A token in GPT-2's byte alphabet."""
    return "".join([CHARACTER_OF[byte] for byte in token])


def merges_of_ranks(tokens: Sequence[str]) -> list[Pair]:
    """The merges equivalent to ranks: every pair whose union is a token, in the order of the union's rank.

    Pairs with the same union are sorted by their own ranks, as in Llama 3's published tokenizer.json.
    """
    rank = {token: i for i, token in enumerate(tokens)}
    pairs = all_splits(tokens, rank, "the vocabulary")
    return sorted(pairs, key=lambda pair: (rank["".join(pair)], rank[pair[0]], rank[pair[1]]))


def merges_of_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[Pair]:
    """The merges equivalent to SentencePiece's scores: the best union first."""
    pieces = {token: id for id, token in enumerate(tokens) if types[id] == NORMAL}
    best_first = sorted(pieces, key=lambda piece: (-scores[pieces[piece]], pieces[piece]))
    return all_splits(best_first, pieces, "the vocabulary")


def _from_tiktoken(tokenizer: TiktokenTokenizer) -> dict[str, Any]:
    n = tokenizer.n_vocab - N_CONTROL
    tokens = [spelled(tokenizer.token_bytes(id)) for id in range(n)]
    return {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": [*tokens, *tokenizer.control],
        "token_type": [NORMAL] * n + [CONTROL] * N_CONTROL,
        "merges": [" ".join(pair) for pair in merges_of_ranks(tokens)],
    }


def _from_sentencepiece(tokenizer: SentencePieceModelTokenizer) -> dict[str, Any]:
    pieces, specs = list[dict[int, Any]](), dict[int, dict[int, Any]]()
    for number, value, _ in read_fields(tokenizer.data):
        fields = {key: field for key, field, _ in read_fields(cast(bytes, value))}
        if number == sentencepiece.PIECE:
            pieces.append(fields)
        else:
            specs.setdefault(number, {}).update(fields)
    replaces = specs[sentencepiece.NORMALIZER_SPEC].get(sentencepiece.CHARSMAP)
    if replaces or specs[sentencepiece.TRAINER_SPEC].get(MODEL_TYPE) != BPE:
        raise TokenizerError(
            f"the SentencePiece model {'replaces characters of a text' if replaces else 'is not BPE'}, which no other"
            " format can express; expected one that works like Llama 2's"
        )
    hidden = {id for token, id in tokenizer.control.items() if token not in tokenizer.visible}
    types = [CONTROL if id in hidden else piece.get(sentencepiece.TYPE, NORMAL) for id, piece in enumerate(pieces)]
    added = range(len(pieces), tokenizer.n_vocab)  # tokens of the files beside the model, or ids without one
    beside = [tokenizer.token_of.get(id, padding(id)) for id in added]
    kinds = [CONTROL if id in hidden else USER_DEFINED if id in tokenizer.token_of else UNUSED for id in added]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [*(piece[TEXT].decode() for piece in pieces), *beside],
        "scores": [struct.unpack("<f", piece.get(SCORE, bytes(4)))[0] for piece in pieces] + [0.0] * len(added),
        "token_type": types + kinds,
        "add_space_prefix": tokenizer.strips_leading_space,
    }


def _from_json(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    source = json.loads(tokenizer.data)
    model, hidden = source["model"], tokenizer.control.keys() - tokenizer.visible
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(f"the model of tokenizer.json is {model['type']}, expected BPE, the only one of GGUF")
    added = {token["content"] for token in source.get("added_tokens") or []}
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
    merged = (NORMAL, USER_DEFINED) if tokenizer.byte_level else (NORMAL,)
    plain = {token for token, type in zip(tokens, types, strict=True) if type in merged}
    listed = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model.get("merges") or []]
    merges = [pair for pair in listed if plain.issuperset((*pair, "".join(pair)))]  # others need a control token
    common = {"tokens": tokens, "token_type": types}
    backend = Backend.from_str(json.dumps(source))
    normalizer, words = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
    if not tokenizer.byte_level:
        user_defined = [token for token, type in zip(tokens, types, strict=True) if type == USER_DEFINED]
        prefix = tokenizer.strips_leading_space
        if words or normalizer != _steps(_normalizer(prefix, user_defined)):
            raise TokenizerError(f"tokenizer.json handles spaces in another way than a SentencePiece model; {REMEDY}")
        scores = _scores_of_merges(tokens, types, merges)
        return {"model": "llama", "pre": "default", **common, "scores": scores, "add_space_prefix": prefix}
    if spaced := [pair for pair in merges if " " in "".join(pair)]:
        raise TokenizerError(f"GGUF can't express the merge {spaced[0]!r}: it separates the two tokens by a space")
    rules = normalizer, words, bool(model.get("ignore_merges"))
    names = [name for name, r in PRE.items() if rules == (_steps(r.normalizer()), _steps(r.words()), r.ignore_merges)]
    if not names:
        raise TokenizerError(f"tokenizer.json splits text into words in a way that has no name in GGUF; {REMEDY}")
    return {"model": "gpt2", "pre": names[0], **common, "merges": [" ".join(pair) for pair in merges]}


def _steps(step: Any) -> list[dict[str, Any]]:
    """The single steps of a normalizer or pre-tokenizer as the library writes them, without what changes no id."""
    state = {} if step is None else json.loads(step.__getstate__())
    listed = state.get("normalizers") or state.get("pretokenizers") or [state]
    return [{**one, "trim_offsets": None} for one in listed if one]


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
def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The text of a tokenizer.json. Raises TokenizerError if the format can't express the vocabulary."""
    if isinstance(tokenizer, HuggingFaceTokenizer) and not isinstance(tokenizer, GGUFTokenizer):
        return tokenizer.data.decode(json.detect_encoding(tokenizer.data))
    found = _as_gguf(tokenizer)
    metadata, tokens, types = found.metadata, found.tokens, found.types
    byte_level = metadata["tokenizer.ggml.model"] == "gpt2"
    used = {NORMAL, UNKNOWN, CONTROL, USER_DEFINED} | (set() if byte_level else {BYTE})  # no text becomes another one
    vocab = {token: id for id, token in enumerate(tokens) if types[id] in used}
    if byte_level:
        merges, rule = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]], PRE[found.pre]
        backend = Backend(models.BPE(vocab, merges, ignore_merges=rule.ignore_merges))
        backend.normalizer, backend.pre_tokenizer = rule.normalizer(), rule.words()
        backend.decoder = decoders.ByteLevel()
    else:
        merges, prefix = merges_of_scores(tokens, types, metadata[SCORES]), found.strips_leading_space
        unknown = tokens[types.index(UNKNOWN)] if UNKNOWN in types else None
        backend = Backend(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        backend.normalizer = _normalizer(prefix, _user_defined(found))
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * prefix)])
    if found.add_bos and found.bos_id is not None:
        bos = tokens[found.bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, found.bos_id)]
        )
    for token, type in zip(tokens, types, strict=True):
        if type in (CONTROL, UNKNOWN, USER_DEFINED):
            plain = type == USER_DEFINED
            backend.add_tokens([AddedToken(token, normalized=plain and not byte_level, special=not plain)])
    return str(backend.to_str())


def _as_gguf(tokenizer: Tokenizer) -> Any:
    if isinstance(tokenizer, GGUFTokenizer):
        return tokenizer
    return from_metadata(gguf_metadata(tokenizer, tokenizer.n_vocab), "the vocabulary")


def _normalizer(prefix: bool, user_defined: Sequence[str]) -> normalizers.Normalizer:
    """The normalizer of Llama 2's tokenizer.json, with or without a space before every text.

    The library matches user-defined pieces in the normalized text, and normalizes the pieces too, so a step removes the
    leading space that a piece gets. As a side effect, a text that consists of one such piece gets no leading space.
    """
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    if prefix and user_defined:
        alternatives = "|".join(map(re.escape, user_defined))
        steps.append(normalizers.Replace(Regex(rf"\A{SPACE}(?=(?:{alternatives})\z)"), ""))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of a tokenizer_config.json, without the chat template.

    PreTrainedTokenizerFast uses tokenizer.json unchanged; LlamaTokenizer would replace its normalizer and decoder.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer) and not isinstance(tokenizer, GGUFTokenizer):
        return {key: value for key, value in tokenizer.settings.items() if key != "chat_template"}
    found = _as_gguf(tokenizer)
    ids = {"bos_token": found.bos_id, "eos_token": found.eos_id}
    ids |= {"unk_token": found.types.index(UNKNOWN)} if UNKNOWN in found.types else {}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": found.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **{name: None if id is None else found.tokens[id] for name, id in ids.items()},
    }


# --------------------------------------------------------------------------------------------------------- the proof
def check_equal(source: Tokenizer, written: Tokenizer) -> None:
    """Raise TokenizerError unless a tokenizer that was written has the same ids, bytes and ends as its source."""
    for name in ("bos_id", "eos_id", "stop_ids", "add_bos", "strips_leading_space"):
        ours, theirs = getattr(source, name), getattr(written, name)
        if ours != theirs:
            raise TokenizerError(f"its {name} {ours} would become {theirs}; {REMEDY}")
    for id in range(source.n_vocab):
        token, found = source.token_bytes(id), written.token_bytes(id)
        if token not in (found, UNKNOWN_BYTES) and found != padding(id).encode():
            raise TokenizerError(f"its token {id}, {token!r:.60}, would become {found!r:.60}; {REMEDY}")
    added = [*_user_defined(source), *_user_defined(written)][:MOST_ADDED]
    for text in (*SAMPLE, *(f"a {token} b{token}c" for token in added)):
        if _ids(source, text) != _ids(written, text):
            raise TokenizerError(f"the ids of {text!r:.60} would change; {REMEDY}")
    for control in list(source.control)[:MOST_ADDED]:
        pieces = [(control, True), ("the dog", False)]
        if source.encode_pieces(pieces) != written.encode_pieces(pieces):
            raise TokenizerError(f"the ids of a text after {control!r:.60} would change; {REMEDY}")


def _user_defined(tokenizer: Tokenizer) -> list[str]:
    """Plain tokens that are matched in a text before it is split."""
    if isinstance(tokenizer, GGUFTokenizer):
        return [token for token, type in zip(tokenizer.tokens, tokenizer.types, strict=True) if type == USER_DEFINED]
    if isinstance(tokenizer, SentencePieceModelTokenizer):
        return sorted(tokenizer.added.keys() - tokenizer.control.keys())
    added = json.loads(tokenizer.data)["added_tokens"] if isinstance(tokenizer, HuggingFaceTokenizer) else []
    return [token["content"] for token in added if token["content"] not in tokenizer.control]


def _ids(tokenizer: Tokenizer, text: str) -> list[int] | None:
    try:
        return tokenizer.encode(text)
    except TokenizerError:  # the vocabulary lacks tokens for some bytes
        return None
