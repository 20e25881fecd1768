"""The repository's scripts as modules. Each is imported on first use, since most tests need only one."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

__all__ = [
    "annotated",
    "compare_encodings",
    "compare_peers",
    "lesson_svg",
    "make_tiny",
    "one_file",
    "reference",
    "render_lessons",
    "site_hooks",
    "three_back",
    "train_tiny",
]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(name)
