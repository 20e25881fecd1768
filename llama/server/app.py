"""The endpoints: the page at /, /health, /metrics, /v1/models, answers (APIS), tokens (CONVERSIONS) and /look."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from queue import Full
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..generation.structured import warn_once
from ..inside import trace_page
from ..inside.jacobian import JacobianLens
from ..text import Llama
from .api import DISCONNECTED, Api, Format, Reply, Stream, refusal
from .dialects import standard
from .engine import COUNTED, Engine, Inbox, Look, Steps
from .look import Looks
from .openai import Chat, Completions
from .requests import apply_template, check_model, detokenize, parse_answer, parse_body, parse_look, tokenize
from .responses import Responses

log = logging.getLogger(__name__)

APIS: dict[str, Api] = {"/v1/chat/completions": Chat(), "/v1/completions": Completions(), "/v1/responses": Responses()}
CONVERSIONS = {"/tokenize": tokenize, "/detokenize": detokenize, "/apply-template": apply_template}  # as llama.cpp's
EVENTS = Format()
# name of a look -> its method, and the type of the response: all events as a stream, the last event, or a file of it
LOOKS: dict[str, tuple[Callable[..., Steps], str]] = {
    "answer": (Looks.answer, EVENTS.media_type),
    "grid": (Looks.grid, EVENTS.media_type),
    "patch": (Looks.patching, EVENTS.media_type),
    "inside": (Looks.inside, "application/json"),
    "sources": (Looks.sources, "application/json"),
    "page": (Looks.page, "text/html"),
    "activations": (Looks.activations, "application/octet-stream"),
}
IGNORED_HEADER = "X-Clearllama-Ignored"  # names the fields of a request that have no effect
AUTHENTICATE = {"WWW-Authenticate": "Bearer"}
# The keys that ask for a grammar. A key may be written with escapes or in UTF-16; escapes outside keys are common.
SCHEMAS = rb"format|tool_choice|tools|structured_outputs|guided_\w+|grammar|json_schema"
MAY_HAVE_SCHEMA = re.compile(rb"(" + SCHEMAS + rb'|\\u[0-9a-fA-F]{4}[a-z_]{0,14})"\s*:|\0')
# path -> file in the package. These files need no API key; the endpoints that the page calls do
PAGE = {"/": "server/page/index.html"}
SCRIPTS = ("page.js", "panel.js", "lens.js", "compare.js", "keep.js")
PAGE |= {f"/{name}": f"server/page/{name}" for name in ("page.css", *SCRIPTS)}
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
# A request may have one header of each group. h11 checks that Host is single
SINGLE = ((b"authorization",), (b"content-type",), (b"content-length", b"transfer-encoding"))
PACKAGE = Path(__file__).parent.parent
T = TypeVar("T")
Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class Server:
    """A model behind HTTP.

    model    the model's name in requests and responses
    key      the API key, or None
    lens     the Jacobian lens of its looks
    strict   refuse the fields of servers other than OpenAI's
    aliases  other names of the model in requests
    """

    def __init__(
        self,
        engine: Engine,
        model: str,
        key: str | None,
        lens: JacobianLens | None = None,
        strict: bool = False,
        aliases: Sequence[str] = (),
    ):
        self.strict, self.aliases = strict, aliases
        self.llm, self.engine, self.model, self.key, self.limits = engine.llm, engine, model, key, engine.limits
        self.looks, self.started = Looks(self.llm, model, lens), int(time.time())
        self.statuses: Counter[tuple[str, int]] = Counter()  # responses by path and status
        self.received = 0  # bytes of bodies that are not parsed yet
        self.parsing, self.compiling = asyncio.Semaphore(self.limits.parsed), asyncio.Semaphore(self.limits.compiled)
        self.tracing = asyncio.Semaphore(1)

    def app(self, hosts: list[str] | None, origins: Sequence[str] = ()) -> Starlette:
        """The application. It accepts only `hosts` as values of the Host header; None accepts all.

        origins  origins of web pages that may read the responses
        """
        get: dict[str, Endpoint] = {"/health": self.health, "/metrics": self.metrics, "/v1/models": self.models}
        get |= {"/v1/models/{id:path}": self.models, "/view.html": self.view, **dict.fromkeys(PAGE, self.page)}
        post: dict[str, Endpoint] = {path: partial(self.complete, api) for path, api in APIS.items()}
        post |= {path: partial(self.convert, conversion) for path, conversion in CONVERSIONS.items()}
        post |= {f"/look/{name}": partial(self.look, name) for name in LOOKS}
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
                    seconds, tokens = time.perf_counter() - began, getattr(request.state, "tokens", {})
                    done = "" if not tokens else ", {prompt_tokens} prompt tokens, {new_tokens} new".format_map(tokens)
                    speed = f" ({tokens['new_tokens'] / seconds:.1f} tok/s)" if tokens else ""
                    log.info("POST %s %d %.2f s%s%s", path, status, seconds, done, speed)

            began = time.perf_counter()
            try:
                if path != "/health" and path not in PAGE:
                    self._authorize(request)
                response = await endpoint(request)
            except ClientDisconnect:
                response = Response(status_code=DISCONNECTED)
            except Exception as failed:
                response = refusal(failed, APIS.get(path, EVENTS))
            if ignored := getattr(request.state, "ignored", []):
                response.headers[IGNORED_HEADER] = ", ".join(ignored)
                for name in ignored:  # warn_once writes each message once
                    warn_once(f"the field {name} of requests has no effect")
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
        card: dict[str, Any] = {"object": "model", "created": self.started, "owned_by": "clearllama"}
        card |= {"max_model_len": self.llm.model.max_seq_len, "meta": self.looks.meta()}
        cards = {name: {**card, "id": name} for name in (self.model, *self.aliases)}
        if not request.path_params.get("id"):  # also /v1/models/
            return JSONResponse({"object": "list", "data": [*cards.values()]})
        if (name := request.path_params["id"]) not in cards:
            check_model(name, self.model)
        return JSONResponse(cards[name])

    async def metrics(self, request: Request) -> Response:
        """Counters and gauges in Prometheus' text format."""
        lines = ["# TYPE clearllama_requests_total counter"]
        for (path, status), count in sorted(self.statuses.items()):
            lines.append(f'clearllama_requests_total{{path="{path}",status="{status}"}} {count}')
        for name in COUNTED:
            lines += [f"# TYPE clearllama_{name}_total counter", f"clearllama_{name}_total {self.engine.tokens[name]}"]
        for name, jobs in (("running", self.engine.running), ("waiting", self.engine.waiting)):
            lines += [f"# TYPE clearllama_answers_{name} gauge", f"clearllama_answers_{name} {len(jobs)}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    # ----------------------------------------------------------------------------------------------------- completions
    async def complete(self, api: Api, request: Request) -> Response:
        asked = await self._parsed(request, api.parse)
        reply = Reply(asked, self.engine, self.model)
        request.state.tokens = reply.tokens  # complete at the end
        if asked.stream:
            return Stream(api.chunks(reply), reply, api)
        await self._all(request, reply)
        return JSONResponse(api.whole(reply))

    async def convert(self, conversion: Callable[..., dict[str, Any]], request: Request) -> Response:
        return JSONResponse(await self._parsed(request, conversion))

    async def _parsed(self, request: Request, parse: Callable[[dict[str, Any], Llama, str], T]) -> T:
        """Read the body of a request and call `parse`. Raises HTTPException if it is too large or slow, or not JSON."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page of another origin can't send this type without permission
            raise HTTPException(415, f"got Content-Type {kind!r:.80}; send the header Content-Type: application/json")
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.receive):
                async for part in request.stream():
                    body += part
                    self.received += len(part)
                    if len(body) > self.limits.body:
                        raise HTTPException(413, f"the body has more than {self.limits.body:,} bytes")
                    if self.received > self.limits.bodies:
                        raise Full("the server is busy: too many large requests; try again later")
            # Parsing takes up to 30 times the memory of the body. Compiling a schema may take seconds.
            async with self.compiling if MAY_HAVE_SCHEMA.search(body) else self.parsing:
                return await asyncio.to_thread(self._read, request, bytes(body), parse)
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self.limits.receive:g} s") from None
        finally:
            self.received -= len(body)

    def _read(self, request: Request, body: bytes, parse: Callable[[dict[str, Any], Llama, str], T]) -> T:
        fields, request.state.ignored = standard(parse_body(body), self.strict)
        if fields.get("model") in self.aliases:
            fields["model"] = self.model
        return parse(fields, self.llm, self.model)

    # ----------------------------------------------------------------------------------------- the page and its looks
    async def page(self, request: Request) -> Response:
        file = PACKAGE / PAGE[request.url.path]
        return Response(file.read_bytes(), media_type=KINDS[file.suffix], headers=PAGE_HEADERS)

    async def view(self, request: Request) -> Response:
        return Response(one_file(), media_type="text/html", headers=PAGE_HEADERS)

    async def look(self, name: str, request: Request) -> Response:
        asked = await self._parsed(request, parse_answer if name == "answer" else partial(parse_look, name))
        method, kind = LOOKS[name]
        steps = partial(method, self.looks, **asked)
        if kind == EVENTS.media_type:
            look = Look(steps(), self.engine)
            return Stream(look.news(), look, EVENTS)
        if kind == JSONResponse.media_type:
            return JSONResponse((await self._all(request, Look(steps(), self.engine)))[-1])
        async with self.tracing:
            (render,) = await self._all(request, Look(steps(), self.engine))
            return Response(await asyncio.to_thread(render), media_type=kind)

    async def _all(self, request: Request, inbox: Inbox) -> list[Any]:
        """All values of the inbox, unless the client disconnects first."""

        async def collect() -> list[Any]:
            return [found async for found in inbox.news()]

        async def disconnect() -> None:  # the body has been read
            while (await request.receive())["type"] != "http.disconnect":
                pass

        whole, gone = asyncio.create_task(collect()), asyncio.create_task(disconnect())
        try:
            await asyncio.wait((whole, gone), return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise ClientDisconnect
            return whole.result()
        finally:
            whole.cancel()
            gone.cancel()
            inbox.cancel()


def one_file() -> str:
    """The page as one file that needs no network. The browser adds a view to its first, empty script.

    The policy allows the other scripts and the styles by their hashes.
    """
    page = (PACKAGE / PAGE["/"]).read_text("utf-8")
    policy = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"
    for kind, tag, end in (("css", "style", "</head>"), ("js", "script", "</body>")):
        files = (PACKAGE / PAGE[f"/{name}"] for name in re.findall(rf'="(\w+\.{kind})"', page))
        policy += f"; {tag}-src '{trace_page.hashed(text := ''.join(file.read_text('utf-8') for file in files))}'"
        page = re.sub(rf'<[^>]*="\w+\.{kind}".*\n', "", page).replace(end, f"<{tag}>{text}</{tag}>\n{end}")
    policy += "; require-trusted-types-for 'script'; trusted-types 'none'"
    saved = '<script type="application/json" id="saved"></script>'
    return page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n{saved}', 1)


def one_value(app: ASGIApp) -> ASGIApp:
    """Middleware that rejects a request with two headers of one group of SINGLE, since a proxy may use the other."""

    async def handle(scope: Any, receive: Any, send: Any) -> None:
        given = [name for name, _ in scope["headers"]]
        several = [b" or ".join(names).decode() for names in SINGLE if sum(map(given.count, names)) > 1]
        refused = HTTPException(400, f"expected one header {', '.join(several)}; got several", {"Connection": "close"})
        await (refusal(refused, EVENTS) if several else app)(scope, receive, send)

    return handle


async def _no_endpoint(request: Request, raised: Exception) -> Response:
    status, headers = getattr(raised, "status_code", 404), getattr(raised, "headers", None) or {}
    base = f"{request.base_url!s:.100}v1"
    other = f"no such endpoint; the API is OpenAI's, with the base URL {base}"
    wrong = f"use {headers['Allow']}" if "Allow" in headers else other
    return refusal(HTTPException(status, f"{request.method} {request.scope['path']!r:.80}: {wrong}", headers), EVENTS)
