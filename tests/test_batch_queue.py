"""A batch that reads from a queue: requests arrive at any time, and each gets the answer it would get alone."""

from __future__ import annotations

import dataclasses
import queue
import random
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from llama.errors import MemoryLimitError, UsageError
from llama.generate import generate
from llama.generation import batch
from llama.generation.batch import Batch, Ended, Event, PromptScored, Request, Slot, Started, TokenEvent
from llama.model import Transformer
from llama.sampling import SamplingParams, Token
from llama.text import Llama, Session
from tests import tiny


def alone(net: Transformer, request: Request) -> list[int]:
    return [token.id for token in generate(net, request.ids, request.params)]


class Feed:
    """A Source that hands out requests at given steps, and checks that it is asked to block only if nothing runs."""

    def __init__(self, arrivals: list[tuple[int, Request]]):
        self.arrivals, self.step, self.running = arrivals, 0, 0

    def get(self, block: bool) -> Request | None:
        assert block == (self.running == 0)
        if not self.arrivals:
            if block:
                return None
            raise queue.Empty
        when, request = self.arrivals[0]
        if when > self.step and not block:
            raise queue.Empty
        self.arrivals.pop(0)
        self.running += 1
        return request


def run(net: Transformer, arrivals: list[tuple[int, Request]], slots: int) -> tuple[list[list[int]], list[Event]]:
    feed = Feed(list(arrivals))
    events, tokens = [], [[] for _ in arrivals]  # type: ignore[var-annotated]
    for event in Batch(net, feed, slots=slots):
        events.append(event)
        match event:
            case TokenEvent(number, token):
                tokens[number].append(token.id)
                feed.step += 1
            case Ended(_, error):
                assert error is None
                feed.running -= 1
    return tokens, events


def arriving(seed: int, count: int) -> list[tuple[int, Request]]:
    """Requests with gaps, of which many continue an earlier one, as the turns of a conversation do."""
    rng, made, at = random.Random(seed), [], 0  # type: ignore[var-annotated]
    for i in range(count):
        at += rng.choice([0, 0, 1, 9, 200])
        start = list(rng.choice(made)[1].ids) if made and rng.random() < 0.6 else []
        prompt = (start + [rng.randrange(320) for _ in range(rng.randint(1, 30))])[-200:]
        options = rng.choice([{}, {"temperature": 1.5}, {"presence_penalty": 1.0, "frequency_penalty": 0.5}])
        made.append((at, Request(prompt, SamplingParams(max_new_tokens=rng.randint(1, 14), seed=i, **options))))
    return made


@pytest.mark.parametrize("slots", [2, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 8))])
def test_requests_that_arrive_at_any_time_get_the_answers_they_get_alone(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        batch, "prompt_chunk", lambda device: 16
    )  # several chunks a prompt, with steps of the others between them
    net, arrivals = tiny.model(), arriving(slots, 30)
    tokens, events = run(net, arrivals, slots)
    assert tokens == [alone(net, request) for _, request in arrivals]
    assert sum(event.cached > 0 for event in events if isinstance(event, Started)) >= 3


def test_an_idle_row_keeps_its_keys() -> None:
    """A conversation waits while another one is answered for many steps, then continues with its cached keys."""
    net, first = tiny.model(), tiny.random_tokens(40, seed=3)[0].tolist()
    again = Request([*first, 9, 9], SamplingParams(max_new_tokens=8))
    arrivals = [
        (0, Request(first, SamplingParams(max_new_tokens=2))),
        (0, Request([7, 8], SamplingParams(max_new_tokens=30))),
        (20, again),
    ]
    tokens, events = run(net, arrivals, 2)
    assert [event.cached for event in events if isinstance(event, Started)] == [0, 0, 40]
    assert tokens[2] == alone(net, again)


def test_the_least_recently_used_slot_is_taken() -> None:
    """Two conversations in turn, in a batch of three slots: neither loses its keys to the other."""
    net = tiny.model()
    talks = [tiny.random_tokens(40, seed=i)[0].tolist() for i in range(2)]
    arrivals = [(100 * i, Request(talks[i % 2] + [i] * i, SamplingParams(max_new_tokens=2))) for i in range(6)]
    _, events = run(net, arrivals, 3)
    assert [event.cached >= 40 for event in events if isinstance(event, Started)] == [False, False] + [True] * 4


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The number of the request and the tokens of every chunk that a batch feeds; a chunk has at most 10."""
    fed, real = list[tuple[int, int]](), Batch._feed

    def spy(batch: Batch, slot: Slot, size: int) -> Iterator[Event]:
        fed.append((batch.prompts[slot].number, size))
        return real(batch, slot, size)

    monkeypatch.setattr(batch, "prompt_chunk", lambda device: 10)
    monkeypatch.setattr(Batch, "_feed", spy)
    return fed


class Every:
    """A Source with a request at every second question for one, however many run."""

    def __init__(self, requests: list[Request]):
        self.requests, self.asked = list(requests), 0

    def get(self, block: bool) -> Request | None:
        self.asked += 1
        if not block and self.asked % 2 == 0:
            raise queue.Empty
        return self.requests.pop(0) if self.requests else None


def test_a_short_prompt_passes_a_long_one(turns: list[tuple[int, int]]) -> None:
    net = tiny.model()
    requests = [Request(tiny.random_tokens(n, seed=n)[0].tolist(), SamplingParams(max_new_tokens=3)) for n in (200, 12)]
    events = list(Batch(net, Every(requests), slots=4))
    assert [event.number for event in events if isinstance(event, Ended)] == [1, 0]
    numbers = [number for number, _ in turns]
    assert numbers.index(1) <= 2  # it waits for the chunk that is being fed
    for number, request in enumerate(requests):
        found = [event.token.id for event in events if isinstance(event, TokenEvent) and event.number == number]
        assert found == alone(net, request)


def test_no_prompt_waits_for_ever(turns: list[tuple[int, int]]) -> None:
    """With a short prompt at any time, at most PASSES chunks in succession are not the long one's."""
    net, short = tiny.model(), SamplingParams(max_new_tokens=1)
    prompts = [tiny.random_tokens(150 if i == 1 else 9, seed=i)[0].tolist() for i in range(90)]
    events = list(Batch(net, Every([Request(prompt, short) for prompt in prompts]), slots=3))
    assert sum(isinstance(event, Ended) for event in events) == 90
    of_long = [at for at, (number, _) in enumerate(turns) if number == 1]
    gaps = {after - before for before, after in pairwise(of_long)}
    assert len(of_long) >= 15
    assert max(gaps) == batch.PASSES + 1


@pytest.mark.parametrize("scored", [False, True])
def test_prompts_with_a_common_beginning_feed_it_once(turns: list[tuple[int, int]], scored: bool) -> None:
    """Also if one of them is being fed when the others arrive; scored prompts are fed completely."""
    net, system = tiny.model(), tiny.random_tokens(60, seed=1)[0].tolist()
    params = [SamplingParams(max_new_tokens=4, prompt_logprobs=scored and i == 2) for i in range(4)]
    requests = [Request([*system, 7, i, 9], each) for i, each in enumerate(params)]
    events = list(Batch(net, requests, slots=4))
    assert sum(size for _, size in turns) == 63 + 3 * 2 + 61 * scored
    for number, request in enumerate(requests):
        found = [event.token.id for event in events if isinstance(event, TokenEvent) and event.number == number]
        assert found == alone(net, request)


def test_a_long_prompt_does_not_hold_up_an_answer_in_progress(turns: list[tuple[int, int]]) -> None:
    net = tiny.model(dataclasses.replace(tiny.CONFIG, max_seq_len=2048))
    arrivals = [
        (0, Request([1, 2], SamplingParams(max_new_tokens=600))),
        (5, Request(tiny.random_tokens(1500)[0].tolist(), SamplingParams(max_new_tokens=1))),
    ]
    _, events = run(net, arrivals, 2)
    numbers = [event.number for event in events]
    started, ended = numbers.index(1), len(numbers) - numbers[::-1].index(1)
    chunks = sum(number == 1 for number, _ in turns)
    assert chunks >= 10
    assert numbers[started:ended].count(0) >= chunks - 1


# ------------------------------------------------------------------------------------------------------ cancellation
@pytest.mark.parametrize("slots", [1, 3])
def test_a_cancelled_request_frees_its_slot_before_the_next_step(slots: int) -> None:
    net, flag = tiny.model(), threading.Event()
    params = SamplingParams(max_new_tokens=50)
    requests = [Request([1, 2], params, cancelled=flag), *(Request([3, i], params) for i in range(slots))]
    events, seen = [], 0
    for event in Batch(net, requests, slots=slots):
        events.append(event)
        if isinstance(event, TokenEvent) and event.number == 0:
            seen += 1
            if seen == 4:
                flag.set()
    assert seen in (4, 5)  # 5 if the token of the running step was already chosen
    assert [sum(isinstance(e, TokenEvent) and e.number == n for e in events) for n in range(1, slots + 1)] == [
        50
    ] * slots


def test_a_cancelled_prompt_is_not_fed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "prompt_chunk", lambda device: 10)
    net, flag, fed = tiny.model(), threading.Event(), []
    real = net.hidden
    net.hidden = lambda tokens, **o: (fed.append(tokens.shape[1]), len(fed) == 3 and flag.set(), real(tokens, **o))[2]  # type: ignore[method-assign,assignment,func-returns-value]
    requests = [Request(tiny.random_tokens(100)[0].tolist(), SamplingParams(max_new_tokens=5), cancelled=flag)]
    assert [type(event) for event in Batch(net, requests, slots=1)] == [Started, Ended]
    assert len(fed) == 3


# ----------------------------------------------------------------------------------------------------- prompt scores
@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_scores_of_a_prompt_equal_those_of_one_pass(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "prompt_chunk", lambda device: chunk)
    net, prompt = tiny.model(), tiny.random_tokens(30, seed=4)[0].tolist()
    expected = net(torch.tensor([prompt]))[0].log_softmax(-1)  # (T, V)
    requests = [
        Request(prompt, SamplingParams(max_new_tokens=2)),  # its keys must not be reused: they have no scores
        Request(prompt, SamplingParams(max_new_tokens=3, top_logprobs=4, prompt_logprobs=True)),
        Request(prompt, SamplingParams(max_new_tokens=0, prompt_logprobs=True)),
    ]
    events = list(Batch(net, requests, slots=2))
    scored = {event.number: event.tokens for event in events if isinstance(event, PromptScored)}
    assert set(scored) == {1, 2}
    for tokens in scored.values():
        assert [token.id for token in tokens] == prompt
        assert tokens[0].logprob is None
        found = torch.tensor([token.logprob for token in tokens[1:]])
        torch.testing.assert_close(found, expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
    for at, token in enumerate(scored[1][1:]):
        assert list(token.top) == expected[at].topk(4).indices.tolist()
        assert list(token.top.values()) == sorted(token.top.values(), reverse=True)
    assert all(not token.top for token in scored[2])
    assert sum(isinstance(event, TokenEvent) and event.number == 1 for event in events) == 3


def test_every_method_returns_scores_of_the_prompt(tiny_llm: Llama) -> None:
    ids = tiny_llm.tokenizer.encode_prompt("hello world", False)
    expected = tiny_llm.model(torch.tensor([ids]))[0, :-1, : tiny_llm.tokenizer.n_vocab].log_softmax(-1)  # (T - 1, V)
    expected = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    options = {"max_new_tokens": 3, "seed": 1, "temperature": 2.0}
    plain = tiny_llm.generate("hello world", **options)
    *pieces, last = tiny_llm.stream("hello world", prompt_logprobs=True, **options)
    assert [token.id for token in pieces[0].prompt or ()] == ids
    for scored in (
        last.completion,
        tiny_llm.generate("hello world", prompt_logprobs=True, **options),
        tiny_llm.generate(["hello world", "x"], prompt_logprobs=True, **options)[0],
    ):
        assert scored is not None
        assert scored.prompt_logprobs is not None
        assert (scored.tokens, scored.text) == (plain.tokens, plain.text)
        first, *found = scored.prompt_logprobs
        assert first is None
        torch.testing.assert_close(torch.tensor(found), expected)
    assert plain.prompt_logprobs is None
    only = tiny_llm.generate("hello world", max_new_tokens=0, prompt_logprobs=True)
    assert (only.text, len(only.prompt_logprobs or ())) == ("", len(ids))
    for given in ({"session": Session()}, {"draft": "ngram"}):
        with pytest.raises(UsageError, match="prompt_logprobs can't be combined with a session, a draft or progress"):
            tiny_llm.generate("hello", prompt_logprobs=True, **given)


def test_top_logprobs_are_the_largest_of_the_models_distribution() -> None:
    net, prompt = tiny.model(), [3, 1, 4]
    params = SamplingParams(max_new_tokens=6, temperature=2.0, top_k=3, seed=1, logit_bias={5: 50.0}, top_logprobs=5)
    batched = [e.token for e in Batch(net, [Request(prompt, params)], slots=1) if isinstance(e, TokenEvent)]
    single = list(generate(net, prompt, params))
    text = list(prompt)
    for one, other in zip(batched, single, strict=True):
        expected = net(torch.tensor([text]))[0, -1].log_softmax(-1).topk(5)
        for token in (one, other):
            assert list(token.top) == expected.indices.tolist()
            torch.testing.assert_close(torch.tensor(list(token.top.values())), expected.values)
        assert one.id == other.id
        text.append(one.id)


# ---------------------------------------------------------------------------------------------------- memory, options
def test_if_memory_runs_out_the_longest_answer_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama.cache.FIRST_SLOTS", 16)
    monkeypatch.setattr(batch, "RESERVED", 1)
    net = tiny.model()

    def refuse(size: int, slots: int, device: torch.device) -> None:
        if slots > 32:
            raise MemoryLimitError("no memory for more")

    net.check_memory = refuse
    requests = [Request([1] * 10, SamplingParams(max_new_tokens=60)), Request([2], SamplingParams(max_new_tokens=20))]
    events = list(Batch(net, iter(requests), slots=2))
    ends = {event.number: event.error for event in events if isinstance(event, Ended)}
    assert isinstance(ends[0], MemoryLimitError)
    assert ends[1] is None
    assert sum(isinstance(event, TokenEvent) and event.number == 0 for event in events) == 32 - 10 + 1


def test_processors_see_the_text_and_change_the_choice(tiny_llm: Llama) -> None:
    seen: list[list[int]] = []

    def record(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append(ids.tolist())
        return logits

    def never_twice(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, ids, -torch.inf)

    prompt = tiny_llm.tokenizer.encode_prompt("abc")
    found = tiny_llm.generate("abc", max_new_tokens=12, processors=[record, never_twice])
    assert seen == [prompt + found.tokens[:i] for i in range(len(seen))]
    text: list[int] = list(prompt)
    for id in found.tokens:
        logits = tiny_llm.model(torch.tensor([text]))[0, -1, : tiny_llm.tokenizer.n_vocab]
        assert id == max((i for i in range(len(logits)) if i not in text), key=lambda i: float(logits[i]))
        text.append(id)
    together = tiny_llm.generate(["d", "abc"], max_new_tokens=12, processors=[never_twice])
    drafted = tiny_llm.generate("abc", max_new_tokens=12, processors=[never_twice], draft="ngram")
    assert together[1].tokens == drafted.tokens == found.tokens
    for bad, message in [
        (lambda ids, logits: logits[:3], "floating-point logits"),
        (lambda ids, logits: None, "got None"),
        (lambda ids, logits: logits - torch.inf, "finite"),
    ]:
        with pytest.raises(UsageError, match=message):
            tiny_llm.generate("abc", processors=[bad])
    with pytest.raises(UsageError, match="processors"):
        tiny_llm.generate("abc", processors=[3])


def test_tokens_of_a_stopped_answer_do_not_leak_into_the_next() -> None:
    """Cancelled requests leave rows that later requests reuse."""
    net, rng = tiny.model(), random.Random(5)
    requests, flags = [], []
    base = tiny.random_tokens(30, seed=9)[0].tolist()
    for i in range(20):
        flags.append(threading.Event())
        params = SamplingParams(max_new_tokens=10, temperature=rng.choice([0, 1.3]), seed=i)
        requests.append(Request([*base[: rng.randint(17, 30)], i], params, cancelled=flags[-1]))
    tokens: list[list[Token]] = [[] for _ in requests]
    for event in Batch(net, iter(requests), slots=3):
        if isinstance(event, TokenEvent):
            tokens[event.number].append(event.token)
            if event.number % 3 == 0 and len(tokens[event.number]) == event.number % 5 + 1:
                flags[event.number].set()
    for number, request in enumerate(requests):
        got = [token.id for token in tokens[number]]
        assert got == alone(net, request)[: len(got)]
        assert len(got) == 10 or number % 3 == 0
