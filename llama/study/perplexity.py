"""Perplexity by position under the methods that stretch a context. An interrupted run can be resumed.

A text is cut into windows. The model reads each window from position 0 to its end under each method, and the
log-probabilities are summed in buckets of positions, whose edges are multiples of the trained length. Completed
windows are rows of a CSV file, from which the next run resumes.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Checkpoint, open_checkpoint
from ..engine.runtime import pick_device, pick_dtype
from ..errors import CheckpointError, UsageError
from ..hub import resolve
from ..loader import build
from ..rope_scaling import trained_length
from ..system.temporary import write_atomically
from ..tools.evaluate import token_logprobs
from .stretch import LLAMA3

TINY = "tiny-kjv"  # trained by scripts/train_tiny.py and shipped with the package
EDGES = (0.5, 1, 1.25, 1.5, 2, 3, 4, 6, 8)  # ends of the buckets, in trained lengths
STRETCHING = ("linear", "ntk", "dynamic", "yarn", "llama3")

METHODS = ("none", "linear:4", "ntk:4", "ntk:16", "dynamic:1", "yarn:4")
COLUMNS = ("model", "text", "dtype", "trained", "length", "windows", "method", "window", "first", "last", "nats")


@dataclass(frozen=True)
class Row:
    """One window under one method in one bucket: the sum of -log p over the tokens at positions first .. last."""

    method: str
    window: int
    first: int
    last: int
    nats: float


@dataclass(frozen=True)
class Measurement:
    """Results and their setting. The setting is the same for all rows: a file must not mix two of them."""

    setting: dict[str, str]
    rows: tuple[Row, ...]

    @property
    def trained(self) -> int:
        """The length the model was trained for, in tokens."""
        return int(self.setting["trained"])

    def perplexity(self, method: str) -> dict[float, float]:
        """End of each bucket, in trained lengths -> exp of the mean of -log p over all windows."""
        sums: dict[int, list[float]] = {}
        for row in self.rows:
            if row.method == method:
                sums.setdefault(row.last, []).append(row.nats / (row.last - row.first + 1))
        means = {last: sum(nats) / len(nats) for last, nats in sorted(sums.items())}
        return {(last + 1) / self.trained: float(torch.tensor(mean).exp()) for last, mean in means.items()}

    @property
    def methods(self) -> list[str]:
        """The methods that were measured, in the order of the rows."""
        return list(dict.fromkeys(row.method for row in self.rows))


def scaling_of(method: str) -> dict[str, Any]:
    """The scaling of a method: "none", or KIND:FACTOR as in "yarn:4".

    Raises UsageError on any other form.
    """
    kind, _, factor = method.partition(":")
    if kind == "none" and not factor:
        return {"rope_type": "default"}
    try:
        if kind in STRETCHING:
            return {"rope_type": kind, "factor": float(factor), **(LLAMA3 if kind == "llama3" else {})}
    except ValueError:
        pass
    raise UsageError(f"method {method!r}: expected none or KIND:FACTOR, as in yarn:4; kinds: {', '.join(STRETCHING)}")


def tiny_folder() -> Path:
    """The tiny model's folder, in a checkout or in the installed package. Raises CheckpointError if it is missing."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "checkpoints" / TINY, package / TINY):
        if (folder / "model.safetensors").is_file():
            return folder
    raise CheckpointError(f"the tiny model {TINY} is missing from this installation; reinstall, or give --model")


def source(model: str, text: Path | None) -> tuple[Path, Path]:
    """The model's folder or file, and the text to read; by default what the tiny model was not trained on.

    Raises UsageError if there is no text for a model, CheckpointError if the model is missing.
    """
    folder = tiny_folder() if model == TINY else resolve(model)
    if text is None and model != TINY:
        raise UsageError("a text is needed: add --text FILE; only the tiny model comes with one")
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
    output: Path | None = None,
    dtype: str | None = None,
    device: str | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> Measurement:
    """Measure `windows` windows of `length` tokens of a text under each method; rows already in `output` are kept.

    length    tokens of a window; by default 8 times the trained length
    progress  called with the method, and the completed tokens and all tokens of this run

    Raises UsageError when the text is too short, or `output` has rows of another setting.
    """
    folder, text = source(model, text)
    checkpoint = open_checkpoint(folder)
    trained = int(trained_length(checkpoint.config))
    length = 8 * trained if length is None else length
    raw = read_text(text)
    tokens = _windows(checkpoint, raw, length, windows)  # (windows, length + 1)
    methods = [method.strip() for method in methods]
    scalings = {method: scaling_of(method) for method in methods}
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype or ("float32" if model == TINY else None), torch_device)
    setting = {
        "model": f"{TINY if model == TINY else folder.name}@{_fingerprint(checkpoint)}",
        "text": hashlib.sha256(raw).hexdigest()[:12],
        "dtype": str(torch_dtype).removeprefix("torch."),
        "trained": str(trained),
        "length": str(length),
        "windows": str(windows),
    }
    ends = _ends(trained, length)
    rows = [] if output is None else _read(output, setting, ends)
    done = {(row.method, row.window) for row in rows}
    todo = [(method, window) for method in methods for window in range(windows) if (method, window) not in done]
    at_once = max(1, 8192 // length)  # windows that are read as one batch and written together
    finished, total = 0, len(todo) * length
    for method in methods:
        mine = [window for name, window in todo if name == method]
        if not mine:
            continue
        setup: dict[str, Any] = {"max_seq_len": length, "fast": model != TINY, "rope_scaling": scalings[method]}
        net = build(checkpoint, torch_device, torch_dtype, **setup)
        # where frequencies depend on the length they must change often, as they do in decoding
        chunk = max(1 if net.rope.by_length else 256, trained // 8)
        for start in range(0, len(mine), at_once):
            part = mine[start : start + at_once]

            def advance(read: int, _: int, method: str = method, rows: int = len(part), before: int = finished) -> None:
                if progress is not None:
                    progress(method, before + (read - 1) * rows, total)

            logprobs = token_logprobs(net, tokens[part].to(torch_device), chunk=chunk, progress=advance)
            rows += _rows(method, part, logprobs, trained)
            finished += len(part) * length
            if output is not None:
                _write(output, setting, rows)
    order = {method: index for index, method in enumerate(methods)}
    return Measurement(setting, tuple(sorted((r for r in rows if r.method in order), key=lambda r: order[r.method])))


def _ends(trained: int, length: int) -> list[int]:
    """Ends of the buckets in tokens, the last one at the window's end."""
    return [end for end in dict.fromkeys(round(edge * trained) for edge in EDGES) if 0 < end < length] + [length]


def _rows(method: str, windows: Sequence[int], logprobs: Tensor, trained: int) -> list[Row]:
    """Sums of logprobs (B, length) in buckets, window by window."""
    ends = _ends(trained, logprobs.shape[1])
    return [
        Row(method, window, first, last - 1, float(-of_window[first:last].double().sum()))
        for window, of_window in zip(windows, logprobs, strict=True)
        for first, last in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _windows(checkpoint: Checkpoint, raw: bytes, length: int, windows: int) -> Tensor:
    """One window from the middle of each of `windows` equal parts of the text: (windows, length + 1) int64, with bos.

    Raises UsageError if the text is too short.
    """
    if length < 2 or windows < 1:
        raise UsageError(f"--length must be at least 2 and --windows at least 1, got {length} and {windows}")
    tokenizer = checkpoint.tokenizer()
    ids = torch.tensor(tokenizer.encode(raw.decode()))  # (N,)
    start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    need = length + 1 - len(start)
    if len(ids) < windows * length + 1:
        fit = (len(ids) - 1) // length
        raise UsageError(
            f"the text has {len(ids)} tokens, enough for {fit} windows of {length} tokens, but --windows is"
            f" {windows}; use a longer text, or lower --windows or --length"
        )
    starts = [(2 * i + 1) * (len(ids) - need) // (2 * windows) for i in range(windows)]
    return torch.stack([torch.cat((torch.tensor(start, dtype=torch.int64), ids[at : at + need])) for at in starts])


def _fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of the architecture and some of the last weights, to distinguish models of the same name."""
    last = checkpoint.config.n_layers - 1
    digest = hashlib.sha256(repr((checkpoint.config, sorted(checkpoint.shapes.items()))).encode())
    for name in ("norm.weight", f"layers.{last}.ffn_norm.weight", f"layers.{last}.attention.wo.weight"):
        digest.update(checkpoint.tensor(name).float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:8]


def _read(path: Path, setting: dict[str, str], ends: Sequence[int]) -> list[Row]:
    """Rows of an earlier run, none if there is no file yet. Raises UsageError if damaged or of another setting."""
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--output {path}: expected a file name in an existing folder")
    if not path.exists() or path.stat().st_size == 0:
        return []
    other = "choose another file for --output, or delete this one"
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            lines = list(csv.DictReader(stream, strict=True))
        differs = [
            f"{key} {line[key]}, not {value}" for line in lines for key, value in setting.items() if line[key] != value
        ]
        rows = [Row(x["method"], int(x["window"]), int(x["first"]), int(x["last"]), float(x["nats"])) for x in lines]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise UsageError(f"{path} is damaged or not a table of perplexities ({error}); {other}") from None
    if differs:
        raise UsageError(f"{path} has results with {differs[0]}; {other}")
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for row in rows:
        found.setdefault((row.method, row.window), []).append((row.first, row.last))
    buckets = list(zip([0, *ends[:-1]], (end - 1 for end in ends), strict=True))
    sound = all(0 <= row.nats < math.inf and 0 <= row.window < int(setting["windows"]) for row in rows)
    if not sound or any(window != buckets for window in found.values()):
        raise UsageError(f"{path} is damaged: a value is out of range, or a window is incomplete; {other}")
    return rows


def _write(path: Path, setting: dict[str, str], rows: Sequence[Row]) -> None:
    """Write the complete table in one rename, so that a killed run leaves the windows completed so far."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([*setting.values(), row.method, row.window, row.first, row.last, row.nats])
    write_atomically(path, text.getvalue().encode())
