"""Reader of Hugging Face folders whose weights another program has quantized: GPTQ, AWQ, FP8, bitsandbytes, ...

Several tensors store one weight; methods.py combines them. Integers go to the kernels unchanged if the kernels' formats
can represent them; other weights are dequantized when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..quant.matrices import Matrix
from ..system.documents import Fields, read_json
from . import huggingface, quantized
from .huggingface import CONFIG, HuggingFaceCheckpoint, StoredTensor
from .methods import ACT_ORDER, Layer, method_of

SCHEMES = ("quantization_config", "compression_config")  # the second name is compressed-tensors' before 0.5
# Ends of the names of tensors for activations and the KV cache, which are not quantized here
UNUSED = (
    ".input_scale", ".input_zero_point", ".activation_scale", ".input_scale_ub", ".output_scale", ".output_zero_point",
    ".kv_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point",
)  # fmt: skip
OLD = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # older: a file of its own


def recognizes(folder: Path) -> bool:
    found = _scheme(folder) if huggingface.recognizes(folder) else None
    return found is not None and found.values.get("quant_method") != quantized.METHOD


def _scheme(folder: Path) -> Fields | None:
    """The description of the quantization; None if there is none. Raises CheckpointError, ConfigError."""
    settings = Fields(read_json(folder / CONFIG), str(folder / CONFIG))
    for key in SCHEMES:
        if (scheme := settings.get(key, dict, None)) is not None:
            return Fields(scheme, f"{settings.where}: {key}")
    for name, method in OLD.items():
        if (folder / name).is_file():
            return Fields({"quant_method": method, **read_json(folder / name)}, str(folder / name))
    return None


class PrequantizedCheckpoint(HuggingFaceCheckpoint):
    """A folder with quantized weights. See Checkpoint for the members."""

    unused = (*HuggingFaceCheckpoint.unused, *UNUSED)

    def __init__(self, folder: Path):
        self._method = method_of(_scheme(folder) or Fields({}, str(folder)))
        self.format = f"Hugging Face, quantized by {self._method.name}"
        self.suffixes = self._method.tensors
        super().__init__(folder)

    def _matrix(self, name: str, stored: Mapping[str, StoredTensor]) -> Matrix:
        for suffix, tensor in stored.items():
            if suffix not in self._method.tensors:
                raise tensor.error(f"which {self._method.name} does not store beside {', '.join(stored)}")
        return self._method.matrix(Layer(stored))

    def _add_tensors(self, tensors: Sequence[StoredTensor]) -> None:
        super()._add_tensors(tensors)
        if ordered := [matrix for matrix in self._matrices.values() if matrix.label.endswith(ACT_ORDER)]:
            self.warnings.append(
                f"{len(ordered)} of {len(self._matrices)} quantized weights are {ordered[0].label}, which the kernels"
                " lack; they are dequantized and take four times the memory (use a version with desc_act false)"
            )
        self._drop_zero_biases()

    def _drop_zero_biases(self) -> None:
        """Remove zero biases that the configuration does not mention: some versions of AutoGPTQ saved them."""
        config = self.config
        for name in [name for name in self._tensors if name.endswith(".bias")]:
            of_qkv = name.endswith((".wq.bias", ".wk.bias", ".wv.bias")) and config.qkv_bias
            expected = (config.attention_bias or of_qkv) if ".attention." in name else config.mlp_bias
            if not expected and not bool(self.tensor(name).any()):
                del self._tensors[name]
