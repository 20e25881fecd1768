"""Tools to look into a model: reading and changing tensors by name, interventions, patching, steering, and traces.

hooks.py reads and changes tensors, and the other files use it: intervene.py, patching.py and steering.py change a
model, trace.py records a forward pass, explain.py compares one block with numpy. trace_page/ draws a trace.

__all__ is the public API; each name is imported on first use (docs/guides/inside.md). For example:

>>> from llama import inside
>>> with inside.activations(llm, "resid_post.*") as seen:
...     llm.generate("The capital of France is")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ablation import AblationGrid, ablation_grid
    from .hooks import SITES, Activations, Place, activations, patch
    from .jacobian import JacobianLens, fit_jacobian_lens
    from .patching import Grid, patching_grid
    from .steering import ControlVector, control_vector, steer

__all__ = [
    "SITES", "AblationGrid", "Activations", "ControlVector", "Grid", "JacobianLens", "Place", "ablation_grid",
    "activations", "control_vector", "fit_jacobian_lens", "patch", "patching_grid", "steer",
]  # fmt: skip
MODULES = ("ablation", "hooks", "jacobian", "patching", "steering")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (importlib.import_module(f".{module}", __name__) for module in MODULES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))
