"""A model on several devices has the logits that it has on one. away.py simulates the devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llama import generate
from llama.cache import KINDS
from llama.checkpoint import open_checkpoint
from llama.cli import main
from llama.config import ModelConfig
from llama.engine import kernels, placement
from llama.engine.linears import (
    BlockEmbedding,
    BlockLinear,
    FewRowsLinear,
    TileEmbedding,
    TileLinear,
    quantize_,
)
from llama.engine.placement import PlacedRunner, Placement, pick_placement, place, spread
from llama.errors import UsageError
from llama.generation import speculative
from llama.generation.speculative import NGramDraft, speculate
from llama.loader import build
from llama.model import Transformer
from llama.sampling import SamplingParams

from . import away, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = replace(tiny.CONFIG, n_layers=4)
CPU = torch.device("cpu")
CONFIGS = {
    "grouped": CONFIG,
    "tied": replace(CONFIG, tie_embeddings=True),
    "biases": replace(CONFIG, attention_bias=True, mlp_bias=True),
    "some without RoPE": replace(CONFIG, qkv_bias=True, no_rope_layers=(1, 3)),
    "by length": replace(CONFIG, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
}


def devices(letters: str) -> list[torch.device]:
    """Return one device for each letter: 'c01' -> cpu, away:0, away:1."""
    return [CPU if letter == "c" else torch.device("away", int(letter)) for letter in letters]


@pytest.fixture(autouse=True)
def _away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the devices away:0 and so on, and use the CPU's random generator for them."""
    away.register()
    known = placement.pick_device

    def pick(name: Any = None) -> torch.device:
        found = torch.device(name) if name is not None and str(name).startswith("away") else None
        return known(name) if found is None else torch.device("away", found.index or 0)

    random_generator = generate.random_generator
    monkeypatch.setattr(placement, "pick_device", pick)
    for module in (generate, speculative):
        monkeypatch.setattr(module, "random_generator", lambda params, device: random_generator(params, CPU))


def placed(config: ModelConfig, letters: str, **options: Any) -> Transformer:
    """Return a model with one letter per layer; the embedding is with the first layer, the output with the last."""
    found = devices(letters)
    net = tiny.model(config, **options)
    net.runner = place(net, Placement(found[0], tuple(found), found[-1]))
    return net


def raw(x: Tensor) -> Tensor:
    """Return a tensor on the CPU."""
    return x.raw if isinstance(x, away.Away) else x


# --------------------------------------------------------------------------------------------------- the same logits
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("where", ["cc00", "c000", "0011", "0123", "00cc", "c0c0", "0000"])
def test_logits_are_bitwise_equal_to_those_of_one_device(kind: str, where: str) -> None:
    config = CONFIGS[kind]
    tokens = tiny.random_tokens(12, config, batch=2)
    expected = tiny.model(config)(tokens)
    net = placed(config, where)
    logits = net(tokens.to(devices(where)[-1]))
    assert logits.device == devices(where)[-1]
    assert torch.equal(raw(logits), expected)
    if where != "0000":  # the tokens may be on another device
        assert torch.equal(raw(net(tokens)), expected)


@pytest.mark.parametrize("form", ["complex", "real", "half"])
@pytest.mark.parametrize("cache", KINDS)
@pytest.mark.parametrize("fixed", [False, True])
def test_logits_with_a_cache_are_bitwise_equal_to_those_of_one_device(form: str, cache: str, fixed: bool) -> None:
    plain, net = tiny.model(CONFIG, rope=form), placed(CONFIG, "cc01", rope=form)
    tokens = tiny.random_tokens(20, CONFIG)
    outs = []
    for model in (plain, net):
        model.runner.cache_kind, model.runner.fixed_cache = cache, fixed
        used = model.new_cache(32)
        cuts = [(0, 7), (7, 18), (18, 19), (19, 20)]
        outs.append([raw(model(tokens[:, a:b].to(used.device), cache=used)) for a, b in cuts])
        used.trim(5)
        outs[-1].append(raw(model(tokens[:, 5:9].to(used.device), cache=used)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outs, strict=True))
    tolerance = 0.2 if cache == "int8" else 1e-4
    torch.testing.assert_close(torch.cat(outs[1][:4], 1), raw(net(tokens)), rtol=tolerance, atol=tolerance)


def test_rows_of_a_batch_may_have_different_positions() -> None:
    tokens = tiny.random_tokens(3, CONFIG, batch=2)
    positions = torch.tensor([[0, 1, 2], [0, 0, 1]])
    plain, net = tiny.model(CONFIG), placed(CONFIG, "c001")
    expected = plain(tokens, positions, plain.new_cache(8, batch=2))
    cache = net.new_cache(8, batch=2)
    assert torch.equal(raw(net(tokens.to(cache.device), positions.to(cache.device), cache)), expected)


def test_generated_tokens_are_those_of_one_device() -> None:
    params = SamplingParams(max_new_tokens=24, repetition_penalty=1.1)
    prompt = tiny.random_tokens(9, CONFIG)[0].tolist()
    expected = [token.id for token in generate.generate(tiny.model(CONFIG), prompt, params)]
    net = placed(CONFIG, "cc01")
    assert [token.id for token in generate.generate(net, prompt, params)] == expected
    greedy, repeated = SamplingParams(max_new_tokens=24), prompt * 3
    expected = [token.id for token in generate.generate(tiny.model(CONFIG), repeated, greedy)]
    assert [token.id for token in speculate(net, repeated, greedy, NGramDraft())] == expected


# --------------------------------------------------------------------------------------- devices of weights and caches
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("where", ["cc00", "0123"])
def test_the_weights_and_the_cache_of_a_layer_are_on_its_device(where: str, tied: bool) -> None:
    net = placed(replace(CONFIG, tie_embeddings=tied), where)
    found = devices(where)
    for name, weight in net.named_parameters():
        part = name.split(".")
        expected = found[int(part[1])] if part[0] == "layers" else found[0 if part[0] == "tok_embeddings" else -1]
        assert weight.device == expected, name
    if tied:
        assert torch.equal(raw(net.tok_embeddings.weight), raw(net.output.weight))
    cache = net.new_cache(2000)
    net(tiny.random_tokens(100, CONFIG).to(found[-1]), cache=cache)
    cache.place(1500)  # grows
    for layer, device in zip(cache.layers, found, strict=True):
        assert {buffer.device for buffer in layer.buffers} == {device}
    assert cache.slots >= 1500
    assert cache.device == found[-1] == net.norm.weight.device
    assert cache.k.shape[0] == cache.v.shape[0] == 4


@pytest.mark.parametrize(
    ("where", "borders"), [("cc00", ["c0"]), ("0011", ["01"]), ("0123", ["01", "12", "23"]), ("c0c0", ["c0", "0c", "c0"])]
)  # fmt: skip
def test_only_the_hidden_state_is_copied_between_the_devices_of_adjacent_layers(where: str, borders: list[str]) -> None:
    """The tokens are copied once to the first device; positions, freqs_cis and mask once to each group of layers."""
    net = placed(CONFIG, where)
    last = devices(where)[-1]
    cache = net.new_cache(32)
    for tokens, masked in ((tiny.random_tokens(6, CONFIG), True), (tiny.random_tokens(1, CONFIG), False)):
        fed = tokens.to(last)
        net.rope.freqs_cis(torch.arange(4).to(last), 4)  # the table stays on the device of its first use
        B, T = tokens.shape
        with away.counted() as moves:
            net(fed, cache=cache)
        names = {str(device): letter for device, letter in zip(devices(where), where, strict=True)}
        copied = [names[a] + names[b] for a, b, shape in moves if shape == (B, T, CONFIG.dim)]
        assert copied == borders
        others = [(names[b], shape) for _, b, shape in moves if shape != (B, T, CONFIG.dim)]
        assert others.count((where[0], (B, T))) == 1  # the tokens, which are on the last device
        kinds = {(T,), (T, CONFIG.head_dim // 2), *([(T, cache.end)] if masked else [])}  # positions, freqs_cis, mask
        groups = [letter for i, letter in enumerate(where) if letter != where[-1] and where[i - 1 : i] != letter]
        assert sorted(others) == sorted([(where[0], (B, T))] + [(group, kind) for group in groups for kind in kinds])


def test_the_simulated_devices_reject_mixed_tensors() -> None:
    """The tests above rely on this."""
    here, there, yonder = torch.ones(2, 2), torch.ones(2, 2).to("away:0"), torch.ones(2, 2).to("away:1")
    for pair in ((here, there), (there, here), (there, yonder)):
        for work in (torch.add, torch.matmul, torch.nn.functional.linear):
            with pytest.raises(RuntimeError, match="was given tensors on"):
                work(*pair)
    with pytest.raises(RuntimeError, match="was given tensors on"):
        there.index_copy_(0, torch.tensor([0]), torch.ones(1, 2).to("away:0"))
    with pytest.raises(RuntimeError, match="was given tensors on"):
        tiny.model(CONFIG).to("away:0")(tiny.random_tokens(3, CONFIG))


@pytest.mark.parametrize("where", ["cc00", "0011", "00cc"])
def test_no_weight_is_moved_to_two_devices(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moved parameter stays the same object, so moving a tied weight would move both of its layers."""
    moved: dict[int, set[str]] = {}

    def to(module: nn.Module, device: torch.device) -> nn.Module:
        for weight in module.parameters():
            moved.setdefault(id(weight), set()).add(str(device))
        return module

    monkeypatch.setattr(nn.Module, "to", to)
    net = placed(replace(CONFIG, tie_embeddings=True), where)
    assert {id(weight) for weight in net.parameters()} == set(moved)
    assert all(len(targets) == 1 for targets in moved.values())
    assert torch.equal(net.tok_embeddings.weight, net.output.weight)


@pytest.mark.skipif(not kernels.ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("tied", [False, True])
def test_only_layers_on_the_cpu_keep_the_quantized_blocks_of_a_file(tmp_path: Path, tied: bool) -> None:
    config = replace(tiny.WIDE, n_layers=4, tie_embeddings=tied)
    path = tiny.write_gguf(
        tmp_path / "wide.gguf", config, quantization="Q8_0", without=("output.weight",) if tied else ()
    )
    net = build(open_checkpoint(path), "away:0", "bfloat16", gpu_layers=2, fast=True)
    for i, block in enumerate(net.layers):
        assert type(block.attention.wq) is (TileLinear if i < 2 else nn.Linear)
    assert type(net.output) is nn.Linear
    assert type(net.tok_embeddings) is TileEmbedding
    tokens = tiny.random_tokens(9, config)
    expected = build(open_checkpoint(path), "cpu", "float32")(tokens)
    assert (raw(net(tokens)) - expected).norm() / expected.norm() < 0.05


def test_a_model_on_one_device_has_the_plain_runner() -> None:
    net = placed(CONFIG, "0000")
    assert not isinstance(net.runner, PlacedRunner)
    assert {layer.buffers[0].device for layer in net.new_cache(8).layers} == {torch.device("away:0")}
    assert placement.describe_devices(net) == "away:0"
    assert (
        placement.describe_devices(placed(CONFIG, "cc01"))
        == "cpu (layers 0 to 1) and away:0 (2 to 2) and away:1 (3 to 3)"
    )


# ------------------------------------------------------------------------------------------------- choosing devices
def test_gpu_layers_are_the_last_layers_and_the_output() -> None:
    gpu = torch.device("away:0")
    for count in range(1, 4):
        found = pick_placement(CONFIG, "away:0", count)
        assert found == Placement(CPU, (CPU,) * (4 - count) + (gpu,) * count, gpu)
    for count in (4, 5, 1000):
        assert pick_placement(CONFIG, "away:0", count) == Placement(gpu, (gpu,) * 4, gpu)
    for device in (None, "cpu", "away:0", "away:1"):
        assert pick_placement(CONFIG, device, 0) == Placement(CPU, (CPU,) * 4, CPU)
    assert pick_placement(CONFIG, "cpu").single


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "llama-2-70b", "smollm2-135m-instruct"])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_layers_are_divided_by_bytes_as_evenly_as_possible(name: str, count: int) -> None:
    from llama.hub.families import official
    from llama.weights import expected_shapes

    config = official()[name]
    found = spread(config, devices("01234567"[:count]))
    assert list(found.layers) == sorted(found.layers, key=lambda device: device.index)
    assert (found.embedding.index, found.output.index) == (0, count - 1)
    loads, layer = [0] * count, 0
    for tensor, shape in expected_shapes(config).items():
        size = torch.Size(shape).numel()
        loads[found.device_of(tensor).index] += size
        layer += size if tensor.startswith("layers.0.") else 0
        if config.tie_embeddings and tensor.startswith("tok_embeddings"):
            loads[-1] += size
    with_layers = [size for i, size in enumerate(loads) if devices("01234567")[i] in found.layers]
    assert max(with_layers) - layer <= min(loads)  # moving a layer from the fullest device would not help


def test_invalid_devices_and_gpu_layers_are_rejected() -> None:
    for value in (-1, True, 1.5, "3"):
        with pytest.raises(UsageError, match="gpu_layers must be an integer of at least 0"):
            pick_placement(CONFIG, "away:0", value)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"available: .*cpu"):
        pick_placement(CONFIG, "cpu", 2)
    with pytest.raises(UsageError, match="2 were named"):
        pick_placement(CONFIG, "away:0,away:1", 2)
    for text in ("away:0,away:0", "away,away:0", "cpu,cpu"):
        with pytest.raises(UsageError, match="named twice"):
            pick_placement(CONFIG, text)
    with pytest.raises(UsageError, match="5 devices for 4 layers"):
        pick_placement(CONFIG, "cpu,away:0,away:1,away:2,away:3")
    for text in ("", ",", "cpu,", "cpu,nonsense", "cpu,away:0,tpu:1"):
        with pytest.raises(UsageError):
            pick_placement(CONFIG, text)
    assert pick_placement(CONFIG, " cpu , away:1 ").output == torch.device("away:1")
    assert pick_placement(CONFIG, [CPU, torch.device("away:1")]).layers[0] == CPU


@pytest.mark.skipif(torch.accelerator.is_available() and torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_layers_without_a_gpu_are_an_error_of_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tiny.write_gguf(tmp_path / "small.gguf"))
    command = ["generate", "hello", "-m", path, "-n", "4", "--raw", "--temp", "0", "--gpu-layers"]
    assert main([*command, "10"]) == 2
    out, err = capfd.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert "--gpu-layers 10 requires a GPU, but this machine has none (available: cpu)" in err
    assert main([*command, "0"]) == 0
    answer = capfd.readouterr().out
    assert main(command[:-1]) == 0
    assert capfd.readouterr().out == answer
    for words in (["trace", "hello"], ["explain"]):
        assert main([*words, "-m", path, "--gpu-layers", "0"]) == 2
        assert "on one device" in capfd.readouterr().err


# ---------------------------------------------------------------------------------------------------------- loading
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("gpu_layers", [0, 1, 3, 4, None])
def test_logits_of_a_loaded_model_equal_those_on_one_device(tmp_path: Path, tied: bool, gpu_layers: int | None) -> None:
    config = replace(CONFIG, tie_embeddings=tied)
    path = tiny.write_gguf(tmp_path / "small.gguf", config, without=("output.weight",) if tied else ())
    checkpoint = open_checkpoint(path)
    expected = build(checkpoint, "cpu", "float32")
    where = "away:0" if gpu_layers is not None else "cpu,away:0,away:1"
    net = build(checkpoint, where, "float32", gpu_layers=gpu_layers)
    tokens = tiny.random_tokens(11, config)
    assert torch.equal(raw(net(tokens.to(net.norm.weight.device))), expected(tokens))
    picked = pick_placement(config, where, gpu_layers)
    assert all(weight.device == picked.device_of(name) for name, weight in net.named_parameters())
    is_shared = net.tok_embeddings.weight is net.output.weight
    assert is_shared == (tied and picked.embedding == picked.output)


@pytest.mark.skipif(not kernels.ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_each_layer_has_the_type_for_its_device(tmp_path: Path, tied: bool, quantize: str | None) -> None:
    config = replace(tiny.WIDE, n_layers=4, tie_embeddings=tied)
    path = tiny.write_gguf(tmp_path / "wide.gguf", config, without=("output.weight",) if tied else ())
    net = build(open_checkpoint(path), "away:0", "bfloat16", quantize=quantize, gpu_layers=2, fast=True)
    on_cpu: Any = (TileLinear if quantize else FewRowsLinear), "kernel"
    on_gpu: Any = (BlockLinear if quantize else nn.Linear), "sdpa"
    for i, block in enumerate(net.layers):
        kind, attention = on_cpu if i < 2 else on_gpu
        for layer in (block.attention.wq, block.attention.wo, block.feed_forward.w_down):
            assert isinstance(layer, kind), (i, layer)
        assert block.attention.attend.function is tiny.FUNCTIONS[attention]
    assert isinstance(net.output, on_gpu[0])
    assert isinstance(net.tok_embeddings, TileEmbedding if quantize and tied else nn.Embedding)
    tokens = tiny.random_tokens(11, config)
    cache = net.new_cache(32)
    logits = [raw(net(part.to(cache.device), cache=cache)) for part in (tokens[:, :9], tokens[:, 9:10], tokens[:, 10:])]
    alone = build(open_checkpoint(path), "cpu", "float32", quantize=None)
    if quantize:
        quantize_(alone, quantize)
    error = (torch.cat(logits, 1) - alone(tokens)).norm() / alone(tokens).norm()
    assert error < 0.05


@pytest.mark.parametrize("where", ["away:0,away:1", "cpu,away:0"])
def test_a_tied_embedding_on_another_device_has_the_same_quantized_weights(tmp_path: Path, where: str) -> None:
    config = replace(tiny.WIDE, tie_embeddings=True)
    path = tiny.write_gguf(tmp_path / "wide.gguf", config, without=("output.weight",))
    net = build(open_checkpoint(path), where, "float32", quantize="int8", fast=True)
    if where.startswith("cpu") and not kernels.ready():
        pytest.skip("needs the C++ kernels")
    assert isinstance(net.tok_embeddings, BlockEmbedding | TileEmbedding)
    assert torch.equal(raw(net.tok_embeddings.weight), raw(net.output.weight))
    ids = tiny.random_tokens(5, config)
    rows = raw(net.tok_embeddings(ids.to(where.split(",")[0])))
    assert torch.equal(rows, raw(net.output.weight)[ids])


def test_compiled_models_run_on_one_device(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "small.gguf", CONFIG)
    for options in ({"gpu_layers": 2, "device": "away:0"}, {"device": "cpu,away:0"}):
        with pytest.raises(UsageError, match="runs on one device"):
            build(open_checkpoint(path), compile=True, **options)
