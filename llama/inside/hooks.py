"""The inside of a model: read any tensor while the model runs (`activations`), or change it (`patch`).

    with activations(model, ["resid_post.*", "pattern.3"]) as seen:
        model(tokens)
    seen["pattern.3"]  # (B, H, T, S)

    with patch(model, {"z.3": lambda x, at: x * keep}):  # keep (H, 1), 0 for the heads to ablate
        llm.generate("The capital of France is")

Both use PyTorch's hooks on the modules, so they work in every way to run a model: a forward pass, generate, a batch,
speculative decoding, on every device and with quantized weights. Compiled and fused code calls no modules and is
switched off while there are hooks (engine/watch.py); a model in several processes is refused.

The name of a module, such as "layers.3.attention.wq", stands for its output. A name of SITES is followed by the number
of a layer: "q.3". * stands for any part between dots: "resid_post.*", "layers.*.attention.wq". docs/guides/inside.md
lists all names.

Letters: B batch, T new tokens, S keys (cached and new), H query heads, KV key/value heads, D head_dim, C model dim,
F hidden_dim, V vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock, local
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import dequantized, reference_weights
from ..errors import UsageError
from ..model import Transformer
from ..rope import RotaryEmb
from ..text import Llama


class Place(NamedTuple):
    """Where a function of `patch` is called.

    name       name of the tensor, such as "resid_post.3"
    layer      number of the layer; None outside the layers
    positions  positions of the tokens, (T,) or (B, T); None outside the layers
    """

    name: str
    layer: int | None
    positions: Tensor | None


Function = Callable[[Tensor, Place], Tensor]
Visit = Callable[[Tensor], Tensor | None]  # returns a new tensor, or None to keep the old one
Remove = Callable[[], None]


# ------------------------------------------------------------------------------------------------------------- names
@dataclass(frozen=True)
class Site:
    """A tensor of the model: an input or the output of a module.

    module  name of the module; if the site is in a block, the name within the block ("" is the block itself)
    shape   shape of the tensor, for the documentation
    input   index among the module's inputs; None if the tensor is an output
    part    index of the tensor if the output is a tuple
    heads   whether the module's last axis must be divided into heads
    remedy  the site to patch instead, if a change of this tensor would not reach everything that reads the tensor
    """

    module: str
    shape: str
    input: int | None = None
    part: int | None = None
    heads: bool = False
    remedy: str | None = None


# The order is that of the forward pass. Where TransformerLens has a name, it is used here.
SITES: dict[str, Site] = {
    "embed": Site("tok_embeddings", "(B, T, C)"),
    "resid_pre": Site("", "(B, T, C)", input=0),
    "attn_in": Site("attention_norm", "(B, T, C)"),
    "q": Site("attention.apply_rotary_emb", "(B, T, H, D)", input=0),
    "k": Site("attention.apply_rotary_emb", "(B, T, KV, D)", input=1),
    "v": Site("attention.wv", "(B, T, KV, D)", heads=True),
    "rot_q": Site("attention.apply_rotary_emb", "(B, T, H, D)", part=0),
    "rot_k": Site("attention.apply_rotary_emb", "(B, T, KV, D)", part=1),
    "pattern": Site("attention.attend", "(B, H, T, S) float32"),
    "z": Site("attention.wo", "(B, T, H, D)", input=0, heads=True),
    "attn_out": Site("attention", "(B, T, C)"),
    "resid_mid": Site("ffn_norm", "(B, T, C)", input=0, remedy="attn_out"),
    "mlp_in": Site("ffn_norm", "(B, T, C)"),
    "mlp_hidden": Site("feed_forward.w_down", "(B, T, F)", input=0),
    "mlp_out": Site("feed_forward", "(B, T, C)"),
    "resid_post": Site("", "(B, T, C)"),
    "final_norm": Site("norm", "(B, T, C)"),
    "logits": Site("output", "(.., V)"),
}
OUTSIDE = ("embed", "final_norm", "logits")  # sites that are not in a block
OUTPUT = Site("", "")  # the site of a name that is a module's
MARKING = Lock()  # held while the identities and the buffer change together


class Tensors(NamedTuple):
    """What a name stands for: the module to hook, the site, and the number of the layer."""

    module: nn.Module
    site: Site
    layer: int | None


def tensors_of(model: Transformer) -> dict[str, Tensors]:
    """All names with their tensors, in the order of the forward pass. In `only_layers`, layers keep their numbers."""
    found = {"embed": Tensors(model.tok_embeddings, SITES["embed"], None)}
    for block in model.layers:
        layer = block.attention.layer
        for name, site in SITES.items():
            if name not in OUTSIDE:
                found[f"{name}.{layer}"] = Tensors(block.get_submodule(site.module), site, layer)
        for name, module in block.named_modules(prefix=f"layers.{layer}"):
            if not isinstance(module, RotaryEmb):  # a RotaryEmb returns two tensors: rot_q and rot_k
                found[name] = Tensors(module, OUTPUT, layer)
    for name in OUTSIDE[1:]:
        found[name] = Tensors(model.get_submodule(SITES[name].module), SITES[name], None)
    for name in ("tok_embeddings", "norm", "output"):
        found[name] = Tensors(model.get_submodule(name), OUTPUT, None)
    return found


def resolve(model: Transformer, names: str | Iterable[str]) -> dict[str, Tensors]:
    """The tensors that names and patterns stand for. Raises UsageError if a name or pattern stands for no tensor."""
    known, found = tensors_of(model), dict[str, Tensors]()
    for name in [names] if isinstance(names, str) else names:
        pattern = re.compile(re.escape(name).replace(r"\*", "[^.]*"))
        matches = {one: tensors for one, tensors in known.items() if pattern.fullmatch(one)}
        if not matches:
            layers = sorted({tensors.layer for tensors in known.values() if tensors.layer is not None})
            raise UsageError(
                f"no tensor is named {name!r:.80}; expected a module such as layers.{layers[0]}.attention.wq, or"
                f" {', '.join(one if one in OUTSIDE else f'{one}.N' for one in SITES)}; N is * or a layer from"
                f" {layers[0]} to {layers[-1]}"
            )
        found |= matches
    return found


def transformer(model: Transformer | Llama) -> Transformer:
    """The model itself. Raises UsageError if several processes share it: each would see only a part of each tensor."""
    model = model.model if isinstance(model, Llama) else model
    if model.world is not None:
        raise UsageError("the tensors of a model in several processes can't be read or changed; run it in one process")
    return model


# ------------------------------------------------------------------------------------------------------------- hooks
def attach(tensors: Tensors, head_dim: int, visit: Visit) -> Remove:
    """Call `visit` with a tensor whenever the module runs. If `visit` returns a tensor, the model uses this tensor."""
    module, site, _ = tensors
    if site is SITES["pattern"]:
        return Pattern.attach(module, visit)

    def changed(old: Any, number: int | None) -> Any:
        """The new tensor, or the tuple with the new tensor in it; None if `visit` keeps the old tensor."""
        x: Tensor = old if number is None else old[number]
        new = visit(x.unflatten(-1, (-1, head_dim)) if site.heads else x)
        if new is None:
            return None
        new = new.flatten(-2) if site.heads else new
        return new if number is None else (*old[:number], new, *old[number + 1 :])

    if site.input is not None:
        return module.register_forward_pre_hook(lambda _, inputs: changed(inputs, site.input)).remove
    return module.register_forward_hook(lambda _, inputs, output: changed(output, site.part)).remove


class Pattern:
    """The hook of an attention function: calls each visit with the attention weights, in the order of `visits`.

    Fused kernels return no weights, so the hook computes them. If no visit changes them, the function's own result
    stays; otherwise the result is the changed weights times the values.
    """

    def __init__(self, attend: nn.Module):
        self.visits: list[Visit] = []
        self.handle = attend.register_forward_hook(self)

    @staticmethod
    def attach(attend: nn.Module, visit: Visit) -> Remove:
        """Add a visit to the module's hook. The hook is made for the first visit and removed with the last one."""
        hooks = attend._forward_hooks.values()
        hook = next((hook for hook in hooks if isinstance(hook, Pattern)), None) or Pattern(attend)
        hook.visits.append(visit)

        def remove() -> None:
            hook.visits.remove(visit)
            if not hook.visits:
                hook.handle.remove()

        return remove

    def __call__(self, attend: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor | None:
        q, k, v, mask = inputs
        q, k, v = dequantized(q.float(), k, v)
        first = weights = reference_weights(q, k, mask)  # (B, H, T, S)
        for visit in list(self.visits):
            new = visit(weights)
            weights = weights if new is None else new
        if weights is first:
            return None
        values = v.float().repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B, H, S, D)
        return (weights @ values).type_as(y)  # (B, H, T, D)


# ----------------------------------------------------------------------------------------------------------- reading
class Activations(Mapping[str, Tensor]):
    """The recorded tensors by name: `seen[name]` is the tensor of the latest pass.

    calls  name -> the tensors of all passes: one for each chunk of a prompt and one for each new token

    The tensors are the model's own and not copies. They remain available after the `with` block.
    """

    def __init__(self, names: Iterable[str]):
        self.calls: dict[str, list[Tensor]] = {name: [] for name in names}

    def __getitem__(self, name: str) -> Tensor:
        if not self.calls.get(name):
            recorded = ", ".join(self) or "nothing, since the model did not run in the with block"
            raise KeyError(f"{name} was not recorded; recorded: {recorded}")
        return self.calls[name][-1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, tensors in self.calls.items() if tensors)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@contextlib.contextmanager
def activations(model: Transformer | Llama, names: str | Iterable[str]) -> Iterator[Activations]:
    """Record the tensors with these names whenever the model runs, in any thread.

    Inside the block of a `patch`, the changed tensors are recorded; if the `patch` begins inside this block, the
    unchanged ones. Raises UsageError for an unknown name, and for a model in several processes.
    """
    model = transformer(model)
    found = resolve(model, names)
    seen = Activations(found)
    with contextlib.ExitStack() as stack:
        for name, tensors in found.items():
            stack.callback(attach(tensors, model.config.head_dim, seen.calls[name].append))
        yield seen


# ---------------------------------------------------------------------------------------------------------- changing
@contextlib.contextmanager
def patch(model: Transformer | Llama, changes: Mapping[str, Function], identity: str | None = None) -> Iterator[None]:
    """Replace tensors whenever the model runs: {name or pattern: function(x, at) -> the new tensor}.

    x is the tensor in the shape of SITES, and `at` a Place. The result must have the shape of x; it is converted to the
    dtype and device of x. x is a copy, so it may be changed in place. Functions for the same tensor run in the order in
    which they were given. The change affects all threads; a pass that already runs is changed from its next layer on.

    identity  a name for the change. A `Session` that was used in this patch can be used again only in a patch with the
              same identity; without an identity, only in this `with` block

    Raises UsageError for an unknown name, for a tensor that can only be read, for a model in several processes, and,
    when the model runs, for a result of another shape or type.
    """
    model = transformer(model)
    now = local()  # now.positions are those of the pass that this thread runs
    with contextlib.ExitStack() as stack:
        stack.enter_context(marked(model, identity or uuid.uuid4().hex))
        for block in dict.fromkeys(model.layers):
            handle = block.register_forward_pre_hook(lambda _, inputs: setattr(now, "positions", inputs[3]))
            stack.callback(handle.remove)
        for pattern, function in changes.items():
            for name, tensors in resolve(model, pattern).items():
                if tensors.site.remedy is not None:
                    raise UsageError(f"{name} can only be read; patch {tensors.site.remedy}.{tensors.layer}")
                visit = _checked(name, tensors.layer, function, now)
                stack.callback(attach(tensors, model.config.head_dim, visit))
        yield


def _checked(name: str, layer: int | None, function: Function, now: local) -> Visit:
    """A visit that calls the function and checks the tensor that it returns."""

    def visit(x: Tensor) -> Tensor | None:
        if layer is not None and not hasattr(now, "positions"):  # the block began before the patch
            return None
        copy = x.clone()  # x may also be recorded, or be part of a computation that follows
        new = function(copy, Place(name, layer, None if layer is None else now.positions))
        if not isinstance(new, Tensor) or new.shape != x.shape:
            found = f"shape {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
            raise UsageError(f"the function for {name} must return a tensor of shape {tuple(x.shape)}, got {found}")
        return x if new is copy and not new.requires_grad and torch.equal(new, x) else new.to(x)

    return visit


@contextlib.contextmanager
def marked(model: Transformer, identity: str) -> Iterator[None]:
    """Add a change to the model's identity, which is a buffer that sessions compare (generation/session.py).

    Changes may end in any order, since several threads may patch a model.
    """
    _mark(model, list.append, identity)
    try:
        yield
    finally:
        _mark(model, list.remove, identity)


def _mark(model: Transformer, change: Callable[[list[str], str], None], identity: str) -> None:
    with MARKING:
        identities = model.__dict__.setdefault("_identities", [])  # identities of all changes in force
        change(identities, identity)
        if identities:
            digest = hashlib.sha256("\0".join(identities).encode()).digest()
            model.register_buffer("patched", torch.frombuffer(bytearray(digest), dtype=torch.uint8), persistent=False)
        else:
            del model._identities, model.patched
