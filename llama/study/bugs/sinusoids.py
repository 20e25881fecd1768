"""Bugs in the table of sinusoids."""

from __future__ import annotations

import math

import numpy as np
import torch

from .. import measures
from .base import Bug, Row, frequencies, residual, row, sinusoids, table
from .quiz import Number

WIDTH = Number("width of the table", 8, 64, 8)
POS = Number("position", 1, 40, 1)


def _right(pos: float, i: float, d: float) -> float:
    """Column i of the library's table."""
    return float(measures.sinusoids(torch.tensor([int(pos)]), int(d))[0, int(i)])


def _exponent() -> list[Row]:
    wrong, right = table(256, 64, lambda pos, i: pos / 10000 ** (2 * pos / 64)), sinusoids(256, 64)
    return [
        row("different sine columns, of 32", lambda pe: len(np.unique(pe[:, 0::2].T, axis=0)), wrong, right),
        row("largest range of a column, rows 100 to 255", lambda pe: float(np.ptp(pe[100:], 0).max()), wrong, right),
        row("best linear map from row pos to pos + 1: error", lambda pe: residual(pe, 1), wrong, right),
    ]


def _step() -> list[Row]:
    wrong, right = table(2, 8, lambda pos, i: pos / 10000 ** (4 * i / 8)), sinusoids(2, 8)
    return [(f"pe[1, {i}]", float(wrong[1, i]), float(right[1, i])) for i in (0, 2, 4, 6)]


def _cosine() -> list[Row]:
    right = sinusoids(64, 16)
    wrong = table(64, 16, lambda pos, i: pos / 10000 ** (2 * i / 16), lambda pos, i: pos / 10000 ** ((4 * i + 2) / 16))
    lengths = [x[:, 0::2] ** 2 + x[:, 1::2] ** 2 for x in (wrong, right)]
    return [
        ("sin^2 + cos^2 of a pair, smallest", float(lengths[0].min()), float(lengths[1].min())),
        ("sin^2 + cos^2 of a pair, largest", float(lengths[0].max()), float(lengths[1].max())),
        ("best linear map from row pos to pos + 3: error", residual(wrong, 3), residual(right, 3)),
    ]


def _div_term() -> list[Row]:
    def made(seq_len: int, d: int, count: int) -> str | float:
        div_term = torch.exp(-torch.arange(0, count, 2) * math.log(10000) / d)
        pe = torch.zeros(seq_len, d)
        try:
            pe[:, 0::2] = torch.sin(torch.arange(seq_len)[:, None] * div_term)
        except RuntimeError as error:
            return type(error).__name__
        return round(float(np.abs(pe[:, 0::2].numpy() - sinusoids(seq_len, d)[:, 0::2]).max()), 5)

    return [
        (f"seq_len = {n}, d_model = {d}: error of the sines", made(n, d, n), made(n, d, d))
        for n, d in ((10, 16), (16, 16), (2, 16))
    ]


def _power() -> list[Row]:
    right = frequencies(16)
    return [(f"d = 16, i = {i}", math.exp(2 * i / 16) * math.log(10000), float(right[i])) for i in (0, 1, 3)]


def _complex() -> list[Row]:
    at = np.array([0.0, 0.1])
    wrong, right = np.angle(np.exp(1j * at)), np.angle(np.sin(at) + 1j * np.cos(at))
    return [
        ("direction of the pair at a = 0, in radians", float(wrong[0]), float(right[0])),
        ("its change when a grows by 0.1", float(np.diff(wrong)[0]), float(np.diff(right)[0])),
    ]


BUGS = (
    Bug(
        name="exponent",
        line="pe[pos, 2*i] = sin(pos / 10000**(2*pos/d))",
        predict="A table of width 64 has 32 sine columns. How many of them differ from each other?",
        evidence=_exponent,
        ask="pe[pos, 2*i]",
        names={"pos": POS, "i": Number("pair, from 0", 1, 3, 1), "d": WIDTH},
        truth=lambda pos, i, d: _right(pos, 2 * i, d),
        wrong="sin(pos / 10000**(2*pos/d))",
        right="sin(pos / 10000**(2*i/d))",
        why="The exponent uses the position instead of the pair, so all pairs of a row are equal, and from row 100 on"
        " all rows are nearly equal. The table has no frequencies, and no linear map leads from one row to the next.",
    ),
    Bug(
        name="step",
        line="for i in range(0, d, 2): pe[pos, i] = sin(pos / 10000**((2*i)/d))",
        predict="Does the code fail? At d = 8, which of the sine columns 0, 2, 4, 6 are wrong?",
        evidence=_step,
        ask="pe[pos, i]",
        names={"pos": POS, "i": Number("loop variable: 2, 4, 6", 2, 6, 2), "d": WIDTH},
        truth=_right,
        wrong="sin(pos / 10000**((2*i)/d))",
        right="sin(pos / 10000**(i/d))",
        why="The loop's i already steps by 2, so 2*i doubles the exponent. Nothing fails, and the first column is"
        " right, but every other pair rotates too slowly, and the slower half hardly at all.",
    ),
    Bug(
        name="cosine",
        line="for i in range(0, d, 2): pe[pos, i+1] = cos(pos / 10000**((2*(i+1))/d))",
        predict="In a right table, sin^2 + cos^2 of every pair is 1. What is its range here?",
        evidence=_cosine,
        ask="pe[pos, i+1]",
        names={"pos": POS, "i": Number("loop variable: 0, 2, 4, 6", 0, 6, 2), "d": WIDTH},
        truth=lambda pos, i, d: _right(pos, i + 1, d),
        wrong="cos(pos / 10000**((2*(i+1))/d))",
        right="cos(pos / 10000**(i/d))",
        why="The sine and the cosine of one angle are a unit vector that rotates by a fixed angle per position. Here"
        " the cosine has another frequency than the sine of its pair, so the length of the pair changes with the"
        " position, and no linear map leads from row pos to row pos + 3.",
    ),
    Bug(
        name="div-term",
        line="div_term = exp(-arange(0, seq_len, 2) * log(10000) / d_model)  # seq_len/2 elements",
        predict="For which of the shapes (10, 16), (16, 16) and (2, 16) does it fail, and for which is it wrong?",
        evidence=_div_term,
        ask="the number of elements of div_term in a table of seq_len rows and d_model columns",
        names={"seq_len": Number("rows, even", 4, 64, 2), "d_model": Number("columns, even", 8, 128, 2)},
        truth=lambda seq_len, d_model: float(np.zeros((int(seq_len), int(d_model)))[:, 0::2].shape[1]),
        wrong="seq_len / 2",
        right="d_model / 2",
        why="The frequencies belong to the columns, not to the rows. Most shapes fail. With seq_len = d_model the table"
        " is right by accident; with two rows, a single frequency is broadcast to all columns without an error.",
    ),
    Bug(
        name="power",
        line="1 / 10000**(2*i/d) = exp(2*i/d) * log(10000)",
        predict="Does the right side grow or fall with i? At i = 0 the left side is 1; what is the right side?",
        evidence=_power,
        ask="the left side, written with exp and log",
        names={"i": Number("pair, from 0", 0, 3, 1), "d": WIDTH},
        truth=lambda i, d: float(measures.frequencies(int(d))[int(i)]),
        wrong="exp(2*i/d) * log(10000)",
        right="exp(-(2*i/d) * log(10000))",
        why="a**b is exp(b * log(a)): the logarithm belongs inside the exponential, and the minus sign is missing.",
    ),
    Bug(
        name="first-axis",
        line="pe[2*i] + 1j * pe[2*i + 1] = cos(a) + 1j * sin(a)  # a = pos * w; its imaginary part is sin(a)",
        predict="When the angle a grows by 0.1, in which direction does the pair rotate?",
        evidence=_complex,
        ask="the imaginary part of pe[2*i] + 1j * pe[2*i + 1], where the even entry is the sine",
        names={"a": Number("angle of the pair", 0.1, 1.5)},
        truth=lambda a: float((1j * np.exp(-1j * a)).imag),
        wrong="sin(a)",
        right="cos(a)",
        why="The even entry is the sine, so the pair is sin(a) + j cos(a). It starts at 12 o'clock and rotates"
        " clockwise; a picture drawn from the wrong line rotates in the other direction.",
    ),
)
