"""RoPE: the three forms of the rotation equal each other, the formula, and transformers' code."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import pytest
import torch
from transformers.models.llama import modeling_llama as hf

import llama
from llama.errors import ConfigError, ContextLengthError
from llama.rope import FORMS, Rope, apply_rotary_emb_real, to_half_layout, to_interleaved_layout
from llama.rope_scaling import inverse_frequencies

from . import tiny


def random_qk(T: int = 7, D: int = 16, B: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, T, 4, D), torch.randn(B, T, 2, D)


def test_the_table_is_cis_of_position_times_frequency() -> None:
    table = llama.precompute_freqs_cis(8, 6)
    assert table.dtype == torch.complex64
    assert table.shape == (6, 4)
    for m in range(6):
        for i in range(4):
            angle = m * 10000 ** (-2 * i / 8)
            assert complex(table[m, i]) == pytest.approx(complex(math.cos(angle), math.sin(angle)), abs=1e-6)


def test_the_rotation_equals_an_example_computed_by_hand() -> None:
    """Pair (28, 29) of position 1, frequency 0.01: (28 + 29i) e^(0.01 i) = 27.7086 + 29.2785 i."""
    x = torch.zeros(1, 2, 1, 8)
    x[0, 1, 0, 4:6] = torch.tensor([28.0, 29.0])
    rotated, _ = llama.apply_rotary_emb(x, x, llama.precompute_freqs_cis(8, 2))
    assert rotated[0, 1, 0, 4:6].tolist() == pytest.approx([27.708604844975795, 29.27854534543996], rel=1e-6)


def test_complex_real_and_half_are_the_same_rotation() -> None:
    q, k = random_qk()
    freqs_cis = llama.precompute_freqs_cis(16, 7, theta=500.0)
    rotated = llama.apply_rotary_emb(q, k, freqs_cis)
    assert_equal(apply_rotary_emb_real(q, k, freqs_cis.real, freqs_cis.imag), rotated)
    reorder = to_half_layout(
        torch.arange(16), 16
    )  # for each entry of the half layout, its index in the interleaved one
    by_half = llama.apply_rotary_pos_emb(q[..., reorder], k[..., reorder], *halves(freqs_cis), unsqueeze_dim=2)
    assert_equal(by_half, [x[..., reorder] for x in rotated])


def halves(freqs_cis: torch.Tensor) -> list[torch.Tensor]:
    return [torch.cat((part, part), -1) for part in (freqs_cis.real, freqs_cis.imag)]


def assert_equal(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_half_equals_transformers() -> None:
    q, k = (x.transpose(1, 2) for x in random_qk())  # (B, H, T, D), Hugging Face's order
    cos, sin = (part[None] for part in halves(llama.precompute_freqs_cis(16, 7)))
    assert_equal(llama.apply_rotary_pos_emb(q, k, cos, sin), hf.apply_rotary_pos_emb(q, k, cos, sin))
    assert torch.equal(llama.rotate_half(q), hf.rotate_half(q))


def test_the_conversions_of_the_layout_are_inverse_and_follow_the_rule_for_rows() -> None:
    weight = torch.arange(3 * 8 * 5).view(24, 5)  # 3 heads of 8 rows
    half = to_half_layout(weight, 8)
    for head in range(3):
        for i in range(4):
            for j in range(2):  # row h*D + j*D/2 + i of the half layout is row h*D + 2i + j of the interleaved one
                assert torch.equal(half[head * 8 + j * 4 + i], weight[head * 8 + 2 * i + j])
    assert torch.equal(to_interleaved_layout(half, 8), weight)


@pytest.mark.parametrize("shift", [1, 100, 4096])
def test_scores_depend_only_on_the_distance(shift: int) -> None:
    q, k = random_qk(T=1, B=1)
    table = llama.precompute_freqs_cis(16, 9000)

    def score(m: int, n: int) -> torch.Tensor:
        return (llama.apply_rotary_emb(q, k, table[m : m + 1])[0][..., :2, :]
                * llama.apply_rotary_emb(q, k, table[n : n + 1])[1]).sum(-1)  # fmt: skip

    torch.testing.assert_close(score(37, 5), score(37 + shift, 5 + shift), rtol=0, atol=5e-3)
    assert not torch.allclose(score(37, 5), score(38, 5), atol=1e-2)


def test_rows_of_a_batch_may_have_different_positions() -> None:
    q, k = random_qk(T=3)
    table = llama.precompute_freqs_cis(16, 20)
    positions = torch.tensor([[0, 1, 2], [10, 15, 19]])
    both = llama.apply_rotary_emb(q, k, table[positions])
    for row in (slice(0, 1), slice(1, 2)):
        assert_equal([x[row] for x in both], llama.apply_rotary_emb(q[row], k[row], table[positions[row][0]]))


@pytest.mark.parametrize("form", FORMS)
def test_the_table_grows_on_demand_up_to_the_context(form: str) -> None:
    rope = Rope(form, 16, 5000, 10000.0)
    late = tiny.rows(rope, torch.tensor([4999]), 5000)
    fresh = Rope(form, 16, 5000, 10000.0)
    for a, b in zip(late, tiny.rows(fresh, torch.tensor([4999]), 5000), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ContextLengthError, match="5000"):
        rope.freqs_cis(torch.tensor([5000]), 5001)


def test_keys_or_a_table_of_another_length_are_rejected() -> None:
    q, k = random_qk(T=7)
    freqs_cis = llama.precompute_freqs_cis(16, 7)
    for rows in (1, 6, 8):
        with pytest.raises(ValueError, match="7 tokens"):
            llama.apply_rotary_emb(q, k, llama.precompute_freqs_cis(16, rows))
    ours, theirs = "q (B, T, H, D) and k (B, T, KV, D)", "q (B, H, T, D) and k (B, KV, T, D)"
    for expected, rotate in (
        (ours, lambda: llama.apply_rotary_emb(q, k[:, :1], freqs_cis)),
        (ours, lambda: apply_rotary_emb_real(q, k[:1], freqs_cis.real, freqs_cis.imag)),
        (
            theirs,
            lambda: llama.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2)[..., :1, :], *halves(freqs_cis)),
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(expected)):
            rotate()


# ------------------------------------------------------------------------------------------------------- scalings
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("dim", "factor", "golden"),
    [
        (128, 8.0, {28: 0.00321144599, 29: 0.00216657076, 34: 0.000178507813, 35: 9.55621235e-05, 63: 3.06892599e-07}),
        (64, 32.0, {15: 0.00129054793, 17: 9.7082878e-05, 18: 1.94616382e-05, 31: 9.41830673e-08}),
    ],
)
def test_llama3_scaling_returns_the_published_values(dim: int, factor: float, golden: dict[int, float]) -> None:
    inv_freq, attention_factor = inverse_frequencies(dim, 500000.0, {**LLAMA3, "factor": factor})
    assert attention_factor == 1.0
    for i, expected in golden.items():
        assert float(inv_freq[i]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_scalings_equal_those_of_transformers(scaling: dict[str, object] | None) -> None:
    config = hf.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=32768,
        rope_parameters={"rope_theta": 500000.0, **(scaling or {"rope_type": "default"})},
    )  # fmt: skip
    theirs = hf.LlamaRotaryEmbedding(config)
    inv_freq, attention_factor = inverse_frequencies(64, 500000.0, scaling)
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=2e-6, atol=0)
    assert attention_factor == theirs.attention_scaling
    positions = torch.tensor([[0, 1, 8191, 8192, 131071]])
    cos, _ = theirs(torch.zeros(1), positions)
    table = llama.precompute_freqs_cis(64, 131072, 500000.0, scaling)
    # In float32 the spacing of numbers near 131,071 is 0.008, so neither angle is more precise.
    torch.testing.assert_close(table[positions[0]].real, cos[0, :, :32], rtol=0, atol=0.02)


def test_divisors_as_in_gguf_files_can_express_llama3_scaling() -> None:
    plain, _ = inverse_frequencies(64, 500000.0)
    scaled, _ = inverse_frequencies(64, 500000.0, LLAMA3)
    again, _ = inverse_frequencies(64, 500000.0, {"rope_type": "divisors", "divisors": (plain / scaled).tolist()})
    torch.testing.assert_close(again, scaled, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "spiral"},
        {"rope_type": ["linear"]},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": float("nan")},
        {"rope_type": "linear", "factor": "4"},
        {**LLAMA3, "low_freq_factor": 4.0},
        {"rope_type": "divisors", "divisors": [1.0]},
        {"rope_type": "divisors", "divisors": [1.0, 0.0, 1.0, 1.0]},
    ],
)
def test_invalid_scalings_are_errors(scaling: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        inverse_frequencies(8, 10000.0, scaling)


@pytest.mark.parametrize(("dim", "theta"), [(7, 1e4), (0, 1e4), (8, 0.0), (8, math.nan), (8, "1e4"), (4, 1e299)])
def test_invalid_dimensions_and_bases_are_errors(dim: int, theta: float) -> None:
    with pytest.raises(ConfigError):
        inverse_frequencies(dim, theta, {"rope_type": "ntk", "factor": 1e60})


def test_ntk_divides_the_slowest_frequency_by_the_factor_and_keeps_the_fastest() -> None:
    plain, _ = inverse_frequencies(64, 10000.0)
    ntk, attention_factor = inverse_frequencies(64, 10000.0, {"rope_type": "ntk", "factor": 4.0})
    assert attention_factor == 1
    assert float(ntk[0]) == float(plain[0])
    assert float(plain[-1] / ntk[-1]) == pytest.approx(4.0, rel=1e-5)
    assert bool((ntk[1:] < plain[1:]).all())


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", "proportional"])
def test_frequencies_equal_those_of_transformers_at_official_sizes(kind: str, dim: int) -> None:
    """At contexts up to 131,072, without a model."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    lists = [[1 + step * i for i in range(dim // 2)] for step in (0.1, 2.0)]
    more = {
        "dynamic": {},
        "yarn": {"original_max_position_embeddings": 8192},
        "longrope": {"original_max_position_embeddings": 8192, "short_factor": lists[0], "long_factor": lists[1]},
        "proportional": {"partial_rotary_factor": 0.5},
    }[kind]
    scaling = {"rope_type": kind, "factor": 16.0, **more}
    context = 8192 if kind == "dynamic" else 131072
    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, max_position_embeddings=context,
                         rope_parameters={**scaling, "rope_theta": 500000.0})  # fmt: skip
    for length in (100, 8192, 8193, 131072):
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
        ours, our_factor = inverse_frequencies(dim, 500000.0, scaling, seq_len=length, max_seq_len=context)
        torch.testing.assert_close(ours, expected, rtol=2e-6, atol=0)
        assert our_factor == pytest.approx(factor)
