"""Keys and values of the tokens already processed, so that each token is computed once.

Letters: B batch, T new tokens, S keys (cached and new), KV key/value heads, D head_dim.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .errors import ContextLengthError, UsageError

FIRST_SLOTS = 1024  # tokens that a cache has room for before it first grows
# A cache adds at most this many slots at once, unless more are needed. Decoding reads the whole cache for each token: a
# copy every few thousand tokens adds about a thousandth. Doubling would leave half of a long cache empty.
LARGEST_STEP = 4096


class QuantizedKV(NamedTuple):
    """Keys or values in 8 bits: `values` (B, KV, S, D) int8, `scale` (B, KV, S) float32, one per head and token.

    Keys are rotated, as `QuantizedLayerCache` stores them: apply `hadamard` to the queries before computing scores.
    """

    values: Tensor
    scale: Tensor

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """(B, KV, S, D) in `dtype`."""
        return (self.values.float() * self.scale.unsqueeze(-1)).to(dtype)  # the scale as (B, KV, S, 1)


KeysOrValues = Tensor | QuantizedKV


class LayerCache:
    """The keys and values of one layer, (B, KV, slots, D) each. Slot s holds position s.

    buffers     k and v; the slots are axis 2 of each
    visible     number of slots that `update` returns; None: all of them
    key_offset  see `QuantizedLayerCache`
    """

    key_offset: Tensor | None = None

    def __init__(self, buffers: Sequence[Tensor], parent: LayerCache | None = None, rows: slice = slice(None)):
        self._buffers, self._parent, self._rows = list(buffers), parent, rows
        self._source: list[Tensor] = []  # the parent's buffers that _buffers are views of
        self.visible: int | None = None

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> LayerCache:
        """A cache of zeros. torch.empty could hold NaN: a masked slot has weight 0, but 0 times NaN is NaN."""
        return cls([_zeros(shape, dtype, device) for _ in range(2)])

    def rows(self, rows: slice) -> LayerCache:
        """A view of some rows of the batch. It reads the buffers from this cache, so it stays valid when they grow."""
        part = type(self)([], self, rows)
        part.key_offset = self.key_offset
        return part

    @property
    def buffers(self) -> list[Tensor]:
        if self._parent is not None and self._source is not self._parent.buffers:  # first use, or the parent has grown
            self._source = self._parent.buffers
            self._buffers = [buffer[self._rows] for buffer in self._source]
        return self._buffers

    def update(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[KeysOrValues, KeysOrValues]:
        """Write k, v (B, KV, T, D) at `positions`; return all keys and values (B, KV, S, D)."""
        keys, values = self.write([k, v], positions)
        return keys, values

    def write(self, new: Sequence[Tensor], positions: Tensor) -> list[Tensor]:
        """Write each of `new` (B, KV, T, ..) into its buffer at positions (T,) or (B, T); return the visible slots."""
        for buffer, part in zip(self.buffers, new, strict=True):
            if positions.dim() == 1:
                buffer.index_copy_(2, positions, part)
            else:  # each row of the batch at its own positions; in compiled code, scatter_ would copy the buffer
                rows = torch.arange(part.shape[0], device=positions.device).view(-1, 1, 1)  # (B, 1, 1)
                heads = torch.arange(part.shape[1], device=positions.device).view(-1, 1)  # (KV, 1)
                buffer.index_put_((rows, heads, positions.unsqueeze(1)), part)  # (B, KV, T, ..)
        return [buffer if self.visible is None else buffer[:, :, : self.visible] for buffer in self.buffers]

    def floats(self) -> tuple[Tensor, Tensor]:
        """All keys and all values as floating-point tensors, (B, KV, slots, D) each."""
        return self.buffers[0], self.buffers[1]

    def resize(self, slots: int) -> None:
        """Resize to a number of slots, keeping the contents."""
        grown = []
        for old in self.buffers:
            new = _zeros((*old.shape[:2], slots, *old.shape[3:]), old.dtype, old.device)  # (B, KV, slots, ..)
            new[:, :, : old.shape[2]] = old[:, :, :slots]
            grown.append(new)
        self._buffers = grown


class QuantizedLayerCache(LayerCache):
    """A LayerCache in 8 bits, which takes about half the memory of bfloat16.

    `buffers` are k, v and their scales. Each head of each token has its own scale, so a rounding error is at most 1/254
    of the largest entry. Two exact steps keep the largest entry of a key small; without them, a key with a few very
    large entries (Qwen2.5 has biases above 100) would lose the precision of its other entries:

    key_offset (KV, 1, D)  subtracted from every key. All scores of a query change by the same amount, so its attention
                           weights stay the same (arXiv:2410.02367). `Attention.key_offset` computes it. None: 0
    hadamard               applied to keys and queries, which leaves their products unchanged (arXiv:2404.00456)

    The C++ kernels read the integers; `attention.sdpa` dequantizes all of them in each pass.
    """

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> QuantizedLayerCache:
        values = [_zeros(shape, torch.int8, device) for _ in range(2)]
        return cls([*values, *(_zeros(shape[:3], torch.float32, device) for _ in range(2))])

    def update(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[KeysOrValues, KeysOrValues]:
        k = k.float() if self.key_offset is None else k.float() - self.key_offset
        (k, k_scale), (v, v_scale) = quantize_kv(hadamard(k)), quantize_kv(v)
        k, v, k_scale, v_scale = self.write([k, v, k_scale, v_scale], positions)
        return QuantizedKV(k, k_scale), QuantizedKV(v, v_scale)

    def floats(self) -> tuple[Tensor, Tensor]:
        k, v, k_scale, v_scale = self.buffers
        keys = hadamard(QuantizedKV(k, k_scale).dequantize(torch.float32))  # hadamard is its own inverse
        keys = keys if self.key_offset is None else keys + self.key_offset
        return keys, QuantizedKV(v, v_scale).dequantize(torch.float32)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros that can be modified inside and outside torch.inference_mode, wherever they were made."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def quantize_kv(x: Tensor) -> QuantizedKV:
    """Quantize (B, KV, T, D) to -127 .. 127, with the scale that maps each head's largest absolute entry to 127."""
    scale = x.float().abs().amax(-1) / 127  # (B, KV, T); NaN if x holds NaN, so that dequantizing returns NaN too
    steps = torch.where(scale == 0, 1, scale).unsqueeze(-1)  # (B, KV, T, 1)
    return QuantizedKV((x.float() / steps).round().nan_to_num(0).to(torch.int8), scale)


def hadamard(x: Tensor) -> Tensor:
    """Multiply each run of n entries of the last axis by a Hadamard matrix / sqrt(n): (.., D) -> (.., D).

    n is the largest power of two that divides D. This rotation is its own inverse. It spreads large entries over a run.
    """
    step, n = 1, x.shape[-1] & -x.shape[-1]
    while step < n:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)  # (.., D / (2 step), step) twice
        x, step = torch.stack((a + b, a - b), dim=-2).flatten(-3), 2 * step  # (.., D)
    return x * n**-0.5


KINDS: dict[str, type[LayerCache]] = {"model": LayerCache, "int8": QuantizedLayerCache}  # "model": the model's dtype

# Called with (size, slots, device) before a cache allocates `size` bytes on a device, to have `slots` slots afterwards;
# raises MemoryLimitError if the memory is not free. Implemented by system.memory.check_growth.
MemoryCheck = Callable[[int, int, torch.device], None]


class KVCache:
    """A LayerCache for each layer, and the number of tokens in them.

    The generation code creates the cache and passes it in. For 2 cached tokens and 3 new ones:

        place(3)                     positions [2, 3, 4]; the keys now reach to slot 4
        layers[0].update(k, v, ..)   writes slots 2, 3, 4 of layer 0, returns slots 0 to 4; likewise for each layer
        commit()                     length is 5. A forward pass that failed before this leaves length unchanged
        trim(4)                      drops the last token

    After place(3):

        slot      0    1    2    3    4    5    6    7    8   ..
                  ├─ cached ─┼─── placed ────┼─── room ───┼── not allocated ──┤
                          length            end         slots              max_len

    The buffers grow with use, first by doubling, later by LARGEST_STEP. A long context takes memory only when filled.
    With fixed=True they have max_len slots from the start, and a single new token sees all of them through a mask, so
    shapes are the same in each step, as compiled code and CUDA graphs require. Rows of the batch may be filled to
    different lengths; length and end are those of the longest row.

    A cache is for inference: call the model under torch.no_grad or torch.inference_mode, otherwise each pass keeps the
    graph of all passes before it.
    """

    def __init__(  # many parameters, since a cache is made from sizes alone, without a model
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
        key_offset: Callable[[int], Tensor | None] = lambda layer: None,
        check_memory: MemoryCheck | None = None,
    ):
        self.sizes = n_layers, n_kv_heads, head_dim, dtype
        layer_cache = KINDS[checks.choice("kind of KV cache", kind, KINDS)]
        checks.integer("max_len of a KV cache", max_len)
        checks.integer("batch of a KV cache", batch)
        checks.boolean("fixed", fixed)
        slots = max_len if fixed else min(max_len, FIRST_SLOTS)
        shape = (batch, n_kv_heads, slots, head_dim)
        devices = [device] * n_layers if isinstance(device, str | torch.device) else list(device)  # one per layer
        slot = layer_cache.empty((*shape[:2], 1, head_dim), dtype, "meta")  # one slot of one layer
        self._slot_bytes = sum(buffer.nbytes for buffer in slot.buffers)
        self._check_memory = check_memory
        self._check_free(slots, slots, devices)
        self.layers = [layer_cache.empty(shape, dtype, devices[i]) for i in range(n_layers)]
        if kind == "int8":
            for i, layer in enumerate(self.layers):
                layer.key_offset = key_offset(i)
        self.batch, self.max_len, self.fixed, self.kind = batch, max_len, fixed, kind
        # Tokens and positions are created on the device of the last layer, where the logits are computed and sampled.
        self.device = self.layers[-1].buffers[0].device
        self._cached, self._placed = [0] * batch, [0] * batch  # length and end of each row
        self._parent: KVCache | None = None  # the cache whose memory this view shares

    @property
    def length(self) -> int:
        """Number of tokens whose keys were in every layer before the current forward pass."""
        return max(self._cached)

    @property
    def end(self) -> int:
        """The value of `length` after the current forward pass."""
        return max(self._placed)

    @property
    def visible(self) -> int:
        """Number of keys that attention reads in the current forward pass, masked ones included."""
        return self.slots if self.layers[0].visible is None else self.layers[0].visible

    @property
    def slots(self) -> int:
        """Number of positions that fit before the buffers grow."""
        return self.layers[-1].buffers[-1].shape[2]  # it is resized last: right even if memory ran out midway

    def check_sizes(self, *sizes: object) -> None:
        """Raise UsageError unless the cache has these numbers of layers and key/value heads, head_dim and dtype."""
        if sizes != self.sizes:
            found, needed = (" x ".join(map(str, numbers)) for numbers in (self.sizes, sizes))
            raise UsageError(f"the cache is for a model with {found}, this one needs {needed}; use model.new_cache()")

    def place(self, tokens: int, positions: Tensor | None = None, batch: int | None = None) -> Tensor:
        """Make room for T new tokens and return their positions. Raises UsageError if the cache has another `batch`.

        Tokens follow the cached ones unless `positions` (T,) or (B, T) is given. Given positions may overwrite cached
        tokens but must not leave a gap, since attention would read the empty slots. Raises ContextLengthError if the
        tokens do not fit.
        """
        if batch not in (None, self.batch):
            raise UsageError(f"the cache is for a batch of {self.batch}, not {batch}; use new_cache(batch={batch})")
        if positions is None:
            if min(self._cached) < self.length:
                raise UsageError(f"rows of the cache differ in length ({self._cached}); pass the positions")
            positions = torch.arange(self.length, self.length + tokens, device=self.device)  # (T,)
            placed = [self.length + tokens] * self.batch
        else:
            positions = positions.long()
            placed = self._ends(positions)
        self.reserve(max(placed))
        self._placed = placed
        for layer in self.layers:
            layer.visible = None if self.fixed and tokens == 1 else self.end
        return positions

    def commit(self) -> None:
        """Add the placed tokens to `length`: now they are in every layer."""
        self._cached = self._placed

    def trim(self, length: int) -> None:
        """Drop everything from position `length` on."""
        checks.integer("the length that a cache is trimmed to", length, 0, self.length)
        self._cached = self._placed = [min(row, length) for row in self._cached]

    def reserve(self, end: int) -> None:
        """Make room for the positions below `end`.

        Raises ContextLengthError if `end` is beyond max_len, MemoryLimitError if the memory is not free.
        """
        if self._parent is not None:
            self._parent.reserve(end)
            return
        if end > self.max_len:
            raise ContextLengthError(f"the KV cache has room for {self.max_len} tokens, not {end}; raise max_len")
        if end > self.slots:
            slots = min(max(end, self.slots + min(self.slots, LARGEST_STEP)), self.max_len)
            devices = [layer.buffers[0].device for layer in self.layers]
            self._check_free(slots - self.slots, slots, devices, self.slots)
            for layer in self.layers:  # one by one, so that only one layer exists twice at any time
                layer.resize(slots)

    def rows(self, first: int, last: int, length: int = 0) -> KVCache:
        """Rows `first` to `last` - 1 of the batch, as a cache that shares this one's memory and holds `length` tokens.

        The new cache stays valid when this one grows. If the new cache needs more slots, this one grows.
        """
        part = copy.copy(self)
        part.layers = [layer.rows(slice(first, last)) for layer in self.layers]
        part.batch, part.fixed, part._parent = last - first, True, self
        part._cached = part._placed = [length] * part.batch
        return part

    def _buffers(self) -> Iterator[Tensor]:
        return (buffer for layer in self.layers for buffer in layer.buffers)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""
        for buffer in self._buffers():
            buffer[target, :, :length] = buffer[source, :, :length]

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` tokens of two rows."""
        for buffer in self._buffers():
            buffer[[a, b], :, :length] = buffer[[b, a], :, :length]

    def clear_row(self, row: int) -> None:
        """Set a row to zero, since NaN must not stay in a masked slot (see LayerCache.empty)."""
        for buffer in self._buffers():
            buffer[row] = 0

    def _check_free(self, added: int, slots: int, devices: Sequence[torch.device | str], copied: int = 0) -> None:
        """Check the memory for `added` slots per layer and `copied` slots of the layer that exists twice meanwhile."""
        for device in dict.fromkeys(devices):
            if self._check_memory is not None:
                size = (devices.count(device) * added + copied) * self._slot_bytes
                self._check_memory(size, slots, torch.device(device))

    def _ends(self, positions: Tensor) -> list[int]:
        """The end of each row after new tokens at positions (T,) or (B, T)."""
        placed = []
        for end, row in zip(self._cached, positions.expand(self.batch, -1).tolist(), strict=True):
            for position in sorted(row):
                if position > end:
                    raise UsageError(f"position {position} leaves a gap: the next free one is {end}")
                end = max(end, position + 1)
            placed.append(end)
        return placed
