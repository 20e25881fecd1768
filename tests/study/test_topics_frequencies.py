"""The topics wavelengths, decay, clock, pairing, scale and precision: their reports, and every number of their figures.

This file has its own frequencies, tables and decoder in numpy's float64, independent of the library and of
llama/study/formulas.py. A report with a planted wrong computation must fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama import rope, rope_scaling
from llama.cli import main
from llama.config import ModelConfig
from llama.errors import ConfigError, UsageError
from llama.model import Transformer
from llama.rope_scaling import SCALINGS
from llama.study import figure as figures
from llama.study import forms, formulas
from llama.study.report import Report, text
from llama.study.stretch import Stretch
from llama.study.topics import clock, decay, find, pairing, precision, scale, wavelengths

from . import drawing

NAMES = ("wavelengths", "decay", "clock", "pairing", "scale", "precision")
FIGURES = [(name, figure) for name in NAMES for figure in find(name).figures]

OTHERS: dict[str, list[dict[str, Any]]] = {
    "wavelengths": [
        {"theta": 500000.0, "context": 8192, "factor": 16.0},
        {"head_dim": 4, "theta": 100.0, "context": 16, "factor": 1.0},
        {"head_dim": 1024, "theta": 1e12, "context": 2**20, "factor": 1024.0},
    ],
    "scale": [
        {"head_dim": 64, "theta": 500000.0, "context": 8192, "factor": 8.0},
        {"head_dim": 4, "theta": 100.0, "context": 16, "factor": 1.01},
        {"head_dim": 1024, "theta": 1e12, "context": 2**20, "factor": 1024.0},
        {"head_dim": 6, "theta": 10000.0, "context": 2048, "factor": 4.0},
    ],
    "decay": [
        {"head_dim": 64, "theta": 123456.789, "context": 1234},
        {"head_dim": 4, "theta": 100.0, "context": 16},
        {"head_dim": 1024, "theta": 1e10, "context": 2048},
    ],
    "clock": [{"factor": 1.01}, {"factor": 7.7}, {"factor": 1024.0}],
    "pairing": [{"head_dim": 4, "theta": 100.0}, {"head_dim": 512, "theta": 1e12}],
    "precision": [
        {"head_dim": 4, "theta": 1e12, "context": 512},
        {"head_dim": 64, "theta": 10000.0, "context": 12345},
        {"head_dim": 1024, "theta": 500000.0, "context": 2**20},
    ],
}


def failed(report: Report) -> list[str]:
    """The checks of a report that fail."""
    return [check.what for check in report.checks if not check.passed]


def within_limits(report: Report) -> None:
    lines = text(report).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 110, max(lines, key=len)


# ------------------------------------------------------------------------------------------------------------- reports
@pytest.mark.parametrize("name", NAMES)
def test_a_report_passes_and_fits_a_screen(name: str) -> None:
    report = find(name).report()
    assert not failed(report)
    assert report.topic == name
    assert all(check.claim for check in report.checks)
    within_limits(report)


@pytest.mark.parametrize(("name", "options"), [(name, options) for name in NAMES for options in OTHERS[name]])
def test_a_report_passes_and_fits_a_screen_at_other_settings(name: str, options: dict[str, Any]) -> None:
    report = find(name).report(**options)
    assert not failed(report)
    assert {key: report.settings[key] for key in options} == options
    within_limits(report)


HEADS = st.integers(2, 128).map(lambda half: 2 * half)
BASES = st.floats(100, 1e9)


@settings(max_examples=30, deadline=None)
@given(HEADS, BASES, st.integers(16, 2**20), st.floats(1, 200))
def test_the_checks_on_scalings_pass_for_any_context(D: int, theta: float, L: int, s: float) -> None:
    for topic in (wavelengths, scale):
        report = topic.report(D, theta, L, s if topic is wavelengths else max(s, 1.01))
        assert not failed(report)
        within_limits(report)


@settings(max_examples=15, deadline=None)
@given(HEADS, BASES, st.integers(16, 4096))
def test_the_checks_on_decay_pass_for_any_base(D: int, theta: float, L: int) -> None:
    report = decay.report(D, theta, L)
    assert not failed(report)
    within_limits(report)


@settings(max_examples=25, deadline=None)
@given(st.floats(1.01, 1024))
def test_the_checks_on_the_clock_pass_for_any_factor(s: float) -> None:
    report = clock.report(s)
    assert not failed(report)
    within_limits(report)


@settings(max_examples=15, deadline=None)
@given(HEADS, BASES, st.integers(512, 2**20))
def test_the_checks_on_rounding_pass_for_any_context(D: int, theta: float, L: int) -> None:
    report = precision.report(D, theta, L)
    assert not failed(report)
    within_limits(report)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("wavelengths", {"head_dim": 7}),
        ("wavelengths", {"head_dim": 2}),
        ("wavelengths", {"head_dim": 64.0}),
        ("wavelengths", {"theta": math.nan}),
        ("wavelengths", {"theta": 1.0}),
        ("wavelengths", {"theta": "1e4"}),
        ("wavelengths", {"context": 0}),
        ("wavelengths", {"context": True}),
        ("wavelengths", {"factor": 0.5}),
        ("wavelengths", {"factor": math.inf}),
        ("scale", {"head_dim": -128}),
        ("scale", {"context": 2**31}),
        ("decay", {"head_dim": 9}),
        ("decay", {"theta": -1.0}),
        ("decay", {"context": 100000}),
        ("scale", {"factor": 1.0}),
        ("clock", {"factor": 0.0}),
        ("clock", {"factor": 1.0}),
        ("pairing", {"head_dim": 6000}),
        ("pairing", {"head_dim": 5}),
        ("pairing", {"theta": math.inf}),
        ("precision", {"head_dim": 3}),
        ("precision", {"context": 100}),
    ],
)
def test_bad_settings_are_errors_of_one_line(name: str, options: dict[str, Any]) -> None:
    topic = find(name)
    (value,) = options.values()
    for run in (topic.report, *(f.data for f in topic.figures if name != "pairing")):
        with pytest.raises((UsageError, ConfigError)) as error:
            run(**options)
        assert "\n" not in str(error.value)
        assert str(value) in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pairing", {"head_dim": 3}, "--head-dim of this topic must be an integer from 4 to 512, got 3"),
        ("scale", {"head_dim": 7}, "--head-dim must be even, since RoPE rotates pairs of entries; got 7"),
        (
            "decay",
            {"theta": 1e13},
            "--rope-theta of this topic must be a number from 100 to 1e+10, got 10000000000000.0",
        ),
        ("precision", {"context": 9}, "--context of this topic must be an integer from 512 to 1048576, got 9"),
        ("clock", {"factor": 1.0}, "--rope-factor of this topic must be a number from 1.01 to 1024, got 1.0"),
    ],
)
def test_errors_about_settings_have_one_form(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        find(name).report(**options)
    assert str(error.value) == message


def prose(name: str, **options: Any) -> str:
    return " ".join(find(name).report(**options).says)


def test_the_prose_on_decay_follows_the_numbers() -> None:
    assert "its mean falls for every base; over all distances it is larger for each larger base" in prose("decay")
    assert "its mean falls for no base; over all distances it is not larger" in prose("decay", head_dim=4)
    half = 2048
    for D in (4, 128):
        for base in (1e4, 5e5, 1e6):
            w = base ** (-2 * np.arange(D // 2) / D)
            bound = np.abs(np.cumsum(np.exp(1j * np.outer(np.arange(2 * half + 1), w)), axis=1)).mean(1)
            assert (bound[half + 1 :].mean() < 0.95 * bound[1 : half + 1].mean()) == (D == 128)


def test_the_prose_on_pairing_follows_the_numbers() -> None:
    assert "partly noise, more so at larger distances." in prose("pairing")
    assert "partly noise, not more so at larger distances." in prose("pairing", head_dim=4, theta=1e12)


def test_the_prose_on_precision_follows_the_numbers() -> None:
    assert "from position 1,023 on, bfloat16 angles are useless" in prose("precision")
    small = prose("precision", head_dim=4, context=512)
    assert "useless" not in small
    assert "the error is 2.8e-08 with float32" in small


def test_the_tolerance_for_float32_is_its_rounding_error() -> None:
    checks = precision.report(head_dim=4, context=512).checks
    assert all(check.tolerance <= 2.0**-23 for check in checks if "511" in check.what)


def test_scale_reports_which_checks_have_no_pair() -> None:
    for D, checks, words in ((6, 14, "the 3 checks of such pairs do not apply"), (128, 17, "")):
        report = scale.report(head_dim=D)
        assert len(report.checks) == checks
        assert ("not apply" in " ".join(report.says)) == bool(words)
        assert words in " ".join(report.says)
    for D in range(4, 64, 2):
        report = scale.report(head_dim=D)
        between = sum("which needs" in check.what or "radians of pair" in check.what for check in report.checks)
        assert {
            0: "the 3 checks of such pairs do not apply",
            2: "1 of the 3 checks of such pairs does not apply",
            3: "",
        }[between] in " ".join(report.says)
        assert ("apply" in " ".join(report.says)) == (between < 3)
        within_limits(report)


def test_there_is_an_example_of_every_scaling_and_of_no_other() -> None:
    for kind in SCALINGS:
        assert rope_scaling.kind_of(Stretch().scaling(kind)) == kind
    with pytest.raises(UsageError, match="spiral"):
        Stretch().scaling("spiral")
    assert [row[0] for row in scale.report().tables[0].rows] == list(SCALINGS)


def test_the_command_uses_the_options_and_rejects_those_of_other_topics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "scale", "--rope-factor", "8", "--context", "4096"]) == 0
    out = capsys.readouterr().out
    assert "context 4096, factor 8.0" in out
    assert "at 32,768 tokens" in out
    assert main(["study", "clock", "--context", "4096"]) == 2
    assert "it accepts: --rope-factor" in capsys.readouterr().err
    assert main(["study", "wavelengths", "--head-dim", "7"]) == 2
    assert "7" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- planted wrong computations
Scaling = Callable[..., tuple[torch.Tensor, float]]


def litgpt_yarn(base: rope_scaling.Base, scaling: Any) -> tuple[torch.Tensor, float]:
    """YaRN with a reversed ramp: fast pairs are divided, slow pairs stay."""
    inv_freq, factor = rope_scaling.yarn(base, scaling)
    return base.inv_freq() / scaling["factor"] + base.inv_freq() - inv_freq, factor


WRONG_SCALINGS: list[tuple[str, str, Scaling, str]] = [
    ("wavelengths", "default", lambda b, s: (b.theta ** (-torch.arange(b.dim // 2).double() / b.dim), 1.0), "001-25"),
    ("wavelengths", "ntk", lambda b, s: (b.inv_freq(stretch=s["factor"]), 1.0), "001-23"),
    ("wavelengths", "yarn", litgpt_yarn, "001-23"),
    ("wavelengths", "linear", lambda b, s: (b.inv_freq(), 1.0), "001-23"),
    ("scale", "linear", lambda b, s: (b.inv_freq() * s["factor"], 1.0), "001-18"),
    ("scale", "ntk", lambda b, s: (b.inv_freq(stretch=s["factor"]), 1.0), "001-30"),
    ("scale", "dynamic", lambda b, s: (b.inv_freq(), 1.0), "001-35"),
    ("scale", "yarn", litgpt_yarn, "002-15"),
    ("scale", "yarn", lambda b, s: (rope_scaling.yarn(b, s)[0], 1.0), "002-25"),
    ("scale", "yarn", lambda b, s: rope_scaling.yarn(b, {**s, "truncate": True}), "002-15"),
    ("scale", "yarn", lambda b, s: rope_scaling.yarn(b, {k: v for k, v in s.items() if k != "mscale"}), "002-25"),
    ("scale", "yarn", lambda b, s: rope_scaling.yarn(b, s | {"mscale_all_dim": s.get("mscale")}), "002-25"),
    ("scale", "llama3", lambda b, s: (b.inv_freq() / s["factor"], 1.0), "002-15"),
    ("scale", "longrope", lambda b, s: (b.inv_freq(), 1.0), "002-15"),
    ("scale", "proportional", lambda b, s: (b.inv_freq(), 1.0), "002-15"),
    ("clock", "ntk", lambda b, s: (b.inv_freq() / s["factor"], 1.0), "001-28"),
    ("clock", "linear", lambda b, s: (b.inv_freq(), 1.0), "001-27"),
]


@pytest.mark.parametrize(("name", "kind", "wrong", "claim"), WRONG_SCALINGS)
def test_a_wrong_scaling_fails(
    name: str, kind: str, wrong: Scaling, claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "default":  # the other scalings use it
        monkeypatch.setattr(rope_scaling.Base, "inv_freq", lambda base, stretch=1.0: wrong(base, {})[0])
    else:
        monkeypatch.setitem(SCALINGS, kind, wrong)
    report = find(name).report()
    assert any(claim in check.claim for check in report.checks if not check.passed), failed(report)


def plain_sum(inv_freq: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """The mean cosine instead of the bound."""
    return torch.cos(distances.double()[:, None] * inv_freq).mean(-1).abs() * len(inv_freq) / 2


def backwards(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return REAL_APPLY(xq, xk, freqs_cis.conj())


def by_halves(xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = torch.cat((freqs_cis.real,) * 2, -1), torch.cat((freqs_cis.imag,) * 2, -1)
    return rope.apply_rotary_pos_emb(xq, xk, cos, sin, unsqueeze_dim=2)


REAL_APPLY = rope.apply_rotary_emb


@pytest.mark.parametrize(
    ("name", "where", "attribute", "wrong"),
    [
        ("wavelengths", wavelengths, "turns", lambda inv_freq, length: length * inv_freq),
        ("wavelengths", wavelengths, "wavelengths", lambda inv_freq: 1 / inv_freq),
        ("wavelengths", Stretch, "unseen", lambda self, kind: 0),
        ("decay", decay, "decay_bound", plain_sum),
        ("decay", decay, "mean_cosine", lambda inv_freq, distances: -distances.double()),
        ("decay", rope, "apply_rotary_emb", backwards),
        ("decay", rope, "apply_rotary_emb", by_halves),
        ("clock", clock, "STEPS", (1.0, 1.5, 4 / 3)),
        ("clock", clock, "CLOCK", [1.0, 1.0, 1.0]),
        ("clock", clock, "BASE", 60.0),
        ("pairing", rope, "to_half_layout", lambda weight, head_dim: weight),
        ("pairing", rope, "interleaved_to_half", rope.half_to_interleaved),
        ("pairing", rope, "rotate_half", forms.quarter_turn),
        ("pairing", rope, "apply_rotary_emb", by_halves),
        ("scale", Stretch, "reach", lambda self, kind: self.context),
        ("scale", Stretch, "unseen", lambda self, kind: 0),
        ("precision", precision, "freqs_cis_at", lambda at, w: rope.freqs_cis_at(at, w.bfloat16().float())),
        ("precision", precision, "freqs_cis_at", lambda at, w: rope.freqs_cis_at(at.bfloat16().float(), w)),
        ("precision", precision, "freqs_cis_at", lambda at, w: rope.freqs_cis_at(at, w).conj()),
    ],
)
def test_a_wrong_computation_fails(
    name: str, where: Any, attribute: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, attribute, wrong)
    assert failed(find(name).report())


def test_a_table_that_follows_the_dtype_of_the_model_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cast = Transformer.to

    def to(self: Transformer, dtype: torch.dtype) -> Transformer:
        self.rope.table = tuple(torch.view_as_complex(torch.view_as_real(t).to(dtype).float()) for t in self.rope.table)
        return cast(self, dtype)

    monkeypatch.setattr(Transformer, "to", to)
    assert failed(precision.report()) == ["a model cast to bfloat16 keeps its float32 table, bit for bit"]


# ----------------------------------------------------------------------------------- the same numbers, computed by hand
def by_hand(kind: str, D: int, theta: float, L: int, s: float) -> list[float]:
    """Inverse frequencies at int(s L) positions, pair by pair; NTK scalings change the base, as in the library."""
    n = int(s * L)
    found = []
    for i in range(D // 2):
        w = theta ** (-2 * i / D)
        turns = L * w / (2 * math.pi)
        if kind == "linear":
            w /= s
        elif kind == "ntk":
            w = (theta * s ** (D / (D - 2))) ** (-2 * i / D)
        elif kind == "dynamic":
            w = (theta * (s * n / L - (s - 1)) ** (D / (D - 2))) ** (-2 * i / D)
        elif kind == "yarn":

            def pair(times: float) -> float:
                return D * math.log(L / (times * 2 * math.pi)) / (2 * math.log(theta))

            low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), D - 1)
            slow = min(max((i - low) / (high - low or 0.001), 0), 1)
            w = (1 - slow) * w + slow * w / s
        elif kind == "llama3" or kind == "divisors":
            keep = min(max((turns - 1) / 3, 0), 1)
            w = keep * w + (1 - keep) * w / s
        elif kind == "longrope" and n > L:
            w /= s ** min(1, (i / (0.625 * (D // 2 - 1))) ** 2)
        elif kind == "proportional" and i >= D // 4:
            w = 0.0
        found.append(w)
    return found


@settings(max_examples=60, deadline=None)
@given(HEADS, BASES, st.integers(16, 2**20), st.floats(1, 200), st.sampled_from(list(SCALINGS)))
def test_library_formulas_and_test_agree_on_every_scaling(D: int, theta: float, L: int, s: float, kind: str) -> None:
    stretch = Stretch(D, theta, L, s)
    hand = np.array(by_hand(kind, D, theta, L, s))
    np.testing.assert_allclose(stretch.frequencies(kind).numpy(), hand, rtol=1e-6)
    np.testing.assert_allclose(
        formulas.frequencies(D, theta) / formulas.divisors(kind, D, theta, L, s), hand, rtol=1e-9
    )
    np.testing.assert_allclose(
        formulas.turns(D, theta, L), [L * w / (2 * math.pi) for w in by_hand("default", D, theta, L, s)]
    )


@settings(max_examples=60, deadline=None)
@given(HEADS, BASES, st.integers(16, 2**20), st.floats(1.01, 200))
def test_yarn_untruncated_and_with_mscale_agrees_with_formulas(D: int, theta: float, L: int, s: float) -> None:
    divided, times = scale._yarn(Stretch(D, theta, L, s), truncate=False, mscale=0.707, mscale_all_dim=1.5)
    np.testing.assert_allclose(divided, formulas.yarn_ramp(D, theta, L, s, truncate=False), rtol=1e-6)
    assert times == pytest.approx((0.0707 * math.log(s) + 1) / (0.15 * math.log(s) + 1), rel=1e-12)
    assert times == pytest.approx(formulas.yarn_sharpness(s, 0.707, 1.5), rel=1e-12)


def rounded(x: np.ndarray) -> np.ndarray:
    """bfloat16 in eight significant bits, ties to even."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(mantissa, 8)), exponent - 8)


@settings(max_examples=50)
@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30), min_size=1, max_size=20
    )
)
def test_bfloat16_by_bits_by_mantissa_and_by_torch_agree(numbers: list[float]) -> None:
    expected = torch.tensor(numbers, dtype=torch.float32).bfloat16().double().numpy()
    np.testing.assert_array_equal(formulas.bfloat16(numbers), expected)
    np.testing.assert_array_equal(rounded(np.array(numbers)), expected)


def rows_of(data: figures.Data, column: str, value: str) -> dict[str, np.ndarray]:
    here = data[column] == value
    return {name: values[here] for name, values in data.items()}


KIND_OF = {name: kind for kinds in (wavelengths.METHODS, scale.KINDS) for kind, name in kinds.items()}
STRETCHES = [(128, 10000.0, 2048, 4.0), (64, 500000.0, 8192, 8.0), (10, 300.0, 100, 2.5)]


@pytest.mark.parametrize("numbers", STRETCHES)
def test_figure_wavelengths(numbers: tuple[int, float, int, float]) -> None:
    data = wavelengths.wavelengths_data(*numbers)
    for method in wavelengths.METHODS.values():
        rows = rows_of(data, "method", method)
        hand = [2 * math.pi / w for w in by_hand(KIND_OF[method], *numbers)]
        np.testing.assert_allclose(rows["wavelength"], hand, rtol=1e-6)
        assert rows["pair"].tolist() == list(range(numbers[0] // 2))
        assert set(rows["trained"]) == {numbers[2]}
        assert set(rows["target"]) == {int(numbers[2] * numbers[3])}


@pytest.mark.parametrize("numbers", STRETCHES)
def test_figure_seen_arc(numbers: tuple[int, float, int, float]) -> None:
    data = wavelengths.seen_arc_data(*numbers)
    L, n = numbers[2], int(numbers[2] * numbers[3])
    plain = by_hand("default", *numbers)
    for method in ("unscaled", "PI", "NTK-aware", "YaRN"):
        rows = rows_of(data, "method", method)
        hand = by_hand(KIND_OF[method], *numbers)
        np.testing.assert_allclose(
            rows["seen"], [min((L - 1) * plain[i], 2 * math.pi) for i in rows["pair"]], rtol=1e-6
        )
        np.testing.assert_allclose(rows["met"], [min((n - 1) * hand[i], 2 * math.pi) for i in rows["pair"]], rtol=1e-6)
    assert set(data["trained"]) == {L}
    if numbers == STRETCHES[0]:
        assert rows["pair"].tolist() == [0, 16, 32, 41, 48, 63]


@pytest.mark.parametrize("numbers", STRETCHES)
def test_figure_divisor(numbers: tuple[int, float, int, float]) -> None:
    data = scale.divisor_data(*numbers)
    plain = np.array(by_hand("default", *numbers))
    for method in scale.KINDS.values():
        rows = rows_of(data, "method", method)
        np.testing.assert_allclose(rows["divisor"], plain / by_hand(KIND_OF[method], *numbers), rtol=1e-6)
        assert rows["short"].tolist() == [numbers[2] * w < 2 * math.pi for w in plain]


@pytest.mark.parametrize("numbers", STRETCHES)
def test_figure_ramps(numbers: tuple[int, float, int, float]) -> None:
    *_, L, s = numbers
    data = scale.ramps_data(*numbers)
    plain = np.array(by_hand("default", *numbers))
    for method, kind in (("YaRN, the code", "yarn"), ("llama3", "llama3")):
        np.testing.assert_allclose(
            rows_of(data, "method", method)["divisor"], plain / by_hand(kind, *numbers), rtol=1e-6
        )
    gamma = [min(max((L * w / (2 * math.pi) - 1) / 31, 0), 1) for w in plain]  # YaRN's section 3.2, alpha 1, beta 32
    hand = [w / ((1 - g) * w / s + g * w) for w, g in zip(plain, gamma, strict=True)]
    np.testing.assert_allclose(rows_of(data, "method", "YaRN, the paper")["divisor"], hand, rtol=1e-9)


def test_the_two_ramps_of_yarn_are_furthest_apart_at_pair_34() -> None:
    data = scale.ramps_data(context=4096)
    paper, code = (rows_of(data, "method", f"YaRN, the {what}")["divisor"] for what in ("paper", "code"))
    assert int((paper / code).argmax()) == 34
    assert float((paper / code).max()) == pytest.approx(1.733, abs=5e-4)


@pytest.mark.parametrize("numbers", [(128, 10000.0, 4096), (16, 700.0, 300)])
def test_figure_decay(numbers: tuple[int, float, int]) -> None:
    D, theta, L = numbers
    data = decay.decay_data(*numbers)
    edges = sorted({round(float(x)) for x in np.geomspace(1, L + 1, 61)})
    for base in (theta, 50 * theta, 100 * theta):
        rows = rows_of(data, "line", f"bound, base {base:g}")
        w = base ** (-2 * np.arange(D // 2) / D)
        sums = np.cumsum(np.exp(1j * np.outer(np.arange(L + 1), w)), axis=1)  # (L + 1, D/2)
        bound = np.abs(sums).mean(1)
        assert bound[0] == pytest.approx((D // 2 + 1) / 2)
        means = [bound[a:b].mean() / bound[0] for a, b in pairwise(edges)]
        np.testing.assert_allclose(rows["value"], means, atol=1e-4)
        np.testing.assert_allclose(rows["distance"], [math.sqrt(a * (b - 1)) for a, b in pairwise(edges)])
    built = min(500, L // 2)
    rows = rows_of(data, "line", f"a key built for {built}")
    w = theta ** (-2 * np.arange(D // 2) / D)
    np.testing.assert_allclose(rows["value"], [np.cos((d - built) * w).mean() for d in rows["distance"]], atol=1e-4)
    assert rows["distance"][rows["value"].argmax()] == built


@pytest.mark.parametrize("s", [3.0, 1.01, 7.7])
def test_figure_clock(s: float) -> None:
    data = clock.clock_data(s)
    periods = {
        "now": (60, 3600, 43200),
        "PI": (60 * s, 3600 * s, 43200 * s),
        "NTK-aware": (60, 3600 * s**0.5, 43200 * s),
    }
    if s == 3:
        periods["published"] = (60, 60 * 90, 60 * 90 * 24)
    assert set(data["clock"]) == set(periods)
    for name, expected in periods.items():
        rows = rows_of(data, "clock", name)
        assert rows["hand"].tolist() == ["second", "minute", "hour"]
        np.testing.assert_allclose(rows["period"], expected, rtol=1e-6)
        np.testing.assert_allclose(rows["times"], np.array(expected) / (60, 3600, 43200), rtol=1e-6)
        np.testing.assert_allclose(rows["step"], 360 / np.array(expected), rtol=1e-6)
        turned = np.exp(1j * np.radians(rows["angle"]))  # 0 and 360 degrees are the same point
        np.testing.assert_allclose(turned, np.exp(2j * np.pi * clock.NOW / np.array(expected)), atol=1e-2)


def test_figure_pairing() -> None:
    data = pairing.pairing_data()
    assert data["partner_interleaved"].tolist() == [j ^ 1 for j in range(8)]
    assert data["partner_half"].tolist() == [(j + 4) % 8 for j in range(8)]
    assert data["goes_to"].tolist() == [j % 2 * 4 + j // 2 for j in range(8)]


@pytest.mark.parametrize("numbers", [(128, 500000.0, 131072), (64, 10000.0, 3000)])
def test_figure_precision(numbers: tuple[int, float, int]) -> None:
    D, theta, L = numbers
    data = precision.precision_data(*numbers)
    edges = sorted({round(float(x)) for x in np.geomspace(1, L, 61)})
    exact = theta ** (-2 * np.arange(D // 2) / D)
    single = exact.astype(np.float32)

    def angle(m: np.ndarray, w: np.ndarray) -> np.ndarray:
        return (m.astype(np.float32)[:, None] * w.astype(np.float32)).astype(np.float64)

    def off(cos: np.ndarray, sin: np.ndarray, m: np.ndarray) -> float:
        truth = m[:, None] * exact
        return float(np.maximum(abs(cos - np.cos(truth)), abs(sin - np.sin(truth))).max())

    found: dict[str, list[float]] = {name: [] for name in precision.WAYS}
    for a, b in pairwise(edges):
        m = np.array([round(float(x)) for x in np.linspace(a, b - 1, 12)])
        plain = angle(m, single)
        found["float32"].append(off(np.cos(plain), np.sin(plain), m))
        found["bfloat16 cos, sin"].append(off(rounded(np.cos(plain)), rounded(np.sin(plain)), m))
        coarse = angle(m, rounded(single.astype(np.float64)))
        found["bfloat16 frequencies"].append(off(np.cos(coarse), np.sin(coarse), m))
        moved = angle(rounded(m.astype(np.float64)), single)
        found["bfloat16 positions"].append(off(np.cos(moved), np.sin(moved), m))
    for name, errors in found.items():
        rows = rows_of(data, "table", name)
        assert rows["position"].tolist() == edges[:-1]
        ties = 2 * np.array(found["float32"]) if name == "bfloat16 cos, sin" else 0  # a tie may round either way
        assert (abs(rows["error"] - errors) <= 1e-6 + ties).all()


# ------------------------------------------------------------------------------------------------------------ pictures
@pytest.mark.parametrize(("name", "figure"), FIGURES, ids=[f"{name}-{figure.name}" for name, figure in FIGURES])
def test_a_figure_draws_at_readable_size(
    name: str, figure: figures.Figure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure as Canvas
    from matplotlib.text import Text

    canvases: list[Canvas] = []

    def draw(data: figures.Data, canvas: Canvas) -> None:
        canvases.append(canvas)
        figure.draw(data, canvas)

    watched = figures.Figure(figure.name, figure.caption, figure.data, draw, figure.size)
    figures.save(watched, tmp_path / "a.png")
    figures.save(watched, tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    drawing.check_drawn(figure.name, figure.data(), canvases[0])
    small = [t for t in canvases[0].findobj(Text) if t.get_text() and t.get_visible() and t.get_fontsize() < 8]
    assert not small
    for axes in canvases[0].axes:
        assert not axes.axison or (axes.get_xlabel() and axes.get_ylabel())


@pytest.mark.slow
def test_figures_draw_at_other_settings(tmp_path: Path) -> None:
    for figure in (*wavelengths.TOPIC.figures, *scale.TOPIC.figures):  # here every pair finishes a turn
        figures.save(figure, tmp_path / "a.svg", head_dim=4, theta=100.0, context=1000, factor=1.01)
    figures.save(clock.TOPIC.figure(), tmp_path / "a.svg", factor=10.0)
    figures.save(decay.TOPIC.figure(), tmp_path / "a.svg", head_dim=4, context=16)
    figures.save(precision.TOPIC.figure(), tmp_path / "a.svg", head_dim=4, context=512)


# ---------------------------------------------------------------------------------------- pairing: a decoder in numpy
def numpy_logits(config: ModelConfig, state: dict[str, torch.Tensor], tokens: np.ndarray, half: bool) -> np.ndarray:
    """Logits (B, T, V) of the decoder in float64; half pairs entries j and j + D/2 of a head, otherwise 2j, 2j + 1."""
    w = {name: weight.double().numpy() for name, weight in state.items()}
    (B, T), D = tokens.shape, config.head_dim
    j = np.arange(D // 2)
    first, second = (j, j + D // 2) if half else (2 * j, 2 * j + 1)
    angles = np.arange(T)[:, None, None] * config.rope_theta ** (-2 * j / D)  # (T, 1, D/2)

    def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weight

    def turned(x: np.ndarray) -> np.ndarray:
        y = np.empty_like(x)
        y[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
        y[..., second] = x[..., first] * np.sin(angles) + x[..., second] * np.cos(angles)
        return y

    h = w["tok_embeddings.weight"][tokens]  # (B, T, C)
    for layer in range(config.n_layers):
        here = {name.split(".", 2)[2]: x for name, x in w.items() if name.startswith(f"layers.{layer}.")}
        x = normed(h, here["attention_norm.weight"])
        q, k, v = (
            (x @ here[f"attention.{name}.weight"].T).reshape(B, T, -1, D) for name in ("wq", "wk", "wv")
        )  # (B, T, H, D), (B, T, KV, D) twice
        q, k = turned(q), turned(k)
        heads = []
        for head in range(config.n_heads):
            group = head * config.n_kv_heads // config.n_heads
            scores = np.einsum("bmd,bnd->bmn", q[:, :, head], k[:, :, group]) / math.sqrt(D)  # (B, T, T)
            weights = np.where(np.tri(T, dtype=bool), np.exp(scores), 0)
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, :, group])  # (B, T, D)
        h = h + np.concatenate(heads, -1) @ here["attention.wo.weight"].T
        x = normed(h, here["ffn_norm.weight"])
        gate = x @ here["feed_forward.w_gate.weight"].T
        up = x @ here["feed_forward.w_up.weight"].T
        h = h + (gate / (1 + np.exp(-gate)) * up) @ here["feed_forward.w_down.weight"].T
    return normed(h, w["norm.weight"]) @ w["output.weight"].T


def test_a_second_decoder_finds_the_same_divergence_of_the_wrong_pairing() -> None:
    state, tokens = pairing.random_state()
    right, wrong = (numpy_logits(pairing.CONFIG, state, tokens.numpy(), half) for half in (False, True))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (right, wrong))
    kl = (np.exp(p) * (p - q)).sum(-1)  # (B, T)
    assert kl[:, 0].max() == pytest.approx(0, abs=1e-12)  # a single token attends only to itself, at distance 0
    assert kl.mean() == pytest.approx(pairing.KL, abs=1e-7)
    agree = (right.argmax(-1) == wrong.argmax(-1)).mean()
    assert agree == pairing.AGREE < 0.25
    shown = pairing.report().tables[2].rows[0][1:]
    assert [float(x) for x in shown] == pytest.approx([kl[:, t].mean() for t in pairing.TOKENS], abs=6e-4)


@settings(max_examples=25, deadline=None)
@given(HEADS, BASES, st.integers(0, 3000))
def test_the_change_of_scores_is_its_closed_form(D: int, theta: float, distance: int) -> None:
    """rms of q . (R' - R) k / rms of q . R k is sqrt(2 - 2 tr(R^T R') / D), a function of common entries only."""
    w = theta ** (-2 * np.arange(D // 2) / D)
    cos = np.cos(distance * w)  # (D/2,)
    # entry j is in pair j // 2 and in pair j mod D/2; no two entries are partners in both layouts
    trace = sum(cos[j // 2] * cos[j % (D // 2)] for j in range(D))
    expected = math.sqrt(max(2 - 2 * trace / D, 0))
    assert pairing._change(D, theta, distance) == pytest.approx(expected, abs=2e-3)
    assert pairing._change_by_formula(D, theta, distance) == pytest.approx(expected, abs=1e-7)
