"""Folders that other programs quantized: their integers, bit by bit, and the logits of the weights they mean.

The files are packed here from known integers, by the formats' documentation; test_quantizers.py has them packed by the
original programs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from llama import loader
from llama.checkpoint import open_checkpoint
from llama.checkpoint.prequantized import METHODS, PrequantizedCheckpoint
from llama.engine.linears import TileLinear
from llama.errors import CheckpointError, LlamaError
from llama.quant.blocks import BlockFormat
from llama.quant.tiles import unpack
from llama.rope import to_interleaved_layout
from llama.system.documents import Fields
from llama.tools import quantize
from llama.weights import check_tensors, read_quantized

from .test_huggingface import compare, edit, tokens, write
from .test_kernels import needs_kernels
from .test_quantizers import in_memory

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
HEAD = 32


# ------------------------------------------------------------------------------------------- packing, bit by bit
def words(values: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """(n, count) integers -> (n, words) int32: integer i in bits i * bits, ... of a row, padded to complete words."""
    size = -(-values.shape[1] * bits // 32)
    rows = [sum(int(value) << bits * i for i, value in enumerate(row)) for row in values]
    return np.frombuffer(b"".join(row.to_bytes(4 * size, "little") for row in rows), "<i4").reshape(len(rows), size)


def awq_words(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(n, count) integers -> (n, count / 8) int32, in AutoAWQ's order of the eight integers of a word."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    ordered = np.concatenate([values[:, [i + k for k in order]] for i in range(0, values.shape[1], 8)], axis=1)
    return words(ordered, 4)


class Rounded(NamedTuple):
    """Integers (N, K) with a scale and zero point for each group of columns, and the weight that they mean."""

    quants: np.ndarray[Any, Any]
    scale: np.ndarray[Any, Any]  # (N, G) float32
    zero: np.ndarray[Any, Any]  # (N, G)
    group_of: np.ndarray[Any, Any]  # (K,)

    @property
    def weight(self) -> Tensor:
        exact = self.scale[:, self.group_of].astype(np.float64) * (self.quants - self.zero[:, self.group_of])
        return torch.from_numpy(exact.astype(np.float32))


def rounded(
    weight: Tensor, bits: int, group: int, symmetric: bool, order: np.ndarray[Any, Any] | None = None, dtype: Any = None
) -> Rounded:
    """Round a weight to integers, group by group. order: the group of each column; None: adjacent columns."""
    w, top = weight.double().numpy(), 2**bits - 1
    group = w.shape[1] if group == -1 else group
    group_of = np.arange(w.shape[1]) // group if order is None else order
    groups = int(group_of.max()) + 1
    scale, zero = np.zeros((len(w), groups)), np.zeros((len(w), groups), int)
    for g in range(groups):
        low, high = w[:, group_of == g].min(axis=1), w[:, group_of == g].max(axis=1)
        scale[:, g] = np.maximum(-low, high) * 2 / top if symmetric else (high - low) / top
        zero[:, g] = 2 ** (bits - 1) if symmetric else np.clip(np.round(-low / scale[:, g]), 0, top)
    scale = torch.from_numpy(scale).to(dtype or torch.float16).float().numpy()
    quants = np.clip(np.round(w / scale[:, group_of]) + zero[:, group_of], 0, top).astype(int)
    return Rounded(quants, scale, zero, group_of)


Stored = tuple[dict[str, Tensor], Tensor]  # a layer's tensors, and the weight that they mean


def torched(**arrays: Any) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def gptq(
    w: Tensor, bits: int = 4, group: int = 32, symmetric: bool = True, order: bool = False, first: int = 1
) -> Stored:
    groups = w.shape[1] // (w.shape[1] if group == -1 else group)
    ordered = np.random.default_rng(0).permutation(np.arange(w.shape[1]) % groups) if order else None
    r = rounded(w, bits, group, symmetric, ordered)
    zero = r.zero.T.astype(int)  # (G, N)
    r = r._replace(zero=np.maximum(r.zero, first))  # version 1 has no 0
    tensors = torched(
        qweight=words(r.quants, bits).T,
        qzeros=words(np.maximum(zero, first) - first, bits),
        g_idx=r.group_of.astype("i4"),
    )
    return {**tensors, "scales": torch.from_numpy(r.scale.T.copy()).half()}, r.weight


def awq(w: Tensor, group: int = 32) -> Stored:
    r = rounded(w, 4, group, symmetric=False)
    tensors = torched(qweight=awq_words(r.quants.T), qzeros=awq_words(r.zero.T))
    return {**tensors, "scales": torch.from_numpy(r.scale.T.copy()).half()}, r.weight


def fp8(w: Tensor, block: tuple[int, int] | None = None, per: str = "block", name: str = "weight_scale") -> Stored:
    down, across = block or ((1, w.shape[1]) if per == "row" else tuple(w.shape))
    grid = -(-w.shape[0] // down), -(-w.shape[1] // across)
    scale = torch.empty(grid)
    values = torch.empty_like(w)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across)
            scale[i, j] = w[part].abs().max() / 448
            values[part] = w[part] / scale[i, j]
    quantized = values.to(torch.float8_e4m3fn)
    weight = Fp8Dequantize(None)._dequantize_one(quantized, scale)  # transformers' own; scales in float32
    return {"weight": quantized, name: scale.squeeze() if per == "tensor" else scale}, weight


def packed(w: Tensor, bits: int = 4, group: int = 32, symmetric: bool = True, order: bool = False) -> Stored:
    groups = w.shape[1] // (w.shape[1] if group == -1 else group)
    ordered = np.random.default_rng(0).permutation(np.arange(w.shape[1]) % groups) if order else None
    r = rounded(w, bits, group, symmetric, ordered, torch.bfloat16)
    tensors = torched(weight_packed=words(r.quants, bits), weight_shape=np.array(w.shape))
    tensors["weight_scale"] = torch.from_numpy(r.scale).bfloat16()
    if not symmetric:
        tensors |= torched(weight_zero_point=words(r.zero.T, bits).T)
    return tensors | (torched(weight_g_idx=r.group_of.astype("i4")) if order else {}), r.weight


def bytes_of(
    w: Tensor, group: int = -1, symmetric: bool = True, dtype: Any = torch.float32, tensor: bool = False
) -> Stored:
    r = rounded(w, 8, group, symmetric, dtype=dtype)
    if tensor:
        largest = w.abs().max()
        quants = (w / largest * 127).round()
        return {"weight": quants.to(torch.int8), "weight_scale": (largest / 127)[None]}, quants * (largest / 127)
    tensors = torched(weight=(r.quants - 128).astype(np.int8)) | {"weight_scale": torch.from_numpy(r.scale).to(dtype)}
    return tensors | ({} if symmetric else torched(weight_zero_point=(r.zero - 128).astype(np.int8))), r.weight


def llm_int8(w: Tensor) -> Stored:
    largest = w.abs().amax(1)
    quants = (w / largest[:, None] * 127).round().to(torch.int8)
    weight = quants.double() * largest.double()[:, None] / 127
    return {"weight": quants, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}, weight.float()


def nf4(w: Tensor, nested: bool = False, kind: str = "nf4", block: int = 64, storage: Any = torch.uint8) -> Stored:
    rng = np.random.default_rng(1)
    values = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    flat = w.double().numpy().ravel()
    absmax = np.abs(flat.reshape(-1, block)).max(axis=1).astype(np.float32)
    extra: dict[str, Tensor] = {}
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": list(w.shape)}
    if nested:
        table = np.linspace(-1, 1, 256, dtype=np.float32)
        offset, inner = float(absmax.mean()), 16
        outer = np.array(
            [np.abs(absmax[i : i + inner] - offset).max() for i in range(0, len(absmax), inner)], np.float32
        )
        codes = [np.abs((a - offset) / outer[i // inner] - table).argmin() for i, a in enumerate(absmax)]
        absmax = np.array([table[c] * outer[i // inner] + offset for i, c in enumerate(codes)], np.float32)
        extra = {f"weight.{k}": v for k, v in torched(nested_absmax=outer, nested_quant_map=table).items()}
        state |= {"nested_blocksize": inner, "nested_dtype": "float32", "nested_offset": offset}
    indices = np.abs(flat[:, None] / absmax.repeat(block)[:, None] - values).argmin(axis=1)
    weight = values[indices] * absmax.repeat(block)
    raw = torch.from_numpy((indices[0::2] << 4 | indices[1::2]).astype(np.uint8).copy()).view(storage)[:, None]
    stored = torch.tensor(codes, dtype=torch.uint8) if nested else torch.from_numpy(absmax)
    document = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    extra |= {"weight": raw, "weight.absmax": stored, "weight.quant_map": torch.from_numpy(values)}
    extra[f"weight.quant_state.bitsandbytes__{kind}"] = document
    return extra, torch.from_numpy(weight).view(w.shape)


# -------------------------------------------------------------------------------------------------- whole folders
def folder_of(folder: Path, store: Callable[[Tensor], Stored], scheme: dict[str, Any], **changes: Any) -> Any:
    """Write a random model whose linear layers `store` quantizes; return transformers' model of the same weights."""
    model = write(folder, **{**SIZES, **changes})
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith("_proj.weight")]:
        tensors, weight = store(state.pop(name).float())
        layer = name.removesuffix(".weight")
        state |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
        with torch.no_grad():
            model.get_parameter(name).copy_(weight)
    save_file(state, folder / "model.safetensors")
    edit(folder, quantization_config=scheme)
    return model


def g(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, **more}


def a(**more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", **more}


def c(form: str, activations: bool = False, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8} if activations else None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

# Name -> (how a layer is stored, quantization_config, the kernels' format or None, how `inspect` names it)
Case = tuple[Callable[[Tensor], Stored], dict[str, Any], BlockFormat | None, str]
INT4 = "compressed-tensors int4"
CASES: dict[str, Case] = {
    "gptq": (gptq, g(), BlockFormat(4, 32, False), "GPTQ int4"),
    "gptq labelled as version 1": (
        lambda w: gptq(w, first=0), g(checkpoint_format="gptq"), BlockFormat(4, 32, False), "GPTQ int4"),
    "gptq labelled as version 2": (gptq, g(format="gptq_v2"), BlockFormat(4, 32, False), "GPTQ int4"),
    "gptq asymmetric": (lambda w: gptq(w, symmetric=False), g(sym=False), BlockFormat(4, 32, True), "GPTQ int4"),
    "gptq version 2": (
        lambda w: gptq(w, symmetric=False, first=0), g(sym=False, checkpoint_format="gptq_v2"),
        BlockFormat(4, 32, True), "GPTQ int4"),
    "gptq in rows": (lambda w: gptq(w, group=-1), g(group_size=-1), BlockFormat(4, 128, False), "GPTQ int4"),
    "gptq act order": (
        lambda w: gptq(w, symmetric=False, order=True), g(sym=False, desc_act=True), None, "GPTQ int4 in act order"),
    "gptq in 8 bits": (lambda w: gptq(w, bits=8), g(bits=8), BlockFormat(8, 32, False), "GPTQ int8"),
    "awq": (awq, a(), BlockFormat(4, 32, True), "AWQ int4"),
    "awq in rows": (lambda w: awq(w, -1), a(group_size=-1, version="GEMM"), BlockFormat(4, 128, True), "AWQ int4"),
    "fp8 blocks": (
        lambda w: fp8(w, (64, 32), name="weight_scale_inv"), {**BLOCKS, "weight_block_size": [64, 32]}, None, "FP8"),
    "fp8 tensor": (lambda w: fp8(w, per="tensor", name="weight_scale_inv"), {"quant_method": "fp8"}, None, "FP8"),
    "fbgemm": (lambda w: fp8(w, per="row"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, None, "FP8"),
    "compressed fp8 tensor": (
        lambda w: fp8(w, per="tensor"), c("float-quantized", True, num_bits=8, type="float", strategy="tensor"), None, "FP8"),
    "compressed fp8 groups": (
        lambda w: fp8(w, (1, 32)), c("float-quantized", True, num_bits=8, type="float", strategy="group"), None, "FP8"),
    "compressed fp8 blocks": (
        lambda w: fp8(w, (128, 128)),
        c("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]), None, "FP8"),
    "compressed int4": (packed, c("pack-quantized", num_bits=4, group_size=32), BlockFormat(4, 32, False), INT4),
    "compressed int4 asymmetric": (
        lambda w: packed(w, group=64, symmetric=False), c("pack-quantized", num_bits=4, group_size=64, symmetric=False),
        BlockFormat(4, 64, True), INT4),
    "compressed int4 rows": (
        lambda w: packed(w, group=-1), c("pack-quantized", num_bits=4, strategy="channel"), BlockFormat(4, 128, False), INT4),
    "compressed int4 act order": (
        lambda w: packed(w, order=True), c("pack-quantized", num_bits=4, group_size=32, actorder="group"), None,
        f"{INT4} in act order"),
    "compressed int8": (
        bytes_of, c("int-quantized", True, num_bits=8, strategy="channel"), BlockFormat(8, 0, False), "compressed-tensors int8"),
    "compressed int8 tensor": (
        lambda w: bytes_of(w, tensor=True), c("int-quantized", num_bits=8, strategy="tensor"), BlockFormat(8, 0, False),
        "compressed-tensors int8"),
    "compressed int8 asymmetric": (
        lambda w: bytes_of(w, 32, symmetric=False, dtype=torch.float16),
        c("int-quantized", True, num_bits=8, strategy="group", symmetric=False), BlockFormat(8, 32, True),
        "compressed-tensors int8"),
    "llm.int8": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, BlockFormat(8, 0, False), "bitsandbytes int8"),
    "nf4": (nf4, BNB, None, "NF4"),
    "nf4 nested": (lambda w: nf4(w, nested=True, storage=torch.bfloat16), BNB, None, "NF4"),
    "fp4 in blocks longer than rows": (lambda w: nf4(w, kind="fp4", block=512), BNB, None, "FP4"),
}  # fmt: skip
WEIGHT = "layers.0.attention.wo.weight"  # its rows are not permuted
LAYER = "model.layers.0.self_attn.o_proj"


class Folder(NamedTuple):
    name: str
    path: Path
    model: Any  # transformers'
    case: Case


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    case = CASES[request.param]
    path = tmp_path_factory.mktemp("quantized")
    return Folder(request.param, path, folder_of(path, case[0], case[1]), case)


def test_logits_are_those_of_the_stored_weights(folder: Folder) -> None:
    _, _, format, label = folder.case
    checkpoint = open_checkpoint(folder.path)
    assert isinstance(checkpoint, PrequantizedCheckpoint)
    found, expected = checkpoint.tensor(WEIGHT), folder.model.get_parameter(f"{LAYER}.weight").detach()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(checkpoint.piece(WEIGHT, slice(17, 49), slice(3, 70)), found[17:49, 3:70])
    blocks = checkpoint.blocks(WEIGHT)
    assert (None if blocks is None else blocks.format) == format
    assert checkpoint.stored(WEIGHT) == label
    compare(folder.path, folder.model)


def test_the_kernels_get_the_integers_and_scales_of_the_file(folder: Folder) -> None:
    """Of every linear layer, with the rows of wq and wk in the model's order."""
    format = folder.case[2]
    if format is None:
        return
    checkpoint = open_checkpoint(folder.path)
    for ours, theirs in (("attention.wq", "self_attn.q_proj"), ("attention.wk", "self_attn.k_proj"),
                         ("attention.wo", "self_attn.o_proj"), ("feed_forward.w_down", "mlp.down_proj")):  # fmt: skip
        weight = read_quantized(checkpoint, f"layers.0.{ours}.weight", format, "interleaved")
        blocks = unpack(weight.tiles(), *weight.shape, format)
        expected = folder.model.get_parameter(f"model.layers.0.{theirs}.weight").detach().float()
        if ours in ("attention.wq", "attention.wk"):
            expected = to_interleaved_layout(expected, HEAD)
        group = format.group or expected.shape[1]
        scale = blocks.scale.repeat_interleave(group, 1)[:, : expected.shape[1]].double()
        if blocks.offset is None:  # nothing is rounded
            torch.testing.assert_close(blocks.weight, expected, rtol=1e-6, atol=1e-7)
            continue
        offset = blocks.offset.repeat_interleave(group, 1)[:, : expected.shape[1]].double()
        zero = (blocks.quants - expected.double() / scale).round()  # an integer for each group
        torch.testing.assert_close(scale * (blocks.quants - zero), expected.double(), rtol=1e-6, atol=1e-7)
        steps = (offset + scale * zero).abs() / scale  # the product of scale and zero point is rounded to float16
        assert float(steps.max()) < (2**-7 if format.bits == 4 else 2**-3)


@needs_kernels
@pytest.mark.parametrize("name", ["gptq", "awq", "llm.int8"])
def test_a_run_computes_with_the_stored_integers(tmp_path: Path, name: str) -> None:
    store, scheme, format, _ = CASES[name]
    folder_of(tmp_path, store, scheme)
    exact = loader.load_model(tmp_path, dtype="float32", device="cpu")
    model = loader.build(open_checkpoint(tmp_path), device="cpu", dtype="bfloat16", fast=True)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, TileLinear)}
    assert {m.format for m in linears.values()} == {format}
    assert len(linears) == 7
    expected, found = exact(tokens(20)), model(tokens(20)).float()
    assert float((found - expected).norm() / expected.norm()) < 0.03


def test_saved_again_the_integers_stay(tmp_path: Path) -> None:
    folder_of(tmp_path / "awq", awq, a())
    quantize.quantize(tmp_path / "awq", tmp_path / "ours", "int4")
    before, after = (open_checkpoint(tmp_path / name).blocks(WEIGHT) for name in ("awq", "ours"))
    assert before is not None
    assert after is not None
    assert torch.equal(before.quants, after.quants)
    assert torch.equal(before.scale, after.scale)


def test_a_zero_point_of_0_in_version_1_borrows_from_its_neighbour() -> None:
    """GPTQModel subtracts 1 from all integers of a word at once, so that reading it back can add 1 to them at once."""
    generator = np.random.default_rng(0)
    zero = generator.integers(0, 16, (64, 2))
    zero[::3] = 0
    saved = (words(zero.T, 4).view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    tensors = torched(qweight=np.zeros((8, 64), np.int32), qzeros=saved, scales=np.ones((2, 64), np.float32))
    matrix = METHODS["gptq"](Fields(g(sym=False), "config")).matrix(in_memory(tensors))
    for rows in (slice(None), slice(5, 40)):
        assert torch.equal(matrix.floats(rows), -torch.from_numpy(zero)[rows].repeat_interleave(32, 1).float())


@pytest.mark.parametrize(("scale", "fits"), [(2.0**-15 * 1.25, True), (2.0**17, False), (2.0**-22 * 1.3, False)])
def test_scales_that_float16_lacks_are_dequantized(tmp_path: Path, scale: float, fits: bool) -> None:
    def store(w: Tensor) -> Stored:
        tensors, weight = packed(w)
        factor = torch.tensor(scale).bfloat16() / tensors["weight_scale"].max()
        tensors["weight_scale"] = (tensors["weight_scale"] * factor).bfloat16()
        return tensors, weight

    folder_of(tmp_path, store, CASES["compressed int4"][1])
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.blocks(WEIGHT) is not None) == fits
    assert float(checkpoint.tensor(WEIGHT).abs().max()) > scale


def test_act_order_that_changes_nothing_is_packed(tmp_path: Path) -> None:
    folder_of(tmp_path, lambda w: gptq(w, order=w.shape[1] == 256), g(desc_act=True))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.blocks("layers.0.feed_forward.w_down.weight") is None
    assert checkpoint.blocks(WEIGHT) is not None


# ------------------------------------------------------------------------------------------------- around the weights
def change(folder: Path, of: Callable[[dict[str, Tensor]], None]) -> None:
    state = load_file(folder / "model.safetensors")
    of(state)
    save_file(state, folder / "model.safetensors")


def test_biases_of_zeros_are_dropped_and_others_are_not(tmp_path: Path) -> None:
    """Old versions of AutoGPTQ saved a bias for every layer."""
    model = folder_of(tmp_path, gptq, g())
    change(tmp_path, lambda state: state.update({f"{LAYER}.bias": torch.zeros(128)}))
    compare(tmp_path, model)
    change(tmp_path, lambda state: state.update({f"{LAYER}.bias": torch.ones(128)}))
    with pytest.raises(CheckpointError, match=r"1 tensor is unexpected: .*o_proj\.bias"):
        loader.load_model(tmp_path)


def test_parts_of_a_weight_may_be_in_several_files(tmp_path: Path) -> None:
    model = folder_of(tmp_path, gptq, g())
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + name.endswith('scales')}-of-00002.safetensors" for name in state}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in state.items() if files[name] == file}, tmp_path / file)
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    compare(tmp_path, model)
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.warnings
    assert sum(checkpoint.about["weights"].values()) == total
    assert checkpoint.bits(WEIGHT) == 4 + 16 / 32 + 4 / 32 + 32 / 128  # integers, scales, zero points, g_idx
    for name in checkpoint.shapes:
        checkpoint.release(name)


@pytest.mark.parametrize(("file", "case"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")])
def test_a_scheme_in_a_file_of_its_own(tmp_path: Path, file: str, case: str) -> None:
    store, scheme, _, label = CASES[case]
    model = folder_of(tmp_path, store, {})
    edit(tmp_path, remove=("quantization_config",))
    old = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"} if case == "awq" else scheme
    (tmp_path / file).write_text(json.dumps({key: value for key, value in old.items() if key != "quant_method"}))
    assert open_checkpoint(tmp_path).stored(WEIGHT) == label
    compare(tmp_path, model)
    (tmp_path / file).write_text("{")
    with pytest.raises(CheckpointError, match=f"{file}.*not valid JSON"):
        open_checkpoint(tmp_path)


def test_scales_of_activations_and_of_the_cache_are_left_out(tmp_path: Path) -> None:
    store, scheme, _, _ = CASES["compressed fp8 groups"]
    model = folder_of(tmp_path, store, scheme)
    extra = {f"{LAYER}.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    change(tmp_path, lambda state: state.update(extra))
    compare(tmp_path, model)


def test_some_or_all_layers_may_stay_floating_point(tmp_path: Path) -> None:
    model = folder_of(tmp_path, gptq, g())

    def restore(state: dict[str, Tensor], layer: str = f"{LAYER}.") -> None:
        for name in [name for name in state if name.startswith(layer)]:
            del state[name]
        state |= {name: tensor for name, tensor in model.state_dict().items() if name.startswith(layer)}

    change(tmp_path, restore)
    compare(tmp_path, model)
    change(tmp_path, lambda state: restore(state, "model."))
    compare(tmp_path, model)
    change(tmp_path, lambda state: state.update({f"{LAYER}.scales": torch.ones(4, 128)}))
    with pytest.raises(LlamaError, match=r"o_proj\.(weight|scales) is F32 .*, which GPTQ does not store beside"):
        open_checkpoint(tmp_path)


# --------------------------------------------------------------------------------------------------------- bad files
CONFIGS = {
    "another method": ({"quant_method": "exl2"}, "'exl2' can't be read; run it with vLLM, or get the weights in BF16, or as GGUF"),
    "no method": ({"bits": 4}, "the key quant_method is missing"),
    "a list": ([1], "must be an object"),
    "3 bits": (g(bits=3), r"bits is 3; supported: 4, 8; run it with vLLM"),
    "bits as text": (g(bits="4"), "bits must be an integer, got '4'"),
    "no group": ({"quant_method": "awq", "bits": 4}, "the key group_size is missing"),
    "group 0": (g(group_size=0), "group_size must be above 0, or -1"),
    "group huge": (a(group_size=2**70), "group_size must be above 0, or -1"),
    "marlin": (g(checkpoint_format="marlin"), "checkpoint_format is 'marlin'.*run it with vLLM"),
    "mixed bits": (g(dynamic={".*up_proj": {"bits": 8}}), "dynamic is .*, expected none; run it with vLLM"),
    "rotation": (g(rotation="hadamard"), "rotation is 'hadamard', expected none"),
    "awq gemv": (a(version="gemv"), "version is 'gemv'; supported: gemm, exllama, ipex; run it with vLLM"),
    "awq 8 bits": (a(bits=8), "bits is 8; supported: 4"),
    "block text": ({**BLOCKS, "weight_block_size": "128"}, "weight_block_size must be a list"),
    "block of 0": ({**BLOCKS, "weight_block_size": [128, 0]}, "weight_block_size must be two sizes above 0"),
    "nvfp4": (c("nvfp4-pack-quantized", num_bits=4), "format is 'nvfp4-pack-quantized'.*run it with vLLM"),
    "int3": (c("pack-quantized", num_bits=3), "num_bits is 3; supported: 8, 4"),
    "groups as a list": ({**c("pack-quantized"), "config_groups": []}, "config_groups must be an object"),
    "weights as text": ({**c("pack-quantized"), "config_groups": {"g": {"weights": "x"}}}, "weights must be an object"),
    "several schemes": (
        {**c("pack-quantized"), "config_groups": {n: {"weights": {"num_bits": n}} for n in (4, 8)}},
        "the groups store weights in different ways; run it with vLLM, or get the weights in BF16"),
    "transform": ({**c("pack-quantized"), "transform_config": {"R1": {}}}, "transform_config is .*, expected none"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bad_description_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, **SIZES)
    scheme, text = CONFIGS[name]
    edit(tmp_path, quantization_config=scheme)
    with pytest.raises(LlamaError, match=rf"^[^\n]*config\.json[^\n]*{text}[^\n]*$"):
        open_checkpoint(tmp_path)


def damages(tensor: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """A tensor with each of several faults; None: it is missing."""
    yield "missing", None
    yield "empty", tensor.flatten()[:0]
    yield "scalar", torch.zeros(()).to(tensor.dtype)
    yield "longer", torch.cat([tensor.flatten(), tensor.flatten()]).contiguous()
    yield "another shape", tensor.flatten()[None, None].contiguous()
    yield "another dtype", torch.zeros(tensor.shape, dtype=torch.float64)
    yield "ones", torch.full_like(tensor.view(torch.uint8) if tensor.dim() else tensor, 255).view(tensor.dtype)


@pytest.mark.parametrize("name", ["gptq act order", "awq", "fp8 blocks", "fbgemm", "compressed int4 asymmetric", "compressed int8 asymmetric", "llm.int8",
                                  "nf4 nested", "compressed int4 act order"])  # fmt: skip
def test_a_damaged_part_is_one_line(tmp_path: Path, name: str) -> None:
    store, scheme, _, _ = CASES[name]
    write(tmp_path, **SIZES)
    edit(tmp_path, quantization_config=scheme)
    state = load_file(tmp_path / "model.safetensors")
    for layer in [name.removesuffix(".weight") for name in state if name.endswith("_proj.weight")]:
        tensors, _ = store(state.pop(f"{layer}.weight"))
        state |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
    refused = 0
    for part in [name for name in state if name.startswith(f"{LAYER}.")]:
        for fault, tensor in damages(state[part]):
            changed = {key: value for key, value in state.items() if key != part}
            save_file({**changed, **({} if tensor is None else {part: tensor})}, tmp_path / "model.safetensors")
            error = failure(tmp_path)
            if error is None:
                # Other values of the right form; a part that is optional; one scale for all; bytes in another shape
                optional = ("g_idx", "weight_format")
                single = fault == "scalar" and part.endswith(("weight_scale", "weight_format")) and name != "fp8 blocks"
                reshaped = fault == "another shape" and part.endswith("o_proj.weight") and "nf4" in name
                missing = fault == "missing" and part.endswith(optional) and "order" not in name
                reshaped |= fault == "another shape" and part.endswith("nf4")
                assert fault == "ones" or single or reshaped or missing, (part, fault)
            else:
                assert "\n" not in str(error), (part, fault)
                assert LAYER in str(error), (part, fault, error)
                refused += 1
    assert refused > 10


def failure(folder: Path) -> LlamaError | None:
    """What loading a checkpoint and reading one weight raises."""
    try:
        checkpoint = open_checkpoint(folder)
        check_tensors(checkpoint)
        checkpoint.blocks(WEIGHT, slice(0, 16))
        checkpoint.tensor(WEIGHT)
    except LlamaError as error:
        return error
    return None
