"""Test everything that needs a GPU, and compare its speed with the limits of the GPU and with other programs.

Requires a GPU and a CUDA build of PyTorch. Runs from a copy of this repository; installation is not required:

    python scripts/gpu_check.py --out results --minutes 9 --only correctness
    python scripts/gpu_check.py --out results --minutes 9 --only speed
    python scripts/gpu_check.py --out results --minutes 9 --only more
    python scripts/gpu_check.py --out results --minutes 3 --only change --change stages=4
    python scripts/gpu_check.py --out results --minutes 5 --only tune

A later call with the same folder continues: it skips complete parts and runs failed parts last. Nothing is downloaded.
If transformers is installed, it is timed too. Two parts use the C++ kernels of the CPU, which need platformdirs; it can
be a wheel in a folder (--wheels).

Each part runs in a process of its own, which is killed after twice its estimated time or when --minutes are over. Each
row is appended to rows.jsonl as soon as it is measured, so the rows of a part that crashes or hangs are kept. Each call
ends with a report on all rows so far; its file, for docs/evidence/benchmarks, is named after the GPU. Each call starts
with the ceilings, which are the bandwidth of a copy and the rate of a matrix product; some limits are shares of them.

Without a GPU, `--device cpu --tiny` runs the parts on tiny shapes. This only tests the script.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_parts
import torch
from gpu_parts import COPY, DECODING, MATMUL, PARTS, PREFILL, Row, Run, at_least, holds, info

FINISHED, ERROR = "finished", "error"  # names of the last row of a part: it is complete, or it failed
DECISION = "decision"  # the name of the rows that compare parts
FORK = multiprocessing.get_context("fork")  # a fork need not import PyTorch; this process never touches the GPU
Found = dict[str, dict[str, dict[str, Any]]]  # part -> what -> the last such row


# ------------------------------------------------------------------------------------------------------- rows on disk
def append(file: Path, part: str, row: Row) -> None:
    """Print a row, append it to a file of JSON lines and flush it to the disk."""
    finite = isinstance(row.value, str) or math.isfinite(row.value)  # JSON has no NaN
    line = {"part": part, **row._replace(value=row.value if finite else str(row.value))._asdict()}
    with file.open("ab+") as out:
        if out.tell():
            out.seek(-1, os.SEEK_END)
            if out.read(1) != b"\n":  # a process was killed while it wrote
                out.write(b"\n")
        out.write(json.dumps(line).encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())
    print(formatted(line), flush=True)


def formatted(line: Mapping[str, Any]) -> str:
    """Return a row as text."""
    value = line["value"] if isinstance(line["value"], str) else f"{line['value']:.4g}"
    verdict = {True: "ok  ", False: "FAIL", None: "    "}[line["passed"]]
    expected = f" (expected {line['expected']})" if line["expected"] else ""
    return f"{verdict} {line['part']}: {line['what']} {value} {line['unit']} {line['limit']}".rstrip() + expected


def read(file: Path) -> Found:
    """Return the rows of a file. Later rows replace earlier rows of the same name; truncated lines are skipped."""
    found: Found = {}
    for text in file.read_text(errors="replace").splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):
            row = json.loads(text)
            rows = found.setdefault(row["part"], {})
            for last in (FINISHED, ERROR):  # only the end of the last attempt counts
                if row["what"] in (FINISHED, ERROR):
                    rows.pop(last, None)
            rows[row["what"]] = row
    return found


def number(found: Found, part: str, what: str) -> float:
    """Return the value of a row, NaN if there is none."""
    value = found.get(part, {}).get(what, {}).get("value", math.nan)
    return value if isinstance(value, float | int) else math.nan


# ----------------------------------------------------------------------------------------------------------- one part
def work(name: str, run: Run, file: Path) -> None:
    """Run a part and append its rows. `run_part` calls this in a new process, which starts a process group."""
    os.setpgid(0, 0)
    if run.device.type == "cpu" and run.tiny:
        torch.set_num_threads(1)  # synchronizing threads would take longer than the work
    torch.backends.cuda.enable_cudnn_sdp(False)  # as the loader does on CUDA; comparisons enable it
    began = time.perf_counter()
    try:
        with torch.no_grad():
            for row in PARTS[name].rows(run):
                append(file, name, row)
        if run.device.type == "cuda":
            append(file, name, info("peak memory", torch.cuda.max_memory_allocated(run.device) / 1e9, "GB"))
        append(file, name, info(FINISHED, time.perf_counter() - began, "s"))
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0][:300]
        append(file, name, Row(ERROR, f"{type(error).__name__}: {first}", passed=False))
    sys.stdout.flush()
    os._exit(0)  # skip destructors: the device may have failed


def run_part(name: str, run: Run, file: Path, limit: float) -> None:
    """Run a part in a process, and kill it after `limit` seconds. If it wrote no last row, append an error."""
    size = file.stat().st_size if file.exists() else 0
    process = FORK.Process(target=work, args=(name, run, file))
    process.start()
    try:
        process.join(limit)
        late = process.is_alive()
    finally:
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # the processes that it started, such as compilers
        process.join()
    written = file.read_bytes()[size:].decode(errors="replace") if file.exists() else ""
    if not any(f'"what": "{last}"' in written for last in (FINISHED, ERROR)):
        code = process.exitcode or 0
        why = f"the process ended with {signal.Signals(-code).name if code < 0 else code}"
        append(file, name, Row(ERROR, f"not finished after {limit:.0f} s" if late else why, passed=False))


def plan(found: Found, only: Collection[str], again: bool) -> list[str]:
    """Return the parts to run: the ceilings, then parts that never ran, then parts that did not finish."""
    chosen = [name for name, part in PARTS.items() if {name, part.group} & set(only)]
    new = [name for name in chosen if again or name not in found]
    failed = [name for name in chosen if name not in new and FINISHED not in found[name]]
    always = [name for name, part in PARTS.items() if part.group == "always"]
    return [*always, *(name for name in (*new, *failed) if name not in always)]


# ------------------------------------------------------------------------------------------------------ the decisions
def decisions(found: Found, run: Run) -> Iterator[Row]:
    """Compare parts: the fused kernels with Inductor, quantized weights with bfloat16, this package with transformers.

    A comparison is skipped if one of its rows was not measured.
    """

    def compared(what: str, above: str, below: str, limit: float | None, row: str = DECODING) -> Iterator[Row]:
        ratio = number(found, above, row) / number(found, below, row)
        if not math.isnan(ratio):
            yield info(what, ratio, "x") if limit is None else run.judge(at_least(what, ratio, limit, "x"))

    ours = [
        row
        for size, limit in (("8B", 1.1), ("1B", 1.2))
        for row in compared(f"{size} bf16, fused over Inductor", f"{size} bf16: fused", f"{size} bf16: Inductor", limit)
    ]
    yield from ours
    if len(ours) == 2:
        keep = float(ours[0].value) >= 1.1 and float(ours[1].value) >= 1.2
        yield run.judge(holds("the fused kernels are fast enough to keep (8B: 1.1, 1B: 1.2 times Inductor)", keep))
    for size in ("8B", "1B"):
        for weights, limit in (("int8", 1.6), ("int4", 2.4)):
            goal = limit if size == "8B" else None
            yield from compared(f"{size} {weights} over bf16", f"{size} {weights}: fused", f"{size} bf16: fused", goal)
            way = f"{size} {weights}, fused over Inductor"
            yield from compared(way, f"{size} {weights}: fused", f"{size} {weights}: Inductor", None)
        for theirs in ("transformers", "transformers without cuDNN"):
            for row in (DECODING, PREFILL):
                name = f"{size} bf16, {row}, over {theirs}"
                yield from compared(name, f"{size} bf16: fused", f"{size} bf16: {theirs}", 1.0, row)
    yield from compared("8B bf16, fused over unfused", "8B bf16: fused", "8B bf16: unfused", None)


def report(found: Found, out: Path) -> list[str]:
    """Write the report, named after the GPU, to a folder. Returns the names of the rows that failed."""
    rows = [row for part in found.values() for row in part.values()]
    failed = [f"{row['part']}: {row['what']}" for row in rows if row["passed"] is False]
    machine = {what: row["value"] for what, row in found.get("ceilings", {}).items()}
    slug = re.sub(r"[^a-z0-9]+", "-", str(machine.get("gpu", "unknown")).lower()).strip("-")
    parts = {
        name: [{k: v for k, v in row.items() if k != "part"} for row in rows.values()] for name, rows in found.items()
    }
    document = {"machine": machine, "failed": failed, "parts": parts}
    (out / f"{slug}.json").write_text(json.dumps(document, indent=1) + "\n")
    return failed


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    groups = list(dict.fromkeys(part.group for part in PARTS.values() if part.group != "always"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder for rows and report")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call; parts that do not fit are postponed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to test this script")
    what = f"groups or parts to run; default: all but tune. Groups: {', '.join(groups)}. Parts: {', '.join(PARTS)}"
    default = [group for group in groups if group != "tune"]
    parser.add_argument("--only", nargs="+", choices=[*groups, *PARTS], default=default, metavar="PART", help=what)
    parser.add_argument("--again", action="store_true", help="also run complete parts")
    parser.add_argument("--change", nargs="+", default=["stages=2"], metavar="NAME=N", help=gpu_parts.change.__doc__)
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="folder with wheels to import packages from")
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and torch.version.cuda is None:
        parser.error("this PyTorch is not built for CUDA; to test the script without CUDA: --device cpu --tiny")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run parts, print and save their rows, and write the report. Returns 1 if any row failed."""
    began = time.perf_counter()
    args = parse(argv)
    if args.wheels is not None:
        sys.path.extend(str(path) for path in sorted(args.wheels.glob("*.whl")))  # Python imports from zip files
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "rows.jsonl"
    run = Run(torch.device(args.device), args.tiny, tuple(args.change))
    names, left = plan(read(file), args.only, args.again), 60 * args.minutes
    print(f"Time limit: {args.minutes:g} minutes. Estimated seconds of each part (* may not fit):")
    for name in names:
        left -= 1 if args.tiny else PARTS[name].seconds
        print(f"{'*' if left < 0 else ' '} {PARTS[name].seconds:>4} {name}", flush=True)
    for name in names:
        found = read(file)
        bandwidth, matmul = number(found, "ceilings", COPY) * 1e12, number(found, "ceilings", MATMUL) * 1e12
        run = dataclasses.replace(run, bandwidth=bandwidth, matmul=matmul)
        needed, left = PARTS[name].seconds, 60 * args.minutes - (time.perf_counter() - began)
        if left < (0 if args.tiny else needed):
            why = f"it takes about {needed} s, and {max(0.0, left):.0f} s remain"
            print(f"     {name}: postponed to a later call: {why}", flush=True)  # else a fork would print it again
        else:
            run_part(name, run, file, min(left, 60 if args.tiny else 2 * needed))
        if name == "ceilings" and FINISHED not in read(file).get(name, {}):
            break  # the device does not work, or there is no time
    for row in decisions(read(file), run):
        append(file, DECISION, row)
    failed = report(read(file), args.out)
    print(
        "\n".join([*(f"FAIL {what}" for what in failed), f"{len(failed)} failed; {time.perf_counter() - began:.0f} s"])
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
