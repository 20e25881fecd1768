"""Note 003: attention, why the square root of d, sinusoids as digits, and the derivation of RoPE."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from llama.attention import reference, reference_weights
from llama.rope_scaling import inverse_frequencies
from llama.study import forms, measures
from llama.study.report import Check, above, below, equal

from .base import (
    Array,
    Erratum,
    Table,
    frequencies,
    library_rotation,
    library_table,
    rotated,
    rotation,
    sinusoid_table,
    softmax,
    worst,
)

# ------------------------------------------------------------------------------------------------------------- E33
Rotation = Callable[[Array, float], Array]  # (vector (D,), position) -> (D,)


def _e33_printed(x: Array, position: float) -> Array:
    angles = np.repeat(position * frequencies(len(x)), 2)  # (D,)
    swapped = np.stack((-x[1::2], x[0::2]), -1).reshape(-1)  # -x2, x1, -x4, x3, ..
    swapped[-2:] = -x[-2], x[-1]  # the last two rows as printed in the note
    return np.asarray(x * np.cos(angles) + swapped * np.sin(angles))


def _e33_right(x: Array, position: float) -> Array:
    angles = (position * inverse_frequencies(len(x))[0].double())[None]  # (T = 1, D/2)
    batch = torch.from_numpy(x).float()[None, None, None]  # (B, T, H, D)
    return forms.apply_elementwise(batch, angles.cos(), angles.sin())[0, 0, 0].double().numpy()


def _e33(wrong: Rotation, right: Rotation) -> Sequence[Check]:
    x = np.array([0.5, -1.0, 1.5, 2.0, -0.5, 1.0, 2.0, -1.0])
    error = {m: np.abs(wrong(x, m) - rotated(x[None], [m])[0]) for m in (3, 300)}
    law = {m: float(abs(x[-1] - x[-2]) * abs(math.sin(m * 1e-3))) for m in (3, 300)}  # the last pair rotates by 1e-3
    ratio = {form: float(np.linalg.norm(form(x, 300)[-2:]) / np.linalg.norm(x[-2:])) for form in (wrong, right)}
    c, s = math.cos(0.3), math.sin(0.3)
    length = math.hypot(2.0 * (c - s), -1.0 * (c + s)) / math.hypot(2.0, -1.0)
    return (
        equal("E33", "wrong entries at m = 3", ", ".join(str(i + 1) for i in np.flatnonzero(error[3] > 1e-9)), "7, 8"),
        equal("E33", "their error, |x_d - x_(d-1)| sin(m theta)", float(error[3].max()), law[3], 1e-9),
        equal("E33", "their error at m = 300", float(error[300].max()), law[300], 1e-9),
        equal("E33", "last pair, m = 300: length over its original length", ratio[wrong], length, 1e-9),
        equal("000-25 E33", "the same ratio, right form", ratio[right], 1.0, 1e-6),
        below("003-22 E33", "right form minus numpy, m = 3", worst(right(x, 3), rotated(x[None], [3])[0]), 1e-6),
        below("003-22 E33", "right form minus numpy, m = 300", worst(right(x, 300), rotated(x[None], [300])[0]), 1e-6),
    )


E33 = Erratum(
    id="E33",
    kind="A",
    where="note 003, line 139, the last two rows of the element-wise form",
    matter="the last pair of the second column is not swapped: it is stretched, not rotated",
    printed="(-x_2, x_1, -x_4, x_3, ..., -x_(d-1), x_d) times the sines",
    right="(-x_2, x_1, -x_4, x_3, ..., -x_d, x_(d-1))",
    why="All pairs but the slowest are right, so nothing shows at short distances: at m = 3 the error is 3/1000 of"
    " |x_d - x_(d-1)|. At m = 300 the pair has lost or gained a large part of its length.",
    wrong_form=_e33_printed,
    right_form=_e33_right,
    prove=_e33,
)


# ------------------------------------------------------------------------------------------------------------- E34
def _e34(wrong: Table, right: Table) -> Sequence[Check]:
    truth = sinusoid_table(256, 16)
    return (
        equal("E34", "smallest entry of a table that runs from 0 to 1", float(wrong(256, 16).min()), 0.0, 1e-4),
        equal("E34", "its difference from the sinusoids", worst(wrong(256, 16), truth), 1.0, 1e-3),
        equal("E34", "smallest entry of the sinusoids", float(right(256, 16).min()), -1.0, 1e-4),
        below("003-13 E34", "right form minus numpy", worst(right(256, 16), truth), 1e-12),
    )


E34 = Erratum(
    id="E34",
    kind="A",
    where="note 003, line 55, from binary digits to sinusoids",
    matter="the continuous digits run from -1 to 1, not from 0 to 1",
    printed="replace the discrete digits 0, 1 by continuous values from 0 to 1 to get the sinusoidal encoding",
    right="continuous values from -1 to 1",
    why="Values from 0 to 1 are (1 + sin)/2. This is another table: it is not centred, and because of the added"
    " constant encoding t + k is no longer linear in encoding t.",
    wrong_form=lambda count, dim: (1 + library_table(count, dim)) / 2,
    right_form=library_table,
    prove=_e34,
)


# ------------------------------------------------------------------------------------------------------------- E35
Digits = Callable[[int], tuple[float, int]]  # width -> (radix, number of digits)


def _e35_right(dim: int) -> tuple[float, int]:
    lengths = measures.wavelengths(measures.frequencies(dim))
    return float(lengths[1] / lengths[0]), len(lengths)


def _e35(wrong: Digits, right: Digits) -> Sequence[Check]:
    periods = 2 * np.pi / frequencies(128)
    ratios = periods[1:] / periods[:-1]
    radix, digits = right(128)
    claimed, count = wrong(128)
    return (
        equal("E35", "radix as printed", claimed, 7.256, 1e-3),
        above("E35", "its distance from the nearest ratio of periods", float(np.abs(ratios - claimed).min()), 6.0),
        equal("E35", "powers of ten from first to last period", (count - 1) * math.log10(claimed), 109.3, 0.05),
        equal("003-12 E35", "ratio of neighbouring periods", radix, 1.1548, 1e-4),
        below("E35", "spread of that ratio over the pairs", float(np.ptp(ratios)), 1e-12),
        equal("E35", "digits, one per pair", digits, 64),
        equal("E35", "longest period over the shortest", radix ** (digits - 1), 8660.0, 1.0),
    )


E35 = Erratum(
    id="E35",
    kind="A",
    where="note 003, lines 58 and 141, sinusoids as a number system",
    matter="the radix is 10000^(2/d) without the 2 pi, and there are d/2 digits",
    printed="roughly a number with d digits in radix 10000^(2/d) * 2 pi",
    right="d/2 digits in radix 10000^(2/d), the ratio of neighbouring periods; 2 pi is only the first period",
    why="At d = 128 the period grows by 1.1548 per pair, so the longest of 64 is 1.1548^63 = 8660 times the shortest."
    " In radix 7.256 the last of 128 digits would have 7.256^127 = 10^109 times the period of the first, which is not"
    " an approximation.",
    wrong_form=lambda dim: (10000 ** (2 / dim) * 2 * math.pi, dim),
    right_form=_e35_right,
    prove=_e35,
)


# ------------------------------------------------------------------------------------------------------------- E36
def _e36_right(hidden: int, heads: int) -> float:
    """The library's divisor, computed from the weights of two keys whose products with the query are 1 and 0."""
    q = torch.eye(hidden // heads, dtype=torch.float64)[None, None, :1]  # (B, H, T = 1, D)
    weights = reference_weights(q, torch.cat((q, 0 * q), -2))[0, 0, 0].double()  # (S = 2,)
    return 1 / float((weights[0] / weights[1]).log())


def _e36(wrong: Callable[[int, int], float], right: Callable[[int, int], float]) -> Sequence[Check]:
    rng = np.random.default_rng(36)
    q, k = rng.standard_normal((2, 20000, 64))  # 512 over 8 heads
    products = (q * k).sum(-1)
    return (
        equal(
            "E36", "variance of the scores, divided by sqrt(hidden)", _variance(products / wrong(512, 8)), 1 / 8, 0.01
        ),
        equal("002-35 E36", "variance of the scores of the library", _variance(products / right(512, 8)), 1.0, 0.05),
        equal("E36", "divisor of the library", right(512, 8), 8.0, 1e-4),
    )


def _variance(values: Array) -> float:
    return float(values.var())


E36 = Erratum(
    id="E36",
    kind="C",
    where="note 003, line 5, where d is called the hidden size",
    matter="with h heads the divisor is the root of the head dimension, not of the hidden size",
    printed="softmax(Q K^T / sqrt(d)) V, where d is the hidden size",
    right="true for one head; with h heads d is hidden / h, the head dimension",
    why="q and k of a head have hidden / h entries, so the variance of their dot product is hidden / h. Divided by"
    " sqrt(hidden), the variance is only 1/h, and the attention weights stay nearly uniform.",
    wrong_form=lambda hidden, heads: math.sqrt(hidden),
    right_form=_e36_right,
    prove=_e36,
)


# ------------------------------------------------------------------------------------------------------------- E37
Steepness = Callable[[Sequence[float]], float]  # scores -> largest derivative of a weight with respect to a score


def _e37_printed(scores: Sequence[float]) -> float:
    """One-hot weights as soon as one score is large."""
    x = np.array(scores)
    p = np.eye(len(x))[x.argmax()] if x.max() >= 50 else softmax(x)
    return float(np.abs(np.diag(p) - np.outer(p, p)).max())


def _e37(wrong: Steepness, right: Steepness) -> Sequence[Check]:
    even, uneven = (100.0, 100.0, 100.0), (0.0, 0.0, 50.0)
    x = torch.tensor(even, dtype=torch.float64)
    with torch.enable_grad():  # the caller may have disabled gradients
        derived = torch.autograd.functional.jacobian(lambda y: y.softmax(-1), x)
    return (
        equal("E37", "(100, 100, 100), by the sentence alone: largest derivative", wrong(even), 0.0),
        equal("E37", "(100, 100, 100), measured: largest derivative", right(even), 0.222, 1e-3),
        equal("003-05 E37", "the same by autograd", float(derived.abs().max()), right(even), 1e-9),
        equal("003-06 E37", "(0, 0, 50), measured, over 2 e^-50", right(uneven) * math.exp(50) / 2, 1.0, 1e-9),
    )


E37 = Erratum(
    id="E37",
    kind="C",
    where="note 003, line 22, when the softmax saturates",
    matter="a score must be large relative to the others, not large in itself",
    printed="if one of the x_i is large, the softmax is nearly one-hot and all derivatives go to 0",
    right="if it is much larger than the others; a number added to all of them changes nothing",
    why="(100, 100, 100) gives weights of 1/3 and a largest derivative of 0.222: the scores are large, but nothing is"
    " saturated. (0, 0, 50) gives 3.9e-22.",
    wrong_form=_e37_printed,
    right_form=lambda scores: float(measures.softmax_jacobian(torch.tensor(scores)).abs().max()),
    prove=_e37,
)


# ------------------------------------------------------------------------------------------------------------- E38
Counted = Callable[[Array, Array, Array], tuple[Array, int]]  # (q, k, v, each (n, d)) -> (output, products q . k)
_BLOCK = 8


def _e38_printed(q: Array, k: Array, v: Array) -> tuple[Array, int]:
    """Fewer than n^2 products: each block of queries attends to one block of keys."""
    out, products = np.empty_like(v), 0
    for start in range(0, len(q), _BLOCK):
        block = slice(start, start + _BLOCK)
        scores = q[block] @ k[block].T / q.shape[-1] ** 0.5
        products += scores.size
        out[block] = softmax(scores) @ v[block]
    return out, products


def _e38_right(q: Array, k: Array, v: Array) -> tuple[Array, int]:
    """FlashAttention's arithmetic: all blocks in turn, with a running maximum and sum for each row."""
    out, products = np.empty_like(v), 0
    for rows in range(0, len(q), _BLOCK):
        queries = q[rows : rows + _BLOCK]
        top = np.full(len(queries), -np.inf)
        total, sums = np.zeros(len(queries)), np.zeros((len(queries), v.shape[-1]))
        for start in range(0, len(k), _BLOCK):
            scores = queries @ k[start : start + _BLOCK].T / q.shape[-1] ** 0.5
            products += scores.size
            higher = np.maximum(top, scores.max(-1))
            powers, shrink = np.exp(scores - higher[:, None]), np.exp(top - higher)
            total = total * shrink + powers.sum(-1)
            sums = sums * shrink[:, None] + powers @ v[start : start + _BLOCK]
            top = higher
        out[rows : rows + _BLOCK] = sums / total[:, None]
    return out, products


def _e38(wrong: Counted, right: Counted) -> Sequence[Check]:
    q, k, v = np.random.default_rng(38).standard_normal((3, 64, 16))
    direct = softmax(q @ k.T / 4) @ v
    (partial, n_partial), (blockwise, n_blockwise) = wrong(q, k, v), right(q, k, v)
    library = reference(*(torch.from_numpy(x)[None, None] for x in (q, k, v)))[0, 0]
    return (
        below("E38", "products q . k of a form below n^2, n = 64", n_partial, 64**2),
        above("E38", "error of its output", worst(partial, direct), 0.1),
        equal("E38", "products q . k, block by block as in FlashAttention", n_blockwise, 64**2),
        below("E38", "error of its output", worst(blockwise, direct), 1e-12),
        below("E38", "the library's attention minus it", worst(library, blockwise), 1e-5),
    )


E38 = Erratum(
    id="E38",
    kind="B",
    where="note 003, line 143, alternatives to O(n^2)",
    matter="FlashAttention is exact and still computes n^2 products; it saves memory traffic",
    printed="the cost is O(n^2); FlashAttention, sparse attention, ... improve on it",
    right="FlashAttention computes the same n^2 scores but never writes them to memory; sparse attention computes"
    " fewer",
    why="Computed block by block with a running maximum, the output is the same to 1e-15 and needs all 64^2 products."
    " Skipping products changes the output.",
    wrong_form=_e38_printed,
    right_form=_e38_right,
    prove=_e38,
)


# ------------------------------------------------------------------------------------------------------------- OK1
Matrix = Callable[[float], Array]  # angle -> 2 x 2


def _ok1(tempting: Matrix, printed: Matrix) -> Sequence[Check]:
    t, k, w = 5, 3, 0.7
    before, after = (np.array([math.sin(w * m), math.cos(w * m)]) for m in (t, t + k))
    table = measures.sinusoids(torch.tensor([t, t + k]), 2, 1.0).numpy()  # base 1: frequency 1
    return (
        below(
            "003-17 OK1",
            "[[cos, sin], [-sin, cos]] from t to t + k: error",
            worst(printed(w * k) @ before, after),
            1e-15,
        ),
        below("OK1", "the same matrix on the library's table: error", worst(printed(k) @ table[0], table[1]), 1e-15),
        above("OK1", "[[cos, -sin], [sin, cos]] from t to t + k: error", worst(tempting(w * k) @ before, after), 0.5),
        equal("OK1", "direction of its rotation, counter-clockwise = +1", float(np.sign(printed(0.1)[1, 0])), -1.0),
    )


OK1 = Erratum(
    id="OK1",
    kind="OK",
    where="note 003, lines 63 to 77, the matrix from PE_t to PE_(t+k)",
    matter="[[cos, sin], [-sin, cos]] and 'clockwise' are right: the vector is (sin, cos)",
    printed="(sin, cos)(t + k) = [[cos wk, sin wk], [-sin wk, cos wk]] (sin, cos)(t), a clockwise rotation",
    right="as printed; the usual matrix is for (cos, sin)",
    why="With the sine first, the vector starts at 12 o'clock and rotates clockwise.",
    wrong_form=rotation,
    right_form=lambda angle: np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]),
    prove=_ok1,
)


# ------------------------------------------------------------------------------------------------------------- OK2
Relative = Callable[[int, int], int]  # (m, n) -> positions to rotate by between q and k


def _ok2(tempting: Relative, printed: Relative) -> Sequence[Check]:
    q, k = np.random.default_rng(2).standard_normal((2, 8))
    true = float(rotated(q[None], [7])[0] @ rotated(k[None], [3])[0])
    product = library_rotation(8, 7).T @ library_rotation(8, 3)
    return (
        below("000-35 OK2", "R_m^T R_n minus R_(n-m)", worst(product, library_rotation(8, printed(7, 3))), 1e-12),
        below(
            "003-20 OK2",
            "q^T R_(n-m) k minus the product",
            abs(float(q @ library_rotation(8, printed(7, 3)) @ k) - true),
            1e-7,
        ),
        above("OK2", "R_m^T R_n minus R_(m-n)", worst(product, library_rotation(8, tempting(7, 3))), 0.1),
    )


OK2 = Erratum(
    id="OK2",
    kind="OK",
    where="note 003, lines 104 to 131, the product of the two rotated vectors",
    matter="R_m^T R_n = R_(n-m) is right, although the text says m - n",
    printed="f_q(m) . f_k(n) = q^T R_(n-m) k",
    right="as printed; either sign describes a relative position, but only n - m gives this product",
    why="The transpose rotates back by m before the rotation by n. Formula 7 of note 000 has the opposite sign (E09).",
    wrong_form=lambda m, n: m - n,
    right_form=lambda m, n: n - m,
    prove=_ok2,
)


# ------------------------------------------------------------------------------------------------------------- OK3
def _ok3(tempting: Callable[[int], float], printed: Callable[[int], float]) -> Sequence[Check]:
    last = float(measures.wavelengths(measures.frequencies(512))[-1])
    return (
        equal("003-12 OK3", "10000^((d-2)/d) 2 pi at d = 512", printed(512), 60611.5, 0.1),
        equal("OK3", "longest wavelength of the library", last, printed(512), 0.1),
        equal("OK3", "longest wavelength in numpy", float(2 * np.pi / frequencies(512).min()), printed(512), 1e-6),
        above("OK3", "error of 10000 * 2 pi", tempting(512) - last, 2000.0),
    )


OK3 = Erratum(
    id="OK3",
    kind="OK",
    where="note 003, line 49, the longest wavelength",
    matter="the longest wavelength is 10000^((d-2)/d) 2 pi: the last exponent is below 1",
    printed="wavelengths form a geometric series from 2 pi to 10000^((d-2)/d) * 2 pi",
    right="as printed; many texts say 10000 * 2 pi = 62831.9, which no pair reaches",
    why="The last pair has i = d/2 - 1, so its exponent is (d-2)/d, and its wavelength at d = 512 is 60611.5.",
    wrong_form=lambda dim: 10000 * 2 * math.pi,
    right_form=lambda dim: 10000 ** ((dim - 2) / dim) * 2 * math.pi,
    prove=_ok3,
)


# ------------------------------------------------------------------------------------------------------------- OK4
def _ok4(tempting: Callable[[int], float], printed: Callable[[int], float]) -> Sequence[Check]:
    rng = np.random.default_rng(4)
    q = rng.standard_normal((40000, 64))
    independent = _variance((q * rng.standard_normal((40000, 64))).sum(-1))
    identical = _variance(q.sum(-1) * rng.standard_normal(40000))  # all 64 entries of k are equal
    return (
        equal("003-08 OK4", "variance of q . k, independent entries, over d", independent / printed(64), 1.0, 0.06),
        equal("OK4", "variance of q . k, all entries of k equal, over d", identical / printed(64), 1.0, 0.06),
        below("OK4", "variance of q . k, all entries of k equal, over d^2", identical / tempting(64), 0.05),
    )


OK4 = Erratum(
    id="OK4",
    kind="OK",
    where="note 003, lines 24 to 37, the variance of q . k",
    matter="the variance is d, even if the entries of k depend on each other",
    printed="the entries of q and k are independent, of mean 0 and variance 1, so Var[q . k] = d",
    right="as printed, and weaker conditions suffice: the entries of q are uncorrelated, and q and k are independent",
    why="The terms q_i q_j k_i k_j with i != j vanish because of q alone. With all entries of k equal, the variance is"
    " still d and not d^2.",
    wrong_form=lambda dim: float(dim**2),
    right_form=lambda dim: float(dim),
    prove=_ok4,
)


ERRATA = (E33, E34, E35, E36, E37, E38, OK1, OK2, OK3, OK4)
