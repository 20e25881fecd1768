"""A harness with a deliberate defect, to test the fuzzer: input that begins with BAD is a finding. Not in NAMES."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llama.errors import UsageError

from . import law


class Harness(law.Harness):
    words = (b"BAD",)

    def seeds(self) -> Iterable[bytes]:
        yield b"good"

    def calls(self, data: bytes) -> Iterator[law.Call]:
        yield lambda: read(data)


def read(data: bytes) -> None:
    if not data.startswith(b"B"):
        raise UsageError("the input must begin with B")
    if data.startswith(b"BAD"):
        raise KeyError("the defect")
