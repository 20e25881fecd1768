"""Fixtures of the study's tests: the C++ kernels, transformers with the tiny model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from llama.engine import kernels
from llama.model import Transformer

from .. import tiny


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> Iterator[None]:
    """Remove the C++ kernel from tiny.FUNCTIONS on machines where it cannot be built."""
    with pytest.MonkeyPatch.context() as patch:
        if not kernels.ready():
            patch.delitem(tiny.FUNCTIONS, "kernel")
        yield


@pytest.fixture(scope="module")
def both() -> tuple[Transformer, Any]:
    """The tiny model, and transformers' with the same weights and eager attention, which returns its weights."""
    theirs = tiny.transformers_model()
    theirs.set_attn_implementation("eager")
    return tiny.model(), theirs
