"""Reader of Hugging Face folders: config.json, safetensors in one or many files, tokenizer.json.

The safetensors library checks each header: tensors must cover the file without gap or overlap. Sources: transformers
5.23, configuration classes and modeling_rope_utils.py; https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import integer, is_integer, shown
from ..config import ModelConfig
from ..errors import CheckpointError, ConfigError, DamagedError, UsageError
from ..rope import Layout
from ..rope_scaling import PARAMETERS, SCALINGS
from ..sampling import SamplingParams, option_names
from ..system.documents import LARGEST, Fields, read_file, read_json, read_optional, start_of
from ..tokenizer import Named, Tokenizer
from ..tokenizer.common import joined_templates
from . import architectures, base
from .architectures import MODEL_TYPES, MULTIPLIERS, folded, known, no_rope_layers, sliding_window, text_settings
from .base import EMBEDDING, HUGGING_FACE_NAMES, OUTPUT, Checkpoint, model_weights
from .torchfile import read_torch
from .weight import DTYPES, FLOATS, Weight

CONFIG = "config.json"
INDEX, BIN_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"

# Suffixes of tensors that are not used: RoPE tables, and scales of activations and of the KV cache, since neither is
# quantized here
UNUSED = (
    ".rotary_emb.inv_freq", ".input_scale", ".input_zero_point", ".activation_scale", ".input_scale_ub",
    ".output_scale", ".output_zero_point", ".kv_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point",
)  # fmt: skip
VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")

# Keys of config.json that do not affect inference
NO_EFFECT = {
    "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range", "pad_token_id",
    "pretraining_tp", "attention_dropout", "_name_or_path", "auto_map", "max_sequence_length", "model_type",
    "embed_dropout", "unsloth_version", "unsloth_fixed", "output_attentions", "output_hidden_states", "return_dict",
    "id2label", "label2id", "is_decoder", "is_encoder_decoder", "_attn_implementation_autoset", "bos_token_id",
    "eos_token_id", "chunk_size_feed_forward", "problem_type", "torchscript", "tie_encoder_decoder",
    "quantization_config", "llama_4_scaling_beta", "max_position_embeddings",
    "embd_pdrop", "resid_pdrop", "attention_bias", "mlp_bias", "init_method", "normalization_function",
    "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef",
}  # fmt: skip
# Keys that can change what is computed -> the supported values, which change nothing. null changes nothing either.
MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"), "qk_layernorm": (False,), "use_qk_norm": (False,),
    "num_local_experts": (0,), "num_experts": (0,), "logit_scale": (1,), "logits_scaling": (1,),
    "embedding_multiplier": (1,), "residual_multiplier": (1,), "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,), "rope_interleaved": (False,),
    "use_mrope": (False,), "lm_head_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,),
}  # fmt: skip
# torch's dtypes -> their names in safetensors files
STORED = {
    **FLOATS, torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip


def model_name(name: str) -> str | None:
    """The model's name for a tensor of a file or adapter; None if a LLaMA decoder has no such tensor."""
    name = re.sub(r"^(model\.)?language_model\.", "", name)  # the prefix beside a vision model
    if not name.startswith(("model.", "lm_head.", "transformer.")):
        name = f"model.{name}"  # a model that was saved without its head lacks this prefix
    return base.to_model_name(name, HUGGING_FACE_NAMES)


def recognizes(folder: Path) -> bool:
    """Whether a folder has a config.json and files of weights."""
    return (folder / CONFIG).is_file() and any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir())


# --------------------------------------------------------------------------------------------------------- weights
@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file. `name` is its name in the file, and `read` returns its values.

    metadata  the text under the tensor's name in the file's metadata; empty if there is none
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    metadata: str = ""

    def expect(self, dtypes: Collection[str], shape: tuple[int, ...]) -> StoredTensor:
        """Return this tensor. Raises CheckpointError unless it has the shape and one of the dtypes."""
        if self.dtype not in dtypes or self.shape != shape:
            raise self.error(f"expected {' or '.join(dtypes)} {shape}")
        return self

    def error(self, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.name} is {self.dtype} {self.shape}, {expected}")


class Layer(dict[str, StoredTensor]):
    """The tensors that store one quantized weight, by suffix. Looking up a missing one raises CheckpointError."""

    def __missing__(self, suffix: str) -> StoredTensor:
        other = next(iter(self.values()))
        raise CheckpointError(f"{other.path}: {other.name} needs {suffix} of the same layer, which is missing")

    def matrix(self, suffix: str, dtypes: Sequence[str]) -> StoredTensor:
        """The tensor with a suffix. Raises CheckpointError unless it is a matrix, not empty, of one of the dtypes."""
        tensor = self[suffix]
        if len(tensor.shape) != 2 or 0 in tensor.shape or tensor.dtype not in dtypes:
            raise tensor.error(f"expected a matrix of {' or '.join(dtypes)}")
        return tensor


class StoredWeight(Weight):
    """A weight that one or several tensors store. Its name is that of the first one."""

    def __init__(self, tensors: Mapping[str, StoredTensor], shape: Sequence[int], stored: str):
        """tensors: by their suffixes."""
        self.tensors = [*tensors.values()]
        super().__init__(self.tensors[0].name, shape, stored)

    @property
    def bits(self) -> float:
        return 8 * sum(tensor.nbytes for tensor in self.mapped()) / math.prod(self.whole)

    def mapped(self) -> list[Tensor]:
        return [tensor.read() for tensor in self.tensors]

    def floats(self) -> Tensor:
        return self.tensors[0].read()[self.part].contiguous() if self.stored in DTYPES else super().floats()


class Method(NamedTuple):
    """How the quantized weights of a folder are stored.

    name     for display
    tensors  names of a layer's tensors without the name of the layer; may include `weight`
    weight   a function: a layer's tensors -> the weight that they store. It reads few values; raises CheckpointError
    layout   the order of the rows of wq and wk
    """

    name: str
    tensors: tuple[str, ...]
    weight: Callable[[Layer], Weight]
    layout: Layout = "half"


def open_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, or of a torch file if it has another suffix. Raises CheckpointError."""
    if path.suffix != ".safetensors":
        tensors = read_torch(path)
        return {
            name: StoredTensor(path, name, STORED.get(t.dtype, "?"), tuple(t.shape), partial(tensors.__getitem__, name))
            for name, t in tensors.items()
        }
    from safetensors import SafetensorError, safe_open

    start_of(path)  # refuses a pipe, which would block, and a file that can't be read
    try:
        file: Any = safe_open(str(path), framework="pt")
        metadata, headers = file.metadata() or {}, {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DamagedError(f"{path} is not a valid safetensors file: {error!s:.160}") from None
    return {
        name: StoredTensor(path, name, header.get_dtype(), tuple(header.get_shape()), partial(file.get_tensor, name),
                           metadata=metadata.get(name, ""))
        for name, header in headers.items()
    }  # fmt: skip


def open_weights(folder: Path) -> list[StoredTensor]:
    """The tensors of all files of weights: those that an index names, the usual one, or else all safetensors files."""
    names = sorted(os.listdir(folder))
    for index, single in ((INDEX, "model.safetensors"), (BIN_INDEX, "pytorch_model.bin")):
        if index in names and single in names:
            raise CheckpointError(f"{folder} has both {index} and {single}; remove the one that is not the model's")
        if index in names:
            return _open_indexed(folder, index)
        files = [single] if single in names else [name for name in names if name.endswith(".safetensors")]
        if files:
            return [tensor for name in files for tensor in open_file(folder / name).values()]
    raise CheckpointError(
        f"{folder} has no weights, expected model.safetensors or pytorch_model.bin; complete the download"
    )


def _open_indexed(folder: Path, index: str) -> list[StoredTensor]:
    """The tensors that an index lists. Other tensors in the same files are ignored."""
    where = folder / index
    weight_map = Fields(read_json(where), str(where)).get("weight_map", dict)
    for file in weight_map.values():
        # A path could lead outside the folder. Links inside the folder are allowed: caches consist of them.
        if not isinstance(file, str) or not re.fullmatch(r"[\w\-+ ][\w.\-+ ]*", file):
            raise CheckpointError(f"{where}: {shown(file)} is not a plain file name")
    opened = {file: open_file(folder / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in opened[file]:
            raise CheckpointError(f"{where}: {name!r:.80} should be in {file} but is not")
    return [opened[file][name] for name, file in weight_map.items()]


# --------------------------------------------------------------------------------------------------- configuration
def read_config(settings: Mapping[str, Any], where: str) -> tuple[ModelConfig, list[str]]:
    """The architecture that a config.json describes, and warnings. Raises ConfigError."""
    fields = Fields(text_settings(settings), where)
    kind = known(fields, "model_type", MODEL_TYPES)
    defaults = MODEL_TYPES[kind]
    for key, allowed in MUST_BE.items():
        value = fields.get(key, object, None)
        if value not in (None, *allowed) and not (kind == "granite" and key in MULTIPLIERS):
            raise ConfigError(f"{where}: {key} is {shown(value)}, which no LLaMA has; try transformers or vLLM")
    dim, n_layers = fields.get("hidden_size", int), fields.get("num_hidden_layers", int)
    n_heads = integer(f"{where}: num_attention_heads", fields.get("num_attention_heads", int), error=ConfigError)
    theta, scaling, warnings = _read_rope(fields, defaults)
    # as in transformers, null stands for n_heads, and a missing key for the default of the model_type
    kv_heads = n_heads if "num_key_value_heads" in fields.values else defaults.n_kv_heads or n_heads
    config = ModelConfig(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=fields.get("num_key_value_heads", int, kv_heads),
        head_dim=fields.get("head_dim", int, defaults.head_dim or dim // n_heads),
        hidden_dim=fields.get("intermediate_size", int),
        vocab_size=fields.get("vocab_size", int),
        norm_eps=fields.get("rms_norm_eps", float, defaults.norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        max_seq_len=fields.get("max_position_embeddings", int, defaults.context),
        tie_embeddings=fields.get("tie_word_embeddings", bool, defaults.tied),
        qkv_bias=defaults.qkv_bias,
        qk_norm=defaults.qk_norm,
        **{key: fields.get(key, bool, False) for key in defaults.bias_keys},
        no_rope_layers=no_rope_layers(fields, kind, n_layers),
        sliding_window=sliding_window(fields, kind, n_layers),
    )
    return config, [*warnings, *base.unknown_keys(fields, NO_EFFECT)]


def _read_rope(fields: Fields, family: architectures.ModelType) -> tuple[float, dict[str, Any] | None, list[str]]:
    """theta and the scaling, and a warning if entries of the scaling have no effect.

    Both are in rope_theta and rope_scaling, or in rope_parameters (transformers 5). A null counts as missing.
    """
    merged: dict[str, Any] = {}
    old, new = fields.get("rope_scaling", dict, None), fields.get("rope_parameters", dict, None)
    outside = {key: fields.get(key, object, None) for key in ("rope_theta", "partial_rotary_factor")}
    for source in (outside, old or {}, new or {}):
        for key, value in source.items():
            key = "rope_type" if key == "type" else key  # the key in transformers before 4.43
            nothing = value is None or (key, value) == ("partial_rotary_factor", 1)
            if not nothing and merged.setdefault(key, value) != value:
                raise ConfigError(f"{fields.where}: {key} is both {shown(merged[key])} and {shown(value)}")
    length = fields.get("original_max_position_embeddings", object, family.trained)  # it overrides the scaling's
    scaling, where = Fields(merged, fields.where), fields.where
    theta, kind = scaling.get("rope_theta", float, family.theta), scaling.get("rope_type", str, "default")
    kind = "longrope" if family.trained and kind in ("su", "yarn") else kind
    if kind not in SCALINGS:
        raise ConfigError(f"{where}: rope_type is {kind!r:.40}, expected one of {', '.join(SCALINGS)}")
    used = {key: merged[key] for key in PARAMETERS.get(kind, ()) if scaling.get(key, object, None) is not None}
    if (part := used.get("partial_rotary_factor")) and not family.trained and kind != "proportional":
        raise ConfigError(f"{where}: partial_rotary_factor is {shown(part)}, which no LLaMA has; try transformers")
    if length is not None and kind in ("llama3", "yarn", "longrope"):
        used["original_max_position_embeddings"] = length
    found = {"rope_type": kind, **used} if used or kind != "default" else None
    return theta, found, base.unknown_keys(scaling, NO_EFFECT)


# ------------------------------------------------------------------------------------------------------ the reader
class HuggingFaceCheckpoint(Checkpoint):
    """A folder in Hugging Face's format. See Checkpoint for the members."""

    names = HUGGING_FACE_NAMES

    def __init__(self, folder: Path):
        from .prequantized import method_of  # imports this module

        file = folder / CONFIG
        settings = read_json(file)
        method = method_of(settings, str(file))
        self.path, self.settings, self.method = folder, text_settings(settings), method
        self.format = "Hugging Face" if method is None else f"Hugging Face, quantized by {method.name}"
        self.layout = "half" if method is None else method.layout
        self.warnings: list[str]
        self.config, self.warnings = read_config(self.settings, CONFIG)
        self.config, self.factors = folded(self.config, Fields(self.settings, CONFIG))
        self.generation = read_optional(folder / "generation_config.json")
        self.sampling = self._sampling()
        self.chat_template = read_chat_template(folder)
        tensors = open_weights(folder)
        if settings.get("model_type") == "mistral3":
            text = [tensor for tensor in tensors if not VISION.match(tensor.name)]
            self.notes = [f"{len(tensors) - len(text)} tensors of the vision model are left out"]
            untied = settings.get("tie_word_embeddings") is False  # otherwise, a head decides
            tied = not untied and not any("lm_head." in tensor.name for tensor in text)
            tensors, self.config = text, dataclasses.replace(self.config, tie_embeddings=tied)
        self.parts = {path.name: path.stat().st_size for path in sorted({tensor.path for tensor in tensors})}
        self._weights = self._collect(tensors)

    def own_tokenizer(self) -> Tokenizer:
        path = base.find_tokenizer(self.path, ("tokenizer.json", "tokenizer.model"))
        ids = self._ids("bos_token_id"), self._ids("eos_token_id")
        return read_tokenizer(path, Named(*ids, joined_templates(self.chat_template)))

    # ------------------------------------------------------------------------------------------------ the tensors
    def _collect(self, tensors: Sequence[StoredTensor]) -> dict[str, Weight]:
        """The weights that the tensors store. Raises CheckpointError for a tensor that no LLaMA has."""
        found: dict[str, dict[str, StoredTensor]] = {}  # weight -> suffix -> tensor
        suffixes = self.method.tensors if self.method else ()
        for tensor in tensors:
            if tensor.name.endswith(UNUSED):
                continue
            suffix = next((one for one in suffixes if tensor.name.endswith(f".{one}")), None)
            source = tensor.name if suffix is None else f"{tensor.name.removesuffix(suffix)}weight"
            name = model_name(source)
            if name is None:
                raise CheckpointError(f"{tensor.path}: {tensor.name!r:.80} is not part of a LLaMA decoder")
            other = found.setdefault(name, {}).setdefault(suffix or source.rpartition(".")[2], tensor)
            if other is not tensor:
                raise CheckpointError(f"{tensor.name} is in {other.path} and {tensor.path.name}; remove one of them")
        if self.config.tie_embeddings and EMBEDDING not in found and OUTPUT in found:
            found[EMBEDDING] = found.pop(OUTPUT)
        weights = {name: self._weight(stored) for name, stored in found.items()}
        weights = weights if self.layout == "interleaved" else model_weights(weights, self.config)
        if self.config.tie_embeddings and OUTPUT in weights:
            output, embedding = weights.pop(OUTPUT).floats(), weights[EMBEDDING].floats()
            if output.dtype != embedding.dtype or not torch.equal(output, embedding):
                raise CheckpointError(f"{self.path} ties the embeddings, but lm_head.weight differs from the embedding")
        # Some versions of AutoGPTQ saved biases of zeros that the configuration does not mention.
        for name in [name for name in weights if self.method and name.endswith(".bias")]:
            of_qkv = name.endswith((".wq.bias", ".wk.bias", ".wv.bias")) and self.config.qkv_bias
            expected = (self.config.attention_bias or of_qkv) if ".attention." in name else self.config.mlp_bias
            if not expected and not bool(weights[name].floats().any()):
                del weights[name]
        return weights

    def _weight(self, stored: Mapping[str, StoredTensor]) -> Weight:
        """The weight that some tensors store. Raises CheckpointError."""
        first = next(iter(stored.values()))
        if stored.keys() <= {"weight", "bias"} and first.dtype in DTYPES:
            return StoredWeight(stored, first.shape, first.dtype)
        if self.method is None:
            raise first.error(f"expected one of {', '.join(DTYPES)}; get the weights in BF16")
        for suffix, tensor in stored.items():
            if suffix not in self.method.tensors:
                raise tensor.error(f"which {self.method.name} does not store beside {', '.join(stored)}")
        return self.method.weight(Layer(stored))

    # -------------------------------------------------------------------------------------- tokens and sampling
    def _ids(self, key: str) -> list[int]:
        """The ids under a key, an id or a list of ids: those of generation_config.json, then those of config.json."""
        found: list[int] = []
        for name, source in (("generation_config.json", self.generation), (CONFIG, self.settings)):
            value = source.get(key)
            ids = [id for id in (value if isinstance(value, list) else [value]) if id is not None]
            if not all(map(is_integer, ids)):
                raise ConfigError(f"{self.path / name}: {key} must be an id or a list of ids, got {shown(value)}")
            found += [id for id in ids if id >= 0]  # -1 in some files: no such token
        return found

    def _sampling(self) -> dict[str, Any]:
        """The sampling options of generation_config.json; without do_sample, only repetition_penalty."""
        samples = self.generation.get("do_sample") is True
        keys = option_names("number") if samples else ["repetition_penalty"]
        options: dict[str, Any] = {"temperature": 1.0} if samples else {}
        options |= {key: self.generation[key] for key in keys if self.generation.get(key) is not None}
        try:
            SamplingParams(**options)
        except UsageError as error:
            self.warnings.append(f"generation_config.json: {error}; its sampling options are ignored")
            return {}
        return options


def _read_template(path: Path) -> str:
    try:
        return read_file(path, LARGEST).decode()
    except UnicodeDecodeError:
        raise DamagedError(f"{path} is not UTF-8") from None


def read_tokenizer(file: Path, named: Named | None = None) -> Tokenizer:
    """The tokenizer in a file, with the settings beside it. named: as in `open_tokenizer`; None: the template there."""
    from ..tokenizer import open_tokenizer

    settings = read_optional(file.with_name("tokenizer_config.json"))
    return open_tokenizer(file, settings, named or Named(template=joined_templates(read_chat_template(file.parent))))


def read_chat_template(folder: Path) -> str | Mapping[str, str] | None:
    """The chat template, or {name: template} if there are several. Template files replace tokenizer_config.json's."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    templates = {name: _read_template(path) for name, path in files.items() if path.exists()}
    if not templates:
        fields = Fields(read_optional(folder / "tokenizer_config.json"), "tokenizer_config.json")
        if not isinstance(listed := fields.get("chat_template", object, None), list):
            return fields.get("chat_template", str, None)
        entries = [Fields(item if isinstance(item, dict) else {}, "chat_template") for item in listed]
        templates = {entry.get("name", str): entry.get("template", str) for entry in entries}
    return templates["default"] if templates.keys() == {"default"} else templates or None
