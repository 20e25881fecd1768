"""Checkpoints: what a path holds (open.py), one file for each format."""

from .base import Checkpoint
from .open import open_checkpoint, read_tokenizer

__all__ = ["Checkpoint", "open_checkpoint", "read_tokenizer"]
