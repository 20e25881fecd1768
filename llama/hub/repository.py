"""A repository of the Hugging Face hub, and its copy in the hub's own cache, which other programs share.

huggingface_hub does the work: tokens, resuming, links into its cache. Here is decided what of a repository is needed
to run it, and every error is told in one line with its remedy. Nothing is fetched unless `pull` is asked for.
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

# What is read of a model besides its weights
DOCUMENTS = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template.jinja")
META_DOCUMENTS = ("params.json", "checklist.chk", "tokenizer*")
META_WEIGHTS = re.compile(r"consolidated\.\d+\.pth|fp8_scales_\d+\.pt")
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")
# (index, the file of a model in one file, all files of weights), in the order of preference
LAYOUTS = (
    ("model.safetensors.index.json", "model.safetensors", "*.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model*.bin"),
)


@dataclass(frozen=True)
class HubId:
    """A repository of the Hugging Face hub, and what in it is meant: all of it, a folder, or a .gguf file."""

    repo: str
    path: str
    revision: str

    def __str__(self) -> str:
        path = f"/{self.path}" if self.path else ""
        return f"{self.repo}{path}{f'@{self.revision}' * (self.revision != 'main')}"


def hub_id(name: str) -> HubId | None:
    """ORG/NAME[/FOLDER or /FILE.gguf][@REVISION] taken apart; None for what can't be one, as ./x or models/x.gguf."""
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
    """Of the files in one folder those that make up a model this package reads; none if there is no such model.

    indexed  gives the files that an index names. A file of the answer that is not in `names` is missing.

    safetensors come before .bin, both before Meta's files, and those before GGUF. Raises CheckpointError where
    several GGUF models lie side by side: they are the same model in different sizes, and one is wanted.
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
        raise CheckpointError(f"{where} holds {len(models)} GGUF models ({sizes}); name one, as in {where}/FILE.gguf")
    return _with_all_parts(matching("*.gguf"))


def _with_all_parts(names: list[str]) -> list[str]:
    """Names as NAME-00002-of-00003.gguf stand for all three."""
    found = dict.fromkeys(names)
    for name in names:
        if match := PART.fullmatch(name):
            count = min(int(match[3]), 9999)
            found |= dict.fromkeys(f"{match[1]}-{i + 1:05d}-of-{match[3]}{match[4]}" for i in range(count))
    return list(found)


def cached(wanted: HubId) -> Path | None:
    """The place of a model in the Hugging Face cache, whole or not; None if nothing of it is there."""
    if not has_library():
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(wanted.repo, revision=wanted.revision, local_files_only=True, allow_patterns=[])
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    place = Path(folder, wanted.path)
    return place if place.exists() else None


def unfinished(wanted: HubId) -> set[Path]:
    """Files that downloads of this repository were writing when they ended, or are writing now, and nobody can use.

    Older versions of huggingface_hub go on with their own (ETAG.incomplete), newer ones (ETAG.XXXXXXXX.incomplete)
    begin anew; only the latter are meant.
    """
    if not has_library():
        return set()
    from huggingface_hub import constants

    blobs = Path(constants.HF_HUB_CACHE, f"models--{wanted.repo.replace('/', '--')}", "blobs")
    return {path for path in blobs.glob("*.incomplete") if re.search(r"\.[0-9a-f]{8}\.incomplete$", path.name)}


def find_cached(wanted: HubId) -> Path | None:
    """The model in the Hugging Face cache, if every file of it is there."""
    place = cached(wanted)
    if place is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    root = Path(snapshot_download(wanted.repo, revision=wanted.revision, local_files_only=True, allow_patterns=[]))
    for folder in (place.parent,) if place.is_file() else (place, place / "original"):
        names = {file.name for file in folder.iterdir() if file.is_file()} if folder.is_dir() else set()
        if place.is_file():
            chosen = _with_all_parts([place.name])
        else:
            chosen = choose(names, functools.partial(_indexed, folder), str(wanted))
        if not chosen or not names.issuperset(chosen):
            continue
        prefix = "".join(f"{part}/" for part in folder.relative_to(root).parts)
        meta = "params.json" in chosen
        patterns = (*META_DOCUMENTS, "consolidated.*.pth") if meta else () if _is_gguf(chosen) else DOCUMENTS
        try:  # the library knows which files belong to a repository, if it was the one that fetched them
            snapshot_download(
                wanted.repo,
                revision=wanted.revision,
                local_files_only=True,
                allow_patterns=[glob.escape(prefix) + pattern for pattern in patterns],
            )
        except LocalEntryNotFoundError:
            continue
        return _place(folder, chosen)
    return None


def pull_repository(wanted: HubId, force: bool, meta: bool, quiet: bool) -> Path:
    """Fetch what is needed of a repository into the hub's cache; its folder there, or its .gguf file.

    meta takes the files of Meta's in its folder original/. Raises CheckpointError or UsageError with the remedy.
    """
    if not has_library():
        raise CheckpointError(
            f"fetching {wanted} from the Hugging Face hub needs a package that is not installed:"
            f" pip install 'clearllama[hub]'"
        )
    try:
        with _muted(quiet):
            return _download(wanted, force, meta, quiet)
    except CheckpointError:
        raise
    except Exception as error:
        place = HubId(wanted.repo, wanted.path or "original" * meta, wanted.revision)
        here = find_cached(place) if _is_unreachable(error) and not force else None
        if here is None:
            raise _explained(error, wanted) from error
        if not quiet:
            print(f"the hub can't be reached ({short(error)}); the copy that is here is whole", file=sys.stderr)
        return here


def _download(wanted: HubId, force: bool, meta: bool, quiet: bool) -> Path:
    """Fetch what is wanted; errors are the library's, and CheckpointError where there is nothing to fetch."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    info = HfApi().model_info(wanted.repo, revision=wanted.revision, files_metadata=True, timeout=30)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}

    def indexed(path: str) -> Collection[str]:
        file = Path(hf_hub_download(wanted.repo, path, revision=info.sha, force_download=force))
        return _indexed(file.parent, file.name)

    prefix, chosen = _choose_remote(wanted, sizes, meta, indexed)
    paths = [prefix + name for name in chosen]
    total = _check_space(wanted, {path: sizes[path] for path in paths}, info.sha, force)
    if not quiet:
        count = f"{len(paths)} file{'s' * (len(paths) > 1)}"
        print(f"fetching {wanted} ({count}, {total / 10**6:,.0f} MB of them not here yet)", file=sys.stderr)
    folder = snapshot_download(
        wanted.repo,
        revision=wanted.revision,
        allow_patterns=[glob.escape(path) for path in paths],
        force_download=force,
    )
    return _place(Path(folder, prefix), chosen)


def _choose_remote(
    wanted: HubId, names: Collection[str], meta: bool, indexed: Callable[[str], Collection[str]]
) -> tuple[str, list[str]]:
    """(the folder in the repository with a slash behind it, the files to fetch from it)."""
    folder, _, file = wanted.path.rpartition("/") if wanted.path.endswith(".gguf") else (wanted.path, "", "")
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
        chosen = choose(here, lambda index: indexed(prefix + index), f"{wanted.repo}{f'/{folder}' * bool(folder)}")
    if meta and "params.json" not in chosen:
        chosen = []
    if not chosen or (file and not here):
        inside = {name.rpartition("/")[0] for name in names if re.search(r"(^|/)(params\.json|[^/]+\.gguf)$", name)}
        deeper = sorted(inside - {folder, ""})
        hint = f"; there may be one in {', '.join(f'{wanted.repo}/{name}' for name in deeper[:4])}" if deeper else ""
        sought = "params.json with consolidated.00.pth" if meta else (
            "config.json with safetensors or .bin, params.json with .pth, or .gguf")  # fmt: skip
        raise CheckpointError(f"{wanted} holds no model that can be run: there is no {sought}{hint}")
    if missing := [name for name in chosen if name not in here]:
        raise CheckpointError(f"{wanted} is incomplete on the hub itself: {', '.join(missing[:4])} is not in it")
    return prefix, chosen


def _indexed(folder: Path, index: str) -> Collection[str]:
    """The files that an index names. What is no plain name is left to the reader of the checkpoint to refuse."""
    path = folder / index
    try:
        places = json.loads(path.read_bytes())["weight_map"].values()
        return {name for name in places if isinstance(name, str) and re.fullmatch(r"[\w.\-+ ]+", name)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} can't be read; fetch it again with --force") from None


def _is_gguf(chosen: list[str]) -> bool:
    return chosen[0].endswith(".gguf")


def _place(folder: Path, chosen: list[str]) -> Path:
    """The path to load: the folder, or the GGUF file in it."""
    return folder / min(chosen) if _is_gguf(chosen) else folder


def _check_space(wanted: HubId, sizes: dict[str, int], revision: str | None, force: bool) -> int:
    """The bytes that are not here yet. Raises CheckpointError when they don't fit on the disk."""
    from huggingface_hub import constants, try_to_load_from_cache

    def is_here(path: str) -> bool:
        return not force and isinstance(try_to_load_from_cache(wanted.repo, path, revision=revision), str)

    needed = sum(size for path, size in sizes.items() if not is_here(path))
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if free < needed:
        raise CheckpointError(
            f"{cache} has {free // 10**6} MB free and fetching {wanted} needs {needed // 10**6} MB; free some or set"
            f" HF_HOME to a folder on another disk"
        )
    return needed


def _is_unreachable(error: Exception) -> bool:
    """No answer came, or one that says nothing of the model."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    said = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
    return not said and not isinstance(error, HFValidationError)


def _explained(error: Exception, wanted: HubId) -> CheckpointError | UsageError:
    """What went wrong on the hub, in words of this package, with the remedy."""
    from huggingface_hub import constants, errors

    repo, page = wanted.repo, f"{constants.ENDPOINT}/{wanted.repo}"
    log_in = "log in with 'hf auth login' or set HF_TOKEN"
    if isinstance(error, errors.HFValidationError):
        return UsageError(f"{wanted} is no name of the Hugging Face hub: {short(error)}")
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(f"{repo} is gated: accept its licence on {page}, then {log_in}, and pull again")
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{repo} has no revision {wanted.revision!r}; branches, tags and commits are on {page}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"the Hugging Face hub shows no repository {repo}: it does not exist, or it is private; check the name, and"
            f" if it is private {log_in}"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return CheckpointError(f"the Hugging Face hub refuses the token that is set ({short(error)}); {log_in} anew")
    if constants.HF_HUB_OFFLINE:
        return CheckpointError(
            f"HF_HUB_OFFLINE is set and the Hugging Face cache holds no complete copy of {wanted}; unset it and pull"
            f" with a network"
        )
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOSPC:
        return CheckpointError(
            f"the disk of {constants.HF_HUB_CACHE} is full; free some space or set HF_HOME to a folder on another disk,"
            f" and pull again: files that are complete are kept"
        )
    if number in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
        return CheckpointError(
            f"can't write to the Hugging Face cache {constants.HF_HUB_CACHE}: {os.strerror(number)}; set HF_HOME to a"
            f" folder that can be written"
        )
    return CheckpointError(
        f"the Hugging Face hub did not deliver {wanted} ({type(error).__name__}: {short(error)}); check the network"
        f" and pull again: files that are complete are kept"
    )


def has_library() -> bool:
    """Whether huggingface_hub is installed."""
    return importlib.util.find_spec("huggingface_hub") is not None


def short(error: Exception) -> str:
    """An error in one line."""
    return " ".join(str(error).split())[:200]


@contextlib.contextmanager
def _muted(quiet: bool) -> Iterator[None]:
    """Keep the library's bars off what is no terminal, and its remarks off too where nothing is to be shown."""
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
