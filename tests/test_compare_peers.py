"""scripts/compare_peers.py: its statistics on known numbers, and complete runs in which scripts replace the engines."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import tiny
from .scripts import compare_peers

SCRIPT = Path(compare_peers.__file__)


def run_of(round_: int, engine: str, peer: str | None, decode: float, prefill: float, row: str = "int4"):
    return {
        "round": round_, "row": row, "engine": engine, "peer": peer, "decode_tps": decode, "prefill_tps": prefill
    }  # fmt: skip


def test_a_ratio_is_computed_within_a_round() -> None:
    # The machine runs at half speed in round 2 and at a tenth in round 3; clearllama is always twice as fast.
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


def test_the_result_is_the_median_of_ratios_over_rounds_with_both_engines() -> None:
    runs = [
        run_of(1, "ours", None, 10, 1), run_of(1, "theirs", "llama.cpp", 10, 1),
        run_of(2, "ours", None, 90, 1), run_of(2, "theirs", "llama.cpp", 30, 1),
        run_of(3, "ours", None, 40, 1), run_of(3, "theirs", "llama.cpp", 80, 1),
        run_of(4, "ours", None, 1e9, 1),
        run_of(5, "theirs", "llama.cpp", 1e-9, 1),
    ]  # fmt: skip
    (found,) = compare_peers.ratios(runs)
    assert found["rounds"] == 3
    assert found["decode_ratio"] == 1  # the median of 1, 3 and 0.5; the ratio of the medians is 40 / 30
    assert compare_peers.ratios(runs[-2:]) == []


def test_rows_are_not_mixed() -> None:
    runs = [
        run_of(1, "ours", None, 10, 1, "bf16"), run_of(1, "theirs", "llama.cpp", 5, 1, "bf16"),
        run_of(1, "HF", "transformers", 4, 1, "bf16"),
        run_of(1, "ours", None, 30, 1, "int8"), run_of(1, "theirs", "llama.cpp", 10, 1, "int8"),
    ]  # fmt: skip
    found = {(ratio["row"], ratio["peer"]): ratio["decode_ratio"] for ratio in compare_peers.ratios(runs)}
    assert found == {("bf16", "llama.cpp"): 2, ("bf16", "transformers"): 2.5, ("int8", "llama.cpp"): 3}


def test_a_turn_without_prefill_counts_only_for_decoding() -> None:
    runs = [
        run_of(1, "ours", None, 10, 30), run_of(1, "theirs", "llama.cpp", 10, 10),
        run_of(2, "ours", None, 30, 1), run_of(2, "theirs", "llama.cpp", 10, 1),
        run_of(3, "ours", None, 50, 99), run_of(3, "theirs", "llama.cpp", 10, 1),
    ]  # fmt: skip
    del runs[2]["prefill_tps"], runs[5]["prefill_tps"]
    (found,) = compare_peers.ratios(runs)
    assert (found["rounds"], found["decode_ratio"], found["prefill_ratio"]) == (3, 3, 3)
    (found,) = compare_peers.ratios([runs[2], runs[3]])
    assert (found["rounds"], found["decode_ratio"], found["prefill_ratio"]) == (1, 3, None)
    ours, theirs = compare_peers.table([runs[2], runs[3]], 512).splitlines()[2:]
    assert ours == "| int4 | ours | 30.0 |  |  | 3.00 |  |"
    assert theirs == "| int4 | theirs | 10.0 | 1 |  |  |  |"


def test_the_table_shows_medians_and_ratios_as_markdown() -> None:
    runs = [
        run_of(1, "ours", None, 10, 1000), run_of(1, "theirs", "llama.cpp", 8, 500),
        run_of(2, "ours", None, 20, 3000), run_of(2, "theirs", "llama.cpp", 10, 1000),
        run_of(1, "ours", None, 6, 10, "bf16"), run_of(1, "HF", "transformers", 4, 40, "bf16"),
    ]  # fmt: skip
    runs[0]["share"], runs[2]["share"] = 0.5, 0.75
    assert compare_peers.table(runs, 512).splitlines() == [
        "| weights | engine | decode at 512, tok/s | prefill 512, tok/s | share of bandwidth |"
        " decode / llama.cpp | prefill / llama.cpp | decode / transformers | prefill / transformers |",
        "|---|---|---|---|---|---|---|---|---|",
        "| int4 | ours | 15.0 | 2,000 | 0.62 | 1.62 | 2.50 |  |  |",
        "| int4 | theirs | 9.0 | 750 |  |  |  |  |  |",
        "| bf16 | ours | 6.0 | 10 |  |  |  | 1.50 | 0.25 |",
        "| bf16 | HF | 4.0 | 40 |  |  |  |  |  |",
    ]


def test_the_machine_is_parsed_from_cpuinfo_and_meminfo() -> None:
    cpuinfo = "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu avx2 avx512f avx512_bf16x\n\nprocessor\t: 1\n"
    facts = compare_peers.machine(cpuinfo, "MemTotal:       16777216 kB\nMemFree: 5 kB\n")
    assert facts == {"cpu": "A Processor", "flags": ["avx2", "avx512f"], "memory_gib": 16.0}
    assert compare_peers.machine("", "") == {}
    assert compare_peers.this_machine()["cores"] >= 1


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
        assert sum("compile" in engine.options for engine in ours) * 2 == len(ours)
        assert "llama.cpp" in {engine.peer for engine in engines}
        assert len({engine.name for engine in engines}) == len(engines)
        expected = {"dtype": "bfloat16"} if row == "bf16" else {"quantize": row}
        of_hf = [engine.options for engine in ours if engine.path.name == "hf"]
        assert of_hf == [expected, {**expected, "compile": True}]
        assert all(engine.path.exists() for engine in engines)
    files = {engine.path for engine in compare_peers.rows_of(tmp_path / "bf16.gguf")["file"]}
    assert files == {tmp_path / "bf16.gguf"}


# ------------------------------------------------------------------------------------------------------------- turns
def test_a_turn_starts_after_the_prompt_and_processes_it_only_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[tuple[list[int], int]] = []
    clock = 0.0

    def step(tokens: list[int], past: int) -> int:
        nonlocal clock
        fed.append((tokens, past))
        clock += 2.0 if past == 0 else 0.25
        return 10 + len(tokens) + past

    monkeypatch.setattr(compare_peers.time, "perf_counter", lambda: clock)
    prompt = [7, 8, 9, 7]
    answers = list(compare_peers.turns(step, prompt, 3, ["decode\n", "decode\n", "prefill\n"]))
    decoded = [([14], 4), ([15], 5), ([16], 6)]
    assert fed == [(prompt, 0), *decoded, *decoded, (prompt, 0), *decoded]
    assert answers == [{"decode_tps": 4.0}, {"decode_tps": 4.0}, {"decode_tps": 4.0, "prefill_tps": 2.0}]


def test_clearllamas_steps_decode_greedily_and_its_bytes_per_token_equal_those_of_bench(tmp_path: Path) -> None:
    from llama import load_model
    from llama.generate import generate
    from llama.sampling import SamplingParams
    from llama.tools import benchmark

    path = tiny.write_gguf(tmp_path / "tiny.gguf")
    import torch

    threads = torch.get_num_threads()
    spec = {"path": str(path), "options": {"dtype": "float32"}, "prompt_tokens": 5, "new_tokens": 6, "threads": threads}
    step, vocabulary, read = compare_peers.load_clearllama(spec)
    model = load_model(path, "cpu", "float32")
    prompt = compare_peers.random_prompt(vocabulary, 5)
    expected = [token.id for token in generate(model, prompt, SamplingParams(temperature=0.0, max_new_tokens=6))]
    assert len(set(expected)) > 1
    first = step(prompt, 0)
    for _ in range(2):  # the second time reuses the prompt's cache
        found = [first]
        for position in range(5, 10):
            found.append(step([found[-1]], position))
        assert found == expected
    assert read == benchmark.measure(model, 5, 2, reps=1).step_bytes


PEER = """#!{python}
import json, os, sys
spec = json.loads(sys.argv[-1])
name = spec["engine"]
with open({log!r}, "a") as log:
    print(name, os.getpid(), file=log, flush=True)
    if name == "check":
        print(json.dumps({{spec["peer"]: "1.2.3"}}))
        sys.exit()
    if {start!r} == name:
        sys.exit("first line\\nno such weights")
    print(json.dumps({{"bytes_per_token": None if name != "clearllama" else 10**9}}), flush=True)
    for number, line in enumerate(sys.stdin, 1):
        print(name, line.strip(), file=log, flush=True)
        if number == 2 and name in {dies!r}:
            sys.exit("fell over")
        if number == 2 and name in {prints!r}:
            print({line!r}, flush=True)
            continue
        speed = 30.0 if name == "clearllama" else 10.0
        answer = {{"bandwidth_gbs": 40.0 + 20 * number}} if name == "memory" else {{"decode_tps": speed}}
        if line.strip() == "prefill" and name != "memory":
            answer["prefill_tps"] = 2 * speed
        print(json.dumps(answer), flush=True)
"""


def stand_ins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str, **defects: Any
) -> tuple[int, list[list[str]], dict[str, Any]]:
    """Run main() with a script in place of every engine. Returns exit code, log of the turns, and the JSON.

    Also asserts that no process is left.
    """
    settings = {"start": "", "dies": "", "prints": "", "line": "", **defects}
    script, log, out = tmp_path / "python", tmp_path / "log", tmp_path / "out.json"
    script.write_text(PEER.format(python=sys.executable, log=str(log), **settings))
    script.chmod(0o755)
    model = tiny.write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(compare_peers.sys, "executable", str(script))
    monkeypatch.setattr(compare_peers, "PAUSE", 0)
    words = ["--model", str(model), "--peers-python", str(script), "--json", str(out), "--threads", "7"]
    monkeypatch.setattr(sys, "argv", ["x", *words, "--rounds", "3", "--prefill-rounds", "1", *options])
    try:
        code = compare_peers.main()
    finally:
        seen = [line.split() for line in log.read_text().splitlines()]
        for _, what in seen:
            if what.isdigit():
                with pytest.raises(ProcessLookupError):
                    os.kill(int(what), 0)
    return code, [line for line in seen if not line[1].isdigit()], json.loads(out.read_text())


scripts_run = pytest.mark.skipif(sys.platform == "win32", reason="the engines are a script with #!")


@scripts_run
def test_engines_take_turns_and_every_result_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, seen, facts = stand_ins(tmp_path, monkeypatch)
    assert code == 0
    shown, _ = capsys.readouterr()
    order = ["memory", "clearllama", "clearllama", "transformers", "llama.cpp"]
    assert [name for name, _ in seen] == [*order, *order[::-1], *order]
    assert [kind for _, kind in seen] == ["prefill"] * 5 + ["decode"] * 10
    starts = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines() if line.split()[1].isdigit()]
    assert starts == ["check", "check", *order]  # one process per engine for all rounds
    assert (len(facts["results"]), facts["failures"]) == (12, [])
    assert {(ratio["decode_ratio"], ratio["prefill_ratio"], ratio["rounds"]) for ratio in facts["ratios"]} == {
        (3, 2 * 30 / 20, 3)
    }
    assert facts["bandwidth_gbs"] == 80
    ours = [run for run in facts["results"] if run["engine"] == "clearllama"]
    assert [run["share"] for run in ours] == [30 / 60, 30 / 80, 30 / 100]  # 1 GB per token
    assert not any("share" in run for run in facts["results"] if run["peer"])
    assert (facts["settings"]["threads"], facts["settings"]["prefill_rounds"]) == (7, 1)
    rows = [line.split(" | ") for line in shown.splitlines() if line.startswith("| file")]
    assert [row[1:5] for row in rows] == [
        ["clearllama", "30.0", "60", "0.38"],
        ["clearllama --compile", "30.0", "60", "0.38"],
        ["transformers, bfloat16", "10.0", "20", ""],
        ["llama.cpp", "10.0", "20", ""],
    ]
    assert "transformers 1.2.3" in shown
    assert "3 rounds (1 with prefill), 512 prompt tokens, 16 new, 7 threads" in shown


@scripts_run
@pytest.mark.parametrize(
    ("defect", "round_", "error"),
    [
        ({"start": "llama.cpp"}, 0, "no such weights"),
        ({"dies": ["llama.cpp"]}, 2, "fell over"),
        ({"prints": ["llama.cpp"], "line": "hello"}, 2, "expected a line of JSON, got 'hello'"),
        ({"prints": ["llama.cpp"], "line": "[3]"}, 2, "expected a line of JSON, got '[3]'"),
        ({"prints": ["llama.cpp"], "line": '{"decode_tps": 0}'}, 2, "expected decode_tps above 0, got"),
        ({"prints": ["llama.cpp"], "line": '{"speed": 3}'}, 2, "expected decode_tps above 0, got"),
    ],
)
def test_a_failed_engine_is_dropped_and_the_others_continue(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    defect: dict[str, Any],
    round_: int,
    error: str,
) -> None:
    code, _, facts = stand_ins(tmp_path, monkeypatch, **defect)
    assert code == 1
    (failure,) = facts["failures"]
    assert (failure["round"], failure["row"], failure["engine"], failure["peer"]) == (
        round_, "file", "llama.cpp", "llama.cpp"
    )  # fmt: skip
    assert failure["error"].startswith(error)
    counts = [[run["engine"] for run in facts["results"]].count(name) for name in ("clearllama", "llama.cpp")]
    assert counts == [3, max(round_ - 1, 0)]
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith(f"compare_peers: 1 failed, the last llama.cpp: {error}")
    assert any(line.startswith(f"round {round_}") and f"failed: {error}" in line for line in errors)


@scripts_run
def test_without_a_bandwidth_there_is_no_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, facts = stand_ins(tmp_path, monkeypatch, start="memory")
    assert (code, facts["bandwidth_gbs"], len(facts["results"])) == (1, None, 12)
    assert not any("share" in run for run in facts["results"])


@scripts_run
def test_an_interrupt_ends_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = compare_peers.Worker.turn
    calls = 0

    def interrupted(self: compare_peers.Worker, kind: str, keys: set[str]) -> dict[str, float]:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return turn(self, kind, keys)

    monkeypatch.setattr(compare_peers.Worker, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stand_ins(tmp_path, monkeypatch)
    assert calls == 4


@scripts_run
def test_output_of_libraries_does_not_reach_the_answers(tmp_path: Path) -> None:
    script = tmp_path / "noisy.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\nimport compare_peers\n"
        "def noisy(spec):\n    print('hello')\n    yield {'speed': spec['speed']}\n"
        "compare_peers.WORKERS['noisy'] = noisy\ncompare_peers.worker({'engine': 'noisy', 'speed': 3})\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ('{"speed": 3}\n', "hello\n")


@pytest.mark.skipif(sys.platform == "win32", reason="the peers' Python is a script with #!")
@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("#!/bin/sh\necho noise >&2; echo 'ImportError: no such thing' >&2; exit 3\n", "ImportError: no such thing"),
        ("#!/bin/sh\nexit 3\n", "ended with code 3"),
        (None, "No such file or directory"),
    ],
)
def test_a_missing_peer_is_a_one_line_error_before_any_measurement(
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
        (["--prefill-rounds", "-1"], "must be at least 0"),
        (["--rows", "file,int5"], "unknown row 'int5'"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_error_messages_name_bad_arguments(
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
