"""Continuous batching: many prompts through the slots of one KV cache. It knows ids, never text.

A decoding step does little but read the weights, so a step for eight answers takes little longer than a step for one.
The cache is a batch with a row for each slot. An answer that has ended leaves its slot, and the next prompt takes it at
once: it is fed into that row alone, and from then on each step carries it along with the others.

    slot 0   prompt 0 ─ answer ─────────── prompt 3 ─ answer ── ..
    slot 1   prompt 1 ─ answer ── prompt 2 ─ answer ─────────── ..

Each row has positions, a mask and a random generator of its own, so what it says is what it says alone. A prompt that
begins as what some row holds (a system prompt, most often) takes these keys and values from there.

Steps have one shape: a row for every slot, and every slot of the cache behind the mask. That changes only where the
cache grows, and at the end, when no prompt waits any more: then what is left moves to the front, and steps take the
next power of two of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..engine.nonfinite import locate
from ..errors import LlamaError, UsageError
from ..generate import Token, check_extreme, generate, prefill, random_generator, room_for, seen_ids
from ..model import Transformer
from ..sampling import SamplingParams, choose, extreme
from .prefix import shared_prefix

SHORTEST_PREFIX = 16  # tokens that are worth copying from another row
CHUNK = 256  # most tokens of a prompt in one pass
MOST_SLOTS = 4096


class Request(NamedTuple):
    """A prompt, as ids, and how its answer is to be drawn. logprobs as in `generate.generate`."""

    prompt: Sequence[int]
    params: SamplingParams
    logprobs: bool = False


# What happens to request `number` (from 0), in this order: Started, any number of Said, Ended. One that can't be run is
# Ended at once.
class Started(NamedTuple):
    """It has got a slot. `cached` of its prompt's tokens were taken from another row."""

    number: int
    cached: int


class Said(NamedTuple):
    """A new token."""

    number: int
    token: Token


class Ended(NamedTuple):
    """Nothing more will come, because of an error or because it is complete."""

    number: int
    error: LlamaError | None


Event = Started | Said | Ended


@dataclass
class Row:
    """An answer under way."""

    number: int
    request: Request
    room: int  # new tokens there may be
    generator: torch.Generator
    seen: Tensor | None  # (N,) ids for the repetition penalty
    done: bool = False
    said: int = 0


class Slot:
    """A row of the cache: the ids whose keys it holds, the id to be fed next, and whose answer that is."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.next = 0
        self.row: Row | None = None
        self.spoilt = False  # an error ended it, so it may hold what is not finite

    def shares(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt it holds; one at least is left to be fed, since its logits are wanted."""
        shared = shared_prefix(self.ids, prompt)
        return shared if shared >= SHORTEST_PREFIX else 0


class Batch:
    """Iterate over it once: it yields events until every request has ended.

    requests  taken one at a time, whenever a slot is free
    slots     answers under way at once
    stop_ids  and n_vocab as in `generate.generate`

    An error that one request meets (a prompt too long, logits that are not finite) ends that request alone. Where the
    turns of RoPE depend on the length (rope.Rope), rows can't share a pass, and requests run one after the other.
    Raises UsageError on a bad number of slots.
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
        if isinstance(requests, Sequence):  # then what they need is known
            needs = (len(request.prompt) + request.params.max_new_tokens for request in requests)
            slots, longest = max(1, min(slots, len(requests))), min(longest, max(needs, default=1))
        self.requests = enumerate(requests)
        self.slots = [Slot() for _ in range(slots)]
        self.longest = longest  # no request needs more positions
        self._begun = False

    def finish(self, number: int) -> None:
        """Say no more for request `number`, as when a stop string was found in its text; it ends at once."""
        for slot in self.slots:
            if slot.row is not None and slot.row.number == number:
                slot.row.done = True

    def __iter__(self) -> Iterator[Event]:
        if self._begun:
            raise UsageError("a batch is iterated over once; make another one for the same requests")
        self._begun = True
        if self.model.rope.by_length:
            yield from self._one_by_one()
            return
        self.cache = self.model.new_cache(max(1, self.longest), batch=len(self.slots), fixed=False)
        waiting = True  # whether there may be requests without a slot
        while True:
            while waiting and (free := [slot for slot in self.slots if slot.row is None]):
                if (found := next(self.requests, None)) is None:
                    waiting = False
                else:
                    yield from self._admit(*found, free)
            if not any(slot.row for slot in self.slots):
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
        slot.row = Row(number, request, room, random_generator(request.params, device), seen)
        yield from self._say(slot, logits, None)

    @torch.inference_mode()
    def _feed(self, prompt: list[int], slot: Slot, source: Slot, cached: int, end: int) -> Tensor:
        """Take a prompt into a slot, its first tokens from another: logits (V,) after its last token."""
        self.cache.reserve(end)
        target = self.slots.index(slot)
        if slot.spoilt:
            self.cache.clear_row(target)
        if cached and source is not slot:
            self.cache.copy_row(self.slots.index(source), target, cached)
        slot.ids, slot.spoilt = [], True  # until it is through
        rest = prompt[cached:]
        chunk = None  # prefill's own
        if self.cache.device.type == "cpu":  # shares of one size: a short one would cost like a longer one
            chunk = -(-len(rest) // -(-len(rest) // CHUNK))
        logits = prefill(self.model, rest, self.cache.rows(target, target + 1, cached), chunk)
        slot.ids, slot.spoilt = prompt, False
        return logits[: self.n_vocab]

    # ------------------------------------------------------------------------------------------- a step of all slots
    def _step(self) -> Iterator[Event]:
        """One token for each row."""
        logits = self._next_logits()  # (B, V)
        likeliest = logits.argmax(-1, keepdim=True)  # (B, 1)
        best = zip(likeliest[:, 0].tolist(), extreme(logits).tolist(), strict=True)
        for slot, row_logits, choice in list(zip(self.slots, logits, best, strict=False)):
            if slot.row is not None:
                slot.ids.append(slot.next)
                yield from self._say(slot, row_logits, choice)

    @torch.inference_mode()
    def _next_logits(self) -> Tensor:
        """Feed the next id of every row: (B, V). A slot without an answer is fed something at its start."""
        device, B = self.cache.device, self._width
        fed = [(slot.next, len(slot.ids)) if slot.row else (0, 0) for slot in self.slots[:B]]
        # (B, 1) each, and without gaps: compiled code takes for granted how its arguments lie in memory
        tokens, positions = torch.tensor(fed, device=device).T.contiguous().unsqueeze(-1)
        positions = positions[0] if B == 1 else positions  # (T,): as one text has it, for code made for one
        return self.model.runner.next_logits(self.model, tokens, positions, self.cache.rows(0, B))[:, : self.n_vocab]

    @property
    def _width(self) -> int:
        """Rows of a step: up to the last that is in use, as a power of two."""
        used = max(i for i, slot in enumerate(self.slots) if slot.row) + 1
        return min(1 << (used - 1).bit_length(), len(self.slots))

    @torch.inference_mode()
    def _shrink(self) -> None:
        """Move rows from behind to free slots in front, where that halves the rows of a step."""
        used = [i for i, slot in enumerate(self.slots) if slot.row]
        if self._width <= 1 << (len(used) - 1).bit_length():
            return
        free = [i for i in range(len(used)) if not self.slots[i].row]
        for target, source in zip(free, reversed(used), strict=False):
            if self.slots[target].spoilt:
                self.cache.clear_row(target)
                self.slots[target].spoilt = False
            self.cache.copy_row(source, target, len(self.slots[source].ids))
            self.slots[target], self.slots[source] = self.slots[source], self.slots[target]

    def _say(self, slot: Slot, logits: Tensor, best: tuple[int, float] | None) -> Iterator[Event]:
        """Choose a row's next token from logits (V,), whose likeliest id and its logit may be known."""
        row = slot.row
        if row is None:
            return
        if row.done:  # told so meanwhile
            slot.row = None
            yield Ended(row.number, None)
            return
        try:
            token = self._choose(row, logits, best, slot.ids)
        except LlamaError as error:
            slot.row, slot.ids, slot.spoilt = None, [], True
            yield Ended(row.number, error)
            return
        row.said += 1
        slot.next = token.id
        yield Said(row.number, token)
        if row.done or token.stop or row.said == row.room:
            slot.row = None
            yield Ended(row.number, None)
        elif row.seen is not None:
            row.seen = torch.cat((row.seen, row.seen.new_tensor([token.id])))

    def _choose(self, row: Row, logits: Tensor, best: tuple[int, float] | None, text: Sequence[int]) -> Token:
        params, logprob = row.request.params, None
        if best is not None and params.greedy and row.seen is None:
            id, top = best
            logprob = float(logits.log_softmax(-1)[id]) if row.request.logprobs else None
        else:
            choice = choose(logits, params, row.seen, row.generator, row.request.logprobs)
            id, top = int(choice[0]), float(choice[1])
            logprob = float(choice[2]) if row.request.logprobs else None
        check_extreme(top, f"new token {row.said + 1}", text, partial(locate, self.model))
        return Token(id, logprob, id in self.stop_ids)

    # --------------------------------------------------------------------------------------------------- without rows
    def _one_by_one(self) -> Iterator[Event]:
        for number, (prompt, params, logprobs) in self.requests:
            slot, error = self.slots[0], None
            slot.row = row = Row(number, Request(prompt, params), 0, torch.Generator(), None)
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
                    yield Said(number, token)
                    if row.done:
                        break
            except LlamaError as found:
                error = found
            slot.row = None
            yield Ended(number, error)
