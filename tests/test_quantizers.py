"""Layers that the original quantization programs packed: our readers return the weights that those programs do.

data/quantizers.safetensors holds one small layer of each program, with the weight that the program's own code returns
for it: AutoGPTQ 0.7.1, AutoAWQ 0.2.9, compressed-tensors 0.20, bitsandbytes 0.50. The slow tests make the layers of the
last two again, if they are installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from llama.checkpoint.huggingface import DTYPES, StoredTensor
from llama.checkpoint.prequantized import METHODS, Layer
from llama.system.documents import Fields

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDED = Path(__file__).parent / "data" / "quantizers.safetensors"
ROWS, COLUMNS, GROUP = 32, 64, 32
Made = tuple[dict[str, Any], dict[str, Tensor]]  # quantization_config; the layer's tensors and "expected", the weight


def original() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) / 8


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
LAYERS = [*MAKERS, "gptq-4", "gptq-4-asymmetric", "gptq-4-order", "gptq-8", "awq-gemm"]


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


@pytest.mark.parametrize("name", LAYERS)
def test_recorded_layers_have_the_weights_of_their_programs(name: str) -> None:
    check(*recorded(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_layers_have_the_weights_of_the_installed_programs(name: str) -> None:
    config, tensors = MAKERS[name]()
    check(config, {key: tensor.detach().clone() for key, tensor in tensors.items()})
