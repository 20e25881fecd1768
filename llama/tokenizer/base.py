"""What every tokenizer can do, whatever file its vocabulary came from."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from ..errors import TokenizerError
from .common import MID, PRE, SUF


def _valid(text: str) -> str:
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


class Tokenizer(ABC):
    """Text to ids and back.

    Text never becomes a control id: `encode` turns "<|im_end|>" into the plain characters it is written with, in
    every vocabulary. Control ids are appended by code: `bos` and `eos` here, the turns of a chat in chat.py.

    kind       what the vocabulary is, in words
    n_vocab    number of ids; every id is below it
    bos_id, eos_id  ids of begin and end of text, or None where the vocabulary has none
    add_bos    True if the model was trained with bos in front of every text
    control    control string -> id, for code that appends them
    stop_ids   ids that end an answer
    """

    kind: str
    n_vocab: int
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    control: Mapping[str, int]
    stop_ids: frozenset[int]
    strips_leading_space = False

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Ids of plain, valid text."""

    @abstractmethod
    def token_bytes(self, id: int) -> bytes:
        """The bytes that an id stands for; empty for a control id. Several ids may share one character."""

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of a text, between bos and eos where asked for. Raises TokenizerError on a lone surrogate."""
        ids = self._encode(_valid(text))
        return self._marker(bos, self.bos_id, "begin") + ids + self._marker(eos, self.eos_id, "end")

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt, as the model was trained to see it; an empty text is bos alone, where there is one."""
        empty_start = not text and self.bos_id is not None
        return self.encode(text, bos=self.add_bos or empty_start)

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Ids that ask a Code Llama model for the text between two others. Raises TokenizerError on other vocabularies.

        Prefix, suffix, middle, as in meta-llama/codellama llama/generation.py (infilling_prompt_tokens).
        """
        if not {PRE, SUF, MID} <= self.control.keys():
            raise TokenizerError(
                f"this vocabulary has no infill ids ({PRE} {SUF} {MID}); only the Code Llama models that were trained"
                f" to fill in have them"
            )
        pre, suf, mid = (self.control[mark] for mark in (PRE, SUF, MID))
        before, after = self._encode(_valid(prefix)), self._encode_joined(_valid(suffix))
        return [*self._marker(True, self.bos_id, "begin"), pre, *before, suf, *after, mid]

    def _encode_joined(self, text: str) -> list[int]:
        """Ids of plain, valid text that does not begin a text: no space is put in front of it."""
        return self._encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; control ids have none. Bytes that are not UTF-8 become U+FFFD."""
        decoder = Decoder(self)
        return "".join([decoder.feed(id) for id in ids]) + decoder.end()

    def _check(self, id: int) -> None:
        if not 0 <= id < self.n_vocab:
            raise TokenizerError(f"token ids must lie between 0 and {self.n_vocab - 1}, got {id}")

    def _marker(self, wanted: bool, id: int | None, name: str) -> list[int]:
        if wanted and id is None:
            raise TokenizerError(f"this vocabulary has no {name}-of-text id")
        return [id] if wanted and id is not None else []


class Decoder:
    """Ids to text, piece by piece, without ever giving half a character.

    The pieces joined, `end()` included, are what `decode` gives for all ids at once.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_leading_space

    def feed(self, id: int) -> str:
        """The text that one more id completes; empty while a character is unfinished."""
        piece = self._utf8.decode(self.tokenizer.token_bytes(id))
        if self._at_start and piece:
            self._at_start = False
            piece = piece.removeprefix(" ")
        return piece

    def end(self) -> str:
        """U+FFFD if the ids stop inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)
