"""Note 000: position encoding, the proof of RoPE, and the worked example with Meta's code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama import rope
from llama.attention import causal_mask, reference_weights
from llama.config import ModelConfig
from llama.model import Attention
from llama.rope_scaling import inverse_frequencies
from llama.study import forms
from llama.study.encodings import Encoding, Rotary, attend, scores
from llama.study.measures import turn
from llama.study.report import Check, above, below, equal, holds

from .base import (
    Array,
    Erratum,
    Table,
    fit_residual,
    frequencies,
    library_rotation,
    library_table,
    name_of,
    outcome,
    rotated,
    rotation,
    sinusoid_table,
    softmax,
    worst,
)


def _random(seed: int, *shapes: tuple[int, ...]) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def _weights(seed: int, *shapes: tuple[int, ...]) -> list[Array]:
    """Random matrices, scaled so that a product has the size of its input."""
    return [array / array.shape[-1] ** 0.5 for array in _random(seed, *shapes)]


def _tensors(arrays: Sequence[Array]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


# ------------------------------------------------------------------------------------------------------------- E01
def _e01_printed(count: int, dim: int) -> Array:
    table = np.empty((count, dim))
    for i in range(count):
        for t in range(dim // 2):
            table[i, 2 * t] = math.sin(i / 10000 ** (2 * i / dim))
            table[i, 2 * t + 1] = math.cos(i / 10000 ** (2 * i / dim))
    return table


def _e01(wrong: Table, right: Table) -> Sequence[Check]:
    printed, table = wrong(256, 64), right(256, 64)
    return (
        equal("E01", "distinct sine columns out of 32, as printed", _distinct(printed[:, 0::2].T), 1),
        equal("E01", "spread of rows 100 to 255, as printed", float(np.ptp(printed[100:], 0).max()), 3.16e-11, 1e-13),
        equal("E01", "residual of the best linear map i to i + 1, as printed", fit_residual(printed, 1), 0.680, 1e-3),
        below("E01", "residual of the best linear map i to i + 1, right form", fit_residual(table, 1), 1e-11),
        below("E01", "right form minus numpy", worst(table, sinusoid_table(256, 64)), 1e-12),
    )


def _distinct(rows: Array) -> int:
    return len(np.unique(rows, axis=0))


E01 = Erratum(
    id="E01",
    kind="A",
    where="note 000, lines 64 and 66, the two formulas of the sinusoidal encoding",
    matter="the exponent uses the position i instead of the pair index t",
    printed="p[i, 2t] = sin(i / 10000^(2i/d)), p[i, 2t+1] = cos(i / 10000^(2i/d)), where i is the position",
    right="the exponent is 2t/d, where t is the pair index; i is only the position",
    why="The right-hand side does not depend on t, so all pairs of a row are equal. From position 100 on, all rows are"
    " nearly equal as well. Such a table contains no frequencies, and no linear map takes one position to the next.",
    wrong_form=_e01_printed,
    right_form=library_table,
    prove=_e01,
)


# ------------------------------------------------------------------------------------------------------------- E02
Pairs = Callable[[int], list[tuple[int, int]]]  # width -> (pair t, index of its sine from 0)


def _e02_printed(dim: int) -> list[tuple[int, int]]:
    entries = set(range(1, dim + 1))
    return [(t, 2 * t - 1) for t in range(dim + 1) if {2 * t, 2 * t + 1} <= entries]  # entry 1 has index 0


def _e02_right(dim: int) -> list[tuple[int, int]]:
    return [(t, 2 * t) for t in range(dim // 2)]


def _e02(wrong: Pairs, right: Pairs) -> Sequence[Check]:
    printed, filled = _e02_fill(wrong, 8), _e02_fill(right, 8)
    empty = ", ".join(str(index + 1) for index in range(8) if np.isnan(printed[index]))
    return (
        equal("E02", "pairs t that fit, as printed", ", ".join(str(t) for t, _ in wrong(8)), "1, 2, 3"),
        equal("E02", "entries 1 to 8 that no pair fills, as printed", empty, "1, 8"),
        below("E02", "row filled by the right pairs minus the library", worst(filled, library_table(4, 8)[3]), 1e-12),
    )


def _e02_fill(form: Pairs, dim: int) -> Array:
    """Row 3 of the table, with only the form's pairs filled in."""
    row = np.full(dim, np.nan)
    for t, index in form(dim):
        angle = 3 * 10000 ** (-2 * t / dim)
        row[index : index + 2] = math.sin(angle), math.cos(angle)
    return row


E02 = Erratum(
    id="E02",
    kind="A",
    where="note 000, line 68, the index range below the sinusoidal formulas",
    matter="with 2t and 2t+1 in 1..d, the first and the last entry are never filled",
    printed="{2t, 2t+1} is a subset of {1, 2, ..., d}",
    right="{2t, 2t+1} is a subset of {0, ..., d-1}, with t = 0 .. d/2 - 1",
    why="At d = 8 only t = 1, 2, 3 fit, so entries 1 and 8 are never filled and the fastest pair is missing. Counted"
    " from 0, the pairs fill every entry.",
    wrong_form=_e02_printed,
    right_form=_e02_right,
    prove=_e02,
)


# ------------------------------------------------------------------------------------------------------------- E03
Angles = Callable[[int], Array]


def _e03_printed(dim: int) -> Array:
    return np.array([10000.0 ** (-2 * (i - 1) / dim) for i in range(1, dim + 1)])


def _e03_right(dim: int) -> Array:
    return inverse_frequencies(dim)[0].double().numpy()


def _e03(wrong: Angles, right: Angles) -> Sequence[Check]:
    return (
        equal("E03", "number of angles for the 4 pairs of d = 8, as printed", len(wrong(8)), 8),
        equal("E03", "smallest of these angles", float(wrong(8).min()), 1e-7, 1e-12),
        equal("000-33 E03", "number of angles for the 4 pairs of d = 8, right form", len(right(8)), 4),
        below("E03", "right form minus numpy", worst(right(8), frequencies(8)), 1e-8),
    )


E03 = Erratum(
    id="E03",
    kind="A",
    where="note 000, line 196, the set of angles Theta",
    matter="Theta has d angles instead of d/2, and its index is i although the formula uses t",
    printed="Theta = {theta_t = 10000^(-2(t-1)/d), i in {1, ..., d}}",
    right="t in {1, ..., d/2}: one angle per pair",
    why="A head with d entries has d/2 pairs. As printed there are twice as many angles, and at d = 8 the smallest is"
    " 1e-7, although the slowest pair rotates by 1e-3 per position.",
    wrong_form=_e03_printed,
    right_form=_e03_right,
    prove=_e03,
)


# ------------------------------------------------------------------------------------------------------------- E04
def _e04(wrong: Callable[[int, int], int], right: Callable[[int, int], int]) -> Sequence[Check]:
    return (
        equal("E04", "shape of xk, as the sentence says", _e04_shape(wrong(2, 2)), "(2, 5, 2, 8)"),
        equal("000-40 E04", "shape of xk, right form and in the note", _e04_shape(right(2, 2)), "(2, 5, 1, 8)"),
        equal("E04", "query heads that read key head 0, right form", _e04_readers(right(2, 2)), 2),
    )


def _e04_layer(n_kv_heads: int) -> Attention:
    config = ModelConfig(
        dim=16,
        n_layers=1,
        n_heads=2,
        n_kv_heads=n_kv_heads,
        head_dim=8,
        hidden_dim=16,
        vocab_size=8,
        norm_eps=1e-5,
        max_seq_len=8,
    )
    with torch.device("meta"):
        return Attention(config, 0, "complex", "sdpa")


def _e04_shape(n_kv_heads: int) -> str:
    wk = torch.zeros(_e04_layer(n_kv_heads).wk.weight.shape)  # (KV * D, C)
    return str(tuple((torch.zeros(2, 5, 16) @ wk.T).unflatten(-1, (-1, 8)).shape))


def _e04_readers(n_kv_heads: int) -> int:
    """Number of query heads whose weights change when key head 0 changes."""
    q, k = _tensors(_random(4, (1, 2, 5, 8), (1, n_kv_heads, 5, 8)))  # (B, H, T, D), (B, KV, T, D)
    other = k.clone()
    other[:, 0] += torch.from_numpy(_random(5, (5, 8))[0])
    change = (reference_weights(q, k) - reference_weights(q, other)).abs().amax((0, 2, 3))  # (H,)
    return int((change > 1e-3).sum())


E04 = Erratum(
    id="E04",
    kind="A",
    where="note 000, line 224 (the example's numbers) and line 234 (the shape of xk)",
    matter="'query_group_num = 2, one key and value each' means 2 key heads, but xk has 1",
    printed="the queries are split into query_group_num = 2 groups, each with one key and one value; xk is"
    " (2, 5, 1, 8)",
    right="query_group_num is the number of query heads that share a key head: n_kv_heads = 2 / 2 = 1, n_rep = 2",
    why="With 2 groups of one key head each, xk would be (2, 5, 2, 8). The example divides the number of heads by"
    " query_group_num. Read as a number of groups, it doubles the rows of wk, and weights made for one key head do not"
    " fit.",
    wrong_form=lambda heads, query_group_num: query_group_num,
    right_form=lambda heads, query_group_num: heads // query_group_num,
    prove=_e04,
)


# ------------------------------------------------------------------------------------------------------------- E05
Attending = Callable[..., Tensor]  # (x, wq, wk, wv, positions) -> (N, D)


def _e05_printed(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, positions: Tensor) -> Tensor:
    encoding = Rotary(8)
    v = encoding.turn(x @ wv.T, positions)  # (N, D): the value is rotated like q and k
    return scores(encoding, x, wq, wk, positions).softmax(-1) @ v


def _e05_right(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, positions: Tensor) -> Tensor:
    return attend(Rotary(8), x, wq, wk, wv, positions)


def _e05(wrong: Attending, right: Attending) -> Sequence[Check]:
    arrays = _random(5, (6, 16)) + _weights(6, (8, 16), (8, 16), (8, 16))
    x, wq, wk, wv = arrays
    steps = np.arange(6)
    q, k = rotated(x @ wq.T, steps), rotated(x @ wk.T, steps)
    truth = softmax(q @ k.T / 8**0.5) @ (x @ wv.T)
    at = {shift: torch.arange(6) + shift for shift in (0, 5)}
    change = {form: worst(form(*_tensors(arrays), at[5]), form(*_tensors(arrays), at[0])) for form in (wrong, right)}
    return (
        above("E05", "output change if positions shift by 5, values rotated", change[wrong], 0.1),
        below("000-06 E05", "output change if positions shift by 5, values not rotated", change[right], 1e-6),
        below("E05", "right form minus numpy", worst(right(*_tensors(arrays), at[0]), truth), 1e-6),
    )


E05 = Erratum(
    id="E05",
    kind="B",
    where="note 000, lines 31 to 37, which make q, k and v all depend on the position",
    matter="with RoPE the value v does not depend on the position",
    printed="v_n = f_v(x_n, n): the position enters q, k and v",
    right="true for encodings that are added; with RoPE v_n = W_v x_n, and only q and k are rotated",
    why="If the values are rotated, the output depends on where the text begins: it changes when all positions shift"
    " by 5. Without that rotation it stays the same.",
    wrong_form=_e05_printed,
    right_form=_e05_right,
    prove=_e05,
)


# ------------------------------------------------------------------------------------------------------------- E06
def _e06(wrong: Callable[[Array, int], Array], right: Callable[[Array, int], Array]) -> Sequence[Check]:
    q, k = _tensors(_random(6, (1, 1, 7, 8), (1, 1, 7, 8)))
    row = reference_weights(q, k)[0, 0, 2].double().numpy()  # (N,): the scores of token m = 2
    causal = reference_weights(q, k, causal_mask(torch.arange(7), torch.arange(7)))[0, 0]  # (N, N)
    return (
        equal("E06", "number of scores, with 'n' read as the index n = 3", len(wrong(row, 3)), 3),
        above("E06", "1 minus their sum", 1 - float(wrong(row, 3).sum()), 0.05),
        equal("E06", "number of scores, right form", len(right(row, 3)), 7),
        equal("000-07 E06", "their sum", float(right(row, 3).sum()), 1.0, 1e-6),
        equal("E06", "number of scores of token m = 2 in a decoder", int((causal[2] > 0).sum()), 3),
    )


E06 = Erratum(
    id="E06",
    kind="B",
    where="note 000, line 39, on the softmax",
    matter="'n scores': n is the running index; the number of scores is N",
    printed="the softmax gives n attention scores",
    right="it returns N scores, n = 1 .. N; in a decoder, token m (counted from 0) has m + 1",
    why="The note uses n both for one key and for the number of keys. The scores sum to 1 only over all N.",
    wrong_form=lambda row, n: row[:n],
    right_form=lambda row, n: row,
    prove=_e06,
)


# ------------------------------------------------------------------------------------------------------------- E07
def _e07(wrong: tuple[str, str], right: tuple[str, str]) -> Sequence[Check]:
    return (
        equal("E07", "offset from dog to cat, printed pair", _e07_offsets(wrong), "+3, -2"),
        above("E07", "printed pair, output difference without positions", _e07_difference(wrong, Encoding()), 0.01),
        equal("000-03 E07", "offset from dog to cat, right pair", _e07_offsets(right), "+3, -3"),
        below("E07", "right pair, output difference without positions", _e07_difference(right, Encoding()), 1e-12),
        above("E07", "right pair, output difference with RoPE", _e07_difference(right, Rotary(8)), 1e-3),
    )


def _e07_offsets(pair: tuple[str, str]) -> str:
    return ", ".join(f"{text.index('猫') - text.index('狗'):+d}" for text in pair)


def _e07_difference(pair: tuple[str, str], encoding: Encoding) -> float:
    """Difference between the mean attention outputs of the two sentences, one token per character."""
    known = sorted(set("狗在追猫被"))
    table, wq, wk, wv = _tensors(_random(7, (len(known), 16)) + _weights(8, (8, 16), (8, 16), (8, 16)))
    means = []
    for text in pair:
        x = table[[known.index(character) for character in text]]  # (N, C)
        means.append(attend(encoding, x, wq, wk, wv, torch.arange(len(text))).mean(0))
    return worst(*means)


E07 = Erratum(
    id="E07",
    kind="B",
    where="note 000, line 74, the example sentences for 'relative order matters'",
    matter="the two example sentences mean the same and use different words",
    printed="狗在追猫 (the dog chases the cat) and 猫被狗追 (the cat is chased by the dog): the order is what matters",
    right="狗在追猫 and 猫在追狗, as in line 11: the same words in another order, with another meaning",
    why="In the printed pair the order is reversed (+3 and -2) but the meaning is the same, which contradicts the"
    " point of the example. Because the words differ, attention distinguishes the sentences even without positions.",
    wrong_form=("狗在追猫", "猫被狗追"),
    right_form=("狗在追猫", "猫在追狗"),
    prove=_e07,
)


# ------------------------------------------------------------------------------------------------------------- E08
Change = Callable[[float, Array], Array]  # (position, frequencies) -> change of a pair of length 1


def _e08(wrong: Change, right: Change) -> Sequence[Check]:
    w = frequencies(8)
    measured = {m: _e08_measured(m) for m in (6, 44)}
    xk = torch.arange(80.0).reshape(2, 5, 1, 8)
    _, xk_out = rope.apply_rotary_emb(xk, xk, rope.precompute_freqs_cis(8, 5))
    moved = (xk_out - xk)[0, 4, 0].abs()  # (D,): token 4 in the note's example
    return (
        equal("E08", "m = 6: change of pair 0", float(measured[6][0]), 0.282, 1e-3),
        equal("E08", "m = 6: change of pair 1 (later, yet larger)", float(measured[6][1]), 0.591, 1e-3),
        above("E08", "m = 6: error of 'the change is the angle'", worst(wrong(6, w), measured[6]), 5.0),
        above("E08", "m = 44: error of 'the change is the angle'", worst(wrong(44, w), measured[44]), 40.0),
        below("000-53 E08", "m = 6: error of 2 |sin(m w / 2)|", worst(right(6, w), measured[6]), 1e-5),
        below("E08", "m = 44: error of 2 |sin(m w / 2)|", worst(right(44, w), measured[44]), 1e-5),
        equal(
            "E08", "m = 44: change of pair 0 over pair 1", float(measured[44][0] / measured[44][1]), 0.018 / 1.617, 5e-4
        ),
        equal("E08", "the note's xk[0, 4]: change of entry 0", float(moved[0]), 27.94, 0.01),
        equal("E08", "the note's xk[0, 4]: change of entry 1", float(moved[1]), 78.79, 0.01),
    )


def _e08_measured(position: int) -> Array:
    """Distance by which the library moves pairs of length 1: (4,)."""
    x = torch.tensor([1.0, 0.0] * 4).reshape(1, 1, 1, 8)  # (B, T, H, D)
    row = rope.precompute_freqs_cis(8, position + 1)[position:]  # (1, D/2)
    moved = rope.apply_rotary_emb(x, x, row)[0] - x
    return moved.reshape(4, 2).norm(dim=-1).double().numpy()


E08 = Erratum(
    id="E08",
    kind="B",
    where="note 000, line 299, the conclusion from comparing xk and xk_out",
    matter="the angle falls with the pair index; the size of the change does not",
    printed="the earlier an entry is in the vector, the more it changes",
    right="the angle m w_i falls with i; a pair changes by 2 |sin(m w_i / 2)| times its length",
    why="A pair that has rotated almost a full turn is nearly back at its start: at m = 6 pair 0 changes by 0.282 and"
    " pair 1 by 0.591. In the note's own numbers, entry 0 of token 4 changes by 27.94 and entry 1 by 78.79.",
    wrong_form=lambda m, w: m * w,
    right_form=lambda m, w: 2 * np.abs(np.sin(m * w / 2)),
    prove=_e08,
)


# ------------------------------------------------------------------------------------------------------------- E09
Score = Callable[[Array, Array, float, float, float], float]  # (q~, k~, m, n, theta) -> the score


def _e09_printed(q: Array, k: Array, m: float, n: float, theta: float) -> float:
    return float(q @ rotation((m - n) * theta) @ k)


def _e09_right(q: Array, k: Array, m: float, n: float, theta: float) -> float:
    angle = torch.tensor([(n - m) * theta], dtype=torch.float64)
    return float(q @ forms.rotation_matrix(angle.cos(), angle.sin()).numpy() @ k)


def _e09(wrong: Score, right: Score) -> Sequence[Check]:
    q, k = _random(9, (2,), (2,))
    m, n, theta = 7.0, 3.0, 0.3
    true = _e09_true(float(q[0]), float(q[1]), float(k[0]), float(k[1]), m, n, theta)
    twice = 2 * float(q[1] * k[0] - q[0] * k[1]) * math.sin((m - n) * theta)  # the sine term, once with each sign
    off = wrong(q, k, m, n, theta) - true
    return (
        above("E09", "error of q^T R((m-n) theta) k", abs(off), 0.1),
        equal("E09", "the same error, equal to twice the sine term", off, twice, 1e-12),
        below("000-29 E09", "error of q^T R((n-m) theta) k", abs(right(q, k, m, n, theta) - true), 1e-12),
    )


def _e09_true(q1: float, q2: float, k1: float, k2: float, m: float, n: float, theta: float) -> float:
    """The product of the two vectors, each rotated by its own position."""
    q = complex(q1, q2) * complex(math.cos(m * theta), math.sin(m * theta))
    k = complex(k1, k2) * complex(math.cos(n * theta), math.sin(n * theta))
    return q.real * k.real + q.imag * k.imag


E09 = Erratum(
    id="E09",
    kind="A",
    where="note 000, lines 168 to 172, formula 7, the product in matrix form",
    matter="the matrix between q and k rotates in the wrong direction",
    printed="q_m^T k_n = q~^T R((m-n) theta) k~",
    right="q_m^T k_n = q~^T R((n-m) theta) k~, because R_m^T R_n is a rotation by n - m",
    why="The formula contradicts the note's own formulas 5 and 6: its sine term has the opposite sign. Code written"
    " from this line computes the score of the mirrored distance.",
    wrong_form=_e09_printed,
    right_form=_e09_right,
    prove=_e09,
)


# ------------------------------------------------------------------------------------------------------------- E10
Product = Callable[[Array, Array, Array, Array, Array], float]  # (x_m, x_n, W_q, W_k, R_(n-m)) -> the score


def _e10(wrong: Product, right: Product) -> Sequence[Check]:
    x_m, x_n = _random(10, (8,), (8,))
    wq, wk = _weights(11, (8, 8), (8, 8))
    narrow_q, narrow_k = wq[:4], wk[:4]  # heads narrower than the model, as in every LLaMA
    true = float(rotated((wq @ x_m)[None], [7])[0] @ rotated((wk @ x_n)[None], [3])[0])
    true_narrow = float(rotated((narrow_q @ x_m)[None], [7])[0] @ rotated((narrow_k @ x_n)[None], [3])[0])
    printed_narrow = outcome(wrong, x_m, x_n, narrow_q, narrow_k, library_rotation(4, -4))
    return (
        above("E10", "error without the transpose", abs(wrong(x_m, x_n, wq, wk, library_rotation(8, -4)) - true), 0.1),
        equal("E10", "head_dim 4, dim 8, without the transpose", name_of(printed_narrow), "ValueError"),
        below(
            "000-34 E10",
            "relative error with the transpose",
            abs(right(x_m, x_n, wq, wk, library_rotation(8, -4)) - true) / abs(true),
            1e-6,
        ),
        below(
            "E10",
            "head_dim 4, dim 8, with the transpose: error",
            worst(outcome(right, x_m, x_n, narrow_q, narrow_k, library_rotation(4, -4)), true_narrow),
            1e-5,
        ),
    )


E10 = Erratum(
    id="E10",
    kind="A",
    where="note 000, lines 198 to 202, formula 12: the score in d dimensions",
    matter="W_q lacks its transpose, and one x stands for both tokens",
    printed="q_m^T k_n = x^T W_q R_(n-m) W_k x",
    right="q_m^T k_n = x_m^T W_q^T R_(n-m) W_k x_n",
    why="(W_q x)^T is x^T W_q^T. With square weights the printed formula returns another number. With a head narrower"
    " than the model, the shapes do not fit at all.",
    wrong_form=lambda x_m, x_n, wq, wk, rotation: float(x_m @ wq @ rotation @ wk @ x_n),
    right_form=lambda x_m, x_n, wq, wk, rotation: float(x_m @ wq.T @ rotation @ wk @ x_n),
    prove=_e10,
)


# ------------------------------------------------------------------------------------------------------------- E11
def _e11(wrong: Array, right: Array) -> Sequence[Check]:
    shown = np.array([-27.2878, -21.3629])  # the note's xk_out, token 3, pair 0
    return (
        equal("E11", "rows of sample 0 in the picture, for 5 tokens", len(wrong), 6),
        equal("E11", "rotating them with 5 positions", name_of(outcome(_e11_rotated, wrong, 5)), "ValueError"),
        above("E11", "pair 0 of row 3, from the picture: distance to the shown output", _e11_off(wrong, shown), 5),
        equal("000-40 E11", "rows, right form", len(right), 5),
        below("000-51 E11", "pair 0 of row 3, from the right rows: distance to it", _e11_off(right, shown), 1e-4),
        below("E11", "(24 + 25i) rotated by 3: distance to it", worst((24 + 25j) * np.exp(3j), complex(*shown)), 1e-4),
    )


def _e11_rotated(rows: Array, positions: int) -> Tensor:
    xk = torch.from_numpy(rows).float()[None, :, None]  # (B, T, KV, D)
    return rope.apply_rotary_emb(xk, xk, rope.precompute_freqs_cis(8, positions))[1]


def _e11_off(rows: Array, shown: Array) -> float:
    return worst(_e11_rotated(rows, len(rows))[0, 3, 0, :2], shown)


E11 = Erratum(
    id="E11",
    kind="A",
    where="note 000, below line 234, the picture of xk (example 2)",
    matter="the picture of xk repeats a row, so sample 0 has six tokens instead of five",
    printed="sample 0 of xk: rows that begin with 0, 8, 16, 16, 24, 32",
    right="five rows, beginning with 0, 8, 16, 24, 32: xk = arange(80).reshape(2, 5, 1, 8)",
    why="The output that the note shows for row 3, (-27.2878, -21.3629), is (24, 25) rotated by 3 radians, but row 3"
    " of the picture begins with (16, 17). Copying the picture gives 6 tokens for 5 positions, which is an error.",
    wrong_form=np.arange(40.0).reshape(5, 8)[[0, 1, 2, 2, 3, 4]],
    right_form=np.arange(40.0).reshape(5, 8),
    prove=_e11,
)


# ------------------------------------------------------------------------------------------------------------- E12
Query = Callable[..., Tensor]  # (x (N, C), W (D, C), positions) -> (N, D)


def _e12(wrong: Query, right: Query) -> Sequence[Check]:
    (x,), (wq, wk) = _random(12, (6, 8)), _weights(13, (8, 8), (8, 8))
    truth = rotated(x @ wq.T, np.arange(6))
    off = {form: worst(form(*_tensors([x, wq]), torch.arange(6)), truth) for form in (wrong, right)}
    moved = {form: worst(_e12_scores(form, x, wq, wk, 5), _e12_scores(form, x, wq, wk, 0)) for form in (wrong, right)}
    return (
        above("E12", "difference between W R x and R W x", off[wrong], 1.0),
        above("E12", "score change if positions shift by 5, embedding rotated", moved[wrong], 0.5),
        below("000-30 E12", "right form minus numpy", off[right], 1e-5),
        below("E12", "score change if positions shift by 5, q and k rotated", moved[right], 1e-9),
    )


def _e12_scores(form: Query, x: Array, wq: Array, wk: Array, shift: int) -> Tensor:
    at = torch.arange(6) + shift
    return form(*_tensors([x, wq]), at) @ form(*_tensors([x, wk]), at).T


E12 = Erratum(
    id="E12",
    kind="B",
    where="note 000, line 178, on more than two dimensions",
    matter="the pairs consist of entries of q and k, not of the word embedding",
    printed="group the entries of the word embedding in pairs and rotate each pair",
    right="group the entries of q and of k, head by head: R_m (W_q x), not W_q (R_m x)",
    why="W and R do not commute. Rotating the embedding gives other queries, and scores that change when the whole"
    " text shifts by 5 positions.",
    wrong_form=lambda x, weight, positions: turn(x, positions, inverse_frequencies(8)[0]) @ weight.T,
    right_form=lambda x, weight, positions: turn(x @ weight.T, positions, inverse_frequencies(8)[0]),
    prove=_e12,
)


# ------------------------------------------------------------------------------------------------------------- E13
Complex = Callable[[complex, complex, float], float]  # (q~, k~, angle (m-n) theta) -> g


def _e13(wrong: Complex, right: Complex) -> Sequence[Check]:
    q, k, angle = 1 + 2j, 3 - 1j, 4 * 0.3
    true = _e09_true(q.real, q.imag, k.real, k.imag, 7, 3, 0.3)
    off = wrong(q, k, angle) - true
    dropped = -2 * k.imag * (q * complex(math.cos(angle), math.sin(angle))).imag  # Re[q e^(ia) (k - k*)]
    args = q, k, angle
    return (
        above("E13", "error of g with the star read as 'not yet rotated'", abs(off), 1.0),
        equal("E13", "the same error, equal to -2 k2 Im(q e^(ia))", off, dropped, 1e-12),
        below("000-20 E13", "error of g with the star of k read as the conjugate", abs(right(*args) - true), 1e-12),
    )


def _e13_right(q: complex, k: complex, angle: float) -> float:
    z = torch.tensor([q, k], dtype=torch.complex128)
    phase = torch.polar(torch.ones((), dtype=torch.float64), torch.tensor(angle, dtype=torch.float64))
    return float((z[0] * z[1].conj() * phase).real)


E13 = Erratum(
    id="E13",
    kind="B",
    where="note 000, lines 140 to 142, next to the definition of g",
    matter="one star means both 'not yet rotated' and 'conjugate' in the same formula",
    printed="W_k x_n = k_n^* = k^*(1) + i k^*(2), while g = Re[(W_q x_m)(W_k x_n)^* e^(i(m-n) theta)]",
    right="write q~ and k~ for the vectors before rotation, and use the star only for the conjugate",
    why="Reading (W_k x_n)^* as the k_n^* just defined drops the conjugate and gives another number.",
    wrong_form=lambda q, k, angle: (q * k * complex(math.cos(angle), math.sin(angle))).real,
    right_form=_e13_right,
    prove=_e13,
)


# ------------------------------------------------------------------------------------------------------------- E53
Rows = Callable[[rope.Rope, int, int], Any]  # (table, cached tokens, new tokens) -> rows (T, D/2)


def _e53(wrong: Rows, right: Rows) -> Sequence[Check]:
    (x,), (wq, wk) = _random(53, (8, 16)), _weights(54, (8, 16), (8, 16))
    q, k = x @ wq.T, rotated(x @ wk.T, np.arange(8))  # (T, D): the cached keys are rotated
    truth = rotated(q, np.arange(8)) @ k.T / 8**0.5  # (T, T)
    table = rope.Rope("complex", 8, 64, 10000.0)
    off = {}
    for form in (wrong, right):
        last = torch.from_numpy(q[7:]).float()[None, :, None]  # (B, T = 1, H, D): token 7, after 7 in the cache
        out = rope.apply_rotary_emb(last, last, form(table, 7, 1))[0][0, 0, 0].double().numpy()  # (D,)
        off[form] = worst(out @ k.T / 8**0.5, truth[7])
    return (
        above("E53", "token 7, 7 tokens cached, table cut to xq's length: error", off[wrong], 0.1),
        below("000-45 E53", "token 7, 7 tokens cached, row 7 of the table: error", off[right], 1e-5),
    )


E53 = Erratum(
    id="E53",
    kind="B",
    where="note 000, line 258, on a freqs_cis longer than xq",
    matter="with a cache the rows begin at the number of cached tokens, not at 0",
    printed="cut freqs_cis to the length of xq and xk",
    right="use rows start .. start + T - 1, where start is the number of tokens already in the cache",
    why="This works for a prompt and fails at the next token: a single new token uses row 0, so its query is rotated"
    " as if it were the first token of the text.",
    wrong_form=lambda table, start, count: table.freqs_cis(torch.arange(count), count),
    right_form=lambda table, start, count: table.freqs_cis(torch.arange(start, start + count), start + count),
    prove=_e53,
)


# ------------------------------------------------------------------------------------------------------------- OK6
def _ok6(tempting: Callable[[int], float], printed: Callable[[int], float]) -> Sequence[Check]:
    xq = torch.arange(160.0).reshape(2, 5, 2, 8)
    out, _ = rope.apply_rotary_emb(xq, xq, rope.precompute_freqs_cis(8, 5))
    shown = 27.708604844975795 + 29.27854534543996j
    return (
        below("000-48 OK6", "(28 + 29i) with exponent 2(i-1)/8: error", worst(_ok6_element(printed), shown), 1e-12),
        below("000-41 OK6", "the four angles minus the library", worst(_ok6_angles(printed), _e03_right(8)), 1e-8),
        below("000-51 OK6", "xq_out[0, 1, 1, 4:6] minus the note", worst(out[0, 1, 1, 4:6], [27.7086, 29.2785]), 1e-4),
        above("OK6", "(28 + 29i) with exponent 2i/8: error", worst(_ok6_element(tempting), shown), 0.1),
    )


def _ok6_element(form: Callable[[int], float]) -> complex:
    return complex(28, 29) * complex(math.cos(form(3)), math.sin(form(3)))


def _ok6_angles(form: Callable[[int], float]) -> Array:
    return np.array([form(i) for i in range(1, 5)])


OK6 = Erratum(
    id="OK6",
    kind="OK",
    where="note 000, lines 242 and 284, the example's angles and the element traced through it",
    matter="2(i-1)/8 in the example is right because i starts at 1",
    printed="freqs[i] = 1 / 10000^(2(i-1)/8), i = 1 .. 4, and (28 + 29i) becomes 27.7086 + 29.2785i",
    right="as printed; 2i/8 would be right with i starting at 0",
    why="Earlier formulas of the note count pairs sometimes from 0 and sometimes from 1. Here i = 1 is the fastest"
    " pair, and its angle is 1.",
    wrong_form=lambda i: 1 / 10000 ** (2 * i / 8),
    right_form=lambda i: 1 / 10000 ** (2 * (i - 1) / 8),
    prove=_ok6,
)


# ------------------------------------------------------------------------------------------------------------- OK7
Counting = Callable[[int], tuple[Tensor, Tensor]]  # tokens -> (positions of the queries, of the keys)


def _ok7(tempting: Counting, printed: Counting) -> Sequence[Check]:
    q, k = _random(107, (6, 8), (6, 8))
    from_zero = rotated(q, np.arange(6)) @ rotated(k, np.arange(6)).T
    w = inverse_frequencies(8)[0]
    off = {}
    for form in (tempting, printed):
        at_q, at_k = form(6)
        off[form] = worst(turn(torch.from_numpy(q), at_q, w) @ turn(torch.from_numpy(k), at_k, w).T, from_zero)
    first = turn(torch.from_numpy(q), printed(6)[0], w)[0]
    return (
        below("OK7", "score difference between counting from 1 and from 0", off[printed], 1e-6),
        above("OK7", "score difference if queries start at 1 and keys at 0", off[tempting], 0.1),
        holds("000-52 OK7", "counted from 1, the first token is rotated too", worst(first, q[0]) > 0.1),
    )


OK7 = Erratum(
    id="OK7",
    kind="OK",
    where="note 000, positions from 1 in the theory (lines 19 to 43) and from 0 in the example",
    matter="positions start at 1 in the theory and at 0 in the example: the scores are equal",
    printed="S_N = {w_i}, i = 1 .. N; later t = tensor([0, 1, 2, 3, 4])",
    right="as printed: a common shift of all positions changes no score",
    why="Only the statement 'position 0 is unchanged' requires counting from 0. Queries and keys must start at the"
    " same number.",
    wrong_form=lambda count: (torch.arange(1, count + 1), torch.arange(count)),
    right_form=lambda count: (torch.arange(1, count + 1), torch.arange(1, count + 1)),
    prove=_ok7,
)


ERRATA = (E01, E02, E03, E04, E05, E06, E07, E08, E09, E10, E11, E12, E13, E53, OK6, OK7)
