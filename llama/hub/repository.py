"""Repositories of the Hugging Face hub, and their copies in the hub's cache, which other programs share.

This file chooses the files that are needed to run a repository's model, and turns every error of huggingface_hub into
one line with its remedy. The library downloads, checks sizes, and knows the token. A repository's code is not fetched.
The name of a revision is written to the cache last, so a partial copy is not taken for a complete one.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, one_line
from ..system.temporary import write_atomically

# Files of a model other than its weights
TOKENIZERS = ("tokenizer*.json", "tokenizer.model")
DOCUMENTS = (
    "config.json", "generation_config.json", *TOKENIZERS, "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip
META_DOCUMENTS = ("params.json", "checklist.chk", "tokenizer_checklist.chk", *TOKENIZERS)
META_WEIGHTS = ("consolidated.*.pth", "fp8_scales_*.pt")
# Weights of Hugging Face's formats, in order of preference: all files, one file, the index of several files
LAYOUTS = (
    ("*.safetensors", "model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin", "pytorch_model.bin.index.json"),
)
OTHER_WEIGHTS = ("adapter_*", "consolidated*")
DEFAULT_QUANT = "Q4_K_M"
ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface|hf)\.co/([^?#]+?)/?(?:[?#].*)?")
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")
OTHER_GGUF = re.compile(r"(?i)(^|[-_.])(mmproj|imatrix)")  # files that accompany a model but are not one


@dataclass(frozen=True)
class HubId:
    """A repository of the Hugging Face hub; a folder or a .gguf file in it (path); a quantization of its GGUF files."""

    repo: str
    path: str = ""
    revision: str = "main"
    quant: str = ""

    def __str__(self) -> str:
        path, quant = f"/{self.path}" * bool(self.path), f":{self.quant}" * bool(self.quant)
        return f"{self.repo}{path}{quant}{f'@{self.revision}' * (self.revision != 'main')}"


def hub_id(name: str) -> HubId | None:
    """Parse ORG/NAME[/FOLDER or /FILE.gguf][:QUANT][@REVISION], or the address of its page on the hub.

    None for other names, such as ./x or models/x.gguf.
    """
    if address := ADDRESS.fullmatch(name):
        name = re.sub(r"^([^/]+/[^/]+)/(?:tree|blob|resolve)/([^/]+)(.*)", r"\1\3@\2", address[1])
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


def choose(id: HubId, names: Collection[str]) -> list[str]:
    """The paths of the files that form the model in a repository with the files `names`; empty if there is none.

    The order of preference is safetensors, .bin, Meta's files, GGUF, and Meta's files in the folder original/. A chosen
    file that is not among `names` is missing. Raises CheckpointError if a GGUF file can't be chosen.
    """
    if id.path.endswith(".gguf"):
        return with_all_parts([id.path])
    prefix = f"{id.path}/" if id.path else ""
    here = sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def matching(*patterns: str) -> list[str]:
        return [
            name for pattern in patterns for name in here
            if fnmatch.fnmatchcase(name, pattern) and name.count("/") == pattern.count("/")
        ]  # fmt: skip

    chosen: list[str] = []
    for pattern, single, index in LAYOUTS if "config.json" in here and not id.quant else ():
        weights = sorted({*matching(pattern)} - {*matching(*OTHER_WEIGHTS)})
        if weights and not chosen:
            parts = [name for name in weights if PART.fullmatch(name)]
            used = [single] if single in weights and index not in here else parts or weights
            chosen = [*matching(index, *DOCUMENTS), *with_all_parts(used)]
    if not chosen and "params.json" in here and not id.quant and (weights := matching(*META_WEIGHTS)):
        chosen = [*weights, *matching(*META_DOCUMENTS)]
    chosen = chosen or choose_gguf(matching("*.gguf", "*/*.gguf"), id.quant, str(id))
    if not chosen and not id.path and "original/params.json" in names:
        return choose(dataclasses.replace(id, path="original"), names)
    return sorted(prefix + name for name in chosen)


def choose_gguf(names: Collection[str], quant: str, where: str) -> list[str]:
    """All files of the GGUF model whose path names the quantization; empty if `quant` is empty and there is no model.

    quant  "" stands for the only model or, among several, for DEFAULT_QUANT

    Raises CheckpointError if no model or more than one has this quantization.
    """
    first = {PART.sub(r"\1", path): path for path in sorted(names, reverse=True) if path.endswith(".gguf")}
    models = sorted(path for path in first.values() if not OTHER_GGUF.search(path.rpartition("/")[2]))
    wanted = quant or DEFAULT_QUANT
    found = [path for path in models if re.search(rf"(?i)(?<![A-Z0-9]){wanted}(?![A-Z0-9_])", path)]
    if not quant and len(models) < 2:
        found = models
    elif len(found) != 1:
        listed = ", ".join(models[:12]) + ", ..." * (len(models) > 12)
        raise CheckpointError(
            f"{where} has no single GGUF model of type {wanted}; choose one, as in {where}:TYPE or {where}/FILE.gguf:"
            f" {listed or 'it has none'}"
        )
    return with_all_parts(found)


def with_all_parts(names: Collection[str]) -> list[str]:
    """The names, and all parts of a name such as NAME-00002-of-00003.gguf."""
    found = dict.fromkeys(names)
    for match in filter(None, map(PART.fullmatch, names)):
        count = min(int(match[3]), 9999)
        found |= dict.fromkeys(f"{match[1]}-{i + 1:05d}-of-{match[3]}{match[4]}" for i in range(count))
    return list(found)


# ---------------------------------------------------------------------------------------------------------- the cache
def find_cached(id: HubId) -> Path | None:
    """The path of a model in the Hugging Face cache, if no needed file is missing and no link to one dangles."""
    try:
        commit = (store(id) / "refs" / id.revision).read_text()
    except (OSError, ValueError):  # no such revision, or a damaged file: the hub is asked
        commit = id.revision
    root = store(id) / "snapshots" / commit
    if not re.fullmatch("[0-9a-f]{40}", commit) or not root.is_dir():
        return None
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        names = {file.path for file in get_cached_repo_tree(id.repo, revision=root.name)}
    except CachedRepoTreeNotFoundError:  # only snapshot_download stores the list
        names = {path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()}
    try:
        chosen = choose(id, names)
    except CheckpointError:  # the hub may have the file
        return None
    return _path_of(root, chosen) if chosen and all((root / name).is_file() for name in chosen) else None


def store(id: HubId) -> Path:
    """The folder of a repository in the Hugging Face cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"models--{id.repo.replace('/', '--')}")


def _path_of(root: Path, chosen: list[str]) -> Path:
    """The path to load: the GGUF file, or the folder of the chosen files."""
    first = root / min(chosen, key=lambda name: (name.count("/"), name))
    return first if first.suffix == ".gguf" else first.parent


# ------------------------------------------------------------------------------------------------------- the download
def pull_repository(id: HubId, *, force: bool = False, quiet: bool = False) -> Path:
    """Fetch the needed files of a repository into the hub's cache. Returns its folder there, or its .gguf file.

    Raises CheckpointError with the remedy.
    """
    try:
        return _download(id, force, quiet)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(_explained(error, id)) from error


def pull_file(name: str) -> Path:
    """The path of a file of the hub, ORG/NAME/FILE, which is fetched into the hub's cache if it is not there.

    Raises CheckpointError with the remedy.
    """
    from huggingface_hub import hf_hub_download

    *repo, file = name.split("/", 2)
    try:
        return Path(hf_hub_download("/".join(repo), file))
    except Exception as error:
        raise CheckpointError(_explained(error, HubId("/".join(repo), file))) from error


def _download(id: HubId, force: bool, quiet: bool) -> Path:
    from huggingface_hub import HfApi, hf_hub_download
    from tqdm import tqdm

    info: Any = HfApi().model_info(id.repo, revision=id.revision, files_metadata=True, timeout=30)
    sizes = {str(entry.rfilename): entry.size or 0 for entry in info.siblings or []}
    chosen = choose(id, sizes)
    if not chosen or not sizes.keys() >= {*chosen}:
        raise CheckpointError(
            f"{id} has no complete model that can be run: expected config.json with safetensors or .bin, params.json"
            " with .pth, or .gguf"
        )
    root = store(id) / "snapshots" / info.sha
    needed = sum(sizes[name] for name in chosen if force or not (root / name).is_file())
    if needed and not quiet:
        what = chosen[0] if len(chosen) == 1 else f"{len(chosen)} files"
        licence = (info.card_data or {}).get("license") or "not stated"
        line = f"downloading {id} ({what}, {needed / 10**6:,.0f} MB, licence {licence!s:.60})"
        print(one_line(line), file=sys.stderr)
    for name in sorted(chosen, key=sizes.__getitem__):  # not by snapshot_download, whose threads Ctrl-C does not end
        bar: Any = partial(tqdm, disable=True) if quiet else None
        hf_hub_download(id.repo, name, revision=info.sha, force_download=force, tqdm_class=bar)
    if info.sha != id.revision:
        ref = store(id) / "refs" / id.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(ref, info.sha.encode())
    return _path_of(root, chosen)


def _explained(error: Exception, id: HubId) -> str:
    """What to say about an error of huggingface_hub, with the remedy."""
    from huggingface_hub import constants, errors

    page, short = f"{constants.ENDPOINT}/{id.repo}", " ".join(str(error).split())[:200]
    log_in = "log in with 'hf auth login' or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return f"{id.repo} is gated: accept its licence on {page}, {log_in}, then try again"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{id.repo} has no revision {id.revision!r}; branches, tags and commits are on {page}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the Hugging Face hub has no repository {id.repo}, or it is private: check the name, or {log_in}"
    if constants.HF_HUB_OFFLINE:
        return f"the Hugging Face cache has no complete copy of {id}; unset HF_HUB_OFFLINE to download it"
    if isinstance(error, OSError) and error.errno:
        where = error.filename or constants.HF_HUB_CACHE
        return f"can't write {where}: {error.strerror}; make room, or set HF_HOME to another folder"
    return f"downloading {id} failed ({type(error).__name__}: {short}); check the network and HF_TOKEN, try again"
