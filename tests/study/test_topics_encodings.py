"""The topics about other encodings, variants, bands and recall: against transformers, numpy and complete passes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama.cli import main
from llama.config import ModelConfig
from llama.errors import UsageError
from llama.loader import load_model, load_tokenizer
from llama.study import measures, needle, topics
from llama.study.perplexity import tiny_folder
from llama.study.topics import bands, others, trained, variants
from llama.study.topics import needle as needle_topic

from .. import tiny
from . import drawing

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("trained", "bands", "variants", "others", "needle")


# --------------------------------------------------------------------------------------------------- reports, figures
@pytest.mark.parametrize("name", NAMES)
def test_every_check_holds(name: str) -> None:
    report = topics.find(name).report()
    assert report.passed, [check for check in report.checks if not check.passed]
    assert (report.topic, report.question) == (name, topics.TOPICS[name])


NOT_DRAWN = {
    "trained": set(),
    "needle": {"trained", "read", "at", "nats", "right", "text"},  # means of them are drawn
    "depth": {"trained", "read", "at", "nats", "text"},
    "bands": {"x", "y", "low", "high"},
    "bands_smollm2": {"low", "high"},
    "plane": {"x", "y"},
}


@pytest.mark.parametrize(("name", "figure"), [(n, f.name) for n in NAMES for f in topics.find(n).figures])
def test_a_figure_shows_its_numbers(name: str, figure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = topics.find(name).figure(figure)
    data = drawn.data()
    assert len({len(column) for column in data.values()}) == 1
    canvas = drawing.draw(drawn)
    monkeypatch.setattr(drawing, "NOT_DRAWN", NOT_DRAWN)
    drawing.check_drawn(figure, data, canvas)
    assert any(axes.get_xlabel() for axes in canvas.axes)
    assert canvas.get_supylabel() or any(axes.get_ylabel() for axes in canvas.axes)


# ----------------------------------------------------------------------------------------------------- other encodings
@pytest.mark.slow  # imports a model of transformers
def test_t5_buckets_are_those_of_transformers() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-20, 3000)
    theirs = T5Attention._relative_position_bucket(-distances, bidirectional=False, num_buckets=32, max_distance=128)
    assert torch.equal(others.t5_bucket(distances), theirs)


@pytest.mark.slow  # imports a model of transformers
def test_partial_rotation_is_that_of_gpt_j() -> None:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb, create_sinusoidal_positions

    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    table = create_sinusoidal_positions(9, 16)
    sin, cos = (half[None] for half in table.chunk(2, dim=-1))  # (B, T, 8) each
    theirs = torch.cat((apply_rotary_pos_emb(x[None, :, None, :16], sin, cos)[0, :, 0], x[:, 16:]), dim=-1)
    ours = variants.partly_turned(x, torch.arange(9), 16)
    torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=1e-5)


@pytest.mark.slow  # imports a model of transformers
def test_alibi_slopes_are_those_of_bloom() -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), 16, torch.float32)[:, 0, 1]  # slope * 1, by head
    torch.testing.assert_close(others.alibi_slopes(16).float(), theirs)


def test_scores_equal_loops_in_numpy() -> None:
    """Shaw, Transformer-XL, ALiBi and xPos, query by query and key by key."""
    draw, n, d = torch.Generator().manual_seed(0), 7, 8
    q, k, wr = (torch.randn(*s, generator=draw, dtype=torch.float64) for s in ((n, d), (n, d), (d, 6)))
    table, u, v = (torch.randn(*s, generator=draw, dtype=torch.float64) for s in ((5, d), (d,), (d,)))
    found = {
        "shaw": others.shaw(q, k, table),
        "xl": others.transformer_xl(q, k, wr, u, v),
        "alibi": others.alibi(q, k, 0.25),
        "xpos": others.xpos(q, k),
    }
    Q, K = q.numpy(), k.numpy()
    w = 10000.0 ** (-np.arange(0, d, 2) / d)
    zeta = (np.arange(0, d, 2) + 0.4 * d) / (1.4 * d)  # as in torchscale
    for m in range(n):
        for j in range(n):
            t = m - j
            angles = t * 10000.0 ** (-np.arange(0, 6, 2) / 6)
            r = np.stack((np.sin(angles), np.cos(angles)), -1).ravel()
            zq, zk = (x[0::2] + 1j * x[1::2] for x in (Q[m], K[j]))
            expected = {
                "shaw": Q[m] @ (K[j] + table[min(max(t, -2), 2) + 2].numpy()),
                "xl": (Q[m] + u.numpy()) @ K[j] + (Q[m] + v.numpy()) @ (wr.numpy() @ r),
                "alibi": Q[m] @ K[j] - 0.25 * t,
                "xpos": (zq * zk.conj() * np.exp(1j * t * w) * zeta ** (t / 512)).real.sum(),
            }
            for name, value in expected.items():
                assert float(found[name][m, j]) == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("freqs", [variants.axial(16), variants.mixed(16)])
def test_rotation_in_the_plane_depends_on_the_difference_of_places(freqs: torch.Tensor) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 16, generator=draw, dtype=torch.float64)
    for place, other in (((3, 5), (1, 9)), ((-4, 2), (7, 7))):
        score = (
            variants.turn_2d(q, torch.tensor([place]), freqs) @ variants.turn_2d(k, torch.tensor([other]), freqs).T
        ).item()
        zq, zk = (x.numpy()[0, 0::2] + 1j * x.numpy()[0, 1::2] for x in (q, k))
        x, y = place[0] - other[0], place[1] - other[1]
        angles = x * freqs[0].numpy() + y * freqs[1].numpy()
        assert score == pytest.approx((zq * zk.conj() * np.exp(1j * angles)).real.sum(), abs=1e-9)


# --------------------------------------------------------------------------------------------------------------- bands
def test_lengths_of_pairs_and_weights_are_those_of_the_model() -> None:
    net = tiny.model()
    tokens = tiny.random_tokens(20)[0]
    found = bands.measured(net, tokens)
    x = net.layers[0].attention_norm(net.tok_embeddings(tokens))
    for got, linear, heads in ((found.q, "wq", 4), (found.k, "wk", 2)):
        pairs = getattr(net.layers[0].attention, linear)(x).double().numpy().reshape(20, heads, 8, 2)
        lengths = np.sqrt((pairs**2).sum(-1)).mean(0)  # (heads, D/2)
        np.testing.assert_allclose(got[0].numpy(), lengths.repeat(4 // heads, axis=0), rtol=1e-5)
    expected = torch.nn.functional.cross_entropy(net(tokens[None])[0, :-1].double(), tokens[1:])
    assert found.loss == pytest.approx(float(expected))


def test_stopping_all_pairs_is_a_model_without_rope() -> None:
    """The topic stops pairs in the table; `no_rope_layers` leaves the rotation out."""
    _, _, found = bands._heads("tiny-kjv", None, 64)
    text = (tiny_folder() / "held-out.txt").read_bytes()
    start = (len(text) - 64) // 2
    tokens = torch.tensor(list(text[start : start + 64]))
    net = load_model(tiny_folder(), dtype="float32")
    for block in net.layers:
        block.attention.apply_rotary_emb.rotates = False
    assert found["all"].loss == pytest.approx(bands.measured(net, tokens).loss, abs=1e-4)
    assert found["none"].loss < found["fastest quarter"].loss < found["all"].loss


# -------------------------------------------------------------------------------------------------------------- needle
def test_a_haystack_has_its_facts_at_their_places() -> None:
    tokenizer = load_tokenizer(tiny_folder())
    source = (tiny_folder() / "held-out.txt").read_text()
    hay = needle.haystack(tokenizer, source, 1000, 128)
    assert len(hay.ids) == len(hay.plain) == 1000
    assert [at for _, _, at, _ in hay.facts] == [64 + 128 * i for i in range(7)]
    for place, number, at, _ in hay.facts:
        fact = f"\nThe magic number of {place} is {number}.\n"
        assert tokenizer.decode(hay.ids[at : at + len(fact)].tolist()) == fact
        assert not hay.plain[at : at + len(fact)].any()
    assert tokenizer.decode(hay.ids[hay.plain].tolist()) == source[: int(hay.plain.sum())]
    assert len({number for _, number, *_ in hay.facts}) == 7


@pytest.mark.parametrize(
    ("length", "every", "message"),
    [(8192, 128, "at most 4096"), (4000, 2000, "longer --text"), (40, 32, "a fact has 38 tokens")],
)
def test_a_text_without_room_is_rejected(length: int, every: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        needle.haystack(load_tokenizer(tiny_folder()), "word " * 100, length, every)


def test_the_answer_begins_at_the_number(tmp_path: Path) -> None:
    paths = [tiny_folder(), tiny.write_gguf(tmp_path / "a.gguf")]
    for tokenizer in map(load_tokenizer, paths):
        ids, start = needle.question(tokenizer, "Lima", "29305")
        assert tokenizer.decode(ids[start:]).strip() == "29305"
        assert tokenizer.decode(ids[:start]).strip() == "The magic number of Lima is"


def test_recall_and_text_equal_those_of_complete_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question against the text before it and the question in one pass, with softmax in numpy."""
    monkeypatch.setattr(needle, "PER_LENGTH", 1)
    monkeypatch.setattr(needle, "EDGES", (0.5, 1, 1.5, 2))
    found = needle.measure("tiny-kjv", length=300, methods=("yarn:4",), dtype="float32")
    assert sorted({answer.read for answer in found.answers}) == [128, 192, 256, 300]
    tokenizer, model = load_tokenizer(tiny_folder()), load_model(
        tiny_folder(), dtype="float32", rope_scaling={"rope_type": "yarn", "factor": 4.0}, max_seq_len=400
    )  # fmt: skip
    hay = needle.haystack(tokenizer, (tiny_folder() / "held-out.txt").read_text(), 300, 128)
    numbers = {at: needle.question(tokenizer, place, number) for place, number, at, _ in hay.facts}

    def logprobs(ids: list[int]) -> Any:
        logits = model(torch.tensor([ids]))[0].double().numpy()
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    whole = logprobs(hay.ids.tolist())
    first = {128: 64, 192: 128, 256: 192, 300: 256}
    for answer in found.answers:
        ids, start = numbers[answer.at]
        rows = logprobs([*hay.ids[: answer.read].tolist(), *ids])[answer.read :]
        wanted = ids[start:]
        assert answer.nats == pytest.approx(
            -np.mean([rows[start - 1 + i, id] for i, id in enumerate(wanted)]), rel=1e-3
        )
        assert answer.right == np.mean([rows[start - 1 + i].argmax() == id for i, id in enumerate(wanted)])
        span = [t for t in range(first[answer.read] + 1, min(answer.read + 1, 300)) if hay.plain[t]]
        assert answer.text == pytest.approx(-np.mean([whole[t - 1, hay.ids[t]] for t in span]), rel=1e-3)
    assert {(answer.read, answer.at) for answer in found.answers} == {
        (read, at) for read in first for at in numbers if at + 38 <= read
    }


def test_a_stretch_that_recalls_nothing_fails_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    real = needle_topic.stored()
    bad = tuple(
        needle.Recall(a.method, a.read, a.at, a.nats, 0.1 if a.method == "yarn:2" else a.right, a.text)
        for a in real.answers
    )
    monkeypatch.setattr(needle_topic, "stored", lambda: needle.Found(real.model, real.trained, bad))
    assert not needle_topic.report().passed


def test_an_option_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "needle", "--length", "4096"]) == 2
    assert "add --model" in capsys.readouterr().err


@pytest.mark.slow  # reads 4096 tokens with the default model
def test_the_stored_recall_is_measured_again() -> None:
    stored = {(a.at): a for a in needle_topic.stored().answers if (a.method, a.read) == ("none", 4096)}
    again = needle.measure("smollm2-135m-instruct", length=4096, methods=("none",))
    assert {answer.at for answer in again.answers} == set(stored)
    for answer in again.answers:
        assert answer.nats == pytest.approx(stored[answer.at].nats, abs=0.2)
        assert answer.text == pytest.approx(stored[answer.at].text, abs=0.02)


# ------------------------------------------------------------------------------------------------------------- trained
def test_the_stored_losses_cover_whole_seeds_of_one_setting() -> None:
    lines = trained.json_lines(trained.FILE)
    assert len({(line["steps"], line["batch"]) for line in lines}) == 1
    for name, losses in trained.losses().items():
        assert losses.shape == (len(trained.losses()["rope"]), 512 // trained.BUCKET), name
        assert (losses > 0.5).all()
        assert (losses < math.log(256) + 1).all()


def test_reports_of_untrained_runs_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "losses", lambda: {name: np.full((3, 32), math.log(256)) for name in trained.NAMES})
    assert not trained.report().passed


def test_the_kernels_begin_at_1_and_xpos_is_below_rope_at_the_peaks() -> None:
    lines = others.kernels(torch.arange(2000), 64)
    assert all(float(line[0]) == pytest.approx(1) for line in lines.values())
    assert float(lines["xPos"].abs()[1000:].max()) < float(lines["RoPE"].abs()[1000:].max())
    torch.testing.assert_close(lines["RoPE"], measures.mean_cosine(measures.frequencies(64), torch.arange(2000)))


def test_layers_without_rope_do_not_depend_on_the_config_of_others() -> None:
    assert ModelConfig(32, 2, 2, 2, 16, 64, 8, no_rope_layers=(1,)).no_rope_layers == (1,)
    changes = variants.change_by_layer((1,), n_layers=2)
    assert changes[1] == 0 < changes[0]
