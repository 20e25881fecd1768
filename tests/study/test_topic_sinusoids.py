"""The topics order and sinusoids, against numpy and against arXiv:1706.03762."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from llama.study import encodings, measures, topics
from llama.study.topics import order, sinusoids


def outputs(x: np.ndarray, wq: np.ndarray, wk: np.ndarray, wv: np.ndarray, *, causal: bool) -> np.ndarray:
    """Attention without positions, word by word."""
    rows = []
    for m in range(len(x)):
        seen = x[: m + 1] if causal else x
        exp = np.exp(seen @ wk.T @ (wq @ x[m]) / np.sqrt(len(wq)))  # (S,)
        rows.append(exp @ (seen @ wv.T) / exp.sum())
    return np.array(rows)


def table(n: int, d: int, base: float) -> np.ndarray:
    """The sinusoidal table, entry by entry."""
    angle = [[t / base ** (2 * i / d) for i in range(d // 2)] for t in range(n)]
    return np.array([[f(a) for a in row for f in (np.sin, np.cos)] for row in angle])


def test_order_without_positions_a_word_keeps_its_output_in_all_24_orders() -> None:
    embeddings, *weights = order.drawn(8)
    x, wq, wk, wv = (part.numpy() for part in (embeddings, *weights))
    plain = encodings.attend(
        encodings.Encoding(), embeddings, weights[0], weights[1], weights[2], torch.arange(4)
    ).numpy()
    np.testing.assert_allclose(plain, outputs(x, wq, wk, wv, causal=False), atol=1e-12)
    for other in map(list, permutations(range(4))):
        np.testing.assert_allclose(outputs(x[other], wq, wk, wv, causal=False), plain[other], atol=1e-12)
    np.testing.assert_allclose(order.causal(embeddings, *weights), outputs(x, wq, wk, wv, causal=True), atol=1e-5)


def test_order_reports_no_difference_for_none_alone() -> None:
    gaps = {str(row[0]): float(str(row[2])) for row in topics.find("order").report().tables[0].rows}
    assert gaps.pop("none") < 1e-12
    assert set(gaps) == {"sinusoidal", "learned", "rope", "alibi", "none, causal mask"}
    assert min(gaps.values()) > 0.1


@pytest.mark.parametrize(("d", "base"), [(8, 16.0), (64, 10000.0), (128, 500000.0)])
def test_sinusoids_are_the_published_table_and_a_shift_is_a_rotation(d: int, base: float) -> None:
    rows = measures.sinusoids(torch.arange(60), d, base).numpy()
    np.testing.assert_allclose(rows, table(60, d, base), atol=1e-12)
    for k in (1, 3, 30):
        move = sinusoids.shift_matrix(d, base, k).numpy()
        np.testing.assert_allclose(rows[:-k] @ move.T, rows[k:], atol=1e-12)
        np.testing.assert_allclose(move @ move.T, np.eye(d), atol=1e-12)


def test_sinusoids_reports_the_wavelengths_and_that_only_sines_shift() -> None:
    hands, misfits = topics.find("sinusoids").report(head_dim=128).tables
    waves = [float(str(row[2])) for row in hands.rows]
    assert waves[0] == pytest.approx(2 * np.pi)
    assert waves[-1] == pytest.approx(54410.14, rel=1e-6)
    assert "1.15478" in hands.title
    sines, triangles = (float(str(row[1])) for row in misfits.rows)
    assert sines < 1e-10
    assert triangles == pytest.approx(0.19)
    waves_of = sinusoids.triangles(torch.arange(50), 8).numpy()
    np.testing.assert_allclose(waves_of, np.arcsin(table(50, 8, 10000.0)) * 2 / np.pi, atol=1e-6)
