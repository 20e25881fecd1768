"""The batch of a server: one thread runs the model, and event loops hand it prompts and looks through a queue."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import Empty, Full, Queue
from threading import Thread

from ..errors import LlamaError
from ..generation.answer import Piece, Prompt
from ..text import Llama
from .look import Look

log = logging.getLogger(__name__)

# Receives the pieces of the answers to one request; the engine's thread calls it
Listener = Callable[[Prompt, Piece | LlamaError], object]
WAITING_LOOKS = 8


class Prompts(Queue[Prompt | None]):
    """The prompts that wait, and the looks (look.py): the first one runs, a step at a time, the others wait.

    The steps of a look run in the engine's thread, so no pass of the batch runs while a look has hooks in the model.
    """

    def __init__(self, waiting: int, listeners: dict[Prompt, Listener]):
        super().__init__(waiting)
        self.listeners, self.looks = listeners, deque[Look]()
        self.since = time.monotonic()  # when looks ran last, or the batch began to run

    def _get(self) -> Prompt | None:
        """Remove the first prompt of the request with the fewest answers in progress, so that each has its share."""
        listeners, waiting = dict(self.listeners), {*self.queue}
        running = Counter(listener for prompt, listener in listeners.items() if prompt not in waiting)
        found = min(filter(None, self.queue), key=lambda prompt: running[listeners[prompt]], default=None)
        self.queue.remove(found)
        return found

    def add_look(self, look: Look) -> None:
        """Queue a look. Raises queue.Full if WAITING_LOOKS wait already."""
        with self.not_empty:
            if sum(not one.cancelled.is_set() for one in self.looks) > WAITING_LOOKS:
                raise Full
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

    def get(self, block: bool = True, timeout: float | None = None) -> Prompt | None:
        """The next prompt. Runs looks while there is none, if `block` is set."""
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
    """Runs prompts in one continuous batch (generation/batch.py).

    slots    maximum number of answers in progress
    waiting  maximum number of prompts that wait for a slot
    """

    def __init__(self, llm: Llama, slots: int, waiting: int):
        self.llm, self.slots, self.closed = llm, slots, False
        self.listeners: dict[Prompt, Listener] = {}  # of prompts that wait or run
        self.queue = Prompts(waiting, self.listeners)
        self.thread = Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def submit(self, prompts: Sequence[Prompt], listener: Listener) -> None:
        """Queue the prompts of a request. Raises queue.Full, and queues none, if they do not fit.

        Call it from one thread only.
        """
        if len(prompts) > self.queue.maxsize - self.queue.qsize():
            raise Full
        self.listeners.update(dict.fromkeys(prompts, listener))
        for prompt in prompts:
            self.queue.put_nowait(prompt)

    def cancel(self, prompts: Sequence[Prompt]) -> None:
        """End answers before their next token. Prompts whose answers have ended are ignored."""
        for prompt in prompts:
            prompt.cancelled.set()
            with self.queue.mutex:
                if waits := prompt in self.queue.queue:
                    self.queue.queue.remove(prompt)
            if waits:
                self.listeners.pop(prompt, None)

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
                for prompt, piece in self.llm.answers(self.queue, batch_size=self.slots, between=self.queue.run_looks):
                    self._deliver(prompt, piece)
            except BaseException as error:  # out of memory, or a panic in a Rust library: continue with a new cache
                log.error("the batch failed: %s", type(error).__name__, exc_info=log.isEnabledFor(logging.DEBUG))
                self._fail(LlamaError(f"the model could not be run: {type(error).__name__}"))

    def _fail(self, error: LlamaError) -> None:
        """Deliver an error to all answers in progress; if there are none, to the next prompt."""
        with self.queue.mutex:
            failed: list[Prompt | None] = [prompt for prompt in [*self.listeners] if prompt not in self.queue.queue]
        for prompt in failed or [self.queue.get()]:
            if prompt is not None:
                self._deliver(prompt, error)

    def _deliver(self, prompt: Prompt, piece: Piece | LlamaError) -> None:
        ended = isinstance(piece, LlamaError) or piece.completion is not None
        listener = self.listeners.pop(prompt, None) if ended else self.listeners.get(prompt)
        if listener is not None:  # somebody waits for the answer
            listener(prompt, piece)
