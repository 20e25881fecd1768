"""Reader of Hugging Face folders: config.json, safetensors in one or many files, tokenizer.json.

Sources: transformers' configuration classes of the families, modeling_rope_utils.py;
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import difflib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..checks import integer, is_integer
from ..config import ModelConfig
from ..errors import CheckpointError, ConfigError, UsageError
from ..rope import Layout
from ..rope_scaling import PARAMETERS, SCALINGS
from ..sampling import SamplingParams
from ..tokenizer import Tokenizer
from . import torchfile
from .architectures import FAMILIES, no_rope_layers, refusal, sliding_window, window_warnings
from .base import FLOATS, Checkpoint, checked, drop_pages, stored_bytes, to_file_name, to_model_name
from .documents import LARGEST, Fields, describe, read_json, utf8_name, with_remedy
from .meta import check_vocabulary
from .nearby import find_tokenizer
from .safetensors_header import read_header
from .write import raw_bytes

CONFIG = "config.json"
INDEX, BIN_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"

# Hugging Face's name -> the model's
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w_gate",
    "mlp.up_proj": "feed_forward.w_up",
    "mlp.down_proj": "feed_forward.w_down",
}
LAYERS = "model.layers"
TABLES = re.compile(r".*rotary_emb\.inv_freq")  # computed from the configuration

# Keys of config.json that do not affect inference
NO_EFFECT = {
    "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range", "pad_token_id",
    "pretraining_tp", "attention_dropout", "_name_or_path", "auto_map", "max_sequence_length", "model_type",
    "unsloth_version", "unsloth_fixed", "output_attentions", "output_hidden_states", "return_dict", "id2label",
    "label2id", "is_decoder", "is_encoder_decoder", "_attn_implementation_autoset",
    "chunk_size_feed_forward", "problem_type", "torchscript", "tie_encoder_decoder",
}  # fmt: skip
# Keys that would change what is computed, and the values that change nothing. null changes nothing either.
MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1,),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "num_local_experts": (0,),
    "num_experts": (0,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
# Options of generation_config.json that are not supported, and the values under which they have no effect
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "typical_p": (1, 1.0), "no_repeat_ngram_size": (0,), "bad_words_ids": ([],), "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],), "num_beams": (1,), "penalty_alpha": (0, 0.0), "min_new_tokens": (0,),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "encoder_repetition_penalty": (1, 1.0),
}  # fmt: skip
# torch's dtypes -> their names in safetensors files
DTYPES = {
    **FLOATS, torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

CHUNK = 2**20  # bytes that `check_bytes` compares at once


def recognizes(folder: Path) -> bool:
    return folder.is_dir() and (folder / CONFIG).is_file()


class HuggingFaceCheckpoint(Checkpoint):
    """A folder in Hugging Face's format. See Checkpoint for the members."""

    format = "Hugging Face"
    layout: Layout = "half"

    def __init__(self, folder: Path):
        self.path = folder
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.settings = read_json(folder / CONFIG)
        try:
            self.config = checked(self._config(Fields(self.settings, CONFIG)))
        except ConfigError as error:
            raise CheckpointError(
                f"{folder}: {with_remedy(error, f'correct {CONFIG}, or download it again')}"
            ) from error
        self.generation = self._read_optional("generation_config.json")
        self.sampling = self._sampling()
        self._files = _open_weights(folder, self.warnings)
        self.parts = {file.path.name: file.path.stat().st_size for file in self._files}
        self._sources: dict[str, tuple[WeightFile, str]] = {}
        for file in self._files:
            self._add_tensors(file)
        self._combine_parts()
        self._check_tying()
        self.shapes = {name: self._shape(file, source) for name, (file, source) in self._sources.items()}
        self.tokenizer_settings = self._read_optional("tokenizer_config.json")
        self.chat_template = self._chat_template()

    @property
    def about(self) -> Mapping[str, Any]:
        stored = {name: (file.dtypes[source], file.nbytes(source)) for name, (file, source) in self._sources.items()}
        return {"weights": stored_bytes(stored)}

    def tensor(self, name: str) -> Tensor:
        file, source = self._sources[name]
        return file.tensor(source)

    def file_name(self, name: str) -> str:
        return to_file_name(name, NAMES, LAYERS)

    def stored(self, name: str) -> str:
        file, source = self._sources[name]
        return file.dtypes[source]

    def check_bytes(self, name: str) -> None:
        file, source = self._sources[name]
        file.check_bytes(source)

    def release(self, name: str) -> None:
        file, source = self._sources[name]
        if file.mapped:
            drop_pages(file.tensor(source))

    def own_tokenizer(self) -> Tokenizer:
        from ..tokenizer import Named, open_tokenizer

        names, settings = ("tokenizer.json", "tokenizer.model"), self.tokenizer_settings
        path = next((p for n in names if (p := self.path / n).exists()), None)
        if path is None:
            path = find_tokenizer(self.path, names)
            self.warnings.append(f"{self.path} has no tokenizer; using {path}")
            beside = path.with_name("tokenizer_config.json")
            settings = settings or (read_json(beside) if beside.is_file() else {})
        ids = {
            key: [id for _, id in self._named(key) if is_integer(id) and id >= 0]
            for key in ("bos_token_id", "eos_token_id")
        }
        named = Named(ids["bos_token_id"], ids["eos_token_id"], self.chat_template or "")
        tokenizer = open_tokenizer(path, settings, named)
        check_vocabulary(tokenizer, self.config, str(path))
        # bos_token_id of config.json is ignored if the tokenizer's own files name a bos
        for key in ["eos_token_id", *["bos_token_id"] * (tokenizer.bos_id is None)]:
            for name, id in self._named(key):
                if id not in ids[key] or id >= tokenizer.n_vocab:
                    self.warnings.append(
                        f"{name}: {key} {describe(id)} is ignored, because the ids of the vocabulary are 0 to"
                        f" {tokenizer.n_vocab - 1}"
                    )
        return tokenizer

    # ------------------------------------------------------------------------------------------------- weights
    def _add_tensors(self, file: WeightFile) -> None:
        for source in file.shapes:
            if TABLES.fullmatch(source) or self._is_part(file, source):
                continue
            # In a model that was saved without its head, names lack the prefix "model."
            full = self._weight_name(source if source.startswith(("model.", "lm_head.")) else f"model.{source}")
            name = to_model_name(full, NAMES, LAYERS)
            if name is None:
                raise CheckpointError(
                    f"{file.path}: {source!r:.80} is not part of a LLaMA decoder, so this model can't be run; try"
                    " transformers or vLLM"
                )
            if name in self._sources:
                other = self._sources[name][0].path.name
                raise CheckpointError(
                    f"{self.path}: {source} is in {other} and in {file.path.name}; one of these files belongs"
                    " to another model, remove that file"
                )
            self._check_stored(file, source)
            self._sources[name] = (file, source)

    def _is_part(self, file: WeightFile, source: str) -> bool:
        """Whether a tensor is one of several that store a quantized weight. They are not weights by themselves."""
        return False

    def _combine_parts(self) -> None:
        """Add the quantized weights, after all files were seen."""

    def _weight_name(self, source: str) -> str:
        """The name of the weight or bias that a tensor of the files stores."""
        return source

    def _check_stored(self, file: WeightFile, source: str) -> None:
        if file.dtypes[source] not in FLOATS.values():
            raise CheckpointError(
                f"{file.path}: {source} is stored as {file.dtypes[source]}, expected one of"
                f" {', '.join(FLOATS.values())}; get the weights in BF16"
            )

    def _shape(self, file: WeightFile, source: str) -> tuple[int, ...]:
        """The shape of the weight that a tensor of the files stores."""
        return file.shapes[source]

    def _check_tying(self) -> None:
        """Raise CheckpointError if a tied model has an lm_head that differs from the embedding. Drop an equal one."""
        if not self.config.tie_embeddings or "output.weight" not in self._sources:
            return
        ours, other = self.tensor("output.weight"), self.tensor("tok_embeddings.weight")
        if ours.data_ptr() != other.data_ptr() and not torch.equal(ours, other):
            raise CheckpointError(
                f"{self.path}: {CONFIG} sets tie_word_embeddings, but lm_head.weight differs from the embedding; set it"
                f" to false if the model has an output matrix of its own"
            )
        del self._sources["output.weight"]

    # ------------------------------------------------------------------------------------------- configuration
    def _config(self, fields: Fields) -> ModelConfig:
        where = fields.where
        kind, named = fields.get("model_type", object, None), fields.get("architectures", object, None)
        if kind is None and isinstance(named, list) and len(named) == 1:
            kind = next((kind for kind, family in FAMILIES.items() if family.architecture == named[0]), None)
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise ConfigError(f"{where}: {refusal('model_type', kind, FAMILIES)}")
        family = FAMILIES[kind]
        self._check_quantization(fields.get("quantization_config", dict, None), where)
        for key, allowed in MUST_BE.items():
            if fields.get(key, object, None) not in (None, *allowed):
                raise ConfigError(
                    f"{where}: {key} is {describe(fields.get(key, object, None))}, but a LLaMA has {describe(allowed[0])}; run the"
                    " model with transformers or vLLM"
                )
        n_layers = fields.get("num_hidden_layers", int)
        dim, n_heads = fields.get("hidden_size", int), fields.get("num_attention_heads", int)
        integer(f"{where}: num_attention_heads", n_heads, error=ConfigError)
        if fields.get("head_dim", object, None) is None and dim % n_heads:
            raise ConfigError(
                f"{where}: hidden_size {dim} is not a multiple of num_attention_heads {n_heads}, and there is no"
                f" head_dim"
            )
        context = fields.get("max_position_embeddings", int, family.context)
        theta, scaling = self._rope(fields, family.theta)
        default_kv = (
            n_heads if "num_key_value_heads" in fields.values else family.n_kv_heads or n_heads
        )  # null: n_heads
        config = ModelConfig(
            dim=dim,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=fields.get("num_key_value_heads", int, default_kv),
            head_dim=fields.get("head_dim", int, dim // n_heads),
            hidden_dim=fields.get("intermediate_size", int),
            vocab_size=fields.get("vocab_size", int),
            norm_eps=fields.get("rms_norm_eps", float, 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_seq_len=context,
            tie_embeddings=fields.get("tie_word_embeddings", bool, family.tied),
            attention_bias=family.bias_keys and fields.get("attention_bias", bool, False),
            qkv_bias=family.qkv_bias,
            mlp_bias=family.bias_keys and fields.get("mlp_bias", bool, False),
            no_rope_layers=no_rope_layers(fields, kind, n_layers),
            sliding_window=sliding_window(fields, kind, n_layers),
        )
        for key in ("bos_token_id", "eos_token_id"):
            fields.get(key, object, None)
        for key in fields.unknown():
            if key not in NO_EFFECT and (near := difflib.get_close_matches(key, fields.keys_read, 1, 0.9)):
                raise ConfigError(f"{where}: unknown key {key!r:.60}; did you mean {near[0]!r}?")
        if unknown := [key for key in fields.unknown() if key not in NO_EFFECT]:
            self.warnings.append(f"{CONFIG} has unknown keys, which have no effect: {', '.join(unknown)}")
        self.warnings += window_warnings(config)
        return config

    def _check_quantization(self, scheme: Mapping[str, Any] | None, where: str) -> None:
        """Check quantization_config. Folders with quantized weights have readers of their own."""

    def _rope(self, fields: Fields, theta: float) -> tuple[float, dict[str, Any] | None]:
        """theta and scaling, from rope_theta and rope_scaling, or from rope_parameters (transformers 5).

        theta  the default
        """
        where, old, new = (
            fields.where,
            fields.get("rope_scaling", dict, None),
            fields.get("rope_parameters", dict, None),
        )
        if old and new:
            theirs = {key: value for key, value in new.items() if key != "rope_theta"}
            if _spelled_out(theirs) != _spelled_out(old):
                raise ConfigError(f"{where}: rope_scaling and rope_parameters contradict each other; remove one")
        scaling = dict(new or old or {})
        inner = scaling.pop("rope_theta", None)
        outer = fields.get("rope_theta", object, None)
        if inner is not None and outer is not None and inner != outer:
            raise ConfigError(f"{where}: rope_theta is {outer!r:.40}, but {inner!r:.40} in rope_parameters; remove one")
        theta = Fields({"rope_theta": outer if inner is None else inner}, where).get("rope_theta", float, theta)
        scaling = _spelled_out(scaling)
        kind = scaling.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise ConfigError(f"{where}: rope_type is {kind!r:.40}, expected one of {', '.join(SCALINGS)}")
        if scaling.get("partial_rotary_factor") in (1, 1.0) and kind != "proportional":
            del scaling["partial_rotary_factor"]
        if kind in ("llama3", "yarn", "longrope"):
            length = fields.get(
                "original_max_position_embeddings", object, None
            )  # as in Phi-3; transformers prefers it
            if length is not None:
                scaling["original_max_position_embeddings"] = length
        known = PARAMETERS.get(kind, ())
        if odd := [key for key in scaling if key not in ("rope_type", *known)]:
            self.warnings.append(f"{CONFIG}: rope scaling {kind} has keys that have no effect: {', '.join(odd)}")
            scaling = {key: value for key, value in scaling.items() if key not in odd}
        return theta, None if kind == "default" else scaling

    # -------------------------------------------------------------------------------------- tokens and sampling
    def _read_optional(self, name: str) -> dict[str, Any]:
        """An optional document; {} if it is missing, {} and a warning if it is invalid."""
        if not os.path.lexists(self.path / name):
            return {}
        try:
            return read_json(self.path / name)
        except CheckpointError as error:
            self.warnings.append(f"{error}; continuing without it")
            return {}

    def _named(self, key: str) -> list[tuple[str, Any]]:
        """The values of a key in generation_config.json, then in config.json, each with the name of its file."""
        found = []
        for name, source in (("generation_config.json", self.generation), (CONFIG, self.settings)):
            value = source.get(key)
            found += [(name, id) for id in (value if isinstance(value, list) else [] if value is None else [value])]
        return found

    def _sampling(self) -> dict[str, Any]:
        """The options of generation_config.json: temperature and filters only if it sets do_sample."""
        unsupported = [key for key, none in UNSUPPORTED.items() if self.generation.get(key) not in (None, *none)]
        if unsupported:
            self.warnings.append(f"generation_config.json sets unsupported options: {', '.join(unsupported)}")
        options = {key: self.generation[key] for key in SAMPLING if self.generation.get(key) is not None}
        if self.generation.get("do_sample") is True:
            options = {"temperature": 1.0, **options}
        else:
            options = {key: value for key, value in options.items() if key == "repetition_penalty"}
        try:
            SamplingParams(**options)
        except UsageError as error:
            self.warnings.append(f"generation_config.json: {error}; its sampling options are ignored")
            return {}
        return options

    def _chat_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            if (size := file.stat().st_size) > LARGEST:
                raise CheckpointError(
                    f"{file} has {size:,} bytes, expected at most {LARGEST:,}; it is not a chat template, download the"
                    " file again"
                )
            try:
                return file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise CheckpointError(
                    f"{file} is not UTF-8 (byte {error.start}); download it again, or remove it to run without a"
                    " template"
                ) from None
        template = self.tokenizer_settings.get("chat_template")
        if isinstance(template, list):  # several templates with names
            try:
                named = {item["name"]: item["template"] for item in template}
            except (TypeError, KeyError):
                raise self._wrong_template("a list with an entry that has no name or no template") from None
            if "default" not in named:
                self.warnings.append(f"none of the {len(named)} chat templates is named 'default', so none is used")
            template = named.get("default")
        if template is not None and not isinstance(template, str):
            raise self._wrong_template(f"the type {type(template).__name__}")
        return template

    def _wrong_template(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path / 'tokenizer_config.json'}: chat_template must be a string or a list of objects with name and"
            f" template, found {found}; download the file again, or remove the entry to run without a template"
        )


def _spelled_out(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling with the legacy key "type" renamed to "rope_type" and without entries that are null."""
    out = {key: value for key, value in scaling.items() if value is not None and key != "type"}
    kind = scaling.get("rope_type", scaling.get("type"))
    return out if kind is None else {**out, "rope_type": kind}


class ConfigFile(HuggingFaceCheckpoint):
    """A config.json without weights: only the architecture. Raises CheckpointError, ConfigError."""

    def __init__(self, file: Path):
        self.path = file
        self.warnings = []
        self.settings = read_json(file)
        self.config = checked(self._config(Fields(self.settings, str(file))))


class WeightFile(ABC):
    """One file of weights: its header has been read, its values are mapped. metadata: further entries of the header."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    metadata: Mapping[str, str] = MappingProxyType({})
    mapped = True

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """A tensor by the file's name for it, mapped."""

    @abstractmethod
    def check_bytes(self, name: str) -> None:
        """As `Checkpoint.check_bytes`."""

    @abstractmethod
    def nbytes(self, name: str) -> int:
        """Bytes of a tensor."""


class _Safetensors(WeightFile):
    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            with open(path, "rb") as file:
                start = file.read(64)
                torchfile.refuse_mistakes(path, start)
                # A header length may begin with the bytes of a torch file; then a header follows.
                if start.startswith((torchfile.ZIP, torchfile.PICKLE)) and start[8:9] != b"{":
                    raise CheckpointError(f"{path} is a torch file, not a safetensors file; rename it to *.bin")
            header = read_header(path)
            with utf8_name(path) as name:
                self._file = safe_open(name, framework="pt")
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from None
        except SafetensorError as error:
            raise CheckpointError(
                f"{path}: the safetensors library reports it as damaged ({' '.join(str(error).split())[:160]});"
                " download it again"
            ) from None
        self._header = header
        self.metadata = header.metadata
        self.shapes = {name: entry.shape for name, entry in header.tensors.items()}
        self.dtypes = {name: entry.dtype for name, entry in header.tensors.items()}

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def nbytes(self, name: str) -> int:
        entry = self._header.tensors[name]
        return entry.end - entry.begin

    def check_bytes(self, name: str) -> None:
        """Compare the tensor that the library reads with the bytes at the offsets that this package read."""
        entry, read = self._header.tensors[name], raw_bytes(self.tensor(name))
        with open(self.path, "rb") as file:
            file.seek(self._header.start + entry.begin)
            for at in range(0, entry.end - entry.begin, CHUNK):
                if read[at : at + CHUNK].tobytes() != file.read(min(CHUNK, entry.end - entry.begin - at)):
                    raise CheckpointError(
                        f"{self.path}: {name} differs from the bytes at its offsets; the file was changed in the"
                        f" meantime, run the command again"
                    )


class _TorchFile(WeightFile):
    def __init__(self, path: Path):
        self.path = path
        self._tensors = torchfile.read_torch(path)
        self.mapped = torchfile.is_archive(path)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.dtypes = {name: DTYPES.get(t.dtype, str(t.dtype)) for name, t in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def nbytes(self, name: str) -> int:
        return self._tensors[name].nbytes

    def check_bytes(self, name: str) -> None:
        torchfile.check_bytes(self._tensors, name, self.path)


def _open_weights(folder: Path, warnings: list[str]) -> list[WeightFile]:
    """The files with the weights: safetensors if there are any, else pytorch_model*.bin; never both."""
    for index, single, ending, reader in (
        (INDEX, "model.safetensors", ".safetensors", _Safetensors),
        (BIN_INDEX, "pytorch_model.bin", ".bin", _TorchFile),
    ):
        if (folder / index).is_file():
            files = _open_indexed(folder, index, reader, warnings)
            if (folder / single).is_file() and single not in {file.path.name for file in files}:
                raise CheckpointError(
                    f"{folder} has both {index} and {single}; it is unclear which one applies; remove one"
                )
            return files
        found = sorted(file for file in folder.iterdir() if file.suffix == ending and "training_args" not in file.name)
        if (folder / single).is_file():
            if ignored := [file.name for file in found if file.name != single]:
                warnings.append(f"ignored because there is {single}: {', '.join(ignored[:4])}")
            return [_open(reader, folder / single)]
        adapters = [file for file in found if file.name.startswith("adapter_")]
        if found and len(adapters) == len(found):
            raise CheckpointError(
                f"{folder} contains an adapter ({found[0].name}), not a model; pass its base model as --model and this"
                f" folder as --adapter"
            )
        if found:
            return [_open(reader, file) for file in found if file not in adapters]
    if partial := [file.name for file in folder.iterdir() if file.name.endswith((".incomplete", ".part"))]:
        raise CheckpointError(f"{folder} contains an incomplete file ({partial[0]}); resume the download")
    if (folder / "original").is_dir():
        raise CheckpointError(f"{folder} has no weights, but Meta's may be in {folder / 'original'}: name that folder")
    raise CheckpointError(
        f"{folder} has {CONFIG} but no weights: expected model.safetensors or pytorch_model.bin; download them"
    )


def open_file(path: Path) -> WeightFile:
    """A file of weights: safetensors if its suffix says so, otherwise a torch file. Raises CheckpointError."""
    return _open(_Safetensors if path.suffix == ".safetensors" else _TorchFile, path)


def _open(reader: type[Any], path: Path) -> WeightFile:
    """Open a file of weights. Raises CheckpointError for a dangling link, or a pipe, which would block."""
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} is a link to a file that does not exist; resume the download")
    if not path.is_file():
        raise CheckpointError(f"{path} is not a regular file; replace it with the weights file")
    file: WeightFile = reader(path)
    return file


def _open_indexed(folder: Path, index: str, reader: type[Any], warnings: list[str]) -> list[WeightFile]:
    """Open the files of an index and check that they have the tensors that the index lists."""
    where = str(folder / index)
    document = read_json(folder / index)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: weight_map must map names of tensors to files; download it again")
    for name, file in weight_map.items():
        # A path could lead outside the folder. Links inside the folder are allowed: caches consist of them.
        if not isinstance(file, str) or not re.fullmatch(r"[\w.\-+ ]+", file) or file in (".", ".."):
            raise CheckpointError(
                f"{where}: the file of {name!r:.60} is {file!r:.60}, which is not a plain file name; download it again"
            )
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing[:4])}; resume the"
            " download"
        )
    files = [_open(reader, folder / name) for name in names]
    present = {(name, file.path.name) for file in files for name in file.shapes}
    listed = set(weight_map.items())
    if missing_tensors := sorted(listed - present):
        name, file = missing_tensors[0]
        raise CheckpointError(
            f"{where}: {name!r:.80} should be in {file} but is not; the files belong to different models,"
            " download them again"
        )
    if extra := sorted(present - listed):
        name, file = extra[0]
        raise CheckpointError(
            f"{folder / file} contains {name!r:.80}, but {index} does not list it there; the files belong to different"
            " models, download them again"
        )
    metadata = document.get("metadata")
    expected = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(file.nbytes(name) for file in files for name in file.shapes)
    if expected is not None and expected != found:
        warnings.append(
            f"{index}: total_size is {expected!r:.40}, but the files contain {found} bytes of weights; they may be"
            f" of different versions"
        )
    return files
