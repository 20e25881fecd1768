"""scripts/compare_encodings.py: the encodings are exchanged as their papers say, and nothing else differs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from llama.model import Transformer
from llama.study import encodings

from . import compare_encodings, train_tiny

TOKENS = torch.randint(256, (1, 24), generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.usefixtures("one_thread")


def build(name: str) -> Transformer:
    return compare_encodings.build(name, 7).requires_grad_(False)


def test_matrices_that_models_share_have_the_same_values() -> None:
    plain = build("rope").state_dict()
    for name in compare_encodings.ENCODINGS:
        state = {key.replace("embedding.", ""): value for key, value in build(name).state_dict().items()}
        for key, value in plain.items():
            assert torch.equal(state[key], value), (name, key)


def test_without_an_encoding_the_positions_do_not_matter_and_with_rope_they_do() -> None:
    at = 3 * torch.arange(24)
    none, rope = build("none"), build("rope")
    assert torch.equal(none(TOKENS), none(TOKENS, positions=at))
    assert float((rope(TOKENS) - rope(TOKENS, positions=at)).abs().max()) > 1e-4


def test_every_encoding_changes_the_logits() -> None:
    logits = {name: build(name)(TOKENS) for name in compare_encodings.ENCODINGS}
    for one in logits:
        for other in logits:
            assert one == other or float((logits[one] - logits[other]).abs().max()) > 1e-4, (one, other)


@pytest.mark.parametrize("name", ["alibi", "none", "rope"])
def test_scores_of_the_first_layer_are_those_of_the_study(name: str) -> None:
    """The output of each head against llama.study.encodings, in float64, with a causal softmax in numpy."""
    model = build(name)
    block = model.layers[0].attention
    x = model.layers[0].attention_norm(model.tok_embeddings(TOKENS))  # (B, T, C)
    seen = []
    block.attend.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    model(TOKENS)
    for head in range(4):
        rows = slice(32 * head, 32 * head + 32)
        encoding = encodings.Alibi(4.0 ** -(head + 1)) if name == "alibi" else encodings.make(name, 128, 32)
        scores = encodings.scores(
            encoding, x[0], block.wq.weight[rows], block.wk.weight[rows], torch.arange(24)
        ).numpy()
        weights = np.exp(np.where(np.tri(24, dtype=bool), scores, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        values = (x[0] @ block.wv.weight[rows].T).double().numpy()
        np.testing.assert_allclose(seen[0][head].double().numpy(), weights @ values, atol=1e-5)


def test_added_positions_are_those_of_the_papers() -> None:
    tokens = TOKENS[0]
    sinusoidal, learned = build("sinusoidal").tok_embeddings, build("learned").tok_embeddings
    plain = build("rope").tok_embeddings.weight[tokens].double().numpy()
    t, i = np.arange(24)[:, None], np.arange(64)[None, :]
    table = np.stack((np.sin(t / 10000 ** (2 * i / 128)), np.cos(t / 10000 ** (2 * i / 128))), -1).reshape(24, 128)
    np.testing.assert_allclose(sinusoidal(TOKENS)[0].numpy(), np.sqrt(128) * plain + table, atol=1e-5)
    np.testing.assert_allclose(learned(TOKENS)[0].numpy(), plain + learned.table[:24].numpy(), atol=1e-6)


def test_the_loss_by_position_is_the_mean_over_windows() -> None:
    model, text = build("rope"), torch.randint(256, (1100,), generator=torch.Generator().manual_seed(1))
    found = compare_encodings.loss_by_position(model, text.to(torch.uint8))
    expected = torch.zeros(512, dtype=torch.float64)
    for start in (0, 512):  # two windows fit
        logprobs = model(text[None, start : start + 512]).double().log_softmax(-1)[0]
        expected -= logprobs[torch.arange(512), text[start + 1 : start + 513]] / 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # trains
def test_a_finished_run_is_not_repeated_and_a_run_is_deterministic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Genesis 1\n" + "the morning and the evening. " * 60 + "\nRevelation 1\n" + "held out words. " * 40)

    def main(output: str) -> list[dict[str, object]]:
        words = ["compare", "--text", str(text), "--output", str(tmp_path / output), "--steps", "2", "--seeds", "0"]
        monkeypatch.setattr(sys, "argv", [*words, "--encodings", "alibi,rope"])
        try:
            with torch.enable_grad():
                assert compare_encodings.main() == 0
        finally:
            torch.use_deterministic_algorithms(False)
        return [json.loads(line) for line in (tmp_path / output).read_text().splitlines()]

    lines = main("a")
    assert [line["encoding"] for line in lines] == ["alibi", "rope"]
    assert main("a") == lines
    again = main("b")
    assert [{**line, "seconds": 0} for line in again] == [{**line, "seconds": 0} for line in lines]
    assert train_tiny.CONFIG.max_seq_len == 128
