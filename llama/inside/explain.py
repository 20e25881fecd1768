"""Follow one token through one block: show the equation, numbers and line of code of each step, and check the step.

`reference` below is the complete block in numpy's float64. It shares only the weights with the model. Each of its steps
starts from the model's results of earlier steps, so one wrong step does not make later steps fail. The model's numbers
are recorded while its code runs, and the lines of code come from the source of the functions that ran.

Letters: T tokens, H query heads, KV key/value heads, D head_dim, C model dim, F hidden_dim, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import attention, model, rope
from ..checks import dtype_name
from ..config import ModelConfig
from ..errors import UsageError
from ..model import Transformer
from ..rope import to_layout
from ..rope_scaling import kind_of
from ..system.documents import plain
from .hooks import activations

Array = np.ndarray[Any, Any]
Code = list[tuple[Callable[..., Any], str]]  # functions, and expressions in them
Recipe = tuple[str, str, str, Code]  # a step: name, equation, results as "letter shape; letter shape", code

# A model whose tokens are bytes and whose numbers fit on a screen. All sizes differ, so no shapes are equal by chance.
TINY = ModelConfig(
    dim=8, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, hidden_dim=12, vocab_size=256, max_seq_len=256
)
LONGEST = 256  # limit of the tokens, since all steps are stored, including the scores of all heads
# Allowed difference of a number, relative to its scale (`reference`). In float32, a sum of thousands of terms has an
# error of about 1e-6 of the sum of their absolute values.
TOLERANCE = 1e-5
ZERO = np.zeros(1)


def random_model(config: ModelConfig = TINY, rope: str = "complex", **options: Any) -> Transformer:
    """A model with random float32 weights, which do not depend on the form of RoPE. Options are as for Transformer."""
    model = Transformer(config, rope, **options).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        value = 1 + 0.2 * noise if name.endswith("norm.weight") else noise / weight.shape[-1] ** 0.5
        weight.copy_(to_layout(name, value, config.head_dim, "interleaved", model.rope.layout))
    return model


# ------------------------------------------------------------------------------------------ the block in numpy
def reference(
    h: Array, w: Mapping[str, Array], angles: Array, factor: float, config: ModelConfig, ours: Mapping[str, Array]
) -> dict[str, tuple[Array, Array]]:
    """Compute every step of a block from the input h (T, C) float64 and angles (T, D/2) in radians, as in the papers.

    Returns letter -> (result, scale); the scale is the sum of the absolute values of the terms that are added. The
    rounding error of a step is a few ulps of this scale. If `ours` has the result of an earlier step, a step starts
    from this result, so that errors of its inputs do not count; softmax would amplify the errors of large scores.
    """
    T, H, D, group = len(h), config.n_heads, config.head_dim, config.n_heads // config.n_kv_heads
    cos, sin = factor * np.cos(angles), factor * np.sin(angles)  # (T, D/2)
    found: dict[str, tuple[Array, Array]] = {}

    def step(letter: str, result: Array, scale: Array) -> Array:
        found[letter] = result, scale
        computed = ours.get(letter)
        return result if computed is None or computed.shape != result.shape else computed

    def norm(x: Array, weight: Array, errors: Array = ZERO) -> tuple[Array, Array]:  # RMSNorm, arXiv:1910.07467
        rms = np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps)
        y = x / rms * weight
        return y, np.abs(y) + (errors * np.abs(weight) + errors.max(-1, keepdims=True) * np.abs(y)) / rms

    def project(x: Array, name: str) -> tuple[Array, Array]:
        weight, bias = w[f"{name}.weight"].T, w.get(f"{name}.bias", ZERO)
        return x @ weight + bias, np.abs(x) @ np.abs(weight) + np.abs(bias)

    def split(x: Array) -> Array:  # (T, heads * D) -> (heads, T, D)
        return x.reshape(T, -1, D).swapaxes(0, 1)

    def heads(name: str) -> tuple[Array, Array]:
        result, scale = map(split, project(x, f"attention.w{name}"))  # (heads, T, D) twice
        weight = w.get(f"attention.{name}_norm.weight")  # Qwen3 has a norm for each head
        return (result, scale) if weight is None else norm(result, weight, scale)

    def rotate(x: Array) -> tuple[Array, Array]:  # RoPE, arXiv:2104.09864: entries 2i and 2i + 1 are a point
        a, b = x[..., 0::2], x[..., 1::2]
        # an angle in float32 has an error of some ulps of the angle
        scale = factor * (1 + np.abs(angles)) * (np.abs(a) + np.abs(b))  # (heads, T, D/2)
        return np.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(x.shape), np.repeat(scale, 2, -1)

    x = step("x", *norm(h, w["attention_norm.weight"]))  # (T, C)
    q, k, v = (step(name, *heads(name)) for name in "qkv")  # (H, T, D), (KV, T, D) twice
    rotated_q, rotated_k = step("q'", *rotate(q)), np.repeat(step("k'", *rotate(k)), group, 0)  # (H, T, D) twice
    scores, scale = (f(rotated_q) @ f(rotated_k).swapaxes(1, 2) / np.sqrt(D) for f in (np.array, np.abs))  # (H, T, T)
    scores = step("s", np.where(np.tri(T, dtype=bool), scores, -np.inf), scale)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)  # (H, T, T)
    # if t = s - max s is rounded, e^t has an error of (1 + |t|) e^t ulps; for t <= 0, this is at most 1 ulp
    weights = step("p", weights, weights.max(-1, keepdims=True))
    values = np.repeat(v, group, 0)  # (H, T, D)
    y = step("y", weights @ values, weights @ np.abs(values))  # (H, T, D)
    o = step("o", *project(y.swapaxes(0, 1).reshape(T, H * D), "attention.wo"))  # (T, C)
    a = step("a", h + o, np.abs(h) + np.abs(o))  # (T, C)
    z = step("z", *norm(a, w["ffn_norm.weight"]))  # (T, C)
    (gate, gate_scale), (up, up_scale) = (project(z, f"feed_forward.{name}") for name in ("w_gate", "w_up"))  # (T, F)
    with np.errstate(over="ignore"):  # e^-gate may be infinite; the quotient is then 0
        silu = gate / (1 + np.exp(-gate))  # (T, F)
    result, _ = project(silu * up, "feed_forward.w_down")  # SwiGLU, arXiv:2002.05202: (T, C)
    # an error of gate is multiplied by up, and an error of up by silu(gate); the slope of silu is about 1
    _, scale = project(gate_scale * np.abs(up) + np.abs(silu) * up_scale, "feed_forward.w_down")
    f = step("f", result, scale)
    step("h'", a + f, np.abs(a) + np.abs(f))
    return found


# -------------------------------------------------------------------------------------------- recording the model
# letter of `reference` -> the name of its tensor in hooks.py, without the layer
SITES = {
    **{"h": "resid_pre", "x": "attn_in", "q": "q", "k": "k", "v": "v", "q'": "rot_q", "k'": "rot_k", "y": "z"},
    **{"p": "pattern", "o": "attn_out", "a": "resid_mid", "z": "mlp_in", "f": "mlp_out", "h'": "resid_post"},
}


def _computed(net: Transformer, ids: Sequence[int], layer: int) -> dict[str, Array]:
    """The model's result of each step for a text, in the shapes of `reference`, with heads in the interleaved layout.

    The model runs with the reference implementation of attention, since fused kernels don't return scores.
    """
    seen: dict[str, Tensor] = {}
    block = net.layers[layer]
    names = {"e": "embed", **{letter: f"{site}.{layer}" for letter, site in SITES.items()}}

    def attend(q: Any, k: Any, v: Any, mask: Tensor | None) -> Tensor:
        seen["s"] = attention.reference_scores(q, k, mask)
        return attention.reference(q, k, v, mask)

    with contextlib.ExitStack() as stack:
        stack.callback(block.set_submodule, "attention.attend", block.attention.attend)
        block.set_submodule("attention.attend", attention.Attend(attend))
        tensors = stack.enter_context(activations(net, names.values()))
        with torch.inference_mode():
            net(torch.tensor([ids], device=net.tok_embeddings.weight.device))
    seen |= {letter: tensors[name] for letter, name in names.items()}
    for letter in ("q", "k", "v", "q'", "k'", "y"):
        by_head = seen[letter].transpose(1, 2)  # (1, heads, T, D)
        half = net.rope.layout == "half" and letter in "qk"
        seen[letter] = rope.half_to_interleaved(by_head) if half else by_head
    return {letter: tensor[0].double().cpu().numpy() for letter, tensor in seen.items()}


def _weights_of(net: Transformer, layer: int) -> dict[str, Array]:
    """The block's weights in float64, with wq and wk in the interleaved layout, which `reference` uses."""
    found = {}
    for name, weight in net.layers[layer].named_parameters():
        plain = rope.to_layout(name, weight, net.config.head_dim, net.rope.layout, "interleaved")
        found[name] = plain.double().cpu().numpy()
    return found


# ----------------------------------------------------------------------------------------------- lines of code
def find_source(function: Callable[..., Any], expression: str) -> dict[str, Any] | None:
    """The line of a function's source that contains an expression; None if no line does, or if there is no source.

    Returns the file relative to the package's parent folder, the number of the line, and its text.
    """
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return None
    for number, line in enumerate(lines, first):
        if expression in line:
            path, package = Path(inspect.getsourcefile(function) or ""), Path(model.__file__).parent.parent
            file = path.relative_to(package).as_posix() if path.is_relative_to(package) else path.name
            return {"file": file, "line": number, "text": line.strip()}
    return None


# form of RoPE -> the expression that rotates
ROTATIONS = {
    "complex": "q * cis",
    "real": "(a * cos - b * sin, a * sin + b * cos)",
    "half": "q.float() * cos + rotate_half(q.float()) * sin",
}


def recipes(form: str, apply: Callable[..., Any], kind: str = "default", qk_norm: bool = False) -> list[Recipe]:
    """The twelve steps of a model with a form of rope.FORMS and a kind of rope_scaling.SCALINGS.

    `apply` is the function that rotates. Functions are looked up at each call and not at import, so that the quoted
    code is the code that runs.
    """
    forward, block, norm = model.Attention.forward, model.TransformerBlock.forward, model.RMSNorm.forward
    scores = attention.reference_scores
    normed = "y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)"
    projections = [(forward, f"self.w{name}(x).unflatten(-1, (-1, self.head_dim))") for name in "qkv"]
    of_heads = ",  then RMSNorm of each head of q and k" if qk_norm else ""
    attended = "h + self.attention(self.attention_norm(h), freqs_cis, mask, positions, cache)"
    rotations: Code = [
        (rope.freqs_cis_at, "positions.unsqueeze(-1).float() * inv_freq"),
        (forward, "self.apply_rotary_emb(q, k, freqs_cis)"),
        (apply if form != "half" else rope.apply_rotary_pos_emb, ROTATIONS[form]),
    ]
    scaled = f" scaled by {kind}" if kind != "default" else ""
    T, D = "(T, C)", "(H, T, D)"
    return [
        ("embedding", "e = the token's row of the embedding matrix, the input h of block 0", f"e {T}",
         [(model.Transformer.states, "self.tok_embeddings(tokens)")]),
        ("RMSNorm", "x = h / sqrt(mean(h²) + eps) · w_norm", f"h {T}; x {T}",
         [(norm, normed), (norm, "y.type_as(x) * self.weight")]),
        ("projections", f"q = W_q x,  k = W_k x,  v = W_v x, cut into heads of D{of_heads}",
         f"q {D}; k (KV, T, D); v (KV, T, D)", projections),
        ("RoPE", f"q'_i = q_i e^(j m ω_i),  k'_i = k_i e^(j m ω_i),  ω_i = θ^(-2i/D){scaled}: pair i at position m;"
         " v is unchanged", f"q' {D}; k' (KV, T, D)", rotations),
        ("scores", "s_mn = q'_m · k'_n / sqrt(D) for n <= m, else -inf; query head h reads key head h // (H / KV)",
         "s (H, T, T)", [(scores, "(q.float() @ k.float().transpose(-2, -1)) / q.shape[-1] ** 0.5"),
                         (scores, "scores.masked_fill(~mask, -torch.inf)")]),
        ("softmax", "p_mn = e^(s_mn) / sum over n of e^(s_mn)", "p (H, T, T)",
         [(attention.reference_weights, "reference_scores(q, k, mask).softmax(dim=-1)")]),
        ("weighted sum", "y_m = sum over n of p_mn v_n", f"y {D}",
         [(attention.reference, "reference_weights(x, k, mask) @ v.float()")]),
        ("output projection", "o = W_o (y of all heads, concatenated)", f"o {T}",
         [(forward, "self.wo(y.transpose(1, 2).flatten(-2))")]),
        ("residual", "a = h + o", f"a {T}", [(block, attended)]),
        ("second RMSNorm", "z = a / sqrt(mean(a²) + eps) · w_norm, with other weights", f"z {T}",
         [(block, "self.ffn_norm(h)"), (norm, normed)]),
        ("SwiGLU", "f = W_down (silu(W_gate z) * W_up z),  silu(t) = t / (1 + e^(-t))", f"f {T}",
         [(model.FeedForward.forward, "self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))")]),
        ("second residual", "h' = a + f, the input of the next block", f"h' {T}",
         [(block, "h + self.feed_forward(self.ffn_norm(h))")]),
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------- the explanation
SHOWN = 8  # numbers per row
QUESTION = "what happens to one token in one block?"


def explain(
    net: Transformer,
    ids: Sequence[int],
    token: int | None = None,
    layer: int = 0,
    texts: Sequence[str] | None = None,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Follow one token (by default the last) through one block of a float32 model. Returns an object for JSON:

    settings   `about`, the selected token with its text from `texts`, and the model's sizes
    says       sentences on how to read the numbers
    passed     whether all steps passed
    steps      for each step: name, equation, values, sources (null if the quoted expression is not in the code),
               difference (the largest difference from `reference`, relative to the scale) and passed
    values     for each result of a step: letter; its shape in letters and in numbers (`letters`, `shape`); numbers (at
               most `SHOWN`, for the selected token and head 0); more (whether there are further numbers)

    Raises UsageError on a token or layer that does not exist, an empty or long text, or a model in another dtype.
    """
    config = net.config
    if net.tok_embeddings.weight.dtype != torch.float32:
        dtype = dtype_name(net.tok_embeddings.weight.dtype)
        raise UsageError(
            f"explain needs a model in float32, not {dtype}: load it with dtype='float32' (--dtype float32)"
        )
    token = check(net, ids, token, layer)
    ours = _computed(net, ids, layer)
    embedded = net.tok_embeddings.weight[list(ids)].double().cpu().numpy()  # (T, C)
    start = embedded if layer == 0 else ours["h"]
    rotary = net.layers[layer].attention.apply_rotary_emb
    angles, factor = _angles(net, len(ids)) if rotary.rotates else (np.zeros((len(ids), config.head_dim // 2)), 1.0)
    right = reference(start, _weights_of(net, layer), angles, factor, config, ours)
    right["e"] = embedded, np.abs(embedded)

    steps = []
    for name, equation, results, code in recipes(
        net.rope.form, rotary.rotate, kind_of(config.rope_scaling), config.qk_norm
    ):
        shapes = [result.split(" ", 1) for result in results.split("; ")]
        compared = [letter for letter, _ in shapes if letter != "h"]  # h is an input
        # np.max returns NaN if one of the numbers is NaN; Python's max may not
        apart = float(np.max([_apart(ours.get(letter), *right[letter]) for letter in compared]))
        values = [_value(letter, letters, ours.get(letter), token) for letter, letters in shapes]
        step = {"name": name, "equation": equation, "values": values, "sources": [find_source(*line) for line in code]}
        steps.append({**step, "difference": plain(apart), "passed": apart < TOLERANCE})  # NaN does not pass
    read = {} if texts is None else {"text": texts[token]}
    sizes = {"T": len(ids), "C": config.dim, "H": config.n_heads, "KV": config.n_kv_heads, "D": config.head_dim}
    sizes |= {"F": config.hidden_dim, "V": config.vocab_size}
    settings = {**(about or {}), "layer": layer, "token": token, **read, **sizes}
    notes = ["each step is compared with an independent computation of the same step in numpy's float64"]
    if layer:
        notes.append(f"the comparison starts from the output of blocks 0 to {layer - 1}")
    if not rotary.rotates:
        notes.append("this block has no RoPE: all frequencies ω_i are 0, so q' = q and k' = k")
    if net.rope.layout == "half":
        notes.append("q and k are shown in Meta's layout; --rope half stores entry 2i + r of a head at index i + r D/2")
    if config.rope_scaling is not None:
        notes.append("the model's frequencies are scaled; the comparison uses ω_i from the library")
    passed = all(step["passed"] for step in steps)
    return {"settings": settings, "says": notes, "passed": passed, "steps": steps}


def check(net: Transformer, ids: Sequence[int], token: int | None, layer: int) -> int:
    """Check the arguments of `explain` that can be checked without weights. Returns the index of the token."""
    if not 1 <= len(ids) <= LONGEST:
        raise UsageError(f"explain needs a text of 1 to {LONGEST} tokens, got {len(ids)}")
    token = len(ids) - 1 if token is None else token
    if not 0 <= token < len(ids):
        raise UsageError(f"token must be from 0 to {len(ids) - 1}, the last token of the text, got {token}")
    if not 0 <= layer < net.config.n_layers:
        raise UsageError(f"layer must be from 0 to {net.config.n_layers - 1}, the last layer of the model, got {layer}")
    return token


def _angles(net: Transformer, length: int) -> tuple[Array, float]:
    """Angles position * theta^(-2i/D) (T, D/2), and the factor of cos and sin.

    For a model with a RoPE scaling, both are the library's values.
    """
    config, factor = net.config, 1.0
    inv_freq: Array = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if config.rope_scaling is not None:
        scaled, factor = net.rope.frequencies(length)
        inv_freq = scaled.double().numpy()
    return np.outer(np.arange(length), inv_freq), factor


def _apart(ours: Array | None, right: Array, scale: Array) -> float:
    """The largest value of difference / scale; infinite if `ours` was not recorded or has another shape."""
    if ours is None or ours.shape != right.shape:
        return float("inf")
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.where(ours == right, 0.0, np.abs(ours - right) / scale).max())  # -inf equals -inf


def _value(letter: str, letters: str, ours: Array | None, token: int) -> dict[str, Any]:
    shape: tuple[int, ...] = () if ours is None else ours.shape
    numbers = np.zeros(0)
    if ours is not None:
        row = ours[0] if ours.ndim == 3 else ours  # head 0: (T, ..)
        numbers = row[token][: token + 1] if letters.endswith("T)") else row[token]
    shown = {"numbers": list(map(plain, numbers[:SHOWN].tolist())), "more": len(numbers) > SHOWN}
    return {"letter": letter, "letters": letters, "shape": shape, **shown}


def text(found: Mapping[str, Any]) -> str:
    """An explanation as text for a terminal."""
    lines = [f"explain: {QUESTION}"]
    lines.append("  " + ", ".join(f"{key} {value!r}" for key, value in found["settings"].items()))
    lines += [f"  {line}" for line in found["says"]]
    lines.append(
        f"  the numbers shown belong to this token and, in steps with heads, to head 0; at most {SHOWN} per row"
    )
    for number, step in enumerate(found["steps"], 1):
        lines += ["", f"{number:>2} {step['name']}: {step['equation']}"]
        for value in step["values"]:
            numbers = " ".join(f"{x:.4f}" if abs(x) < 1e3 else f"{x:.4g}" for x in map(float, value["numbers"]))
            shape = "(" + ", ".join(map(str, value["shape"])) + ")" if value["shape"] else "not recorded"
            more = " .." if value["more"] else ""
            lines.append(f"   {value['letter']:<2} {value['letters']} = {shape}: {numbers}{more}")
        for source in step["sources"]:
            lines.append("   {file}:{line}  {text}".format_map(source) if source else "   (line not found)")
        word = "PASS" if step["passed"] else "FAIL"
        lines.append(f"   {word}  difference {float(step['difference']):.1e}, at most {TOLERANCE:.0e} allowed")
    count = sum(step["passed"] for step in found["steps"])
    lines += ["", f"{'PASS' if found['passed'] else 'FAIL'}: {count} of {len(found['steps'])}"]
    return "\n".join(lines) + "\n"
