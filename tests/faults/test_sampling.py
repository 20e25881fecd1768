"""Group G: prompts, limits and sampling options at and beyond their bounds, stops, streams, caches and batches.

Most cases are next to the tests of their subject and marked with the row there. Here are the remaining cases, and those
that compare with logits of transformers over the complete text, without a cache.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llama import loader
from llama.attention import causal_mask
from llama.cache import KINDS, KVCache
from llama.errors import ContextLengthError, LlamaError, NumericalError, UsageError
from llama.generate import prefill
from llama.generation.batch import Batch, Request, TokenEvent
from llama.sampling import LARGEST_LOGIT, History, SamplingParams, check_extreme, choose, probs
from llama.text import Llama, Session

from .. import tiny
from .conftest import Try

pytestmark = pytest.mark.usefixtures("one_thread")
RUN = ("generate", "-q", "--raw", "--device", "cpu", "--dtype", "float32")


@pytest.fixture(scope="module")
def theirs() -> Callable[[list[int]], torch.Tensor]:
    """Logits (T, V) of the tiny model from transformers: the complete text at once, no cache."""
    model = tiny.transformers_model()
    return lambda ids: model(torch.tensor([ids]), use_cache=False).logits[0]


# --------------------------------------------------------------------------------------------------------- the prompt
def test_an_empty_prompt_is_begin_of_text_only(tiny_llm: Llama) -> None:
    bos = tiny_llm.tokenizer.bos_id
    assert bos is not None
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    expected = [piece.completion for piece in tiny_llm.stream_ids([bos], **options)][-1]
    assert expected is not None
    assert tiny_llm.generate("", **options).tokens == expected.tokens
    assert [c.tokens for c in tiny_llm.generate(["", ""], **options)] == [expected.tokens] * 2


@pytest.mark.parametrize("prompt", [None, 5, 1.5, b"x", {"a": 1}, [None], ["a", 5], [["a"]], {"a"}])
def test_a_prompt_that_is_not_a_string_is_a_usage_error(tiny_llm: Llama, prompt: Any) -> None:
    with pytest.raises(LlamaError, match="must be a string"):
        tiny_llm.generate(prompt)


def test_without_begin_of_text_an_empty_prompt_is_refused(tmp_path: Path, attempt: Try) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", metadata={"tokenizer.ggml.bos_token_id": None})
    attempt(*RUN, "-m", path, "", "-n", "2").refused("no begin-of-text id", "pass some text", code=2)
    llm = loader.load(path, dtype="float32", device="cpu")
    with pytest.raises(UsageError, match=r"^prompt 2 of 3: the prompt has no tokens"):
        llm.generate(["a", "", "b"], max_new_tokens=2)
    for way in ({"draft": "ngram"}, {"session": Session()}):
        with pytest.raises(UsageError, match="call generate once for each prompt"):
            llm.generate(["a", "b"], **way)


@pytest.mark.parametrize(
    ("prompts", "kind", "message"),
    [
        (["a", "\ud800"], LlamaError, r"^prompt 2 of 2: .*lone surrogate"),
        (["a", 7], LlamaError, r"^prompt 2 of 2: prompt must be a string .*, got 7"),
        (["b " * 400, "a"], ContextLengthError, r"^prompt 1 of 2: the prompt has \d+ tokens, but the context of 256"),
    ],
)
def test_an_error_in_a_list_names_the_prompt(tiny_llm: Llama, prompts: Any, kind: type, message: str) -> None:
    for size in (1, 16):
        with pytest.raises(kind, match=message):
            tiny_llm.generate(prompts, max_new_tokens=2, batch_size=size)


@pytest.mark.parametrize("how", ["alone", "batch", "command"])
def test_a_prompt_one_token_shorter_than_the_context_is_answered_and_a_longer_one_refused(
    how: str, theirs: Callable[..., torch.Tensor], tiny_llm: Llama, tiny_gguf: Path, attempt: Try
) -> None:
    """llama-models returns an empty answer there, without an error."""
    text = "a" * 255  # byte by byte
    ids = tiny_llm.tokenizer.encode_prompt(text)
    assert len(ids) == 255
    best = int(theirs(ids)[-1, : tiny_llm.tokenizer.n_vocab].argmax())
    for longer, count in ((text + "a", 256), (text + "aa", 257)):
        message = f"{count} tokens, but the context of 256"
        if how == "command":
            attempt(*RUN, "-m", tiny_gguf, longer, "-n", "5").refused(message, "--max-seq-len")
        else:
            with pytest.raises(ContextLengthError, match=message):
                tiny_llm.generate(longer if how == "alone" else [longer], max_new_tokens=5)
    if how == "command":
        done = json.loads(attempt(*RUN, "-m", tiny_gguf, text, "-n", "5", "--json").stdout)
        tokens, finish = done["tokens"], done["finish_reason"]
    else:
        answer = tiny_llm.generate([text], max_new_tokens=5)[0] if how == "batch" else tiny_llm.generate(text)
        tokens, finish = answer.tokens, answer.finish_reason
    assert tokens == ([] if best in tiny_llm.tokenizer.stop_ids else [best])
    assert finish == ("stop" if best in tiny_llm.tokenizer.stop_ids else "length")


@pytest.mark.parametrize("how", ["alone", "batch", "draft", "fixed cache", "8-bit cache"])
def test_an_answer_ends_at_the_end_of_the_context_and_its_tokens_are_correct(
    how: str, theirs: Callable[..., torch.Tensor], tiny_llm: Llama
) -> None:
    net, prompt = tiny.model(), tiny.random_tokens(240)[0].tolist()
    net.make_cache = tiny.cache_maker(how == "fixed cache")
    net.cache_kind = "int8" if how == "8-bit cache" else "model"
    llm = Llama(net, copy.copy(tiny_llm.tokenizer))
    llm.tokenizer.stop_ids = frozenset()
    if how == "batch":
        pieces = [p for _, p in llm.answers(llm.prepare(prompt, {"max_new_tokens": 1000}, n=2))]
        answers = [p.completion for p in pieces if not isinstance(p, LlamaError) and p.completion]
    else:
        draft = {"draft": "ngram"} if how == "draft" else {}
        answers = [p.completion for p in llm.stream_ids(prompt, max_new_tokens=1000, **draft) if p.completion]
    for answer in answers:
        assert answer.finish_reason == "length"
        assert len(answer.tokens) == 16
        logits = theirs(prompt + answer.tokens)[239:-1, : llm.tokenizer.n_vocab]  # (16, V)
        chosen = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        near = 0.2 if how == "8-bit cache" else 1e-4  # the most likely, except for ties
        assert bool((chosen >= logits.amax(-1) - near).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fixed", [False, True])
def test_a_cache_refuses_tokens_beyond_its_end(kind: str, fixed: bool) -> None:
    """A slice beyond the end is empty, and torch writes one token into it without an error."""
    cache = KVCache(1, 2, 4, max_len=8, fixed=fixed, kind=kind)
    cache.layers[0].update(*(torch.randn(1, 2, 8, 4) for _ in "kv"), cache.place(8))
    cache.commit()
    before = [buffer.clone() for buffer in cache.layers[0].buffers]
    for tokens, at in ((1, None), (3, None), (1, torch.tensor([8]))):
        with pytest.raises(ContextLengthError, match="room for 8"):
            cache.place(tokens, at)
    assert cache.length == 8
    assert all(torch.equal(a, b) for a, b in zip(before, cache.layers[0].buffers, strict=True))


# -------------------------------------------------------------------------------------------------------- the options
BAD_OPTIONS = {
    "-n": "-3 1.5 x 9223372036854775808", "--temperature": "-1 -0.001 -inf nan inf 1e9", "--top-k": "-1 1.5",
    "--top-p": "1.5 nan inf -0.1 -1e-9", "--seed": "-1 1.5 9223372036854775808 18446744073709551616", "--stop": "",
}  # fmt: skip


@pytest.mark.parametrize(("option", "value"), [(o, v) for o, vs in BAD_OPTIONS.items() for v in vs.split(" ")])
def test_the_command_refuses_bad_sampling_options_with_exit_code_2(
    option: str, value: str, tiny_gguf: Path, attempt: Try
) -> None:
    attempt(*RUN, "-m", tiny_gguf, "a", f"{option}={value}" if option != "-n" else f"-n{value}").refused(code=2)


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"temperature": -1e-9}, {"top_p": 1.5}, {"top_p": 1 + 1e-9}, {"top_p": math.nan}]
)
def test_every_entry_point_refuses_bad_sampling_options(tiny_llm: Llama, bad: dict[str, float]) -> None:
    """A negative temperature would invert the distribution, and top_p above 1 would have no effect."""
    (name, value), *_ = bad.items()
    own = Llama(tiny_llm.model, tiny_llm.tokenizer, sampling=bad)  # as from a generation_config.json
    ways: list[Callable[[], Any]] = [
        lambda: SamplingParams(**bad),
        lambda: dataclasses.replace(SamplingParams(), **bad),
        lambda: tiny_llm.generate("a", **bad),
        lambda: tiny_llm.generate(["a"], **bad),
        lambda: tiny_llm.generate("a", draft="ngram", **bad),
        lambda: tiny_llm.prepare([5], bad),
        lambda: own.generate("a"),
    ]
    for way in ways:
        with pytest.raises(UsageError, match=f"{name} must be a number from 0 to .*, got {value}"):
            way()


@given(st.lists(st.floats(-9, 9, width=16), min_size=2, max_size=20), st.floats(0, 1))
def test_top_p_keeps_the_smallest_set_that_reaches_p(values: list[float], p: float) -> None:
    logits = torch.tensor(values)
    kept = probs(logits, SamplingParams(temperature=1.0, top_p=p)) > 0
    chances = logits.double().softmax(-1)
    assert bool(kept.any())
    without_least = float(chances[kept].sum() - chances[kept].min())
    assert p == 1 or without_least <= p + 1e-5
    assert float(chances[kept].sum()) >= p - 1e-5


@given(
    st.lists(st.one_of(st.just(-math.inf), st.floats(-(2.0**100), 2.0**100, width=32)), min_size=1, max_size=12),
    st.floats(0, 1e6), st.integers(0, 14), st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 100), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=150)
def test_every_combination_of_filters_leaves_a_token_to_sample(
    values: list[float], temperature: float, k: int, p: float, m: float, penalty: float, seed: int
) -> None:
    """Probabilities sum to 1 for any largest logit, and the sampled token has a positive probability."""
    logits = torch.tensor(values)
    params = SamplingParams(temperature=temperature, top_k=k, top_p=p, min_p=m, repetition_penalty=penalty)
    seen = History(torch.arange(len(values)), 0) if penalty != 1 else None
    if not max(map(abs, values)) < LARGEST_LOGIT or any(map(math.isnan, values)):
        with pytest.raises(NumericalError, match="new token 5 "):
            check_extreme(float(choose(logits, params, [None], seen)[1]), "new token 5")
        return
    chances = probs(logits, params, seen)
    assert float(chances.sum()) == pytest.approx(1, abs=1e-5)
    id = int(choose(logits, params, [torch.Generator().manual_seed(seed)], seen)[0])
    assert float(chances[id]) > 0
    assert math.isfinite(values[id])


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1])
@pytest.mark.parametrize("way", [{}, {"draft": "ngram"}, {"logprobs": True}, {"stop": ["zq"]}], ids=str)
def test_a_seed_determines_all_tokens_with_all_options(tiny_llm: Llama, seed: int, way: dict[str, Any]) -> None:
    options = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    options |= {"max_new_tokens": 12, "seed": seed, **way}
    first, again = (tiny_llm.generate("hello hello", **options) for _ in range(2))
    assert first.tokens == again.tokens
    assert first.stats.seed == seed
    if "draft" not in way:  # speculative decoding draws more than once per token
        listed = tiny_llm.generate(["the", "hello hello"], **options)
        assert listed[1].tokens == first.tokens


# ------------------------------------------------------------------------------------------------------------- batches
@pytest.mark.parametrize("name", tiny.FUNCTIONS)
def test_unused_rows_of_a_batch_have_finite_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots whose sequence has ended or not started run too; their logits are finite and discarded."""
    net, real, rows = tiny.model(attention=name), Batch._next_logits, [0]

    def finite(*given: Any) -> torch.Tensor:
        logits: torch.Tensor = real(*given)
        assert bool(torch.isfinite(logits).all())
        rows[0] += len(logits)
        return logits

    monkeypatch.setattr(Batch, "_next_logits", finite)
    monkeypatch.setattr(Batch, "_rounded", lambda self, rows: len(self.slots))  # more rows than answers
    lengths = (1, 9, 2, 1, 12, 5)
    requests = (Request([i + 1] * (i + 1), SamplingParams(max_new_tokens=n)) for i, n in enumerate(lengths))
    tokens = sum(isinstance(event, TokenEvent) for event in Batch(net, requests, slots=5))
    assert tokens == sum(lengths)
    assert rows[0] > tokens - len(lengths)  # some rows were unused


@given(st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=1, max_size=4))
def test_every_query_attends_to_itself_so_no_row_is_fully_masked(positions: list[list[int]]) -> None:
    where = torch.tensor(positions)  # (B, T)
    mask = causal_mask(where, torch.arange(31))  # (B, 1, T, S)
    assert bool(mask.any(-1).all())
    for row, seen in zip(positions, mask[:, 0], strict=True):
        assert [int(line.sum()) for line in seen] == [position + 1 for position in row]


# ------------------------------------------------------------------------------------------------- stops and streaming
@pytest.mark.parametrize("stop", ["\U0001f642", "a\U0001f642b", "\U0001f642\U0001f642"])
def test_a_stop_string_with_an_emoji_over_several_tokens(tiny_llm: Llama, stop: str) -> None:
    """Each emoji is four tokens, one per byte. No part of the stop string is shown."""
    from llama.generation.answer import Answer, Job
    from llama.sampling import Token

    text = f"ab\U0001f643{stop}c"  # the first emoji shares three bytes with the other
    answer, shown = Answer(tiny_llm.tokenizer, Job([1], SamplingParams(stop=[stop]))), []
    for id in tiny_llm.tokenizer.encode(text):
        shown.append(str(answer.feed(Token(id, None, False))))
        if answer.done:
            break
    done = answer.end().completion
    assert done is not None
    assert "".join(shown) == done.text == "ab\U0001f643"
    assert done.finish_reason == "stop"


@pytest.mark.parametrize("stops", [(2,), (0, 2), (0, 1, 2)])
def test_end_of_text_as_the_first_token_is_an_empty_answer(tiny_llm: Llama, stops: tuple[int, ...]) -> None:
    net = tiny.model()
    net.output.weight.zero_()
    net.norm.weight.fill_(1)
    net.output.weight[stops[-1]] = net.norm(net.hidden(torch.tensor([[5, 6]])))[0, -1]  # by far the most likely
    llm = Llama(net, copy.copy(tiny_llm.tokenizer))
    llm.tokenizer.stop_ids = frozenset(stops)
    for answer in (
        [p.completion for p in llm.stream_ids([5, 6])][-1],
        [p.completion for p in llm.stream_ids([5, 6], draft="ngram")][-1],
        [p.completion for _, p in llm.answers(llm.prepare([5, 6], {})) if not isinstance(p, LlamaError)][-1],
    ):
        assert answer is not None
        assert (answer.text, answer.tokens, answer.finish_reason) == ("", [], "stop")


def test_the_command_succeeds_with_an_empty_answer(tmp_path: Path, attempt: Try) -> None:
    state = tiny.weights()
    state["output.weight"] = torch.zeros_like(state["output.weight"])  # all logits are equal: greedy chooses id 0
    path = tiny.write_gguf(tmp_path / "x.gguf", state=state, metadata={"tokenizer.ggml.eos_token_id": 0})
    done = attempt(*RUN, "-m", path, "hello")
    assert (done.code, done.stdout, done.stderr) == (0, b"", b"")


# ------------------------------------------------------------------------------------------- caches, tables, positions
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 30])
@pytest.mark.parametrize("name", tiny.FUNCTIONS)
def test_chunks_with_a_cache_equal_transformers_without_one(
    name: str, chunk: int, fixed: bool, theirs: Callable[..., torch.Tensor]
) -> None:
    net, ids = tiny.model(attention=name), tiny.random_tokens(30)[0].tolist()
    net.make_cache = tiny.cache_maker(fixed)
    expected, cache = theirs(ids), net.new_cache(40)
    for start in range(0, 30, chunk):
        logits = net(torch.tensor([ids[start : start + chunk]]), cache=cache)[0]
        torch.testing.assert_close(logits, expected[start : start + chunk], rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", ["complex", "real"])
def test_positions_beyond_the_initial_rope_table_equal_transformers(form: str) -> None:
    """The table starts with 1,024 rows; a slice beyond its end would be shorter, without an error."""
    config = dataclasses.replace(tiny.CONFIG, n_layers=1, max_seq_len=2500)
    net, ids = tiny.model(config, rope=form), tiny.random_tokens(1300)
    first = len(net.rope.table[0])
    assert first == 1024
    expected = tiny.transformers_model(config)(ids, use_cache=False).logits
    torch.testing.assert_close(net(ids), expected, rtol=0, atol=5e-4)
    assert 1300 <= len(net.rope.table[0]) <= 2500
    cache = net.new_cache()
    stepwise = prefill(net, ids[0, :1299].tolist(), cache), prefill(net, ids[0, 1299:].tolist(), cache)
    torch.testing.assert_close(torch.stack(stepwise), expected[0, -2:], rtol=0, atol=5e-4)


@pytest.mark.parametrize("form", ["complex", "real", "half"])
def test_a_position_beyond_the_rope_table_is_refused(form: str) -> None:
    rope = tiny.model(rope=form).rope
    assert all(len(part) == 256 for part in tiny.rows(rope, torch.arange(256), 256))
    for end in (257, 1000, 10**6):
        with pytest.raises(ContextLengthError, match=f"position {end - 1} .*256 positions"):
            rope.freqs_cis(torch.arange(end - 2, end), end)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e31, -1e31])
def test_one_nonfinite_logit_is_an_error(value: float) -> None:
    """Even if it is not the largest: it would change the distribution silently."""
    from llama.sampling import check_extreme, extreme

    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))  # (B, V)
    check_extreme(float(extreme(logits[1])), "new token 1")
    assert extreme(logits).tolist() == logits.amax(-1).tolist()
    logits[1, 7] = value
    with pytest.raises(NumericalError, match="the logits of new token 1 are"):
        check_extreme(float(extreme(logits[1])), "new token 1")
    top = extreme(logits)
    assert top[[0, 2]].isfinite().all()
    assert not -1e30 < float(top[1]) < 1e30
