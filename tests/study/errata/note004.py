"""Note 004: the absolute encoding as rotating vectors, the clock, and a function with four mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama import rope
from llama.rope_scaling import inverse_frequencies
from llama.study import measures
from llama.study.encodings import Rotary, additive_terms, scores
from llama.study.measures import diagonal_spread, sinusoids
from llama.study.report import Check, above, below, equal, holds

from .base import (
    Array,
    Erratum,
    Table,
    frequencies,
    library_table,
    name_of,
    outcome,
    rotated,
    sinusoid_table,
    worst,
)


# ------------------------------------------------------------------------------------------------------------- E39
def _e39_printed(count: int) -> Tensor:
    made: Tensor = getattr(torch, "arrange")(0, count)  # noqa: B009  (a type checker rejects torch.arrange)
    return made


def _e39(wrong: Callable[[int], Tensor], right: Callable[[int], Tensor]) -> Sequence[Check]:
    return (
        equal("E39", "torch.arrange(0, 5)", name_of(outcome(wrong, 5)), "AttributeError"),
        equal("E39", "torch.arange(0, 5) minus 0, 1, 2, 3, 4", worst(outcome(right, 5), [0, 1, 2, 3, 4]), 0.0),
    )


E39 = Erratum(
    id="E39",
    kind="A",
    where="note 004, lines 82 and 84 of absolute_positional_encoding",
    matter="torch.arrange does not exist",
    printed="torch.arrange(0, seq_len)",
    right="torch.arange(0, seq_len), with one r",
    why="The first call raises AttributeError, so the function cannot have been run as printed.",
    wrong_form=_e39_printed,
    right_form=lambda count: torch.arange(0, count),
    prove=_e39,
)


# ------------------------------------------------------------------------------------------------------------- E40
def _e40(wrong: Callable[[Tensor], Any], right: Callable[[Tensor], Any]) -> Sequence[Check]:
    angles = torch.tensor([[0.0, 0.5], [1.0, 1.5]], dtype=torch.float64)
    by_hand = [[math.sin(0.0), math.sin(0.5)], [math.sin(1.0), math.sin(1.5)]]
    failed = name_of(outcome(wrong, angles))
    return (
        holds(
            "E40",
            f"math.sin of a (2, 2) tensor raises, here {failed}",
            failed in ("ValueError", "TypeError", "RuntimeError"),
        ),
        below("E40", "torch.sin minus math.sin of each element", worst(outcome(right, angles), by_hand), 1e-15),
        equal("E40", "math.sin of a one-element tensor, which looks right", wrong(angles[1, 0]), math.sin(1)),
    )


E40 = Erratum(
    id="E40",
    kind="A",
    where="note 004, lines 86 and 87 of absolute_positional_encoding",
    matter="math.sin takes one number, not a tensor",
    printed="pe[:, 0::2] = math.sin(pos * div_term); pe[:, 1::2] = math.cos(pos * div_term)",
    right="torch.sin, torch.cos",
    why="A tensor with one element passes, which hides the mistake in the smallest test. Any other tensor raises.",
    wrong_form=math.sin,
    right_form=torch.sin,
    prove=_e40,
)


# ------------------------------------------------------------------------------------------------------------- E41
def _e41_printed(count: int, dim: int) -> Tensor:
    table = torch.zeros(count, dim, dtype=torch.float64)
    pos = torch.arange(0, count).unsqueeze(-1)  # (N, 1)
    div_term = torch.exp(-1 * torch.arange(0, count, 2) * math.log(10000.0) / dim)  # the mistake: count instead of dim
    table[:, 0::2] = torch.sin(pos * div_term)
    table[:, 1::2] = torch.cos(pos * div_term)
    return table


def _e41(wrong: Table, right: Table) -> Sequence[Check]:
    off = {shape: worst(outcome(wrong, *shape), sinusoid_table(*shape)) for shape in ((2, 16), (16, 16))}
    return (
        equal("E41", "10 positions of width 16, as printed", name_of(outcome(wrong, 10, 16)), "RuntimeError"),
        equal("E41", "2 positions of width 16, as printed: largest error", off[2, 16], 0.84, 0.005),
        below("E41", "16 positions of width 16, as printed: largest error", off[16, 16], 1e-6),
        below(
            "004-16 E41",
            "10 positions, right form: largest error",
            worst(outcome(right, 10, 16), sinusoid_table(10, 16)),
            1e-12,
        ),
        below(
            "E41", "2 positions, right form: largest error", worst(outcome(right, 2, 16), sinusoid_table(2, 16)), 1e-12
        ),
    )


E41 = Erratum(
    id="E41",
    kind="A",
    where="note 004, line 84 of absolute_positional_encoding, div_term",
    matter="the number of frequencies comes from the length of the text, not from the width",
    printed="div_term = exp(-arange(0, seq_len, 2) * log(10000) / d_model)",
    right="arange(0, d_model, 2): one frequency per sine column",
    why="Usually the shapes do not fit and the call fails. With two positions, a single frequency is silently"
    " broadcast to all columns, with an error of 0.84. With seq_len = d_model the result is right by accident.",
    wrong_form=_e41_printed,
    right_form=library_table,
    prove=_e41,
)


# ------------------------------------------------------------------------------------------------------------- E42
Frequency = Callable[[int, int], float]  # (pair, width) -> radians per position


def _e42(wrong: Frequency, right: Frequency) -> Sequence[Check]:
    return (
        equal("E42", "printed right side, i = 3, d = 16", wrong(3, 16), 13.401, 1e-3),
        equal("E42", "1 / 10000^(2i/d), i = 3, d = 16", float(frequencies(16)[3]), 0.031623, 1e-6),
        equal("004-17 E42", "frequency 3 of the library, d = 16", right(3, 16), 0.031623, 1e-6),
        below(
            "E42",
            "exp(-(2i/d) log 10000) minus the library",
            abs(math.exp(-6 / 16 * math.log(10000)) - right(3, 16)),
            1e-8,
        ),
    )


E42 = Erratum(
    id="E42",
    kind="A",
    where="note 004, line 78, the comment above absolute_positional_encoding",
    matter="the logarithm is outside the exponential, and the minus sign is missing",
    printed="1 / 10000 ** (2 * i / d) = exp(2 * i / d) * log(10000)",
    right="exp(-(2 * i / d) * log(10000))",
    why="a^b is exp(b log a). At i = 3, d = 16 the left side is 0.0316 and the printed right side 13.4. The code below"
    " the comment is correct.",
    wrong_form=lambda pair, dim: math.exp(2 * pair / dim) * math.log(10000),
    right_form=lambda pair, dim: float(inverse_frequencies(dim)[0][pair]),
    prove=_e42,
)


# ------------------------------------------------------------------------------------------------------------- E43
def _e43_printed(count: int, dim: int) -> Tensor:
    """The note's function with E39 to E41 fixed."""
    table = torch.zeros(count, dim, dtype=torch.float64)
    pos = torch.arange(0, count).unsqueeze(-1)  # (N, 1)
    div_term = torch.exp(-torch.arange(0, dim, 2) * math.log(10000.0) / dim)  # (ceil(d/2),)
    table[:, 0::2] = torch.sin(pos * div_term)
    table[:, 1::2] = torch.cos(pos * div_term)
    return table


def _e43(wrong: Table, right: Table) -> Sequence[Check]:
    rejected = outcome(right, 10, 7)
    return (
        equal("E43", "width 7, with E39 to E41 fixed", name_of(outcome(wrong, 10, 7)), "RuntimeError"),
        holds(
            "E43",
            "width 7, right form: ValueError with the number 7",
            isinstance(rejected, ValueError) and "7" in str(rejected),
        ),
        below(
            "E43", "width 8, with E39 to E41 fixed: error", worst(outcome(wrong, 10, 8), sinusoid_table(10, 8)), 1e-6
        ),
        below("E43", "width 8, right form: error", worst(right(10, 8), sinusoid_table(10, 8)), 1e-12),
    )


E43 = Erratum(
    id="E43",
    kind="B",
    where="note 004, lines 86 and 87 of absolute_positional_encoding",
    matter="an odd width fails with a message about shapes",
    printed="pe[:, 1::2] = cos(pos * div_term), for any d_model",
    right="reject an odd d_model, with its value in the message: sines and cosines come in pairs",
    why="Width 7 has four sine columns and three cosine columns. The error message mentions sizes 4 and 3, not the"
    " width.",
    wrong_form=_e43_printed,
    right_form=library_table,
    prove=_e43,
)


# ------------------------------------------------------------------------------------------------------------- E44
Series = Callable[[int], Array]  # width -> frequencies (d/2,)


def _e44(wrong: Series, right: Series) -> Sequence[Check]:
    w, line = right(128), wrong(128)
    steps, ratios = np.diff(w), w[1:] / w[:-1]
    return (
        above("E44", "straight line from 1 to the last frequency: largest error", worst(line, frequencies(128)), 0.6),
        below("E44", "spread of its steps", float(np.ptp(np.diff(line))), 1e-12),
        equal("E44", "frequencies of the library: first step", float(steps[0]), -0.134, 1e-3),
        equal("E44", "frequencies of the library: last step", float(steps[-1]), -1.8e-5, 0.05e-5),
        equal("E44", "ratio of neighbours, 10000^(-2/128)", float(ratios.mean()), 0.8660, 1e-4),
        below("E44", "spread of this ratio", float(np.ptp(ratios)), 1e-6),
    )


E44 = Erratum(
    id="E44",
    kind="A",
    where="note 004, line 67, on the index i",
    matter="the frequency falls exponentially with i, not linearly",
    printed="as i grows, the frequency falls linearly",
    right="each frequency is a constant fraction of the one before: 10000^(-2/d)",
    why="At d = 128 the first step is -0.134 and the last -1.8e-5, while the ratio is 0.866 throughout. Evenly spaced"
    " frequencies would leave almost no slow pairs to distinguish distant positions.",
    wrong_form=lambda dim: np.linspace(1.0, frequencies(dim)[-1], dim // 2),
    right_form=lambda dim: measures.frequencies(dim).numpy(),
    prove=_e44,
)


# ------------------------------------------------------------------------------------------------------------- E45
Lowest = Callable[[int], float]  # width -> lowest frequency


def _e45(wrong: Lowest, right: Lowest) -> Sequence[Check]:
    widths = (2, 4, 8, 64, 512)
    lowest = [right(dim) for dim in widths]
    known = [1, 1e-2, 1e-3, 1.33e-4, 1.04e-4]
    return (
        below("E45", "lowest over 1, .01, .001, 1.33e-4, 1.04e-4, minus 1", _relative(lowest, known), 0.005),
        below(
            "E45", "right form over numpy, minus 1", _relative(lowest, [frequencies(dim).min() for dim in widths]), 1e-6
        ),
        above("E45", "lowest frequency at d = 8 over 1/10000", lowest[2] / wrong(8), 9.9),
        holds(
            "E45",
            "no width reaches 1/10000",
            all(value > wrong(dim) for value, dim in zip(lowest, widths, strict=True)),
        ),
    )


def _relative(values: Sequence[float], others: Sequence[float]) -> float:
    """Largest relative difference."""
    return worst(np.array(values) / np.array(others), np.ones(len(values)))


E45 = Erratum(
    id="E45",
    kind="B",
    where="note 004, line 67, on the range of the frequencies",
    matter="the lowest frequency depends on d, and 1/10000 is never reached",
    printed="dividing by d keeps the frequencies in [1/10000, 1], so that every d has the same properties",
    right="they lie in (1/10000, 1], and the lowest is 10000^(-(d-2)/d)",
    why="The range is right but the conclusion is not: the lowest frequency is 1e-3 at d = 8 and 1.04e-4 at d = 512,"
    " so a narrow head has no slow pair.",
    wrong_form=lambda dim: 1 / 10000,
    right_form=lambda dim: float(inverse_frequencies(dim)[0][-1]),
    prove=_e45,
)


# ------------------------------------------------------------------------------------------------------------- E46
Angles = Callable[[float, float, float], tuple[float, float]]  # (m, n, w) -> theta_1, theta_2


def _e46(wrong: Angles, right: Angles) -> Sequence[Check]:
    m, n, w = 7, 3, float(frequencies(8)[1])
    table = sinusoids(torch.tensor([m, n]), 8)[:, 2:4]  # pair 1 of both positions
    product = float(table[0] @ table[1])
    return (
        above("E46", "cos(theta_1 - theta_2) of differences: error", abs(_e46_cosine(wrong(m, n, w)) - product), 0.1),
        below(
            "004-10 E46", "cos(theta_1 - theta_2) of angles: error", abs(_e46_cosine(right(m, n, w)) - product), 1e-12
        ),
        below("E46", "cos((m - n) w) minus the product", abs(math.cos((m - n) * w) - product), 1e-12),
    )


def _e46_cosine(angles: tuple[float, float]) -> float:
    first, second = angles
    return math.cos(first) * math.cos(second) + math.sin(first) * math.sin(second)


E46 = Erratum(
    id="E46",
    kind="A",
    where="note 004, line 56, below the sum-angle formula",
    matter="theta_1 and theta_2 are the angles; their difference is theta_1 - theta_2",
    printed="theta_1 and theta_2 are the angle differences of the two positions",
    right="theta_1 = m w and theta_2 = n w are the angles; their difference is theta_1 - theta_2 = (m - n) w",
    why="With the differences (m - n) w and (n - m) w, the formula evaluates to cos 2(m - n)w.",
    wrong_form=lambda m, n, w: ((m - n) * w, (n - m) * w),
    right_form=lambda m, n, w: (m * w, n * w),
    prove=_e46,
)


# ------------------------------------------------------------------------------------------------------------- E47
Scores = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (x (N, C), wq, wk, positions) -> (N, N)


def _e47_printed(x: Tensor, wq: Tensor, wk: Tensor, positions: Tensor) -> Tensor:
    encoded = x + sinusoids(positions, x.shape[-1])  # (N, C)
    return (encoded @ wq.T) @ (encoded @ wk.T).T


def _e47(wrong: Scores, right: Scores) -> Sequence[Check]:
    rng = np.random.default_rng(47)
    token, wq, wk = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((1, 16), (16, 16), (16, 16)))
    x, at = token.repeat(12, 1), torch.arange(12)  # the same token everywhere: only positions differ
    p = sinusoids(at, 16)
    terms = additive_terms(x, p, wq, wk)
    by_hand = rotated((x @ wq.T).numpy(), np.arange(12)) @ rotated((x @ wk.T).numpy(), np.arange(12)).T / 4
    return (
        below("E47", "variation of p . p along a diagonal", diagonal_spread(p @ p.T), 1e-12),
        above("E47", "variation of p W_q^T W_k p", diagonal_spread(terms["position-position"]), 1.0),
        above("E47", "variation of the score with added encodings", diagonal_spread(wrong(x, wq, wk, at)), 5.0),
        below("E47", "sum of its four terms minus it", worst(sum(terms.values()), _e47_printed(x, wq, wk, at)), 1e-10),
        below("003-18 E47", "variation of the scores of RoPE", diagonal_spread(right(x, wq, wk, at)), 1e-10),
        below("E47", "right form minus numpy", worst(right(x, wq, wk, at), by_hand), 1e-4),
    )


E47 = Erratum(
    id="E47",
    kind="B",
    where="note 004, lines 50 and 62 (note 003, line 79, is correct)",
    matter="with added encodings, relative position is in one term of four, altered by W_q^T W_k",
    printed="Q K^T of such encodings yields a relative position between the tokens",
    right="only p_m . p_n depends on m - n alone; the score contains p_m W_q^T W_k p_n and three more terms",
    why="With the same token at every position, p . p is constant along a diagonal. With W_q and W_k in between, or"
    " with the word embedding added, it is not; with RoPE the complete score is constant.",
    wrong_form=_e47_printed,
    right_form=lambda x, wq, wk, positions: scores(Rotary(16), x, wq, wk, positions),
    prove=_e47,
)


# ------------------------------------------------------------------------------------------------------------- E48
ScoreAhead = Callable[[Array, Array, int], float]  # (q, k, steps from query to key) -> score


def _e48_right(q: Array, k: Array, steps: int) -> float:
    xq, xk = (torch.from_numpy(x).float()[None, None, None] for x in (q, k))  # (B, T = 1, H, D)
    row = {m: rope.precompute_freqs_cis(len(q), m + 1)[m:] for m in (20, 20 + steps)}
    xq_out = rope.apply_rotary_emb(xq, xq, row[20])[0]
    xk_out = rope.apply_rotary_emb(xk, xk, row[20 + steps])[1]
    return float((xq_out * xk_out).sum())


def _e48_printed(q: Array, k: Array, steps: int) -> float:
    table = sinusoids(torch.tensor([20, 20 + steps]), len(q))
    return float(table[0] @ table[1])


def _e48(wrong: ScoreAhead, right: ScoreAhead) -> Sequence[Check]:
    q, k = np.random.default_rng(48).standard_normal((2, 16))
    z = (q[0::2] - 1j * q[1::2]) * (k[0::2] + 1j * k[1::2])  # (D/2,)
    by_hand = 2 * float((-z.imag * np.sin(5 * frequencies(16))).sum())  # score at +5 less score at -5
    return (
        below("E48", "p . p: difference between 5 ahead and 5 behind", abs(wrong(q, k, 5) - wrong(q, k, -5)), 1e-12),
        above("E48", "RoPE: difference between 5 ahead and 5 behind", abs(right(q, k, 5) - right(q, k, -5)), 1.0),
        equal("E48", "the same difference from the sine terms alone", right(q, k, 5) - right(q, k, -5), by_hand, 1e-4),
    )


E48 = Erratum(
    id="E48",
    kind="C",
    where="note 004, line 68, on the angle difference",
    matter="p_m . p_n contains the distance but not its direction",
    printed="the sum-angle formula describes the angle difference of two tokens, which is their distance",
    right="true, but cos is even: 5 ahead and 5 behind look alike; RoPE has a sine term that distinguishes them",
    why="The product of two encodings is a sum of cosines of (m - n) w. In q_m . k_n of RoPE the sine is multiplied by"
    " q_1 k_2 - q_2 k_1, which the weights can set.",
    wrong_form=_e48_printed,
    right_form=_e48_right,
    prove=_e48,
)


# ------------------------------------------------------------------------------------------------------------- E49
def _e49(wrong: Callable[[float], complex], right: Callable[[float], complex]) -> Sequence[Check]:
    before, after = right(0.5), right(0.6)
    change = {form: float(np.angle(form(0.6) / form(0.5))) for form in (wrong, right)}
    return (
        equal("E49", "cos + i sin: rotation when theta grows by 0.1", change[wrong], 0.1, 1e-12),
        above(
            "E49",
            "its difference from the pair in the table",
            abs(wrong(0.5) - complex(math.sin(0.5), math.cos(0.5))),
            0.3,
        ),
        equal("E49", "pair in the table: rotation when theta grows by 0.1", change[right], -0.1, 1e-9),
        below("004-05 E49", "pair in the table minus i e^(-i theta)", worst([before, after], _e49_law(0.5, 0.6)), 1e-9),
    )


def _e49_law(*angles: float) -> Array:
    return 1j * np.exp(-1j * np.array(angles))


def _e49_right(theta: float) -> complex:
    """Entries 0 and 1 of the library's table; the angle of pair 0 is the position."""
    sine, cosine = sinusoids(torch.tensor([theta], dtype=torch.float64), 2)[0].tolist()
    return complex(sine, cosine)


E49 = Erratum(
    id="E49",
    kind="B",
    where="note 004, line 31, the pairs as complex numbers",
    matter="the pair is sin + i cos, which rotates clockwise",
    printed="two neighbouring entries form the vector cos(theta) + i sin(theta) in the complex plane",
    right="sin(theta) + i cos(theta) = i e^(-i theta): it starts at i and rotates the other way",
    why="By the note's own formula the even entry is the sine. When theta grows by 0.1, the angle falls by 0.1, so a"
    " picture drawn from the sentence rotates the wrong way.",
    wrong_form=lambda theta: complex(math.cos(theta), math.sin(theta)),
    right_form=_e49_right,
    prove=_e49,
)


# ------------------------------------------------------------------------------------------------------------- E50
Speed = Callable[[int, int], Array]  # (position, width) -> radians per position of each pair (d/2,)


def _e50_right(position: int, dim: int) -> Array:
    """Angle by which the library rotates each pair from one position to the next."""
    x = torch.tensor([1.0, 0.0] * (dim // 2), dtype=torch.float64).repeat(2, 1)  # (N = 2, D)
    at = torch.tensor([position, position + 1])
    pairs = torch.view_as_complex(measures.turn(x, at, measures.frequencies(dim)).unflatten(-1, (-1, 2)))  # (N, D/2)
    return torch.angle(pairs[1] / pairs[0]).numpy()


def _e50(wrong: Speed, right: Speed) -> Sequence[Check]:
    return (
        equal("E50", "theta at position 0, fastest pair", float(wrong(0, 6)[0]), 0.0),
        above("E50", "theta used as the speed at position 5: error", worst(wrong(5, 6), frequencies(6)), 3.9),
        below("004-06 E50", "speeds minus 1, 0.0464, 0.00215", worst(right(0, 6), [1, 0.0464, 0.00215]), 5e-5),
        below("E50", "speeds at position 5 minus numpy", worst(right(5, 6), frequencies(6)), 1e-6),
    )


E50 = Erratum(
    id="E50",
    kind="B",
    where="note 004, line 33, which vector rotates faster",
    matter="theta is the angle, which depends on the position; the speed is the frequency",
    printed="the smaller i, the larger theta and so the faster the rotation, with theta = pos / 10000^(2i/d)",
    right="the speed is w_i = 10000^(-2i/d) radians per position; theta = pos * w_i is the current angle",
    why="At position 0 all angles are 0, but the pairs rotate at their usual speed. If theta were the speed, every"
    " pair would accelerate along the text.",
    wrong_form=lambda position, dim: position * frequencies(dim),
    right_form=_e50_right,
    prove=_e50,
)


# ------------------------------------------------------------------------------------------------------------- OK5
Exponent = Callable[[int], Tensor]  # width -> frequencies (d/2,)


def _ok5(tempting: Exponent, printed: Exponent) -> Sequence[Check]:
    ours = inverse_frequencies(16)[0]
    return (
        below("OK5", "exp(-arange(0, d, 2) log(10000) / d) minus the library", worst(printed(16), ours), 1e-7),
        below("OK5", "the same minus numpy", worst(printed(16), frequencies(16)), 1e-6),
        above("OK5", "with an additional factor 2: largest error", worst(tempting(16), frequencies(16)), 0.2),
    )


OK5 = Erratum(
    id="OK5",
    kind="OK",
    where="note 004, line 84 of absolute_positional_encoding, the exponent",
    matter="the exponent needs no factor 2: arange already steps by 2",
    printed="exp(-1 * arange(0, .., 2) * log(10000) / d_model)",
    right="as printed (with d_model instead of seq_len, E41): the elements of the range are 2i",
    why="Adding the formula's factor 2 is the mistake of note 002, line 38 (E24).",
    wrong_form=lambda dim: torch.exp(-2 * torch.arange(0, dim, 2) * math.log(10000.0) / dim),
    right_form=lambda dim: torch.exp(-1 * torch.arange(0, dim, 2) * math.log(10000.0) / dim),
    prove=_ok5,
)


ERRATA = (E39, E40, E41, E42, E43, E44, E45, E46, E47, E48, E49, E50, OK5)
