"""docs/guides/sizing.md shows the command's output, and its examples are consistent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llama.cli import main
from llama.config import ModelConfig

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/guides/sizing.md").read_text()
SHOWN = re.findall(r"```console\n\$ clearllama (.*?)\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def rows(heading: str) -> list[dict[str, str]]:
    """The rows of the first table after a heading, each as column -> cell."""
    lines = TEXT[TEXT.index(heading) :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(table[0], cells, strict=True)) for cells in table[2:]]


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["plan", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_the_shown_output_is_that_of_the_command(command: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(command.split())
    assert capsys.readouterr().out == output


def test_the_table_has_the_numbers_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows("### Llama 3.1 on 1, 8 and 16 H100")
    wanted = [(m, w, n) for m in ("8B", "70B", "405B") for w in ("bfloat16", "int8", "int4") for n in ("1", "8", "16")]
    assert [(row["model"], row["weights"], row["GPUs"]) for row in table] == wanted
    for row in table:
        scheme = [] if row["weights"] == "bfloat16" else ["--quantize", row["weights"]]
        model = f"configs/llama-3.1-{row['model'].lower()}.json"
        run = ["-m", model, "--gpus", f"{row['GPUs']}xH100", "--context", "8192", "--batch", "8", *scheme]
        found = facts(capsys, *run)
        memory, speeds = found["memory"], ["-"] * 3
        if found["fits"]:
            decode = found["decode"]["tps_each"], found["decode"]["tps_batch"]
            speeds = [*(f"{value:,.0f}" for value in decode), f"{found['largest_batch']:,}"]
        expected = {
            "weights, GB": f"{memory['weights'] / 1e9:.1f}",
            "keys, values, GB": f"{memory['kv_cache'] / 1e9:.1f}",
            "in all, with activations and reserve, GB": f"{memory['total'] / 1e9:.1f}",
            "fits in 80": "yes" if found["fits"] else "no",
            **dict(zip(("tok/s each", "tok/s in all", "most sequences"), speeds, strict=True)),
        }
        assert {key: row[key] for key in expected} == expected, row


def test_the_numbers_in_the_text_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    on = {n: facts(capsys, "-m", "llama-3.1-8b", "--gpus", f"{n}xH100", "--batch", str(n)) for n in (8, 16)}
    assert f"{2 * on[8]['decode']['tps_batch']:,.0f} tokens per second" in TEXT
    assert f"one copy on 16 GPUs is {on[16]['decode']['tps_batch']:,.0f}." in TEXT
    for name in ("8b", "70b", "405b"):
        config = ModelConfig(**json.loads((ROOT / f"configs/llama-3.1-{name}.json").read_text()))
        assert f"{config.n_params * 2 / 1e9:.1f} GB for {name.upper()}" in TEXT


def test_the_shares_follow_from_the_rates_in_the_table() -> None:
    from llama.tools.plan import GPUS, REACHED

    table = rows("### What programs reach")
    for row in table:
        share = float(row["GB/s of a GPU"]) * 1e9 / GPUS["a100"].bandwidth
        assert row["share"] == f"{share:.2f}"
    plain = [float(row["share"]) for row in table if row["weights"] == "bfloat16"]
    assert (min(plain), max(plain)) == REACHED


def test_the_vllm_commands_use_all_gpus() -> None:
    served = re.findall(r"^vllm serve DST (.*?)(?:\s+#.*)?$", TEXT, re.MULTILINE)
    assert len(served) == 3
    assert [("--pipeline-parallel-size 2" in line, "--tensor-parallel-size 8" in line) for line in served] == [
        (False, True), (True, True), (True, True),
    ]  # fmt: skip
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    compile(code, "docs/guides/sizing.md", "exec")
    copies, tensor = (int(re.search(pattern, code)[1]) for pattern in (r"concurrency=(\d+)", r'tensor_parallel_size": (\d+)'))  # type: ignore[index]  # fmt: skip
    assert f"copies of the engine: {copies * tensor} GPUs" in code
