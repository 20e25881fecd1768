"""Connections: uvicorn's protocol and configuration, with limits on sizes, times and incomplete requests."""

from __future__ import annotations

import logging
import math
from typing import Any

import h11
from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import Limits


class Protocol(H11Protocol):
    """uvicorn's protocol, with limits on incomplete requests, on clients that do not read, and on connections."""

    def __init__(self, limits: Limits, **options: Any):
        super().__init__(**options)
        self.limits = limits

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.end, self.deadline = math.inf, self.loop.call_later(self.limits.receive, self._late)
        if self.limit_concurrency is not None and len(self.connections) > 2 * self.limit_concurrency:
            transport.abort()  # before the limit on open files is reached, which affects the whole program

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is None or self.cycle.response_complete:
            return  # these bytes are an incomplete head of the next request, or a body that is no longer needed
        if self.cycle is not before:  # the application's own limit can't end a response that nobody reads
            self.deadline.cancel()
            self.end = self.loop.time() + self.limits.receive + self.limits.seconds
            self.deadline = self.loop.call_at(self.end, self.transport.abort)
        if not self.cycle.more_body:  # keep reading, to notice that the client disconnects
            if len(self.conn.trailing_data[0]) > self.limits.head:
                self.transport.abort()
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self.deadline.cancel()
        self.deadline = self.loop.call_later(self.limits.receive, self._late)
        super().on_response_complete()

    def _late(self, before: float = math.inf) -> None:
        """Close the connection, unless fewer than `before` bytes of the last response are still to be read."""
        if 0 < (left := self.transport.get_write_buffer_size()) < before and self.loop.time() < self.end:
            self.deadline = self.loop.call_later(self.limits.receive, self._late, left)
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # uvicorn tried to answer a malformed request a second time
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.deadline.cancel()
        super().connection_lost(exc)


def raise_open_files(most: int) -> int:
    """Raise the limit of open files to `most`, or to the system's maximum if that is lower. Returns the new limit."""
    try:
        import resource
    except ImportError:  # Windows
        return most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1: no limit
    most = max(soft, most if hard < 0 else min(hard, most))
    if soft >= 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def configuration(app: ASGIApp, limits: Limits) -> Config:
    """uvicorn's configuration for a server with these limits."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it writes 2,000 tracebacks/s if descriptors run out
    return Config(
        app,
        http=lambda **options: Protocol(limits, **options),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # clients can cause messages of all other levels
        access_log=False,
        server_header=False,
        backlog=limits.backlog,
        limit_concurrency=min(2 * (limits.slots + limits.waiting) + 64, raise_open_files(limits.files) // 4),
        h11_max_incomplete_event_size=limits.head,
    )
