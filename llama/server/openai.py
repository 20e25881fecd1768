"""The shapes of OpenAI's API: /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import AsyncIterator
from itertools import islice
from operator import itemgetter
from typing import Any

from .api import COUNTED, Api, Part, Reply
from .requests import parse_chat, parse_text

LOWEST = -9999.0  # for a log-probability of minus infinity, which JSON lacks; the value of OpenAI's API


class OpenAI(Api):
    """What both endpoints share. They differ in the content of a choice and in the form of log-probabilities."""

    end = b"data: [DONE]\n\n"
    prefix: str  # of an id
    kinds: tuple[str, str]  # the `object` of a response and of a chunk

    @abstractmethod
    def content(self, part: Part) -> dict[str, Any]: ...
    @abstractmethod
    def logprobs(self, part: Part) -> dict[str, Any]: ...

    def choice(self, part: Part) -> dict[str, Any]:
        logprobs = self.logprobs(part) if part.choice.request.logprobs else None
        content = {"index": part.choice.index, **self.content(part)}
        return {**content, "logprobs": logprobs, "finish_reason": part.finish_reason}

    def body(self, reply: Reply, choices: list[Any], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        kind = self.kinds[reply.request.stream]
        head = {"id": f"{self.prefix}-{reply.id}", "object": kind, "created": reply.created, "model": reply.model}
        return {**head, "choices": choices, **({"usage": usage} if usage or reply.request.usage else {})}

    def usage(self, reply: Reply) -> dict[str, Any]:
        prompt, cached, new = (reply.tokens[name] for name in COUNTED)
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    def whole(self, reply: Reply, parts: list[Part]) -> dict[str, Any]:
        return self.body(reply, sorted(map(self.choice, parts), key=itemgetter("index")), self.usage(reply))

    def chunk(self, reply: Reply, parts: list[Part]) -> dict[str, Any]:
        return self.body(reply, [*map(self.choice, parts)])

    async def chunks(self, reply: Reply) -> AsyncIterator[dict[str, Any]]:
        async for chunk in super().chunks(reply):
            yield chunk
        if reply.request.usage:
            yield self.body(reply, [], self.usage(reply))


class Completions(OpenAI):
    """/v1/completions."""

    parse, prefix, kinds = staticmethod(parse_text), "cmpl", ("text_completion", "text_completion")

    def content(self, part: Part) -> dict[str, Any]:
        return {"text": part.text}

    def logprobs(self, part: Part) -> dict[str, Any]:
        choice, spelled = part.choice, part.choice.spelling.text
        texts = [spelled(token.id) for token in part.tokens]
        offsets, tops = [], list[dict[str, float] | None]()
        for token, text in zip(part.tokens, texts, strict=True):
            offsets.append(choice.offset)
            choice.offset += len(choice.decoder.feed(token.id))
            likely = reversed([*islice(token.top.items(), choice.request.top)])
            entries = {spelled(id): number(logprob) for id, logprob in likely}
            tops.append(None if token.logprob is None else {**entries, text: number(token.logprob)})
        scores = [None if token.logprob is None else number(token.logprob) for token in part.tokens]
        return {"tokens": texts, "token_logprobs": scores, "top_logprobs": tops, "text_offset": offsets}


class Chat(OpenAI):
    """/v1/chat/completions."""

    parse, prefix, kinds = staticmethod(parse_chat), "chatcmpl", ("chat.completion", "chat.completion.chunk")

    def content(self, part: Part) -> dict[str, Any]:
        text, stream = part.text, part.choice.request.stream
        calls = {"tool_calls": [_call(call, stream) for call in part.calls]} if part.calls else {}
        if stream:
            return {"delta": {**({"content": text} if text else {}), **calls}}
        content = None if calls and not text else text
        return {"message": {"role": "assistant", "content": content, "refusal": None, **calls}}

    def logprobs(self, part: Part) -> dict[str, Any]:
        spelling = part.choice.spelling

        def entry(id: int, logprob: float | None) -> dict[str, Any]:
            return {"token": spelling.text(id), "logprob": number(logprob or 0.0), "bytes": list(spelling.raw(id))}

        entries = []
        for token in part.tokens:
            top = [entry(id, logprob) for id, logprob in islice(token.top.items(), part.choice.request.top)]
            entries.append({**entry(token.id, token.logprob), "top_logprobs": top})
        return {"content": entries, "refusal": None}

    async def chunks(self, reply: Reply) -> AsyncIterator[dict[str, Any]]:
        for i in range(len(reply.choices)):
            delta = {"role": "assistant", "content": ""}
            yield self.body(reply, [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
        async for chunk in super().chunks(reply):
            yield chunk


def _call(call: dict[str, Any], stream: bool) -> dict[str, Any]:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    index = {"index": call["number"]} if stream else {}
    return {**index, "id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def number(logprob: float) -> float:
    """A log-probability as a number that JSON can represent."""
    return max(logprob, LOWEST)
