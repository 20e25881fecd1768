"""Fixtures of the tests of inside/: transformers with the tiny model's weights."""

from __future__ import annotations

from typing import Any

import pytest

from llama.model import Transformer

from .. import tiny


@pytest.fixture(scope="module")
def both() -> tuple[Transformer, Any]:
    """The tiny model, and transformers' with the same weights and eager attention, which returns its weights."""
    theirs = tiny.transformers_model()
    theirs.set_attn_implementation("eager")
    return tiny.model(), theirs
