"""Conversions: the same model in every format, complete or absent, and readable by the formats' own programs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import llama
from llama.chat import TEMPLATES
from llama.checkpoint import gguf_write, huggingface_write, open_checkpoint
from llama.checkpoint.architectures import MODEL_TYPES
from llama.errors import CheckpointError, ConfigError, LlamaError, UsageError
from llama.quant.gguf_types import MIXES
from llama.tools.convert import convert, quantize

from . import test_architectures, test_huggingface, tiny
from .scripts import make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(500, (1, 100), generator=torch.Generator().manual_seed(1))


def logits(path: Path, tokens: Tensor = TOKENS) -> Tensor:
    return llama.load_model(path, dtype="float32", device="cpu")(tokens)


def files(folder: Path) -> dict[str, str]:
    """Every file below a folder and its hash."""
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(folder.rglob("*")) if file.is_file()}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny.make(tmp_path / "source", "llama-3-8b")


# ------------------------------------------------------------------------------------------------------ equal models
@pytest.mark.parametrize(
    "like", ["llama-1-7b", "llama-2-70b", "codellama-7b", "llama-3-8b", "llama-3.1-405b", "llama-3.2-1b"]
)
def test_a_round_trip_through_all_formats_is_bit_equal(tmp_path: Path, like: str) -> None:
    source = make_tiny.make(tmp_path / "meta", like, shards=2 if "405b" in like else 1)
    hf = convert(source, tmp_path / f"hf-{like}", "hf")
    file = convert(hf.path, tmp_path / "model.gguf", "gguf")
    assert open_checkpoint(file.path).about["name"] == f"hf-{like}"
    back = convert(file.path, tmp_path / "back", "hf")
    assert len({proof.sha256 for proof in (hf, file, back)}) == 1
    [warning] = hf.warnings
    assert warning.startswith("wrote no chat template")
    assert file.warnings == back.warnings == []
    paths = [source, hf.path, file.path, back.path]
    assert all(open_checkpoint(path).config == open_checkpoint(source).config for path in paths)
    assert all(torch.equal(logits(source), logits(path)) for path in paths)
    tokenizers = [llama.load_tokenizer(path) for path in paths]
    text = " The dog bites the man.\n\n 12345 😀 <|eot_id|> </s>  x"
    assert len({tuple(tokenizer.encode(text, bos=True)) for tokenizer in tokenizers}) == 1
    assert len({tokenizer.stop_ids for tokenizer in tokenizers}) == 1


def test_rows_without_a_token_survive_a_round_trip(tmp_path: Path) -> None:
    """GGUF lists a token for every row of the embedding; tokenizer.json lists only those that exist."""
    source = tiny.write_gguf(tmp_path / "a.gguf", dataclasses.replace(tiny.CONFIG, vocab_size=600))
    folder = convert(source, tmp_path / "hf", "hf").path
    back = convert(convert(folder, tmp_path / "b.gguf", "gguf").path, tmp_path / "back", "hf").path
    assert all(torch.equal(logits(source), logits(path)) for path in (folder, back))
    assert llama.load_tokenizer(back).encode("hello") == llama.load_tokenizer(folder).encode("hello")


def test_chat_templates_with_names_survive_every_conversion(source: Path, tmp_path: Path) -> None:
    named = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}{{ messages[0].content }}"}
    folder = convert(source, tmp_path / "hf", "hf").path
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    file = convert(folder, tmp_path / "model.gguf", "gguf").path
    back = convert(file, tmp_path / "back", "hf").path
    assert [open_checkpoint(path).chat_template for path in (folder, file, back)] == [named] * 3


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if kind in (None, "q4_k") or family == "llama" else pytest.mark.slow)
        for family in MODEL_TYPES
        for kind in (None, *MIXES)
    ],
)
def test_every_family_is_written_in_every_quantization(tmp_path: Path, family: str, kind: str | None) -> None:
    own = test_architectures.MULTIPLIERS if family == "granite" else {}
    model = test_architectures.write(
        tmp_path / "hf", test_architectures.FAMILIES[family], num_hidden_layers=4, head_dim=16, **own
    )
    path = convert(tmp_path / "hf", tmp_path / "x.gguf", "gguf", quantize=kind).path
    expected = model(test_huggingface.tokens(40)).logits
    error = (logits(path, test_huggingface.tokens(40)) - expected).norm() / expected.norm()
    assert float(error) < {None: 1e-5, "q8_0": 0.06}.get(kind, 0.6)
    types = {open_checkpoint(path).weight(f"layers.1.attention.{name}.weight").stored for name in ("wq", "wk", "wo")}
    assert types == {{None: "F32", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k": "Q5_0"}[kind]}


LISTS = {"short_factor": test_huggingface.SHORT, "long_factor": test_huggingface.LONG}
REFUSED = [  # in GGUF
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50.7},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "truncate": False},
]
USUAL = [rope for rope in test_huggingface.ROPES if not rope.keys() & {"beta_fast", "truncate"}]
ROPES = [
    *(rope for rope in USUAL if rope["rope_type"] != "dynamic"),
    {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.5},
    {"rope_type": "yarn", "original_max_position_embeddings": 32},
    {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 32, **LISTS},
    {"rope_type": "ntk", "factor": 3.0},
]


def scaled(folder: Path, rope: dict[str, Any], **options: Any) -> Path:
    """A folder with a scaling, which transformers need not accept."""
    test_huggingface.write(folder, **options)
    test_huggingface.edit(folder, remove=("rope_parameters",), rope_scaling=rope, rope_theta=1e4)
    return folder


@pytest.mark.parametrize("rope", ROPES, ids=test_huggingface.label)
def test_rope_scalings_survive_gguf(tmp_path: Path, rope: dict[str, Any]) -> None:
    source = scaled(tmp_path / "hf", rope)
    paths = [source, convert(source, tmp_path / "x.gguf", "gguf").path]
    if rope["rope_type"] != "ntk":  # becomes divisors, which config.json can't express
        paths += [convert(path, tmp_path / f"hf {i}", "hf").path for i, path in enumerate(paths)]
    models = [llama.load_model(path, dtype="float32", device="cpu") for path in paths]
    for length in (20, 60):
        tokens = test_huggingface.tokens(length)
        assert all(float((model(tokens) - models[0](tokens)).abs().max()) < 1e-4 for model in models)
    assert len({model.max_seq_len for model in models}) == 1
    both = {"llama.rope.scaling.factor", "llama.rope.scaling.type"} <= gguf.GGUFReader(paths[1]).fields.keys()
    assert not both or rope["rope_type"] in ("linear", "yarn")


MODELS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in test_architectures.FAMILIES.values()),
    ("Granite", {**test_architectures.MULTIPLIERS, "tie_word_embeddings": True}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True}),
    ("Qwen2", {"tie_word_embeddings": True}),
    *(("Llama", {"rope": rope}) for rope in ROPES),
    *(("Qwen2", {"rope": rope}) for rope in (ROPES[1], ROPES[3], ROPES[-2])),
    ("SmolLM3", {"rope": ROPES[1]}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), MODELS, ids=str)
def test_llama_cpp_computes_the_same_logits(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Its cache holds float16. It chooses longrope's list by the size of its context, at least 256 tokens."""
    llama_cpp = pytest.importorskip("llama_cpp")
    rope = changes.get("rope")
    changes = {key: value for key, value in changes.items() if key != "rope"}
    test_architectures.write(tmp_path / "hf", family, vocab_size=768, **changes)
    if rope is not None:
        test_huggingface.edit(tmp_path / "hf", ("rope_parameters",), rope_scaling=rope, rope_theta=1e4)
    (tmp_path / "tokenizer.model").write_bytes(make_tiny.tiktoken_model(512))
    file = convert(tmp_path / "hf", tmp_path / "x.gguf", "gguf", tokenizer=tmp_path / "tokenizer.model").path
    tokens = TOKENS[:, :60]
    theirs = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    theirs.eval(tokens[0].tolist())
    assert np.abs(logits(tmp_path / "hf", tokens)[0].numpy() - theirs.scores[:60]).max() < 0.03


@pytest.mark.parametrize("like", ["llama-2-7b", "codellama-34b", "llama-3.1-8b", "llama-3.2-3b"])
def test_transformers_reads_the_written_files(tmp_path: Path, like: str) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    source = make_tiny.make(tmp_path / "meta", like)
    convert(source, tmp_path / "hf", "hf", shards=3)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 3
    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert float((logits(source) - model(TOKENS).logits).abs().max()) < 5e-4
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "hf"), llama.load_tokenizer(source)
    text = "The dog bites the man: 12345 über 😀\n\n  x"
    assert theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids == ours.encode(text)


@pytest.mark.parametrize("count", [0, 2, 21])
def test_a_folder_has_the_requested_number_of_files(source: Path, tmp_path: Path, monkeypatch, count: int) -> None:
    monkeypatch.setattr(huggingface_write, "FILE_SIZE", 100_000)
    convert(source, tmp_path / "hf", "hf", shards=count)
    states = [load_file(file) for file in (tmp_path / "hf").glob("*.safetensors")]
    total = sum(tensor.nbytes for state in states for tensor in state.values())
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total > 200_000
    assert len(states) == (count or -(-total // 100_000))
    sizes = [len(state) for state in states]
    assert (sum(sizes), max(sizes) - min(sizes) <= 1) == (21, True)
    assert torch.equal(logits(tmp_path / "hf"), logits(source))


def test_each_weight_keeps_its_dtype(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    convert(tiny.write_gguf(tmp_path / "t.gguf"), source, "hf")
    mixed = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    up = "model.layers.0.mlp.up_proj.weight"
    mixed[up] = mixed[up].float()
    save_file(mixed, source / "model.safetensors", {"format": "pt"})
    again = load_file(convert(source, tmp_path / "again", "hf").path / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in again.items()} == {name: t.dtype for name, t in mixed.items()}
    narrow = load_file(convert(source, tmp_path / "half", "hf", dtype=torch.float16).path / "model.safetensors")
    assert {tensor.dtype for tensor in narrow.values()} == {torch.float16}
    reader = gguf.GGUFReader(convert(source, tmp_path / "x.gguf", "gguf").path)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    names = ("blk.0.ffn_up", "blk.0.attn_q", "output_norm")
    assert [types[f"{name}.weight"] for name in names] == ["F32", "BF16", "F32"]


def test_the_other_files_of_a_folder_have_the_keys_of_transformers(source: Path, tmp_path: Path) -> None:
    first = convert(source, tmp_path / "first", "hf", chat_template="llama3").path
    sampling = {"temperature": 0.6, "top_p": 0.9, "do_sample": True}
    test_huggingface.edit(first, file="generation_config.json", **sampling)
    second = convert(first, tmp_path / "second", "hf").path
    for folder, more in ((first, sampling), (second, sampling)):
        names = ("config.json", "generation_config.json", "tokenizer_config.json")
        config, generation, settings = (json.loads((folder / name).read_text()) for name in names)
        ids = {"bos_token_id": 512, "eos_token_id": [513, 520, 521]}
        assert generation == {**ids, **more}
        assert config.items() >= {**ids, "torch_dtype": "bfloat16", "hidden_act": "silu", "model_type": "llama"}.items()
        assert (settings["bos_token"], settings["eos_token"]) == ("<|begin_of_text|>", "<|end_of_text|>")
        assert (settings["model_max_length"], settings["add_bos_token"]) == (8192, True)
        assert settings["chat_template"] == TEMPLATES["llama3"]


# ------------------------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("rope", "options", "message"),
    [
        *((rope, {}, f"GGUF can't express the rope scaling '{rope['rope_type']}'") for rope in REFUSED),
        ({"rope_type": "default"}, {"to": "meta"}, "unknown format 'meta'; known: hf, gguf"),
        ({"rope_type": "default"}, {"shards": 2}, "shards must be an integer from 0 to 1"),
        ({"rope_type": "default"}, {"to": "hf", "shards": 22}, "21 weights can't be split into 22 files"),
        (
            {"rope_type": "default"},
            {"to": "hf", "dtype": torch.float16},
            "norm.weight holds values beyond float16's limit",
        ),
    ],
    ids=str,
)
def test_what_can_not_be_written_is_refused(
    tmp_path: Path, rope: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    source = scaled(tmp_path / "hf", rope)
    state = load_file(source / "model.safetensors")
    state["model.norm.weight"][3] = 1e6
    save_file(state, source / "model.safetensors", {"format": "pt"})
    before = files(tmp_path)
    with pytest.raises(LlamaError, match=message):
        convert(source, tmp_path / "out", **{"to": "gguf", **options})
    assert files(tmp_path) == before


def test_a_quantized_source_needs_a_dtype_or_is_quantized_twice(tmp_path: Path) -> None:
    source = tiny.write_gguf(tmp_path / "x.gguf", quantization="Q4_0")
    with pytest.raises(UsageError, match=r"quantized.*\(--dtype\) to write: float32 is exact"):
        convert(source, tmp_path / "hf", "hf")
    exact = convert(source, tmp_path / "hf", "hf", dtype=torch.float32)
    assert torch.equal(logits(source, TOKENS % 320), logits(exact.path, TOKENS % 320))
    proof = convert(source, tmp_path / "q.gguf", "gguf", quantize="q8_0")
    assert any(
        "already quantized (Q4_0); quantizing" in w and "the weights grow by 0.1 MB" in w for w in proof.warnings
    )
    smaller = convert(tiny.write_gguf(tmp_path / "8.gguf", quantization="Q8_0"), tmp_path / "4", "hf", quantize="int4")
    assert ["less accuracy" in w and "grow" not in w for w in smaller.warnings] == [True]


def test_a_source_without_a_tokenizer_is_converted_with_a_warning(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.model").write_bytes(make_tiny.tiktoken_model(600))
    with pytest.raises(CheckpointError, match="tokens, but the embedding has"):
        convert(source, tmp_path / "hf", "hf")
    (source / "tokenizer.model").write_bytes(b"nonsense")
    for to in ("hf", "gguf"):
        [warning] = convert(source, tmp_path / to, to).warnings
        assert warning.startswith("no tokenizer was written: ")
        assert torch.equal(logits(tmp_path / to), logits(source))


# ---------------------------------------------------------------------------------------------------------- the target
WRITERS: dict[str, Callable[..., object]] = {
    "convert": lambda source, target, **options: convert(source, target, "hf", **options),
    "quantize": quantize,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_an_existing_target_is_not_replaced(source: Path, tmp_path: Path, writer: str) -> None:
    write, target = WRITERS[writer], tmp_path / "new"
    write(source, target)
    before = files(target)
    for other in (target, source):
        with pytest.raises(UsageError, match="exists already; name another target, or remove it first"):
            write(source, other)
    with pytest.raises(UsageError, match="is not in an existing folder"):
        write(source, tmp_path / "no" / "hf")
    assert files(target) == before


# ----------------------------------------------------------------------------------------------------------- the proof
@pytest.mark.parametrize("writer", ["convert", "quantize", "gguf", "q8_0"])
def test_the_proof_finds_a_wrong_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str) -> None:
    source = tiny.write_gguf(tmp_path / "source.gguf", tiny.WIDE)
    module: Any = huggingface_write if writer in WRITERS else gguf_write
    options = {} if writer in WRITERS else {"to": "gguf", "quantize": None if writer == "gguf" else writer}
    original, calls = module.raw_bytes, list[int]()

    def change_a_bit(tensor: Tensor) -> Any:
        raw = original(tensor).copy()
        calls.append(1)
        raw[-1] ^= (len(calls) == 5) << 7
        return raw

    monkeypatch.setattr(module, "raw_bytes", change_a_bit)
    with pytest.raises(CheckpointError, match="differs after it was written"):
        WRITERS.get(writer, convert)(source, tmp_path / "new", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]


def test_tokens_without_a_row_stay_in_hf_and_are_an_error_in_gguf(tmp_path: Path) -> None:
    n_vocab = open_checkpoint(tiny.write_gguf(tmp_path / "a.gguf")).tokenizer().n_vocab
    config = dataclasses.replace(tiny.CONFIG, vocab_size=n_vocab - 20)
    source = tiny.write_gguf(tmp_path / "fewer.gguf", config)
    convert(source, tmp_path / "hf", "hf")
    assert open_checkpoint(tmp_path / "hf").tokenizer().n_vocab == n_vocab
    for path in (source, tmp_path / "hf"):
        with pytest.raises(ConfigError, match=rf"has {n_vocab} tokens and the embedding {n_vocab - 20} rows"):
            convert(path, tmp_path / "b.gguf", "gguf")
