"""Check that a downloaded checkpoint is complete and undamaged, even if it can't be opened.

Loading trusts the data of the weights: a flipped bit there changes the model without an error. Here every byte is read
and compared with what the files declare about themselves and each other: sizes, checksums, names.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from ..checkpoint import Checkpoint, base, gguf, huggingface, meta, open_checkpoint, torchfile
from ..errors import CheckpointError, DamagedError, LlamaError, TokenizerError, UsageError, one_line
from ..hub import models as hub
from ..system.documents import LARGEST, LARGEST_TOKENIZER, read_json, refuse_mistakes, size_of
from ..tokenizer import open_tokenizer
from ..weights import mismatches

Status = Literal["ok", "warn", "fail"]
# (the step, bytes or weights done, their total)
Progress = Callable[[str, int, int], None]

CHUNK = 2**20  # bytes of a file that are in memory at a time
ELEMENTS = 2**22  # values of a weight that are checked at a time
LARGEST_CHECKLIST = 2**20  # bytes

TORCH = (".pth", ".pt", ".bin")
WEIGHTS = (*TORCH, ".safetensors", ".gguf")
CHECKLIST, TOKENIZER_CHECKLIST = "checklist.chk", "tokenizer_checklist.chk"
# The JSON files to check; a folder may contain others.
DOCUMENTS = (
    meta.PARAMS, huggingface.CONFIG, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "tokenizer.json", huggingface.INDEX, huggingface.BIN_INDEX,
)  # fmt: skip
UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2")
SHARD = re.compile(r"consolidated\.(\d{1,4})\.pth")
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf|\.safetensors|\.bin)")

# format -> names that identify it, even if other files are missing
SIGNS = {
    "Hugging Face": re.compile(r"config\.json|.+\.safetensors|.+\.index\.json|pytorch_model.*\.bin"),
    "Meta": re.compile(r"params\.json|consolidated\.\d+\.pth|checklist\.chk"),
    "GGUF": re.compile(r".+\.gguf"),
}


@dataclass(frozen=True)
class Finding:
    """The result of one check of one item.

    check    files, size, md5, sha256, git, sums, crc, json, open, tokenizer, tensors
    status   "ok"; "warn": not known to be wrong, but a user should know; "fail"
    item     the file or tensor
    message  what was found; after a failure also what was expected and what to do
    """

    check: str
    status: Status
    item: str
    message: str


@dataclass(frozen=True)
class Sum:
    """A published checksum of a file, and its source."""

    file: Path
    algorithm: Literal["md5", "sha256", "git"]
    value: str
    source: str


def _silent(what: str, done: int, total: int) -> None:
    pass


def verify(path: Path, tensors: bool = False, progress: Progress = _silent) -> Iterator[Finding]:
    """Check a folder in Meta's or Hugging Face's format, a GGUF file or a set of them; yield findings one by one.

    tensors  also read every weight, for values that are not finite and matrices of zeros

    At most one weight is in memory. Raises CheckpointError if `path` does not exist, UsageError if it is one file of a
    folder.
    """
    files, root = find_files(path), path if path.is_dir() else path.parent
    yield from check_presence(path)
    sizes = {file: check_size(file, root) for file in files}
    yield from sizes.values()
    sound = [file for file, finding in sizes.items() if finding.status == "ok"]
    yield from check_total_size(root, sound)
    yield from check_sums(files, root, progress)
    yield from (check_records(file, root, progress) for file in sound if file.suffix in TORCH)
    yield from (check_document(file, root) for file in sound if file.name in DOCUMENTS)
    checkpoint, findings = check_opening(path)
    yield from findings
    yield check_tokenizer(path, checkpoint)
    if tensors and checkpoint is not None:
        yield from check_weights(checkpoint, progress)
    elif tensors:
        yield Finding("tensors", "warn", _name(path), "the weights were not read: the checkpoint can't be opened")


def format_of(path: Path) -> str:
    """The format, even if files are missing or damaged: "Hugging Face", "Meta", "GGUF" or "unknown"."""
    if not path.is_dir():
        return "GGUF"
    names = _names(path)
    return next((form for form, sign in SIGNS.items() if any(map(sign.fullmatch, names))), "unknown")


def find_files(path: Path) -> list[Path]:
    """The existing files of the checkpoint at `path`: weights, documents, tokenizer, checklists."""
    if path.is_dir():
        known = (*WEIGHTS, ".json", ".model", ".chk")
        files = [file for file in sorted(path.iterdir()) if file.suffix in known and file.is_file()]
        tokenizer = find_tokenizer(path)
        return files if tokenizer is None or tokenizer in files else [*files, tokenizer]
    if not path.exists():
        raise CheckpointError(f"there is no file or folder {str(path)!r}")
    if not path.is_file():
        raise CheckpointError(f"{path} is neither a regular file nor a folder; expected a model folder or a .gguf file")
    if path.suffix in (*TORCH, ".safetensors", ".json", ".model", ".chk"):
        raise UsageError(f"{path} is one file of a checkpoint that is a folder; name the folder: {path.parent}")
    return [path.with_name(name) for name in _with_all_parts(path.name) if path.with_name(name).is_file()]


def find_tokenizer(folder: Path) -> Path | None:
    """The tokenizer's file, as the readers of the formats find it; None if there is none."""
    names = ("tokenizer.json", "tokenizer.model")
    try:
        found = base.find_tokenizer(folder, names[::-1] if format_of(folder) == "Meta" else names)
    except TokenizerError:
        return None
    return found if found.is_file() else None


# ------------------------------------------------------------------------------------------------------- presence
def check_presence(path: Path) -> Iterator[Finding]:
    """Find missing files, broken links and unfinished downloads."""
    if path.is_dir():
        missing = missing_files(path)
        links = [file for file in sorted(path.iterdir()) if file.is_symlink() and not file.exists()]
    else:
        count = len(_with_all_parts(path.name))
        names = [name for name in _with_all_parts(path.name) if not path.with_name(name).exists()]
        missing, links = dict.fromkeys(names, f"the model has {count} parts"), []
    for file in links:
        missing.pop(file.name, None)
        where = os.readlink(file)
        yield Finding("files", "fail", file.name, f"is a link to {where}, which does not exist; download it again")
    for name, why in missing.items():
        yield Finding("files", "fail", name, f"is missing ({why}); download it")
    if not missing and not links and format_of(path) != "unknown":
        yield Finding("files", "ok", _name(path), f"{format_of(path)}; no file is known to be missing")
    for file in leftovers(path) if path.is_dir() else []:
        message = f"{file.stat().st_size:,} bytes of an unfinished download; resume it, or remove the file"
        yield Finding("files", "warn", file.name, message)


def missing_files(folder: Path) -> dict[str, str]:
    """Files that other files of a folder require -> the reason."""
    names, form = _names(folder), format_of(folder)
    missing: dict[str, str] = {}
    safetensors = any(name.endswith(".safetensors") or name == huggingface.INDEX for name in names)
    for index in (huggingface.INDEX, huggingface.BIN_INDEX):
        if index in names and (index == huggingface.INDEX or not safetensors):
            missing |= dict.fromkeys(sorted(indexed(folder / index) - names), f"{index} names it")
    for name in sorted(names):
        parts = _with_all_parts(name)
        missing |= {part: f"the model has {len(parts)} parts" for part in parts if part not in names}
    shards = {int(match[1]) for name in names if (match := SHARD.fullmatch(name))}
    for i in sorted(set(range(max(shards, default=0))) - shards):
        missing[f"consolidated.{i:02d}.pth"] = f"the last one here is consolidated.{max(shards):02d}.pth"
    for line in read_checklist(folder / CHECKLIST)[0] if CHECKLIST in names else []:
        if line.file.name not in names:
            missing[line.file.name] = f"{CHECKLIST} lists it"
    description = {"Meta": meta.PARAMS, "Hugging Face": huggingface.CONFIG}.get(form)
    if description is not None and description not in names:
        missing[description] = "it describes the model"
    return missing


def indexed(index: Path) -> set[str]:
    """The plain file names in an index; empty if it can't be read, which another check reports."""
    try:
        weight_map = read_json(index).get("weight_map")
    except CheckpointError:
        return set()
    values = weight_map.values() if isinstance(weight_map, dict) else ()
    return {name for name in values if isinstance(name, str) and _is_plain(name)}


def leftovers(folder: Path) -> list[Path]:
    """Unfinished downloads in the folder and in the cache of the Hugging Face library."""
    found = [file for file in sorted(folder.iterdir()) if file.suffix in UNFINISHED and file.is_file()]
    found += sorted((folder / ".cache" / "huggingface" / "download").glob("**/*.incomplete"))
    for parent in (folder, *folder.absolute().parents):
        if parent.parent.name == "snapshots":
            found += sorted((parent.parent.parent / "blobs").glob("*.incomplete"))
    return found


# ------------------------------------------------------------------------------------------------------- each file
def check_size(file: Path, root: Path) -> Finding:
    """Check a file's first bytes, and its size against its own header."""

    def look() -> str:
        with open(file, "rb") as opened:
            refuse_mistakes(file, opened.read(64))
        if file.suffix == ".safetensors":
            tensors = huggingface.open_file(file)
            return f"{file.stat().st_size:,} bytes, as its header says: {len(tensors):,} tensors"
        if file.suffix in TORCH:
            return torch_size(file)
        if file.suffix in (".json", ".model", ".chk"):
            return f"{file.stat().st_size:,} bytes"
        return f"{file.stat().st_size:,} bytes, as its header says: {len(gguf.GGUFFile(file).tensors):,} tensors"

    return _outcome("size", file, root, look)


def torch_size(file: Path) -> str:
    """Describe the size of a torch file. Raises CheckpointError if the end of its archive is missing."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        start = opened.read(4)
    if start != torchfile.ZIP:
        raise DamagedError(f"{file} is not a torch file: it begins with {start!r}")
    return f"{size:,} bytes, {len(torchfile.read_records(file, file)):,} records to the end of the archive"


def check_total_size(folder: Path, sound: list[Path]) -> Iterator[Finding]:
    """Compare the total size in the index of a Hugging Face folder with the sizes in its files."""
    index = folder / huggingface.INDEX
    names = indexed(index) if index in sound else set()
    shards = [file for file in sound if file.name in names]
    if not names or len(shards) != len(names):
        return
    metadata = read_json(index).get("metadata")
    declared = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(_data_bytes(file) for file in shards)
    if declared is None:
        yield Finding("size", "warn", index.name, "does not declare the total size of the weights")
    elif declared == found:
        yield Finding("size", "ok", index.name, f"{found:,} bytes of weights in {len(shards)} files, as declared")
    else:
        message = f"declares {declared!r:.40} bytes of weights, but the files have {found:,}; their versions may differ"
        yield Finding("size", "warn", index.name, message)


def _data_bytes(file: Path) -> int:
    """Bytes of the tensors in a safetensors file: all that follow the header and its length."""
    with open(file, "rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


def check_records(file: Path, root: Path, progress: Progress = _silent) -> Finding:
    """Check the CRC-32 of every record in a torch file's archive. It detects a flipped bit, which loading does not."""

    def read() -> str:
        damaged, done = [], 0
        records = torchfile.read_records(file, file).values()
        if not any(record.CRC for record in records):  # torch.serialization.set_crc32_options(False)
            return UNCHECKED
        total = sum(record.file_size for record in records)
        with zipfile.ZipFile(file) as archive:
            for record in records:
                try:
                    with archive.open(record) as opened:
                        while chunk := opened.read(CHUNK):
                            done += len(chunk)
                            progress(f"crc {file.name}", done, total)
                except zipfile.BadZipFile:
                    damaged.append(record.filename)
        if damaged:
            names = ", ".join(damaged[:3]) + ", ..." * (len(damaged) > 3)
            raise DamagedError(f"{file}: the CRC-32 of {len(damaged):,} of {len(records):,} records differs: {names}")
        return f"the CRC-32 of all {len(records):,} records matches"

    finding = _outcome("crc", file, root, read)
    return Finding("crc", "warn", finding.item, UNCHECKED) if finding.message == UNCHECKED else finding


UNCHECKED = "not verified: the file was written without checksums"


def check_document(file: Path, root: Path) -> Finding:
    """Check that a JSON file can be read."""
    largest = LARGEST_TOKENIZER if file.name in ("tokenizer.json", "vocab.json") else LARGEST
    return _outcome("json", file, root, lambda: f"{len(read_json(file, largest)):,} entries")


# -------------------------------------------------------------------------------------------- published checksums
def check_sums(files: list[Path], root: Path, progress: Progress = _silent) -> Iterator[Finding]:
    """Compare files with their published checksums, then list the weights and tokenizers without one."""
    sums = [known for file in files if (known := cache_sum(file))]
    for checklist in find_checklists(files, root):
        listed, faults = read_checklist(checklist)
        yield from (Finding("sums", "fail", _item(checklist, root), fault) for fault in faults)
        sums += listed
    for known in sums:
        if known.file.is_file():
            yield _outcome(known.algorithm, known.file, root, partial(_compare, known, progress))
    covered = {known.file for known in sums}
    wanted = [file for file in files if file.suffix in (*WEIGHTS, ".model") or file.name == "tokenizer.json"]
    if bare := [_item(file, root) for file in wanted if file not in covered]:
        names = ", ".join(bare[:4]) + ", ..." * (len(bare) > 4)
        it, where = "it" if len(bare) == 1 else "them", ""
        if lists := [file.name for file in files if file.suffix == ".chk"]:
            where = f"{lists[0]} does not list {it}, and "
        elif format_of(root) == "Meta":
            where = f"there is no {CHECKLIST}, and "
        why = f"{where}the Hugging Face cache has no checksum of {it}"
        yield Finding("sums", "warn", names, f"not verified: {why}")


def find_checklists(files: list[Path], root: Path) -> list[Path]:
    """The lists of checksums, including that of a tokenizer in the parent folder."""
    lists = [file for file in files if file.suffix == ".chk"]
    for file in files:
        if file.parent != root and (file.parent / TOKENIZER_CHECKLIST).is_file():
            lists.append(file.parent / TOKENIZER_CHECKLIST)
    return lists


def read_checklist(path: Path) -> tuple[list[Sum], list[str]]:
    """(the checksums of a list in the format of md5sum, the faults of its other lines)."""
    try:
        size = size_of(path)
        text = path.read_text(encoding="utf-8") if size <= LARGEST_CHECKLIST else None
    except CheckpointError as error:
        return [], [str(error)]
    except UnicodeDecodeError:
        return [], ["is not UTF-8; it is damaged, download it again"]
    except OSError as error:
        return [], [f"can't be read: {error.strerror or error}"]
    if text is None:
        return [], [f"has {size:,} bytes, but a checklist has a few hundred; it is another file, download it again"]
    sums, faults = [], []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.fullmatch(r"([0-9a-fA-F]{32}) [ *](.+)", line)
        if match and _is_plain(match[2]):
            sums.append(Sum(path.parent / match[2], "md5", match[1].lower(), path.name))
        elif match:
            faults.append(f"line {number} names {match[2]!r:.60}, which is not a plain file name; it was ignored")
        elif line.strip() and not line.startswith("#"):
            faults.append(f"line {number} is {line!r:.60}; expected an md5, two spaces and a name; download it again")
    if not sums and not faults:
        faults.append("lists no file; it is damaged, download it again")
    return sums, faults


def cache_sum(file: Path) -> Sum | None:
    """The checksum of a file that the Hugging Face library recorded, or that of a named model; None if unknown.

    In the library's cache a file is a link to ../../blobs/CHECKSUM; in another folder the library records it in
    .cache/huggingface/download. Large files have a sha256, small ones git's object id.
    """
    value, record = "", file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    if file.is_symlink():
        target = Path(os.readlink(file))
        value = target.name if target.parent.name == "blobs" else ""
    elif record.is_file() and record.stat().st_size < LARGEST_CHECKLIST:
        lines = record.read_text(errors="replace").splitlines()
        value = lines[1] if len(lines) > 1 else ""
    if re.fullmatch(r"[0-9a-f]{64}", value):
        return Sum(file, "sha256", value, "the Hugging Face hub")
    if re.fullmatch(r"[0-9a-f]{40}", value):
        return Sum(file, "git", value, "the Hugging Face hub")
    for name, model in hub.MODELS.items():
        if file.name == model.file and file.stat().st_size == model.size:
            return Sum(file, "sha256", model.sha256, f"the list of named models ({name})")
    return None


def file_sum(file: Path, algorithm: str, progress: Progress = _silent) -> str:
    """The md5, the sha256, or git's object id of a file."""
    size, done = file.stat().st_size, 0
    digest = hashlib.new("sha1" if algorithm == "git" else algorithm, usedforsecurity=False)
    if algorithm == "git":
        digest.update(f"blob {size}\0".encode())
    with open(file, "rb") as opened:
        while chunk := opened.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(f"{algorithm} {file.name}", done, size)
    return digest.hexdigest()


def _compare(known: Sum, progress: Progress) -> str:
    found = file_sum(known.file, known.algorithm, progress)
    if found != known.value:
        raise CheckpointError(
            f"{known.file}: {known.source} has {known.value}, but the file has {found}; it is damaged or another"
            " version, download it again"
        )
    return f"{found}, as in {known.source}"


# ---------------------------------------------------------------------------------------------------- as a checkpoint
def check_opening(path: Path) -> tuple[Checkpoint | None, list[Finding]]:
    """Open the checkpoint and compare its tensors with its configuration."""
    item, opened = _name(path), []

    def look() -> str:
        opened.append(open_checkpoint(path))
        return f"{opened[0].format}, {opened[0].config.n_params:,} parameters in {len(opened[0].shapes):,} tensors"

    finding = _outcome("open", path, path, look)
    if not opened:
        return None, [finding]
    checkpoint = opened[0]
    remedy = "the files and the configuration do not belong together, or one is damaged"
    wrong = [f"{fault}; {remedy}" for fault in mismatches(checkpoint)]
    findings = [Finding("open", "fail", item, fault) for fault in wrong] or [finding]
    findings += [Finding("open", "warn", item, _without_root(text, path)) for text in checkpoint.warnings]
    return checkpoint, findings


def check_tokenizer(path: Path, checkpoint: Checkpoint | None) -> Finding:
    """Open the tokenizer, even if the checkpoint can't be opened, and compare it with the embedding."""
    file = find_tokenizer(path) if path.is_dir() else None
    root = path if path.is_dir() else path.parent
    if checkpoint is None and file is None:
        message = "no tokenizer file was found, and the checkpoint can't be opened"
        return Finding("tokenizer", "warn" if format_of(path) == "GGUF" else "fail", _name(path), message)
    rows = checkpoint.config.vocab_size if checkpoint else 0
    counts = []

    def look() -> str:
        if checkpoint is not None:
            tokenizer = checkpoint.tokenizer()
        elif file is not None:
            tokenizer = open_tokenizer(file)
        else:
            raise TokenizerError(f"{path}: there is no tokenizer")
        counts.append(tokenizer.n_vocab)
        return f"{tokenizer.kind}, {tokenizer.n_vocab:,} tokens" + f" for {rows:,} rows of the embedding" * bool(rows)

    finding = _outcome("tokenizer", file or path, root, look)
    if counts and rows and not 0.75 * rows <= counts[0] <= rows:  # models pad the embedding by less than this
        message = f"has {counts[0]:,} tokens and the embedding {rows:,} rows; it may belong to another model"
        return Finding("tokenizer", "warn", finding.item, message)
    return finding


def check_weights(checkpoint: Checkpoint, progress: Progress = _silent) -> Iterator[Finding]:
    """Read every weight, one at a time. Values that are not finite fail; a matrix of zeros is a warning."""
    sound = 0
    for done, name in enumerate(checkpoint.shapes, 1):
        finding = _outcome("tensors", Path(name), Path(), partial(describe_weight, checkpoint, name))
        progress("weights", done, len(checkpoint.shapes))
        if finding.message == ZEROS:
            yield Finding("tensors", "warn", name, ZEROS)
        elif finding.status != "ok":
            yield finding
        sound += finding.status == "ok"
    if sound == len(checkpoint.shapes):
        yield Finding("tensors", "ok", _name(checkpoint.path), f"all values of {sound:,} tensors are finite")


ZEROS = "all values are zero; a part of the file may never have been written"


def describe_weight(checkpoint: Checkpoint, name: str) -> str:
    """ZEROS or "finite". Raises CheckpointError with the count and the first position of values that are not finite."""
    weight = checkpoint.tensor(name)
    shape, flat = tuple(weight.shape), weight.reshape(-1)
    nans = infinities = 0
    first, zeros = None, True
    for start in range(0, len(flat), ELEMENTS):
        part = flat[start : start + ELEMENTS]
        bad = ~torch.isfinite(part)
        zeros = zeros and not bool(part.any())
        if bool(bad.any()):
            count = int(torch.isnan(part).sum())
            nans, infinities = nans + count, infinities + int(bad.sum()) - count
            first = first if first is not None else start + int(bad.nonzero()[0])
    checkpoint.release(name)
    if first is not None:
        position = [first // math.prod(shape[axis + 1 :]) % size for axis, size in enumerate(shape)]
        raise CheckpointError(
            f"{name} has {nans:,} NaN and {infinities:,} infinite of {len(flat):,} values, the first at {position};"
            " the file is damaged, or was written from a broken model"
        )
    return ZEROS if zeros and not name.endswith(".bias") else "finite"


# --------------------------------------------------------------------------------------------------------- helpers
def _outcome(check: str, file: Path, root: Path, look: Callable[[], str]) -> Finding:
    """The finding of a check. Any exception is a finding too, so that no damaged file ends the verification."""
    item = _item(file, root)
    try:
        return Finding(check, "ok", item, look())
    except LlamaError as error:
        message = _without_root(str(error), root).removeprefix(item).removeprefix(":").lstrip()
    except OSError as error:
        message = f"can't be read: {error.strerror or error}"
    except Exception as error:
        message = f"can't be read ({type(error).__name__}: {one_line(str(error))[:160]}); it is damaged"
    return Finding(check, "fail", item, message)


def _without_root(text: str, root: Path) -> str:
    """A message without the path of the folder, which is the same in all messages."""
    if str(root) == ".":
        return text
    return text.replace(f"{root}{os.sep}", "").removeprefix(f"{root}: ").removeprefix(f"{root} ")


def _item(file: Path, root: Path) -> str:
    """The name of a file, or its relative path if it is outside the folder."""
    if file == root:
        return _name(file)
    return file.name if file.parent in (root, Path()) else os.path.relpath(file, root)


def _name(path: Path) -> str:
    return path.name or path.absolute().name or str(path)


def _names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def _is_plain(name: str) -> bool:
    short = len(name.encode(errors="replace")) <= 255  # bytes; file systems allow no longer name
    return short and re.fullmatch(r"[^/\\\0]+", name) is not None and name not in (".", "..")


def _with_all_parts(name: str) -> list[str]:
    """The names of all parts: three for NAME-00002-of-00003.gguf, the name itself if it has no parts."""
    match = PART.fullmatch(name)
    if not match:
        return [name]
    count = int(match[3])
    return [f"{match[1]}-{i + 1:05d}-of-{match[3]}{match[4]}" for i in range(max(1, min(count, 9999)))]
