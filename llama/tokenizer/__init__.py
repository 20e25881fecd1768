"""Tokenizers: one interface (base.py) and one file for each kind of vocabulary."""

from .base import Decoder, Tokenizer
from .open import is_tokenizer, open_tokenizer

__all__ = ["Decoder", "Tokenizer", "is_tokenizer", "open_tokenizer"]
