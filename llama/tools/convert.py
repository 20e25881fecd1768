"""From one format to another, weight by weight: memory holds one weight, the target appears whole or not at all.

At the end the new files are read again and every weight is held against the source's: the proof of the conversion.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ..checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.write import Model, Writer, raw_bytes
from ..errors import CheckpointError, ConfigError, TokenizerError, UsageError
from ..system.temporary import abandoned, locked, own_temporary, swap, sweep
from ..tokenizer import Tokenizer
from ..weights import check_tensors, to_layout

T = TypeVar("T")
PREFIX = ".convert"  # of what lies beside a target while it is written
# (what is being done, weights done, weights in all)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Proof:
    """What a conversion shows for itself.

    path      the new folder or file
    tensors   weights that were read back and are the same
    sha256    one hash over the names, shapes, dtypes and values of all of them, in the interleaved layout
    warnings  what could not be carried over
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


# name -> (the writer, whether it writes a folder): a new format adds one line
WRITERS: dict[str, tuple[Callable[[], Writer], bool]] = {
    "meta": (_meta, True),
    "hf": (_huggingface, True),
    "gguf": (_gguf, False),
}


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    shards: int = 0,
    dtype: torch.dtype | None = None,
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Proof:
    """Write the model at `source` to `target` in another format.

    to      "meta", "hf" (folders) or "gguf" (a file)
    shards  files of a Meta or Hugging Face folder; 0 is one for Meta, as few as needed for Hugging Face
    dtype   of the matrices; None keeps the stored one
    force   replace a target that exists

    Raises ConfigError where the format can't express the model, CheckpointError when the target can't be written
    or does not read back the same; then nothing is left behind.
    """
    if to not in WRITERS:
        raise UsageError(f"unknown format {to!r}; known: {', '.join(WRITERS)}")
    if shards < 0:
        raise UsageError(f"the number of shards must not be negative, got {shards}")
    source, target = Path(source), Path(target)
    load_writer, is_folder = WRITERS[to]
    checkpoint = open_checkpoint(source)
    check_tensors(checkpoint)
    model = describe(checkpoint, plan_dtypes(checkpoint, dtype))

    def fill(place: Path) -> Proof:
        hashes: dict[str, str] = {}
        warnings = list(load_writer()(place, _counted(model, hashes, progress), shards))
        if model.tokenizer is None:
            warnings.append(f"why there is no tokenizer: {model.no_tokenizer}")
        elif checkpoint.format == "Meta" and to != "meta":
            warnings.append(NO_TEMPLATE)
        return Proof(target, len(hashes), prove(place, model, hashes, progress), warnings)

    check_target(source, target, is_folder, force)
    try:
        return put_whole(target, is_folder, force, sum(map(model.nbytes, model.shapes)), fill)
    except ConfigError as error:
        raise ConfigError(f"{source} can't become {to}: {error}") from error


NO_TEMPLATE = "Meta's files hold no chat template, so the new ones have none either"


def put_whole(target: Path, is_folder: bool, force: bool, needed: int, fill: Callable[[Path], T]) -> T:
    """Let `fill` write a file or into a new folder, then give that its name; a target is there whole or not at all.

    needed  bytes the disk must have free

    Returns what `fill` returns. Raises CheckpointError where the system does not let it happen; nothing is left behind.
    """
    try:
        with locked(target, PREFIX):
            _restore(target)
            sweep(target.parent, PREFIX)
            _check_space(target, needed)
            with own_temporary(target.parent, PREFIX) as work:
                place = work / target.name
                if is_folder:
                    place.mkdir()
                made = fill(place)
                _sync(place)
                _put(place, target, force, work)
    except OSError as error:
        why = f"{error.filename or target}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(target.parent).free
            why += f"; {free // 10**6} MB are free and the new files need {needed // 10**6} MB"
        raise CheckpointError(f"{why}; nothing was changed") from error
    return made


def plan_dtypes(checkpoint: Checkpoint, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """In which dtype each weight is written: the one asked for, or its own.

    Vectors follow the matrices where that loses nothing.
    """
    matrices = {stored_dtype(checkpoint, name) for name, shape in checkpoint.shapes.items() if len(shape) > 1}
    if dtype is None and (quantized := sorted(kind for kind in matrices if isinstance(kind, str))):
        raise UsageError(
            f"{checkpoint.path}: the weights are quantized ({', '.join(quantized)}); say in which dtype they are to be"
            f" written: --dtype float32 is exact, bfloat16 takes half the space"
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


def describe(checkpoint: Checkpoint, dtypes: Mapping[str, torch.dtype]) -> Model:
    """What the writers are given of a checkpoint, each weight in the dtype planned for it."""
    config = checkpoint.config

    def stored(name: str) -> Tensor:
        tensor = checkpoint.tensor(name)
        return to_layout(name, tensor, config.head_dim, checkpoint.layout, "interleaved")

    last: list[str] = []

    def read(name: str) -> Tensor:
        while last:  # the writer is through with it
            checkpoint.release(last.pop())
        last.append(name)
        tensor = stored(name)
        cast = tensor.to(dtypes[name])
        narrows = cast.dtype == torch.float16 != tensor.dtype  # the only cast that overflows in practice
        if narrows and not bool(torch.isfinite(cast).all()) and bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name} holds values beyond what {dtypes[name]} can hold; choose another --dtype")
        return cast

    tokenizer: Tokenizer | None
    why = ""
    try:
        tokenizer = checkpoint.tokenizer()
    except TokenizerError as error:  # none, or one that can't be read; one of another model is an error
        tokenizer, why = None, str(error)
    return Model(
        config=config,
        shapes=checkpoint.shapes,
        dtypes=dtypes,
        read=read,
        tokenizer=tokenizer,
        no_tokenizer=why,
        chat_template=checkpoint.chat_template,
        sampling=checkpoint.sampling,
        name=checkpoint.about.get("name", checkpoint.path.stem),
    )


def stored_dtype(checkpoint: Checkpoint, name: str) -> torch.dtype | str:
    """The dtype of a weight, or the name of the blocks it is stored in."""
    kind = checkpoint.stored(name)
    return {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(kind, kind)


def prove(place: Path, model: Model, hashes: dict[str, str], progress: Progress) -> str:
    """Read the new files and hold each weight against the hash of the source's; one hash over all.

    Raises CheckpointError when one differs.
    """
    written = open_checkpoint(place)
    check_tensors(written)
    if written.shapes.keys() != model.shapes.keys():
        raise CheckpointError(
            f"the new files hold other tensors: {sorted(written.shapes.keys() ^ model.shapes.keys())[:3]}"
        )
    whole = hashlib.sha256()
    for done, name in enumerate(sorted(model.shapes)):
        progress("checking", done, len(model.shapes))
        read = to_layout(name, written.tensor(name), model.config.head_dim, written.layout, "interleaved")
        exact = read.to(model.dtypes[name])
        lossy = exact.dtype != read.dtype and not torch.equal(exact.to(read.dtype), read)
        if tensor_hash(exact) != hashes[name] or lossy:
            raise CheckpointError(f"{name} does not read back as it was written; the disk or this program is at fault")
        whole.update(f"{name} {tuple(exact.shape)} {exact.dtype} {hashes[name]}\n".encode())
        written.release(name)
    progress("checking", len(model.shapes), len(model.shapes))
    return whole.hexdigest()


def tensor_hash(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes."""
    return hashlib.sha256(raw_bytes(tensor).data).hexdigest()


def _counted(model: Model, hashes: dict[str, str], progress: Progress) -> Model:
    """The model, its reader noting the hash of what it reads and telling how far it is."""

    def read(name: str) -> Tensor:
        tensor = model.read(name)
        hashes[name] = tensor_hash(tensor)
        progress("writing", len(hashes), len(model.shapes))
        return tensor

    return Model(**{**model.__dict__, "read": read})


def check_target(source: Path, target: Path, is_folder: bool, force: bool) -> None:
    """Raise UsageError unless the target may be written: it is not there, or force is given and it is no other kind."""
    if target.exists() or target.is_symlink():
        if source.resolve() == target.resolve() or target.resolve() in source.resolve().parents:
            raise UsageError(f"{target} is the source, or the source lies in it; name another target")
        if not force:
            raise UsageError(f"{target} exists already; name another target, or replace it with --force")
        if target.is_dir() != is_folder:
            kind = ("a folder", "a file") if target.is_dir() else ("a file", "a folder")
            raise UsageError(
                f"{target} is {kind[0]} and this format is {kind[1]}; remove it first or name another target"
            )
        if is_folder and (foreign := _not_of_a_checkpoint(target)):
            raise UsageError(
                f"{target} holds {foreign}, so it is not replaced as a whole; remove it first or name another target"
            )
    if not target.name or target.name in (".", ".."):
        raise UsageError(f"{target} is no name for a new file or folder")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is not a folder; make it first")


def _not_of_a_checkpoint(folder: Path) -> str | None:
    """What in a folder was hardly written by a conversion: another folder, or files with no checkpoint among them."""
    inside = sorted(folder.iterdir())
    for path in inside:
        if path.is_dir():
            return f"the folder {path.name}"
    known = {"config.json", "params.json"}
    return f"{inside[0].name} and no checkpoint" if inside and not known & {path.name for path in inside} else None


def _check_space(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needed * 1.01 + 2**20:
        raise CheckpointError(
            f"{target.parent} has {free // 10**6} MB free and the new files need {needed // 10**6} MB;"
            f" nothing was written"
        )


def _sync(place: Path) -> None:
    """Let the disk have everything before the name appears."""
    for path in [*place.iterdir()] if place.is_dir() else [place]:
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
    with contextlib.suppress(OSError):  # not every system opens folders
        handle = os.open(place if place.is_dir() else place.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _put(place: Path, target: Path, force: bool, work: Path) -> None:
    """Give the finished files their name. An old target goes only when the new one is there."""
    if not target.is_dir():
        if target.exists() and not force:
            raise CheckpointError(f"{target} appeared in the meantime; nothing was changed")
        os.replace(place, target)
        return
    if not force:
        raise CheckpointError(f"{target} appeared in the meantime; nothing was changed")
    if swap(place, target):
        return  # the old one is in the work folder now and goes with it
    old = target.with_name(f"{_old(target)}{work.name}")
    os.rename(target, old)  # killed behind this line, the next conversion to this target takes it back
    try:
        os.rename(place, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old)


def _old(target: Path) -> str:
    """How the name of a target's old folder begins while the new one takes its place."""
    return f".{target.name}"


def _restore(target: Path) -> None:
    """Give back, or clear away, the old folder of a conversion that was killed when two names could not be swapped."""
    for old in abandoned(target.parent, f"{_old(target)}{PREFIX}"):
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, target)
