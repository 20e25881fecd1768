"""Sources of models: the default model, repositories of the Hugging Face hub, official families."""

from .models import DEFAULT, default_model, resolve

__all__ = ["DEFAULT", "default_model", "resolve"]
