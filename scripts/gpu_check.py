"""Check everything that needs a GPU, and time it against what the GPU can do.

On a machine with a GPU and a CUDA build of PyTorch, from a copy of this repository that need not be installed:

    python scripts/gpu_check.py --out results --minutes 9 --only correctness
    python scripts/gpu_check.py --out results --minutes 9 --only speed
    python scripts/gpu_check.py --out results --minutes 9 --only more
    python scripts/gpu_check.py --out results --minutes 3 --only change --change stages=4
    python scripts/gpu_check.py --out results --minutes 5 --only tune

Each call continues in the folder: complete parts are skipped, and parts that failed come last. Nothing is downloaded.
transformers is compared with if it is installed. Two packages that the C++ kernels of the CPU and GGUF files need,
platformdirs and gguf, may be wheels in a folder (--wheels).

Each part runs in a process of its own, which is ended after twice its estimated time. Its rows are appended to
rows.jsonl as they are measured, so those of a part that crashes or hangs are kept. GPU.json, for docs/benchmarks, is
made from them after each call. Ceilings are measured in each call, and limits of speeds are shares of them.

Without a GPU, `--device cpu --tiny` runs every part on tiny shapes; this tests the script and measures nothing.
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

FINISHED, ERROR = "finished", "error"  # the last row of a part: that it is complete, or why it is not
DECISION = "decision"  # the name of the rows that compare parts
FORK = multiprocessing.get_context("fork")  # a fork has PyTorch already; this process never touches the GPU
Found = dict[str, dict[str, dict[str, Any]]]  # part -> what -> the last such row


# ------------------------------------------------------------------------------------------------------- rows on disk
def append(file: Path, part: str, row: Row) -> None:
    """Print a row and append it to a file of JSON lines; it is on the disk when this returns."""
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
    """Return the rows of a file; later ones replace earlier ones. Lines that are not complete are left out."""
    found: Found = {}
    for text in file.read_text(errors="replace").splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):
            row = json.loads(text)
            rows = found.setdefault(row["part"], {})
            for last in (FINISHED, ERROR):  # only the end of the last try counts
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
    """Run a part, in its own process and process group."""
    os.setpgid(0, 0)
    if run.device.type == "cpu" and run.tiny:
        torch.set_num_threads(1)  # synchronizing threads would take longer than the work
    torch.backends.cuda.enable_cudnn_sdp(False)  # as the loader does on CUDA; parts that compare switch it on
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
    os._exit(0)  # without the destructors of a device that may have failed


def run_part(name: str, run: Run, file: Path, limit: float) -> None:
    """Run a part in a process; end it after `limit` seconds. If it wrote no last row, write an error."""
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
    """The parts to run: the ceilings, the parts that never ran, then those that failed."""
    chosen = [name for name, part in PARTS.items() if {name, part.group} & set(only)]
    new = [name for name in chosen if again or name not in found]
    failed = [name for name in chosen if name not in new and FINISHED not in found[name]]
    always = [name for name, part in PARTS.items() if part.group == "always"]
    return [*always, *(name for name in (*new, *failed) if name not in always)]


# ------------------------------------------------------------------------------------------------------ the decisions
def decisions(found: Found, run: Run) -> Iterator[Row]:
    """Compare parts: the fused kernels with Inductor, quantized weights with bfloat16, this package with transformers.

    Rows that were not measured yet have no comparison.
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
        yield run.judge(holds("the fused kernels are fast enough to keep; otherwise delete them", keep))
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
    yield from compared("8B bf16, fused over as written", "8B bf16: fused", "8B bf16: as written", None)


def report(found: Found, out: Path) -> list[str]:
    """Write the report, named after the GPU, into a folder. Returns what failed."""
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
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of the rows and the report")
    parser.add_argument("--minutes", type=float, default=9.0, help="for this call; parts that do not fit are left out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to test this script")
    what = f"{', '.join(groups)}, or parts; default: all but tune. Parts: {', '.join(PARTS)}"
    default = [group for group in groups if group != "tune"]
    parser.add_argument("--only", nargs="+", choices=[*groups, *PARTS], default=default, metavar="PART", help=what)
    parser.add_argument("--again", action="store_true", help="run parts that are complete, too")
    parser.add_argument("--change", nargs="+", default=["stages=2"], metavar="NAME=N", help=gpu_parts.change.__doc__)
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="of wheels to import from")
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and torch.version.cuda is None:
        parser.error("this PyTorch is not built for CUDA; --device cpu --tiny tests the script itself")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run parts; print and save their rows and the report. Returns 1 if any failed."""
    began = time.perf_counter()
    args = parse(argv)
    if args.wheels is not None:
        sys.path.extend(str(path) for path in sorted(args.wheels.glob("*.whl")))  # Python imports from zip files
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "rows.jsonl"
    run = Run(torch.device(args.device), args.tiny, tuple(args.change))
    names, left = plan(read(file), args.only, args.again), 60 * args.minutes
    print(f"{args.minutes:g} minutes; parts with their estimated seconds, * if their time is expected to be over:")
    for name in names:
        left -= 1 if args.tiny else PARTS[name].seconds
        print(f"{'*' if left < 0 else ' '} {PARTS[name].seconds:>4} {name}", flush=True)
    for name in names:
        found = read(file)
        bandwidth, matmul = number(found, "ceilings", COPY) * 1e12, number(found, "ceilings", MATMUL) * 1e12
        run = dataclasses.replace(run, bandwidth=bandwidth, matmul=matmul)
        needed, left = PARTS[name].seconds, 60 * args.minutes - (time.perf_counter() - began)
        if left < (0 if args.tiny else needed):
            why = f"it takes about {needed} s, and {max(0.0, left):.0f} s are left"
            print(f"     {name}: left for another call; {why}", flush=True)  # a fork would print it again
        else:
            run_part(name, run, file, min(left, 60 if args.tiny else 2 * needed))
        if name == "ceilings" and FINISHED not in read(file).get(name, {}):
            break  # there is no device, or no time
    for row in decisions(read(file), run):
        append(file, DECISION, row)
    failed = report(read(file), args.out)
    print(
        "\n".join([*(f"FAIL {what}" for what in failed), f"{len(failed)} failed; {time.perf_counter() - began:.0f} s"])
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
