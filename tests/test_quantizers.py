"""Layers that the original quantization programs packed: our readers return the weights that those programs do.

data/quantizers.safetensors holds one small layer of each program, with the weight that the program's own code returns
for it. The slow tests make the layers again with the installed programs; `python -m tests.test_quantizers` records them.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from llama.checkpoint.huggingface import DTYPES, StoredTensor
from llama.checkpoint.prequantized import METHODS, Layer
from llama.system.documents import Fields

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDED = Path(__file__).parent / "data" / "quantizers.safetensors"
ROWS, COLUMNS, GROUP = 32, 64, 32
Made = tuple[dict[str, Any], dict[str, Tensor]]  # quantization_config; the layer's tensors and "expected", the weight


def original() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) / 8


def module(name: str) -> Any:
    """A module of an installed program, without running the __init__.py of its packages, which import everything.

    Skips the test if the program or one of its requirements is not installed.
    """
    parts = name.split(".")
    spec = PathFinder.find_spec(parts[0])
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"{parts[0]} is not installed")
    folder = Path(spec.submodule_search_locations[0])
    for i in range(1, len(parts)):
        package = types.ModuleType(".".join(parts[:i]))
        package.__path__ = [str(folder.joinpath(*parts[1:i]))]
        sys.modules.setdefault(package.__name__, package)
    return pytest.importorskip(name, exc_type=ImportError)


def rounding(w: Tensor, top: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales and zero points (N, G) of groups: scales that float16 has."""
    groups = w.view(ROWS, -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    if symmetric:
        return (2 * groups.abs().amax(-1) / top).half().float(), torch.full_like(low, (top + 1) // 2)
    scale = ((high - low) / top).half().float()
    return scale, (-low / scale).round().clamp(0, top)


def clipped(w: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
    """The weight without what the integers can't represent, as calibration leaves it."""
    of_column = torch.arange(COLUMNS) // GROUP
    return torch.minimum(torch.maximum(w, (-zero * scale)[:, of_column]), ((top - zero) * scale)[:, of_column])


def auto_gptq(bits: int, symmetric: bool, order: bool = False) -> Made:
    kind = "cuda" if order else "cuda_old"
    program = module(f"auto_gptq.nn_modules.qlinear.qlinear_{kind}")
    w = original()
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    group_of = torch.arange(COLUMNS, dtype=torch.int32) // GROUP
    columns = torch.arange(COLUMNS)  # those of a group together
    if order:
        group_of = group_of[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))]
        columns = group_of.argsort(stable=True)
    scale, zero = rounding(w[:, columns], 2**bits - 1, symmetric)
    layer.weight.data = clipped(w[:, columns], scale, zero, 2**bits - 1)[:, columns.argsort()]
    quantized = program.QuantLinear(bits, GROUP, COLUMNS, ROWS, False, weight_dtype=torch.float32)
    quantized.pack(layer, scale, zero.clone(), group_of)
    expected = quantized(torch.eye(COLUMNS)).T  # with float32 scales; saved in float16, which has them
    tensors = {"qweight": quantized.qweight, "qzeros": quantized.qzeros, "scales": quantized.scales.half()}
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": order, "sym": symmetric}
    return config, {**tensors, "g_idx": quantized.g_idx.int(), "expected": expected}


def auto_awq() -> Made:
    packing = module("awq.utils.packing_utils")
    program = module("awq.modules.linear.gemm")
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    scale, zero = rounding(original(), 15, False)
    layer.weight.data = clipped(original(), scale, zero, 15)
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    made = program.WQLinear_GEMM.from_linear(layer, 4, GROUP, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
    expected = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), 4, GROUP).T
    return config, {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales, "expected": expected}


def compressed_tensors(form: str, **arguments: Any) -> Made:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    w = original()
    weights = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=form)
    strategy, top = str(weights.strategy), 448.0 if weights.type == "float" else 2.0**weights.num_bits - 1
    blocks = {
        "tensor": (ROWS, COLUMNS),
        "channel": (1, COLUMNS),
        "group": (1, weights.group_size or 1),
        "block": (16, 32),
    }
    down, across = blocks[strategy]
    tiles = w.view(ROWS // down, down, COLUMNS // across, across).transpose(1, 2).flatten(2)
    low, high = tiles.amin(-1).clamp(max=0), tiles.amax(-1)
    span = tiles.abs().amax(-1) * (1 if weights.type == "float" else 2) if weights.symmetric else high - low
    scale = (span / top).half().float()
    state = {"weight": w, "weight_scale": scale.view(1) if strategy == "tensor" else scale}
    if not weights.symmetric:
        zero = (-low / scale).round() - 2 ** (weights.num_bits - 1)
        state["weight_zero_point"] = zero.to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    group = {"weights": json.loads(weights.model_dump_json()), "targets": ["Linear"]}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return config, {**stored, "expected": expected}


def bitsandbytes(kind: str, nested: bool) -> Made:
    functional = pytest.importorskip("bitsandbytes").functional
    w = original()
    if kind == "int8":
        quants, largest, _ = functional.int8_vectorwise_quant(w.half())
        expected = functional.int8_vectorwise_dequant(quants, largest)
        return {"quant_method": "bitsandbytes", "load_in_8bit": True}, {
            "weight": quants, "SCB": largest, "expected": expected.float()
        }  # fmt: skip
    packed, state = functional.quantize_4bit(w, blocksize=64, quant_type=kind, compress_statistics=nested)
    expected = functional.dequantize_4bit(packed, state)
    tensors = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    return {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"weight": packed, **tensors, "expected": expected}


MAKERS: dict[str, Callable[[], Made]] = {
    "gptq-4": lambda: auto_gptq(4, True),
    "gptq-4-asymmetric": lambda: auto_gptq(4, False),
    "gptq-4-order": lambda: auto_gptq(4, False, order=True),
    "gptq-8": lambda: auto_gptq(8, False),
    "awq-gemm": auto_awq,
    "ct-int4": lambda: compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "ct-int4-asymmetric": lambda: compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
    "ct-int8": lambda: compressed_tensors("int-quantized", num_bits=8, strategy="channel"),
    "ct-int8-asymmetric": lambda: compressed_tensors("int-quantized", num_bits=8, strategy="group", group_size=32, symmetric=False),
    "ct-fp8-tensor": lambda: compressed_tensors("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "ct-fp8-channel": lambda: compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel"),
    "ct-fp8-block": lambda: compressed_tensors("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
    "nf4": lambda: bitsandbytes("nf4", False),
    "nf4-nested": lambda: bitsandbytes("nf4", True),
    "llm-int8": lambda: bitsandbytes("int8", False),
}  # fmt: skip


def in_memory(tensors: dict[str, Tensor]) -> Layer:
    """A layer's tensors as a file has them."""
    return Layer({
        name: StoredTensor(Path("layer"), name, DTYPES.get(tensor.dtype, "?"), tuple(tensor.shape), lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    })  # fmt: skip


def check(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Compare the weight that our reader returns with the expected one; blocks and floats with each other."""
    expected = tensors.pop("expected").float()
    matrix = METHODS[config["quant_method"]](Fields(config, "config")).matrix(in_memory(tensors))
    found = matrix.floats(slice(None))
    assert matrix.shape == found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
    assert torch.equal(matrix.floats(slice(3, 21)), found[3:21])
    blocks = matrix.blocks(slice(5, 30))
    if blocks is not None:
        torch.testing.assert_close(blocks.weight, expected[5:30], rtol=1e-6, atol=1e-7)


def recorded(name: str) -> Made:
    """A layer as its program packed it when the file was recorded."""
    with safe_open(RECORDED, "pt") as file:
        keys = [key for key in file.offset_keys() if key.startswith(f"{name}/")]
        return json.loads(file.metadata()[name]), {key.removeprefix(f"{name}/"): file.get_tensor(key) for key in keys}


@pytest.mark.parametrize("name", MAKERS)
def test_recorded_layers_have_the_weights_of_their_programs(name: str) -> None:
    check(*recorded(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_layers_have_the_weights_of_the_installed_programs(name: str) -> None:
    config, tensors = MAKERS[name]()
    check(config, {key: tensor.detach().clone() for key, tensor in tensors.items()})


def record() -> None:
    """Make the layers and save them."""
    metadata, found = {}, {}
    for name, make in MAKERS.items():
        config, tensors = make()
        metadata[name] = json.dumps(config)
        found |= {f"{name}/{key}": tensor.detach().clone().contiguous() for key, tensor in tensors.items()}
    RECORDED.parent.mkdir(exist_ok=True)
    save_file(found, RECORDED, metadata)


if __name__ == "__main__":
    record()
