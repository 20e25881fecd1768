"""Checkpoints: what a path holds (open.py), one file for each format."""

from .open import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
