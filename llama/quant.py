"""Linear layers whose weight is not one number in bfloat16 for each entry; they replace nn.Linear from outside."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .checkpoint.blocks import GROUP, Blocks4

# Up to this many rows torch's 4-bit kernel, which works row by row, beats a bfloat16 product that reads more.
FEW_ROWS = 4


class Int4Linear(nn.Module):
    """A linear layer with 4-bit weights in groups of 32, as a GGUF file holds them: weight = scale * quant + offset.

    Decoding one token does little but read weights, and 4 bits with their scales are 0.625 bytes where bfloat16 is 2.
    For many rows the arithmetic counts, so those go through `wide`, the same weights in bfloat16.
    Scale and offset are rounded to bfloat16, about as large an error as rounding every weight to it.
    """

    def __init__(self, blocks: Blocks4, wide: nn.Module):
        super().__init__()
        self.out_features, self.in_features = blocks.quants.shape
        self.wide = wide
        quants = torch.from_numpy(blocks.quants).int()
        # Not buffers: a cast of the model must not touch packed bits.
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quants, 1)
        scale, offset = torch.from_numpy(blocks.scale), torch.from_numpy(blocks.offset)  # (out, in / 32)
        # The kernel computes (quant - 8) * scale + zero.
        self._scales = torch.stack((scale, offset + 8 * scale), -1).transpose(0, 1).contiguous().bfloat16()

    @property
    def weight(self) -> Tensor:
        """The weight in bfloat16, (out, in)."""
        plain: Tensor = self.wide.weight  # type: ignore[assignment]
        return plain

    def forward(self, x: Tensor) -> Tensor:  # (.., in) -> (.., out)
        if x.numel() > FEW_ROWS * self.in_features:
            return self.wide(x)
        rows = x.reshape(-1, self.in_features).contiguous()  # the kernel asks for it
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._packed, GROUP, self._scales)
        return y.view(*x.shape[:-1], self.out_features)


def runs_int4(out_features: int, in_features: int) -> bool:
    """Whether torch has a fast 4-bit kernel for this shape on this CPU."""
    return out_features % 16 == 0 and in_features % GROUP == 0 and torch.cpu._is_avx512_supported()
