"""Readers of LoRA adapters: PEFT's folders, and the GGUF files of llama.cpp's convert_lora_to_gguf.py.

The tensors in the file decide which weights change; the configuration has the scales. An adapter that can't be merged
is rejected. Sources: huggingface/peft, src/peft/tuners/lora and utils/other.py; llama.cpp, src/llama-adapter.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from ..errors import CheckpointError, ConfigError, DamagedError
from ..rope import Layout
from ..system.documents import Fields, read_json
from . import gguf, huggingface
from .architectures import GGUF_LAYOUTS, known
from .base import EMBEDDING, GGUF_NAMES, to_model_name

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MERGE = "merge it into its base with peft (merge_and_unload, save_pretrained) and load the result"

# End of a tensor's key in PEFT's files -> one of the two matrices, a weight to replace, or a copy of the base's weight
PARTS = {
    "lora_A.weight": "down", "lora_B.weight": "up", "lora_embedding_A": "up", "lora_embedding_B": "down",
    "weight": "whole", "bias": "whole", "modules_to_save.weight": "whole", "base_layer.bias": "whole",
    "base_layer.weight": "copy", "original_module.weight": "copy",
}  # fmt: skip
KEY = re.compile(rf"base_model\.model\.(.+?)\.({'|'.join(map(re.escape, PARTS))})")
# Entries of adapter_config.json that do not change the merged weights, or only say which tensors the file has. Another
# entry that is set, such as use_dora, is an error: it changes the result in a way that is not supported.
NO_EFFECT = {
    "auto_mapping", "peft_version", "revision", "inference_mode", "task_type", "lora_dropout", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "megatron_core", "ensure_weight_tying",
    "runtime_config", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "base_model_name_or_path", "bias", "modules_to_save", "fan_in_fan_out",
}  # fmt: skip
# Initializations that leave the base's weights unchanged. Others, such as pissa, belong to a changed base.
UNCHANGED_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")

T = TypeVar("T")


@dataclass(frozen=True)
class LowRank:
    """A change of a matrix (out, in): `scale * up @ down`, for down (r, in) and up (out, r)."""

    down: Tensor
    up: Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in); () if `up @ down` is not defined."""
        fits = self.up.dim() == self.down.dim() == 2 and self.up.shape[1] == len(self.down)
        return (len(self.up), self.down.shape[1]) if fits else ()


@dataclass(frozen=True)
class Adapter:
    """An adapter: the changes of weights, by the model's tensor names. layout: the order of the rows of wq and wk."""

    path: Path
    layout: Layout
    low_rank: Mapping[str, LowRank]
    whole: Mapping[str, Tensor] = field(default_factory=dict)  # weights that replace the base's
    copies: Mapping[str, Tensor] = field(default_factory=dict)  # copies of the base's weights, maybe resized


def read(path: Path) -> Adapter:
    """The adapter at a path. Raises CheckpointError if it is damaged or can't be merged."""
    try:
        if (path / CONFIG).is_file():
            return _read_peft(path)
        if path.suffix == ".gguf" and path.is_file():
            return _read_gguf(path)
    except (ConfigError, OverflowError, re.error) as error:  # a huge integer; an invalid regular expression
        raise CheckpointError(f"adapter {path}: {error}") from None
    found = "is neither a PEFT folder with adapter_config.json nor a GGUF file" if path.exists() else "does not exist"
    raise CheckpointError(f"adapter {path} {found}")


# ---------------------------------------------------------------------------------------------------------------- GGUF
def _read_gguf(path: Path) -> Adapter:
    """NAME.lora_a (r, in) and NAME.lora_b (out, r). For the embedding, lora_a is stored as (V, r)."""
    file = gguf.GGUFFile(path)
    fields = Fields(file.metadata, "metadata")
    layout = GGUF_LAYOUTS[known(fields, "general.architecture", GGUF_LAYOUTS)]
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (found := fields.get(key, str, "")) != expected:
            raise CheckpointError(
                f"adapter {path} is not a LoRA for LLaMA: {key} is {found!r:.40}, expected {expected!r}"
            )
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise CheckpointError(f"adapter {path} applies only after certain tokens (aLoRA); run it with llama.cpp")
    alpha, low_rank = fields.get("adapter.lora.alpha", float, 0.0), {}
    for weight in dict.fromkeys(re.sub(r"\.lora_[ab]$", "", name) for name in file.tensors):
        name = to_model_name(weight, GGUF_NAMES)
        a, b = (file.tensors.get(f"{weight}.lora_{end}") for end in "ab")
        if name is None or a is None or b is None:
            raise DamagedError(f"adapter {path}: expected two matrices for each weight of a LLaMA, found {weight:.80}")
        down, up = a.floats(), b.floats()
        if name == EMBEDDING:
            down, up = up.transpose(0, -1), down
        low_rank[name] = LowRank(down, up, alpha / max(len(down), 1) or 1.0)  # llama.cpp: 1 without alpha
    return Adapter(path, layout, low_rank)


# ---------------------------------------------------------------------------------------------------------------- PEFT
def _read_peft(folder: Path) -> Adapter:
    fields = Fields(read_json(folder / CONFIG), CONFIG)
    if (kind := fields.get("peft_type", object, None)) != "LORA":
        raise CheckpointError(f"adapter {folder} has the PEFT type {kind!r:.40}, expected 'LORA'; merge it with peft")
    if (start := fields.get("init_lora_weights", object, True)) not in UNCHANGED_BASE:
        raise CheckpointError(f"adapter {folder}: {start!r:.40} also changed the weights of its base; {MERGE}")
    rank, alpha = fields.get("r", int, 8), fields.get("lora_alpha", float, 8.0)
    ranks, alphas = (
        Fields(fields.get(f"{key}_pattern", dict, {}), f"{CONFIG}: {key}_pattern") for key in ("rank", "alpha")
    )
    root = fields.get("use_rslora", bool, False)
    for key in fields.unknown():
        if key not in NO_EFFECT and fields.values[key] not in (None, False, [], {}, ""):
            raise CheckpointError(f"adapter {folder}: {CONFIG} sets {key:.60}, which is not supported; {MERGE}")
    low_rank, (parts, modules) = {}, _read_parts(folder)
    for name in {**parts["down"], **parts["up"]}:
        module, pair = modules[name], {part: parts[part][name] for part in ("down", "up") if name in parts[part]}
        r = _by_pattern(ranks, module, int, rank)
        if len(pair) < 2 or r < 1 or pair["down"].shape[:1] != (r,):
            found = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in pair.items())
            raise DamagedError(f"adapter {folder}: {module} has {found}, expected two matrices of rank {r!r:.20}")
        scale = _by_pattern(alphas, module, float, alpha) / (math.sqrt(r) if root else r)
        low_rank[name] = LowRank(pair["down"], pair["up"], scale)
    return Adapter(folder, "half", low_rank, parts["whole"], parts["copy"])


def _by_pattern(patterns: Fields, module: str, type: type[T], default: T) -> T:
    """The value of the first key that matches a module's name, by the rule of peft's get_pattern_key."""
    key = next((key for key in patterns.values if re.match(rf"(.*\.)?({key})$", module)), None)
    return default if key is None else patterns.get(key, type)


def _read_parts(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """{what a tensor is, as in PARTS: {name in the model: tensor}}, and {name in the model: module in the file}."""
    path = next((folder / name for name in WEIGHTS if (folder / name).exists()), folder / WEIGHTS[0])
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS.values()}
    modules = {}
    for key, stored in huggingface.open_file(path).items():
        match = KEY.fullmatch(key)
        kind = "bias" if key.endswith(".bias") else "weight"
        name = huggingface.model_name(f"{match[1]}.{kind}") if match else None
        if match is None or name is None:
            raise CheckpointError(f"adapter {path}: {key:.100} is not a LoRA matrix or weight of a LLaMA; {MERGE}")
        tensor, modules[name] = stored.read(), match[1]
        # an embedding is (V, C): A (r, V) transposed is up, B (C, r) transposed is down
        parts[PARTS[match[2]]][name] = tensor.transpose(0, -1) if "embedding" in match[2] else tensor
    return parts, modules
