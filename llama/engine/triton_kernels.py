"""Triton kernels for CUDA: the operations of a decoding step and of a prompt that cuBLAS and flash attention lack.

A decoding step reads every weight once and computes little, so it has few kernels, and each includes the small
operations around its product:

    linear      W x or W (x / rms(x) * norm), W in 16, 8 or 4 bits; then optionally adds a residual or applies SwiGLU
    qkv         the same product for wq, wk and wv at once, then RoPE; keys and values are written into the cache
    attend      attention of one token: the keys of all heads are processed in parallel splits, which are then combined

A prompt uses rms_norm, rotate (RoPE and the cache) and swiglu between its matrix products, and unpack
to dequantize quantized weights.
This file has their callers; triton_code.py has the kernels, and the first launch imports it together with Triton.

Letters: N rows of a weight (outputs), K columns (inputs), T tokens, H heads, KV key/value heads, D head_dim, C dim.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor


@functools.cache
def ready() -> bool:
    """Whether the kernels can be called on CUDA tensors. PyTorch's CUDA builds install Triton."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def kernel(name: str) -> Any:
    """A kernel of triton_code.py. The first call imports Triton, which takes 0.15 s and is not needed on a CPU."""
    from . import triton_code

    return getattr(triton_code, name)


class Weight(NamedTuple):
    """A weight (N, K): floats, or quantized in groups as weight = scale * quant + offset.

    data    16 bits: (N, K) floats. 8 bits: (N, K) uint8, K padded to full groups if there are several. 4 bits:
            (N, groups * group / 8) int32; word w of a group holds its inputs w, w + group / 8, w + 2 group / 8, ...
            from bit 0 up
    scale   (N, groups); None for floats
    offset  (N, groups); None: floats, or implied as -scale * 2^(bits - 1)
    bias    (N,), or None
    bits    4, 8, or 16 for floats of any dtype
    group   inputs that share a scale: a power of two, or at least K
    """

    data: Tensor
    scale: Tensor | None
    offset: Tensor | None
    bias: Tensor | None
    rows: int
    columns: int
    bits: int
    group: int


# ------------------------------------------------------------------------------------------------------ the calls
ONE = 0x3F800000  # the bits of 1.0


class BlockSizes(NamedTuple):
    """The part of a weight that a program processes at a time, in rows and columns, and its number of warps.

    stages  stages of the software pipeline: above 1, the next parts are copied to shared memory in advance
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1


def pick_block_sizes(weight: Weight) -> BlockSizes:
    """The sizes for `linear` and `qkv`.

    Each thread reads 16 bytes of several rows at once, and each multiprocessor runs several programs. By an estimate
    from their registers, these have about 48 KB of a weight in flight per multiprocessor. That is about twice what its
    share of the bandwidth requires at a latency of 800 ns, so one stage is enough.
    """
    size = {16: float(weight.data.element_size()), 8: 1.0, 4: 0.5}[weight.bits]
    columns = min(power_of_2(weight.columns), int(2048 / size))
    few = weight.bits == 16 and weight.rows <= 4096  # quantized weights are processed four rows at a time
    return BlockSizes(2 if few else 4, max(columns, _tile(weight)), 4 if columns * size >= 2048 else 2)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def supports(weight: Weight) -> bool:
    """Whether `linear` can multiply by a weight here.

    Float weights must be contiguous. Quantized weights must be accepted by `unpacks`, and their groups must have at
    least 32 columns unless each row has one scale.
    """
    parts = [weight.data, *([] if weight.bias is None else [weight.bias])]
    floats = weight.bits == 16 and ready() and all(part.is_contiguous() for part in parts)
    return floats or (unpacks(weight) and (weight.group >= 32 or _one_scale(weight)))


def unpacks(weight: Weight) -> bool:
    """Whether `unpack` can dequantize a weight here.

    It must be contiguous. The size of its groups must be a power of two, at least 8; or its rows have 8 bits and one
    scale each.
    """
    group = weight.group >= 8 and weight.group == power_of_2(weight.group)
    parts = [part for part in (weight.data, weight.scale, weight.offset, weight.bias) if part is not None]
    return ready() and weight.bits != 16 and (group or _one_scale(weight)) and all(p.is_contiguous() for p in parts)


def _tile(weight: Weight) -> int:
    """Number of inputs summed at once: the group, or 32 without."""
    return 32 if weight.bits == 16 or _one_scale(weight) else weight.group


def _one_scale(weight: Weight) -> bool:
    """Whether a weight in 8 bits has one scale per row, and no padding."""
    return weight.bits == 8 and weight.group >= weight.columns == weight.data.shape[1]


def _common(weight: Weight, blocks: BlockSizes) -> dict[str, Any]:
    return {
        "K": weight.columns,
        "BITS": weight.bits,
        "GROUP": _tile(weight),
        "ROW": _one_scale(weight),
        "OFFSET": weight.offset is not None,
        "BIAS": weight.bias is not None,
        "BLOCK_N": blocks.rows,
        "BLOCK_K": blocks.columns,
        "STAGES": blocks.stages,
        "num_warps": blocks.warps,
    }


def launch(name: str, grid: tuple[int, ...], first: Tensor, *args: Any, **constants: Any) -> None:
    """Launch a kernel of triton_code.py on the device of its first argument. Triton itself uses the current device."""
    constants = {"enable_fp_fusion": True, **constants}  # fused multiply-add, which Triton 3.10 turns off by default
    with torch.cuda.device_of(first):  # does nothing for a tensor on a CPU
        kernel(name)[grid](first, *args, **constants)


def linear(
    weight: Weight,
    x: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    blocks: BlockSizes | None = None,
) -> Tensor:
    """Write W x to out (N,), in out's dtype, and return it; x is (K,). All tensors are contiguous.

    norm      (K,) weights of an RMSNorm that is applied to x first
    residual  (N,) is added; may be `out` itself
    gated     apply SwiGLU to the halves of the rows: out (N / 2,) = silu(W[i] x) * W[N / 2 + i] x
    """
    blocks = blocks or pick_block_sizes(weight)
    launch(
        "_linear",
        (-(-weight.rows // blocks.rows),),
        x,
        norm,
        eps,
        weight.data,
        weight.scale,
        weight.offset,
        weight.bias,
        ONE,
        residual,
        out,
        weight.rows,
        NORM=norm is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        **_common(weight, blocks),
    )
    return out


def qkv(
    weight: Weight,
    x: Tensor,
    norm: Tensor,
    eps: float,
    freqs_cis: tuple[Tensor, Tensor],
    position: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks: BlockSizes | None = None,
) -> None:
    """Write q (H, D) of a token with hidden state x (C,), and its key and value into the caches (KV, slots, D).

    weight     wq, wk and wv, one below the other
    freqs_cis  the tables of cos and sin, (positions, D / 2) each
    position   (1,) int64, on the device
    """
    blocks = blocks or pick_block_sizes(weight)
    (heads, dim), (kv, slots, _) = q.shape, k_cache.shape
    launch(
        "_qkv",
        (weight.rows // blocks.rows,),
        x,
        norm,
        eps,
        weight.data,
        weight.scale,
        weight.offset,
        weight.bias,
        ONE,
        *freqs_cis,
        position,
        q,
        k_cache,
        v_cache,
        slots,
        H=heads,
        KV=kv,
        D=dim,
        **_common(weight, blocks),
    )


def unpack(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Dequantize a weight: (N, K), computed in float32 and rounded to `dtype`."""
    out = torch.empty(weight.rows, weight.columns, dtype=dtype, device=weight.data.device)
    block = max(_tile(weight), min(2048, power_of_2(weight.columns)))
    launch(
        "_unpack",
        (weight.rows, -(-weight.columns // block)),
        weight.data,
        weight.scale,
        weight.offset,
        out,
        K=weight.columns,
        BITS=weight.bits,
        GROUP=_tile(weight),
        ROW=_one_scale(weight),
        OFFSET=weight.offset is not None,
        BLOCK_K=block,
        num_warps=8,
        enable_fp_fusion=False,  # round the product and the sum separately, as a CPU does
    )
    return out


class Splits(NamedTuple):
    """Buffers for the result of `attend` in each split of the keys, float32.

    y      (H, splits, D): the weighted sum of the values
    top    (H, splits): the largest score
    total  (H, splits): the sum of the weights
    """

    y: Tensor
    top: Tensor
    total: Tensor

    @classmethod
    def empty(cls, heads: int, kv: int, dim: int, device: torch.device) -> Splits:
        """Buffers for enough splits to keep all multiprocessors busy, whatever the number of heads."""
        count = min(64, max(1, power_of_2(256 // kv + 1) // 2))
        sizes = (heads, count, dim), (heads, count), (heads, count)
        return cls(*(torch.empty(size, dtype=torch.float32, device=device) for size in sizes))


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor, splits: Splits, out: Tensor) -> Tensor:
    """Write the attention of one token's q (H, D) to out (H, D), and return it.

    The token sees the keys and values (KV, slots, D) up to its own position.
    """
    (heads, dim), (kv, slots, _) = q.shape, k_cache.shape
    group, count = heads // kv, splits.y.shape[1]
    width = max(16, power_of_2(dim))
    launch(
        "_attend",
        (kv, count),
        q,
        k_cache,
        v_cache,
        position,
        *splits,
        slots,
        dim**0.5,
        D=dim,
        WIDTH=width,
        G=group,
        QUERIES=max(16, power_of_2(group)),
        SPLITS=count,
        BLOCK_S=32 if q.dtype == torch.float32 else 64,  # keys per step
        num_warps=4,
    )
    launch("_combine", (heads,), *splits, out, D=dim, WIDTH=width, SPLITS=count, num_warps=4)
    return out


def rms_norm(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """RMSNorm of each row: (T, C) -> (T, C)."""
    out = torch.empty_like(x)
    block = power_of_2(x.shape[1])
    warps = min(32, max(4, block // 256))  # 8 entries per thread; with 16 in float32, ptxas spills one
    launch("_rms_norm", (len(x),), x, norm, eps, out, C=x.shape[1], BLOCK=block, num_warps=warps)
    return out


def rotate(
    qkv: Tensor, freqs_cis: tuple[Tensor, Tensor], first: int, k_cache: Tensor, v_cache: Tensor, heads: int
) -> Tensor:
    """Apply RoPE to T tokens from position `first` on: qkv (T, (H + 2 KV) D) -> q (T, H, D).

    Keys and values are written into the caches (KV, slots, D). freqs_cis as in `qkv`.
    """
    kv, slots, dim = k_cache.shape
    q = qkv.new_empty(len(qkv), heads, dim)
    launch(
        "_rotate",
        (len(qkv), heads + 2 * kv),
        qkv,
        *freqs_cis,
        first,
        q,
        k_cache,
        v_cache,
        slots,
        H=heads,
        KV=kv,
        D=dim,
        HALF=power_of_2(dim // 2),
        num_warps=1,
    )
    return q


def swiglu(x: Tensor) -> Tensor:
    """silu(x[i]) * x[F + i] in each row: (T, 2 F) -> (T, F)."""
    tokens, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(tokens, width)
    launch("_swiglu", (tokens, -(-width // 1024)), x, out, F=width, BLOCK=1024, num_warps=4)
    return out
