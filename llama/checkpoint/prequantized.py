"""Reader of Hugging Face folders whose weights another program has quantized: GPTQ, AWQ, FP8, bitsandbytes, ...

Several tensors store one weight; a `Method` of METHODS combines them. Integers go to the kernels unchanged if the
kernels' formats can represent them; other weights are dequantized when they are read. Sources: the packages AutoGPTQ
0.7.1 and GPTQModel 7.7 (GPTQ), AutoAWQ 0.2.9, compressed-tensors 0.20, bitsandbytes 0.50, transformers 5.23 (FP8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..checks import integer, is_integer, shown
from ..errors import CheckpointError, ConfigError
from ..system.documents import Fields, parse_json
from .huggingface import Layer, Method, StoredTensor, StoredWeight
from .integers import IntegerWeight, repeated, unpack_rows_of_words, unpack_words
from .quantized import METHOD, clearllama
from .weight import DTYPES

FLOAT8 = "F8_E4M3"
LARGEST_GROUP = 2**31
INSTEAD = "run it with vLLM, or get the weights in BF16"


class DequantizedWeight(StoredWeight):
    """A weight in a format that no layer computes with. `rows` dequantizes a slice of its rows: (n, K) float32."""

    def __init__(self, layer: Layer, stored: str, shape: tuple[int, int], rows: Callable[[slice], Tensor]):
        super().__init__(layer, shape, stored)
        self.rows = rows

    def dequantized(self) -> Tensor:
        rows, columns = self.part
        return self.rows(rows)[:, columns]


def _choice(fields: Fields, key: str, allowed: Sequence[Any]) -> Any:
    """A value that must be one of `allowed`, ignoring case; the first of them if it is missing."""
    value = fields.get(key, type(allowed[0]), allowed[0])
    value = value.lower() if isinstance(value, str) else value
    if value not in allowed:
        choices = ", ".join(map(str, allowed))
        raise ConfigError(f"{fields.where}: {key} is {shown(value)}; supported: {choices}; {INSTEAD}")
    return value


def _refuse(fields: Fields, *keys: str) -> None:
    """Raise ConfigError if one of these entries is set: each changes what is stored."""
    for key in keys:
        if value := fields.get(key, object, None):
            raise ConfigError(f"{fields.where}: {key} is {shown(value)}, expected none; {INSTEAD}")


def _group_size(fields: Fields) -> int:
    """The number of columns in a group. The largest one, a complete row, is written -1."""
    size = fields.get("group_size", int)
    return LARGEST_GROUP if size == -1 else integer(f"{fields.where}: group_size", size, 1, LARGEST_GROUP, ConfigError)


def _order(index: StoredTensor | None, columns: int, group: int, groups: int) -> Tensor | None:
    """The group of each column; None if the columns of every group are adjacent. Reads `columns` integers."""
    if index is None:
        return None
    order = index.expect(("I32", "I64"), (columns,)).read().long()
    if torch.equal(order, torch.arange(columns) // group) or bool((order == -1).all()):
        return None
    if int(order.min()) < 0 or int(order.max()) >= groups:
        raise index.error(f"with numbers from {int(order.min())} to {int(order.max())}, expected 0 to {groups - 1}")
    return order


def _signed_bytes(weight: StoredTensor) -> Callable[[slice], NDArray[np.uint8]]:
    """Rows of int8 as uint8, offset by 128."""
    return lambda rows: weight.read()[rows].numpy().view(np.uint8) ^ np.uint8(128)


# ------------------------------------------------------------------------------------------------------------ GPTQ
def gptq(fields: Fields) -> Method:
    """qweight (K bits / 32, N), qzeros (G, N bits / 32), scales (G, N), and g_idx (K,), the group of each column.

    Format gptq stores each zero point minus 1, gptq_v2 the zero point itself. In a symmetric model, all
    zero points are equal, and their value is not used, because some files' configuration names the wrong format.
    """
    bits, group = _choice(fields, "bits", (4, 8)), _group_size(fields)
    symmetric, reorders = fields.get("sym", bool, False), fields.get("desc_act", bool, False)
    formats = [_choice(fields, key, ("gptq", "gptq_v2")) for key in ("checkpoint_format", "format")]
    # A carry into the next integer is intended: the writer subtracted `ones` from the whole word.
    ones = np.uint32(0 if "gptq_v2" in formats else sum(1 << i for i in range(0, 32, bits)))
    _refuse(fields, "dynamic", "rotation")

    def weight(layer: Layer) -> StoredWeight:
        qweight = layer.matrix("qweight", ("I32",))
        columns, rows = qweight.shape[0] * 32 // bits, qweight.shape[1]
        groups = -(-columns // group)
        scales = layer["scales"].expect(DTYPES, (groups, rows))
        qzeros = layer["qzeros"].expect(("I32",), (groups, -(-rows * bits // 32)))
        if symmetric and bool((qzeros.read() != qzeros.read()[0, 0]).any()):
            raise qzeros.error("with different zero points, but the configuration says sym; get the weights in BF16")
        order = _order(layer["g_idx"] if reorders else layer.get("g_idx"), columns, group, groups)

        def zero(part: slice) -> Any:
            words = (qzeros.read().numpy().view(np.uint32) + ones).view(np.int32)
            return unpack_words(words, bits, part).T  # (n, G)

        def quants(part: slice) -> Any:
            return unpack_words(qweight.read()[:, part].numpy().T, bits)

        zeros = None if symmetric else zero
        shape, scale = (rows, columns), scales.read().T
        return IntegerWeight(layer, f"GPTQ int{bits}", shape, bits, group, quants, scale, zeros, order)

    return Method("GPTQ", ("qweight", "qzeros", "scales", "g_idx"), weight)


# ------------------------------------------------------------------------------------------------------------- AWQ
def awq(fields: Fields) -> Method:
    """4 bits: qweight (K, N / 8), qzeros (G, N / 8), scales (G, N)."""
    _choice(fields, "bits", (4,))
    group = _group_size(fields)
    for key in ("version", "format", "checkpoint_format"):
        _choice(fields, key, ("gemm", "exllama", "ipex"))  # the last two are ways to run gemm's layout

    def weight(layer: Layer) -> StoredWeight:
        qweight = layer.matrix("qweight", ("I32",))
        columns, rows = qweight.shape[0], 8 * qweight.shape[1]
        groups = -(-columns // group)
        scales = layer["scales"].expect(DTYPES, (groups, rows)).read().T
        qzeros = layer["qzeros"].expect(("I32",), (groups, rows // 8))

        def unpacked(tensor: StoredTensor) -> Callable[[slice], NDArray[np.uint8]]:
            return lambda part: unpack_rows_of_words(tensor.read().numpy(), part)

        shape, quants, zeros = (rows, columns), unpacked(qweight), unpacked(qzeros)
        return IntegerWeight(layer, "AWQ int4", shape, 4, group, quants, scales, zeros)

    return Method("AWQ", ("qweight", "qzeros", "scales"), weight)


# ------------------------------------------------------------------------------------------------------ 8-bit floats
def _scaled_floats(
    layer: Layer, weight: StoredTensor, scale: StoredTensor, blocks: Sequence[tuple[int, int]]
) -> StoredWeight:
    """A float8 weight with a scale for each block; without blocks, for each row or for the whole matrix."""
    rows, columns = weight.shape
    block = {(rows,): (1, columns), (rows, 1): (1, columns), (): weight.shape, (1,): weight.shape, (1, 1): weight.shape}
    if blocks:
        block = {(-(-rows // down), -(-columns // across)): (down, across) for down, across in blocks}
    if scale.shape not in block or scale.dtype not in DTYPES:
        raise scale.error(f"expected a floating-point tensor of shape {' or '.join(map(str, block))}")
    down, across = block[scale.shape]

    def floats(part: slice) -> Tensor:
        scales = scale.read().float().view(-1, -(-columns // across))[torch.arange(part.start, part.stop) // down]
        return weight.read()[part].float().mul_(repeated(scales, across, columns))  # (n, K)

    return DequantizedWeight(layer, "FP8", (rows, columns), floats)


def _block_sizes(fields: Fields, key: str) -> list[tuple[int, int]]:
    """[(rows, columns)] of a block; [] if there are no blocks."""
    sizes = fields.get(key, list, [])
    if len(sizes) not in (0, 2) or not all(is_integer(size) and 0 < size < 2**31 for size in sizes):
        raise ConfigError(f"{fields.where}: {key} must be two sizes above 0, got {shown(sizes)}")
    return [(sizes[0], sizes[1])] if sizes else []


def fp8(fields: Fields) -> Method:
    """weight in float8, and weight_scale_inv or weight_scale: one number, one for each row, or one for each block."""
    blocks = _block_sizes(fields, "weight_block_size")

    def weight(layer: Layer) -> StoredWeight:
        scale = layer.get("weight_scale") or layer["weight_scale_inv"]
        return _scaled_floats(layer, layer.matrix("weight", (FLOAT8,)), scale, blocks)

    return Method("FP8", ("weight", "weight_scale_inv", "weight_scale"), weight)


# ---------------------------------------------------------------------------------------------- compressed-tensors
def compressed_tensors(fields: Fields) -> Method:
    """Packed integers (weight_packed), or a weight in int8 or float8, with weight_scale and perhaps zero points.

    weight_packed (N, K bits / 32), weight_zero_point (N bits / 32, G), weight_shape: N and K. Packed integers are
    offset by 2^(bits - 1).
    """
    _choice(fields, "format", ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"))
    _refuse(fields, "transform_config")
    where, found = f"{fields.where}: config_groups", fields.get("config_groups", dict, {})
    schemes = [Fields(Fields(found, where).get(key, dict), where).get("weights", dict, {}) for key in found] or [{}]
    if any(scheme != schemes[0] for scheme in schemes):
        raise ConfigError(f"{where}: the groups store weights in different ways; {INSTEAD}")
    weights = Fields(schemes[0], where)
    width, symmetric = _choice(weights, "num_bits", (8, 4)), weights.get("symmetric", bool, True)
    reorders = weights.get("actorder", object, None) == "group"
    blocks = _block_sizes(weights, "block_structure")

    def weight(layer: Layer) -> StoredWeight:
        scale, bits = layer["weight_scale"], width
        if "weight_packed" in layer:
            packed = layer.matrix("weight_packed", ("I32",))
            rows, columns = layer["weight_shape"].expect(("I64", "I32"), (2,)).read().tolist()
            if columns < 1 or packed.shape != (rows, -(-columns * bits // 32)):
                raise packed.error(f"expected {bits} bits for the shape ({rows}, {columns}) in weight_shape")
        else:
            packed, bits = layer.matrix("weight", ("I8", FLOAT8)), 8
            rows, columns = packed.shape
        groups = scale.shape[1] if len(scale.shape) == 2 else 1
        group = -(-columns // (groups or 1))
        if packed.dtype == FLOAT8:
            return _scaled_floats(layer, packed, scale, blocks or [(1, group)] * (groups > 1))
        if scale.dtype not in DTYPES or scale.shape not in ((), (1,), (1, 1), (rows,), (rows, columns // group)):
            raise scale.error(f"expected floating-point numbers for {rows} rows of equal groups of {columns} columns")
        order = _order(layer["weight_g_idx"] if reorders else layer.get("weight_g_idx"), columns, group, groups)

        def unpacked(part: slice) -> Any:
            return unpack_words(packed.read()[part].numpy(), bits, slice(columns))

        def zero(part: slice) -> Any:
            zeros = layer["weight_zero_point"].read().numpy().T
            return unpack_words(zeros, bits, part).T  # (n, G)

        quants = _signed_bytes(packed) if packed.dtype == "I8" else unpacked
        if not symmetric:
            layer["weight_zero_point"].expect(("I32",), (-(-rows * bits // 32), groups))
        # one value, one value for each row, or (N, G) values
        scales = scale.read().view(-1, groups if math.prod(scale.shape) > 1 else 1).expand(rows, groups)
        label, zeros = f"compressed-tensors int{bits}", None if symmetric else zero
        return IntegerWeight(layer, label, (rows, columns), bits, group, quants, scales, zeros, order)

    tensors = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    return Method("compressed-tensors", tensors, weight)


# ---------------------------------------------------------------------------------------------------- bitsandbytes
STATE = "weight.quant_state.bitsandbytes__nf4"


def bitsandbytes(fields: Fields) -> Method:
    """4 bits: a codebook of 16 values, and the largest value of each block. Another codebook may quantize the latter.

    8 bits: int8 with the largest value of each row, SCB.
    """

    def weight(layer: Layer) -> StoredWeight:
        if STATE in layer:
            return _codebook(layer, layer[STATE])
        weight = layer.matrix("weight", ("I8",))
        if "weight_format" in layer and bool(layer["weight_format"].expect(("U8",), ()).read()):
            raise layer["weight_format"].error("expected 0, the layout by rows; other layouts are for GPU kernels")
        scale = layer["SCB"].expect(DTYPES, weight.shape[:1]).read()[:, None].float() / 127
        shape, quants = (weight.shape[0], weight.shape[1]), _signed_bytes(weight)
        return IntegerWeight(layer, "bitsandbytes int8", shape, 8, shape[1], quants, scale)

    parts = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    return Method(
        "bitsandbytes", (STATE, *(f"weight.{part}" for part in parts), "weight", "SCB", "weight_format"), weight
    )


def _codebook(layer: Layer, state: StoredTensor) -> StoredWeight:
    """A weight in NF4. Its quant_state is JSON with the shape and the sizes of the blocks."""
    where, text = f"{state.path}: {state.name}", state.expect(("U8",), state.shape).read().numpy().tobytes()
    fields = Fields(parse_json(text, where), where)
    nested = "weight.nested_absmax" in layer
    shape, block = tuple(fields.get("shape", list)), fields.get("blocksize", int)
    inner = fields.get("nested_blocksize", int) if nested else 1
    offset = fields.get("nested_offset", float) if nested else 0.0
    sizes = (*shape, block, inner)
    if len(shape) != 2 or not all(is_integer(n) and 0 < n < 2**31 for n in sizes) or shape[1] % 2:
        raise CheckpointError(f"{where}: expected sizes above 0 and rows of even length, got {shown(list(sizes))}")
    rows, columns = shape
    weight, blocks = layer["weight"], -(-rows * columns // block)
    if weight.read().nbytes != rows * columns // 2:
        raise weight.error(f"expected {rows * columns // 2} bytes")
    packed = weight.read().flatten().view(torch.uint8)  # the bytes may be stored in another dtype
    values = layer["weight.quant_map"].expect(("F32",), (16,)).read()
    absmax = layer["weight.absmax"].expect(("U8",) if nested else ("F32",), (blocks,)).read()
    if nested:
        outer = layer["weight.nested_absmax"].expect(("F32",), (-(-blocks // inner),)).read()
        table = layer["weight.nested_quant_map"].expect(("F32",), (256,)).read()

    def floats(part: slice) -> Tensor:
        first, last = part.start * columns, part.stop * columns
        pairs = torch.cartesian_prod(values, values)  # (256, 2): the values of each byte, high 4 bits first
        found = F.embedding(packed[first // 2 : last // 2].int(), pairs).flatten()  # (n K,)
        start, end = first // block, -(-last // block)
        largest = absmax[start:end]
        if nested:
            largest = table[largest.int()] * outer[torch.arange(start, end) // inner] + offset
        found *= largest.repeat_interleave(block)[first - start * block :][: last - first]
        return found.view(-1, columns)

    return DequantizedWeight(layer, "NF4", (rows, columns), floats)


# quant_method -> a function that returns the Method for a quantization_config, or raises ConfigError
METHODS: dict[str, Callable[[Fields], Method]] = {
    "gptq": gptq, "awq": awq, "fp8": fp8, "fbgemm_fp8": fp8, "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes, METHOD: clearllama,
}  # fmt: skip


def method_of(settings: Mapping[str, Any], where: str) -> Method | None:
    """The method that a config.json names; None if the weights are floats. Raises ConfigError."""
    if (found := Fields(settings, where).get("quantization_config", dict, None)) is None:
        return None
    fields = Fields(found, f"{where}: quantization_config")
    if (kind := fields.get("quant_method", str)) not in METHODS:
        raise ConfigError(f"{fields.where}: weights quantized by {kind!r:.40} can't be read; {INSTEAD}, or as GGUF")
    return METHODS[kind](fields)
