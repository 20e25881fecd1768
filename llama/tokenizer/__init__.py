"""Tokenizers: one interface (base.py) and one file for each kind of vocabulary."""

from .base import Decoder, Tokenizer, token_ids
from .common import Named
from .open import open_tokenizer

__all__ = ["Decoder", "Named", "Tokenizer", "open_tokenizer", "token_ids"]
