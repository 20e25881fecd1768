"""Mistral, Qwen2, Qwen3 and SmolLM3: the logits of transformers from every format, limits of windows, clear refusals."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

import llama
from llama.checkpoint import base, open_checkpoint
from llama.checkpoint.architectures import EXAONE_KEYS, MODEL_TYPES, NEEDS
from llama.checkpoint.huggingface import read_config
from llama.engine.linears import TileLinear
from llama.errors import ConfigError, LlamaError, UsageError
from llama.inside.explain import random_model
from llama.quant.gguf_types import quantize
from llama.rope_scaling import reach
from llama.tools.convert import convert
from llama.tools.families import official

from . import test_huggingface, tiny
from .test_huggingface import edit, load, tokens

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = {**test_huggingface.BASE, "num_hidden_layers": 5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e6}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e6,
          "original_max_position_embeddings": 32}  # fmt: skip
MULTIPLIERS = {"embedding_multiplier": 3.5, "attention_multiplier": 0.4, "residual_multiplier": 0.22,
               "logits_scaling": 1.7}  # fmt: skip
SCALED = {**YARN, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "beta_fast": 32.0,
          "beta_slow": 1.0}  # fmt: skip
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3",
            "granite": "Granite", "ministral3": "Ministral3", "exaone": "Exaone"}  # fmt: skip
VISION = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16,
          "num_attention_heads": 2, "patch_size": 4, "image_size": 16}  # fmt: skip


def write(folder: Path, family: str, **changes: Any) -> Any:
    changes = {**BASE, **changes}
    if family == "Mistral3":
        changes = {"text_config": {"model_type": "mistral", "sliding_window": None, "head_dim": 16, **changes},
                   "vision_config": VISION, "tie_word_embeddings": changes["tie_word_embeddings"]}  # fmt: skip
    return test_huggingface.write(folder, family=family, **changes)


def gap(ours: Any, theirs: Any, length: int) -> float:
    expected = theirs(tokens(length)).logits
    assert float(expected.std()) > 0.3
    return float((ours(tokens(length)) - expected).abs().max())


# (family, changes, whether GGUF can't express it)
MODELS: list[tuple[str, dict[str, Any], bool]] = [
    ("Mistral", {"sliding_window": None, "head_dim": 24}, False),  # as in Mistral Nemo
    ("Mistral", {"sliding_window": 16}, False),
    ("Mistral", {"sliding_window": 256, "rope_parameters": YARN}, False),
    ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}, False),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}, False),
    ("Qwen3", {"head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": True}, False),
    ("Qwen3", {"head_dim": 16, "num_key_value_heads": 4, "rope_parameters": YARN}, False),
    (
        "Qwen3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 3,
        },
        True,
    ),
    ("SmolLM3", {"num_hidden_layers": 9, "tie_word_embeddings": True}, False),
    ("SmolLM3", {"no_rope_layers": [0, 1, 1, 0, 1]}, True),
    ("SmolLM3", {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True}, True),
    ("Granite", {**MULTIPLIERS, "tie_word_embeddings": True}, False),
    ("Granite", {**MULTIPLIERS, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}, False),
    ("Granite", {"attention_multiplier": 0.2, "logits_scaling": 0.5, "head_dim": 24, "rope_parameters": YARN}, False),
    ("Ministral3", {"head_dim": 24, "rope_parameters": SCALED, "tie_word_embeddings": True}, False),
    ("Mistral3", {"model_type": "ministral3", "rope_parameters": {**SCALED, "mscale_all_dim": 0.7}}, False),
    ("Mistral3", {"num_key_value_heads": 4, "tie_word_embeddings": True}, False),
    ("Exaone", {"num_key_value_heads": 4, "tie_word_embeddings": True}, False),
    ("Exaone", {"head_dim": 24, "rope_parameters": LLAMA3}, False),
]


@pytest.mark.parametrize(("family", "changes", "only_hf"), MODELS, ids=str)
def test_logits_equal_transformers_in_every_format(
    tmp_path: Path, family: str, changes: dict[str, Any], only_hf: bool
) -> None:
    """Converted folders are also run by transformers, which computes the same as with the original."""
    model, source = write(tmp_path / "hf", family, **changes), tmp_path / "hf"
    context = load(source).max_seq_len
    convert(source, tmp_path / "new.hf", "hf")
    if only_hf:
        with pytest.raises(ConfigError, match="can't be written"):
            convert(source, tmp_path / "new.gguf", "gguf")
    else:
        convert(source, tmp_path / "new.gguf", "gguf")
    for path in (source, *tmp_path.glob("new.*")):
        assert gap(load(path), model, context) < 5e-4
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new.hf", dtype=torch.float32)
    assert float((theirs(tokens(context)).logits - model(tokens(context)).logits).abs().max()) < 5e-5


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("Mistral", "llama"), ("Qwen2", "qwen2"), ("Qwen3", "qwen3"), ("SmolLM3", "smollm3")],
)
@pytest.mark.parametrize("form", ["real", "half"])
def test_a_gguf_file_has_the_architecture_and_rows_that_llama_cpp_expects(
    tmp_path: Path, family: str, architecture: str, form: str
) -> None:
    model = write(tmp_path / "hf", family, head_dim=16)
    convert(tmp_path / "hf", tmp_path / "x.gguf", "gguf")
    checkpoint: Any = open_checkpoint(tmp_path / "x.gguf")
    assert checkpoint.metadata["general.architecture"] == architecture
    assert checkpoint.metadata[f"{architecture}.rope.dimension_count"] == 16
    q = model.model.layers[0].self_attn.q_proj.weight  # (H D, C) in Hugging Face's order
    pairs = q.unflatten(0, (4, 2, 8)).transpose(1, 2).flatten(0, 2)
    name, in_file = "layers.0.attention.wq.weight", q if architecture in ("qwen2", "qwen3") else pairs
    assert torch.equal(checkpoint.weight(name, checkpoint.layout).floats(), in_file)
    assert torch.equal(checkpoint.weight(name).floats(), pairs)
    assert torch.equal(checkpoint.weight(name)[3:9, 5:].floats(), pairs[3:9, 5:])
    assert gap(load(tmp_path / "x.gguf", rope=form), model, 64) < 5e-4


def test_the_weight_of_a_head_s_norm_has_the_order_of_the_head_s_rows(tmp_path: Path) -> None:
    model, name = write(tmp_path, "Qwen3", head_dim=16), "layers.0.attention.q_norm.weight"
    in_file = model.model.layers[0].self_attn.q_norm.weight
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.weight(name, "half").floats(), in_file)
    assert torch.equal(checkpoint.weight(name).floats(), in_file.view(2, 8).T.flatten())
    net: Any = load(tmp_path)
    with torch.no_grad():
        net.layers[0].attention.q_norm.weight.copy_(in_file)
    assert gap(net, model, 64) > 0.01


def test_sizes_of_qwen3_are_the_published_ones() -> None:
    sizes = {name: config.n_params for name, config in official().items() if config.qk_norm}
    assert sizes == {
        "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
        "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    }  # fmt: skip


GGUF_KEYS = {
    "granite": {"embedding_scale": 3.5, "attention.scale": 0.4, "residual_scale": 0.22, "logit_scale": 1.7},
    "mistral3": {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 32,
                 "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_log_multiplier": 0.7,
                 "attention.temperature_scale": 0.1},
    "exaone": {},
}  # fmt: skip


def as_gguf(source: Path, target: Path, architecture: str, quantization: str = "F32") -> Path:
    """Write a folder's weights as llama.cpp's converter does: unscaled, and in the order of the architecture."""
    checkpoint: Any = open_checkpoint(source)
    layout = "half" if architecture == "exaone" else "interleaved"
    weights = {name: checkpoint.unscaled(name, layout).floats() for name in checkpoint.shapes}
    config = dataclasses.replace(checkpoint.config, norm_eps=1e-5)
    entries = {**tiny.architecture(config), **{f"llama.{key}": one for key, one in GGUF_KEYS[architecture].items()}}
    own = {key.replace("llama.", f"{architecture}."): value for key, value in entries.items()}
    metadata = {**dict.fromkeys(entries), **own, "general.architecture": architecture}
    return tiny.write_gguf(target, config, weights, quantization=quantization, metadata=metadata)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "architecture", "changes"),
    [
        ("Granite", "granite", MULTIPLIERS),
        ("Ministral3", "mistral3", {"rope_parameters": {**SCALED, "mscale_all_dim": 0.7}, "head_dim": 16}),
        ("Exaone", "exaone", {"num_key_value_heads": 4, "rope_parameters": {"rope_theta": 1e6}}),
    ],
    ids=["granite", "mistral3", "exaone"],
)
def test_files_of_llama_cpp_s_architectures(
    tmp_path: Path, family: str, architecture: str, changes: dict[str, Any], tied: bool
) -> None:
    model = write(tmp_path / "hf", family, tie_word_embeddings=tied, **changes)
    file = as_gguf(tmp_path / "hf", tmp_path / "x.gguf", architecture)
    assert load(file).max_seq_len == load(tmp_path / "hf").max_seq_len
    for form in ("real", "half"):
        assert gap(load(file, rope=form), model, load(file).max_seq_len) < 1e-4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("type", ["Q8_0", "Q4_K", "Q6_K"])
def test_quantized_files_of_granite(tmp_path: Path, type: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has the dequantized weights. Kept quantized, a weight differs by float16's rounding of its scales."""
    monkeypatch.setattr(
        gguf.quants, "quantize", lambda x, to: x if to == 0 else quantize(torch.from_numpy(x), type).numpy()
    )
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    model = write(tmp_path / "hf", "Granite", tie_word_embeddings=tied, **MULTIPLIERS, **sizes)
    file = as_gguf(tmp_path / "hf", tmp_path / "x.gguf", "granite", type)
    checkpoint: Any = open_checkpoint(file)
    state = {base.to_file_name(name, base.HUGGING_FACE_NAMES, "model.layers"): checkpoint.unscaled(name, "half").floats()
             for name in checkpoint.shapes}  # fmt: skip
    model.load_state_dict(state, strict=not tied)
    exact = load(file)
    assert gap(exact, model, 64) < 1e-4
    kept = llama.load(file, device="cpu", dtype="bfloat16").model
    for name, layer in kept.named_modules():
        if isinstance(layer, TileLinear):
            expected = exact.get_submodule(name).weight
            assert float((layer.weight - expected).norm() / expected.norm()) < 2**-10


def test_a_multiplier_that_is_missing_or_out_of_range(tmp_path: Path) -> None:
    model = write(tmp_path, "Granite", attention_multiplier=1.0, embedding_multiplier=2.0)
    edit(tmp_path, remove=("attention_multiplier", "logits_scaling", "residual_multiplier"))
    assert gap(load(tmp_path), model, 16) < 1e-4
    for value in (0.0, -1.0, 1e-200, 1e200):
        edit(tmp_path, residual_multiplier=value)
        with pytest.raises(
            LlamaError, match=re.escape(f"residual_multiplier must be a number from 1e-06 to 1e+06, got {value}")
        ):
            load(tmp_path)


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_language_model_is_read_without_its_vision_model(tmp_path: Path, original: bool, tied: bool) -> None:
    """In both forms of names; whether the output is tied depends on the tensors, as in transformers."""
    model = write(tmp_path, "Mistral3", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, save_original_format=original)
    edit(tmp_path, remove=("tie_word_embeddings",))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.tie_embeddings is tied
    assert checkpoint.notes == ["15 tensors of the vision model are left out"]
    assert gap(load(tmp_path), model, 64) < 1e-4


def test_exaone_s_own_keys(tmp_path: Path) -> None:
    model = write(tmp_path, "Exaone")
    config = json.loads((tmp_path / "config.json").read_text())
    own = {theirs: config[usual] for theirs, usual in EXAONE_KEYS.items()}
    edit(tmp_path, remove=tuple(EXAONE_KEYS.values()), **own, embed_dropout=0.0)
    assert open_checkpoint(tmp_path).warnings == []
    assert gap(load(tmp_path), model, 64) < 1e-4


@pytest.mark.parametrize(("kind", "need"), [(kind, need) for need, kinds in NEEDS.items() for kind in kinds.split()])
def test_a_family_that_is_refused_says_what_it_needs(kind: str, need: str) -> None:
    with pytest.raises(ConfigError, match=rf"model_type is '{kind}', which needs {re.escape(need)}; only llama, mist"):
        read_config({"model_type": kind}, "config.json")


def test_a_zero_in_no_rope_layers_is_a_layer_without_rope(tmp_path: Path) -> None:
    """The opposite reading of the list, which its name suggests, gives other logits."""
    model = write(tmp_path, "SmolLM3", num_hidden_layers=8)
    ours = load(tmp_path)
    assert ours.config.no_rope_layers == (3, 7)
    assert gap(ours, model, 64) < 5e-4
    for block in model.model.layers:
        block.self_attn.use_rope = not block.self_attn.use_rope
    assert gap(ours, model, 64) > 0.1
    edit(tmp_path, remove=("no_rope_layers",))
    assert load(tmp_path).config.no_rope_layers == (3, 7)
    for listed in ([1, 1], [1, 1, 1, 2, 1, 1, 1, 1], [True] * 8):
        edit(tmp_path, no_rope_layers=listed)
        with pytest.raises(LlamaError, match=r"no_rope_layers must have a 0 .* for each of the 8 layers"):
            load(tmp_path)


@pytest.mark.parametrize("form", ["real", "half"])
def test_logits_and_cached_keys_are_the_same_in_every_form_of_rope(form: str) -> None:
    """A session saved under one form may be continued under another."""
    config, ids = dataclasses.replace(tiny.CONFIG, no_rope_layers=(1,), qkv_bias=True), tiny.random_tokens(20)
    expected, found = random_model(config), random_model(config, form)
    caches = [net.new_cache(20) for net in (expected, found)]
    assert torch.equal(expected(ids, cache=caches[0]), found(ids, cache=caches[1]))
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(one.floats()[0], other.floats()[0])
    config = dataclasses.replace(config, qk_norm=True)  # a norm adds the squares of a head in the order of its entries
    assert torch.allclose(random_model(config)(ids), random_model(config, form)(ids), atol=1e-4)


# ---------------------------------------------------------------------------------------------------- sliding windows
def test_a_window_ends_the_context(tmp_path: Path) -> None:
    model = write(tmp_path, "Mistral", sliding_window=16)
    ours = load(tmp_path)
    assert (ours.config.max_seq_len, ours.max_seq_len) == (64, 16)
    assert gap(ours, model, 16) < 5e-4
    with pytest.raises(LlamaError, match="position 16 lies outside the 16 positions"):
        ours(tokens(17))
    with pytest.raises(UsageError, match=r"context of 17 tokens exceeds the model's sliding window.*at most 16.*vLLM"):
        load(tmp_path, max_seq_len=17)
    assert load(tmp_path, rope_scaling={"rope_type": "linear", "factor": 4.0}).max_seq_len == 16
    assert open_checkpoint(tmp_path).warnings == [
        "the context is limited to 16 of 64 tokens: windows and scaled queries are not implemented"
    ]


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {}, 4096),  # transformers' default
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2}, 4096),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True}, None),  # 28 layers have none
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, 4096),
        ("smollm3", {"sliding_window": 128}, None),
        ("smollm3", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}, 4),
    ],
    ids=str,
)
def test_a_window_applies_as_in_transformers(family: str, changes: dict[str, Any], window: int | None) -> None:
    required = {key: value for key, value in BASE.items() if "position" not in key and not key.endswith("_id")}
    config, _ = read_config({"model_type": family, **required, **changes}, "config.json")
    assert config.sliding_window == window
    assert reach(config) == min(config.max_seq_len, window or config.max_seq_len)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    """The classes of transformers have the defaults; keys that a file leaves out have these values."""
    assert FAMILIES.keys() == MODEL_TYPES.keys()
    for kind, family in MODEL_TYPES.items():
        theirs = getattr(transformers, f"{FAMILIES[kind]}Config")()
        assert theirs.model_type == kind
        assert theirs.max_position_embeddings == family.context
        assert theirs.rope_parameters["rope_theta"] == family.theta
        assert theirs.tie_word_embeddings == family.tied
        biases = [key for key in ("attention_bias", "mlp_bias") if hasattr(theirs, key)]
        assert (*biases,) == family.bias_keys
        assert getattr(type(theirs), "head_dim", None) == family.head_dim
        assert family.window == getattr(type(theirs), "sliding_window", None)
        assert theirs.num_key_value_heads == (family.n_kv_heads or theirs.num_attention_heads)
        assert hasattr(transformers, family.architecture)
