"""Repositories of the Hugging Face hub, and their copies in the hub's cache, which other programs share.

This file chooses the files of a repository that are needed to run it, and turns every error into one line with its
remedy. transfer.py fetches and checks a file; huggingface_hub handles tokens and the links in its cache. A repository's
code is not fetched. The name of a revision is written to the cache last, so a partial copy can't be loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fnmatch
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
from typing import Any

from ..errors import CheckpointError, UsageError
from ..system.temporary import write_atomically
from . import quants, transfer
from .transfer import RemoteFile

# Files of a model other than its weights
TOKENIZERS = ("tokenizer*.json", "tokenizer.model")
DOCUMENTS = ("config.json", "generation_config.json", *TOKENIZERS, "special_tokens_map.json", "chat_template.jinja")
META_DOCUMENTS = ("params.json", "checklist.chk", "tokenizer_checklist.chk", *TOKENIZERS)
META_WEIGHTS = re.compile(r"consolidated\.\d+\.pth|fp8_scales_\d+\.pt")
PLAIN = re.compile(r"[\w.+ -]+(/[\w.+ -]+)*")  # paths of files; no other path of a repository is used
COMMIT = re.compile(r"[0-9a-f]{40}")
# (index, the weights in a single file, all weights files), in order of preference
LAYOUTS = (
    ("model.safetensors.index.json", "model.safetensors", "*.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model*.bin"),
)


@dataclass(frozen=True)
class HubId:
    """A repository of the Hugging Face hub; a folder or a .gguf file in it (path); a quantization of its GGUF files."""

    repo: str
    path: str
    revision: str
    quant: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" * (self.revision != "main")
        return f"{self.where}{f':{self.quant}' * bool(self.quant)}{revision}"

    @property
    def where(self) -> str:
        """The repository and the path in it."""
        return f"{self.repo}{f'/{self.path}' * bool(self.path)}"


def hub_id(name: str) -> HubId | None:
    """Parse ORG/NAME[/FOLDER or /FILE.gguf][:QUANT][@REVISION]. None for others, such as ./x or models/x.gguf."""
    match = re.fullmatch(
        r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)((?:/[\w.+ -]+)*)(?::([\w-]+))?(?:@([\w.-]+(?:/[\w.-]+)*))?",
        name,
        re.ASCII,
    )
    if not match or any(set(part) == {"."} for part in f"{match[2]}/{match[4] or ''}".split("/") if part):
        return None
    is_file = re.search(r"\.(gguf|pth|pt|bin|safetensors|json|model)$", match[2] or match[1])
    if is_file and (is_file[1] != "gguf" or not match[2] or match[3]):
        return None
    return HubId(match[1], match[2][1:], match[4] or "main", match[3] or "")


def choose(names: Collection[str], indexed: Callable[[str], Collection[str]], where: str) -> list[str]:
    """The files of one folder that form a model this package reads; empty if there is none.

    names    the files in the folder; a file of the result that is not among them is missing
    indexed  returns the files that an index names

    The order of preference is safetensors, .bin, Meta's files, GGUF; quants.choose picks one of several GGUF models, or
    raises CheckpointError.
    """

    def matching(*patterns: str) -> list[str]:
        return sorted(name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))

    for index, single, pattern in LAYOUTS if "config.json" in names else ():
        if index in names:
            return [*matching(*DOCUMENTS), index, *sorted(indexed(index))]
        files = [name for name in matching(pattern) if not name.startswith(("adapter_", "consolidated"))]
        if files:
            return [*matching(*DOCUMENTS), *([single] if single in files else quants.with_all_parts(files))]
    weights = [name for name in sorted(names) if META_WEIGHTS.fullmatch(name)]
    if "params.json" in names and weights:
        return [*matching(*META_DOCUMENTS), *weights]
    return quants.choose(matching("*.gguf"), "", where)


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


def find_cached(id: HubId) -> Path | None:
    """The path of a model in the Hugging Face cache, if it is complete."""
    root, path = _snapshot(id), cached(id)
    if root is None or path is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    for folder in (path.parent,) if path.is_file() else (path, path / "original"):
        names = _names_in(folder)
        if path.is_file():
            chosen = quants.with_all_parts([path.name])
        elif id.quant:
            chosen = quants.choose(names, id.quant, id.where) if quants.named(names, id.quant) else []
        else:
            chosen = choose(names, lambda index, here=folder: _indexed(here / index, index), id.where)  # type: ignore[misc]
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


def _names_in(folder: Path) -> set[str]:
    """The names of the files in a folder, and the paths of the GGUF files in its subfolders."""
    if not folder.is_dir():
        return set()
    deeper = {f"{path.parent.name}/{path.name}" for path in folder.glob("*/*.gguf") if path.is_file()}
    return {file.name for file in folder.iterdir() if file.is_file()} | deeper


def pull_repository(id: HubId, *, force: bool, check: bool, meta: bool, quiet: bool) -> Path:
    """Fetch the needed files of a repository into the hub's cache. Returns its folder there, or its .gguf file.

    check compares the checksums of files that are there already; meta fetches Meta's own files from the folder
    original/. Raises CheckpointError or UsageError with the remedy.
    """
    if not has_library():
        raise CheckpointError(
            f"downloading {id} from the Hugging Face hub needs a package that is not installed:"
            f" pip install 'clearllama[hub]'"
        )
    try:
        with _library_output(quiet):
            return _download(id, force, check, meta, quiet)
    except CheckpointError:
        raise
    except Exception as error:
        local = HubId(id.repo, id.path or "original" * meta, id.revision, id.quant)
        path = find_cached(local) if _is_unreachable(error) and not force else None
        if path is None:
            raise _explained(error, id) from error
        if not quiet:
            print(f"the hub can't be reached ({short(error)}); using the complete local copy", file=sys.stderr)
        return path
    except (KeyboardInterrupt, SystemExit):
        if not quiet:
            print(f"\ndownloading {id} was stopped; the same command resumes it", file=sys.stderr)
        raise


def _download(id: HubId, force: bool, check: bool, meta: bool, quiet: bool) -> Path:
    """Fetch the needed files. Raises the library's errors, and CheckpointError if there is no model to fetch."""
    from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url, snapshot_download
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    info: Any = HfApi().model_info(id.repo, revision=id.revision, files_metadata=True, timeout=30)
    files, store = _listed(info), _store(id)
    checked: set[Path] = set()

    def target(file: RemoteFile) -> Path:
        """The path of a file in the cache."""
        return store / "blobs" / file.etag if file.etag else store / "snapshots" / info.sha / file.path

    def get(file: RemoteFile, progress: Callable[[int], Any] = lambda done: None) -> Path:
        """Fetch one file, and verify it if its ETag is known. The largest files need the library's own function."""
        if not file.etag or (file.size or 0) > constants.MAX_HTTP_DOWNLOAD_SIZE:
            return Path(hf_hub_download(id.repo, file.path, revision=info.sha, force_download=force))
        path = target(file)
        damaged = check and transfer.is_complete(path, file) and transfer.checksum(path, file.etag) != file.etag
        transfer.fetch(
            hf_hub_url(id.repo, file.path, revision=info.sha),
            file,
            path,
            build_hf_headers(),
            force=force or damaged,
            progress=progress,
            waiting=lambda: (
                None if quiet else print(f"waiting for another process that downloads {id}", file=sys.stderr)
            ),
        )
        checked.add(path.resolve())
        return path

    prefix, chosen = _choose_remote(id, files, meta, lambda index: _indexed(get(files[index]), index))
    wanted = sorted((files[prefix + name] for name in chosen), key=lambda file: file.size or 0)
    here = {file.path: 0 if force else transfer.partial_size(target(file), file) for file in wanted}
    total = sum(file.size or 0 for file in wanted)
    needed = total - sum(here.values())
    check_space(Path(constants.HF_HUB_CACHE), str(id), needed, "set HF_HOME to a folder on another disk")
    if needed and not quiet:
        print(_explanation(id, info, [file.path for file in wanted], files, needed), file=sys.stderr)
    with transfer.progress_bar(f"downloading {id}", total, quiet or not needed) as show:
        done = 0
        for file in wanted:
            get(file, lambda size, before=done: show(before + size))  # type: ignore[misc]
            done += file.size or 0
    patterns = [glob.escape(file.path) for file in wanted]
    folder = Path(snapshot_download(id.repo, revision=info.sha, allow_patterns=patterns))  # makes the links
    for file in wanted:
        if (folder / file.path).resolve() not in checked:
            _check_linked(folder / file.path, file)
    if not COMMIT.fullmatch(id.revision):
        (store / "refs" / id.revision).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(store / "refs" / id.revision, info.sha.encode())
    transfer.remove_partial(store / "blobs", {file.etag for file in files.values()})
    return _model_path(folder / prefix, chosen)


def _store(id: HubId) -> Path:
    """The folder of a repository in the Hugging Face cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"models--{id.repo.replace('/', '--')}")


def _listed(info: Any) -> dict[str, RemoteFile]:
    """The files of a repository by their paths. Paths that could mean something else on this machine are left out."""
    files = {}
    for entry in info.siblings or []:
        path, large = str(entry.rfilename), getattr(entry, "lfs", None)
        etag = str((large.sha256 if large else getattr(entry, "blob_id", None)) or "")
        if PLAIN.fullmatch(path) and not any(set(part) == {"."} for part in path.split("/")):
            known = re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", etag)
            files[path] = RemoteFile(path, entry.size, etag if known else "")
    return files


def _explanation(id: HubId, info: Any, paths: list[str], files: Collection[str], needed: int) -> str:
    """What is fetched, how much, and under which licence."""
    parts = f" in {len(paths)} parts" if len(paths) > 1 else ""
    what = f"{min(paths)}{parts}" if _is_gguf(paths) or not parts else f"{len(paths)} files"
    card = getattr(info, "card_data", None) or {}
    licence = card.get("license")
    if licence == "other":
        licence = card.get("license_name")
    known = isinstance(licence, str) and re.fullmatch(r"[\w.+ -]{1,60}", licence)
    gate = f", gated: accept the licence on {_page(id)}" if getattr(info, "gated", False) else ""
    size = f"{needed / 10**6:,.0f} MB to download, licence {licence if known else 'not stated'}{gate}"
    return f"downloading {id} ({what}{_nearest(id, paths, files)}, {size})"


def _nearest(id: HubId, paths: list[str], names: Collection[str]) -> str:
    """A note if a quantization other than the default was chosen from several GGUF models; else ""."""
    own = quants.label(min(paths)) if _is_gguf(paths) else ""
    chosen = not id.quant and not id.path.endswith(".gguf") and len(quants.models(names)) > 1
    return f", the nearest to {quants.DEFAULT}" if chosen and own not in ("", quants.DEFAULT) else ""


def cached_note(id: HubId, path: Path) -> str:
    """A line naming the cached GGUF file that a name without a quantization selects; "" if it is the default."""
    if path.suffix != ".gguf" or id.quant or id.path.endswith(".gguf"):
        return ""
    own = quants.label(path.name)
    if own in ("", quants.DEFAULT):
        return ""
    return f"{id}: using {path.name} from the Hugging Face cache"


def _choose_remote(
    id: HubId, names: Collection[str], meta: bool, indexed: Callable[[str], Collection[str]]
) -> tuple[str, list[str]]:
    """The folder in the repository (with a trailing slash), and the files to fetch from it."""
    folder, _, file = id.path.rpartition("/") if id.path.endswith(".gguf") else (id.path, "", "")
    if meta and not folder and any(name.startswith("original/") for name in names):
        folder = "original"
    prefix = f"{folder}/" if folder else ""
    where = f"{id.repo}{f'/{folder}' * bool(folder)}"
    here = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    here = {name for name in here if "/" not in name or (name.endswith(".gguf") and name.count("/") == 1)}
    if meta:
        here -= {"config.json"}
    if file:
        chosen = quants.with_all_parts([file])
    elif id.quant:
        chosen = quants.choose(here, id.quant, where)
    else:
        chosen = choose(here, lambda index: indexed(prefix + index), where)
    if meta and "params.json" not in chosen:
        chosen = []
    if not chosen and not id.path and "original/params.json" in names:
        return _choose_remote(dataclasses.replace(id, path="original"), names, meta, indexed)
    if not chosen or (file and not here):
        inside = {name.rpartition("/")[0] for name in names if re.search(r"(^|/)(params\.json|[^/]+\.gguf)$", name)}
        deeper = sorted(inside - {folder, ""})
        hint = f"; there may be one in {', '.join(f'{id.repo}/{name}' for name in deeper[:4])}" if deeper else ""
        expected = "params.json with consolidated.00.pth" if meta else (
            "config.json with safetensors or .bin, params.json with .pth, or .gguf")  # fmt: skip
        raise CheckpointError(f"{id} has no model that can be run: expected {expected}{hint}")
    if missing := [name for name in chosen if name not in here]:
        raise CheckpointError(
            f"{id} is incomplete on the hub itself: {', '.join(missing[:4])} is missing; choose"
            " another repository or revision"
        )
    return prefix, chosen


def _indexed(file: Path, index: str) -> Collection[str]:
    """The weights that an index names. Other entries are left for the checkpoint reader to reject."""
    kind = ".safetensors" if "safetensors" in index else ".bin"
    try:
        names = json.loads(file.read_bytes())["weight_map"].values()
        return {n for n in names if isinstance(n, str) and re.fullmatch(r"[\w.\-+ ]+", n) and n.endswith(kind)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f"{index} of the repository can't be read ({file}); download it again with --force"
        ) from None


def _check_linked(link: Path, file: RemoteFile) -> None:
    """Check a file that the library fetched by itself. Raises CheckpointError after removing a damaged one."""
    stored = link.resolve()
    if transfer.is_complete(stored, file) and transfer.checksum(stored, file.etag) == file.etag:
        return
    for path in (link, stored):
        path.unlink(missing_ok=True)
    raise CheckpointError(f"{file.path} arrived damaged: its size or checksum differs from the listed one; try again")


def _is_gguf(chosen: list[str]) -> bool:
    return chosen[0].endswith(".gguf")


def _model_path(folder: Path, chosen: list[str]) -> Path:
    """The path to load: the folder, or the GGUF file in it."""
    return folder / min(chosen) if _is_gguf(chosen) else folder


def check_space(folder: Path, name: str, needed: int, alternative: str) -> None:
    """Raise CheckpointError if the disk of a folder, which may not exist yet, has fewer than `needed` bytes free."""
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if free < needed:
        raise CheckpointError(
            f"{folder} has {free // 10**6} MB free, but downloading {name} needs {needed // 10**6} MB;"
            f" free some space or {alternative}"
        )


def _page(id: HubId) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{id.repo}"


def _is_unreachable(error: Exception) -> bool:
    """Whether there was no response, or only a server error."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    answered = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
    return not answered and not isinstance(error, HFValidationError)


def _explained(error: Exception, id: HubId) -> CheckpointError | UsageError:
    """The error of this package for an error of huggingface_hub, with the remedy."""
    from huggingface_hub import constants, errors

    repo, page = id.repo, _page(id)
    log_in = "log in with 'hf auth login' or set HF_TOKEN"
    if isinstance(error, errors.HFValidationError):
        return UsageError(f"{id} is not a valid name on the Hugging Face hub: {short(error)}")
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(f"{repo} is gated: accept its licence on {page}, {log_in}, then try again")
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
            f"the Hugging Face cache has no complete copy of {id}, and HF_HUB_OFFLINE is set; unset it and try again"
            f" with a network"
        )
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOSPC:
        return CheckpointError(
            f"the disk of {constants.HF_HUB_CACHE} is full; free some space or set HF_HOME to a folder on another disk,"
            f" and try again: the transfer resumes"
        )
    if number in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR):
        return CheckpointError(
            f"can't write to the Hugging Face cache {constants.HF_HUB_CACHE}: {os.strerror(number)}; set HF_HOME to a"
            f" writable folder"
        )
    return CheckpointError(
        f"downloading {id} from the Hugging Face hub failed ({type(error).__name__}: {short(error)}); check the"
        f" network and try again: a transfer resumes where it stopped"
    )


def has_library() -> bool:
    """Whether huggingface_hub is installed."""
    return importlib.util.find_spec("huggingface_hub") is not None


def short(error: Exception) -> str:
    """An error's message in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]


@contextlib.contextmanager
def _library_output(quiet: bool) -> Iterator[None]:
    """Hide the library's progress bars, and all its output if `quiet`."""
    utils = importlib.import_module("huggingface_hub.utils")
    level, disabled = utils.logging.get_verbosity(), utils.are_progress_bars_disabled()
    if quiet:
        utils.logging.set_verbosity_error()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.logging.set_verbosity(level)
        if not disabled:
            utils.enable_progress_bars()
