"""Encode a conversation by the checkpoint's own Jinja template, which sandbox.py renders in a child process.

The first template starts the child, which also renders all later ones, so that a rendering takes a millisecond;
`start` starts it before, since that takes 0.1 s. If a template exceeds SECONDS or SPACE, or crashes, only the child
ends; the next rendering starts a new child.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from ..errors import LlamaError, TemplateError, UsageError
from ..tokenizer import Tokenizer
from . import sandbox
from .messages import Message

SECONDS = 2.0  # CPU time; a conversation of 1000 turns takes about 0.05
PER_MEGABYTE = 1.0  # additional seconds for each megabyte of the request
SPACE = 256 * 2**20  # bytes of memory, in addition to COPIES times the size of the request
COPIES = 16  # a request is read, parsed and changed, and a character may take four bytes
OUTPUT = 2**20  # bytes that a template may write in addition to four times the request
WAIT = 60.0  # seconds of real time, in case CPU time can't be limited (Windows) or the machine is very busy


def encode_template(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
) -> list[int]:
    """Ids of validated messages and tools. None of their text becomes a control token. Raises TemplateError."""
    for i, message in enumerate(messages):
        if "continues" in message:
            raise UsageError(
                f"message {i}: a chat template always ends the message, so the key 'continues' is not supported; leave"
                " it out, or use the chat format llama3"
            )
    controls = {text: id for text, id in tokenizer.control.items() if text}
    values = _values(tokenizer, messages, tools, add_generation_prompt)
    return tokenizer.encode_pieces(_rendered(template, values, controls, now))


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
) -> str:
    """The text of messages rendered by a template.

    As in Hugging Face's library, templates have raise_exception, strftime_now, loop controls, {% generation %} and a
    tojson without HTML escapes; documents is none. A template that exceeds SECONDS or SPACE is stopped. Raises
    TemplateError.
    """
    values = _values(tokenizer, messages, tools, add_generation_prompt)
    return "".join(piece for piece, _ in _rendered(template, values, None, now))


def _values(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool
) -> dict[str, Any]:
    """The variables of a template."""
    name = {id: text for text, id in tokenizer.control.items()}
    return {
        "messages": messages,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": name.get(tokenizer.bos_id, "") if tokenizer.bos_id is not None else "",
        "eos_token": name.get(tokenizer.eos_id, "") if tokenizer.eos_id is not None else "",
    }


def _rendered(
    template: str, values: Mapping[str, Any], controls: Mapping[str, int] | None, now: datetime.datetime | None
) -> list[sandbox.Piece]:
    """The answer of the child process: see sandbox.answer. Raises TemplateError."""
    request = {
        "template": template,
        "values": values,
        "controls": None if controls is None else list(controls),
        "now": (now or datetime.datetime.now()).isoformat(),
    }
    try:
        encoded = sandbox.encoded(request)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"messages and tools must be JSON-serializable: {error}") from None
    try:
        reply = json.loads(_CHILD.ask(encoded))
        if "usage" in reply:
            raise UsageError(str(reply["usage"]))
        if "pieces" in reply:
            return [_checked(piece, controls or {}) for piece in reply["pieces"]]
        reason = str(reply["error"])[:1000]
    except _Stopped as error:
        reason = str(error)
    except LlamaError:
        raise
    except (ValueError, RecursionError, LookupError, TypeError):
        reason = "it left the sandbox"  # sandbox.py always sends valid answers
    raise TemplateError(f"the model's chat template failed: {reason}; llm.generate (--raw) works without it")


def _checked(piece: Any, controls: Mapping[str, int]) -> sandbox.Piece:
    """A piece of an answer. Raises ValueError or TypeError if it is invalid."""
    text, is_control = piece
    if not isinstance(text, str) or (is_control and text not in controls):
        raise ValueError
    return text, bool(is_control)


def start() -> None:
    """Start the child process, which imports Jinja in the background. The first rendering reports a failure."""
    with contextlib.suppress(TemplateError):
        _CHILD.start()


class _Stopped(Exception):
    """The child ended during a rendering. The message is the reason."""


class _Child:
    """A process that runs sandbox.py. It serves one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def forget(self) -> None:
        """Drop the process after a fork, since it belongs to the parent.

        The pipes are closed without flushing, because a buffer may hold a part of another thread's request.
        """
        for pipe in (self._process.stdin, self._process.stdout) if self._process else ():
            cast(Any, pipe).raw.close()
        self.__init__()  # type: ignore[misc]

    def stop(self) -> int | None:
        """Kill the process. Returns its exit code, None if there was no process."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # the process did not read all of the request
                cast(IO[bytes], pipe).close()
        return process.wait()

    def start(self) -> None:
        """Start the process unless it is running. Raises TemplateError."""
        with self._lock:
            self._process = self._process or _start()

    def ask(self, request: bytes) -> bytes:
        """The answer to a request. Raises _Stopped at a limit or after a crash, TemplateError if no process starts."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.stop()  # something else has ended it
            fresh = self._process is None
            try:
                answer = self._try(request)
                if answer == MEMORY and not fresh:  # earlier templates may have filled the memory
                    self.stop()
                    answer = self._try(request)
            except OSError:
                raise _Stopped(_meaning(self.stop(), request)) from None
            except BaseException:
                self.stop()  # else the next request would read the answer to this one
                raise
            if answer == MEMORY:
                self.stop()
                raise _Stopped(f"its values needed more than {SPACE >> 20} MiB, so it was stopped")
            return answer

    def _try(self, request: bytes) -> bytes:
        """Send a request and read the answer. Raises OSError if the process ends."""
        process = self._process = self._process or _start()
        into, out = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        allowed = OUTPUT + 4 * len(request)
        timer = threading.Timer(WAIT, process.kill)
        timer.start()
        try:
            into.write(sandbox.HEADER.pack(len(request), seconds(request), SPACE + COPIES * len(request)) + request)
            into.flush()
            header = out.read(sandbox.LENGTH.size)
            (length,) = sandbox.LENGTH.unpack(header) if len(header) == sandbox.LENGTH.size else (0,)
            if length > allowed:
                raise _Stopped(f"it wrote {length:,} bytes, expected at most {allowed:,}, so it was stopped")
            answer = out.read(length)
            if not length or len(answer) < length:
                raise BrokenPipeError
            return answer
        finally:
            timer.cancel()


MEMORY = sandbox.encoded({"memory": True})


# Variables without which some systems can't start Python
TO_START = ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LD_PRELOAD")


def _start() -> subprocess.Popen[bytes]:
    """Start sandbox.py with the folders of Jinja and its dependency, and without the user's environment."""
    folders = []
    for name in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise TemplateError(f"chat templates need {name}, which is not installed; run: pip install {name}")
        folders.append(str(Path(spec.origin).parents[1]))
    command = [sys.executable, "-I", "-S", sandbox.__file__, *folders]
    system = {name: os.environ[name] for name in TO_START if name in os.environ}
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=system,
            start_new_session=True,  # the terminal's Ctrl-C must not reach it
        )
    except OSError as error:
        raise TemplateError(
            f"chat templates run in a child process, which could not be started ({error.strerror or error});"
            " llm.generate (--raw) works without a child process"
        ) from None


def seconds(request: bytes) -> float:
    """The CPU time for a request."""
    return SECONDS + PER_MEGABYTE * len(request) / 1e6


def _meaning(code: int | None, request: bytes) -> str:
    """Why the child ended, by its exit code."""
    if code is not None and -code == getattr(signal, "SIGPROF", None):
        return f"it ran for more than {seconds(request):.3g} seconds and was stopped"
    if code is not None and -code == getattr(signal, "SIGKILL", None):
        return f"it was killed, by the system or because it took more than {WAIT:g} seconds"
    if code is not None and code > 0:
        return f"its process ended with exit code {code}; check that this starts: {sys.executable} {sandbox.__file__}"
    return f"its process crashed (exit code {code})"


_CHILD = _Child()
atexit.register(_CHILD.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_CHILD.forget)
