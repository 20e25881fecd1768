"""Threads that share a model: each gets the same answer as alone, or a UsageError."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from llama import rope
from llama.cache import KVCache
from llama.engine.nonfinite import locate
from llama.errors import NumericalError, UsageError
from llama.generate import generate
from llama.generation.session import Session
from llama.generation.speculative import ModelDraft, NGramDraft
from llama.model import Transformer
from llama.sampling import SamplingParams
from llama.text import Llama

from .. import tiny
from ..patience import PATIENCE

pytestmark = [pytest.mark.usefixtures("one_thread")]
OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "temperature": 1.5}
WAYS: dict[str, Callable[[Llama, int], list[list[int]]]] = {
    "one text": lambda llm, i: [llm.generate("hello " * i, seed=i, **OPTIONS).tokens],
    "a list": lambda llm, i: [c.tokens for c in llm.generate(["the", "hello " * i], seed=i, **OPTIONS)],
    "a draft": lambda llm, i: [llm.generate("hello " * i, seed=i, draft="ngram", **OPTIONS).tokens],
    "a draft model": lambda llm, i: [llm.generate("hello " * i, seed=i, draft=llm, **OPTIONS).tokens],
    "a session": lambda llm, i: [
        llm.generate(text, session=session, **OPTIONS, seed=i).tokens
        for session in [Session()]
        for text in ("hello", "hello x")
    ],
    "a chat": lambda llm, i: [llm.chat([{"role": "user", "content": "hello " * i}], seed=i, **OPTIONS).tokens],
}


def overlapping(net: Transformer, count: int) -> threading.Barrier:
    """Make `count` threads wait for each other between two layers, in their first passes."""
    barrier, meetings = threading.Barrier(count), [0]

    def meet(*_: object) -> None:
        if meetings[0] < 6 * count:
            meetings[0] += 1
            barrier.wait(timeout=PATIENCE)

    net.layers[1].register_forward_pre_hook(meet)
    return barrier


PAIRS = [(a, b) for a in WAYS for b in list(WAYS)[: 1 + list(WAYS).index(a)]]
QUICK = [(a, b) for a, b in PAIRS if a == b or b == next(iter(WAYS))]  # each way with itself and with the first


@pytest.mark.parametrize(
    "pair", [pair if pair in QUICK else pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS], ids=str
)
def test_two_threads_at_once_generate_what_each_generates_alone(pair: tuple[str, str], tiny_llm: Llama) -> None:
    net = tiny.model()
    llm = Llama(net, tiny_llm.tokenizer, tiny_llm.chat_template)
    expected = [WAYS[way](llm, i + 1) for i, way in enumerate(pair)]
    overlapping(net, 2)
    with ThreadPoolExecutor(max_workers=2) as pool:
        found = list(pool.map(lambda item: WAYS[item[1]](llm, item[0] + 1), enumerate(pair)))
    assert found == expected


def test_the_threads_overlap() -> None:
    """The hook of the tests above brings both threads inside a pass at the same time."""
    net, inside, seen = tiny.model(), [0], [0]
    overlapping(net, 2)

    def enter(*_: object) -> None:
        inside[0] += 1
        seen[0] = max(seen[0], inside[0])

    net.layers[0].register_forward_pre_hook(enter)
    net.layers[1].register_forward_hook(lambda *_: inside.__setitem__(0, inside[0] - 1))
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(lambda i: list(generate(net, [i, 2], SamplingParams(max_new_tokens=5))), range(2)))
    assert seen[0] == 2


def test_a_session_or_draft_is_for_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four threads that start at the same moment, exactly one gets the session or draft."""
    net = tiny.model()
    for _ in range(30):
        session, draft, barrier = Session(), NGramDraft(), threading.Barrier(4)

        def take(session: Session = session, barrier: threading.Barrier = barrier) -> object:
            barrier.wait(timeout=PATIENCE)
            return session.reuse(net, [1, 2, 3])

        def begin(draft: NGramDraft = draft, barrier: threading.Barrier = barrier) -> object:
            barrier.wait(timeout=PATIENCE)
            return draft.start(net, [1, 2, 3])

        for way in (take, begin):
            with ThreadPoolExecutor(max_workers=4) as pool:
                errors = [future.exception(timeout=PATIENCE) for future in [pool.submit(way) for _ in range(4)]]
            refused = [error for error in errors if error is not None]
            assert len(refused) == 3
            assert all(isinstance(error, UsageError) and "in use by another stream" in str(error) for error in refused)


def test_a_session_is_free_after_its_cache_could_not_be_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    net, session = tiny.model(), Session()

    def full(*args: Any, **options: Any) -> KVCache:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(net, "new_cache", full)
        with pytest.raises(MemoryError):
            session.reuse(net, [1, 2])
    assert isinstance(session.reuse(net, [1, 2]), KVCache)


@pytest.mark.parametrize("form", ["complex", "real"])
def test_one_thread_may_extend_the_rope_table_while_another_reads_it(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower thread finishes a shorter table after the longer table is in use."""
    config = dataclasses.replace(tiny.CONFIG, n_layers=1, max_seq_len=6000)
    net = tiny.model(config, rope=form)
    long, short = torch.arange(4000, 4003), torch.arange(1100, 1103)
    table = tiny.model(config, rope=form).rope
    expected = {end: tiny.rows(table, at, end) for at, end in ((long, 4003), (short, 1103))}
    real, begun, done = rope.Rope._table, threading.Event(), threading.Event()

    def slow(self: rope.Rope, end: int) -> tuple[torch.Tensor, ...]:
        table = real(self, end)
        if end < 4000:  # the short table waits until the long one is finished
            begun.set()
            assert done.wait(20)
        return table

    monkeypatch.setattr(rope.Rope, "_table", slow)
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(tiny.rows, net.rope, short, 1103)
        assert begun.wait(20)
        ours = tiny.rows(net.rope, long, 4003)
        done.set()
        theirs = waiting.result(timeout=PATIENCE)
    for got, end in ((ours, 4003), (theirs, 1103)):
        assert all(torch.equal(a, b) for a, b in zip(got, expected[end], strict=True))
    assert len(net.rope.table[0]) >= 4003  # not replaced by the shorter table
    assert all(torch.equal(a, b) for a, b in zip(tiny.rows(net.rope, long, 4003), expected[4003], strict=True))


def test_locating_a_nan_does_not_disturb_the_pass_of_another_thread() -> None:
    """While one thread searches for the origin of a NaN, another uses the same layers."""
    net = tiny.model()
    net.tok_embeddings.weight[200] = torch.nan
    expected = [token.id for token in generate(net, [1, 2, 3], SamplingParams(max_new_tokens=60))]
    assert 200 not in expected

    def locate_repeatedly() -> str:
        for _ in range(15):
            with pytest.raises(NumericalError, match=r"first at \[200, 0\]"):
                list(generate(net, [1, 200, 3], SamplingParams(max_new_tokens=5), diagnose=partial(locate, net)))
        return "located"

    with ThreadPoolExecutor(max_workers=2) as pool:
        other = pool.submit(locate_repeatedly)
        while not other.done():
            assert [token.id for token in generate(net, [1, 2, 3], SamplingParams(max_new_tokens=60))] == expected
        assert other.result() == "located"


def test_interleaved_streams_generate_what_each_generates_alone(tiny_llm: Llama) -> None:
    prompts = [
        ([5, 6], {"seed": 1}),
        ([5, 6, 7, 8], {"seed": 2, "draft": "ngram"}),
        ([9], {"seed": 3, "logprobs": True}),
    ]
    streams = [tiny_llm.stream_ids(prompt, **OPTIONS, **more) for prompt, more in prompts]
    ends: dict[int, list[int]] = {}
    while len(ends) < len(streams):
        for i, stream in enumerate(streams):
            piece = next(stream, None)
            if piece is not None and piece.completion is not None:
                ends[i] = piece.completion.tokens
    for i, (prompt, more) in enumerate(prompts):
        *_, last = tiny_llm.stream_ids(prompt, **OPTIONS, **more)
        assert last.completion is not None
        assert ends[i] == last.completion.tokens


def test_an_abandoned_stream_frees_its_cache_session_and_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    net, session, draft = tiny.model(), Session(), ModelDraft(tiny.model())
    from llama.tokenizer.gguf import from_metadata

    llm, made = Llama(net, from_metadata(tiny.byte_vocabulary(), "tiny")), weakref.WeakSet[KVCache]()
    real = net.new_cache

    def watched(*args: Any, **options: Any) -> KVCache:
        made.add(cache := real(*args, **options))
        return cache

    monkeypatch.setattr(net, "new_cache", watched)
    for options in ({}, {"draft": "ngram"}, {"draft": draft}, {"session": session}):
        stream = llm.stream_ids([5, 6, 7], **OPTIONS, seed=1, **options)
        next(stream)
        del stream
    batch = llm.answers(llm.prepare([5, 6], {**OPTIONS, "seed": 1}, n=3))
    next(batch)
    del batch
    gc.collect()
    assert len(made) == 1  # the cache of the session
    assert not session.busy
    assert not draft.busy
    *_, last = llm.stream_ids([5, 6, 7], session=session, draft=draft, max_new_tokens=9)
    *_, fresh = llm.stream_ids([5, 6, 7], max_new_tokens=9)
    assert last.completion is not None
    assert fresh.completion is not None
    assert last.completion.tokens == fresh.completion.tokens


@pytest.mark.parametrize(
    ("error", "at"),
    [
        pytest.param(error, at, marks=() if at == 2 or error is KeyboardInterrupt else pytest.mark.slow)
        for error in (KeyboardInterrupt, MemoryError, RuntimeError)
        for at in (1, 2, 5)
    ],
)
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_call_after_an_error_inside_a_pass_equals_that_of_a_fresh_model(
    error: type[BaseException], at: int, draft: str | None, tiny_llm: Llama
) -> None:
    net, calls = tiny.model(), [0]
    llm, session = Llama(net, tiny_llm.tokenizer), Session()

    def fail(*_: object) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise error("inside a pass")

    hook = net.layers[1].attention.register_forward_pre_hook(fail)
    with pytest.raises(error):
        llm.generate("hello hello hello", session=session, draft=draft, max_new_tokens=30)
    calls[0] = at - 1
    with pytest.raises(error):
        llm.generate(["hello hello", "the"], max_new_tokens=9)
    hook.remove()
    for prompt in ("hello hello hello", "hello hel", "the"):
        fresh = Llama(tiny.model(), tiny_llm.tokenizer)
        expected = fresh.generate(prompt, max_new_tokens=20)
        assert llm.generate(prompt, session=session, draft=draft, max_new_tokens=20).tokens == expected.tokens
        assert llm.generate([prompt, "a"], max_new_tokens=20)[0].tokens == expected.tokens
