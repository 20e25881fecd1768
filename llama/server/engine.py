"""The batch of a server: one thread runs the model, and event loops hand it jobs through a queue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Full, Queue
from threading import Thread

from ..errors import LlamaError
from ..generation.answer import Piece, Prompt
from ..text import Llama

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Job(Prompt):
    """A prompt, and the function that receives the pieces of its answer; the engine's thread calls it."""

    deliver: Callable[[Piece | LlamaError], object]


class Engine:
    """Runs jobs in one continuous batch (generation/batch.py).

    slots    maximum number of answers in progress
    waiting  maximum number of jobs without a slot
    """

    def __init__(self, llm: Llama, slots: int, waiting: int):
        self.llm, self.slots = llm, slots
        self.queue: Queue[Job | None] = Queue(waiting)
        self.running: set[Job] = set()
        self.closed = False
        self.thread = Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all jobs. Raises queue.Full, and queues none, if they do not fit. Call it from one thread only."""
        if len(jobs) > self.queue.maxsize - self.queue.qsize():
            raise Full
        for job in jobs:
            self.queue.put_nowait(job)

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End jobs: those in progress before their next token. Jobs that have ended are ignored."""
        for job in jobs:
            job.request.cancelled.set()
        with self.queue.mutex:
            for job in jobs:
                if job in self.queue.queue:
                    self.queue.queue.remove(job)

    def close(self, finish: bool = True) -> None:
        """End the thread, after all jobs if `finish`."""
        self.closed = True
        if not finish:
            self.cancel([*self.running, *(job for job in self.queue.queue if job is not None)])
        self.queue.put(None)
        self.thread.join()

    def get(self, block: bool) -> Job | None:
        """The next job for the batch (text.PromptQueue)."""
        job = self.queue.get(block)
        if job is not None:
            self.running.add(job)
        return job

    def _run(self) -> None:
        while not self.closed or self.queue.qsize():
            try:
                for prompt, piece in self.llm.answers(self, batch_size=self.slots):
                    assert isinstance(prompt, Job)  # get() returns nothing else
                    if isinstance(piece, LlamaError) or piece.completion is not None:
                        self.running.discard(prompt)
                    prompt.deliver(piece)
            except (
                Exception
            ) as error:  # memory ran out, for example: these jobs fail, and the next ones get a new cache
                log.error("the batch failed: %s", type(error).__name__, exc_info=log.isEnabledFor(logging.DEBUG))
                for job in self.running:
                    job.deliver(LlamaError(f"the model could not be run: {type(error).__name__}"))
                self.running.clear()
