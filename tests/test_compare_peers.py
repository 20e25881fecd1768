"""scripts/compare_peers.py: ratios, table and machine from raw numbers; a whole run with peers that are scripts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from . import tiny
from .scripts import compare_peers

SCRIPT = Path(compare_peers.__file__)


def run_of(round_: int, engine: str, peer: str | None, decode: float, prefill: float, row: str = "int4"):
    return {
        "round": round_, "row": row, "engine": engine, "peer": peer, "decode_tps": decode, "prefill_tps": prefill
    }  # fmt: skip


def test_a_ratio_is_taken_within_a_round() -> None:
    # The machine is half as fast in round 2 and a tenth in round 3; we are twice as fast throughout.
    runs = [
        run
        for round_, pace in ((1, 1.0), (2, 0.5), (3, 0.1))
        for run in (
            run_of(round_, "ours", None, 80 * pace, 300 * pace),
            run_of(round_, "theirs", "llama.cpp", 40 * pace, 600 * pace),
        )
    ]
    random.Random(0).shuffle(runs)
    (found,) = compare_peers.ratios(runs)
    assert (found["row"], found["engine"], found["peer"], found["rounds"]) == ("int4", "ours", "llama.cpp", 3)
    assert found["decode_ratio"] == pytest.approx(2)
    assert found["prefill_ratio"] == pytest.approx(0.5)


def test_the_median_is_that_of_the_ratios_and_what_is_missing_is_left_out() -> None:
    runs = [
        run_of(1, "ours", None, 10, 1), run_of(1, "theirs", "llama.cpp", 10, 1),
        run_of(2, "ours", None, 90, 1), run_of(2, "theirs", "llama.cpp", 30, 1),
        run_of(3, "ours", None, 40, 1), run_of(3, "theirs", "llama.cpp", 80, 1),
        run_of(4, "ours", None, 1e9, 1),
        run_of(5, "theirs", "llama.cpp", 1e-9, 1),
    ]  # fmt: skip
    (found,) = compare_peers.ratios(runs)
    assert found["rounds"] == 3
    assert found["decode_ratio"] == 1  # of 1, 3 and 0.5, where the ratio of the medians is 40 / 30
    assert compare_peers.ratios(runs[-2:]) == []


def test_rows_are_not_mixed() -> None:
    runs = [
        run_of(1, "ours", None, 10, 1, "bf16"), run_of(1, "theirs", "llama.cpp", 5, 1, "bf16"),
        run_of(1, "HF", "transformers", 4, 1, "bf16"),
        run_of(1, "ours", None, 30, 1, "int8"), run_of(1, "theirs", "llama.cpp", 10, 1, "int8"),
    ]  # fmt: skip
    found = {(ratio["row"], ratio["peer"]): ratio["decode_ratio"] for ratio in compare_peers.ratios(runs)}
    assert found == {("bf16", "llama.cpp"): 2, ("bf16", "transformers"): 2.5, ("int8", "llama.cpp"): 3}


def test_the_table_is_markdown_of_medians_and_ratios() -> None:
    runs = [
        run_of(1, "ours", None, 10, 1000), run_of(1, "theirs", "llama.cpp", 8, 500),
        run_of(2, "ours", None, 20, 3000), run_of(2, "theirs", "llama.cpp", 10, 1000),
        run_of(1, "ours", None, 6, 10, "bf16"), run_of(1, "HF", "transformers", 4, 40, "bf16"),
    ]  # fmt: skip
    assert compare_peers.table(runs, 512).splitlines() == [
        "| weights | engine | decode at 512, tok/s | prefill 512, tok/s | decode / llama.cpp | prefill / llama.cpp |"
        " decode / transformers | prefill / transformers |",
        "|---|---|---|---|---|---|---|---|",
        "| int4 | ours | 15.0 | 2,000 | 1.62 | 2.50 |  |  |",
        "| int4 | theirs | 9.0 | 750 |  |  |  |  |",
        "| bf16 | ours | 6.0 | 10 |  |  | 1.50 | 0.25 |",
        "| bf16 | HF | 4.0 | 40 |  |  |  |  |",
    ]


def test_the_machine_is_read_from_linux() -> None:
    cpuinfo = "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu avx2 avx512f avx512_bf16x\n\nprocessor\t: 1\n"
    facts = compare_peers.machine(cpuinfo, "MemTotal:       16777216 kB\nMemFree: 5 kB\n")
    assert facts == {"cpu": "A Processor", "flags": ["avx2", "avx512f"], "memory_gib": 16.0}
    assert compare_peers.machine("", "") == {}
    assert compare_peers.here()["cores"] >= 1


def test_the_rows_of_a_folder_and_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no hf, bf16\.gguf, q8_0\.gguf, q4_0\.gguf"):
        compare_peers.rows_of(tmp_path)
    (tmp_path / "hf").mkdir()
    for kind in ("bf16", "q8_0", "q4_0"):
        (tmp_path / f"{kind}.gguf").write_bytes(b"")
    rows = compare_peers.rows_of(tmp_path)
    assert list(rows) == ["bf16", "int8", "int4"]
    for row, engines in rows.items():
        ours = [engine for engine in engines if engine.peer is None]
        assert sum("--compile" in engine.options for engine in ours) * 2 == len(ours)
        assert "llama.cpp" in {engine.peer for engine in engines}
        assert len({engine.name for engine in engines}) == len(engines)
        quantized = {engine.options[:2] for engine in ours if engine.path.name == "hf"}
        assert quantized == {("--dtype", "bfloat16") if row == "bf16" else ("--quantize", row)}
        assert all(engine.path.exists() for engine in engines)
    files = {engine.path for engine in compare_peers.rows_of(tmp_path / "bf16.gguf")["file"]}
    assert files == {tmp_path / "bf16.gguf"}


def test_what_runs_clearllama_is_understood_by_bench(tmp_path: Path) -> None:
    from llama.cli import build_parser

    class Sizes:
        prompt_tokens, new_tokens, threads, peers_python = 9, 4, 1, "python"

    (ours, compiled, peer, _) = compare_peers.rows_of(tmp_path / "x.gguf")["file"]
    python, _, module, *words = compare_peers.command(compiled, Sizes)
    args = build_parser().parse_args(words)
    assert (python, module) == (sys.executable, "llama")
    assert (args.model, args.prompt_tokens, args.new_tokens, args.threads) == (str(tmp_path / "x.gguf"), "9", 4, 1)
    assert (args.compile, args.json, args.quiet, args.reps) == ("on", True, True, 1)
    assert "--compile" not in compare_peers.command(ours, Sizes)
    assert compare_peers.command(peer, Sizes)[:4] == ["python", str(SCRIPT), "--peer", "transformers"]


def test_a_run_takes_turns_prints_the_table_and_keeps_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def ask(words: list[str]) -> dict[str, object]:
        if "--check" in words:
            return {words[words.index("--peer") + 1]: "1.2.3"}
        if "--peer" not in words:
            order.append("compiled" if "--compile" in words else "eager")
            return {"decode_tps": 30.0, "prefill_tps": 40.0, "bandwidth_gbs": 5.0 + len(order)}
        order.append(words[words.index("--peer") + 1])
        if order[-1] == "llama.cpp" and order.count("llama.cpp") == 2:
            raise RuntimeError("fell over")
        return {"decode_tps": 10.0, "prefill_tps": 20.0}

    model, out = tiny.write_gguf(tmp_path / "tiny.gguf"), tmp_path / "out.json"
    monkeypatch.setattr(compare_peers, "ask", ask)
    monkeypatch.setattr(
        sys, "argv", ["x", "--model", str(model), "--rounds", "3", "--json", str(out), "--threads", "7"]
    )
    assert compare_peers.main() == 1
    shown, told = capsys.readouterr()
    turn = ["eager", "compiled", "transformers", "llama.cpp"]
    assert order == [*turn, *turn[::-1], *turn]
    facts = json.loads(out.read_text())
    assert [(run["round"], run["engine"]) for run in facts["failures"]] == [(2, "llama.cpp")]
    assert len(facts["results"]) == 11
    assert {ratio["rounds"] for ratio in facts["ratios"] if ratio["peer"] == "llama.cpp"} == {2}
    assert {(ratio["decode_ratio"], ratio["prefill_ratio"]) for ratio in facts["ratios"]} == {(3.0, 2.0)}
    assert facts["settings"]["threads"] == 7
    assert facts["bandwidth_gbs"] == 5 + (7 + 8) / 2  # the middle of 1, 2, 7, 8, 9, 10
    rows = [line.split(" | ") for line in shown.splitlines() if line.startswith("| file")]
    assert [row[1] for row in rows] == ["clearllama", "clearllama --compile", "transformers, bfloat16", "llama.cpp"]
    assert "transformers 1.2.3" in shown
    assert "3 rounds, 512 prompt tokens, 64 new, 7 threads" in shown
    assert told.splitlines()[-1] == "compare_peers: 1 runs failed, the last llama.cpp: fell over"


@pytest.mark.skipif(sys.platform == "win32", reason="the peers' python is a script with #!")
@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("#!/bin/sh\necho noise >&2; echo 'ImportError: no such thing' >&2; exit 3\n", "ImportError: no such thing"),
        ("#!/bin/sh\nexit 3\n", "ended with code 3"),
        (None, "No such file or directory"),
    ],
)
def test_a_peer_that_is_missing_is_a_clear_line_before_anything_runs(
    tmp_path: Path, python: str | None, message: str
) -> None:
    peers = tmp_path / "python"
    if python is not None:
        peers.write_text(python)
        peers.chmod(0o755)
    words = ["--model", str(tiny.write_gguf(tmp_path / "tiny.gguf")), "--peers-python", str(peers)]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert f"transformers can't run in {peers}: " in line
    assert f"{message}; install transformers there" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "must be at least 1"),
        (["--rows", "file,int5"], "unknown row 'int5'"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    model = tiny.write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(sys, "argv", ["x", "--model", str(model), *options])
    with pytest.raises(SystemExit) as stopped:
        compare_peers.main()
    assert message in capsys.readouterr().err + str(stopped.value)
