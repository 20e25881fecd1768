"""The Triton kernels that triton_kernels.py launches, in Triton's language.

This file imports Triton, which takes 0.15 s, so it is imported by the first launch. All sums are float32. Kernels read
the position from device memory, so that a CUDA graph can be replayed.

Letters: N rows of a weight (outputs), K columns (inputs), H heads, KV key/value heads, D head_dim, C dim.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment,misc,var-annotated"
# (Triton's language has no annotations, and its tuples change their length)
from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # triton_kernels.ready reports it
    triton = tl = None


def jit(function: Any) -> Any:
    """Compile a kernel. Without Triton, return the function, which is then never called."""
    return function if triton is None else triton.jit(function)


# ------------------------------------------------------------------------------------------------ rows of W times x
@jit
def _row(first, r, N, GATED: tl.constexpr):
    """The index in the weight of row r of a program. Beyond the last row it is the last row; that result is not stored.

    GATED: even r are rows of w_gate, the first half of the weight; odd r are the same rows of w_up, the second half.
    """
    row = tl.minimum(first // 2 + r // 2, N // 2 - 1) + r % 2 * (N // 2) if GATED else tl.minimum(first + r, N - 1)
    return row.to(tl.int64)


@jit
def _floats(
    x,
    norm,
    data,
    rows,
    K: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """For rows (BLOCK_N,) of a weight in floats: W (x * norm) and the sum of x^2."""
    y = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        part = tl.load(x + k, k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += part * part
            part *= tl.load(norm + k, k < K, other=0.0).to(tl.float32)
        w = tl.load(data + rows[:, None] * K + k[None, :], (k < K)[None, :], other=0.0)  # (BLOCK_N, BLOCK_K)
        y += w.to(tl.float32) * part[None, :]
    return tl.sum(y, 1), tl.sum(squares, 0)


# many parameters: a kernel receives pointers, sizes and constants one by one
@jit
def _int8(
    x, norm, data, scale, offset, first, N, K: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr,
    OFFSET: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_floats` for four rows in 8 bits: in each group, scale * (quants times inputs) + offset * (sum of the inputs).

    Every tile has the shape (groups, inputs per group), so all have one layout over the threads, and threads exchange
    only sums. ROW: the complete row has one scale, and its bytes are not padded to groups.

    All rows are loaded before any row is used. Without the barrier, ptxas saves registers by moving each load to its
    first use, so each thread would wait for every row in turn. With more than one stage, Triton copies the rows of the
    next steps to shared memory while this step is computed; a barrier would prevent that.
    """
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    PITCH: tl.constexpr = K if ROW else GROUPS * GROUP
    PARTS: tl.constexpr = BLOCK_K // GROUP  # groups per step
    y = tl.zeros((PARTS, 2, 2), tl.float32)  # row 2i + j at [:, i, j]
    squares = tl.zeros((PARTS,), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        g = start // GROUP + tl.arange(0, PARTS)
        k = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # (PARTS, GROUP)
        quants, scales, sums = (), (), ()
        for r in tl.static_range(4):
            row = _row(first, r, N, GATED)
            quants += (tl.load(data + row * PITCH + k, k < PITCH, other=0),)
            scales += (_scale(scale, offset, row, g, GROUPS, ROW, OFFSET, 128.0),)
        if STAGES == 1:
            tl.debug_barrier()
        part, squared = _inputs(x, norm, k, K, NORM)
        squares += squared
        total = tl.sum(part, 1)
        for r in tl.static_range(4):
            s, o = scales[r]
            sums += (s * tl.sum(quants[r].to(tl.float32) * part, 1) + o * total,)
        y += tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    return tl.reshape(tl.sum(y, 0), (4,)), tl.sum(squares, 0)


@jit
def _scale(scale, offset, row, g, GROUPS: tl.constexpr, ROW: tl.constexpr, OFFSET: tl.constexpr, MIDDLE: tl.constexpr):
    """The scales and offsets (groups,) of groups g of a row."""
    at = row + 0 * g if ROW else row * GROUPS + g
    s = tl.load(scale + at, g < GROUPS, other=0.0).to(tl.float32)
    o = tl.load(offset + at, g < GROUPS, other=0.0).to(tl.float32) if OFFSET else -MIDDLE * s
    return s, o


# many parameters: a kernel receives pointers, sizes and constants one by one
@jit
def _int4(
    x, norm, data, scale, offset, first, N, one, K: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Like `_int8`, but 4 bits, eight inputs per word; tiles have the shape (groups, words of a group).

    Unpacking nibbles would cost more than multiplying. Instead, shift a word so that two nibbles start at bits 15 and
    19; a nibble n or-ed with the bits of 1.0 is the float32 1 + n / 256 or 1 + n / 16. The ones contribute the sum of
    the inputs, which is subtracted last. `one` holds the bits of 1.0; a constant would cost one more instruction.
    """
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    WORDS: tl.constexpr = GROUP // 8
    PARTS: tl.constexpr = BLOCK_K // GROUP
    y = tl.zeros((PARTS, 2, 2), tl.float32)  # row 2i + j at [:, i, j]
    squares = tl.zeros((PARTS,), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        g = start // GROUP + tl.arange(0, PARTS)
        word = tl.arange(0, WORDS)[None, :]
        words, scales, inputs, sums = (), (), (), ()
        for r in tl.static_range(4):
            row = _row(first, r, N, GATED)
            at = row * (GROUPS * WORDS) + g[:, None] * WORDS + word
            words += (tl.load(data + at, (g < GROUPS)[:, None], other=0),)  # (PARTS, WORDS)
            scales += (_scale(scale, offset, row, g, GROUPS, False, OFFSET, 8.0),)
        if STAGES == 1:
            tl.debug_barrier()
        for i in tl.static_range(8):
            part, squared = _inputs(x, norm, g[:, None] * GROUP + i * WORDS + word, K, NORM)  # (PARTS, WORDS)
            inputs += (part,)
            squares += squared
        sum_even = tl.sum(inputs[0] + inputs[2] + inputs[4] + inputs[6], 1)  # (PARTS,)
        sum_odd = tl.sum(inputs[1] + inputs[3] + inputs[5] + inputs[7], 1)
        for r in tl.static_range(4):
            w = words[r]
            s, o = scales[r]
            even = _bits_to_float(w << 15, 0x78000, one) * inputs[0]
            even += _bits_to_float(w << 7, 0x78000, one) * inputs[2]
            even += _bits_to_float(w >> 1, 0x78000, one) * inputs[4]
            even += _bits_to_float(w >> 9, 0x78000, one) * inputs[6]
            odd = _bits_to_float(w << 15, 0x780000, one) * inputs[1]
            odd += _bits_to_float(w << 7, 0x780000, one) * inputs[3]
            odd += _bits_to_float(w >> 1, 0x780000, one) * inputs[5]
            odd += _bits_to_float(w >> 9, 0x780000, one) * inputs[7]
            dot = 256.0 * (tl.sum(even, 1) - sum_even) + 16.0 * (tl.sum(odd, 1) - sum_odd)
            sums += (s * dot + o * (sum_even + sum_odd),)
        y += tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    return tl.reshape(tl.sum(y, 0), (4,)), tl.sum(squares, 0)


@jit
def _inputs(x, norm, k, K: tl.constexpr, NORM: tl.constexpr):
    """x at k (groups, n), times the weights of the norm if NORM; the sums of x^2 (groups,) if NORM, otherwise zeros."""
    part = tl.load(x + k, k < K, other=0.0).to(tl.float32)
    squares = tl.zeros((part.shape[0],), tl.float32)
    if NORM:
        squares = tl.sum(part * part, 1)
        part *= tl.load(norm + k, k < K, other=0.0).to(tl.float32)
    return part, squares


@jit
def _bits_to_float(w, mask: tl.constexpr, one):
    """The masked bits of words, combined with the bits of 1.0, read as float32."""
    return ((w & mask) | one).to(tl.float32, bitcast=True)


# many parameters: a kernel receives pointers, sizes and constants one by one
@jit
def _product(
    x, norm, eps, data, scale, offset, bias, one, first, N, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ROW: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of W from `first` on, times x or x / rms(x) * norm, plus the bias: (BLOCK_N,) float32."""
    rows = _row(first, tl.arange(0, BLOCK_N), N, GATED)
    if BITS == 16:
        y, squares = _floats(x, norm, data, rows, K, NORM, BLOCK_N, BLOCK_K, STAGES)
    elif BITS == 8:
        y, squares = _int8(x, norm, data, scale, offset, first, N, K, GROUP, ROW, OFFSET, NORM, GATED, BLOCK_K, STAGES)
    else:
        y, squares = _int4(x, norm, data, scale, offset, first, N, one, K, GROUP, OFFSET, NORM, GATED, BLOCK_K, STAGES)
    if NORM:  # 1 / rms(x) is a scalar, so it can be applied to the sum
        y *= tl.rsqrt(squares / K + eps)
    if BIAS:
        y += tl.load(bias + rows).to(tl.float32)
    return y


# many parameters: a kernel receives pointers, sizes and constants one by one
@jit
def _linear(
    x, norm, eps, data, scale, offset, bias, one, residual, out, N, K: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, ROW: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    RESIDUAL: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    y = _product(
        x, norm, eps, data, scale, offset, bias, one, first, N, K, BITS, GROUP, ROW, OFFSET, BIAS, NORM, GATED,
        BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    if GATED:  # rows of w_gate and of w_up alternate in y, see `_row`
        gate, up = tl.split(tl.reshape(y, (BLOCK_N // 2, 2)))
        i = first // 2 + tl.arange(0, BLOCK_N // 2)
        tl.store(out + i, gate * tl.sigmoid(gate) * up, i < N // 2)
    else:
        n = first + tl.arange(0, BLOCK_N)
        if RESIDUAL:
            y += tl.load(residual + n, n < N, other=0.0).to(tl.float32)
        tl.store(out + n, y, n < N)


# many parameters: a kernel receives pointers, sizes and constants one by one
@jit
def _qkv(
    x, norm, eps, data, scale, offset, bias, one, cos, sin, position, q, k_cache, v_cache, slots, K: tl.constexpr,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    N: tl.constexpr = (H + 2 * KV) * D
    y = _product(
        x, norm, eps, data, scale, offset, bias, one, first, N, K, BITS, GROUP, ROW, OFFSET, BIAS, True, False,
        BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    at = tl.load(position)
    a, b = tl.split(tl.reshape(y, (BLOCK_N // 2, 2)))  # pairs of a head
    d = first % D + 2 * tl.arange(0, BLOCK_N // 2)
    c = tl.load(cos + at * (D // 2) + d // 2)
    s = tl.load(sin + at * (D // 2) + d // 2)
    rotated = first < (H + KV) * D  # values are not rotated
    c, s = tl.where(rotated, c, 1.0), tl.where(rotated, s, 0.0)
    head = first // D
    if head < H:
        to = q + head * D + d
        tl.store(to, a * c - b * s)
        tl.store(to + 1, a * s + b * c)
    elif head < H + KV:
        to = k_cache + ((head - H) * slots + at) * D + d
        tl.store(to, a * c - b * s)
        tl.store(to + 1, a * s + b * c)
    else:
        to = v_cache + ((head - H - KV) * slots + at) * D + d
        tl.store(to, a * c - b * s)
        tl.store(to + 1, a * s + b * c)


# ----------------------------------------------------------------------------------------- dequantizing a weight
# many parameters: a kernel receives pointers, sizes and constants one by one
@jit
def _unpack(
    data, scale, offset, out, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr,
    OFFSET: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store scale * quant + offset for BLOCK_K columns of one row."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * (BLOCK_K // GROUP) + tl.arange(0, BLOCK_K // GROUP)
    i = tl.arange(0, GROUP)
    k = g[:, None] * GROUP + i[None, :]  # (groups, inputs per group)
    if BITS == 4:
        WORDS: tl.constexpr = GROUP // 8
        at = g[:, None] * WORDS + (i % WORDS)[None, :]
        q = tl.load(data + row * (GROUPS * WORDS) + at, (g < GROUPS)[:, None], other=0)
        q = (q >> (i // WORDS * 4)[None, :]) & 15
    else:
        PITCH: tl.constexpr = K if ROW else GROUPS * GROUP
        q = tl.load(data + row * PITCH + k, k < K, other=0)
    at = row + 0 * g if ROW else row * GROUPS + g
    s = tl.load(scale + at, g < GROUPS, other=0.0).to(tl.float32)
    o = tl.load(offset + at, g < GROUPS, other=0.0).to(tl.float32) if OFFSET else -(2.0 ** (BITS - 1)) * s
    tl.store(out + row * K + k, q.to(tl.float32) * s[:, None] + o[:, None], k < K)


# ---------------------------------------------------------------------------------------- attention of one token
# many parameters: a kernel receives pointers, sizes and constants one by one
@jit
def _attend(
    q, k_cache, v_cache, position, part, part_max, part_sum, slots, root, D: tl.constexpr, WIDTH: tl.constexpr,
    G: tl.constexpr, QUERIES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """softmax(q k^T / root) v over one split of the keys, for the G queries of one key/value head."""
    head, split = tl.program_id(0), tl.program_id(1)
    length = tl.load(position).to(tl.int32) + 1
    width = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_S) * BLOCK_S  # keys per split
    first = split * width
    last = tl.minimum(first + width, length)
    g, d = tl.arange(0, QUERIES), tl.arange(0, WIDTH)  # both padded to sizes that tl.dot supports
    real = (g < G)[:, None] & (d < D)[None, :]
    queries = tl.load(q + (head * G + g)[:, None] * D + d[None, :], real, other=0.0)  # (QUERIES, WIDTH)
    keys, values = k_cache + head.to(tl.int64) * slots * D, v_cache + head.to(tl.int64) * slots * D
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    y = tl.zeros((QUERIES, WIDTH), tl.float32)
    for start in range(first, last, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        k = tl.load(keys + s[None, :] * D + d[:, None], (s < last)[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(values + s[:, None] * D + d[None, :], (s < last)[:, None] & (d < D)[None, :], other=0.0)
        scores = tl.dot(queries, k, input_precision="ieee") / root  # (QUERIES, BLOCK_S)
        scores = tl.where((s < last)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        old = tl.exp(top - higher)
        y = y * old[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * old + tl.sum(weights, 1)
        top = higher
    at = (head * G + g) * SPLITS + split  # (QUERIES,): the splits of a query are adjacent
    tl.store(part + at[:, None] * D + d[None, :], y, real)
    tl.store(part_max + at, top, g < G)
    tl.store(part_sum + at, total, g < G)


@jit
def _combine(part, part_max, part_sum, out, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Combine the splits of one query. An empty split has the maximum -inf and so the weight 0."""
    query = tl.program_id(0)
    split, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    top = tl.load(part_max + query * SPLITS + split)
    weights = tl.exp(top - tl.max(top, 0))
    total = tl.sum(weights * tl.load(part_sum + query * SPLITS + split), 0)
    y = tl.load(part + (query * SPLITS + split)[:, None] * D + d[None, :], (d < D)[None, :], other=0.0)
    tl.store(out + query * D + d, tl.sum(y * weights[:, None], 0) / total, d < D)


# ------------------------------------------------------------------------------------------------------- a prompt
@jit
def _rms_norm(x, norm, eps, out, C: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    y = tl.load(x + row * C + c, c < C, other=0.0).to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 0) / C + eps)
    tl.store(out + row * C + c, y * tl.load(norm + c, c < C, other=0.0).to(tl.float32), c < C)


# many parameters: a kernel receives pointers, sizes and constants one by one
@jit
def _rotate(
    qkv, cos, sin, first, q, k_cache, v_cache, slots, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = token + first
    d, i = tl.arange(0, 2 * HALF), tl.arange(0, HALF)  # entries and pairs of a head
    source = tl.load(qkv + token * ((H + 2 * KV) * D) + head * D + d, d < D, other=0.0)
    if head < H + KV:
        a, b = tl.split(tl.reshape(source.to(tl.float32), (HALF, 2)))
        c = tl.load(cos + at * (D // 2) + i, i < D // 2, other=0.0)
        s = tl.load(sin + at * (D // 2) + i, i < D // 2, other=0.0)
        y = tl.interleave(a * c - b * s, a * s + b * c)
        if head < H:
            tl.store(q + (token * H + head) * D + d, y, d < D)
        else:
            tl.store(k_cache + ((head - H) * slots + at) * D + d, y, d < D)
    else:
        tl.store(v_cache + ((head - H - KV) * slots + at) * D + d, source, d < D)


@jit
def _swiglu(x, out, F: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + token * (2 * F) + i, i < F, other=0.0).to(tl.float32)
    up = tl.load(x + token * (2 * F) + F + i, i < F, other=0.0).to(tl.float32)
    tl.store(out + token * F + i, gate * tl.sigmoid(gate) * up, i < F)
