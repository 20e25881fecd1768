"""Reader of Meta's folders: params.json, consolidated.00.pth, .01.pth, ..., and tokenizer.model, there or one level up.

A model of several shards was split for as many GPUs: some matrices by columns, others by rows (fairscale's
ColumnParallelLinear and RowParallelLinear). Any number of shards can be read. Each weight is merged when it is read, so
memory holds the model and one more weight. Sources: meta-llama/llama, llama3 and llama-models.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import integer, positive
from ..config import LARGEST_SIZE, ModelConfig
from ..errors import CheckpointError, ConfigError
from ..tokenizer import Tokenizer
from . import torchfile
from .base import FLOATS, Checkpoint, checked, drop_pages, stored_bytes, to_file_name
from .documents import Fields, read_json, with_remedy
from .meta_quant import SUFFIXES, dequantize, hadamard
from .nearby import find_tokenizer

PARAMS = "params.json"

# Meta's name -> (the model's name, axis along which shards split it; None: every shard has the full tensor).
# The embedding is split along its columns up to Code Llama and along its rows since Llama 3; the shapes show which.
NAMES: dict[str, tuple[str, int | None]] = {
    "tok_embeddings": ("tok_embeddings", 0),
    "norm": ("norm", None),
    "output": ("output", 0),
    "attention_norm": ("attention_norm", None),
    "attention.wq": ("attention.wq", 0),
    "attention.wk": ("attention.wk", 0),
    "attention.wv": ("attention.wv", 0),
    "attention.wo": ("attention.wo", 1),
    "ffn_norm": ("ffn_norm", None),
    "feed_forward.w1": ("feed_forward.w_gate", 0),
    "feed_forward.w3": ("feed_forward.w_up", 0),
    "feed_forward.w2": ("feed_forward.w_down", 1),
}
STEMS = {source: ours for source, (ours, _) in NAMES.items()}
# Tables in the files of LLaMA 1, Llama 2 and Code Llama; not read, since they follow from the configuration.
TABLES = re.compile(r"(layers\.\d+\.attention\.inner_attention\.)?rope\.freqs")

QUANTIZED = {torch.float8_e4m3fn: "float8 with row scales", torch.int8: "integers with group scales"}

KNOWN_PARAMS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_theta",
    "use_scaled_rope", "rope_scaling_factor", "vocab_size", "max_seq_len", "max_batch_size", "quantization_args",
    "lora_args",
}  # fmt: skip
VISION = ("vision_chunk_size", "vision_max_num_chunks", "vision_num_cross_attention_layers", "vision_model")

# What use_scaled_rope means (llama-models, apply_scaling); the factor is 32 for Llama 3.2 1B and 3B, else 8.
SCALED_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
MIXED = "they are not shards of one model, download all of them again"
MOST_SHARDS = 128  # official models have at most 16; a larger count means that dim is wrong
SMALL_32 = {(2048, 16), (3072, 28)}  # (dim, n_layers) of Llama 3.2 1B and 3B


def recognizes(folder: Path) -> bool:
    return folder.is_dir() and (folder / PARAMS).is_file()


class MetaCheckpoint(Checkpoint):
    """A folder in Meta's format. See Checkpoint for the members."""

    format = "Meta"
    layout = "interleaved"

    def __init__(self, folder: Path):
        self.path = folder
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.params = self._read_params()
        self.files, ignored = find_shards(folder)
        if ignored:
            self.warnings.append(f"ignored, not part of the model: {', '.join(ignored)}")
        self.shards = [torchfile.read_torch(file) for file in self.files]
        self.parts = {file.name: file.stat().st_size for file in self.files}
        self._refuse_copies()
        self._scales = self._read_fp8_scales()
        try:
            self._names = self._match_names()  # the model's name -> (Meta's name without ".weight", axis)
            self._check_replicas()
            self.config = checked(self._config())
        except ConfigError as error:
            raise CheckpointError(
                f"{folder}: {with_remedy(error, f'correct {PARAMS}, or download the files again')}"
            ) from error
        tied = self.config.tie_embeddings
        self.shapes = {name: self._merged_shape(name) for name in self._names if not (tied and name == "output.weight")}

    @property
    def about(self) -> Mapping[str, Any]:
        stored = {
            f"{rank}:{name}": (str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
            for rank, shard in enumerate(self.shards)
            for name, tensor in shard.items()
        }
        quantization = self.params.get("quantization_args")
        scheme = {"quantization": "float8 feed-forward"} if self._scales else {}
        if isinstance(quantization, Mapping):
            scheme = {
                "quantization": f"{quantization.get('scheme')}{' SpinQuant' * bool(quantization.get('spinquant'))}"
            }
        return {**scheme, "weights": stored_bytes(stored)}

    def tensor(self, name: str) -> Tensor:
        source, axis = self._names[name]
        slices = [self._slice(source, rank) for rank in range(1 if axis is None else len(self.shards))]
        weight = slices[0] if len(slices) == 1 or axis is None else torch.cat(slices, axis)
        if self._has_copies(name):
            weight = self._without_copies(weight, name)
        return hadamard(weight) if self._is_spun(name) else weight

    def piece(self, name: str, rows: slice, columns: slice) -> Tensor:
        source, axis = self._names[name]
        if axis is None or self._has_copies(name) or self._is_spun(name):  # a vector, or must be merged first
            return super().piece(name, rows, columns)
        cut, other = (rows, columns) if axis == 0 else (columns, rows)
        size = self._stored(name).shape[axis]  # of each shard
        first, last, _ = cut.indices(size * len(self.shards))
        pieces = []
        for shard in range(first // size, -(-last // size)):
            own = slice(max(first - shard * size, 0), min(last - shard * size, size))
            pieces.append(self._slice(source, shard)[(own, other) if axis == 0 else (other, own)])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)

    def file_name(self, name: str) -> str:
        return to_file_name(name, STEMS)

    def stored(self, name: str) -> str:
        dtype = self._stored(name).dtype
        return FLOATS.get(dtype) or QUANTIZED.get(dtype) or str(dtype).removeprefix("torch.")

    def check_bytes(self, name: str) -> None:
        source, _ = self._names[name]
        for file, shard in zip(self.files, self.shards, strict=True):
            for suffix in SUFFIXES:
                if source + suffix in shard:
                    torchfile.check_bytes(shard, source + suffix, file)

    def release(self, name: str) -> None:
        source, _ = self._names[name]
        for shard, mapped in zip(self.shards, self._mapped, strict=True):
            for suffix in SUFFIXES:
                if mapped and source + suffix in shard:
                    drop_pages(shard[source + suffix])

    def own_tokenizer(self) -> Tokenizer:
        from ..tokenizer import open_tokenizer

        usual = (self.path / "tokenizer.model", self.path.parent / "tokenizer.model", self.path / "tokenizer.json")
        path = next((path for path in usual if path.exists()), None)
        if path is None:
            path = find_tokenizer(self.path, ("tokenizer.model", "tokenizer.json"))
            self.warnings.append(f"{self.path} has no tokenizer; using {path}")
        tokenizer = open_tokenizer(path)
        check_vocabulary(tokenizer, self.config, str(path))
        rows, exact = self.config.vocab_size, tokenizer.kind.startswith("tiktoken")
        # Llama 3's control ids follow the last line of the file, so one missing line shifts all of them.
        if tokenizer.n_vocab < rows and (exact or rows > tokenizer.n_vocab + max(1024, tokenizer.n_vocab // 4)):
            raise CheckpointError(
                f"{path}: the tokenizer has {tokenizer.n_vocab} tokens, but the embedding has {rows} rows; the file is"
                " truncated or belongs to another model; copy the one that was published with the weights"
            )
        return tokenizer

    def chat_format(self, tokenizer: Tokenizer) -> str | None:
        """The built-in format of the vocabulary. The files do not state whether the model was trained to chat."""
        from ..chat import chat_format_of

        return chat_format_of(tokenizer)

    # ------------------------------------------------------------------------------------------------- reading
    def _read_params(self) -> dict[str, Any]:
        params = read_json(self.path / PARAMS)
        if "model" in params and isinstance(params["model"], dict):  # some releases wrap it
            params = params["model"]
        where = str(self.path / PARAMS)
        if vision := [key for key in VISION if params.get(key) not in (None, -1)]:
            raise CheckpointError(f"{where}: the key {vision[0]} belongs to a vision model; get a text model")
        for key in params.keys() - KNOWN_PARAMS - set(VISION):
            if near := difflib.get_close_matches(key, KNOWN_PARAMS, 1, 0.85):
                raise CheckpointError(f"{where}: unknown key {key!r:.60}; did you mean {near[0]!r}?")
            self.warnings.append(f"{PARAMS} has an unknown key, which has no effect: {key!r:.60}")
        return params

    def _read_fp8_scales(self) -> list[dict[str, Tensor]]:
        """The row scales of a float8 checkpoint, one file per shard; empty for other checkpoints."""
        if not any(tensor.dtype == torch.float8_e4m3fn for tensor in self.shards[0].values()):
            return []
        files = [self.path / f"fp8_scales_{rank}.pt" for rank in range(len(self.shards))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(
                f"{self.path}: the weights are float8 and their scales are missing; download {', '.join(missing)}"
            )
        return [torchfile.read_torch(file) for file in files]

    def _refuse_copies(self) -> None:
        """Raise CheckpointError if two shards have the same bytes: one file was saved under two names."""
        seen: dict[tuple[int, ...], Path] = {}
        for file in self.files:
            sums = torchfile.checksums(file)
            if any(sums) and sums in seen:
                raise CheckpointError(
                    f"{file} is a copy of {seen[sums].name}: same checksums; download the right shard"
                )
            seen[sums] = file

    @cached_property
    def _mapped(self) -> list[bool]:
        return [torchfile.is_archive(file) for file in self.files]

    def _match_names(self) -> dict[str, tuple[str, int | None]]:
        first = self.shards[0].keys()
        for file, shard in zip(self.files, self.shards, strict=True):
            if odd := sorted(first ^ shard.keys()):
                has = "has" if odd[0] in shard else "does not have"
                raise CheckpointError(f"{file} {has} {odd[0]}, unlike {self.files[0].name}; {MIXED}")
            for name, tensor in shard.items():
                other = self.shards[0][name]
                if tensor.dtype != other.dtype:
                    raise CheckpointError(
                        f"{file}: {name} is {tensor.dtype}, but {other.dtype} in {self.files[0].name}; {MIXED}"
                    )
                if tensor.shape != other.shape:
                    raise CheckpointError(
                        f"{file}: {name} has shape {tuple(tensor.shape)}, but {tuple(other.shape)} in"
                        f" {self.files[0].name}; {MIXED}"
                    )
        names: dict[str, tuple[str, int | None]] = {}
        for name in first:
            if TABLES.fullmatch(name):
                continue
            match = re.fullmatch(r"(layers\.\d+\.)?([\w.]+?)(\.weight|\.scales|\.zeros|\.adaptor\.[AB]\.weight)", name)
            if not match or match[2] not in NAMES:
                raise CheckpointError(
                    f"{self.files[0]}: {name} is not part of a LLaMA decoder, so this model can't be run; use the"
                    " code that was published with it"
                )
            if match[3] != ".weight":
                self._check_part(name, name.removesuffix(match[3]), match[3])
                continue
            ours, axis = NAMES[match[2]]
            if self.shards[0][name].dim() != (1 if axis is None else 2):
                raise CheckpointError(
                    f"{self.files[0]}: {name} has shape {tuple(self.shards[0][name].shape)}, expected"
                    f" {'a vector' if axis is None else 'a matrix'}; the file is damaged, download it again"
                )
            names[f"{match[1] or ''}{ours}.weight"] = (f"{match[1] or ''}{match[2]}", axis)
        if "tok_embeddings.weight" not in names:
            raise CheckpointError(f"{self.files[0]}: tok_embeddings.weight is missing; download the file again")
        columns = self.shards[0]["tok_embeddings.weight"].shape[-1]
        if columns < Fields(self.params, PARAMS).get("dim", int):
            names["tok_embeddings.weight"] = ("tok_embeddings", 1)
        return names

    def _check_part(self, name: str, base: str, suffix: str) -> None:
        """Raise CheckpointError unless scales and adaptors belong to a quantized weight, and adaptor A to B."""
        shard = self.shards[0]
        weight = shard.get(f"{base}.weight")
        twin = {".adaptor.A.weight": ".adaptor.B.weight", ".adaptor.B.weight": ".adaptor.A.weight"}.get(suffix)
        if weight is None or weight.dtype != torch.int8:
            raise CheckpointError(
                f"{self.files[0]}: {name} belongs to a quantized weight, but {base}.weight is not quantized; {MIXED}"
            )
        if twin is not None and base + twin not in shard:
            raise CheckpointError(
                f"{self.files[0]}: {name} is present, but {base + twin} is missing; the file is incomplete, download"
                " it again"
            )

    def _check_replicas(self) -> None:
        """Raise CheckpointError if a vector, of which every shard has a copy, differs between shards."""
        for name in ("norm.weight", "layers.0.attention_norm.weight"):
            first = self.shards[0].get(name)
            for file, shard in zip(self.files[1:], self.shards[1:], strict=True):
                if first is not None and not torch.allclose(first.float(), shard[name].float(), rtol=0.02, atol=0.02):
                    raise CheckpointError(f"{file}: {name} differs from that of {self.files[0].name}; {MIXED}")

    def _stored(self, name: str) -> Tensor:
        """The first shard's part of a weight, in the stored dtype."""
        return self.shards[0][f"{self._names[name][0]}.weight"]

    def _merged_shape(self, name: str) -> tuple[int, ...]:
        shape = list(self._stored(name).shape)
        axis = self._names[name][1]
        if axis is not None:
            shape[axis] *= len(self.shards)
        if self._has_copies(name):
            shape[0] //= self._kv_copies
        return tuple(shape)

    def _slice(self, source: str, rank: int) -> Tensor:
        """One shard's part of a weight, in floating point."""
        shard, file = self.shards[rank], self.files[rank]
        weight = shard[f"{source}.weight"]
        if weight.dtype in FLOATS:
            return weight
        if weight.dtype == torch.float8_e4m3fn and self._scales:
            scale = self._scales[rank].get(re.sub(r"^layers\.(\d+)\.", r"\1_", f"{source}_{rank}"))
            if scale is None or scale.numel() not in (1, len(weight)):
                raise CheckpointError(
                    f"{self.path}: fp8_scales_{rank}.pt has no scales for the {len(weight)} rows of {source}; download"
                    " it again"
                )
            return weight.float() * scale.float().reshape(-1, 1)  # one scale a row
        if weight.dtype == torch.int8 and f"{source}.scales" in shard:
            return dequantize(shard, source, self.params, str(file))
        raise CheckpointError(
            f"{file}: {source}.weight is stored as {str(weight.dtype).removeprefix('torch.')}, expected one of"
            f" {', '.join(str(d).removeprefix('torch.') for d in FLOATS)}; get the weights in bfloat16"
        )

    def _has_copies(self, name: str) -> bool:
        """Whether this weight stores each key/value head several times."""
        return self._kv_copies > 1 and name.endswith((".wk.weight", ".wv.weight"))

    def _without_copies(self, weight: Tensor, name: str) -> Tensor:
        heads = weight.unflatten(0, (self.config.n_kv_heads, self._kv_copies, self.config.head_dim))
        if not bool((heads == heads[:, :1]).all()):
            raise CheckpointError(
                f"{self.path}: the copies of the key/value heads in {name} differ; a shard is damaged, download them"
                " again"
            )
        return heads[:, 0].flatten(0, 1)  # (KV, copies, D, C), then (KV * D, C)

    def _is_spun(self, name: str) -> bool:
        """Whether SpinQuant's code multiplies the input of this layer by a Hadamard matrix at run time.

        `tensor` multiplies the weight by it instead, with the same result.
        """
        quantization = self.params.get("quantization_args")
        return (
            isinstance(quantization, Mapping) and bool(quantization.get("spinquant")) and name.endswith("w_down.weight")
        )

    # -------------------------------------------------------------------------------------------- configuration
    def _config(self) -> ModelConfig:
        """The architecture, by params.json and the shapes. Sets how often each key/value head is stored."""
        params, n = Fields(self.params, PARAMS), len(self.shards)
        dim, n_layers, n_heads = params.get("dim", int), params.get("n_layers", int), params.get("n_heads", int)
        integer(f"{PARAMS}: dim", dim, 1, LARGEST_SIZE, ConfigError)
        if n_heads < 1 or dim % n_heads:
            raise ConfigError(f"{PARAMS}: dim must be a multiple of n_heads, got {dim} and {str(n_heads)[:40]}")
        head_dim = dim // n_heads
        self._kv_copies = 1
        for name in ("attention.wq", "attention.wk", "feed_forward.w_gate"):
            if f"layers.0.{name}.weight" not in self._names:
                raise ConfigError(f"{self.file_name(f'layers.0.{name}.weight')} is missing; download the files again")
        rows = self._stored("layers.0.attention.wq.weight").shape[0]
        if rows * n != dim:
            found = f"{n} shard{'s' * (n > 1)} with {rows * n} rows of wq, but {PARAMS} requires {dim}"
            if rows and dim % rows == 0 and n < dim // rows <= MOST_SHARDS:
                missing = [f"consolidated.{shard:02d}.pth" for shard in range(n, dim // rows)]
                absent = f"{missing[0]} up to {missing[-1]} are missing, download them"
                if len(missing) == 1:
                    absent = f"{missing[0]} is missing, download it"
                raise ConfigError(f"{found}; the model has {dim // rows} shards: {absent}")
            raise ConfigError(f"{found}; the files belong to different models, download them again")
        expected_kv = params.get("n_kv_heads", int, n_heads)
        stored_kv = self._stored("layers.0.attention.wk.weight").shape[0] * n // head_dim
        self._kv_copies = self._find_copies(stored_kv, expected_kv, head_dim)
        n_kv_heads = stored_kv // self._kv_copies
        if expected_kv not in (stored_kv, n_kv_heads):
            raise ConfigError(f"{PARAMS} specifies {expected_kv} key/value heads, but the files have {stored_kv}")
        vocab_size, _ = self._merged_shape("tok_embeddings.weight")
        expected_vocab = params.get("vocab_size", int, -1)
        if expected_vocab not in (-1, vocab_size):  # -1 in Llama 2: the size of the tokenizer
            raise ConfigError(
                f"{PARAMS} specifies vocab_size {expected_vocab}, but the embedding has {vocab_size} rows"
            )
        hidden_dim = self._merged_shape("layers.0.feed_forward.w_gate.weight")[0]
        expected_hidden = _hidden_dim(params, dim)
        if expected_hidden not in (None, hidden_dim):
            raise ConfigError(
                f"multiple_of and ffn_dim_multiplier in {PARAMS} imply a feed-forward width of {expected_hidden},"
                f" but the files have {hidden_dim}"
            )
        theta = params.get("rope_theta", float, 10000.0)
        scaled = params.get("use_scaled_rope", bool, False)
        tied = self._tied((dim, n_layers))
        for name in ("tok_embeddings.weight", "output.weight"):  # read for the comparison
            if name in self._names:
                self.release(name)
        return ModelConfig(
            dim=dim,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            hidden_dim=hidden_dim,
            vocab_size=vocab_size,
            norm_eps=params.get("norm_eps", float, 1e-5),
            rope_theta=theta,
            rope_scaling=self._rope_scaling(params, scaled, tied, (dim, n_layers)),
            max_seq_len=params.get("max_seq_len", int, self._context(scaled, theta)),
            tie_embeddings=tied,
        )

    def _find_copies(self, stored: int, expected: int, head_dim: int) -> int:
        """How often each key/value head is stored: a model of more shards than key/value heads repeats them."""
        if len(self.shards) == 1:
            return 1
        if expected and stored > expected and stored % expected == 0:
            return stored // expected
        if stored != len(self.shards):  # heads are repeated until every shard has one
            return 1
        heads = self.tensor("layers.0.attention.wk.weight").unflatten(0, (-1, head_dim))  # (stored, D, C)
        copies = 1
        while stored % (2 * copies) == 0 and stored > copies:
            pairs = heads[::copies].unflatten(0, (-1, 2))  # (heads / 2, 2, D, C)
            if not torch.equal(pairs[:, 0], pairs[:, 1]):
                break
            copies *= 2
        return copies

    def _tied(self, size: tuple[int, int]) -> bool:
        """Whether the output matrix equals the embedding. Meta's files store both, even for Llama 3.2 1B and 3B.

        The first rows are compared first: in most models they differ, and then the other rows are not read.
        """
        if "output.weight" not in self._names:
            if size in SMALL_32:
                return True
            raise ConfigError(
                "output.weight is missing, which is valid only for Llama 3.2 1B and 3B; download the files again"
            )
        (_, axis), (_, out_axis) = self._names["tok_embeddings.weight"], self._names["output.weight"]
        if self._merged_shape("tok_embeddings.weight") != self._merged_shape("output.weight"):
            return False
        if axis == out_axis or len(self.shards) == 1:
            for rank in range(len(self.shards)):
                ours, other = (self._slice(name, rank) for name in ("tok_embeddings", "output"))
                if ours.data_ptr() != other.data_ptr() and not (
                    torch.equal(ours[:1], other[:1]) and torch.equal(ours, other)
                ):
                    return False
            return True
        columns = [self._slice("tok_embeddings", rank) for rank in range(len(self.shards))]
        for rank in range(len(self.shards)):
            other = self._slice("output", rank)  # (rows of this shard, C)
            rows = [part[rank * len(other) : (rank + 1) * len(other)] for part in columns]
            same_start = torch.equal(torch.cat([part[:1] for part in rows], 1), other[:1])
            if not same_start or not torch.equal(torch.cat(rows, 1), other):
                return False
        return True

    def _rope_scaling(self, params: Fields, scaled: bool, tied: bool, size: tuple[int, int]) -> dict[str, Any] | None:
        if not scaled:
            return None
        small = tied or size in SMALL_32
        factor = params.get("rope_scaling_factor", float, 32.0 if small else 8.0)
        if params.get("rope_scaling_factor") is None:
            family = "Llama 3.2 1B and 3B, by the tied output matrix or the size" if small else "Llama 3.1 and 3.3"
            self.notes.append(f"{PARAMS} sets use_scaled_rope without a factor; {factor:g} is used, as in {family}")
        return {**SCALED_ROPE, "factor": factor}

    def _context(self, scaled: bool, theta: float) -> int:
        """The trained context, inferred from the family if params.json does not state it."""
        context, family = family_context(scaled, theta, self._stored("tok_embeddings.weight").dtype == torch.float16)
        if self.params.get("max_seq_len") is None:
            self.notes.append(f"{PARAMS} does not state the context; {context} tokens are assumed ({family})")
        return context


def family_context(scaled: bool, theta: float, half: bool = False) -> tuple[int, str]:
    """The context of Meta's models with these values in params.json, and the reason. half: weights in float16."""
    if scaled:
        return 131072, "scaled RoPE, as Llama 3.1 and later"
    if theta == 500000:
        return 8192, "theta 500,000, as Llama 3"
    if theta == 1000000:
        return 16384, "theta 1,000,000, as Code Llama"
    return (2048, "float16, as LLaMA 1") if half else (4096, "as Llama 2")


def read_params(file: Path) -> ModelConfig:
    """The sizes in a params.json without weights. Raises ConfigError if only the weights have one, as in Llama 2."""
    values = read_json(file)
    params = Fields(values["model"] if isinstance(values.get("model"), dict) else values, str(file))
    dim, n_heads, vocab_size = params.get("dim", int), params.get("n_heads", int), params.get("vocab_size", int, -1)
    hidden_dim = _hidden_dim(params, dim)
    if vocab_size < 1 or hidden_dim is None or n_heads < 1:
        raise ConfigError(
            f"{file} does not state the size of the vocabulary or of the feed-forward network; name the folder with"
            " the weights, or a file of configs/"
        )
    context, _ = family_context(params.get("use_scaled_rope", bool, False), params.get("rope_theta", float, 10000.0))
    return ModelConfig(
        dim=dim,
        n_layers=params.get("n_layers", int),
        n_heads=n_heads,
        n_kv_heads=params.get("n_kv_heads", int, n_heads),
        head_dim=params.get("head_dim", int, dim // n_heads),
        hidden_dim=hidden_dim,
        vocab_size=vocab_size,
        max_seq_len=params.get("max_seq_len", int, context),
    )


def find_shards(folder: Path) -> tuple[list[Path], list[str]]:
    """The shards of a model in order, and the names of other torch files in the folder."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".pth", ".pt"))
    numbered = {int(m[1]): file for file in files if (m := re.fullmatch(r"consolidated\.(\d+)\.pth", file.name))}
    rest = [file for file in files if file not in numbered.values() and not file.name.startswith("fp8_scales_")]
    if not numbered:
        if len(rest) == 1:
            return rest, []
        found = f"; found {', '.join(file.name for file in rest[:4])}" if rest else ""
        raise CheckpointError(
            f"{folder} has {PARAMS} but no weights: expected consolidated.00.pth{found}; download them"
        )
    if missing := [f"consolidated.{i:02d}.pth" for i in range(max(numbered) + 1) if i not in numbered]:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {max(numbered) + 1} shards are missing: {', '.join(missing[:4])};"
            " download them"
        )
    return [numbered[i] for i in sorted(numbered)], [file.name for file in rest]


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, where: str) -> None:
    """Raise CheckpointError if the tokenizer has more tokens than the embedding has rows, or less than a quarter.

    Models pad the vocabulary by a few rows. Llama 2's 32,000 tokens are just below a quarter of Llama 3's 128,256.
    """
    if tokenizer.n_vocab > config.vocab_size or 4 * tokenizer.n_vocab < config.vocab_size:
        raise CheckpointError(
            f"{where}: the tokenizer has {tokenizer.n_vocab} tokens, but the embedding has"
            f" {config.vocab_size} rows; use the tokenizer that was published with the weights"
        )


def _hidden_dim(params: Fields, dim: int) -> int | None:
    """Width of the feed-forward network as Meta's code computes it; None if params.json does not determine it."""
    if params.get("multiple_of") is None:
        return None
    multiple = params.get("multiple_of", int)
    integer(f"{PARAMS}: multiple_of", multiple, 1, error=ConfigError)
    hidden = int(8 * dim / 3)
    if params.get("ffn_dim_multiplier") is not None:
        multiplier = params.get("ffn_dim_multiplier", float)
        factor = positive(f"{PARAMS}: ffn_dim_multiplier", multiplier, LARGEST_SIZE, ConfigError)
        hidden = int(factor * hidden)
    return multiple * -(-hidden // multiple)
