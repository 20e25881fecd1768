"""Keys and values of the tokens already seen, so that each token is computed once.

Letters: B batch, T new tokens, S cached tokens, KV key/value heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ContextLengthError

FIRST_SLOTS = 1024  # tokens a cache has room for before it first grows


class KVCache:
    """One buffer (B, KV, slots, D) for the keys and one for the values of each layer. Slot s holds position s.

    The buffers grow with use, by doubling, up to max_len; so a long context costs memory only when it is filled.
    Whoever generates makes it and passes it in; the model keeps no state. It is used like this, for
    2 cached tokens and 3 new ones:

        place(3)             positions [2, 3, 4]; from now on the keys reach to slot 4
        update(0, k, v, ..)  writes slots 2, 3, 4 of layer 0, returns slots 0 to 4; so for each layer
        commit()             length is 5. A forward pass that broke off in the middle has changed no length
        trim(4)              forgets the last token
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
        device: torch.device | str = "cpu",
    ):
        shape = (n_layers, batch, n_kv_heads, min(max_len, FIRST_SLOTS), head_dim)
        # Zeros, not empty: a masked slot has weight 0, and 0 times a stray NaN would still be NaN.
        self.k = torch.zeros(shape, dtype=dtype, device=device)  # (layer, B, KV, slots, D)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.max_len = max_len
        self.length = 0  # tokens whose keys are complete in every layer
        self.end = 0  # tokens whose keys are complete once the current forward pass is through
        self._filled = [0] * batch  # the same for each row of the batch, since rows may differ
        self._placed = [0] * batch

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
            positions = torch.arange(self.length, end, device=self.k.device)  # (T,)
            self._placed = [end] * self.k.shape[1]
        else:
            positions = positions.long()
            end = self._place_at(positions)
        if end > self.max_len:
            raise ContextLengthError(f"the KV cache holds {self.max_len} tokens, and these would reach {end}")
        if end > self.k.shape[3]:
            self._grow(min(max(end, 2 * self.k.shape[3]), self.max_len))
        self.end = end
        return positions

    def update(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (B, KV, T, D) at `positions` of a layer; return all its keys and values (B, KV, S, D)."""
        keys, values = self.k[layer], self.v[layer]  # (B, KV, slots, D)
        if positions.dim() == 1:
            keys.index_copy_(2, positions, k)
            values.index_copy_(2, positions, v)
        else:  # each row of the batch at its own positions
            slots = positions[:, None, :, None].expand_as(k)  # (B, KV, T, D)
            keys.scatter_(2, slots, k)
            values.scatter_(2, slots, v)
        return keys[:, :, : self.end], values[:, :, : self.end]

    def commit(self) -> None:
        """The placed tokens are in every layer."""
        self.length, self._filled = self.end, self._placed

    def trim(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"the cache holds {self.length} tokens and can't be trimmed to {length}")
        self.length = self.end = length
        self._filled = [min(row, length) for row in self._filled]

    def _place_at(self, positions: Tensor) -> int:
        rows = positions.expand(self.k.shape[1], -1).tolist()  # (B, T)
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

    def _grow(self, slots: int) -> None:
        for name in ("k", "v"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:3], slots, old.shape[4])
            new[:, :, :, : self.length] = old[:, :, :, : self.length]
            setattr(self, name, new)
