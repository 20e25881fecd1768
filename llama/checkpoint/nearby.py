"""The tokenizer file of a checkpoint whose own folder has none: downloads put it elsewhere, or users moved it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ..errors import TokenizerError
from ..tokenizer import is_tokenizer

MOST_FOLDERS = 100  # folders that are searched at a place
REMEDY = "name one with --tokenizer PATH"


def find_tokenizer(folder: Path, names: Sequence[str]) -> Path:
    """A tokenizer file in a folder below, or in the folder above; the nearer place is used.

    names  the names of tokenizer files; the first in a folder is used

    Folders beside this one are not searched: their tokenizers may be those of other models with as many tokens. Raises
    TokenizerError if there is none, or if a place has different ones.
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
            raise TokenizerError(f"{folder} has no tokenizer, and {paths} differ; {REMEDY}")
    raise TokenizerError(
        f"{folder}: there is no {' or '.join(names)} in it or near it; copy the one that was published with the"
        f" weights, or {REMEDY}"
    )


def _file_in(folder: Path, names: Sequence[str]) -> Path | None:
    return next((path for name in names if (path := folder / name).is_file() and is_tokenizer(path)), None)


def folders_in(folder: Path) -> list[Path]:
    """The first MOST_FOLDERS folders in a folder, without hidden ones; none if it can't be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.name[:1] != "." and path.is_dir())[:MOST_FOLDERS]
    except OSError:
        return []
