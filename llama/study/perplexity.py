"""Perplexity by position under the methods that stretch a context.

A text is cut into windows. The model reads each window from position 0 to its end under each method, and the
log-probabilities are averaged in buckets of positions, whose edges are multiples of the trained length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Checkpoint, open_checkpoint
from ..checks import dtype_name
from ..errors import CheckpointError, UsageError
from ..hub import resolve
from ..loader import build
from ..rope_scaling import STRETCHING, trained_length
from ..tools.perplexity import nats, start_ids
from .measures import stretching

TINY = "tiny-kjv"  # trained by scripts/train_tiny.py and shipped with the package
EDGES = (0.5, 1, 1.25, 1.5, 2, 3, 4, 6, 8)  # ends of the buckets, as multiples of the trained length
METHODS = ("none", "linear:4", "ntk:4", "ntk:16", "dynamic:1", "yarn:4")


@dataclass(frozen=True)
class Measurement:
    """Results of `measure`. `nats` has, for each method, -log p of each token: (windows, length)."""

    model: str
    dtype: str
    trained: int
    nats: dict[str, Tensor]

    def perplexity(self, method: str) -> dict[float, float]:
        """Map the end of each bucket, in trained lengths, to exp of the mean of -log p over all windows."""
        nats = self.nats[method]
        ends = [end for end in dict.fromkeys(round(edge * self.trained) for edge in EDGES) if 0 < end < nats.shape[1]]
        ends.append(nats.shape[1])
        buckets = zip([0, *ends], ends, strict=False)
        return {end / self.trained: float(nats[:, first:end].double().mean().exp()) for first, end in buckets}


def scalings(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Map each method to its scaling. Raises UsageError as `scaling_of` does."""
    return {method: scaling_of(method) for method in map(str.strip, methods)}


def scaling_of(method: str) -> dict[str, Any]:
    """The scaling of a method: "none", or KIND:FACTOR as in "yarn:4".

    Raises UsageError on any other form.
    """
    kind, _, factor = method.partition(":")
    if kind == "none" and not factor:
        return {"rope_type": "default"}
    try:
        if kind in STRETCHING:
            return stretching(kind, float(factor))
    except ValueError:
        pass
    raise UsageError(f"method {method!r}: expected none or KIND:FACTOR, as in yarn:4; kinds: {', '.join(STRETCHING)}")


def tiny_folder() -> Path:
    """The tiny model's folder, in a checkout or in the installed package. Raises CheckpointError if it is missing."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "checkpoints" / TINY, package / TINY):
        if (folder / "model.safetensors").is_file():
            return folder
    raise CheckpointError(
        f"the tiny model {TINY} is missing from this installation; reinstall, or name a model (--model)"
    )


def folder_of(model: str) -> Path:
    """The model's folder or file. Raises CheckpointError if it is missing."""
    return tiny_folder() if model == TINY else resolve(model)


def source(model: str, text: Path | None) -> tuple[Path, Path]:
    """The model's folder or file, and the text to read; the default is the tiny model's held-out text.

    Raises UsageError if there is no text for a model, CheckpointError if the model is missing.
    """
    folder = folder_of(model)
    if text is None and model != TINY:
        raise UsageError("a text (--text FILE) is needed; only the tiny model comes with one")
    return folder, text or folder / "held-out.txt"


def read_text(path: Path) -> bytes:
    """The content of a text file. Raises UsageError if it can't be read or is not UTF-8."""
    try:
        raw = path.read_bytes()
        raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"byte {error.start} is not"
        raise UsageError(f"{path}: expected a text file in UTF-8: {why}") from None
    return raw


def measure(
    model: str = TINY,
    text: Path | None = None,
    length: int | None = None,
    windows: int = 6,
    methods: Sequence[str] = METHODS,
    dtype: str | None = None,
    progress: Callable[[str, int, int], object] = lambda method, done, total: None,
) -> Measurement:
    """Measure `windows` windows of `length` tokens of a text under each method.

    length    tokens of a window; by default 8 times the trained length
    progress  called with the method, the number of completed tokens and that of all tokens of the run

    Raises UsageError when the text is too short.
    """
    folder, text = source(model, text)
    checkpoint = open_checkpoint(folder)
    trained = int(trained_length(checkpoint.config))
    length = 8 * trained if length is None else length
    tokens = _windows(checkpoint, read_text(text).decode(), length, windows)  # (windows, length + 1)
    dtype, found = dtype or ("float32" if model == TINY else None), dict[str, Tensor]()
    for method, scaling in scalings(methods).items():
        net = build(checkpoint, None, dtype, max_seq_len=length, fast=model != TINY, rope_scaling=scaling)
        # short chunks: frequencies that depend on the length must change often, as they do in decoding
        chunk = max(1 if net.rope.by_length else 256, trained // 8)
        batches = tokens.split(max(1, 8192 // length))
        found[method] = torch.cat(nats(net, batches, chunk, partial(progress, method)))  # (windows, length)
    return Measurement(model, dtype_name(net.norm.weight.dtype), trained, found)


def _windows(checkpoint: Checkpoint, text: str, length: int, windows: int) -> Tensor:
    """One window from the middle of each of `windows` equal parts of the text: (windows, length + 1) int64, with bos.

    Raises UsageError if the text is too short.
    """
    if length < 2 or windows < 1:
        raise UsageError(
            f"length (--length) must be at least 2 and windows (--windows) at least 1, got {length} and {windows}"
        )
    tokenizer = checkpoint.tokenizer()
    ids, start = torch.tensor(tokenizer.encode(text)), torch.tensor(start_ids(tokenizer), dtype=torch.int64)  # (N,)
    need = length + 1 - len(start)
    if len(ids) < windows * length + 1:
        fit = (len(ids) - 1) // length
        raise UsageError(
            f"the text has {len(ids)} tokens, enough for {fit} window{'s' * (fit != 1)} of {length} tokens, but windows"
            f" (--windows) is {windows}; use a longer text, or lower one of windows and length (--length)"
        )
    starts = [(2 * i + 1) * (len(ids) - need) // (2 * windows) for i in range(windows)]
    return torch.stack([torch.cat((start, ids[at : at + need])) for at in starts])
