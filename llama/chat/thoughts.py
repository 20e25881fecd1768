"""The thought that a model writes before its answer. The white space around it is dropped, as in DeepSeek's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from ..tokenizer import Decoder, Tokenizer
from ..tokenizer.common import joined_templates

PAIRS = (
    ("<think>", "</think>"),  # DeepSeek-R1, QwQ, Qwen3, SmolLM3, Granite 3.3 and 4.2
    ("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("Here is my thought process:", "Here is my response:"),  # Granite 3.2
)


class Thoughts(NamedTuple):
    """The marks of a model's thoughts, empty if the model writes none, and how an answer begins.

    state  "open": inside a thought; "free": with a thought or with text; "closed": with text
    """

    opening: str = ""
    closing: str = ""
    state: Literal["open", "free", "closed"] = "closed"


def find_thoughts(
    tokenizer: Tokenizer, template: str | Mapping[str, str] | None, prompt: Sequence[int], answer: str = ""
) -> Thoughts:
    """The marks of thoughts in a model's template, or in one of several, and how the answer to a prompt begins.

    answer  the beginning of the answer, if the prompt ends with it and the model continues it
    """
    opening, closing = next((pair for pair in PAIRS if pair[1] in joined_templates(template)), ("", ""))
    if not closing:
        return Thoughts()
    ids = [id for id in prompt[-64 - 4 * len(answer) :] if id < tokenizer.n_vocab]  # a character has up to 4 ids
    spelled = b"".join(tokenizer.token_bytes(id) or (tokenizer.name(id) or "").encode() for id in ids)
    before = spelled.decode(errors="replace").rstrip().removesuffix(answer.rstrip()).rstrip()
    begun = opening * before.endswith(opening) + answer.lstrip()
    if begun.startswith(opening) and closing not in begun:
        return Thoughts(opening, closing, "open")
    return Thoughts(opening, closing, "closed" if begun or before.endswith(closing) else "free")


class ThoughtStream:
    """Splits an answer into the thought at its start and the text after it, however it is divided into tokens.

    before    ids whose text the answer continues, as for `Decoder`
    thinking  whether the thought is open
    count     the number of tokens up to the end of the thought
    """

    def __init__(self, tokenizer: Tokenizer, thoughts: Thoughts, before: Sequence[int] = ()):
        self.decoder, self.fed, self.count = Decoder(tokenizer, before), 0, 0
        self._opening, self._closing, state = thoughts
        self._names = {tokenizer.control[mark]: mark for mark in thoughts[:2] if mark in tokenizer.control}
        self.thinking = self._strips = state == "open"  # _strips: drop white space until there is other text
        self._may_open = state != "closed"  # even if it is open: a model may repeat the prompt's mark
        self._held = ""  # text that may begin a mark, or space before one

    def feed(self, id: int) -> tuple[str | None, str]:
        """The parts of the thought and of the text that a token makes certain. The former is None outside a thought."""
        inside, self.fed = self.thinking, self.fed + 1
        thought, text = self._split(self.decoder.feed(id) or self._names.get(id, ""))
        if not (inside or self.thinking):
            return None, text
        self.count = self.fed
        return thought, text

    def end(self) -> tuple[str, str]:
        """The rest of the thought and of the text."""
        return self._split(self.decoder.end(), end=True)

    def _split(self, text: str, end: bool = False) -> tuple[str, str]:
        held, self._held = self._held + text, ""
        if self._may_open:
            begun = held.lstrip()
            if not end and len(begun) < len(self._opening) and self._opening.startswith(begun):
                self._held = held
                return "", ""
            self._may_open = False
            if begun.startswith(self._opening):
                held, self.thinking, self._strips = begun.removeprefix(self._opening), True, True
        if self._strips:
            held = held.lstrip()
            self._strips = not held
        if not self.thinking:
            return "", held
        thought, mark, rest = held.partition(self._closing)
        if mark:
            self.thinking, self._strips = False, not rest.strip()
            return thought.rstrip(), rest.lstrip()
        part = next(n for n in range(len(self._closing), -1, -1) if held.endswith(self._closing[:n]))  # of a mark
        thought = held[: len(held) - (0 if end else part)].rstrip()
        self._held = held[len(thought) :]
        return thought, ""
