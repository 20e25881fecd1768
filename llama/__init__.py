"""clearllama: the LLaMA you can see through. The public API; each name is imported on first use.

>>> import llama
>>> llm = llama.load("smollm2-135m-instruct")
>>> llm.generate("The capital of France is", max_new_tokens=8).text
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .cache import KVCache as KVCache
    from .config import ModelConfig as ModelConfig
    from .errors import LlamaError as LlamaError
    from .generation.session import Session as Session
    from .loader import load as load
    from .loader import load_model as load_model
    from .loader import load_tokenizer as load_tokenizer
    from .model import Transformer as Transformer
    from .rope import apply_rotary_emb as apply_rotary_emb
    from .rope import apply_rotary_emb_real as apply_rotary_emb_real
    from .rope import apply_rotary_pos_emb as apply_rotary_pos_emb
    from .rope import precompute_freqs_cis as precompute_freqs_cis
    from .rope import rotate_half as rotate_half
    from .rope_scaling import inverse_frequencies as inverse_frequencies
    from .sampling import SamplingParams as SamplingParams
    from .text import Completion as Completion
    from .text import Llama as Llama
    from .tokenizer import Tokenizer as Tokenizer
    from .tools.convert import quantize as quantize

# module -> the names it defines. Importing torch takes a second, and `clearllama --help` should not.
_NAMES = {
    "cache": ["KVCache"],
    "config": ["ModelConfig"],
    "errors": ["LlamaError"],
    "generation.session": ["Session"],
    "loader": ["load", "load_model", "load_tokenizer"],
    "model": ["Transformer"],
    "rope": [
        *("apply_rotary_emb", "apply_rotary_emb_real", "apply_rotary_pos_emb", "precompute_freqs_cis", "rotate_half"),
    ],
    "rope_scaling": ["inverse_frequencies"],
    "sampling": ["SamplingParams"],
    "text": ["Completion", "Llama"],
    "tokenizer": ["Tokenizer"],
    "tools.convert": ["quantize"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'llama' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
