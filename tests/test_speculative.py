"""Speculative decoding returns the tokens of plain decoding if greedy, else tokens of the same distribution."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llama.cache import KVCache
from llama.cli import main
from llama.errors import ContextLengthError, NumericalError, UsageError
from llama.generate import generate
from llama.generation import speculative
from llama.generation.speculative import (
    Draft,
    DraftToken,
    ModelDraft,
    NGramDraft,
    acceptance,
    residual,
    speculate,
)
from llama.model import Transformer
from llama.sampling import History, SamplingParams, Token, probs
from llama.text import Llama, Session

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = dataclasses.replace(
    tiny.CONFIG, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=48, vocab_size=12
)
SMALLER = dataclasses.replace(CONFIG, n_layers=1, dim=16, hidden_dim=16)


def ids(tokens: Any) -> list[int]:
    return [token.id for token in tokens]


class Scripted(Draft):
    """Proposes the tokens that a function of the text returns, without a distribution."""

    def __init__(self, script: Any, most: int = 10):
        super().__init__(most)
        self.script = script

    def propose(self, tokens: list[int], limit: int, pick: Any) -> list[DraftToken]:
        return [DraftToken(id, None) for id in self.script(tokens, limit)]


def drafts(seed: int, model: Transformer, most: int) -> list[Draft]:
    """Return three drafts: n-grams, another model, and the model itself."""
    return [NGramDraft(most), ModelDraft(tiny.model(SMALLER, seed + 100), most), ModelDraft(model, most)]


def assert_cache_holds(cache: KVCache, model: Transformer, tokens: list[int], at_least: int) -> None:
    """Check that the cache equals that of a new pass over its tokens, and that it holds at least `at_least` tokens."""
    length = cache.length
    assert at_least <= length <= len(tokens)
    fresh = model.new_cache()
    model(torch.tensor([tokens[:length]]), cache=fresh)
    torch.testing.assert_close(tiny.contents(cache, length), tiny.contents(fresh, length), rtol=0, atol=1e-4)


# --------------------------------------------------------------------------------------------------------- the rule
chances = st.lists(st.sampled_from([0.0, 0.01, 0.5, 1.0, 2.0, 7.0]), min_size=6, max_size=6).filter(any)


@given(chances, chances)
def test_accepted_tokens_and_replacements_follow_the_models_distribution(ps: list[float], qs: list[float]) -> None:
    p, q = torch.tensor(ps) / sum(ps), torch.tensor(qs) / sum(qs)
    output = torch.zeros(6)
    for id in q.nonzero().flatten().tolist():  # drafted with probability q(id), then accepted or replaced
        chance = acceptance(p, DraftToken(id, q))
        assert 0 <= chance <= 1
        output[id] += q[id] * chance
        if chance < 1:
            output += q[id] * (1 - chance) * residual(p, DraftToken(id, q))
    torch.testing.assert_close(output, p, rtol=0, atol=1e-6)


@given(chances, st.integers(0, 5))
def test_a_draft_token_without_a_distribution_has_probability_1(ps: list[float], id: int) -> None:
    p, point = torch.tensor(ps) / sum(ps), torch.zeros(6)
    point[id] = 1
    assert acceptance(p, DraftToken(id, None)) == acceptance(p, DraftToken(id, point)) == p[id]
    torch.testing.assert_close(residual(p, DraftToken(id, None)), residual(p, DraftToken(id, point)), rtol=0, atol=0)


# ----------------------------------------------------------------------------------------------------------- greedy
@pytest.mark.parametrize(
    "seed", [0, 3, 4, 7, 8, 11, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 5, 6, 9, 10))]
)
def test_greedy_tokens_are_those_of_plain_decoding(seed: int) -> None:
    """For several models, drafts, penalties, stops, vocabularies and filled caches; the cache is checked too."""
    model = tiny.model(CONFIG, seed)
    prompt = [3 * i * i % 7 for i in range(8)] * 2 + [11, seed % 12]
    penalty, n_vocab, most = [1.0, 1.3, 0.8][seed % 3], [None, 9][seed % 2], [1, 3, 10][seed // 3 % 3]
    params = SamplingParams(max_new_tokens=40, repetition_penalty=penalty, logprobs=True)
    plain = list(generate(model, prompt, params, n_vocab=n_vocab))
    stop = {plain[-1 - seed].id} if seed % 4 == 3 else set()
    plain = list(generate(model, prompt, params, n_vocab=n_vocab, stop_ids=stop))
    for draft in drafts(seed, model, most):
        cache = model.new_cache()
        model(torch.tensor([prompt[: seed % 5]]).long(), cache=cache) if seed % 5 else None
        got = list(speculate(model, prompt, params, draft, n_vocab=n_vocab, stop_ids=stop, cache=cache))
        assert [(t.id, t.stop) for t in got] == [(t.id, t.stop) for t in plain]
        assert [t.logprob for t in got] == pytest.approx([t.logprob for t in plain], abs=1e-4)
        assert_cache_holds(cache, model, prompt + ids(got), len(prompt) + len(got) - 1)
        assert draft.drafted >= draft.accepted
        assert len(got) < 20 or draft.drafted > 0


def test_these_tests_accept_and_reject_draft_tokens() -> None:
    """Otherwise the tests above would pass without using the drafts."""
    model, prompt = tiny.model(CONFIG, 1), [1, 2, 3] * 4
    counts = []
    for draft in drafts(1, model, 10):
        list(speculate(model, prompt, SamplingParams(max_new_tokens=60, repetition_penalty=1.2), draft))
        counts.append((draft.drafted, draft.accepted))
    assert all(0 < accepted < drafted for drafted, accepted in counts[:2])
    assert counts[2][0] == counts[2][1] > 0


@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("most", [1, 4, 10])
def test_a_draft_equal_to_the_model_is_always_accepted(most: int, penalty: float) -> None:
    model = tiny.model()
    draft = ModelDraft(tiny.model(), most)
    list(speculate(model, [1, 2, 3], SamplingParams(max_new_tokens=50, repetition_penalty=penalty), draft))
    assert draft.drafted == draft.accepted
    assert draft.accepted >= 49 * most // (most + 1) - most  # every pass yields one token more than it accepts


@pytest.mark.parametrize("room", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("by", ["max_new_tokens", "context", "cache"])
def test_an_answer_ends_where_it_ends_without_a_draft(room: int, by: str) -> None:
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    limit = len(prompt) + room
    model = tiny.model(CONFIG, 3, max_seq_len=limit if by == "context" else None)
    params = SamplingParams(max_new_tokens=room if by == "max_new_tokens" else 50)
    size = limit if by == "cache" else None
    if room == 0 and by != "max_new_tokens":
        for draft in drafts(3, model, 10):
            with pytest.raises(ContextLengthError, match="8 tokens, but the context of 8"):
                list(speculate(model, prompt, params, draft, cache=model.new_cache(size)))
        return
    plain = ids(generate(model, prompt, params, cache=model.new_cache(size)))
    assert len(plain) == room
    for draft in drafts(3, tiny.model(CONFIG, 3), 10):
        assert ids(speculate(model, prompt, params, draft, cache=model.new_cache(size))) == plain


def test_a_draft_model_stops_drafting_at_the_end_of_its_own_context() -> None:
    model, draft = tiny.model(CONFIG, 3), ModelDraft(tiny.model(CONFIG, 3, max_seq_len=20))
    params = SamplingParams(max_new_tokens=60)
    assert ids(speculate(model, [1, 2, 3], params, draft)) == ids(generate(model, [1, 2, 3], params))
    assert 10 <= draft.accepted <= 18


@pytest.mark.parametrize("count", [1, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 5, 9))])
def test_the_cache_can_be_continued_after_the_generator_is_closed(count: int) -> None:
    for seed in range(4):
        model, prompt = tiny.model(CONFIG, seed), [1, 2, 3] * 4
        params = SamplingParams(max_new_tokens=40, repetition_penalty=1.1)
        for draft in drafts(seed, model, 10):
            cache = model.new_cache()
            stream = speculate(model, prompt, params, draft, cache=cache)
            text = prompt + [next(stream).id for _ in range(count)]
            stream.close()  # type: ignore[attr-defined]
            assert_cache_holds(cache, model, text, len(text) - 1)
            cache.trim(min(cache.length, len(text) - 1))
            rest = SamplingParams(max_new_tokens=10, repetition_penalty=1.1)
            assert ids(speculate(model, text, rest, draft, cache=cache)) == ids(generate(model, text, rest))


def test_a_rejected_token_is_dropped_from_the_cache_before_its_replacement_is_yielded() -> None:
    model, prompt = tiny.model(CONFIG, 5), [1, 2, 3] * 4
    params = SamplingParams(max_new_tokens=30)
    plain = ids(generate(model, prompt, params))

    def third_is_wrong(tokens: list[int], limit: int) -> list[int]:
        known = (prompt + plain)[len(tokens) : len(tokens) + limit]
        return known[:2] + [(id + 1) % 12 for id in known[2:]]

    for count in range(1, 30):
        cache, draft = model.new_cache(), Scripted(third_is_wrong)
        stream = speculate(model, prompt, params, draft, cache=cache)
        assert [next(stream).id for _ in range(count)] == plain[:count]
        stream.close()  # type: ignore[attr-defined]
        assert_cache_holds(cache, model, prompt + plain[:count], len(prompt) + count - 1)
    assert draft.drafted > draft.accepted > 0


def test_frequencies_that_depend_on_the_length_support_no_draft() -> None:
    config = dataclasses.replace(CONFIG, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    with pytest.raises(UsageError, match="do not depend on the length"):
        next(speculate(tiny.model(config), [1], SamplingParams(), NGramDraft()))


# --------------------------------------------------------------------------------------------------------- sampling
V = 5
SMALL = dataclasses.replace(
    CONFIG, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=24, vocab_size=V, max_seq_len=64
)
DEPTH = 4  # tokens of an answer: one from the prefill, then up to two drafted tokens and the token after them


def all_answers(model: Transformer, prompt: list[int], params: SamplingParams) -> Tensor:
    """Return the probability of each answer, (V^DEPTH,), from full passes without a cache."""
    answers = torch.cartesian_prod(*[torch.arange(V)] * DEPTH)  # (V^DEPTH, DEPTH)
    texts = torch.cat((torch.tensor(prompt).expand(len(answers), -1), answers), 1)
    logits = model(texts)[:, len(prompt) - 1 : -1]  # (V^DEPTH, DEPTH, V)
    chance = torch.ones(len(answers), dtype=torch.float64)
    for i in range(DEPTH):
        p = probs(logits[:, i], params, History(texts[:, : len(prompt) + i], len(prompt)))
        chance *= p.gather(1, answers[:, i : i + 1])[:, 0]
    return chance


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Return the p-value of Pearson's chi-square test. Answers expected less than five times form one cell."""
    assert not counts[expected == 0].any(), "an impossible answer was generated"
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None])).double()
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ngram", {"temperature": 1.0}),
        ("scripted", {"temperature": 1.0, "repetition_penalty": 1.8}),
        # Slow, since the cases above and the test of the acceptance rule cover filters, penalties and drafts already.
        pytest.param(
            "scripted",
            {"temperature": 1.0, "presence_penalty": 0.9, "frequency_penalty": 0.7},
            marks=pytest.mark.slow,
        ),
        pytest.param("model", {"temperature": 0.7, "top_k": 3}, marks=pytest.mark.slow),
        pytest.param("model", {"temperature": 1.3, "top_p": 0.8}, marks=pytest.mark.slow),
        pytest.param("model", {"temperature": 1.0, "repetition_penalty": 1.8}, marks=pytest.mark.slow),
    ],
)
def test_answers_follow_the_models_distribution(
    monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    """Compare 800 seeded answers of four tokens with the exact probabilities by a chi-square test: p above 1e-4.

    With new seeds, a correct program would fail one time in 10,000 in each of the five cases.
    """
    monkeypatch.setattr(Draft, "length", lambda self: self.most)  # draft as many tokens as possible
    model, runs = tiny.model(SMALL, 4), 800
    prompt = [0, 1, 2, 3, 4, 2, 0, 3, 1, 1, 4, 0, 0, 2, 2, 1, 3, 3, 4, 4, 1, 0, 4, 3, 2, 3, 0, 1]
    if len(options) > 1 and "top_k" not in options:
        prompt = [0, 1, 2, 0, 1]  # 3 and 4 are new, so each token changes the next distribution
    draft: Draft = {
        "ngram": NGramDraft,
        "scripted": lambda: Scripted(lambda tokens, limit: [(tokens[-1] + 1 + i) % V for i in range(limit)]),
        "model": lambda: ModelDraft(tiny.model(SMALL, 9)),
    }[kind]()
    cache, powers = model.new_cache(), V ** torch.arange(DEPTH - 1, -1, -1)
    counts = torch.zeros(V**DEPTH)
    drafted = accepted = 0
    for seed in range(runs):
        params = SamplingParams(max_new_tokens=DEPTH, seed=seed, **options)
        cache.trim(min(cache.length, len(prompt) - 1))
        answer = ids(speculate(model, prompt, params, draft, cache=cache))
        counts[int((torch.tensor(answer) * powers).sum())] += 1
        drafted, accepted = drafted + draft.drafted, accepted + draft.accepted
    assert runs < drafted
    assert drafted * 0.05 < accepted < drafted * 0.9
    p = p_value(counts, runs * all_answers(model, prompt, SamplingParams(**options)))
    print(f"p = {p:.3g}, {accepted} of {drafted} drafted tokens accepted")
    assert p > 1e-4


# ----------------------------------------------------------------------------------------------------------- drafts
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(1, 5), max_size=20))
def test_ngrams_propose_what_followed_the_last_occurrence_of_the_longest_suffix(
    text: list[int], steps: list[int]
) -> None:
    draft, model = NGramDraft(), tiny.model(SMALL)
    draft.start(model, text[:1])
    length = 1
    for step in [0, *steps]:  # the index grows with the text; the expected tokens are searched from the start
        length = min(length + step, len(text))
        seen = text[:length]
        expected: list[int] = []
        for n in (4, 3, 2):
            ends = [at for at in range(n, length) if seen[at - n : at] == seen[length - n :]]
            if length > n and ends:
                continued = list(seen)
                for i in range(7):
                    continued.append(continued[ends[-1] + i])
                expected = continued[length:]
                break
        drafted = draft.propose(seen, 7, lambda logits, tokens: DraftToken(0, None))
        assert ids(drafted) == expected
        assert all(token.q is None for token in drafted)


def test_a_draft_model_proposes_its_own_continuation_after_any_number_of_accepted_tokens() -> None:
    small, model = tiny.model(SMALLER, 2), tiny.model(CONFIG)
    draft, generator = ModelDraft(small), torch.Generator().manual_seed(0)

    def greedy(logits: Tensor, tokens: Any) -> DraftToken:
        return DraftToken(int(logits.argmax()), logits.softmax(-1))

    for prompt in ([1, 2, 3], [1, 2, 4, 4], [1, 2, 4, 4]):  # a shared prefix, then the same prompt again
        text = list(prompt)
        draft.start(model, prompt)
        for _ in range(15):
            limit = int(torch.randint(1, 6, (), generator=generator))
            drafted = draft.propose(text, limit, greedy)
            expected = list(generate(small, text, SamplingParams(max_new_tokens=limit, logprobs=True)))
            assert ids(drafted) == ids(expected)
            logprobs = [math.log(float(token.q[token.id])) for token in drafted if token.q is not None]
            assert logprobs == pytest.approx([token.logprob for token in expected], abs=1e-4)
            assert draft.cache.length < len(text) + limit
            accepted = int(torch.randint(0, limit + 1, (), generator=generator))
            text += [*ids(drafted[:accepted]), int(torch.randint(12, (), generator=generator))]
        draft.busy = False


def test_a_rejected_draft_costs_almost_nothing_and_one_that_improves_drafts_more_tokens() -> None:
    model, prompt, params = tiny.model(CONFIG, 5), [1, 2, 3], SamplingParams(max_new_tokens=240)
    plain = prompt + ids(generate(model, prompt, params))
    calls: list[tuple[int, int]] = []  # length of the text, limit

    def wrong_up_to_100(tokens: list[int], limit: int) -> list[int]:
        calls.append((len(tokens), limit))
        return [(id + (len(tokens) < 100)) % 12 for id in plain[len(tokens) : len(tokens) + limit]]

    draft = Scripted(wrong_up_to_100)
    assert prompt + ids(speculate(model, prompt, params, draft)) == plain
    rejected = [(at, limit) for at, limit in calls if at < 100]
    assert 0 < sum(limit for _, limit in rejected) * speculative.ROW_COST < 0.05 * 97
    assert max(limit for at, limit in rejected if at >= 20) == 1
    assert max(limit for at, limit in calls if at >= 100) == 10 == speculative.DRAFT_TOKENS
    assert draft.accepted > 100


# ------------------------------------------------------------------------------------------------ invalid arguments
def test_a_draft_may_have_other_rows_of_padding() -> None:
    """Rows of the embedding that no token has: Qwen2.5 has 151,936 in its small models and 152,064 in its large ones."""
    model, prompt = tiny.model(CONFIG), [1, 2, 3, 1, 2]
    for rows in (5, 30):
        draft = ModelDraft(tiny.model(dataclasses.replace(SMALL, vocab_size=rows)))
        params = SamplingParams(max_new_tokens=20)
        got = list(speculate(model, prompt, params, draft, n_vocab=5))
        assert ids(got) == ids(generate(model, prompt, params, n_vocab=5))
        assert draft.drafted > 0
    with pytest.raises(UsageError, match="5 token ids, the model 12"):
        next(speculate(model, [1, 7], params, ModelDraft(tiny.model(SMALL)), n_vocab=5))


def test_ids_without_a_token_are_not_drafted() -> None:
    """A prompt may contain ids for which the tokenizer has no token; an answer must not."""
    model, prompt = tiny.model(CONFIG), [1, 2, 11, 1, 2, 11, 1, 2]
    for temperature in (0.0, 2.0):
        params = SamplingParams(max_new_tokens=20, temperature=temperature, seed=1)
        draft = Scripted(lambda tokens, limit: [11, 1, 2][:limit])
        got: list[Token] = list(speculate(model, prompt, params, draft, n_vocab=9))
        assert all(token.id < 9 for token in got)
        assert temperature or ids(got) == ids(generate(model, prompt, params, n_vocab=9))
        assert draft.drafted == 0


def test_nonfinite_logits_are_reported_with_their_model() -> None:
    broken = tiny.model(CONFIG)
    broken.layers[0].feed_forward.w_up.weight[0, 0] = math.nan
    with pytest.raises(NumericalError, match="logits of new token 1 "):
        list(speculate(broken, [1, 2], SamplingParams(), NGramDraft()))
    with pytest.raises(NumericalError, match="logits of the draft model for new token 2 "):
        list(speculate(tiny.model(CONFIG), [1, 2], SamplingParams(), ModelDraft(broken)))


def test_prompts_that_plain_decoding_rejects_are_rejected() -> None:
    model = tiny.model(CONFIG)
    with pytest.raises(UsageError, match="token id 12 is not in the vocabulary"):
        list(speculate(model, [12], SamplingParams(), NGramDraft()))
    cache = model.new_cache()
    model(torch.tensor([[1, 2]]), cache=cache)
    with pytest.raises(UsageError, match="2 cached"):
        list(speculate(model, [1, 2], SamplingParams(), NGramDraft(), cache=cache))


# ------------------------------------------------------------------------------------------------ text and commands
@pytest.mark.parametrize("more", [{}, {"regex": "(hello |the )*"}, {"ignore_eos": True}], ids=str)
def test_text_is_the_same_with_every_kind_of_draft(tiny_llm: Llama, more: dict[str, Any]) -> None:
    prompt = "hello the hello the hello"
    options: dict[str, Any] = {"max_new_tokens": 40, "logprobs": True, **more}
    plain = tiny_llm.generate(prompt, **options)
    assert (plain.stats.drafted_tokens, plain.stats.accepted_tokens) == (0, 0)
    for draft in ("ngram", tiny_llm, tiny_llm.model, NGramDraft(3)):
        tokens = None if isinstance(draft, Draft) else 3
        fast = tiny_llm.generate(prompt, draft=draft, draft_tokens=tokens, **options)
        assert (fast.text, fast.tokens, fast.finish_reason) == (plain.text, plain.tokens, plain.finish_reason)
        assert fast.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        assert fast.stats.drafted_tokens >= fast.stats.accepted_tokens
        assert fast.stats.accepted_tokens or "regex" in more  # a draft does not know the grammar
        assert fast.stats.as_dict()["accepted_tokens"] == fast.stats.accepted_tokens


def test_a_conversation_is_the_same_with_a_draft(tiny_llm: Llama) -> None:
    for draft in (NGramDraft(), ModelDraft(tiny_llm.model)):
        session, messages = Session(), list[dict[str, str]]()
        for turn in ("hello", "the", "hello the"):
            messages.append({"role": "user", "content": turn})
            options = {"max_new_tokens": 12, "repetition_penalty": 1.1}
            pieces = tiny_llm.stream_chat(messages, session=session, draft=draft, **options)
            if turn == "the":
                next(pieces)
                pieces.close()  # type: ignore[attr-defined]
                continue
            completion = list(pieces)[-1].completion
            assert completion is not None
            assert completion.tokens == tiny_llm.chat(messages, **options).tokens
            assert (completion.stats.cached_tokens > 0) == (len(messages) > 1)
            messages.append({"role": "assistant", "content": completion.text})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "ngrams"}, "unknown draft 'ngrams'; expected 'ngram' or a loaded model"),
        ({"draft": 5}, "unknown draft 5"),
        ({"draft": ["ngram"]}, r"unknown draft \['ngram'\]"),
        ({"draft": "ngram", "draft_tokens": 0}, "at least 1, got 0"),
        ({"draft_tokens": 3}, "needs a draft"),
        ({"draft": NGramDraft(), "draft_tokens": 3}, "needs a draft"),
    ],
)
def test_invalid_drafts_are_rejected_before_the_first_piece(
    tiny_llm: Llama, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        tiny_llm.stream("hello", **options)


def command(*args: str) -> int:
    """Run a command in this process, which saves a second."""
    return main([*args, "--dtype", "float32", "--temp", "0", "--device", "cpu"])


def test_the_command_reports_how_many_drafted_tokens_were_accepted(
    capsys: pytest.CaptureFixture[str], tiny_gguf: Path
) -> None:
    args = ("generate", "-m", str(tiny_gguf), "hello the hello the", "--raw", "-n", "30", "--json")
    assert command(*args) == 0
    plain, quiet = capsys.readouterr()
    assert command(*args, "--draft", "ngram", "--draft-tokens", "4") == 0
    out, err = capsys.readouterr()
    found, stats = json.loads(out), json.loads(out)["stats"]
    assert found["tokens"] == json.loads(plain)["tokens"]
    assert stats["drafted_tokens"] >= stats["accepted_tokens"] > 0
    assert f"{stats['accepted_tokens']} of {stats['drafted_tokens']} drafted tokens accepted" in err
    assert "drafted" not in quiet


def test_a_model_drafts_for_a_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path
) -> None:
    outputs = []
    for more in ((), ("--draft", str(tiny_gguf))):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\nthe\n")))
        assert command("chat", "-m", str(tiny_gguf), "-n", "9", *more) == 0
        outputs.append(capsys.readouterr())
    assert outputs[0].out == outputs[1].out
    assert len(re.findall(r"[1-9] of [1-9]\d* drafted tokens accepted", outputs[1].err)) == 2


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--draft-tokens", "3"), 2, "needs a draft"),
        (("--draft", "ngram", "--draft-tokens", "0"), 2, "--draft-tokens must be an integer of at least 1, got 0"),
        (("--draft", "ngram", "--draft-tokens", "-1"), 2, "--draft-tokens must be an integer of at least 1, got -1"),
        (("--draft", "ngrams"), 1, "there is no file or folder 'ngrams'"),
        (("--draft", "{other}"), 2, "has 30 token ids, the model 320"),
    ],
)
def test_invalid_draft_options_are_errors_of_one_line(
    capsys: pytest.CaptureFixture[str], tiny_gguf: Path, tmp_path: Path, args: tuple[str, ...], code: int, message: str
) -> None:
    config = dataclasses.replace(tiny.CONFIG, vocab_size=30)
    other = tiny.write_gguf(tmp_path / "other.gguf", config, tiny.weights(config))
    given = [str(other) if arg == "{other}" else arg for arg in args]
    for start in (("generate", "hello"), ("chat",)):
        assert command(*start, "-q", "-m", str(tiny_gguf), *given) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert message in err
