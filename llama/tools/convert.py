"""Convert a checkpoint to another format, with one weight in memory at a time.

The target appears in one step when it is complete. Before that, every weight is read back from the new files and
compared with the weight of the source. A reader that misreads both files in the same way would not be noticed.
Therefore the bytes of each weight, in source and target, are also compared with a second description: the CRC-32 of an
archive's record, or the offsets in a safetensors header, which another library reads too. GGUF has none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .. import checks
from ..chat import TEMPLATES, check_format, check_template
from ..checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.adapters import Adapters, with_adapters
from ..checkpoint.base import FLOATS
from ..checkpoint.gguf import GGUFCheckpoint
from ..checkpoint.gguf_write import Packed
from ..checkpoint.write import Model, Writer, raw_bytes
from ..config import ModelConfig
from ..errors import CheckpointError, ConfigError, TokenizerError, UsageError
from ..quant import gguf_types
from ..quant.gguf_types import MIXES, TYPES, types_of
from ..rope_scaling import inverse_frequencies, reach, trained_length
from ..system.temporary import abandoned, keep_mode, locked, own_temporary, swap, sweep, write_atomically
from ..tokenizer import Tokenizer
from ..weights import check_tensors, to_layout

T = TypeVar("T")
PREFIX = ".convert"  # of the temporary folder next to a target
CHAT_NAME = re.compile("instruct|chat", re.IGNORECASE)  # in the name of a folder with a model trained to chat
# Names of the files that conversions write into a folder
OWN = re.compile(
    r"(params|config|generation_config|tokenizer|tokenizer_config|model\.safetensors\.index)\.json"
    r"|checklist\.chk|tokenizer\.model|(?P<weights>consolidated\.\d+\.pth|model(-\d{5}-of-\d{5})?\.safetensors)"
)
# (the step, number of weights done, number of weights)
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Proof:
    """The result of a conversion that was read back and compared with its source.

    path      the new folder or file
    tensors   number of weights that were compared
    sha256    one hash of the names, shapes, dtypes and values of all weights, in the interleaved layout
    warnings  what could not be converted
    """

    path: Path
    tensors: int
    sha256: str
    warnings: list[str]


def _meta() -> Writer:
    from ..checkpoint import meta_write

    return meta_write.write


def _huggingface() -> Writer:
    from ..checkpoint import huggingface_write

    return huggingface_write.write


def _gguf() -> Writer:
    from ..checkpoint import gguf_write

    return gguf_write.write


# name -> (the writer, whether it writes a folder)
WRITERS: dict[str, tuple[Callable[[], Writer], bool]] = {
    "meta": (_meta, True),
    "hf": (_huggingface, True),
    "gguf": (_gguf, False),
}


# 12 parameters: one for each option of the command
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    shards: int = 0,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    adapters: Adapters = (),
    modelfile: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
    chat_template: str = "auto",
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Proof:
    """Write the model at `source` to `target` in another format.

    to             "meta", "hf" (folders) or "gguf" (a file)
    shards         number of weight files in a folder; 0: one for Meta, as few as needed for Hugging Face
    dtype          dtype of the matrices; None keeps the stored one
    quantize       for GGUF: the entry of gguf_types.MIXES by which the matrices are quantized
    adapters       LoRA adapters to merge, as for `llama.load`
    modelfile      for GGUF: also write TARGET.Modelfile, with which `ollama create` imports the file
    tokenizer      a file or folder with the tokenizer to write in place of the source's own
    chat_template  "auto": the source's, or for Meta's format, which has none, that of the vocabulary's family if the
                   folder's name contains "instruct" or "chat"; "none"; a name of chat.TEMPLATES; or Jinja source
    force          replace an existing target

    Raises UsageError for a bad argument, ConfigError if the format can't express the model, CheckpointError if the
    target can't be written or is not read back equal. After an error, the target is unchanged.
    """
    checks.choice("format", to, WRITERS)
    check_quantize(to, quantize, dtype)
    checks.integer("shards", shards, 0)
    source, target = Path(source), Path(target)
    load_writer, is_folder = WRITERS[to]
    if to == "meta" and chat_template not in ("auto", "none"):
        raise UsageError(
            "chat_template must be auto or none, because Meta's format can't store a chat template; the formats hf and"
            " gguf can"
        )
    checkpoint = with_adapters(open_checkpoint(source, tokenizer), adapters)
    check_tensors(checkpoint)
    types = {} if quantize is None else types_of(checkpoint.shapes, checkpoint.config, quantize)
    exact = dict.fromkeys(checkpoint.shapes, torch.float32)
    model = describe(checkpoint, exact if types else plan_dtypes(checkpoint, dtype), chat_template)
    beside = plan_modelfile(target, to, model, force) if modelfile else None

    def read_back(written: Checkpoint, name: str) -> tuple[Tensor, str]:
        if name in types and isinstance(written, GGUFCheckpoint):
            return written.raw(name), f"{written.shapes[name]} {written.stored(name)}"
        stored = to_layout(name, written.tensor(name), model.config.head_dim, written.layout, "interleaved")
        tensor = stored.to(model.dtypes[name])
        if tensor.dtype != stored.dtype and not torch.equal(tensor.to(stored.dtype), stored):
            tensor = stored  # the cast changes values, so they are not those that were written
        return tensor, f"{tuple(tensor.shape)} {tensor.dtype}"

    def write(path: Path) -> Proof:
        hashes: dict[str, str] = {}
        record = partial(recorded, hashes=hashes, total=len(model.shapes), progress=progress)
        blocks = record(lambda name: gguf_types.quantize(model.read(name), types[name]))
        packed = {name: Packed(type, partial(blocks, name)) for name, type in types.items()}
        extra = {"packed": packed, "file_type": MIXES[quantize].file_type} if quantize else {}
        warnings = [*checkpoint.warnings]
        warnings += load_writer()(path, dataclasses.replace(model, read=record(model.read)), shards, **extra)
        warnings += [*tokenizer_warnings(checkpoint, model, to, chat_template), *quantized_twice(checkpoint, types)]
        return Proof(target, len(hashes), prove(path, checkpoint.config, hashes, read_back, progress), warnings)

    check_target(source, target, is_folder, force)
    try:
        sizes = (TYPES[types[name]].size(shape) if name in types else model.nbytes(name)
                 for name, shape in model.shapes.items())  # fmt: skip
        proof = write_target(target, is_folder, force, sum(sizes), write)
    except ConfigError as error:
        raise ConfigError(f"{source} can't be converted to {to}: {error}") from error
    if beside is not None:
        path, text = beside
        try:
            write_atomically(path, text.encode())
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}; {target} is complete") from error
    return proof


def plan_modelfile(target: Path, to: str, model: Model, force: bool) -> tuple[Path, str]:
    """The path and the text of the Modelfile of a target. Raises UsageError if it can't be written."""
    from .modelfile import modelfile

    path = target.with_name(f"{target.name}.Modelfile")
    if to != "gguf":
        raise UsageError(f"--modelfile describes a GGUF file for Ollama, and --to {to} writes none; use --to gguf")
    if path.exists() and not force:
        raise UsageError(f"{path} exists already; remove it, or replace it with force=True (--force)")
    return path, modelfile(target, model)


def check_quantize(to: str, quantize: str | None, dtype: torch.dtype | None) -> None:
    """Raise UsageError unless a kind of quantization exists and fits the other arguments."""
    if quantize is None:
        return
    checks.choice("quantization of GGUF files", quantize, MIXES)
    if to != "gguf":
        raise UsageError(
            f"--quantize {quantize} is for GGUF files, not for --to {to}; use --to gguf, or 'clearllama quantize' for a"
            f" folder in clearllama's own format"
        )
    if dtype is not None:
        raise UsageError(f"--quantize {quantize} decides how weights are stored; leave --dtype out")


def quantized_twice(checkpoint: Checkpoint, types: Mapping[str, str]) -> list[str]:
    """A warning if weights to be quantized are stored quantized; otherwise an empty list."""
    kinds = sorted({checkpoint.stored(name) for name in types} - {*FLOATS.values()})
    if not kinds:
        return []
    return [f"the source is already quantized ({', '.join(kinds)}); quantizing the original would lose less accuracy"]


def tokenizer_warnings(checkpoint: Checkpoint, model: Model, to: str, chat_template: str) -> list[str]:
    """Why a new checkpoint has no tokenizer, and which chat template "auto" chose for a source that can't store one."""
    if model.tokenizer is None:
        return [f"why there is no tokenizer: {model.no_tokenizer}"]
    family = checkpoint.chat_format(model.tokenizer) if checkpoint.chat_template is None else None
    if family is None or to == "meta" or chat_template != "auto":
        return []
    name = named(checkpoint)
    if model.chat_template is not None:
        return [
            f"wrote the chat template of {family}, because the name {name} contains instruct or chat;"
            " chat_template='none' (--chat-template none) leaves it out"
        ]
    return [
        f"wrote no chat template, because the name {name} does not contain instruct or chat; for a chat model, use"
        f" chat_template={family!r} (--chat-template {family})"
    ]


def write_target(target: Path, is_folder: bool, force: bool, needed: int, write: Callable[[Path], T]) -> T:
    """Call `write` with a temporary file or folder, then rename that to `target`; return what `write` returned.

    needed  bytes that must be free on the disk

    Raises CheckpointError if the system reports an error. Then the target is unchanged.
    """
    try:
        with locked(target, PREFIX):
            _restore(target)
            sweep(target.parent, PREFIX)
            _check_space(target, needed)
            with own_temporary(target.parent, PREFIX) as work:
                path = work / target.name
                if is_folder:
                    path.mkdir()
                made = write(path)
                _sync(path)
                _install(path, target, force, work)
    except OSError as error:
        why = f"{error.filename or target}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(target.parent).free
            why += f"; {free // 10**6} MB are free and the new files need {needed // 10**6} MB"
        raise CheckpointError(f"{why}; nothing was changed") from error
    return made


def plan_dtypes(checkpoint: Checkpoint, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtype to write each weight in: `dtype`, or the stored one.

    Without `dtype`, vectors are written in the dtype of the matrices if that changes no value.
    """
    matrices = {stored_dtype(checkpoint, name) for name, shape in checkpoint.shapes.items() if len(shape) > 1}
    if dtype is None and (quantized := sorted(kind for kind in matrices if isinstance(kind, str))):
        raise UsageError(
            f"{checkpoint.path}: the weights are quantized ({', '.join(quantized)}); choose the dtype to write:"
            " --dtype float32 is exact, bfloat16 takes half the space"
        )
    common = dtype or max((kind for kind in matrices if isinstance(kind, torch.dtype)), key=lambda kind: kind.itemsize)
    dtypes: dict[str, torch.dtype] = {}
    for name, shape in checkpoint.shapes.items():
        kind = stored_dtype(checkpoint, name)
        if len(shape) > 1 or dtype is not None:
            dtypes[name] = dtype or (kind if isinstance(kind, torch.dtype) else common)
        else:
            vector = checkpoint.tensor(name)
            dtypes[name] = common if torch.equal(vector.to(common).float(), vector.float()) else vector.dtype
    return dtypes


def describe(checkpoint: Checkpoint, dtypes: Mapping[str, torch.dtype], chat_template: str) -> Model:
    """The model of a checkpoint as the writers need it, each weight in its dtype of `dtypes`."""
    config = checkpoint.config

    def stored(name: str) -> Tensor:
        tensor = checkpoint.tensor(name)
        return to_layout(name, tensor, config.head_dim, checkpoint.layout, "interleaved")

    last: list[str] = []

    def read(name: str) -> Tensor:
        while last:  # the writer no longer needs it
            checkpoint.release(last.pop())
        last.append(name)
        checkpoint.check_bytes(name)
        tensor = stored(name)
        cast = tensor.to(dtypes[name])
        narrows = cast.dtype == torch.float16 != tensor.dtype  # the only cast that overflows in practice
        if narrows and not bool(torch.isfinite(cast).all()) and bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name} has values beyond the range of {dtypes[name]}; choose another --dtype")
        return cast

    tokenizer: Tokenizer | None
    why = ""
    try:
        tokenizer = checkpoint.tokenizer()
    except TokenizerError as error:  # missing or damaged; the tokenizer of another model is a CheckpointError
        tokenizer, why = None, str(error)
    return Model(
        config=config,
        shapes=checkpoint.shapes,
        dtypes=dtypes,
        read=read,
        tokenizer=tokenizer,
        no_tokenizer=why,
        chat_template=pick_template(checkpoint, tokenizer, chat_template),
        sampling=checkpoint.sampling,
        name=checkpoint.about.get("name", checkpoint.path.stem),
    )


def named(checkpoint: Checkpoint) -> str:
    """The name of a checkpoint's folder or file; for a folder "original" of a download, that of the folder above."""
    path = checkpoint.path.resolve()
    return path.parent.name if path.name == "original" else path.name


def pick_template(checkpoint: Checkpoint, tokenizer: Tokenizer | None, choice: str) -> str | None:
    """The chat template to write, as `convert` describes it.

    Raises TemplateError if it does not fit the vocabulary.
    """
    own = checkpoint.chat_template
    if choice == "auto" and own is not None:
        return own
    if choice == "none" or tokenizer is None:
        return None
    if choice == "auto":
        chats = CHAT_NAME.search(named(checkpoint)) is not None
        return TEMPLATES.get(checkpoint.chat_format(tokenizer) or "") if chats else None
    if choice in TEMPLATES:
        check_format(choice, tokenizer)
        return TEMPLATES[choice]
    check_template(choice, tokenizer, "the chat template")
    return choice


def stored_dtype(checkpoint: Checkpoint, name: str) -> torch.dtype | str:
    """The dtype of a weight, or the name of its format if it is quantized."""
    kind = checkpoint.stored(name)
    return {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(kind, kind)


def recorded(
    read: Callable[[str], Tensor], hashes: dict[str, str], total: int, progress: Progress
) -> Callable[[str], Tensor]:
    """`read`, which also records the hash of each tensor and reports the progress."""

    def read_and_record(name: str) -> Tensor:
        tensor = read(name)
        hashes[name] = tensor_hash(tensor)
        progress("writing", len(hashes), total)
        return tensor

    return read_and_record


def prove(
    path: Path,
    config: ModelConfig,
    hashes: Mapping[str, str],
    read: Callable[[Checkpoint, str], tuple[Tensor, str]],
    progress: Progress,
) -> str:
    """Read the new files and compare each weight with the hash of what was written; return one hash of them all.

    The configuration may be stored in another form, so its effects are compared (check_config).

    read  returns a weight of the new checkpoint as it was written, and its shape and dtype

    Raises CheckpointError if a weight differs.
    """
    written = open_checkpoint(path)
    check_tensors(written)
    if written.shapes.keys() != hashes.keys():
        raise CheckpointError(
            "the tensors of the source and of the new files differ:"
            f" {sorted(written.shapes.keys() ^ hashes.keys())[:3]}; this is a bug, please report it"
        )
    check_config(config, written.config)
    total = hashlib.sha256()
    for done, name in enumerate(sorted(hashes)):
        progress("checking", done, len(hashes))
        written.check_bytes(name)
        tensor, form = read(written, name)
        if tensor_hash(tensor) != hashes[name]:
            raise CheckpointError(f"{name} differs after it was written; check the disk, or report a bug")
        del tensor  # so that memory holds one weight
        total.update(f"{name} {form} {hashes[name]}\n".encode())
        written.release(name)
    progress("checking", len(hashes), len(hashes))
    return total.hexdigest()


def check_config(source: ModelConfig, written: ModelConfig) -> None:
    """Raise ConfigError unless models with the two configurations compute the same.

    Numbers may differ by the rounding to float32. RoPE is compared at the lengths 1, the trained one, the next one and
    the longest, since its frequencies may depend on the length.
    """
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(source, field.name), getattr(written, field.name)
        if field.name == "max_seq_len":
            ours, theirs = (reach(each) for each in (source, written))
        same = ours == theirs or (isinstance(ours, float) and math.isclose(ours, theirs, rel_tol=1e-6))
        if not same and field.name != "rope_scaling":
            raise ConfigError(f"its {field.name} {ours} would become {theirs}; choose another format")
    trained = min(int(trained_length(source)), source.max_seq_len)
    for length in sorted({1, trained, trained + 1, reach(source)}):
        (ours, factor), (theirs, other) = (
            inverse_frequencies(
                each.head_dim, each.rope_theta, each.rope_scaling, seq_len=length, max_seq_len=each.max_seq_len
            )
            for each in (source, written)
        )
        if not torch.allclose(ours, theirs, rtol=4e-6, atol=0):
            raise ConfigError(f"its RoPE frequencies for {length} tokens would change; choose another format")
        if not math.isclose(factor, other, rel_tol=1e-6):
            raise ConfigError(
                f"its RoPE attention factor {factor:g} for {length} tokens would become {other:g}; choose another"
                " format"
            )


def tensor_hash(tensor: Tensor) -> str:
    """The sha256 of a tensor's bytes."""
    return hashlib.sha256(raw_bytes(tensor).data).hexdigest()


# ------------------------------------------------------------------------------------------------------- the target
def check_target(source: Path, target: Path, is_folder: bool, force: bool) -> None:
    """Raise UsageError unless the target does not exist, or `force` is set and it may be replaced."""
    if target.exists() or target.is_symlink():
        if source.resolve() == target.resolve() or target.resolve() in source.resolve().parents:
            raise UsageError(f"{target} is the source or contains it; name another target")
        if not force:
            raise UsageError(f"{target} exists already; name another target, or replace it with force=True (--force)")
        if target.is_dir() != is_folder:
            kind = ("a folder", "a file") if target.is_dir() else ("a file", "a folder")
            raise UsageError(
                f"{target} is {kind[0]}, but this format is {kind[1]}; remove it first, or name another target"
            )
        if is_folder and (foreign := _foreign_content(target)):
            raise UsageError(
                f"{target} contains {foreign}, so it is not replaced; remove it first, or name another target"
            )
    if not target.name or target.name in (".", ".."):
        raise UsageError(f"{target} is not a name for a new file or folder")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is not a folder; create it first")


def _foreign_content(folder: Path) -> str | None:
    """What shows that no conversion wrote a folder: a file of another name, or no weights. None if nothing does."""
    inside, weights = sorted(folder.iterdir()), False
    for path in inside:
        kind = "the link " if path.is_symlink() else "the folder " if path.is_dir() else ""
        own = OWN.fullmatch(path.name)
        if kind or own is None:
            return f"{kind}{path.name}, which no conversion writes"
        weights |= own["weights"] is not None
    return f"{inside[0].name} and no weights" if inside and not weights else None


def _check_space(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needed * 1.01 + 2**20:
        raise CheckpointError(
            f"{target.parent} has {free // 10**6} MB free, but the new files need {needed // 10**6} MB;"
            " nothing was written"
        )


def _sync(path: Path) -> None:
    """Write a new file or folder to the disk before it gets its name."""
    for part in [*path.iterdir()] if path.is_dir() else [path]:
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
    with contextlib.suppress(OSError):  # not every system can open a folder
        handle = os.open(path if path.is_dir() else path.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _install(path: Path, target: Path, force: bool, work: Path) -> None:
    """Rename the finished file or folder to its target. An old target is removed after the new one is in its place."""
    if target.exists() and not force:
        raise CheckpointError(f"{target} was created in the meantime; nothing was changed")
    if target.is_dir() and (foreign := _foreign_content(target)):
        raise CheckpointError(f"{target} contains {foreign}; nothing was changed")
    keep_mode(path, target)
    if not target.is_dir():
        os.replace(path, target)
        return
    if swap(path, target):
        return  # the old folder is in `work` now and is removed with it
    old = target.with_name(f"{_old_prefix(target)}{work.name}")
    os.rename(target, old)  # if the process is killed after this line, the next conversion renames it back
    try:
        os.rename(path, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old)


def _old_prefix(target: Path) -> str:
    """The prefix of the name that an old target has while it is replaced."""
    return f".{target.name}"


def _restore(target: Path) -> None:
    """Rename back, or remove, the old target of a conversion that was killed while it replaced it without `swap`."""
    for old in abandoned(target.parent, f"{_old_prefix(target)}{PREFIX}"):
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, target)
