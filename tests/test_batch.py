"""Batches: each request gets the tokens that it gets alone, whatever the other rows hold."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from llama.engine import kernels
from llama.errors import ContextLengthError, LlamaError, NumericalError, UsageError
from llama.generate import generate
from llama.generation.batch import Batch, Ended, Request, Started, TokenEvent
from llama.model import Transformer
from llama.sampling import SamplingParams, Token
from llama.text import Llama

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = dataclasses.replace(tiny.WIDE, max_seq_len=300)
needs_kernels = pytest.mark.skipif(not kernels.ready(), reason="packed weights need the C++ kernels")


def alone(net: Transformer, request: Request, **options: Any) -> list[Token]:
    """Return the tokens of one request without a batch."""
    return list(generate(net, request.ids, request.params, **options))


def batched(net: Transformer, requests: Iterable[Request], slots: int, **options: Any) -> list[list[Token]]:
    """Return the tokens of each request in a batch, and check the order of its events."""
    tokens: dict[int, list[Token]] = {}
    state: dict[int, str] = {}
    for event in Batch(net, requests, slots=slots, **options):
        match event:
            case Started(number, _, cached):
                assert number not in state
                assert cached >= 0
                state[number], tokens[number] = "started", []
            case TokenEvent(number, token):
                assert state[number] == "started"
                tokens[number].append(token)
            case Ended(number, error):
                assert error is None
                assert state[number] == "started"
                state[number] = "ended"
    assert set(state.values()) <= {"ended"}
    return [tokens[number] for number in sorted(tokens)]


def ragged(rng: random.Random, count: int, vocab: int = 320, longest: int = 60, **params: Any) -> list[Request]:
    """Return requests of different lengths, greedy and sampled; some share a prefix."""
    shared = [rng.randrange(vocab) for _ in range(20)]
    made = []
    for i in range(count):
        prompt = shared * rng.randrange(2) + [rng.randrange(vocab) for _ in range(rng.randint(1, longest))]
        sampling = rng.choice(
            [{}, {"temperature": 1.5}, {"repetition_penalty": 1.3}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40}]
        )
        options = {"max_new_tokens": rng.randint(0, 12), "seed": i, **sampling, **params}
        made.append(Request(prompt, SamplingParams(**options, logprobs=rng.random() < 0.5)))
    return made


def assert_same(got: list[list[Token]], expected: list[list[Token]], tolerance: float = 1e-4) -> None:
    assert [[token[:1] for token in map(dataclasses.astuple, row)] for row in got] == [
        [token[:1] for token in map(dataclasses.astuple, row)] for row in expected
    ]
    for ours, theirs in zip(got, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.stop == other.stop
            assert (one.logprob is None) == (other.logprob is None)
            assert one.logprob == pytest.approx(other.logprob, abs=tolerance)


# ---------------------------------------------------------------------------------------- equal to single requests
@pytest.mark.parametrize("slots", [3, 9, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4, 5))])
def test_each_request_gets_the_tokens_it_gets_alone(slots: int) -> None:
    net = tiny.model()
    for seed in range(4):
        requests = ragged(random.Random(seed), 11)
        expected = [alone(net, request, stop_ids={3, 77}, n_vocab=300) for request in requests]
        assert_same(batched(net, requests, slots, stop_ids={3, 77}, n_vocab=300), expected)
        lazily = batched(net, iter(requests), slots, stop_ids={3, 77}, n_vocab=300)
        assert_same(lazily, expected)


def int8_cache(net: Transformer) -> Transformer:
    net.cache_kind = "int8"
    return net


MODELS: dict[str, Callable[[], Transformer]] = {
    "multi-head": lambda: tiny.model(dataclasses.replace(tiny.CONFIG, n_kv_heads=4)),
    "one key head": lambda: tiny.model(dataclasses.replace(tiny.CONFIG, n_kv_heads=1)),
    "tied": lambda: tiny.model(dataclasses.replace(tiny.CONFIG, tie_embeddings=True)),
    "biased": lambda: tiny.model(dataclasses.replace(tiny.CONFIG, attention_bias=True, mlp_bias=True)),
    "written out": lambda: tiny.model(attention="reference"),
    "half": lambda: tiny.model(rope="half"),
    "real": lambda: tiny.model(rope="real"),
    "yarn": lambda: tiny.model(dataclasses.replace(tiny.CONFIG, rope_scaling={"rope_type": "yarn", "factor": 2.0})),
    "8-bit cache": lambda: int8_cache(tiny.model()),
}


@pytest.mark.parametrize("kind", MODELS)
def test_batches_work_with_every_kind_of_model(kind: str) -> None:
    net, requests = MODELS[kind](), ragged(random.Random(5), 8)
    assert_same(batched(net, requests, 3), [alone(net, request) for request in requests])


@needs_kernels
@pytest.mark.skipif(
    kernels.has_tiles(), reason="with AMX, 16 rows and more are multiplied in bfloat16, fewer in 8 bits"
)
@pytest.mark.parametrize("settings", [("int8", "model"), ("int4", "model"), ("int4", "int8")])
def test_batches_work_with_the_cpu_kernels(settings: tuple[str, str]) -> None:
    scheme, kind = settings
    net = tiny.quantized(tiny.model(WIDE, attention="kernel"), scheme)
    net.cache_kind = kind
    requests = ragged(random.Random(7), 8)
    assert_same(batched(net, requests, 4), [alone(net, request) for request in requests], tolerance=0.05)


@pytest.mark.parametrize("form", ["dynamic", "longrope"])
def test_requests_run_one_by_one_if_frequencies_depend_on_the_length(form: str) -> None:
    scaling: dict[str, Any] = {"rope_type": form, "factor": 4.0}
    if form == "longrope":
        halves = tiny.CONFIG.head_dim // 2
        scaling |= {"short_factor": [1.0] * halves, "long_factor": [3.0] * halves}
        scaling |= {"original_max_position_embeddings": 32}
    net = tiny.model(dataclasses.replace(tiny.CONFIG, max_seq_len=32, rope_scaling=scaling), max_seq_len=128)
    assert net.rope.by_length
    requests = ragged(random.Random(7), 6)
    assert_same(batched(net, requests, 3), [alone(net, request) for request in requests])


def test_logits_of_a_row_equal_those_of_a_full_pass() -> None:
    """All logits are compared, for rows at different positions and slots that are used again."""
    net = tiny.model()
    fed: list[torch.Tensor] = []  # (B, 2) token and position of each row
    rows: list[torch.Tensor] = []  # (B, V)
    real = Batch._next_logits

    def spy(batch: Batch) -> torch.Tensor:
        fed.append(torch.tensor([(slot.next, len(slot.ids)) for slot in batch.slots[: batch._width]]))
        logits = real(batch)
        rows.append(logits.clone())
        return logits

    requests = ragged(random.Random(9), 6, temperature=0.0, repetition_penalty=1.0, max_new_tokens=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "_next_logits", spy)
        found = batched(net, requests, 3)
    texts = [list(request.ids) + [token.id for token in row] for request, row in zip(requests, found, strict=True)]
    full = [net(torch.tensor([text]))[0] for text in texts]  # (T, V) each, without a cache
    checked = 0
    for inputs, logits in zip(fed, rows, strict=True):
        for (token, position), row in zip(inputs.tolist(), logits, strict=True):
            for text, expected in zip(texts, full, strict=True):
                if (
                    0 < position < len(text)
                    and text[position] == token
                    and torch.allclose(row, expected[position], atol=1e-4)
                ):
                    checked += 1
                    break
    assert checked == sum(len(row) - 1 for row in found)  # the first token of each comes from the prefill


# ------------------------------------------------------------------------------------------------- slots and shapes
def test_requests_start_in_order_and_a_free_slot_is_used_at_once() -> None:
    net = tiny.model()
    lengths = [9, 2, 5, 1, 3, 7]
    requests = [Request([5 + i] * 3, SamplingParams(max_new_tokens=n)) for i, n in enumerate(lengths)]
    active: set[int] = set()
    started: list[int] = []
    for event in Batch(net, requests, slots=2):
        match event:
            case Started(number):
                active.add(number)
                started.append(number)
            case TokenEvent():
                if 2 <= len(started) < len(requests):
                    assert len(active) == 2
            case Ended(number):
                active.remove(number)
    assert started == [0, 1, 2, 3, 4, 5]
    assert not active


def test_a_request_is_read_only_when_a_slot_is_free() -> None:
    net, read = tiny.model(), []

    def requests() -> Iterable[Request]:
        for i in range(100):
            read.append(i)
            yield Request([i + 1, 2, 3], SamplingParams(max_new_tokens=4))

    events = iter(Batch(net, requests(), slots=3))
    for event in events:
        if isinstance(event, TokenEvent) and event.number == 2:
            break
    assert len(read) == 3


def test_steps_have_the_rows_in_use_and_one_number_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    net, shapes = tiny.model(), []
    real = Batch._next_logits

    def spy(batch: Batch) -> torch.Tensor:
        logits = real(batch)
        assert batch.rows is not None
        shapes.append((len(logits), batch.rows.slots))
        return logits

    monkeypatch.setattr(Batch, "_next_logits", spy)
    lengths = [30, 4, 20, 9, 16, 2, 7, 12, 5, 5, 3, 25]
    requests = [Request([i + 1] * (i + 1), SamplingParams(max_new_tokens=n)) for i, n in enumerate(lengths)]
    batched(net, requests, 6)
    widths = [width for width, _ in shapes]
    assert len({slots for _, slots in shapes}) == 1
    assert widths[0] == 6
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == 1
    assert sum(widths) <= sum(lengths)  # so no row is idle; the first token of an answer needs no step


def test_the_cache_is_as_large_as_the_requests_need() -> None:
    net, made = tiny.model(), []
    real = net.new_cache
    net.new_cache = lambda *a, **k: made.append(real(*a, **k)) or made[-1]  # type: ignore[method-assign]
    requests = [Request([1] * 10, SamplingParams(max_new_tokens=5)), Request([1] * 3, SamplingParams(max_new_tokens=9))]
    batched(net, requests, 8)
    assert (made[0].batch, made[0].slots) == (2, 15)


def test_a_cache_that_grows_does_not_change_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama.cache.FIRST_SLOTS", 8)
    net, requests = tiny.model(), ragged(random.Random(10), 9)
    assert_same(batched(net, iter(requests), 3), [alone(net, request) for request in requests])


@pytest.mark.parametrize("slots", [0, -1, True, 1.5, "8", 10**6])
def test_an_invalid_number_of_slots_is_refused(slots: Any) -> None:
    with pytest.raises(UsageError, match="batch size"):
        Batch(tiny.model(), [], slots=slots)


# -------------------------------------------------------------------------------------------------- shared prefixes
def test_a_shared_prefix_is_fed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, fed = tiny.model(), []
    real = net.hidden
    monkeypatch.setattr(net, "hidden", lambda tokens, **o: (fed.append(tokens.shape[1]), real(tokens, **o))[1])
    system = tiny.random_tokens(50, seed=1)[0].tolist()
    requests = [Request([*system, 7, i, 9], SamplingParams(max_new_tokens=5)) for i in range(7)]
    cached = [event.cached for event in Batch(net, requests, slots=3) if isinstance(event, Started)]
    assert fed == [53] + [2] * 6
    assert cached == [0] + [51] * 6
    monkeypatch.undo()
    assert_same(batched(net, requests, 3), [alone(net, request) for request in requests])


def test_the_last_token_of_a_repeated_prompt_is_fed_again() -> None:
    net = tiny.model()
    requests = [Request(list(range(40)), SamplingParams(max_new_tokens=5, temperature=2.0, seed=i)) for i in range(5)]
    assert_same(batched(net, requests, 2), [alone(net, request) for request in requests])


# ------------------------------------------------------------------------------------------------------------- ends
def test_cancelling_another_request_takes_effect_before_its_next_token() -> None:
    net = tiny.model()
    requests = [Request([i + 1, 5], SamplingParams(max_new_tokens=10)) for i in range(3)]
    numbers: list[int] = []
    for event in Batch(net, requests, slots=3):
        if isinstance(event, TokenEvent):
            numbers.append(event.number)
        if isinstance(event, TokenEvent) and event.number == 0 and numbers.count(0) == 5:
            requests[2].cancelled.set()  # has 4 tokens; its fifth would follow in this step
    assert [numbers.count(number) for number in range(3)] == [10, 10, 4]


def test_an_invalid_request_ends_no_other_request() -> None:
    net = tiny.model()
    params = SamplingParams(max_new_tokens=4)
    good = [Request([1, 2, 3], params), Request([4] * 30, params)]
    bad = [Request([], params), Request([1] * 256, params), Request([1, 9999], params), Request([-1], params)]
    errors: dict[int, LlamaError | None] = {}
    tokens: dict[int, list[Token]] = {0: [], 5: []}
    for event in Batch(net, [good[0], *bad, good[1]], slots=2):
        if isinstance(event, Ended):
            errors[event.number] = event.error
        if isinstance(event, TokenEvent):
            tokens[event.number].append(event.token)
    assert [type(errors[i]) for i in range(6)] == [
        type(None), UsageError, ContextLengthError, UsageError, UsageError, type(None)
    ]  # fmt: skip
    assert_same([tokens[0], tokens[5]], [alone(net, request) for request in good])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("attention", [name for name in tiny.FUNCTIONS if name != "cpu"])
def test_a_row_that_is_not_finite_ends_with_an_error_and_affects_no_other(attention: str, bad: float) -> None:
    """Token 300 has an embedding that is not finite. The next request in its slot must not read its keys and values."""
    net = tiny.model(attention=attention)
    params = SamplingParams(max_new_tokens=6)
    clean = [Request([i + 1, 2, 3], params) for i in range(8)]
    expected = [alone(net, request, n_vocab=300) for request in clean]
    net.tok_embeddings.weight[300] = bad
    poison = Request([7] * 30 + [300] + [8] * 20, params)
    for slots in (1, 2, 3):
        requests = list(clean)
        for at in (0, 3, 7):
            requests.insert(at, poison)
        tokens: dict[int, list[Token]] = {}
        errors: dict[int, LlamaError | None] = {}
        for event in Batch(net, requests, slots=slots, n_vocab=300):
            if isinstance(event, TokenEvent):
                tokens.setdefault(event.number, []).append(event.token)
            if isinstance(event, Ended):
                errors[event.number] = event.error
        poisoned = [i for i, request in enumerate(requests) if request is poison]
        assert [i for i in errors if errors[i]] == poisoned
        assert all(isinstance(errors[i], NumericalError) for i in poisoned)
        assert "not finite" in str(errors[poisoned[0]])
        assert_same([tokens[i] for i in range(len(requests)) if i not in poisoned], expected)


def test_a_row_that_becomes_nonfinite_later_ends_no_other_request() -> None:
    net = tiny.model()
    requests = [Request([i + 1, 2, 3], SamplingParams(max_new_tokens=8)) for i in range(5)]
    expected = [alone(net, request) for request in requests]
    real, calls = Batch._next_logits, [0]

    def third_fails(*args: Any) -> torch.Tensor:
        logits: torch.Tensor = real(*args).clone()
        calls[0] += 1
        if calls[0] == 3:
            logits[1, 5] = torch.nan
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "_next_logits", third_fails)
        events = list(Batch(net, requests, slots=3))
    tokens = [[e.token for e in events if isinstance(e, TokenEvent) and e.number == i] for i in range(5)]
    assert [event.number for event in events if isinstance(event, Ended) and event.error] == [1]
    assert_same(tokens, [row if i != 1 else row[:3] for i, row in enumerate(expected)])


# ------------------------------------------------------------------------------------------------------------- text
def test_a_list_of_prompts_gets_the_answers_of_single_prompts(tiny_llm: Llama) -> None:
    rng = random.Random(0)
    prompts = ["hello " * rng.randint(0, 8) + rng.choice("abcdefgh") for _ in range(9)]
    for options in (
        {"max_new_tokens": 12},
        {"max_new_tokens": 30, "temperature": 2.0, "seed": 4, "logprobs": True},
        {"max_new_tokens": 30, "temperature": 3.0, "seed": 5, "stop": ["a", "\n", "er"]},
        {"max_new_tokens": 0},
    ):
        expected = [tiny_llm.generate(prompt, **options) for prompt in prompts]
        for batch_size in (1, 4, 16):
            got = tiny_llm.generate(prompts, **options, batch_size=batch_size)
            for ours, theirs in zip(got, expected, strict=True):
                assert (ours.text, ours.tokens, ours.finish_reason) == (
                    theirs.text,
                    theirs.tokens,
                    theirs.finish_reason,
                )
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
                assert ours.stats.seed == theirs.stats.seed or "seed" not in options
                assert ours.stats.prompt_tokens == theirs.stats.prompt_tokens


def test_a_stop_string_frees_the_slot(tiny_llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_new_tokens": 40, "temperature": 3.0, "seed": 5}
    complete = tiny_llm.generate("hello", **options)
    stop = complete.text[8:11]
    steps: list[int] = []
    real = Batch._next_logits
    monkeypatch.setattr(Batch, "_next_logits", lambda batch: (steps.append(1), real(batch))[1])
    stopped = tiny_llm.generate(["hello", "hello"], **options, stop=[stop])
    assert [c.text for c in stopped] == [complete.text[: complete.text.index(stop)]] * 2
    assert len(steps) == len(stopped[0].tokens) - 1


def test_joined_pieces_of_a_batch_are_its_texts(tiny_llm: Llama) -> None:
    options = {"max_new_tokens": 9, "temperature": 3.0}
    texts = {tiny_llm.prepare([5 + i, 9], {**options, "seed": i})[0]: "" for i in range(5)}
    completions = {}
    for prompt, piece in tiny_llm.answers(iter(texts), batch_size=2):
        assert not isinstance(piece, LlamaError)
        assert prompt not in completions
        texts[prompt] += piece.text
        if piece.completion:
            completions[prompt] = piece.completion.text
    assert completions == texts


def test_an_error_in_one_prompt_of_a_list_is_raised(tiny_llm: Llama) -> None:
    with pytest.raises(UsageError, match="unknown option 'nonsense'"):
        tiny_llm.generate(["a"], nonsense=1)
    with pytest.raises(UsageError, match="batch size"):
        tiny_llm.generate(["a"], batch_size=0)


def test_a_prompt_is_fed_right_while_another_answer_makes_the_cache_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two chunks of the second prompt, the first answer fills the cache's memory, which is replaced."""
    monkeypatch.setattr("llama.generation.batch.prompt_chunk", lambda device: 16)
    monkeypatch.setattr("llama.generation.batch.RESERVED", 1)
    monkeypatch.setattr("llama.cache.FIRST_SLOTS", 8)
    monkeypatch.setattr("llama.cache.LARGEST_STEP", 3)
    net = tiny.model(dataclasses.replace(tiny.CONFIG, max_seq_len=256))
    text = tiny.random_tokens(120)[0].tolist()
    long, short = (Request(ids, SamplingParams(max_new_tokens=60)) for ids in (text[:100], text[20:]))
    expected = [alone(net, one) for one in (long, short)]
    for kind in ("model", "int8"):
        net.cache_kind = kind
        assert_same(
            batched(net, [long, short], 2),
            expected if kind == "model" else [alone(net, one) for one in (long, short)],
            tolerance=0.05,
        )
