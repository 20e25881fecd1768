"""scripts/compare_peers.py: ratios within a round, and turns after the same prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import tiny
from .scripts import compare_peers


def run_of(number: int, engine: str, peer: str | None, decode: float, **prefill: float) -> dict[str, Any]:
    return {"round": number, "row": "int4", "engine": engine, "peer": peer, "decode_tps": decode, **prefill}


def test_the_table_shows_medians_of_speeds_and_of_ratios_within_a_round() -> None:
    runs = [
        run_of(1, "ours", None, 10, prefill_tps=1000), run_of(1, "theirs", "llama.cpp", 10, prefill_tps=500),
        run_of(2, "ours", None, 90), run_of(2, "theirs", "llama.cpp", 30),
        run_of(3, "ours", None, 40), run_of(3, "theirs", "llama.cpp", 80),
        run_of(4, "ours", None, 50),
    ]  # fmt: skip
    assert compare_peers.table(runs, 512).splitlines() == [
        "| weights | engine | decode at 512, tok/s | prefill 512, tok/s | decode / llama.cpp | prefill / llama.cpp |",
        "|---|---|---|---|---|---|",
        "| int4 | ours | 45.0 | 1,000 | 1.00 | 2.00 |",  # the median of 1, 3 and 0.5; that of the medians is 1.5
        "| int4 | theirs | 30.0 | 500 |  |  |",
    ]


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
    speed = {"decode_tps": 4.0}
    assert answers == [speed, speed, {**speed, "prefill_tps": 2.0}]


def test_clearllamas_steps_decode_greedily(tmp_path: Path) -> None:
    from llama import load_model
    from llama.generate import generate
    from llama.sampling import SamplingParams

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
