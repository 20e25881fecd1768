"""A model on several devices has the logits that it has on one. away.py simulates the devices."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llama import generate, sampling
from llama.cache import KINDS
from llama.checkpoint import open_checkpoint
from llama.cli import main
from llama.config import ModelConfig
from llama.engine import kernels, placement
from llama.engine.linears import FewRowsLinear, QuantizedEmbedding, TileLinear
from llama.engine.placement import PlacedRunner, Placement, pick_placement, spread
from llama.errors import UsageError
from llama.generation.speculative import NGramDraft, speculate
from llama.loader import build
from llama.sampling import SamplingParams
from llama.tools.families import official
from llama.weights import expected_shapes

from . import away, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = replace(tiny.CONFIG, n_layers=4)
CPU = torch.device("cpu")
# Devices and gpu_layers -> the devices of the layers; the embedding is with the first, the output with the last.
PLACES = [("cpu,away:0", None, "cc00"), ("away:0", 3, "c000"), ("away:0", 1, "ccc0"), ("away:0", 4, "0000")]
PLACES += [("away:0,away:1,away:2,away:3", None, "0123"), ("away:0,cpu", None, "00cc"), ("away:0", 0, "cccc")]
KINDS_OF_MODELS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "grouped": (CONFIG, {}),
    "tied": (replace(CONFIG, tie_embeddings=True), {}),
    "biases": (replace(CONFIG, attention_bias=True, mlp_bias=True), {"rope": "half"}),
    "by length": (CONFIG, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope": "real"}),
}


def raw(x: Tensor) -> Tensor:
    """A tensor on the CPU."""
    return x.raw if isinstance(x, away.Away) else x


def write(folder: Path, config: ModelConfig, quantization: str = "F32") -> Path:
    without = ("output.weight",) if config.tie_embeddings else ()
    return tiny.write_gguf(folder / "x.gguf", config, quantization=quantization, without=without)


@pytest.fixture(autouse=True)
def _away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the devices away:0 and so on, and use the CPU's random generator for them."""
    away.register()
    known = placement.pick_device

    def pick(name: Any = None) -> torch.device:
        found = torch.device(name) if name is not None and str(name).startswith("away") else None
        return known(name) if found is None else torch.device("away", found.index or 0)

    random_generator = sampling.random_generator
    monkeypatch.setattr(placement, "pick_device", pick)
    monkeypatch.setattr(sampling, "random_generator", lambda params, device: random_generator(params, CPU))


# ---------------------------------------------------------------------------------------------------- the same numbers
@pytest.mark.parametrize(
    ("kind", "where", "count", "letters"),
    [
        pytest.param(kind, *place, marks=() if place is PLACES[0] or kind == "grouped" else pytest.mark.slow)
        for place in PLACES
        for kind in KINDS_OF_MODELS
    ],
)
def test_logits_are_bitwise_equal_to_those_of_one_device(
    kind: str, where: str, count: int | None, letters: str, tmp_path: Path
) -> None:
    config, options = KINDS_OF_MODELS[kind]
    checkpoint = open_checkpoint(write(tmp_path, config))
    plain = build(checkpoint, "cpu", "float32", **options)
    net = build(checkpoint, where, "float32", gpu_layers=count, **options)
    devices = [CPU if letter == "c" else torch.device("away", int(letter)) for letter in letters]
    assert isinstance(net.runner, PlacedRunner) == (len(set(letters)) > 1)
    for name, weight in net.named_parameters():
        part = name.split(".")
        at = int(part[1]) if part[0] == "layers" else 0 if part[0] == "tok_embeddings" else -1
        assert weight.device == devices[at], name
    tokens, positions = tiny.random_tokens(20, config, batch=2), torch.tensor([[9, 10, 11], [7, 8, 9]])
    for cache in KINDS:
        outs = []
        for model in (plain, net):
            model.cache_kind = cache
            used = model.new_cache(200, batch=2)
            outs.append([raw(model(tokens[:, a:b].to(used.device), cache=used)) for a, b in ((0, 7), (7, 8), (8, 19))])
            used.trim(9)
            outs[-1].append(raw(model(tokens[:, 9:12].to(used.device), positions.to(used.device), used)))
            used.reserve(150)  # grows
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outs, strict=True))
        assert [{buffer.device for buffer in layer.buffers} for layer in used.layers] == [{d} for d in devices]
    assert torch.equal(raw(net(tokens.to(devices[-1]))), plain(tokens))
    assert (net.tok_embeddings.weight is net.output.weight) == (config.tie_embeddings and devices[0] == devices[-1])


def test_generated_tokens_are_those_of_one_device(tmp_path: Path) -> None:
    checkpoint, params = open_checkpoint(write(tmp_path, CONFIG)), SamplingParams(max_new_tokens=24)
    plain, net = (build(checkpoint, where, "float32") for where in ("cpu", "cpu,away:0,away:1"))
    prompt = tiny.random_tokens(9, CONFIG)[0].tolist() * 3
    expected = [token.id for token in generate.generate(plain, prompt, params)]
    assert [token.id for token in generate.generate(net, prompt, params)] == expected
    assert [token.id for token in speculate(net, prompt, params, NGramDraft())] == expected
    with away.counted() as moves:  # the hidden state once to each device
        net(torch.tensor([[7]], device="away:1"), cache=net.new_cache(8))
    assert [(str(a), str(b)) for a, b, shape in moves if shape == (1, 1, CONFIG.dim)] == [("cpu", "away:0"), ("away:0", "away:1")]  # fmt: skip
    assert placement.describe_devices(net) == "cpu (1 layer) and away:0 (2 layers) and away:1 (1 layer)"


@pytest.mark.skipif(not kernels.ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("stored", "quantize"), [("F32", None), ("F32", "int8"), ("Q8_0", None)])
def test_each_layer_has_the_type_for_its_device(tmp_path: Path, tied: bool, stored: str, quantize: str | None) -> None:
    config = replace(tiny.WIDE, n_layers=4, tie_embeddings=tied)
    checkpoint = open_checkpoint(write(tmp_path, config, stored))
    net = build(checkpoint, "away:0", "bfloat16", quantize=quantize, gpu_layers=2, fast=True)
    packed = stored != "F32" or quantize is not None
    for i, block in enumerate(net.layers):
        for layer in (block.attention.wq, block.attention.wo, block.feed_forward.w_down):
            assert isinstance(layer, TileLinear if packed else FewRowsLinear) == (i < 2)
            assert {str(tensor.device) for tensor in layer.state_dict().values()} == {"cpu" if i < 2 else "away:0"}
    quantized = packed and (tied or stored != "F32")
    assert isinstance(net.tok_embeddings, QuantizedEmbedding if quantized else nn.Embedding)
    tokens = tiny.random_tokens(11, config)
    expected = build(checkpoint, "cpu", "float32")(tokens)
    assert (raw(net(tokens.to("away:0"))) - expected).norm() / expected.norm() < 0.05


# ------------------------------------------------------------------------------------------------- choosing devices
@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "llama-2-70b", "smollm2-135m-instruct"])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_layers_are_divided_by_bytes_as_evenly_as_possible(name: str, count: int) -> None:
    config = official()[name]
    found = spread(config, [torch.device("away", i) for i in range(count)])
    assert list(found.layers) == sorted(found.layers, key=lambda device: device.index)
    assert (found.embedding.index, found.output.index) == (0, count - 1)
    sizes = {tensor: math.prod(shape) for tensor, shape in expected_shapes(config).items()}
    loads = [sum(size for tensor, size in sizes.items() if found.device_of(tensor).index == i) for i in range(count)]
    loads[-1] += sizes["tok_embeddings.weight"] if config.tie_embeddings else 0
    layer = sum(size for tensor, size in sizes.items() if tensor.startswith("layers.0."))
    with_layers = [size for i, size in enumerate(loads) if torch.device("away", i) in found.layers]
    assert max(with_layers) - layer <= min(loads)  # moving a layer from the fullest device would not help


def test_invalid_devices_and_gpu_layers_are_rejected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert pick_placement(CONFIG, " cpu , away:1 ") == Placement(CPU, (CPU,) * 2 + (torch.device("away:1"),) * 2, torch.device("away:1"))  # fmt: skip
    for where, count, message in (
        *(("away:0", value, "gpu_layers must be an integer of at least 0") for value in (-1, "3")),
        ("cpu", 2, "requires a GPU"),
        ("away:0,away:1", 2, "2 were named"),
        *((text, None, "named twice") for text in ("away:0,away:0", "away,away:0", "cpu,cpu")),
        ("cpu,away:0,away:1,away:2,away:3", None, "5 devices for 4 layers"),
        *((text, None, None) for text in ("", ",", "cpu,", "cpu,nonsense", "cpu,away:0,tpu:1")),
    ):
        with pytest.raises(UsageError, match=message):
            pick_placement(CONFIG, where, count)  # type: ignore[arg-type]
    path = write(tmp_path, CONFIG)
    with pytest.raises(UsageError, match="runs on one device"):
        build(open_checkpoint(path), "cpu,away:0", compile=True)
    assert main(["generate", "hello", "-m", str(path), "--device", "cpu", "--gpu-layers", "10"]) == 2
    assert "--gpu-layers 10 requires a GPU" in capfd.readouterr().err
