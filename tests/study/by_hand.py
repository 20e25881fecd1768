"""The formulas of the decoder in numpy's float64, as an independent reference for the tests.

Nothing here imports from `llama`; the library must compute the same numbers. Letters: N positions, D head_dim.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from torch import Tensor

Array = np.ndarray[Any, Any]

# Settings of a law: the same examples on every machine and in every run.
LAW = settings(max_examples=40, derandomize=True, deadline=None)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def gaussians(seed: int, *shape: int) -> Tensor:
    """Independent standard normal numbers in float64."""
    return torch.from_numpy(rng(seed).standard_normal(shape))


def frequencies(dim: int, base: float = 1e4) -> Array:
    """w_i = base^(-2i/D), i = 0 .. D/2 - 1."""
    return np.array([base ** (-2 * i / dim) for i in range(dim // 2)])


def rotation(position: float, w: Array) -> Array:
    """The block-diagonal R_m, entry by entry: (D, D)."""
    matrix = np.zeros((2 * len(w), 2 * len(w)))
    for i, frequency in enumerate(w):
        c, s = math.cos(position * frequency), math.sin(position * frequency)
        matrix[2 * i, 2 * i], matrix[2 * i, 2 * i + 1] = c, -s
        matrix[2 * i + 1, 2 * i], matrix[2 * i + 1, 2 * i + 1] = s, c
    return matrix


def rotated(x: Array, at: Sequence[float] | Array, w: Array) -> Array:
    """Each x[n] (.., N, D) times R of at[n], with one matrix per position."""
    return np.stack([x[..., n, :] @ rotation(m, w).T for n, m in enumerate(at)], -2)


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(q: Array, k: Array, v: Array, visible: Callable[[int, int], bool] = lambda m, n: True) -> Array:
    """softmax(q k^T / sqrt(D)) v of one head, computed entry by entry: q (T, D), k and v (S, D)."""
    out = np.zeros((len(q), v.shape[1]))
    for m in range(len(q)):
        keys = [n for n in range(len(k)) if visible(m, n)]
        weights = softmax(np.array([q[m] @ k[n] / math.sqrt(len(q[m])) for n in keys]))
        for weight, n in zip(weights, keys, strict=True):
            out[m] += weight * v[n]
    return out


def functions_of(path: Path, *names: str) -> dict[str, Callable[..., Any]]:
    """Functions of a file, executed without the rest of the file, so that its imports are not needed."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    scope: dict[str, Any] = {"torch": torch, "Tuple": tuple}
    exec(compile(tree, str(path), "exec"), scope)
    return {name: scope[name] for name in names}


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x divided by its root mean square, times a weight: (.., C)."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def llama(weights: dict[str, Tensor], config: Any, tokens: Sequence[int]) -> Array:
    """The complete decoder for one text, head by head: logits (T, V)."""
    w = {name: tensor.double().numpy() for name, tensor in weights.items()}
    d, at = config.head_dim, range(len(tokens))
    inv_freq = frequencies(d, config.rope_theta)
    h = w["tok_embeddings.weight"][list(tokens)]  # (T, C): not scaled by sqrt(C)
    for layer in range(config.n_layers):
        own = {name.removeprefix(f"layers.{layer}.").removesuffix(".weight"): value for name, value in w.items()}
        x = rms_norm(h, own["attention_norm"], config.norm_eps)
        heads = []
        for head in range(config.n_heads):
            shared = head // (config.n_heads // config.n_kv_heads)
            q = rotated(x @ own["attention.wq"][d * head : d * (head + 1)].T, at, inv_freq)  # (T, D)
            k = rotated(x @ own["attention.wk"][d * shared : d * (shared + 1)].T, at, inv_freq)
            v = x @ own["attention.wv"][d * shared : d * (shared + 1)].T
            heads.append(attention(q, k, v, lambda m, n: n <= m))
        h = h + np.concatenate(heads, -1) @ own["attention.wo"].T
        x = rms_norm(h, own["ffn_norm"], config.norm_eps)
        gate = x @ own["feed_forward.w_gate"].T
        swish = gate / (1 + np.exp(-gate))
        h = h + (swish * (x @ own["feed_forward.w_up"].T)) @ own["feed_forward.w_down"].T
    return rms_norm(h, w["norm.weight"], config.norm_eps) @ w["output.weight"].T
