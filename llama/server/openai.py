"""The shapes of OpenAI's API: /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

from .api import Api, Choice, Reply
from .engine import COUNTED
from .requests import parse_chat, parse_text

LOWEST = -9999.0  # as in OpenAI's API, it stands for minus infinity, which JSON can't represent


class OpenAI(Api):
    """Base of both endpoints. They differ in the content of a choice and in the form of log-probabilities."""

    end = b"data: [DONE]\n\n"
    prefix: str  # of an id
    kinds: tuple[str, str]  # the `object` of a response and of a chunk

    @abstractmethod
    def content(self, choice: Choice) -> dict[str, Any]: ...
    @abstractmethod
    def logprobs(self, choice: Choice) -> dict[str, Any]: ...

    def choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = self.logprobs(choice) if choice.request.logprobs else None
        content = {"index": choice.index, **self.content(choice)}
        more = choice.request.stream and len(choice.calls) > 1
        return {**content, "logprobs": logprobs, "finish_reason": None if more else choice.finish_reason}

    def body(self, reply: Reply, choices: list[Any], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        kind = self.kinds[reply.request.stream]
        head = {"id": f"{self.prefix}-{reply.id}", "object": kind, "created": reply.created, "model": reply.model}
        return {**head, "choices": choices, **({"usage": usage} if usage or reply.request.usage else {})}

    def usage(self, reply: Reply) -> dict[str, Any]:
        prompt, cached, new, reasoning = (reply.tokens[name] for name in COUNTED)
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        details = {"completion_tokens_details": {"reasoning_tokens": reasoning}}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}, **details}

    def chunk(self, reply: Reply, choices: list[Choice]) -> dict[str, Any]:
        return self.body(reply, [*map(self.choice, choices)])

    def whole(self, reply: Reply) -> dict[str, Any]:
        return super().whole(reply) | {"usage": self.usage(reply)}

    async def chunks(self, reply: Reply) -> AsyncIterator[dict[str, Any]]:
        async for chunk in super().chunks(reply):
            yield chunk
        if reply.request.usage:
            yield self.body(reply, [], self.usage(reply))


class Completions(OpenAI):
    """/v1/completions."""

    parse, prefix, kinds = staticmethod(parse_text), "cmpl", ("text_completion", "text_completion")

    def content(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def logprobs(self, choice: Choice) -> dict[str, Any]:
        spelled, offsets, tops = choice.spelling.text, [], list[dict[str, float] | None]()
        for token in choice.tokens:
            offsets.append(choice.offset)
            choice.offset += len(choice.decoder.feed(token.id))
            likely = reversed([*islice(token.top.items(), choice.request.top)])
            top = {spelled(id): number(logprob) for id, logprob in likely}
            tops.append(None if token.logprob is None else {**top, spelled(token.id): number(token.logprob)})
        scores = [None if token.logprob is None else number(token.logprob) for token in choice.tokens]
        texts = [spelled(token.id) for token in choice.tokens]
        return {"tokens": texts, "token_logprobs": scores, "top_logprobs": tops, "text_offset": offsets}


class Chat(OpenAI):
    """/v1/chat/completions."""

    parse, prefix, kinds = staticmethod(parse_chat), "chatcmpl", ("chat.completion", "chat.completion.chunk")

    def content(self, choice: Choice) -> dict[str, Any]:
        text, stream = choice.text, choice.request.stream
        thought = {"reasoning_content": choice.reasoning} if choice.reasoning else {}
        parts = [_call(call, stream) for call in choice.calls]
        calls = {"tool_calls": parts[:1] if stream else parts} if parts else {}
        if stream:
            return {"delta": {**thought, **({"content": text} if text else {}), **calls}}
        content = None if calls and not text else text
        return {"message": {"role": "assistant", "content": content, "refusal": None, **thought, **calls}}

    def logprobs(self, choice: Choice) -> dict[str, Any]:
        spelling, entries = choice.spelling, []

        def entry(id: int, logprob: float | None) -> dict[str, Any]:
            return {"token": spelling.text(id), "logprob": number(logprob or 0.0), "bytes": list(spelling.raw(id))}

        for token in choice.tokens:
            top = [entry(id, logprob) for id, logprob in islice(token.top.items(), choice.request.top)]
            entries.append({**entry(token.id, token.logprob), "top_logprobs": top})
        return {"content": entries, "refusal": None}

    async def chunks(self, reply: Reply) -> AsyncIterator[dict[str, Any]]:
        for i in range(len(reply.choices)):
            delta = {"role": "assistant", "content": ""}
            yield self.body(reply, [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
        async for chunk in super().chunks(reply):
            yield chunk


def _call(call: dict[str, Any], stream: bool) -> dict[str, Any]:
    function = {key: call[key] for key in ("name", "arguments") if key in call}
    head = {"id": call["id"], "type": "function"} if "id" in call else {}  # only the first part of a call has an id
    return {**({"index": call["number"]} if stream else {}), **head, "function": function}


def number(logprob: float) -> float:
    """A log-probability as a number that JSON can represent."""
    return max(logprob, LOWEST)
