"""The Erratum class, and the formulas in numpy that the proofs compare with.

A proof is a function of two forms, the wrong one and the right one. A test exchanges the two: a proof that still passes
proves nothing. The right form is the library's own code. Both forms are compared with the formulas below, which are
written independently of the library in numpy and float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llama.config import ModelConfig
from llama.model import Transformer
from llama.rope_scaling import inverse_frequencies
from llama.study import forms
from llama.study.measures import sinusoids
from llama.study.report import Check

Array = NDArray[Any]
Table = Callable[[int, int], Any]  # (positions, width) -> (positions, width)
Kind = Literal["A", "B", "C", "OK"]

# meaning of each class, in the order of the list
KINDS: dict[Kind, str] = {
    "A": "false or does not run",
    "B": "misleading",
    "C": "true but incomplete",
    "OK": "looks wrong, but is right",
}


@dataclass(frozen=True)
class Erratum:
    """One sentence, formula or line of the notes, and its proof.

    id          "E33", or "OK1" for one that looks wrong but is right
    kind        one of KINDS
    where       note and line, in words
    matter      what is wrong, in one line
    printed     what the note says
    right       the right form
    why         how the mistake shows, and what it causes
    wrong_form  what is printed, as code or data; for C the incomplete sentence read literally, for OK the tempting
                "correction"
    right_form  what is right, by the library; for OK what is printed
    prove       (wrong form, right form) -> checks
    """

    id: str
    kind: Kind
    where: str
    matter: str
    printed: str
    right: str
    why: str
    wrong_form: Any
    right_form: Any
    prove: Callable[[Any, Any], Sequence[Check]]

    def proof(self, wrong_form: Any = None, right_form: Any = None) -> Sequence[Check]:
        """Run the proof. Other forms may replace the erratum's own, to test the proof itself."""
        wrong = self.wrong_form if wrong_form is None else wrong_form
        right = self.right_form if right_form is None else right_form
        return self.prove(wrong, right)


def passes(checks: Sequence[Check]) -> bool:
    """Whether there are checks and all of them pass."""
    return bool(checks) and all(check.passed for check in checks)


# ----------------------------------------------------------------------------------------------- comparing results
def worst(a: Any, b: Any) -> float:
    """Largest absolute difference of two arrays; infinite for different shapes, exceptions and NaN."""
    if a is None or b is None or isinstance(a, Exception) or isinstance(b, Exception):
        return float("inf")
    left, right = (x.detach().resolve_conj().numpy() if isinstance(x, Tensor) else np.asarray(x) for x in (a, b))
    if left.shape != right.shape or not left.size:
        return float("inf")
    difference = float(np.abs(left - right).max())
    return difference if np.isfinite(difference) else float("inf")


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call, or the exception that it raises."""
    try:
        return call(*arguments)
    except Exception as error:
        return error


def name_of(result: Any) -> str:
    """The name of the type of an `outcome`."""
    return type(result).__name__


def fit_residual(table: Array, shift: int) -> float:
    """Largest error of the best linear map from row t to row t + shift: table (N, d)."""
    before, after = table[:-shift], table[shift:]
    best = np.linalg.lstsq(before, after, rcond=None)[0]  # (d, d)
    return worst(before @ best, after)


# ------------------------------------------------------------------------------------- the formulas, in numpy float64
def frequencies(dim: int, base: float = 10000.0) -> Array:
    """base^(-2i/d) for i = 0 .. d/2 - 1: (d/2,)."""
    return np.array([base ** (-2 * i / dim) for i in range(dim // 2)])


def sinusoid_table(count: int, dim: int, base: float = 10000.0) -> Array:
    """Row t: sin and cos of t * base^(-2i/d), alternating: (count, d)."""
    angles = np.arange(count)[:, None] * frequencies(dim, base)  # (count, d/2)
    table = np.empty((count, dim))
    table[:, 0::2], table[:, 1::2] = np.sin(angles), np.cos(angles)
    return table


def rotated(x: Array, positions: Sequence[float] | Array, base: float = 10000.0) -> Array:
    """Vectors x (N, D) with pair i of row m multiplied by e^(i position_m w_i): (N, D)."""
    z = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * np.outer(positions, frequencies(x.shape[-1], base)))  # (N, D/2)
    return np.stack((z.real, z.imag), -1).reshape(x.shape)


def rotation(angle: float) -> Array:
    """[[cos, -sin], [sin, cos]]: a counter-clockwise rotation."""
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


def softmax(scores: Array) -> Array:
    """Softmax over the last axis."""
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


# -------------------------------------------------------------------------------------------- the library's own forms
def library_table(count: int, dim: int) -> Array:
    """The library's table of sinusoids, `sinusoid_table` in its code: (count, d)."""
    return sinusoids(torch.arange(count), dim).numpy()


def library_rotation(dim: int, steps: int) -> Array:
    """The library's rotation matrix by `steps` positions: (D, D)."""
    angles = steps * inverse_frequencies(dim)[0].double()
    return forms.rotation_matrix(angles.cos(), angles.sin()).numpy()


# ---------------------------------------------------------------------------------------------------- a small model
CONFIG = ModelConfig(
    dim=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, hidden_dim=24, vocab_size=32, norm_eps=1e-5, max_seq_len=64
)


def small_model(config: ModelConfig = CONFIG, seed: int = 0) -> Transformer:
    """A library model with random weights; the state of torch's random generator does not change."""
    with torch.random.fork_rng(devices=[]):
        model = Transformer(config)
    rng = np.random.default_rng(seed)
    state = {}
    for name, tensor in model.state_dict().items():
        noise = rng.standard_normal(tuple(tensor.shape))
        state[name] = torch.from_numpy(1 + 0.2 * noise if noise.ndim == 1 else noise / noise.shape[-1] ** 0.5).float()
    model.load_state_dict(state)
    return model.requires_grad_(False).eval()


def block_by_hand(model: Transformer, layer: int, h: Array) -> Array:
    """Layer `layer` of a model for h (T, C) at positions 0 .. T - 1, in numpy: (T, C)."""
    config = model.config
    prefix = f"layers.{layer}."
    weight = {
        name.removeprefix(prefix).removesuffix(".weight"): tensor.double().numpy()
        for name, tensor in model.state_dict().items()
        if name.startswith(prefix)
    }
    steps = np.arange(len(h))

    def norm(x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * weight[name])

    x = norm(h, "attention_norm")
    heads = []
    for head in range(config.n_heads):
        group = head * config.n_kv_heads // config.n_heads  # the key head that this query head reads
        own = slice(head * config.head_dim, (head + 1) * config.head_dim)
        shared = slice(group * config.head_dim, (group + 1) * config.head_dim)
        q = rotated(x @ weight["attention.wq"][own].T, steps, config.rope_theta)  # (T, D)
        k = rotated(x @ weight["attention.wk"][shared].T, steps, config.rope_theta)  # (T, D)
        scores = q @ k.T / config.head_dim**0.5  # (T, T)
        scores[steps[:, None] < steps] = -np.inf
        heads.append(softmax(scores) @ (x @ weight["attention.wv"][shared].T))  # (T, D)
    h = h + np.concatenate(heads, -1) @ weight["attention.wo"].T
    x = norm(h, "ffn_norm")
    gate = x @ weight["feed_forward.w_gate"].T
    up = x @ weight["feed_forward.w_up"].T
    return np.asarray(h + (gate / (1 + np.exp(-gate)) * up) @ weight["feed_forward.w_down"].T)


def hidden_by_hand(model: Transformer, tokens: Sequence[int]) -> Array:
    """`Transformer.hidden` for one row of tokens, in numpy: (T, C)."""
    state = model.state_dict()
    h = state["tok_embeddings.weight"].double().numpy()[list(tokens)]
    for layer in range(model.config.n_layers):
        h = block_by_hand(model, layer, h)
    return np.asarray(
        h / np.sqrt((h**2).mean(-1, keepdims=True) + model.config.norm_eps) * state["norm.weight"].double().numpy()
    )
