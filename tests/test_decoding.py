"""Asynchronous decoding yields the tokens of plain decoding, ends where it ends, and never waits for the device."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llama import cache as cache_module
from llama.cache import KVCache
from llama.engine import cuda_graphs
from llama.engine.cuda_graphs import GraphRunner
from llama.errors import NumericalError
from llama.generate import Token, generate, prefill, random_generator
from llama.model import Runner, Transformer
from llama.rope import FORMS, to_half_layout
from llama.sampling import History, SamplingParams, choose, draw, sample

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


@pytest.fixture
def by_graph(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Token]]:
    """`generate` with a GraphRunner, the runner on CUDA."""

    def run(model: Transformer, *args: Any, **options: Any) -> list[Token]:
        with monkeypatch.context() as patch:
            runner = model.runner if isinstance(model.runner, GraphRunner) else graph_runner(model)
            patch.setattr(model, "runner", runner)
            return list(generate(model, *args, **options))

    return run


def graph_runner(model: Transformer) -> GraphRunner:
    """Return a GraphRunner with the settings of the model's runner."""
    runner = GraphRunner(model.runner.cache_kind)
    runner.fixed_cache = model.runner.fixed_cache
    return runner


def plain(*args: Any, **options: Any) -> list[Token]:
    """`generate` with the model's own runner."""
    return list(generate(*args, **options))


def picker(params: SamplingParams, **options: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    return lambda logits: choose(logits, params, **options)


def same(ours: list[Token], theirs: list[Token]) -> bool:
    """Whether ids and stops are equal and log-probabilities close: under a mask, the sums run over more slots."""
    close = [
        (a.logprob is None) == (b.logprob is None) and abs((a.logprob or 0) - (b.logprob or 0)) < 1e-5
        for a, b in zip(ours, theirs, strict=True)
    ]
    return [(t.id, t.stop) for t in ours] == [(t.id, t.stop) for t in theirs] and all(close)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("logprobs", [False, True])
def test_tokens_are_those_of_plain_decoding(
    by_graph: Callable[..., list[Token]], settings: dict[str, Any], logprobs: bool
) -> None:
    model, params = tiny.model(), SamplingParams(max_new_tokens=23, **settings)
    options = {"n_vocab": N_VOCAB, "logprobs": logprobs}
    expected = plain(model, PROMPT, params, **options)
    assert same(by_graph(model, PROMPT, params, **options), expected)
    assert len(expected) == 23
    assert all((token.logprob is not None) == logprobs for token in expected)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_the_same_in_every_form_of_rope(by_graph: Callable[..., list[Token]], form: str) -> None:
    model = tiny.model(rope=form) if form != "half" else Transformer(tiny.CONFIG, "half").requires_grad_(False)
    if form == "half":
        rotated = ("wq.weight", "wk.weight")
        state = tiny.weights().items()
        model.load_state_dict({n: to_half_layout(w, 16) if n.endswith(rotated) else w for n, w in state})
    params = SamplingParams(max_new_tokens=9)
    assert same(by_graph(model, PROMPT, params), plain(tiny.model(), PROMPT, params))


@pytest.mark.parametrize("count", [1, 2, 3, 6, 9])
def test_an_answer_ends_at_a_stop_id_that_is_read_late(by_graph: Callable[..., list[Token]], count: int) -> None:
    model, params = tiny.model(), SamplingParams(max_new_tokens=40, temperature=1.0, seed=5)
    stop = plain(model, PROMPT, params)[count - 1].id
    caches = [model.new_cache(60), model.new_cache(60)]
    expected = plain(model, PROMPT, params, stop_ids=[stop], cache=caches[0])
    assert same(by_graph(model, PROMPT, params, stop_ids=[stop], cache=caches[1]), expected)
    assert caches[1].length == caches[0].length == len(PROMPT) + len(expected) - 1
    assert expected[-1].stop


def test_a_cache_can_be_continued_after_a_stop(by_graph: Callable[..., list[Token]]) -> None:
    model, params = tiny.model(), SamplingParams(max_new_tokens=30, temperature=1.0, seed=5)
    cache = model.new_cache(120)
    stop = plain(model, PROMPT, params)[4].id
    model.runner = runner = graph_runner(model)
    first = by_graph(model, PROMPT, params, stop_ids=[stop], cache=cache)
    longer = [*PROMPT, *(token.id for token in first), 5, 6, 7]
    at = torch.tensor([cache.length])
    step = runner.step_for(cache, at)
    assert same(by_graph(model, longer, params, cache=cache), plain(tiny.model(), longer, params))
    assert runner.step_for(cache, at) is step  # the next answer reuses the captured graph
    assert graph_runner(model).step_for(cache, at) is not step  # another runner does not


@pytest.mark.parametrize("count", [0, 1, 2, 5, 11])
def test_a_closed_generator_leaves_the_cache_that_plain_decoding_leaves(count: int) -> None:
    model, params = tiny.model(), SamplingParams(max_new_tokens=30)
    cache = model.new_cache(60)
    logits = prefill(model, PROMPT, cache)
    with closing(GraphRunner().decode(model, logits, cache, 30, picker(params))) as tokens:
        answer = [next(tokens)[0] for _ in range(count)]
        ahead = cache.length - len(PROMPT)
        assert ahead == 0 or count > 1  # the first token is shown before the second step is launched
        assert ahead <= count + (cuda_graphs.AHEAD + 1) * cuda_graphs.STRIDE
    assert cache.length == len(PROMPT) + max(0, count - 1)
    text = torch.tensor([[*PROMPT, *answer][: cache.length]])
    expected = model.new_cache(60)
    model(text, cache=expected)
    torch.testing.assert_close(cache.k[:, :, :, : cache.length], expected.k[:, :, :, : cache.length])


@pytest.mark.parametrize(("max_len", "new"), [(15, 40), (40, 0), (40, 1), (40, 2), (40, 5)])
def test_an_answer_ends_at_the_context_or_at_max_new_tokens(
    by_graph: Callable[..., list[Token]], max_len: int, new: int
) -> None:
    model, params = tiny.model(), SamplingParams(max_new_tokens=new)
    expected = plain(model, PROMPT, params, cache=model.new_cache(max_len))
    assert same(by_graph(model, PROMPT, params, cache=model.new_cache(max_len)), expected)
    assert len(expected) == min(new, max_len - len(PROMPT))


@pytest.mark.parametrize("kind", ["model", "int8"])
@pytest.mark.parametrize("fixed", [False, True])
def test_the_cache_may_grow_while_decoding(
    by_graph: Callable[..., list[Token]], monkeypatch: pytest.MonkeyPatch, fixed: bool, kind: str
) -> None:
    monkeypatch.setattr(cache_module, "FIRST_SLOTS", 10)
    model, params = tiny.model(), SamplingParams(max_new_tokens=60)
    model.runner.fixed_cache, model.runner.cache_kind = fixed, kind
    assert same(by_graph(model, PROMPT, params), plain(model, PROMPT, params))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_logits_are_reported_at_their_step(by_graph: Callable[..., list[Token]], bad: float) -> None:
    model, params = tiny.model(), SamplingParams(max_new_tokens=30)
    answer = [token.id for token in plain(model, PROMPT, params)]
    late = next(i for i, id in enumerate(answer) if i >= 4 and id not in answer[:i] and id not in PROMPT)
    model.tok_embeddings.weight[answer[late]] = bad  # read when that token is fed
    messages, lengths = [], []
    for run in (plain, by_graph):
        cache = model.new_cache(60)
        with pytest.raises(NumericalError) as error:
            run(model, PROMPT, params, cache=cache)
        messages.append(str(error.value))
        lengths.append(cache.length)
    assert messages[0] == messages[1]
    assert f"new token {late + 2} " in messages[0]
    assert lengths[0] == lengths[1]


class NoSynchronization(TorchDispatchMode):
    """Rejects the operators that wait for the device: those that read a value, or have a size that depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_step_waits_for_the_device(settings: dict[str, Any]) -> None:
    model, params = tiny.model(), SamplingParams(max_new_tokens=20, **settings)
    cache = model.new_cache(60)
    logits = prefill(model, PROMPT, cache)
    generator = random_generator(params, torch.device("cpu"))
    text = History(torch.tensor(PROMPT), len(PROMPT)) if "repetition_penalty" in settings else None
    with NoSynchronization():
        with pytest.raises(AssertionError, match="waits"):
            int(logits.argmax())  # as plain decoding does
        pick = picker(params, text=text, generator=generator, logprobs=True)
        assert len(list(GraphRunner().decode(model, logits[:N_VOCAB], cache, 20, pick))) == 20


def test_a_draw_equals_that_of_multinomial_and_follows_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01, 0.0])
    rows = probabilities.expand(20000, -1)
    ours = draw(rows, torch.Generator().manual_seed(0))
    assert torch.equal(ours, sample(rows, torch.Generator().manual_seed(0)))
    counts = torch.bincount(ours, minlength=6).double()
    expected = 20000 * probabilities.double()
    assert counts[5] == 0
    chi_square = float(((counts - expected).square() / expected)[:5].sum())
    assert chi_square < 18.5  # 4 degrees of freedom, 1 in 1,000


def test_answers_over_many_seeds_follow_the_models_distribution(by_graph: Callable[..., list[Token]]) -> None:
    config = dataclasses.replace(tiny.CONFIG, vocab_size=5, n_layers=1)
    model = tiny.model(config)
    exact = {}
    for a in range(5):
        first = model(torch.tensor([[1, 2]]))[0, -1].softmax(-1)
        then = model(torch.tensor([[1, 2, a]]))[0, -1].softmax(-1)
        exact |= {(a, b): float(first[a] * then[b]) for b in range(5)}
    draws = 1500
    counts = dict.fromkeys(exact, 0)
    for seed in range(draws):
        first, second = by_graph(model, [1, 2], SamplingParams(max_new_tokens=2, temperature=1.0, seed=seed))
        counts[first.id, second.id] += 1
    chi_square = sum((counts[pair] - draws * p) ** 2 / (draws * p) for pair, p in exact.items())
    assert chi_square < 51.2  # 24 degrees of freedom, 1 in 1,000


def test_a_cache_is_freed_with_its_last_reference() -> None:
    model = tiny.model()
    cache = model.new_cache(60)
    runner = GraphRunner()
    tokens = runner.decode(model, prefill(model, PROMPT, cache), cache, 20, picker(SamplingParams()))
    next(tokens)
    gone = weakref.ref(cache)
    gc.disable()
    try:
        tokens.close()
        del tokens, cache
        assert gone() is None  # a reference cycle would keep gigabytes until a garbage collection
    finally:
        gc.enable()


class FakeGraph:
    """Replaces a CUDA graph: runs the captured step again, and checks that it uses the captured buffers."""

    def __init__(self, cache: KVCache, step: Callable[[], object]):
        self.cache, self.step = cache, step
        self.pointers = self.buffers()

    def buffers(self) -> list[int]:
        return [buffer.data_ptr() for layer in self.cache.layers for buffer in layer.buffers]

    def replay(self) -> None:
        assert self.buffers() == self.pointers, "a graph was replayed on buffers that no longer exist"
        self.step()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """The graphs of steps that are captured and replayed as on CUDA: two runs that are undone, then the capture."""
    graphs: list[FakeGraph] = []
    step_for = GraphRunner.step_for

    def capturing(runner: GraphRunner, cache: KVCache, positions: torch.Tensor) -> cuda_graphs.GraphStep:
        found = step_for(runner, cache, positions)
        found._captures = True

        def capture(step: Callable[[], object], restore: Callable[[], object]) -> FakeGraph:
            for _ in range(2):
                step()
                restore()
            graphs.append(FakeGraph(cache, step))
            return graphs[-1]

        monkeypatch.setattr(cuda_graphs, "capture", capture)
        return found

    monkeypatch.setattr(GraphRunner, "step_for", capturing)
    return graphs


def test_a_step_is_captured_once_for_each_size_of_the_cache(
    by_graph: Callable[..., list[Token]], captured: list[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "FIRST_SLOTS", 16)
    model, params = tiny.model(), SamplingParams(max_new_tokens=60)
    model.runner = graph_runner(model)
    cache = model.new_cache(200)
    assert same(by_graph(model, PROMPT, params, cache=cache), plain(tiny.model(), PROMPT, params))
    assert len(captured) == 4  # 16, 32, 64 and 128 slots
    longer = [*PROMPT, *PROMPT]
    cache.trim(len(PROMPT))
    assert same(by_graph(model, longer, params, cache=cache), plain(tiny.model(), longer, params))
    assert len(captured) == 4


def test_a_step_is_captured_again_if_the_table_of_rope_is_replaced(
    by_graph: Callable[..., list[Token]], captured: list[FakeGraph]
) -> None:
    model, params = tiny.model(), SamplingParams(max_new_tokens=5)
    model.runner = graph_runner(model)
    cache = model.new_cache(200)
    by_graph(model, PROMPT, params, cache=cache)
    model.rope.table = tuple(table.clone() for table in model.rope.table)
    cache.trim(len(PROMPT) - 1)
    assert same(by_graph(model, PROMPT, params, cache=cache), plain(tiny.model(), PROMPT, params))
    assert len(captured) == 2


def test_a_step_is_captured_again_if_the_weights_have_moved(
    by_graph: Callable[..., list[Token]], captured: list[FakeGraph]
) -> None:
    model, params = tiny.model(), SamplingParams(max_new_tokens=5)
    model.runner = graph_runner(model)
    cache = model.new_cache(200)
    by_graph(model, PROMPT, params, cache=cache)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    cache.trim(len(PROMPT) - 1)
    assert same(by_graph(model, PROMPT, params, cache=cache), plain(tiny.model(), PROMPT, params))
    assert len(captured) == 2


def test_batches_and_frequencies_by_length_are_decoded_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a graph step was made")

    monkeypatch.setattr(GraphRunner, "step_for", refuse)
    stretched = tiny.model(dataclasses.replace(tiny.CONFIG, rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    expected = plain(stretched, PROMPT, SamplingParams(max_new_tokens=9))
    stretched.runner = GraphRunner()
    assert same(plain(stretched, PROMPT, SamplingParams(max_new_tokens=9)), expected)
    model = tiny.model()
    several = model.new_cache(10, batch=2)
    logits = model(torch.tensor([[1, 2], [1, 2]]), cache=several)[0, -1]
    found = [list(r.decode(model, logits, several, 1, picker(SamplingParams()))) for r in (GraphRunner(), Runner())]
    assert found[0] == found[1]
