"""docs/learn/claims.md and rope-on-one-page.md: every number in two computations, and the code that the pages show."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import llama
from llama.study import bugs, measures, topics
from llama.study.results import json_lines

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = (ROOT / "docs" / "learn" / "claims.md").read_text()
SUMMARY = (ROOT / "docs" / "learn" / "rope-on-one-page.md").read_text()
RANDOM = np.random.default_rng(0)


def omega(d: int, base: float = 10000.0) -> np.ndarray:
    """The frequencies as the library computes them: (d/2,) float64."""
    return measures.frequencies(d, base).double().numpy()


def said(*words: str) -> None:
    for word in words:
        assert word in CLAIMS, word


def rotated(x: np.ndarray, m: int) -> np.ndarray:
    """RoPE of one vector (D,), with neighbours as pairs."""
    z = (x[0::2] + 1j * x[1::2]) * np.exp(1j * m * omega(len(x)))  # (D/2,)
    return np.stack((z.real, z.imag), -1).ravel()  # (D/2, 2), then (D,)


def test_the_commands_and_files_that_the_pages_name_exist() -> None:
    references = (ROOT / "docs" / "learn" / "references.md").read_text()
    for page in (CLAIMS, references, SUMMARY):
        for topic, bug in re.findall(r"`(?:clearllama )?study ([a-z]+)(?: ([a-z-]+))?[^`]*`", page):
            assert topics.find(topic)
            assert topic != "bugs" or bug in ("", *bugs.BUGS), bug
        for file in re.findall(r"`((?:tests|scripts|llama)/[\w/]+\.py)`", page):
            assert (ROOT / file).exists(), file


# ------------------------------------------------------------------------------------------- words, order, attention
def test_an_added_code_is_in_the_values_and_a_rotation_that_is_undone_is_not() -> None:
    x, p = RANDOM.standard_normal((2, 6, 8))  # (S, C)
    w, a = RANDOM.standard_normal((8, 8)), RANDOM.dirichlet(np.ones(6))  # (D, C), (S,)
    np.testing.assert_allclose(a @ ((x + p) @ w.T) - a @ (x @ w.T), w @ (a @ p))  # the weighted mean of W p
    v = x @ w.T  # (S, D)

    def output(shift: int, undo: bool) -> np.ndarray:
        total = sum(a[n] * rotated(v[n], n + shift) for n in range(6))
        return rotated(total, -5 - shift) if undo else total

    np.testing.assert_allclose(output(100, undo=True), output(0, undo=True), atol=1e-9)
    assert np.abs(output(100, undo=False) - output(0, undo=False)).max() > 0.1


def test_blocks_give_the_same_attention_without_storing_the_scores() -> None:
    q, k, v = RANDOM.standard_normal((3, 12, 8))  # (S, D)
    running, largest, total = np.zeros((12, 8)), np.full((12, 1), -np.inf), np.zeros((12, 1))
    products = 0
    for at in range(0, 12, 4):  # softmax over blocks of 4 keys
        scores = q @ k[at : at + 4].T / math.sqrt(8)  # (S, 4)
        products += scores.size
        top = np.maximum(largest, scores.max(1, keepdims=True))
        weights, scale = np.exp(scores - top), np.exp(largest - top)
        running, total = scale * running + weights @ v[at : at + 4], scale * total + weights.sum(1, keepdims=True)
        largest = top
    whole = torch.nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)))
    np.testing.assert_allclose(running / total, whole, atol=1e-12)
    assert products == 12**2


@pytest.mark.slow
def test_dog_is_the_sixth_nearest_token_of_cat_in_the_default_model() -> None:
    llm = llama.load(dtype="float32", quiet=True)
    table = llm.model.tok_embeddings.weight  # (V, C)
    (cat,), (dog,) = (llm.tokenizer.encode(word) for word in (" cat", " dog"))
    cosines = torch.nn.functional.cosine_similarity(table, table[cat], dim=1)  # (V,)
    nearer = (cosines > cosines[dog]).nonzero().flatten().tolist()
    assert {llm.tokenizer.decode([id]).strip().lower() for id in nearer} == {"cat", "cats"}
    assert len(nearer) == 5  # cat itself and four others
    assert len(table) == 49152
    said("49,152 tokens, only four other forms of *cat*")


# ---------------------------------------------------------------------------------------------- sinusoids and learned
def test_frequencies_fall_by_a_factor_and_their_smallest_depends_on_d() -> None:
    for d, smallest in ((4, 0.01), (64, 0.000133)):
        assert omega(d)[-1] == pytest.approx(10000 ** (-(d - 2) / d), rel=1e-6)
        assert omega(d)[-1] == pytest.approx(smallest, rel=3e-3)
        assert omega(d)[-1] > 1e-4
    np.testing.assert_allclose(omega(128)[1:] / omega(128)[:-1], 0.866, atol=5e-5)
    assert [10000 ** (-2 * i / 8) for i in range(0, 8, 2)] == pytest.approx([1, 0.01, 0.0001, 0.000001])  # doubled
    np.testing.assert_allclose(omega(8), [1, 0.1, 0.01, 0.001], rtol=1e-6)
    said("0.01 for d = 4, 0.000133 for d = 64", "0.866 for d = 128", "1, 0.01, 0.0001, 0.000001 in place of 1, 0.1,")


def test_the_radix_is_the_ratio_of_periods_without_2_pi() -> None:
    periods = 2 * math.pi / omega(128)  # (64,)
    np.testing.assert_allclose(periods[1:] / periods[:-1], 10000 ** (2 / 128), rtol=1e-6)
    assert round(10000 ** (2 / 128), 3) == 1.155
    assert round(2 * math.pi, 2) == round(periods[0], 2) == 6.28
    assert periods[-1] == pytest.approx(2 * math.pi * (10000 ** (2 / 128)) ** 63, rel=1e-6)
    assert round(periods[-1], -1) == 54410
    said("64 digits with radix 1.155", "pair 0 turns in 6.28 tokens, pair 63 in 54,410")


def test_the_order_of_entries_does_not_matter_and_columns_are_not_orthogonal() -> None:
    codes = measures.sinusoids(torch.arange(512), 64).numpy()  # (N, C)
    grouped = np.concatenate(
        (np.sin(np.outer(np.arange(512), omega(64))), np.cos(np.outer(np.arange(512), omega(64)))), 1
    )
    np.testing.assert_allclose(grouped @ grouped.T, codes @ codes.T, atol=1e-4)
    turns = np.outer(np.arange(512), np.arange(1, 33)) / 512  # (N, 32): Fourier's, of the lengths 512, 256, ...
    fourier = np.concatenate((np.sin(2 * np.pi * turns), np.cos(2 * np.pi * turns)), 1)  # (N, 64)
    np.testing.assert_allclose(fourier.T @ fourier, 256 * np.eye(64), atol=1e-9)
    products = codes.T @ codes / 256  # (C, C)
    assert np.abs(products - np.diag(np.diag(products))).max() > 1


def test_lengths_of_words_and_codes_and_pairs_that_do_not_turn_within_512() -> None:
    words = RANDOM.standard_normal((2000, 512)) / math.sqrt(512)
    assert np.linalg.norm(words, axis=1).mean() == pytest.approx(1, abs=0.01)
    assert round(math.sqrt(512), 1) == 22.6
    codes = measures.sinusoids(torch.arange(100), 512).numpy()
    np.testing.assert_allclose(np.linalg.norm(codes, axis=1), 16, rtol=1e-6)
    slow = sum(512 * 10000 ** (-2 * i / 512) < 2 * math.pi for i in range(256))
    assert slow == int((measures.turns(measures.frequencies(512), 512) < 1).sum()) == 133
    said("16 for d = 512", "22.6 long", "133 of 256 pairs")


def test_losses_after_the_same_training() -> None:
    runs = json_lines("encodings.jsonl")
    mean = {
        name: np.mean([run["loss"] for run in runs if run["encoding"] == name], 0) for name in ("sinusoidal", "learned")
    }
    per = len(mean["learned"]) // 4  # windows of 512 bytes: the first quarter was trained
    assert [round(float(mean[name][:per].mean()), 2) for name in mean] == [1.6, 1.71]
    assert round(float(mean["sinusoidal"][per : per + per // 4].mean()), 2) == 3.08
    said("from 1.60 to 3.08 within the next 32", "1.71 against 1.60")


def test_gpt2s_table_is_a_small_part_of_the_model() -> None:
    C, V, T, L = 768, 50257, 1024, 12
    layer = (C * 3 * C + 3 * C) + (C * C + C) + (C * 4 * C + 4 * C) + (4 * C * C + C) + 4 * C
    total = V * C + T * C + L * layer + 2 * C
    assert total == 124_439_808
    assert T * C == 786_432
    assert round(100 * T * C / total, 1) == 0.6
    said("786,432 numbers, 0.6 % of 124 million")


# ------------------------------------------------------------------------------------------------------- the rotation
def test_the_last_entry_of_the_elementwise_form_is_x_of_d_minus_1() -> None:
    x, m = RANDOM.standard_normal(8), 300
    cos, sin = (np.repeat(f(m * omega(8)), 2) for f in (np.cos, np.sin))  # (D,)
    quarter = np.stack((-x[1::2], x[0::2]), -1).ravel()  # (D,)
    np.testing.assert_allclose(x * cos + quarter * sin, rotated(x, m), atol=1e-12)
    printed = np.r_[quarter[:-2], -x[-2], x[-1]]
    wrong = np.abs(x * cos + printed * sin - rotated(x, m))
    assert wrong[:-2].max() < 1e-12
    assert wrong[-2:].min() > 1e-3


def test_scores_are_invariant_under_shifts_and_not_under_other_rotations() -> None:
    q, k = RANDOM.standard_normal((2, 8))
    other = np.linalg.qr(RANDOM.standard_normal((8, 8)))[0]
    score = rotated(q, 5) @ rotated(k, 2)
    assert rotated(q, 105) @ rotated(k, 102) == pytest.approx(score)
    assert rotated(other @ q, 5) @ rotated(other @ k, 2) != pytest.approx(score, abs=0.01)


def test_front_pairs_turn_most_and_need_not_move_most() -> None:
    moved = [abs(np.exp(1j * 44 * w) - 1) for w in omega(8)[:2]]
    assert (
        [round(float(x), 2) for x in moved] == [round(2 * abs(math.sin(22 * w)), 2) for w in (1, 0.1)] == [0.02, 1.62]
    )
    said("pair 0 moves by 0.02, and pair 1 by 1.62")


def test_a_larger_base_lowers_frequencies_and_slows_the_decay() -> None:
    distances = np.arange(1, 4097)
    small, large = (np.cos(np.outer(distances, omega(128, base))).mean(1) for base in (1e4, 5e5))  # (4096,)
    np.testing.assert_allclose(
        small, measures.mean_cosine(measures.frequencies(128), torch.from_numpy(distances)), atol=1e-3
    )
    assert (omega(128, 5e5)[1:] < omega(128)[1:]).all()
    assert small.mean() < large.mean() - 0.1
    for base, near in ((1e4, 21), (5e5, 15)):
        assert (
            (2 * math.pi / omega(128, base) < 128).sum()
            == math.ceil(64 * math.log(64 / math.pi) / math.log(base))
            == near
        )
    said("21 pairs have periods below 128 tokens with base 10,000, and 15 with 500,000")


def test_bfloat16_frequencies_are_wrong_by_10_radians_at_8191() -> None:
    right = np.array([10000 ** (-2 * i / 128) for i in range(64)])
    exponent = np.floor(np.log2(right)) - 7  # bfloat16 has 8 significant bits
    by_hand = np.round(right / 2**exponent) * 2**exponent
    by_torch = llama.inverse_frequencies(128)[0].bfloat16().double().numpy()
    np.testing.assert_array_equal(by_torch, by_hand)
    assert round(float(8191 * np.abs(by_hand - right).max())) == 10
    said("10 radians at position 8,191")


def test_unsqueeze_dim_names_the_axis_of_the_heads() -> None:
    q, k, cos, sin = torch.randn(4, 1, 2, 5, 8)
    cos, sin = cos[:, 0], sin[:, 0]  # (B, T, D)
    heads_first = llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    tokens_first = llama.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    for one, other in zip(heads_first, tokens_first, strict=True):
        assert torch.equal(one, other.transpose(1, 2))


# -------------------------------------------------------------------------------------------------------- longer texts
def test_the_clock_lasts_three_times_as_long_in_three_ways() -> None:
    def periods(*counts: float) -> np.ndarray:
        return np.cumprod(counts)

    clock = periods(60, 60, 12)
    assert clock.tolist() == [60, 3600, 43200]
    assert (3 * clock)[-1] == 129600
    assert 360 / (3 * 60) == 2
    np.testing.assert_allclose(periods(60, 90, 24), clock * [1, 1.5, 3])
    ntk = omega(6) / measures.frequencies(6, 10000.0, {"rope_type": "ntk", "factor": 3.0}).numpy()  # (3,)
    np.testing.assert_allclose(ntk, 3 ** (np.arange(3) / 2), rtol=1e-6)
    np.testing.assert_allclose(clock * ntk, periods(60, 60 * math.sqrt(3), 12 * math.sqrt(3)), rtol=1e-6)
    assert round(float((clock * ntk)[-1])) == 129600
    for base, ratio in ((60.0, 60 ** (1 / 3)), (216000.0, 60.0)):
        np.testing.assert_allclose(omega(6, base)[:-1] / omega(6, base)[1:], ratio, rtol=1e-6)
    said("by 1, 1.732 and 3", "become 60, 5,400 and 129,600 s", "60 needs base 216,000", "2° per second in place of 6°")


def test_the_new_base_interpolates_the_last_pair_alone_fully() -> None:
    base = 10000 * 4 ** (128 / 126)
    assert round(base) == 40890
    by_library = omega(128) / measures.frequencies(128, 10000.0, {"rope_type": "ntk", "factor": 4.0}).numpy()
    np.testing.assert_allclose(by_library, omega(128) / base ** (-np.arange(0, 128, 2) / 128), rtol=1e-6)
    assert by_library[0] == 1
    assert by_library[-1] == pytest.approx(4)
    assert (by_library[1:-1] < 3.95).all()
    said("base 40,890")


def test_the_lines_in_circulation_do_what_the_page_says() -> None:
    assert not hasattr(torch, "arrange")
    with pytest.raises((TypeError, ValueError)):
        math.sin(torch.arange(3.0))  # type: ignore[arg-type]
    errors = {}
    for length in (2, 10, 16):
        frequencies = torch.exp(torch.arange(0, length, 2) * (-math.log(10000) / 16))
        try:
            angles = torch.zeros(length, 8) + torch.arange(length)[:, None] * frequencies
        except RuntimeError:
            errors[length] = "error"
        else:
            right = np.outer(np.arange(length), omega(16))
            errors[length] = "right" if np.allclose(angles, right, atol=1e-4) else "wrong"
    assert errors == {2: "wrong", 10: "error", 16: "right"}
    assert math.exp(-2 * 3 / 16 * math.log(10000)) == pytest.approx(10000 ** (-6 / 16))
    assert math.exp(2 * 3 / 16) * math.log(10000) > 13


# --------------------------------------------------------------------------------------------------- RoPE on one page
def test_the_code_of_the_summary_is_the_rotation_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", SUMMARY, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert capsys.readouterr().out == shown
    q, k, positions = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 1, 8), torch.arange(5.0)  # (B, T, H, D), (B, T, KV, D)
    angles = torch.outer(positions, llama.inverse_frequencies(8)[0])  # (T, D/2)
    pairs = llama.apply_rotary_emb(q, k, llama.precompute_freqs_cis(8, 5))
    halves = llama.apply_rotary_pos_emb(q, k, angles.cos().repeat(1, 2), angles.sin().repeat(1, 2), unsqueeze_dim=2)
    for name, library in (("rotate_interleaved", pairs), ("rotate_half", halves)):
        for x, right in zip((q, k), library, strict=True):
            found = names[name](x.transpose(1, 2), angles)  # type: ignore[operator]
            assert torch.allclose(found.transpose(1, 2), right, atol=1e-6)
        body = re.search(rf"def {name}\(.*?\n((?:    .*\n)+)", code)
        assert body
        assert len(body[1].splitlines()) <= 6


def test_the_table_of_scalings_has_every_kind_with_its_parameters() -> None:
    rows = dict(re.findall(r"^\| `(\w+)`(?: \([^|]*\))? \| (?!frequency).*?\| (.*) \|$", SUMMARY, re.MULTILINE))
    assert rows.keys() == llama.rope_scaling.SCALINGS.keys() - {"divisors"}  # of GGUF, not of config.json
    for kind, cell in rows.items():
        accepted = set(llama.rope_scaling.PARAMETERS[kind])
        named = set(re.findall(r"`(\w+)`", cell))
        assert named == (accepted if kind == "proportional" else accepted - {"partial_rotary_factor"}), kind


def test_each_configuration_has_one_row_with_its_own_base_and_slow_pairs() -> None:
    page = (ROOT / "docs" / "reference" / "rope.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    for file in (ROOT / "configs").glob("*.json"):
        config = json.loads(file.read_text())
        (row,) = (cells for cells in rows if f"`{file.stem}`" in cells[0])
        scaling, D = config["rope_scaling"] or {}, config["head_dim"]
        trained = scaling.get("original_max_position_embeddings", config["max_seq_len"])
        slow = sum(2 * math.pi * config["rope_theta"] ** (2 * i / D) > trained for i in range(D // 2))
        assert row[1:3] == [f"{config['rope_theta']:,.0f}", f"{trained:,}"]
        by = f" ({scaling['rope_type']}, factor {scaling['factor']:g})" if scaling else ""
        assert row[3:5] == [f"{config['max_seq_len']:,}{by}", f"{slow} of {D // 2}"]
