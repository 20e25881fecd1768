"""Compare `llama.study.activations` and `patching_grid` with nnsight on transformers, in float32 on the same weights.

usage: python scripts/compare_inside.py FOLDER

FOLDER holds a model in Hugging Face's format. This makes it from the default model:

    clearllama convert smollm2-135m-instruct FOLDER --to hf --dtype float32

The first table has a row for each name of docs/guides/inside.md: the largest value of the tensor, the largest
difference, and the largest difference divided by the largest value of the same vector (of a token; of a head, if the
tensor has heads). The second compares two patching grids: each entry of nnsight's is a run of its own, also where the
two texts are equal. Exit code 1 if a number exceeds its bound. It needs nnsight 0.8 and transformers 5.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import llama
from llama import study
from llama.rope import half_to_interleaved

BOUND = 1e-4  # of a difference, divided by the largest value of the vector; of a share in the grid
TEXT = (
    "The capital of France is Paris. Rotary embeddings rotate each query and each key by an angle that grows with its"
    " position, so that a score depends on the distance between two tokens and on nothing else about their places."
)
SOURCE, TARGET = "The capital of Italy is", "The capital of France is"

# our name -> nnsight's value, for a layer of transformers' Llama; in the order in which the layer computes them
LAYER: dict[str, Callable[[Any], Any]] = {
    "resid_pre": lambda block: block.input,
    "attn_in": lambda block: block.input_layernorm.output,
    "q": lambda block: block.self_attn.q_proj.output,
    "k": lambda block: block.self_attn.k_proj.output,
    "v": lambda block: block.self_attn.v_proj.output,
    "rot_q": lambda block: block.self_attn.source.apply_rotary_pos_emb_0.output[0],
    "rot_k": lambda block: block.self_attn.source.apply_rotary_pos_emb_0.output[1],
    "pattern": lambda block: block.self_attn.source.attention_interface_1.output[1],
    "z": lambda block: block.self_attn.o_proj.input,
    "attn_out": lambda block: block.self_attn.o_proj.output,
    "resid_mid": lambda block: block.post_attention_layernorm.input,
    "mlp_in": lambda block: block.post_attention_layernorm.output,
    "mlp_hidden": lambda block: block.mlp.down_proj.input,
    "mlp_out": lambda block: block.mlp.output,
    "resid_post": lambda block: block.output,
}


def in_our_order(name: str, x: Tensor, head_dim: int) -> Tensor:
    """A tensor of transformers in our shape: heads apart, after the tokens; the pairs of q and k side by side."""
    if name in ("rot_q", "rot_k"):
        x = x.transpose(1, 2)  # (B, H, T, D) -> (B, T, H, D)
    elif name in ("q", "k", "v", "z"):
        x = x.unflatten(-1, (-1, head_dim))
    return half_to_interleaved(x) if name in ("q", "k", "rot_q", "rot_k") else x


def their_activations(theirs: Any, ids: list[int]) -> dict[str, Tensor]:
    """Every tensor of LAYER in each layer, and those outside the layers: {"q.3": ...}."""
    found: dict[str, Tensor] = {}
    for block in theirs.model.layers:
        _ = block.self_attn.source  # nnsight rewrites the forward before it runs
    with torch.no_grad(), theirs.trace(torch.tensor([ids])):
        found["embed"] = theirs.model.embed_tokens.output.save()
        for number, block in enumerate(theirs.model.layers):
            for name, value in LAYER.items():
                found[f"{name}.{number}"] = value(block).save()
        found["final_norm"] = theirs.model.norm.output.save()
        found["logits"] = theirs.lm_head.output.save()
    return found


def their_grid(theirs: Any, grid: study.Grid) -> Tensor:
    """The grid by nnsight, (L, T) float64: row t of a batch of T has the source's stream at token t."""
    T, (first, second), (d_source, d_target) = len(grid.target), grid.answers, grid.differences
    every = torch.arange(T)
    restored = torch.zeros(len(grid.layers), T, dtype=torch.float64)
    streams = their_activations(theirs, grid.source)
    for number, block in enumerate(theirs.model.layers):
        put = streams[f"resid_pre.{number}"][0]  # (T, C)
        with torch.no_grad(), theirs.trace(torch.tensor([grid.target] * T)):
            stream = block.input.clone()  # (T, T, C)
            stream[every, every] = put
            block.input = stream
            logits = theirs.lm_head.output[:, -1].save()  # (T, V)
        restored[number] = ((logits[:, first] - logits[:, second]).double() - d_target) / (d_source - d_target)
    return restored


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the inside of a model with nnsight's view of transformers.")
    parser.add_argument("folder", type=Path, help="a model in Hugging Face's format")
    folder = parser.parse_args().folder
    try:
        from nnsight import TransformersModel
    except ImportError as error:
        raise SystemExit(f"compare_inside: {error}; pip install nnsight transformers") from error

    llm = llama.load(folder, device="cpu", dtype="float32")
    theirs = TransformersModel(
        str(folder), task="text-generation", dispatch=True, dtype=torch.float32, attn_implementation="eager"
    )
    ids, (source, target) = (
        llm.tokenizer.encode_prompt(TEXT),
        (llm.tokenizer.encode_prompt(text) for text in (SOURCE, TARGET)),
    )
    expected = their_activations(theirs, ids)
    with study.activations(llm, ["embed", "final_norm", "logits", *(f"{name}.*" for name in LAYER)]) as seen:
        llm.model(torch.tensor([ids]))
    assert set(seen) == set(expected)

    worst: dict[str, tuple[float, float, float]] = {}
    for name, tensor in expected.items():
        site = name.split(".")[0]
        x = in_our_order(site, tensor, llm.model.config.head_dim)
        difference, largest = (seen[name] - x).abs(), x.abs().amax(-1, keepdim=True)
        found = float(largest.max()), float(difference.max()), float((difference / largest).max())
        worst[site] = tuple(map(max, found, worst.get(site, found)))  # type: ignore[assignment]
    print(f"{len(ids)} tokens, {llm.model.config.n_layers} layers")
    print("| name | largest value | largest difference | relative to the vector |\n|---|---:|---:|---:|")
    for site, (largest_value, absolute, relative) in worst.items():
        print(f"| `{site}` | {largest_value:,.4g} | {absolute:.1e} | {relative:.1e} |")

    grid = study.patching_grid(llm, source, target)
    gap = float((grid.restored - their_grid(theirs, grid)).abs().max())
    d_source, d_target = grid.differences
    print(f"\npatching grid, {grid.restored.shape[0]} layers x {grid.restored.shape[1]} tokens:")
    print(f"logit differences {d_source:.4f} and {d_target:.4f}; largest difference of a share {gap:.1e},")
    print(f"of a patched logit difference {gap * abs(d_source - d_target):.1e}")
    return int(max(gap, *(relative for _, _, relative in worst.values())) > BOUND)


if __name__ == "__main__":
    sys.exit(main())
