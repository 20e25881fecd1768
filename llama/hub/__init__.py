"""Sources of models: named models, Hugging Face repositories, official families."""

from .named import DEFAULT, resolve

__all__ = ["DEFAULT", "resolve"]
