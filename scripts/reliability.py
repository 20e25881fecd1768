"""Run the fault suite and write its results to docs/evidence/reliability.md.

usage: python scripts/reliability.py [--quick] [--reports FOLDER] [--output docs/evidence/reliability.md]

It runs the cases of all faults, then the slow cases, then plants every defect. --quick skips the slow cases and the
defects, and the page states that. --reports keeps cases.xml, slow.xml and planted.xml in a folder and does not repeat
a run whose report exists. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import importlib.metadata
import os
import platform
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

`python scripts/reliability.py` runs the fault suite and writes this page. This is its run of
{today}, with {versions}{quick}.

A *row* is a kind of bad input or fault. A *case* is a test of it with one or many *inputs*: files truncated at each
byte, each bit flipped, each number replaced by extreme values. A file is opened by a new process, with a limit of 10
seconds and 1 GiB, a canary that hostile code would touch, and a folder that must not change. The process succeeds, or
it ends with the right exit code, nothing on stdout, and one line with the file, the item, the finding and the remedy.

"""

SILENCE = """\
## Faults that cause no error in other programs

For {count} rows, similar programs often continue without an error, so the absence of an error proves nothing. Each of
these rows has a case that compares two independent computations. Each case was verified: a defect was planted in the
source, and the case failed.

"""


CLASSES = """\
## Classes of faults

A case tests one fault. The following methods search classes of faults. The column *found* lists what a method found;
all of it is fixed. The column *planted defect* names a defect that the method detects.

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


def page(found: dict[str, Tally], caught: dict[str, str], quick: bool) -> str:
    """The text of docs/evidence/reliability.md."""

    def total(name: str, rows: list[str]) -> int:
        return sum(getattr(found[row], name) for row in rows if row in found)

    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "safetensors", "tokenizers")
    )
    lines = [
        *INTRODUCTION.format(
            today=datetime.date.today(),
            versions=f"Python {platform.python_version()}, {versions}, {platform.system()}, {os.cpu_count()} cores",
            quick=", without slow cases and planted defects (`--quick`)" if quick else "",
        ).splitlines(),
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
        tests = ", ".join(f"`{n}`" for n in mine.names[:4]) + (
            f" and {len(mine.names) - 4} more" if len(mine.names) > 4 else ""
        )
        lines.append(f"| {row} | {what} | {mine.cases} | {mine.inputs:,} | {tests} |")
    return "\n".join(lines) + "\n"


def label(defect: object) -> str:
    return f"{defect.row} {defect.what}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="skip the slow cases and the planted defects")
    parser.add_argument(
        "--reports", type=Path, metavar="FOLDER", help="keep the reports of pytest, and use existing ones"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "evidence" / "reliability.md")
    args = parser.parse_args()
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
    args.output.write_text(page(found, caught, args.quick))
    failed = sum(mine.failed for mine in found.values()) + list(caught.values()).count("**no**")
    print(f"{args.output}: {len(cases)} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
