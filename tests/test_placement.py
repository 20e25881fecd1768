"""A model on several devices says what it says on one. The devices are away.py's, which refuse to mix."""

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
from llama.engine.cuda_graphs import GraphRunner
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
KINDS_OF_MODEL = {
    "grouped": CONFIG,
    "tied": replace(CONFIG, tie_embeddings=True),
    "biases": replace(CONFIG, attention_bias=True, mlp_bias=True),
    "by length": replace(CONFIG, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
}


def devices(text: str) -> list[torch.device]:
    """'c01' -> the CPU, away:0, away:1."""
    return [CPU if letter == "c" else torch.device("away", int(letter)) for letter in text]


@pytest.fixture(autouse=True)
def _away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices away:0 and so on are there, and draws for them come from the CPU's generator."""
    away.register()
    known = placement.pick_device

    def pick(name: Any = None) -> torch.device:
        found = torch.device(name) if name is not None and str(name).startswith("away") else None
        return known(name) if found is None else torch.device("away", found.index or 0)

    drawn = generate.random_generator
    monkeypatch.setattr(placement, "pick_device", pick)
    for module in (generate, speculative):
        monkeypatch.setattr(module, "random_generator", lambda params, device: drawn(params, CPU))


def placed(config: ModelConfig, where: str, **options: Any) -> Transformer:
    """A model whose layers lie where the letters say, the embedding with the first, the output with the last."""
    found = devices(where)
    net = tiny.model(config, **options)
    net.runner = place(net, Placement(found[0], tuple(found), found[-1]))
    return net


def raw(x: Tensor) -> Tensor:
    return x.raw if isinstance(x, away.Away) else x


# --------------------------------------------------------------------------------------------------- the same numbers
@pytest.mark.parametrize("kind", KINDS_OF_MODEL)
@pytest.mark.parametrize("where", ["cc00", "c000", "0011", "0123", "00cc", "c0c0", "0000"])
def test_logits_are_those_of_one_device_bit_for_bit(kind: str, where: str) -> None:
    config = KINDS_OF_MODEL[kind]
    tokens = tiny.random_tokens(12, config, batch=2)
    expected = tiny.model(config)(tokens)
    net = placed(config, where)
    logits = net(tokens.to(devices(where)[-1]))
    assert logits.device == devices(where)[-1]
    assert torch.equal(raw(logits), expected)
    if where != "0000":  # wherever the tokens come from
        assert torch.equal(raw(net(tokens)), expected)


@pytest.mark.parametrize("form", ["complex", "real", "half"])
@pytest.mark.parametrize("cache", KINDS)
@pytest.mark.parametrize("fixed", [False, True])
def test_cached_passes_are_those_of_one_device_bit_for_bit(form: str, cache: str, fixed: bool) -> None:
    plain, net = tiny.model(CONFIG, rope=form), placed(CONFIG, "cc01", rope=form)
    tokens = tiny.random_tokens(20, CONFIG)
    outs = []
    for model in (plain, net):
        model.runner.cache_kind, model.runner.fixed_cache = cache, fixed
        kept = model.new_cache(32)
        cuts = [(0, 7), (7, 18), (18, 19), (19, 20)]
        outs.append([raw(model(tokens[:, a:b].to(kept.device), cache=kept)) for a, b in cuts])
        kept.trim(5)
        outs[-1].append(raw(model(tokens[:, 5:9].to(kept.device), cache=kept)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outs, strict=True))
    whole = raw(net(tokens))
    torch.testing.assert_close(torch.cat(outs[1][:4], 1), whole, rtol=0.2 if cache == "int8" else 1e-4, atol=0.2 if cache == "int8" else 1e-4)  # fmt: skip


def test_rows_of_a_batch_at_positions_of_their_own() -> None:
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


# ------------------------------------------------------------------------------------------------ where things lie
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("where", ["cc00", "0123"])
def test_every_weight_and_every_cache_lies_with_its_layer(where: str, tied: bool) -> None:
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
    assert not cache.on_one_device
    assert cache.k.shape[0] == cache.v.shape[0] == 4


@pytest.mark.parametrize(
    ("where", "borders"), [("cc00", ["c0"]), ("0011", ["01"]), ("0123", ["01", "12", "23"]), ("c0c0", ["c0", "0c", "c0"])]
)  # fmt: skip
def test_only_the_hidden_state_crosses_and_only_where_layers_part(where: str, borders: list[str]) -> None:
    """Besides it: the tokens once to the first device, and what says who sits where once to each device's layers."""
    net = placed(CONFIG, where)
    last = devices(where)[-1]
    cache = net.new_cache(32)
    for tokens, masked in ((tiny.random_tokens(6, CONFIG), True), (tiny.random_tokens(1, CONFIG), False)):
        fed = tokens.to(last)
        net.rope.freqs_cis(torch.arange(4).to(last), 4)  # the table stays where it was first asked for
        B, T = tokens.shape
        with away.counted() as moves:
            net(fed, cache=cache)
        names = {str(device): letter for device, letter in zip(devices(where), where, strict=True)}
        crossed = [names[a] + names[b] for a, b, shape in moves if shape == (B, T, CONFIG.dim)]
        assert crossed == borders
        others = [(names[b], shape) for _, b, shape in moves if shape != (B, T, CONFIG.dim)]
        assert others.count((where[0], (B, T))) == 1  # the tokens; they come on the last device
        kinds = {(T,), (T, CONFIG.head_dim // 2), *([(T, cache.end)] if masked else [])}  # positions, turns, mask
        runs = [letter for i, letter in enumerate(where) if letter != where[-1] and (i == 0 or where[i - 1] != letter)]
        assert sorted(others) == sorted([(where[0], (B, T))] + [(run, kind) for run in runs for kind in kinds])


def test_the_devices_of_these_tests_do_not_mix() -> None:
    """The rope that all of the above hangs on."""
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
def test_no_weight_is_sent_to_two_places(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the CPU and a GPU a parameter stays one object when it moves: tied, both layers would go where one goes."""
    sent: dict[int, set[str]] = {}

    def to(module: nn.Module, device: torch.device) -> nn.Module:
        for weight in module.parameters():
            sent.setdefault(id(weight), set()).add(str(device))
        return module

    monkeypatch.setattr(nn.Module, "to", to)
    net = placed(replace(CONFIG, tie_embeddings=True), where)
    assert {id(weight) for weight in net.parameters()} == set(sent)
    assert all(len(places) == 1 for places in sent.values())
    assert torch.equal(net.tok_embeddings.weight, net.output.weight)


@pytest.mark.skipif(not kernels.ready(), reason="wants the C++ kernels")
@pytest.mark.parametrize("tied", [False, True])
def test_blocks_of_a_file_are_for_the_layers_on_the_cpu(tmp_path: Path, tied: bool) -> None:
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


def test_one_device_runs_as_the_model_is_written() -> None:
    net = placed(CONFIG, "0000")
    assert not isinstance(net.runner, PlacedRunner)
    assert {layer.buffers[0].device for layer in net.new_cache(8).layers} == {torch.device("away:0")}
    assert placement.describe_devices(net) == "away:0"
    assert (
        placement.describe_devices(placed(CONFIG, "cc01"))
        == "cpu (layers 0 to 1) and away:0 (2 to 2) and away:1 (3 to 3)"
    )


def test_several_devices_decode_without_cuda_graphs() -> None:
    """engine/cuda_graphs.py captures the steps of one GPU; a model on several devices has another runner."""
    assert not isinstance(placed(CONFIG, "cc01").runner, GraphRunner)


# ------------------------------------------------------------------------------------------------------- which goes where
def test_gpu_layers_are_the_last_ones_with_the_output() -> None:
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
def test_bytes_are_spread_as_evenly_as_whole_layers_allow(name: str, count: int) -> None:
    from llama.hub.families import official
    from llama.weights import expected_shapes

    config = official()[name]
    found = spread(config, devices("01234567"[:count]))
    assert list(found.layers) == sorted(found.layers, key=lambda device: device.index)
    assert (found.embedding.index, found.output.index) == (0, count - 1)
    held, layer = [0] * count, 0
    for tensor, shape in expected_shapes(config).items():
        size = torch.Size(shape).numel()
        held[found.of(tensor).index] += size
        layer += size if tensor.startswith("layers.0.") else 0
        if config.tie_embeddings and tensor.startswith("tok_embeddings"):
            held[-1] += size
    filled = [size for i, size in enumerate(held) if devices("01234567")[i] in found.layers]
    assert max(filled) - layer <= min(held)  # a layer moved from the fullest would fill another as much


@pytest.mark.row("J03")
def test_what_can_t_be_placed_is_refused() -> None:
    here = r"available: .*cpu"
    for value in (-1, True, 1.5, "3"):
        with pytest.raises(UsageError, match="gpu_layers must be a whole number of at least 0"):
            pick_placement(CONFIG, "away:0", value)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=here):
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


@pytest.mark.row("J03")
@pytest.mark.skipif(torch.accelerator.is_available() and torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tiny.write_gguf(tmp_path / "small.gguf"))
    command = ["generate", "hello", "-m", path, "-n", "4", "--raw", "--temp", "0", "--gpu-layers"]
    assert main([*command, "10"]) == 2
    out, err = capfd.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert "gpu_layers 10 wants a GPU, and there is none here (available: cpu)" in err
    assert main([*command, "0"]) == 0
    told = capfd.readouterr().out
    assert main(command[:-1]) == 0
    assert capfd.readouterr().out == told
    for words in (["trace", "hello"], ["explain"]):
        assert main([*words, "-m", path, "--gpu-layers", "0"]) == 2
        assert "on one device" in capfd.readouterr().err


# ---------------------------------------------------------------------------------------------------------- loading
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("gpu_layers", [0, 1, 3, 4, None])
def test_a_loaded_model_says_what_it_says_on_one_device(tmp_path: Path, tied: bool, gpu_layers: int | None) -> None:
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
    shared = net.tok_embeddings.weight is net.output.weight
    assert shared == (tied and picked.embedding == picked.output)


@pytest.mark.skipif(not kernels.ready(), reason="wants the C++ kernels")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_each_layer_is_made_for_the_device_it_lies_on(tmp_path: Path, tied: bool, quantize: str | None) -> None:
    config = replace(tiny.WIDE, n_layers=4, tie_embeddings=tied)
    path = tiny.write_gguf(tmp_path / "wide.gguf", config, without=("output.weight",) if tied else ())
    net = build(open_checkpoint(path), "away:0", "bfloat16", quantize=quantize, gpu_layers=2, fast=True)
    here: Any = (TileLinear if quantize else FewRowsLinear), "kernel"
    there: Any = (BlockLinear if quantize else nn.Linear), "sdpa"
    for i, block in enumerate(net.layers):
        kind, attention = here if i < 2 else there
        for layer in (block.attention.wq, block.attention.wo, block.feed_forward.w_down):
            assert isinstance(layer, kind), (i, layer)
        assert block.attention.attend.function is tiny.FUNCTIONS[attention]
    assert isinstance(net.output, there[0])
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
def test_a_tied_embedding_apart_reads_the_same_integers(tmp_path: Path, where: str) -> None:
    config = replace(tiny.WIDE, tie_embeddings=True)
    path = tiny.write_gguf(tmp_path / "wide.gguf", config, without=("output.weight",))
    net = build(open_checkpoint(path), where, "float32", quantize="int8", fast=True)
    if where.startswith("cpu") and not kernels.ready():
        pytest.skip("wants the C++ kernels")
    assert isinstance(net.tok_embeddings, BlockEmbedding | TileEmbedding)
    assert torch.equal(raw(net.tok_embeddings.weight), raw(net.output.weight))
    ids = tiny.random_tokens(5, config)
    rows = raw(net.tok_embeddings(ids.to(where.split(",")[0])))
    assert torch.equal(rows, raw(net.output.weight)[ids])


def test_compiled_code_is_for_one_device(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "small.gguf", CONFIG)
    for options in ({"gpu_layers": 2, "device": "away:0"}, {"device": "cpu,away:0"}):
        with pytest.raises(UsageError, match="runs on one device"):
            build(open_checkpoint(path), compile=True, **options)
