"""The models on this machine: the default model, and those in the cache of the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError, UsageError
from ..system.folders import cache_folder
from . import models
from .repository import OTHER_GGUF, HubId, find_cached, hub_id, store, with_all_parts


class Local(NamedTuple):
    """A complete model. `used` is the time of the last access to its files, in seconds since 1970."""

    name: str
    path: Path
    format: str  # as in convert --to, or meta
    bytes: int
    used: float


def found() -> list[Local]:
    """The models that a command finds by name without the network, the last used one first."""
    path = models.find(models.DEFAULT)
    own = [] if path is None else [_local(models.DEFAULT, path, [path])]
    return sorted([*own, *_shared()], key=lambda local: (-local.used, local.name))


def _shared() -> Iterator[Local]:
    """The models in the hub's cache: for each repository, the model that its name means, and every GGUF model."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repo in (repo for repo in repos if repo.repo_type == "model"):
        for ref, revision in repo.refs.items():
            files = [file.file_path for file in revision.files]
            inside = [path.relative_to(revision.snapshot_path).as_posix() for path in files]
            quants = sorted(name for name in inside if name.endswith(".gguf") and not OTHER_GGUF.search(name))
            names: dict[Path, str] = {}  # path -> the shortest name
            for id in (HubId(repo.repo_id, name, ref) for name in ("", *quants)):
                if path := find_cached(id):
                    names.setdefault(path, str(id))
            for path, name in names.items():
                parts = [path.with_name(part) for part in with_all_parts([path.name])]
                yield _local(name, path, parts if path.suffix == ".gguf" else [x for x in files if x.suffix != ".gguf"])


def _local(name: str, path: Path, files: list[Path]) -> Local:
    kind = "gguf" if path.suffix == ".gguf" else "meta" if (path / "params.json").exists() else "hf"
    facts = [file.stat() for file in files]
    return Local(name, path, kind, sum(fact.st_size for fact in facts), max(fact.st_atime for fact in facts))


def removable(name: str) -> tuple[list[Path], int, bool]:
    """The files or the folder of a model in a cache, their bytes, and whether the cache is the hub's.

    Raises UsageError if they may not be removed.
    """
    id = hub_id(name)
    if id is None and name != models.DEFAULT:
        raise UsageError(f"{name!r} is no name of a model in a cache; clearllama list shows the names")
    root = cache_folder() / models.FILE if id is None else store(id)
    found = find_cached(id) if id is not None and id != HubId(id.repo) else root
    if found is None or not os.path.lexists(found):
        raise CheckpointError(f"there is no {name} in {root}; clearllama list shows the models on this machine")
    if found not in (root, found.with_suffix(".gguf")):
        raise UsageError(f"only a GGUF model or the whole repository can be removed: clearllama rm {id and id.repo}")
    paths = [found] if found == root else [found.with_name(part) for part in with_all_parts([found.name])]
    for path in paths:
        if root.is_symlink() or root.resolve() not in (path.resolve(), *path.resolve().parents):
            raise UsageError(f"{path} is a symbolic link to {os.path.realpath(path)}; remove it yourself")
    files = [root, *root.rglob("*")]
    if found != root:  # the hub's cache has links to blobs; revisions with the same file link to the same blob
        blobs = {path.resolve() for path in paths}
        paths = files = [*paths, *(file for file in files if file.resolve() in blobs and file not in paths)]
    size = sum(file.lstat().st_size for file in files if file.is_file() and not file.is_symlink())
    return paths, size, id is not None
