"""The interface of a checkpoint, whatever its format, and what the readers share."""

from __future__ import annotations

import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..config import ModelConfig
from ..errors import CheckpointError, DamagedError, TokenizerError
from ..rope import ROTATED, Layout, to_layout
from ..rope_scaling import inverse_frequencies, rotated_entries
from ..system.documents import Fields
from ..tokenizer import Tokenizer
from .weight import ReorderedWeight, ScaledWeight, Weight

# A tensor's name in the model, without layer and ".weight" -> in Meta's, Hugging Face's, GGUF and EXAONE's files.
# "layers" stands before the number of a layer.
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("layers", "model.layers", "blk", "transformer.h"),
    "tok_embeddings": ("tok_embeddings", "model.embed_tokens", "token_embd", "transformer.wte"),
    "norm": ("norm", "model.norm", "output_norm", "transformer.ln_f"),
    "output": ("output", "lm_head", "output"),
    "attention_norm": ("attention_norm", "input_layernorm", "attn_norm", "ln_1"),
    "attention.wq": ("attention.wq", "self_attn.q_proj", "attn_q", "attn.attention.q_proj"),
    "attention.wk": ("attention.wk", "self_attn.k_proj", "attn_k", "attn.attention.k_proj"),
    "attention.wv": ("attention.wv", "self_attn.v_proj", "attn_v", "attn.attention.v_proj"),
    "attention.wo": ("attention.wo", "self_attn.o_proj", "attn_output", "attn.attention.out_proj"),
    "attention.q_norm": ("attention.q_norm", "self_attn.q_norm", "attn_q_norm"),
    "attention.k_norm": ("attention.k_norm", "self_attn.k_norm", "attn_k_norm"),
    "ffn_norm": ("ffn_norm", "post_attention_layernorm", "ffn_norm", "ln_2"),
    "feed_forward.w_gate": ("feed_forward.w1", "mlp.gate_proj", "ffn_gate", "mlp.c_fc_0"),
    "feed_forward.w_up": ("feed_forward.w3", "mlp.up_proj", "ffn_up", "mlp.c_fc_1"),
    "feed_forward.w_down": ("feed_forward.w2", "mlp.down_proj", "ffn_down", "mlp.c_proj"),
}
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
PARTIAL = "only a part of each head rotates (partial_rotary_factor), which can't be written; keep the source's files"
META_NAMES, HUGGING_FACE_NAMES, GGUF_NAMES, EXAONE = (
    {theirs[column]: ours for ours, theirs in NAMES.items() if theirs[column:]} for column in range(4)
)
HUGGING_FACE_NAMES = {
    "shared_mlp.input_linear": "feed_forward.w_gate_up", "shared_mlp.output_linear": "feed_forward.w_down",  # Granite 4
    "self_attn.qkv_proj": "attention.wqkv", "mlp.gate_up_proj": "feed_forward.w_gate_up",
    **EXAONE, **HUGGING_FACE_NAMES,  # last: `to_file_name` uses the last of several names
}  # fmt: skip
GGUF_NAMES |= {"attn_qkv": "attention.wqkv"}  # matrices that are stored as one: see `model_weights`


class Checkpoint(ABC):
    """A model on disk, described from its headers; weights are read one at a time, on demand."""

    path: Path
    format: str  # for display
    config: ModelConfig
    layout: Layout = "interleaved"  # the order of the rows of wq and wk in the files
    _weights: Mapping[str, Weight]  # by the model's tensor names, in the files' layout
    names: Mapping[str, str] = MappingProxyType({})  # a tensor's name in the files, without layer -> in the model
    factors: Mapping[str, float] = MappingProxyType({})  # what weights and biases are multiplied by: {"wq": 0.5}
    parts: Mapping[str, int]  # the files that hold weights, in order -> their sizes in bytes
    chat_template: str | Mapping[str, str] | None = None  # Jinja source, or several by name (default, tool_use)
    sampling: Mapping[str, Any] = MappingProxyType({})  # default options: temperature, top_p, ...
    warnings: Sequence[str] = ()  # to show at once: entries without effect, files that are ignored
    notes: Sequence[str] = ()  # facts that the files do not state, and how they were decided
    adapters: Sequence[str] = ()  # descriptions of the adapters that are merged into the weights
    adapters_hash: str = ""  # a hash of these adapters and their scales; "" if there are none
    tokenizer_override: Tokenizer | None = None  # used in place of the checkpoint's own tokenizer

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights by the model's names. A tied output has no entry."""
        return {name: weight.shape for name, weight in self._weights.items()}

    @property
    def about(self) -> Mapping[str, Any]:
        """Further facts to display: name, quantization, and the bytes of the weights by their stored type."""
        weights: dict[str, int] = {}
        for weight in map(self.weight, self.shapes):
            nbytes = round(weight.bits * math.prod(weight.shape) / 8)
            weights[weight.stored] = weights.get(weight.stored, 0) + nbytes
        return {"weights": weights}

    def weight(self, name: str, layout: Layout = "interleaved") -> Weight:
        """A weight by the model's name for it. `layout` is the order of the rows of wq and wk."""
        unscaled, factor = self.unscaled(name, layout), self.factors.get(name.split(".")[-2], 1.0)
        return ScaledWeight(unscaled, factor) if factor != 1 and unscaled.shape else unscaled

    def unscaled(self, name: str, layout: Layout) -> Weight:
        """A weight without its factor."""
        return in_layout(self._weights[name], name, self.config.head_dim, self.layout, layout)

    def file_name(self, name: str) -> str:
        """The name that the model's tensor `name` has in the files, or would have if they lack the tensor."""
        return self.weight(name).name if name in self.shapes else to_file_name(name, self.names)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Raises TokenizerError if there is none, CheckpointError if it does not fit."""
        tokenizer = self.tokenizer_override or self.own_tokenizer()
        # Some models pad the embedding; others have a few tokens without a row, which are an error only in a prompt.
        # Llama 2's 32,000 tokens are just below a quarter of Llama 3's 128,256.
        small, large = sorted((tokenizer.n_vocab, self.config.vocab_size))
        if 4 * small < large:
            raise CheckpointError(
                f"{self.path}: the tokenizer has {tokenizer.n_vocab} tokens, but the embedding has"
                f" {self.config.vocab_size} rows; use the tokenizer that was published with the weights"
            )
        return tokenizer

    @abstractmethod
    def own_tokenizer(self) -> Tokenizer:
        """The tokenizer in the checkpoint's files, or found near them. Raises TokenizerError."""

    def chat_format(self, tokenizer: Tokenizer) -> str | None:
        """The built-in chat format that fits the vocabulary of Meta's files, which have no template; None for others.

        The files do not state whether the model was trained to chat.
        """
        from ..chat.formats import chat_format_of

        return chat_format_of(tokenizer) if self.format == "Meta" else None


def in_layout(weight: Weight, name: str, head_dim: int, source: Layout, target: Layout) -> Weight:
    """A weight with the rows of wq and wk in another order; see `to_layout`."""
    rows = torch.arange(sum(weight.shape[:1]))
    if source == target or not name.endswith(ROTATED) or not len(rows) or len(rows) % head_dim:
        return weight  # `mismatches` reports a number of rows that does not fit
    return ReorderedWeight(weight, to_layout(name, rows, head_dim, source, target))


def find_tokenizer(folder: Path, names: Sequence[str]) -> Path:
    """The first file with one of these names in the folder, its parent, or its subfolder original/.

    Meta's downloads of LLaMA 1 and 2 have it in the parent. Raises TokenizerError if there is none.
    """
    for place in (folder, folder.absolute().parent, folder / "original"):
        for name in names:
            if (place / name).exists():
                return place / name
    raise TokenizerError(f"{folder} has no {' or '.join(names)}; name one: tokenizer=PATH (--tokenizer PATH)")


def unknown_keys(fields: Fields, no_effect: Collection[str]) -> list[str]:
    """A warning that names the entries that nothing has read, except those that never have an effect."""
    unknown = [key for key in fields.unknown() if key not in no_effect]
    return [f"{fields.where} has unknown keys, which have no effect: {', '.join(unknown)}"] if unknown else []


def model_weights(stored: Mapping[str, Weight], config: ModelConfig) -> dict[str, Weight]:
    """Convert a file's weights, in the half layout, to the model's weights. Fused matrices are split.

    In the file, the rows of a head that do not rotate come last. They become the last pairs of the half layout, and are
    divided by the attention factor, since this factor multiplies cos and sin of every pair.
    """
    q, kv, F = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim, config.hidden_dim
    fused = {"wqkv": {"wq": q, "wk": kv, "wv": kv}, "w_gate_up": {"w_gate": F, "w_up": F}}
    weights: dict[str, Weight] = {}
    for name, weight in stored.items():
        stem, rows, end = name.split(".")[-2], sum(weight.shape[:1]), 0
        both = stem == "w_up" and rows == 2 * F and name.replace("w_up", "w_gate") not in stored  # as in GGUF files
        for part, count in fused.get("w_gate_up" if both else stem, {stem: rows}).items():
            whole = name.replace(stem, part)
            if whole in weights or (whole in stored and whole != name and not both):
                raise DamagedError(f"{weight.name} and another tensor both contain {whole}; remove one of them")
            weights[whole] = weight[end : end + count]
            end += count
        if end != rows:
            raise DamagedError(f"{weight.name} has shape {weight.shape}, but the configuration requires {end} rows")
    D, rotated = config.head_dim, rotated_entries(config.head_dim, config.rope_scaling)
    if rotated == D:
        return weights
    _, factor = inverse_frequencies(D, config.rope_theta, config.rope_scaling, max_seq_len=config.max_seq_len)
    (a, b), (c, d) = torch.arange(rotated).chunk(2), torch.arange(rotated, D).chunk(2)
    order = torch.cat((a, c, b, d))  # (D,): the entries in the file, in the order of the half layout
    factors = torch.where(order < rotated, 1.0, 1 / factor)  # (D,)
    for name, weight in weights.items():
        if name.endswith(ROTATED) and weight.shape[:1] in ((q,), (kv,)):  # `mismatches` reports others
            index = torch.arange(weight.shape[0]).view(-1, D)[:, order].flatten()
            weights[name] = ScaledWeight(ReorderedWeight(weight, index), factors.repeat(len(index) // D))
    return weights


def to_file_name(name: str, names: Mapping[str, str]) -> str:
    """Convert the model's name of a tensor to the file's. names: stems of the file's names -> the model's."""
    theirs = {ours: source for source, ours in names.items()}
    stem, kind = name.rsplit(".", 1)  # kind is weight or bias
    if not stem.startswith("layers."):
        return f"{theirs[stem]}.{kind}"
    _, layer, inner = stem.split(".", 2)
    return f"{theirs['layers']}.{layer}.{theirs[inner]}.{kind}"


def to_model_name(file_name: str, names: Mapping[str, str]) -> str | None:
    """The inverse of `to_file_name`; None for a tensor that a LLaMA decoder does not have."""
    layers = "|".join(re.escape(theirs) for theirs, ours in names.items() if ours == "layers")
    match = re.fullmatch(rf"(?:(?:{layers})\.([0-9]{{1,6}})\.)?([\w.]+)\.(weight|bias)", file_name)
    if not match or match[2] not in names:
        return None
    return (f"layers.{match[1]}." if match[1] else "") + f"{names[match[2]]}.{match[3]}"
