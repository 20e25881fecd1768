"""Where models come from: named models, repositories of the Hugging Face hub, official families."""

from .named import DEFAULT, resolve

__all__ = ["DEFAULT", "resolve"]
