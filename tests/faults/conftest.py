"""Run the command on bad inputs in a child process with limits, a canary and a check of the folder."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path

import pytest

from ..forked import Forked
from .harness import Outcome, snapshot

Try = Callable[..., Outcome]


@pytest.fixture
def attempt(
    forked: Forked,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Try:
    """Run `clearllama ARGS` in a child: attempt("inspect", path).

    The child has 10 seconds of CPU time and 1 GiB of addresses beyond those of the imports. CANARY names a file that
    only code in an input could create. The folder of the test must be unchanged after the command, to the byte;
    writes=(patterns,) names the files that the command may write. file_size, before: as in Forked.run.
    """
    canary = tmp_path.parent / f"{tmp_path.name}.canary"
    monkeypatch.setenv("CANARY", str(canary))

    def run(
        *args: object,
        stdin: bytes | Path | None = None,
        seconds: int = 10,
        memory: int = 1 << 30,
        writes: tuple[str, ...] = (),
        file_size: int = 0,
        before: str = "",
    ) -> Outcome:
        earlier = snapshot(tmp_path)
        done = forked.run(tuple(str(a) for a in args), stdin, seconds, memory, file_size=file_size, before=before)
        later = snapshot(tmp_path)
        for state in (earlier, later):
            for name in [name for name in state if any(fnmatch.fnmatchcase(name, pattern) for pattern in writes)]:
                del state[name]
        assert later == earlier, f"{args}: files were changed, created or deleted"
        assert not canary.exists(), f"{args}: code in the input was executed"
        return Outcome(args, done.returncode, done.stdout, done.stderr)

    return run
