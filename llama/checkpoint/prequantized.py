"""Reader of Hugging Face folders whose weights another program has quantized: GPTQ, AWQ, FP8, bitsandbytes, ...

Several tensors store one weight; methods.py combines them. Integers go to the kernels unchanged if the kernels' formats
can represent them; other weights are dequantized when they are read.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config import ModelConfig
from ..errors import CheckpointError
from ..quant.blocks import Blocks
from ..quant.matrices import Integers, Matrix
from . import huggingface, quantized
from .base import FLOATS, dequantized_floats, drop_pages, stored_bytes, to_file_name, to_model_name
from .documents import Fields, read_json
from .huggingface import CONFIG, LAYERS, NAMES, HuggingFaceCheckpoint, WeightFile
from .methods import Method, Part, method_of

SCHEMES = ("quantization_config", "compression_config")  # the second name is compressed-tensors' before 0.5
OLD = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # older: a file of its own


def recognizes(folder: Path) -> bool:
    if not huggingface.recognizes(folder):
        return False
    try:
        settings = read_json(folder / CONFIG)
    except CheckpointError:
        return False  # HuggingFaceCheckpoint raises the error
    found = next((settings[key] for key in SCHEMES if settings.get(key) is not None), None)
    if found is None:
        return any((folder / name).is_file() for name in OLD)
    return isinstance(found, dict) and found.get("quant_method") != quantized.METHOD


def _scheme(folder: Path, settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The description of the quantization, and the file and key that hold it."""
    for key in SCHEMES:
        if settings.get(key) is not None:
            return settings[key], f"{CONFIG}: {key}"
    name, method = next((name, method) for name, method in OLD.items() if (folder / name).is_file())
    return {"quant_method": method, **read_json(folder / name)}, name


class PrequantizedCheckpoint(HuggingFaceCheckpoint):
    """A folder with quantized weights. See Checkpoint for the members."""

    def __init__(self, folder: Path):
        self._matrices: dict[str, Matrix] = {}
        self._labels: dict[str, str] = {}
        self._parts: dict[str, dict[str, Part]] = {}  # layer in the files -> suffix -> tensor
        super().__init__(folder)
        self.format = f"Hugging Face, quantized by {self._method.name}"
        self.shapes = {**self.shapes, **{name: matrix.shape for name, matrix in self._matrices.items()}}

    # ---------------------------------------------------------------------------------------------- as Checkpoint
    @property
    def about(self) -> Mapping[str, Any]:
        return {
            "weights": stored_bytes(
                {
                    name: (self.stored(name), sum(part.file.nbytes(part.source) for part in self._all_parts(name)))
                    for name in self._sources
                }
            )
        }

    def tensor(self, name: str) -> Tensor:
        matrix = self._matrices.get(name)
        return super().tensor(name) if matrix is None else dequantized_floats(*matrix.shape, matrix.floats)

    def piece(self, name: str, rows: slice, columns: slice) -> Tensor:
        matrix = self._matrices.get(name)
        return super().piece(name, rows, columns) if matrix is None else matrix.floats(rows)[:, columns]

    def blocks(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Blocks | None:
        matrix = self._matrices.get(name)
        found = None if matrix is None else matrix.blocks(rows)
        return None if found is None else found.columns(columns)

    def stored(self, name: str) -> str:
        return self._labels.get(name) or super().stored(name)

    def bits(self, name: str) -> float:
        if name not in self._matrices:
            return super().bits(name)
        rows, columns = self._matrices[name].shape
        return 8 * sum(part.file.nbytes(part.source) for part in self._all_parts(name)) / (rows * columns)

    def file_name(self, name: str) -> str:
        return self._sources[name][1] if name in self._matrices else to_file_name(name, NAMES, LAYERS)

    def release(self, name: str) -> None:
        for part in self._all_parts(name):
            if part.file.mapped:
                drop_pages(part.read())

    def _all_parts(self, name: str) -> list[Part]:
        """The tensors that store a weight."""
        source = to_file_name(name, NAMES, LAYERS).removesuffix(".weight")
        return list(self._parts[source].values()) if name in self._matrices else [Part(*self._sources[name])]

    # ------------------------------------------------------------------------------------------------ the tensors
    def _config(self, fields: Fields) -> ModelConfig:
        for key in SCHEMES:
            fields.get(key, object, None)
        scheme, where = _scheme(self.path, self.settings)
        self._method: Method = method_of(scheme, where)
        self.notes += self._method.notes
        return super()._config(fields)

    def _check_quantization(self, scheme: Mapping[str, Any] | None, where: str) -> None:
        """Do nothing: `_config` has checked it."""

    def _layer_and_part(self, source: str) -> tuple[str, str] | None:
        """The layer and the suffix of a tensor's name; None if the method has no such suffix."""
        for kind in sorted({*self._method.tensors, *self._method.unused}, key=len, reverse=True):
            if source.endswith(f".{kind}"):
                return source.removesuffix(f".{kind}"), kind
        return None

    @functools.cached_property
    def _quantized_layers(self) -> set[str]:
        """The layers with a tensor that only quantized layers have."""
        split = [self._layer_and_part(source) for file in self._files for source in file.shapes]
        return {found[0] for found in split if found is not None and found[1] != "weight"}

    def _is_part(self, file: WeightFile, source: str) -> bool:
        found = self._layer_and_part(source)
        if found is None:
            return False
        layer, kind = found
        if kind == "weight" and layer not in self._quantized_layers and file.dtypes[source] in FLOATS.values():
            return False
        if kind in self._method.unused:
            if (reason := self._method.unused[kind]) not in self.notes:
                self.notes.append(reason)
            return True
        full = layer if layer.startswith(("model.", "lm_head")) else f"model.{layer}"
        parts = self._parts.setdefault(full, {})
        if kind in parts:
            raise CheckpointError(
                f"{self.path}: {source} is in {parts[kind].file.path.name} and in {file.path.name}; one belongs to"
                f" another model, download the folder again"
            )
        parts[kind] = Part(file, source)
        return True

    def _combine_parts(self) -> None:
        for layer, parts in self._parts.items():
            first = next(iter(parts.values()))
            name = to_model_name(f"{layer}.weight", NAMES, LAYERS)
            if name is None:
                raise CheckpointError(
                    f"{first.file.path}: {first.source!r:.80} is not part of a LLaMA decoder, so this model can't be"
                    " run; try transformers or vLLM"
                )
            if name in self._sources:
                raise CheckpointError(
                    f"{self.path}: {layer} has both {self._sources[name][1]} and {first.source}; one belongs to another"
                    f" model, download the folder again"
                )
            self._sources[name] = first.file, first.source
            self._matrices[name], label = self._method.matrix(parts, layer)
            self._labels[name] = label
        self._explain_order()
        self._drop_zero_biases()
        if not self._matrices:
            self.warnings.append(
                f"{CONFIG} describes weights quantized by {self._method.name}, but all weights are floating-point; they"
                f" are used as they are"
            )

    def _explain_order(self) -> None:
        """Warn about weights that the kernels can't represent because of act order."""
        ordered = [name for name, m in self._matrices.items() if isinstance(m, Integers) and m.order is not None]
        for name in ordered:
            self._labels[name] += " in act order"
        if ordered:
            kind = Counter(self._labels[name] for name in ordered).most_common(1)[0][0]
            self.warnings.append(
                f"{len(ordered)} of {len(self._matrices)} quantized weights are {kind}, which the kernels do not"
                f" support; they are dequantized and take four times the memory (use a version without act order,"
                f" desc_act false)"
            )

    def _drop_zero_biases(self) -> None:
        """Remove zero biases that the configuration does not mention: some versions of AutoGPTQ saved them."""
        for name in [name for name in self._sources if name.endswith(".bias")]:
            config, of_qkv = self.config, name.endswith((".wq.bias", ".wk.bias", ".wv.bias"))
            expected = (
                config.attention_bias or (config.qkv_bias and of_qkv) if ".attention." in name else config.mlp_bias
            )
            if not expected and not bool(self.tensor(name).any()):
                del self._sources[name]
