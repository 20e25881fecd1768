"""Note 002: the formulas again, a sinusoid class, Hugging Face's Llama from RoPE to attention. One test per claim."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llama
from llama import attention, rope
from llama.checkpoint import open_checkpoint
from llama.rope_scaling import BY_LENGTH, SCALINGS, inverse_frequencies, kind_of
from llama.study import encodings, forms, measures

from .. import test_huggingface, tiny
from . import by_hand
from .by_hand import LAW, bases, even_dims, gaussians, positions, seeds
from .watch import watch

pytestmark = pytest.mark.usefixtures("one_thread")

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1.0, 2.0, 3.0, 4.0], "factor": 4.0,
}  # fmt: skip


def doubled(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (T, D) of angles (T, D/2), each repeated as the half style needs them."""
    return torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)


# ----------------------------------------------------------------------------------------- attention and sinusoids
def test_002_02_a_token_also_attends_to_itself() -> None:
    """E52: without n = m, the first token of a decoder would have no key, and the softmax would be NaN."""
    at = torch.arange(4)
    assert bool(attention.causal_mask(at, at).diagonal().all())
    q, k = gaussians(0, 1, 1, 4, 8), gaussians(1, 1, 1, 4, 8)
    weights = attention.reference_weights(q, k, attention.causal_mask(at, at))
    assert weights[0, 0, 0].tolist() == [1, 0, 0, 0]
    strict = attention.reference_weights(q, k, attention.causal_mask(at, at).tril(-1))
    assert bool(strict[0, 0, 0].isnan().all())


@LAW
@given(seed=seeds, start=positions)
def test_002_03_additive_positions(seed: int, start: int) -> None:
    x, w = gaussians(seed, 3, 8), gaussians(seed + 1, 8, 8)
    at = torch.arange(start, start + 3)
    ours = encodings.make("sinusoidal", 8, 8).embed(x, at) @ w.T
    p = np.stack([by_hand.sinusoid(t, 8) for t in range(start, start + 3)])
    np.testing.assert_allclose(ours.numpy(), (x.numpy() + p) @ w.numpy().T, rtol=0, atol=1e-10)


def class_of_the_note(length: int, d: int, exponent: Any) -> torch.Tensor:
    """The two loops of the note's class, in its float32 table; `exponent` is the exponent of 10000."""
    pe = torch.zeros(length, d)
    for pos in range(length):
        for i in range(0, d, 2):
            pe[pos, i] = math.sin(pos / 10000 ** exponent(i, 0))
            pe[pos, i + 1] = math.cos(pos / 10000 ** exponent(i, 1))
    return pe


def test_002_04_a_table_of_max_len_rows() -> None:
    """E24, E25: i already steps by 2, so the exponent is i/d, for the sine and for its cosine."""
    right = measures.sinusoids(torch.arange(16), 8)
    assert right.shape == (16, 8)
    repaired = class_of_the_note(16, 8, lambda i, j: i / 8)
    assert float((repaired - right).abs().max()) < 4e-8
    printed = class_of_the_note(16, 8, lambda i, j: 2 * (i + j) / 8)
    by_column = (printed - right).abs().amax(0)
    assert by_column[0::2].tolist() == pytest.approx([0, 0.848, 0.148, 0.015], abs=5e-4)


@pytest.mark.parametrize("d", [1, 5, 15])
def test_002_04_an_odd_width_has_no_table(d: int) -> None:
    """E26: the last sine would have no cosine."""
    with pytest.raises(ValueError, match=str(d)):
        measures.sinusoids(torch.arange(4), d)


@LAW
@given(position=st.integers(0, 10**6), d=even_dims)
def test_002_05_the_length_of_an_encoding_is_the_root_of_half_its_width(position: int, d: int) -> None:
    code = measures.sinusoids(torch.tensor([position]), d)
    assert float(code.square().sum()) == pytest.approx(d / 2, rel=1e-12)


def test_002_05_llama_does_not_scale_its_embedding() -> None:
    """The note's class multiplies x by sqrt(d) before it adds the encoding; here nothing is added."""
    model, tokens, entered = tiny.model(), tiny.random_tokens(5), []
    hook = model.layers[0].register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0]))
    model(tokens)
    hook.remove()
    assert torch.equal(entered[0], model.tok_embeddings.weight[tokens])


# --------------------------------------------------------------------------------------------- RoPE, derived again
@LAW
@given(seed=seeds, m=positions, n=positions, shift=st.integers(0, 4096))
def test_002_06_g_depends_on_the_difference_alone(seed: int, m: int, n: int, shift: int) -> None:
    q, k, inv_freq = gaussians(seed, 1, 2), gaussians(seed + 1, 1, 2), inverse_frequencies(2)[0]
    scores = [
        float((measures.turn(q, torch.tensor([a]), inv_freq) * measures.turn(k, torch.tensor([b]), inv_freq)).sum())
        for a, b in ((m, n), (m + shift, n + shift))
    ]
    g = (complex(*q[0].tolist()) * complex(*k[0].tolist()).conjugate() * np.exp(1j * (m - n))).real
    assert scores == pytest.approx([g, g], abs=1e-10)


@LAW
@given(seed=seeds, angle=st.floats(-100, 100))
def test_002_07_the_product_multiplied_out(seed: int, angle: float) -> None:
    q = gaussians(seed, 1, 1, 1, 2).float()
    (q1, q2), c, s = q.flatten().tolist(), math.cos(angle), math.sin(angle)
    product = complex(q1, q2) * complex(c, s)
    by_real, _ = rope.apply_rotary_emb_real(q, q, torch.tensor([[c]]), torch.tensor([[s]]))
    assert (q1 * c - q2 * s, q2 * c + q1 * s) == pytest.approx((product.real, product.imag), abs=1e-14)
    assert by_real.flatten().tolist() == pytest.approx([product.real, product.imag], abs=1e-6)


@LAW
@given(seed=seeds, m=st.integers(0, 100), n=st.integers(0, 100))
def test_002_08_f_and_g_as_matrices(seed: int, m: int, n: int) -> None:
    """g needs R(n - m), E09."""
    x_m, x_n, wq, wk = gaussians(seed, 2), gaussians(seed + 1, 2), gaussians(seed + 2, 2, 2), gaussians(seed + 3, 2, 2)
    r_m, r_n, between = (
        forms.rotation_matrix(torch.tensor([float(at)]).double().cos(), torch.tensor([float(at)]).double().sin())
        for at in (m, n, n - m)
    )
    f_q = measures.turn((wq @ x_m)[None], torch.tensor([m]), torch.ones(1))[0]
    f_k = measures.turn((wk @ x_n)[None], torch.tensor([n]), torch.ones(1))[0]
    torch.testing.assert_close(f_q, r_m @ wq @ x_m, rtol=0, atol=1e-12)
    torch.testing.assert_close(f_k, r_n @ wk @ x_n, rtol=0, atol=1e-12)
    assert float(f_q @ f_k) == pytest.approx(float(x_m @ wq.T @ between @ wk @ x_n), abs=1e-11)


@LAW
@given(seed=seeds, m=positions, n=positions, d=even_dims)
def test_002_09_the_score_is_the_sum_of_the_pairs_scores(seed: int, m: int, n: int, d: int) -> None:
    q, k, inv_freq = gaussians(seed, 1, d), gaussians(seed + 1, 1, d), inverse_frequencies(d)[0]
    q_m, k_n = (measures.turn(x, torch.tensor([at]), inv_freq) for x, at in ((q, m), (k, n)))
    score = float((q_m * k_n).sum())
    total = 0.0
    for i in range(d // 2):
        pair = slice(2 * i, 2 * i + 2)
        a, b = (measures.turn(x[:, pair], torch.tensor([at]), inv_freq[i : i + 1]) for x, at in ((q, m), (k, n)))
        total += float((a * b).sum())
    assert score == pytest.approx(total, abs=1e-11)


@pytest.mark.parametrize("dim", [1, 3, 127])
def test_002_09_an_odd_width_is_an_error(dim: int) -> None:
    with pytest.raises(ValueError, match=f"(even|from 2).*{dim}"):
        llama.precompute_freqs_cis(dim, 4)


@LAW
@given(seed=seeds, shift=st.integers(1, 150))
def test_002_10_attention_with_rope_depends_on_distances(seed: int, shift: int) -> None:
    """A shift of 1 to 150 positions does not change the model's logits; doubling all positions does."""
    model, tokens = tiny.model(), tiny.random_tokens(12, seed=seed % 1000)
    here = model(tokens)
    torch.testing.assert_close(model(tokens, torch.arange(shift, shift + 12)), here, rtol=0, atol=1e-3)
    assert float((model(tokens, 2 * torch.arange(12)) - here).abs().max()) > 0.05


@LAW
@given(seed=seeds, m=positions, d=even_dims)
def test_002_11_two_products_per_entry_replace_the_matrix(seed: int, m: int, d: int) -> None:
    x, angles = gaussians(seed, d), m * torch.from_numpy(by_hand.frequencies(d))
    cos, sin = angles.cos(), angles.sin()
    by_entry = x * cos.repeat_interleave(2) + forms.quarter_turn(x) * sin.repeat_interleave(2)
    by_matrix = forms.rotation_matrix(cos, sin) @ x
    assert float((by_entry - by_matrix).abs().max()) < 2e-15


def test_002_11_most_of_the_matrix_is_zero() -> None:
    angles = 7 * torch.from_numpy(by_hand.frequencies(64))
    matrix = forms.rotation_matrix(angles.cos(), angles.sin())
    assert float((matrix == 0).double().mean()) == pytest.approx(0.969, abs=5e-4)
    assert int((matrix != 0).sum()) == 2 * 64  # multiplications that remain of 64^2


# ------------------------------------------------------------------------------------------------ rotary embedding
@LAW
@given(factor=st.floats(1, 64), dim=st.sampled_from([8, 64]))
def test_002_13_the_type_has_two_keys_and_a_default(factor: float, dim: int) -> None:
    new, old = ({key: "linear", "factor": factor} for key in ("rope_type", "type"))
    assert kind_of(new) == kind_of(old) == "linear"
    assert torch.equal(inverse_frequencies(dim, scaling=new)[0], inverse_frequencies(dim, scaling=old)[0])
    both = {"rope_type": "linear", "type": "yarn", "factor": factor}
    assert kind_of(both) == "linear"  # the newer key takes precedence
    assert kind_of(None) == kind_of({}) == "default"
    assert torch.equal(inverse_frequencies(dim)[0], inverse_frequencies(dim, scaling={"rope_type": "default"})[0])


def test_002_14_the_trained_length_is_stored() -> None:
    """`dynamic` stretches beyond the trained length, whatever the maximum length of the model."""
    plain = rope.Rope("complex", 8, 64, 1e4).freqs_cis(torch.arange(17), 17)
    table = rope.Rope("complex", 8, 64, 1e4, DYNAMIC, trained_len=16)
    assert table.max_seq_len == 64
    assert torch.equal(table.freqs_cis(torch.arange(16), 16), plain[:16])
    assert not torch.equal(table.freqs_cis(torch.arange(17), 17), plain)


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "yarn", "longrope", "llama3"])
def test_002_15_every_type_returns_frequencies_and_a_factor(kind: str) -> None:
    scaling = {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }  # fmt: skip
    base = llama.rope_scaling.Base(8, 1e4, seq_len=64, max_seq_len=16)
    inv_freq, factor = SCALINGS[kind](base, scaling)
    assert (inv_freq.shape, inv_freq.dtype) == ((4,), torch.float64)
    ours, our_factor = inverse_frequencies(8, 1e4, {"rope_type": kind, **scaling}, seq_len=64, max_seq_len=16)
    assert torch.equal(ours, inv_freq.float())
    assert our_factor == factor
    assert factor == 1 or kind in ("yarn", "longrope")


def test_002_16_frequencies_are_not_in_a_checkpoint() -> None:
    model = tiny.model()
    state = model.state_dict()
    assert not [name for name in state if "rope" in name or "freq" in name]
    assert not [name for name, _ in model.named_buffers()]
    model.load_state_dict(state, strict=True)
    assert sum(tensor.numel() for tensor in state.values()) == tiny.CONFIG.n_params


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("form", rope.FORMS)
def test_002_17_frequencies_stay_float32_when_the_model_is_cast(form: str, dtype: torch.dtype) -> None:
    """E30."""
    model = tiny.model(rope=form)
    before = [row.clone() for row in tiny.rows(model.rope, torch.arange(40), 40)]
    model.to(dtype)
    assert model.tok_embeddings.weight.dtype == dtype
    for after, row in zip(tiny.rows(model.rope, torch.arange(40), 40), before, strict=True):
        assert after.dtype in (torch.complex64, torch.float32)
        assert torch.equal(after, row)
    rows, fresh = (tiny.rows(table, torch.arange(200), 200) for table in (model.rope, tiny.model(rope=form).rope))
    for after, row in zip(rows, fresh, strict=True):
        assert torch.equal(after, row)  # rows computed after the cast as well


@LAW
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=6),
    scaling=st.sampled_from([DYNAMIC, LONGROPE, {"rope_type": "yarn", "factor": 4.0}, None]),
    form=st.sampled_from(list(rope.FORMS)),
)
def test_002_18_the_rows_depend_on_the_length_and_not_on_earlier_texts(
    lengths: list[int], scaling: dict[str, Any] | None, form: str
) -> None:
    """E29: an object that stores the longest text returns different rows after it."""
    used = rope.Rope(form, 8, 64, 1e4, scaling, trained_len=16)
    for length in lengths:
        rows, fresh = (
            tiny.rows(table, torch.arange(length), length)
            for table in (used, rope.Rope(form, 8, 64, 1e4, scaling, trained_len=16))
        )
        assert all(torch.equal(a, b) for a, b in zip(rows, fresh, strict=True))


def test_002_18_at_the_trained_length_the_frequencies_are_the_trained_ones() -> None:
    """E29's numbers: D = 8, trained for 16; 40 tokens stretch the slowest pair from 0.001 to 0.00025."""
    table = rope.Rope("complex", 8, 64, 1e4, DYNAMIC, trained_len=16)

    def slowest(length: int) -> float:
        return float(table.freqs_cis(torch.arange(length), length)[1, -1].angle())

    found = [slowest(length) for length in (16, 40, 16, 24, 15)]
    middle = 1e-3 / (2 * 24 / 16 - 1)
    assert found == pytest.approx([1e-3, 2.5e-4, 1e-3, middle, 1e-3], rel=1e-6)


def test_002_19_the_length_is_the_largest_position_of_the_batch_plus_one() -> None:
    """This includes batches padded on the left: the longest row sets the length for all rows."""
    config = dataclasses.replace(tiny.CONFIG, rope_scaling={"rope_type": "dynamic", "factor": 4.0}, max_seq_len=16)
    model = tiny.model(config, max_seq_len=64)
    rows = torch.stack((torch.arange(24), (torch.arange(24) - 9).clamp(min=0)))  # (B, T), row 1 padded by 9
    seen = watch(model, tiny.random_tokens(24, batch=2), rows)
    assert [end for _, end in seen.lookups] == [24]
    inv_freq, _ = inverse_frequencies(16, 1e4, config.rope_scaling, seq_len=24, max_seq_len=16)
    assert not torch.equal(inv_freq, inverse_frequencies(16, 1e4)[0])
    assert torch.equal(seen.freqs_cis[0], rope.freqs_cis_at(rows, inv_freq))


def test_002_20_the_table_has_no_gradient_and_passes_gradients_to_q() -> None:
    with torch.enable_grad():
        table = rope.Rope("real", 8, 64, 1e4).freqs_cis(torch.arange(3), 3)
        q = gaussians(0, 1, 3, 1, 8).float().requires_grad_(True)
        rotated, _ = rope.apply_rotary_emb_real(q, q.detach(), *table)
        upstream = gaussians(1, 1, 3, 1, 8).float()
        (rotated * upstream).sum().backward()
    assert not any(part.requires_grad for part in table)
    # The gradient is rotated back: the transpose of R_m is R_(-m).
    cos, sin = table
    back, _ = rope.apply_rotary_emb_real(upstream, upstream, cos, -sin)
    torch.testing.assert_close(q.grad, back, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_002_21_every_type_that_depends_on_the_length_follows_it(scaling: dict[str, Any]) -> None:
    """E54: longrope, too, depends on the length: it switches lists beyond the trained length."""
    assert scaling["rope_type"] in BY_LENGTH
    config = dataclasses.replace(tiny.CONFIG, dim=32, n_heads=4, head_dim=8, max_seq_len=16, rope_scaling=scaling)
    model = tiny.model(config, max_seq_len=64)
    short, long = watch(model, tiny.random_tokens(16, config)), watch(model, tiny.random_tokens(40, config))
    assert not torch.allclose(short.freqs_cis[0][15], long.freqs_cis[0][15], atol=1e-3)
    for kind in set(SCALINGS) - set(BY_LENGTH) - {"divisors"}:
        more = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        at_16, at_40 = (
            inverse_frequencies(8, 1e4, {"rope_type": kind, **more}, seq_len=length, max_seq_len=16)[0]
            for length in (16, 40)
        )
        assert torch.equal(at_16, at_40), kind


@LAW
@given(start=positions, seed=seeds, d=even_dims)
def test_002_22_the_matrix_product_is_an_outer_product(start: int, seed: int, d: int) -> None:
    ids = torch.from_numpy(by_hand.rng(seed).integers(start, start + 100, (2, 5)))  # (B, T)
    inv_freq = inverse_frequencies(d)[0]
    product = (inv_freq[None, :, None].expand(2, -1, 1) @ ids[:, None, :].float()).transpose(1, 2)  # (B, T, D/2)
    ours = rope.freqs_cis_at(ids, inv_freq)
    assert ours.shape == product.shape == (2, 5, d // 2)
    expected = np.stack([np.outer(row, inv_freq.numpy()) for row in ids.numpy().astype(np.float32)])
    np.testing.assert_allclose(product.numpy(), expected, rtol=2e-7)
    torch.testing.assert_close(ours, torch.polar(torch.ones_like(product), product), rtol=0, atol=2e-3)


def test_002_23_autocast_does_not_affect_the_angles() -> None:
    """E30: with frequencies rounded to bfloat16, the angle at position 8,191 would be wrong by 10 radians."""
    at = torch.arange(8192)
    inv_freq = inverse_frequencies(128)[0]
    plain = rope.freqs_cis_at(at, inv_freq)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (inv_freq[:, None] @ inv_freq[None]).dtype == torch.bfloat16  # a matrix product would be cast
        assert torch.equal(rope.freqs_cis_at(at, inv_freq), plain)
        assert torch.equal(llama.precompute_freqs_cis(128, 8192), plain)
    rounded = inv_freq.bfloat16().double()
    assert float(((rounded - inv_freq.double()) / inv_freq.double()).abs().max()) == pytest.approx(0.0037, abs=1e-4)
    assert float((8191 * (rounded - inv_freq.double())).abs().max()) == pytest.approx(10.0, abs=0.05)


@pytest.mark.parametrize("form", rope.FORMS)
def test_002_23_autocast_does_not_affect_the_rotation(form: str) -> None:
    q, freqs_cis = gaussians(0, 1, 40, 2, 16).float(), rope.Rope(form, 16, 64, 1e4).freqs_cis(torch.arange(40), 40)
    plain = rope.RotaryEmb(form)(q, q, freqs_cis)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = rope.RotaryEmb(form)(q, q, freqs_cis)
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))


def test_002_24_the_half_style_repeats_every_angle() -> None:
    for part in rope.Rope("half", 16, 64, 1e4).freqs_cis(torch.arange(30), 30):
        assert part.shape == (30, 16)
        assert torch.equal(part[..., :8], part[..., 8:])
    cos, sin = rope.Rope("half", 16, 64, 1e4).freqs_cis(torch.arange(30), 30)
    angles = np.outer(np.arange(30), by_hand.frequencies(16))
    np.testing.assert_allclose(cos[:, :8], np.cos(angles), rtol=0, atol=3e-6)
    np.testing.assert_allclose(sin[:, :8], np.sin(angles), rtol=0, atol=3e-6)


@LAW
@given(seed=seeds, factor=st.floats(1.01, 64), m=positions, n=positions)
def test_002_25_the_factor_reaches_the_score_squared(seed: int, factor: float, m: int, n: int) -> None:
    """E32: both q and k carry the factor."""
    scaling = {"rope_type": "yarn", "factor": factor}
    inv_freq, sharper = inverse_frequencies(16, 1e4, scaling, max_seq_len=2048)
    assert sharper == pytest.approx(1 + 0.1 * math.log(factor), rel=1e-12)
    q, k = gaussians(seed, 1, 1, 1, 16).float(), gaussians(seed + 1, 1, 1, 1, 16).float()
    at_m, at_n = torch.tensor([m]), torch.tensor([n])

    def score(factor: float) -> float:
        q_m, _ = rope.apply_rotary_emb(q, q, rope.freqs_cis_at(at_m, inv_freq, factor))
        k_n, _ = rope.apply_rotary_emb(k, k, rope.freqs_cis_at(at_n, inv_freq, factor))
        return float((q_m * k_n).sum())

    assert score(sharper) == pytest.approx(sharper**2 * score(1.0), abs=1e-4)


def test_002_25_the_factor_for_four_times_the_length() -> None:
    _, sharper = inverse_frequencies(16, 1e4, {"rope_type": "yarn", "factor": 4.0}, max_seq_len=2048)
    assert (sharper, sharper**2) == pytest.approx((1.1386, 1.2965), abs=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("form", rope.FORMS)
def test_002_26_the_output_has_the_dtype_of_x(form: str, dtype: torch.dtype) -> None:
    """The result is rounded once, after the rotation; the note's code rounds cos and sin before it."""
    rotate, freqs_cis = rope.RotaryEmb(form), rope.Rope(form, 16, 64, 1e4).freqs_cis(torch.arange(40), 40)
    x = gaussians(0, 2, 40, 3, 16).to(dtype)
    rotated, _ = rotate(x, x, freqs_cis)
    assert rotated.dtype == dtype
    assert torch.equal(rotated, rotate(x.float(), x.float(), freqs_cis)[0].to(dtype))


# ------------------------------------------------------------------------------------------------------- the model
def test_002_27_one_lookup_in_the_table_serves_every_layer() -> None:
    seen = watch(tiny.model(dataclasses.replace(tiny.CONFIG, n_layers=4)), tiny.random_tokens(6))
    assert len(seen.lookups) == 1
    assert len(seen.freqs_cis) == 4
    assert all(rows is seen.freqs_cis[0] for rows in seen.freqs_cis)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_002_29_ids_layers_norm_logits(heads: tuple[int, int]) -> None:
    """E27: every layer's output enters the next, and the final norm follows the last layer.

    Compares with numpy: the complete decoder (002-28), its blocks (002-30, 003-04), heads merged by wo (002-40).
    """
    config = dataclasses.replace(tiny.CONFIG, n_layers=3, n_heads=heads[0], n_kv_heads=heads[1])
    tokens = tiny.random_tokens(9)
    expected = by_hand.llama(tiny.weights(config), config, tokens[0].tolist())
    logits = tiny.model(config)(tokens)[0]
    assert float(np.abs(expected).max()) > 2
    np.testing.assert_allclose(logits.numpy(), expected, rtol=0, atol=2e-5)


def test_002_31_attention_and_mlp_are_normed_and_added() -> None:
    """E28: h = x + attention(norm x), out = h + mlp(norm h)."""
    model = tiny.model()
    block, x, at = model.layers[1], gaussians(0, 1, 5, 64).float(), torch.arange(5)
    freqs_cis, mask = model.rope.freqs_cis(at, 5), attention.causal_mask(at, at)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(by_hand.rms_norm(x.double().numpy(), weight.double().numpy(), 1e-5)).float()

    h = x + block.attention(norm(x, block.attention_norm.weight), freqs_cis, mask, at, None)
    expected = h + block.feed_forward(norm(h, block.ffn_norm.weight))
    torch.testing.assert_close(block(x, freqs_cis, mask, at, None), expected, rtol=0, atol=1e-5)
    block.attention.wo.weight.zero_()
    block.feed_forward.w_down.weight.zero_()
    assert torch.equal(block(x, freqs_cis, mask, at, None), x)  # only the residual connections remain


@LAW
@given(seed=seeds, m=positions, scale=st.sampled_from([-2.0, 0.5, 4.0]), form=st.sampled_from(list(rope.FORMS)))
def test_002_32_q_and_k_are_rotated_not_added_to(seed: int, m: int, scale: float, form: str) -> None:
    """E31: a rotation is linear and preserves lengths; adding a vector does neither."""
    rotate, freqs_cis = rope.RotaryEmb(form), rope.Rope(form, 16, 8193, 1e4).freqs_cis(torch.tensor([m]), m + 1)
    x, y = gaussians(seed, 1, 1, 2, 16).float(), gaussians(seed + 1, 1, 1, 2, 16).float()
    rotated, other = rotate(x, y, freqs_cis)
    scaled, _ = rotate(scale * x, y, freqs_cis)
    together, _ = rotate(x + y, y, freqs_cis)
    assert torch.equal(scaled, scale * rotated)
    torch.testing.assert_close(together, rotated + other, rtol=0, atol=2e-6)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)


def test_002_32_v_is_unchanged() -> None:
    model, tokens = tiny.model(), tiny.random_tokens(8)
    seen = watch(model, tokens)
    block = model.layers[0]
    v = block.attention.wv(block.attention_norm(model.tok_embeddings(tokens)))
    assert torch.equal(seen.v[0].transpose(1, 2).flatten(-2), v)


@pytest.mark.parametrize(("head_dim", "expected"), [(None, 16), ("absent", 16), (32, 32)])
def test_002_33_head_dim_is_given_or_follows_from_the_sizes(tmp_path: Path, head_dim: Any, expected: int) -> None:
    """A head_dim of null has the same fallback as an absent one."""
    test_huggingface.write(tmp_path, **({"head_dim": 32} if expected == 32 else {}))
    if head_dim == "absent":
        test_huggingface.edit(tmp_path, remove=("head_dim",))
    else:
        test_huggingface.edit(tmp_path, head_dim=head_dim)
    assert open_checkpoint(tmp_path).config.head_dim == expected


@LAW
@given(seed=seeds, kv=st.integers(1, 4), group=st.integers(1, 4), tokens=st.integers(1, 6))
def test_002_34_a_group_of_query_heads_shares_a_key_head(seed: int, kv: int, group: int, tokens: int) -> None:
    from transformers.models.llama.modeling_llama import repeat_kv

    q = gaussians(seed, 2, kv * group, tokens, 8).float()
    k, v = gaussians(seed + 1, 2, kv, tokens, 8).float(), gaussians(seed + 2, 2, kv, tokens, 8).float()
    repeated = [torch.from_numpy(np.repeat(x.numpy(), group, axis=1)) for x in (k, v)]
    assert all(torch.equal(a, repeat_kv(b, group)) for a, b in zip(repeated, (k, v), strict=True))
    for attend in tiny.FUNCTIONS.values():
        torch.testing.assert_close(attend(q, k, v), attend(q, *repeated), rtol=0, atol=1e-6)


@LAW
@given(seed=seeds, d=st.sampled_from([2, 8, 32, 128]), h=st.sampled_from([1, 4]))
def test_002_35_scores_are_divided_by_the_root_of_head_dim(seed: int, d: int, h: int) -> None:
    """E36: the root of head_dim, not of the hidden size h * d."""
    q, k = gaussians(seed, 1, h, 3, d), gaussians(seed + 1, 1, h, 5, d)
    ours = attention.reference_weights(q, k)[0].numpy()
    for head in range(h):
        scores = q[0, head].numpy() @ k[0, head].numpy().T
        np.testing.assert_allclose(ours[head], by_hand.softmax(scores / d**0.5), rtol=0, atol=1e-6)
        if h > 1:
            assert float(np.abs(ours[head] - by_hand.softmax(scores / (h * d) ** 0.5)).max()) > 1e-4


def test_002_36_the_four_projections_have_no_bias() -> None:
    config = dataclasses.replace(tiny.CONFIG, n_heads=6, n_kv_heads=2, head_dim=24)
    layer = tiny.model(config).layers[0].attention
    shapes = {name: tuple(getattr(layer, name).weight.shape) for name in ("wq", "wk", "wv", "wo")}
    assert shapes == {"wq": (6 * 24, 64), "wk": (2 * 24, 64), "wv": (2 * 24, 64), "wo": (64, 6 * 24)}
    assert all(getattr(layer, name).bias is None for name in shapes)
    biased = tiny.model(dataclasses.replace(config, attention_bias=True)).layers[0].attention
    assert all(getattr(biased, name).bias.shape == (shapes[name][0],) for name in shapes)


def test_002_37_heads_come_before_tokens() -> None:
    seen = watch(tiny.model(), tiny.random_tokens(5, batch=2))
    q, k = seen.before[0]  # as projected, tokens first
    assert (q.shape, k.shape) == ((2, 5, 4, 16), (2, 5, 2, 16))
    assert (seen.q[0].shape, seen.k[0].shape, seen.v[0].shape) == ((2, 4, 5, 16), (2, 2, 5, 16), (2, 2, 5, 16))
    rotated, _ = rope.apply_rotary_emb(q, k, llama.precompute_freqs_cis(16, 5))
    for b, t, h in np.ndindex(2, 5, 4):
        assert torch.equal(seen.q[0][b, h, t], rotated[b, t, h])


@pytest.mark.parametrize("form", rope.FORMS)
@pytest.mark.parametrize("chunk", [1, 7, 30])
def test_002_38_rotated_keys_are_cached_and_the_cache_changes_no_logits(form: str, chunk: int) -> None:
    model, tokens = tiny.model(rope=form), tiny.random_tokens(30)
    full, cache = watch(model, tokens), model.new_cache()
    parts = [model(part, cache=cache) for part in tokens.split(chunk, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), full.logits, rtol=0, atol=1e-5)
    for layer in range(tiny.CONFIG.n_layers):
        torch.testing.assert_close(cache.k[layer, :, :, :30], full.k[layer], rtol=0, atol=1e-5)
    late = torch.cat([model(part, at, cache) for part, at in [(tokens[:, 20:], torch.arange(20, 30))]])
    torch.testing.assert_close(late, full.logits[:, 20:], rtol=0, atol=1e-5)


def test_002_39_fused_attention_equals_the_formula_and_has_no_dropout() -> None:
    tokens = tiny.random_tokens(40)
    fused, written_out = (tiny.model(attention=name) for name in ("sdpa", "reference"))
    torch.testing.assert_close(fused(tokens), written_out(tokens), rtol=0, atol=1e-5)
    in_training = tiny.model().train()
    assert torch.equal(in_training(tokens), fused(tokens))  # nothing is random, not even in training mode
    assert not [m for m in in_training.modules() if isinstance(m, torch.nn.Dropout)]


# ----------------------------------------------------------------------------------------------------- rotate_half
@LAW
@given(seed=seeds, d=even_dims)
def test_002_41_rotate_half_is_a_quarter_turn(seed: int, d: int) -> None:
    x = gaussians(seed, 3, d)
    rotated = rope.rotate_half(x)
    assert torch.equal(rope.rotate_half(rotated), -x)
    assert torch.equal(rotated, torch.cat((-x[:, d // 2 :], x[:, : d // 2]), -1))
    matrix = rope.rotate_half(torch.eye(d, dtype=torch.float64))
    assert torch.equal(matrix @ matrix.T, torch.eye(d, dtype=torch.float64))
    assert torch.allclose(rotated.norm(dim=-1), x.norm(dim=-1))
    assert float((rotated * x).sum(-1).abs().max()) < 1e-12


@LAW
@given(seed=seeds, start=positions, d=even_dims, base=bases)
def test_002_42_q_cos_plus_rotate_half_q_sin_is_the_complex_form(seed: int, start: int, d: int, base: float) -> None:
    q, k = gaussians(seed, 2, 5, 4, d).float(), gaussians(seed + 1, 2, 5, 2, d).float()
    freqs_cis = rope.freqs_cis_at(torch.arange(start, start + 5), inverse_frequencies(d, base)[0])
    cos, sin = (torch.cat((part, part), -1) for part in (freqs_cis.real, freqs_cis.imag))
    by_half = rope.apply_rotary_pos_emb(
        rope.interleaved_to_half(q), rope.interleaved_to_half(k), cos, sin, unsqueeze_dim=2
    )
    for ours, expected in zip(by_half, rope.apply_rotary_emb(q, k, freqs_cis), strict=True):
        torch.testing.assert_close(rope.half_to_interleaved(ours), expected, rtol=0, atol=2e-6)


@LAW
@given(seed=seeds, start=positions)
def test_002_43_the_axis_of_the_heads_is_an_argument(seed: int, start: int) -> None:
    q, k = gaussians(seed, 2, 4, 5, 16).float(), gaussians(seed + 1, 2, 2, 5, 16).float()  # (B, H, T, D)
    cos, sin = doubled(torch.outer(torch.arange(start, start + 5).float(), inverse_frequencies(16)[0]))
    heads_first = rope.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    tokens_first = rope.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    for a, b in zip(heads_first, tokens_first, strict=True):
        assert torch.equal(a, b.transpose(1, 2))
    assert "position_ids" not in inspect.signature(rope.apply_rotary_pos_emb).parameters
    with pytest.raises(ValueError, match="4 tokens"):  # the axis of the tokens instead of the heads
        rope.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
