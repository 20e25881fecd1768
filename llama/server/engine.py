"""The batch of a server: one thread runs the model, and event loops hand it jobs and looks through a queue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from queue import Empty, Full, Queue
from threading import Event as Flag
from threading import Thread
from typing import Any

from ..errors import LlamaError
from ..generation.answer import Job, Piece
from ..text import Llama
from .limits import Limits

log = logging.getLogger(__name__)
COUNTED = ("prompt_tokens", "cached_tokens", "new_tokens")  # fields of Stats

Steps = Generator[Any, None, None]
# Receives the pieces of the answers to one request; the engine's thread calls it
Listener = Callable[[Job, Piece | LlamaError], object]


def failure(what: str, error: BaseException) -> LlamaError:
    """Log an unexpected error, without the texts of a request. Returns an error that tells the client its kind."""
    log.error("%s: %s", what, type(error).__name__, exc_info=log.isEnabledFor(logging.DEBUG))
    return LlamaError(f"{what}: {type(error).__name__}")


class Inbox:
    """What the engine's thread hands to the event loop that made it. An error that arrives is raised by `received`."""

    def __init__(self) -> None:
        self._loop, self._arrived = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def put(self, found: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before the engine
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, found)

    async def received(self) -> AsyncIterator[Any]:
        """What arrives, up to None. Raises LlamaError."""
        while (found := await self._arrived.get()) is not None:
            if isinstance(found, LlamaError):
                raise found
            yield found


class Look(Inbox):
    """A look that waits or runs. The engine's thread calls `step`; the event loop reads its results."""

    def __init__(self, steps: Steps):
        super().__init__()
        self.steps, self.cancelled = steps, Flag()

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


class Schedule(Queue[Job | None]):
    """The jobs that wait, and the looks (look.py): the first look runs, a step at a time, the others wait.

    The steps of a look run in the engine's thread, so no pass of the batch runs while a look has hooks in the model.
    """

    def __init__(self, limits: Limits, listeners: dict[Job, Listener]):
        super().__init__(limits.waiting)
        self.limits, self.listeners, self.looks = limits, listeners, deque[Look]()
        self.since = time.monotonic()  # when looks ran last, or the batch began to run

    def _get(self) -> Job | None:
        """Remove the first job of the request with the fewest answers in progress, so that each has its share."""
        listeners, waiting = dict(self.listeners), {*self.queue}
        running = Counter(listener for job, listener in listeners.items() if job not in waiting)
        found = min(filter(None, self.queue), key=lambda job: running[listeners[job]], default=None)
        self.queue.remove(found)
        return found

    def add_look(self, look: Look) -> None:
        """Queue a look. Raises queue.Full if too many wait already."""
        with self.not_empty:
            if sum(not one.cancelled.is_set() for one in self.looks) > self.limits.looks:
                raise Full("the server is busy with other looks; try again later")
            self.looks.append(look)
            self.not_empty.notify()

    def run_looks(self) -> None:
        """Run looks, at least one step, for half as long as the batch ran since the last call."""
        now = time.monotonic()
        end = now + (now - self.since) / 2
        while self.looks:
            if self.looks[0].step():
                with self.mutex:
                    self.looks.popleft()
            if time.monotonic() >= end:
                break
        self.since = time.monotonic()

    def get(self, block: bool = True, timeout: float | None = None) -> Job | None:
        """The next job. Runs looks while there is none, if `block` is set."""
        while True:
            try:
                return super().get(False)
            except Empty:
                if not block:
                    raise
            with self.not_empty:
                self.not_empty.wait_for(lambda: self.queue or self.looks)
            self.since = time.monotonic()
            self.run_looks()


class Engine:
    """Runs jobs in one continuous batch (generation/batch.py)."""

    def __init__(self, llm: Llama, limits: Limits):
        self.llm, self.limits, self.closed = llm, limits, False
        self.listeners: dict[Job, Listener] = {}  # of jobs that wait or run
        self.queue = Schedule(limits, self.listeners)
        self.tokens = Counter[str]()  # of all answers that have ended
        self.thread = Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def submit(self, jobs: Sequence[Job], listener: Listener) -> None:
        """Queue the jobs of a request. Raises queue.Full, and queues none, if they do not fit.

        Call it from one thread only.
        """
        if len(jobs) > self.limits.waiting - self.queue.qsize():
            raise Full("the server is busy: its queue is full; try again later")
        self.listeners.update(dict.fromkeys(jobs, listener))
        for job in jobs:
            self.queue.put_nowait(job)

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End answers before their next token. Jobs that have ended are ignored."""
        for job in jobs:
            job.cancelled.set()
            with self.queue.mutex:
                if waits := job in self.queue.queue:
                    self.queue.queue.remove(job)
            if waits:
                self.listeners.pop(job, None)

    def close(self, finish: bool) -> None:
        """End the thread: after all answers if `finish` is set, otherwise before the next token."""
        self.closed = True
        if not finish:
            self.cancel([*self.listeners])
        self.queue.put(None)
        self.thread.join()

    def _run(self) -> None:
        while not self.closed or self.queue.qsize():
            try:
                for job, piece in self.llm.answers(
                    self.queue, batch_size=self.limits.slots, between=self.queue.run_looks
                ):
                    self._deliver(job, piece)
            except BaseException as error:  # out of memory, or a panic in a Rust library: continue with a new cache
                self._fail(failure("the model could not be run", error))

    def _fail(self, error: LlamaError) -> None:
        """Deliver an error to all answers in progress; if there are none, to the next job."""
        with self.queue.mutex:
            failed: list[Job | None] = [job for job in [*self.listeners] if job not in self.queue.queue]
        for job in failed or [self.queue.get()]:
            if job is not None:
                self._deliver(job, error)

    def _deliver(self, job: Job, piece: Piece | LlamaError) -> None:
        ended = isinstance(piece, LlamaError) or piece.completion is not None
        listener = self.listeners.pop(job, None) if ended else self.listeners.get(job)
        if listener is not None:  # somebody waits for the answer
            listener(job, piece)
