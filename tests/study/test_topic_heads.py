"""The topics bands and decay on tiny-kjv: their numbers against numpy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from llama.errors import UsageError
from llama.inside import activations
from llama.loader import load_model
from llama.study.measures import decay_bound, frequencies
from llama.study.perplexity import tiny_folder
from llama.study.topics import bands, decay, find

pytestmark = pytest.mark.usefixtures("one_thread")
Products = list[np.ndarray]


@pytest.fixture(scope="module")
def vectors() -> tuple[Products, Products]:
    """Queries and keys before RoPE as complex pairs (T, H, D/2), one per layer."""
    text = (tiny_folder() / "held-out.txt").read_bytes()
    tokens = torch.tensor([list(text[(len(text) - 128) // 2 :][:128])])
    model = load_model(tiny_folder(), dtype="float32")
    with torch.inference_mode(), activations(model, ["q.*", "k.*"]) as seen:
        model(tokens)
    q, k = ([seen[f"{name}.{layer}"][0].double().numpy() for layer in range(4)] for name in "qk")
    return [x[..., 0::2] + 1j * x[..., 1::2] for x in q], [x[..., 0::2] + 1j * x[..., 1::2] for x in k]


OMEGA = 10000.0 ** (-np.arange(16) / 16)  # those of tiny-kjv


def test_shares_and_weights_of_heads_are_those_of_their_products(vectors: tuple[Products, Products]) -> None:
    table = bands.data()
    apart = np.subtract.outer(np.arange(128), np.arange(128))  # (T, T) m - n
    previous, shares = [], []
    for layer, head in np.ndindex(4, 4):
        q, k = (x[layer][:, head] for x in vectors)  # (T, D/2)
        parts = np.einsum("mi,ni->mni", q, k.conj())
        scores = (parts * np.exp(1j * apart[..., None] * OMEGA)).sum(-1).real / np.sqrt(32)
        weights = np.where(apart >= 0, np.exp(scores), 0)
        previous.append(np.diagonal(weights / weights.sum(-1, keepdims=True), -1).mean())
        norms = np.abs(parts)[apart >= 0].sum(0)
        shares.append(norms / norms.sum())
    first = int(np.argmax(previous))
    rows = (table["panel"] == "pairs") & (table["kind"] == "1 most on the previous token")
    np.testing.assert_allclose(table["y"][rows], shares[first], rtol=2e-3, atol=1e-5)
    rows = table["panel"] == "heads"
    np.testing.assert_allclose(np.sort(table["y"][rows]), np.sort(previous), rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(np.sort(table["x"][rows]), np.sort([s[:4].sum() for s in shares]), rtol=2e-3, atol=1e-4)


def test_fast_pairs_carry_the_loss_and_the_previous_token() -> None:
    _, losses, previous = (np.array(column) for column in zip(*find("bands").report().tables[1].rows, strict=True))
    np.testing.assert_allclose(losses, [1.097, 2.654, 1.849, 1.098, 1.097, 3.376], atol=0.005)
    assert previous[1] < 0.3 * previous[0]  # without the fastest quarter


def test_bands_refuse_frequencies_that_depend_on_the_length(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder(), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="needs fixed frequencies"):
        find("bands").report(model=str(folder))


def test_shares_by_distance_agree_with_other_random_combinations(vectors: tuple[Products, Products]) -> None:
    curves = decay.order_data()
    shares = curves["share"].reshape(2, -1)  # (line, octave)
    rng = np.random.default_rng(1)
    for octave in (2, 4, 6, 12):
        a, b, c = rng.integers(1, 128, (3, 1000))
        r = 2**octave * (1 + rng.random((1000, 1)))
        found = []
        for q, k in zip(*vectors, strict=True):
            one, other = q[a] * k[b].conj(), q[a] * k[c].conj()  # (N, H, D/2)
            turn = np.exp(1j * r[..., None].round() * OMEGA)
            near, far, rival = (x.sum(-1).real for x in (one * turn, one * turn**2, other * turn))
            found.append(((near > far).mean(), ((near > rival) == ((one - other).sum(-1).real > 0)).mean()))
        np.testing.assert_allclose(shares[:, octave], np.mean(found, axis=0), atol=0.05)
    assert find("decay").report().tables[1].rows[0] == (7, 10, "0.99", "92", "353")  # pair 7: -sin(r omega) in 10 heads


@pytest.mark.parametrize(("base", "mean"), [(1e4, 5.59), (5e5, 8.56), (1e6, 9.17)])
def test_the_bound_is_the_mean_of_the_partial_sums(base: float, mean: float) -> None:
    at = np.arange(1, 4097)
    sums = np.exp(1j * np.outer(at, base ** (-np.arange(64) / 64))).cumsum(-1)
    bound = decay_bound(frequencies(128, base), torch.from_numpy(at)).numpy()
    np.testing.assert_allclose(bound, np.abs(sums).mean(-1), atol=1e-2)
    assert bound.mean() == pytest.approx(mean, abs=0.01)
