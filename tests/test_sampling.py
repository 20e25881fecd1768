"""Sampling: each filter equals its definition, values out of range are errors, and a seed determines the answer."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llama import sampling
from llama.errors import LlamaError, UsageError
from llama.generate import generate
from llama.generation.batch import Batch, Request, TokenEvent
from llama.generation.speculative import NGramDraft, speculate
from llama.sampling import History, SamplingParams, logprob_of, option, probs

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

logits_lists = st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=30)


def kept(logits: torch.Tensor) -> list[int]:
    return torch.isfinite(logits).nonzero().flatten().tolist()


@given(logits_lists, st.integers(1, 40))
def test_top_k_keeps_the_k_largest_and_those_equal_to_them(values: list[float], k: int) -> None:
    smallest = sorted(values, reverse=True)[min(k, len(values)) - 1]
    expected = [i for i, value in enumerate(values) if value >= smallest]
    assert kept(sampling.top_k(torch.tensor(values), k)) == expected


@given(
    temperature=st.floats(0.1, 3), k=st.integers(0, 20), p=st.floats(0.05, 1), m=st.floats(0, 0.9),
    penalty=st.floats(0.5, 2), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60)
def test_the_filters_in_order_equal_those_of_transformers(
    temperature: float, k: int, p: float, m: float, penalty: float, seed: int
) -> None:
    torch.manual_seed(seed)
    logits, seen = torch.randn(1, 50) * 3, torch.randint(50, (1, 12))
    params = SamplingParams(temperature=temperature, top_k=k, top_p=p, min_p=m, repetition_penalty=penalty)
    if params.greedy:
        return
    expected = RepetitionPenaltyLogitsProcessor(penalty)(seen, logits.clone())
    expected = TemperatureLogitsWarper(temperature)(seen, expected)
    if k:
        expected = TopKLogitsWarper(k)(seen, expected)
    if p < 1:
        expected = TopPLogitsWarper(p)(seen, expected)
    if m:
        expected = MinPLogitsWarper(m)(seen, expected)
    torch.testing.assert_close(probs(logits, params, History(seen, 0)), expected.softmax(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"temperature": 1e-30}, {"temperature": 1.0, "top_k": 1}])
def test_greedy_is_one_hot_at_the_first_maximum(options: dict[str, Any]) -> None:
    assert probs(torch.tensor([1.0, 3.0, 3.0]), SamplingParams(**options)).tolist() == [0, 1, 0]


@dataclass(frozen=True)
class WithoutEven(SamplingParams):
    no_even: int = option(0, "exclude even ids", (0, 1), lambda logits, _: logits.index_fill(-1, EVEN, -math.inf))


EVEN = torch.arange(0, 320, 2)


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}, {"temperature": 2.0, "top_k": 1}])
def test_a_new_filter_holds_for_every_choice(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    field = next(field for field in dataclasses.fields(WithoutEven) if field.name == "no_even")
    monkeypatch.setattr(sampling, "OPTIONS", {**sampling.OPTIONS, "no_even": field})
    params = WithoutEven(**options, seed=1, max_new_tokens=40, no_even=1)
    alone = [token.id for token in generate(tiny.model(), [5], params)]
    events = Batch(tiny.model(), [Request([5], params), Request([7], params)], slots=2)
    batch = [event.token.id for event in events if isinstance(event, TokenEvent)]
    assert len(alone) == 40
    assert len(batch) == 80
    assert all(id % 2 for id in alone + batch)
    first_two_even = torch.zeros(320).index_fill(0, torch.tensor([0, 2]), 9.0)
    with pytest.raises(UsageError, match=r"no_even \(1\) excludes every token"):
        probs(first_two_even, WithoutEven(temperature=1.0, top_k=2, no_even=1))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": "hot"},
        {"top_p": 1.5}, {"top_p": -0.1}, {"top_p": math.nan}, {"min_p": -0.1}, {"min_p": 1.1},
        {"top_k": -1}, {"top_k": 1.5}, {"top_k": True}, {"repetition_penalty": 0.0}, {"repetition_penalty": 1e-300},
        {"max_new_tokens": -1}, {"max_new_tokens": 2**63}, {"seed": -1}, {"seed": 2**63}, {"seed": 1.5},
        {"presence_penalty": math.nan}, {"frequency_penalty": 1e9}, {"logit_bias": [1]}, {"logit_bias": {"a": 1}},
        {"logit_bias": {-1: 1}}, {"logit_bias": {1: math.inf}}, {"processors": "f"},
    ],
)  # fmt: skip
def test_values_out_of_range_are_usage_errors(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))) as error:
        SamplingParams(**options)  # type: ignore[arg-type]
    assert error.value.exit_code == 2


# ------------------------------------------------------------------------------------------------------ generation
def test_a_seed_decides_the_tokens_and_the_global_generator_is_not_used() -> None:
    model, before = tiny.model(), torch.random.get_rng_state()
    params = [SamplingParams(temperature=2.0, seed=seed, max_new_tokens=12) for seed in (1, 1, 2)]
    one, again, two = (list(generate(model, [5], each)) for each in params)
    assert one == again != two
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("prompt", [[], [320], [-1], [5] * 256, [5] * 1000])
def test_prompts_that_leave_no_room_or_have_invalid_ids_are_errors(prompt: list[int]) -> None:
    with pytest.raises(LlamaError, match=f"{len(prompt)} tokens, but the context of 256" if len(prompt) > 1 else None):
        list(generate(tiny.model(), prompt, SamplingParams(max_new_tokens=12)))


def test_ids_without_a_token_are_never_chosen() -> None:
    for seed in range(20):
        params = SamplingParams(max_new_tokens=5, temperature=50.0, seed=seed)
        assert all(t.id < 3 for t in generate(tiny.model(), [1], params, n_vocab=3))


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4)])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2}],
    ids=str,
)
def test_the_filters_treat_each_row_as_if_it_were_alone(shape: tuple[int, ...], options: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator) * torch.arange(1, shape[0] + 1).view(-1, *[1] * (len(shape) - 1))
    seen = torch.randint(shape[-1], (*shape[:-1], 2), generator=generator)
    params = SamplingParams(**options)
    together = probs(logits, params, History(seen, 1)).flatten(0, -2)
    for row, alone, ids in zip(together, logits.flatten(0, -2), seen.flatten(0, -2), strict=True):
        torch.testing.assert_close(row, probs(alone, params, History(ids, 1)), rtol=0, atol=1e-7)
    assert len(torch.unique(together, dim=0)) > 1


# ------------------------------------------------------------------------------------- what clients of the API send
def test_count_penalties_are_the_formula_of_openais_api() -> None:
    """logit[j] - count[j] * frequency - (count[j] > 0) * presence, over the answer and not the prompt."""
    logits, answer = torch.randn(9), [3, 3, 3, 0, 8]
    params = SamplingParams(temperature=0.7, presence_penalty=0.3, frequency_penalty=-1.2)
    got = probs(logits, params, History(torch.tensor([1, 2, *answer]), 2))
    expected = [float(logits[j]) - answer.count(j) * -1.2 - (j in answer) * 0.3 for j in range(9)]
    torch.testing.assert_close(got, (torch.tensor(expected) / 0.7).softmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_bias_is_added_as_transformers_adds_it(temperature: float) -> None:
    logits, bias = torch.randn(1, 20), {4: 2.5, 7: -100.0, 19: 100.0, 21: 5.0}
    expected = SequenceBiasLogitsProcessor([[[id], value] for id, value in bias.items() if id < 20])(
        torch.zeros(1, 1, dtype=torch.long), logits
    )
    params = SamplingParams(temperature=temperature, logit_bias=bias)
    got = dict(sampling.stages(logits[0], params, History(torch.tensor([1]), 1)))["logit_bias"]
    torch.testing.assert_close(got, expected[0])
    assert int(sampling.choose(logits[0], params, [None], History(torch.tensor([1]), 1))[0]) == 19


def test_a_mask_leaves_the_renormalized_distribution() -> None:
    logits, allowed = torch.randn(30), torch.rand(30) < 0.3
    params = SamplingParams(temperature=1.0)
    free = probs(logits, params)
    masked = probs(logits, params, allowed=allowed)
    torch.testing.assert_close(masked, torch.where(allowed, free, 0) / free[allowed].sum())
    everything = torch.ones(30, dtype=torch.bool)
    for options in ({}, {"temperature": 0.8, "top_p": 0.5}):
        params = SamplingParams(**options)
        assert torch.equal(probs(logits, params, allowed=everything), probs(logits, params))
    # The mask comes before top-k: the k most probable of the allowed tokens.
    assert int((probs(logits, SamplingParams(temperature=1.0, top_k=3), allowed=allowed) > 0).sum()) == 3


@pytest.mark.parametrize("number", [0.0, 2**-53, 0.5, 1 - 2**-53])
def test_no_number_draws_an_excluded_token(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real, excluded = torch.rand, torch.tensor([*range(0, 20, 2), 19])
    rows = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).index_fill(-1, excluded, -math.inf)
    rows[1, 3], rows[2, 5] = 80.0, -100.0  # one certain token, and one with a probability below float32's smallest
    grammar = torch.isfinite(rows[0])

    monkeypatch.setattr(torch, "rand", lambda *shape, **options: real(*shape, **options).fill_(number))
    p = rows.softmax(-1)
    assert bool((p.gather(-1, sampling.sample(p)[:, None]) > 0).all())
    for row in rows:
        for options in ({}, {"top_p": 0.9}, {"min_p": 0.1, "top_p": 0.5}):
            params = SamplingParams(temperature=1.0, **options)
            (id, _) = sampling.choose(row.nan_to_num(neginf=3.0), params, [None], allowed=grammar)
            assert bool(grammar[id])
    net, params = tiny.model(), SamplingParams(temperature=1.0, top_k=2, seed=1, max_new_tokens=4)
    answers = [[token.id for token in generate(net, [5, 6, 5, 6], params)]]
    answers.append([token.id for token in speculate(net, [5, 6, 5, 6], params, NGramDraft())])
    events = Batch(net, [Request([5, 6, 5, 6], params)], slots=1)
    answers.append([event.token.id for event in events if isinstance(event, TokenEvent)])
    for answer in answers:
        logits = net(torch.tensor([[5, 6, 5, 6, *answer]]))[0, 3:-1]  # (N, V)
        best = logits.topk(2).indices.tolist()
        assert all(id in two for id, two in zip(answer, best, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_draws_do_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    p = torch.tensor([0.25, 0.0, 0.75]).expand(50, 3)  # (B, V)
    drawn = [sampling.sample(p.to(kind), torch.Generator().manual_seed(1)) for kind in (torch.float32, dtype)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 0.7, 1.0, 1e6])
def test_a_processor_may_force_a_token_with_the_largest_float(temperature: float) -> None:
    def force(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([7]), torch.finfo(logits.dtype).max)

    params = SamplingParams(max_new_tokens=3, temperature=temperature, seed=1, processors=[force])
    assert [token.id for token in generate(tiny.model(), [1, 2], params)] == [7, 7, 7]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.2}], ids=str)
def test_a_processor_may_change_its_arguments_in_place(options: dict[str, Any]) -> None:
    def in_place(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits[:100] += 5
        logits[5] = -torch.inf
        ids.zero_()
        return logits

    def copied(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return in_place(ids.clone(), logits.clone())

    model, found = tiny.model(), []
    for processor in (in_place, copied):
        params = SamplingParams(max_new_tokens=6, processors=[processor], logprobs=True, **options)
        found.append([(token.id, token.logprob) for token in generate(model, [1, 2], params)])
        drafted = speculate(model, [1, 2], params, NGramDraft(4))
        assert len(list(drafted)) == 6
    assert found[0] == found[1]


@pytest.mark.parametrize("bad", [lambda x: x.int(), lambda x: x > 0, lambda x: x.to("meta"), lambda x: x[:3], list])
def test_what_a_processor_must_return(bad: Any) -> None:
    params = SamplingParams(processors=[lambda ids, logits: bad(logits)])
    with pytest.raises(UsageError, match="a processor must return"):
        probs(torch.zeros(9), params, History(torch.tensor([1]), 1))
    half = SamplingParams(processors=[lambda ids, logits: logits.half()])
    assert float(probs(torch.zeros(9), half, History(torch.tensor([1]), 1)).sum()) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_processors_that_exclude_what_a_grammar_allows_are_an_error(temperature: float) -> None:
    def only_7(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf).index_copy(-1, torch.tensor([7]), logits[7:8])

    params = SamplingParams(temperature=temperature, processors=[only_7])
    logits, text = torch.randn(20), History(torch.tensor([1]), 1)
    with pytest.raises(UsageError, match="exclude every token that the grammar allows"):
        sampling.choose(logits, params, [None], text, allowed=torch.arange(20) == 9)
    assert int(sampling.choose(logits, params, [None], text, allowed=torch.arange(20) < 9)[0]) == 7


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.1}, {"presence_penalty": 1.0}, {"logit_bias": {3: 100.0}}], ids=str
)
def test_parameters_that_depend_on_the_text_need_it(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="need the text so far"):
        probs(torch.zeros(4), SamplingParams(temperature=1.0, **options))


def test_log_probabilities_of_ids_have_no_bias_in_a_large_vocabulary() -> None:
    logits = 3 * torch.randn(4, 50, 49152, generator=torch.Generator().manual_seed(0))
    ids = logits.topk(3).indices[..., 2]  # (4, 50)
    exact = logits.double().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(logprob_of(logits.double(), ids), exact, rtol=0, atol=1e-13)
    error = logprob_of(logits, ids) - exact
    assert error.abs().max() < 2e-6
    assert error.mean().abs() < 5e-7
