"""Is a checkpoint that was downloaded whole and right? Everything that can be told, also where it can't be opened.

Loading trusts the data of the weights: a flipped bit there gives another model and no error. Here every byte is read
and held against what the files say of themselves and of each other: sizes, checksums, names.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from ..checkpoint import Checkpoint, gguf, huggingface, meta, open_checkpoint, torchfile
from ..checkpoint.documents import read_json, size_of
from ..checkpoint.safetensors_header import read_header
from ..errors import CheckpointError, LlamaError, TokenizerError, UsageError
from ..hub import named as hub
from ..tokenizer import open_tokenizer
from ..weights import mismatches

Status = Literal["ok", "warn", "fail"]
# (what is being read, bytes or weights done, of how many)
Progress = Callable[[str, int, int], None]

CHUNK = 2**20  # bytes of a file in memory at a time
ELEMENTS = 2**22  # numbers of a weight looked at at a time
LARGEST_CHECKLIST = 2**20

TORCH = (".pth", ".pt", ".bin")
WEIGHTS = (*TORCH, ".safetensors", ".gguf")
CHECKLIST, TOKENIZER_CHECKLIST = "checklist.chk", "tokenizer_checklist.chk"
# The JSON files that are read here; others in a folder may hold anything.
DOCUMENTS = (
    meta.PARAMS, huggingface.CONFIG, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "tokenizer.json", huggingface.INDEX, huggingface.BIN_INDEX,
)  # fmt: skip
UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2")
SHARD = re.compile(r"consolidated\.(\d{1,4})\.pth")
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf|\.safetensors|\.bin)")

# format -> names that tell it, also where others are missing
SIGNS = {
    "Hugging Face": re.compile(r"config\.json|.+\.safetensors|.+\.index\.json|pytorch_model.*\.bin"),
    "Meta": re.compile(r"params\.json|consolidated\.\d+\.pth|checklist\.chk"),
    "GGUF": re.compile(r".+\.gguf"),
}


@dataclass(frozen=True)
class Finding:
    """The outcome of one check of one thing.

    check    files, size, md5, sha256, sums, crc, json, open, tokenizer, tensors
    status   "ok"; "warn": nothing is known to be wrong and a user should hear of it; "fail"
    item     the file or tensor that was looked at
    message  what was found; where it failed also what was expected and what to do
    """

    check: str
    status: Status
    item: str
    message: str


@dataclass(frozen=True)
class Sum:
    """A checksum that somebody published: of which file, and where that is said."""

    file: Path
    algorithm: Literal["md5", "sha256", "git"]
    value: str
    source: str


def _silent(what: str, done: int, total: int) -> None:
    pass


def verify(path: Path, tensors: bool = False, progress: Progress = _silent) -> Iterator[Finding]:
    """Check a folder of Meta's or Hugging Face's, a GGUF file or a split set; each finding comes when it is known.

    tensors  also read every weight, for numbers that are not finite and matrices of zeros

    Memory holds one weight at most. Raises CheckpointError where there is nothing at `path`, UsageError where it is
    one file of a folder.
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
    """What the files are or would be if they were whole: "Hugging Face", "Meta", "GGUF" or "unknown"."""
    if not path.is_dir():
        return "GGUF"
    names = _names(path)
    return next((form for form, sign in SIGNS.items() if any(map(sign.fullmatch, names))), "unknown")


def find_files(path: Path) -> list[Path]:
    """The files of the checkpoint at `path` that are there: weights, documents, tokenizer, checklists."""
    if path.is_dir():
        known = (*WEIGHTS, ".json", ".model", ".chk")
        files = [file for file in sorted(path.iterdir()) if file.suffix in known and file.is_file()]
        tokenizer = find_tokenizer(path)
        return files if tokenizer is None or tokenizer in files else [*files, tokenizer]
    if not path.exists():
        raise CheckpointError(f"there is no file or folder {str(path)!r}")
    if not path.is_file():
        raise CheckpointError(f"{path} is neither a regular file nor a folder")
    if path.suffix in (*TORCH, ".safetensors", ".json", ".model", ".chk"):
        raise UsageError(f"{path} is one file of a checkpoint that is a folder; name the folder: {path.parent}")
    return [path.with_name(name) for name in _with_all_parts(path.name) if path.with_name(name).is_file()]


def find_tokenizer(folder: Path) -> Path | None:
    """The tokenizer's file in a folder; for Meta's LLaMA 1 and 2 it lies in the one above."""
    if format_of(folder) == "Meta":
        places = [folder / "tokenizer.model", folder.parent / "tokenizer.model", folder / "tokenizer.json"]
    else:
        places = [folder / "tokenizer.json", folder / "tokenizer.model"]
    return next((place for place in places if place.is_file()), None)


# ------------------------------------------------------------------------------------------------- what is there
def check_presence(path: Path) -> Iterator[Finding]:
    """Names: what others say should be there, links that lead nowhere, leftovers of downloads."""
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
        yield Finding("files", "fail", file.name, f"is a link to {where}, where nothing is; fetch it again")
    for name, why in missing.items():
        yield Finding("files", "fail", name, f"is missing ({why}); fetch it")
    if not missing and not links and format_of(path) != "unknown":
        yield Finding("files", "ok", _name(path), f"{format_of(path)}; no file is known to be missing")
    for file in leftovers(path) if path.is_dir() else []:
        rest = f"{file.stat().st_size:,} bytes of a download that did not end; resume it, or remove them if all is here"
        yield Finding("files", "warn", file.name, rest)


def missing_files(folder: Path) -> dict[str, str]:
    """Files that should be in a folder by what else is in it -> how that is known."""
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
    """The plain file names in an index. One that can't be read names none here, and fails where it is read."""
    try:
        places = read_json(index).get("weight_map")
    except CheckpointError:
        return set()
    values = places.values() if isinstance(places, dict) else ()
    return {name for name in values if isinstance(name, str) and _is_plain(name)}


def leftovers(folder: Path) -> list[Path]:
    """Unfinished files: in the folder, and where the Hugging Face library keeps them."""
    found = [file for file in sorted(folder.iterdir()) if file.suffix in UNFINISHED and file.is_file()]
    found += sorted((folder / ".cache" / "huggingface" / "download").glob("**/*.incomplete"))
    for place in (folder, *folder.absolute().parents):
        if place.parent.name == "snapshots":
            found += sorted((place.parent.parent / "blobs").glob("*.incomplete"))
    return found


# --------------------------------------------------------------------------------------- each file, by its own word
def check_size(file: Path, root: Path) -> Finding:
    """A file's first bytes, and its size against what its own header says."""

    def look() -> str:
        with open(file, "rb") as opened:
            torchfile.refuse_mistakes(file, opened.read(64))
        if file.suffix == ".safetensors":
            header = read_header(file)
            return f"{file.stat().st_size:,} bytes, as its header says: {len(header.tensors):,} tensors"
        if file.suffix in TORCH:
            return torch_size(file)
        if file.suffix in (".json", ".model", ".chk"):
            return f"{file.stat().st_size:,} bytes"
        tensors = gguf.Part(file).header.tensors
        return f"{file.stat().st_size:,} bytes, as its header says: {len(tensors):,} tensors"

    return _outcome("size", file, root, look)


def torch_size(file: Path) -> str:
    """What there is to say of the size of a torch file. Raises CheckpointError unless its archive has an end."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        start = opened.read(4)
    if start[:2] == torchfile.PICKLE:
        return f"{size:,} bytes; an old torch file, which does not say how many there should be"
    if start != torchfile.ZIP:
        raise CheckpointError(f"{file} is not a torch file: it begins with {start!r}; fetch it again")
    try:
        with zipfile.ZipFile(file) as archive:
            return f"{size:,} bytes, {len(archive.infolist()):,} records to the end of the archive"
    except zipfile.BadZipFile:
        raise CheckpointError(
            f"{file} is cut off or damaged: after {size:,} bytes its archive has no end; fetch it again"
        ) from None


def check_total_size(folder: Path, sound: list[Path]) -> Iterator[Finding]:
    """The bytes that the index of a Hugging Face folder announces against those in its files."""
    index = folder / huggingface.INDEX
    names = indexed(index) if index in sound else set()
    shards = [file for file in sound if file.name in names]
    if not names or len(shards) != len(names):
        return
    announced = read_json(index).get("metadata")
    expected = announced.get("total_size") if isinstance(announced, dict) else None
    found = sum(entry.end - entry.begin for file in shards for entry in read_header(file).tensors.values())
    if expected is None:
        yield Finding("size", "warn", index.name, "does not say the total size of the weights")
    elif expected == found:
        yield Finding("size", "ok", index.name, f"{found:,} bytes of weights in {len(shards)} files, as it says")
    else:
        message = (
            f"says {expected!r:.40} bytes of weights and the files hold {found:,}; they may be of different versions"
        )
        yield Finding("size", "warn", index.name, message)


def check_records(file: Path, root: Path, progress: Progress = _silent) -> Finding:
    """The CRC-32 of every record in a torch file's archive: it finds a flipped bit, which loading does not."""

    def read() -> str:
        damaged, done = [], 0
        with open(file, "rb") as opened:
            if opened.read(4) != torchfile.ZIP:
                return UNCHECKED
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            total = sum(record.file_size for record in records)
            if not any(record.CRC for record in records):  # torch.serialization.set_crc32_options(False)
                return UNCHECKED
            if total > file.stat().st_size:
                raise CheckpointError(f"{file} claims {total:,} bytes of records, more than it has; it is forged")
            for record in records:
                try:
                    with archive.open(record) as stream:
                        while chunk := stream.read(CHUNK):
                            done += len(chunk)
                            progress(f"crc {file.name}", done, total)
                except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
                    damaged.append(record.filename)
        if damaged:
            raise CheckpointError(
                f"{file}: of {len(records):,} records {len(damaged):,} are not what their CRC-32 says they were:"
                f" {', '.join(damaged[:3])}{', ...' * (len(damaged) > 3)}; the file is damaged, fetch it again"
            )
        return f"{len(records):,} records are what their CRC-32 says"

    finding = _outcome("crc", file, root, read)
    return Finding("crc", "warn", finding.item, UNCHECKED) if finding.message == UNCHECKED else finding


UNCHECKED = "not verified: the file was written without checksums"


def check_document(file: Path, root: Path) -> Finding:
    """Whether a JSON file can be read."""
    return _outcome("json", file, root, lambda: f"{len(read_json(file)):,} entries")


# -------------------------------------------------------------------------------------------- published checksums
def check_sums(files: list[Path], root: Path, progress: Progress = _silent) -> Iterator[Finding]:
    """Every checksum that is known against the file; then the weights and tokenizers of which none is known."""
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
        why = f"no {CHECKLIST} and no cache of the hub's says which bytes were published"
        yield Finding("sums", "warn", names, f"not verified: {why}")


def find_checklists(files: list[Path], root: Path) -> list[Path]:
    """The lists of checksums; that of a tokenizer in the folder above lies there too."""
    lists = [file for file in files if file.suffix == ".chk"]
    for file in files:
        if file.parent != root and (file.parent / TOKENIZER_CHECKLIST).is_file():
            lists.append(file.parent / TOKENIZER_CHECKLIST)
    return lists


def read_checklist(path: Path) -> tuple[list[Sum], list[str]]:
    """(the checksums of a list as md5sum writes it, what is wrong with its other lines)."""
    try:
        size = size_of(path)
        text = path.read_text(encoding="utf-8") if size <= LARGEST_CHECKLIST else None
    except CheckpointError as error:
        return [], [str(error)]
    except UnicodeDecodeError:
        return [], ["is not UTF-8; it is damaged, fetch it again"]
    except OSError as error:
        return [], [f"can't be read: {error.strerror or error}"]
    if text is None:
        return [], [f"has {size:,} bytes, and a checklist a few hundred; it is something else, fetch it again"]
    sums, faults = [], []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.fullmatch(r"([0-9a-fA-F]{32}) [ *](.+)", line)
        if match and _is_plain(match[2]):
            sums.append(Sum(path.parent / match[2], "md5", match[1].lower(), path.name))
        elif match:
            faults.append(f"line {number} names {match[2]!r:.60}, which is no plain file name; it is not followed")
        elif line.strip() and not line.startswith("#"):
            faults.append(f"line {number} is {line!r:.60}; expected an md5, two spaces and a name: fetch it again")
    if not sums and not faults:
        faults.append("lists no file; it is damaged, fetch it again")
    return sums, faults


def cache_sum(file: Path) -> Sum | None:
    """The checksum that the Hugging Face hub gave for a file, where its library noted it; or that of a named model.

    In the library's cache a file is a link to ../../blobs/CHECKSUM; in a folder of one's own the library notes it in
    .cache/huggingface/download. Large files have a sha256, small ones the number that git gives them.
    """
    value, note = "", file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    if file.is_symlink():
        target = Path(os.readlink(file))
        value = target.name if target.parent.name == "blobs" else ""
    elif note.is_file() and note.stat().st_size < LARGEST_CHECKLIST:
        lines = note.read_text(errors="replace").splitlines()
        value = lines[1] if len(lines) > 1 else ""
    if re.fullmatch(r"[0-9a-f]{64}", value):
        return Sum(file, "sha256", value, "the Hugging Face hub")
    if re.fullmatch(r"[0-9a-f]{40}", value):
        return Sum(file, "git", value, "the Hugging Face hub")
    for name, model in hub.MODELS.items():
        if file.name == model.file and file.stat().st_size == model.size:
            return Sum(file, "sha256", model.sha256, f"the list of named models ({name})")
    return None


def _compare(known: Sum, progress: Progress) -> str:
    found = file_sum(known.file, known.algorithm, progress)
    if found != known.value:
        raise CheckpointError(
            f"{known.file}: {known.source} says {known.value} and the file has {found}; it is damaged or of another"
            f" version, fetch it again"
        )
    return f"{found}, as {known.source} says"


def file_sum(file: Path, algorithm: str, progress: Progress = _silent) -> str:
    """md5, sha256, or git's number of a file."""
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


# ---------------------------------------------------------------------------------------------------- as a whole
def check_opening(path: Path) -> tuple[Checkpoint | None, list[Finding]]:
    """Open the checkpoint and hold its tensors against its configuration."""
    item, opened = _name(path), []

    def look() -> str:
        opened.append(open_checkpoint(path))
        return f"{opened[0].format}, {opened[0].config.n_params:,} parameters in {len(opened[0].shapes):,} tensors"

    finding = _outcome("open", path, path, look)
    if not opened:
        return None, [finding]
    checkpoint = opened[0]
    remedy = "files and configuration do not belong together, or one is damaged"
    wrong = [f"{fault}; {remedy}" for fault in mismatches(checkpoint)]
    findings = [Finding("open", "fail", item, fault) for fault in wrong] or [finding]
    return checkpoint, findings + [Finding("open", "warn", item, _relative(text, path)) for text in checkpoint.warnings]


def check_tokenizer(path: Path, checkpoint: Checkpoint | None) -> Finding:
    """Open the tokenizer and hold it against the embedding; alone, where the checkpoint can't be opened."""
    place = find_tokenizer(path) if path.is_dir() else None
    root = path if path.is_dir() else path.parent
    if checkpoint is None and place is None:
        message = "there is none to look at: the checkpoint can't be opened"
        return Finding("tokenizer", "warn" if format_of(path) == "GGUF" else "fail", _name(path), message)
    rows = checkpoint.config.vocab_size if checkpoint else 0
    counts = []

    def look() -> str:
        if checkpoint is not None:
            tokenizer = checkpoint.tokenizer()
        elif place is not None:
            tokenizer = open_tokenizer(place)
        else:
            raise TokenizerError(f"{path}: there is no tokenizer")
        counts.append(tokenizer.n_vocab)
        return f"{tokenizer.kind}, {tokenizer.n_vocab:,} tokens" + f" for {rows:,} rows of the embedding" * bool(rows)

    finding = _outcome("tokenizer", place or path, root, look)
    if counts and counts[0] < 0.75 * rows:  # models pad to round numbers, by less than this
        message = f"has {counts[0]:,} tokens and the embedding {rows:,} rows; it may belong to another model"
        return Finding("tokenizer", "warn", finding.item, message)
    return finding


def check_weights(checkpoint: Checkpoint, progress: Progress = _silent) -> Iterator[Finding]:
    """Read every weight, one at a time: numbers that are not finite fail, matrices of zeros are worth a warning."""
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
        yield Finding("tensors", "ok", _name(checkpoint.path), f"all numbers of {sound:,} tensors are finite")


ZEROS = "holds nothing but zeros; a part of the file may never have been written"


def describe_weight(checkpoint: Checkpoint, name: str) -> str:
    """ZEROS or "finite". Raises CheckpointError with the count and the place of numbers that are neither."""
    numbers = checkpoint.tensor(name)
    shape, flat = tuple(numbers.shape), numbers.reshape(-1)
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
        place = [first // math.prod(shape[axis + 1 :]) % size for axis, size in enumerate(shape)]
        raise CheckpointError(
            f"{name} holds {nans:,} NaN and {infinities:,} infinite of {len(flat):,} numbers, the first at {place};"
            f" the file is damaged, or was written from a broken model"
        )
    return ZEROS if zeros and not name.endswith(".bias") else "finite"


# ------------------------------------------------------------------------------------------------------- in common
def _outcome(check: str, file: Path, root: Path, look: Callable[[], str]) -> Finding:
    """What a look at something says, or its failure in words: no damaged file may end the whole examination."""
    item = _item(file, root)
    try:
        return Finding(check, "ok", item, look())
    except LlamaError as error:
        message = _relative(str(error), root).removeprefix(item).removeprefix(":").lstrip()
    except OSError as error:
        message = f"can't be read: {error.strerror or error}"
    except Exception as error:
        message = f"can't be read ({type(error).__name__}: {' '.join(str(error).split())[:160]}); it is damaged"
    return Finding(check, "fail", item, message)


def _relative(text: str, root: Path) -> str:
    """A message without the folder that all of them are about."""
    if str(root) == ".":
        return text
    return text.replace(f"{root}{os.sep}", "").removeprefix(f"{root}: ").removeprefix(f"{root} ")


def _item(file: Path, root: Path) -> str:
    """How a file is called: by its name, with the way to it if it lies outside the folder."""
    if file == root:
        return _name(file)
    return file.name if file.parent in (root, Path()) else os.path.relpath(file, root)


def _name(path: Path) -> str:
    return path.name or path.absolute().name or str(path)


def _names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def _is_plain(name: str) -> bool:
    short = len(name.encode(errors="replace")) <= 255  # bytes; a longer one no file system has
    return short and re.fullmatch(r"[^/\\\0]+", name) is not None and name not in (".", "..")


def _with_all_parts(name: str) -> list[str]:
    """NAME-00002-of-00003.gguf stands for all three; other names for themselves."""
    match = PART.fullmatch(name)
    if not match:
        return [name]
    count = int(match[3])
    return [f"{match[1]}-{i + 1:05d}-of-{match[3]}{match[4]}" for i in range(max(1, min(count, 9999)))]
