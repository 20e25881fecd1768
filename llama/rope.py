"""Rotary position embedding (RoFormer, arXiv:2104.09864) in the five forms in which the field writes it.

A head of D numbers is read as D/2 points in the plane. Pair i of a token at position m is turned by the angle
m * inv_freq[i]. Turning q at m and k at n makes their product depend on m - n alone, which is the point of it.

    complex      a pair is one complex number, turning is one multiplication by  cis(angle) = cos + i sin.
                 Meta's form and the definition here: the others are tested against it.
    real         the same arithmetic on the two real parts; torch.compile generates better code for it.
    half         Hugging Face's rotate_half: pair i is (x[i], x[i + D/2]) instead of (x[2i], x[2i + 1]). It needs the
                 rows of wq and wk in another order (`to_half_layout`) and then gives the same scores.
    elementwise  x * cos + quarter_turn(x) * sin: half's formula with Meta's pairs, as the paper's equation 34.
    matrix       R_m x with the block-diagonal rotation matrix: the formula of the proofs, D/2 times the work.

Angles and rotation are float32 whatever the model runs in: in bfloat16 positions near 131,072 are off by up to 256.
Letters: B batch, T tokens, H heads, KV key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor

from .errors import ContextLengthError, UsageError
from .rope_scaling import BY_LENGTH, inverse_frequencies, kind_of

# How the rows of wq and wk are ordered: Meta's pairs (2i, 2i + 1), or Hugging Face's pairs (i, i + D/2).
Layout = Literal["interleaved", "half"]


# ---------------------------------------------------------------------------------------- complex: the definition
def precompute_freqs_cis(
    dim: int,
    end: int,
    theta: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    *,
    max_seq_len: int | None = None,
) -> Tensor:
    """Row m, column i: cis(m * inv_freq[i]), as in Meta's llama/model.py.

    dim is D, end the number of positions; scaling and max_seq_len as in `inverse_frequencies`.
    Returns (end, D/2) complex64.
    """
    inv_freq, attention_factor = inverse_frequencies(dim, theta, scaling, seq_len=end, max_seq_len=max_seq_len)
    return freqs_cis_at(torch.arange(end), inv_freq, attention_factor)


def freqs_cis_at(positions: Tensor, inv_freq: Tensor, attention_factor: float = 1.0) -> Tensor:
    """cis(m * inv_freq[i]) for positions m (..) and pairs i (D/2,), times the factor: (.., D/2) complex64."""
    angles = positions.unsqueeze(-1).float() * inv_freq  # (.., D/2) radians
    return torch.polar(torch.full_like(angles, attention_factor), angles)  # (.., D/2) complex64


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Turn queries (B, T, H, D) and keys (B, T, KV, D) by freqs_cis (T, D/2), or (B, T, D/2) for positions per row.

    Meta's semantics: entries 2i and 2i + 1 form pair i. Shapes and dtypes are kept; the rotation is float32.
    Raises ValueError when freqs_cis has not exactly one row for each of the T tokens.
    """
    _check(xq, xk, freqs_cis, xq.shape[-1] // 2)
    turn = freqs_cis.unsqueeze(-2)  # (.., T, 1, D/2): the same turn for every head
    q = torch.view_as_complex(xq.float().unflatten(-1, (-1, 2)))  # (B, T, H, D/2) complex
    k = torch.view_as_complex(xk.float().unflatten(-1, (-1, 2)))  # (B, T, KV, D/2) complex
    return torch.view_as_real(q * turn).flatten(-2).type_as(xq), torch.view_as_real(k * turn).flatten(-2).type_as(xk)


# ------------------------------------------------------------------------------- real: the product, written out
def apply_rotary_emb_real(xq: Tensor, xk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_emb` without complex numbers; cos and sin are (T, D/2) or (B, T, D/2)."""
    _check(xq, xk, cos, xq.shape[-1] // 2)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (.., T, 1, D/2)

    def turn(x: Tensor) -> Tensor:
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # two of (B, T, H, D/2)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).type_as(x)  # (B, T, H, D)

    return turn(xq), turn(xk)


# ---------------------------------------------------------------------------------- half: Hugging Face's pairing
def rotate_half(x: Tensor) -> Tensor:
    """(.., D) -> (.., D): (a, b) becomes (-b, a), a quarter turn of every pair (x[i], x[i + D/2])."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Turn q and k as transformers' modeling_llama.py does:  x * cos + rotate_half(x) * sin.

    cos and sin are (T, D) or (B, T, D), the D/2 angles twice over. unsqueeze_dim is the axis of the heads:
    1 for q (B, H, T, D), Hugging Face's order, 2 for q (B, T, H, D). The rotation is float32.
    """
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)  # (1, T, D)
    by_token = (q, k) if unsqueeze_dim == 2 else (q.transpose(1, 2), k.transpose(1, 2))  # (B, T, H, D)
    _check(*by_token, cos, q.shape[-1])
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned_q = q.float() * cos + rotate_half(q.float()) * sin
    turned_k = k.float() * cos + rotate_half(k.float()) * sin
    return turned_q.type_as(q), turned_k.type_as(k)


def interleaved_to_half(x: Tensor) -> Tensor:
    """Reorder the entries of a head (.., D) from Meta's pairs to Hugging Face's: entry 2i + j goes to j * D/2 + i."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # (.., D/2, 2) -> (.., 2, D/2) -> (.., D)


def half_to_interleaved(x: Tensor) -> Tensor:
    """The inverse of `interleaved_to_half`."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)  # (.., 2, D/2) -> (.., D/2, 2) -> (.., D)


def to_half_layout(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of wq or wk (or the last axis of a bias) from Meta's pairs to Hugging Face's.

    weight is (heads * D, C) or (heads * D,); row 2i + j of a head becomes row j * D/2 + i.
    """
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_interleaved_layout(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of `to_half_layout`: from Hugging Face's pairs to Meta's."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


# -------------------------------------------------------------------- elementwise and matrix: the paper's notation
def quarter_turn(x: Tensor) -> Tensor:
    """(.., D) -> (.., D): every pair (x[2i], x[2i + 1]) = (a, b) becomes (-b, a)."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)  # two of (.., D/2)
    return torch.stack((-b, a), dim=-1).flatten(-2)  # (.., D)


def apply_rotary_emb_elementwise(xq: Tensor, xk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_emb` as RoFormer's equation 34:  x * cos + quarter_turn(x) * sin.

    cos and sin are (T, D) or (B, T, D), each of the D/2 angles twice running.
    """
    _check(xq, xk, cos, xq.shape[-1])
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (.., T, 1, D)
    turned_q = xq.float() * cos + quarter_turn(xq.float()) * sin
    turned_k = xk.float() * cos + quarter_turn(xk.float()) * sin
    return turned_q.type_as(xq), turned_k.type_as(xk)


def rotation_matrix(cos: Tensor, sin: Tensor) -> Tensor:
    """R_m of RoFormer's equation 15 from the cos and sin (.., D/2) of one position's angles: (.., D, D).

    Block-diagonal: pair i of a head is turned by the block [[cos, -sin], [sin, cos]] in rows and columns 2i, 2i + 1.
    """
    blocks = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)  # (.., D/2, 2, 2)
    same_pair = torch.eye(cos.shape[-1], dtype=cos.dtype, device=cos.device)  # (D/2, D/2)
    return torch.einsum("...iab,ij->...iajb", blocks, same_pair).flatten(-2).flatten(-3, -2)  # (.., D, D)


def apply_rotary_emb_matrix(xq: Tensor, xk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_emb` as R_m x, with one matrix a token; cos and sin are (T, D/2) or (B, T, D/2)."""
    _check(xq, xk, cos, xq.shape[-1] // 2)
    turn = rotation_matrix(cos, sin).unsqueeze(-3)  # (.., T, 1, D, D)

    def turned(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # it would make a matrix product bfloat16
            return (turn @ x.float().unsqueeze(-1)).squeeze(-1).type_as(x)  # (B, T, H, D)

    return turned(xq), turned(xk)


# ------------------------------------------------------------------------------------------ what the model holds
def _complex_table(freqs_cis: Tensor) -> tuple[Tensor, ...]:
    return (freqs_cis,)


def _real_table(freqs_cis: Tensor) -> tuple[Tensor, ...]:
    return freqs_cis.real.contiguous(), freqs_cis.imag.contiguous()


def _elementwise_table(freqs_cis: Tensor) -> tuple[Tensor, ...]:
    return freqs_cis.real.repeat_interleave(2, -1), freqs_cis.imag.repeat_interleave(2, -1)  # (S, D) each


def _half_table(freqs_cis: Tensor) -> tuple[Tensor, ...]:
    return torch.cat((freqs_cis.real,) * 2, -1), torch.cat((freqs_cis.imag,) * 2, -1)  # (S, D) each


def _apply_half(xq: Tensor, xk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn by halves, then hand the entries on in the interleaved order.

    q and k are reordered alike, so the scores would be the same without that; with it the products are also summed
    in the same order, and keys in the cache are the same, bit for bit, as in the other forms.
    """
    q, k = apply_rotary_pos_emb(xq, xk, cos, sin, unsqueeze_dim=2)
    return half_to_interleaved(q), half_to_interleaved(k)


# form -> (tables made from freqs_cis, the function that turns q and k by rows of them, layout of wq and wk)
FORMS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], Callable[..., tuple[Tensor, Tensor]], Layout]] = {
    "complex": (_complex_table, apply_rotary_emb, "interleaved"),
    "real": (_real_table, apply_rotary_emb_real, "interleaved"),
    "half": (_half_table, _apply_half, "half"),
    "elementwise": (_elementwise_table, apply_rotary_emb_elementwise, "interleaved"),
    "matrix": (_real_table, apply_rotary_emb_matrix, "interleaved"),
}


GROWING = Lock()  # no thread may replace a table by a shorter one


class Rope:
    """The turns of positions 0, 1, 2, ... in one of FORMS, computed up to the furthest position seen so far.

    A plain object and no buffer of the module: `model.to(torch.bfloat16)` must not touch the table. It grows with
    use, so that a context length read from a file never sizes an allocation.

    max_seq_len is how far this model may go, trained_len how far it was trained: most scalings don't care, but those
    in BY_LENGTH change all frequencies with the length, so for them the rows are computed afresh each time. Keys in a
    cache keep the turn they entered with. Turning them again would not give the logits of a full pass at the new
    length either: what deeper layers hold of the earlier tokens was computed under the old frequencies.
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
        if form not in FORMS:
            raise UsageError(f"unknown form of RoPE {form!r}; known: {', '.join(FORMS)}")
        self._make_table, self.apply, self.layout = FORMS[form]
        self._arguments = (dim, theta, scaling)
        self._trained_len = max_seq_len if trained_len is None else trained_len
        self.by_length = kind_of(scaling) in BY_LENGTH
        self.form, self.max_seq_len = form, max_seq_len
        self.table = self._table(min(max_seq_len, 1024))

    def rows(self, positions: Tensor, end: int) -> tuple[Tensor, ...]:
        """The table's rows for positions (T,) or (B, T), all below `end`, on their device.

        `end` is passed because asking a GPU for the largest position would wait for it. Raises ContextLengthError
        beyond max_seq_len.
        """
        if end > self.max_seq_len:
            raise ContextLengthError(
                f"position {end - 1} lies outside the {self.max_seq_len} positions the model was made for;"
                f" shorten the input, or raise max_seq_len (--max-seq-len)"
            )
        if self.by_length:
            inv_freq, factor = self.frequencies(end)
            return self._make_table(freqs_cis_at(positions, inv_freq.to(positions.device), factor))
        table = self.table  # held here, since another thread may replace it by a shorter one than this needs
        if end > len(table[0]):
            table = self._table(min(max(end, 2 * len(table[0])), self.max_seq_len))
        if table[0].device != positions.device:
            table = tuple(t.to(positions.device) for t in table)
        if table is not self.table:
            with GROWING:
                if len(table[0]) >= len(self.table[0]):
                    self.table = table
        return tuple(t[positions] for t in table)

    @property
    def end(self) -> int:
        """Positions the table has."""
        return len(self.table[0])

    def _table(self, end: int) -> tuple[Tensor, ...]:
        with torch.device("cpu"):  # the model around it may be under construction on the meta device
            return self._make_table(freqs_cis_at(torch.arange(end), *self.frequencies(end)))

    def frequencies(self, seq_len: int) -> tuple[Tensor, float]:
        """inv_freq (D/2,) and the factor for cos and sin that a sequence of this length is turned by."""
        return inverse_frequencies(*self._arguments, seq_len=seq_len, max_seq_len=self._trained_len)


def _check(q: Tensor, k: Tensor, rows: Tensor, width: int) -> None:
    """Broadcasting would stretch one row, or one token's keys, over all tokens in silence; refuse instead."""
    if rows.shape[-2:] != (q.shape[1], width):
        raise ValueError(
            f"RoPE: expected one row of {width} for each of {q.shape[1]} tokens, got {tuple(rows.shape)};"
            f" take the rows of the tokens' positions out of the table first"
        )
    if (q.shape[:2], q.shape[3]) != (k.shape[:2], k.shape[3]):
        raise ValueError(
            f"RoPE: q and k must be of the same batch, tokens and width, got {tuple(q.shape)}, {tuple(k.shape)}"
        )
