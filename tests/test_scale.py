"""docs/guides/sizing.md shows the command's output and numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llama.cli import main

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/guides/sizing.md").read_text()
SHOWN = re.findall(r"```console\n\$ clearllama (.*?)\n(.*?)```", TEXT, re.DOTALL)
ROWS = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\| \d+B .*", TEXT, re.MULTILINE)]


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_the_shown_output_is_that_of_the_command(command: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(command.split())
    assert capsys.readouterr().out == output


def test_the_table_has_the_numbers_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(ROWS) == 18
    for model, weights, gpus, needs, speed, most in ROWS:
        scheme = [] if weights == "bfloat16" else ["--quantize", weights]
        run = ["-m", f"llama-3.1-{model.lower()}", "--gpus", f"{gpus}xH100", "--context", "8192", "--batch", "8"]
        main(["plan", *run, *scheme, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert needs == f"{found['memory']['total'] / 1e9:.1f}"
        fitting = (
            (f"{found['decode']['tps_each']:,.0f}", f"{found['largest_batch']:,}") if found["fits"] else ("-", "-")
        )
        assert (speed, most) == fitting
