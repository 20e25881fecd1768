"""Every scaling at real sizes: against a formula in numpy's float64, against transformers, against Meta's code.

The library computes in float64 and rounds once, so it must match the formulas to half a step of float32. transformers
and Meta compute in float32 and have errors of about 1e-6; tests that need a larger tolerance state it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llama
from llama import rope
from llama.rope_scaling import SCALINGS, inverse_frequencies, stretched

from .. import meta_code
from . import by_hand
from .by_hand import LAW, Array

pytestmark = pytest.mark.usefixtures("one_thread")

DIMS, THETAS, FACTORS = (32, 64, 96, 128), (1e4, 1e5, 5e5, 1e6), (1.0, 1.5, 2.0, 4.0, 8.0, 32.0)
GRID = list(itertools.product(DIMS, THETAS, FACTORS))
LENGTHS = (1, 2048, 2049, 4096, 8191, 8192, 8193, 32768, 131072)
ROUNDED = 2**-24  # the largest relative error of a float64 rounded to float32


# ------------------------------------------------------------------------ an independent implementation of the formulas
def plain(d: int, theta: float) -> Array:
    return np.exp(-2 * np.arange(d // 2) / d * math.log(theta))


def linear(d: int, theta: float, factor: float) -> Array:
    return plain(d, theta) / factor


def ntk(d: int, theta: float, factor: float) -> Array:
    """NTK-aware as a divisor of each pair: factor^(i / (D/2 - 1))."""
    return plain(d, theta) / factor ** (np.arange(d // 2) / (d / 2 - 1))


def dynamic(d: int, theta: float, factor: float, length: int, trained: int) -> Array:
    """ntk with a factor that is 1 up to the trained length, and grows by `factor` for each further trained length."""
    return ntk(d, theta, 1 + factor * max(0, length - trained) / trained)


def yarn(
    d: int, theta: float, factor: float, trained: int, fast: float = 32, slow: float = 1, truncate: bool = True
) -> Array:
    """The ramp of YaRN's code, linear in the pair's index."""

    def index(turns: float) -> float:  # of the pair that makes so many turns within the trained length
        return d / 2 * math.log(trained / (2 * math.pi * turns), theta)

    first, last = index(fast), index(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    width = 0.001 if first == last else last - first
    out = plain(d, theta)
    for i in range(d // 2):
        interpolated = min(max((i - first) / width, 0), 1)
        out[i] *= 1 - interpolated + interpolated / factor
    return out


def yarn_attention(factor: float, over: float = 1, under: float = 0) -> float:
    """The square root of YaRN's 1 / t (equation 22), 0.1 ln s + 1; with two weights, a quotient of two such terms."""
    grows = math.log(factor) / 10 if factor > 1 else 0
    return (1 + over * grows) / (1 + under * grows)


def llama3(d: int, theta: float, factor: float, trained: float = 8192, low: float = 1, high: float = 4) -> Array:
    """By the wavelength, pair by pair, as in Llama 3.1's code."""
    out = plain(d, theta)
    for i, w in enumerate(out):
        wave = 2 * math.pi / w
        if wave > trained / low:
            out[i] = w / factor
        elif wave >= trained / high:
            smooth = (trained / wave - low) / (high - low)
            out[i] = (1 - smooth) * w / factor + smooth * w
    return out


def longrope_attention(factor: float, trained: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0


def lists(d: int) -> dict[str, list[float]]:
    return {"short_factor": [1 + 0.01 * i for i in range(d // 2)], "long_factor": [1 + 0.7 * i for i in range(d // 2)]}


LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def theirs(
    d: int, theta: float, scaling: dict[str, Any], context: int, length: int | None = None, exact: bool = False
) -> tuple[Array, float]:
    """transformers' results, by the function that its Llama calls; `exact` runs it in float64 where possible."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config: Any = SimpleNamespace(
        rope_parameters={**scaling, "rope_theta": theta}, head_dim=d, hidden_size=4 * d, num_attention_heads=4,
        max_position_embeddings=context, standardize_rope_params=lambda: None,
    )  # fmt: skip
    kind = scaling["rope_type"]
    with mock.patch.object(torch, "float", torch.float64 if exact else torch.float32):
        if kind == "default":
            inv_freq, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        else:
            inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    return inv_freq.double().numpy(), factor


def check(
    d: int, theta: float, scaling: dict[str, Any], expected: Array, attention: float = 1.0, *,
    context: int = 8192, length: int | None = None, in_transformers: bool = True, loss: float = 1.0,
) -> None:  # fmt: skip
    """Compare the library with the formula up to one rounding, and with transformers up to 1e-6 * loss.

    With loss > 1 the library is also compared with transformers' code in float64, up to 1e-6.
    """
    ours, factor = inverse_frequencies(d, theta, scaling, seq_len=length, max_seq_len=context)
    assert (ours.dtype, ours.shape) == (torch.float32, (d // 2,))
    np.testing.assert_allclose(ours.double().numpy(), expected, rtol=ROUNDED * 1.001, atol=0)
    assert factor == pytest.approx(attention, rel=1e-12)
    if in_transformers:
        inv_freq, their_factor = theirs(d, theta, scaling, context, length)
        np.testing.assert_allclose(ours.double().numpy(), inv_freq, rtol=1e-6 * loss, atol=0)
        assert factor == pytest.approx(their_factor, rel=1e-9)
        if loss > 1:
            inv_freq, _ = theirs(d, theta, scaling, context, length, exact=True)
            np.testing.assert_allclose(ours.double().numpy(), inv_freq, rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------------- the grid
def test_default() -> None:
    for d, theta in itertools.product(DIMS, THETAS):
        check(d, theta, {"rope_type": "default"}, plain(d, theta))


def test_linear() -> None:
    for d, theta, factor in GRID:
        check(d, theta, {"rope_type": "linear", "factor": factor}, linear(d, theta, factor))


def test_ntk() -> None:
    for d, theta, factor in GRID:
        check(d, theta, {"rope_type": "ntk", "factor": factor}, ntk(d, theta, factor), in_transformers=False)


def test_dynamic_at_every_length() -> None:
    for (d, theta, factor), trained in itertools.product(GRID, (2048, 8192)):
        for length in LENGTHS:
            expected = dynamic(d, theta, factor, length, trained)
            check(d, theta, {"rope_type": "dynamic", "factor": factor}, expected, context=trained, length=length)


def test_yarn() -> None:
    for (d, theta, factor), trained in itertools.product(GRID, (2048, 8192, 32768)):
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
        check(d, theta, scaling, yarn(d, theta, factor, trained), yarn_attention(factor), context=int(factor * trained))


def optional_keys() -> Iterator[tuple[dict[str, Any], dict[str, Any], float | None]]:
    """Combinations of yarn's optional keys: (keys, arguments of the formula, attention factor at factor 8)."""
    for fast, slow, truncate in itertools.product((None, 16.0, 64.0), (None, 0.5, 2.0), (None, True, False)):
        ramp = {"beta_fast": fast, "beta_slow": slow, "truncate": truncate}
        yield (
            {key: value for key, value in ramp.items() if value is not None},
            {"fast": fast or 32, "slow": slow or 1, "truncate": truncate is not False},
            None,
        )
    for over, under, attention in itertools.product((None, 0.7, 1.0), (None, 0.5, 1.0), (None, 1.3)):
        weights = {"mscale": over, "mscale_all_dim": under, "attention_factor": attention}
        both = over is not None and under is not None
        expected = attention or (yarn_attention(8, over or 1, under or 0) if both else yarn_attention(8))
        yield {key: value for key, value in weights.items() if value is not None}, {}, expected


@pytest.mark.parametrize(("keys", "means", "attention"), list(optional_keys()), ids=str)
def test_every_optional_key_of_yarn(keys: dict[str, Any], means: dict[str, Any], attention: float | None) -> None:
    for d, theta in itertools.product(DIMS, THETAS):
        scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, **keys}
        expected = yarn_attention(8) if attention is None else attention
        check(d, theta, scaling, yarn(d, theta, 8.0, 4096, **means), expected, context=32768)


@pytest.mark.parametrize(
    "keys", [{"beta_fast": None, "beta_slow": None, "attention_factor": None}, {"factor": None}], ids=str
)
def test_a_key_with_null_is_like_a_missing_key(keys: dict[str, Any]) -> None:
    """Without a factor, the factor is the context divided by the trained length."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, **keys}
    check(64, 1e4, scaling, yarn(64, 1e4, 8.0, 4096), yarn_attention(8), context=32768)


def test_longrope_short_and_long() -> None:
    for (d, theta, factor), trained in itertools.product(GRID, (4096, 8192)):
        both = lists(d)
        scaling = {"rope_type": "longrope", "factor": factor, "original_max_position_embeddings": trained, **both}
        for length in LENGTHS:
            divide = np.array(both["long_factor" if length > trained else "short_factor"])
            attention = longrope_attention(factor, trained)
            check(d, theta, scaling, plain(d, theta) / divide, attention, context=131072, length=length)


def test_longropes_factor_is_explicit_or_from_the_context() -> None:
    for keys, attention in (
        ({}, longrope_attention(131072 / 4096, 4096)),
        ({"factor": 2.0}, longrope_attention(2, 4096)),
        ({"attention_factor": 1.25}, 1.25),
        ({"factor": 0.5}, 1.0),
    ):
        scaling = {
            "rope_type": "longrope",
            "factor": None,
            "original_max_position_embeddings": 4096,
            **lists(96),
            **keys,
        }
        divide = np.array(lists(96)["short_factor"])
        check(96, 1e4, scaling, plain(96, 1e4) / divide, attention, context=131072, length=4096)


def test_llama3() -> None:
    """transformers' float32 ramp loses digits near its slow end, in the difference of turns and 1; so loss is 3."""
    for (d, theta, factor), trained in itertools.product(GRID, (2048, 8192)):
        scaling = {**LLAMA3, "factor": factor, "original_max_position_embeddings": trained}
        check(d, theta, scaling, llama3(d, theta, factor, trained), loss=3)
    for low, high in ((0.5, 2.0), (1.0, 8.0), (3.0, 3.5)):
        scaling = {**LLAMA3, "factor": 8.0, "low_freq_factor": low, "high_freq_factor": high}
        check(128, 5e5, scaling, llama3(128, 5e5, 8.0, 8192, low, high), loss=3)


def test_divisors() -> None:
    for d, theta in itertools.product(DIMS, THETAS):
        divide = lists(d)["long_factor"]
        scaling = {"rope_type": "divisors", "divisors": divide}
        check(d, theta, scaling, plain(d, theta) / np.array(divide), in_transformers=False)


def test_proportional() -> None:
    for (d, theta, factor), part in itertools.product(GRID, (0.25, 0.5, 1.0)):
        expected = linear(d, theta, factor)
        expected[int(part * d // 2) :] = 0
        scaling = {"rope_type": "proportional", "partial_rotary_factor": part, "factor": factor}
        check(d, theta, scaling, expected)


def test_every_kind_is_on_the_grid() -> None:
    tried = {name.split("_")[1] for name in globals() if name.startswith("test_")}
    assert set(SCALINGS) <= tried


# ------------------------------------------------------------------------------------------------------- Meta's code
@pytest.mark.parametrize("d", DIMS)
def test_llama3_with_factor_8_is_metas_apply_scaling(d: int) -> None:
    folder = meta_code.unpacked("llama-models==0.3.0")
    meta = by_hand.functions_of(
        folder / "llama_models" / "llama3" / "model.py", "apply_scaling", "precompute_freqs_cis"
    )
    for theta in THETAS:
        ours, _ = inverse_frequencies(d, theta, {**LLAMA3, "factor": 8.0})
        exact = meta["apply_scaling"](torch.from_numpy(plain(d, theta)))  # their function, float64 in and out
        np.testing.assert_allclose(ours.double().numpy(), exact.numpy(), rtol=ROUNDED * 1.001, atol=0)
        theirs_32 = 1.0 / (theta ** (torch.arange(0, d, 2).float() / d))  # as in their precompute_freqs_cis
        np.testing.assert_allclose(ours.numpy(), meta["apply_scaling"](theirs_32).numpy(), rtol=1e-6, atol=0)
        table = meta["precompute_freqs_cis"](d, 512, theta, True)
        by_us = llama.precompute_freqs_cis(d, 512, theta, {**LLAMA3, "factor": 8.0})
        torch.testing.assert_close(by_us, table, rtol=0, atol=3e-4)


# --------------------------------------------------------------------------------------------- laws of the scalings
def scaled(kind: str, d: int, theta: float, factor: float, length: int = 8192) -> Array:
    """The divisor of each pair under a kind, before rounding, for a model trained on 4,096 tokens."""
    base = llama.rope_scaling.Base(d, theta, seq_len=length, max_seq_len=4096)
    more: dict[str, Any] = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **lists(d)}
    return plain(d, theta) / SCALINGS[kind](base, more)[0].numpy()


@LAW
@given(
    kind=st.sampled_from(["linear", "ntk", "yarn", "llama3"]),
    d=st.sampled_from(DIMS),
    theta=st.sampled_from(THETAS),
    factor=st.floats(1, 64),
)
def test_divisors_are_between_1_and_the_factor_and_increase_with_the_pair(
    kind: str, d: int, theta: float, factor: float
) -> None:
    divisor = scaled(kind, d, theta, factor)
    assert divisor.min() >= 1 - 1e-12
    assert divisor.max() <= factor * (1 + 1e-12)
    assert bool(np.all(np.diff(divisor) >= -1e-9))


def test_yarns_code_is_not_yarns_paper() -> None:
    """The code's ramp is linear in the pair's index, the paper's in its turns; they differ most at pair 34."""
    turns = 4096 * plain(128, 1e4) / (2 * math.pi)
    keep = np.clip((turns - 1) / (32 - 1), 0, 1)
    apart = scaled("yarn", 128, 1e4, 4.0) * (keep + (1 - keep) / 4)  # divisor of the code / divisor of the paper
    apart = np.maximum(apart, 1 / apart)
    assert (int(apart.argmax()), float(apart.max())) == (34, pytest.approx(1.733, abs=1e-3))


@pytest.mark.parametrize("kind", ["linear", "ntk", "dynamic", "yarn"])
def test_the_stretched_context_is_within_reach(kind: str) -> None:
    for factor in FACTORS:
        assert stretched(4096, {"rope_type": kind, "factor": factor}) == int(4096 * factor)


# -------------------------------------------------------------------------------- angles and tables, to 131,072
EXAMPLES: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "ntk", "factor": 8.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    {**LLAMA3, "factor": 8.0},
]
FAR = np.unique(np.concatenate([np.arange(0, 64), 2 ** np.arange(6, 18), 2 ** np.arange(6, 18) - 1, [99_999, 131_071]]))


@pytest.mark.parametrize("scaling", EXAMPLES, ids=lambda s: s["rope_type"] if s else "none")
@pytest.mark.parametrize("theta", THETAS)
def test_angles_to_position_131072(scaling: dict[str, Any] | None, theta: float) -> None:
    """An angle is the rounded product of an exact position and a rounded frequency: two roundings."""
    context = 8192
    for d in DIMS:
        inv_freq, _ = inverse_frequencies(d, theta, scaling, seq_len=131072, max_seq_len=context)
        base = llama.rope_scaling.Base(d, theta, 131072, context)
        exact = SCALINGS[(scaling or {}).get("rope_type", "default")](base, scaling or {})[0].numpy()  # float64
        angles = (torch.from_numpy(FAR).float().numpy()[:, None] * inv_freq.numpy()).astype(np.float64)  # (N, D/2)
        np.testing.assert_allclose(angles, FAR[:, None] * exact, rtol=2 * ROUNDED * 1.001, atol=0)
        table = rope.freqs_cis_at(torch.from_numpy(FAR), inv_freq).to(torch.complex128).numpy()
        off = np.abs(table - np.exp(1j * FAR[:, None] * exact))
        # The error bound of float32 for each entry: two roundings of the angle, and the roundings of cos and sin.
        assert bool(np.all(off <= 2 * ROUNDED * FAR[:, None] * exact + 2e-7))


@pytest.mark.parametrize(
    ("d", "theta"),
    [(128, 5e5), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((64, 5e5), (64, 1e4), (128, 1e4)))],
)
def test_the_complete_table_to_131072(d: int, theta: float) -> None:
    """Measured at position 131,071: Meta's float32 table has an error of 3.7e-3, ours less; ours is below 7.8e-3."""
    table = llama.precompute_freqs_cis(d, 131072, theta)
    last = np.exp(1j * 131071 * plain(d, theta))
    ours = table[-1].to(torch.complex128).numpy()
    assert max(float(np.abs((ours - last).real).max()), float(np.abs((ours - last).imag).max())) < 3.7e-3
    worst = 0.0
    for start in range(0, 131072, 16384):
        exact = np.cos(np.outer(np.arange(start, start + 16384), plain(d, theta)))
        worst = max(worst, float(np.abs(table.real[start : start + 16384].numpy() - exact).max()))
    assert 1e-3 < worst < 131072 * 2 * 2**-25  # half a step of a frequency in [1/2, 1), and of an angle near 131,071
    if theta == 5e5:
        folder = meta_code.unpacked("llama-models==0.3.0")
        meta = by_hand.functions_of(folder / "llama_models" / "llama3" / "model.py", "precompute_freqs_cis")
        row = meta["precompute_freqs_cis"](d, 131072, theta)[-1].to(torch.complex128).numpy()
        assert float(np.abs((row - last).imag).max()) == pytest.approx(3.7e-3, rel=2e-2)
