"""Composed tokenizer.json files: each is refused, or it writes a bounded amount of text in a bounded time.

The components are legal one by one. The oracle for a bound is the library, which runs them.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from llama.errors import TokenizerError
from llama.tokenizer.huggingface import HuggingFaceTokenizer
from llama.tokenizer.steps import LARGEST_GROWTH, growth

from . import small_vocabularies

SECONDS = 1.0  # processor time for a text of at most 400 characters

words = st.text("ab ▁éﬀ", max_size=4)
characters = st.sampled_from(
    ["a", "b", ".", r"\s", r"\p{L}", "[ab]", "[^a]", " ", r"\b", "$", "", "é", "a{1,3}+", "[a[b]]"]
)
patterns = st.recursive(
    characters,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "+?", "*+"])).map("(?:{0[0]}){0[1]}".format),
        st.tuples(st.sampled_from(["(?=", "(?!", "(?i:", "(?>", "("]), inner).map("{0[0]}{0[1]})".format),
    ),
    max_leaves=8,
)
pattern = st.one_of(words.map(lambda text: {"String": text}), patterns.map(lambda text: {"Regex": text}))


def step(kind: str, **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind), **fields})


scheme = st.sampled_from(["always", "first", "never"])
behavior = st.sampled_from(["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"])
normalizer = st.one_of(
    step("NFC"), step("NFD"), step("NFKC"), step("NFKD"), step("Lowercase"), step("Prepend", prepend=words),
    step("Strip", strip_left=st.booleans(), strip_right=st.booleans()),
    step("Replace", pattern=pattern, content=words), step("Replace", pattern=pattern, content=words),
)  # fmt: skip
pre_tokenizer = st.one_of(
    step("ByteLevel", add_prefix_space=st.booleans(), trim_offsets=st.booleans(), use_regex=st.booleans()),
    step("Metaspace", replacement=st.just("▁"), prepend_scheme=scheme, split=st.booleans()),
    step("Split", pattern=pattern, behavior=behavior, invert=st.booleans()),
    step("Digits", individual_digits=st.booleans()), step("Punctuation", behavior=behavior),
    step("Whitespace"), step("WhitespaceSplit"),
)  # fmt: skip


def sequences(steps: st.SearchStrategy[dict[str, Any]], name: str) -> st.SearchStrategy[Any]:
    return st.none() | st.lists(steps, max_size=6).map(lambda found: {"type": "Sequence", name: found})


flags = {name: st.booleans() for name in ("normalized", "lstrip", "rstrip", "single_word")}
added = st.lists(st.fixed_dictionaries({"content": words.filter(bool), "special": st.just(False), **flags}), max_size=3)
sources = st.fixed_dictionaries(
    {
        "normalizer": sequences(normalizer, "normalizers"),
        "pre_tokenizer": sequences(pre_tokenizer, "pretokenizers"),
        "added_tokens": added,
    }
)
texts = st.tuples(st.text("ab .▁é1ﷺﬀİ\u0390'\n", min_size=1, max_size=12), st.sampled_from([1, 30])).map(
    lambda pair: pair[0] * pair[1]
)


def check(composed: dict[str, Any], text: str, unigram: bool) -> None:
    source = {**json.loads(small_vocabularies.unigram_json() if unigram else small_vocabularies.tokenizer_json()), **composed}
    contents = {token["content"]: token for token in composed["added_tokens"]}
    source["added_tokens"] = [{**token, "id": 5000 + i} for i, token in enumerate(contents.values())]
    started = time.process_time()
    try:
        tokenizer = HuggingFaceTokenizer(json.dumps(source).encode(), "composed")
        factor = growth(source, "composed")
        ids = tokenizer.encode(text)
    except TokenizerError:
        ids, factor = [], 0.0
    assert time.process_time() - started < SECONDS
    assert factor <= LARGEST_GROWTH
    assert len(ids) <= 4 * factor * len(text)  # a character without a token is up to four bytes
    if factor:
        backend = Backend.from_str(json.dumps({**source, "added_tokens": []}))
        seen = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        if backend.pre_tokenizer is not None:
            seen = "".join(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(seen))
        assert len(seen) <= factor * len(text)


@pytest.mark.row("E13")
@given(composed=sources, text=texts, unigram=st.booleans())
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_composed_steps_are_refused_or_bounded(composed: dict[str, Any], text: str, unigram: bool) -> None:
    check(composed, text, unigram)


@pytest.mark.slow
@given(composed=sources, text=texts, unigram=st.booleans())
@settings(max_examples=5000, suppress_health_check=list(HealthCheck))
def test_many_composed_steps_are_refused_or_bounded(composed: dict[str, Any], text: str, unigram: bool) -> None:
    check(composed, text, unigram)
