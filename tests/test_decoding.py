"""Decoding yields the tokens of full passes over the text, ends where it must, and its choices never wait for a device."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from contextlib import closing
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from llama import sampling
from llama.generate import generate, prefill
from llama.model import Transformer
from llama.sampling import History, SamplingParams, Token, choose, probs, random_generator, sample

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = tiny.random_tokens(7)[0].tolist()
N_VOCAB = 300
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.3, "top_p": 0.7, "top_k": 20, "min_p": 0.02, "seed": 1},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.3, "temperature": 0.7, "seed": 9},
]


def decoded(model: Transformer, prompt: list[int], params: SamplingParams, **options: Any) -> list[Token]:
    return list(generate(model, prompt, params, **options))


def by_full_passes(model: Transformer, params: SamplingParams, count: int) -> list[tuple[int, float]]:
    """The ids and log-probabilities of an answer to PROMPT, each from a pass over the whole text without a cache."""
    generator, answer = random_generator(params, torch.device("cpu")), []
    for _ in range(count):
        ids = [*PROMPT, *(id for id, _ in answer)]
        text = History(torch.tensor(ids), len(ids)) if params.repetition_penalty != 1 else None
        logits = model(torch.tensor([ids]))[0, -1, :N_VOCAB]
        id = int(choose(logits, params, [generator], text)[0])
        answer.append((id, float(logits.log_softmax(-1)[id])))
    return answer


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("fixed", [False, True])
def test_tokens_are_those_of_full_passes(options: dict[str, Any], fixed: bool) -> None:
    model, params = tiny.model(), SamplingParams(max_new_tokens=23, logprobs=True, **options)
    model.make_cache = tiny.cache_maker(fixed)
    found = decoded(model, PROMPT, params, n_vocab=N_VOCAB)
    expected = by_full_passes(model, params, 23)
    assert [token.id for token in found] == [id for id, _ in expected]
    assert [token.logprob for token in found] == pytest.approx([logprob for _, logprob in expected], abs=1e-4)
    unscored = dataclasses.replace(params, logprobs=False)
    assert all(token.logprob is None for token in decoded(model, PROMPT, unscored, n_vocab=N_VOCAB))


@pytest.mark.parametrize("count", [1, 2, 6])
def test_a_cache_can_be_continued_after_a_stop(count: int) -> None:
    model, params = tiny.model(), SamplingParams(max_new_tokens=40, temperature=1.0, seed=5)
    answer, cache = [token.id for token in decoded(model, PROMPT, params)], model.new_cache(120)
    first = decoded(model, PROMPT, params, stop_ids=[answer[count - 1]], cache=cache)
    assert [token.id for token in first] == answer[: answer.index(answer[count - 1]) + 1]
    assert [token.stop for token in first] == [False] * (len(first) - 1) + [True]
    assert cache.length == len(PROMPT) + len(first) - 1
    longer = [*PROMPT, *(token.id for token in first), 5, 6, 7]
    again, new = decoded(model, longer, params, cache=cache), decoded(model, longer, params)
    assert [token.id for token in again] == [token.id for token in new]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_closed_generator_leaves_the_tokens_that_it_has_fed(count: int) -> None:
    model, params = tiny.model(), SamplingParams()
    cache = model.new_cache(60)
    with closing(generate(model, PROMPT, params, cache=cache)) as tokens:  # type: ignore[type-var]
        answer = [next(tokens).id for _ in range(count)]
    assert cache.length == len(PROMPT) + count - 1
    expected = model.new_cache(60)
    model(torch.tensor([[*PROMPT, *answer][: cache.length]]), cache=expected)
    torch.testing.assert_close(*(tiny.contents(one, cache.length) for one in (cache, expected)))


class NoSynchronization(TorchDispatchMode):
    """Rejects the operators that wait for the device: those that read a value, or have a size that depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_no_choice_waits_for_a_gpu(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "reads_are_free", lambda tensor: False)
    model, params = tiny.model(), SamplingParams(logprobs=True, **options)
    logits = prefill(model, PROMPT, model.new_cache(60))[:N_VOCAB]
    generator = random_generator(params, torch.device("cpu"))
    text = History(torch.tensor(PROMPT), len(PROMPT)) if "repetition_penalty" in options else None
    with NoSynchronization():
        with pytest.raises(AssertionError, match="waits"):
            int(logits.argmax())
        choose(logits, params, [generator], text)


DRAWS = [
    {"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 2.0, "top_p": 0.3},
    {"temperature": 1.0, "top_p": 0.01}, {"temperature": 0.8, "top_k": 5}, {"temperature": 0.8, "top_k": 7, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2}, {"temperature": 1.3, "min_p": 0.9}, {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.7, "min_p": 0.05}, {"temperature": 3.0, "top_p": 0.0},
    {"temperature": 1.0, "top_p": 0.6, "top_k": 30, "min_p": 0.02},
]  # fmt: skip


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("options", DRAWS, ids=str)
def test_draws_follow_the_distribution(options: dict[str, Any], on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU no filter but top_k is applied before a draw; `probs` applies all of them."""
    monkeypatch.setattr(sampling, "reads_are_free", lambda tensor: not on_gpu)
    logits = torch.randn(200, generator=torch.Generator().manual_seed(0)).clamp(max=1) - 9  # (V,)
    logits[50:74] += 9 + torch.linspace(0, 1, 24)  # two blocks
    logits[[54, 59, 61]] = float(logits[70])  # equal logits, some of them inside and some outside of a set
    params = SamplingParams(**options)
    generator = torch.Generator().manual_seed(2)
    ids, _ = choose(logits.expand(1000, -1), params, [generator] * 1000)  # (1000,)
    expected, counts = 1000 * probs(logits, params).double(), torch.bincount(ids, minlength=200).double()
    assert counts[expected == 0].sum() == 0
    rare = expected < 5  # together they form one cell
    cells = [torch.cat((values[~rare], values[rare].sum()[None])) for values in (counts, expected)]
    chi_square = float(((cells[0] - cells[1]).square() / cells[1].clamp(min=5)).sum())
    freedom = len(cells[0])
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5 + 6  # less likely than 1 in 1,000 for any of them


def test_a_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    weights = torch.rand(500, 40, generator=torch.Generator().manual_seed(0)).where(torch.arange(40) % 3 > 0, 0)
    uniform = 1 - torch.rand(500, 1, generator=torch.Generator().manual_seed(7), dtype=torch.float64).numpy()
    sums = weights.double().numpy().cumsum(-1)
    expected = [int(numpy.searchsorted(row, u[0] * row[-1])) for row, u in zip(sums, uniform, strict=True)]
    assert sample(weights, torch.Generator().manual_seed(7)).tolist() == expected


@given(st.integers(0, 10**6), st.floats(0.0, 0.999), st.floats(0.1, 6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_top_p_from_a_few_candidates_keeps_what_sorting_all_keeps(
    seed: int, p: float, scale: float, equal: bool
) -> None:
    logits = scale * torch.randn(2, 5000, generator=torch.Generator().manual_seed(seed))  # (B, V)
    logits = logits.round() if equal else logits  # many equal logits
    order = logits.double().softmax(-1).sort(descending=True, stable=True)  # (B, V)
    outside = order.values.cumsum(-1) - order.values >= p
    outside[..., 0] = False
    expected = outside.scatter(-1, order.indices, outside)
    near = (order.values.cumsum(-1) - order.values - p).abs().amin() < 1e-6  # rounding decides
    assert near or torch.equal(sampling.top_p(logits, p).isneginf(), expected)


def test_a_cache_is_freed_with_its_last_reference() -> None:
    model = tiny.model()
    cache = model.new_cache(60)
    tokens: Any = generate(model, PROMPT, SamplingParams(max_new_tokens=20), cache=cache)
    next(tokens)
    gone = weakref.ref(cache)
    gc.disable()
    try:
        tokens.close()
        del tokens, cache
        assert gone() is None  # a reference cycle would keep gigabytes until a garbage collection
    finally:
        gc.enable()
