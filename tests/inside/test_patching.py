"""The patching grid equals plain hooks on transformers, and is what the command shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llama import inside
from llama.cli import main
from llama.errors import UsageError
from llama.inside.intervene import other_rope
from llama.inside.patching import ROWS, cell
from llama.text import Llama

from .. import tiny
from .test_hooks import Pair, hooked

pytestmark = pytest.mark.usefixtures("one_thread")


def with_plain_hooks(theirs: Any, source: list[int], target: list[int]) -> torch.Tensor:
    """The grid by one run of transformers for each layer and token: (L, T)."""
    streams: list[torch.Tensor] = []
    answers, logits = [], []
    for ids in (source, target):
        out = theirs(torch.tensor([ids]), output_hidden_states=True)
        streams.append(torch.stack(out.hidden_states[:-1])[:, 0])  # (L, T, C): before each layer
        logits.append(out.logits[0, -1])
        answers.append(int(logits[-1].argmax()))

    def difference(row: torch.Tensor) -> float:
        return float(row[answers[0]] - row[answers[1]])

    high, low = map(difference, logits)
    grid = torch.zeros(len(streams[0]), len(target))
    for layer in range(len(grid)):
        for t in range(len(target)):

            def put(h: torch.Tensor, layer: int = layer, t: int = t) -> torch.Tensor:
                h = h.clone()
                h[0, t] = streams[0][layer, t]
                return h

            with hooked(theirs, "resid_pre", layer, put):
                patched = theirs(torch.tensor([target])).logits[0, -1]
            grid[layer, t] = (difference(patched) - low) / (high - low)
    return grid


@pytest.mark.parametrize(("same", "count"), [(0, 7), (3, ROWS + 4)])
def test_the_grid_equals_plain_hooks_on_transformers(both: Pair, same: int, count: int) -> None:
    ours, theirs = both
    source, target = (tiny.random_tokens(count, seed=seed)[0].tolist() for seed in (1, 2))
    source = [*target[:same], *source[same:]]
    grid = inside.patching_grid(ours, source, target)
    expected = with_plain_hooks(theirs, source, target)
    torch.testing.assert_close(grid.restored.float(), expected, rtol=0, atol=1e-4)
    assert bool((grid.restored[:, :same] == 0).all())
    assert float(grid.restored[:, same:].std()) > 0.05
    assert grid.differences[0] > 0 > grid.differences[1]
    assert grid.layers == [0, 1]


def test_texts_that_can_not_be_compared_are_refused() -> None:
    model = tiny.model()
    with pytest.raises(UsageError, match="equally many tokens, got 3 and 2"):
        inside.patching_grid(model, [1, 2, 3], [1, 2])
    with pytest.raises(UsageError, match="equally many tokens"):
        inside.patching_grid(model, [], [])
    with pytest.raises(UsageError, match="the same most probable next token"):
        inside.patching_grid(model, [1, 2, 3], [1, 2, 3])


def test_the_model_is_as_before_and_a_cell_is_one_character() -> None:
    model = tiny.model()
    source, target = (tiny.random_tokens(5, seed=seed)[0].tolist() for seed in (1, 2))
    before = model(torch.tensor([target]))
    inside.patching_grid(model, source, target)
    assert torch.equal(model(torch.tensor([target])), before)
    assert [cell(value) for value in (-0.06, 0.04, 0.051, 0.16, 0.94, 0.95)] == ["-", ".", "1", "2", "9", "#"]


def test_the_command_shows_and_writes_the_grid(
    tiny_gguf: Path, tiny_llm: Llama, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(text: str) -> int:
        return int(tiny_llm.model(torch.tensor([tiny_llm.tokenizer.encode_prompt(text)]))[0, -1].argmax())

    other = next(f"ab{c}d" for c in "xyzuvw" if answer(f"ab{c}d") != answer("abcd"))
    args = ["trace", "abcd", "--patch-from", other, "-m", str(tiny_gguf), "--device", "cpu", "-q"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert main([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["patching"]
    source, target = (tiny_llm.tokenizer.encode_prompt(text) for text in (other, "abcd"))
    grid = inside.patching_grid(tiny_llm, source, target)
    assert found["source"][-2:] == [other[2], "d"]
    assert found["restored"] == [pytest.approx(row, abs=1e-5) for row in grid.restored.tolist()]
    assert found["differences"] == pytest.approx(grid.differences, rel=1e-5)
    for t, text in enumerate(found["target"]):
        row = "".join(cell(float(value)) for value in grid.restored[:, t])
        line = f'{t:>5}  {row}  "{text}"' + (f' from "{other[2]}"' if text == "c" else "")
        assert line in out.splitlines()
    assert main([*args, "--rope-theta", "9000", "--json"]) == 0
    with other_rope(tiny_llm.model, theta=9000.0):  # the grid of the changed model
        changed = inside.patching_grid(tiny_llm, source, target)
    differences = json.loads(capsys.readouterr().out)["patching"]["differences"]
    assert differences == pytest.approx(changed.differences, abs=1e-5) != pytest.approx(grid.differences, abs=1e-5)
