"""Continuous batching: many prompts through the slots of one KV cache. It works on ids, not on text.

A decoding step mostly reads the weights, so a step for eight answers takes little longer than a step for one. The cache
has one batch row for each slot. When an answer ends, the next prompt uses its slot at once: the prompt is fed into
that row alone, and from then on each step decodes it together with the others.

    slot 0   prompt 0 ─ answer ─────────── prompt 3 ─ answer ── ..
    slot 1   prompt 1 ─ answer ── prompt 2 ─ answer ─────────── ..

Each row has its own positions, mask and random generator, so its answer is the one it would get alone. If a prompt
shares a prefix with the contents of a row (often a system prompt), the row's keys and values are reused.

Prompts are fed one at a time, in chunks. After each chunk, the answers in progress get one token, so a long prompt
delays each of their tokens by one chunk at most. A prompt that waited for a similar one can reuse its keys. After each
chunk and step, `between` may run the model on something else.

All steps have the same shape: one row for each slot up to the last one in use, rounded up to a power of two, and all
positions for which the cache has memory, with a mask. While no prompt waits, the rows in use move to the front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty
from threading import Event as Flag
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import checks
from ..cache import KVCache
from ..engine.nonfinite import locate
from ..errors import LlamaError, UsageError
from ..generate import prefill_chunks, prompt_chunk, room_for
from ..model import Transformer
from ..sampling import (
    Chooser,
    Constraint,
    SamplingParams,
    Token,
    check_extreme,
    choose_rows,
    extreme,
    logprob_of,
    most_probable,
)
from .prefix import shared_prefix

SHORTEST_PREFIX = 16  # tokens; a shorter prefix is not worth copying from another row
MOST_SLOTS = 4096
RESERVED = 1024  # new tokens for which a request reserves memory; longer answers reserve more on demand


@dataclass(eq=False)
class Request:
    """A prompt, as ids, and the parameters of its answer; for prompt_logprobs, no prefix is copied from another row.

    constraint  limits the tokens; usable for one answer only
    cancelled   may be set at any time, by any thread: the request ends before its next token
    owner       who sent the prompt; `Started.cached` counts only reused tokens of the same owner
    """

    ids: Sequence[int]
    params: SamplingParams
    constraint: Constraint | None = None
    cancelled: Flag = field(default_factory=Flag)
    owner: object = None


class Source(Protocol):
    """Where requests come from, for example a queue.Queue."""

    def get(self, block: bool) -> Any:
        """The next request, or None if there will be no more. Raises queue.Empty if there is none now, unless block."""


# The events of request `number` (from 0), in this order: Started, PromptScored if it was requested, any number of
# TokenEvents, Ended.
class Started(NamedTuple):
    """The request was read. The keys of the first `cached` tokens of its prompt were in the cache, from its owner."""

    number: int
    request: Any  # as it was given, a Request or a subclass of it
    cached: int


class PromptScored(NamedTuple):
    """The tokens of the prompt. The first has no log-probability."""

    number: int
    tokens: list[Token]


class TokenEvent(NamedTuple):
    """A new token."""

    number: int
    token: Token


class Ended(NamedTuple):
    """The request is complete, or an error ended it."""

    number: int
    error: LlamaError | None


Event = Started | PromptScored | TokenEvent | Ended


@dataclass
class ActiveSequence:
    """An answer in progress."""

    number: int
    request: Request
    chooser: Chooser
    end: int  # the largest number of tokens of prompt and answer


class Slot:
    """A row of the cache: the ids whose keys it holds, the next id to feed, and the sequence it belongs to."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.next = 0
        self.sequence: ActiveSequence | None = None
        self.used = 0  # the number of the request that used it last, from 1
        self.owner: object = None  # of the request that used it last

    def shares(self, prompt: Sequence[int]) -> int:
        """The number of leading tokens of a prompt that it holds; 0 for a prefix that is not worth copying."""
        shared = shared_prefix(self.ids, prompt)
        return shared if shared >= SHORTEST_PREFIX else 0


class Batch:
    """An iterator over events, to be used once; it ends when every request has ended.

    requests  read one at a time, whenever a slot is free: an iterable, or a Source, which may be empty for some time
    slots     maximum number of answers in progress
    stop_ids, n_vocab  as in `generate.generate`
    between   called after each chunk of a prompt and each step of the answers; it may run the model with its own cache

    An error in one request (a prompt that is too long, logits that are not finite) ends only that request. If the RoPE
    frequencies depend on the length (rope.Rope), rows can't share a pass, and requests run one after the other. Raises
    UsageError for an invalid number of slots.
    """

    def __init__(
        self,
        model: Transformer,
        requests: Iterable[Request] | Source,
        *,
        slots: int,
        stop_ids: Collection[int] = (),
        n_vocab: int | None = None,
        between: Callable[[], object] = lambda: None,
    ):
        checks.integer("the batch size", slots, 1, MOST_SLOTS)
        self.model, self.stop_ids, self.n_vocab, self.between = model, stop_ids, n_vocab, between
        longest = model.max_seq_len
        if isinstance(requests, Sequence):  # then the required sizes are known
            needs = (len(request.ids) + request.params.max_new_tokens for request in requests)
            slots, longest = max(1, min(slots, len(requests))), min(longest, max(needs, default=1))
        if model.rope.by_length:
            slots = 1
        if isinstance(requests, Iterable):
            iterator = iter(requests)
            self._get: Callable[[bool], Request | None] = lambda block: next(iterator, None)
        else:
            self._get = requests.get
        self._more = True  # until the last request was read
        self.count = 0  # requests read so far
        self.slots = [Slot() for _ in range(slots)]
        self.longest = longest  # no request needs more positions
        self._begun = False

    def __iter__(self) -> Iterator[Event]:
        if self._begun:
            raise UsageError("a batch can be iterated over only once; create another one for the same requests")
        self._begun = True
        self.cache = self.model.new_cache(max(1, self.longest), batch=len(self.slots), fixed=False)
        self.rows: KVCache | None = None  # view of the cache rows that a step uses
        feeding: Generator[Event | None] | None = None  # feeds a prompt; yields None after a chunk
        while True:
            self.between()
            for slot in self._active():
                if slot.sequence.request.cancelled.is_set():  # type: ignore[union-attr]
                    yield self._end(slot)
            free = [slot for slot in self.slots if slot.sequence is None]
            active = len(free) < len(self.slots)
            if feeding is None and free:
                if (request := self._next_request(block=not active)) is not None:
                    feeding = self._admit(self.count - 1, request, free)
                elif not active and not self._more:
                    return
                else:
                    self._shrink()
            if feeding is not None:
                for event in feeding:
                    if event is None:
                        break
                    yield event
                else:
                    feeding = None
                    if self._more:
                        continue  # the next prompt, if one waits
            if self._active():
                yield from self._step()

    def _active(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.sequence]

    def _next_request(self, block: bool) -> Request | None:
        """The next request; None if there is none now, or there are no more."""
        if not self._more:
            return None
        try:
            request = self._get(block)
        except Empty:
            return None
        self._more = request is not None
        self.count += self._more
        return request

    def _end(self, slot: Slot, error: LlamaError | None = None) -> Ended:
        """End the sequence of a slot."""
        sequence, slot.sequence = slot.sequence, None
        return Ended(sequence.number, error)  # type: ignore[union-attr]

    @torch.inference_mode()
    def _clear(self, slot: Slot) -> None:
        """Empty a slot that may hold NaN. Masking is not enough (see LayerCache.empty)."""
        slot.ids = []
        self.cache.clear_row(self.slots.index(slot))

    # ---------------------------------------------------------------------------------------- a request gets a slot
    def _admit(self, number: int, request: Request, free: Sequence[Slot]) -> Generator[Event | None]:
        prompt, params, error = list(request.ids), request.params, None
        try:
            room = room_for(self.model, prompt, params, None)
        except LlamaError as found:
            room, error = 0, found
        if error is not None or (room == 0 and not params.prompt_logprobs):
            yield Started(number, request, 0)
            yield Ended(number, error)
            return
        source = max(self.slots, key=lambda slot: (slot.shares(prompt), slot in free))
        # Under frequencies that depend on the length, a longer prompt rotates even its first token differently.
        cached = 0 if params.prompt_logprobs or self.model.rope.by_length else source.shares(prompt)
        # The slot with the prefix if it is free, otherwise the least recently used one.
        slot = source if cached and source in free else min(free, key=lambda slot: slot.used)
        yield Started(number, request, cached if source.owner == request.owner else 0)
        slot.used, slot.owner = number + 1, request.owner
        scored: list[Token] = []
        try:
            self.cache.reserve(len(prompt) + min(room, RESERVED))
            for hidden in self._feed(prompt, slot, source, cached):  # (1, T, C)
                if params.prompt_logprobs:
                    scored += self._score(prompt, len(slot.ids), hidden, params.top_logprobs)
                if len(slot.ids) < len(prompt):
                    yield None
                if request.cancelled.is_set():
                    break
            if request.cancelled.is_set():
                self._clear(slot)  # its last chunk was not checked for NaN
                yield Ended(number, None)
                return
            with torch.inference_mode():
                logits = self.model.output(hidden[:, -1])[0].float()[: self.n_vocab]  # (V,)
            if room == 0:
                check_extreme(float(extreme(logits)), "the next token", prompt, partial(locate, self.model))
        except LlamaError as error:
            self._clear(slot)
            yield Ended(number, error)
            return
        if params.prompt_logprobs:
            yield PromptScored(number, scored)
        if room == 0:
            yield Ended(number, None)
            return
        where = partial(locate, self.model)
        common = self.stop_ids, self.n_vocab, request.constraint, self.model.world
        chooser = Chooser(prompt, params, self.cache.device, *common, where)
        slot.sequence = ActiveSequence(number, request, chooser, len(prompt) + room)
        yield from self._choose_next(slot, logits, None)

    def _feed(self, prompt: list[int], slot: Slot, source: Slot, cached: int) -> Iterator[Tensor]:
        """Feed a prompt into a slot, copying its cached prefix: the hidden states (1, T, C) of each chunk."""
        target = self.slots.index(slot)
        with torch.inference_mode():
            if cached and source is not slot:
                self.cache.copy_row(self.slots.index(source), target, cached)
        slot.ids = prompt[:cached]
        rest = prompt[cached:]
        chunk = None  # the default of prefill
        if self.cache.device.type == "cpu":  # chunks of equal size, since a short one takes as long as a longer one
            chunk = -(-len(rest) // -(-len(rest) // prompt_chunk(self.cache.device)))
        for hidden in prefill_chunks(self.model, rest, self.cache.rows(target, target + 1, cached), chunk):
            slot.ids = prompt[: len(slot.ids) + hidden.shape[1]]
            yield hidden

    @torch.inference_mode()
    def _score(self, prompt: list[int], fed: int, hidden: Tensor, top: int) -> list[Token]:
        """The tokens that the last chunk of prompt[:fed] predicts, and the first token. hidden: (1, T, C)."""
        logits = self.model.output(hidden)[0].float()[:, : self.n_vocab]  # (T, V)
        start = fed - len(logits)
        scored = [Token(prompt[0], None, False)] if start == 0 else []
        following = torch.tensor(
            prompt[start + 1 : fed + 1], device=logits.device
        )  # (T,), or (T - 1,) after the last chunk
        known = logits[: len(following)], following.clamp(max=logits.shape[-1] - 1)
        logprobs, extremes = logprob_of(*known).tolist(), extreme(logits).tolist()
        for row, id in enumerate(following.tolist()):
            check_extreme(extremes[row], f"prompt token {start + row + 2}", prompt, partial(locate, self.model))
            logprob = logprobs[row] if id < logits.shape[-1] else -math.inf
            scored.append(Token(id, logprob, False, most_probable(logits[row], top) if top else {}))
        return scored

    # ------------------------------------------------------------------------------------------- a step of all slots
    def _step(self) -> Iterator[Event]:
        """One token for each row."""
        yield from self._grow()
        if not self._active():
            return
        active = [(row, slot, slot.sequence) for row, slot in enumerate(self.slots) if slot.sequence is not None]
        with self.model.runner.threads(self._width):
            logits = self._next_logits()  # (B, V)
            choices = choose_rows({row: sequence.chooser for row, _, sequence in active}, logits)
        for row, slot, _ in active:
            slot.ids.append(slot.next)
            yield from self._choose_next(slot, logits[row], choices.get(row))

    def _grow(self) -> Iterator[Event]:
        """Make room for one more token in each row. If memory runs out, the longest answer ends with an error."""
        while active := self._active():
            longest = max(active, key=lambda slot: len(slot.ids))
            try:
                self.cache.reserve(len(longest.ids) + 1)
                return
            except LlamaError as error:
                yield self._end(longest, error)

    @torch.inference_mode()
    def _next_logits(self) -> Tensor:
        """Feed the next id of every row: (B, V). An idle row repeats its first id, whose key does not change."""
        device, B = self.cache.device, self._width
        if self.model.rope.by_length:  # the frequencies follow the length of the only row
            (slot,) = self.slots
            token, row = torch.tensor([[slot.next]], device=device), self.cache.rows(0, 1, len(slot.ids))
            hidden = self.model.hidden(token, cache=row)  # (1, 1, C)
            return self.model.output(hidden[:, -1]).float()[:, : self.n_vocab]  # (1, V)
        fed = [(slot.next, len(slot.ids)) if slot.sequence else ([*slot.ids, 0][0], 0) for slot in self.slots[:B]]
        tokens, positions = torch.tensor(fed, device=device).T.unsqueeze(-1)  # (B, 1) each
        if B == 1:
            positions = positions[0]  # (T,), as code that was compiled for a single text expects
        if self.rows is None or self.rows.batch != B:
            self.rows = self.cache.rows(0, B)
        # No shape and no branch depends on the positions: each row sees all slots, through its mask.
        slots = torch.arange(self.rows.slots, device=device)  # (S,)
        longest = min(self.rows.slots, self.model.max_seq_len)
        h = self.model.states(tokens, positions, slots, longest, self.rows)  # (B, 1, C)
        return self.model.output(h[:, -1]).float()[:, : self.n_vocab]  # (B, V)

    @property
    def _width(self) -> int:
        """The number of rows in a step: up to the last one in use, rounded up to a power of two."""
        used = max(i for i, slot in enumerate(self.slots) if slot.sequence) + 1
        return min(1 << (used - 1).bit_length(), len(self.slots))

    @torch.inference_mode()
    def _shrink(self) -> None:
        """Move the last rows to free slots at the front, if that halves the rows of a step."""
        used = [i for i, slot in enumerate(self.slots) if slot.sequence]
        if not used or self._width <= 1 << (len(used) - 1).bit_length():
            return
        free = [i for i in range(len(used)) if not self.slots[i].sequence]
        for target, source in zip(free, reversed(used), strict=False):
            self.cache.swap_rows(target, source, max(len(self.slots[i].ids) for i in (target, source)))
            self.slots[target], self.slots[source] = self.slots[source], self.slots[target]

    def _choose_next(self, slot: Slot, logits: Tensor, choice: tuple[int, float] | None) -> Iterator[Event]:
        """Choose a slot's next token from logits (V,), or take a choice of `choose_rows`."""
        sequence = slot.sequence
        if sequence is None:
            return
        if sequence.request.cancelled.is_set():
            if not math.isfinite(float(extreme(logits))):
                self._clear(slot)
            yield self._end(slot)
            return
        try:
            token = sequence.chooser.choose(logits, choice)
        except LlamaError as error:
            self._clear(slot)
            yield self._end(slot, error)
            return
        slot.next = token.id
        yield TokenEvent(sequence.number, token)
        if token.stop or len(sequence.chooser.text) == sequence.end:
            yield self._end(slot)
