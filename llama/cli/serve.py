"""Serve a model over an OpenAI-compatible HTTP API.

The page at / chats with the model and looks inside its answers (docs/guides/inside.md); the other paths are
/v1/chat/completions, /v1/completions, /v1/models, /health and /metrics (docs/guides/serving.md). Requests are answered
together, in one batch.
"""

from __future__ import annotations

import argparse
import os
import socket
import webbrowser
from pathlib import Path

from ..checks import integer
from ..errors import LlamaError, UsageError
from .common import arguments, files, loading, terminal
from .common.parser import MANY, RARE

KEY = "CLEARLLAMA_API_KEY"
LOCAL = ("localhost", "127.0.0.1", "::1")  # addresses that only this machine can reach
# name -> default, smallest and largest value, help
NUMBERS = {
    "port": (8000, 0, 65535, "port to listen on; 0 chooses a free one"),
    "parallel": (16, 1, 1024, "maximum number of answers generated at once"),
    "queue": (128, 1, 100_000, "maximum number of waiting answers; further requests get HTTP 429"),
    "timeout": (3600, 1, 10**6, "maximum time of a request in seconds"),
    "max-tokens": (4096, -1, 2**31, "default of max_tokens in chat requests; -1: until the context is full"),
}


OPTIONS = [
    ("--host ADDRESS", str, "address to listen on", {"default": "127.0.0.1"}),
    ("--open", bool, "open the page in the browser"),
    ("--api-key FILE", str, f"a file with the key that clients send (or set {KEY})"),
    ("--no-auth", bool, "with --host: let other machines connect without a key", RARE),
    ("--name NAME", str, "the model's name in requests (default: the name of its file or folder)"),
    ("--alias NAME", str, "another name of the model in requests; may be repeated", MANY),
    *((f"--{name} N", int, help, {"default": n}) for name, (n, *_, help) in NUMBERS.items()),
    ("--strict", bool, "refuse the fields of llama.cpp's and vLLM's servers", RARE),
    ("--allowed-host NAME", str, "a Host header to accept, such as a proxy's name; may be repeated", MANY | RARE),
    ("--cors-origin ORIGIN", str, "origin whose pages may use the server (https://example.org); may be repeated", MANY),
    ("--thinking-budget N", int, "close a thought after N tokens (a request may set its own budget)", RARE),
    arguments.LENS,
    *arguments.model(argument=True),
    *arguments.CHAT,
    *arguments.STEERING,
]


def run(args: argparse.Namespace) -> None:
    try:
        import uvicorn

        from ..server.app import Server
        from ..server.connections import configuration
    except ImportError as error:
        raise LlamaError(f"serving needs {error.name}: pip install 'clearllama[serve]'") from None
    from ..server.engine import Engine
    from ..server.limits import Limits

    for name, (_, low, high, _) in NUMBERS.items():
        integer(f"--{name}", getattr(args, name.replace("-", "_")), low, high)
    key, local = api_key(args.api_key), args.host in LOCAL
    if not local and key is None and not args.no_auth:
        raise UsageError(f"--host {args.host} needs a key, as other machines can connect: --api-key FILE, or --no-auth")
    listener = bind(args.host, args.port)
    llm, read_weights = loading.prepare(args)
    read_weights()
    lens = loading.read_lens(args, llm.model)
    loading.set_chat_form(args, llm)
    if args.thinking_budget is not None:
        llm.prepare([0], {"thinking_budget": args.thinking_budget, "thoughts": llm.thoughts([0])})  # checks it
        llm.thinking_budget = args.thinking_budget
    name = args.name or loading.model_name(args.model)
    limits = Limits(slots=args.parallel, waiting=args.queue, seconds=args.timeout, tokens=args.max_tokens)
    engine = Engine(llm, limits)
    hosts = [*args.allowed_host, "localhost", "127.0.0.1", "[::1]"] if local or args.allowed_host else None
    app = Server(engine, name, key, lens, args.strict, args.alias).app(hosts, args.cors_origin)
    server = uvicorn.Server(configuration(app, limits))
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    listener.listen()  # from now on clients can connect
    terminal.info(f"serving {name} at http://{address}/ (API: /v1); Ctrl-C stops the server")
    if args.open:
        webbrowser.open(f"http://{address}/".replace("0.0.0.0", "127.0.0.1"))
    try:
        server.run([listener])
    finally:
        engine.close(finish=not server.force_exit)


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket. Raises UsageError if the address is in use, or is not an address of this machine."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except (OSError, UnicodeError) as error:
        remedy = "choose others; --port 0 finds a free port"
        raise UsageError(f"can't listen on --host {host} --port {port}: {error}; {remedy}") from None


def api_key(path: str | None) -> str | None:
    """The key in the file `path` or in the environment. Raises UsageError for an empty key."""
    if path is not None and not os.path.lexists(path):  # other users can see a command, so it must not hold the key
        raise UsageError(f"--api-key needs the name of an existing file; to give the key itself, set {KEY}")
    text = os.environ.get(KEY) if path is None else files.read_text(Path(path))
    key = text and text.strip()
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise UsageError(f"{path or KEY}: expected a key of printable ASCII characters")
    return key
