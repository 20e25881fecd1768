"""Bugs that people write in position encodings: a wrong line, what it causes, and the right line.

`clearllama study bugs` lists the wrong lines, so that you can predict each effect. Each bug is one row of
BUGS. Its evidence is computed twice: by the wrong line and by the right line.
Letters: B batch, T tokens, H heads, S cached keys, D head_dim.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention import causal_mask, reference, reference_weights
from ..checks import choice
from ..loader import load_model
from ..rope import apply_rotary_emb, freqs_cis_at, half_to_interleaved, interleaved_to_half, precompute_freqs_cis
from ..rope_scaling import inverse_frequencies
from ..system.documents import plain
from ..tools.perplexity import nats
from .measures import frequencies, sinusoids
from .perplexity import tiny_folder
from .report import Table, Value, table_lines

Row = tuple[str, Value, Value]  # name of a quantity, its value by the wrong line, by the right line


@dataclass(frozen=True)
class Bug:
    """A wrong line and its effect.

    name      one or two words for the command line; they do not say what is wrong
    wrong     the wrong line
    question  what to predict before the evidence is shown
    right     the right line
    why       the reason for the effect
    evidence  computes the effect
    """

    name: str
    wrong: str
    question: str
    right: str
    why: str
    evidence: Callable[[], Sequence[Row]]


def find(name: str) -> Bug:
    """The bug of this name. Raises UsageError if there is none."""
    return BUGS[choice("bug", name.lower(), BUGS)]


def show(bug: Bug) -> tuple[dict[str, Any], str]:
    """A bug with its evidence, for JSON and as text."""
    evidence = bug.evidence()
    rows = [{"what": what, "wrong": plain(wrong), "right": plain(right)} for what, wrong, right in evidence]
    facts = {key: getattr(bug, key) for key in ("name", "wrong", "question", "right", "why")}
    lines = {"wrong": bug.wrong, "predict": bug.question, "right": bug.right, "why": bug.why}
    wrong, predict, right, why = (
        textwrap.fill(f"  {label:<9}{text}", 100, subsequent_indent=" " * 11) for label, text in lines.items()
    )
    effect = table_lines(Table("effect", ("", "wrong line", "right line"), evidence))
    text = "\n".join([bug.name, wrong, predict, "", *effect, "", right, why, "", ""])
    return {"bugs": [{**facts, "evidence": rows}]}, text


def _row(what: str, measure: Callable[[Tensor], Value], wrong: Tensor, right: Tensor) -> Row:
    """A row that measures the result of the wrong line and that of the right line in the same way."""
    return what, measure(wrong), measure(right)


def _keys(mask: Tensor) -> str:
    """The number of keys that each query of a mask (T, S) reads."""
    return ", ".join(map(str, mask.sum(-1).tolist()))


def _normal(*shape: int) -> Tensor:
    """Normal numbers, equal in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _score(q: Tensor, k: Tensor, m: int, n: int) -> float:
    """The score of a query (D,) at position m and a key (D,) at position n, to three decimals."""
    freqs_cis = precompute_freqs_cis(len(q), max(m, n) + 1)  # (N, D/2)
    rotated_q, _ = apply_rotary_emb(q.view(1, 1, 1, -1), k.view(1, 1, 1, -1), freqs_cis[m : m + 1])
    _, rotated_k = apply_rotary_emb(q.view(1, 1, 1, -1), k.view(1, 1, 1, -1), freqs_cis[n : n + 1])
    return round(float((rotated_q * rotated_k).sum()), 3)


def _turned(x: Tensor, inv_freq: Tensor, factor: float = 1.0) -> Tensor:
    """Rotate x (B, T, H, D) at the positions 0 .. T - 1."""
    return apply_rotary_emb(x, x, freqs_cis_at(torch.arange(x.shape[1]), inv_freq, factor))[0]  # (B, T, H, D)


def _perplexity(rotate: Callable[[Tensor, int], Tensor]) -> float:
    """The perplexity of tiny-kjv, whose layers rotate q and k (B, T, H, D) by rotate(x, layer)."""
    model = load_model(tiny_folder(), "cpu", "float32", fast=False)
    for layer in range(model.config.n_layers):
        rotary: Any = model.get_submodule(f"layers.{layer}.attention.apply_rotary_emb")
        rotary.rotate = lambda q, k, _, layer=layer: (rotate(q, layer), rotate(k, layer))
    tokens = torch.tensor(list((tiny_folder() / "held-out.txt").read_bytes()[:1024])).view(8, 128)  # (B, T)
    return round(float(nats(model, [tokens])[0].mean().exp()), 2)


# ------------------------------------------------------------------------------------------- the sinusoidal table
def _step() -> list[Row]:
    right = sinusoids(torch.tensor([1]), 8)[0]
    return [(f"pe[1, {i}]", math.sin(1 / 10000 ** (2 * i / 8)), float(right[i])) for i in (0, 2, 4, 6)]


# ------------------------------------------------------------------------------------------ the rotation of q and k
def _direction() -> list[Row]:
    q, k = _normal(2, 8)
    return [
        (f"score at m - n = {distance}", _score(q, k, 7, 7 + distance), _score(q, k, 7 + distance, 7))
        for distance in (0, 4, -4)
    ]


def _pairs() -> list[Row]:
    q, k = _normal(2, 64)  # (D,) each, in the order of wq and wk in Hugging Face's files
    rows: list[Row] = []
    for m, n in ((7, 7), (8, 7), (107, 7), (1107, 1007)):
        right = _score(half_to_interleaved(q), half_to_interleaved(k), m, n)
        rows.append((f"score at m = {m:,}, n = {n:,}", _score(q, k, m, n), right))
    return rows


def _angles() -> list[Row]:
    inv_freq, _ = inverse_frequencies(64)
    at = torch.arange(4000, 4016)
    right = freqs_cis_at(at, inv_freq)  # (N, D/2)
    angles = (at.bfloat16()[:, None] * inv_freq.bfloat16()).double()
    wrong = torch.polar(torch.ones_like(angles), angles)
    return [
        _row("different angles of pair 0, of 16", lambda x: len(x[:, 0].real.unique()), wrong, right),
        ("angle of pair 0 at position 4,007", float(angles[7, 0]), float(at[7] * inv_freq[0])),
        ("largest error of cos", float((wrong.real - right.real).abs().max()), 0.0),
    ]


def _values() -> list[Row]:
    x = _normal(1, 8, 1, 16)  # (B, T, H, D), used as q, k and v
    outputs = []
    for start in (0, 100):
        rotated, _ = apply_rotary_emb(x, x, precompute_freqs_cis(16, 200)[start : start + 8])
        q, v = rotated.transpose(1, 2), x.transpose(1, 2)  # (B, H, T, D)
        outputs.append(torch.stack([reference(q, q, values)[0, 0, -1] for values in (q, v)]))  # (2, D)
    wrong, right = (outputs[1] - outputs[0]).norm(dim=-1).tolist()
    return [("change of the last output when all positions grow by 100", round(wrong, 3), round(right, 3))]


def _quarter() -> list[Row]:
    def wrong(x: Tensor, layer: int) -> Tensor:
        x = interleaved_to_half(x)  # (B, T, H, D), the order of a file of Hugging Face
        return torch.cat((_turned(half_to_interleaved(x[..., :16]), inverse_frequencies(16)[0]), x[..., 16:]), -1)

    half, quarter = ({"rope_type": "proportional", "partial_rotary_factor": part} for part in (0.5, 0.25))
    right = _perplexity(lambda x, layer: _turned(x, *inverse_frequencies(32, scaling=half)))
    return [
        ("D = 512: entry that is rotated with entry 0", 512 // 8, 512 // 2),
        ("frequency of pair 63", float(frequencies(128, 1e6)[63]), float(frequencies(512, 1e6, quarter)[63])),
        ("tiny-kjv, D = 32, half of the pairs: perplexity", _perplexity(wrong), right),
    ]


# --------------------------------------------------------------------------------------- attention, and the cache
def _divisor() -> list[Row]:
    q, k = _normal(2, 20000, 64)  # one head of 512 / 8 entries
    wrong, right = ((q * k).sum(-1) / math.sqrt(divisor) for divisor in (512, 64))
    return [
        _row("dim = 512, 8 heads: variance of the scores", lambda x: float(x.var()), wrong, right),
        _row("mean largest of 100 weights", lambda x: float(x.view(-1, 100).softmax(-1).amax(-1).mean()), wrong, right),
    ]


def _own_key() -> list[Row]:
    at, even = torch.arange(5), torch.zeros(1, 1, 5, 4)
    wrong, right = at[:, None] > at, causal_mask(at, at)  # (T, T) each

    def nans(mask: Tensor) -> int:
        return int(reference_weights(even, even, mask)[0, 0, 0].isnan().sum())

    return [
        _row("keys of tokens 0 to 4", _keys, wrong, right),
        _row("weights of token 0 that are NaN, of 5", nans, wrong, right),
    ]


def _cached_row() -> list[Row]:
    q, k = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # one pair, of frequency 1
    return [
        ("7 tokens cached: position of the next token", 0, 7),
        *((f"its score with key {n}", _score(q, k, 0, n), _score(q, k, 7, n)) for n in (0, 6)),
    ]


def _cached_mask() -> list[Row]:
    return [
        _row(
            f"{cached} tokens cached, {new} new: keys that each new token reads",
            _keys,
            torch.ones(new, cached + new, dtype=torch.bool).tril(),  # what is_causal means in PyTorch
            causal_mask(torch.arange(cached, cached + new), torch.arange(cached + new)),
        )
        for cached, new in ((0, 3), (7, 1), (7, 3))
    ]


# ------------------------------------------------------------------------------------------------- longer contexts
def _new_base() -> list[Row]:
    plain, ntk = frequencies(128), frequencies(128, scaling={"rope_type": "ntk", "factor": 4.0})
    base = float(ntk[1]) ** (-128 / 2)  # since pair 1 has the frequency base^(-2/D)
    return [
        ("D = 128, 4 times the length: base", 500000.0, float(f"{base:.5g}")),
        ("divisor of the slowest pair", float(plain[-1] / frequencies(128, 500000.0)[-1]), float(plain[-1] / ntk[-1])),
    ]


def _twice() -> list[Row]:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    inv_freq, a = inverse_frequencies(64, scaling=yarn)
    x = _normal(1, 1, 1, 64)
    rotated, _ = apply_rotary_emb(x, x, freqs_cis_at(torch.tensor([5]), inv_freq, a))
    return [("YaRN, 4 times the length: factor of the scores", a, float((rotated**2).sum() / (x**2).sum()))]


def _windows() -> list[Row]:
    yarn = {"rope_type": "yarn", "factor": 8.0}
    inv_freq, a = inverse_frequencies(128, 5e5, yarn, max_seq_len=8192)
    scaled, unscaled = inverse_frequencies(32, scaling=yarn, max_seq_len=128), inverse_frequencies(32)
    right = _perplexity(lambda x, layer: _turned(x, *(scaled if layer == 3 else unscaled)))
    return [
        ("factor of the scores in a layer with a window", a * a, 1.0),
        ("divisor of its slowest pair", float(frequencies(128, 5e5)[-1] / inv_freq[-1]), 1.0),
        ("tiny-kjv, all 4 layers or 1 scaled: perplexity", _perplexity(lambda x, layer: _turned(x, *scaled)), right),
    ]


BUGS = {
    bug.name: bug
    for bug in (
        Bug(
            "step",
            "for i in range(0, d, 2): pe[pos, i] = sin(pos / 10000 ** (2*i / d))",
            "Does the code fail? At d = 8, which of the sine columns 0, 2, 4, 6 are wrong?",
            "for i in range(0, d, 2): pe[pos, i] = sin(pos / 10000 ** (i / d))",
            "The loop's i already steps by 2, so 2*i doubles the exponent. Nothing fails and column 0 is right, but"
            " every other pair rotates too slowly.",
            _step,
        ),
        Bug(
            "direction",
            "score = q @ R(m - n) @ k  # R(a) rotates by a * w",
            "At which of the distances m - n = 0, 4, -4 is the score wrong, and what does it equal there?",
            "score = q @ R(n - m) @ k",
            "The rotation between q and k is R(m)^T R(n) = R(n - m). The wrong line computes the score of the mirrored"
            " distance. At distance 0 both are equal.",
            _direction,
        ),
        Bug(
            "pairs",
            "q = view_as_complex(wq(x).unflatten(-1, (-1, 2)))  # wq as in Hugging Face's file",
            "Does the code fail? Does the score still depend on the distance alone?",
            "wq = to_interleaved_layout(wq, head_dim)  # once, after loading; wk too",
            "In such a file, pair i is (x[i], x[i + D/2]). Read as neighbours, the entries still rotate, and the score"
            " depends on the distance alone: no shape and no test of that law shows the bug. But each entry gets the"
            " frequency of another pair, and the scores are wrong except at distance 0.",
            _pairs,
        ),
        Bug(
            "angles",
            "model.to(torch.bfloat16)  # inv_freq is a buffer, and the positions follow it",
            "How many different angles does pair 0 have at the 16 positions from 4,000 to 4,015?",
            "angles = positions.float() * inv_freq  # float32 in every model; convert q and k afterwards",
            "A bfloat16 number has 8 significant bits: between 2,048 and 4,096, it can only be a multiple of 16. All 16"
            " tokens get the angle of position 4,000 or 4,016.",
            _angles,
        ),
        Bug(
            "values",
            "q, k, v = (apply_rotary(x, m) for x in (q, k, v))",
            "All positions grow by 100. Does the output of attention change?",
            "q, k = (apply_rotary(x, m) for x in (q, k))  # v stays",
            "In the score, the rotations of q and k leave only the distance. Nothing cancels the rotation of v, so the"
            " output depends on where the text starts.",
            _values,
        ),
        Bug(
            "quarter",
            "inv_freq = theta ** (-arange(0, D // 4, 2) / (D // 4))  # Gemma 4: rotates x[: D // 4]",
            "D = 512, theta = 1,000,000. With which entry is entry 0 rotated? How fast is the slowest pair, 63?",
            "inv_freq = theta ** (-arange(0, D, 2) / D); inv_freq[D // 8 :] = 0  # rotates x",
            "In Gemma 4's layers with full attention, pair i is (x[i], x[i + D/2]) and has the frequency"
            " theta^(-2i/D), as in any head; only the first quarter of the pairs rotates. The wrong line treats the"
            " first quarter of the entries as a small head. No shape shows the bug. (If all pairs rotate, tiny-kjv has"
            " the perplexity 2.96, too.)",
            _quarter,
        ),
        Bug(
            "divisor",
            "scores = q @ k.T / sqrt(dim)  # in each of the heads",
            "The entries of q and k have variance 1. With 8 heads, what is the variance of the scores?",
            "scores = q @ k.T / sqrt(head_dim)",
            "The variance of a dot product is the number of its terms, and a head has dim / 8 of them. Divided by"
            " sqrt(dim), the variance is 1/8, and the weights stay nearly uniform.",
            _divisor,
        ),
        Bug(
            "own-key",
            "mask = m > n  # a token reads the tokens before it",
            "What are the attention weights of the first token, m = 0?",
            "mask = m >= n",
            "A token also reads itself. Without its own key, the first token has no key at all, and the softmax of"
            " nothing is NaN, which spreads through all later layers.",
            _own_key,
        ),
        Bug(
            "cached-row",
            "freqs_cis = freqs_cis[:T]  # T new tokens",
            "The cache holds 7 tokens. As which position is the next token rotated?",
            "freqs_cis = freqs_cis[start : start + T]  # start tokens are in the cache",
            "The first rows are right for a prompt and wrong for every token after it. A single new token is rotated as"
            " position 0, so its distances to the cached keys are wrong in size and sign.",
            _cached_row,
        ),
        Bug(
            "cached-mask",
            "scaled_dot_product_attention(q, k, v, is_causal=True)  # T new queries, S keys with the cached ones",
            "The cache holds 7 tokens. How many keys does the next token read?",
            "scaled_dot_product_attention(q, k, v, attn_mask=positions[:, None] >= key_positions)",
            "PyTorch aligns the triangle of is_causal at the top left: query j reads the keys 0 to j, although j counts"
            " from the first new token. A prompt is right; a generated token reads only the first key.",
            _cached_mask,
        ),
        Bug(
            "new-base",
            "theta = 500000  # NTK-aware scaling to 4 times the length",
            "The slowest pair should be 4 times slower. How much slower is it?",
            "theta = 10000 * 4 ** (D / (D - 2))",
            "NTK-aware scaling computes the base from the factor. A base of 500,000 fits a factor of 47; models with"
            " this base were trained with it.",
            _new_base,
        ),
        Bug(
            "twice",
            "cos, sin = cos * a, sin * a  # multiplies the scores by a",
            "YaRN for 4 times the length has a = 1.1386. By which factor do the scores grow?",
            "cos, sin = cos * a, sin * a  # multiplies the scores by a ** 2",
            "q and k are both rotated with the multiplied cos and sin, so a score contains the factor twice. Code that"
            " multiplies the scores instead must use the square.",
            _twice,
        ),
        Bug(
            "windows",
            "inv_freq, a = yarn(config)  # OLMo 3: YaRN for 8 times the length, in every layer",
            "Three of four layers have a window of 4,096 tokens, and 8,192 were trained. What changes in those three?",
            "inv_freq, a = yarn(config) if window is None else default(config)",
            "In a layer with a window, no distance exceeds the window, so there is nothing to extend. The wrong line"
            " multiplies the scores of such a layer by a ** 2 and slows its slow pairs by 8, in short texts too. In"
            " training, only the layers with full attention were scaled.",
            _windows,
        ),
    )
}
