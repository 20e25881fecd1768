"""The bodies of responses: from pieces of answers to JSON as in OpenAI's API."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from itertools import islice
from typing import Any

from ..chat.tool_calls import ToolCallStream, call_marks
from ..generate import Token
from ..generation.answer import Completion, Piece
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
    """One answer in a response. `delta` converts a piece of it to the `choice` of a chunk of the stream.

    The deltas of an answer, joined, are its complete text, calls and log-probabilities.
    """

    def __init__(self, call: Call, index: int, spelling: Spelling, chat: bool):
        self.call, self.index, self.spelling, self.chat = call, index, spelling, chat
        self.calls = ToolCallStream(call.tools) if call.tools else None
        self.text = call.echoed[index // call.n] if call.echoed else ""  # not sent yet
        self.tokens: list[Token] = []  # not sent yet
        self.found: list[dict[str, Any]] = []  # the calls of tools so far
        before = () if chat or call.echoed else call.prompts[index].prompt
        self.decoder, self.offset = Decoder(spelling.tokenizer, before), 0  # where in the text the next token begins
        self.completion: Completion | None = None

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        """The `choice` object of a chunk, or None if there is nothing to send yet."""
        self.tokens += piece.prompt or []
        if piece.token is not None and not (piece.token.stop and self.chat):
            self.tokens.append(piece.token)
        self.completion = piece.completion
        calls: list[dict[str, Any]] = []
        for event in [piece.text] if self.calls is None else self._events(self.calls, piece):
            if isinstance(event, str):
                self.text += event
            elif self.call.several_calls or not self.found:
                calls.append(
                    {
                        "index": len(self.found),
                        "id": f"call_{uuid.uuid4().hex[:24]}",
                        "type": "function",
                        "function": {
                            "name": event["function"]["name"],
                            "arguments": json.dumps(event["function"]["arguments"], ensure_ascii=False),
                        },
                    }
                )
                self.found.append(calls[-1])
        if not self.text and not calls and self.completion is None:
            return None
        text, self.text = self.text, ""
        logprobs, self.tokens = self._logprobs(self.tokens) if self.call.logprobs else None, []
        reason = None
        if self.completion is not None:
            reason = "tool_calls" if self.found else self.completion.finish_reason
        content: dict[str, Any] = {"text": text}
        if self.chat:
            content = {"delta": {**({"content": text} if text else {}), **({"tool_calls": calls} if calls else {})}}
        return {"index": self.index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _events(self, calls: ToolCallStream, piece: Piece) -> list[Any]:
        mark = "" if piece.token is None else self.spelling.call_marks.get(piece.token.id, "")
        return [*calls.feed(mark + piece.text), *(calls.end() if piece.completion is not None else [])]

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


def header(model: str, chat: bool, stream: bool) -> dict[str, Any]:
    """The fields that every response and every chunk of one stream have in common."""
    kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
    id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


def merged(deltas: Sequence[dict[str, Any]], chat: bool) -> dict[str, Any]:
    """The choice of a complete response, from the deltas of its stream."""
    choice: dict[str, Any] = {"index": deltas[0]["index"]}
    if chat:
        text = "".join(delta["delta"].get("content", "") for delta in deltas)
        calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        choice["message"] = message
    else:
        choice["text"] = "".join(delta["text"] for delta in deltas)
    scores = [delta["logprobs"] for delta in deltas if delta["logprobs"] is not None]
    choice["logprobs"] = None
    if scores:
        lists = [key for key, value in scores[0].items() if value is not None]
        joined = {key: [entry for score in scores for entry in score[key]] for key in lists}
        choice["logprobs"] = {**scores[0], **joined}
    return {**choice, "finish_reason": deltas[-1]["finish_reason"]}
