"""Sources of models: the default model and repositories of the Hugging Face hub."""

from .models import DEFAULT, default_model, resolve

__all__ = ["DEFAULT", "default_model", "resolve"]
