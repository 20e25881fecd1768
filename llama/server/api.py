"""Code that all API shapes share: the answers to a request, streams of answers, and errors."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from queue import Full
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..chat.tool_calls import ToolCallStream, call_marks
from ..errors import ContextLengthError, LlamaError, TemplateError, TokenizerError, UsageError
from ..generation.answer import Job, Piece
from ..generation.structured import warn_once
from ..sampling import Token
from ..text import Llama
from ..tokenizer import Decoder
from .engine import COUNTED, OF_PROMPT, Engine, Inbox, failure
from .requests import AnswerRequest, UnknownModel
from .spelling import Spelling

REFUSED = (UsageError, ContextLengthError, TemplateError, TokenizerError)  # errors that the request causes
CODES: dict[type, str] = {UnknownModel: "model_not_found", ContextLengthError: "context_length_exceeded"}
RETRY = {"Retry-After": "2"}  # seconds; about the time of a short answer
STREAM_HEADERS = {"Cache-Control": "no-cache, no-store", "X-Accel-Buffering": "no"}  # a proxy must not delay events
DISCONNECTED = 499  # the status in the log if the client disconnected


class Format:
    """How streams and errors are written: as server-sent events, and as OpenAI's error object."""

    media_type, comment, end = "text/event-stream", b": in progress\n\n", b""

    def event(self, text: str) -> bytes:
        """An event of a stream, given its JSON."""
        return f"data: {text}\n\n".encode()

    def error(self, message: str, kind: str, code: str | None) -> Any:
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class Api(Format):
    """The shape of an API: the requests it accepts and the form of its responses."""

    parse: Callable[[Mapping[str, Any], Llama, str], AnswerRequest]  # arguments: the body, the model and its name

    @abstractmethod
    def chunk(self, reply: Reply, choices: list[Choice]) -> Any:
        """An event of a stream, given the choices that have something new."""

    def whole(self, reply: Reply) -> Any:
        """The body of a response that is not a stream."""
        return self.chunk(reply, [*reply.choices.values()])

    async def chunks(self, reply: Reply) -> AsyncIterator[Any]:
        """The events of a stream."""
        async for choice in reply.news():
            more = True
            while more:
                yield self.chunk(reply, [choice])
                choice.clear()
                more = bool(choice.calls)


class Choice:
    """The part of an answer that is yet to be sent: thought, text, tokens, parts of calls, and why the answer ended.

    The parts that a stream sends add up to the complete answer.
    """

    def __init__(self, request: AnswerRequest, index: int, spelling: Spelling):
        self.request, self.index, self.spelling = request, index, spelling
        self.calls = list[dict[str, Any]]()
        self.clear()
        self.text = request.echoed[index // request.n] if request.echoed else ""
        self.finish_reason: str | None = None
        self.finder = ToolCallStream(request.tools, parts=True) if request.tools else None
        self.marks = call_marks(spelling.tokenizer) if request.tools else {}
        self.count, self.cut = 0, False  # number of calls found so far; whether the answer ends within a call
        self.before: int | None = None  # calls that began before the text
        self.offset = 0  # where in the text the next token begins

    def clear(self) -> None:
        """Forget what has been sent. An event of a stream sends one part of a call, so only the first is forgotten."""
        self.reasoning, self.text, self.tokens, self.calls = "", "", list[Token](), self.calls[1:]

    @cached_property
    def decoder(self) -> Decoder:
        """The decoder that finds the offsets of tokens in the text."""
        return Decoder(self.spelling.tokenizer, () if self.request.echoed else self.request.jobs[self.index].ids)

    def add(self, piece: Piece) -> bool:
        """Add a piece. Returns whether there is something to send."""
        self.reasoning += piece.reasoning or ""
        self.tokens += piece.prompt or []
        self.tokens += [piece.token] if piece.token is not None else []
        for event in [piece.text] if self.finder is None else self._events(self.finder, piece):
            if isinstance(event, str):
                self.text += event
                self.before = self.count if event and self.before is None else self.before
            elif "function" in event:
                name, arguments = event["function"].values()
                self._add_part({"name": name, "id": event.get("id")})
                self._add_part({"arguments": json.dumps(arguments, ensure_ascii=False)})
            else:
                self._add_part(event)
        if piece.completion is None:
            return self.request.stream and bool(self.reasoning or self.text or self.calls)
        self.finish_reason = piece.completion.finish_reason
        if self.finish_reason == "stop" and self.count and not self.cut:  # the model ended it after complete calls
            self.finish_reason = "tool_calls"
        return True

    def _add_part(self, part: dict[str, Any]) -> None:
        self.count += "name" in part
        if self.count > 1 and not self.request.several_calls:
            return
        if "name" in part:
            id = part["id"] or uuid.uuid4().hex[:9]  # Mistral's templates require nine letters and digits
            self.calls.append({"number": self.count - 1, "name": part["name"], "id": id, "arguments": ""})
        elif self.request.stream and (not self.calls or "name" in self.calls[-1]):
            self.calls.append({"number": self.count - 1, **part})
        else:
            self.calls[-1]["arguments"] += part["arguments"]

    def _events(self, calls: ToolCallStream, piece: Piece) -> list[Any]:
        mark = "" if piece.token is None or piece.reasoning is not None else self.marks.get(piece.token.id, "")
        events, shown, rest = calls.feed(mark + piece.text), calls.shown, calls.end() if piece.completion else []
        self.cut = shown or any(isinstance(event, str) and event.strip("; \n") for event in rest)  # within a call
        return events + rest


class Reply(Inbox):
    """The answers to one request. The constructor queues its jobs."""

    def __init__(self, request: AnswerRequest, engine: Engine, model: str):
        super().__init__(engine)
        self.request, self.model, self.cancel = request, model, partial(engine.cancel, request.jobs)
        self.id, self.created, self.tokens = uuid.uuid4().hex, int(time.time()), Counter[str]()
        spelling, count, most = Spelling(engine.llm.tokenizer), len(request.jobs), engine.limits.waiting
        self.choices = {job: Choice(request, i, spelling) for i, job in enumerate(request.jobs)}
        self.most_new = engine.limits.tokens if request.unlimited else -1
        for job in request.jobs if self.most_new >= 0 else []:
            job.params = replace(job.params, max_new_tokens=min(job.params.max_new_tokens, self.most_new))
        if count > most:
            raise UsageError(f"the number of prompts times n is {count}; this server allows at most {most}")
        engine.submit(request.jobs, self._deliver)

    def _deliver(self, job: Job, piece: Piece | LlamaError) -> None:
        """Hand a piece to the event loop; with the last piece, count the answer's tokens, also after a disconnect."""
        choice = self.choices[job]
        if isinstance(piece, LlamaError):
            return self.put(piece)
        if piece.completion is not None:
            stats, once = piece.completion.stats, choice.index % self.request.n == 0  # n answers have one prompt
            if piece.completion.finish_reason == "length" and stats.new_tokens == self.most_new:
                warn_once("--max-tokens, the default of requests without max_tokens, has cut an answer")
            for counts in (self.tokens, self.engine.tokens):
                counts.update({name: getattr(stats, name) for name in COUNTED if once or name not in OF_PROMPT})
        self.put((choice, piece))

    async def news(self) -> AsyncIterator[Choice]:
        """The choices that have something to send, until all have ended."""
        async for choice, piece in super().news():
            if choice.add(piece):
                yield choice
            if all(choice.finish_reason for choice in self.choices.values()):
                return


class Stream(StreamingResponse):
    """A stream of values. However it ends, it cancels the inbox, and calls `ended` with the final status."""

    def __init__(self, values: AsyncIterator[Any], inbox: Inbox, format: Format):
        self.events, self.inbox, self.format, self.status = self._events(values), inbox, format, DISCONNECTED
        self.ended: Callable[[int], object] = lambda status: None
        super().__init__(self.events, 200, STREAM_HEADERS, format.media_type)

    async def _events(self, values: AsyncIterator[Any]) -> AsyncGenerator[bytes]:
        try:
            async for value in values:
                yield self.format.event(json.dumps(value, ensure_ascii=False))
            yield self.format.end
            self.status = 200
        except Exception as failed:  # the status has been sent already
            refused = refusal(failed, self.format)
            yield self.format.event(bytes(refused.body).decode())
            self.status = refused.status_code

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def comments() -> None:
            while True:
                await asyncio.sleep(self.inbox.engine.limits.pause)
                if self.status == DISCONNECTED:  # the initial status: the stream has not ended
                    await send({"type": "http.response.body", "body": self.format.comment, "more_body": True})

        commenting = asyncio.create_task(comments())
        try:
            await super().__call__(scope, receive, send)
        finally:
            commenting.cancel()
            self.inbox.cancel()
            await self.events.aclose()
            self.ended(self.status)


def refusal(failed: Exception, format: Format) -> Response:
    """A response with an error object and the matching status."""
    headers: Mapping[str, str] | None = None
    if isinstance(failed, HTTPException):
        status, message, headers = failed.status_code, failed.detail, failed.headers
    elif isinstance(failed, Full):
        status, message, headers = 429, str(failed), RETRY
    elif isinstance(failed, TimeoutError):
        status, message = 504, "the answer took more time than this server allows (--timeout); lower max_tokens"
    else:
        error = failed if isinstance(failed, LlamaError) else failure("the server failed", failed)
        status = 404 if isinstance(error, UnknownModel) else 400 if isinstance(error, REFUSED) else 500
        message = str(error)
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return JSONResponse(format.error(message, kind, CODES.get(type(failed))), status, headers)
