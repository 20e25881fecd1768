"""The bodies of responses: from pieces of answers to JSON as in OpenAI's API."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from itertools import islice
from typing import Any

from ..chat.tool_calls import ToolCallStream, call_marks
from ..generation.answer import Completion, Piece
from ..sampling import Token
from ..tokenizer import Decoder, Tokenizer
from .requests import Call

LOWEST = -9999.0  # for a log-probability of minus infinity, which JSON lacks; the value of OpenAI's API


class Spelling:
    """The text of single tokens: "bytes:\\xe2" for bytes that are not UTF-8, and the name of a control token."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.raw, self.call_marks = tokenizer, tokenizer.token_bytes, call_marks(tokenizer)
        self.names = {id: name for name, id in tokenizer.control.items()}

    def __call__(self, id: int) -> str:
        if id in self.names:
            return self.names[id]
        try:
            return self.raw(id).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw(id))


class Choice:
    """One answer in a response. `add` converts pieces to `choice` objects: several in a stream, else one.

    Those of a stream, joined, are the complete text, calls and log-probabilities.
    """

    def __init__(self, call: Call, index: int, spelling: Spelling, chat: bool):
        self.call, self.index, self.spelling, self.chat = call, index, spelling, chat
        self.finder = ToolCallStream(call.tools) if call.tools else None
        self.text = call.echoed[index // call.n] if call.echoed else ""  # not sent yet, like tokens and calls
        self.tokens: list[Token] = []
        self.calls: list[dict[str, Any]] = []
        self.count, self.cut = 0, False  # calls found so far; whether the answer ends within one
        before = () if chat or call.echoed else call.prompts[index].prompt
        self.decoder, self.offset = Decoder(spelling.tokenizer, before), 0  # where in the text the next token begins
        self.completion: Completion | None = None

    def add(self, piece: Piece) -> dict[str, Any] | None:
        """The next `choice` object, or None if there is nothing to send yet."""
        self.tokens += piece.prompt or []
        self.tokens += [piece.token] if piece.token is not None else []
        self.completion = piece.completion
        for event in [piece.text] if self.finder is None else self._events(self.finder, piece):
            if isinstance(event, str):
                self.text += event
            elif self.call.several_calls or not self.count:
                arguments = json.dumps(event["function"]["arguments"], ensure_ascii=False)
                function = {"name": event["function"]["name"], "arguments": arguments}
                index = {"index": self.count} if self.call.stream else {}
                id = event.get("id") or uuid.uuid4().hex[:9]  # Mistral's templates require nine letters and digits
                self.calls.append({**index, "id": id, "type": "function", "function": function})
                self.count += 1
        if self.completion is None and not (self.call.stream and (self.text or self.calls)):
            return None
        text, calls = self.text, {"tool_calls": self.calls} if self.calls else {}
        logprobs = self._logprobs(self.tokens) if self.call.logprobs else None
        self.text, self.tokens, self.calls = "", [], []
        reason: str | None = None if self.completion is None else self.completion.finish_reason
        if reason == "stop" and self.count and not self.cut:  # the model ended the answer after complete calls
            reason = "tool_calls"
        content: dict[str, Any] = {"text": text}
        if self.chat and self.call.stream:
            content = {"delta": {**({"content": text} if text else {}), **calls}}
        elif self.chat:
            whole = {"role": "assistant", "content": None if calls and not text else text, "refusal": None, **calls}
            content = {"message": whole}
        return {"index": self.index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _events(self, calls: ToolCallStream, piece: Piece) -> list[Any]:
        mark = "" if piece.token is None else self.spelling.call_marks.get(piece.token.id, "")
        events, rest = calls.feed(mark + piece.text), calls.end() if piece.completion is not None else []
        self.cut = any(isinstance(event, str) and event.strip("; \n") for event in rest)  # a stop string in a call
        return events + rest

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        top = self.call.top
        if self.chat:
            return {
                "content": [
                    {
                        **self._entry(token.id, token.logprob),
                        "top_logprobs": [self._entry(id, logprob) for id, logprob in islice(token.top.items(), top)],
                    }
                    for token in tokens
                ],
                "refusal": None,
            }
        texts = [self.spelling(token.id) for token in tokens]
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(self.decoder.feed(token.id))
        tops: list[dict[str, float] | None] = []
        for token, text in zip(tokens, texts, strict=True):
            likely = reversed([*islice(token.top.items(), top)])
            entries = {self.spelling(id): number(logprob) for id, logprob in likely}
            tops.append(None if token.logprob is None else {**entries, text: number(token.logprob)})
        return {
            "tokens": texts,
            "token_logprobs": [None if token.logprob is None else number(token.logprob) for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _entry(self, id: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self.spelling(id), "logprob": number(logprob or 0.0), "bytes": list(self.spelling.raw(id))}


def number(logprob: float) -> float:
    """A log-probability as a number that JSON can represent."""
    return max(logprob, LOWEST)
