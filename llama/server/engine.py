"""The engine of a server: one thread runs the model, and event loops hand it jobs and looks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from queue import Empty, Full
from threading import Condition, Thread
from threading import Event as Flag
from typing import Any

from ..errors import LlamaError
from ..generation.answer import Job, Piece
from ..text import Llama
from .limits import Limits

log = logging.getLogger(__name__)
OF_PROMPT = ("prompt_tokens", "cached_tokens")
COUNTED = (*OF_PROMPT, "new_tokens", "reasoning_tokens")  # fields of Stats

Steps = Generator[Any, None, None]
# Receives the pieces of the answers to one request; the engine's thread calls it
Listener = Callable[[Job, Piece | LlamaError], object]


def failure(what: str, error: BaseException) -> LlamaError:
    """Log an unexpected error, without the texts of a request. Returns an error that tells the client its kind."""
    log.error("%s: %s", what, type(error).__name__, exc_info=log.isEnabledFor(logging.DEBUG))
    return LlamaError(f"{what}: {type(error).__name__}")


class Inbox:
    """Passes values from the engine's thread to the event loop that created it, until the request times out."""

    cancel: Callable[[], object]  # ends the computation of its values; may be called at any time

    def __init__(self, engine: Engine):
        self.engine, self.loop, self.arrived = engine, asyncio.get_running_loop(), asyncio.Queue[Any]()
        self.end = self.loop.time() + engine.limits.seconds

    def put(self, found: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before the engine
            self.loop.call_soon_threadsafe(self.arrived.put_nowait, found)

    async def news(self) -> AsyncIterator[Any]:
        """Yield the values up to None. Raises TimeoutError, or a LlamaError if it receives one."""
        while self.loop.time() < self.end:
            async with asyncio.timeout_at(self.end):
                found = await self.arrived.get()
            if found is None:
                return
            if isinstance(found, LlamaError):
                raise found
            yield found
        raise TimeoutError


class Look(Inbox):
    """A look that waits or runs. The constructor queues it; the engine's thread calls `step`."""

    def __init__(self, steps: Steps, engine: Engine):
        super().__init__(engine)
        self.steps, self.cancelled = steps, Flag()
        self.cancel = self.cancelled.set
        engine.add_look(self)

    def step(self) -> bool:
        """Run the look up to its next result, and deliver it. Returns whether the look has ended."""
        found: Any = None
        try:
            found = None if self.cancelled.is_set() else next(self.steps, None)
        except LlamaError as error:
            found = error
        except BaseException as error:  # out of memory, for example: the batch goes on
            found = failure("the look failed", error)
        if ended := found is None or isinstance(found, LlamaError):
            self.steps.close()
        self.put(found)
        return ended


class Engine:
    """One thread that runs jobs in one continuous batch (generation/batch.py), and looks (look.py) between its passes.

    The first look runs one step at a time; the others wait. No pass of the batch runs while a look has hooks in the
    model.
    """

    def __init__(self, llm: Llama, limits: Limits):
        self.llm, self.limits, self.closed = llm, limits, False
        self.waiting: dict[Job, Listener] = {}
        self.running: dict[Job, Listener] = {}
        self.reading = set[Listener]()  # listeners of requests whose prompt is being read: no piece since the last job
        self.looks = deque[Look]()
        self.tokens = Counter[str]()  # of all answers that have ended
        self.since = time.monotonic()  # when looks ran last, or the batch began to run
        self.changed = Condition()
        self.thread = Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def submit(self, jobs: Sequence[Job], listener: Listener) -> None:
        """Queue the jobs of a request. If not all of them fit, queues none and raises queue.Full."""
        with self.changed:
            if len(jobs) > self.limits.waiting - len(self.waiting):
                raise Full("the server is busy: its queue is full; try again later")
            self.waiting |= dict.fromkeys(jobs, listener)
            self.changed.notify()

    def add_look(self, look: Look) -> None:
        """Queue a look. Raises queue.Full if too many wait already."""
        with self.changed:
            if sum(not one.cancelled.is_set() for one in self.looks) > self.limits.looks:
                raise Full("the server is busy with other looks; try again later")
            self.looks.append(look)
            self.changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End answers before their next token. Jobs that have ended are ignored."""
        with self.changed:
            for job in jobs:
                job.cancelled.set()
                self.waiting.pop(job, None)

    def close(self, finish: bool) -> None:
        """End the thread: after all answers if `finish` is set, otherwise before the next token."""
        if not finish:
            self.cancel([*self.waiting, *self.running])
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()

    def get(self, block: bool) -> Job | None:
        """The next job for the batch, or None if the engine is closed.

        The request with the fewest answers in progress is next, so that each gets a fair share. While the prompt of a
        request is being read, its other jobs wait here, so that they take no slot. If no job is ready, runs looks
        until one is (with `block`) or raises queue.Empty.
        """
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.closed or self.looks or not block)
                ready = [job for job, listener in self.waiting.items() if listener not in self.reading]
                if ready:
                    counts = Counter(self.running.values())
                    job = min(ready, key=lambda job: counts[self.waiting[job]])
                    self.running[job] = self.waiting.pop(job)
                    self.reading.add(self.running[job])
                    return job
            if self.closed and not self.waiting:
                return None
            if not block:
                raise Empty
            self.since = time.monotonic()
            self._run_looks()

    def _run_looks(self) -> None:
        """Run looks for half as long as the batch ran since the last call, but at least one step."""
        now = time.monotonic()
        end = now + (now - self.since) / 2
        while self.looks:
            if self.looks[0].step():
                with self.changed:
                    self.looks.popleft()
            if time.monotonic() >= end:
                break
        self.since = time.monotonic()

    def _run(self) -> None:
        while not self.closed or self.waiting:
            try:
                for job, piece in self.llm.answers(self, batch_size=self.limits.slots, between=self._run_looks):
                    self._deliver(job, piece)
            except BaseException as error:  # out of memory, or a panic in a Rust library: continue with a new cache
                self._fail(failure("the model failed to run", error))

    def _fail(self, error: LlamaError) -> None:
        """Deliver an error to all answers in progress; if there are none, to the next job."""
        for job in [*self.running] or filter(None, [self.get(True)]):
            self._deliver(job, error)

    def _deliver(self, job: Job, piece: Piece | LlamaError) -> None:
        ended = isinstance(piece, LlamaError) or piece.completion is not None
        listener = self.running.pop(job) if ended else self.running[job]
        self.reading.discard(listener)
        listener(job, piece)
