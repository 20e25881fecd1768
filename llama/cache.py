"""Keys and values of the tokens already seen, so that each token is computed once.

Letters: B batch, T new tokens, S cached tokens, KV key/value heads, D head_dim.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import ContextLengthError, UsageError
from .system import memory

FIRST_SLOTS = 1024  # tokens a cache has room for before it first grows
# The most it grows by at once, beyond what is asked for. Decoding reads all of the cache for each token, so copying it
# once in so many tokens costs a thousandth; doubling would leave half of a long cache empty.
LARGEST_STEP = 4096


class Rounded(NamedTuple):
    """Keys or values in 8 bits: values (B, KV, S, D) int8, scale (B, KV, S) float32, one for each head of a token."""

    values: Tensor
    scale: Tensor

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """(B, KV, S, D) in `dtype`."""
        return (self.values.float() * self.scale.unsqueeze(-1)).to(dtype)


class LayerCache:
    """The keys and the values of one layer, (B, KV, slots, D) each. Slot s holds position s."""

    def __init__(self, k: Tensor, v: Tensor):
        self.buffers = [k, v]  # the slots are axis 2 of each
        self.end: int | None = None  # how many slots are handed out; None: all of them

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> LayerCache:
        """Zeros, not empty: a masked slot has weight 0, and 0 times a stray NaN would still be NaN."""
        return cls(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))

    def update(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Keys, Keys]:
        """Write k, v (B, KV, T, D) at `positions`; return all keys and values (B, KV, S, D)."""
        keys, values = self.write([k, v], positions)
        return keys, values

    def write(self, new: Sequence[Tensor], positions: Tensor) -> list[Tensor]:
        """Put new (B, KV, T, ..) into the buffers at positions (T,) or (B, T); return what of these is handed out."""
        for buffer, part in zip(self.buffers, new, strict=True):
            if positions.dim() == 1:
                buffer.index_copy_(2, positions, part)
            else:  # each row of the batch at its own positions; scatter_ would copy the whole buffer
                rows = torch.arange(part.shape[0], device=positions.device).view(-1, 1, 1)  # (B, 1, 1)
                heads = torch.arange(part.shape[1], device=positions.device).view(-1, 1)  # (KV, 1)
                buffer.index_put_((rows, heads, positions.unsqueeze(1)), part)  # (B, KV, T, ..)
        return [buffer if self.end is None else buffer[:, :, : self.end] for buffer in self.buffers]

    @property
    def k(self) -> Tensor:
        """All keys, (B, KV, slots, D)."""
        return self.buffers[0]

    @property
    def v(self) -> Tensor:
        """All values, likewise."""
        return self.buffers[1]

    def resize(self, slots: int) -> None:
        """Have so many slots, and in them what was there."""
        for i, old in enumerate(self.buffers):
            if old.shape[2] != slots:
                new = old.new_zeros(*old.shape[:2], slots, *old.shape[3:])
                new[:, :, : old.shape[2]] = old[:, :, :slots]
                self.buffers[i] = new


class RoundedLayerCache(LayerCache):
    """A LayerCache in 8 bits: half the memory of bfloat16, and half the bytes that decoding reads in a long context.

    Each head of each token has a scale of its own, so a token's rounding error is at most 1/254 of its largest entry.
    """

    def __init__(self, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor):
        super().__init__(k, v)
        self.buffers += [k_scale, v_scale]

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> RoundedLayerCache:
        k, v = (torch.zeros(shape, dtype=torch.int8, device=device) for _ in range(2))
        return cls(k, v, *(torch.zeros(shape[:3], device=device) for _ in range(2)))

    def update(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Keys, Keys]:
        (k, k_scale), (v, v_scale) = round_to_8_bits(k), round_to_8_bits(v)
        k, v, k_scale, v_scale = self.write([k, v, k_scale, v_scale], positions)
        return Rounded(k, k_scale), Rounded(v, v_scale)

    @property
    def k(self) -> Tensor:
        return Rounded(self.buffers[0], self.buffers[2]).numbers(torch.float32)

    @property
    def v(self) -> Tensor:
        return Rounded(self.buffers[1], self.buffers[3]).numbers(torch.float32)


def round_to_8_bits(x: Tensor) -> Rounded:
    """(B, KV, T, D) to integers from -127 to 127, with the scale that takes the largest entry of a head to 127."""
    scale = x.float().abs().amax(-1) / 127  # (B, KV, T); NaN where x holds one, and so will be what is read
    steps = torch.where(scale == 0, 1, scale).unsqueeze(-1)
    return Rounded((x.float() / steps).round().nan_to_num(0).to(torch.int8), scale)


Keys = Tensor | Rounded
KINDS: dict[str, type[LayerCache]] = {
    "model": LayerCache,
    "int8": RoundedLayerCache,
}  # "model": in the model's own dtype


class KVCache:
    """One LayerCache for each layer, and how far they are filled.

    The buffers grow with use, by doubling and later in steps, and never beyond max_len slots; so a long context costs
    memory only when it is filled. With fixed=True they have max_len slots from the start, and a single token gets to
    see all of them, behind a mask: tensors of one shape at each step, as compiled code and CUDA graphs want.
    Whoever generates makes it and passes it in; the model keeps no state. It is used like this, for
    2 cached tokens and 3 new ones:

        place(3)                  positions [2, 3, 4]; from now on the keys reach to slot 4
        layers[0].update(k, v, ..)   writes slots 2, 3, 4 of layer 0, returns slots 0 to 4; so for each layer
        commit()                  length is 5. A forward pass that broke off in the middle has changed no length
        trim(4)                   forgets the last token

    Rows of a batch that are filled to different lengths are worked on through `rows` (batch.py).
    """

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        max_len: int,
        *,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | Sequence[torch.device] = "cpu",
        fixed: bool = False,
        kind: str = "model",
        check_memory: bool = True,
    ):
        if kind not in KINDS:
            raise UsageError(f"unknown kind of KV cache {kind!r}; known: {', '.join(KINDS)}")
        slots = max_len if fixed else min(max_len, FIRST_SLOTS)
        shape = (batch, n_kv_heads, slots, head_dim)
        devices = [device] * n_layers if isinstance(device, str | torch.device) else list(device)  # one for each layer
        one = KINDS[kind].empty((*shape[:2], 1, head_dim), dtype, "meta")  # a slot of a layer
        self._slot_bytes = sum(buffer.nbytes for buffer in one.buffers)
        self._check_memory = check_memory
        self._check_free(slots, slots, devices)
        self.layers = [KINDS[kind].empty(shape, dtype, devices[i]) for i in range(n_layers)]
        self.batch, self.max_len, self.fixed, self.kind = batch, max_len, fixed, kind
        self.device = self.layers[-1].buffers[0].device  # where tokens and positions are made
        self.length = 0  # tokens whose keys are complete in every layer
        self.end = 0  # tokens whose keys are complete once the current forward pass is through
        self.width = 0  # keys that attention gets to see in the current forward pass, masked ones included
        self.steps: object = None  # what decoding.py has recorded for these buffers
        self.whole: tuple[KVCache, int] | None = None  # of what, and from which row on, this is some `rows`
        self.moves: list[tuple[int | None, int, int]] | None = None  # of rows, for whoever keeps a like (parallel.py)
        self._filled = [0] * batch  # the same for each row of the batch, since rows may differ
        self._placed = [0] * batch

    @property
    def k(self) -> Tensor:
        """All keys, (layer, B, KV, slots, D): a copy, to look at."""
        return torch.stack([layer.k.to(self.device) for layer in self.layers])

    @property
    def v(self) -> Tensor:
        """All values, likewise."""
        return torch.stack([layer.v.to(self.device) for layer in self.layers])

    @property
    def on_one_device(self) -> bool:
        """Whether all layers lie together."""
        return len({layer.buffers[0].device for layer in self.layers}) == 1

    @property
    def slots(self) -> int:
        """Positions there is room for before the buffers grow."""
        return self.layers[-1].buffers[-1].shape[2]  # the last to be resized, should memory run out in the middle

    def place(self, tokens: int, positions: Tensor | None = None) -> Tensor:
        """Make room for T new tokens and return their positions.

        They follow the cached ones unless `positions` (T,) or (B, T) says otherwise; those may overwrite what is
        there but leave no gap, since an empty slot would be attended to like any other. Raises ContextLengthError
        when they don't fit: writing past the end of a slice would change nothing, in silence.
        """
        if positions is None:
            if min(self._filled) < self.length:
                raise ValueError(f"rows of the cache are filled up to {self._filled}; say which positions come next")
            end = self.length + tokens
            positions = torch.arange(self.length, end, device=self.device)  # (T,)
            self._placed = [end] * self.batch
        else:
            positions = positions.long()
            end = self._place_at(positions)
        self._hand_out(end, every_slot=self.fixed and tokens == 1)
        return positions

    def place_next(self) -> None:
        """`place(1)` for a device that knows the position itself (decoding.py): every slot is handed out."""
        self._placed = [self.length + 1] * self.batch
        self._hand_out(self.length + 1, every_slot=True)

    @property
    def filled(self) -> list[int]:
        """How far each row of the batch is filled."""
        return list(self._filled)

    def fill_to(self, length: int, filled: list[int]) -> None:
        """Take over the `length` and `filled` of another cache, whose like this one is (parallel.py)."""
        self.length = self.end = length
        self._filled = list(filled)

    def commit(self) -> None:
        """The placed tokens are in every layer."""
        self.length, self._filled = self.end, self._placed

    def trim(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"the cache holds {self.length} tokens and can't be trimmed to {length}")
        self.length = self.end = length
        self._filled = [min(row, length) for row in self._filled]

    def reserve(self, end: int) -> None:
        """Have room for the positions below `end`.

        Raises ContextLengthError where that is beyond max_len, MemoryLimitError where the memory is not free.
        """
        if end > self.max_len:
            raise ContextLengthError(f"the KV cache holds {self.max_len} tokens, and these would reach {end}")
        if end > self.slots:
            slots = min(max(end, self.slots + min(self.slots, LARGEST_STEP)), self.max_len)
            devices = [layer.buffers[0].device for layer in self.layers]
            self._check_free(slots - self.slots, slots, devices, self.slots)  # one layer is there twice for a moment
            for layer in self.layers:  # one by one, so that only one is there twice
                layer.resize(slots)

    def rows(self, first: int, last: int, length: int = 0) -> KVCache:
        """Rows `first` to `last` of the batch as a cache of their own in the same memory, with `length` tokens in it.

        It is fixed at the slots there are now, and of no use once this cache has grown.
        """
        part = copy.copy(self)
        part.layers = [type(layer)(*(buffer[first:last] for buffer in layer.buffers)) for layer in self.layers]
        part.batch, part.max_len, part.fixed, part.steps = last - first, self.slots, True, None
        part.length, part.end, part.whole = length, length, (self, first)
        part._filled = part._placed = [length] * part.batch
        return part

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Give row `target` the first tokens of row `source`."""
        self._note(source, target, length)
        for layer in self.layers:
            for buffer in layer.buffers:
                buffer[target, :, :length] = buffer[source, :, :length]

    def clear_row(self, row: int) -> None:
        """Zeros: what is not finite must not stay behind a mask, see LayerCache.empty."""
        self._note(None, row, 0)
        for layer in self.layers:
            for buffer in layer.buffers:
                buffer[row] = 0

    def _note(self, source: int | None, target: int, length: int) -> None:
        if self.moves is not None:
            self.moves.append((source, target, length))

    def _check_free(self, added: int, slots: int, devices: Sequence[torch.device | str], more: int = 0) -> None:
        """Ask before `added` slots are made for a layer on each of the devices, and `more` for one of them.

        The cache will have `slots` in each layer.
        """
        for device in dict.fromkeys(devices):
            size = (devices.count(device) * added + more) * self._slot_bytes
            if self._check_memory and size > memory.SMALL and torch.device(device).type != "meta":
                memory.check_cache(size, slots, memory.rooms(device))

    def _hand_out(self, end: int, every_slot: bool) -> None:
        self.reserve(end)
        self.end = end
        for layer in self.layers:
            layer.end = None if every_slot else end
        self.width = self.slots if every_slot else end

    def _place_at(self, positions: Tensor) -> int:
        rows = positions.expand(self.batch, -1).tolist()  # (B, T)
        self._placed = []
        for filled, row in zip(self._filled, rows, strict=True):
            for position in row:
                if position > filled:
                    raise ValueError(
                        f"position {position} leaves a gap: this row of the cache is filled up to {filled}"
                    )
                filled = max(filled, position + 1)
            self._placed.append(filled)
        return max(self.length, *self._placed)
