"""Group K: several processes. Most cases are in tests/test_parallel_launch.py and tests/test_parallel.py."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ..test_parallel_launch import PROMPT, Launched

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


def free_port() -> str:
    """A port of this host that no process listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return str(bound.getsockname()[1])


@pytest.mark.slow
def test_a_rank_without_its_master_reports_one_line(tiny_gguf: Path) -> None:
    """Once it also printed torch's stack and ended with the exit code of usage errors."""
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    code, out, err = Launched(*PROMPT, "-m", str(tiny_gguf), **env, CLEARLLAMA_JOIN_SECONDS="1").end(60)
    assert (code, out) == (1, "")
    assert len(err) == 1, err
    assert "rank 1 of 2 did not connect to the others within 1 s" in err[0]
    assert "MASTER_ADDR and MASTER_PORT" in err[0]


def pair(folder: Path, *each: tuple[str, ...]) -> list[tuple[int, str, list[str]]]:
    """Start two ranks, each with its own arguments, and wait for their ends."""
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "CLEARLLAMA_STORE": str(folder / "store")}
    ranks = [Launched(*args, **env, RANK=str(i), LOCAL_RANK=str(i)) for i, args in enumerate(each)]
    return [rank.end(60) for rank in ranks]


def test_rank_0_decides_the_prompt_the_seed_and_the_end(tiny_gguf: Path, tmp_path: Path, clearllama: Any) -> None:
    model = ("-m", str(tiny_gguf), "--raw", "--dtype", "float32", "--device", "cpu", "--json", "--temp", "1.5")
    first = ("generate", "hello there", *model, "-n", "12", "--seed", "5")
    other = ("generate", "the hello the", *model, "-n", "3", "--seed", "6")
    (code, out, err), (code1, out1, err1) = pair(tmp_path, first, other)
    assert (code, code1) == (0, 0), (err, err1)
    assert (out1, err1) == ("", [])
    alone, wrong = (json.loads(clearllama(*args).stdout)["tokens"] for args in (first, other))
    assert json.loads(out)["tokens"] == alone
    assert alone[:3] != wrong


@pytest.mark.slow
def test_ranks_with_different_options_are_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    options = ("--raw", "hello", "-m", str(tiny_gguf), "--device", "cpu", "--dtype", "float32")
    for number, more in enumerate((("--kv-cache", "int8"), ("--rope", "half"), ("--rope-theta", "5"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        ends = pair(folder, ("generate", *options), ("generate", *options, *more))
        assert ends[0][0] == 1
        assert "start all ranks with the same model and options" in ends[0][2][-1]
        assert ends[1][1] == ends[0][1] == ""


def test_a_waiting_rank_listens_on_the_loopback_interface_only(tiny_gguf: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    launched = Launched(*PROMPT, "-m", str(tiny_gguf), **env, CLEARLLAMA_JOIN_SECONDS="60")
    addresses: set[str] = set()
    deadline = time.monotonic() + 50
    while not addresses and time.monotonic() < deadline and launched.process.poll() is None:
        time.sleep(0.1)
        addresses = listening(launched.marked())
    launched.process.kill()
    launched.end()
    assert addresses
    local = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and its IPv6 form
    assert {address.split(":")[0] for address in addresses} <= local, addresses


def listening(pids: list[int]) -> set[str]:
    """The addresses these processes listen on, in the notation of /proc/net."""
    found, sockets = set(), set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(entry))
            except OSError:
                continue
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = row.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                found.add(columns[1])
    return found
