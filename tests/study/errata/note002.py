"""Note 002: formulas as pictures, a class for sinusoids, and the code of LLaMA from the rotary table on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from llama import rope
from llama.attention import causal_mask, reference_weights
from llama.config import ModelConfig
from llama.model import Transformer, TransformerBlock
from llama.rope_scaling import inverse_frequencies
from llama.study import forms, measures
from llama.study.encodings import Learned
from llama.study.report import Check, above, below, equal, holds

from .base import (
    CONFIG,
    Array,
    Erratum,
    Table,
    block_by_hand,
    fit_residual,
    frequencies,
    hidden_by_hand,
    library_table,
    name_of,
    outcome,
    rotated,
    sinusoid_table,
    small_model,
    worst,
)


# ------------------------------------------------------------------------------------------------------------- E24
def _e24_printed(count: int, dim: int) -> Array:
    table = sinusoid_table(count, dim)  # the cosines are right here; E25 covers them
    for pos in range(count):
        for i in range(0, dim, 2):
            table[pos, i] = math.sin(pos / (10000 ** ((2 * i) / dim)))
    return table


def _e24(wrong: Table, right: Table) -> Sequence[Check]:
    truth = sinusoid_table(16, 8)
    error = np.abs(wrong(16, 8) - truth)[:, 0::2].max(0)  # (d/2,)
    return (
        below("E24", "errors of the sine columns minus 0, 0.848, 0.148, 0.015", _e24_off(error), 1e-3),
        above("E24", "largest error of the table, as printed", worst(wrong(16, 8), truth), 0.8),
        below("002-04 E24", "largest error of the table, right form", worst(right(16, 8), truth), 1e-12),
    )


def _e24_off(error: Array) -> float:
    return worst(error, [0, 0.848, 0.148, 0.015])


E24 = Erratum(
    id="E24",
    kind="A",
    where="note 002, line 38, the sine of PositionalEmbedding",
    matter="i already steps by 2, so 2*i doubles the exponent",
    printed="for i in range(0, d, 2): pe[pos, i] = sin(pos / 10000**((2*i) / d))",
    right="sin(pos / 10000**(i / d)): the loop's i is the formula's 2i",
    why="Nothing fails. Every pair but the first rotates too slowly, and the slower half hardly at all. The first"
    " column is right, so a quick look at the table does not show the mistake.",
    wrong_form=_e24_printed,
    right_form=library_table,
    prove=_e24,
)


# ------------------------------------------------------------------------------------------------------------- E25
def _e25_printed(count: int, dim: int) -> Array:
    pos, i = np.arange(count)[:, None], np.arange(0, dim, 2)
    table = np.empty((count, dim))
    table[:, 0::2] = np.sin(pos / (10000 ** ((2 * i) / dim)))
    table[:, 1::2] = np.cos(pos / (10000 ** ((2 * (i + 1)) / dim)))
    return table


def _e25(wrong: Table, right: Table) -> Sequence[Check]:
    table = wrong(2000, 8)
    squares = (table.reshape(2000, 4, 2) ** 2).sum(-1)  # sin^2 + cos^2 of each pair
    length = (right(2000, 8).reshape(2000, 4, 2) ** 2).sum(-1)
    return (
        equal("E25", "smallest sin^2 + cos^2 of a pair, as printed", float(squares.min()), 0.0, 0.005),
        equal("E25", "largest sin^2 + cos^2 of a pair, as printed", float(squares.max()), 1.98, 0.005),
        equal("E25", "residual of the best linear map t to t + 3, as printed", fit_residual(table, 3), 0.326, 0.002),
        below("E25", "sin^2 + cos^2 of a pair minus 1, right form", worst(length, np.ones((2000, 4))), 1e-12),
        below("002-03 E25", "residual of the same map, right form", fit_residual(right(2000, 8), 3), 1e-10),
        below("E25", "right form minus numpy", worst(right(2000, 8), sinusoid_table(2000, 8)), 1e-12),
    )


E25 = Erratum(
    id="E25",
    kind="A",
    where="note 002, line 39, the cosine of PositionalEmbedding",
    matter="the cosine has a different frequency from the sine it is paired with",
    printed="pe[pos, i+1] = cos(pos / 10000**((2*(i+1)) / d))",
    right="cos(pos / 10000**(i / d)), with the i of the preceding sine",
    why="The sine and cosine of one angle form a unit vector that rotates by a fixed angle per position. With two"
    " frequencies its squared length ranges from 0 to 1.98, and encoding t + 3 is no longer a linear map of encoding"
    " t.",
    wrong_form=_e25_printed,
    right_form=library_table,
    prove=_e25,
)


# ------------------------------------------------------------------------------------------------------------- E26
Adding = Callable[[int, int, Tensor], Tensor]  # (longest, width, x (B, T, d)) -> x with positions added


def _e26_printed(longest: int, dim: int, x: Tensor) -> Tensor:
    table = torch.zeros(longest, dim, dtype=torch.float64)
    for pos in range(longest):
        for i in range(0, dim, 2):
            table[pos, i] = math.sin(pos / 10000 ** (i / dim))
            table[pos, i + 1] = math.cos(pos / 10000 ** (i / dim))
    table = table.unsqueeze(0)  # the note's comment: (batch_size, seq_len, embed_dim)
    return x + table[:, : x.shape[1]]


def _e26_right(longest: int, dim: int, x: Tensor) -> Tensor:
    table = Learned(measures.sinusoids(torch.arange(longest), dim))
    return torch.stack([table.embed(row, torch.arange(len(row))) for row in x])


def _e26(wrong: Adding, right: Adding) -> Sequence[Check]:
    x = torch.zeros(2, 12, 8, dtype=torch.float64)
    odd, long = (outcome(right, 16, 7, x[..., :7]), outcome(right, 9, 8, x))
    fits = sinusoid_table(12, 8)[None].repeat(2, 0)  # (B, T, d)
    return (
        equal("E26", "width 7, as printed", name_of(outcome(wrong, 16, 7, x[..., :7])), "IndexError"),
        equal("E26", "12 tokens, table of 9, as printed", name_of(outcome(wrong, 9, 8, x)), "RuntimeError"),
        holds("E26", "width 7, right form: ValueError with the number 7", _e26_names(odd, "7")),
        holds("E26", "12 tokens, right form: ValueError with position 11 and the last, 8", _e26_names(long, "11", "8")),
        below("E26", "width 8, 12 tokens, table of 16: error", worst(outcome(right, 16, 8, x), fits), 1e-12),
    )


def _e26_names(result: Any, *numbers: str) -> bool:
    return isinstance(result, ValueError) and all(number in str(result) for number in numbers)


E26 = Erratum(
    id="E26",
    kind="B",
    where="note 002, lines 36 to 47, the buffer and the forward of PositionalEmbedding",
    matter="an odd width or a long text fails with an unrelated error message",
    printed="pe[pos, i+1] = ..., then x + pe[:, :seq_len]; a comment gives the buffer (1, max_len, d) the shape"
    " (batch_size, ..)",
    right="reject an odd width and a position beyond the table, with the number in the message",
    why="Width 7 raises an IndexError inside a loop. Twelve tokens with nine rows raise a RuntimeError about shapes,"
    " because slicing past the end returns fewer rows instead of an error. The first dimension of the buffer is 1 and"
    " serves every batch; it is not the batch size.",
    wrong_form=_e26_printed,
    right_form=_e26_right,
    prove=_e26,
)


# ------------------------------------------------------------------------------------------------------------- E27
# The note's mistakes in a small class: a method indented by one space too many, a loop that passes the same undefined
# name to every layer, no norm, and no return.
_E27_PRINTED = """\
class Decoder:
    def __init__(self, model):
        self.model = model

     def forward(self, tokens, positions, mask):
        embedded = self.model.tok_embeddings(tokens)
        freqs_cis = self.model.rope.freqs_cis(positions, len(positions))
        for layer in self.model.layers:
            output = layer(hidden, freqs_cis, causal, positions, None)
"""
_E27_RIGHT = """\
class Decoder:
    def __init__(self, model):
        self.model = model

    def forward(self, tokens, positions, mask):
        hidden = self.model.tok_embeddings(tokens)  # (B, T, C)
        freqs_cis = self.model.rope.freqs_cis(positions, len(positions))
        for layer in self.model.layers:
            hidden = layer(hidden, freqs_cis, mask, positions, None)
        return self.model.norm(hidden)
"""


def _e27(wrong: str, right: str) -> Sequence[Check]:
    model, tokens = small_model(), torch.tensor([[1, 5, 7, 9, 3]])
    fixed = wrong.replace("\n     def", "\n    def")
    missing = {"hidden": model.tok_embeddings(tokens), "causal": causal_mask(torch.arange(5), torch.arange(5))}
    entered: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0])) for layer in model.layers]
    completed = _e27_run(fixed, model, tokens, missing)
    for hook in hooks:
        hook.remove()
    truth = hidden_by_hand(model, [1, 5, 7, 9, 3])[None]  # (B, T, C)
    return (
        equal("E27", "the class as printed", name_of(_e27_run(wrong, model, tokens, {})), "IndentationError"),
        equal("E27", "with the indentation fixed", name_of(_e27_run(fixed, model, tokens, {})), "NameError"),
        equal("E27", "with the missing names defined as well", name_of(completed), "NoneType"),
        equal("E27", "difference between the inputs of the two layers", worst(*entered[:2]), 0.0),
        below("002-29 E27", "right form minus numpy", worst(_e27_run(right, model, tokens, {}), truth), 1e-5),
        below("E27", "the library minus numpy", worst(model.hidden(tokens), truth), 1e-5),
    )


def _e27_run(source: str, model: Transformer, tokens: Tensor, names: dict[str, Tensor]) -> Any:
    """Run the forward of a class in `source`, with these names defined; an exception is returned."""

    def run() -> Any:
        scope: dict[str, Any] = dict(names)
        exec(compile(source, "the note", "exec"), scope)
        positions = torch.arange(tokens.shape[1])
        return scope["Decoder"](model).forward(tokens, positions, causal_mask(positions, positions))

    return outcome(run)


E27 = Erratum(
    id="E27",
    kind="A",
    where="note 002, lines 171 to 219, the class LlamaModel",
    matter="the model's forward does not run; repaired, it would still use no layer's output",
    printed="forward is indented one space too deep; the loop calls layer(hidden_states, attention_mask=causal_mask)"
    " with two undefined names and discards the result; the method ends there",
    right="h = embed(tokens); for each layer h = layer(h, ..); return norm(h)",
    why="There are four mistakes, one hiding the next. Python stops at the indentation and then at a NameError. With"
    " both repaired, every layer receives the embeddings, and the method ends without a norm or a return value.",
    wrong_form=_E27_PRINTED,
    right_form=_E27_RIGHT,
    prove=_e27,
)


# ------------------------------------------------------------------------------------------------------------- E28
Step = Callable[[TransformerBlock, Tensor, rope.FreqsCis, Tensor, Tensor], Any]


def _e28_printed(layer: TransformerBlock, h: Tensor, freqs_cis: rope.FreqsCis, mask: Tensor, at: Tensor) -> None:
    residual = h  # noqa: F841  (saved and never used: that is the mistake)
    h = layer.attention_norm(h)
    h = layer.attention(h, freqs_cis, mask, at, None)


def _e28(wrong: Step, right: Step) -> Sequence[Check]:
    model = small_model()
    layer, at = cast(TransformerBlock, model.layers[0]), torch.arange(5)
    h = torch.from_numpy(np.random.default_rng(28).standard_normal((1, 5, CONFIG.dim))).float()  # (B, T, C)
    rest = model.rope.freqs_cis(at, 5), causal_mask(at, at), at
    used = {form: _e28_used(layer, partial(form, layer, h, *rest)) for form in (wrong, right)}
    truth = block_by_hand(model, 0, h[0].double().numpy())[None]
    return (
        equal("E28", "type of the result, as printed", name_of(wrong(layer, h, *rest)), "NoneType"),
        equal("E28", "submodules that run, as printed", len(used[wrong]), 2),
        holds("E28", "these are the first norm and the attention", used[wrong] == {"attention", "attention_norm"}),
        equal("002-31 E28", "submodules that run, right form", len(used[right]), 4),
        below("E28", "right form minus numpy", worst(right(layer, h, *rest), truth), 1e-5),
    )


def _e28_used(layer: TransformerBlock, call: Callable[[], Any]) -> set[str]:
    """Names of the layer's submodules that run during a call."""
    found: set[str] = set()
    hooks = [
        part.register_forward_pre_hook(lambda *_, name=name: found.add(name)) for name, part in layer.named_children()
    ]
    call()
    for hook in hooks:
        hook.remove()
    return found


E28 = Erratum(
    id="E28",
    kind="A",
    where="note 002, lines 250 to 265, the class LlamaDecoderLayer",
    matter="the layer saves its residual but never adds it, has no MLP and returns nothing",
    printed="residual = h; h = input_layernorm(h); h, _ = self_attn(h, ..); the method ends there",
    right="h = h + attention(norm1(h)); return h + mlp(norm2(h))",
    why="Two of the four parts that __init__ creates are never called. Without the addition there is no residual"
    " stream, and without a return statement the result is None.",
    wrong_form=_e28_printed,
    right_form=lambda layer, h, freqs_cis, mask, at: layer(h, freqs_cis, mask, at, None),
    prove=_e28,
)


# ------------------------------------------------------------------------------------------------------------- E29
Calls = Callable[[], Callable[[int], Array]]  # creates a table: number of tokens -> frequencies
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def _e29_frequencies(tokens: int) -> Array:
    return inverse_frequencies(8, 10000.0, _DYNAMIC, seq_len=tokens, max_seq_len=16)[0].double().numpy()


class _Stateful:
    """The printed class: extend for a new longest text, reset for one shorter than the original length."""

    def __init__(self) -> None:
        self.original = self.cached = 16
        self.now = self.first = _e29_frequencies(16)

    def __call__(self, tokens: int) -> Array:
        if tokens > self.cached:
            self.now, self.cached = _e29_frequencies(tokens), tokens
        if tokens < self.original and self.cached > self.original:
            self.now, self.cached = self.first, self.original
        return self.now


def _e29(wrong: Calls, right: Calls) -> Sequence[Check]:
    after = {form: _e29_after_forty(form) for form in (wrong, right)}
    twenty_four = {form: worst(after[form][1], form()(24)) for form in (wrong, right)}
    by_hand = frequencies(8, 10000 * (2 * 24 / 16 - 1) ** (8 / 6))
    return (
        equal("E29", "16 tokens after 40, as printed: slowest pair", float(after[wrong][0][-1]), 2.50e-4, 1e-6),
        equal("E29", "24 tokens after 40, as printed: effect of earlier text", twenty_four[wrong], 0.0164, 1e-4),
        equal("E29", "16 tokens after 40, right form: slowest pair", float(after[right][0][-1]), 1.00e-3, 1e-6),
        equal("002-18 E29", "24 tokens after 40, right form: effect of earlier text", twenty_four[right], 0.0),
        below("E29", "24 tokens, right form minus numpy", worst(after[right][1], by_hand), 1e-7),
    )


def _e29_after_forty(form: Calls) -> tuple[Array, Array]:
    """Frequencies for 16 and for 24 tokens, each computed after a text of 40."""
    short, middle = form(), form()
    short(40)
    middle(40)
    return short(16), middle(24)


E29 = Erratum(
    id="E29",
    kind="A",
    where="note 002, line 141, the reset of dynamic frequencies (Hugging Face's own code)",
    matter="frequencies depend on earlier texts, and the original length does not reset them",
    printed="reset if seq_len < original and cached > original; otherwise keep the largest length so far",
    right="no state: the frequencies depend only on the length of the current text",
    why="After a text of 40 tokens, a text of 16, the original length, keeps frequencies stretched 4 times, and a text"
    " of 24 keeps those of 40. The same prompt then returns different logits, depending on what ran before it.",
    wrong_form=_Stateful,
    right_form=lambda: _e29_frequencies,
    prove=_e29,
)


# ------------------------------------------------------------------------------------------------------------- E30
Cast = Callable[[int, torch.dtype], Array]  # (head_dim, dtype of the model) -> the frequencies it uses


class _AsBuffer(nn.Module):
    """Frequencies as in the printed class: a buffer, and a plain attribute for the reset."""

    inv_freq: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.from_numpy(frequencies(dim)).float(), persistent=False)
        self.original_inv_freq = self.inv_freq


def _e30_right(dim: int, dtype: torch.dtype) -> Array:
    """The angles at position 1 of a library model that was cast to dtype."""
    config = ModelConfig(
        dim=8,
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        head_dim=dim,
        hidden_dim=8,
        vocab_size=8,
        norm_eps=1e-5,
        max_seq_len=16,
    )
    model = small_model(config).to(dtype)
    return _angles(model.rope, 2)


def _angles(table: rope.Rope, tokens: int) -> Array:
    """The angles at position 1 for a text of so many tokens: (D/2,)."""
    freqs_cis = cast(Tensor, table.freqs_cis(torch.tensor([1]), tokens))  # (1, D/2)
    return freqs_cis[0].angle().double().numpy()


def _e30(wrong: Cast, right: Cast) -> Sequence[Check]:
    w = frequencies(128)
    coarse, preserved = wrong(128, torch.bfloat16), right(128, torch.bfloat16)
    moved = _AsBuffer(8).to("meta")
    return (
        equal("E30", "buffer in bfloat16: largest relative error", float(np.abs(coarse / w - 1).max()), 0.00365, 1e-4),
        equal("E30", "angle error at position 8191, rad", 8191 * worst(coarse, w), 10.0, 0.1),
        below("002-17 E30", "library after .to(bfloat16): angle error, rad", 8191 * worst(preserved, w), 0.01),
        equal("E30", "device of the buffer after .to(another device)", moved.inv_freq.device.type, "meta"),
        equal("E30", "device of the copy that the reset restores", moved.original_inv_freq.device.type, "cpu"),
    )


E30 = Erratum(
    id="E30",
    kind="B",
    where="note 002, lines 124 and 125, how the frequencies are stored",
    matter="the buffer is cast with the model, and its plain copy stays on the old device",
    printed='register_buffer("inv_freq", inv_freq, persistent=False); self.original_inv_freq = self.inv_freq',
    right="keep the frequencies in float32 for every model dtype, and move all copies of them together",
    why="model.to(bfloat16) rounds the buffer by up to 0.4%, which is 10 radians at position 8191. After a move to"
    " another device, the reset would put a table of the old device into the module.",
    wrong_form=lambda dim, dtype: _AsBuffer(dim).to(dtype).inv_freq.double().numpy(),
    right_form=_e30_right,
    prove=_e30,
)


# ------------------------------------------------------------------------------------------------------------- E31
Encoded = Callable[[Array, float], Array]  # (vector (D,), position) -> (D,)


def _e31_right(x: Array, position: float) -> Array:
    at = torch.tensor([position])
    return measures.turn(torch.from_numpy(x)[None], at, measures.frequencies(x.shape[-1]))[0].numpy()


def _e31(wrong: Encoded, right: Encoded) -> Sequence[Check]:
    x = np.random.default_rng(31).standard_normal(8)
    tripled = {form: float(np.linalg.norm(form(3 * x, 7) - 3 * form(x, 7))) for form in (wrong, right)}
    longer = {form: abs(float(np.linalg.norm(form(x, 7)) - np.linalg.norm(x))) for form in (wrong, right)}
    return (
        equal("E31", "length of f(3q) - 3 f(q), added: 2 sqrt(d/2)", tripled[wrong], 4.0, 1e-9),
        above("E31", "change of the length of q, added", longer[wrong], 0.1),
        below("E31", "length of f(3q) - 3 f(q), rotated", tripled[right], 1e-12),
        below("000-25 E31", "change of the length of q, rotated", longer[right], 1e-12),
        below("E31", "right form minus numpy", worst(right(x, 7), rotated(x[None], [7])[0]), 1e-6),
    )


E31 = Erratum(
    id="E31",
    kind="B",
    where="note 002, line 270, on apply_rotary_pos_emb",
    matter="RoPE does not add to q and k, it rotates them",
    printed="apply_rotary_pos_emb adds the position to q and k",
    right="it multiplies them by a rotation, which is linear and preserves the length",
    why="Three times the query gives three times the rotated query. Addition does not have this property, and it makes"
    " the length of the result depend on the position.",
    wrong_form=lambda x, position: x + sinusoid_table(int(position) + 1, len(x))[-1],
    right_form=_e31_right,
    prove=_e31,
)


# ------------------------------------------------------------------------------------------------------------- E32
def _e32(wrong: Callable[[float], float], right: Callable[[float], float]) -> Sequence[Check]:
    factor = 0.1 * math.log(4) + 1  # YaRN's, for s = 4
    measured = _e32_measured()
    return (
        equal(
            "E32", "attention_scaling of YaRN, factor 4", inverse_frequencies(16, scaling=_E32_YARN)[1], 1.1386, 1e-4
        ),
        above("E32", "error of that value as the factor of the logits", abs(wrong(factor) - measured), 0.1),
        equal("002-25 E32", "factor of the logits, measured", measured, 1.2965, 1e-4),
        below("E32", "error of its square", abs(right(factor) - measured), 1e-5),
    )


_E32_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def _e32_measured() -> float:
    """Ratio of the library's logits with YaRN's attention factor to those without it."""
    rng = np.random.default_rng(32)
    q, k = (torch.from_numpy(rng.standard_normal((1, 6, 1, 16))).float() for _ in range(2))  # (B, T, H, D)
    logits = []
    for scaling in (_E32_YARN, {**_E32_YARN, "attention_factor": 1.0}):
        xq, xk = rope.apply_rotary_emb(q, k, rope.precompute_freqs_cis(16, 6, 10000.0, scaling))
        logits.append((xq[0, :, 0] @ xk[0, :, 0].T).double())  # (T, T)
    return float((logits[0] * logits[1]).sum() / (logits[1] ** 2).sum())  # least squares


E32 = Erratum(
    id="E32",
    kind="C",
    where="note 002, line 162, on attention_scaling",
    matter="multiplying cos and sin by a multiplies the logits by a squared",
    printed="cos and sin are multiplied by attention_scaling, which is the same as scaling attention",
    right="true, but the logits are multiplied by its square, because both q and k carry it",
    why="For factor 4, YaRN's 1.1386 multiplies the logits by 1.2965. Code that applies the factor in the softmax"
    " instead must square it.",
    wrong_form=lambda scaling: scaling,
    right_form=lambda scaling: scaling**2,
    prove=_e32,
)


# ------------------------------------------------------------------------------------------------------------- E52
Mask = Callable[[Tensor], Tensor]  # positions (T,) -> allowed pairs (T, T)


def _e52(wrong: Mask, right: Mask) -> Sequence[Check]:
    rng = np.random.default_rng(52)
    q, k = (torch.from_numpy(rng.standard_normal((1, 1, 5, 8))) for _ in range(2))  # (B, H, T, D)
    rows = {form: reference_weights(q, k, form(torch.arange(5)))[0, 0] for form in (wrong, right)}
    seen = [int((rows[right][m] > 0).sum()) for m in range(5)]
    return (
        equal("E52", "NaN weights in the first row, 'other' keys only", int(rows[wrong][0].isnan().sum()), 5),
        equal("002-02 E52", "weight of the first token on itself, right form", float(rows[right][0, 0]), 1.0),
        equal("E52", "number of keys visible to tokens 0 to 4, right form", ", ".join(map(str, seen)), "1, 2, 3, 4, 5"),
        below("E52", "row sums minus 1, right form", worst(rows[right].sum(-1), torch.ones(5)), 1e-6),
    )


E52 = Erratum(
    id="E52",
    kind="B",
    where="note 002, line 15, on the output o_m",
    matter="q_m is also scored against its own k_m, not only against the other keys",
    printed="q_m and the other k_n each give an attention score",
    right="q_m and all k_n up to n = m, including its own",
    why="Without its own key the first token of a decoder has no key at all, and the softmax over nothing is NaN.",
    wrong_form=lambda positions: positions[None, :] < positions[:, None],
    right_form=lambda positions: causal_mask(positions, positions),
    prove=_e52,
)


# ------------------------------------------------------------------------------------------------------------- E54
Update = Callable[[dict[str, Any], int], Array]  # (scaling, tokens) -> frequencies
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}


def _e54_printed(scaling: dict[str, Any], tokens: int) -> Array:
    length = tokens if "dynamic" in scaling["rope_type"] else 16  # otherwise the first table stays
    return inverse_frequencies(8, 10000.0, scaling, seq_len=length, max_seq_len=16)[0].double().numpy()


def _e54_right(scaling: dict[str, Any], tokens: int) -> Array:
    """The angles at position 1 in the library's table for a text of that length."""
    table = rope.Rope("complex", 8, 64, 10000.0, scaling, trained_len=16)
    return _angles(table, tokens)


def _e54(wrong: Update, right: Update) -> Sequence[Check]:
    short, long = frequencies(8), frequencies(8) / np.array([1, 2, 3, 4])
    return (
        below("E54", "40 tokens, as printed: distance to the short table", worst(wrong(_LONGROPE, 40), short), 1e-7),
        above("E54", "40 tokens, as printed: distance to the long table", worst(wrong(_LONGROPE, 40), long), 0.04),
        below(
            "002-21 E54", "40 tokens, right form: distance to the long table", worst(right(_LONGROPE, 40), long), 1e-6
        ),
        below("E54", "16 tokens, right form: distance to the short table", worst(right(_LONGROPE, 16), short), 1e-6),
    )


E54 = Erratum(
    id="E54",
    kind="B",
    where="note 002, line 147, when frequencies are updated",
    matter="the table must follow the length for longrope too, not only for dynamic",
    printed='if "dynamic" in self.rope_type: update the frequencies',
    right="update for every type whose frequencies depend on the length: dynamic and longrope",
    why="longrope has one list of divisors up to the trained length and another beyond it. With this line, a text of"
    " 40 tokens and an original length of 16 silently uses the short list.",
    wrong_form=_e54_printed,
    right_form=_e54_right,
    prove=_e54,
)


# ------------------------------------------------------------------------------------------------------------- OK8
Rotated = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # (q, k, freqs_cis) -> both rotated


def _ok8_halves(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = torch.cat((freqs_cis.real,) * 2, -1), torch.cat((freqs_cis.imag,) * 2, -1)  # (T, D) each
    return rope.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)


def _ok8(tempting: Rotated, printed: Rotated) -> Sequence[Check]:
    rng = np.random.default_rng(8)
    q, k = rng.standard_normal((6, 8)), rng.standard_normal((6, 8))
    truth = rotated(q, np.arange(6)) @ rotated(k, np.arange(6)).T  # adjacent pairs
    xq, xk = (torch.from_numpy(x).float()[None, :, None] for x in (q, k))  # (B, T, H, D)
    off = {}
    for form in (tempting, printed):
        out_q, out_k = form(xq, xk, rope.precompute_freqs_cis(8, 6))
        off[form] = worst(out_q[0, :, 0] @ out_k[0, :, 0].T, truth)
    return (
        below("001-10 OK8", "rotate_half, reordered, minus adjacent pairs", off[printed], 1e-5),
        above("OK8", "rotate_half, not reordered, minus adjacent pairs", off[tempting], 1.0),
    )


OK8 = Erratum(
    id="OK8",
    kind="OK",
    where="note 002, lines 158 and 342, cat(freqs, freqs) and rotate_half",
    matter="cat(freqs, freqs) with rotate_half is RoPE with the entries in another order",
    printed="emb = cat((freqs, freqs), -1) and rotate_half(x) = cat((-x2, x1), -1), while the theory pairs neighbours",
    right="as printed, for weights whose rows are in the half order (pair i is entries i and i + d/2)",
    why="After one permutation the scores equal those of neighbouring pairs. Without it they do not: this is the"
    " classic bug of loading Meta's weights into Hugging Face's code, or the reverse.",
    wrong_form=_ok8_halves,
    right_form=lambda q, k, freqs_cis: _ok8_halves(rope.interleaved_to_half(q), rope.interleaved_to_half(k), freqs_cis),
    prove=_ok8,
)


# ------------------------------------------------------------------------------------------------------------ OK10
Rotation = Callable[[Tensor, Tensor], Tensor]  # (x (1, T, 1, D), angles (T, D/2)) -> rotated x


def _ok10_tempting(x: Tensor, angles: Tensor) -> Tensor:
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)  # (b, a): swapped, without the sign
    cos, sin = angles.cos().repeat_interleave(2, -1), angles.sin().repeat_interleave(2, -1)  # (T, D) each
    return x * cos[:, None] + swapped * sin[:, None]


def _ok10_printed(x: Tensor, angles: Tensor) -> Tensor:
    return forms.apply_elementwise(x, angles.cos(), angles.sin())


def _ok10(tempting: Rotation, printed: Rotation) -> Sequence[Check]:
    x = np.random.default_rng(10).standard_normal((6, 64))
    angles = torch.outer(torch.arange(6.0), inverse_frequencies(64)[0])  # (T, D/2)
    matrices = forms.rotation_matrix(angles.cos(), angles.sin()).double().numpy()  # (T, D, D)
    by_matrix = np.einsum("tij,tj->ti", matrices, x)  # (T, D)
    batch = torch.from_numpy(x).float()[None, :, None]  # (B, T, H, D)
    return (
        below("002-11 OK10", "element-wise form minus R x", worst(printed(batch, angles)[0, :, 0], by_matrix), 1e-5),
        above("OK10", "swap without the sign minus R x", worst(tempting(batch, angles)[0, :, 0], by_matrix), 1.0),
        below("OK10", "R x minus numpy", worst(by_matrix, rotated(x, np.arange(6))), 1e-5),
        equal("OK10", "fraction of R that is zero, d = 64", float((matrices[5] == 0).mean()), 0.969, 5e-4),
    )


OK10 = Erratum(
    id="OK10",
    kind="OK",
    where="note 002, lines 92 and 97, the block-diagonal matrix and the element-wise form",
    matter="the element-wise form equals the block-diagonal matrix, with the zeros left out",
    printed="R x = x * cos + (-x2, x1, -x4, x3, ..) * sin",
    right="as printed: every row of R has two nonzero entries",
    why="At d = 64 the matrix is 96.9% zeros: 2d products replace d^2. A plain swap of neighbours would lose the"
    " signs.",
    wrong_form=_ok10_tempting,
    right_form=_ok10_printed,
    prove=_ok10,
)


ERRATA = (E24, E25, E26, E27, E28, E29, E30, E31, E32, E52, E54, OK8, OK10)
