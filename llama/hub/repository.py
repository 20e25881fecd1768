"""Repositories of the Hugging Face hub, and their copies in the hub's cache, which other programs share.

huggingface_hub handles tokens, resuming and the links in its cache. This file chooses the files of a repository that
are needed to run it, and turns every error into one line with its remedy. Only `pull` fetches files.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import glob
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, UsageError

# Files of a model other than its weights
DOCUMENTS = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template.jinja")
META_DOCUMENTS = ("params.json", "checklist.chk", "tokenizer*")
META_WEIGHTS = re.compile(r"consolidated\.\d+\.pth|fp8_scales_\d+\.pt")
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")
# (index, the weights in a single file, all weights files), in order of preference
LAYOUTS = (
    ("model.safetensors.index.json", "model.safetensors", "*.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model*.bin"),
)


@dataclass(frozen=True)
class HubId:
    """A repository of the Hugging Face hub, a folder in it or a .gguf file in it (path)."""

    repo: str
    path: str
    revision: str

    def __str__(self) -> str:
        path = f"/{self.path}" if self.path else ""
        return f"{self.repo}{path}{f'@{self.revision}' * (self.revision != 'main')}"


def hub_id(name: str) -> HubId | None:
    """Parse ORG/NAME[/FOLDER or /FILE.gguf][@REVISION]. None if it is not an id, such as ./x or models/x.gguf."""
    match = re.fullmatch(
        r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)((?:/[\w.+ -]+)*)(?:@([\w.-]+(?:/[\w.-]+)*))?", name, re.ASCII
    )
    if not match or any(set(part) == {"."} for part in match[2].split("/") if part):
        return None
    is_file = re.search(r"\.(gguf|pth|pt|bin|safetensors|json|model)$", match[2] or match[1])
    if is_file and (is_file[1] != "gguf" or not match[2]):
        return None
    return HubId(match[1], match[2][1:], match[3] or "main")


def choose(names: Collection[str], indexed: Callable[[str], Collection[str]], where: str) -> list[str]:
    """The files of one folder that form a model this package reads; empty if there is none.

    names    the files in the folder; a file of the result that is not among them is missing
    indexed  returns the files that an index names

    The order of preference is safetensors, .bin, Meta's files, GGUF. Raises CheckpointError if the folder has several
    GGUF models: they are usually one model in different sizes, so the user must choose.
    """

    def matching(*patterns: str) -> list[str]:
        return sorted(name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))

    for index, single, pattern in LAYOUTS if "config.json" in names else ():
        if index in names:
            return [*matching(*DOCUMENTS), index, *sorted(indexed(index))]
        files = [name for name in matching(pattern) if not name.startswith(("adapter_", "consolidated"))]
        if files:
            return [*matching(*DOCUMENTS), *([single] if single in files else _with_all_parts(files))]
    weights = [name for name in sorted(names) if META_WEIGHTS.fullmatch(name)]
    if "params.json" in names and weights:
        return [*matching(*META_DOCUMENTS), *weights]
    models = {match[1] if (match := PART.fullmatch(name)) else name: name for name in matching("*.gguf")}
    if len(models) > 1:
        sizes = ", ".join(sorted(models.values())[:6]) + ", ..." * (len(models) > 6)
        raise CheckpointError(f"{where} has {len(models)} GGUF models ({sizes}); choose one, as in {where}/FILE.gguf")
    return _with_all_parts(matching("*.gguf"))


def _with_all_parts(names: list[str]) -> list[str]:
    """The names, and all parts of a name such as NAME-00002-of-00003.gguf."""
    found = dict.fromkeys(names)
    for name in names:
        if match := PART.fullmatch(name):
            count = min(int(match[3]), 9999)
            found |= dict.fromkeys(f"{match[1]}-{i + 1:05d}-of-{match[3]}{match[4]}" for i in range(count))
    return list(found)


def cached(id: HubId) -> Path | None:
    """The path of a model in the Hugging Face cache, complete or not; None if it is not there."""
    root = _snapshot(id)
    return root / id.path if root and (root / id.path).exists() else None


def _snapshot(id: HubId) -> Path | None:
    """The folder of the repository's revision in the Hugging Face cache, if there is one."""
    if not has_library():
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(id.repo, revision=id.revision, local_files_only=True, allow_patterns=[]))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def unfinished(id: HubId) -> set[Path]:
    """Partial files of this repository that no later download can resume; a download in progress may still write them.

    Older versions of huggingface_hub resume their partial files (ETAG.incomplete), which are excluded. Newer versions
    (ETAG.XXXXXXXX.incomplete) start over.
    """
    if not has_library():
        return set()
    from huggingface_hub import constants

    blobs = Path(constants.HF_HUB_CACHE, f"models--{id.repo.replace('/', '--')}", "blobs")
    return {path for path in blobs.glob("*.incomplete") if re.search(r"\.[0-9a-f]{8}\.incomplete$", path.name)}


def find_cached(id: HubId) -> Path | None:
    """The path of a model in the Hugging Face cache, if it is complete."""
    root, path = _snapshot(id), cached(id)
    if root is None or path is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    for folder in (path.parent,) if path.is_file() else (path, path / "original"):
        names = {file.name for file in folder.iterdir() if file.is_file()} if folder.is_dir() else set()
        if path.is_file():
            chosen = _with_all_parts([path.name])
        else:
            chosen = choose(names, functools.partial(_indexed, folder), str(id))
        if not chosen or not names.issuperset(chosen):
            continue
        prefix = "".join(f"{part}/" for part in folder.relative_to(root).parts)
        meta = "params.json" in chosen
        patterns = (*META_DOCUMENTS, "consolidated.*.pth") if meta else () if _is_gguf(chosen) else DOCUMENTS
        try:  # if the library fetched the repository, it knows which files belong to it
            snapshot_download(
                id.repo,
                revision=id.revision,
                local_files_only=True,
                allow_patterns=[glob.escape(prefix) + pattern for pattern in patterns],
            )
        except LocalEntryNotFoundError:
            continue
        return _model_path(folder, chosen)
    return None


def pull_repository(id: HubId, force: bool, meta: bool, quiet: bool) -> Path:
    """Fetch the needed files of a repository into the hub's cache. Returns its folder there, or its .gguf file.

    meta fetches Meta's own files from the folder original/. Raises CheckpointError or UsageError with the remedy.
    """
    if not has_library():
        raise CheckpointError(
            f"fetching {id} from the Hugging Face hub needs a package that is not installed:"
            f" pip install 'clearllama[hub]'"
        )
    try:
        with _library_output(quiet):
            return _download(id, force, meta, quiet)
    except CheckpointError:
        raise
    except Exception as error:
        local = HubId(id.repo, id.path or "original" * meta, id.revision)
        path = find_cached(local) if _is_unreachable(error) and not force else None
        if path is None:
            raise _explained(error, id) from error
        if not quiet:
            print(f"the hub can't be reached ({short(error)}); using the complete local copy", file=sys.stderr)
        return path


def _download(id: HubId, force: bool, meta: bool, quiet: bool) -> Path:
    """Fetch the needed files. Raises the library's errors, and CheckpointError if there is no model to fetch."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    info = HfApi().model_info(id.repo, revision=id.revision, files_metadata=True, timeout=30)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}

    def indexed(path: str) -> Collection[str]:
        file = Path(hf_hub_download(id.repo, path, revision=info.sha, force_download=force))
        return _indexed(file.parent, file.name)

    prefix, chosen = _choose_remote(id, sizes, meta, indexed)
    paths = [prefix + name for name in chosen]
    total = _check_space(id, {path: sizes[path] for path in paths}, info.sha, force)
    if not quiet:
        count = f"{len(paths)} file{'s' * (len(paths) > 1)}"
        print(f"fetching {id} ({count}, {total / 10**6:,.0f} MB to download)", file=sys.stderr)
    folder = snapshot_download(
        id.repo,
        revision=id.revision,
        allow_patterns=[glob.escape(path) for path in paths],
        force_download=force,
    )
    return _model_path(Path(folder, prefix), chosen)


def _choose_remote(
    id: HubId, names: Collection[str], meta: bool, indexed: Callable[[str], Collection[str]]
) -> tuple[str, list[str]]:
    """The folder in the repository (with a trailing slash), and the files to fetch from it."""
    folder, _, file = id.path.rpartition("/") if id.path.endswith(".gguf") else (id.path, "", "")
    if meta and not folder and any(name.startswith("original/") for name in names):
        folder = "original"
    prefix = f"{folder}/" if folder else ""
    here = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    here = {name for name in here if "/" not in name}
    if meta:
        here -= {"config.json"}
    if file:
        chosen = _with_all_parts([file])
    else:
        chosen = choose(here, lambda index: indexed(prefix + index), f"{id.repo}{f'/{folder}' * bool(folder)}")
    if meta and "params.json" not in chosen:
        chosen = []
    if not chosen or (file and not here):
        inside = {name.rpartition("/")[0] for name in names if re.search(r"(^|/)(params\.json|[^/]+\.gguf)$", name)}
        deeper = sorted(inside - {folder, ""})
        hint = f"; there may be one in {', '.join(f'{id.repo}/{name}' for name in deeper[:4])}" if deeper else ""
        expected = "params.json with consolidated.00.pth" if meta else (
            "config.json with safetensors or .bin, params.json with .pth, or .gguf")  # fmt: skip
        raise CheckpointError(f"{id} has no model that can be run: expected {expected}{hint}")
    if missing := [name for name in chosen if name not in here]:
        raise CheckpointError(f"{id} is incomplete on the hub itself: {', '.join(missing[:4])} is missing")
    return prefix, chosen


def _indexed(folder: Path, index: str) -> Collection[str]:
    """The files that an index names. Other entries are left for the checkpoint reader to reject."""
    path = folder / index
    try:
        names = json.loads(path.read_bytes())["weight_map"].values()
        return {name for name in names if isinstance(name, str) and re.fullmatch(r"[\w.\-+ ]+", name)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} can't be read; fetch it again with --force") from None


def _is_gguf(chosen: list[str]) -> bool:
    return chosen[0].endswith(".gguf")


def _model_path(folder: Path, chosen: list[str]) -> Path:
    """The path to load: the folder, or the GGUF file in it."""
    return folder / min(chosen) if _is_gguf(chosen) else folder


def _check_space(id: HubId, sizes: dict[str, int], revision: str | None, force: bool) -> int:
    """The number of bytes to download. Raises CheckpointError if the disk has too little space for them."""
    from huggingface_hub import constants, try_to_load_from_cache

    def is_local(path: str) -> bool:
        return not force and isinstance(try_to_load_from_cache(id.repo, path, revision=revision), str)

    needed = sum(size for path, size in sizes.items() if not is_local(path))
    check_space(Path(constants.HF_HUB_CACHE), str(id), needed, "set HF_HOME to a folder on another disk")
    return needed


def check_space(folder: Path, name: str, needed: int, alternative: str) -> None:
    """Raise CheckpointError if the disk of a folder, which may not exist yet, has fewer than `needed` bytes free."""
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if free < needed:
        raise CheckpointError(
            f"{folder} has {free // 10**6} MB free, but fetching {name} needs {needed // 10**6} MB;"
            f" free some space or {alternative}"
        )


def _is_unreachable(error: Exception) -> bool:
    """Whether there was no response, or only a server error."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    answered = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
    return not answered and not isinstance(error, HFValidationError)


def _explained(error: Exception, id: HubId) -> CheckpointError | UsageError:
    """The error of this package for an error of huggingface_hub, with the remedy."""
    from huggingface_hub import constants, errors

    repo, page = id.repo, f"{constants.ENDPOINT}/{id.repo}"
    log_in = "log in with 'hf auth login' or set HF_TOKEN"
    if isinstance(error, errors.HFValidationError):
        return UsageError(f"{id} is not a valid name on the Hugging Face hub: {short(error)}")
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(f"{repo} is gated: accept its licence on {page}, then {log_in}, and pull again")
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{repo} has no revision {id.revision!r}; branches, tags and commits are on {page}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"the Hugging Face hub has no accessible repository {repo}; it does not exist or is private: check the"
            f" name, and if it is private, {log_in}"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return CheckpointError(f"the Hugging Face hub rejects the configured token ({short(error)}); {log_in} again")
    if constants.HF_HUB_OFFLINE:
        return CheckpointError(
            f"HF_HUB_OFFLINE is set and the Hugging Face cache has no complete copy of {id}; unset it and pull"
            f" with a network"
        )
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOSPC:
        return CheckpointError(
            f"the disk of {constants.HF_HUB_CACHE} is full; free some space or set HF_HOME to a folder on another disk,"
            f" and pull again: complete files are not fetched again"
        )
    if number in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
        return CheckpointError(
            f"can't write to the Hugging Face cache {constants.HF_HUB_CACHE}: {os.strerror(number)}; set HF_HOME to a"
            f" writable folder"
        )
    return CheckpointError(
        f"fetching {id} from the Hugging Face hub failed ({type(error).__name__}: {short(error)}); check the"
        f" network and pull again: complete files are not fetched again"
    )


def has_library() -> bool:
    """Whether huggingface_hub is installed."""
    return importlib.util.find_spec("huggingface_hub") is not None


def short(error: Exception) -> str:
    """An error's message in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]


@contextlib.contextmanager
def _library_output(quiet: bool) -> Iterator[None]:
    """Hide the library's progress bars without a terminal, and all its output if `quiet`."""
    utils = importlib.import_module("huggingface_hub.utils")
    level, disabled = utils.logging.get_verbosity(), utils.are_progress_bars_disabled()
    if quiet:
        utils.logging.set_verbosity_error()
    if quiet or not sys.stderr.isatty():
        utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.logging.set_verbosity(level)
        if not disabled:
            utils.enable_progress_bars()
