"""Find the tokenizer of a checkpoint whose folder has none: some downloads put it elsewhere, or users move it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ..errors import TokenizerError
from ..tokenizer import is_tokenizer

MOST_FOLDERS = 100  # the most folders that are searched in one place
REMEDY = "name one with --tokenizer PATH"


def find_tokenizer(folder: Path, names: Sequence[str]) -> Path:
    """Find a tokenizer file in a subfolder, else in the parent folder.

    names  the names of tokenizer files; the first in a folder is used

    Sibling folders are not searched: another model's tokenizer may have the same number of tokens. Raises
    TokenizerError if there is none, or if the first place that has any has different ones.
    """
    for place in (folders_in(folder), [folder.parent]):
        found: dict[str, Path] = {}
        for file in filter(None, (_file_in(one, names) for one in place)):
            with open(file, "rb") as opened:
                found.setdefault(hashlib.file_digest(opened, "sha256").hexdigest(), file)
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            paths = " and ".join(str(path) for path in list(found.values())[:4])
            raise TokenizerError(f"{folder} has no tokenizer, and those near it differ: {paths}; {REMEDY}")
    raise TokenizerError(
        f"{folder}: there is no {' or '.join(names)} in this folder or near it; copy the one that was published with"
        f" the weights, or {REMEDY}"
    )


def _file_in(folder: Path, names: Sequence[str]) -> Path | None:
    return next((path for name in names if (path := folder / name).is_file() and is_tokenizer(path)), None)


def folders_in(folder: Path) -> list[Path]:
    """The first MOST_FOLDERS subfolders that are not hidden; none if the folder can't be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.name[:1] != "." and path.is_dir())[:MOST_FOLDERS]
    except OSError:
        return []
