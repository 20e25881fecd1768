"""Hugging Face's files: for every configuration the results of transformers, for every fault a clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import llama
from llama import loader
from llama.checkpoint import open_checkpoint
from llama.errors import CheckpointError, LlamaError
from llama.generate import generate
from llama.sampling import SamplingParams
from llama.text import Session

pytestmark = pytest.mark.usefixtures("one_thread")

BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
PAIRS = 8  # of a head


def write(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Save a random model with transformers and return it."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**BASE, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.2
            parameter.copy_(scale * torch.randn(parameter.shape) + (1.0 if "norm" in name else 0.0))
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


def edit(folder: Path, remove: tuple[str, ...] = (), file: str = "config.json", **changes: Any) -> None:
    path = folder / file
    document = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({key: value for key, value in document.items() if key not in remove}))


def tokens(length: int) -> torch.Tensor:
    return torch.randint(320, (1, length), generator=torch.Generator().manual_seed(length))


def compare(folder: Path, model: Any, lengths: tuple[int, ...] = (20, 64)) -> None:
    """Compare the logits with those of transformers at each length, in float32."""
    ours = llama.load_model(folder, dtype="float32", device="cpu", max_seq_len=max(lengths))
    for length in lengths:
        with torch.no_grad():
            expected = model.float()(tokens(length)).logits
        assert float(expected.std()) > 0.3
        assert float((ours(tokens(length)) - expected).abs().max()) < 5e-4, length


# ---------------------------------------------------------------------------------------------- variants of config
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"head_dim": 32},
        {"head_dim": 8},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"rope_theta": 500000.0},
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    ],
    ids=str,
)
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    compare(tmp_path, write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("kind", "heads", "kv"), [("llama", 4, 4), ("mistral", 16, 8), ("qwen2", 64, 32), ("smollm3", 16, 4)]
)
def test_the_number_of_key_value_heads_has_the_default_of_transformers(
    tmp_path: Path, kind: str, heads: int, kv: int
) -> None:
    torch.manual_seed(0)
    given = {**BASE, "num_attention_heads": heads, "hidden_size": 4 * heads, "num_key_value_heads": kv}
    config = AutoConfig.for_model(kind, **given, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    edit(tmp_path, remove=("num_key_value_heads",))
    assert AutoConfig.from_pretrained(tmp_path).num_key_value_heads == kv
    assert open_checkpoint(tmp_path).config.n_kv_heads == kv
    edit(tmp_path, num_key_value_heads=None)
    if kind != "mistral":  # its configuration refuses null
        assert AutoConfig.from_pretrained(tmp_path).num_key_value_heads == heads
    if heads != kv:  # as in transformers, null stands for all heads, which the files do not have
        with pytest.raises(CheckpointError, match="k_proj"):
            loader.build(open_checkpoint(tmp_path), device="cpu")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT, LONG = [1 + 0.1 * i for i in range(PAIRS)], [1 + 0.9 * i for i in range(PAIRS)]
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.8, "mscale_all_dim": 0.5},
    {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 32},
    {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 32,
     "factor": 6.0},
    {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 32,
     "attention_factor": 1.2},
    {**LLAMA3, "original_max_position_embeddings": 32},
    {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 16},
]  # fmt: skip


def label(value: Any) -> str:
    return " ".join(f"{key}={value[key]}" for key in value if "factor" not in key or key == "factor")


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize("rope", ROPES, ids=label)
def test_every_kind_of_rope_in_every_spelling(tmp_path: Path, rope: dict[str, Any], spelling: str) -> None:
    model = write(tmp_path, rope_parameters={**rope, "rope_theta": 10000.0})
    if spelling != "rope_parameters":  # as written by transformers 4
        old = dict(rope)
        if spelling == "type":
            old["type"] = old.pop("rope_type")
        edit(tmp_path, remove=("rope_parameters",), rope_scaling=old, rope_theta=10000.0)
    compare(tmp_path, model, lengths=(20, 32, 33, 64, 65, 200))


def test_the_trained_length_may_be_outside_the_scaling(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    write(tmp_path, rope_parameters=rope)
    edit(tmp_path, original_max_position_embeddings=32)
    compare(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path), lengths=(20, 64))
    scaling = open_checkpoint(tmp_path).config.rope_scaling
    assert scaling is not None
    assert scaling["original_max_position_embeddings"] == 32


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_dynamic_scaling_starts_at_max_position_embeddings(tmp_path: Path, spelling: str) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0}
    write(tmp_path, rope_parameters={**rope, "rope_theta": 10000.0})
    odd = {**rope, "original_max_position_embeddings": 32}
    edit(tmp_path, remove=() if spelling == "rope_parameters" else ("rope_parameters",), **{spelling: odd})
    compare(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path), lengths=(20, 33, 64, 65, 200))
    assert any("original_max_position_embeddings" in warning for warning in open_checkpoint(tmp_path).warnings)


@pytest.mark.parametrize("length", [30, 63, 64, 65, 300])
@pytest.mark.parametrize("rope", [ROPES[2], ROPES[9]], ids=label)
def test_scalings_by_length_generate_the_text_of_transformers(
    tmp_path: Path, rope: dict[str, Any], length: int
) -> None:
    """The prompts are longer than a prefill chunk, or decoding passes the trained length."""
    context = {"max_position_embeddings": 64} if rope["rope_type"] == "dynamic" else {"max_position_embeddings": 512}
    model = write(tmp_path, rope_parameters={**rope, "rope_theta": 10000.0}, **context)
    prompt = tokens(length)
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, length:].tolist()
    ours = llama.load_model(tmp_path, dtype="float32", device="cpu", max_seq_len=512)
    params = SamplingParams(max_new_tokens=8, temperature=0.0)
    assert [token.id for token in generate(ours, prompt[0].tolist(), params, chunk=16)] == expected


def test_a_conversation_past_the_trained_length_equals_a_fresh_one(with_tokenizer: Path) -> None:
    edit(with_tokenizer, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0})
    llm = llama.load(with_tokenizer, device="cpu", dtype="float32")
    session = Session()
    for text in ("ab" * 15, "ab" * 15 + "c" * 60, "ab" * 15 + "c" * 60 + "d"):  # 30, 90 and 91 tokens; 64 are trained
        options = {"max_new_tokens": 4, "logprobs": True}
        ours = list(llm.stream_ids(llm.tokenizer.encode(text), session=session, **options))[-1].completion
        fresh = list(llm.stream_ids(llm.tokenizer.encode(text), **options))[-1].completion
        assert ours is not None
        assert fresh is not None
        assert ours.tokens == fresh.tokens
        assert ours.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_a_model_saved_without_its_head_loads(tmp_path: Path) -> None:
    model = write(tmp_path, tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path / "bare")
    compare(tmp_path / "bare", model)


def test_the_family_may_be_given_by_the_architecture_alone(tmp_path: Path) -> None:
    model = write(tmp_path)
    edit(tmp_path, remove=("model_type",))
    compare(tmp_path, model)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_a_scaled_model_accepts_its_context_times_the_factor(tmp_path: Path, kind: str) -> None:
    model = write(tmp_path, rope_parameters={"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0})
    ours = llama.load_model(tmp_path, dtype="float32", device="cpu")
    assert ours.config.max_seq_len == 64
    assert float((ours(tokens(256)) - model(tokens(256)).logits).abs().max()) < 5e-4
    with pytest.raises(LlamaError, match="position 256 lies outside the 256 positions"):
        ours(tokens(257))


def test_logits_do_not_depend_on_an_earlier_longer_pass(tmp_path: Path) -> None:
    write(tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0})
    ours = llama.load_model(tmp_path, dtype="float32", device="cpu", max_seq_len=256)
    before = ours(tokens(40))
    ours(tokens(200))
    assert torch.equal(ours(tokens(40)), before)


def test_bfloat16_and_float16_files_are_read(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        folder = tmp_path / str(dtype)
        write(folder, dtype=dtype)
        compare(folder, LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))


# ------------------------------------------------------------------------------------------------------------- files
def test_logits_do_not_depend_on_the_files_of_the_weights(tmp_path: Path) -> None:
    model = write(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    shutil.copytree(tmp_path / "one", tmp_path / "bin")
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "model.safetensors").unlink()
    shutil.copytree(tmp_path / "one", tmp_path / "links")
    (tmp_path / "links" / "model.safetensors").unlink()  # as in the hub's cache
    (tmp_path / "links" / "model.safetensors").symlink_to(tmp_path / "one" / "model.safetensors")
    logits = [llama.load_model(tmp_path / name, dtype="float32", device="cpu")(tokens(30))
              for name in ("one", "many", "bin", "links")]  # fmt: skip
    assert all(torch.equal(logits[0], other) for other in logits[1:])


@pytest.mark.parametrize("sign", [0x0280, 0x04034B50 % 2**20])
def test_a_header_length_may_look_like_another_format(tmp_path: Path, sign: int) -> None:
    model = write(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    wanted = length - length % 0x10000 + sign
    wanted += 0x10000 if wanted < length else 0
    header = data[8 : 8 + length] + b" " * (wanted - length)
    (tmp_path / "model.safetensors").write_bytes(wanted.to_bytes(8, "little") + header + data[8 + length :])
    compare(tmp_path, model)


def test_a_tied_model_may_store_a_head_equal_to_the_embedding(tmp_path: Path) -> None:
    model = write(tmp_path, tie_word_embeddings=True)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    compare(tmp_path, model)
    state["lm_head.weight"][0] += 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(LlamaError, match=r"tie_word_embeddings, but lm_head\.weight differs"):
        open_checkpoint(tmp_path)


def test_rotary_tables_in_old_files_are_ignored(tmp_path: Path) -> None:
    model = write(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(state, tmp_path / "model.safetensors")
    compare(tmp_path, model)


def test_every_form_of_rope_works_with_biases(tmp_path: Path) -> None:
    write(tmp_path, attention_bias=True)
    logits = [llama.load_model(tmp_path, dtype="float32", device="cpu", rope=form)(tokens(30))
              for form in ("complex", "real", "half")]  # fmt: skip
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_bfloat16_with_biases_is_near_float32(tmp_path: Path) -> None:
    from llama.tokenizer import Tokenizer

    model = write(tmp_path, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    packed = loader.build(open_checkpoint(tmp_path), "cpu", "bfloat16", fast=True)
    expected = model(tokens(30)).logits
    assert float((packed(tokens(30)) - expected).norm() / expected.norm()) < 0.03
    with pytest.raises(LlamaError, match=r"no tokenizer\.json or tokenizer\.model"):
        llama.load(tmp_path)
    assert Tokenizer.__abstractmethods__


@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True}, {"mlp_bias": True, "tie_word_embeddings": True}], ids=str
)
def test_parameters_are_counted_with_biases(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = write(tmp_path, **changes)
    assert open_checkpoint(tmp_path).config.n_params == sum(p.numel() for p in model.parameters())


def test_copied_weights_are_released_from_the_mapped_file(tmp_path: Path) -> None:
    write(tmp_path, dtype=torch.bfloat16)
    for dtype, fast in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        checkpoint = open_checkpoint(tmp_path)
        released: set[str] = set()
        checkpoint.release = released.add  # type: ignore[method-assign]
        loader.build(checkpoint, "cpu", dtype, fast=fast)
        rotated = {name for name in checkpoint.shapes if name.endswith((".wq.weight", ".wk.weight"))}
        assert released == (set(checkpoint.shapes) if dtype == "float32" else rotated)


@pytest.mark.parametrize("safe", [True, False])
def test_only_pages_of_mapped_files_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: bool) -> None:
    model = write(tmp_path)
    if not safe:
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    dropped: list[torch.Tensor] = []
    monkeypatch.setattr("llama.checkpoint.huggingface.drop_pages", dropped.append)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.release("norm.weight")
    assert [tensor.shape for tensor in dropped] == [(checkpoint.config.dim,)] * safe


# ------------------------------------------------------------------------------------- tokens, sampling, templates
@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    write(tmp_path)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(alphabet))}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])  # 256 .. 259
    backend.save(str(tmp_path / "tokenizer.json"))
    edit(tmp_path, file="tokenizer_config.json", bos_token="<s>", eos_token={"content": "</s>"},
         chat_template="{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")  # fmt: skip
    return tmp_path


def test_generation_config_is_applied(with_tokenizer: Path) -> None:
    edit(with_tokenizer, file="generation_config.json", eos_token_id=[256, 260, 999], do_sample=True, temperature=0.6,
         top_p=0.9, top_k=7)  # fmt: skip
    edit(with_tokenizer, eos_token_id=257)
    llm = llama.load(with_tokenizer, device="cpu", dtype="float32")
    assert llm.tokenizer.stop_ids >= {256, 257, 259}
    assert 999 not in llm.tokenizer.stop_ids
    assert llm.sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 7}
    drawn = {llm.generate("ab", max_new_tokens=3, seed=seed).tokens[0] for seed in range(30)}
    assert 1 < len(drawn) <= 7
    greedy = [llm.generate("ab", max_new_tokens=3, temperature=0.0, seed=seed).tokens for seed in range(3)]
    assert greedy[0] == greedy[1] == greedy[2]


@pytest.mark.parametrize("option", [{"temperature": "hot"}, {"top_p": 7}, {"top_k": 2.5}, {"temperature": -1}], ids=str)
def test_invalid_sampling_options_are_a_warning(with_tokenizer: Path, option: dict[str, Any]) -> None:
    edit(with_tokenizer, file="generation_config.json", do_sample=True, **option)
    checkpoint = open_checkpoint(with_tokenizer)
    assert checkpoint.sampling == {}
    assert any("generation_config.json" in warning and next(iter(option)) in warning for warning in checkpoint.warnings)


def test_unsupported_sampling_options_are_named(with_tokenizer: Path) -> None:
    edit(with_tokenizer, file="generation_config.json", no_repeat_ngram_size=3, num_beams=4, typical_p=1.0)
    [warning] = open_checkpoint(with_tokenizer).warnings
    assert "no_repeat_ngram_size, num_beams" in warning
    assert "typical_p" not in warning


def test_without_do_sample_answers_are_greedy(with_tokenizer: Path) -> None:
    edit(with_tokenizer, file="generation_config.json", temperature=0.7, top_p=0.9, repetition_penalty=1.1)
    assert open_checkpoint(with_tokenizer).sampling == {"repetition_penalty": 1.1}


def test_an_invalid_generation_config_is_a_warning(with_tokenizer: Path) -> None:
    (with_tokenizer / "generation_config.json").write_text('{"eos_token_id": 1,')
    checkpoint = open_checkpoint(with_tokenizer)
    assert any("generation_config.json" in warning for warning in checkpoint.warnings)


def test_chat_templates_are_read_from_three_files(with_tokenizer: Path) -> None:
    template = json.loads((with_tokenizer / "tokenizer_config.json").read_text())["chat_template"]
    assert open_checkpoint(with_tokenizer).chat_template == template
    edit(with_tokenizer, file="tokenizer_config.json",
         chat_template=[{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}])  # fmt: skip
    assert open_checkpoint(with_tokenizer).chat_template == "A"
    (with_tokenizer / "chat_template.jinja").write_text("C")
    assert open_checkpoint(with_tokenizer).chat_template == "C"


def test_templates_without_a_default_are_a_warning(with_tokenizer: Path) -> None:
    edit(with_tokenizer, file="tokenizer_config.json", chat_template=[{"name": "tool_use", "template": "B"}])
    checkpoint = open_checkpoint(with_tokenizer)
    assert checkpoint.chat_template is None
    assert any("named 'default'" in warning for warning in checkpoint.warnings)


@pytest.mark.parametrize(
    "template",
    [
        3,
        {"default": "A"},
        ["A"],
        [{"name": "default"}],
        [{"name": [], "template": "A"}],
        [{"name": "default", "template": 1}],
    ],
)
def test_a_chat_template_of_another_type_is_refused(with_tokenizer: Path, template: object) -> None:
    edit(with_tokenizer, file="tokenizer_config.json", chat_template=template)
    with pytest.raises(CheckpointError, match="chat_template must be a string or a list"):
        open_checkpoint(with_tokenizer)


# ------------------------------------------------------------------------------------------------------------ faults
INDEX = "model.safetensors.index.json"


def change_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((folder / INDEX).read_text())
    change(document["weight_map"])
    (folder / INDEX).write_text(json.dumps(document))


def first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def assign(value: Any) -> Callable[[Path], None]:
    return lambda d: change_index(d, lambda weight_map: weight_map.update({"model.norm.weight": value}))


def resave(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        state = load_file(first(folder))
        change(state)
        save_file(state, first(folder))

    return damage


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "other family": (
        lambda d: edit(d, model_type="gpt2"),
        "model_type is 'gpt2'; only llama, .* can be run; try transformers",
    ),
    "layer types": (lambda d: edit(d, layer_types=["sliding_attention"] * 2), "must be a list of full_attention, got"),
    "multiplier": (lambda d: edit(d, residual_multiplier=0.22), "residual_multiplier is 0.22"),
    "typo": (lambda d: edit(d, num_key_value_head=2), "'num_key_value_head'; did you mean 'num_key_value_heads'"),
    "head huge": (lambda d: edit(d, head_dim=2_000_000_000), "head_dim must be at most 65536"),
    "rope kind list": (lambda d: edit(d, rope_parameters={"rope_type": ["a"]}), "rope_type is .'a'."),
    "rope factor huge": (
        lambda d: edit(d, rope_parameters={"rope_type": "dynamic", "factor": 1e308}),
        "'factor' must be a number above 0",
    ),
    "rope factor digits": (
        lambda d: edit(d, rope_parameters={"rope_type": "linear", "factor": 10**400}),
        "'factor' must be a number above 0",
    ),
    "theta digits": (
        lambda d: edit(d, rope_parameters={"rope_type": "default", "rope_theta": 10**400}),
        "rope_theta must be a number above 0",
    ),
    "longrope of one": (
        lambda d: edit(
            d,
            rope_parameters={
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 8,
                "original_max_position_embeddings": 1,
            },
        ),
        "trained length must be above 1",
    ),
    "single file next to an index": (
        lambda d: shutil.copy(first(d), d / "model.safetensors"),
        "it is unclear which one applies",
    ),
    "no family": (lambda d: edit(d, remove=("model_type", "architectures")), "model_type is missing"),
    "quantized": (lambda d: edit(d, quantization_config={"quant_method": "aqlm"}), "quantized .'aqlm': AQLM"),
    "window": (lambda d: edit(d, sliding_window=4096), "sliding_window of a llama model must be null, got 4096"),
    "activation": (lambda d: edit(d, hidden_act="gelu"), "hidden_act is 'gelu'"),
    "dim string": (lambda d: edit(d, hidden_size="64"), "hidden_size must be an integer, got '64' .a string."),
    "dim fraction": (lambda d: edit(d, hidden_size=64.0), "hidden_size must be an integer, got 64.0"),
    "dim true": (lambda d: edit(d, hidden_size=True), "hidden_size must be an integer, got true"),
    "dim gone": (lambda d: edit(d, remove=("hidden_size",)), "the key hidden_size is missing"),
    "dim zero": (lambda d: edit(d, hidden_size=0, head_dim=16), "dim must be an integer from 1"),
    "dim huge": (lambda d: edit(d, hidden_size=2**40), "dim must be an integer from 1"),
    "layers": (lambda d: edit(d, num_hidden_layers=5), "5 layers, but the file has tensors of 2"),
    "heads": (
        lambda d: edit(d, num_attention_heads=7, remove=("head_dim",)),
        "not a multiple of num_attention_heads 7",
    ),
    "kv heads": (lambda d: edit(d, num_key_value_heads=3), "multiple of n_kv_heads"),
    "vocab": (lambda d: edit(d, vocab_size=300), r"model\.embed_tokens\.weight has shape \(320, 64\).*\(300, 64\)"),
    "odd head": (lambda d: edit(d, head_dim=15), "head_dim must be even"),
    "theta": (
        lambda d: edit(d, rope_parameters={"rope_type": "default", "rope_theta": -1.0}),
        "rope_theta must be a number above 0",
    ),
    "theta twice": (lambda d: edit(d, rope_theta=5.0), "rope_theta is 5.0, but 10000.0 in rope_parameters"),
    "rope kind": (
        lambda d: edit(d, rope_parameters={"rope_type": "spiral"}),
        "rope_type is 'spiral', expected one of default",
    ),
    "rope factor": (
        lambda d: edit(d, rope_parameters={"rope_type": "linear", "factor": 0}),
        "'factor' must be a number above 0",
    ),
    "rope both": (lambda d: edit(d, rope_scaling={"rope_type": "linear", "factor": 2.0}), "contradict each other"),
    "rope order": (
        lambda d: edit(d, rope_parameters={**LLAMA3, "low_freq_factor": 4.0}),
        "low_freq_factor must be below",
    ),
    "rope list": (
        lambda d: edit(d, rope_parameters={"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
        "expected 8 numbers, one per pair, got 1",
    ),
    "json": (lambda d: (d / "config.json").write_text("{"), r"config\.json is not valid JSON"),
    "path up": (assign("../x.safetensors"), r"'\.\./x\.safetensors', which is not a plain file name"),
    "path root": (assign("/etc/passwd"), "not a plain file name"),
    "path windows": (assign("C:\\x"), "not a plain file name"),
    "path number": (assign(5), "not a plain file name"),
    "path empty": (assign(""), "not a plain file name"),
    "file gone": (lambda d: first(d).unlink(), "1 of .* are missing: model-00001-of-"),
    "wrong file": (lambda d: assign(first(d).name)(d), r"'model.norm.weight' should be in model-00001"),
    "not in index": (
        lambda d: change_index(d, lambda weight_map: weight_map.pop("model.norm.weight")),
        "does not list it there",
    ),
    "map": (lambda d: (d / INDEX).write_text('{"weight_map": []}'), "weight_map must map"),
    "cut": (lambda d: first(d).write_bytes(first(d).read_bytes()[:-9]), "it is truncated, download it again"),
    "empty": (lambda d: first(d).write_bytes(b""), "is empty"),
    "lfs": (lambda d: first(d).write_text("version https://git-lfs.github.com/spec/v1"), "git lfs pull"),
    "html": (lambda d: first(d).write_text("<html>404"), "web page"),
    "torch file": (lambda d: torch.save({}, first(d)), "is a torch file, not a safetensors file"),
    "length": (lambda d: first(d).write_bytes((2**62).to_bytes(8, "little") + b"{}"), "its header would take"),
    "int8": (resave(lambda s: s.update({n: t.to(torch.int8) for n, t in s.items()})), "is stored as I8"),
    "unknown tensor": (lambda d: edit(d, file=INDEX) or resave(lambda s: s.update(extra=torch.ones(1)))(d), "'extra'"),
    "no weights": (lambda d: [f.unlink() for f in d.glob("*.safetensors*")], "has config.json but no weights"),
    "half fetched": (
        lambda d: [f.unlink() for f in d.glob("*.safetensors*")] and (d / "x.incomplete").touch(),
        "contains an incomplete file",
    ),
    "adapter": (
        lambda d: (
            [f.unlink() for f in d.glob("*.safetensors*")]
            and save_file({"a": torch.ones(1)}, d / "adapter_model.safetensors")
        ),
        "contains an adapter",
    ),
}


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    model = write(folder / "one")
    model.save_pretrained(folder / "many", max_shard_size="40KB")
    return folder / "many"


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_a_one_line_error(many_files: Path, tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(many_files, folder)
    damage, says = FAULTS[fault]
    damage(folder)
    with pytest.raises(LlamaError, match=says) as caught:
        loader.load_model(folder, device="cpu", dtype="float32")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_and_an_extra_tensor_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    kept = state.pop("lm_head.weight")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(LlamaError, match=r"1 tensor is missing: lm_head\.weight"):
        loader.load_model(tmp_path)
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    save_file({**state, **bias, "lm_head.weight": kept}, tmp_path / "model.safetensors")
    with pytest.raises(LlamaError, match=r"1 tensor is unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"):
        loader.load_model(tmp_path)


def test_unknown_keys_are_a_warning_and_have_no_effect(tmp_path: Path) -> None:
    write(tmp_path)
    edit(tmp_path, auto_map={"AutoModel": "evil.py"}, _attn_implementation_internal="evil", my_key=1)
    checkpoint = open_checkpoint(tmp_path)
    assert any("my_key" in warning for warning in checkpoint.warnings)
    assert any("_attn_implementation_internal" in warning for warning in checkpoint.warnings)


def test_a_folder_that_contains_metas_is_read_as_hugging_faces(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "params.json").write_text("{}")
    assert open_checkpoint(tmp_path).format == "Hugging Face"
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(LlamaError, match=r"original has params\.json but no weights"):  # Meta's are looked for instead
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("model-00001-of-00002.safetensors", (60).to_bytes(8, "little") + b'{"__metadata__": {}}'),
        ("model-00001-of-00002.safetensors", (60).to_bytes(8, "little") + b'{ "x": {}}'),
        ("pytorch_model-00001-of-00002.bin", b"PK\x03\x04" + bytes(60)),
        ("model.safetensors.index.json", b'{"weight_map": {}}'),
        ("config.json", b'\n  {"model_type": "llama"}'),
    ],
)
def test_one_file_of_a_folder_is_refused_with_the_name_of_the_folder(tmp_path: Path, name: str, start: bytes) -> None:
    (tmp_path / name).write_bytes(start)
    with pytest.raises(CheckpointError, match=f"name the folder: {tmp_path}$"):
        open_checkpoint(tmp_path / name)
