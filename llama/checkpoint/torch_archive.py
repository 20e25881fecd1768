"""Read the table of contents of a torch file: a zip archive of uncompressed records in one folder.

A zip archive describes each record twice: in a header before the record, and in the table at the end of the file. If
the two differ, some readers use one and some the other. Here the two must agree, no two records may share bytes, and
records of a kind that torch never writes are refused. Only headers are read.
Format: PKWARE's APPNOTE, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..errors import CheckpointError

ZIP = b"PK\x03\x04"
LOCAL, CENTRAL = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
END, LOCATOR, END64 = struct.Struct("<4s4H2IH"), struct.Struct("<4sIQI"), struct.Struct("<4sQ2H2I4Q")
ENCRYPTED, SIZES_FOLLOW = 0x2041, 0x8  # bits of a record's flags
MOST_16, MOST_32 = 2**16 - 1, 2**32 - 1  # these values mean that a 64-bit field has the real one
NEWEST = 45  # version 4.5 of the format, the first with 64-bit numbers
MOST_RECORDS, LARGEST_TABLE = 2**15, 2**23  # a model of 405B parameters has 1,200 records in 0.1 million bytes


class Record(NamedTuple):
    """The bytes of a record in the archive, and their CRC-32; 0 if torch was told to compute none."""

    start: int
    size: int
    crc: int

    def read(self, file: BinaryIO) -> bytes:
        file.seek(self.start)
        return file.read(self.size)


class _Entry(NamedTuple):
    """An entry of the table. offset: position of the header before the record's bytes."""

    name: bytes
    offset: int
    size: int
    packed: int
    crc: int
    flags: int
    method: int
    mode: int


def read_records(file: BinaryIO, path: Path, size: int) -> dict[str, Record]:
    """The records of an archive of `size` bytes, by name without the folder. Raises CheckpointError."""
    try:
        start, length, count = _find_table(file, size)
        if length > LARGEST_TABLE or count > MOST_RECORDS:
            raise CheckpointError(
                f"{path}: the table of contents lists {count:,} records in {length:,} bytes, more than any LLaMA has;"
                " the file is forged or damaged, download it again"
            )
        file.seek(start)
        found: dict[str, Record] = {}
        end = 0
        for entry in sorted(_entries(file.read(length), count), key=lambda entry: entry.offset):
            name = entry.name.decode()
            if why := _unusual(entry) or ("present twice" if name in found else ""):
                raise CheckpointError(
                    f"{path}: the record {name!r:.80} is {why}, which torch never writes; the file is forged, or was"
                    " packed by another program; download it again, or save it with torch.save"
                )
            if entry.offset < end:
                raise ValueError("records overlap")
            found[name] = record = Record(_start(file, entry), entry.size, entry.crc)
            end = record.start + record.size
        if end > start:
            raise ValueError("a record overlaps the table")
    except (ValueError, struct.error) as error:  # UnicodeDecodeError is a ValueError
        raise CheckpointError(
            f"{path}: the table of contents at the end of the archive, which has {size:,} bytes, is missing or does not"
            f" match the records ({error}); the file is truncated or damaged, download it again"
        ) from None
    folders = {name.partition("/")[0] for name in found}
    if len(folders) != 1 or not all("/" in name and name.isprintable() for name in found):
        raise CheckpointError(
            f"{path} is a zip archive that was not written by torch; unpack it, or download the weights again"
        )
    return {name.partition("/")[2]: record for name, record in found.items()}


def _find_table(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """Offset of the table, its length in bytes and its number of records. The end record follows the table."""

    def unpack(form: struct.Struct, at: int, sign: bytes) -> tuple[int, ...]:
        file.seek(max(at, 0))
        found, *values = form.unpack(file.read(form.size))
        if at < 0 or found != sign:
            raise ValueError("no end record")
        return tuple(values)

    at = size - END.size
    small = unpack(END, at, b"PK\x05\x06")
    disk, table_disk, here, count, length, start, comment = small
    try:
        locator = unpack(LOCATOR, at - LOCATOR.size, b"PK\x06\x07")
    except (ValueError, struct.error):
        locator = None
    if locator is not None:  # it points to an end record with 64-bit numbers, which torch always writes
        at = locator[1]
        rest, _, _, disk, table_disk, here, count, length, start = unpack(END64, at, b"PK\x06\x06")
        large = (0, 0, min(count, MOST_16), min(count, MOST_16), min(length, MOST_32), min(start, MOST_32), 0)
        if locator[0] or locator[2] != 1 or rest != END64.size - 12 or small != large:
            raise ValueError("two end records that differ")
        if at + END64.size + LOCATOR.size + END.size != size:
            raise ValueError("bytes between the end records")
    if disk or table_disk or here != count or comment or start + length != at:
        raise ValueError("a wrong end record")
    return start, length, count


def _entries(table: bytes, count: int) -> Iterator[_Entry]:
    at = 0
    for _ in range(count):
        sign, _, need, flags, method, _, _, crc, packed, size, n_name, n_extra, n_comment, disk, _, mode, offset = (
            CENTRAL.unpack_from(table, at)
        )
        name, end = at + CENTRAL.size, at + CENTRAL.size + n_name + n_extra + n_comment
        if sign != b"PK\x01\x02" or need > NEWEST or disk or end > len(table):
            raise ValueError("a wrong entry")
        wide = [value == MOST_32 for value in (size, packed, offset)]
        if any(wide):
            values = iter(_wide(table[name + n_name : name + n_name + n_extra], sum(wide)))
            size, packed, offset = (
                next(values) if is_wide else value for is_wide, value in zip(wide, (size, packed, offset), strict=True)
            )
        yield _Entry(table[name : name + n_name], offset, size, packed, crc, flags, method, mode)
        at = end
    if at != len(table):
        raise ValueError("the table has more than its entries")


def _wide(extra: bytes, count: int) -> tuple[int, ...]:
    """The 64-bit numbers in an entry's extra fields."""
    while extra:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            return struct.unpack_from(f"<{count}Q", extra[4 : 4 + length])
        extra = extra[4 + length :]
    raise ValueError("no 64-bit field")


def _unusual(entry: _Entry) -> str:
    """What is wrong with a record; "" for an ordinary one."""
    kind = stat.S_IFMT(entry.mode >> 16)
    if kind not in (0, stat.S_IFREG) or entry.name.endswith(b"/"):
        return "a link, a folder or a device"
    if entry.flags & ENCRYPTED:
        return "encrypted"
    return "compressed" if entry.method or entry.packed != entry.size else ""


def _start(file: BinaryIO, entry: _Entry) -> int:
    """Offset of a record's bytes. Raises ValueError if its own header differs from the entry in the table."""
    file.seek(entry.offset)
    sign, _, flags, method, _, _, crc, packed, size, n_name, n_extra = LOCAL.unpack(file.read(LOCAL.size))
    known = [(entry.crc, min(entry.size, MOST_32), min(entry.size, MOST_32)), (entry.crc, MOST_32, MOST_32)]
    if flags & SIZES_FOLLOW:
        known.append((0, 0, 0))
    if (sign, flags, method) != (ZIP, entry.flags, entry.method) or (crc, packed, size) not in known:
        raise ValueError("a record's header differs from the table")
    if file.read(n_name) != entry.name:
        raise ValueError("a record has two names")
    return entry.offset + LOCAL.size + n_name + n_extra
