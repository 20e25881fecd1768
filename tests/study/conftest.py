"""Fixtures of the study's tests: the C++ kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llama.engine import kernels

from .. import tiny


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> Iterator[None]:
    """Remove the C++ kernel from tiny.FUNCTIONS on machines where it cannot be built."""
    with pytest.MonkeyPatch.context() as patch:
        if not kernels.ready():
            patch.delitem(tiny.FUNCTIONS, "kernel")
        yield
