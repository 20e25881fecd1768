"""The endpoints: the page at /, /health, /metrics, /v1/models, /v1/chat/completions, /v1/completions and /look."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from queue import Full
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from ..errors import ContextLengthError, LlamaError, TemplateError, TokenizerError, UsageError
from ..generation.answer import Piece, Prompt
from ..text import Llama
from .connections import Limits
from .engine import Engine
from .look import Look, Looks, Steps
from .requests import (
    Call,
    UnknownModel,
    check_model,
    parse_answer,
    parse_body,
    parse_chat,
    parse_inspection,
    parse_page,
    parse_text,
)
from .responses import Choice, Spelling

log = logging.getLogger(__name__)

RETRY = {"Retry-After": "2"}  # seconds; about the time of a short answer
AUTHENTICATE = {"WWW-Authenticate": "Bearer"}
REFUSED = (UsageError, ContextLengthError, TemplateError, TokenizerError)  # errors that the request causes
CODES: dict[type, str] = {UnknownModel: "model_not_found", ContextLengthError: "context_length_exceeded"}
COUNTED = ("prompt_tokens", "cached_tokens", "new_tokens")  # fields of Stats
PARSED, COMPILED = 4, 2  # requests at once, of the 5 or more threads of asyncio.to_thread
# The keys that ask for a grammar, perhaps with escapes or in UTF-16. Escapes elsewhere are text of many languages.
MAY_HAVE_SCHEMA = re.compile(rb'(response_format|tool_choice|\\u[0-9a-fA-F]{4}[a-z_]{0,14})"\s*:|\0')
# path -> file in the package. The page needs no key; what it shows does
PAGE = {"/": "server/page/index.html", "/page.css": "server/page/page.css", "/page.js": "server/page/page.js"}
PAGE |= {f"/{name}": f"inside/trace_page/{name}" for name in ("shared.css", "shared.js", "tokens.css", "tokens.js")}
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src"
    " 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script';"
    " trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
STREAM_HEADERS = {"Cache-Control": "no-cache, no-store", "X-Accel-Buffering": "no"}  # a proxy must not delay events
PAUSE = 15.0  # seconds between the comments in a stream, since proxies close silent connections
SINGLE = ((b"authorization",), (b"content-type",), (b"content-length", b"transfer-encoding"))  # h11 checks Host
PACKAGE = Path(__file__).parent.parent
T = TypeVar("T")
Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]
DISCONNECTED = 499  # the status in the log if the client disconnected


class Server:
    """A model behind HTTP. `model` is its name in requests; `key` the API key, or None."""

    def __init__(self, llm: Llama, engine: Engine, model: str, key: str | None, limits: Limits):
        self.llm, self.engine, self.model, self.key, self.limits = llm, engine, model, key, limits
        self.spelling, self.looks = Spelling(llm.tokenizer), Looks(llm, model)
        self.started = int(time.time())
        self.statuses: Counter[tuple[str, int]] = Counter()  # responses by path and status
        self.tokens: Counter[str] = Counter()
        self.received = 0  # bytes of bodies that are not parsed yet
        self.parsing, self.compiling = asyncio.Semaphore(PARSED), asyncio.Semaphore(COMPILED)
        self.tracing = asyncio.Semaphore(1)

    def app(self, hosts: list[str] | None, origins: Sequence[str] = ()) -> Starlette:
        """The application. It accepts only `hosts` as values of the Host header; None accepts all.

        origins  origins of web pages that may read the responses
        """
        get: dict[str, Endpoint] = {"/health": self.health, "/metrics": self.metrics}
        get |= {"/v1/models": self.models, "/v1/models/{id:path}": self.models}
        post: dict[str, Endpoint] = {"/v1/chat/completions": partial(self.complete, parse_chat)}
        post |= {"/v1/completions": partial(self.complete, parse_text)}
        post |= {"/look/answer": self.look_answer, "/look/inside": self.look_inside, "/look/page": self.look_page}
        get |= dict.fromkeys(PAGE, self.page)
        routes = [Route(path, self._counted(path, endpoint)) for path, endpoint in get.items()]
        routes += [Route(path, self._counted(path, endpoint), methods=["POST"]) for path, endpoint in post.items()]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_endpoint})
        app.router.redirect_slashes = False  # a redirection would use the address in the client's request
        app.add_middleware(one_value)
        if hosts is not None:  # against DNS rebinding: a host name of a web page that resolves to this server
            app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
        if origins:
            app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["POST"], allow_headers=["*"])
        return app

    def _counted(self, path: str, endpoint: Endpoint) -> Endpoint:
        """Wrap an endpoint: check the API key, return errors as JSON, count statuses, and write a line to the log."""

        async def handle(request: Request) -> Response:
            def ended(status: int) -> None:
                self.statuses[path, status] += 1
                if request.method == "POST":
                    log.info("POST %s %d %.2f s", path, status, time.perf_counter() - began)

            began = time.perf_counter()
            try:
                if path != "/health" and path not in PAGE:
                    self._authorize(request)
                response = await endpoint(request)
            except ClientDisconnect:
                response = Response(status_code=DISCONNECTED)
            except Exception as failed:
                response = _refusal(failed)
            if isinstance(response, Stream):
                response.ended = ended
            else:
                ended(response.status_code)
            return response

        return handle

    def _authorize(self, request: Request) -> None:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        right = self.key is None or hmac.compare_digest(given.encode(), self.key.encode())
        if not right or (self.key is not None and kind.lower() != "bearer"):
            raise HTTPException(401, "the API key is missing or wrong: send Authorization: Bearer KEY", AUTHENTICATE)

    # ------------------------------------------------------------------------------------------------- small endpoints
    async def health(self, request: Request) -> Response:
        alive = self.engine.thread.is_alive()
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def models(self, request: Request) -> Response:
        card: dict[str, Any] = {"id": self.model, "object": "model", "created": self.started, "owned_by": "clearllama"}
        card |= {"max_model_len": self.llm.model.max_seq_len, "meta": self.looks.meta()}
        if "id" not in request.path_params:
            return JSONResponse({"object": "list", "data": [card]})
        check_model(request.path_params["id"], self.model)
        return JSONResponse(card)

    async def metrics(self, request: Request) -> Response:
        """Counters and gauges in Prometheus' text format."""
        lines = ["# TYPE clearllama_requests_total counter"]
        for (path, status), count in sorted(self.statuses.items()):
            lines.append(f'clearllama_requests_total{{path="{path}",status="{status}"}} {count}')
        for name in COUNTED:
            lines += [f"# TYPE clearllama_{name}_total counter", f"clearllama_{name}_total {self.tokens[name]}"]
        waiting = self.engine.queue.qsize()
        for name, value in (("running", len(self.engine.listeners) - waiting), ("waiting", waiting)):
            lines += [f"# TYPE clearllama_answers_{name} gauge", f"clearllama_answers_{name} {value}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    # ----------------------------------------------------------------------------------------------------- completions
    async def complete(self, parse: Callable[[dict[str, Any], Llama, str], Call], request: Request) -> Response:
        call = await self._call(request, parse)
        answers = Answers(self, call, chat=parse is parse_chat)
        if call.stream:
            return Stream(answers.chunks(), answers.cancel, self.limits, b"data: [DONE]\n\n")
        return JSONResponse(await self._undisturbed(request, answers.whole(), answers.cancel))

    async def _call(self, request: Request, parse: Callable[[dict[str, Any], Llama, str], T]) -> T:
        """What `parse` makes of the body of a request. Raises HTTPException if it is too large or slow, or not JSON."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page of another origin can't send this type without permission
            raise HTTPException(415, f"Content-Type must be application/json, got {kind!r:.80}")
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.receive):
                async for part in request.stream():
                    body += part
                    self.received += len(part)
                    if len(body) > self.limits.body:
                        raise HTTPException(413, f"the body has more than {self.limits.body:,} bytes")
                    if self.received > self.limits.bodies:
                        raise HTTPException(429, "the server is busy: too many large requests; try again later", RETRY)
            # Parsing takes up to 30 times the memory of the body. A schema may take seconds, one after the other.
            async with self.compiling if MAY_HAVE_SCHEMA.search(body) else self.parsing:
                return await asyncio.to_thread(lambda: parse(parse_body(bytes(body)), self.llm, self.model))
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self.limits.receive:g} s") from None
        finally:
            self.received -= len(body)

    # ----------------------------------------------------------------------------------------- the page and its looks
    async def page(self, request: Request) -> Response:
        file = PACKAGE / PAGE[request.url.path]
        return Response(file.read_bytes(), media_type=KINDS[file.suffix], headers=PAGE_HEADERS)

    async def look_answer(self, request: Request) -> Response:
        look = self._look(self.looks.answer(**await self._call(request, parse_answer)))
        return Stream(look.results(), look.cancelled.set, self.limits)

    async def look_inside(self, request: Request) -> Response:
        look = self._look(self.looks.inside(**await self._call(request, parse_inspection)))
        return JSONResponse(await self._undisturbed(request, look.last(), look.cancelled.set))

    async def look_page(self, request: Request) -> Response:
        ids = await self._call(request, parse_page)
        async with self.tracing:
            look = self._look(self.looks.page(ids))
            render = await self._undisturbed(request, look.last(), look.cancelled.set)
            return Response(await asyncio.to_thread(render), media_type="text/html")

    async def _undisturbed(self, request: Request, result: Coroutine[Any, Any, T], cancel: Callable[[], object]) -> T:
        """The result, unless the client disconnects or the time ends before it. At the end, call `cancel`."""
        whole, gone = asyncio.create_task(result), asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((whole, gone), timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise ClientDisconnect if gone.done() else TimeoutError
            return whole.result()
        finally:
            whole.cancel()
            gone.cancel()
            cancel()

    def _look(self, steps: Steps) -> Look:
        look = Look(steps)
        try:
            self.engine.queue.add_look(look)
        except Full:
            raise HTTPException(429, "the server is busy with other looks; try again later", RETRY) from None
        return look


class Answers:
    """The answers to one call. The constructor queues them; `cancel` ends them, and may be called at any time."""

    def __init__(self, server: Server, call: Call, chat: bool):
        loop, self.arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[Prompt, Piece | LlamaError]]()

        def deliver(prompt: Prompt, piece: Piece | LlamaError) -> None:
            if isinstance(piece, Piece) and piece.completion is not None:  # also after a disconnect
                stats, once = piece.completion.stats, self.choices[prompt].index % call.n == 0  # n answers, one prompt
                for counts in (self.tokens, server.tokens):
                    counts.update({name: getattr(stats, name) for name in COUNTED if once or name == "new_tokens"})
            with contextlib.suppress(RuntimeError):  # the loop has ended before the engine
                loop.call_soon_threadsafe(self.arrived.put_nowait, (prompt, piece))

        self.server, self.call, self.chat, self.tokens = server, call, chat, Counter[str]()
        self.choices = {prompt: Choice(call, i, server.spelling, chat) for i, prompt in enumerate(call.prompts)}
        kind = ("chat.completion.chunk" if call.stream else "chat.completion") if chat else "text_completion"
        id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.head = {"id": id, "object": kind, "created": int(time.time()), "model": server.model}
        if len(call.prompts) > (most := server.engine.queue.maxsize):
            raise UsageError(f"n times the number of prompts is {len(call.prompts)}; this server takes at most {most}")
        try:
            server.engine.submit(call.prompts, deliver)
        except Full:
            raise HTTPException(429, "the server is busy: its queue is full; try again later", RETRY) from None

    def cancel(self) -> None:
        self.server.engine.cancel(self.call.prompts)

    async def parts(self) -> AsyncIterator[dict[str, Any]]:
        """The parts of all choices, as they are generated. Raises LlamaError if an answer fails."""
        while any(choice.completion is None for choice in self.choices.values()):
            prompt, piece = await self.arrived.get()
            if isinstance(piece, LlamaError):
                raise piece
            if (part := self.choices[prompt].add(piece)) is not None:
                yield part

    def usage(self) -> dict[str, Any]:
        prompt, cached, new = (self.tokens[name] for name in COUNTED)
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    async def whole(self) -> dict[str, Any]:
        """The body of a response that is not a stream."""
        choices = [choice async for choice in self.parts()]
        return {**self.head, "choices": sorted(choices, key=itemgetter("index")), "usage": self.usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        extra: dict[str, Any] = {"usage": None} if self.call.usage else {}
        for i in range(len(self.choices) * self.chat):
            opening = {"index": i, "delta": {"role": "assistant", "content": ""}}
            yield {**self.head, "choices": [{**opening, "logprobs": None, "finish_reason": None}], **extra}
        async for part in self.parts():
            yield {**self.head, "choices": [part], **extra}
        if self.call.usage:
            yield {**self.head, "choices": [], "usage": self.usage()}


class Stream(StreamingResponse):
    """Server-sent events, then `end`. However the stream ends, it calls `cancel`, and `ended` with the final status."""

    def __init__(self, values: AsyncIterator[Any], cancel: Callable[[], object], limits: Limits, end: bytes = b""):
        self.events, self.cancel, self.status = self._events(values, limits, end), cancel, DISCONNECTED
        self.ended: Callable[[int], object] = lambda status: None
        super().__init__(self.events, 200, STREAM_HEADERS, "text/event-stream")

    async def _events(self, values: AsyncIterator[Any], limits: Limits, end: bytes) -> AsyncGenerator[bytes]:
        late = time.monotonic() + limits.seconds
        try:
            while (left := late - time.monotonic()) > 0:
                async with asyncio.timeout(left):  # not around a `yield`, which waits for the client
                    value = await anext(values, None)
                if value is None:
                    yield end
                    self.status = 200
                    return
                yield f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()
            raise TimeoutError
        except Exception as failed:  # the status has been sent already
            refusal = _refusal(failed)
            yield b"data: " + bytes(refusal.body) + b"\n\n"
            self.status = refusal.status_code

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def comments() -> None:
            while True:
                await asyncio.sleep(PAUSE)
                if self.status == DISCONNECTED:  # not ended
                    await send({"type": "http.response.body", "body": b": in progress\n\n", "more_body": True})

        commenting = asyncio.create_task(comments())
        try:
            await super().__call__(scope, receive, send)
        finally:
            commenting.cancel()
            self.cancel()
            await self.events.aclose()
            self.ended(self.status)


def one_value(app: ASGIApp) -> ASGIApp:
    """Middleware that rejects a request with two keys, types or lengths, since a proxy may use the other one."""

    async def handle(scope: Any, receive: Any, send: Any) -> None:
        given = [name for name, _ in scope["headers"]]
        several = [b" or ".join(names).decode() for names in SINGLE if sum(map(given.count, names)) > 1]
        refused = HTTPException(400, f"expected one header {', '.join(several)}, got several", {"Connection": "close"})
        await (_refusal(refused) if several else app)(scope, receive, send)

    return handle


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(failed: Exception) -> Response:
    """A response with OpenAI's error object and the matching status."""
    headers: Mapping[str, str] | None = None
    if isinstance(failed, HTTPException):
        status, message, headers = failed.status_code, failed.detail, failed.headers
    elif isinstance(failed, LlamaError):
        status = 404 if isinstance(failed, UnknownModel) else 400 if isinstance(failed, REFUSED) else 500
        message = str(failed)
    elif isinstance(failed, TimeoutError):
        status, message = 504, "the answer took more time than this server allows (--timeout); lower max_tokens"
    else:
        log.error("a request failed: %s", type(failed).__name__, exc_info=log.isEnabledFor(logging.DEBUG))
        status, message = 500, f"the server failed: {type(failed).__name__}"
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = CODES.get(type(failed))
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status, headers)


async def _no_endpoint(request: Request, raised: Exception) -> Response:
    status, headers = getattr(raised, "status_code", 404), getattr(raised, "headers", None) or {}
    wrong = f"use {headers['Allow']}" if "Allow" in headers else "no such endpoint"
    return _refusal(HTTPException(status, f"{request.method} {request.scope['path']!r:.80}: {wrong}", headers))
