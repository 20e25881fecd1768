"""Writer of Meta's folders, weight by weight, in any number of shards; see meta.py for the files."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import ConfigError, TokenizerError
from .base import to_file_name
from .meta import NAMES, PARAMS, SCALED_ROPE, SMALL_32, STEMS
from .write import Model, refuse

STORAGES = {torch.float32: torch.FloatStorage, torch.bfloat16: torch.BFloat16Storage, torch.float16: torch.HalfStorage}
MULTIPLES = (256, 1024, 4096)  # multiple_of and ffn_dim_multiplier of official models
MULTIPLIERS = (None, 1.0, 1.2, 1.3, 1.5)


def write(folder: Path, model: Model, shards: int = 0) -> Sequence[str]:
    """Fill an empty folder with `shards` shards; 0 means one. Returns warnings."""
    config, shards = model.config, shards or 1
    only: dict[str, object] = {"attention_bias": False, "qkv_bias": False, "mlp_bias": False, "no_rope_layers": ()}
    refuse(config, "Meta's format", **only, sliding_window=None, head_dim=config.dim // config.n_heads)
    copies = _kv_copies(config, shards)
    if config.n_heads % shards or config.n_kv_heads * copies % shards:
        fit = [n for n in range(1, config.n_heads + 1) if not config.n_heads % n and not (
            config.n_kv_heads * _kv_copies(config, n) % n)]  # fmt: skip
        raise ConfigError(
            f"{config.n_heads} heads and {config.n_kv_heads} key/value heads can't be divided into {shards} equal"
            f" shards; numbers that work: {', '.join(map(str, fit))}"
        )
    old = _splits_columns(model)
    plan = {to_file_name(name, STEMS): (name, axis(name, old)) for name in model.shapes}
    if config.tie_embeddings:  # Meta's files always have an output matrix
        plan["output.weight"] = ("tok_embeddings.weight", 0)
    shapes = {theirs: _shard_shape(model.shapes[ours], where, shards, copies if _is_kv(ours) else 1, ours)
              for theirs, (ours, where) in plan.items()}  # fmt: skip
    dtypes = {theirs: model.dtypes[ours] for theirs, (ours, _) in plan.items()}
    files = [folder / f"consolidated.{rank:02d}.pth" for rank in range(shards)]
    writers = [TorchWriter(file, shapes, dtypes) for file in files]
    for theirs, (ours, where) in plan.items():
        tensor = model.read(ours)
        if copies > 1 and _is_kv(ours):
            tensor = tensor.unflatten(0, (config.n_kv_heads, -1)).repeat_interleave(copies, 0).flatten(0, 1)
        for rank, writer in enumerate(writers):
            part = (
                tensor if where is None else tensor.narrow(where, rank * shapes[theirs][where], shapes[theirs][where])
            )
            writer.add(theirs, part)
    for writer in writers:
        writer.close()
    (folder / PARAMS).write_text(json.dumps(params_json(config, shards, copies)) + "\n")
    with open(folder / "checklist.chk", "w") as file:
        for path in [*files, folder / PARAMS]:
            with open(path, "rb") as content:
                file.write(f"{hashlib.file_digest(content, 'md5').hexdigest()}  {path.name}\n")
    return _write_tokenizer(folder, model)


def axis(name: str, old: bool) -> int | None:
    """The axis along which shards split a weight. `old`: as up to Code Llama, which split the embedding by columns."""
    if name == "tok_embeddings.weight":
        return 1 if old else 0
    stem = name.removesuffix(".weight")
    inner = stem.split(".", 2)[2] if stem.startswith("layers.") else stem
    return next(where for ours, where in NAMES.values() if ours == inner)


def _is_kv(name: str) -> bool:
    return name.endswith((".wk.weight", ".wv.weight"))


def _splits_columns(model: Model) -> bool:
    """Whether the model is of a family with a SentencePiece vocabulary; these split the embedding by columns."""
    return model.tokenizer is not None and "SentencePiece" in model.tokenizer.kind


def _kv_copies(config: ModelConfig, shards: int) -> int:
    if shards > config.n_kv_heads and shards % config.n_kv_heads == 0:
        return shards // config.n_kv_heads  # each shard needs a head of its own
    return 1


def _shard_shape(shape: tuple[int, ...], where: int | None, shards: int, copies: int, name: str) -> tuple[int, ...]:
    if where is None:
        return shape
    size = shape[where] * copies
    if size % shards:
        counts = [n for n in range(1, 65) if size % n == 0]
        raise ConfigError(f"{name} has {size} {'columns' if where else 'rows'}, which can't be divided into {shards}"
                          f" equal shards; numbers that work: {', '.join(map(str, counts[:8]))}")  # fmt: skip
    return (*shape[:where], size // shards, *shape[where + 1 :])


def params_json(config: ModelConfig, shards: int, copies: int) -> dict[str, Any]:
    """params.json of a model. Raises ConfigError for what it can't express."""
    out: dict[str, Any] = {"dim": config.dim, "n_layers": config.n_layers, "n_heads": config.n_heads}
    out |= {"n_kv_heads": config.n_kv_heads * copies, "vocab_size": config.vocab_size, "norm_eps": config.norm_eps}
    out |= {**feed_forward_keys(config.dim, config.hidden_dim), "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if scaling is not None:
        rest = {key: scaling.get(key) for key in SCALED_ROPE}
        if rest != SCALED_ROPE:
            raise ConfigError(
                f"Meta's format can't express the rope scaling {dict(scaling)!r:.120}, only {SCALED_ROPE}; convert it"
                " to hf or gguf"
            )
        out["use_scaled_rope"] = True
        usual = 32 if config.tie_embeddings or (config.dim, config.n_layers) in SMALL_32 else 8
        if scaling["factor"] != usual:
            out["rope_scaling_factor"] = scaling["factor"]  # not a key of Meta's code, which always uses 8
    if config.max_seq_len != _usual_context(config):
        out["max_seq_len"] = config.max_seq_len
    return out


def _usual_context(config: ModelConfig) -> int:
    """The context that the reader assumes for a bfloat16 file without the key max_seq_len."""
    if config.rope_scaling is not None:
        return 131072
    return {500000.0: 8192, 1000000.0: 16384}.get(config.rope_theta, 4096)


def feed_forward_keys(dim: int, hidden_dim: int) -> dict[str, Any]:
    """multiple_of and ffn_dim_multiplier that yield this width by Meta's formula; an official pair if one does."""
    pairs = [(multiple, multiplier) for multiplier in MULTIPLIERS for multiple in MULTIPLES]
    for multiple, multiplier in [*pairs, (hidden_dim, None)]:
        base = int(8 * dim / 3) if multiplier is None else int(multiplier * int(8 * dim / 3))
        if multiple * -(-base // multiple) == hidden_dim:
            return {"multiple_of": multiple} | ({} if multiplier is None else {"ffn_dim_multiplier": multiplier})
    return {"multiple_of": hidden_dim, "ffn_dim_multiplier": hidden_dim / int(8 * dim / 3)}


class TorchWriter:
    """Writes a .pth file like torch.save, with one tensor in memory at a time."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]):
        self._keys = {name: str(i) for i, name in enumerate(shapes)}
        self._sink = _Sink(path)
        self._writer = torch._C.PyTorchFileWriter(self._sink)  # type: ignore[call-overload]
        table = {name: _Described(self._keys[name], shape, dtypes[name]) for name, shape in shapes.items()}
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=2).dump(table)
        self._record("data.pkl", buffer.getvalue())
        self._record("byteorder", b"little")

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the values of one of the tensors, each once, in any order."""
        part = tensor.contiguous()
        if part.untyped_storage().nbytes() != part.nbytes:  # the writer writes complete storages
            part = part.clone()
        self._writer.write_record(f"data/{self._keys.pop(name)}", part.untyped_storage(), part.nbytes)
        self._sink.check()

    def close(self) -> None:
        """Write the archive's table of contents."""
        if self._keys:
            raise RuntimeError(f"tensors were not written: {sorted(self._keys)[:3]}")
        self._writer.write_end_of_file()
        self._sink.close()

    def _record(self, name: str, data: bytes) -> None:
        self._writer.write_record(name, data, len(data))
        self._sink.check()


class _Sink:
    """A file that stores an OSError for `check`: raised inside torch's writer, it would abort the process."""

    def __init__(self, path: Path):
        self._path, self._file = path, open(path, "wb")  # noqa: SIM115  (closed by close)
        self._error: OSError | None = None

    def write(self, data: bytes) -> int:
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        return len(data)

    def check(self) -> None:
        """Raise the stored error."""
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self._path))

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self._error = self._error or error
        self.check()


class _Described:
    """A tensor in the pickle, without its values."""

    def __init__(self, key: str, shape: tuple[int, ...], dtype: torch.dtype):
        self.storage = _Storage(key, torch.Size(shape).numel(), dtype)
        self.shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        strides = torch.empty(self.shape, device="meta").stride()
        rebuild = torch._utils._rebuild_tensor_v2
        return rebuild, (self.storage, 0, self.shape, strides, False, OrderedDict())


class _Storage:
    def __init__(self, key: str, numel: int, dtype: torch.dtype):
        self.key, self.numel, self.kind = key, numel, STORAGES[dtype]


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        """A reference to a storage: torch keeps storages outside the pickle."""
        return ("storage", obj.kind, obj.key, "cpu", obj.numel) if isinstance(obj, _Storage) else None


def _write_tokenizer(folder: Path, model: Model) -> list[str]:
    if model.tokenizer is None:
        return ["the source has no readable tokenizer, so none was written"]
    from ..tokenizer.write import tokenizer_model

    try:
        (folder / "tokenizer.model").write_bytes(tokenizer_model(model.tokenizer))
    except TokenizerError as error:
        return [f"the tokenizer was not converted: {error}"]
    return ["Meta's format can't store a chat template, so it was not written"] if model.chat_template else []
