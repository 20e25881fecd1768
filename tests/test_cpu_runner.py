"""KernelRunner computes what model.py computes, and leaves a model alone that was changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llama.cache import KVCache
from llama.checkpoint.weight import MemoryWeight
from llama.config import ModelConfig
from llama.engine import cpu_runner, kernels
from llama.engine.cpu_runner import KernelRunner
from llama.engine.linears import make_linear
from llama.errors import UsageError
from llama.model import RMSNorm, Runner, Transformer

from . import kernel_edges, tiny

pytestmark = pytest.mark.skipif(not kernels.ready(), reason="needs the C++ kernels")
BIASED = ModelConfig(64, 2, 4, 2, 16, 96, 320, norm_eps=1e-5, max_seq_len=256, attention_bias=True, mlp_bias=True)
QKV_BIASED = dataclasses.replace(tiny.WIDE, qkv_bias=True)
SOME_ROPE = dataclasses.replace(tiny.WIDE, n_layers=3, no_rope_layers=(0, 2))
CONFIGS = {
    "wide": tiny.WIDE, "small": tiny.CONFIG, "with biases": BIASED, "biases of q, k, v": QKV_BIASED,
    "layers without RoPE": SOME_ROPE, "norms of q and k": dataclasses.replace(QKV_BIASED, qk_norm=True),
}  # fmt: skip


def model(
    scheme: str | None, dtype: torch.dtype, config: ModelConfig = tiny.WIDE, rope: str = "complex"
) -> Transformer:
    """A random model with the layers that the loader chooses on a CPU."""
    net = tiny.model(config, attention="kernel", rope=rope).to(dtype)
    if scheme is not None:
        return tiny.quantized(net, scheme)
    for name, linear in [(n, m) for n, m in net.named_modules() if isinstance(m, nn.Linear)]:
        bias = None if linear.bias is None else linear.bias.detach()
        net.set_submodule(
            name, make_linear(MemoryWeight(linear.weight.detach()), torch.device("cpu"), linear.weight.dtype, bias)
        )
    return net


def logits(net: Transformer, runner: Runner) -> Tensor:
    """A prompt, single tokens and a further prompt for two texts; then a step at positions that differ."""
    net.runner = runner
    ids = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(1))
    cache = net.new_cache(64, batch=2)
    rows = [net(part, cache=cache) for part in ids.split([20, 1, 1, 18], 1)]
    cache = net.new_cache(64, batch=2, fixed=True)
    net(ids[:, :9], cache=cache)
    last = net(ids[:, 9:10], torch.tensor([[9], [4]]), cache)
    return torch.cat([*rows, last, net(ids)], 1)


@pytest.mark.parametrize(("scheme", "dtype", "rope", "config", "kind"), [
    *(("int4", torch.bfloat16, "complex", config, "model") for config in CONFIGS),
    *(("int8", torch.float32, "complex", config, "int8") for config in CONFIGS),
    ("int8", torch.float32, "complex", "wide", "model"), ("int8", torch.bfloat16, "real", "wide", "model"),
    ("int8", torch.bfloat16, "real", "layers without RoPE", "int8"),
    (None, torch.bfloat16, "complex", "with biases", "model"), (None, torch.bfloat16, "complex", "wide", "int8"),
    (None, torch.bfloat16, "real", "layers without RoPE", "model"), (None, torch.bfloat16, "real", "norms of q and k", "model"),
])  # fmt: skip
def test_the_logits_are_those_of_model_py(
    scheme: str | None, dtype: torch.dtype, rope: str, config: str, kind: str
) -> None:
    net = model(scheme, dtype, CONFIGS[config], rope)
    assert cpu_runner.supports(net)
    net.cache_kind = kind
    expected = logits(net, Runner())
    gap = (logits(net, KernelRunner(net)) - expected).norm() / expected.norm()
    # A last bit that differs can move x by one step of its 8 bits.
    assert float(gap) < (0.03 if dtype == torch.bfloat16 or scheme else 1e-5), float(gap)


def changed(net: Transformer, how: str) -> None:
    block: Any = net.layers[1]
    if how == "hook":
        block.feed_forward.w_down.register_forward_hook(lambda layer, inputs, y: 2 * y)
    elif how == "pre-hook":
        block.attention.register_forward_pre_hook(lambda layer, inputs: (2 * inputs[0], *inputs[1:]))
    else:
        net.set_submodule("layers.1.ffn_norm", nn.Identity())


@pytest.mark.parametrize("how", ["hook", "pre-hook", "replaced"])
def test_a_changed_model_runs_module_by_module(how: str) -> None:
    net = model("int4", torch.bfloat16)
    net.runner, ids = KernelRunner(net), torch.arange(7)[None]
    before = net(ids, cache=net.new_cache(9))
    changed(net, how)
    after = net(ids, cache=net.new_cache(9))
    assert not torch.equal(before, after)
    net.runner = Runner()
    assert torch.equal(after, net(ids, cache=net.new_cache(9)))


def test_a_hook_on_all_modules_of_the_process_is_called() -> None:
    net, seen = model("int4", torch.bfloat16), []
    net.runner = KernelRunner(net)
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: seen.append(module))
    try:
        net(torch.arange(3)[None])
    finally:
        handle.remove()
    assert set(net.layers[1].modules()) <= set(seen)
    seen.clear()
    net(torch.arange(3)[None])
    assert not seen


def test_weights_that_are_changed_in_place_are_used() -> None:
    net = model("int8", torch.bfloat16)
    net.runner, ids = KernelRunner(net), torch.arange(5)[None]
    before = net(ids, cache=net.new_cache(9))
    net.layers[0].attention.wk.tiles.zero_()
    after = net(ids, cache=net.new_cache(9))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("scheme", ["int4", None])
@pytest.mark.parametrize("cached", [True, False])
def test_all_layers_are_one_call(scheme: str | None, cached: bool) -> None:
    net = model(scheme, torch.bfloat16)
    net.runner = KernelRunner(net)
    with torch.profiler.profile() as profile:
        net(torch.arange(3)[None], cache=net.new_cache(9) if cached else None)
    calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith("clearllama::")}
    assert calls.pop("clearllama::layers") == 1
    assert set(calls) <= {"clearllama::linear_tiles", "clearllama::linear_bf16"}  # the output layer
    assert sum(calls.values()) == 1


# ------------------------------------------------------------------------------------------ what a user may change
def quantized() -> Transformer:
    """A model in int8 on the kernels."""
    net = model("int8", torch.bfloat16)
    net.runner = KernelRunner(net)
    return net


CHANGES: dict[str, Callable[[Any], object]] = {
    "packed weight": lambda net: setattr(
        net.layers[0].attention.wo, "tiles", torch.zeros_like(net.layers[0].attention.wo.tiles)
    ),
    "weight of a norm": lambda net: setattr(
        net.layers[1].ffn_norm, "weight", nn.Parameter(torch.zeros_like(net.norm.weight), False)
    ),
    "bias added": lambda net: setattr(net.layers[0].attention.wo, "bias", torch.ones_like(net.norm.weight)),
    "last norm": lambda net: setattr(net, "norm", RMSNorm(tiny.WIDE.dim, 1e-5).bfloat16()),
    "layer appended": lambda net: net.layers.append(net.layers[0]),
    "forward assigned": lambda net: setattr(net.layers[0].feed_forward, "forward", lambda x: x * 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_assignment_after_loading_has_its_effect(change: str) -> None:
    net, ids = quantized(), tiny.random_tokens(8, tiny.WIDE)
    before = net(ids)
    CHANGES[change](net)
    after = net(ids)
    net.runner = Runner()
    expected = net(ids)
    assert float((after - expected).abs().max()) < 0.1 < float((before - expected).abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_casting_a_loaded_model_is_an_error(dtype: torch.dtype) -> None:
    net = quantized().to(dtype)
    with pytest.raises(UsageError, match=r"was loaded in torch\.bfloat16 and can't be cast"):
        net(tiny.random_tokens(8, tiny.WIDE))


def test_casting_a_model_without_packed_weights_runs_its_modules() -> None:
    net, ids = model(None, torch.bfloat16), tiny.random_tokens(3, tiny.WIDE)
    net.runner = KernelRunner(net)
    found = net.float()(ids)
    net.runner = Runner()
    assert torch.equal(found, net(ids))


@pytest.mark.parametrize("runner", [KernelRunner, lambda net: Runner()], ids=["kernels", "modules"])
def test_one_row_of_positions_stands_for_all(runner: Callable[[Transformer], Runner]) -> None:
    net, ids = quantized(), tiny.random_tokens(9, tiny.WIDE, batch=3)
    net.runner = runner(net)
    for at in (torch.arange(9)[None], torch.arange(9).expand(3, 9)):
        torch.testing.assert_close(net(ids, at), net(ids), rtol=0, atol=0.1)
        torch.testing.assert_close(net(ids, at, net.new_cache(batch=3)), net(ids), rtol=0, atol=0.1)


@pytest.mark.parametrize("sizes", [(2, 1, 32), (2, 2, 16), (1, 2, 32), (3, 2, 32)], ids=str)
def test_a_cache_of_another_model_is_refused(sizes: tuple[int, int, int]) -> None:
    net, ids = quantized(), tiny.random_tokens(9, tiny.WIDE)
    for cache in (KVCache(*sizes, 128, dtype=torch.bfloat16), KVCache(2, 2, 32, 128)):
        with pytest.raises(UsageError, match=r"the cache is for a model with .* use model.new_cache\(\)"):
            net(ids, cache=cache)
        assert cache.length == 0


@pytest.mark.parametrize("length", [3, 20])
@torch.enable_grad()
def test_gradients_are_those_of_the_modules_or_an_error(length: int) -> None:
    ids, found = tiny.random_tokens(length, tiny.WIDE), []
    for dtype in (torch.bfloat16, torch.float32):
        net = model(None, torch.bfloat16).to(dtype)
        net.runner = KernelRunner(net)
        weight = net.layers[0].feed_forward.w_up.weight.requires_grad_(True)
        found.append(torch.autograd.grad(net(ids)[0, -1].logsumexp(-1), weight)[0].float())
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.05
    net = quantized()
    net.layers[0].attention_norm.weight.requires_grad_(True)
    with pytest.raises(UsageError, match="layers with packed weights have no gradients"):
        net(ids)


@pytest.mark.parametrize("shape", [(1, 0), (0, 5)])
def test_no_tokens_give_no_logits(shape: tuple[int, int]) -> None:
    assert quantized()(torch.zeros(shape, dtype=torch.long)).shape == (*shape, tiny.WIDE.vocab_size)


# ------------------------------------------------------------------------------------------------ the whole operator
def test_all_layers_at_the_edges_of_their_inputs() -> None:
    """Sizes, formats, caches, biases, and norms of heads; tests/test_sanitized.py runs the same with sanitizers."""
    kernel_edges.layers()


def test_rows_of_an_embedding_are_those_of_the_unpacked_weight() -> None:
    kernel_edges.embeddings()
