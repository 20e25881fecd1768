"""Sources of models: named models, Hugging Face repositories, official families."""

from .named import DEFAULT, default_model, resolve

__all__ = ["DEFAULT", "default_model", "resolve"]
