"""Adapters: merged logits are those of transformers with W + scale B A; what does not fit is refused in one line."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import llama
from llama import loader
from llama.checkpoint import open_checkpoint
from llama.checkpoint.adapters import with_adapters
from llama.checkpoint.base import GGUF_NAMES, HUGGING_FACE_NAMES, to_file_name, to_model_name
from llama.engine import kernels
from llama.engine.parallel import ShardedCheckpoint
from llama.errors import CheckpointError, LlamaError, TokenizerError, UsageError
from llama.tools.convert import convert, quantize

from . import test_architectures, test_huggingface, tiny
from .test_gguf import finish

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(312, (1, 30), generator=torch.Generator().manual_seed(2))
LAYERS = 2
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
MODULES = [f"model.layers.{i}.{part}.{name}" for i in range(LAYERS)
           for part, names in (("self_attn", ATTENTION), ("mlp", MLP)) for name in names]  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a random model: plain or tied."""
    root = tmp_path_factory.mktemp("bases")
    test_huggingface.write(root / "plain")
    test_huggingface.write(root / "tied", tie_word_embeddings=True)
    return lambda kind: root / kind


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


def write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level tokenizer.json with this number of tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([f"<|{id}|>" for id in range(len(alphabet), size)])
    backend.save(str(folder / "tokenizer.json"))


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

    def whole(self, module: str, rows: int | None = None) -> None:
        """A weight of modules_to_save."""
        weight = noise(rows or len(self.state[f"{module}.weight"]), *self.state[f"{module}.weight"].shape[1:], seed=7)
        self.tensors[f"{module}.weight"], self.state[f"{module}.weight"] = weight, weight.clone()

    def copy(self, module: str, rows: int | None = 320) -> None:
        """The base's weight, perhaps resized, as PEFT writes it beside the LoRA of an embedding or output."""
        weight = self.state[f"{module}.weight"]
        weight = weight if rows is None else torch.cat((weight, noise(8, 64, seed=8)))[:rows]
        self.tensors[f"{module}.base_layer.weight"] = weight
        for one in (EMBED, HEAD) if self.tied and module in (EMBED, HEAD) else (module,):
            self.state[f"{one}.weight"] = weight.clone()

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
        config = AutoConfig.from_pretrained(
            base, tie_word_embeddings=False, vocab_size=len(self.state[f"{HEAD}.weight"])
        )
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(self.state)
        return model.eval()(TOKENS).logits


def simple(
    base: Path, folder: Path, rank: int = 4, alpha: float = 8, modules: list[str] = MODULES, **config: Any
) -> tuple[Path, Lora]:
    lora = Lora(base)
    for module in modules:
        lora.low_rank(module, rank, alpha / rank)
    return lora.write(folder, **{"r": rank, "lora_alpha": alpha, **config}), lora


def logits(path: Path, **options: Any) -> Tensor:
    return llama.load_model(path, **{"dtype": "float32", "device": "cpu", **options})(TOKENS)


EMBED, HEAD = "model.embed_tokens", "lm_head"
# (the modules with a LoRA, the factor of the change, entries of adapter_config.json)
CASES: dict[str, tuple[list[str], float, dict[str, Any]]] = {
    "all": (MODULES, 2.0, {}),
    "rslora": (MODULES, 4.0, {"use_rslora": True, "init_lora_weights": "gaussian"}),
    "one": ([MODULES[-1]], 2.0, {"layers_to_transform": [1], "init_lora_weights": "mica"}),
    "head": ([HEAD], 2.0, {}),
    "embedding": ([EMBED], 2.0, {}),
    "both": ([EMBED, HEAD], 2.0, {}),
}  # fmt: skip


def check(lora: Lora, base: Path, adapters: Any, config: Path | None = None) -> None:
    """config: the folder with the base's config.json, if it is not the base itself."""
    assert (logits(base, adapters=adapters) - lora.logits(config or base)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["plain", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_merged_logits_are_those_of_transformers(bases, tmp_path: Path, case: str, kind: str) -> None:
    lora, (modules, scale, config) = Lora(bases(kind)), CASES[case]
    for module in modules:
        lora.low_rank(module, 4, scale)
    path = lora.write(tmp_path / "adapter", **config)
    check(lora, bases(kind), path)
    assert (logits(bases(kind), adapters=path) - logits(bases(kind))).abs().max() > 0.1


# (modules that are replaced, modules with a copy of the base's weight, modules with a LoRA, the rows of all embeddings)
REPLACED: dict[str, tuple[list[str], list[str], list[str], int]] = {
    "head": ([HEAD], [], MODULES[:2], 320),
    "embedding": ([EMBED], [], MODULES[:2], 320),
    "both": ([EMBED, HEAD], [], [], 328),
    "fewer": ([EMBED, HEAD], [], MODULES[:2], 312),
    "layers": (["model.norm", MODULES[0], MODULES[8]], [], [MODULES[1], MODULES[8]], 320),
    "copies": ([], [EMBED, HEAD], [*MODULES, EMBED, HEAD], 320),
    "resized": ([], [EMBED, HEAD], [EMBED, HEAD], 328),
    "tied": ([], [HEAD], [HEAD], 328),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "tied"])
@pytest.mark.parametrize("case", REPLACED)
def test_replaced_and_resized_weights_are_those_of_transformers(bases, tmp_path: Path, case: str, kind: str) -> None:
    lora, (replaced, copied, low_rank, rows) = Lora(bases(kind)), REPLACED[case]
    for module in replaced:
        lora.whole(module, rows if module in (EMBED, HEAD) else None)
    for module in copied:
        lora.copy(module, rows)
    for module in low_rank:
        lora.low_rank(module, 4, 2.0)
    path = lora.write(tmp_path / "adapter", modules_to_save=[module.rpartition(".")[2] for module in replaced] or None)
    if case == "tied" and kind == "plain":  # the rows of the embedding are missing
        with pytest.raises(CheckpointError, match=r"shape \(328, 64\), but the model has \(320, 64\);.*save_embedding"):
            with_adapters(open_checkpoint(bases(kind)), path)
        return
    check(lora, bases(kind), path)
    merged = convert(bases(kind), tmp_path / "merged", "hf", adapters=path).path
    model = LlamaForCausalLM.from_pretrained(merged)
    assert (model.config.vocab_size, len(model.lm_head.weight)) == (rows, rows)
    assert model.config.tie_word_embeddings == (kind == "tied" and case in ("both", "fewer", "layers"))
    assert (model(TOKENS).logits - lora.logits(bases(kind))).abs().max() < 1e-4
    file = convert(bases(kind), tmp_path / "base.gguf", "gguf").path  # has another order of rows
    assert (logits(file, adapters=path) - lora.logits(bases(kind))).abs().max() < 1e-4
    with pytest.raises(UsageError, match="only with scale 1") if replaced or rows != 320 else nullcontext():
        logits(bases(kind), adapters=f"{path}:0.5")


def test_biases_are_replaced(tmp_path: Path) -> None:
    base = tmp_path / "base"
    test_huggingface.write(base, attention_bias=True)
    lora, module = Lora(base), MODULES[1]
    lora.low_rank(module, 4, 2.0)
    for part, kind in ((f"{module}.base_layer", "q"), (MODULES[2], "all")):
        lora.tensors[f"{part}.bias"] = noise(32, seed=len(kind))
        lora.state[f"{part.removesuffix('.base_layer')}.bias"] = lora.tensors[f"{part}.bias"]
    check(lora, base, lora.write(tmp_path / "adapter", bias="all"))


@pytest.mark.parametrize("type", [None, "Q8_0", "Q4_0"])
def test_a_copy_shows_whether_the_base_is_the_right_one(bases, tmp_path: Path, type: str | None) -> None:
    lora = Lora(bases("plain"))
    lora.copy(HEAD)
    lora.low_rank(HEAD, 4, 2.0)
    path = lora.write(tmp_path / "adapter")
    lora.tensors[f"{HEAD}.base_layer.weight"] = lora.tensors[f"{HEAD}.base_layer.weight"].bfloat16()
    rounded = lora.write(tmp_path / "rounded")
    base = convert(bases("plain"), tmp_path / "a.gguf", "gguf", quantize=type and type.lower()).path
    expected = logits(base, adapters=path)
    assert torch.equal(logits(base, adapters=rounded), expected)
    if type is None:
        assert (expected - lora.logits(bases("plain"))).abs().max() < 1e-4
    lora.tensors[f"{HEAD}.base_layer.weight"] = lora.tensors[f"{HEAD}.base_layer.weight"].roll(1, 0)
    with pytest.raises(CheckpointError, match=r"was trained on another model: its copy of output.weight differs"):
        logits(base, adapters=lora.write(tmp_path / "other"))


def test_the_tokenizer_of_a_resized_vocabulary_is_the_adapters(bases, tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(bases("tied"), base)
    write_tokenizer(base, 320)
    lora = Lora(base)
    for module in (EMBED, HEAD):
        lora.whole(module, 328)
    path = lora.write(folder)
    with pytest.raises(TokenizerError, match=r"resizes the vocabulary from 320 to 328 tokens.*--tokenizer"):
        loader.load(base, device="cpu", adapters=path)
    assert loader.load(base, device="cpu", adapters=path, tokenizer=base).tokenizer.n_vocab == 320
    write_tokenizer(folder, 328)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    llm = loader.load(base, device="cpu", adapters=path)
    assert (llm.tokenizer.n_vocab, llm.chat_template) == (328, "{{ messages[0].content }}")
    assert llm.adapters == (f"{path}, scale 1, with its tokenizer",)
    merged = convert(base, tmp_path / "merged", "hf", adapters=path).path
    assert loader.load(merged, device="cpu").tokenizer.n_vocab == 328


def test_the_adapters_tokenizer_keeps_the_ids_and_the_template_that_the_base_names(bases, tmp_path: Path) -> None:
    base, (folder, _) = tmp_path / "base", simple(bases("plain"), tmp_path / "adapter")
    shutil.copytree(bases("plain"), base)
    for path in (base, folder):
        write_tokenizer(path, 318)
        backend = Tokenizer.from_file(str(path / "tokenizer.json"))
        backend.add_tokens(["<turn>", "<end_turn>"])  # 318 and 319, which no file marks as special
        backend.save(str(path / "tokenizer.json"))
    (base / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": [257, 319]}))
    (base / "chat_template.jinja").write_text("<turn>{{ messages[0].content }}<end_turn>")
    plain, adapted = (loader.load(base, device="cpu", adapters=paths) for paths in ((), folder))
    for llm in (plain, adapted):
        assert (llm.tokenizer.bos_id, {257, 319} - llm.tokenizer.stop_ids) == (256, set())
        assert [id for id in llm.encode_chat([{"role": "user", "content": "<turn><end_turn>"}]) if id > 255] == [
            318,
            319,
        ]
    assert adapted.tokenizer.control == plain.tokenizer.control
    (base / "tokenizer.json").unlink()
    assert loader.load(base, device="cpu", adapters=folder).tokenizer.n_vocab == 320


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, test_architectures.PARTIAL], ids=["all", "partial"])
def test_adapters_of_matrices_stored_as_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    """PEFT names Phi's modules; the wholes and copies are of the same rows."""
    model = test_architectures.write(tmp_path / "hf", "Phi3", **changes)
    lora, folder = Lora(tmp_path / "hf"), tmp_path / "hf"
    layers = [f"model.layers.{i}.{name}" for i in range(5) for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")]
    lora.whole(layers[4])
    lora.copy(layers[0], None)
    for module in layers[:4]:
        lora.low_rank(module, 2 if "qkv" in module else 4, 2.0)
    path = lora.write(tmp_path / "adapter", rank_pattern={"qkv_proj": 2}, alpha_pattern={"qkv_proj": 4})
    assert float((model(TOKENS).logits - lora.logits(folder)).abs().max()) > 0.1
    check(lora, folder, path)
    check(lora, test_architectures.write_phi_gguf(tmp_path / "x.gguf", model), path, folder)
    lora.tensors[f"{layers[0]}.base_layer.weight"] += 0.1
    with pytest.raises(CheckpointError, match=r"trained on another model: its copy of .*layers.0.self_attn.qkv_proj"):
        logits(folder, adapters=lora.write(tmp_path / "other", rank_pattern={"qkv_proj": 2}))


def test_patterns_choose_rank_and_alpha_as_in_peft(bases, tmp_path: Path) -> None:
    lora = Lora(bases("plain"))
    for module in MODULES:
        rank = 3 if "layers.1.mlp" in module else 2 if module.endswith("q_proj") else 4
        lora.low_rank(module, rank, (5 if module.endswith("0.self_attn.k_proj") else 8) / rank)
    ranks = {r"model\.layers\.1\.mlp\..*": 3, "q_proj": 2, "_proj": 7}
    path = lora.write(tmp_path / "adapter", rank_pattern=ranks, alpha_pattern={"0.self_attn.k_proj": 5, ".*q_proj": 8})
    check(lora, bases("plain"), path)


@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_both_orders_of_rows_and_every_file_of_the_adapter_give_the_same_logits(bases, tmp_path: Path, kind) -> None:
    path, _ = simple(bases(kind), tmp_path / "adapter", modules=[*MODULES, EMBED])
    expected = logits(bases(kind), adapters=path)
    assert torch.equal(logits(convert(bases(kind), tmp_path / "a.gguf", "gguf").path, adapters=path), expected)
    assert torch.allclose(logits(bases(kind), adapters=path, rope="half"), expected, atol=1e-4)
    torch.save(load_file(path / "adapter_model.safetensors"), path / "adapter_model.bin")
    (path / "adapter_model.safetensors").unlink()
    assert torch.equal(logits(bases(kind), adapters=path), expected)


def test_adapters_add_up_with_their_scales(bases, tmp_path: Path) -> None:
    base = bases("plain")
    first, one = simple(base, tmp_path / "first")
    second, two = simple(base, tmp_path / "second:2", rank=3, alpha=1.5, modules=MODULES[5:9])
    plain = load_file(base / "model.safetensors")
    one.state = {name: w + 0.5 * (one.state[name] - w) - 2 * (two.state[name] - w) for name, w in plain.items()}
    for adapters in ([f"{first}:0.5", (second, -2)], [(str(first), 0.5), f"{second}:-2"]):
        check(one, base, adapters)
    assert torch.equal(logits(base, adapters=f"{first}:0"), logits(base))


def gguf_adapter(path: Path, lora: Lora, alpha: float | None = 8.0, **metadata: str) -> Path:
    """Write the matrices of a PEFT adapter as llama.cpp's converter does: rows of q and k in Meta's order."""

    entries = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "llama", **metadata}
    writer = gguf.GGUFWriter(str(path), entries.pop("general.architecture"))
    tiny.add_metadata(writer, entries)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for key, tensor in lora.tensors.items():
        if key.startswith("model.layers."):
            module, which = key.removesuffix(".weight").rsplit(".", 1)
            ours = to_model_name(f"{module}.weight", HUGGING_FACE_NAMES)
            name = f"{to_file_name(str(ours), GGUF_NAMES)}.{which.lower()}"
            rotated = module.endswith(("q_proj", "k_proj")) and which == "lora_B"
            if rotated and metadata.get("general.architecture", "llama") == "llama":
                tensor = tensor.view(-1, 2, 8, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)  # heads of 16
        else:
            name = f"token_embd.weight.lora_{key[-1].lower()}"
            tensor = tensor.T if key.endswith("A") else tensor
        writer.add_tensor(name, tensor.contiguous().numpy())
    finish(writer)
    return path


def test_a_gguf_adapter_is_the_peft_adapter_it_was_made_of(bases, tmp_path: Path) -> None:
    base = bases("plain")
    path, lora = simple(base, tmp_path / "adapter", modules=[*MODULES, EMBED])
    file = gguf_adapter(tmp_path / "adapter.gguf", lora)
    assert torch.allclose(logits(base, adapters=file), logits(base, adapters=path), atol=1e-5)
    without = gguf_adapter(tmp_path / "without.gguf", lora, alpha=None)  # llama.cpp then takes the scale 1
    assert torch.allclose(logits(base, adapters=without), logits(base, adapters=f"{path}:0.5"), atol=1e-5)


def test_a_gguf_adapter_of_qwen2_has_the_rows_of_hugging_face(tmp_path: Path) -> None:
    base = tmp_path / "base"
    test_huggingface.write(base, family="Qwen2")
    path, lora = simple(base, tmp_path / "adapter")
    file = gguf_adapter(tmp_path / "adapter.gguf", lora, **{"general.architecture": "qwen2"})
    assert torch.allclose(logits(base, adapters=file), logits(base, adapters=path), atol=1e-5)


def test_a_piece_of_a_merged_weight_is_a_part_of_it(bases, tmp_path: Path) -> None:
    lora = Lora(bases("tied"))
    lora.copy(HEAD, 328)
    for module in (MODULES[0], "model.norm"):
        lora.whole(module)
    for module in (*MODULES[1:], EMBED):
        lora.low_rank(module, 4, 2.0)
    path = lora.write(tmp_path / "adapter")
    for base in (bases("tied"), convert(bases("tied"), tmp_path / "a.gguf", "gguf").path):  # two orders of rows
        whole = with_adapters(open_checkpoint(base), path)
        for name, shape in whole.shapes.items():
            full, rows, columns = whole.weight(name).floats(), slice(3, shape[0] - 5), slice(7, 33)
            part = full[rows] if full.dim() == 1 else full[rows, columns]
            assert torch.allclose(whole.weight(name)[rows, columns].floats(), part, atol=1e-6)
            if whole.weight(name).changed:
                assert (whole.weight(name).format, whole.weight(name).tiles()) == (None, None)
            for part in (ShardedCheckpoint(whole, rank, 2) for rank in range(2)):
                assert torch.allclose(part.weight(name).floats(), full[part.cut(name)[: full.dim()]], atol=1e-6)


@pytest.mark.parametrize(("family", "tied"), [("Granite", True), ("Granite", False), ("Exaone", False)])
def test_an_adapter_is_merged_in_the_names_and_before_the_factors_of_its_family(
    tmp_path: Path, family: str, tied: bool
) -> None:
    """Of the embedding too, which unties a tied model. The merged file, run by transformers, gives the same."""
    base, merged = tmp_path / "base", tmp_path / "merged"
    multipliers = test_architectures.MULTIPLIERS if family == "Granite" else {}
    test_architectures.write(base, family, tie_word_embeddings=tied, **multipliers)
    lora, inputs = Lora(base), ("embed_tokens.weight", "wte.weight", "lm_head.weight")
    for name in [name for name, tensor in lora.state.items() if tensor.dim() == 2 and not name.endswith(inputs)]:
        lora.low_rank(name.removesuffix(".weight"), 4, 3.0 if ".out_proj." in name else 2.0)  # alpha / r
    if family == "Granite":
        lora.low_rank(EMBED, 4, 2.0)
        lora.whole("model.norm")
    path = lora.write(tmp_path / "adapter", alpha_pattern={"out_proj": 12})
    shutil.copytree(base, merged)
    save_file(lora.state, merged / "model.safetensors")
    test_huggingface.edit(merged, tie_word_embeddings=False)
    theirs = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(TOKENS).logits
    assert float((logits(base) - theirs).abs().max()) > 0.1
    for form in ("complex", "half"):
        assert float((logits(base, adapters=path, rope=form) - theirs).abs().max()) < 1e-4
    checkpoint = with_adapters(open_checkpoint(base), path)
    for part in (ShardedCheckpoint(checkpoint, rank, 2) for rank in range(2)):
        for name in checkpoint.shapes:
            full = checkpoint.weight(name).floats()
            assert torch.equal(part.weight(name).floats(), full[part.cut(name)[: full.dim()]])


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
    with pytest.raises(UsageError, match=rf"base.gguf is quantized \({type}\).*--dtype"):
        loader.load(file, device="cpu", adapters=path)
    with pytest.raises(UsageError, match=r"choose the dtype \(--dtype\) to write"):
        convert(file, tmp_path / "out.gguf", "gguf", adapters=path)
    plain = convert(file, tmp_path / "plain", "hf", dtype=torch.float32).path
    assert torch.allclose(logits(file, adapters=path), logits(plain, adapters=path), atol=1e-5)


# --------------------------------------------------------------------------------------------------------- identity
def test_the_identity_is_that_of_the_contents_and_scales(bases, tmp_path: Path) -> None:
    base = open_checkpoint(bases("plain"))
    path, _ = simple(bases("plain"), tmp_path / "adapter")
    other, _ = simple(bases("plain"), tmp_path / "other", alpha=9)
    shutil.copytree(path, tmp_path / "elsewhere")
    hashes = [with_adapters(base, each).adapters_hash for each in
              (path, tmp_path / "elsewhere", f"{path}:0.5", [path, f"{path}:0"], other)]  # fmt: skip
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4
    assert with_adapters(base, ()) is base


# --------------------------------------------------------------------------------------------------------- refusals
Change = Callable[[dict[str, Tensor]], object]


def put(name: str, value: Tensor) -> Change:
    return lambda state: state.update({f"base_model.model.{name}": value})


Q = "model.layers.0.self_attn.q_proj"
# (entries of adapter_config.json, a change of the tensors, the error)
REFUSALS: list[tuple[dict[str, Any], Change | None, str]] = [
    ({"peft_type": "IA3"}, None, "has the PEFT type 'IA3'"),
    *(({key: ["lm_head"]}, None, f"sets {key}, which is not supported; merge it")
      for key in ("use_dora", "lora_bias", "trainable_token_indices", "anything")),
    ({"init_lora_weights": "pissa_niter_4"}, None, "'pissa_niter_4' also changed the weights of its base"),
    ({"lora_alpha": 10**400}, None, "too large"),
    ({"rank_pattern": {"(": 4}}, None, "unterminated subpattern"),
    ({}, lambda state: state.pop(f"base_model.model.{Q}.lora_A.weight"), f"{Q} has up .*, expected two matrices"),
    *(({}, put(name, torch.ones(64)), f"{name} is not a LoRA matrix .*; merge it into its base")
      for name in (f"{Q}.lora_B.bias", f"{Q}.lora_magnitude_vector", "score.weight", f"{Q}.other.weight")),
    *(({}, put(f"{name}.{end}", torch.ones(shape)), says) for name, end, shape, says in (
        (Q, "bias", 64, r"changes model.layers.0.self_attn.q_proj.bias .* has None"),
        ("model.embed_tokens", "weight", 64, r"shape \(64,\), but the model has \(320, 64\)"),
        ("model.norm", "weight", (64, 2), r"shape \(64, 2\), but the model has \(64,\)"),
        ("lm_head", "base_layer.weight", (320, 32), "its copy of lm_head.weight differs"),
        ("lm_head", "base_layer.weight", (), "its copy of lm_head.weight differs"),
    )),
    ({}, put("model.norm.weight", torch.full((64,), math.inf)), "not finite"),
    ({}, put(f"{Q}.lora_B.weight", torch.ones(32, 4)), "pass the adapter's base model"),
    ({}, put(f"{Q}.lora_B.weight", torch.full((64, 4), math.nan)), "not finite"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "change", "says"), REFUSALS, ids=[says for _, _, says in REFUSALS])
def test_what_can_not_be_merged_is_refused(bases, tmp_path: Path, config: dict[str, Any], change, says: str) -> None:
    path, _ = simple(bases("plain"), tmp_path / "adapter", **config)
    if change is not None:
        state = load_file(path / "adapter_model.safetensors")
        change(state)
        save_file(state, path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=says) as caught:
        with_adapters(open_checkpoint(bases("plain")), path)
    assert str(path) in str(caught.value)


def test_a_wrong_path_or_scale_is_refused(bases, tmp_path: Path) -> None:
    path, _ = simple(bases("plain"), tmp_path / "adapter")
    cases: list[tuple[Any, str]] = [
        ("nowhere:2", "nowhere does not exist"), (f"{path}:x", "must be PATH, PATH:SCALE or"),
        ((path, math.inf), "must be a finite number"), (str(tmp_path), "is neither a PEFT folder"),
    ]  # fmt: skip
    metadata = {"general.type": "model", "adapter.type": "ia3", "adapter.alora.invocation_tokens": "x"}
    for number, (key, value) in enumerate(metadata.items()):
        file = gguf_adapter(tmp_path / f"{number}.gguf", Lora(bases("plain")), **{key: value})
        cases.append((file, "applies only after certain tokens" if value == "x" else f"{key} is '{value}', expected"))
    for adapters, says in cases:
        with pytest.raises(LlamaError, match=re.escape(says)):
            logits(bases("plain"), adapters=adapters)
