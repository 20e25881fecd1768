"""Reader of Meta's folders: params.json, consolidated.00.pth, .01.pth, ..., and tokenizer.model, there or one level up.

A model of several shards was split for as many GPUs: some matrices by columns, others by rows (fairscale's
ColumnParallelLinear and RowParallelLinear). Any number of shards can be read. Each weight is merged when it is read, so
memory holds the model and one more weight. Sources: meta-llama/llama, llama3 and llama-models.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import integer, positive
from ..config import LARGEST_SIZE, ModelConfig
from ..errors import CheckpointError, ConfigError, DamagedError
from ..system.documents import Fields, read_json
from ..tokenizer import Tokenizer
from . import base
from .base import FLOATS, Checkpoint, check_vocabulary, drop_pages, find_tokenizer, to_file_name
from .meta_quant import SUFFIXES, dequantize, hadamard
from .torchfile import is_archive, read_torch

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

VISION = ("vision_chunk_size", "vision_max_num_chunks", "vision_num_cross_attention_layers", "vision_model")

# What use_scaled_rope means (llama-models, apply_scaling); the factor is 32 for Llama 3.2 1B and 3B, else 8.
SCALED_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
MIXED = "the files are not shards of one model"
SMALL_32 = {(2048, 16), (3072, 28)}  # (dim, n_layers) of Llama 3.2 1B and 3B
ALL = slice(None)
# The weights whose shapes tell sizes that params.json may leave out
NEEDED = [f"{name}.weight" for name in ("tok_embeddings", "layers.0.attention.wq", "layers.0.attention.wk",
                                        "layers.0.feed_forward.w_gate")]  # fmt: skip


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
        self.params = _unwrapped(folder / PARAMS)
        if vision := [key for key in VISION if self.params.get(key, object, -1) != -1]:
            raise CheckpointError(f"{folder / PARAMS}: {vision[0]} belongs to a vision model; get a text model")
        self.quantization = self.params.get("quantization_args", dict, {})
        self.params.get("lora_args", dict, {})
        self.files, ignored = find_shards(folder)
        if ignored:
            self.warnings.append(f"ignored, not part of the model: {', '.join(ignored)}")
        self.parts = {file.name: file.stat().st_size for file in self.files}
        self.shards = [read_torch(file) for file in self.files]
        self._mapped = [is_archive(file) for file in self.files]
        self._scales: list[dict[str, Tensor]] = []  # the row scales of a float8 checkpoint, one file for each shard
        if any(tensor.dtype == torch.float8_e4m3fn for tensor in self.shards[0].values()):
            self._scales = [read_torch(folder / f"fp8_scales_{rank}.pt") for rank in range(len(self.shards))]
        self._kv_copies = 1  # how often each key/value head is stored: if there are more shards than heads
        try:
            self._names = self._match_names()  # the model's name -> (Meta's name without ".weight", axis)
            self._check_shards()
            self.config = base.checked(self._config())
        except ConfigError as error:
            raise CheckpointError(f"{folder}: {error}") from error
        tied = self.config.tie_embeddings
        self.shapes = {name: self._shape(name) for name in self._names if not (tied and name == "output.weight")}
        self.params.get("max_batch_size", object, None)  # without effect
        for key in self.params.unknown():
            if near := difflib.get_close_matches(key, self.params.keys_read, 1, 0.85):
                raise CheckpointError(f"{folder / PARAMS}: unknown key {key!r:.60}; did you mean {near[0]!r}?")
            self.warnings.append(f"{PARAMS} has an unknown key, which has no effect: {key!r:.60}")

    @property
    def about(self) -> Mapping[str, Any]:
        stored = {
            f"{rank}:{name}": (str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
            for rank, shard in enumerate(self.shards)
            for name, tensor in shard.items()
        }
        return {"weights": base.stored_bytes(stored)}

    def tensor(self, name: str) -> Tensor:
        source, axis = self._names[name]
        slices = [self._slice(source, rank) for rank in range(1 if axis is None else len(self.shards))]
        weight = slices[0] if len(slices) == 1 or axis is None else torch.cat(slices, axis)
        if self._has_copies(name):
            heads = weight.unflatten(0, (self.config.n_kv_heads, self._kv_copies, -1))  # (KV, copies, D, C)
            if not bool((heads == heads[:, :1]).all()):
                raise DamagedError(f"{self.path}: the copies of the key/value heads in {name} differ")
            weight = heads[:, 0].flatten(0, 1)  # (KV * D, C)
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
        return {**FLOATS, **QUANTIZED}[self._stored(name).dtype]

    def release(self, name: str) -> None:
        source, _ = self._names[name]
        for shard, mapped in zip(self.shards, self._mapped, strict=True):
            for suffix in SUFFIXES:
                if mapped and source + suffix in shard:
                    drop_pages(shard[source + suffix])

    def own_tokenizer(self) -> Tokenizer:
        from ..tokenizer import open_tokenizer

        path = find_tokenizer(self.path, ("tokenizer.model", "tokenizer.json"))
        tokenizer = open_tokenizer(path)
        check_vocabulary(tokenizer, self.config, str(path))
        rows = self.config.vocab_size
        # Llama 3's control ids follow the last line of the file, so one missing line shifts all of them.
        if tokenizer.n_vocab != rows and tokenizer.kind.startswith("tiktoken"):
            raise DamagedError(f"{path} has {tokenizer.n_vocab} tokens, but the embedding has {rows} rows")
        return tokenizer

    def chat_format(self, tokenizer: Tokenizer) -> str | None:
        """The built-in format of the vocabulary. The files do not state whether the model was trained to chat."""
        from ..chat import chat_format_of

        return chat_format_of(tokenizer)

    # ------------------------------------------------------------------------------------------------- reading
    def _check_shards(self) -> None:
        """Raise CheckpointError unless the shards agree in names, shapes and norm, and differ in wq."""
        kinds = [{name: (t.shape, t.dtype) for name, t in shard.items()} for shard in self.shards]
        norm, rows = self.shards[0].get("norm.weight"), set()
        for file, shard, kind in zip(self.files, self.shards, kinds, strict=True):
            if kind != kinds[0]:
                odd = min(name for name, _ in kind.items() ^ kinds[0].items())
                raise CheckpointError(f"{file}: {odd} is not as in {self.files[0].name}; {MIXED}")
            if norm is not None and not torch.allclose(norm.float(), shard["norm.weight"].float(), 0.02, 0.02, True):
                raise CheckpointError(f"{file}: norm.weight differs from that of {self.files[0].name}; {MIXED}")
            rows.add(tuple(shard["layers.0.attention.wq.weight"][:1].flatten().tolist()))
        if len(rows) < len(self.shards):
            raise CheckpointError(f"{self.path}: two shards have the same weights; one is a copy under another name")

    def _match_names(self) -> dict[str, tuple[str, int | None]]:
        where, shard = self.files[0], self.shards[0]
        names: dict[str, tuple[str, int | None]] = {}
        for name, tensor in shard.items():
            if TABLES.fullmatch(name):
                continue
            match = re.fullmatch(r"(layers\.\d+\.)?([\w.]+?)(\.weight|\.scales|\.zeros|\.adaptor\.[AB]\.weight)", name)
            if not match or match[2] not in NAMES:
                raise CheckpointError(f"{where}: {name:.80} is not part of a LLaMA decoder, so this model can't be run")
            layer, stem, suffix = match[1] or "", match[2], match[3]
            ours, axis = NAMES[stem]
            weight = shard.get(f"{layer}{stem}.weight")
            if suffix != ".weight":
                if weight is None or weight.dtype != torch.int8:
                    raise CheckpointError(f"{where}: {name} belongs to a quantized weight, but there is none")
                continue
            if tensor.dim() != (1 if axis is None else 2):
                raise DamagedError(f"{where}: {name} has the shape {tuple(tensor.shape)}")
            if tensor.dtype not in (*FLOATS, *QUANTIZED):
                raise CheckpointError(f"{where}: {name} is {tensor.dtype}; get the weights in bfloat16")
            names[f"{layer}{ours}.weight"] = (f"{layer}{stem}", axis)
        base.use_tied_output(names, self._size() in SMALL_32)
        if missing := [name for name in NEEDED if name not in names]:
            raise DamagedError(f"{where}: {self.file_name(missing[0])} is missing")
        if shard[f"{names['tok_embeddings.weight'][0]}.weight"].shape[1] < self._size()[0]:
            names["tok_embeddings.weight"] = ("tok_embeddings", 1)
        return names

    def _size(self) -> tuple[int, int]:
        return self.params.get("dim", int), self.params.get("n_layers", int)

    def _stored(self, name: str) -> Tensor:
        """The first shard's part of a weight, in the stored dtype."""
        return self.shards[0][f"{self._names[name][0]}.weight"]

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, without copies of heads."""
        shape, axis = list(self._stored(name).shape), self._names[name][1]
        if axis is not None:
            shape[axis] *= len(self.shards)
        if self._has_copies(name):
            shape[0] //= self._kv_copies
        return tuple(shape)

    def _slice(self, source: str, rank: int) -> Tensor:
        """One shard's part of a weight, in floating point."""
        weight = self.shards[rank][f"{source}.weight"]
        if weight.dtype in FLOATS:
            return weight
        if weight.dtype == torch.int8:
            return dequantize(self.shards[rank], source, self.params)
        scale = self._scales[rank].get(re.sub(r"^layers\.(\d+)\.", r"\1_", f"{source}_{rank}"))
        if scale is None or scale.numel() not in (1, len(weight)):
            raise DamagedError(f"{self.path}: fp8_scales_{rank}.pt has no scales for the rows of {source}")
        return weight.float() * scale.float().reshape(-1, 1)  # one scale a row

    def _has_copies(self, name: str) -> bool:
        """Whether this weight stores each key/value head several times."""
        return self._kv_copies > 1 and name.endswith((".wk.weight", ".wv.weight"))

    def _is_spun(self, name: str) -> bool:
        """Whether SpinQuant's code multiplies the input of this layer by a Hadamard matrix at run time.

        `tensor` multiplies the weight by it instead, with the same result.
        """
        return bool(self.quantization.get("spinquant")) and name.endswith("w_down.weight")

    # -------------------------------------------------------------------------------------------- configuration
    def _config(self) -> ModelConfig:
        """The architecture: by params.json, and by the shapes where it states nothing. Finds the copies of heads."""
        params, n = self.params, len(self.shards)
        dim, n_layers = self._size()
        n_heads = params.get("n_heads", int)
        integer(f"{PARAMS}: dim", dim, 1, LARGEST_SIZE, ConfigError)
        head_dim = dim // integer(f"{PARAMS}: n_heads", n_heads, 1, dim, ConfigError)
        if (rows := n * self._stored("layers.0.attention.wq.weight").shape[0]) < n_heads * head_dim:
            raise ConfigError(f"{n} shards have {rows:,} of {dim:,} rows of wq; download the other shards")
        n_kv_heads, vocab_size = params.get("n_kv_heads", int, n_heads), params.get("vocab_size", int, -1)
        stored_kv = self._stored("layers.0.attention.wk.weight").shape[0] * n // head_dim
        self._kv_copies = self._find_copies(stored_kv, n_kv_heads, head_dim)
        scaled, theta = params.get("use_scaled_rope", bool, False), params.get("rope_theta", float, 10000.0)
        tied = self._tied()
        context = family_context(scaled, theta, self._stored("tok_embeddings.weight").dtype == torch.float16)
        if params.get("max_seq_len", int, None) is None:
            self.notes.append(f"{PARAMS} does not state the context; {context} tokens are assumed")
        return ModelConfig(
            dim=dim,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=stored_kv // self._kv_copies if n_kv_heads == stored_kv else n_kv_heads,
            head_dim=head_dim,
            hidden_dim=_hidden_dim(params, dim) or self._shape("layers.0.feed_forward.w_gate.weight")[0],
            # -1 in Llama 2: the size of the tokenizer
            vocab_size=self._shape("tok_embeddings.weight")[0] if vocab_size == -1 else vocab_size,
            norm_eps=params.get("norm_eps", float, 1e-5),
            rope_theta=theta,
            rope_scaling=self._rope_scaling(tied) if scaled else None,
            max_seq_len=params.get("max_seq_len", int, context),
            tie_embeddings=tied,
        )

    def _find_copies(self, stored: int, expected: int, head_dim: int) -> int:
        """How often each key/value head is stored: a model of more shards than key/value heads repeats them."""
        if len(self.shards) == 1:
            return 1
        if stored != expected or stored != len(self.shards):  # heads are repeated until every shard has one
            return stored // expected if 0 < expected < stored else 1
        heads = self.tensor("layers.0.attention.wk.weight").unflatten(0, (-1, head_dim))  # (stored, D, C)
        copies = 1
        while stored % (2 * copies) == 0 and torch.equal(heads[:: 2 * copies], heads[copies :: 2 * copies]):
            copies *= 2
        return copies

    def _tied(self) -> bool:
        """Whether the output matrix equals the embedding. Meta's files store both, even for Llama 3.2 1B and 3B.

        The first rows are compared first: in most models they differ, and then the other rows are not read.
        """
        embedding, output = "tok_embeddings.weight", "output.weight"
        if output not in self._names:  # in other models, the check of the names reports it as missing
            return self._size() in SMALL_32
        if self._shape(embedding) != self._shape(output):
            return False
        step = -(-self._shape(output)[0] // len(self.shards))
        parts = [slice(0, 1), *(slice(rank * step, (rank + 1) * step) for rank in range(len(self.shards)))]
        pairs = ((self.piece(embedding, rows, ALL), self.piece(output, rows, ALL)) for rows in parts)
        tied = all(one.data_ptr() == other.data_ptr() or torch.equal(one, other) for one, other in pairs)
        self.release(embedding)
        self.release(output)
        return tied

    def _rope_scaling(self, tied: bool) -> dict[str, Any]:
        small = tied or self._size() in SMALL_32
        factor = self.params.get("rope_scaling_factor", float, 32.0 if small else 8.0)
        if self.params.get("rope_scaling_factor", float, None) is None:
            family = "Llama 3.2 1B and 3B" if small else "Llama 3.1 and 3.3"
            self.notes.append(f"{PARAMS} sets use_scaled_rope without a factor; {factor:g} is used, as in {family}")
        return {**SCALED_ROPE, "factor": factor}


def family_context(scaled: bool, theta: float, half: bool = False) -> int:
    """The context of Meta's models with these values in params.json. half: weights in float16."""
    if scaled:
        return 131072  # Llama 3.1 and later
    return {500000.0: 8192, 1000000.0: 16384}.get(
        theta, 2048 if half else 4096
    )  # Llama 3, Code Llama, LLaMA 1, Llama 2


def read_params(file: Path) -> ModelConfig:
    """The sizes in a params.json without weights. Raises ConfigError if only the weights have one, as in Llama 2."""
    params = _unwrapped(file)
    dim, n_heads, vocab_size = params.get("dim", int), params.get("n_heads", int), params.get("vocab_size", int, -1)
    hidden_dim = _hidden_dim(params, dim)
    if vocab_size < 1 or hidden_dim is None or n_heads < 1:
        raise ConfigError(f"{file} does not state all sizes; name the folder with the weights, or a file of configs/")
    context = family_context(params.get("use_scaled_rope", bool, False), params.get("rope_theta", float, 10000.0))
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
    numbered = {int(m[1]): file for file in files if (m := re.fullmatch(r"consolidated\.(\d{2,3})\.pth", file.name))}
    rest = [file for file in files if file not in numbered.values() and not file.name.startswith("fp8_scales_")]
    if not numbered and len(rest) == 1:
        return rest, []
    if missing := [i for i in range(max(numbered, default=0) + 1) if i not in numbered][:4]:
        names = ", ".join(f"consolidated.{i:02d}.pth" for i in missing)
        raise CheckpointError(f"{folder}: weights are missing: {names}; download them")
    return [numbered[i] for i in sorted(numbered)], [file.name for file in rest]


def _unwrapped(file: Path) -> Fields:
    """The entries of a params.json; some releases put them into an object "model"."""
    values = read_json(file)
    inner = values.get("model")
    return Fields(inner if isinstance(inner, dict) else values, str(file))


def _hidden_dim(params: Fields, dim: int) -> int | None:
    """Width of the feed-forward network as Meta's code computes it; None if params.json does not determine it."""
    if params.get("multiple_of", int, None) is None:
        return None
    multiple = integer(f"{PARAMS}: multiple_of", params.get("multiple_of", int), error=ConfigError)
    factor = params.get("ffn_dim_multiplier", float, 1)
    hidden = int(positive(f"{PARAMS}: ffn_dim_multiplier", factor, LARGEST_SIZE, ConfigError) * int(8 * dim / 3))
    return multiple * -(-hidden // multiple)
