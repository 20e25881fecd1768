"""A conversation's KV cache and its ids, in memory and in a file, so that a text is fed once for many questions.

The file is a safetensors file with the ids and the used slots of every layer. Its metadata has the settings of the
model, the messages and a checksum. Keys of another model, or of the same model under other settings, would give fluent
nonsense; so a session is accepted only by a model with the same settings and the same weights.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..cache import KVCache
from ..chat import check_messages
from ..checkpoint.huggingface_write import Entry, write_safetensors
from ..checkpoint.write import digest
from ..checks import dtype_name
from ..engine.linears import describe_quantization
from ..errors import CheckpointError, UsageError
from ..model import Transformer
from ..system.documents import parse_json
from ..system.temporary import check_writable, own_temporary, replace
from ..tokenizer import Tokenizer
from .prefix import shared_prefix

MARK, FORMAT = "clearllama_session", "2"  # the metadata entry with the version of the file format
BUFFERS = ("k", "v", "k_scale", "v_scale")  # names of a layer's buffers in the file
LARGEST_HEADER = 2**24  # bytes; the messages of a chat of 128,000 tokens take about 2**19
ENDS = 1024  # bytes at the beginning and at the end of a weight that its hash covers

ACQUIRING = Lock()  # so that no two threads find the same session idle and both reserve it


@dataclass
class Session:
    """The KV cache of one conversation and its ids. For a prompt with the same prefix, only the new part is computed.

    A session belongs to the model that computed its tokens; another model, or the model under other settings, is
    refused. A session without tokens belongs to no model.

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
        """Reserve the session and return its cache, trimmed to the prefix that it shares with `prompt[:-1]`.

        tokenizer  the tokenizer that encoded the prompt, if known

        Raises UsageError while another stream uses the session, and if the session belongs to another model or
        tokenizer.
        """
        with ACQUIRING:
            self._check_idle()
            self.busy = True
        try:
            if self.cache is None or not self.tokens:
                self.cache, self.tokens, self._owner, self._tokenizer = model.new_cache(), [], None, None
            self._bind(model, tokenizer)
            # Under frequencies that depend on the length, a longer prompt rotates even its first token differently.
            # A session made of tokens alone has an empty cache: tokens beyond the cache's length are computed again.
            shared = 0 if model.rope.by_length else shared_prefix(self.tokens[: self.cache.length], prompt)
            self.cache.trim(shared)
            self.tokens = self.tokens[:shared]
            return self.cache
        except BaseException:
            self.busy = False
            raise

    def give_back(self, tokens: Sequence[int], nonfinite: bool) -> None:
        """End a stream that fed `tokens`, or only the first of them. nonfinite: the cache may hold NaN; drop it.

        Masking does not remove NaN: the weight of a masked slot is 0, and 0 times NaN is NaN.
        """
        if self.cache is not None:
            self.tokens = list(tokens[: self.cache.length])  # usually all but the last id, which was not fed
            self.cache.trim(len(self.tokens))
        if nonfinite:
            self.cache, self.tokens = None, []
        self.busy = False

    def forget(self) -> None:
        """Drop the cached tokens and the messages."""
        self._check_idle()
        self.cache, self.tokens, self.messages, self._owner, self._tokenizer = None, [], [], None, None

    def save(self, path: str | os.PathLike[str], model: Transformer) -> int:
        """Write the session to a file atomically, replacing an older session; return the size in bytes.

        Raises UsageError if there is nothing to save, if `path` holds something other than a session, or if the session
        belongs to another model; CheckpointError if the file can't be written. After an error, `path` is unchanged.
        """
        target = Path(path)
        self._check_idle()
        check_model(model)
        check_target(target)
        if self.cache is None or not self.tokens:
            raise UsageError(f"{target}: the session holds no tokens yet, so there is nothing to save")
        self._bind(model, None)
        tensors = {"tokens": torch.tensor(self.tokens), **_used(self.cache, len(self.tokens))}
        settings = settings_of(model)
        if self._tokenizer is not None:
            settings["tokenizer"] = _digest(self._tokenizer)
        about = json.dumps({"settings": settings, "messages": self.messages})
        metadata = {MARK: FORMAT, "about": about, "sha256": _checksum(about, tensors)}
        entries = {name: Entry(x.dtype, tuple(x.shape), x.cpu) for name, x in tensors.items()}
        resolved = target.resolve()  # so that a symbolic link remains a link
        try:
            with own_temporary(resolved.parent, ".session") as work:
                written = work / resolved.name
                write_safetensors(written, entries, metadata)
                size = written.stat().st_size
                written.chmod(0o600)  # a conversation is private
                replace(written, resolved)
        except OSError as error:
            raise CheckpointError(f"{target}: {error.strerror or error}; the session was not saved") from error
        return size

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Transformer, tokenizer: Tokenizer | None = None) -> Session:
        """Load a session from a file, to continue it with this model.

        tokenizer  the model's tokenizer, to compare it now; without it, the first stream that uses the session does so

        Raises CheckpointError if the file is damaged, is not a session, or belongs to another model or tokenizer (the
        message has the settings that differ); ContextLengthError if it does not fit into the model's context.
        """
        path = Path(path)
        check_model(model)
        file, about = open_session(path)
        saved, ours = about["settings"], settings_of(model)
        if "tokenizer" in saved:
            ours["tokenizer"] = saved["tokenizer"] if tokenizer is None else _digest(tokenizer)
        if found := _difference(saved, ours):
            raise CheckpointError(f"{path} was saved with {found}: load the same model with the same options")
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        if _checksum(about["text"], tensors) != about["sha256"]:
            raise _damaged(path, "its checksum does not match")
        ids = tensors.pop("tokens", torch.empty(0)).tolist()  # (N,)
        if not ids or not all(isinstance(id, int) and 0 <= id < model.config.vocab_size for id in ids):
            raise _damaged(path, f"it must have a list of token ids below {model.config.vocab_size}")
        cache = model.new_cache()
        cache.place(len(ids))
        buffers = _used(cache, len(ids))  # views of the cache
        kinds = [{name: (x.shape, x.dtype) for name, x in parts.items()} for parts in (tensors, buffers)]
        if kinds[0] != kinds[1]:
            raise _damaged(path, "its tensors are not those of a session of this model")
        for name, buffer in buffers.items():
            buffer.copy_(tensors[name])
        cache.commit()
        try:
            messages = [dict(message) for message in check_messages(about["messages"])] if about["messages"] else []
        except UsageError as error:
            raise _damaged(path, str(error)) from None
        session = cls(cache, ids, messages=messages)
        session._bind(model, None)
        session._tokenizer = saved.get("tokenizer") if tokenizer is None else tokenizer
        return session

    def _bind(self, model: Transformer, tokenizer: Tokenizer | None) -> None:
        """Make this model and tokenizer the owners of the cached keys. Raises UsageError if these have other owners.

        The settings are compared too, since the settings of a loaded model can be changed.
        """
        settings = _traits(model)
        owner, theirs = self._owner or (ref(model), settings)
        if owner() is not model or theirs != settings:
            found = _difference(theirs, settings)
            named = f" ({found})" if found else ""
            raise UsageError(f"this session holds the keys of another model{named}; create a session for each model")
        self._owner = owner, theirs
        if tokenizer is None or tokenizer is self._tokenizer:
            return
        if self._tokenizer is not None and _digest(self._tokenizer) != _digest(tokenizer):
            raise UsageError("this session holds ids of another tokenizer; create a session for each tokenizer")
        self._tokenizer = tokenizer

    def _check_idle(self) -> None:
        if self.busy:
            raise UsageError(
                "this session is in use by another stream; finish or close that stream, or create a second session"
            )


# ------------------------------------------------------------------------------------------------------ the checks
def check_model(model: Transformer) -> None:
    """Raise UsageError if sessions are not supported: RoPE depends on the length, or processes share the model."""
    if model.world is not None:
        raise UsageError("a session can't be saved or loaded if several processes share the model; use one process")
    if model.rope.by_length:
        raise UsageError(
            "a session can't be saved or loaded if the RoPE frequencies depend on the length (dynamic, longrope):"
            " in a longer text even the first token is rotated differently; use no session, or another"
            " rope_scaling (--rope-scaling)"
        )


def check_target(path: Path) -> None:
    """Raise UsageError unless a session can be written to a path: it must be free, or hold a session."""
    folder = path.resolve().parent
    try:
        check_writable(folder)
    except OSError as error:
        raise UsageError(f"the session can't be saved in {folder} ({error.strerror or error})") from None
    if path.exists():
        try:
            open_session(path)
        except CheckpointError as error:
            raise UsageError(f"{error}; it is not overwritten: name another file") from None


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is a damaged session: {reason}; save the session again")


# ---------------------------------------------------------------------------------------------------- the settings
def settings_of(model: Transformer) -> dict[str, Any]:
    """The settings that determine the cached keys and values, as JSON values, with a hash of the weights."""
    return {**_traits(model), "weights": sample(model)}


def _traits(model: Transformer) -> dict[str, Any]:
    """`settings_of` without the hash of the weights. It takes less than a millisecond.

    The form of RoPE is not included, since the keys are the same in each form. The model's context isn't either.
    """
    settings = {
        **dataclasses.asdict(model.config),
        "dtype": dtype_name(model.norm.weight.dtype),
        "quantization": describe_quantization(model) or "none",
        "kv_cache": model.cache_kind,
        "device": model.norm.weight.device.type,
    }
    for name in ("adapters", "patched"):  # buffers that the loader and a patch (inside/hooks.py) add
        if (identity := getattr(model, name, None)) is not None:
            settings[name] = bytes(identity.tolist()).hex()[:16]
    return json.loads(json.dumps(settings, default=dict))


def sample(model: Transformer) -> str:
    """A hash of every norm and bias, and of the first and last KB of every other weight in memory.

    So a model of 16 GB in a mapped file is not read completely. But two models that differ only in the middle of their
    matrices have the same hash.
    """
    ends = []
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0]):
        entries = tensor.reshape(-1)  # a view, since weights are contiguous
        some = ENDS // tensor.element_size()
        parts = [entries] if tensor.dim() < 2 or len(entries) <= 2 * some else [entries[:some], entries[-some:]]
        ends += [(f"{name} {tuple(tensor.shape)}", part) for part in parts]
    return digest(ends)[:16]


def _digest(tokenizer: Tokenizer | str) -> str:
    return tokenizer if isinstance(tokenizer, str) else tokenizer.digest()[:16]


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Up to three settings that differ, with both values; "" if none differs."""
    other = [key for key in sorted(ours.keys() | theirs.keys()) if theirs.get(key) != ours.get(key)]
    return ", ".join(f"{key} {theirs.get(key)!s:.100} instead of {ours.get(key)!s:.100}" for key in other[:3])


# ------------------------------------------------------------------------------------------------------- the file
def _used(cache: KVCache, count: int) -> dict[str, Tensor]:
    """The first `count` slots of every buffer, (1, KV, count, ..), by the buffer's name in the file."""
    return {
        f"layers.{number}.{name}": buffer[:, :, :count]
        for number, layer in enumerate(cache.layers)
        for name, buffer in zip(BUFFERS, layer.buffers, strict=False)
    }


def _checksum(about: str, tensors: Mapping[str, Tensor]) -> str:
    return digest([(about, torch.empty(0)), *sorted(tensors.items())])


def open_session(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """An open session file, and {settings, messages, sha256, text} from its metadata. Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a file; expected a session file")  # a pipe would block
    try:
        with open(path, "rb") as raw:
            header = int.from_bytes(raw.read(8), "little")  # bytes of JSON; parsing takes 30 times as much memory
        if header > LARGEST_HEADER:
            raise CheckpointError(f"{path} is not a session file; pass a file that Session.save wrote")
        file = safe_open(str(path), framework="pt")
        metadata: Mapping[str, str] = file.metadata() or {}  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:160]
        raise CheckpointError(f"{path} is not a session file ({reason})") from None
    if metadata.get(MARK) != FORMAT:
        raise CheckpointError(f"{path} is not a session file of this version; pass a file that Session.save wrote")
    text = metadata.get("about", "")
    about = parse_json(text.encode(), f"{path} (metadata)")
    if not isinstance(about.get("settings"), dict) or not isinstance(about.get("messages"), list):
        raise _damaged(path, "its metadata lacks the settings or the messages")
    return file, {**about, "text": text, "sha256": metadata.get("sha256")}
