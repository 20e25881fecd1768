"""The decoder: properties that hold for any weights, and logits equal to transformers' on small random models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama.attention import reference, reference_weights, sdpa
from llama.cache import KVCache
from llama.config import ModelConfig
from llama.errors import ConfigError, ContextLengthError, UsageError
from llama.generate import generate, prefill
from llama.generation.batch import Batch, Request, TokenEvent
from llama.generation.speculative import NGramDraft, speculate
from llama.model import RMSNorm, Transformer
from llama.rope import to_layout
from llama.sampling import SamplingParams

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = {"rtol": 0, "atol": 1e-4}


# ------------------------------------------------------------------------------------------------------ attention
@pytest.mark.parametrize(("T", "S", "H", "KV"), [(1, 1, 4, 4), (1, 9, 6, 2), (5, 9, 6, 2), (9, 9, 4, 1), (3, 40, 3, 3)])
def test_sdpa_equals_the_reference_formula(T: int, S: int, H: int, KV: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, H, T, 16), torch.randn(2, KV, S, 16), torch.randn(2, KV, S, 16)
    mask = torch.arange(S) <= torch.arange(S - T, S)[:, None]
    for m in (None, mask, mask.expand(2, 1, T, S)):
        torch.testing.assert_close(sdpa(q, k, v, m), reference(q, k, v, m), rtol=0, atol=1e-5)


def test_a_group_of_query_heads_uses_one_key_value_head() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 6, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    grouped = reference(q, k, v)
    for h in range(6):
        alone = reference(q[:, h : h + 1], k[:, h // 3 : h // 3 + 1], v[:, h // 3 : h // 3 + 1])
        torch.testing.assert_close(grouped[:, h : h + 1], alone)


def test_attention_weights_are_a_distribution_over_the_unmasked_keys() -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    weights = reference_weights(q, k, torch.ones(4, 4).tril().bool())
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 4))
    assert float(weights.triu(1).abs().max()) == 0


def runs(net: Transformer) -> tuple[list[Tensor], list[list[int]]]:
    """The logits of passes with and without a mask and a cache, and the tokens of every way to generate."""
    prompts, params = [[5, 6, 7, 5, 6], [9]], SamplingParams(max_new_tokens=6)
    tokens = tiny.random_tokens(5, net.config, batch=2)
    logits = [net(tokens), net(tokens[:, :1])]
    for fixed in (False, True):
        cache = net.new_cache(batch=2, fixed=fixed)
        logits += [net(tokens, cache=cache), net(tokens[:, :1], cache=cache), net(tokens[:, :2], cache=cache)]
    caches = (None, net.new_cache(fixed=True))
    answers = [[token.id for token in generate(net, prompts[0], params, cache=cache)] for cache in caches]
    answers.append([token.id for token in speculate(net, prompts[0], params, NGramDraft())])
    events = list(Batch(net, [Request(prompt, params) for prompt in prompts], slots=2))
    for number in range(2):
        mine = [event for event in events if isinstance(event, TokenEvent) and event.number == number]
        answers.append([event.token.id for event in mine])
    return logits, answers


@pytest.mark.parametrize("attention", ["sdpa", "cpu"])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_no_result_depends_on_the_memory_layout_that_attention_returns(
    n_kv_heads: int, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = tiny.model(dataclasses.replace(tiny.CONFIG, n_kv_heads=n_kv_heads), attention=attention)
    expected, plain = runs(net), F.scaled_dot_product_attention

    def memory_efficient(q: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return (B, H, T, D) in the memory layout of CUDA's memory-efficient kernel: (B, T, H, D)."""
        y = plain(q, *args, **options)
        return torch.empty(y.transpose(1, 2).shape, dtype=y.dtype).copy_(y.transpose(1, 2)).transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", memory_efficient)
    found = runs(net)
    assert found[1] == expected[1]
    assert found[1][0] == found[1][1] == found[1][2] == found[1][3]
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)


class Strided(nn.Module):
    """A layer whose result lies in memory column by column, or with a gap of one entry before each row."""

    def __init__(self, inner: nn.Module, by_columns: bool):
        super().__init__()
        self.inner, self.by_columns, self.out_features = inner, by_columns, inner.out_features

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y.mT.contiguous().mT if self.by_columns else F.pad(y, (1, 0))[..., 1:]


@pytest.mark.parametrize("rope", ["complex", "real", "half"])
@pytest.mark.parametrize("by_columns", [True, False])
def test_no_result_depends_on_the_memory_layout_that_a_linear_layer_returns(rope: str, by_columns: bool) -> None:
    net, tokens = tiny.model(rope=rope), tiny.random_tokens(7, batch=2)
    expected = net(tokens)
    for name, layer in [(name, layer) for name, layer in net.named_modules() if isinstance(layer, nn.Linear)]:
        net.set_submodule(name, Strided(layer, by_columns))
    for cache in (None, net.new_cache(batch=2)):
        torch.testing.assert_close(net(tokens, cache=cache), expected, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- cache
def test_a_cache_places_writes_commits_and_trims() -> None:
    cache = KVCache(1, 2, 4, max_len=8)
    first = cache.place(3)
    assert first.tolist() == [0, 1, 2]
    k = torch.randn(1, 2, 3, 4)
    keys, _ = cache.layers[0].update(k, k, first)
    assert torch.equal(keys, k)
    assert cache.length == 0  # a pass that fails here has not changed the length
    cache.commit()
    assert cache.place(2).tolist() == [3, 4]
    cache.trim(1)
    assert cache.place(2).tolist() == [1, 2]
    with pytest.raises(ContextLengthError, match="room for 8"):
        cache.place(8)
    with pytest.raises(ValueError, match="trimmed"):
        cache.trim(5)


def test_a_cache_rejects_positions_that_leave_a_gap() -> None:
    model, tokens = tiny.model(), tiny.random_tokens(9)
    with pytest.raises(ValueError, match="gap"):
        model(tokens, torch.arange(5, 14), model.new_cache())
    cache = model.new_cache()
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="next free one is 9"):
        model(tokens, torch.arange(10, 19), cache)
    with pytest.raises(ValueError, match="gap"):
        model(tokens[:, :2], torch.tensor([9, 11]), cache)
    torch.testing.assert_close(model(tokens[:, :2], torch.tensor([7, 8]), cache)[0, 0], model(
        torch.cat((tokens[:, :7], tokens[:, :1]), 1))[0, -1], **TOLERANCE)  # fmt: skip
    cache.trim(4)
    with pytest.raises(ValueError, match="next free one is 4"):
        model(tokens[:, :1], torch.tensor([5]), cache)
    rows = model.new_cache(batch=2)
    model(torch.cat((tokens, tokens)), cache=rows)
    model(tokens[0, :2, None], torch.tensor([[9], [5]]), rows)
    with pytest.raises(ValueError, match="next free one is 9"):
        model(tokens[0, :2, None], torch.tensor([[10], [10]]), rows)


def test_rows_of_different_lengths_need_explicit_positions() -> None:
    model, tokens = tiny.model(), tiny.random_tokens(4, batch=2)
    cache = model.new_cache(batch=2)
    model(tokens[:, :2], cache=cache)
    model(tokens[:, 2:3], torch.tensor([[2], [1]]), cache)
    with pytest.raises(ValueError, match=r"\[3, 2\]"):
        model(tokens[:, 3:], cache=cache)
    model(tokens[:, 3:], torch.tensor([[3], [2]]), cache)


def test_tokens_without_a_batch_dimension_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"\(B, T\)"):
        tiny.model()(torch.tensor([1, 2]))


def test_a_cache_keeps_its_contents_when_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama.generate.prompt_chunk", lambda device: 300)
    config = dataclasses.replace(tiny.CONFIG, max_seq_len=5000)
    model, tokens = tiny.model(config), tiny.random_tokens(1100)
    cache = model.new_cache()
    slots = cache.slots
    grown = prefill(model, tokens[0].tolist(), cache)
    assert slots < 1100 <= cache.slots < 5000
    torch.testing.assert_close(grown, model(tokens)[0, -1], **TOLERANCE)


# ---------------------------------------------------------------------------------------------------------- model
def test_rms_norm_equals_the_formula_in_float64() -> None:
    norm = RMSNorm(64, 1e-5)
    norm.weight.data = torch.randn(64)
    x = torch.randn(3, 64)
    d = x.double()
    expected = d / (d.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_squares_in_float32() -> None:
    """The square of 300 overflows in float16."""
    out = RMSNorm(8, 1e-5).half()(torch.full((1, 8), 300.0, dtype=torch.float16))
    torch.testing.assert_close(out, torch.ones(1, 8, dtype=torch.float16))


@pytest.mark.parametrize("attention", tiny.FUNCTIONS)
def test_logits_are_the_same_in_every_form_of_rope(attention: str) -> None:
    tokens = tiny.random_tokens(50, batch=2)
    expected = tiny.model()(tokens)
    for form in ("complex", "real", "half"):
        model = tiny.model(rope=form, attention=attention)
        state = tiny.weights()
        layout = model.rope.layout
        model.load_state_dict({n: to_layout(n, t, 16, "interleaved", layout) for n, t in state.items()})
        torch.testing.assert_close(model(tokens), expected, **TOLERANCE)


def test_logits_with_a_cache_equal_those_without_at_every_position() -> None:
    model, tokens = tiny.model(), tiny.random_tokens(40)
    expected = model(tokens)  # (1, 40, V)
    cache = model.new_cache()
    for t in range(40):
        torch.testing.assert_close(model(tokens[:, t : t + 1], cache=cache)[:, 0], expected[:, t], **TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_prefill_in_chunks_returns_the_same_logits(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama.generate.prompt_chunk", lambda device: chunk)
    model, tokens = tiny.model(), tiny.random_tokens(40)
    logits = prefill(model, tokens[0].tolist(), model.new_cache())
    torch.testing.assert_close(logits, model(tokens)[0, -1], **TOLERANCE)


def test_logits_do_not_depend_on_later_tokens() -> None:
    model, tokens = tiny.model(), tiny.random_tokens(20)
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % tiny.CONFIG.vocab_size
    a, b = model(tokens), model(changed)
    torch.testing.assert_close(a[:, :12], b[:, :12], **TOLERANCE)
    assert not torch.allclose(a[:, 12], b[:, 12], atol=1e-2)


def test_logits_do_not_change_when_all_positions_shift() -> None:
    """RoPE is relative: the same text 100 positions later has the same logits."""
    model, tokens = tiny.model(), tiny.random_tokens(20)
    torch.testing.assert_close(model(tokens, torch.arange(100, 120)), model(tokens), rtol=0, atol=1e-3)


def test_rows_of_a_batch_may_have_different_positions() -> None:
    model = tiny.model()
    short, long = tiny.random_tokens(5, seed=1), tiny.random_tokens(9, seed=2)
    cache = model.new_cache(batch=2)
    model(torch.cat((torch.cat((short, short[:, :4]), 1), long)), cache=cache)
    # Row 0 continues at position 5 and overwrites its padding; row 1 continues at position 9.
    step = model(torch.tensor([[7], [8]]), torch.tensor([[5], [9]]), cache)
    torch.testing.assert_close(step[0, 0], model(torch.cat((short, torch.tensor([[7]])), 1))[0, -1], **TOLERANCE)
    torch.testing.assert_close(step[1, 0], model(torch.cat((long, torch.tensor([[8]])), 1))[0, -1], **TOLERANCE)


def test_an_interrupted_pass_does_not_change_the_length_of_the_cache() -> None:
    model, tokens = tiny.model(), tiny.random_tokens(12)
    cache = model.new_cache()
    model(tokens[:, :6], cache=cache)
    hook = model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(tokens[:, 6:], cache=cache)
    hook.remove()
    assert cache.length == 6
    torch.testing.assert_close(model(tokens[:, 6:], cache=cache), model(tokens)[:, 6:], **TOLERANCE)


def test_positions_outside_the_context_are_errors() -> None:
    model = tiny.model()
    with pytest.raises(ContextLengthError):
        model(tiny.random_tokens(257))
    with pytest.raises(ContextLengthError):
        model(tiny.random_tokens(1), torch.tensor([256]))
    with pytest.raises(ValueError, match="negative"):
        model(tiny.random_tokens(1), torch.tensor([-1]))


@pytest.mark.parametrize("shape", [(2,), (3, 4), (1, 5), (2, 1, 4), ()])
def test_positions_of_another_shape_are_errors(shape: tuple[int, ...]) -> None:
    model, tokens = tiny.model(), tiny.random_tokens(4, batch=2)
    for cache in (None, model.new_cache(batch=2)):
        with pytest.raises(ValueError, match=r"positions must be \(T,\) or \(B, T\), got .* for tokens \(2, 4\)"):
            model(tokens, torch.zeros(shape, dtype=torch.long), cache)
    for right in (torch.arange(4), torch.arange(4)[None], torch.arange(4).expand(2, 4)):
        torch.testing.assert_close(model(tokens, right), model(tokens), **TOLERANCE)


@pytest.mark.parametrize("positions", [[3, 3], [0, 2, 1, 2], [[0, 1], [1, 1]]])
@pytest.mark.parametrize("cached", [True, False])
def test_positions_that_occur_twice_in_a_row_are_errors(positions: list[Any], cached: bool) -> None:
    model, given = tiny.model(), torch.tensor(positions)
    tokens = tiny.random_tokens(given.shape[-1], batch=2)
    cache = model.new_cache(batch=2) if cached else None
    if cache is not None:
        model(tiny.random_tokens(4, batch=2), cache=cache)
    with pytest.raises(UsageError, match="positions must be distinct in each row"):
        model(tokens, given, cache)
    both = torch.stack((torch.arange(2), torch.arange(2)))  # rows may have the same positions
    assert bool(model(tokens[:, :2], both, cache).isfinite().all())


def test_an_unknown_attention_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"'flash'.*sdpa, reference"):
        Transformer(tiny.CONFIG, attention="flash")


def test_a_pass_on_meta_leaves_the_table_as_it_is() -> None:
    model = tiny.model()
    model.rope.freqs_cis(torch.arange(5, device="meta"), 5)
    assert model.rope.freqs_cis(torch.arange(5), 5).device.type == "cpu"


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 5), (3, 1)])
def test_a_batch_that_is_not_the_cache_s_is_refused_before_anything_is_written(rows: int, length: int) -> None:
    model = tiny.model()
    cache = model.new_cache(batch=rows)
    with pytest.raises(UsageError, match=rf"a batch of {rows}, not 2; use new_cache\(batch=2\)"):
        model(tiny.random_tokens(length, batch=2), cache=cache)
    assert (cache.length, any(map(torch.any, tiny.contents(cache)))) == (0, False)


def test_the_rope_table_is_not_cast_with_the_model() -> None:
    model = tiny.model().to(torch.bfloat16)
    assert all(t.dtype in (torch.complex64, torch.float32) for t in model.rope.table)
    assert "rope" not in " ".join(model.state_dict())


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "kv", "head_dim", "tied", "scaling"),
    [
        (4, 4, 16, False, None),
        (8, 2, 16, True, None),
        (4, 1, 32, False, None),
        (4, 2, 16, False, {"rope_type": "linear", "factor": 2.0}),
        (4, 2, 16, True, LLAMA3),
    ],
)
def test_logits_equal_those_of_transformers(
    heads: int, kv: int, head_dim: int, tied: bool, scaling: dict[str, object] | None
) -> None:
    config = ModelConfig(
        dim=64, n_layers=3, n_heads=heads, n_kv_heads=kv, head_dim=head_dim, hidden_dim=112, vocab_size=200,
        norm_eps=1e-5, rope_theta=5000.0, rope_scaling=scaling, max_seq_len=512, tie_embeddings=tied,
    )  # fmt: skip
    theirs, tokens = tiny.transformers_model(config), torch.randint(200, (2, 300))
    assert sum(p.numel() for p in theirs.parameters()) == config.n_params
    torch.testing.assert_close(tiny.model(config)(tokens), theirs(tokens).logits, rtol=0, atol=2e-4)


# --------------------------------------------------------------------------------------------------------- config
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "dim must be an integer from 1 to"),
        ({"dim": -1}, "dim must be an integer from 1 to"),
        ({"dim": 2**40}, "dim must be an integer from 1 to"),
        ({"dim": 4096.0}, r"dim .* got 4096\.0"),
        ({"dim": "4096"}, "dim .* got '4096'"),
        ({"dim": True}, "dim .* got True"),
        ({"dim": None}, "dim .* got None"),
        ({"n_kv_heads": 3}, "4 and 3"),
        ({"head_dim": 15}, "even"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": "1e4"}, "rope_theta .* got '1e4'"),
    ],
)
def test_invalid_configs_are_errors_that_name_the_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(tiny.CONFIG, **change)


def test_parameter_counts_are_those_of_the_official_models() -> None:
    llama2_7b = ModelConfig(4096, 32, 32, 32, 128, 11008, 32000)
    llama3_8b = ModelConfig(4096, 32, 32, 8, 128, 14336, 128256)
    llama32_1b = ModelConfig(2048, 16, 32, 8, 64, 8192, 128256, tie_embeddings=True)
    counts = [c.n_params for c in (llama2_7b, llama3_8b, llama32_1b)]
    assert counts == [6_738_415_616, 8_030_261_248, 1_235_814_400]
    assert llama3_8b.kv_cache_bytes(1, 2) == 131072
