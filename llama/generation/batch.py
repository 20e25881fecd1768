"""Continuous batching: many prompts through the slots of one KV cache. It works on ids, not on text.

A decoding step mostly reads the weights, so a step for eight answers takes little longer than a step for one. The cache
has one batch row for each slot. When an answer ends, the next prompt uses its slot at once: the prompt is fed into
that row alone, and from then on each step decodes it together with the others.

    slot 0   prompt 0 ─ answer ─────────── prompt 3 ─ answer ── ..
    slot 1   prompt 1 ─ answer ── prompt 2 ─ answer ─────────── ..

Each row has its own positions, mask and random generator, so its answer is the one it would get alone. If a prompt
shares a prefix with the contents of a row (often a system prompt), the row's keys and values are reused.

Every step has the same shape: one row per slot, over all positions for which the cache has memory, with a mask. The
shape changes only when the cache grows, and at the end, when no prompt waits any more: then the remaining rows move to
the front, and a step runs that many rows, rounded up to a power of two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..cache import KVCache
from ..engine.cuda_graphs import PendingTokens
from ..engine.nonfinite import locate
from ..errors import LlamaError, UsageError
from ..generate import Token, check_extreme, generate, prefill, random_generator, room_for, seen_ids
from ..model import Transformer
from ..sampling import SamplingParams, choose, extreme
from .prefix import shared_prefix

SHORTEST_PREFIX = 16  # tokens; a shorter prefix is not worth copying from another row
CHUNK = 256  # maximum tokens of a prompt in one pass
MOST_SLOTS = 4096


class Request(NamedTuple):
    """A prompt, as ids, and the parameters of its answer. logprobs as in `generate.generate`."""

    prompt: Sequence[int]
    params: SamplingParams
    logprobs: bool = False


# The events of request `number` (from 0), in this order: Started, any number of TokenEvents, Ended. A request that
# can't be run only has Ended.
class Started(NamedTuple):
    """The request has a slot. The keys of the first `cached` tokens of its prompt were already in the cache."""

    number: int
    cached: int


class TokenEvent(NamedTuple):
    """A new token."""

    number: int
    token: Token


class Ended(NamedTuple):
    """The request is complete, or an error ended it."""

    number: int
    error: LlamaError | None


Event = Started | TokenEvent | Ended


@dataclass
class ActiveSequence:
    """An answer in progress."""

    number: int
    request: Request
    room: int  # maximum number of new tokens
    generator: torch.Generator
    seen: Tensor | None  # (N,) ids for the repetition penalty
    done: bool = False
    generated: int = 0


class Slot:
    """A row of the cache: the ids whose keys it holds, the next id to feed, and the sequence it belongs to."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.next = 0
        self.sequence: ActiveSequence | None = None
        self.nonfinite = False  # an error ended its sequence, so it may hold NaN

    def shares(self, prompt: Sequence[int]) -> int:
        """The number of leading tokens of a prompt that it holds; 0 for a prefix that is not worth copying."""
        shared = shared_prefix(self.ids, prompt)
        return shared if shared >= SHORTEST_PREFIX else 0


class Batch:
    """An iterator over events, to be used once; it ends when every request has ended.

    requests  read one at a time, whenever a slot is free
    slots     maximum number of answers in progress
    stop_ids, n_vocab  as in `generate.generate`

    An error in one request (a prompt that is too long, logits that are not finite) ends only that request. If the RoPE
    frequencies depend on the length (rope.Rope), rows can't share a pass, and requests run one after the other. Raises
    UsageError for an invalid number of slots.
    """

    def __init__(
        self,
        model: Transformer,
        requests: Iterable[Request],
        *,
        slots: int,
        stop_ids: Collection[int] = (),
        n_vocab: int | None = None,
    ):
        checks.integer("the batch size", slots, 1, MOST_SLOTS)
        self.model, self.stop_ids, self.n_vocab = model, stop_ids, n_vocab
        longest = model.max_seq_len
        if isinstance(requests, Sequence):  # then the required sizes are known
            needs = (len(request.prompt) + request.params.max_new_tokens for request in requests)
            slots, longest = max(1, min(slots, len(requests))), min(longest, max(needs, default=1))
        self.requests = enumerate(requests)
        self.slots = [Slot() for _ in range(slots)]
        self.longest = longest  # no request needs more positions
        self._begun = False

    def finish(self, number: int) -> None:
        """End request `number`, for example because a stop string was found in its text."""
        for slot in self.slots:
            if slot.sequence is not None and slot.sequence.number == number:
                slot.sequence.done = True

    def __iter__(self) -> Iterator[Event]:
        if self._begun:
            raise UsageError("a batch can be iterated over only once; create another one for the same requests")
        self._begun = True
        if self.model.rope.by_length:
            yield from self._one_by_one()
            return
        self.cache = self.model.new_cache(max(1, self.longest), batch=len(self.slots), fixed=False)
        self.rows: KVCache | None = None  # view of the cache rows that a step uses
        waiting = True  # whether there may be requests without a slot
        while True:
            while waiting and (free := [slot for slot in self.slots if slot.sequence is None]):
                if (found := next(self.requests, None)) is None:
                    waiting = False
                else:
                    yield from self._admit(*found, free)
            if not any(slot.sequence for slot in self.slots):
                return
            if not waiting:
                self._shrink()
            yield from self._step()

    # ---------------------------------------------------------------------------------------- a request gets a slot
    def _admit(self, number: int, request: Request, free: Sequence[Slot]) -> Iterator[Event]:
        prompt = list(request.prompt)
        try:
            room = room_for(self.model, prompt, request.params, None)
        except LlamaError as error:
            yield Ended(number, error)
            return
        source = max(self.slots, key=lambda slot: (slot.shares(prompt), slot in free))
        cached = source.shares(prompt)
        slot = source if source in free else free[0]
        yield Started(number, cached)
        if room == 0:
            yield Ended(number, None)
            return
        try:
            logits = self._feed(prompt, slot, source, cached, len(prompt) + room)
        except LlamaError as error:
            yield Ended(number, error)
            return
        device = self.cache.device
        seen = seen_ids(prompt, request.params, self.n_vocab, device)
        slot.sequence = ActiveSequence(number, request, room, random_generator(request.params, device), seen)
        yield from self._choose_next(slot, logits, None)

    @torch.inference_mode()
    def _feed(self, prompt: list[int], slot: Slot, source: Slot, cached: int, end: int) -> Tensor:
        """Feed a prompt into a slot, copying its cached prefix: logits (V,) after its last token."""
        self.cache.reserve(end)
        target = self.slots.index(slot)
        if slot.nonfinite:
            self.cache.clear_row(target)
        if cached and source is not slot:
            self.cache.copy_row(self.slots.index(source), target, cached)
        slot.ids, slot.nonfinite = [], True  # until the prefill is complete
        rest = prompt[cached:]
        chunk = None  # the default of prefill
        if self.cache.device.type == "cpu":  # chunks of equal size, since a short one takes as long as a longer one
            chunk = -(-len(rest) // -(-len(rest) // CHUNK))
        logits = prefill(self.model, rest, self.cache.rows(target, target + 1, cached), chunk)
        slot.ids, slot.nonfinite = prompt, False
        return logits[: self.n_vocab]

    # ------------------------------------------------------------------------------------------- a step of all slots
    def _step(self) -> Iterator[Event]:
        """One token for each row."""
        logits = self._next_logits()  # (B, V)
        best = PendingTokens([(logits.argmax(-1), extreme(logits))]).read()  # (id, extreme) of each row, in one wait
        for slot, row_logits, (id, top) in list(zip(self.slots, logits, best, strict=False)):
            if slot.sequence is not None:
                slot.ids.append(slot.next)
                yield from self._choose_next(slot, row_logits, (id, top))

    @torch.inference_mode()
    def _next_logits(self) -> Tensor:
        """Feed the next id of every row: (B, V). An idle slot is fed id 0 at position 0."""
        device, B = self.cache.device, self._width
        fed = [(slot.next, len(slot.ids)) if slot.sequence else (0, 0) for slot in self.slots[:B]]
        # (B, 1) each, contiguous, since compiled code assumes the strides of its arguments
        tokens, positions = torch.tensor(fed, device=device).T.contiguous().unsqueeze(-1)
        positions = (
            positions[0] if B == 1 else positions
        )  # (T,) if B is 1: code compiled for a single text expects this shape
        if self.rows is None or (self.rows.batch, self.rows.slots) != (B, self.cache.slots):
            self.rows = self.cache.rows(0, B)  # kept while its shape fits: a CUDA graph belongs to one cache object
        return self.model.runner.next_logits(self.model, tokens, positions, self.rows)[:, : self.n_vocab]

    @property
    def _width(self) -> int:
        """The number of rows in a step: up to the last one in use, rounded up to a power of two."""
        used = max(i for i, slot in enumerate(self.slots) if slot.sequence) + 1
        return min(1 << (used - 1).bit_length(), len(self.slots))

    @torch.inference_mode()
    def _shrink(self) -> None:
        """Move the last rows to free slots at the front, if that halves the rows of a step."""
        used = [i for i, slot in enumerate(self.slots) if slot.sequence]
        if self._width <= 1 << (len(used) - 1).bit_length():
            return
        free = [i for i in range(len(used)) if not self.slots[i].sequence]
        for target, source in zip(free, reversed(used), strict=False):
            if self.slots[target].nonfinite:
                self.cache.clear_row(target)
                self.slots[target].nonfinite = False
            self.cache.copy_row(source, target, len(self.slots[source].ids))
            self.slots[target], self.slots[source] = self.slots[source], self.slots[target]

    def _choose_next(self, slot: Slot, logits: Tensor, best: tuple[int, float] | None) -> Iterator[Event]:
        """Choose a slot's next token from logits (V,). best: the most probable id and `extreme(logits)`, if known."""
        sequence = slot.sequence
        if sequence is None:
            return
        if sequence.done:  # `finish` was called
            slot.sequence = None
            yield Ended(sequence.number, None)
            return
        try:
            token = self._choose(sequence, logits, best, slot.ids)
        except LlamaError as error:
            slot.sequence, slot.ids, slot.nonfinite = None, [], True
            yield Ended(sequence.number, error)
            return
        sequence.generated += 1
        slot.next = token.id
        yield TokenEvent(sequence.number, token)
        if sequence.done or token.stop or sequence.generated == sequence.room:
            slot.sequence = None
            yield Ended(sequence.number, None)
        elif sequence.seen is not None:
            sequence.seen = torch.cat((sequence.seen, sequence.seen.new_tensor([token.id])))

    def _choose(
        self, sequence: ActiveSequence, logits: Tensor, best: tuple[int, float] | None, text: Sequence[int]
    ) -> Token:
        params, logprob = sequence.request.params, None
        if best is not None and params.greedy and sequence.seen is None:
            id, top = best
            logprob = float(logits.log_softmax(-1)[id]) if sequence.request.logprobs else None
        else:
            choice = choose(logits, params, sequence.seen, sequence.generator, sequence.request.logprobs)
            id, top = int(choice[0]), float(choice[1])
            logprob = float(choice[2]) if sequence.request.logprobs else None
        check_extreme(top, f"new token {sequence.generated + 1}", text, partial(locate, self.model))
        return Token(id, logprob, id in self.stop_ids)

    # ------------------------------------------------------------------------------------------ one request at a time
    def _one_by_one(self) -> Iterator[Event]:
        for number, (prompt, params, logprobs) in self.requests:
            slot, error = self.slots[0], None
            slot.sequence = sequence = ActiveSequence(number, Request(prompt, params), 0, torch.Generator(), None)
            tokens = generate(
                self.model,
                prompt,
                params,
                stop_ids=self.stop_ids,
                n_vocab=self.n_vocab,
                logprobs=logprobs,
                diagnose=partial(locate, self.model),
            )
            yield Started(number, 0)
            try:
                for token in tokens:
                    yield TokenEvent(number, token)
                    if sequence.done:
                        break
            except LlamaError as found:
                error = found
            slot.sequence = None
            yield Ended(number, error)
