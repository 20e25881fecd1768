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
    from .inside import SITES as SITES
    from .inside import Activations as Activations
    from .inside import Place as Place
    from .inside import activations as activations
    from .inside import patch as patch
    from .patching import Grid as Grid
    from .patching import patching_grid as patching_grid
    from .steering import ControlVector as ControlVector
    from .steering import control_vector as control_vector
    from .steering import steer as steer

# name -> the module that defines it
_HOME = {
    "SITES": "inside",
    "Activations": "inside",
    "Place": "inside",
    "activations": "inside",
    "patch": "inside",
    "Grid": "patching",
    "patching_grid": "patching",
    "ControlVector": "steering",
    "control_vector": "steering",
    "steer": "steering",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
