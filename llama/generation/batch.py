"""Continuous batching: many prompts through the slots of one KV cache. It works on ids, not on text.

A decoding step mostly reads the weights, so a step for eight answers takes little longer than a step for one. The cache
has one batch row for each slot. When an answer ends, the next prompt uses its slot at once: the prompt is fed into
that row alone, and from then on each step decodes it together with the others.

    slot 0   prompt 0 ─ answer ─────────── prompt 3 ─ answer ── ..
    slot 1   prompt 1 ─ answer ── prompt 2 ─ answer ─────────── ..

Each row has its own positions, mask and random generator, so its answer is the one it would get alone. If a prompt
shares a prefix with the contents of a row (often a system prompt), the row's keys and values are reused.

Prompts take turns, in chunks: the next chunk comes from the prompt with the fewest tokens left, so a short prompt
passes a long one. At most PASSES chunks in succession pass the oldest prompt, so for each chunk of its own and of older
prompts, a prompt waits for at most PASSES other chunks. A prompt also waits while another prompt that begins with the
same tokens is being fed: it copies their keys when they are computed. Until then, the other prompt gets both turns.

Before the answers in progress get their next token, one chunk is fed, or several short ones that take equally long.
`between` is called after each chunk and each step, and may run the model with a cache of its own.

A step computes one row for each slot up to the last slot in use. Each row attends to all positions for which the cache
has memory, through a mask. On a GPU, where few shapes are faster, the number of rows is rounded up to a power of two.
While no prompt waits, the rows in use move to the front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
from ..errors import LlamaError
from ..generate import next_logits, prompt_chunk, room_for
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
PASSES = 3  # chunks of other prompts in succession before the oldest prompt gets its turn
RESERVED = 1024  # new tokens for which a request reserves memory; longer answers reserve more on demand


@dataclass(eq=False)
class Request:
    """A prompt, as ids, and the parameters of its answer. With prompt_logprobs, all tokens of the prompt are computed.

    constraint  limits the tokens of the answer; each answer needs a new one
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
        """The next request, or None if no more will come. If none is there yet: waits if `block`, else raises Empty."""


# The events of request `number` (from 0), in this order: Started, PromptScored if it was requested, any number of
# TokenEvents, Ended.
class Started(NamedTuple):
    """The prompt is about to be fed. The cache already has the keys of its first `cached` tokens."""

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
    """A prompt or an answer in progress."""

    number: int
    request: Request
    ids: list[int]  # of the prompt
    end: int  # maximum number of tokens of prompt and answer together
    begun: bool = False  # set at the first turn; from then on, Slot.ids are this prompt's ids that are cached
    scored: list[Token] = field(default_factory=list)  # of the prompt, so far
    chooser: Chooser = field(init=False)  # of the answer


class Slot:
    """A row of the cache: the ids whose keys the row holds, the next id to feed, and the answer that uses the row."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.next = 0
        self.sequence: ActiveSequence | None = None  # None while the prompt is fed
        self.used = 0  # the number of the last request that used this slot, from 1
        self.owner: object = None  # of the last request that used this slot

    def shares(self, prompt: Sequence[int]) -> int:
        """The number of leading tokens of a prompt whose keys this row holds; 0 if too few to be worth copying."""
        shared = shared_prefix(self.ids, prompt)
        return shared if shared >= SHORTEST_PREFIX else 0


class Batch:
    """An iterator over events, to be used once; it ends when every request has ended.

    requests  an iterable, or a Source, which may be empty for some time; read one at a time, whenever a slot is free
    slots     maximum number of prompts and answers in progress
    stop_ids, n_vocab  as in `generate.generate`
    between   called after each chunk of a prompt and each step of the answers; it may run the model with another cache

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
        self.prompts: dict[Slot, ActiveSequence] = {}  # fed or waiting; the oldest first
        self.fed = 0.0  # prompt tokens since the last step of the answers; tokens late in a long text count more
        self.passed = 0  # chunks fed since the last turn of the oldest prompt
        self.longest = longest  # maximum number of positions that a request needs

    def __iter__(self) -> Iterator[Event]:
        self.cache = self.model.new_cache(max(1, self.longest), batch=len(self.slots), fixed=False)
        self.rows: KVCache | None = None  # view of the cache rows that a step uses
        while True:
            self.between()
            for slot in self.slots:
                yield from self._end_cancelled(slot)
            while free := [slot for slot in self.slots if slot.sequence is None and slot not in self.prompts]:
                request = self._next_request(block=len(free) == len(self.slots))
                if request is None:
                    break
                yield from self._admit(self.count - 1, request, free)
            if turn := self._turn():
                yield from self._feed(*turn)
            elif self._active():
                self._shrink()
                yield from self._step()
                self.fed = 0.0
            elif not self._more:
                return

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
        """End the prompt or answer of a slot."""
        sequence, slot.sequence = self.prompts.pop(slot, slot.sequence), None
        return Ended(sequence.number, error)  # type: ignore[union-attr]

    def _end_cancelled(self, slot: Slot) -> Iterator[Event]:
        """End the prompt or answer of a slot if it was cancelled."""
        sequence = self.prompts.get(slot, slot.sequence)
        if sequence is not None and sequence.request.cancelled.is_set():
            if slot in self.prompts and not sequence.begun:
                yield Started(sequence.number, sequence.request, 0)
            yield self._end(slot)

    @torch.inference_mode()
    def _clear(self, slot: Slot) -> None:
        """Empty a slot that may hold NaN. Masking is not enough (see LayerCache.empty)."""
        slot.ids = []
        self.cache.clear_row(self.slots.index(slot))

    # ---------------------------------------------------------------------------------------- a request gets a slot
    def _admit(self, number: int, request: Request, free: Sequence[Slot]) -> Iterator[Event]:
        """Give a slot to a request, unless the request ends at once."""
        ids, room, error = list(request.ids), 0, None
        try:
            room = room_for(self.model, ids, request.params, None)
        except LlamaError as found:
            error = found
        if error is not None or (room == 0 and not request.params.prompt_logprobs):
            yield Started(number, request, 0)
            yield Ended(number, error)
            return
        prompt = ActiveSequence(number, request, ids, len(ids) + room)
        source, cached = self._source(prompt, free)
        # The slot with the prefix if it is free, otherwise the least recently used one.
        self.prompts[source if cached and source in free else min(free, key=lambda slot: slot.used)] = prompt

    def _source(self, prompt: ActiveSequence, preferred: Sequence[Slot]) -> tuple[Slot, int]:
        """The slot that holds the longest prefix of a prompt, and the number of tokens that need not be fed."""
        source = max(self.slots, key=lambda slot: (slot.shares(prompt.ids), slot in preferred))
        # Under frequencies that depend on the length, a longer prompt rotates even its first token differently.
        all_fed = prompt.request.params.prompt_logprobs or self.model.rope.by_length
        return source, 0 if all_fed else source.shares(prompt.ids)

    def _rest(self, slot: Slot) -> int:
        """The number of tokens of a slot's prompt that are still to be fed."""
        prompt = self.prompts[slot]
        return len(prompt.ids) - (len(slot.ids) if prompt.begun else self._source(prompt, [slot])[1])

    def _leader(self, slot: Slot) -> Slot:
        """The slot to feed in the turn of `slot`: another slot that is being fed the same prefix, or else `slot`."""
        prompt = self.prompts[slot]
        if not prompt.begun and not prompt.request.params.prompt_logprobs:
            worth = len(prompt.ids) - self._rest(slot) + SHORTEST_PREFIX
            for other, ahead in self.prompts.items():
                if ahead.begun and shared_prefix(ahead.ids, prompt.ids) >= worth:
                    return other
        return slot

    def _turn(self) -> tuple[Slot, int] | None:
        """The slot to feed and the number of tokens; None if no prompt waits or a step of the answers is next."""
        if not self.prompts:
            return None
        oldest, shortest = (
            self._leader(slot) for slot in (next(iter(self.prompts)), min(self.prompts, key=self._rest))
        )
        slot = oldest if self.passed >= PASSES else shortest
        rest, chunk, slowdown = self._rest(slot), prompt_chunk(self.cache.device), 1.0
        size = min(rest, chunk)
        if self.cache.device.type == "cpu":
            # Chunks get smaller as the text grows, since attention takes longer. The tokens left are divided equally.
            slowdown += (len(self.prompts[slot].ids) - rest) / 1024
            size = -(-rest // -(-rest // max(int(chunk / slowdown), chunk // 4, 1)))
        if self._active() and self.fed and self.fed + size * slowdown > chunk:
            return None
        self.fed += size * slowdown
        self.passed = 0 if slot is oldest else self.passed + 1
        return slot, size

    def _feed(self, slot: Slot, size: int) -> Iterator[Event]:
        """Feed the next tokens of a prompt; after the last one, choose the first token of the answer."""
        prompt, row, where = self.prompts[slot], self.slots.index(slot), partial(locate, self.model)
        number, request, ids, params = prompt.number, prompt.request, prompt.ids, prompt.request.params
        try:
            if not prompt.begun:
                source, cached = self._source(prompt, [slot])
                yield Started(number, request, cached if source.owner == request.owner else 0)
                self.cache.reserve(len(ids) + min(prompt.end - len(ids), RESERVED))
                if cached and source is not slot:
                    with torch.inference_mode():
                        self.cache.copy_row(self.slots.index(source), row, cached)
                slot.ids, slot.used, slot.owner, prompt.begun = ids[:cached], number + 1, request.owner, True
            fed = len(slot.ids) + size
            with torch.inference_mode():
                tokens = torch.tensor([ids[fed - size : fed]], device=self.cache.device)  # (1, T)
                view = self.cache.rows(row, row + 1, fed - size)
                hidden = self.model.hidden(tokens, cache=view, length=len(ids))  # (1, T, C)
            slot.ids = ids[:fed]
            if params.prompt_logprobs:
                prompt.scored += self._score(ids, fed, hidden, params.top_logprobs)
            if fed < len(ids):
                check_extreme(float(extreme(hidden[0, -1])), f"prompt token {fed + 1}", ids, where)  # keep no NaN
                return
            with torch.inference_mode():
                logits = self.model.output(hidden[:, -1])[0].float()[: self.n_vocab]  # (V,)
            if prompt.end == fed:
                check_extreme(float(extreme(logits)), "the next token", ids, where)
        except LlamaError as error:
            self._clear(slot)
            yield self._end(slot, error)
            return
        if params.prompt_logprobs:
            yield PromptScored(number, prompt.scored)
        if prompt.end == fed:
            yield self._end(slot)
            return
        common = self.stop_ids, self.n_vocab, request.constraint, self.model.world
        prompt.chooser = Chooser(ids, params, self.cache.device, *common, where)
        slot.sequence = self.prompts.pop(slot)
        yield from self._choose_next(slot, prompt, logits, None)

    @torch.inference_mode()
    def _score(self, prompt: list[int], fed: int, hidden: Tensor, top: int) -> list[Token]:
        """The tokens that the last chunk of prompt[:fed] predicts; the first chunk adds token 0. hidden: (1, T, C)."""
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
        """Decode one token for each row."""
        yield from self._grow()
        if not self._active():
            return
        active = [(row, slot, slot.sequence) for row, slot in enumerate(self.slots) if slot.sequence is not None]
        with self.model.runner.threads(self._width):
            logits = self._next_logits()  # (B, V)
            choices = choose_rows({row: sequence.chooser for row, _, sequence in active}, logits)
        for row, slot, sequence in active:
            slot.ids.append(slot.next)
            yield from self._choose_next(slot, sequence, logits[row], choices.get(row))

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
            row = self.cache.rows(0, 1, len(slot.ids))
            return next_logits(self.model, [*slot.ids, slot.next], row)[None, : self.n_vocab]  # (1, V)
        fed = [(slot.next, len(slot.ids)) if slot.sequence else ([*slot.ids, 0][0], 0) for slot in self.slots[:B]]
        tokens, positions = torch.tensor(fed, device=device).T.unsqueeze(-1)  # (B, 1) each
        if B == 1:
            positions = positions[0]  # (T,), as code that was compiled for a single text expects
        if self.rows is None or self.rows.batch != B:
            self.rows = self.cache.rows(0, B)
        # No shape and no branch depends on the positions: each row attends to all slots, through its mask.
        slots = torch.arange(self.rows.slots, device=device)  # (S,)
        longest = min(self.rows.slots, self.model.max_seq_len)
        h = self.model.states(tokens, positions, slots, longest, self.rows)  # (B, 1, C)
        return self.model.output(h[:, -1]).float()[:, : self.n_vocab]  # (B, V)

    @property
    def _width(self) -> int:
        """The number of rows in a step: up to the last one in use."""
        return self._rounded(max(i for i, slot in enumerate(self.slots) if slot.sequence) + 1)

    def _rounded(self, rows: int) -> int:
        """The number of rows that a step computes if it needs `rows` of them."""
        return rows if self.cache.device.type == "cpu" else min(1 << (rows - 1).bit_length(), len(self.slots))

    @torch.inference_mode()
    def _shrink(self) -> None:
        """Move the last rows to free slots at the front, if a step then computes fewer rows."""
        used = [i for i, slot in enumerate(self.slots) if slot.sequence]
        if self.prompts or self._width <= self._rounded(len(used)):
            return
        free = [i for i in range(len(used)) if not self.slots[i].sequence]
        for target, source in zip(free, reversed(used), strict=False):
            self.cache.swap_rows(target, source, max(len(self.slots[i].ids) for i in (target, source)))
            self.slots[target], self.slots[source] = self.slots[source], self.slots[target]

    def _choose_next(
        self, slot: Slot, sequence: ActiveSequence, logits: Tensor, choice: tuple[int, float] | None
    ) -> Iterator[Event]:
        """Choose the next token of a slot's answer from logits (V,), or take a choice of `choose_rows`."""
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
