"""What a run holds: linear in its length, as predicted, and refused in words where it would not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from llama.cache import FIRST_SLOTS, LARGEST_STEP, KVCache
from llama.errors import ContextLengthError
from llama.generate import prefill
from llama.model import Transformer

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINED = 64
PAIRS = tiny.CONFIG.head_dim // 2
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": TRAINED,
        "short_factor": [1.0] * PAIRS,
        "long_factor": [1.0 + i for i in range(PAIRS)],
        "factor": 8.0,
    },
}
scalings = pytest.mark.parametrize("kind", SCALINGS)


def model_with(kind: str, max_seq_len: int = 8192, **changes: Any) -> Transformer:
    config = dataclasses.replace(tiny.CONFIG, max_seq_len=TRAINED, rope_scaling=SCALINGS[kind], **changes)
    return tiny.model(config, max_seq_len=max_seq_len)


# ------------------------------------------------------------------------------------------------ prefill in chunks
@scalings
@pytest.mark.parametrize("length", [TRAINED - 1, TRAINED + 1, 300])
def test_a_prompt_in_chunks_gives_the_logits_and_keys_of_the_whole(kind: str, length: int) -> None:
    model, tokens = model_with(kind), tiny.random_tokens(length)
    whole = model.new_cache(length)
    expected = model(tokens, cache=whole)[0, -1]
    for chunk in (7, 64, length):
        cache = model.new_cache(length)
        got = prefill(model, tokens[0].tolist(), cache, chunk)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(cache.k, whole.k, rtol=0, atol=1e-4)
        torch.testing.assert_close(cache.v, whole.v, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_chunk_that_is_not_told_the_length_is_turned_otherwise(kind: str) -> None:
    """What the length is for: without it the first chunk takes the frequencies of a short text."""
    model, tokens = model_with(kind), tiny.random_tokens(300)
    whole = model(tokens)[0, -1]
    cache = model.new_cache(300)
    for start in range(0, 300, 50):
        h = model.hidden(tokens[:, start : start + 50], cache=cache)
    assert (model.output(h)[0, -1] - whole).abs().max() > 1e-2


class Largest(TorchDispatchMode):
    """Entries of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_flatten(out)[0]:
            if isinstance(value, torch.Tensor):
                self.entries = max(self.entries, value.numel())
        return out


@scalings
@pytest.mark.parametrize("cache_kind", ["model", "int8"])
def test_no_tensor_of_a_prefill_grows_faster_than_the_prompt(kind: str, cache_kind: str) -> None:
    model = model_with(kind)
    model.cache_kind = cache_kind
    entries = {}
    for length in (1024, 2048, 4096):
        cache = model.new_cache(length)
        with Largest() as largest:
            prefill(model, tiny.random_tokens(length)[0].tolist(), cache, 64)
        entries[length] = largest.entries
    assert entries[2048] <= 2 * entries[1024]
    assert entries[4096] <= 2 * entries[2048]
    assert entries[4096] < 4096 * 4096 / 16


# --------------------------------------------------------------------------------------------------- the KV cache
def held(cache: KVCache) -> int:
    return sum(buffer.nbytes for layer in cache.layers for buffer in layer.buffers)


def fill(cache: KVCache, end: int, step: int = 512) -> None:
    """Keys and values for all positions up to `end`, by the cache's own interface."""
    shape = cache.layers[0].buffers[0].shape
    while cache.length < end:
        count = min(step, end - cache.length)
        positions = cache.place(count)
        for layer in cache.layers:
            layer.update(*torch.ones(2, cache.batch, shape[1], count, shape[3]), positions)
        cache.commit()


@pytest.mark.parametrize("kind", ["model", "int8"])
def test_a_cache_never_has_more_slots_than_it_was_asked_for_and_few_that_are_empty(kind: str) -> None:
    cache = KVCache(1, 1, 2, max_len=30_000, kind=kind)
    for end in range(100, 30_001, 100):
        fill(cache, end)
        assert end <= cache.slots <= min(end + max(end, FIRST_SLOTS), end + LARGEST_STEP, 30_000)
    with pytest.raises(ContextLengthError, match=r"30000.*30001"):
        cache.reserve(30_001)


def test_a_prompt_reserves_its_slots_at_once() -> None:
    model, resized = model_with("default"), []
    cache = model.new_cache()
    for layer in cache.layers:
        layer.resize = lambda slots, old=layer.resize: (resized.append(slots), old(slots))[1]  # type: ignore[method-assign]
    prefill(model, tiny.random_tokens(3000)[0].tolist(), cache)
    assert resized == [3000] * len(cache.layers)
    assert cache.slots == 3000


def test_a_cache_whose_growth_broke_off_can_be_used_and_grown_again() -> None:
    model, tokens = model_with("default"), tiny.random_tokens(1300)[0].tolist()
    expected = prefill(model, tokens, model.new_cache())
    cache = model.new_cache()
    prefill(model, tokens[:1000], cache)
    last = cache.layers[-1]

    def fails(slots: int) -> None:
        raise RuntimeError("no memory")

    last.resize = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        cache.reserve(4000)
    del last.resize
    assert cache.slots == FIRST_SLOTS
    torch.testing.assert_close(prefill(model, tokens[1000:], cache), expected, rtol=0, atol=1e-4)
    assert {buffer.shape[2] for layer in cache.layers for buffer in layer.buffers} == {cache.slots}
