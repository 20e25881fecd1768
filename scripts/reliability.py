"""Run the fault suite and write its results to docs/evidence/reliability.md.

usage: python scripts/reliability.py [--quick | --keep] [--reports FOLDER] [--output docs/evidence/reliability.md]

It runs the cases of all faults, then the slow cases, then plants every defect. --quick skips the slow cases and the
defects, and the page states that. --keep runs nothing: after a row or a defect was added or reworded, it writes the
present texts with the results that the page has. --reports keeps cases.xml, slow.xml and planted.xml in a folder and
does not repeat a run whose report exists. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.faults.planted import DEFECTS  # noqa: E402
from tests.faults.rows import GROUPS, METHODS, ROWS, SILENT  # noqa: E402

INTRODUCTION = """\
# Reliability

`python scripts/reliability.py` runs the fault suite and writes this page.

Run of {run}.

A *row* is a kind of bad input or fault. A *case* is a test of a row with one or more *inputs*, such as a file truncated
at each byte, with each bit flipped, or with each number replaced by extreme values. "Not run" marks rows and defects
that are not part of this run.

A new process opens each file. It may use 10 seconds and 1 GiB. It must not change the folder or run code of the file.
It succeeds, or it ends with the right exit code, nothing on stdout, and one line with the file, the item, the finding
and the remedy.

"""

SILENCE = """\
## Faults that cause no error in other programs

For {count} rows, similar programs often continue without an error, so the absence of an error proves nothing. Each of
these rows has a case that compares two independent computations. To verify the case, a defect is planted in the
source; the case must fail.

"""


CLASSES = """\
## Classes of faults

A case tests one fault. The following methods search for whole classes of faults. The column *found* lists the faults
that a method found; all of them are fixed. The column *planted defect* names a defect that the method detects.

"""


@dataclasses.dataclass
class Tally:
    """The results of the cases of a row."""

    cases: int = 0
    inputs: int = 0
    passed: int = 0
    skipped: int = 0
    names: list[str] = dataclasses.field(default_factory=list)

    @property
    def failed(self) -> int:
        return self.cases - self.passed - self.skipped


def pytest(report: Path, *options: str) -> list[ElementTree.Element]:
    """The test cases of a run of pytest, or of its existing report."""
    if not report.exists():
        fresh = report.with_suffix(".new")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={fresh}", *options]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode > 1:  # 0: all passed, 1: some failed, above: it did not run
            raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}")
        fresh.rename(report)
    return list(ElementTree.parse(report).iter("testcase"))


def outcome_of(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def tally(cases: list[ElementTree.Element]) -> dict[str, Tally]:
    """Row -> results. A case of two rows counts for both."""
    found: dict[str, Tally] = collections.defaultdict(Tally)
    for case in cases:
        properties = [(p.get("name"), p.get("value")) for p in case.iter("property")]
        inputs = sum(int(value or 1) for name, value in properties if name == "inputs")
        for row in {value for name, value in properties if name == "row" and value}:
            mine = found[row]
            mine.cases += 1
            outcome = outcome_of(case)
            mine.passed += outcome == "passed"
            mine.skipped += outcome == "skipped"
            mine.inputs += 0 if outcome == "skipped" else max(inputs, 1)
            name = (case.get("name") or "").split("[")[0]
            if name not in mine.names:
                mine.names.append(name)
    return found


def page(found: dict[str, Tally], caught: dict[str, str], run: str) -> str:
    """The text of docs/evidence/reliability.md. `run` is the date of the run and the versions."""

    def total(name: str, rows: list[str]) -> int:
        return sum(getattr(found[row], name) for row in rows if row in found)

    lines = [
        *INTRODUCTION.format(run=run).splitlines(),
        "| group | rows | cases | inputs | passed | skipped here | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for group, title in GROUPS.items():
        rows = [row for row in ROWS if row[0] == group]
        numbers = [total(what, rows) for what in ("cases", "inputs", "passed", "skipped", "failed")]
        lines.append(f"| {group} {title} | {len(rows)} | " + " | ".join(f"{n:,}" for n in numbers) + " |")
    numbers = [total(what, list(ROWS)) for what in ("cases", "inputs", "passed", "skipped", "failed")]
    lines.append(f"| all | {len(ROWS)} | " + " | ".join(f"{n:,}" for n in numbers) + " |")
    lines += [
        "",
        *SILENCE.format(count=len(SILENT)).splitlines(),
        "| row | fault | planted defect | detected |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {d.row} | {ROWS[d.row]} | {d.what} | {caught.get(label(d), 'not run')} |"
        for d in DEFECTS
        if d.row in SILENT
    ]
    others = [d for d in DEFECTS if d.row not in SILENT]
    if others:
        lines += ["", "Defects planted in other rows:", "", "| row | fault | planted defect | detected |"]
        lines += ["|---|---|---|---|"]
        lines += [f"| {d.row} | {ROWS[d.row]} | {d.what} | {caught.get(label(d), 'not run')} |" for d in others]
    lines += ["", *CLASSES.splitlines(), "| class | method | found | cost | planted defect |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(method) + " |" for method in METHODS]
    lines += ["", "## Every row", "", "| row | fault | cases | inputs | tests |", "|---|---|---|---|---|"]
    for row, what in ROWS.items():
        mine = found.get(row, Tally())
        cases = f"{mine.cases} | {mine.inputs:,}" if row in found else "not run | not run"
        tests = ", ".join(f"`{n}`" for n in mine.names[:4]) + (
            f" and {len(mine.names) - 4} more" if len(mine.names) > 4 else ""
        )
        lines.append(f"| {row} | {what} | {cases} | {tests} |")
    return "\n".join(lines) + "\n"


def numbers(cells: list[str]) -> list[int]:
    return [int(cell.replace(",", "")) for cell in cells]


def results(text: str) -> tuple[dict[str, Tally], dict[str, str], str]:
    """The arguments of `page` that wrote `text`."""
    table = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in text.splitlines() if line.startswith("| ")]
    found: dict[str, Tally] = {}
    for row, _, cases, inputs, tests in (cells for cells in table if len(cells) == 5 and cells[0] in ROWS):
        if cases != "not run":
            names = re.findall(r"`(\w+)`", tests) + [""] * sum(numbers(re.findall(r"and (\d+) more", tests)))
            count, opened = numbers([cases, inputs])
            found[row] = Tally(count, opened, count, names=names)
    for cells in table:  # the page has the skipped and failed cases per group only
        if len(cells) == 7 and (first := next((row for row in found if cells[0].startswith(f"{row[0]} ")), None)):
            skipped, failed = numbers(cells[5:])
            found[first].skipped = skipped
            found[first].passed -= skipped + failed
    caught = {f"{cells[0]} {cells[2]}": cells[3] for cells in table if len(cells) == 4}
    (run,) = re.findall(r"Run of (.+)\.$", text, re.MULTILINE)
    return found, caught, run


def this_run(quick: bool) -> str:
    """Return the date, the versions and the machine."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "safetensors", "tokenizers")
    )
    machine = f"Python {platform.python_version()}, {versions}, {platform.system()}, {os.cpu_count()} cores"
    skipped = ", without slow cases and planted defects (`--quick`)" if quick else ""
    return f"{datetime.date.today()} with {machine}{skipped}"


def label(defect: object) -> str:
    return f"{defect.row} {defect.what}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="skip the slow cases and the planted defects")
    parser.add_argument(
        "--reports", type=Path, metavar="FOLDER", help="keep the reports of pytest, and use existing ones"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "evidence" / "reliability.md")
    parser.add_argument("--keep", action="store_true", help="run nothing; keep the results of the page")
    args = parser.parse_args()
    if args.keep:
        args.output.write_text(page(*results(args.output.read_text())))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        reports = args.reports or Path(folder)
        reports.mkdir(parents=True, exist_ok=True)
        cases = pytest(reports / "cases.xml", "--row", "any")
        planted = []
        if not args.quick:
            slow = ("-m", "slow", "--dist", "load")
            cases += pytest(reports / "slow.xml", "--row", "any", *slow)
            planted = pytest(reports / "planted.xml", *slow, "tests/faults/test_planted.py")
    verdicts = {"passed": "yes", "failed": "**no**"}
    caught = {
        (case.get("name") or "").split("[", 1)[-1].removesuffix("]"): verdicts[outcome_of(case)] for case in planted
    }
    found = tally(cases)
    args.output.write_text(page(found, caught, this_run(args.quick)))
    failed = sum(mine.failed for mine in found.values()) + list(caught.values()).count("**no**")
    if missing := [row for row in ROWS if row not in found]:
        print(f"no case ran for the rows {', '.join(missing)}; install the extras: pip install -e '.[test,serve]'")
        failed += len(missing)
    print(f"{args.output}: {len(cases)} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
