"""scripts/compare_peers.py: its statistics on known numbers, and complete runs in which scripts replace the engines."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from . import tiny
from .scripts import compare_peers


def run_of(
    round_: int, engine: str, peer: str | None, decode: float, prefill: float, row: str = "int4", busy: int = 0
) -> dict[str, Any]:
    return {
        "round": round_, "row": row, "busy": busy, "engine": engine, "peer": peer, "decode_tps": decode,
        "prefill_tps": prefill,
    }  # fmt: skip


def test_a_ratio_is_computed_within_a_round() -> None:
    # The machine runs at half speed in round 2 and at a tenth in round 3; clearllama is always twice as fast.
    runs = []
    for round_, pace in ((1, 1.0), (2, 0.5), (3, 0.1)):
        runs.append(run_of(round_, "ours", None, 80 * pace, 300 * pace))
        runs.append(run_of(round_, "theirs", "llama.cpp", 40 * pace, 600 * pace))
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


def test_speeds_beside_busy_loops_are_divided_by_the_same_engines_idle_ones() -> None:
    runs = [
        run_of(1, "ours", None, 10, 1000), run_of(1, "theirs", "llama.cpp", 8, 500),
        run_of(2, "ours", None, 30, 3000), run_of(2, "theirs", "llama.cpp", 8, 500),
        run_of(1, "ours", None, 14, 1500, busy=2), run_of(1, "theirs", "llama.cpp", 2, 500, busy=2),
        run_of(2, "ours", None, 18, 1, busy=2),
    ]  # fmt: skip
    del runs[6]["prefill_tps"]
    runs[0]["share"], runs[2]["share"], runs[4]["share"] = 0.5, 0.5, 7.0
    assert compare_peers.table(runs, 64).splitlines() == [
        "| weights | engine | decode at 64, tok/s | prefill 64, tok/s | share of bandwidth |"
        " decode beside 2 busy loops (/ idle) | prefill beside 2 busy loops (/ idle) |"
        " decode / llama.cpp | prefill / llama.cpp |",
        "|---|---|---|---|---|---|---|---|---|",
        "| int4 | ours | 20.0 | 2,000 | 0.50 | 16.0 (0.80) | 1,500 (0.75) | 2.50 | 4.00 |",
        "| int4 | theirs | 8.0 | 500 |  | 2.0 (0.25) | 500 (1.00) |  |  |",
    ]
    assert compare_peers.ratios(runs) == compare_peers.ratios(runs[:4])


def test_the_rows_of_a_folder_and_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no hf, bf16\.gguf, q8_0\.gguf, q4_0\.gguf"):
        compare_peers.rows_of(tmp_path)
    (tmp_path / "hf").mkdir()
    for kind in ("bf16", "q8_0", "q4_0"):
        (tmp_path / f"{kind}.gguf").write_bytes(b"")
    rows = compare_peers.rows_of(tmp_path)
    assert list(rows) == ["bf16", "int8", "int4"]
    for row, engines in rows.items():
        expected = {"dtype": "bfloat16"} if row == "bf16" else {"quantize": row}
        of_hf = [engine.options for engine in engines if engine.peer is None and engine.path.name == "hf"]
        assert of_hf == [expected, {**expected, "compile": True}]
        assert {"llama.cpp", "OpenVINO"} <= {engine.peer for engine in engines}
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
    prompt, kinds = [7, 8, 9, 7], ["decode\n", "decode\n", "prefill\n"]
    answers = list(compare_peers.turns(compare_peers.Loaded(step, 99), prompt, 3, kinds))
    decoded = [([14], 4), ([15], 5), ([16], 6)]
    assert fed == [(prompt, 0), *decoded, *decoded, (prompt, 0), *decoded]
    speed = {"decode_tps": 4.0, "decoded": 3}
    assert answers == [speed, speed, {**speed, "prefill_tps": 2.0}]

    # Without trimming, every turn starts with the prompt, and the reported speeds are the same.
    fed.clear()
    untrimmed = compare_peers.turns(compare_peers.Loaded(step, 99, trims=False), prompt, 3, kinds)
    assert list(untrimmed) == answers
    assert fed == [(prompt, 0), *decoded] * 3

    # A token takes a quarter of a second: the second one ends at the limit, the third one after it.
    for limit, count in ((0.5, 2), (0.51, 3), (0.01, 1), (9.0, 3)):
        assert list(compare_peers.turns(compare_peers.Loaded(step, 99), prompt, 3, ["decode"], limit)) == [
            {"decode_tps": 4.0, "decoded": count}
        ]


def test_clearllamas_steps_decode_greedily_and_its_bytes_per_token_equal_those_of_bench(tmp_path: Path) -> None:
    from llama import load_model
    from llama.generate import generate
    from llama.sampling import SamplingParams
    from llama.tools import benchmark

    path = tiny.write_gguf(tmp_path / "tiny.gguf")
    import torch

    threads = torch.get_num_threads()
    spec = {"path": str(path), "options": {"dtype": "float32"}, "prompt_tokens": 5, "new_tokens": 6, "threads": threads}
    loaded = compare_peers.load_clearllama(spec)
    step = loaded.step
    model = load_model(path, "cpu", "float32")
    prompt = compare_peers.random_prompt(loaded.vocabulary, 5)
    expected = [token.id for token in generate(model, prompt, SamplingParams(temperature=0.0, max_new_tokens=6))]
    assert len(set(expected)) > 1
    first = step(prompt, 0)
    for _ in range(2):  # the second time reuses the prompt's cache
        found = [first]
        for position in range(5, 10):
            found.append(step([found[-1]], position))
        assert found == expected
    assert loaded.read == benchmark.measure(model, 5, 2, reps=1)["bytes_per_token"]


SETTINGS: dict[str, Any] = {"start": "", "dies": "", "number": 2, "prints": "", "line": ""}
PEER = """#!{python} -IS
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
        if number == {number} and name in {dies!r}:
            sys.exit("fell over")
        if number == 2 and name in {prints!r}:
            print({line!r}, flush=True)
            continue
        speed = (30.0 if name == "clearllama" else 10.0) / (1 if number <= 3 else 4)
        answer = {{"bandwidth_gbs": 40.0 + 20 * number}} if name == "memory" else {{"decode_tps": speed, "decoded": 16}}
        if line.strip() == "prefill" and name != "memory":
            answer["prefill_tps"] = 2 * speed
        print(json.dumps(answer), flush=True)
"""


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def started(log: Path, name: str) -> list[int]:
    """Return the process ids of an engine."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [int(pid) for engine, pid, *_ in lines if engine == name and pid.isdigit()]


def stand_ins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str, **defects: Any
) -> tuple[int, list[list[str]], dict[str, Any]]:
    """Run main() with a script in place of every engine. Returns exit code, log of the turns, and the JSON.

    From the fourth turn on, the engines run at a quarter of their speed. Also asserts that no process is left.
    """
    model = tiny.write_gguf(tmp_path / "tiny.gguf")
    log, out = tmp_path / "log", tmp_path / "out.json"
    script = tmp_path / "python"
    script.write_text(PEER.format(python=sys.executable, log=str(log), **{**SETTINGS, **defects}))
    script.chmod(0o755)
    monkeypatch.setattr(compare_peers.sys, "executable", str(script))
    monkeypatch.setattr(compare_peers, "PAUSE", 0)
    words = ["--model", str(model), "--peers-python", str(script), "--json", str(out), "--threads", "7"]
    monkeypatch.setattr(sys, "argv", ["x", *words, "--rounds", "3", "--prefill-rounds", "1", *options])
    try:
        code = compare_peers.main()
    finally:
        seen = [line.split() for line in log.read_text().splitlines()]
        assert not any(running(int(what)) for _, what, *_ in seen if what.isdigit())
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
    assert [name for name, _ in seen] == [*order, *order[::-1], *order]  # one process per engine for all rounds
    assert [kind for _, kind in seen] == ["prefill"] * 5 + ["decode"] * 10
    assert len(started(tmp_path / "log", "llama.cpp")) == 1
    assert (len(facts["results"]), facts["failures"]) == (12, [])
    assert {(ratio["decode_ratio"], ratio["prefill_ratio"], ratio["rounds"]) for ratio in facts["ratios"]} == {
        (3, 2 * 30 / 20, 3)
    }
    assert facts["bandwidth_gbs"] == 80
    ours = [run for run in facts["results"] if run["engine"] == "clearllama"]
    assert [run["share"] for run in ours] == [30 / 60, 30 / 80, 30 / 100]  # 1 GB per token
    assert not any("share" in run for run in facts["results"] if run["peer"])
    assert (facts["settings"]["threads"], facts["settings"]["prefill_rounds"]) == (7, 1)
    assert compare_peers.table(facts["results"], 512) in shown


@scripts_run
@pytest.mark.parametrize(
    ("defect", "round_", "error"),
    [
        ({"start": "llama.cpp"}, 0, "no such weights"),
        ({"dies": ["llama.cpp"]}, 2, "fell over"),
        ({"prints": ["llama.cpp"], "line": "[3]"}, 2, "expected a line of JSON"),
        ({"prints": ["llama.cpp"], "line": '{"decode_tps": 0}'}, 2, "expected decode_tps, decoded above 0"),
    ],
)
def test_a_failed_engine_is_dropped_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: dict[str, Any], round_: int, error: str
) -> None:
    code, _, facts = stand_ins(tmp_path, monkeypatch, **defect)
    assert code == 1
    (failure,) = facts["failures"]
    assert (failure["round"], failure["row"], failure["peer"]) == (round_, "file", "llama.cpp")
    assert failure["error"].startswith(error)
    counts = [[run["engine"] for run in facts["results"]].count(name) for name in ("clearllama", "llama.cpp")]
    assert counts == [3, max(round_ - 1, 0)]


@scripts_run
def test_all_rounds_run_again_beside_busy_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turn, beside = compare_peers.Worker.turn, []

    def counting(self: compare_peers.Worker, kind: str, keys: set[str]) -> dict[str, float]:
        beside.append(sum(map(running, started(tmp_path / "log", "busy"))))
        return turn(self, kind, keys)

    monkeypatch.setattr(compare_peers.Worker, "turn", counting)
    code, seen, facts = stand_ins(tmp_path, monkeypatch, "--busy", "2", "--new-tokens", "20")
    assert (code, facts["failures"]) == (0, [])
    assert beside == [0] * 15 + [2] * 15
    assert seen[15:] == seen[:15]
    assert [run["busy"] for run in facts["results"]] == [0] * 12 + [2] * 12
    assert {(ratio["decode_ratio"], ratio["rounds"]) for ratio in facts["ratios"]} == {(3, 3)}
    assert facts["bandwidth_gbs"] == 80  # of the rounds without busy loops
    assert compare_peers.table(facts["results"], 512) in capsys.readouterr().out


@scripts_run
@pytest.mark.parametrize(("defect", "error"), [("busy", "no such weights"), ("", "a busy loop ended before")])
def test_without_its_busy_loop_a_speed_beside_it_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str, error: str
) -> None:
    busy_loops = compare_peers.busy_loops

    @contextlib.contextmanager
    def ending(count: int) -> Iterator[None]:
        with busy_loops(count) as loops:
            yield
            for loop in loops:
                loop.process.kill()
                loop.process.wait()

    monkeypatch.setattr(compare_peers, "busy_loops", ending)
    code, _, facts = stand_ins(tmp_path, monkeypatch, "--busy", "1", start=defect)
    (failure,) = facts["failures"]
    assert (code, failure["engine"], failure["error"][: len(error)]) == (1, "busy loops", error)
    assert [run["busy"] for run in facts["results"]] == [0] * 12


# ---------------------------------------------------------------------------------------------------------- OpenVINO
class Stateful:
    """Stands in for OpenVINO: a model whose next id depends on all ids in its cache, and on their positions."""

    def __init__(self) -> None:
        self.cached: list[tuple[int, int]] = []
        self.settings: dict[str, Any] = {}
        self.products: list[Any] = []

    def module(self) -> ModuleType:
        """Return the module `openvino`; model.logits is Result(Convert(MatMul(activations)))."""
        node = SimpleNamespace
        product = node(get_type_name=lambda: "MatMul", input_value=lambda index: "activations")
        product.input = lambda index: node(replace_source_output=self.products.append)
        convert = node(get_type_name=lambda: "Convert", input_value=lambda index: node(get_node=lambda: product))
        result = node(get_type_name=lambda: "Result", input_value=lambda index: node(get_node=lambda: convert))
        size = node(get_length=lambda: 50)
        logits = node(node=result, partial_shape=[None, None, size])
        model = node(output={"logits": logits}.__getitem__, validate_nodes_and_infer_types=lambda: None)
        module = ModuleType("openvino")
        module.Core = lambda: node(read_model=lambda path: model, compile_model=self.compile)
        module.opset13 = ModuleType("openvino.opset13")
        module.opset13.slice = lambda *words: node(output=lambda index: words)
        return module

    def compile(self, model: Any, device: str, settings: dict[str, Any]) -> Any:
        self.settings = settings
        return SimpleNamespace(create_infer_request=lambda: self)

    def reset_state(self) -> None:
        self.cached = []

    def infer(self, inputs: dict[str, Any], share_inputs: bool) -> dict[str, Any]:
        import numpy as np

        self.cached += zip(inputs["input_ids"][0].tolist(), inputs["position_ids"][0].tolist(), strict=True)
        assert inputs["attention_mask"].tolist() == [[1] * len(self.cached)]
        return {"logits": np.eye(50)[None, [self.following(self.cached)]]}

    @staticmethod
    def following(cached: list[tuple[int, int]]) -> int:
        return sum(token * (3 * position + 1) for token, position in cached) % 50


def test_every_turn_of_openvino_decodes_from_the_same_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Stateful()
    module = fake.module()
    monkeypatch.setitem(sys.modules, "openvino", module)
    monkeypatch.setitem(sys.modules, "openvino.opset13", module.opset13)
    loaded = compare_peers.load_openvino({"path": "folder", "threads": 3})
    assert (loaded.vocabulary, loaded.read) == (50, None)
    assert (fake.settings["INFERENCE_NUM_THREADS"], fake.settings["INFERENCE_PRECISION_HINT"]) == (3, "bf16")
    ((source, start, stop, step, axis),) = fake.products  # the last of the tokens
    assert (source, start, step, axis) == ("activations", [-1], [1], [1])
    assert stop[0] > 10**9
    prompt = [7, 11, 13]
    expected = list(prompt)
    for _ in range(5):
        expected.append(fake.following([(token, position) for position, token in enumerate(expected)]))
    for answer in compare_peers.turns(loaded, prompt, 4, ["prefill", "decode", "decode"]):
        assert answer["decoded"] == 4
        assert [token for token, _ in fake.cached] == expected[:7]  # the last token is not fed
        loaded.step([1], 7)
    with pytest.raises(ValueError, match="has 8 tokens and can't be trimmed to 3"):
        loaded.step([1], 3)
