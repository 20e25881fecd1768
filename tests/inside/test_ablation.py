"""The grid of ablations: each number equals that of one ablation, computed alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from llama import inside
from llama.errors import UsageError
from llama.inside import trace
from llama.inside.ablation import AblationGrid, ablation_steps
from llama.inside.hooks import activations, patch
from llama.inside.intervene import ablated
from llama.model import Transformer

from .. import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = [5, 9, 250, 3, 9, 250, 17, 5]
TOKEN, AGAINST = 40, 41


def grid(model: Transformer, **options: Any) -> tuple[AblationGrid, list[tuple[int, int]]]:
    steps, progress = ablation_steps(model, IDS, TOKEN, AGAINST, **options), []
    while True:
        try:
            progress.append(next(steps))
        except StopIteration as end:
            return end.value, progress


def test_the_grid_of_a_tensor_is_that_of_its_ids() -> None:
    model = tiny.model()
    one = inside.ablation_grid(model, torch.tensor([IDS]), TOKEN, AGAINST)
    assert torch.equal(one.total, grid(model)[0].total)
    with pytest.raises(UsageError, match="ids of one text"):
        inside.ablation_grid(model, torch.tensor([IDS, IDS]), TOKEN, AGAINST)


def difference(model: Transformer) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([IDS]))[0, -1]
    return float(logits[TOKEN] - logits[AGAINST])


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"qk_norm": True}])
def test_the_grid_is_ablation_one_by_one(
    changes: dict[str, bool], most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model(dataclasses.replace(tiny.CONFIG, **changes))
    if most is not None:  # rows of a step
        monkeypatch.setattr("llama.inside.ablation.STEP", most * len(IDS) // model.config.n_layers)
    found, progress = grid(model)
    assert found.difference == pytest.approx(difference(model), abs=1e-4)
    assert progress == [(i + 1, len(progress)) for i in range(len(progress))]
    for layer in range(2):
        for head in range(4):
            with ablated(model, [(layer, head)]):
                assert float(found.total[layer, head]) == pytest.approx(found.difference - difference(model), abs=1e-4)
        with patch(model, {f"mlp_out.{layer}": lambda x, at: x * 0}):
            assert float(found.total[layer, 4]) == pytest.approx(found.difference - difference(model), abs=1e-4)


def test_a_part_may_be_replaced_by_its_mean_or_at_one_token() -> None:
    model = tiny.model()
    for mean, position in ((True, None), (False, 3), (True, 3)):

        def changed(x: Tensor, mean: bool = mean, position: int | None = position) -> Tensor:  # (T, ..)
            new = x.mean(0).expand(x.shape) if mean else torch.zeros_like(x)
            kept = torch.arange(len(x)) != position if position is not None else torch.zeros(len(x), dtype=torch.bool)
            return torch.where(kept.view(-1, *[1] * (x.dim() - 1)), x, new)

        def one_head(z: Tensor, at: Any, changed: Any = changed) -> Tensor:  # (1, T, H, D)
            return torch.stack([changed(z[0, :, i]) if i == 2 else z[0, :, i] for i in range(4)], 1)[None]

        found, _ = grid(model, mean=mean, position=position)
        for name, change, part in (
            ("z.0", one_head, 2),
            ("mlp_out.0", lambda x, at, changed=changed: changed(x[0])[None], 4),
        ):
            with patch(model, {name: change}):
                assert float(found.total[0, part]) == pytest.approx(found.difference - difference(model), abs=1e-4)


def test_direct_effects_and_scores_are_those_of_a_trace() -> None:
    model = tiny.model()
    found, _ = grid(model)
    with torch.no_grad(), trace.recording(model) as seen, activations(model, "mlp_out.*") as mlps:
        model(torch.tensor([IDS]))
    direction = trace.readout(model, seen, TOKEN, AGAINST)
    assert torch.allclose(found.direct[:, :4], trace.direct_effects(model, seen, direction), atol=1e-5)
    for layer in range(2):
        weights = seen.weights[layer]  # (H, T, T)
        assert float(found.direct[layer, 4]) == pytest.approx(
            float(mlps[f"mlp_out.{layer}"][0, -1] @ direction), abs=1e-5
        )
        for head in range(4):
            rows = weights[head].tolist()
            previous = sum(rows[t][t - 1] for t in range(1, 8)) / 7
            first = sum(rows[t][0] for t in range(1, 8)) / 7
            followers = {4: [2], 5: [3], 7: [1]}  # token t occurred before; these tokens followed it
            induction = sum(rows[t][s] for t, after in followers.items() for s in after) / 3
            expected = torch.tensor([previous, first, induction])
            assert found.induction is not None
            scores = torch.stack((found.previous, found.first, found.induction))[:, layer, head]
            assert torch.allclose(scores, expected, atol=1e-5)
