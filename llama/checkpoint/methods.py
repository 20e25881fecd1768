"""Quantization methods of Hugging Face folders: from quantization_config and a layer's tensors to a matrix.

METHODS has the supported methods; OTHERS has methods that are not supported, and the programs that run them. Sources:
the packages AutoGPTQ 0.7.1 and GPTQModel 7.7 (GPTQ), AutoAWQ 0.2.9, compressed-tensors 0.20, bitsandbytes 0.50, and
transformers 5.23 (fp8, fbgemm_fp8).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import is_integer, is_number
from ..errors import CheckpointError, ConfigError
from ..quant.matrices import Codebook, Integers, Matrix, ScaledFloats, unpack_rows_of_words, unpack_slice, unpack_words
from .documents import Fields, describe, parse_json
from .huggingface import WeightFile

REMEDY = "download the folder again, or get the weights in BF16"
FLOATS, FLOAT8 = ("F16", "BF16", "F32"), ("F8_E4M3", "F8_E5M2")
NO_ACTIVATIONS = "activations are not quantized here; the results are closer to those of the unquantized model"
NO_CACHE = "the scales for an 8-bit KV cache are ignored"


@dataclass(frozen=True)
class Part:
    """One tensor of a quantized layer, in its file."""

    file: WeightFile
    source: str

    @property
    def dtype(self) -> str:
        return self.file.dtypes[self.source]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.shapes[self.source]

    def read(self) -> Tensor:
        """The tensor, mapped."""
        return self.file.tensor(self.source)

    def wrong(self, expected: str) -> CheckpointError:
        """The error for a tensor that is not as expected."""
        return CheckpointError(
            f"{self.file.path}: {self.source} is {self.dtype} {self.shape}; expected {expected}; the file is damaged"
            f" or its config.json belongs to another model; {REMEDY}"
        )

    def check(self, dtypes: Sequence[str], shape: tuple[int, ...], why: str = "") -> Part:
        """Return the part. Raises CheckpointError unless it has one of the dtypes and the shape."""
        if self.dtype not in dtypes or self.shape != shape:
            raise self.wrong(f"{' or '.join(dtypes)} {shape}{why and f' for {why}'}")
        return self


Parts = Mapping[str, Part]


class Method(ABC):
    """How the weights of a folder are stored, by its quantization_config.

    name     display name
    tensors  suffixes of a layer's tensors, the part of a name after the layer's; may include `weight`
    unused   suffixes of tensors that have no effect here -> the reason
    notes    parts of the configuration that have no effect here
    """

    name: str
    tensors: tuple[str, ...]
    unused: Mapping[str, str] = {}

    def __init__(self, fields: Fields):
        """Read the configuration. Raises ConfigError."""
        self.notes: list[str] = []

    @abstractmethod
    def matrix(self, parts: Parts, layer: str) -> tuple[Matrix, str]:
        """The weight that a layer's tensors store, and a name for how. Reads little. Raises CheckpointError."""


def _part(parts: Parts, name: str, layer: str) -> Part:
    if name not in parts:
        other = next(iter(parts.values()))
        raise CheckpointError(
            f"{other.file.path}: {layer}.{name} is missing, but {other.source} is there; the file is damaged; {REMEDY}"
        )
    return parts[name]


def _choice(fields: Fields, key: str, allowed: Sequence[Any], what_to_do: str) -> Any:
    """A value that must be one of `allowed`, ignoring case; the first of them if it is missing."""
    value = fields.get(key, object, None)
    if value is None:
        return allowed[0]
    same = value.lower() if isinstance(value, str) else value
    if not any(type(same) is type(choice) and same == choice for choice in allowed):
        choices = ", ".join(map(repr, allowed))
        raise ConfigError(f"{fields.where}: {key} is {describe(value)}; supported: {choices}; {what_to_do}")
    return same


def _group_size(fields: Fields, *keys: str) -> int:
    """The number of columns in a group; -1 for a complete row."""
    key = next((key for key in keys if fields.get(key, object, None) is not None), keys[0])
    size = fields.get(key, int)
    if size != -1 and not 0 < size < 2**31:
        raise ConfigError(f"{fields.where}: {key} must be above 0, or -1 for a complete row, got {size}; {REMEDY}")
    return size


def _order(part: Part | None, columns: int, group: int, groups: int) -> Tensor | None:
    """The group of each column; None if every group is adjacent columns. Reads `columns` integers."""
    if part is None:
        return None
    order = part.check(("I32", "I64"), (columns,)).read().long()
    if bool((order == torch.arange(columns) // group).all()) or bool((order == -1).all()):
        return None
    if int(order.min()) < 0 or int(order.max()) >= groups:
        raise CheckpointError(
            f"{part.file.path}: {part.source} has numbers from {int(order.min())} to {int(order.max())}; expected 0 to"
            f" {groups - 1}, the groups of the scales; the file is damaged; {REMEDY}"
        )
    return order


GPU_LAYOUT = "other layouts are for GPU kernels: run it with vLLM, or get the repository's GPTQ, AWQ or GGUF files"


# ------------------------------------------------------------------------------------------------------------ GPTQ
class GPTQ(Method):
    """qweight (K bits / 32, N), qzeros (G, N bits / 32), scales (G, N), and g_idx (K,), the group of each column.

    Version 1 stores each zero point minus 1, version 2 the zero point itself.
    """

    name = "GPTQ"
    tensors = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, fields: Fields):
        super().__init__(fields)
        fields.get("bits", int)
        self.bits = _choice(fields, "bits", (2, 3, 4, 8), "run it with GPTQModel, or get a version in 4 bits")
        self.group = _group_size(fields, "group_size")
        formats = [_choice(fields, key, ("gptq", "gptq_v2"), GPU_LAYOUT) for key in ("checkpoint_format", "format")]
        self.first = 0 if "gptq_v2" in formats else 1
        _choice(fields, "is_marlin_format", (False,), GPU_LAYOUT)
        _choice(fields, "pack_dtype", ("int32",), GPU_LAYOUT)
        if rotation := fields.get("rotation", object, None):
            raise ConfigError(
                f"{fields.where}: rotation is {describe(rotation)}, expected none; get the weights in BF16"
            )
        self.mixed = bool(fields.get("dynamic", object, None))  # layers may have different bits and groups

    def matrix(self, parts: Parts, layer: str) -> tuple[Matrix, str]:
        """The weight of a layer. In mixed models, its bits and groups are computed from the shapes."""
        qweight, scales = _part(parts, "qweight", layer), _part(parts, "scales", layer)
        bits, why = self.bits, f"{self.bits} bits in groups of {self.group}"
        if len(qweight.shape) != 2 or len(scales.shape) != 2 or 0 in (*qweight.shape, *scales.shape):
            raise qweight.wrong("a matrix, and a matrix of scales")
        columns = qweight.shape[0] * 32 // bits
        if self.mixed and "g_idx" in parts:
            columns = (parts["g_idx"].shape or (0,))[0]
            bits, why = qweight.shape[0] * 32 // max(columns, 1), "the columns of g_idx"
        if bits not in (2, 3, 4, 8) or columns * bits != qweight.shape[0] * 32:
            raise qweight.wrong(f"rows of 2, 3, 4 or 8 bits a weight, in words of 32 bits, for {why}")
        rows, groups = qweight.shape[1], scales.shape[0]
        group = -(-columns // groups) if self.mixed else self.group if self.group > 0 else columns
        groups = -(-columns // group)
        qweight.check(("I32",), qweight.shape, why)
        scales.check(FLOATS, (groups, rows), why)
        qzeros = _part(parts, "qzeros", layer).check(("I32",), (groups, -(-rows * bits // 32)), why)
        order = _order(parts.get("g_idx"), columns, group, groups)

        def zero(part: slice) -> Any:
            first, last, _ = part.indices(rows)
            words = qzeros.read().numpy()
            if bits != 3 and self.first:  # a carry into the next integer is intended: saving subtracted the same number
                words = (words.view(np.uint32) + np.uint32(sum(1 << i for i in range(0, 32, bits)))).view(np.int32)
            zeros = unpack_slice(words, bits, slice(first, last))
            zeros = zeros + np.uint8(1) & np.uint8(7) if bits == 3 and self.first else zeros
            return zeros.T  # (n, G)

        def quants(part: slice) -> Any:
            return unpack_words(qweight.read()[:, part].numpy().T, bits, columns)

        matrix = Integers((rows, columns), bits, group, quants, lambda p: scales.read()[:, p].T.float(), zero, order)
        return matrix, f"GPTQ int{bits}"


# ------------------------------------------------------------------------------------------------------------- AWQ
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # rows of the 4-bit integers in a word, lowest bits first


class AWQ(Method):
    """4 bits. gemm: qweight (K, N / 8), qzeros (G, N / 8), scales (G, N); gemv: the same with rows first, padded."""

    name = "AWQ"
    tensors = ("qweight", "qzeros", "scales")

    def __init__(self, fields: Fields):
        super().__init__(fields)
        key = "bits" if fields.get("w_bit", object, None) is None else "w_bit"
        fields.get(key, int)
        _choice(fields, key, (4,), "get a version in 4 bits, or the weights in BF16")
        self.group = _group_size(fields, "group_size", "q_group_size")
        versions = ("gemm", "gemv", "exllama", "ipex")  # the last two are ways to run gemm's layout
        keys = ("version", "format", "checkpoint_format")
        self.by_rows = "gemv" in [_choice(fields, key, versions, GPU_LAYOUT) for key in keys]

    def matrix(self, parts: Parts, layer: str) -> tuple[Matrix, str]:
        """The weight of a layer."""
        qweight = _part(parts, "qweight", layer)
        if len(qweight.shape) != 2 or 0 in qweight.shape:
            raise qweight.wrong("a matrix")
        first, second = qweight.shape
        rows, columns = (first, 8 * second) if self.by_rows else (8 * second, first)
        group = columns if self.group < 0 else min(self.group, columns)
        groups, why = -(-columns // group), f"groups of {self.group}"
        unit = 8 * (4 if group == 32 else 2 if group == 64 else 1)
        width = -(-groups // unit) * unit  # groups of a row, padded in gemv
        by_group = (rows, width) if self.by_rows else (groups, rows)
        qweight.check(("I32",), qweight.shape, why)
        scales = _part(parts, "scales", layer).check(FLOATS, by_group, why)
        qzeros = _part(parts, "qzeros", layer).check(("I32",), (by_group[0], by_group[1] // 8), why)

        def gemm(words: Tensor, part: slice) -> Any:
            start, stop, _ = part.indices(rows)
            unpacked = unpack_rows_of_words(words[:, start // 8 : -(-stop // 8)].numpy(), AWQ_ROWS)
            return unpacked[start % 8 : start % 8 + stop - start]

        if self.by_rows:
            matrix = Integers(
                (rows, columns),
                4,
                group,
                lambda part: unpack_words(qweight.read()[part].numpy(), 4, columns),
                lambda part: scales.read()[part, :groups].float(),
                lambda part: unpack_words(qzeros.read()[part].numpy(), 4, groups),
            )
        else:
            matrix = Integers(
                (rows, columns),
                4,
                group,
                lambda part: gemm(qweight.read(), part),
                lambda part: scales.read()[:, part].T.float(),
                lambda part: gemm(qzeros.read(), part),
            )
        return matrix, "AWQ int4"


# ------------------------------------------------------------------------------------------------------ 8-bit floats
def _scaled_floats(
    weight: Part, scale: Part, blocks: Iterable[tuple[int, int]], only_blocks: bool = False
) -> tuple[Matrix, str]:
    """A weight in float8 with one scale for each block of one of these sizes, or one for each row, or a single one."""
    if weight.dtype not in FLOAT8 or len(weight.shape) != 2 or 0 in weight.shape:
        raise weight.wrong(f"a matrix of {' or '.join(FLOAT8)}")
    rows, columns = weight.shape
    forms = {(): weight.shape, (1,): weight.shape, (1, 1): weight.shape, (rows,): (1, columns), (rows, 1): (1, columns)}
    forms = {} if only_blocks else forms
    forms |= {(-(-rows // down), -(-columns // across)): (down, across) for down, across in blocks}
    if scale.shape not in forms or scale.dtype not in (*FLOATS, "F8_E8M0"):
        raise scale.wrong(f"a floating-point tensor of shape {' or '.join(map(str, forms))}")
    block = forms[scale.shape]
    count = -(-columns // block[1])
    return ScaledFloats((rows, columns), block, weight.read, lambda: scale.read().float().view(-1, count)), "FP8"


def _block_sizes(fields: Fields, key: str) -> set[tuple[int, int]]:
    """Rows and columns of a block, from a list of both; empty if there are no blocks."""
    value = fields.get(key, object, None)
    if value is None:
        return set()
    if not isinstance(value, list) or len(value) != 2 or not all(is_integer(n) and 0 < n < 2**31 for n in value):
        raise ConfigError(f"{fields.where}: {key} must be two sizes above 0, got {describe(value)}; {REMEDY}")
    return {(value[0], value[1])}


class FP8(Method):
    """weight in float8, and weight_scale_inv or weight_scale: one number, one for each row, or one for each block."""

    name = "FP8"
    tensors = ("weight", "weight_scale_inv", "weight_scale")
    unused = dict.fromkeys(("input_scale", "activation_scale", "input_scale_ub"), NO_ACTIVATIONS) | dict.fromkeys(
        ("k_scale", "v_scale", "kv_scale"), NO_CACHE
    )

    def __init__(self, fields: Fields):
        super().__init__(fields)
        self.blocks = _block_sizes(fields, "weight_block_size")
        self.notes.append(NO_ACTIVATIONS)

    def matrix(self, parts: Parts, layer: str) -> tuple[Matrix, str]:
        """The weight of a layer."""
        scale = parts.get("weight_scale") or _part(parts, "weight_scale_inv", layer)
        return _scaled_floats(_part(parts, "weight", layer), scale, self.blocks, only_blocks=bool(self.blocks))


# ---------------------------------------------------------------------------------------------- compressed-tensors
class CompressedTensors(Method):
    """Packed integers (weight_packed), or a weight in int8 or float8, with weight_scale and perhaps zero points.

    weight_packed (N, K bits / 32), weight_zero_point (N bits / 32, G), weight_shape: N and K. Packed integers are
    offset by 2^(bits - 1). Each layer has the number of bits of one of the configuration's groups.
    """

    name = "compressed-tensors"
    tensors = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    unused = dict.fromkeys(("input_scale", "input_zero_point"), NO_ACTIVATIONS) | dict.fromkeys(
        ("k_scale", "v_scale", "k_zero_point", "v_zero_point", "output_scale", "output_zero_point"), NO_CACHE
    )
    FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")

    def __init__(self, fields: Fields):
        super().__init__(fields)
        run = "run it with vLLM, or get it in one of these"
        _choice(fields, "format", self.FORMATS, run)
        if fields.get("transform_config", object, None):
            raise ConfigError(
                f"{fields.where}: transform_config rotates the inputs of layers, which is not supported; {run}"
            )
        if (sparsity := fields.get("sparsity_config", dict, None)) and sparsity.get("format") not in (None, "dense"):
            _choice(Fields(sparsity, f"{fields.where}: sparsity_config"), "format", ("dense",), run)
        groups = fields.get("config_groups", dict, None) or {}
        self.bits: set[int] = set()
        self.blocks: set[tuple[int, int]] = set()
        for key in groups:
            where = f"{fields.where}: config_groups: {key}"
            group = Fields(groups, where).get(key, dict, None) or {}
            inner = Fields(group, where)
            _choice(inner, "format", self.FORMATS, run)
            weights = Fields(inner.get("weights", dict, None) or {}, f"{where}: weights")
            self.bits.add(weights.get("num_bits", int, 8))
            self.blocks |= _block_sizes(weights, "block_structure")
            if inner.get("input_activations") is not None and NO_ACTIVATIONS not in self.notes:
                self.notes.append(NO_ACTIVATIONS)

    def matrix(self, parts: Parts, layer: str) -> tuple[Matrix, str]:
        """The weight of a layer."""
        scale = _part(parts, "weight_scale", layer)
        if "weight_packed" in parts:
            return self._packed(parts, scale, layer)
        weight = _part(parts, "weight", layer)
        if weight.dtype == "I8" and len(weight.shape) == 2:
            return self._integers(parts, weight, scale)
        by_group = len(scale.shape) == len(weight.shape) == 2 and scale.shape[1] > 0
        groups = {(1, -(-weight.shape[1] // scale.shape[1]))} if by_group else set()
        return _scaled_floats(weight, scale, self.blocks | groups)

    def _packed(self, parts: Parts, scale: Part, layer: str) -> tuple[Matrix, str]:
        packed, size = _part(parts, "weight_packed", layer), _part(parts, "weight_shape", layer)
        rows, columns = size.check(("I64", "I32"), (2,)).read().tolist()
        if len(packed.shape) != 2 or packed.shape[0] != rows or packed.dtype != "I32" or not 0 < columns < 2**31:
            raise packed.wrong(f"I32 with the {rows} rows that weight_shape names")
        found = [b for b in sorted(self.bits) if 0 < b <= 8 and -(-columns * b // 32) == packed.shape[1]]
        if not found:
            raise packed.wrong(f"rows of {columns} integers of {' or '.join(map(str, sorted(self.bits)))} bits")
        bits = found[0]
        groups = _groups(scale, rows, columns)
        group = -(-columns // groups)
        zeros = parts.get("weight_zero_point")
        if zeros is not None and zeros.dtype == "I32":
            zeros.check(("I32",), (-(-rows * bits // 32), groups))
        elif zeros is not None:
            zeros.check(("I8",), scale.shape)
        order = _order(parts.get("weight_g_idx"), columns, group, groups)

        def zero(part: slice) -> Any:
            if zeros is None or zeros.dtype != "I32":
                return _rows_of(zeros, rows, groups)[part].numpy().astype(np.int16) + 2 ** (bits - 1)
            first, last, _ = part.indices(rows)
            return unpack_slice(zeros.read().numpy().T, bits, slice(first, last)).T

        return (
            Integers(
                (rows, columns),
                bits,
                group,
                lambda part: unpack_words(packed.read()[part].numpy(), bits, columns),
                lambda part: _rows_of(scale, rows, groups)[part].float(),
                None if zeros is None else zero,
                order,
            ),
            f"compressed-tensors int{bits}",
        )

    def _integers(self, parts: Parts, weight: Part, scale: Part) -> tuple[Matrix, str]:
        rows, columns = weight.shape
        groups = _groups(scale, rows, columns)
        zeros = parts.get("weight_zero_point")
        if zeros is not None:
            zeros.check(("I8",), scale.shape)
        return (
            Integers(
                (rows, columns),
                8,
                -(-columns // groups),
                lambda part: weight.read()[part].numpy().view(np.uint8) ^ np.uint8(128),
                lambda part: _rows_of(scale, rows, groups)[part].float(),
                None if zeros is None else lambda p: _rows_of(zeros, rows, groups)[p].numpy().astype(np.int16) + 128,
            ),
            "compressed-tensors int8",
        )


def _groups(scale: Part, rows: int, columns: int) -> int:
    """The number of groups of a row, by the shape of the scales: one number, (N,), or (N, G)."""
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    fits = scale.shape in ((), (1,), (1, 1), (rows,), (rows, groups))
    if scale.dtype not in FLOATS or not fits or not 0 < groups <= columns or columns % groups:
        raise scale.wrong(f"a floating-point tensor with {rows} rows and a number of columns that divides {columns}")
    return groups


def _rows_of(part: Part | None, rows: int, groups: int) -> Tensor:
    """Scales or zero points expanded to (N, G); the file has one number, one for each row, or (N, G)."""
    values = torch.zeros(1, dtype=torch.float32) if part is None else part.read()
    return values.view(-1, groups if values.numel() > 1 else 1).expand(rows, groups)


# ---------------------------------------------------------------------------------------------------- bitsandbytes
STATES = {"weight.quant_state.bitsandbytes__nf4": "NF4", "weight.quant_state.bitsandbytes__fp4": "FP4"}
STATISTICS = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")


class BitsAndBytes(Method):
    """4 bits: a codebook of 16 values, nf4 or fp4, and the largest value of each block, which may be quantized too.

    8 bits: int8 with the largest value of each row, SCB.
    """

    name = "bitsandbytes"
    tensors = ("weight", *STATES, *STATISTICS, "SCB", "weight_format")

    def matrix(self, parts: Parts, layer: str) -> tuple[Matrix, str]:
        """The weight of a layer."""
        weight = _part(parts, "weight", layer)
        for key, kind in STATES.items():
            if key in parts:
                return self._codebook(parts, weight, parts[key], layer), kind
        if weight.dtype != "I8" or len(weight.shape) != 2:
            raise weight.wrong("a matrix of I8, or U8 with a quant_state")
        if (form := parts.get("weight_format")) is not None and int(form.check(("U8",), ()).read()) != 0:
            raise form.wrong("0, the layout by rows; other layouts are for GPU kernels")
        rows, columns = weight.shape
        largest = _part(parts, "SCB", layer).check(FLOATS, (rows,))
        matrix = Integers(
            (rows, columns),
            8,
            columns,
            lambda part: weight.read()[part].numpy().view(np.uint8) ^ np.uint8(128),
            lambda part: largest.read()[part, None].float() / 127,
        )
        return matrix, "bitsandbytes int8"

    def _codebook(self, parts: Parts, weight: Part, state: Part, layer: str) -> Matrix:
        """A weight in 4 bits. Its quant_state is JSON with the shape and the sizes of the blocks."""
        where = f"{state.file.path}: {state.source}"
        if state.dtype != "U8" or len(state.shape) != 1 or state.shape[0] > 4096:
            raise state.wrong("U8 with a JSON text of at most 4096 bytes")
        fields = Fields(parse_json(state.read().numpy().tobytes(), where), where)
        try:
            shape, block = fields.get("shape", object, None), fields.get("blocksize", int)
            nested = fields.get("nested_blocksize", int) if "weight.nested_absmax" in parts else 0
            offset = fields.get("nested_offset", float) if nested else 0.0
        except ConfigError as error:
            raise CheckpointError(f"{error}; the file is damaged; {REMEDY}") from None
        if not isinstance(shape, list) or len(shape) != 2 or not all(is_integer(n) and 0 < n < 2**31 for n in shape):
            raise CheckpointError(f"{where}: shape must be two sizes, got {describe(shape)}; {REMEDY}")
        if not 0 < block < 2**31 or not 0 <= nested < 2**31 or not is_number(offset) or shape[1] % 2:
            raise CheckpointError(
                f"{where}: block sizes must be above 0 and row lengths even, got {fields.values!r:.120}; {REMEDY}"
            )
        if weight.file.nbytes(weight.source) != shape[0] * shape[1] // 2:
            raise weight.wrong(f"{shape[0] * shape[1] // 2} bytes for a weight {tuple(shape)}")
        blocks = -(-shape[0] * shape[1] // block)
        absmax = _part(parts, "weight.absmax", layer).check(("U8",) if nested else ("F32",), (blocks,))
        values = _part(parts, "weight.quant_map", layer).check(("F32",), (16,))
        outer, table = absmax, absmax
        if nested:
            outer = parts["weight.nested_absmax"].check(("F32",), (-(-blocks // nested),))
            table = _part(parts, "weight.nested_quant_map", layer).check(("F32",), (256,))

        def largest(part: slice) -> Tensor:
            found = absmax.read()[part]
            if not nested:
                return found
            return table.read()[found.int()] * outer.read()[torch.arange(part.start, part.stop) // nested] + offset

        def packed() -> Tensor:
            return weight.read().flatten().view(torch.uint8)  # the bytes may be stored as other numbers

        return Codebook((shape[0], shape[1]), block, packed, values.read, largest)


# quant_method -> method
METHODS: dict[str, type[Method]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "fp8": FP8,
    "fbgemm_fp8": FP8,
    "compressed-tensors": CompressedTensors,
    "bitsandbytes": BitsAndBytes,
}
# quant_method -> what it is, and what runs it
OTHERS = {
    "aqlm": ("AQLM, sums of codebooks of vectors", "transformers with the package aqlm"),
    "auto-round": ("AutoRound", "vLLM, or transformers with the package auto-round"),
    "bitnet": ("BitNet, weights of -1, 0 and 1", "transformers, or bitnet.cpp"),
    "eetq": ("EETQ, int8 for its GPU kernels", "transformers with the package eetq"),
    "exl2": ("EXL2, mixed bits for ExLlamaV2", "ExLlamaV2 or TabbyAPI"),
    "exl3": ("EXL3, trellis codes for ExLlamaV3", "ExLlamaV3 or TabbyAPI"),
    "fp_quant": ("FP-Quant, float4 with rotations", "transformers with the package fp_quant"),
    "higgs": ("HIGGS, vector codes with rotations", "transformers with the package flute"),
    "hqq": ("HQQ, half-quadratic quantization", "transformers with the package hqq, or vLLM"),
    "modelopt": ("NVIDIA ModelOpt", "vLLM or TensorRT-LLM"),
    "mxfp4": ("MXFP4 for experts", "transformers or vLLM"),
    "quanto": ("Quanto", "transformers with the package optimum-quanto"),
    "quark": ("AMD Quark", "vLLM, or transformers with the package amd-quark"),
    "spqr": ("SpQR, integers with sparse outliers", "transformers with the package spqr_quant"),
    "torchao": ("torchao's tensor subclasses", "transformers with the package torchao, or vLLM"),
    "vptq": ("VPTQ, codebooks of vectors", "transformers with the package vptq"),
}


def method_of(scheme: Mapping[str, Any], where: str) -> Method:
    """The method of a quantization_config. Raises ConfigError if it is not supported."""
    fields = Fields(scheme, where)
    kind = fields.get("quant_method", object, None)
    if kind is None and (fields.get("load_in_4bit", object, None) or fields.get("load_in_8bit", object, None)):
        kind = "bitsandbytes"  # as written by transformers before 4.35
    known = ", ".join(METHODS)
    if isinstance(kind, str) and kind in METHODS:
        return METHODS[kind](fields)
    get = f"get the model in BF16, as GGUF, or quantized by one of {known}"
    if isinstance(kind, str) and kind in OTHERS:
        what, runs = OTHERS[kind]
        raise ConfigError(
            f"{where}: the weights are quantized ({kind!r}: {what}), which can't be read; run it with {runs}, or {get}"
        )
    found = "is missing" if kind is None else f"{kind!r:.40} is unknown"
    raise ConfigError(f"{where}: the weights are quantized, but the quant_method {found}; {get}")
