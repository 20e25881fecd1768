"""The study of RoPE and of the decoder: questions answered by running the decoder's own code, and the model's inside.

report.py defines the report of a topic and figure.py a figure. topics/ has one file per topic, bugs.py the common bugs.
Only the command line imports this folder.

The public API; each name is imported on first use (docs/guides/inside.md):

>>> from llama import study
>>> with study.activations(llm, "resid_post.*") as seen:
...     llm.generate("The capital of France is")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .inside import SITES, Activations, Place, activations, patch
    from .patching import Grid, patching_grid
    from .steering import ControlVector, control_vector, steer

__all__ = [
    "SITES", "Activations", "ControlVector", "Grid", "Place", "activations", "control_vector", "patch", "patching_grid",
    "steer",
]  # fmt: skip
MODULES = ("inside", "patching", "steering")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (importlib.import_module(f".{module}", __name__) for module in MODULES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))
