"""The topics trained, others and variants, against numpy and the code of published models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llama.study import measures
from llama.study.results import json_lines
from llama.study.topics import others, trained, variants

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_table_of_losses_has_the_means_of_the_stored_runs() -> None:
    runs = [run["loss"] for run in json_lines(trained.FILE) if run["encoding"] == "alibi"]
    (row,) = [row for row in trained.report().tables[0].rows if row[0] == "ALiBi"]
    means = np.array(runs).reshape(3, 4, 8).mean((0, 2))  # by 128 positions
    np.testing.assert_allclose([row[1], row[4], row[5]], means[[0, 2, 3]], atol=5e-4)
    np.testing.assert_allclose(row[6], np.array(runs)[:, :8].mean(1).std(ddof=1), atol=5e-4)


def test_only_added_positions_have_several_scores_at_one_distance() -> None:
    spreads = {row[0]: row[3] for row in others.report().tables[0].rows}
    assert spreads.pop("sinusoids, added") > 1  # type: ignore[operator]
    assert set(spreads.values()) == {0}


def test_scores_equal_loops_in_numpy() -> None:
    """Shaw, Transformer-XL, T5 and ALiBi, query by query and key by key."""
    draw, n, d = torch.Generator().manual_seed(0), 7, 8
    sizes = ((n, d), (n, d), (d, 6), (5, d), (d,), (d,), (32,))
    q, k, wr, table, u, v, bias = (torch.randn(*s, generator=draw, dtype=torch.float64) for s in sizes)
    found = (
        others.shaw(q, k, table),
        others.transformer_xl(q, k, wr, u, v),
        others.t5(q, k, bias),
        others.alibi(q, k, 0.25),
    )
    Q, K, A, W, U, V, B = (x.numpy() for x in (q, k, table, wr, u, v, bias))
    for m in range(n):
        for j in range(m + 1):
            t = m - j
            angles = t * 10000.0 ** (-np.arange(0, 6, 2) / 6)
            r = np.stack((np.sin(angles), np.cos(angles)), -1).ravel()
            expected = (
                Q[m] @ (K[j] + A[min(t, 2) + 2]),
                (Q[m] + U) @ K[j] + (Q[m] + V) @ (W @ r),
                Q[m] @ K[j] + B[t],  # one bucket for each distance below 16
                Q[m] @ K[j] - 0.25 * t,
            )
            np.testing.assert_allclose([x[m, j] for x in found], expected, atol=1e-9)


def test_t5_buckets_and_alibi_slopes_are_the_published_ones() -> None:
    begins = [*range(17), *np.ceil(16 * 8 ** (np.arange(1, 16) / 16))]  # first distance of each bucket
    at = np.arange(3000)
    np.testing.assert_array_equal(others.t5_bucket(torch.tensor(at)), np.searchsorted(begins, at, side="right") - 1)
    assert others.alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]


def test_a_part_of_a_head_rotates_like_a_head_of_its_own() -> None:
    x = np.random.default_rng(0).standard_normal((9, 32))
    pairs = x[:, :16:2] + 1j * x[:, 1:16:2]
    pairs = pairs * np.exp(1j * np.outer(np.arange(9), 10000.0 ** (-np.arange(8) / 8)))
    expected = np.concatenate((np.stack((pairs.real, pairs.imag), -1).reshape(9, 16), x[:, 16:]), -1)
    found = variants.partly_turned(torch.tensor(x), torch.arange(9), 16)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("freqs", [variants.axial(16), variants.mixed(16)])
def test_a_score_in_the_plane_depends_on_the_difference_of_places(freqs: torch.Tensor) -> None:
    q, k = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = (
        measures.rotated(x, torch.tensor([at], dtype=torch.float64) @ freqs) for x, at in ((q, (3, 5)), (k, (1, 9)))
    )
    zq, zk = (x.numpy()[0, 0::2] + 1j * x.numpy()[0, 1::2] for x in (q, k))
    expected = (zq * zk.conj() * np.exp(1j * (np.array([2, -4]) @ freqs.numpy()))).real.sum()
    assert float(one @ other.T) == pytest.approx(expected, abs=1e-9)
