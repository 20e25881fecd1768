"""Adapters: merged logits are those of transformers with W + scale B A; what does not fit is refused in one line."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

import llama
from llama import loader
from llama.checkpoint import open_checkpoint
from llama.checkpoint.adapters import with_adapters
from llama.engine import kernels
from llama.engine.sharding import Rank, ShardedCheckpoint
from llama.errors import CheckpointError, LlamaError, UsageError
from llama.generation.session import Session, settings_of
from llama.loader import LoadOptions
from llama.tools.convert import convert
from llama.tools.quantize import quantize

from . import test_huggingface, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(320, (1, 30), generator=torch.Generator().manual_seed(2))
LAYERS = 2
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
MODULES = [f"model.layers.{i}.{part}.{name}" for i in range(LAYERS)
           for part, names in (("self_attn", ATTENTION), ("mlp", MLP)) for name in names]  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a random model: plain, tied or biased."""
    root = tmp_path_factory.mktemp("bases")
    kinds = {"plain": {}, "tied": {"tie_word_embeddings": True}, "biased": {"attention_bias": True, "mlp_bias": True}}

    def folder(kind: str) -> Path:
        if not (root / kind).exists():
            test_huggingface.write(root / kind, **kinds[kind])
        return root / kind

    return folder


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


class Lora:
    """An adapter that a test writes, and the state of the merged model, computed here from the definition."""

    def __init__(self, base: Path):
        self.state = load_file(base / "model.safetensors")
        self.tied = "lm_head.weight" not in self.state
        if self.tied:
            self.state["lm_head.weight"] = self.state["model.embed_tokens.weight"].clone()
        self.tensors: dict[str, Tensor] = {}

    def low_rank(self, module: str, rank: int, scale: float) -> None:
        rows, columns = self.state[f"{module}.weight"].shape
        seed = sum(map(ord, module))
        if module.endswith("embed_tokens"):
            a, b = noise(rank, rows, seed=seed), noise(columns, rank, seed=seed + 1)
            self.tensors[f"{module}.lora_embedding_A"], self.tensors[f"{module}.lora_embedding_B"] = a, b
            self.state[f"{module}.weight"] += scale * (b.double() @ a.double()).T.float()
        else:
            a, b = noise(rank, columns, seed=seed), noise(rows, rank, seed=seed + 1)
            self.tensors[f"{module}.lora_A.weight"], self.tensors[f"{module}.lora_B.weight"] = a, b
            self.state[f"{module}.weight"] += scale * (b.double() @ a.double()).float()

    def replace(self, name: str, key: str | None = None) -> None:
        new = self.state[name] + 0.3 * noise(*self.state[name].shape, seed=len(name))
        self.tensors[key or name] = self.state[name] = new

    def write(self, folder: Path, **config: Any) -> Path:
        folder.mkdir()
        save_file({f"base_model.model.{key}": value.contiguous() for key, value in self.tensors.items()},
                  folder / "adapter_model.safetensors")  # fmt: skip
        settings = {"peft_type": "LORA", "base_model_name_or_path": "some/base", "task_type": "CAUSAL_LM", "bias": "none",
                    "r": 4, "lora_alpha": 8, "target_modules": list(ATTENTION + MLP), "lora_dropout": 0.1,
                    "fan_in_fan_out": False, "inference_mode": True, "loftq_config": {}, "peft_version": "0.21.2"}  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
        return folder

    def logits(self, base: Path) -> Tensor:
        """The logits of the merged model, by transformers."""
        model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32, tie_word_embeddings=False)
        model.load_state_dict(self.state)
        return model.eval()(TOKENS).logits


def simple(
    base: Path, folder: Path, rank: int = 4, alpha: float = 8, modules: list[str] = MODULES
) -> tuple[Path, Lora]:
    lora = Lora(base)
    for module in modules:
        lora.low_rank(module, rank, alpha / rank)
    names = sorted({module.rsplit(".", 1)[-1] for module in modules})
    targets = names if modules == MODULES else modules
    return lora.write(folder, r=rank, lora_alpha=alpha, target_modules=targets), lora


def logits(path: Path, **options: Any) -> Tensor:
    return llama.load_model(path, **{"dtype": "float32", "device": "cpu", **options})(TOKENS)


Build = Callable[[Lora], dict[str, Any]]


def each(modules: list[str], rank: int = 4, scale: float = 2.0) -> Build:
    def build(lora: Lora) -> dict[str, Any]:
        for module in modules:
            lora.low_rank(module, rank, scale)
        return {}

    return build


def named(*ends: str) -> list[str]:
    return [module for module in MODULES if module.endswith(ends)]


def patterns(lora: Lora) -> dict[str, Any]:
    for module in MODULES:
        rank = 3 if "layers.1.mlp" in module else 2 if module.endswith("q_proj") else 4
        alpha = 5 if module.endswith("0.self_attn.k_proj") else 8
        lora.low_rank(module, rank, alpha / rank)
    return {"rank_pattern": {r"model\.layers\.1\.mlp\..*": 3, "q_proj": 2}, "alpha_pattern": {"0.self_attn.k_proj": 5}}


def saved(*names: str) -> Build:
    def build(lora: Lora) -> dict[str, Any]:
        for module in named("q_proj"):
            lora.low_rank(module, 4, 2.0)
        for name in sorted(lora.state):
            if name.removesuffix(".weight").endswith(names) or any(f".{part}." in name for part in names):
                lora.replace(name)
        return {"target_modules": ["q_proj"], "modules_to_save": list(names)}

    return build


def biases(kind: str) -> Build:
    def build(lora: Lora) -> dict[str, Any]:
        for module in named("q_proj"):
            lora.low_rank(module, 4, 2.0)
        for name in [name for name in lora.state if name.endswith(".bias")]:
            module = name.removesuffix(".bias")
            if kind == "all" or module.endswith("q_proj"):
                lora.replace(name, f"{module}.base_layer.bias" if module.endswith("q_proj") else name)
        return {"target_modules": ["q_proj"], "bias": kind}

    return build


EMBED, HEAD = "model.embed_tokens", "lm_head"
CASES: dict[str, tuple[Build, dict[str, Any]]] = {
    "list": (each(MODULES), {}),
    "rslora": (each(MODULES, 4, 8 / math.sqrt(4)), {"use_rslora": True}),
    "patterns": (patterns, {}),
    "regex": (each(named("q_proj", "1.mlp.up_proj")), {"target_modules": r".*\.(q_proj|1\.mlp\.up_proj)"}),
    "all-linear": (each(MODULES), {"target_modules": "all-linear"}),
    "excluded": (each(named("v_proj")), {"target_modules": r".*[qv]_proj", "exclude_modules": ["q_proj"]}),
    "layers": (each(named("1.mlp.down_proj")), {"target_modules": ["down_proj"], "layers_to_transform": [1]}),
    "head": (each([HEAD]), {"target_modules": ["lm_head"]}),
    "embedding": (each([EMBED]), {"target_modules": ["embed_tokens"]}),
    "both": (each([EMBED, HEAD]), {"target_modules": ["embed_tokens", "lm_head"]}),
    "saved head": (saved("lm_head"), {}),
    "saved embedding": (saved("embed_tokens"), {}),
    "saved norms": (saved("norm"), {}),
    "saved parts": (saved("mlp"), {}),
}


@pytest.mark.parametrize("kind", ["plain", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_merged_logits_are_those_of_transformers(bases, tmp_path: Path, case: str, kind: str) -> None:
    lora, (build, config) = Lora(bases(kind)), CASES[case]
    path = lora.write(tmp_path / "adapter", **{**build(lora), **config})
    ours, theirs = logits(bases(kind), adapters=path), lora.logits(bases(kind))
    assert (ours - theirs).abs().max() < 1e-4
    assert (ours - logits(bases(kind))).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["all", "lora_only"])
def test_trained_biases_replace_those_of_the_base(bases, tmp_path: Path, kind: str) -> None:
    lora = Lora(bases("biased"))
    path = lora.write(tmp_path / "adapter", **biases(kind)(lora))
    assert (logits(bases("biased"), adapters=path) - lora.logits(bases("biased"))).abs().max() < 1e-4


def test_an_embedding_that_peft_saved_untrained_leaves_the_weights_tied(bases, tmp_path: Path) -> None:
    lora = Lora(bases("tied"))
    each(named("q_proj"))(lora)
    lora.tensors["model.embed_tokens.weight"] = lora.state["model.embed_tokens.weight"]
    path = lora.write(tmp_path / "adapter", target_modules=["q_proj"])
    checkpoint = with_adapters(open_checkpoint(bases("tied")), path)
    assert checkpoint.config.tie_embeddings
    assert not checkpoint.changed("tok_embeddings.weight")


@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_every_format_of_the_base_and_every_file_of_the_adapter_give_the_same_logits(bases, tmp_path, kind) -> None:
    path, _ = simple(bases(kind), tmp_path / "adapter", modules=[*MODULES, EMBED])
    expected = logits(bases(kind), adapters=path)
    convert(bases(kind), tmp_path / "b", "hf")
    convert(bases(kind), tmp_path / "a.gguf", "gguf")
    shutil.copytree(path, tmp_path / "bin")
    torch.save(load_file(path / "adapter_model.safetensors"), tmp_path / "bin" / "adapter_model.bin")
    (tmp_path / "bin" / "adapter_model.safetensors").unlink()
    for base in (tmp_path / "b", tmp_path / "a.gguf"):
        assert torch.equal(logits(base, adapters=path), expected)
    assert torch.equal(logits(bases(kind), adapters=tmp_path / "bin"), expected)
    for rope in ("half", "real"):
        assert torch.allclose(logits(bases(kind), adapters=path, rope=rope), expected, atol=1e-4)


def test_adapters_add_up_with_their_scales(bases, tmp_path: Path) -> None:
    base = bases("plain")
    first, one = simple(base, tmp_path / "first")
    second, two = simple(base, tmp_path / "second:2", rank=3, alpha=1.5, modules=named("k_proj", "down_proj"))
    plain = load_file(base / "model.safetensors")
    one.state = {name: w + 0.5 * (one.state[name] - w) - 2 * (two.state[name] - w) for name, w in plain.items()}
    for adapters in ([f"{first}:0.5", (second, -2)], [(str(first), 0.5), f"{second}:-2"]):
        assert (logits(base, adapters=adapters) - one.logits(base)).abs().max() < 1e-4
    assert torch.equal(logits(base, adapters=f"{first}:0"), logits(base))


def gguf_adapter(path: Path, lora: Lora, alpha: float | None = 8.0, **metadata: str) -> Path:
    """Write the matrices of a PEFT adapter as llama.cpp's converter does: rows of q and k in Meta's order."""
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down"}  # fmt: skip
    entries = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "llama", **metadata}
    writer = gguf.GGUFWriter(str(path), entries.pop("general.architecture"))
    tiny.add_metadata(writer, entries)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for key, tensor in lora.tensors.items():
        if key.startswith("model.layers."):
            _, _, layer, part, module, which, *_ = key.split(".")
            name = f"blk.{layer}.{names[f'{part}.{module}']}.weight.{which.lower()}"
            if module in ("q_proj", "k_proj") and which == "lora_B":
                tensor = tensor.view(-1, 2, 8, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)  # heads of 16
        else:
            name = f"token_embd.weight.lora_{key[-1].lower()}"
            tensor = tensor.T if key.endswith("A") else tensor
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_adapter_is_the_peft_adapter_it_was_made_of(bases, tmp_path: Path) -> None:
    base = bases("plain")
    path, lora = simple(base, tmp_path / "adapter", modules=[*MODULES, EMBED])
    file = gguf_adapter(tmp_path / "adapter.gguf", lora)
    assert torch.allclose(logits(base, adapters=file), logits(base, adapters=path), atol=1e-5)
    without = gguf_adapter(tmp_path / "without.gguf", lora, alpha=None)  # llama.cpp then takes the scale 1
    assert torch.allclose(logits(base, adapters=without), logits(base, adapters=f"{path}:0.5"), atol=1e-5)


def test_a_rank_reads_its_part_of_the_merged_weights(bases, tmp_path: Path) -> None:
    base = bases("tied")
    path, _ = simple(base, tmp_path / "adapter", modules=[*MODULES, EMBED])
    whole = with_adapters(open_checkpoint(base), path)
    for number in range(2):
        rank = Rank(number, 2)
        part = ShardedCheckpoint(whole, rank)
        for name in part.shapes:
            rows, columns = rank.cut(name, whole.config)
            full = whole.tensor(name)
            assert torch.allclose(part.tensor(name), full[rows] if full.dim() == 1 else full[rows, columns], atol=1e-6)


# --------------------------------------------------------------------------------------- quantizing and converting
def test_adapters_are_merged_before_quantization(bases, tmp_path: Path) -> None:
    base = bases("plain")
    path, lora = simple(base, tmp_path / "adapter", modules=[*MODULES, HEAD])
    merged = convert(base, tmp_path / "merged", "hf", adapters=path)
    ours = load_file(merged.path / "model.safetensors")
    assert all((ours[name] - tensor).abs().max() < 1e-6 for name, tensor in lora.state.items())
    assert json.loads((merged.path / "config.json").read_text())["model_type"] == "llama"
    folders = [quantize(base, tmp_path / "a", adapters=path).path, quantize(merged.path, tmp_path / "b").path]
    states = [load_file(folder / "model.safetensors") for folder in folders]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    if kernels.ready():
        options = {"quantize": "int4", "dtype": None}
        assert torch.equal(logits(base, adapters=path, **options), logits(merged.path, **options))


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0"])
def test_a_quantized_base_needs_a_choice(bases, tmp_path: Path, type: str) -> None:
    """Most of the adapter is lost if Q4_0 weights are quantized again, so that is no default."""
    file = tiny.write_gguf(tmp_path / "base.gguf", quantization=type)
    path, _ = simple(bases("plain"), tmp_path / "adapter")
    with pytest.raises(
        UsageError, match=rf"base.gguf is quantized \({type}\).*lose most of.*use the unquantized .*--dtype"
    ):
        loader.load(file, device="cpu", adapters=path)
    plain = convert(file, tmp_path / "plain", "hf", dtype=torch.float32).path
    expected = logits(plain, adapters=path)
    assert torch.allclose(logits(file, adapters=path), expected, atol=1e-5)
    if kernels.ready():
        requantized = loader.load(file, device="cpu", quantize="int8", adapters=path)
        assert any("already quantized" in warning for warning in requantized.warnings)
    with pytest.raises(UsageError, match="choose the dtype to write"):
        convert(file, tmp_path / "out.gguf", "gguf", adapters=path)


def test_requantizing_a_q4_0_weight_loses_a_small_adapter() -> None:
    """The reason for the refusal: of a change of 2 % of the weight's norm, 4 bits keep less than a tenth."""
    weight, change = 0.02 * noise(64, 1024, seed=1) * 32, noise(64, 16, seed=2) @ noise(16, 1024, seed=3)
    change *= 0.02 * weight.norm() / change.norm()
    type = gguf.GGMLQuantizationType.Q4_0

    def again(w: Tensor) -> Tensor:
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(w.numpy(), type), type))

    stored = again(weight)
    kept = ((again(stored + change) - stored) * change).sum() / change.square().sum()
    assert kept < 0.1


def test_merged_weights_are_not_counted_as_mapped(bases, tmp_path: Path) -> None:
    path, _ = simple(bases("plain"), tmp_path / "adapter", modules=named("1.mlp.up_proj"))
    mapped = []
    for adapters in ((), path):
        plan = loader.resolve_options(loader.open_model(bases("plain"), adapters), LoadOptions("cpu", "float32"))
        weights = loader.memory_footprint(plan.checkpoint, plan.checkpoint.shapes, torch.device("cpu"), plan.storage)
        mapped.append(weights)
    assert mapped[0][0] == mapped[1][0]
    assert mapped[0][1] - mapped[1][1] == 4 * 64 * 96


# --------------------------------------------------------------------------------------------------------- identity
def test_a_session_belongs_to_its_adapters_and_their_scales(bases, tmp_path: Path) -> None:
    base = bases("plain")
    path, _ = simple(base, tmp_path / "adapter", modules=named("1.mlp.down_proj"))  # keys and values stay the same
    shutil.copytree(path, tmp_path / "elsewhere")
    model = llama.load_model(base, dtype="float32", device="cpu", adapters=path)
    session = Session()
    cache = session.reuse(model, [1, 2, 3, 4])
    model(torch.tensor([[1, 2, 3]]), cache=cache)
    session.give_back([1, 2, 3], nonfinite=False)
    session.save(tmp_path / "session", model)
    same = llama.load_model(base, dtype="float32", device="cpu", adapters=tmp_path / "elsewhere")
    assert Session.load(tmp_path / "session", same).tokens == [1, 2, 3]
    for others in ((), f"{path}:0.5", [path, f"{path}:0"]):
        other = llama.load_model(base, dtype="float32", device="cpu", adapters=others)
        with pytest.raises(
            CheckpointError, match=r"was saved with adapters [0-9a-f]{16}; this model has (none|[0-9a-f]{16}):"
        ):
            Session.load(tmp_path / "session", other)
    assert "adapters" not in settings_of(llama.load_model(base, dtype="float32", device="cpu"))
    assert "adapters" not in model.state_dict()


# --------------------------------------------------------------------------------------------------------- refusals
def config_of(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "adapter_model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)


def set_tensor(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda state: state.update({f"base_model.model.{name}": value})


FIRST = "model.layers.0.self_attn.q_proj"
PEFT_TYPES = ["IA3", "LOHA", "LOKR", "ADALORA", "OFT", "VERA", "XLORA"]
REFUSALS: list[tuple[dict[str, Any], str]] = [
    *(
        ({"peft_type": kind}, f"has the PEFT type {kind}: only LoRA is merged here; merge it into its base with peft")
        for kind in PEFT_TYPES
    ),
    ({"peft_type": "PROMPT_TUNING"}, "it adds tokens to the prompt instead of changing weights; run it with peft"),
    ({"peft_type": None}, "is not a PEFT adapter: peft_type is missing"),
    ({"use_dora": True}, "is a DoRA adapter, which also rescales every row"),
    ({"fan_in_fan_out": True}, "stores transposed weights"),
    ({"use_qalora": True}, "is a QALoRA adapter"),
    ({"alora_invocation_tokens": [1]}, "is an activated LoRA"),
    ({"layer_replication": [[0, 2]]}, "repeats layers"),
    ({"lora_bias": True}, "adds a bias to B"),
    ({"target_parameters": ["x"]}, "changes single parameters"),
    ({"trainable_token_indices": [3]}, "trains single rows"),
    (
        {"init_lora_weights": "pissa_niter_4"},
        "was initialized by pissa_niter_4, which also changes the weights of its base",
    ),
    ({"init_lora_weights": "new"}, "init_lora_weights is 'new'"),
    ({"use_something": True}, "sets use_something, which is unknown and may change the result"),
    ({"r": 3}, "states rank 3"),
    ({"r": 0}, "a rank must be an integer from 1"),
    ({"r": 10**400}, "a rank must be an integer from 1"),
    ({"lora_alpha": 10**400}, "an alpha must be a number"),
    ({"lora_alpha": "x"}, "lora_alpha must be a finite number"),
    ({"rank_pattern": {"q_proj": 2}}, "states rank 2"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
    ({"alpha_pattern": {"q_proj": None}}, "an alpha must be a number"),
    ({"bias": "some"}, "bias is 'some'"),
    ({"target_modules": None}, "target_modules is missing"),
    ({"target_modules": 5}, "target_modules must be a list"),
    ({"target_modules": ["q_proj"]}, "has matrices for model.layers.0.mlp.down_proj, which its configuration"),
    ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, "(0 missing, 2 unexpected)"),
    ({"layers_to_transform": [0]}, "(0 missing, 7 unexpected)"),
    ({"layers_to_transform": ["0"]}, "layers_to_transform must be a list of integers"),
    ({"target_modules": ".*", "layers_to_transform": [0]}, "needs a list of target_modules"),
    ({"layers_pattern": "h"}, "LLaMA's layers are named 'layers'"),
    ({"target_modules": r"(.*proj"}, "can't be used"),
    ({"target_modules": r"(a|a)*(b|b)*(.*)*x"}, "can't be used"),
    ({"target_modules": r".*.*.*.*.*.*.*.*.*x"}, "could take too long"),
    ({"target_modules": r"[a[b](x+)+y]"}, "can't be used"),
    ({"target_modules": r"(.*)\1"}, "can't be used"),
    ({"target_modules": "x{2000}"}, "can't be used"),
    ({"rank_pattern": {"(x+)+y": 4}}, "can't be used"),
    ({"modules_to_save": ["lm_head"]}, "lacks lm_head.weight, which was trained according to adapter_config.json"),
    ({"modules_to_save": "lm_head"}, "modules_to_save must be a list of names"),
]


@pytest.fixture
def adapter(bases, tmp_path: Path) -> Path:
    return simple(bases("plain"), tmp_path / "adapter")[0]


@pytest.mark.parametrize(("changes", "says"), REFUSALS, ids=lambda value: str(value)[:40])
def test_what_is_no_plain_lora_is_refused(bases, adapter: Path, changes: dict[str, Any], says: str) -> None:
    config_of(adapter, **changes)
    with pytest.raises(CheckpointError) as caught:
        logits(bases("plain"), adapters=adapter)
    assert says in str(caught.value)
    assert str(adapter) in str(caught.value)


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing pair": (lambda s: [s.pop(k) for k in list(s) if FIRST in k], rf"has no matrices for {FIRST}.*1 missing, 0 un"),
    "one of two": (lambda s: s.pop(f"base_model.model.{FIRST}.lora_A.weight"), "only one of the two matrices"),
    "another module": (set_tensor("model.layers.7.mlp.w.lora_A.weight", torch.ones(4, 4)), "only one of the two"),
    "extra": (set_tensor("model.layers.0.extra.weight", torch.ones(4)), "its configuration and its base do not have"),
    "bias": (set_tensor(f"{FIRST}.base_layer.bias", torch.ones(64)), "its configuration and its base do not have"),
    "dora": (set_tensor(f"{FIRST}.lora_magnitude_vector", torch.ones(64)), "belongs to a DoRA adapter"),
    "no prefix": (lambda s: s.update({"x.lora_A.weight": torch.ones(4, 4)}), "is not a part of a LoRA"),
    "integers": (set_tensor(f"{FIRST}.lora_A.weight", torch.ones(4, 64, dtype=torch.int8)), "is stored as I8"),
    "vector": (set_tensor(f"{FIRST}.lora_A.weight", torch.ones(4)), "states rank 4"),
    "width": (set_tensor(f"{FIRST}.lora_A.weight", torch.ones(4, 60)), "was trained on another model"),
    "height": (set_tensor(f"{FIRST}.lora_B.weight", torch.ones(32, 4)), "was trained on another model"),
    "not finite": (set_tensor(f"{FIRST}.lora_B.weight", torch.full((64, 4), math.nan)), "not finite"),
    "resized": (set_tensor("model.embed_tokens.weight", torch.ones(322, 64)), r"\(320, 64\).*\(322, 64\).*was resized"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused(bases, adapter: Path, case: str) -> None:
    change, says = TENSORS[case]
    rewrite(adapter, change)
    with pytest.raises(CheckpointError, match=says):
        logits(bases("plain"), adapters=adapter)


def test_another_base_is_refused_by_its_shapes(adapter: Path, tmp_path: Path) -> None:
    for name, changes in (("wide", {"hidden_size": 96, "head_dim": 16}), ("deep", {"num_hidden_layers": 3})):
        test_huggingface.write(tmp_path / name, **changes)
        with pytest.raises(CheckpointError, match=r"trained on another model|belongs to another model"):
            logits(tmp_path / name, adapters=adapter)


def test_complete_tensors_have_no_scale_and_no_rival(bases, tmp_path: Path) -> None:
    lora = Lora(bases("plain"))
    path = lora.write(tmp_path / "saved", **saved("lm_head")(lora))
    with pytest.raises(UsageError, match=r"replaces lm_head.weight completely, so its scale must be 1, got 0\.5"):
        logits(bases("plain"), adapters=f"{path}:0.5")
    with pytest.raises(CheckpointError, match=r"replaces lm_head.weight, which .* also changes"):
        logits(bases("plain"), adapters=[path, path])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nowhere", "nowhere does not exist"),
        ("nowhere:2", "nowhere does not exist"),
        ("{}:x", "the scale 'x' is not a number"),
        ("{}:nan", "must be a finite number"),
        ("{}:1e999", "must be a finite number"),
        ("{}/adapter_model.safetensors", "is a file; expected the folder"),
        ("{}/../pipe.gguf", "is a file; expected the folder"),
        ("{}/..", "is not a PEFT adapter: expected adapter_config.json, found adapter, pipe.gguf"),
    ],
)
def test_a_wrong_path_or_scale_is_refused(bases, adapter: Path, text: str, says: str) -> None:
    os.mkfifo(adapter.parent / "pipe.gguf")
    with pytest.raises(LlamaError, match=re.escape(says)):
        logits(bases("plain"), adapters=text.format(adapter))


def test_bad_arguments_in_python_are_refused(bases, adapter: Path) -> None:
    for adapters in ([5], [(adapter, "x")], [(adapter, True)], (adapter, math.inf)):
        with pytest.raises(UsageError, match=r"adapter must be a path|must be a finite number"):
            logits(bases("plain"), adapters=adapters)
    with pytest.raises(TypeError):
        loader.build(open_checkpoint(bases("plain")), adapters=adapter)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"general.type": "model"}, "general.type is 'model', expected 'adapter'; pass a model by --model"),
        ({"adapter.type": "ia3"}, "adapter.type is 'ia3', expected 'lora'"),
        ({"general.architecture": "qwen2"}, "general.architecture is 'qwen2', expected 'llama'"),
    ],
)
def test_other_gguf_files_are_refused(bases, tmp_path: Path, metadata: dict[str, str], says: str) -> None:
    _, lora = simple(bases("plain"), tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=re.escape(says)):
        logits(bases("plain"), adapters=gguf_adapter(tmp_path / "a.gguf", lora, **metadata))


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin", "adapter_config.json", "a.gguf"])
def test_a_cut_or_damaged_adapter_is_refused_or_harmless(bases, tmp_path: Path, file: str) -> None:
    path, lora = simple(bases("plain"), tmp_path / "adapter", modules=named("q_proj"))
    target = gguf_adapter(tmp_path / "a.gguf", lora) if file == "a.gguf" else path / file
    if file.endswith(".bin"):
        torch.save(load_file(path / "adapter_model.safetensors"), target)
        (path / "adapter_model.safetensors").unlink()
    data, base = target.read_bytes(), open_checkpoint(bases("plain"))
    spots = sorted({len(data) * i // 23 for i in range(23)} | {0, 1, 9, len(data) - 1})
    changed = [data[:spot] for spot in spots]
    changed += [data[:spot] + bytes([data[spot] ^ 1 << spot % 8]) + data[spot + 1 :] for spot in spots]
    refused = 0
    for content in changed:
        target.write_bytes(content)
        with contextlib.suppress(LlamaError):
            with_adapters(base, target if file == "a.gguf" else path)
            continue
        refused += 1
    assert refused >= len(spots)


def test_an_adapter_as_model_is_refused_with_the_option(adapter: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"contains an adapter, not a model; pass its base model as --model.*--adapter"
    ):
        open_checkpoint(adapter)


# ------------------------------------------------------------------------------------------------------ the commands
def test_the_commands_say_what_is_merged(bases, adapter: Path, tmp_path: Path, clearllama) -> None:
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    file = tiny.write_gguf(tmp_path / "model.gguf", quantization="F32")
    done = clearllama("generate", "-m", str(file), "--adapter", f"{adapter}:0.5", "-n", "1", "--raw", "hello")
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 0, lines
    merged = f"adapter {adapter}: LoRA of rank 4 on 14 matrices, trained on some/base, scale 0.5"
    assert any(merged in line for line in lines)
    assert any("has a chat template that differs from the model's; the model's is used" in line for line in lines)
    done = clearllama("explain", "--adapter", str(adapter))
    assert (done.returncode, b"needs a model (-m)" in done.stderr) == (2, True)
    done = clearllama("convert", str(file), str(tmp_path / "out"), "--to", "hf", "--adapter", str(adapter))
    assert done.returncode == 0, done.stderr
    expected = logits(file, adapters=adapter)
    assert torch.allclose(logits(tmp_path / "out"), expected, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- peft
PEFT: dict[str, dict[str, Any]] = {
    "rslora": {"target_modules": [*ATTENTION, *MLP], "use_rslora": True},
    "patterns": {"target_modules": [*ATTENTION, *MLP], "rank_pattern": {"q_proj": 2, r".*layers\.1\.mlp\.(up|gate)_proj": 3},
                 "alpha_pattern": {"layers.0.self_attn.v_proj": 20}},
    "regex": {"target_modules": r".*\.(self_attn\.(q|k)_proj|mlp\.down_proj)"},
    "all-linear": {"target_modules": "all-linear", "exclude_modules": r".*layers\.0\..*"},
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head"]},
    "tied": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm", "mlp"]},
    "all biases": {"target_modules": ["q_proj"], "bias": "all"},
    "biases": {"target_modules": ["q_proj"], "bias": "lora_only"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "tied", "biased"])
@pytest.mark.parametrize("case", PEFT)
def test_folders_that_peft_wrote(bases, tmp_path: Path, case: str, kind: str) -> None:
    """Needs peft, which is not among the test dependencies."""
    peft = pytest.importorskip("peft")
    model = LlamaForCausalLM.from_pretrained(bases(kind), dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **PEFT[case]))
    for i, parameter in enumerate(p for p in adapted.parameters() if p.requires_grad):
        parameter.add_(0.3 * noise(*parameter.shape, seed=i))
    adapted.save_pretrained(tmp_path / "adapter")
    theirs = adapted.eval()(TOKENS).logits
    assert (logits(bases(kind), adapters=tmp_path / "adapter") - theirs).abs().max() < 5e-4
