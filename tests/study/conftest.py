"""Fixtures of the study's tests: the C++ kernels, transformers with the tiny model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from llama.checkpoint.write import to_layout
from llama.engine import kernels
from llama.model import Transformer

from .. import tiny


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> Iterator[None]:
    """Remove the C++ kernel from tiny.FUNCTIONS on machines where it cannot be built."""
    with pytest.MonkeyPatch.context() as patch:
        if not kernels.ready():
            patch.delitem(tiny.FUNCTIONS, "kernel")
        yield


@pytest.fixture(scope="module")
def both() -> tuple[Transformer, Any]:
    """The tiny model, and transformers' with the same weights and eager attention."""
    c = tiny.CONFIG
    theirs = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=c.dim, num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads, head_dim=c.head_dim,
            num_key_value_heads=c.n_kv_heads, intermediate_size=c.hidden_dim, vocab_size=c.vocab_size,
            rms_norm_eps=c.norm_eps, max_position_embeddings=c.max_seq_len, attn_implementation="eager",
            rope_parameters={"rope_theta": c.rope_theta, "rope_type": "default"}, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    names = {
        "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj", "feed_forward.w_gate": "mlp.gate_proj", "feed_forward.w_up": "mlp.up_proj",
        "feed_forward.w_down": "mlp.down_proj", "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "tok_embeddings": "model.embed_tokens", "output": "lm_head",
        "norm.weight": "model.norm.weight",
    }  # fmt: skip
    state = {}
    for ours, tensor in tiny.weights().items():
        name = "model." + ours if ours.startswith("layers") else ours
        for a, b in names.items():
            if a != "norm.weight" or ours == a:
                name = name.replace(a, b)
        state[name] = to_layout(ours, tensor, c.head_dim, "interleaved", "half")
    theirs.load_state_dict(state)
    return tiny.model(), theirs
