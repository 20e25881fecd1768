"""The interface of every tokenizer, and the streaming decoder."""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from ..checks import boolean, instance, known_ids, shown
from ..errors import TokenizerError, UsageError
from .common import INFILL, PREFIX, SUFFIX, Named, looks_control, named_token, stop_ids, written_by

# Unicode's White_Space, which the `tokenizers` library strips; Python's strip() also removes four control characters
WHITE_SPACE = "".join(one for one in map(chr, range(0x3001)) if one.isspace() and not "\x1c" <= one <= "\x1f")
JOINER = "\u263a"  # put before a text that continues another one, as in Code Llama; it is not a part of a longer token

LONGEST_PARTIAL = 3  # an incomplete character in UTF-8 has at most three bytes


def _valid(text: str) -> str:
    """Return the text. Raises TokenizerError if it has a lone surrogate, which each library handles differently."""
    if not isinstance(text, str):
        raise TokenizerError(f"text must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text is not valid Unicode: a lone surrogate U+{ord(text[error.start]):04X} at character"
            f" {error.start}, usually a byte that is not UTF-8; re-encode the input as UTF-8"
        ) from None
    return text


def token_id(id: object) -> int:
    """An id as an int. Tensors and arrays of one integer are converted, because they hash and compare unlike ints."""
    try:
        if isinstance(id, bool | str):
            raise TypeError
        return operator.index(id)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"a token id must be an integer, got {shown(id)}") from None


def token_ids(ids: Iterable[object]) -> list[int]:
    """Ids as a list of ints. Raises UsageError."""
    instance("token ids", ids, Iterable, "a list of integers")
    return [token_id(id) for id in ids]


@functools.lru_cache
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def split_at(text: str, tokens: Iterable[str]) -> list[tuple[str, bool]]:
    """Split a text at tokens: (part, whether it is a token). The first match wins, then the longest."""
    parts = _pattern(tuple(tokens)).split(text)
    return [(part, i % 2 == 1) for i, part in enumerate(parts) if part]


class Tokenizer(ABC):
    """Text to ids and ids to text.

    Text never becomes a control id, except on request (`parse_special`): every vocabulary encodes "<|im_end|>" as plain
    characters. Only code appends control ids: `bos` and `eos` here, the turns of a conversation in llama/chat/.

    kind                  a description of the vocabulary
    data, settings        the content of the file; that of tokenizer_config.json, or the same keys from GGUF metadata
    n_vocab               number of ids; every id is smaller
    bos_id, eos_id        ids of begin and end of text, or None if the vocabulary has none
    add_bos               True if the model was trained with bos before every text
    control               control string -> id, for code that appends control ids
    special               `control` and the unknown token, whose id can also come from text
    stop_ids              ids that end an answer
    strips_leading_space  True if decoding removes the first space, because encoding added one
    strips                control string -> whether a chat drops white space: (before it, after it)
    visible               control strings with a text: they are control only because the chat template writes them
    """

    kind: str
    data: Any
    settings: Mapping[str, Any] = MappingProxyType({})
    n_vocab: int
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    control: Mapping[str, int]
    special: Mapping[str, int]
    stop_ids: frozenset[int]
    strips_leading_space = False
    strips: Mapping[str, tuple[bool, bool]] = MappingProxyType({})
    visible: Set[str] = frozenset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind}, {self.n_vocab:,} ids, {len(self.control):,} of them control ids)"

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Ids of valid plain text."""

    @abstractmethod
    def _bytes_of(self, id: int) -> bytes:
        """`token_bytes` of an id of the vocabulary."""

    def token_bytes(self, id: int) -> bytes:
        """The bytes of an id. A character may be split over several ids.

        Empty for a control id, unless its token is in `visible`, such as <think>.
        """
        if not 0 <= (id := token_id(id)) < self.n_vocab:
            known_ids([id], self.n_vocab)
        if id not in self._decoded:
            self._decoded[id] = self._bytes_of(id)
        return self._decoded[id]

    @functools.cached_property
    def _decoded(self) -> dict[int, bytes]:
        """The cache of `token_bytes`: id -> bytes."""
        return {}

    @functools.cached_property
    def _names(self) -> Mapping[int, str]:
        return {id: name for name, id in self.control.items()}

    @functools.cached_property
    def hidden(self) -> Set[str]:
        """The control strings without a text."""
        return self.control.keys() - self.visible

    def name(self, id: int) -> str | None:
        """The control string of an id; None if it is not a control id."""
        return self._names.get(id)

    def shown(self, id: int) -> str:
        """The text of a single id, for display: a control id by its name, bytes of a partial character as <0xE5>.

        Ids without a token, which are padding rows of the embedding, are shown as <269>.
        """
        data = self.token_bytes(id) if id < self.n_vocab else b""
        try:
            return data.decode() or self.name(id) or f"<{id}>"
        except UnicodeDecodeError:
            return "".join(chr(byte) if 32 <= byte < 127 else f"<0x{byte:02X}>" for byte in data)

    def _name_tokens(
        self,
        ids: Mapping[str, int],
        added: Mapping[str, Mapping[str, Any]],
        settings: Mapping[str, Any],
        named: Named,
        usual: tuple[str | None, str | None],
        marks: Set[str],
    ) -> None:
        """Set the ids of the tokens that begin and end a text, and the control ids.

        ids       token -> id
        added     the tokens that are matched as a whole, with their flags
        settings  tokenizer_config.json; it may name bos_token and eos_token, or set them to null
        usual     bos and eos if the settings do not mention them
        marks     other control tokens
        """
        self.token_of = {id: token for token, id in ids.items()}
        self.n_vocab = max(self.token_of) + 1
        ends = []
        for key, token, others in zip(("bos_token", "eos_token"), usual, (named.bos_ids, named.stop_ids), strict=True):
            token = named_token(settings, key) if key in settings else token
            ends.append(ids[token] if token is not None else next((id for id in others if id in self.token_of), None))
        self.bos_id, self.eos_id = ends
        stops = [id for id in named.stop_ids if id in self.token_of]  # the other ids have no token
        marks = marks | {self.token_of[id] for id in (*ends, *stops) if id is not None}
        control = marks | {token for token, flags in added.items() if flags.get("special") or looks_control(token)}
        self.visible = written_by(named.template, added.keys() - control)
        self.control = {token: ids[token] for token in sorted(control | self.visible, key=ids.__getitem__)}
        self.strips = {token: (bool(flags.get("lstrip")), bool(flags.get("rstrip"))) for token, flags in added.items()}
        self.stop_ids = stop_ids(self.control, [self.eos_id, *stops])

    def digest(self) -> str:
        """A hash of the content of the tokenizer's file, of its settings and of the control strings."""
        content = [self.data, dict(self.settings), sorted(self.control.items())]
        return hashlib.sha256(json.dumps(content, default=bytes.hex).encode()).hexdigest()

    def encode(self, text: str, bos: bool = False, eos: bool = False, *, parse_special: bool = False) -> list[int]:
        """Ids of a text, with bos before and eos after it if requested. Raises TokenizerError on a lone surrogate.

        parse_special  True: control strings in the text become control ids. Only for text that you wrote yourself
        """
        for name, value in (("bos", bos), ("eos", eos), ("parse_special", parse_special)):
            boolean(name, value)
        ids = self._encode_special(_valid(text)) if parse_special else self._encode(_valid(text))
        if bos:
            ids = [self._required(self.bos_id, "begin"), *ids]
        return [*ids, self._required(self.eos_id, "end")] if eos else ids

    def _encode_special(self, text: str) -> list[int]:
        return self.encode_pieces(self.split_control(text))

    def encode_prompt(self, text: str, parse_special: bool = False, suffix: str | None = None) -> list[int]:
        """Ids of a raw prompt, with bos if `add_bos` is set. An empty prompt is bos alone, if there is a bos.

        parse_special  as in `encode`; a text that begins with the control string of bos gets no second bos
        suffix         text after the text that the model is to write. Raises TokenizerError if there are no infill ids
        """
        if suffix is not None and parse_special:
            raise UsageError("suffix can't be combined with parse_special: leave one of them out")
        ids = self.encode(text, parse_special=parse_special) if suffix is None else self._encode_infill(text, suffix)
        add_bos = self.add_bos or (not ids and self.bos_id is not None)
        return [self._required(self.bos_id, "begin"), *ids] if add_bos and ids[:1] != [self.bos_id] else ids

    def split_control(self, text: str) -> list[tuple[str, bool]]:
        """Split a text at its special strings: (part, whether it is one). The first match wins, then the longest."""
        return split_at(text, self.special)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        """Encode the parts of a text: a special string as its id, other text as plain ids.

        White space next to a control string is dropped as `strips` requires.
        """
        ids: list[int] = []
        for i, (piece, is_control) in enumerate(self._stripped(pieces)):
            if is_control:
                ids.append(self.special[piece])
            else:
                ids += self._encode_after_control(_valid(piece)) if i else self._encode(_valid(piece))
        return ids

    def _stripped(self, pieces: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
        """The parts of a text, without the white space next to a token that `strips` drops."""
        neither = (False, False)
        for i, (piece, is_token) in enumerate(pieces):
            if not is_token and i and self.strips.get(pieces[i - 1][0], neither)[1]:
                piece = piece.lstrip(WHITE_SPACE)
            if not is_token and pieces[i + 1 :] and self.strips.get(pieces[i + 1][0], neither)[0]:
                piece = piece.rstrip(WHITE_SPACE)
            yield piece, is_token

    @functools.cached_property
    def infill(self) -> tuple[str, ...] | None:
        """The tokens and the parts of an infill prompt, in their order; None if the vocabulary has no such tokens."""
        return next((form for form in INFILL if self.control.keys() >= {*form} - {PREFIX, SUFFIX}), None)

    def _encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Ids of an infill prompt, with a leading space only before the prefix.

        As in meta-llama/codellama llama/generation.py (infilling_prompt_tokens) and in mistral-common.
        """
        if self.infill is None:
            raise TokenizerError("the vocabulary has no infill ids, such as <|fim_prefix|>; use a model with infilling")
        parts = {PREFIX: self._encode(_valid(prefix)), SUFFIX: self.encode_joined(suffix)}
        return [id for one in self.infill for id in (parts[one] if one in parts else [self.control[one]])]

    def encode_joined(self, text: str) -> list[int]:
        """Ids of plain text that continues another text."""
        return (self._encode_joined if self.strips_leading_space else self._encode)(_valid(text))

    def _encode_after_control(self, text: str) -> list[int]:
        """Ids of valid plain text after a control token."""
        return self._encode(text)

    def _encode_joined(self, text: str) -> list[int]:
        """Ids of valid plain text that continues another text: no space is added before it."""
        return self._encode(JOINER + text)[len(self._encode(JOINER)) :]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without control ids. Invalid UTF-8 becomes U+FFFD."""
        decoder = Decoder(self)
        return "".join([decoder.feed(id) for id in token_ids(ids)]) + decoder.end()

    def _required(self, id: int | None, name: str) -> int:
        if id is None:
            raise TokenizerError(f"this vocabulary has no {name}-of-text id")
        return id


class Decoder:
    """Streaming decoder: ids to text, one id at a time, never a partial character.

    The concatenated results, including `end()`, equal `Tokenizer.decode` of all ids. If there are ids `before`, the
    results are what the fed ids append to the text of `before`: a leading space is kept, and a character that `before`
    begins is completed.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for id in reversed(token_ids(before)):
            if 0 <= id < tokenizer.n_vocab:  # an embedding may have more rows than the vocabulary has tokens
                tail = tokenizer.token_bytes(id) + tail
            if len(tail) >= LONGEST_PARTIAL:
                break
        self._utf8.decode(tail[-LONGEST_PARTIAL:])
        self._at_start = tokenizer.strips_leading_space and not tail

    @property
    def is_partial(self) -> bool:
        """Whether the ids so far end inside a character."""
        return bool(self._utf8.getstate()[0])

    def feed(self, id: int) -> str:
        """The text that this id completes; empty while a character is incomplete."""
        piece = self._utf8.decode(self.tokenizer.token_bytes(token_id(id)))
        if self._at_start and piece:
            self._at_start = False
            piece = piece.removeprefix(" ")
        return piece

    def end(self) -> str:
        """U+FFFD if the ids end inside a character, else an empty string."""
        return self._utf8.decode(b"", final=True)
