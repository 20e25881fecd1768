"""Folders that other programs quantized: our readers return the weights that those programs do.

data/quantizers.safetensors holds one small layer of each program, with the weight that the program's own code returns
for it: AutoGPTQ 0.7.1, AutoAWQ 0.2.9, compressed-tensors 0.20, bitsandbytes 0.50. VARIANTS are the same layers under other
keys and in other groups.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama import loader
from llama.checkpoint import open_checkpoint
from llama.checkpoint.huggingface import STORED, Layer, StoredTensor
from llama.checkpoint.prequantized import METHODS
from llama.engine.linears import TileLinear
from llama.engine.packing import to_tiles
from llama.errors import CheckpointError, LlamaError
from llama.quant.groups import GroupFormat
from llama.quant.tiles import unpack
from llama.rope import to_interleaved_layout
from llama.system.documents import Fields
from llama.tools.convert import quantize

from .test_huggingface import compare, edit, tokens, write
from .test_kernels import needs_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDED = Path(__file__).parent / "data" / "quantizers.safetensors"
Made = tuple[dict[str, Any], dict[str, Tensor]]  # quantization_config; the layer's tensors and "expected", the weight


def in_memory(tensors: dict[str, Tensor]) -> Layer:
    """A layer's tensors as a file has them."""
    return Layer({
        name: StoredTensor(Path("layer"), name, STORED.get(tensor.dtype, "?"), tuple(tensor.shape), lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    })  # fmt: skip


def check(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Compare the weight that our reader returns with the expected one; groups and floats with each other."""
    expected = tensors.pop("expected").float()
    matrix = METHODS[config["quant_method"]](Fields(config, "config")).weight(in_memory(tensors))
    found = matrix.floats()
    assert matrix.shape == found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
    assert torch.equal(matrix[3:21].floats(), found[3:21])
    if matrix.format is not None:
        torch.testing.assert_close(matrix[5:30].groups().weight, expected[5:30], rtol=1e-6, atol=1e-7)


def recorded(name: str) -> Made:
    """A layer as its program packed it when the file was recorded."""
    with safe_open(RECORDED, "pt") as file:
        keys = [key for key in file.offset_keys() if key.startswith(f"{name}/")]
        return json.loads(file.metadata()[name]), {key.removeprefix(f"{name}/"): file.get_tensor(key) for key in keys}


ROWS, COLUMNS = 32, 64
# q, k, v, gate and up have the shape of the recorded layers
SIZES = {"num_hidden_layers": 1, "hidden_size": COLUMNS, "intermediate_size": ROWS, "head_dim": 16,
         "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
LAYERS = [f"model.layers.0.{name}_proj" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")]
LAYER, WEIGHT = LAYERS[-1], "layers.0.feed_forward.w_up.weight"  # its rows are not permuted

# Recorded layer -> the kernels' format or None, how `inspect` names it
KINDS: dict[str, tuple[GroupFormat | None, str]] = {
    "gptq-4": (GroupFormat(4, 32, False), "GPTQ int4"),
    "gptq-4-asymmetric": (GroupFormat(4, 32, True), "GPTQ int4"),
    "gptq-4-order": (None, "GPTQ int4 in act order"),
    "gptq-8": (GroupFormat(8, 32, True), "GPTQ int8"),
    "awq-gemm": (GroupFormat(4, 32, True), "AWQ int4"),
    "ct-int4": (GroupFormat(4, 32, False), "compressed-tensors int4"),
    "ct-int4-asymmetric": (GroupFormat(4, 32, True), "compressed-tensors int4"),
    "ct-int8": (GroupFormat(8, 0, False), "compressed-tensors int8"),
    **{f"ct-fp8-{part}": (None, "FP8") for part in ("tensor", "channel", "block")},
    "nf4": (None, "NF4"),
    "nf4-nested": (None, "NF4"),
    "llm-int8": (GroupFormat(8, 0, False), "bitsandbytes int8"),
}


def folder_of(folder: Path, name: str) -> Any:
    """Write a model with the recorded layer five times; return transformers' model of the same weights."""
    config, tensors = recorded(name)
    model, expected = write(folder, **SIZES), tensors.pop("expected").float()
    state = load_file(folder / "model.safetensors")
    for layer in LAYERS:
        del state[f"{layer}.weight"]
        state |= {f"{layer}.{part}": tensor.clone() for part, tensor in tensors.items()}
        with torch.no_grad():
            model.get_parameter(f"{layer}.weight").copy_(expected)
    save_file(state, folder / "model.safetensors")
    edit(folder, quantization_config=config)
    return model


def change(folder: Path, of: Callable[[dict[str, Tensor]], object]) -> None:
    state = load_file(folder / "model.safetensors")
    of(state)
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize("name", KINDS)
def test_logits_integers_and_scales_are_those_of_the_program(tmp_path: Path, name: str) -> None:
    """Also with the rows of wq in the model's order."""
    model, (format, label) = folder_of(tmp_path, name), KINDS[name]
    compare(tmp_path, model)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format.startswith("Hugging Face, quantized by ")
    assert checkpoint.weight(WEIGHT).stored == label
    _, stored = recorded(name)
    assert checkpoint.weight(WEIGHT).bits * ROWS * COLUMNS == 8 * sum(
        t.nbytes for part, t in stored.items() if part != "expected"
    )
    weight, expected = checkpoint.weight(WEIGHT).floats(), model.get_parameter(f"{LAYER}.weight").detach()
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(checkpoint.weight(WEIGHT)[17:30, 3:60].floats(), weight[17:30, 3:60])
    assert checkpoint.weight(WEIGHT).format == format
    if format is None:
        return
    for ours, wanted in (("feed_forward.w_up", expected), ("attention.wq", to_interleaved_layout(expected, 16))):
        weight = checkpoint.weight(f"layers.0.{ours}.weight")
        packed = unpack(to_tiles(weight, format), *weight.shape, format)
        scale = packed.scale.repeat_interleave(format.group or COLUMNS, 1)
        # the product of scale and zero point is rounded to float16
        step = 0.0 if packed.offset is None else 2**-7 if format.bits == 4 else 2**-3
        assert bool(((packed.weight - wanted).abs() <= step * scale + 1e-6 * wanted.abs()).all())


def one_group() -> Made:
    """The first group of columns, as a matrix whose rows are one group."""
    config, tensors = recorded("gptq-4-asymmetric")
    first = {"qweight": 4, "g_idx": 32, "scales": 1, "qzeros": 1}  # eight columns in a word
    tensors |= {key: tensors[key][:count] for key, count in first.items()}
    return {**config, "group_size": -1}, {**tensors, "expected": tensors["expected"][:, :32]}


def swapped_groups() -> Made:
    """The columns of both groups in the other order, as act order describes it."""
    config, tensors = recorded("ct-int4")
    tensors |= {key: torch.cat(tensors[key].chunk(2, 1)[::-1], 1) for key in ("weight_packed", "expected")}
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return config, {**tensors, "weight_g_idx": (torch.arange(64, dtype=torch.int32) < 32).int()}


def changed(
    name: str, config: dict[str, Any], of: Callable[[dict[str, Tensor]], object] = lambda tensors: None
) -> Made:
    old, tensors = recorded(name)
    of(tensors)
    return {**old, **config}, tensors


VARIANTS: dict[str, Callable[[], Made]] = {
    "version 2": lambda: changed("gptq-4-asymmetric", {"checkpoint_format": "gptq_v2"}, lambda t: t["qzeros"].add_(0x11111111)),
    "wrong version": lambda: changed("gptq-4", {"format": "gptq_v2"}),
    "gptq in rows": one_group,
    "act order": swapped_groups,
    "fp8 blocks": lambda: changed("ct-fp8-block", {"quant_method": "fp8", "weight_block_size": [16, 32]},
                                  lambda t: t.update(weight_scale_inv=t.pop("weight_scale"))),
    "fp8 tensor": lambda: changed("ct-fp8-tensor", {"quant_method": "fp8"}),
    "fbgemm": lambda: changed("ct-fp8-channel", {"quant_method": "fbgemm_fp8"}),
    "nf4 as bfloat16": lambda: changed("nf4", {}, lambda t: t.update(weight=t["weight"].flatten().view(torch.bfloat16))),
}  # fmt: skip


ALL: dict[str, Callable[[], Made]] = {**VARIANTS, **{name: lambda name=name: recorded(name) for name in KINDS}}


@pytest.mark.parametrize("name", ALL)
def test_the_weights_are_those_of_the_program(name: str) -> None:
    check(*ALL[name]())


def test_an_asymmetric_layer_that_is_labelled_symmetric_is_refused() -> None:
    config, tensors = changed("gptq-4-asymmetric", {"sym": True})
    with pytest.raises(CheckpointError, match=r"qzeros is I32 .*, with different zero points, but the configuration"):
        METHODS["gptq"](Fields(config, "config")).weight(in_memory(tensors))


def test_a_zero_point_of_0_in_version_1_borrows_from_its_neighbour() -> None:
    """GPTQModel subtracts 1 from all integers of a word at once, so that reading it back can add 1 to them at once."""
    config, tensors = recorded("gptq-4-asymmetric")
    zeros = torch.tensor([0x21F0_3500, 0x0123_0000], dtype=torch.int32)[:, None].expand(2, 4).contiguous()
    tensors |= {"qweight": torch.zeros_like(tensors["qweight"]), "qzeros": zeros - 0x11111111}
    tensors["scales"] = torch.ones_like(tensors["scales"])
    found = METHODS["gptq"](Fields(config, "config")).weight(in_memory(tensors))[5:13].floats()
    digits = [[(word >> 4 * i) & 15 for i in range(8)] * 4 for word in zeros[:, 0].tolist()]
    assert torch.equal(found[:, [0, 32]].T, -torch.tensor(digits).float()[:, 5:13])


@needs_kernels
@pytest.mark.parametrize("name", ["gptq-4", "awq-gemm", "llm-int8"])
def test_a_run_computes_with_the_stored_integers(tmp_path: Path, name: str) -> None:
    folder_of(tmp_path / "theirs", name)
    exact = loader.load_model(tmp_path / "theirs", dtype="float32", device="cpu")
    model = loader.build(open_checkpoint(tmp_path / "theirs"), device="cpu", dtype="bfloat16", fast=True)
    assert [m.format for m in model.modules() if isinstance(m, TileLinear)] == [KINDS[name][0]] * 5
    expected, found = exact(tokens(20)), model(tokens(20)).float()
    assert float((found - expected).norm() / expected.norm()) < 0.03
    if name == "awq-gemm":
        quantize(tmp_path / "theirs", tmp_path / "ours", "int4")
        before, after = (open_checkpoint(tmp_path / folder).weight(WEIGHT).groups() for folder in ("theirs", "ours"))
        assert torch.equal(before.quants, after.quants)
        assert torch.equal(before.scale, after.scale)


@pytest.mark.parametrize(("scale", "fits"), [(2.0**-15 * 1.25, True), (2.0**17, False), (2.0**-22 * 1.3, False)])
def test_scales_that_float16_lacks_are_dequantized(scale: float, fits: bool) -> None:
    config, tensors = recorded("ct-int4")
    tensors["weight_scale"] = (tensors["weight_scale"] * (scale / tensors["weight_scale"].max())).bfloat16()
    matrix = METHODS[config["quant_method"]](Fields(config, "config")).weight(in_memory(tensors))
    assert (matrix.format is not None) == fits
    assert float(matrix.floats().abs().max()) > scale


# ------------------------------------------------------------------------------------------------- around the weights
def test_biases_of_zeros_and_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    """Old versions of AutoGPTQ saved a bias for every layer."""
    model = folder_of(tmp_path, "gptq-4")
    extra = {f"{LAYER}.bias": torch.zeros(ROWS), f"{LAYER}.input_scale": torch.ones(1)}
    change(tmp_path, lambda state: state.update({**extra, "model.layers.0.self_attn.k_scale": torch.ones(1)}))
    compare(tmp_path, model)
    change(tmp_path, lambda state: state.update({f"{LAYER}.bias": torch.ones(ROWS)}))
    with pytest.raises(CheckpointError, match=r"1 tensor is unexpected: .*up_proj\.bias"):
        loader.load_model(tmp_path)


def test_some_layers_may_stay_floating_point(tmp_path: Path) -> None:
    model = folder_of(tmp_path, "gptq-4")

    def restore(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if name.startswith(f"{LAYER}.")]:
            del state[name]
        state[f"{LAYER}.weight"] = model.get_parameter(f"{LAYER}.weight")

    change(tmp_path, restore)
    compare(tmp_path, model)
    change(tmp_path, lambda state: state.update({f"{LAYER}.scales": torch.ones(2, ROWS)}))
    with pytest.raises(LlamaError, match=r"up_proj\.(weight|scales) is F32 .*, which GPTQ does not store beside"):
        open_checkpoint(tmp_path)


# --------------------------------------------------------------------------------------------------------- bad files


def g(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, **more}


def c(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


CONFIGS = {
    "another method": ({"quant_method": "exl2"}, "'exl2' can't be read; run it with vLLM, or get the weights in BF16"),
    "no method": ({"bits": 4}, "quant_method is missing"),
    "3 bits": (g(bits=3), r"bits is 3; supported: 4, 8; run it with vLLM"),
    "group 0": (g(group_size=0), "group_size must be an integer from 1"),
    "marlin": (g(checkpoint_format="marlin"), "checkpoint_format is 'marlin'.*run it with vLLM"),
    "mixed bits": (g(dynamic={".*up_proj": {"bits": 8}}), "dynamic is .*, expected none; run it with vLLM"),
    "awq gemv": ({**g(), "quant_method": "awq", "version": "gemv"}, "version is 'gemv'; supported: gemm, exllama, ipex"),
    "block of 0": ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size must be two sizes above 0"),
    "nvfp4": (c("nvfp4-pack-quantized", num_bits=4), "format is 'nvfp4-pack-quantized'.*run it with vLLM"),
    "int3": (c(num_bits=3), "num_bits is 3; supported: 8, 4"),
    "several schemes": (
        {**c(), "config_groups": {n: {"weights": {"num_bits": n}} for n in (4, 8)}},
        "the groups store weights in different ways; run it with vLLM, or get the weights in BF16"),
    "transform": ({**c(), "transform_config": {"R1": {}}}, "transform_config is .*, expected none"),
}  # fmt: skip


def test_a_bad_description_is_refused(tmp_path: Path) -> None:
    write(tmp_path, **SIZES)
    for scheme, text in CONFIGS.values():
        edit(tmp_path, quantization_config=scheme)
        with pytest.raises(LlamaError, match=rf"^[^\n]*config\.json[^\n]*{text}[^\n]*$"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ALL)
def test_a_damaged_part_is_one_line(name: str) -> None:
    config, tensors = ALL[name]()
    del tensors["expected"]
    method = METHODS[config["quant_method"]](Fields(config, "config"))
    for part, tensor in tensors.items():
        longer = torch.cat([tensor.flatten(), tensor.flatten()])
        for fault in (None, tensor.flatten()[:0], longer, torch.zeros(tensor.shape, dtype=torch.float64)):
            if fault is None and part in ("g_idx", "weight_format"):  # may be missing
                continue
            parts = {key: value for key, value in tensors.items() if key != part}
            layer = in_memory({**parts, **({} if fault is None else {part: fault})})
            with pytest.raises(LlamaError, match=rf"^[^\n]*({re.escape(part)}|layer)[^\n]*$"):
                method.weight(layer)[:16].floats()
