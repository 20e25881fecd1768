"""Rotary position embedding (RoFormer, arXiv:2104.09864) in three forms.

The D entries of a head form D/2 pairs, points in the plane. Pair i at position m is rotated by the angle
m * inv_freq[i]. If q is rotated at position m and k at position n, their product depends on m - n only.

    complex  A pair is one complex number; a rotation is one multiplication by  cis(angle) = cos + i sin. Meta's form,
             and the definition here: the other forms are tested against it.
    real     The same arithmetic on real and imaginary parts; torch.compile has no complex numbers.
    half     Hugging Face's rotate_half: pair i is (x[i], x[i + D/2]) instead of (x[2i], x[2i + 1]). It needs the rows
             of wq and wk in another order (`to_half_layout`) and then gives the same scores.

Lesson 5 (docs/learn/05-from-formula-to-code.md) shows complex and half beside each other.

Angles and rotation are float32 in every model dtype: in bfloat16 a position near 131,072 would be off by up to 256.
Letters: B batch, T tokens, H heads, KV key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from . import checks
from .errors import ContextLengthError, UsageError
from .rope_scaling import BY_LENGTH, inverse_frequencies, kind_of

# How the rows of wq and wk are ordered: Meta's pairs (2i, 2i + 1), or Hugging Face's pairs (i, i + D/2).
Layout = Literal["interleaved", "half"]
# Suffixes of the names of tensors whose rows are in the order of the layout. These include q_norm and k_norm, which
# have one entry for each entry of a head.
ROTATED = (".wq.weight", ".wk.weight", ".wq.bias", ".wk.bias", ".q_norm.weight", ".k_norm.weight")


# ---------------------------------------------------------------------------------------- complex: the definition
def precompute_freqs_cis(
    dim: int,
    end: int,
    theta: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    *,
    max_seq_len: int | None = None,
) -> Tensor:
    """Compute the table of rotations: row m, column i is `cis(m * inv_freq[i])`.

    dim is D, end the number of positions; scaling and max_seq_len as in `inverse_frequencies`. Meta's function of this
    name computes inv_freq in float32, this one in float64: at 8,192 positions the tables differ by up to 5e-4.
    Returns (end, D/2) complex64.
    """
    checks.integer("end, the number of positions,", end, 0)
    inv_freq, attention_factor = inverse_frequencies(dim, theta, scaling, seq_len=end, max_seq_len=max_seq_len)
    return freqs_cis_at(torch.arange(end), inv_freq, attention_factor)


def freqs_cis_at(positions: Tensor, inv_freq: Tensor, attention_factor: float = 1.0) -> Tensor:
    """attention_factor * cis(m * inv_freq[i]) for each position m (..) and pair i: (.., D/2) complex64."""
    angles = positions.unsqueeze(-1).float() * inv_freq  # (.., 1) * (D/2,): (.., D/2) radians
    return torch.polar(torch.full_like(angles, attention_factor), angles)  # (.., D/2) complex64


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries (B, T, H, D) and keys (B, T, KV, D) by freqs_cis (T, D/2), or (B, T, D/2) if the rows differ.

    Meta's semantics: entries 2i and 2i + 1 form pair i. Shapes and dtypes are kept; the rotation is float32.
    Raises UsageError unless freqs_cis has exactly one row for each of the T tokens.
    """
    _check(xq, xk, freqs_cis, pair=2, complex_rows=True)
    cis = freqs_cis.unsqueeze(-2)  # (.., T, 1, D/2): the same rotation for every head
    q = torch.view_as_complex(xq.float().contiguous().unflatten(-1, (-1, 2)))  # (B, T, H, D/2) complex
    k = torch.view_as_complex(xk.float().contiguous().unflatten(-1, (-1, 2)))  # (B, T, KV, D/2) complex
    rotated_q = torch.view_as_real(q * cis).flatten(-2)  # (B, T, H, D)
    rotated_k = torch.view_as_real(k * cis).flatten(-2)  # (B, T, KV, D)
    return rotated_q.type_as(xq), rotated_k.type_as(xk)


# ------------------------------------------------------------------------------- real: the product, written out
def apply_rotary_emb_real(xq: Tensor, xk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_emb` without complex numbers; cos and sin are (T, D/2) or (B, T, D/2)."""
    _check(xq, xk, cos, sin, pair=2)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (.., T, 1, D/2)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (B, T, H, D/2) each
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).type_as(x)  # (B, T, H, D)

    return rotate(xq), rotate(xk)


# ---------------------------------------------------------------------------------- half: Hugging Face's pairing
def rotate_half(x: Tensor) -> Tensor:
    """Rotate every pair `(x[i], x[i + D/2])` by 90 degrees: `(a, b)` becomes `(-b, a)`. (.., D) -> (.., D)."""
    if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] % 2:
        raise UsageError(f"rotate_half needs a tensor (.., D) with an even D, got {checks.shown(x)}")
    a, b = x.chunk(2, dim=-1)  # (.., D/2) each
    return torch.cat((-b, a), dim=-1)  # (.., D)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate q and k as transformers' modeling_llama.py does:  x * cos + rotate_half(x) * sin.

    cos and sin are (T, D) or (B, T, D): the values for D/2 angles, twice. unsqueeze_dim is the axis of the heads:
    1 for q (B, H, T, D), as in Hugging Face's models, or 2 for q (B, T, H, D). The rotation is float32.
    """
    _check(q, k, cos, sin, tokens=3 - checks.integer("unsqueeze_dim", unsqueeze_dim, 1, 2))
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)  # (1, T, D)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)  # (B, 1, T, D), or (B, T, 1, D)
    rotated_q = q.float() * cos + rotate_half(q.float()) * sin
    rotated_k = k.float() * cos + rotate_half(k.float()) * sin
    return rotated_q.type_as(q), rotated_k.type_as(k)


def interleaved_to_half(x: Tensor) -> Tensor:
    """Reorder the entries of a head (.., D) from Meta's pairs to Hugging Face's: entry 2i + j goes to j * D/2 + i."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # (.., D/2, 2) -> (.., 2, D/2) -> (.., D)


def half_to_interleaved(x: Tensor) -> Tensor:
    """The inverse of `interleaved_to_half`."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)  # (.., 2, D/2) -> (.., D/2, 2) -> (.., D)


def to_half_layout(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of wq or wk (heads * D, C), or a bias (heads * D,): `interleaved_to_half` in each head."""
    pairs = weight.unflatten(0, (-1, head_dim // 2, 2))  # (heads, D/2, 2, C)
    return pairs.transpose(1, 2).flatten(0, 2)  # (heads, 2, D/2, C), then (heads * D, C)


def to_interleaved_layout(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of `to_half_layout`: from Hugging Face's pairs to Meta's."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))  # (heads, 2, D/2, C)
    return halves.transpose(1, 2).flatten(0, 2)  # (heads, D/2, 2, C), then (heads * D, C)


def to_layout(name: str, tensor: Tensor, head_dim: int, source: Layout, target: Layout) -> Tensor:
    """Reorder the rows of wq and wk from one RoPE layout to the other; return other tensors unchanged."""
    if source == target or not name.endswith(ROTATED):
        return tensor
    return to_half_layout(tensor, head_dim) if target == "half" else to_interleaved_layout(tensor, head_dim)


# ------------------------------------------------------------------------------------------- what the model uses
# The table's rows for some positions: (.., D/2) complex64, or cos and sin, (.., D/2) or (.., D), depending on the form.
FreqsCis = Tensor | tuple[Tensor, ...]


def _apply_half(xq: Tensor, xk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate in the half layout, then return the entries in the interleaved order.

    q and k are reordered alike, so the scores would be the same without the second step. That step makes the order of
    summation, and so the cached keys, the same as in the other forms, bit for bit. Qwen3 is an exception: its norm of q
    and k sums in the order of the layout.
    """
    q, k = apply_rotary_pos_emb(xq, xk, cos, sin, unsqueeze_dim=2)  # (B, T, H, D), (B, T, KV, D)
    return half_to_interleaved(q), half_to_interleaved(k)


class Form(NamedTuple):
    """A way to compute the rotation: a function, the layout of wq and wk, and a function from freqs_cis to a table."""

    apply: Callable[..., tuple[Tensor, Tensor]]
    layout: Layout
    make_table: Callable[[Tensor], tuple[Tensor, ...]] = lambda cis: (cis.real.contiguous(), cis.imag.contiguous())


FORMS: dict[str, Form] = {
    "complex": Form(apply_rotary_emb, "interleaved", lambda cis: (cis,)),
    "real": Form(apply_rotary_emb_real, "interleaved"),
    "half": Form(_apply_half, "half", lambda cis: tuple(torch.cat((x, x), -1) for x in (cis.real, cis.imag))),
}


class RotaryEmb(nn.Module):
    """`apply_rotary_emb` in one of FORMS, as a module: xq (B, T, H, D), xk (B, T, KV, D) -> the same shapes.

    In a layer without RoPE, `rotates` is False: q and k are not rotated, but they are returned in the interleaved order
    like rotated ones, so that cached keys are the same in every form.
    """

    def __init__(self, form: str = "complex", rotates: bool = True):
        super().__init__()
        self.rotate, self.layout, self.rotates = FORMS[form].apply, FORMS[form].layout, rotates

    def forward(self, xq: Tensor, xk: Tensor, freqs_cis: FreqsCis) -> tuple[Tensor, Tensor]:
        if not self.rotates:
            return (xq, xk) if self.layout == "interleaved" else (half_to_interleaved(xq), half_to_interleaved(xk))
        return self.rotate(xq, xk, *((freqs_cis,) if isinstance(freqs_cis, Tensor) else freqs_cis))


GROWING = Lock()  # no thread may replace a table by a shorter one


class Rope:
    """freqs_cis for positions 0, 1, 2, ... in one of FORMS, computed up to the largest position used so far.

    The table is no buffer of a module, because `model.to(torch.bfloat16)` must not change it. It grows with use, so
    that a context length read from a file never sets the size of an allocation.

    max_seq_len is the number of positions the model may use, trained_len the context it was trained for. The scalings
    in BY_LENGTH change all frequencies with the length of the text, so their rows are computed in each forward pass.
    Cached keys keep their rotation: rotating them again would not give the logits of a full pass, since deeper layers
    saw the old frequencies. LongRoPE changes frequencies once (`restarts`): then the complete text is computed again.
    """

    def __init__(
        self,
        form: str,
        dim: int,
        max_seq_len: int,
        theta: float,
        scaling: Mapping[str, Any] | None = None,
        trained_len: int | None = None,
    ):
        self.layout = FORMS[checks.choice("form of RoPE", form, FORMS)].layout
        self._arguments = (dim, theta, scaling)
        self._trained_len = max_seq_len if trained_len is None else trained_len
        self.by_length = kind_of(scaling) in BY_LENGTH
        self.form, self.max_seq_len = form, max_seq_len
        self.table = self._table(min(max_seq_len, 1024))

    def freqs_cis(self, positions: Tensor, seq_len: int) -> FreqsCis:
        """The table's rows for positions (T,) or (B, T) below `seq_len`, on the same device: (T, D/2) or (B, T, D/2).

        In the form half, the last axis is D. seq_len is the length that the frequencies are for. The caller passes it:
        reading the largest position from a GPU blocks. Raises ContextLengthError if seq_len is beyond max_seq_len.
        """
        if seq_len > self.max_seq_len:
            where = f"position {seq_len - 1} lies outside the {self.max_seq_len} positions that this model may use"
            raise ContextLengthError(f"{where}; shorten the input, or raise max_seq_len (--max-seq-len)")
        if self.by_length:
            inv_freq, factor = self.frequencies(seq_len)
            rows = FORMS[self.form].make_table(freqs_cis_at(positions, inv_freq.to(positions.device), factor))
        else:
            table = self.table  # a local reference, since another thread may replace it by one that is too short
            if seq_len > len(table[0]):
                table = self._table(min(max(seq_len, 2 * len(table[0])), self.max_seq_len))
            if table[0].device != positions.device:
                table = tuple(t.to(positions.device) for t in table)
            if table is not self.table and not positions.is_meta:  # a table on "meta" has no values to move back
                with GROWING:
                    if len(table[0]) >= len(self.table[0]):
                        self.table = table
            rows = tuple(t[positions] for t in table)  # each (T, D/2) or (B, T, D/2); half: D
        return rows[0] if len(rows) == 1 else rows

    def restarts(self, length: int) -> bool:
        """Whether the next token changes LongRoPE's frequencies, so that cached keys do not fit them."""
        changes = kind_of(self._arguments[2]) == "longrope"
        return changes and not torch.equal(self.frequencies(length)[0], self.frequencies(length + 1)[0])

    def mean_freqs_cis(self, device: torch.device) -> FreqsCis:
        """The mean of freqs_cis over the first 1,024 positions, (1, D/2): near 0 for pairs that turn quickly."""
        mean = freqs_cis_at(torch.arange(1024), *self.frequencies(1024)).mean(0, keepdim=True)  # (1, D/2)
        rows = tuple(row.to(device) for row in FORMS[self.form].make_table(mean))  # each (1, D/2); half: D
        return rows[0] if len(rows) == 1 else rows

    def _table(self, end: int) -> tuple[Tensor, ...]:
        with torch.device("cpu"):  # the model may be under construction on the meta device
            return FORMS[self.form].make_table(freqs_cis_at(torch.arange(end), *self.frequencies(end)))

    def frequencies(self, seq_len: int) -> tuple[Tensor, float]:
        """inv_freq (D/2,) and the factor of cos and sin for a sequence of this length."""
        return inverse_frequencies(*self._arguments, seq_len=seq_len, max_seq_len=self._trained_len)


def _check(q: Tensor, k: Tensor, *tables: Tensor, pair: int = 1, tokens: int = 1, complex_rows: bool = False) -> None:
    """Check the shapes. Broadcasting would apply one row, or the keys of one token, to all tokens without an error.

    A row in `tables` has one entry for every `pair` entries of a head. `tokens` is the axis of the tokens in q and k.
    """
    for x, is_complex in ((q, False), (k, False), *((rows, complex_rows) for rows in tables)):
        if not isinstance(x, Tensor) or x.is_complex() != is_complex or not (is_complex or x.is_floating_point()):
            raise UsageError(f"RoPE: expected {'complex' if is_complex else 'float'} numbers, got {checks.shown(x)}")
    if q.dim() != 4 or k.dim() != 4 or any(q.shape[axis] != k.shape[axis] for axis in (0, tokens, 3)):
        expected = "q (B, T, H, D) and k (B, T, KV, D)" if tokens == 1 else "q (B, H, T, D) and k (B, KV, T, D)"
        raise UsageError(f"RoPE: expected {expected}, got {tuple(q.shape)} and {tuple(k.shape)}")
    B, T, D = q.shape[0], q.shape[tokens], q.shape[3]
    for rows in tables:
        if rows.shape[-2:] != (T, D // pair) or rows.shape[:-2] not in ((), (1,), (B,)):
            raise UsageError(f"RoPE: expected a row of {D // pair} for each of {T} tokens, got {tuple(rows.shape)}")
