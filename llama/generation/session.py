"""A conversation's KV cache and its ids, in memory and in a file, so that a text is fed once for many questions.

The file is a safetensors file with the ids, the used slots of every layer, and, as metadata, the settings of the model.
Keys of another model, or of the same model under another rotation, would give fluent nonsense; so a session is
accepted only by a model with the same settings and the same weights.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..cache import KVCache, LayerCache
from ..chat import check_messages
from ..checkpoint.huggingface_write import Entry, write_safetensors
from ..checkpoint.write import raw_bytes
from ..engine.linears import describe_quantization
from ..errors import CheckpointError, ContextLengthError, UsageError
from ..model import Transformer
from ..system.documents import parse_json, utf8_name
from ..system.temporary import check_writable, own_temporary, replace
from ..tokenizer import Tokenizer
from .prefix import shared_prefix

FORMAT = "1"  # version of the file format
AGAIN = "save the session again"
MARK = "clearllama_session"  # the metadata entry with the version
BUFFERS = ("k", "v", "k_scale", "v_scale")  # names of a layer's buffers in the file
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8", torch.int64: "I64"}
ENDS = 1024  # bytes at the beginning and at the end of a weight that its hash covers


ACQUIRING = Lock()  # makes the check and the reservation of a session one step, since threads may call at once


@dataclass
class Session:
    """The KV cache of one conversation and its ids. For a prompt with the same prefix, only the new part is computed.

    A session belongs to the model that computed its tokens; another model, or the model under other settings, is
    refused. Without tokens, it belongs to none.

    messages  the messages of a chat; they are for the caller, and are saved with the session
    """

    cache: KVCache | None = None
    tokens: list[int] = field(default_factory=list)
    busy: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    _owner: tuple[ref[Transformer], dict[str, Any]] | None = field(default=None, init=False, repr=False, compare=False)
    _tokenizer: Tokenizer | str | None = field(default=None, init=False, repr=False, compare=False)  # str: its digest

    def __repr__(self) -> str:
        return f"Session({len(self.tokens):,} tokens, {len(self.messages):,} messages)"

    def reuse(self, model: Transformer, prompt: Sequence[int], tokenizer: Tokenizer | None = None) -> KVCache:
        """The cache, trimmed to the prefix it shares with `prompt`, without the prompt's last token.

        tokenizer  the one that encoded the prompt, if it is known

        Raises UsageError while another stream uses the session, and if the session belongs to another model or
        tokenizer.
        """
        with ACQUIRING:
            self._check_idle()
            self.busy = True
        try:
            return self._share(model, prompt, tokenizer)
        except BaseException:
            self.busy = False
            raise

    def _share(self, model: Transformer, prompt: Sequence[int], tokenizer: Tokenizer | None) -> KVCache:
        if self.cache is None or not self.tokens:
            self.cache, self.tokens, self._owner, self._tokenizer = model.new_cache(), [], None, None
        self._bind(model)
        if tokenizer is not None and tokenizer is not self._tokenizer:
            if not _same_tokenizer(self._tokenizer, tokenizer):
                raise UsageError(
                    "this session contains ids of another tokenizer; create a separate session for each tokenizer"
                )
            self._tokenizer = tokenizer
        # Under frequencies that depend on the length, a longer prompt rotates even its first token differently.
        # A session made of tokens alone has an empty cache: tokens beyond its length are computed again.
        shared = 0 if model.rope.by_length else shared_prefix(self.tokens[: self.cache.length], prompt)
        self.cache.trim(shared)
        self.tokens = self.tokens[:shared]
        return self.cache

    def give_back(self, tokens: Sequence[int], nonfinite: bool) -> None:
        """End a stream that fed `tokens` or fewer. nonfinite: the cache may hold NaN, so it is dropped.

        Masking does not remove NaN: the weight of a masked slot is 0, and 0 times NaN is NaN.
        """
        if self.cache is not None:
            self.tokens = list(tokens[: self.cache.length])  # the last id is not in the cache yet
            self.cache.trim(len(self.tokens))
        if nonfinite:
            self.cache, self.tokens = None, []
        self.busy = False

    def forget(self) -> None:
        """Drop the cached tokens and the messages."""
        self._check_idle()
        self.cache, self.tokens, self.messages, self._owner, self._tokenizer = None, [], [], None, None

    def save(self, path: str | os.PathLike[str], model: Transformer, *, new: bool = False) -> int:
        """Write the session to a file atomically, replacing an older session; return the size in bytes.

        new  raise CheckpointError if the file exists, instead of replacing a session

        Raises UsageError if there is nothing to save, `path` is another file (check_target, check_model), or the
        session belongs to another model, CheckpointError if the file can't be written. An existing file is then
        unchanged.
        """
        target = Path(path)
        self._check_idle()
        check_model(model)
        check_target(target)
        if self.cache is None or not self.tokens:
            raise UsageError(f"{target}: the session holds no tokens yet, so there is nothing to save")
        self._bind(model)
        count = len(self.tokens)
        entries = {"tokens": _entry(torch.tensor(self.tokens), count)}
        for name, layer, i in _buffers(self.cache):
            entries[name] = _entry(layer.buffers[i], count)
        digest_of = self._tokenizer.digest() if isinstance(self._tokenizer, Tokenizer) else self._tokenizer
        own = {} if digest_of is None else {"tokenizer": digest_of}
        about = json.dumps({"settings": {**settings_of(model), **own}, "messages": self.messages})
        digest = hashlib.sha256(about.encode())
        for one in entries.values():
            digest.update(raw_bytes(one.read()).data)
        metadata = {MARK: FORMAT, "about": about, "sha256": digest.hexdigest()}
        resolved = target.resolve()  # so that a symbolic link stays one
        try:
            with own_temporary(resolved.parent, ".session") as work:
                written = work / resolved.name
                write_safetensors(written, entries, metadata)
                size = written.stat().st_size
                written.chmod(0o600)  # a conversation is private
                if new and resolved.exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                replace(written, resolved)
        except OSError as error:
            raise CheckpointError(f"{target}: {error.strerror or error}; the session was not saved") from error
        return size

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Transformer, tokenizer: Tokenizer | None = None) -> Session:
        """Load a session from a file, to continue it with this model.

        tokenizer  the model's tokenizer, to check it now; without it, the first stream that uses the session checks it

        Raises CheckpointError if the file is damaged, is not a session, or belongs to another model (with the setting
        that differs) or tokenizer, ContextLengthError if it does not fit into the model's context.
        """
        source = Path(path)
        check_model(model)
        file, about = open_session(source)
        ids_of = about["settings"].pop("tokenizer", None)
        _compare(source, about["settings"], settings_of(model))
        if tokenizer is not None and not _same_tokenizer(ids_of, tokenizer):
            raise CheckpointError(
                f"{source} was saved with another tokenizer, so its ids mean different text; load the model with the"
                " same tokenizer (--tokenizer)"
            )
        count = _length(source, file)
        if count > model.max_seq_len:
            raise ContextLengthError(
                f"{source} has {count} tokens, but the context of the model is {model.max_seq_len};"
                f" raise max_seq_len (--max-seq-len)"
            )
        cache = model.new_cache()
        names = [name for name, _, _ in _buffers(cache)]
        if set(names) != set(file.keys()) - {"tokens"}:
            raise CheckpointError(f"{source} is damaged: its tensors are not those of a session of this model; {AGAIN}")
        digest = hashlib.sha256(about["text"].encode())
        ids = _read(source, file, "tokens", (count,), torch.int64, digest)
        if int(ids.min()) < 0 or int(ids.max()) >= model.config.vocab_size:
            raise CheckpointError(
                f"{source} is damaged: token ids must lie between 0 and {model.config.vocab_size - 1}, got"
                f" {int(ids.min())} to {int(ids.max())}; {AGAIN}"
            )
        cache.place(count)
        for name, layer, i in _buffers(cache):
            buffer = layer.buffers[i][:, :, :count]  # (1, KV, count, ..)
            buffer.copy_(_read(source, file, name, tuple(buffer.shape), buffer.dtype, digest))
        if digest.hexdigest() != about["sha256"]:
            raise CheckpointError(f"{source} is damaged: its checksum does not match; {AGAIN}")
        cache.commit()
        session = cls(cache, ids.tolist(), messages=_messages(source, about["messages"]))
        session._bind(model)
        session._tokenizer = ids_of if tokenizer is None else tokenizer
        return session

    def _bind(self, model: Transformer) -> None:
        """Make this model the owner of the cached keys. Raises UsageError if another model computed them.

        The settings are compared too, since the settings of a loaded model can be changed.
        """
        settings = _traits(model)
        if self._owner is None:
            self._owner = ref(model), settings
            return
        owner, theirs = self._owner
        if owner() is model and theirs == settings:
            return
        other = [key for key in sorted(settings.keys() | theirs.keys()) if theirs.get(key) != settings.get(key)]
        named = ", ".join(
            f"{key} {_shown(theirs.get(key))} instead of {_shown(settings.get(key))}" for key in other[:3]
        )
        raise UsageError(
            f"this session holds the keys of another model{named and f' ({named})'}; create a session for each model"
        )

    def _check_idle(self) -> None:
        if self.busy:
            raise UsageError(
                "this session is in use by another stream; finish or close that stream, or create a second session"
            )


# ------------------------------------------------------------------------------------------------------ the checks
def _same_tokenizer(known: Tokenizer | str | None, other: Tokenizer) -> bool:
    """Whether a tokenizer is the recorded one. True if none is recorded, as in files of older versions."""
    return known is None or (known.digest() if isinstance(known, Tokenizer) else known) == other.digest()


def check_model(model: Transformer) -> None:
    """Raise UsageError if sessions are not supported: RoPE depends on the length, or processes share the model."""
    if model.runner.world is not None:
        raise UsageError(
            "sessions are not supported if several processes share the model, since each has only a part of the KV"
            " cache; use one process, or no session"
        )
    if model.rope.by_length:
        raise UsageError(
            "a session can't be saved or loaded if the RoPE frequencies depend on the length (dynamic, longrope):"
            " in a longer text even the first token is rotated differently; use no session, or another --rope-scaling"
        )


def check_target(path: Path) -> None:
    """Raise UsageError unless the path is free or holds a session."""
    if path.is_dir() or not path.name:
        raise UsageError(f"{path} is a folder; name a file for the session")
    if path.exists() and not is_session(path):
        raise UsageError(f"{path} exists and is not a clearllama session, so it is not overwritten; name another file")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; create it first")
    try:
        check_writable(folder)
    except OSError as error:
        raise UsageError(
            f"{folder} is not writable ({error.strerror or error}), so the session can't be saved there; name another"
            " file"
        ) from None


def is_session(path: Path) -> bool:
    """Whether a file is a session, by its header."""
    try:
        open_session(path)
    except CheckpointError:
        return False
    return True


def settings_of(model: Transformer) -> dict[str, Any]:
    """The settings that determine the cached keys and values, as JSON values, with a hash of the weights."""
    return {**_traits(model), "weights": sample(model)}


def _traits(model: Transformer) -> dict[str, Any]:
    """`settings_of` without the hash of the weights. It takes less than a millisecond.

    The form of the rotation is not included, since the keys are the same in each form; nor is the model's context.
    """
    bits = describe_quantization(model).removesuffix("-bit")  # the wording below is part of the file format
    settings = {
        **dataclasses.asdict(model.config),
        "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
        "quantization": f"weights of {bits.replace('/', ' and ')} bits" if bits else "none",
        "kv_cache": model.runner.cache_kind,
        "device": model.norm.weight.device.type,
    }
    for name in ("adapters", "patched"):  # buffers that the loader and a patch (study/inside.py) add
        if (identity := getattr(model, name, None)) is not None:
            settings[name] = bytes(identity.tolist()).hex()[:16]
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=dict))
    return plain


def sample(model: Transformer) -> str:
    """sha256 of every norm and bias, and of the first and last KB of every other weight in memory.

    So a model of 16 GB in a mapped file is not read completely; two models that differ only in the middle of all their
    matrices have the same hash.
    """
    digest = hashlib.sha256()
    for name, tensor in _weights(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        entries = tensor.detach().reshape(-1)  # a view, since weights are contiguous
        some = ENDS // tensor.element_size()
        ends = [entries] if tensor.dim() < 2 or len(entries) <= 2 * some else [entries[:some], entries[-some:]]
        for end in ends:
            digest.update(raw_bytes(end.cpu()).data)
    return digest.hexdigest()


def _weights(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, with their names."""
    for name, module in sorted(model.named_modules()):
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        for kind, tensor in sorted(own.items()):
            yield f"{name}.{kind}", tensor


# ------------------------------------------------------------------------------------------------------- the file
def _entry(buffer: Tensor, count: int) -> Entry:
    """The used slots of a buffer (1, KV, slots, ..), or ids (count,)."""
    used = buffer if buffer.dim() == 1 else buffer[:, :, :count]
    return Entry(DTYPES[buffer.dtype], tuple(used.shape), used.numel() * used.element_size(), lambda: used.cpu())


def _buffers(cache: KVCache) -> Iterator[tuple[str, LayerCache, int]]:
    """The name in the file, the layer and the number of every buffer."""
    for number, layer in enumerate(cache.layers):
        for i, name in zip(range(len(layer.buffers)), BUFFERS, strict=False):
            yield f"layers.{number}.{name}", layer, i


def open_session(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """An open session file, and {settings, messages, sha256, text} from its metadata. Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file; expected a session file")  # a pipe would block
    try:
        with open(path, "rb") as bare:
            bare.read(1)  # raises the system's own error
        with utf8_name(path) as name:
            file = safe_open(name, framework="pt")
        metadata: Mapping[str, str] = file.metadata() or {}  # type: ignore[no-untyped-call]
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; expected a session file") from None
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a session file, or is damaged ({' '.join(str(error).split())[:160]}); {AGAIN}"
        ) from None
    if MARK not in metadata:
        raise CheckpointError(
            f"{path} is a safetensors file, but not a session file; pass a file of --save-session or Session.save"
        )
    if metadata[MARK] != FORMAT:
        raise CheckpointError(
            f"{path} is a session in format {metadata[MARK]!r:.20}, but this version reads {FORMAT!r}; save the"
            " session again"
        )
    text = metadata.get("about", "")
    about = parse_json(text.encode(), f"{path} (metadata)")
    if not isinstance(about.get("settings"), dict) or not isinstance(about.get("messages"), list):
        raise CheckpointError(f"{path} is damaged: its metadata lacks the settings or the messages; {AGAIN}")
    return file, {**about, "text": text, "sha256": metadata.get("sha256")}


def _compare(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise CheckpointError with the settings that differ, if a session was saved with other settings."""
    other = [key for key in sorted(ours.keys() | theirs.keys()) if theirs.get(key) != ours.get(key)]
    if other == ["weights"]:
        raise CheckpointError(
            f"{path} was saved with other weights of the same shape, or with another --rope;"
            " load the same model with the same options"
        )
    if other := [key for key in other if key != "weights"]:
        saved = [f"{key} {_shown(theirs.get(key))}" for key in other[:3]]
        loaded = [_shown(ours.get(key)) for key in other[:3]]
        more = f", and {len(other) - 3} more settings differ" if len(other) > 3 else ""
        raise CheckpointError(
            f"{path} was saved with {', '.join(saved)}; this model has {', '.join(loaded)}{more}: load the same model"
            " with the same options"
        )


def _shown(value: Any) -> str:
    return "none" if value is None else f"{json.dumps(value):.100}".strip('"')


def _length(path: Path, file: Any) -> int:
    shape = file.get_slice("tokens").get_shape() if "tokens" in file.keys() else []  # noqa: SIM118
    if len(shape) != 1 or shape[0] < 1:
        raise CheckpointError(f"{path} is damaged: it has no token ids; {AGAIN}")
    return int(shape[0])


def _read(path: Path, file: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, digest: Any) -> Tensor:
    """Read a tensor, check its shape and dtype, and add its bytes to the digest."""
    found = file.get_slice(name)
    if (tuple(found.get_shape()), found.get_dtype()) != (shape, DTYPES[dtype]):
        raise CheckpointError(
            f"{path} is damaged: {name} is {found.get_dtype()} {tuple(found.get_shape())}, expected"
            f" {DTYPES[dtype]} {shape}; {AGAIN}"
        )
    tensor: Tensor = file.get_tensor(name)
    digest.update(raw_bytes(tensor).data)
    return tensor


def _messages(path: Path, messages: list[Any]) -> list[dict[str, Any]]:
    if not messages:
        return []
    try:
        return [dict(message) for message in check_messages(messages)]
    except UsageError as error:
        raise CheckpointError(f"{path} is damaged: {error}; {AGAIN}") from None
