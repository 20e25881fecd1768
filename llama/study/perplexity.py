"""Perplexity against context length, for every way to stretch a context: measured by window, kept by window.

A text is cut into windows; each window is read from position 0 to its end under each method; and the log-probabilities
are summed in buckets of positions, whose edges are multiples of the trained length. Every window done is a few rows
of a CSV file, so that a run of hours goes on where it was stopped.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Checkpoint, open_checkpoint
from ..errors import CheckpointError, UsageError
from ..evaluate import token_logprobs
from ..hub import resolve
from ..loader import build
from ..model import Transformer
from ..temporary import own_temporary

TINY = "tiny-kjv"  # trained by scripts/train_tiny.py, shipped with the package
EDGES = (0.5, 1, 1.25, 1.5, 2, 3, 4, 6, 8)  # ends of the buckets, in trained lengths
STRETCHING = ("linear", "ntk", "dynamic", "yarn", "llama3")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # Meta's constants
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
    """What was measured, and how. `setting` is the same for all rows and names what must not be mixed in one file."""

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
        """Those measured, in the order of the rows."""
        return list(dict.fromkeys(row.method for row in self.rows))


def scaling_of(method: str) -> dict[str, Any]:
    """The scaling that a method names: "none", or KIND:FACTOR as in "yarn:4"; "-whole" behind a kind is cut off."""
    kind, _, factor = method.partition(":")
    kind = kind.removesuffix("-whole")
    if kind == "none" and not factor:
        return {"rope_type": "default"}
    try:
        if kind in STRETCHING:
            return {"rope_type": kind, "factor": float(factor), **(LLAMA3 if kind == "llama3" else {})}
    except ValueError:
        pass
    raise UsageError(
        f"method {method!r}: expected none or KIND:FACTOR, as in yarn:4; kinds: {', '.join(STRETCHING)}, dynamic-whole"
    )


def tiny_folder() -> Path:
    """The tiny model's folder, in a checkout or in the installed package."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "checkpoints" / TINY, package / TINY):
        if (folder / "model.safetensors").is_file():
            return folder
    raise CheckpointError(f"the tiny model {TINY} is missing from this installation; reinstall, or give --model")


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
    """Read `windows` windows of `length` tokens of a text under each method; rows already in `output` are kept.

    length    tokens of a window; default 8 times what the model was trained for
    progress  called with the method, the tokens done and the tokens in all, of this run

    Raises UsageError when the text is too short, or `output` holds rows of another setting.
    """
    folder = tiny_folder() if model == TINY else resolve(model)
    if text is None:
        if model != TINY:
            raise UsageError("give a long text with --text FILE; only the tiny model comes with one")
        text = folder / "held-out.txt"
    checkpoint = open_checkpoint(folder)
    trained = _trained(checkpoint)
    length = 8 * trained if length is None else length
    try:
        raw = text.read_bytes()
        raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{text}: expected a text file in UTF-8 ({error})") from None
    tokens = _windows(checkpoint, raw, length, windows)  # (windows, length + 1)
    scalings = {method: scaling_of(method) for method in methods}
    setting = {
        "model": model if model == TINY else folder.name,
        "text": hashlib.sha256(raw).hexdigest()[:12],
        "dtype": dtype or ("float32" if model == TINY else "auto"),
        "trained": str(trained),
        "length": str(length),
        "windows": str(windows),
    }
    rows = _read(output, setting) if output is not None and output.exists() else []
    done = {(row.method, row.window) for row in rows}
    todo = [(method, window) for method in methods for window in range(windows) if (method, window) not in done]
    at_once = max(1, 32768 // length)  # windows read as one batch
    finished, total = 0, len(todo) * length
    for method in methods:
        mine = [window for name, window in todo if name == method]
        if not mine:
            continue
        net = build(
            checkpoint,
            device,
            setting["dtype"],
            max_seq_len=length,
            pack=model != TINY,
            rope_scaling=scalings[method],
        )
        for start in range(0, len(mine), at_once):
            part = mine[start : start + at_once]

            def tell(tokens: int, method: str = method, rows: int = len(part), before: int = finished) -> None:
                if progress is not None:
                    progress(method, before + tokens * rows, total)

            logprobs = _read_through(net, tokens[part], method, trained, tell)  # (windows of this batch, length)
            rows += _rows(method, part, logprobs, trained)
            finished += len(part) * length
            if output is not None:
                _write(output, setting, rows)
    order = {method: index for index, method in enumerate(methods)}
    return Measurement(setting, tuple(sorted((r for r in rows if r.method in order), key=lambda r: order[r.method])))


def _read_through(net: Transformer, tokens: Tensor, method: str, trained: int, tell: Callable[[int], object]) -> Tensor:
    """log p of every token but the first, each from all before it: (B, length + 1) -> (B, length).

    The text enters in chunks of an eighth of the trained length, so that frequencies that depend on the length grow
    as they do in decoding: keys keep those they entered with. A "-whole" method reads each bucket afresh instead,
    from the start to the bucket's end in one piece, all under the frequencies of that end. `tell` hears how many of a
    window's tokens are done.
    """
    tokens = tokens.to(net.tok_embeddings.weight.device)
    if not method.partition(":")[0].endswith("-whole"):
        return token_logprobs(net, tokens, chunk=max(1, trained // 8), progress=_summing(tell))
    parts, first = [], 0
    for last in _ends(trained, tokens.shape[1] - 1):
        parts.append(token_logprobs(net, tokens[:, : last + 1], chunk=last)[:, first:])
        first = last
        tell(last)
    return torch.cat(parts, dim=1)


def _summing(tell: Callable[[int], object]) -> Callable[[int], object]:
    """Hears the tokens of each chunk, tells how many it is so far."""
    total = 0

    def add(tokens: int) -> None:
        nonlocal total
        total += tokens
        tell(total)

    return add


def _ends(trained: int, length: int) -> list[int]:
    """Ends of the buckets in tokens, the last one at the window's end."""
    return [end for end in dict.fromkeys(round(edge * trained) for edge in EDGES) if 0 < end < length] + [length]


def _rows(method: str, windows: Sequence[int], logprobs: Tensor, trained: int) -> list[Row]:
    """Sums in buckets of logprobs (B, length)."""
    first, found = 0, []
    for end in _ends(trained, logprobs.shape[1]):
        sums = (-logprobs[:, first:end].double().sum(-1)).tolist()
        found += [Row(method, window, first, end - 1, nats) for window, nats in zip(windows, sums, strict=True)]
        first = end
    return found


def _windows(checkpoint: Checkpoint, raw: bytes, length: int, windows: int) -> Tensor:
    """Windows in the middle of `windows` equal parts of the text: (windows, length + 1) int64, bos included."""
    if length < 2 or windows < 1:
        raise UsageError(f"--length must be at least 2 and --windows at least 1, got {length} and {windows}")
    tokenizer = checkpoint.tokenizer()
    ids = torch.tensor(tokenizer.encode(raw.decode()))  # (N,)
    start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    need = length + 1 - len(start)
    if len(ids) < need + windows - 1:
        raise UsageError(f"the text has {len(ids)} tokens; {windows} windows of {length} need more: a longer text")
    places = [(2 * i + 1) * (len(ids) - need) // (2 * windows) for i in range(windows)]
    return torch.stack([torch.cat((torch.tensor(start, dtype=torch.int64), ids[at : at + need])) for at in places])


def _trained(checkpoint: Checkpoint) -> int:
    """The length that the plain frequencies were trained for, in tokens."""
    config = checkpoint.config
    return int((config.rope_scaling or {}).get("original_max_position_embeddings") or config.max_seq_len)


def _read(path: Path, setting: dict[str, str]) -> list[Row]:
    """Rows of an earlier run; UsageError if they belong to another setting."""
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    found = []
    for line, row in enumerate(rows, 2):
        if set(row) != set(COLUMNS) or None in row.values():
            raise UsageError(f"{path}, line {line}: not a table of perplexities; name another file, or delete this one")
        for key, value in setting.items():
            if row[key] != value:
                raise UsageError(
                    f"{path} holds results with {key} {row[key]}, this run has {key} {value}; name another file"
                )
        try:
            place = int(row["window"]), int(row["first"]), int(row["last"])
            found.append(Row(row["method"], *place, float(row["nats"])))
        except ValueError:
            raise UsageError(f"{path}, line {line}: not numbers; name another file, or delete this one") from None
    return found


def _write(path: Path, setting: dict[str, str], rows: Sequence[Row]) -> None:
    """The whole table, in one rename: a run that is killed leaves the windows done so far."""
    with own_temporary(path.parent, ".ppl") as work:
        new = work / path.name
        with new.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(COLUMNS)
            for row in rows:
                writer.writerow([*setting.values(), row.method, row.window, row.first, row.last, row.nats])
        os.replace(new, path)
