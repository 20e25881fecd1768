"""The tokenizer.json of a Hugging Face folder, run by the `tokenizers` library.

The library matches added tokens in every text, including control tokens. So the library gets the control tokens under
names that it never matches; then no text can become one. Everything else follows the file.
File format: huggingface/tokenizers, tokenizers/src/tokenizer/serialization.rs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from ..checks import boolean
from ..errors import TokenizerError
from ..system.documents import parse_json
from .base import Tokenizer
from .common import (
    BYTE_OF,
    FLAGS,
    MARKS,
    NOTHING,
    Named,
    added_by_settings,
    added_tokens,
    byte_level_bytes,
    library_errors,
    looks_control,
    number_tokens,
    piece_bytes,
)
from .growth import check_growth

# Tokens that begin and end a text if neither tokenizer_config.json nor tokenizer.json names them
BOS = ("<|begin_of_text|>", "<s>")
EOS = ("<|end_of_text|>", "</s>", "<|endoftext|>")

AFTER = ("post_processor", "decoder")  # the steps after the model
ONE_TOKEN = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
OPTIONS = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")


def recognizes(start: bytes) -> bool:
    """Whether a file begins like a JSON object."""
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")


def build(source: Mapping[str, Any], where: str, hidden: Set[str | None] = frozenset()) -> Backend:
    """The library's tokenizer of a file. No text matches the tokens in `hidden`, but they keep their ids.

    BPE models are passed as Python objects, which takes half the time of JSON. Added tokens come last, after
    `check_growth`: the library normalizes them, and a normalizer may lengthen a text without bound.
    """
    name = {token: f"\uffff{token}" for token in hidden}
    model, vocab = dict(source["model"]), source["model"]["vocab"]
    is_bpe = isinstance(vocab, dict) and isinstance(model.get("merges"), list)
    if isinstance(vocab, dict):
        model["vocab"] = {name.get(token, token): id for token, id in vocab.items()}
    else:
        model["vocab"] = [[name.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") is not None:
        model["unk_token"] = name.get(model["unk_token"], model["unk_token"])
    unused = dict.fromkeys((*AFTER, "padding", "truncation"))
    backend = Backend.from_str(
        json.dumps({**source, **unused, "added_tokens": [], "model": ONE_TOKEN if is_bpe else model})
    )
    check_growth(backend, where)
    if is_bpe:
        used = name.keys() & vocab.keys()
        pairs = (tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"])
        merges = [(a, b) for a, b in pairs if a not in used and b not in used and a + b not in used]
        options = {key: model[key] for key in OPTIONS if model.get(key) is not None}
        backend.model = models.BPE(vocab=model["vocab"], merges=merges, **options)
    backend.add_tokens(
        [
            AddedToken(
                name.get(token["content"], token["content"]),
                special=token["content"] in hidden or bool(token.get("special")),
                **{flag: bool(token.get(flag)) for flag in FLAGS},
            )
            for token in source.get("added_tokens") or []
        ]
    )
    return backend


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer of a tokenizer.json. Ids without a token have no text.

    data      the bytes of the file, or the content that a file would have
    settings  the parsed tokenizer_config.json, if there is one
    """

    def __init__(
        self,
        data: Any,
        where: str,
        settings: Mapping[str, Any] | None = None,
        named_by: Named = NOTHING,
    ):
        self.data, self._where, self.settings = data, where, settings or {}
        with library_errors(where, "not a usable tokenizer.json"):
            found = self._source()
            self._read_tokens(found, named_by)
            self.backend = build(found, where, hidden={*self.control, self.unknown} - {None})
            self.backend.encode_special_tokens = True  # then the library matches none of them in a text
            adds_space = self.backend.encode("a").tokens[0][:1] in "\u0120\u2581"
            rebuilds = self.settings.get("tokenizer_class") not in ("PreTrainedTokenizerFast", "TokenizersBackend")
            if rebuilds and self.settings.get("add_prefix_space", adds_space) not in (None, adds_space):
                # transformers then changes the steps of the file
                raise ValueError("add_prefix_space of tokenizer_config.json contradicts the file; remove it")

    def _source(self) -> dict[str, Any]:
        """The content of the file, with the tokens that tokenizer_config.json adds."""
        source = parse_json(self.data, self._where) if isinstance(self.data, bytes) else self.data
        added = added_tokens(source.get("added_tokens") or [])
        for name, token in added_by_settings(self.settings).items():
            listed = added.get(name, {})
            added[name] = {**token, **listed, "special": bool(token.get("special") or listed.get("special"))}
        return {**source, "added_tokens": list(added.values())}

    def _read_tokens(self, source: dict[str, Any], named_by: Named) -> None:
        """Set the ids of the tokens, and which of them are control tokens."""
        model, vocab = source["model"], source["model"]["vocab"]
        self.added = {token["content"]: token for token in source["added_tokens"]}
        probe = Backend.from_str(json.dumps({"model": ONE_TOKEN, **{key: source.get(key) for key in AFTER}}))
        decode = probe.decoder.decode if probe.decoder is not None else "".join
        self.byte_level = decode(["\u0120a"]) == " a" or '"ByteLevel"' in json.dumps(source.get("pre_tokenizer"))
        if not self.byte_level and decode(["a", "\u2581b"]) != "a b":
            raise TokenizerError(f"{self._where}: its decoder is not supported, expected ByteLevel or SentencePiece's")
        self._byte_fallback = decode(["<0x41>"]) == "A"
        self.strips_leading_space = not self.byte_level and decode(["\u2581a"]) == "a"
        pieces = vocab if isinstance(vocab, dict) else {piece: id for id, (piece, _) in enumerate(vocab)}
        ids = number_tokens(pieces, self.added)
        around = probe.encode("a")  # and the tokens that the file adds before and after a text
        at = around.special_tokens_mask.index(0)
        before, after = around.tokens[:at], around.tokens[at + 1 :]
        usual = [next(iter(token for token in names if token in self.added), None) for names in (before or BOS, EOS)]
        marks = {*before, *after} | MARKS & (self.added.keys() if self.byte_level else ids.keys())
        self._name_tokens(ids, self.added, self.settings, named_by, (usual[0], usual[1]), marks)

        if isinstance(vocab, dict):
            self.unknown: str | None = model.get("unk_token")
            if ids.get(self.unknown) in {self.bos_id, *self.stop_ids} or looks_control(self.unknown or ""):
                self.unknown = None  # GPT-2's files use the end of text for unknown characters
            source["model"] = {**model, "unk_token": self.unknown}
        else:
            self.unknown = self.token_of.get(model.get("unk_id"))
        self.special = {**self.control, **{token: ids[token] for token in (self.unknown,) if token in ids}}
        self.control = {token: id for token, id in self.control.items() if token != self.unknown}
        self._control_ids = frozenset(self.control.values())
        self.kind = f"{'byte-level' if self.byte_level else 'SentencePiece-style'} {model.get('type', 'BPE')}"
        self.add_bos = self._adds_bos(before)
        self._only_first = '"prepend_scheme": "first"' in json.dumps(source.get("pre_tokenizer"))
        missing = [byte for token, byte in BYTE_OF.items() if token not in ids or token in self.control]
        self._missing = frozenset(missing if self.byte_level and self.unknown is None else ())

    def _adds_bos(self, before: Sequence[str]) -> bool:
        """Whether bos precedes every text: as tokenizer_config.json says, else as the file's post-processor does."""
        setting = self.settings.get("add_bos_token")
        if setting is not None:
            return boolean(f"{self._where}: add_bos_token of tokenizer_config.json", setting, TokenizerError)
        if before and (self.bos_id is None or before != [self.token_of[self.bos_id]]):
            raise TokenizerError(
                f"{self._where}: the file adds {' '.join(before)} before every text, expected nothing or the bos_token;"
                " set add_bos_token in tokenizer_config.json"
            )
        return bool(before)

    def _encode(self, text: str) -> list[int]:
        with library_errors(self._where, "the text can't be encoded"):
            ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        if not self._control_ids.isdisjoint(ids) or ("\uffff" in text and "Unigram" in self.kind):  # see `build`
            raise TokenizerError(
                f"{self._where}: the text or a step of the file has U+FFFF, reserved for hidden tokens"
            )
        if lost := self._missing.intersection(text.encode()):  # a longer token may contain such a byte
            encoded = b"".join(map(self.token_bytes, ids))
            for byte in lost:
                if text.encode().count(byte) > encoded.count(byte):
                    raise TokenizerError(f"{self._where}: the text has the byte 0x{byte:02X}, which has no token")
        return ids

    def _encode_special(self, text: str) -> list[int]:
        with library_errors(self._where, "the text can't be encoded"):
            return self._reference.encode(text, add_special_tokens=False).ids

    @cached_property
    def _reference(self) -> Backend:
        """The library's tokenizer, made from the unchanged file; it may turn parts of a text into control tokens."""
        return build(self._source(), self._where)

    def _encode_after_control(self, text: str) -> list[int]:
        return self._encode_joined(text) if self._only_first else self._encode(text)

    def _bytes_of(self, id: int) -> bytes:
        token = self.token_of.get(id)
        if token is None or token in self.hidden or token == self.unknown:
            return b""
        if self.byte_level:
            return token.encode() if token in self.added else byte_level_bytes(token)
        return piece_bytes(token, self._byte_fallback)
