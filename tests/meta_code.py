"""Run Meta's own code (oracle_meta.py) on folders in Meta's format. Skips the test if its wheels are unavailable."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from .wheels import CACHE

SOURCES = {"meta-llama3": "meta-llama3==0.0.1", "llama-models": "llama-models==0.3.0", "fairscale": "fairscale==0.4.13"}


def unpacked(requirement: str) -> Path:
    """The files of a wheel or source archive from PyPI, unpacked into the cache, not installed."""
    target = CACHE / "unpacked" / requirement
    if target.exists():
        return next((child for child in target.iterdir() if (child / "setup.py").exists()), target)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            pytest.skip(f"{requirement} can't be fetched from PyPI: {done.stderr.strip()[-200:]}")
        archive, out = next(Path(folder).iterdir()), Path(folder) / "out"
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(out)
        else:
            with tarfile.open(archive) as source:
                source.extractall(out, filter="data")
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another worker may have done it first
            out.rename(target)
    return unpacked(requirement)


def job(folder: Path, tokens: torch.Tensor, code: str, vocab_size: int, factor: float = 8) -> dict[str, Any]:
    """A request to run `tokens` (1, T) through the model in a folder."""
    torch.save(tokens, folder / "tokens.oracle")
    files = {"tokens": str(folder / "tokens.oracle"), "out": str(folder / "logits.oracle")}
    return {"folder": str(folder), "code": code, "factor": factor, "vocab_size": vocab_size, **files}


def run(jobs: list[dict[str, Any]], ranks: int = 1) -> list[torch.Tensor]:
    """Logits (1, T, V) of each job, computed by Meta's code in `ranks` processes."""
    request = json.dumps({"wheels": {name: str(unpacked(wheel)) for name, wheel in SOURCES.items()}, "jobs": jobs})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).parent / "oracle_meta.py"
    processes = []
    for rank in range(ranks):
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **variables},
            )
        )
    for process in processes:
        if process.stdin is not None:
            process.stdin.write(request)
            process.stdin.close()
    for process in processes:
        error = process.stderr.read() if process.stderr is not None else ""
        if process.wait(timeout=240):
            raise RuntimeError(f"Meta's code failed: {error[-2000:]}")
    return [torch.load(job["out"], weights_only=True) for job in jobs]
