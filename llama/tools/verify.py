"""List the files of a checkpoint, compare their checksums, and open it.

Loading trusts the data of the weights: a flipped bit there changes the model without an error. Here every byte with a
known checksum is read. A checkpoint that can't be opened is checked as far as possible.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from ..checkpoint import Checkpoint, open_checkpoint
from ..errors import CheckpointError, DamagedError, UsageError
from ..hub import models as hub
from ..system.documents import refuse_mistakes
from .findings import Finding, check, failure
from .model_facts import model_facts

CHUNK = 2**20  # bytes of a file that are in memory at a time
ELEMENTS = 2**22  # values of a weight that are checked at a time
TORCH = (".pth", ".pt", ".bin")
WEIGHTS = (*TORCH, ".safetensors", ".gguf")
ALGORITHMS = {32: "md5", 40: "git", 64: "sha256"}  # by the length of the checksum; git's is that of an object

Sum = tuple[Path, str, str]  # file, checksum, source of the checksum


def verify(path: Path, tensors: bool = False, checksums: Path | None = None, quiet: bool = True) -> Iterator[Finding]:
    """Check a folder in Meta's or Hugging Face's format, a GGUF file or a set of them; yield findings one by one.

    tensors    also read every weight, for values that are not finite and matrices of zeros
    checksums  a file with checksums, in addition to the published ones
    quiet      show no progress bar

    At most one weight is in memory. Raises CheckpointError if `path` does not exist, UsageError if it is one file of a
    folder.
    """
    files = find_files(path)
    sums: list[Sum] = []
    for checklist in [file for file in files if file.suffix == ".chk"] + ([checksums] if checksums else []):
        try:
            sums += read_checksums(checklist, path)
        except Exception as error:
            yield failure("sums", checklist.name, error)
    yield from find_missing(path, files, sums)
    for file in files:
        yield check("content", file.name, partial(check_content, file))
    sums += [(file, value, "the hub") for file in files if (value := hub_checksum(file))]
    for file, value, source in sums:
        if os.path.isfile(file):
            yield check(ALGORITHMS[len(value)], file.name, partial(compare, file, value, source, quiet))
    known = {file for file, *_ in sums}
    wanted = [file for file in files if file.suffix in (*WEIGHTS, ".model") or file.name == "tokenizer.json"]
    if bare := [file.name for file in wanted if file not in known]:
        yield Finding("warn", "sums", ", ".join(bare), "not verified: no checksum is known")
    yield from open_and_compare(path, tensors, quiet)


def format_of(path: Path) -> str:
    """The format by the names of the files, some of which may be missing: Hugging Face, Meta, GGUF or unknown."""
    names = [file.name for file in path.iterdir()] if path.is_dir() else []
    if any(name == "config.json" or name.endswith((".safetensors", ".index.json", ".bin")) for name in names):
        return "Hugging Face"
    if any(name in ("params.json", "checklist.chk") or name.endswith(".pth") for name in names):
        return "Meta"
    return "unknown" if path.is_dir() else "GGUF"


# --------------------------------------------------------------------------------------------------------- the files
def find_files(path: Path) -> list[Path]:
    """The existing files of the checkpoint at `path`: weights, documents, tokenizer, checklists."""
    documents = (".json", ".model", ".chk")
    if path.is_dir():
        found = sorted(path.iterdir())
        if format_of(path) == "Meta" and not (path / "tokenizer.model").exists():  # LLaMA 1 and 2 have it in the parent
            found += sorted(path.absolute().parent.glob("tokenizer*"))
        return [file for file in found if file.suffix in (*WEIGHTS, *documents) and file.is_file()]
    if not path.is_file():
        raise CheckpointError(f"there is no model folder or .gguf file {str(path)!r}")
    if path.suffix in (*TORCH, ".safetensors", *documents):
        raise UsageError(f"{path} is one file of a checkpoint that is a folder; name the folder: {path.parent}")
    return sorted(path.parent.glob(re.sub(r"-\d{5}-of-", "-?????-of-", glob.escape(path.name))))  # all files of a set


def find_missing(path: Path, files: list[Path], sums: list[Sum]) -> Iterator[Finding]:
    """Compare the files that exist with checklists and indexes. The target of a broken link does not exist."""
    folder = path if path.is_dir() else path.parent
    needed = {file: f"{source} lists it" for file, _, source in sums}
    for file in (file for file in files if file.name.endswith(".index.json")):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # opening the checkpoint reports it
            names = set(json.loads(file.read_bytes())["weight_map"].values())
            needed |= dict.fromkeys((folder / name for name in names), f"{file.name} names it")
    missing = {file.name: f"is missing: {why}" for file, why in needed.items() if not os.path.exists(file)}
    for name, message in missing.items():
        yield Finding("fail", "files", name, message)
    if not missing:
        yield Finding("ok", "files", path.absolute().name, f"{format_of(path)}, no file is known to be missing")


def check_content(file: Path) -> str:
    """Read a file as far as its format can show damage. Raises CheckpointError if it is damaged."""
    with open(file, "rb") as opened:
        start = opened.read(64)
    refuse_mistakes(file, start)
    try:
        if file.suffix == ".safetensors":
            safe_open(file, "pt")
        elif file.suffix == ".json":
            json.loads(file.read_bytes())
        elif file.suffix in TORCH and start.startswith(b"PK"):
            with zipfile.ZipFile(file) as archive:
                if not any(record.CRC for record in archive.infolist()):  # torch.serialization.set_crc32_options(False)
                    return "without checksums"
                if damaged := archive.testzip():
                    raise DamagedError(f"the CRC-32 of {damaged} differs")
    except (ValueError, RecursionError, SafetensorError, zipfile.BadZipFile) as error:
        raise DamagedError(f"{file.name}: {error}") from None
    return f"{file.stat().st_size:,} bytes"


# ----------------------------------------------------------------------------------------------------- the checksums
def read_checksums(checklist: Path, path: Path) -> list[Sum]:
    """The checksums in a list that md5sum or sha256sum wrote. Raises CheckpointError for another line."""
    sums = []
    folder = checklist.parent if checklist.suffix == ".chk" else path if path.is_dir() else path.parent
    for number, line in enumerate(checklist.read_text(encoding="utf-8").splitlines(), 1):
        if match := re.fullmatch(r"([0-9a-fA-F]{32}|[0-9a-fA-F]{64}) [ *]([^/\\]+)", line):
            sums.append((folder / match[2], match[1].lower(), checklist.name))
        elif line.strip() and not line.startswith("#"):
            raise CheckpointError(f"line {number} is {line!r:.60}; expected a checksum, two spaces and a file name")
    return sums


def hub_checksum(file: Path) -> str | None:
    """The checksum of a file that the Hugging Face library recorded, or that of the default model; None if unknown.

    In the library's cache a file is a link to ../../blobs/CHECKSUM; in another folder the library records it in
    .cache/huggingface/download. Large files have a sha256, small ones git's object id.
    """
    record, value = file.parent / ".cache/huggingface/download" / f"{file.name}.metadata", ""
    if file.is_symlink() and Path(os.readlink(file)).parent.name == "blobs":
        value = Path(os.readlink(file)).name
    elif record.is_file():
        value = [*record.read_text(errors="replace").splitlines(), "", ""][1]
    if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", value):
        return value
    return hub.SHA256 if (file.name, file.stat().st_size) == (hub.FILE, hub.SIZE) else None


def compare(file: Path, expected: str, source: str, quiet: bool) -> str:
    """Compute the checksum of a file. Raises DamagedError if it is not the expected one."""
    algorithm, size = ALGORITHMS[len(expected)], file.stat().st_size
    digest = hashlib.new("sha1" if algorithm == "git" else algorithm, usedforsecurity=False)
    if algorithm == "git":
        digest.update(f"blob {size}\0".encode())
    bar = tqdm(desc=f"{algorithm} {file.name}", total=size, unit_scale=True, leave=False, disable=quiet or None)
    with bar, open(file, "rb") as opened:
        while chunk := opened.read(CHUNK):
            digest.update(chunk)
            bar.update(len(chunk))
    if digest.hexdigest() != expected:
        raise DamagedError(f"{source} has {expected}, but the file has {digest.hexdigest()}")
    return f"{expected}, as in {source}"


# ---------------------------------------------------------------------------------------------------- as a checkpoint
def open_and_compare(path: Path, tensors: bool, quiet: bool) -> Iterator[Finding]:
    """Open the checkpoint, compare its tensors with its configuration, and its tokenizer with the embedding."""
    item = path.absolute().name
    try:
        checkpoint = open_checkpoint(path)
        facts = model_facts(checkpoint)
    except Exception as error:
        yield failure("open", item, error)
        return
    for fault in facts["mismatches"]:
        yield Finding("fail", "open", item, fault)
    if not facts["mismatches"]:
        message = f"{facts['format']}, {facts['parameters']:,} parameters in {len(checkpoint.shapes):,} tensors"
        yield Finding("ok", "open", item, message)
    for warning in facts["warnings"]:
        yield Finding("warn", "open", item, warning)
    if "tokens" in facts:
        rows = f"{facts['tokens']:,} tokens for {facts['vocab_size']:,} rows of the embedding"
        yield Finding("ok", "tokenizer", item, f"{facts['tokenizer']}, {rows}")
    else:
        yield Finding("fail", "tokenizer", item, facts["tokenizer"])
    if tensors:
        names = tqdm(checkpoint.shapes, "weights", leave=False, disable=quiet or None)
        bad = [finding for name in names if (finding := check_weight(checkpoint, name))]
        finite = Finding("ok", "tensors", item, f"all values of {len(checkpoint.shapes):,} tensors are finite")
        yield from bad or [finite]


def check_weight(checkpoint: Checkpoint, name: str) -> Finding | None:
    """Read a weight. Values that are not finite fail, a matrix of zeros is a warning; None if there is neither."""
    try:
        parts = checkpoint.tensor(name).reshape(-1).split(ELEMENTS)
        bad = sum(int((~torch.isfinite(part)).sum()) for part in parts)
        zeros = not any(bool(part.any()) for part in parts)
        checkpoint.release(name)
    except Exception as error:
        return failure("tensors", name, error)
    if bad:
        return Finding("fail", "tensors", name, f"{bad:,} values are NaN or infinite; the model or the file is damaged")
    if zeros and not name.endswith(".bias"):
        return Finding("warn", "tensors", name, "all values are zero; a part of the file may never have been written")
    return None
