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
    from .cache import KVCache
    from .config import ModelConfig
    from .errors import LlamaError
    from .loader import load, load_model, load_tokenizer
    from .model import Transformer
    from .rope import apply_rotary_emb, apply_rotary_emb_real, apply_rotary_pos_emb, precompute_freqs_cis, rotate_half
    from .rope_scaling import inverse_frequencies
    from .sampling import SamplingParams
    from .text import Completion, Llama, Session
    from .tokenizer import Tokenizer
    from .tools.convert import quantize

__all__ = [
    "Completion", "KVCache", "Llama", "LlamaError", "ModelConfig", "SamplingParams", "Session", "Tokenizer",
    "Transformer", "__version__", "apply_rotary_emb", "apply_rotary_emb_real", "apply_rotary_pos_emb",
    "inverse_frequencies", "load", "load_model", "load_tokenizer", "precompute_freqs_cis", "quantize", "rotate_half",
]  # fmt: skip
# Modules that import torch, which takes a second, are last: `clearllama --help` should not import torch.
MODULES = ("errors", "config", "sampling", "tokenizer", "rope", "model", "text", "loader", "tools.convert")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'llama' has no attribute {name!r}")
    modules = (importlib.import_module(f".{module}", __name__) for module in MODULES)
    globals()[name] = value = next(getattr(module, name) for module in modules if hasattr(module, name))
    return value


def __dir__() -> list[str]:
    return __all__
