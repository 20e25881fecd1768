"""Mistral, Qwen2, Qwen3, SmolLM3 and Phi-3: the logits of transformers from every format, limits of windows, clear refusals."""

from __future__ import annotations

import copy
import dataclasses
import functools
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
from llama.errors import ConfigError, DamagedError, LlamaError, UsageError
from llama.generate import generate
from llama.generation.batch import Batch, Request, TokenEvent
from llama.inside.explain import random_model
from llama.quant import gguf_types
from llama.quant.gguf_types import quantize
from llama.rope_scaling import reach
from llama.sampling import SamplingParams
from llama.tools.convert import convert
from llama.tools.families import official

from . import test_huggingface, tiny
from .test_huggingface import edit, load, tokens

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = {**test_huggingface.BASE, "num_hidden_layers": 5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


def longrope(pairs: int) -> dict[str, Any]:
    """Frequencies for texts up to 32 tokens, and others for longer ones."""
    lists = {key: [1 + step * i for i in range(pairs)] for key, step in (("short_factor", 0.1), ("long_factor", 0.9))}
    return {"original_max_position_embeddings": 32, "rope_parameters": {"rope_type": "longrope", **lists}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e6}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e6,
          "original_max_position_embeddings": 32}  # fmt: skip
MULTIPLIERS = {"embedding_multiplier": 3.5, "attention_multiplier": 0.4, "residual_multiplier": 0.22,
               "logits_scaling": 1.7}  # fmt: skip
DENSE = {"num_local_experts": 0, "shared_intermediate_size": 160, "position_embedding_type": "rope",
         "layer_types": ["attention"] * 5}  # fmt: skip
SCALED = {**YARN, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "beta_fast": 32.0,
          "beta_slow": 1.0}  # fmt: skip
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3",
            "granite": "Granite", "ministral3": "Ministral3", "exaone": "Exaone", "phi3": "Phi3"}  # fmt: skip
VISION = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16,
          "num_attention_heads": 2, "patch_size": 4, "image_size": 16}  # fmt: skip


def write(folder: Path, family: str, **changes: Any) -> Any:
    changes = {**BASE, **copy.deepcopy(changes)}  # transformers changes them
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
    ("Phi3", {"num_key_value_heads": 4, "tie_word_embeddings": True, **longrope(8)}, False),
    ("Phi3", {"num_key_value_heads": 1, "head_dim": 24, "sliding_window": 16}, False),
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
    ("GraniteMoeHybrid", {**MULTIPLIERS, "num_key_value_heads": 2, **DENSE}, False),
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


@pytest.mark.parametrize("family", ["Llama", "Granite", "Qwen3", "Phi3"])
@pytest.mark.parametrize("change", [24, 8, "cut", "scalar"])
def test_rows_that_are_not_those_of_the_heads_are_an_error(tmp_path: Path, family: str, change: int | str) -> None:
    write(tmp_path, family, head_dim=16)
    name = f"model.layers.1.self_attn.{'qkv' if family == 'Phi3' else 'q'}_proj.weight"
    if isinstance(change, int):
        edit(tmp_path, head_dim=change)
    else:
        damaged = {"cut": lambda x: x[:-1].contiguous(), "scalar": lambda x: torch.tensor(1.0)}[change]
        test_huggingface.change_state(tmp_path, lambda state: state.update({name: damaged(state[name])}))
    with pytest.raises(DamagedError, match=r"has shape .* but the configuration requires"):
        load(tmp_path)


@pytest.mark.parametrize(("family", "rows"), [("Granite", 128), ("Phi3", 64)])
def test_a_matrix_that_is_stored_twice_is_an_error(tmp_path: Path, family: str, rows: int) -> None:
    write(tmp_path, family, head_dim=16)
    name = f"model.layers.1.self_attn.{'qkv' if family == 'Granite' else 'q'}_proj.weight"
    test_huggingface.change_state(tmp_path, lambda state: state.update({name: torch.zeros(rows, 64)}))
    with pytest.raises(DamagedError, match=r"both contain layers\.1\.attention\.wq\.weight; remove one of them"):
        load(tmp_path)


def test_the_first_scaled_query_ends_the_context_wherever_the_length_is(tmp_path: Path) -> None:
    """Ministral 3's length may stand outside of rope_parameters, which older files call rope_scaling."""
    model = write(tmp_path, "Ministral3", head_dim=24, rope_parameters=SCALED)
    inner = dict(SCALED)
    length, theta = inner["original_max_position_embeddings"], inner.pop("rope_theta")
    edit(tmp_path, remove=("rope_parameters",), rope_scaling=inner, rope_theta=theta)
    assert gap(load(tmp_path), model, length) < 1e-4
    edit(tmp_path, original_max_position_embeddings=length // 2)
    assert load(tmp_path).max_seq_len == length // 2


def test_a_wrapped_model_without_a_head_is_tied_unless_its_config_forbids_it(tmp_path: Path) -> None:
    write(tmp_path, "Mistral3", tie_word_embeddings=True)
    assert load(tmp_path).config.tie_embeddings
    edit(tmp_path, tie_word_embeddings=False)
    with pytest.raises(DamagedError, match=r"1 tensor is missing: lm_head\.weight"):
        load(tmp_path)


def test_sizes_of_qwen_are_the_published_ones() -> None:
    sizes = {name: config.n_params for name, config in official().items() if name.startswith("qwen")}
    assert sizes == {
        "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
        "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen2.5-0.5b-instruct": 494_032_768,
        "qwen2.5-1.5b-instruct": 1_543_714_304, "qwen2.5-3b-instruct": 3_085_938_688,
        "qwen2.5-7b-instruct": 7_615_616_512,
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
    state = {base.to_file_name(name, base.HUGGING_FACE_NAMES): checkpoint.unscaled(name, "half").floats()
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


def test_a_granite_in_gguf_needs_its_logit_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(GGUF_KEYS["granite"], "logit_scale")
    write(tmp_path / "hf", "Granite", **MULTIPLIERS)
    with pytest.raises(LlamaError, match=r"granite\.logit_scale"):
        load(as_gguf(tmp_path / "hf", tmp_path / "x.gguf", "granite"))


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


# --------------------------------------------------------------------------------------------------------------- Phi-3
PARTIAL = {"partial_rotary_factor": 0.75, **longrope(6)}  # as in Phi-4-mini
PHI_MODELS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4, "tie_word_embeddings": True, **longrope(8)},
    {"partial_rotary_factor": 0.5, "num_key_value_heads": 1},
    PARTIAL,
    {**PARTIAL, "tie_word_embeddings": True, "num_key_value_heads": 4},
]
# Parts of the names in Hugging Face's files -> those in GGUF
PHI_NAMES = {
    "model.norm": "output_norm", "model.layers": "blk", "model.embed_tokens": "token_embd", "lm_head": "output",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_phi_gguf(path: Path, model: Any, type: str = "F32") -> Path:
    """Write a file of the architecture phi3, as llama.cpp's converter does."""
    config, rope = model.config, model.model.rotary_emb
    state = {name: weight for name, weight in model.state_dict().items()
             if not (config.tie_word_embeddings and name == "lm_head.weight")}  # fmt: skip
    tensors = {functools.reduce(lambda n, p: n.replace(*p), PHI_NAMES.items(), k): w for k, w in state.items()}
    for key in ("long", "short"):
        if factors := config.rope_parameters.get(f"{key}_factor"):
            tensors[f"rope_factors_{key}.weight"] = torch.tensor(factors)
    head_dim = config.hidden_size // config.num_attention_heads
    metadata = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.sliding_window": config.sliding_window or 0,
        "rope.freq_base": 10000.0, "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "rope.dimension_count": int(head_dim * config.rope_parameters["partial_rotary_factor"]),
        "rope.scaling.attn_factor": rope.attention_scaling,
    }  # fmt: skip
    entries = {"general.architecture": "phi3", **{f"phi3.{key}": value for key, value in metadata.items()}}
    entries = {**dict.fromkeys(tiny.architecture()), **entries}
    return tiny.write_gguf(path, state={}, quantization=type, metadata=entries, extra=tensors)


def test_a_text_config_without_a_model_type_is_a_mistral(tmp_path: Path) -> None:
    model, config = write(tmp_path, "Mistral3"), tmp_path / "config.json"
    settings = json.loads(config.read_text())
    del settings["text_config"]["model_type"]
    config.write_text(json.dumps(settings))
    assert gap(load(tmp_path), model, 64) < 1e-4


@pytest.mark.parametrize("changes", [{"num_local_experts": 4}, {"layer_types": ["attention", "mamba"]},
                                     {"position_embedding_type": "nope"}], ids=str)  # fmt: skip
def test_a_granite_4_that_is_no_llama_is_rejected(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path, "GraniteMoeHybrid", **DENSE)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(LlamaError, match="granitemoehybrid"):
        load(tmp_path)


@pytest.mark.parametrize("changes", PHI_MODELS, ids=str)
def test_phi_logits_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    """On both sides of the length from which longrope has other frequencies, in both layouts, with a cache."""
    model = write(tmp_path / "hf", "Phi3", **changes)
    for path in (tmp_path / "hf", write_phi_gguf(tmp_path / "x.gguf", model)):
        for form in ("complex", "half"):
            ours = load(path, rope=form)
            assert max(gap(ours, model, length) for length in (20, 32, 33, 64)) < 1e-4
        expected, cache = model(tokens(30)).logits, ours.new_cache()
        found = torch.cat([ours(part, cache=cache) for part in tokens(30).split((17, 1, 12), 1)], 1)
        assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("prompt", [20, 31, 32, 33])
def test_an_answer_that_passes_longropes_trained_length_is_that_of_transformers(tmp_path: Path, prompt: int) -> None:
    """The trained length is 32; transformers computes its cache again there."""
    model, ids = write(tmp_path, "Phi3", **PARTIAL), tokens(prompt)
    expected = model.generate(ids, max_new_tokens=25, do_sample=False, eos_token_id=None)[0, prompt:].tolist()
    ours, params = load(tmp_path), SamplingParams(max_new_tokens=25)
    assert [token.id for token in generate(ours, ids[0].tolist(), params)] == expected
    batch = Batch(ours, [Request(ids[0].tolist(), params)], slots=1)
    assert [event.token.id for event in batch if isinstance(event, TokenEvent)] == expected


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_older_names_of_longrope(tmp_path: Path, name: str) -> None:
    write(tmp_path, "Phi3", **PARTIAL)
    scaling = {"type": name, "original_max_position_embeddings": 32, **PARTIAL["rope_parameters"]}
    scaling.pop("rope_type")
    edit(tmp_path, remove=("rope_parameters",), rope_scaling=scaling, rope_theta=5000.0, partial_rotary_factor=0.75)
    without_effect = {"attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "embd_pdrop": 0.0}
    edit(tmp_path, full_attn_mod=1, interpolate_factor=1, **without_effect)  # as in Phi-4-mini
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert gap(load(tmp_path), model, 64) < 1e-4
    assert open_checkpoint(tmp_path).warnings == []


@pytest.mark.parametrize("changes", [{}, {"partial_rotary_factor": 0.75, **longrope(24)}], ids=["all", "partial"])
@pytest.mark.parametrize("type", ["Q8_0", "Q4_K"])
def test_parts_of_a_quantized_matrix_stay_quantized(
    tmp_path: Path, type: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    model = write(tmp_path / "hf", "Phi3", **sizes, **changes)
    quantize = gguf.quants.quantize
    monkeypatch.setattr(gguf.quants, "quantize", lambda x, kind: quantize(x, kind) if kind.name != "Q4_K" else
                        gguf_types.quantize(torch.from_numpy(x), "Q4_K").numpy())  # fmt: skip
    checkpoint: Any = open_checkpoint(write_phi_gguf(tmp_path / "x.gguf", model, type))
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    stored = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    with torch.no_grad():  # the model of the rounded weights
        for name, parameter in model.named_parameters():
            theirs = functools.reduce(lambda n, p: n.replace(*p), PHI_NAMES.items(), name)
            parameter.copy_(torch.from_numpy(stored[theirs].copy()))
    assert gap(load(tmp_path / "x.gguf"), model, 64) < 1e-4
    for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w_gate", "feed_forward.w_up"):
        for layout in ("interleaved", "half"):
            weight = checkpoint.weight(f"layers.1.{name}.weight", layout)
            assert weight.format is not None
            assert weight.stored == type
            assert (weight.blocks() is None) == (name in ("attention.wq", "attention.wk") and bool(changes))
            torch.testing.assert_close(weight.groups().weight, weight.floats(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(weight[64:96].groups().weight, weight.floats()[64:96], rtol=1e-5, atol=1e-6)


def test_a_partial_rotation_is_quantized_but_not_converted(tmp_path: Path) -> None:
    model, source = write(tmp_path / "hf", "Phi3", **PARTIAL), tmp_path / "hf"
    for target, format in ((tmp_path / "new.hf", "hf"), (tmp_path / "new.gguf", "gguf")):
        with pytest.raises(ConfigError, match=r"can't be written: only a part of each head rotates"):
            convert(source, target, format)
    folder = convert(source, tmp_path / "int8", "hf", quantize="int8").path
    for form in ("complex", "half"):
        written, quantized = (load(path, rope=form, quantize="int8") for path in (folder, source))
        assert torch.equal(written(tokens(64)), quantized(tokens(64)))
        assert gap(load(folder, rope=form), model, 64) < 0.3
    with pytest.raises(UsageError, match="runs only with its own rope scaling"):
        load(source, rope_scaling={"rope_type": "default"})
    expected = load(source, rope_theta=5000.0)(tokens(40))
    edit(source, rope_parameters={**PARTIAL["rope_parameters"], "rope_theta": 5000.0})
    assert torch.equal(load(source)(tokens(40)), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 0.7}, "dim times partial_rotary_factor must be even, got 11"),
        ({"partial_rotary_factor": 1.5}, "dim times partial_rotary_factor must be .* 16, got 24"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which no LLaMA has"),
        ({"num_key_value_heads": 1}, r"qkv_proj.weight has shape \(128, 64\), but .* requires 96 rows"),
        ({"intermediate_size": 90}, r"gate_up_proj.weight has shape \(192, 64\), but .* requires 180 rows"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, "Phi3")
    edit(tmp_path, remove=("rope_parameters",), **changes)
    with pytest.raises(LlamaError, match=message):
        load(tmp_path)


# ---------------------------------------------------------------------------------------------------- sliding windows
def test_a_window_ends_the_context(tmp_path: Path) -> None:
    model = write(tmp_path, "Mistral", sliding_window=16)
    ours = load(tmp_path)
    assert (ours.config.max_seq_len, ours.max_seq_len) == (64, 16)
    assert gap(ours, model, 16) < 5e-4
    with pytest.raises(LlamaError, match="position 16 lies outside the 16 positions"):
        ours(tokens(17))
    with pytest.raises(UsageError, match=r"context of 17 tokens is too long: beyond 16.*sliding window.*vLLM"):
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
        # Ministral 3 needs rope_parameters, in which a missing rope_theta is default_theta
        theta = theirs.default_theta if kind == "ministral3" else theirs.rope_parameters["rope_theta"]
        assert theta == family.theta
        assert theirs.tie_word_embeddings == family.tied
        assert theirs.rms_norm_eps == family.norm_eps
        assert getattr(theirs, "original_max_position_embeddings", None) == family.trained
        biases = [key for key in ("attention_bias", "mlp_bias") if hasattr(theirs, key)]
        assert (*biases,) == family.bias_keys
        assert getattr(type(theirs), "head_dim", None) == family.head_dim
        assert family.window == getattr(type(theirs), "sliding_window", None)
        assert theirs.num_key_value_heads == (family.n_kv_heads or theirs.num_attention_heads)
        assert hasattr(transformers, family.architecture)
