"""Interventions equal models that are built with the change, and restore the model afterwards."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from llama.errors import UsageError
from llama.inside import intervene
from llama.inside.intervene import Intervention
from llama.model import Transformer

from .. import tiny
from .test_trace import fingerprint

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = tiny.random_tokens(13)
DEEP = dataclasses.replace(tiny.CONFIG, n_layers=5)


@pytest.fixture
def model() -> Transformer:
    return tiny.model(DEEP, attention="reference")


def changed(model: Transformer, intervention: Intervention) -> Tensor:
    with intervention.on(model):
        return model(TOKENS)


@pytest.mark.parametrize("heads", [((0, 0),), ((4, 3),), ((1, 2), (1, 0), (3, 1))])
def test_ablating_heads_equals_zero_columns_of_wo(model: Transformer, heads: tuple[tuple[int, int], ...]) -> None:
    copy = tiny.model(DEEP, attention="reference")
    for layer, head in heads:
        copy.layers[layer].attention.wo.weight[:, 16 * head : 16 * (head + 1)] = 0
    found = changed(model, Intervention(heads=heads))
    torch.testing.assert_close(found, copy(TOKENS), rtol=0, atol=1e-6)
    assert float((found - model(TOKENS)).abs().max()) > 1e-3


def test_ablating_works_with_a_cache_and_does_not_change_the_bias_of_wo() -> None:
    config = dataclasses.replace(tiny.CONFIG, attention_bias=True)
    model, copy = tiny.model(config), tiny.model(config)
    copy.layers[1].attention.wo.weight[:, 16:32] = 0
    cache = model.new_cache(20)
    with intervene.ablated(model, [(1, 1)]):
        model(TOKENS[:, :8], cache=cache)
        found = model(TOKENS[:, 8:], cache=cache)
    torch.testing.assert_close(found, copy(TOKENS)[:, 8:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("layers", [range(0, 3), range(2, 5), range(4, 5)])
def test_only_some_layers_equal_a_model_of_these_layers(model: Transformer, layers: range) -> None:
    config = dataclasses.replace(DEEP, n_layers=len(layers))
    short = Transformer(config, attention="reference").eval()
    state = tiny.weights(DEEP)
    selected = {name: tensor for name, tensor in state.items() if not name.startswith("layers.")}
    for new, old in enumerate(layers):
        selected |= {
            name.replace(f"layers.{old}.", f"layers.{new}."): t
            for name, t in state.items()
            if name.startswith(f"layers.{old}.")
        }
    short.load_state_dict(selected)
    assert torch.equal(changed(model, Intervention(layers=layers)), short(TOKENS))


@pytest.mark.parametrize("rope", ["complex", "real", "half"])
def test_without_rope_scores_are_those_of_unrotated_vectors_in_every_form(rope: str) -> None:
    model = tiny.model(rope=rope, attention="reference")
    copy = tiny.model(rope=rope, attention="reference")

    for block in copy.layers:
        block.attention.apply_rotary_emb.rotate = lambda q, k, *freqs_cis: (q, k)
    torch.testing.assert_close(changed(model, Intervention(no_rope=True)), copy(TOKENS), rtol=0, atol=1e-5)


def test_without_rope_keeps_the_factor_of_a_scaling() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = dataclasses.replace(tiny.CONFIG, rope_scaling=scaling)
    model, copy = tiny.model(config), tiny.model(config)
    copy.rope.table = (copy.rope.table[0].abs() + 0j,)
    torch.testing.assert_close(changed(model, Intervention(no_rope=True)), copy(TOKENS), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (777.0, None),
        (None, {"rope_type": "linear", "factor": 4.0}),
        (5e5, {"rope_type": "yarn", "factor": 2.0}),
        (None, {"rope_type": "dynamic", "factor": 2.0}),
    ],
)
def test_another_rotation_equals_a_model_built_with_it(theta: float | None, scaling: dict[str, Any] | None) -> None:
    model = tiny.model(attention="reference")
    config = dataclasses.replace(tiny.CONFIG, rope_theta=theta or tiny.CONFIG.rope_theta, rope_scaling=scaling)
    other = tiny.model(config, attention="reference")
    assert torch.equal(changed(model, Intervention(theta=theta, scaling=scaling)), other(TOKENS))
    assert float((other(TOKENS) - model(TOKENS)).abs().max()) > 1e-3 or (scaling or {}).get("rope_type") == "dynamic"


EVERYTHING = Intervention(
    heads=((1, 1), (2, 3)), layers=range(1, 4), theta=500.0, scaling={"rope_type": "linear", "factor": 2}
)


@pytest.mark.parametrize("intervention", [EVERYTHING, Intervention(no_rope=True, layers=range(2))])
def test_the_model_is_restored_also_after_an_exception(model: Transformer, intervention: Intervention) -> None:
    before, expected = fingerprint(model), model(TOKENS)
    changed(model, intervention)
    assert fingerprint(model) == before
    during = []

    def fail() -> None:
        with intervention.on(model):
            during.append(fingerprint(model))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert during != [before]
    assert fingerprint(model) == before
    assert torch.equal(model(TOKENS), expected)


def test_an_empty_intervention_has_no_descriptions() -> None:
    assert Intervention().descriptions() == []
    assert Intervention(layers=range(2)).descriptions() == ["only layers 0 to 1 run"]
    with pytest.raises(UsageError, match="no-rope"):
        Intervention(no_rope=True, theta=1e4)


def test_heads_and_layers_are_parsed() -> None:
    assert intervene.parse_head("3.2", DEEP) == (3, 2)
    spans = {"1:3": (1, 3), ":3": (0, 3), "2:": (2, 5), ":": (0, 5)}
    assert {text: intervene.parse_layers(text, DEEP) for text in spans} == {t: range(*s) for t, s in spans.items()}
    for text in ("3", "3.x", "-1.0", "3.2.1", "١.٢", "5.0", "0.4"):
        with pytest.raises(UsageError, match="layers are 0 to 4 and heads 0 to 3"):
            intervene.parse_head(text, DEEP)
    for text in ("", "3", "0-2", "0:6", "2:2", "5:"):
        with pytest.raises(UsageError, match="END at most 5"):
            intervene.parse_layers(text, DEEP)


def test_a_head_of_a_layer_that_does_not_run_is_refused(model: Transformer) -> None:
    before = fingerprint(model)
    intervention = Intervention(heads=((0, 1),), layers=range(1, 5))
    with pytest.raises(UsageError, match="layer 0 does not run"), intervention.on(model):
        raise AssertionError("must not be entered")
    assert fingerprint(model) == before
