"""scripts/compare_encodings.py: the encodings are exchanged as their papers say, and nothing else differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llama.model import Transformer
from llama.study import encodings

from . import compare_encodings

TOKENS = torch.randint(256, (1, 24), generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.usefixtures("one_thread")


def build(name: str) -> Transformer:
    return compare_encodings.build(name, 7).requires_grad_(False)


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
        encoding = encodings.Alibi(4.0 ** -(head + 1)) if name == "alibi" else encodings.ENCODINGS[name](128)
        wq, wk = block.wq.weight[rows], block.wk.weight[rows]
        scores = encodings.scores(encoding, x[0], wq, wk, torch.arange(24)).numpy()
        weights = np.exp(np.where(np.tri(24, dtype=bool), scores, -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        values = (x[0] @ block.wv.weight[rows].T).double().numpy()
        np.testing.assert_allclose(seen[0][head].double().numpy(), weights @ values, atol=1e-5)


def test_added_positions_are_those_of_the_papers() -> None:
    sinusoidal, learned = build("sinusoidal").tok_embeddings, build("learned").tok_embeddings
    plain = build("rope").tok_embeddings.weight[TOKENS[0]].double().numpy()  # the same random matrix
    angles = np.arange(24)[:, None] / 10000 ** (np.arange(64) / 64)
    table = np.stack((np.sin(angles), np.cos(angles)), -1).reshape(24, 128)
    np.testing.assert_allclose(sinusoidal(TOKENS)[0].numpy(), np.sqrt(128) * plain + table, atol=1e-5)
    np.testing.assert_allclose(learned(TOKENS)[0].numpy(), plain + learned.table[:24].numpy(), atol=1e-6)
