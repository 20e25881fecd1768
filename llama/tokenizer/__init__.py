"""Tokenizers: one small interface (base.py), one file for each kind of vocabulary."""

from .base import Decoder, Tokenizer

__all__ = ["Decoder", "Tokenizer"]
