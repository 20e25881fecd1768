"""The tokenizer.model of LLaMA 1, Llama 2 and Code Llama: a protobuf message, run by the sentencepiece library.

The library is the reference and encodes every text. Only one thing is changed before it reads the model: control tokens
that the file stores as ordinary pieces become control pieces, which the library never matches in a text.
Fields and types: google/sentencepiece src/sentencepiece_model.proto. Wire format: protobuf.dev, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import TokenizerError
from .base import Tokenizer
from .common import (
    CODE_LLAMA_CONTROL,
    NOTHING,
    PRE,
    Named,
    byte_piece,
    check_length,
    library_errors,
    looks_control,
    piece_bytes,
    stop_ids,
    written_by,
)
from .steps import LARGEST_GROWTH, charsmap_growth

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

# Fields of ModelProto, of SentencePiece and of NormalizerSpec; values of SentencePiece.type
PIECE, TRAINER_SPEC, NORMALIZER_SPEC, DENORMALIZER_SPEC = 1, 2, 3, 5
TYPE = 3
CHARSMAP, ADD_DUMMY_PREFIX = 2, 3
CONTROL, USER_DEFINED = 3, 4

# Wire types: an integer with 7 bits per byte, 8 bytes, a length and its bytes, 4 bytes
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

DAMAGED = "not a SentencePiece model, or a damaged one; download it again"


def recognizes(start: bytes) -> bool:
    """Whether a message begins whose first field is a piece: a message that begins with text."""
    return start[:1] == b"\n" and b"\n" in start[2:4]


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The integer written at `at`, low bits first, and the offset after it."""
    value = shift = 0
    while data[at] & 0x80:
        if shift == 63:
            raise ValueError("an integer has more than 64 bits")
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


def write_varint(value: int) -> bytes:
    """An integer with 7 bits per byte, low bits first; every byte except the last has the high bit set."""
    low = bytearray()
    while value > 0x7F:
        low.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*low, value])


def write_field(number: int, value: int | bytes) -> bytes:
    """One field of a message: its number and wire type, then its value."""
    if isinstance(value, int):
        return write_varint(number << 3 | VARINT) + write_varint(value)
    return write_varint(number << 3 | BYTES) + write_varint(len(value)) + value


def read_fields(data: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Number, value and encoded form of each field of a message."""
    at = 0
    while at < len(data):
        start = at
        key, at = read_varint(data, at)
        value: int | bytes
        if key & 7 == VARINT:
            value, at = read_varint(data, at)
        else:
            length = {FIXED64: 8, FIXED32: 4}.get(key & 7)
            if key & 7 == BYTES:
                length, at = read_varint(data, at)
            if length is None or length > len(data) - at:  # a group has no length, and the library skips it by its end
                raise ValueError(f"field {key >> 3} has the wire type {key & 7} or reaches past the end")
            value, at = data[at : at + length], at + length
        yield key >> 3, value, data[start:at]


def last_number(message: bytes, number: int, default: int) -> int:
    """The value of a numeric field; the last one counts if a message repeats it."""
    return next((v for n, v, _ in reversed(list(read_fields(message))) if n == number and isinstance(v, int)), default)


def check_normalizer(spec: bytes, where: str) -> None:
    """Raise TokenizerError if the replacements of a NormalizerSpec are damaged or lengthen a text too much.

    The library replaces sequences of bytes, and a character has up to four bytes.
    """
    for number, value, _ in read_fields(spec):
        if number == CHARSMAP and isinstance(value, bytes) and value and 4 * charsmap_growth(value) > LARGEST_GROWTH:
            raise TokenizerError(
                f"{where}: its normalizer may write more than {LARGEST_GROWTH} characters for one character of a text,"
                f" which is not supported; download the file from the model's authors"
            )


def with_control(model: bytes, ids: set[int]) -> bytes:
    """The model with the pieces of these ids changed to control pieces."""
    written, id = [], 0
    for number, value, raw in read_fields(model):
        if number == PIECE and isinstance(value, bytes):
            raw = write_field(PIECE, value + write_field(TYPE, CONTROL)) if id in ids else raw
            id += 1
        written.append(raw)
    return b"".join(written)


def without_prefix(model: bytes) -> bytes:
    """The model without the space that it adds before every text. Protobuf merges a message that occurs twice."""
    return model + write_field(NORMALIZER_SPEC, write_field(ADD_DUMMY_PREFIX, 0))


class SentencePieceModelTokenizer(Tokenizer):
    """The tokenizer of a SentencePiece model."""

    def __init__(self, data: bytes, where: str, named: Named = NOTHING):
        self.kind = "SentencePiece model"
        self._where = where
        self.data = data
        with library_errors(where, DAMAGED):  # the library accepts a piece that is not UTF-8 and fails to return it
            self._build(data, where, named)

    def _build(self, data: bytes, where: str, named: Named) -> None:
        top = [(number, value) for number, value, _ in read_fields(data) if isinstance(value, bytes)]
        pieces = [value for number, value in top if number == PIECE]
        spec = b"".join(value for number, value in top if number == NORMALIZER_SPEC)
        if not pieces or not {TRAINER_SPEC, NORMALIZER_SPEC} <= {number for number, _ in top}:
            raise TokenizerError(
                f"{where}: the model ends after {len(pieces)} pieces, expected its trainer and normalizer settings"
                f" after them; the file is truncated, download it again"
            )
        for number, value in top:
            if number in (NORMALIZER_SPEC, DENORMALIZER_SPEC):
                check_normalizer(value, where)
        library = self._load(data)
        self.n_vocab = len(pieces)
        for id, piece in enumerate(pieces):
            check_length(piece, id, where)
        self._pieces = [library.id_to_piece(id) for id in range(self.n_vocab)]
        user_defined = {id for id, piece in enumerate(pieces) if last_number(piece, TYPE, 0) == USER_DEFINED}
        bos = library.bos_id() if library.bos_id() >= 0 else next((i for i in named.bos_ids if i < self.n_vocab), None)
        stops = [id for id in named.stop_ids if id < self.n_vocab]
        disguised = {
            id
            for id, piece in enumerate(self._pieces)
            if not library.is_control(id)
            and (
                piece in CODE_LLAMA_CONTROL or (looks_control(piece) and id in user_defined) or id == bos or id in stops
            )
        }
        for id in disguised:
            if library.is_unknown(id) or library.is_byte(id):
                raise TokenizerError(
                    f"{where}: config.json or generation_config.json names id {id}, {self._pieces[id]!r}, as the begin"
                    " or end of a text, expected a control token; the files are of different models, download them"
                    " again"
                )
        written = written_by(named.template, [self._pieces[id] for id in user_defined - disguised])
        self.visible = {id for id in user_defined if self._pieces[id] in written}
        disguised |= self.visible
        model = with_control(data, disguised) if disguised else data
        self._library = self._load(model) if disguised else library
        self.control = {piece: id for id, piece in enumerate(self._pieces) if self._library.is_control(id)}
        self.bos_id = bos
        self.eos_id = library.eos_id() if library.eos_id() >= 0 else min(stops, default=None)
        self.add_bos = library.bos_id() >= 0
        self.stop_ids = stop_ids(self.control, [self.eos_id, *stops])
        self.strips_leading_space = bool(last_number(spec, ADD_DUMMY_PREFIX, 1))
        self._bytes = [self._bytes_of(id, piece) for id, piece in enumerate(self._pieces)]
        self._joining = self._load(without_prefix(model)) if PRE in self.control else self._library

    def _load(self, model: bytes) -> SentencePieceProcessor:
        from sentencepiece import SentencePieceProcessor

        with library_errors(self._where, DAMAGED):
            return SentencePieceProcessor(model_proto=model)

    def _bytes_of(self, id: int, piece: str) -> bytes:
        if self._library.is_control(id) and id not in self.visible:
            return b""
        if self._library.is_unknown(id):
            shown = self._library.decode([id])  # the model defines how an unknown character is shown
            check_length(shown, id, self._where)
            return shown.encode()
        byte = byte_piece(piece) if self._library.is_byte(id) else None
        return piece_bytes(piece) if byte is None else bytes([byte])

    def _ids(self, library: SentencePieceProcessor, text: str) -> list[int]:
        with library_errors(self._where, "the text can't be encoded"):
            return library.encode(text)

    def _encode(self, text: str) -> list[int]:
        return self._ids(self._library, text)

    def _encode_joined(self, text: str) -> list[int]:
        return self._ids(self._joining, text)

    def token_bytes(self, id: int) -> bytes:
        id = self._check_id(id)
        return self._bytes[id]
