"""The tokenizer.model of LLaMA 1, Llama 2 and Code Llama: a protobuf message, run by the sentencepiece library.

The library is the reference and encodes every text. Only one thing is changed before it reads the model: control tokens
that the file stores as ordinary pieces become control pieces, which the library never matches in a text.
Fields and types: google/sentencepiece src/sentencepiece_model.proto. Wire format: protobuf.dev, "Encoding".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from sentencepiece import SentencePieceProcessor

from ..checks import boolean
from ..errors import TokenizerError
from .base import Tokenizer, split_at
from .common import (
    MARKS,
    NOTHING,
    Named,
    added_by_settings,
    library_errors,
    looks_control,
    number_tokens,
    piece_bytes,
)
from .growth import check_factor, longest_replacement

# Fields of ModelProto, of SentencePiece and of NormalizerSpec; values of SentencePiece.type
PIECE, TRAINER, NORMALIZER = 1, 2, 3
TYPE = 3
CHARSMAP, ADD_DUMMY_PREFIX = 2, 3
CONTROL, USER_DEFINED = 3, 4

# Wire types: an integer with 7 bits per byte, 8 bytes, a length and its bytes, 4 bytes
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def recognizes(start: bytes) -> bool:
    """Whether these bytes begin a model: its first field is a piece, whose first field is a text."""
    return start[:1] == b"\n" and b"\n" in start[2:4]


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The integer written at `at`, low bits first, and the offset after it."""
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


@functools.cache  # a model has few different lengths
def write_varint(value: int) -> bytes:
    """An integer with 7 bits per byte, low bits first; every byte except the last has the high bit set."""
    return bytes([value]) if value <= 0x7F else bytes([value & 0x7F | 0x80]) + write_varint(value >> 7)


def write_field(number: int, value: int | bytes) -> bytes:
    """One field of a message: its number and wire type, then its value."""
    if isinstance(value, int):
        return write_varint(number << 3 | VARINT) + write_varint(value)
    return write_varint(number << 3 | BYTES) + write_varint(len(value)) + value


def read_fields(data: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Number, value and encoded form of each field of a message.

    Raises KeyError for a group: it would hide the fields that follow it from this reader, but not from the library.
    """
    at = 0
    while at < len(data):
        start = at
        key, at = read_varint(data, at)
        value: int | bytes
        if key & 7 == VARINT:
            value, at = read_varint(data, at)
        else:
            length, at = read_varint(data, at) if key & 7 == BYTES else ({FIXED64: 8, FIXED32: 4}[key & 7], at)
            value, at = data[at : at + length], at + length
        yield key >> 3, value, data[start:at]


def read_messages(model: bytes) -> dict[int, list[bytes]]:
    """The parts of a model by the number of their field."""
    found: dict[int, list[bytes]] = {PIECE: []}
    for number, value, _ in read_fields(model):
        if isinstance(value, bytes):
            found.setdefault(number, []).append(value)
    return found


def write_messages(messages: Mapping[int, list[bytes]]) -> bytes:
    """The inverse of `read_messages`."""
    return b"".join([write_field(number, value) for number, values in messages.items() for value in values])


def last_number(message: bytes, number: int, default: int) -> int:
    """The value of a numeric field; the last one counts if a message repeats it."""
    return next((v for n, v, _ in reversed(list(read_fields(message))) if n == number and isinstance(v, int)), default)


def with_control(model: bytes, ids: set[int]) -> bytes:
    """The model with the pieces of these ids changed to control pieces."""
    written, id = [], 0
    for number, value, raw in read_fields(model):
        if number == PIECE and isinstance(value, bytes):
            raw = write_field(PIECE, value + write_field(TYPE, CONTROL)) if id in ids else raw
            id += 1
        written.append(raw)
    return b"".join(written)


class SentencePieceModelTokenizer(Tokenizer):
    """The tokenizer of a SentencePiece model.

    data      the bytes of the file, or its messages as `read_messages` returns them
    settings  the parsed tokenizer_config.json of a Hugging Face folder. It may add tokens after the pieces, name the
              begin and the end of a text, and add a space after every control token (legacy), as Meta's code does
    """

    def __init__(
        self,
        data: bytes | dict[int, list[bytes]],
        where: str,
        settings: Mapping[str, Any] | None = None,
        named: Named = NOTHING,
    ):
        self.kind = "SentencePiece model"
        self._where, self.settings = where, settings or {}
        with library_errors(where, "not a SentencePiece model, or a damaged one"):
            self._build(data, named, self.settings)

    def _build(self, data: bytes | dict[int, list[bytes]], named: Named, settings: Mapping[str, Any]) -> None:
        self.data = data if isinstance(data, bytes) else write_messages(data)
        library = SentencePieceProcessor(model_proto=self.data)  # first, because `read_fields` trusts the message
        messages = read_messages(data) if isinstance(data, bytes) else data
        if not {TRAINER, NORMALIZER} <= messages.keys():
            # A file cut at the end of a piece is a message too, and the library's defaults give other ids
            raise ValueError(f"it ends after {len(messages[PIECE])} pieces, expected its settings")
        normalizer = b"".join(messages[NORMALIZER])
        for number, value, _ in read_fields(normalizer):
            if number == CHARSMAP and isinstance(value, bytes):
                check_factor(longest_replacement(value), self._where)
        pieces = library.id_to_piece(list(range(len(messages[PIECE]))))  # fails on a piece that is not UTF-8

        more = added_by_settings(settings)
        listed = {token: flags["id"] for token, flags in more.items() if flags.get("id", -1) >= len(pieces)}
        ids = number_tokens({**listed, **{piece: id for id, piece in enumerate(pieces)}}, more)
        if len({*listed.values()}) < len(listed):
            raise ValueError("two added tokens have the same id")
        added = {piece: {"special": True} for id, piece in enumerate(pieces) if library.is_control(id)}
        for piece, message in zip(pieces, messages[PIECE], strict=True):
            shown = looks_control(piece) or piece in named.template  # then a user-defined piece may be a control token
            if shown and last_number(message, TYPE, 0) == USER_DEFINED:
                added[piece] = {}
        ends = [pieces[id] if id >= 0 else None for id in (library.bos_id(), library.eos_id())]
        self._name_tokens(ids, {**added, **more}, settings, named, (ends[0], ends[1]), MARKS & ids.keys())

        if library.unk_id() in {self.bos_id, *self.stop_ids}:
            raise ValueError("the token of unknown characters begins or ends a text, expected a control token")
        unknown = pieces[library.unk_id()]
        self.special = {**self.control, unknown: library.unk_id()}
        self.control = {token: id for token, id in self.control.items() if token != unknown}
        disguised = {id for id in self.control.values() if id < len(pieces) and not library.is_control(id)}
        self.added = {token: ids[token] for token in more.keys() - self.special.keys()}
        keys = ("add_bos_token", "legacy", "add_prefix_space")  # of the last two, null counts as true
        given = {
            key: boolean(f"{self._where}: {key}", settings[key], TokenizerError)
            for key in keys
            if settings.get(key) is not None
        }
        self.add_bos = given.get("add_bos_token", library.bos_id() >= 0)
        self._space_after_control = given.get("legacy", True)
        prefix = self._space_after_control or given.get("add_prefix_space", True)
        self.strips_leading_space = prefix and bool(last_number(normalizer, ADD_DUMMY_PREFIX, 1))
        spaces = b"" if prefix else write_field(NORMALIZER, write_field(ADD_DUMMY_PREFIX, 0))
        if disguised or spaces:
            library = SentencePieceProcessor(model_proto=with_control(self.data, disguised) + spaces)
        self.library = library

    def _bytes_of(self, id: int) -> bytes:
        token = self.token_of.get(id)
        if token is None or token in self.hidden:
            return b""
        if id >= self.library.vocab_size():
            return token.encode()
        if self.library.is_unknown(id):
            return self.library.decode([id]).encode()  # the model defines how an unknown character is shown
        return piece_bytes(token, self.library.is_byte(id))

    def _encode(self, text: str) -> list[int]:
        with library_errors(self._where, "the text can't be encoded"):
            ids: list[int] = []
            for part, is_token in self._stripped(split_at(text, self.added)):
                if is_token:
                    ids.append(self.added[part])
                else:
                    ids += self._encode_after_control(part) if ids else self.library.encode(part)
            return ids

    def _encode_after_control(self, text: str) -> list[int]:
        return self._encode(text) if self._space_after_control else self._encode_joined(text)
