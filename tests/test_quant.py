"""4-bit and 8-bit weights: the error of quantization is bounded, packing is lossless, blocks are those of the gguf package."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llama
from llama.checkpoint import gguf as gguf_reader
from llama.checkpoint import open_checkpoint
from llama.checkpoint.weight import DTYPES, MemoryWeight, ReorderedWeight, ScaledWeight
from llama.config import ModelConfig
from llama.engine import kernels
from llama.engine.linears import GroupedLinear, QuantizedEmbedding, TileLinear
from llama.engine.packing import to_tiles
from llama.errors import CheckpointError, UsageError
from llama.loader import load_model
from llama.quant import gguf_types, schemes
from llama.quant.gguf_types import MIXES, TYPES, block_of, types_of
from llama.quant.groups import READERS, GroupFormat, joined
from llama.quant.schemes import SCHEMES, quantize
from llama.quant.tiles import TILE, pack, tile_bytes, unpack
from llama.tools.convert import convert
from llama.weights import expected_shapes

from . import tiny
from .test_kernels import KINDS, needs_kernels, random_blocks

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = {**{name: scheme.format for name, scheme in SCHEMES.items()}, "output": GroupFormat(8, 32, False)}
SHAPES = [(48, 512), (1, 1), (5, 7), (33, 200)]  # some are not multiples of a tile or a group


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# ------------------------------------------------------------------------------------------------------ packing
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_is_lossless(kind: GroupFormat, shape: tuple[int, int]) -> None:
    blocks = random_blocks(*shape, *kind)
    tiles = pack(blocks)
    assert tiles.shape == (-(-shape[0] // TILE), tile_bytes(shape[1], kind))
    back = unpack(tiles, *shape, kind)
    assert (back.bits, back.group) == (blocks.bits, blocks.group)
    for ours, theirs in zip(back[:3], blocks[:3], strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    ids = torch.randint(shape[0], (9,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(blocks.rows(ids).weight, blocks.weight[ids])
    half = shape[0] // 2
    assert torch.equal(joined([blocks.rows(slice(half)), blocks.rows(slice(half, None))]).weight, blocks.weight)


# ----------------------------------------------------------------------------------------------------- rounding
WEIGHTS = {
    "normal": lambda: normal(40, 200),
    "heavy tails": lambda: normal(40, 200) ** 3,
    "far from zero": lambda: 50 + normal(40, 200),
    "rows of many sizes": lambda: normal(40, 200) * torch.logspace(-4, 3, 40)[:, None],
    "zeros": lambda: torch.zeros(40, 200),
    "tiny": lambda: normal(40, 200) * 1e-7,
}


def by_group(x: Tensor, scheme: GroupFormat) -> Tensor:
    """(N, K) -> (N, groups, group), padded with zeros."""
    group = scheme.group or x.shape[1]
    return F.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_quant_is_the_nearest_and_the_range_is_covered(name: str, weights: str, monkeypatch) -> None:
    format, w = FORMATS[name], WEIGHTS[weights]()[::5]
    for clips in (schemes.CLIPS[format.bits], (1.0,)):
        monkeypatch.setitem(schemes.CLIPS, format.bits, clips)
        blocks = quantize(w, format)
        offset = -(2.0 ** (format.bits - 1)) * blocks.scale if blocks.offset is None else blocks.offset
        scale, offset = (x.double().repeat_interleave(format.group, 1)[:, :200, None] for x in (blocks.scale, offset))
        choices = torch.arange(2**format.bits) * scale + offset - w[..., None]  # (N, K, choices)
        found = choices.gather(-1, blocks.quants.long()[..., None])[..., 0].abs()
        assert bool((found <= choices.abs().amin(-1) + 1e-5 * scale[..., 0] + 1e-6 * w.abs()).all())
        if len(clips) == 1:  # half a step; scale and offset are rounded to float16
            largest = by_group(w.abs(), format).amax(-1)
            room = blocks.scale / 2 + 2.0**-11 * (2**format.bits * blocks.scale + largest) + 2.0**-24 * 2**format.bits
            assert bool((by_group(found, format).amax(-1) <= room).all())


@needs_kernels
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_quantizes_like_the_definition(name: str) -> None:
    scheme = FORMATS[name]
    for weights in (make() for make in WEIGHTS.values()):
        for w in (weights, weights.bfloat16(), weights.half(), weights[:33, :131], weights.T[:50]):
            shape = tuple(w.shape)
            found = kernels.quantize_to_tiles(w, schemes.CLIPS[scheme.bits], *scheme[:3])
            ours, theirs = (unpack(tiles, *shape, scheme) for tiles in (found, pack(quantize(w, scheme))))
            if not all(a is None or torch.equal(a, b) for a, b in zip(ours[:3], theirs[:3], strict=True)):
                # two ranges have the same error, up to the order of summation
                errors = [by_group((b.weight - w.float()).square(), scheme).sum(-1) for b in (ours, theirs)]
                torch.testing.assert_close(*errors, rtol=1e-5, atol=1e-12)
                assert float((ours.quants != theirs.quants).double().mean()) < 0.01
            assert torch.equal(found[-1], pack(unpack(found, *shape, scheme))[-1])  # the padding is the same too


@pytest.mark.parametrize("wrong", [torch.nan, -torch.inf, 1e30])
@pytest.mark.parametrize("name", [*FORMATS, *TYPES])
def test_a_weight_that_cannot_be_quantized_is_an_error(name: str, wrong: float) -> None:
    w = normal(20, 512)
    w[17, 70] = wrong
    with pytest.raises(CheckpointError, match="not finite, or too large for 16-bit scales"):
        gguf_types.quantize(w, name) if name in TYPES else quantize(w, FORMATS[name])
    if name in FORMATS:
        with pytest.raises(CheckpointError, match="not finite, or too large for 16-bit scales"):
            to_tiles(MemoryWeight(w), FORMATS[name])


# ------------------------------------------------------------------------------------- the blocks of a GGUF file
# Where the scales of a block are, and how many bytes they have
SCALES = {
    "Q2_K": (80, 4), "Q3_K": (108, 2), "Q6_K": (208, 2), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 4)),
}  # fmt: skip


def random_raw(name: str, rows: int, blocks: int, most: float = 0.1) -> np.ndarray:
    """Random bytes as blocks of a type, with scales up to `most`: (rows, bytes)."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (rows, blocks, block_of(name)[1]), dtype=np.uint8)
    at, width = SCALES.get(name, (0, 2))
    scales = rng.uniform(-most, most, (rows, blocks, width // 2)).astype(np.float16)
    raw[:, :, at : at + width] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", READERS)
def test_blocks_are_read_unchanged(name: str) -> None:
    raw = random_raw(name, rows=20, blocks=3)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]))
    blocks = READERS[name](raw)
    assert blocks.quants.shape == expected.shape
    assert blocks.quants.dtype == torch.uint8
    assert int(blocks.quants.max()) < 2**blocks.bits
    torch.testing.assert_close(blocks.weight, expected, rtol=1e-6, atol=1e-7)
    back = unpack(pack(blocks), *expected.shape, blocks.format)
    assert torch.equal(back.quants, blocks.quants)
    assert torch.equal(back.weight, blocks.weight)
    assert distance(back.weight, expected) < 1e-7
    per_block, size = block_of(name)  # memory is at most a tenth more than the file
    assert 8 * tile_bytes(2048, blocks.format) / (TILE * 2048) <= 1.1 * 8 * size / per_block
    assert torch.equal(blocks.simple.weight, blocks.weight)
    assert int(blocks.simple.quants.max()) < 2**blocks.simple.bits


@needs_kernels
@pytest.mark.parametrize("name", READERS)
def test_the_kernels_pack_the_blocks_of_a_file_as_the_readers_do(name: str) -> None:
    """Any bytes, some rows in another order, some columns; the scales also are 0, negative, subnormal and not finite."""
    size, rng = block_of(name)[1], np.random.default_rng(1)
    raw = rng.integers(0, 256, (50, 4, size), dtype=np.uint8)
    at, width = SCALES.get(name, (0, 2))
    odd = np.array([0, 0x8000, 1, 0x83FF, 0x7BFF, 0xFC00, 0x7C00, 0x7C01, 0x7E00, 0xFD55], "<u2")
    raw[:40, :, at : at + width] = rng.choice(odd, (40, 4, width // 2)).view(np.uint8)
    whole = raw.reshape(50, -1)
    for rows, columns in itertools.product((slice(None), slice(3, 20), slice(7, 8)), ((0, 4), (1, 3))):
        some = whole[rows, columns[0] * size : columns[1] * size]
        for order in (None, torch.from_numpy(rng.integers(0, len(some), 33))):
            with np.errstate(invalid="ignore"):  # infinity times 0
                groups = READERS[name](some)
            expected = pack(groups if order is None else groups.rows(order))
            found = torch.full_like(expected, 77)
            kernels.pack_blocks(torch.from_numpy(some), name, order, found)
            assert torch.equal(found, expected), (rows, columns, order is None)


@pytest.mark.parametrize("part", [slice(256, 768), slice(512, None), slice(0, 640), slice(32, 800)])
@pytest.mark.parametrize("name", READERS)
def test_a_range_of_columns_keeps_the_weights(name: str, part: slice) -> None:
    blocks = READERS[name](random_raw(name, rows=20, blocks=1024 // block_of(name)[0]))
    some = blocks.columns(part)
    assert torch.equal(some.weight, blocks.weight[:, part])
    whole = part.start in (256, 512) or blocks.factors is None
    assert some.format == (blocks if whole else blocks.simple).format
    assert distance(unpack(pack(some), *some.quants.shape, some.format).weight, some.weight) < 2**-10
    with pytest.raises(ValueError, match="columns 8 to 64 are not complete groups"):
        blocks.columns(slice(8, 64))


def random_weights(array: np.ndarray, type: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random blocks of a type, with weights of a usual size; other types than those of READERS are cast."""
    if type.name not in READERS:
        return array.astype(np.float32)
    rows, columns = array.shape
    raw = random_raw(type.name, rows, columns // block_of(type.name)[0])
    size = np.sqrt(columns * np.mean(gguf.quants.dequantize(raw, type) ** 2))
    return random_raw(type.name, rows, columns // block_of(type.name)[0], 0.1 / size)


@needs_kernels
@pytest.mark.parametrize("name", READERS)
def test_every_type_is_computed_as_it_is(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tied = name in ("Q4_0", "Q6_K", "IQ4_XS")
    config = ModelConfig(256, 2, 4, 2, 64, 512, 320, max_seq_len=64, tie_embeddings=tied)
    monkeypatch.setattr(gguf.quants, "quantize", random_weights)
    path = tiny.write_gguf(tmp_path / "x.gguf", config, tiny.weights(config), quantization=name)
    model, half = (llama.load(path, device="cpu", dtype="bfloat16", rope=rope).model for rope in ("complex", "half"))
    exact = load_model(path, device="cpu", dtype="float32")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, TileLinear)}
    assert len(linears) == 7 * config.n_layers + 1
    for layer, module in linears.items():
        assert torch.equal(module.weight, exact.get_submodule(layer).weight), layer
        with pytest.raises(RuntimeError, match="Inplace update"):  # it would change no layer
            module.weight.zero_()
    assert torch.equal(model.tok_embeddings.weight, exact.tok_embeddings.weight)
    assert (model.tok_embeddings.tiles.data_ptr() == model.output.tiles.data_ptr()) is tied
    tokens, cache = tiny.random_tokens(20, config), half.new_cache()
    assert distance(model(tokens), exact(tokens)) < 0.03
    # half has the rows of wq and wk in another order
    steps = torch.cat([half(tokens[:, i : i + 1], cache=cache) for i in range(20)], dim=1)
    assert distance(steps, exact(tokens)) < 0.03


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("name", [*READERS, "F32", "BF16"])
def test_a_scaled_weight_is_the_product(tmp_path: Path, name: str, by_row: bool, monkeypatch) -> None:
    """In every type, in parts and with rows in another order; a power of two is exact, and packed as well from 1 on."""
    if name in READERS:
        monkeypatch.setattr(gguf.quants, "quantize", random_weights)
    state = {"tok_embeddings.weight": normal(48, 512), "norm.weight": normal(48, seed=1)}
    file = gguf_reader.GGUFFile(tiny.write_gguf(tmp_path / "x.gguf", tiny.CONFIG, state, quantization=name))
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3))
    powers = torch.randint(9, (48,), generator=torch.Generator().manual_seed(4)).exp2()
    for factor in (normal(48, seed=4), powers) if by_row else (0.0883, 8.0):
        rows = torch.as_tensor(factor).expand(48)
        power = bool((rows.frexp().mantissa == 0.5).all())
        for base in (file.tensors["token_embd.weight"], file.tensors["output_norm.weight"]):
            scaled, values = ScaledWeight(base, factor), base.floats().double()
            assert scaled.changed is (base.stored in DTYPES)  # in a float32 model, they are not stored in 16 bits
            exact = values * rows.view(-1, *[1] * (values.dim() - 1))
            reordered, first = ReorderedWeight(scaled, order), ScaledWeight(ReorderedWeight(base, order), rows[order])
            for weight, expected in ((scaled, exact), (reordered, exact[order]), (first, exact[order])):
                for part in (slice(None), slice(5, 38), (slice(7, 40), slice(256, 512)))[: 1 + values.dim()]:
                    some, product = weight[part], expected[part]
                    torch.testing.assert_close(some.floats().double(), product, rtol=1e-6, atol=1e-9)
                    assert not power or torch.equal(some.floats().double(), product)
                    if some.format is None:
                        continue
                    tiles = unpack(to_tiles(some, some.format), *some.shape, some.format)
                    assert torch.equal(tiles.quants, some.groups().quants)
                    torch.testing.assert_close(some.groups().weight.double(), product, rtol=1e-5, atol=1e-6)
                    assert distance(tiles.weight, product) < (1e-9 if power else 2**-11)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_layers_have_the_same_weight(kind: GroupFormat, shape: tuple[int, int]) -> None:
    blocks, bias = random_blocks(*shape, *kind), normal(shape[0], seed=1)
    tiles, reference = TileLinear(pack(blocks), shape, kind, bias), GroupedLinear(blocks, bias)
    assert torch.equal(tiles.weight, blocks.weight)
    close = 1e-6 * max(1.0, float(blocks.weight.abs().max()))  # it adds an offset of several steps
    torch.testing.assert_close(reference.weight, blocks.weight, rtol=1e-6, atol=close)
    x = normal(3, 4, shape[1], seed=2)
    torch.testing.assert_close(reference(x), F.linear(x, blocks.weight, bias), rtol=1e-4, atol=1e-4)
    index = torch.tensor([[0, shape[0] - 1]])
    assert torch.equal(reference.rows(index), reference.weight[index])


@needs_kernels
@pytest.mark.parametrize(
    ("scheme", "bound"), [(name, 0.06 if s.format.bits == 8 else 0.4) for name, s in SCHEMES.items()]
)
def test_a_quantized_model_is_near_the_model(scheme: str, bound: float) -> None:
    config = ModelConfig(**{**tiny.WIDE.__dict__, "tie_embeddings": True})
    tokens = tiny.random_tokens(30, config)
    plain, model = tiny.model(config), tiny.quantized(tiny.model(config), scheme)
    assert distance(model(tokens), plain(tokens)) < bound
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert isinstance(model.tok_embeddings, QuantizedEmbedding)
    assert model.tok_embeddings.tiles.data_ptr() == model.output.tiles.data_ptr()
    layers = [module for name, module in model.layers.named_modules() if isinstance(module, TileLinear)]
    assert {module.bits for module in layers} == {SCHEMES[scheme].format.bits}
    assert model.output.bits == (8 if SCHEMES[scheme].output else SCHEMES[scheme].format.bits)


# -------------------------------------------------------------------------------------------- types of GGUF files
TOKENS = torch.randint(3, 260, (1, 20), generator=torch.Generator().manual_seed(1))
FIVE = ModelConfig(256, 5, 4, 2, 64, 512, 320, norm_eps=2**-17, max_seq_len=256)
NORMAL = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
OUTLIERS = torch.tensor([5, 300])
GGUF_WEIGHTS = {
    "normal": 0.05 * NORMAL,
    "zero": torch.zeros(8, 512),
    "large": 1e5 * NORMAL,
    "outliers": (1e-2 * NORMAL).index_fill(1, OUTLIERS, 50),
    "tiny": 1e-38 * NORMAL,
    "tiny outliers": torch.zeros(8, 512).index_fill(1, OUTLIERS, 1e-39),
    "tiny blocks": torch.cat((1e-39 * NORMAL[:, :256], NORMAL[:, 256:]), 1),
}


def dequantized(raw: Any, type: str) -> Tensor:
    raw = raw.numpy() if isinstance(raw, Tensor) else np.array(raw)
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type]))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("kind", GGUF_WEIGHTS)
def test_every_group_is_quantized_as_by_llama_cpp(type: str, kind: str) -> None:
    """The bytes of the package where it can quantize; otherwise an error of at most a step. Tiny groups become 0."""
    w = GGUF_WEIGHTS[kind]
    raw = gguf_types.quantize(w, type)
    block, size = gguf_types.block_of(type)
    assert raw.shape == (8, 512 // block * size)
    back = dequantized(raw, type)
    assert torch.equal(READERS[type](raw.numpy()).weight, back)  # both readers agree on the bytes
    if type in ("Q8_0", "Q4_0", "Q5_0") and "tiny" not in kind:
        assert np.array_equal(raw.numpy(), gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType[type]))
    steps = {"Q8_0": 127, "Q4_0": 8, "Q5_0": 16, "Q4_K": 7, "Q6_K": 30}[type]
    largest = w.unflatten(1, (-1, block)).abs().amax(-1, keepdim=True)
    error = (back - w).unflatten(1, (-1, block)).abs()
    assert bool((error <= torch.where(largest < 1e-15, 1e-15, 1.02 * largest / steps)).all())
    assert not back[:, :256].any() or "tiny" not in kind
    assert not back[w == 0].any() or kind == "halves"
    for start in (0, 3):  # rows are independent of the piece in which they are quantized
        assert torch.equal(gguf_types.quantize(w[start : start + 2], type), raw[start : start + 2])


# llama.cpp's own quantizer has on these weights: Q4_K 0.0713, Q6_K 0.0177
ERRORS = {"Q8_0": 0.0055, "Q4_0": 0.088, "Q5_0": 0.044, "Q4_K": 0.072, "Q6_K": 0.0178}


@pytest.mark.parametrize("type", TYPES)
def test_the_error_is_at_most_that_of_llama_cpp(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = 0.05 * torch.randn(64, 1024, generator=torch.Generator().manual_seed(3))
    raw = gguf_types.quantize(w, type)
    assert (dequantized(raw, type) - w).norm() / w.norm() < ERRORS[type]
    monkeypatch.setattr(gguf_types, "QUANTIZED_ENTRIES", 5000)
    assert torch.equal(gguf_types.quantize(w.bfloat16(), type), gguf_types.quantize(w.bfloat16().float(), type))
    assert torch.equal(gguf_types.quantize(w, type), raw)


def table(config: ModelConfig, kind: str) -> dict[str, str]:
    """The types that are not the kind's own, by the layers' short names."""
    found = types_of(expected_shapes(config), config, kind)
    return {name.removesuffix(".weight"): type for name, type in found.items() if type != MIXES[kind].type}


def test_the_types_are_those_that_llama_cpp_chose() -> None:
    """What llama_model_quantize of llama.cpp (llama-cpp-python 0.3.36) chose for models of these sizes."""
    nine = ModelConfig(512, 9, 8, 4, 64, 768, 266)
    more = [0 + 3, 6, 0, 7, 8]  # with one layer in the first eighth, and two in the last
    expected = {f"layers.{i}.{part}": "Q6_K" for i in more for part in ("attention.wv", "feed_forward.w_down")}
    assert table(nine, "q4_k") == {**expected, "output": "Q6_K"}
    assert table(nine, "q4_0") == {"output": "Q6_K"}
    assert table(nine, "q8_0") == {}
    assert table(dataclasses.replace(nine, tie_embeddings=True), "q4_0") == {"tok_embeddings": "Q6_K"}
    seventy = table(ModelConfig(256, 80, 4, 2, 64, 256, 266), "q4_k")
    down = [i for i in range(80) if f"layers.{i}.feed_forward.w_down" in seventy]
    assert down == [*range(10), *range(12, 70, 3), *range(70, 80)]
    odd = ModelConfig(576, 3, 9, 3, 64, 1536, 266)
    types = types_of(expected_shapes(odd), odd, "q4_k")
    assert types["layers.0.attention.wq.weight"] == "Q5_0"
    assert types["output.weight"] == "Q8_0"
    assert {types[f"layers.{i}.feed_forward.w_down.weight"] for i in range(3)} == {"Q4_K", "Q6_K"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("wide") / "wide.gguf", FIVE, quantization="BF16")


@pytest.mark.parametrize("kind", MIXES)
def test_a_file_is_read_by_the_gguf_package_and_by_us(source: Path, tmp_path: Path, kind: str) -> None:
    proof = convert(source, tmp_path / "out.gguf", "gguf", quantize=kind)
    assert proof.warnings == []
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert int(reader.fields["general.file_type"].parts[-1][0]) == MIXES[kind].file_type
    checkpoint, types = open_checkpoint(tmp_path / "out.gguf"), types_of(expected_shapes(FIVE), FIVE, kind)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    for name in checkpoint.shapes:
        tensor = theirs[checkpoint.file_name(name)]
        assert tuple(reversed(tensor.shape.tolist())) == checkpoint.shapes[name]
        assert torch.equal(dequantized(tensor.data, tensor.tensor_type.name), checkpoint.weight(name).floats())
        assert checkpoint.weight(name).stored == types.get(name, "F32")
    before, after = (llama.load_model(path, dtype="float32", device="cpu")(TOKENS) for path in (source, proof.path))
    assert 0 < (before - after).square().mean() < 0.2 * before.var()


def test_what_can_not_be_written_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown quantization of GGUF files 'q3_k'; known: q8_0, q4_0, q4_k"):
        convert(source, tmp_path / "out", "gguf", quantize="q3_k")
    narrow = tiny.write_gguf(tmp_path / "narrow.gguf", dataclasses.replace(tiny.CONFIG, hidden_dim=90))
    with pytest.raises(CheckpointError, match="rows of 90 weights, no multiple of 32"):
        convert(narrow, tmp_path / "out", "gguf", quantize="q8_0")


def test_quantizing_without_the_kernels_is_an_error(monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path) -> None:
    monkeypatch.setattr(kernels, "ready", lambda: False)
    with pytest.raises(UsageError, match=r"requires the C\+\+ kernels on this CPU"):
        load_model(tiny_gguf, quantize="int8", device="cpu")
