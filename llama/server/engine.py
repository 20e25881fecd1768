"""The batch of a server: one thread runs the model, and event loops hand it prompts through a queue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from queue import Full, Queue
from threading import Thread

from ..errors import LlamaError
from ..generation.answer import Piece, Prompt
from ..text import Llama

log = logging.getLogger(__name__)

Listener = Callable[[Piece | LlamaError], object]  # receives the pieces of an answer; the engine's thread calls it


class Engine:
    """Runs prompts in one continuous batch (generation/batch.py).

    slots    maximum number of answers in progress
    waiting  maximum number of prompts that wait for a slot
    """

    def __init__(self, llm: Llama, slots: int, waiting: int):
        self.llm, self.slots, self.closed = llm, slots, False
        self.queue: Queue[Prompt | None] = Queue(waiting)
        self.listeners: dict[Prompt, Listener] = {}  # of prompts that wait or run
        self.thread = Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def submit(self, prompts: Mapping[Prompt, Listener]) -> None:
        """Queue all prompts. Raises queue.Full, and queues none, if they do not fit. Call it from one thread only."""
        if len(prompts) > self.queue.maxsize - self.queue.qsize():
            raise Full
        self.listeners.update(prompts)
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
                for prompt, piece in self.llm.answers(self.queue, batch_size=self.slots):
                    ended = isinstance(piece, LlamaError) or piece.completion is not None
                    (self.listeners.pop if ended else self.listeners.get)(prompt, _nobody)(piece)
            except BaseException as error:  # out of memory, or a panic in a Rust library: continue with a new cache
                log.error("the batch failed: %s", type(error).__name__, exc_info=log.isEnabledFor(logging.DEBUG))
                self._fail(LlamaError(f"the model could not be run: {type(error).__name__}"))

    def _fail(self, error: LlamaError) -> None:
        """Deliver an error to all answers in progress; if there are none, to the next prompt."""
        with self.queue.mutex:
            failed: list[Prompt | None] = [prompt for prompt in [*self.listeners] if prompt not in self.queue.queue]
        for prompt in failed or [self.queue.get()]:
            if prompt is not None:
                self.listeners.pop(prompt, _nobody)(error)


def _nobody(piece: Piece | LlamaError) -> None:
    """The listener of an answer that nobody waits for."""
