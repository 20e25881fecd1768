"""The compiled step of a CUDA device, with stand-ins for the compiler and the graphs: no GPU is needed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama.engine.compiled import FixedCaches, GraphRunner
from llama.errors import UsageError
from llama.generate import generate
from llama.loader import load, load_model
from llama.model import Transformer
from llama.sampling import SamplingParams

from . import tiny

PROMPT = [3, 1, 4, 1, 5]


class Graphs:
    """In place of torch.compile: runs the function, and keeps what a CUDA graph would be recorded for."""

    def __init__(self) -> None:
        self.recorded: set[tuple[object, ...]] = set()
        self.calls = 0

    def compile(self, function: Callable[..., Tensor], mode: str) -> Callable[..., Tensor]:
        def step(block: Any, h: Tensor, freqs_cis: Any, mask: Tensor, positions: Tensor, layer: Any) -> Tensor:
            self.recorded.add((id(block), *(buffer.data_ptr() for buffer in layer.buffers)))
            self.calls += 1
            return function(block, h, freqs_cis, mask, positions, layer)

        return step


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    made = Graphs()
    monkeypatch.setattr(torch, "compile", made.compile)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    return made


def compiled(net: Transformer) -> Transformer:
    net.runner, net.make_cache = GraphRunner(net), FixedCaches()
    return net


def answer(net: Transformer, count: int, **options: Any) -> list[int]:
    return [token.id for token in generate(net, PROMPT, SamplingParams(max_new_tokens=count), **options)]


@pytest.mark.parametrize("kind", ["model", "int8"])
def test_all_answers_use_the_same_graphs_and_have_the_tokens_of_the_plain_model(graphs: Graphs, kind: str) -> None:
    plain, fast = tiny.model(rope="real"), compiled(tiny.model(rope="real"))
    plain.cache_kind = fast.cache_kind = kind
    for count in (4, 2, 9):
        assert answer(fast, count) == answer(plain, count)
    assert graphs.calls == (3 + 1 + 8) * tiny.CONFIG.n_layers
    for count in range(1, 60, 6):
        answer(fast, count)
    assert len(graphs.recorded) <= 4 * tiny.CONFIG.n_layers  # for 8, 16, 32 and 64 slots, not for each answer


def test_an_answer_that_is_in_use_keeps_its_cache(graphs: Graphs) -> None:
    plain, fast = tiny.model(rope="real"), compiled(tiny.model(rope="real"))
    expected, first = answer(plain, 9), generate(fast, PROMPT, SamplingParams(max_new_tokens=9))
    begun = [next(first).id for _ in range(4)]
    assert answer(fast, 9) == expected
    assert begun + [token.id for token in first] == expected
    del first
    gc.collect()
    count = len(graphs.recorded)
    assert answer(fast, 9) == expected
    assert len(graphs.recorded) == count == 2 * tiny.CONFIG.n_layers


def test_a_cache_that_held_nan_is_empty_for_the_next_answer(graphs: Graphs) -> None:
    fast = compiled(tiny.model(rope="real"))
    expected = answer(fast, 6)
    cache = fast.new_cache(20)
    for layer in cache.layers:
        for buffer in layer.buffers:
            buffer.fill_(torch.nan)
    del cache, layer, buffer
    assert answer(fast, 6) == expected


def test_the_complex_form_and_wrapped_layers_are_rejected() -> None:
    with pytest.raises(UsageError, match="rope='real'"):
        GraphRunner(tiny.model())
    net = tiny.model(rope="real")
    net.set_submodule("layers.0.attention.wo", torch.nn.Sequential(net.layers[0].attention.wo))
    with pytest.raises(UsageError, match=r"attention\.wo is wrapped in a Sequential"):
        GraphRunner(net)


def test_compile_must_be_a_boolean(tiny_gguf: Path) -> None:
    with pytest.raises(UsageError, match="compile must be true or false, got 'no'"):
        load(tiny_gguf, compile="no")


def test_without_cuda_one_line_says_that_nothing_is_compiled(tiny_gguf: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, plain = (load_model(tiny_gguf, device="cpu", compile=on) for on in (True, False))
    [line] = [record.getMessage() for record in caplog.records if "compile" in record.getMessage()]
    assert "only a CUDA device has a step to compile; compile (--compile) changes nothing here" in line
    ids = tiny.random_tokens(5)
    assert torch.equal(model(ids), plain(ids))
