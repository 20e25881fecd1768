"""Log-likelihoods in batches with shared prefixes, against one pass for each pair."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from llama import loader
from llama.errors import ContextLengthError, NumericalError
from llama.generate import generate
from llama.model import Transformer
from llama.sampling import SamplingParams
from llama.tools import likelihood
from llama.tools.likelihood import Likelihood, log_likelihoods

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

V = tiny.CONFIG.vocab_size
Pair = tuple[list[int], list[int]]


def one_by_one(model: Transformer, pairs: Sequence[Pair]) -> list[Likelihood]:
    """Feed each pair in one pass, without a cache."""
    found = []
    for context, continuation in pairs:
        ids = [*context, *continuation][-model.max_seq_len - 1 :]
        logprobs = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)[-len(continuation) :]
        targets = torch.tensor(continuation)
        total = float(logprobs.gather(1, targets[:, None]).sum())
        found.append(Likelihood(total, bool((logprobs.argmax(-1) == targets).all())))
    return found


def assert_equal(found: Sequence[Likelihood], expected: Sequence[Likelihood], tolerance: float = 1e-4) -> None:
    assert [one.greedy for one in found] == [one.greedy for one in expected]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=tolerance)


def mixture(model: Transformer) -> list[Pair]:
    """Questions with choices of one and more tokens, examples before some of them, repeats, and texts that are cut."""
    rng = random.Random(0)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(V) for _ in range(rng.randint(low, high))]

    examples, pairs = ids(40, 40), []
    for number in range(14):
        context = (examples if number % 3 == 0 else []) + ids(1, 50)
        for _ in range(rng.randint(1, 4)):
            pairs.append((context, ids(1, 1) if number % 2 else ids(1, 25)))
        params = SamplingParams(temperature=0.0, max_new_tokens=1 + number % 3)
        pairs.append((context, [token.id for token in generate(model, context, params)]))
    pairs += [pairs[0], (ids(300, 300), ids(3, 3)), (ids(300, 300), ids(model.max_seq_len, model.max_seq_len))]
    rng.shuffle(pairs)
    return pairs


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny.model(dataclasses.replace(tiny.CONFIG, max_seq_len=110))


@pytest.mark.parametrize(("batch_size", "most"), [(1, 2**15), (3, 2**15), (16, 2**15), (16, 200)])
def test_batches_are_exact(model: Transformer, monkeypatch: pytest.MonkeyPatch, batch_size: int, most: int) -> None:
    """Also if the cache has room for a few rows only, and the tokens are fed in small parts."""
    monkeypatch.setattr(likelihood, "MOST_TOKENS", most)
    monkeypatch.setattr(likelihood, "CHUNK", most // 5)
    pairs, done = mixture(model), list[tuple[int, int]]()
    assert_equal(
        log_likelihoods(model, pairs, batch_size, lambda *counts: done.append(counts)), one_by_one(model, pairs)
    )
    assert (done, done[-1]) == (sorted(done), (len(pairs), len(pairs)))


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"kv_cache": "int8"}], ids=str)
def test_kernels_and_cache_formats(tiny_gguf: Path, options: dict[str, str]) -> None:
    """The paths that the loader chooses, not only the decoder's own; 16 and 8 bits are compared with 32."""
    exact = loader.load_model(tiny_gguf, device="cpu", dtype="float32")
    model = loader.load(tiny_gguf, device="cpu", **{"dtype": "float32", **options}).model
    pairs = mixture(exact)
    expected, found = one_by_one(exact, pairs), log_likelihoods(model, pairs, batch_size=16)
    if not options:
        assert_equal(found, expected)
    for (_, continuation), one, other in zip(pairs, found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=0.06 * len(continuation))


def test_a_context_is_fed_once(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch feeds its contexts, then its continuations; a later context only feeds what follows a shared prefix."""
    shapes, hidden = [], Transformer.hidden

    def recorded(self: Transformer, tokens: torch.Tensor, *rest: object) -> torch.Tensor:
        shapes.append(tuple(tokens.shape))
        return hidden(self, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Transformer, "hidden", recorded)
    context = list(range(60))
    log_likelihoods(model, [(context, [100 + i, 2, 3]) for i in range(8)], batch_size=4)
    log_likelihoods(model, [([*context, i, 7], [8]) for i in range(2)], batch_size=1)
    assert shapes == [(1, 59), (4, 3), (4, 3), (1, 61), (1, 1), (1, 1), (1, 1)]


def test_frequencies_that_depend_on_the_length_are_those_of_each_text() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = tiny.model(dataclasses.replace(tiny.CONFIG, max_seq_len=32, rope_scaling=scaling))
    pairs: list[Pair] = [([5] * n + [7, 9], [3, 4]) for n in (10, 40, 50, 20)]
    assert_equal(log_likelihoods(model, pairs, batch_size=4), one_by_one(model, pairs))


def test_errors(model: Transformer) -> None:
    assert log_likelihoods(model, [], batch_size=4) == []
    with pytest.raises(ContextLengthError, match="a continuation has 111 tokens"):
        log_likelihoods(model, [([1], [2] * 111)], batch_size=1)
    broken = tiny.model()
    broken.layers[1].attention.wo.weight[0, 0] = math.inf
    with pytest.raises(NumericalError, match=r"begin at the output of layers.1.attention.wo"):
        log_likelihoods(broken, [([1, 2], [3])], batch_size=1)
