"""List the files of a checkpoint, compare their checksums, and open it.

Loading does not check the data of the weights: a flipped bit changes the model without an error. Here every byte that
has a known checksum is read.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint import open_checkpoint
from ..errors import CheckpointError, DamagedError
from ..hub import models as hub
from ..system.documents import start_of
from .doctor import Finding, check
from .model_facts import model_facts

TORCH = (".pth", ".pt", ".bin")
WEIGHTS = (*TORCH, ".safetensors", ".gguf")
ALGORITHMS = {32: "md5", 40: "git", 64: "sha256"}  # length of a checksum -> algorithm; "git" is git's object id

Sum = tuple[Path, str, str]  # file, checksum, source of the checksum


def verify(path: Path) -> Iterator[Finding]:
    """Check a folder in Meta's or Hugging Face's format, a GGUF file or a set of GGUF files. Yield the findings."""
    files = find_files(path)
    sums: list[Sum] = []
    for file in (file for file in files if file.suffix == ".chk"):
        if (found := check("sums", file.name, partial(read_checksums, file, sums))).status == "fail":
            yield found
    yield from (check("files", file.name, partial(describe, file)) for file in files)
    yield from (check("crc32", file.name, partial(check_archive, file)) for file in files if file.suffix in TORCH)
    sums += [(file, value, "the hub") for file in files if (value := hub_checksum(file))]
    for file, value, source in sums:
        yield check(ALGORITHMS[len(value)], file.name, partial(compare, file, value, source))
    known = {file for file, *_ in sums}
    wanted = [file for file in files if file.suffix in (*WEIGHTS, ".model") or file.name == "tokenizer.json"]
    if bare := [file.name for file in wanted if file not in known]:
        yield Finding("warn", "sums", ", ".join(bare), "not verified: no checksum is known")
    yield from open_and_compare(path)


# --------------------------------------------------------------------------------------------------------- the files
def find_files(path: Path) -> list[Path]:
    """The existing files of the checkpoint at `path`: weights, documents, tokenizer, checklists."""
    if not path.is_dir():  # find all files of a set
        return sorted(path.parent.glob(re.sub(r"-\d{5}-of-", "-?????-of-", glob.escape(path.name))))
    found = sorted(path.iterdir())
    if not any((path / name).exists() for name in ("tokenizer.model", "tokenizer.json")):  # Meta's Llama 1 and 2
        found += sorted(path.absolute().parent.glob("tokenizer*"))
    return [file for file in found if file.suffix in (*WEIGHTS, ".json", ".model", ".chk") and file.is_file()]


def describe(file: Path) -> str:
    """The size of a file. Raises CheckpointError if the file is a failed download."""
    start_of(file)
    return f"{file.stat().st_size:,} bytes"


# ----------------------------------------------------------------------------------------------------- the checksums
def check_archive(file: Path) -> str:
    """Compare the CRC-32 of every record in a file of torch.save."""
    if not zipfile.is_zipfile(file):
        return "not an archive, so it has no checksums"
    with zipfile.ZipFile(file) as archive:
        if not any(record.CRC for record in archive.infolist()):  # torch.serialization.set_crc32_options(False)
            return "no record has a checksum"
        if damaged := archive.testzip():
            raise DamagedError(f"the CRC-32 of {damaged} differs")
        return f"all {len(archive.infolist()):,} records"


def read_checksums(checklist: Path, sums: list[Sum]) -> str:
    """Add the checksums of a list that md5sum or sha256sum wrote to `sums`. Raises CheckpointError for a wrong line."""
    for number, line in enumerate(checklist.read_text(encoding="utf-8").splitlines(), 1):
        if match := re.fullmatch(r"([0-9a-fA-F]{32}|[0-9a-fA-F]{64}) [ *]([^/\\]+)", line):
            sums.append((checklist.with_name(match[2]), match[1].lower(), checklist.name))
        elif line.strip() and not line.startswith("#"):
            raise CheckpointError(f"line {number} is {line!r:.60}; expected a checksum, two spaces and a file name")
    return "read"


def hub_checksum(file: Path) -> str | None:
    """The checksum that the Hugging Face library recorded for a file, or the default model's; None if unknown.

    In the library's cache, a file is a link to ../../blobs/CHECKSUM; in another folder, the library records the
    checksum in .cache/huggingface/download. It is the sha256 of a large file, and git's object id of a small one.
    """
    record, value = file.parent / ".cache/huggingface/download" / f"{file.name}.metadata", ""
    if file.is_symlink() and Path(os.readlink(file)).parent.name == "blobs":
        value = Path(os.readlink(file)).name
    elif record.is_file():
        value = [*record.read_text(errors="replace").splitlines(), "", ""][1]
    if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", value):
        return value
    return hub.SHA256 if (file.name, file.stat().st_size) == (hub.FILE, hub.SIZE) else None


def compare(file: Path, expected: str, source: str) -> str:
    """Compute the checksum of a file. Raises CheckpointError if it differs from the expected checksum."""
    if not file.exists():
        raise CheckpointError(f"the file is missing, but {source} lists it")
    algorithm, head = ALGORITHMS[len(expected)], b"blob %d\0" % file.stat().st_size
    with open(file, "rb") as opened:
        found = hashlib.file_digest(opened, partial(hashlib.sha1, head) if algorithm == "git" else algorithm)
    if found.hexdigest() != expected:
        raise DamagedError(f"{source} has {expected}, but the file has {found.hexdigest()}")
    return f"{expected}, as in {source}"


# ---------------------------------------------------------------------------------------------------- as a checkpoint
def open_files(path: Path, facts: dict[str, Any]) -> str:
    """Open the checkpoint, and add the facts in its headers to `facts`."""
    facts |= model_facts(checkpoint := open_checkpoint(path))
    return f"{facts['format']}, {facts['parameters']:,} parameters in {len(checkpoint.shapes):,} tensors"


def open_and_compare(path: Path) -> Iterator[Finding]:
    """Open the checkpoint, compare its tensors with its configuration, and compare its tokenizer with its embedding."""
    item, facts = path.absolute().name, dict[str, Any]()
    opened = check("open", item, partial(open_files, path, facts))
    if not facts.get("mismatches"):
        yield opened
    if opened.status == "fail":
        return
    for fault in facts["mismatches"]:
        yield Finding("fail", "open", item, fault)
    for warning in facts["warnings"]:
        yield Finding("warn", "open", item, warning)
    if "tokens" in facts:
        rows = f"{facts['tokens']:,} tokens for {facts['vocab_size']:,} rows of the embedding"
        yield Finding("ok", "tokenizer", item, f"{facts['tokenizer']}, {rows}")
    else:
        yield Finding("fail", "tokenizer", item, facts["tokenizer"])
