"""Tokenizers: one interface (base.py) and one file for each kind of vocabulary."""

from .base import Decoder, Tokenizer, token_ids
from .common import Named
from .open import is_tokenizer, open_tokenizer

__all__ = ["Decoder", "Named", "Tokenizer", "is_tokenizer", "open_tokenizer", "token_ids"]
