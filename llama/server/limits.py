"""The limits of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits for each request and for all requests together. Sizes are in bytes, times in seconds.

    slots      answers in progress
    waiting    answers that wait for a slot
    looks      looks that wait
    body       size of a request
    bodies     total size of requests not yet parsed
    head       size of a request's head, and of further requests that a client sends before it has the response
    receive    time until a request has arrived completely
    tokens     new tokens of a chat answer if the request has no max_tokens; -1: until the context is full
    seconds    time from the arrival of a request to the end of its answer
    pause      time between the comments in a stream, since proxies close silent connections
    parsed     bodies parsed at once, of the 5 or more threads of asyncio.to_thread
    compiled   bodies with a schema parsed at once
    backlog    connections that wait in the operating system until the server accepts them, all at once
    files      open files; fewer if the system's limit is lower
    """

    slots: int = 16
    waiting: int = 128
    looks: int = 8
    body: int = 2**23
    bodies: int = 2**28
    head: int = 2**16
    receive: float = 30.0
    tokens: int = 4096
    seconds: float = 3600.0
    pause: float = 15.0
    parsed: int = 4
    compiled: int = 2
    backlog: int = 128
    files: int = 2**14
