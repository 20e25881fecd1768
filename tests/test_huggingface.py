"""Hugging Face's files: for every configuration the results of transformers, for every fault a clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM

import llama
from llama.checkpoint import huggingface, open_checkpoint
from llama.errors import LlamaError
from llama.generate import generate
from llama.sampling import SamplingParams
from llama.weights import check_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
PAIRS = 8  # of a head
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def write(folder: Path, dtype: torch.dtype = torch.float32, family: str = "Llama", **changes: Any) -> Any:
    """Save a random model with transformers and return it."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**BASE, **changes})
    kind = "ImageTextToText" if hasattr(config, "text_config") else "CausalLM"
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config).eval()
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


def change_state(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of the first file of weights."""
    file = min(folder.glob("*.safetensors"))
    state = load_file(file)
    change(state)
    save_file(state, file)


def tokens(length: int) -> torch.Tensor:
    return torch.randint(320, (1, length), generator=torch.Generator().manual_seed(length))


def load(folder: Path, **options: Any) -> Any:
    return llama.load_model(folder, dtype="float32", device="cpu", **options)


def compare(folder: Path, model: Any, lengths: tuple[int, ...] = (20, 64)) -> None:
    """Compare the logits with those of transformers at each length, in float32."""
    ours = load(folder, max_seq_len=max(lengths))
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
        {"head_dim": 8},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True},
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    ],
    ids=str,
)
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = write(tmp_path, **changes)
    compare(tmp_path, model)
    assert open_checkpoint(tmp_path).config.n_params == sum(p.numel() for p in model.parameters())


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT, LONG = [1 + 0.1 * i for i in range(PAIRS)], [1 + 0.9 * i for i in range(PAIRS)]
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
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


@pytest.mark.parametrize("rope", ROPES, ids=label)
def test_every_kind_of_rope_in_every_spelling(tmp_path: Path, rope: dict[str, Any]) -> None:
    model = write(tmp_path, rope_parameters={**rope, "rope_theta": 20000.0})
    compare(tmp_path, model, lengths=(20, 32, 33, 64, 65, 200))
    logits = load(tmp_path)(tokens(65)[:, :64])
    for spelling in ("rope_type", "type"):  # as written by transformers 4
        old = {spelling if key == "rope_type" else key: value for key, value in rope.items()}
        edit(tmp_path, remove=("rope_parameters",), rope_scaling=old, rope_theta=20000.0)
        assert torch.equal(load(tmp_path)(tokens(65)[:, :64]), logits)
    edit(tmp_path, rope_parameters={**rope, "rope_theta": 20000.0})  # both may be there, if they agree
    assert torch.equal(load(tmp_path)(tokens(65)[:, :64]), logits)


def test_a_trained_length_beside_the_scaling_is_read_as_in_transformers(tmp_path: Path) -> None:
    write(tmp_path)
    edit(tmp_path, rope_parameters={**ROPES[3], "rope_theta": 10000.0}, original_max_position_embeddings=16)
    compare(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path), lengths=(20, 33, 64, 65, 200))


@pytest.mark.parametrize("length", [30, 63, 65])
@pytest.mark.parametrize("rope", [ROPES[2], ROPES[8]], ids=label)
def test_scalings_by_length_generate_the_text_of_transformers(
    tmp_path: Path, rope: dict[str, Any], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts are longer than a prefill chunk, or decoding passes the trained length.

    There, we compute the text again under LongRoPE. transformers does that in Phi-3 only, so here it has no cache.
    """
    monkeypatch.setattr("llama.generate.prompt_chunk", lambda device: 16)
    dynamic = rope["rope_type"] == "dynamic"
    context = 64 if dynamic else 512
    model = write(tmp_path, rope_parameters={**rope, "rope_theta": 10000.0}, max_position_embeddings=context)
    prompt = tokens(length)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "use_cache": dynamic}
    expected = model.generate(prompt, **options)[0, length:].tolist()
    params = SamplingParams(max_new_tokens=8, temperature=0.0)
    found = generate(load(tmp_path, max_seq_len=512), prompt[0].tolist(), params)
    assert [token.id for token in found] == expected


# ------------------------------------------------------------------------------------------------------------- files
def test_logits_do_not_depend_on_the_files_of_the_weights(tmp_path: Path) -> None:
    model = write(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    for name in ("bin", "links", "surplus", "unlisted", "other names"):
        shutil.copytree(tmp_path / ("many" if name in ("unlisted", "other names") else "one"), tmp_path / name)
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / WEIGHTS).unlink()
    (tmp_path / "bin" / "training_args.bin").touch()
    (tmp_path / "other names" / INDEX).unlink()
    (tmp_path / "links" / WEIGHTS).unlink()  # as in the hub's cache
    (tmp_path / "links" / WEIGHTS).symlink_to(tmp_path / "one" / WEIGHTS)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    change_state(tmp_path / "surplus", lambda state: state.update(old))
    change_state(tmp_path / "unlisted", lambda state: state.update(extra=torch.ones(3)))
    (tmp_path / "unlisted" / "adapter_model.safetensors").touch()
    logits = {path.name: load(path)(tokens(30)) for path in sorted(tmp_path.iterdir())}
    assert len(logits) == 7
    assert open_checkpoint(tmp_path / "one").about == {"weights": {"F32": 4 * model.num_parameters()}}
    for name, other in logits.items():
        assert torch.equal(logits["one"], other), name


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("stored", [EMBEDDING, HEAD, "both"])
def test_a_tied_model_may_store_either_matrix_or_both_if_equal(tmp_path: Path, stored: str, bare: bool) -> None:
    """A model that was saved without its head has names without the prefix `model.`"""
    model = write(tmp_path, tie_word_embeddings=True)
    prefix = len("model.") if bare else 0

    def change(state: dict[str, torch.Tensor]) -> None:
        embedding = state.pop(EMBEDDING)
        for name in list(state):
            state[name[prefix:]] = state.pop(name)
        state.update({EMBEDDING[prefix:]: embedding} if stored != HEAD else {})
        state.update({HEAD: embedding.clone()} if stored != EMBEDDING else {})

    change_state(tmp_path, change)
    compare(tmp_path, model)
    if stored == "both":
        change_state(tmp_path, lambda state: state.update({HEAD: model.lm_head.weight.detach() + 1}))
        with pytest.raises(LlamaError, match=r"lm_head\.weight differs from the embedding"):
            open_checkpoint(tmp_path)


# ------------------------------------------------------------------------------------- tokens, sampling, templates
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Path:
    write(tmp_path)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(alphabet))}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])  # 256 .. 259
    backend.save(str(tmp_path / "tokenizer.json"))
    edit(tmp_path, file="tokenizer_config.json", bos_token="<s>", eos_token={"content": "</s>"}, chat_template=TEMPLATE)
    return tmp_path


def test_generation_config_is_applied_if_valid(with_tokenizer: Path) -> None:
    edit(with_tokenizer, file="generation_config.json", eos_token_id=[256, 260, -1, None], do_sample=True,
         temperature=0.6, top_p=0.9, top_k=7)  # fmt: skip
    edit(with_tokenizer, eos_token_id=257, bos_token_id=[5])
    llm = llama.load(with_tokenizer, device="cpu", dtype="float32")
    assert llm.tokenizer.stop_ids >= {256, 257, 259}
    assert llm.tokenizer.bos_id == 256
    assert llm.sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 7}
    drawn = {llm.generate("ab", max_new_tokens=3, seed=seed).tokens[0] for seed in range(30)}
    assert 1 < len(drawn) <= 7
    edit(with_tokenizer, file="generation_config.json", top_p=7)
    assert open_checkpoint(with_tokenizer).sampling == {}
    assert any("its sampling options are ignored" in warning for warning in open_checkpoint(with_tokenizer).warnings)
    edit(with_tokenizer, file="generation_config.json", do_sample=None, repetition_penalty=1.1)
    assert open_checkpoint(with_tokenizer).sampling == {"repetition_penalty": 1.1}
    edit(with_tokenizer, file="generation_config.json", eos_token_id=[True])
    with pytest.raises(LlamaError, match=r"generation_config\.json: eos_token_id must be an id"):
        llama.load_tokenizer(with_tokenizer)


BOTH = {"default": "A", "tool_use": "B"}
LISTED = [{"name": name, "template": text} for name, text in BOTH.items()]


@pytest.mark.parametrize(
    ("listed", "files", "expected"),
    [
        (LISTED, {}, BOTH),
        (LISTED[:1], {}, "A"),
        (LISTED, {"chat_template.jinja": "é"}, "é"),
        ("X", {"chat_template.jinja": "A", "additional_chat_templates/tool_use.jinja": "B"}, BOTH),
    ],
)
def test_chat_templates_are_read_as_in_transformers(
    with_tokenizer: Path, listed: Any, files: dict[str, str], expected: object
) -> None:
    from transformers import PreTrainedTokenizerFast

    edit(with_tokenizer, file="tokenizer_config.json", chat_template=listed, eos_token="</s>")
    (with_tokenizer / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (with_tokenizer / name).write_text(text)
    checkpoint = open_checkpoint(with_tokenizer)
    assert checkpoint.chat_template == expected
    theirs = PreTrainedTokenizerFast.from_pretrained(with_tokenizer).chat_template
    assert (theirs or None) in (expected, {"default": expected})
    checkpoint.tokenizer()


# ------------------------------------------------------------------------------------------------------------ faults
def first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit(folder, **changes)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "other family": (config(model_type="gpt2"), "model_type is 'gpt2'; only llama, .* can be run"),
    "layers": (config(num_hidden_layers=5), "5 layers, but the file has tensors of 2"),
    "theta twice": (config(rope_theta=5.0), "rope_theta is both 5.0 and 10000.0"),
    "rope kind": (config(rope_parameters={"rope_type": "spiral"}), "rope_type is 'spiral', expected one of default"),
    "two layouts": (lambda d: shutil.copy(first(d), d / WEIGHTS), "has both .*index.json and model.safetensors; remove"),
    "int8": (lambda d: change_state(d, lambda s: s.update({n: t.to(torch.int8) for n, t in s.items()})),
             r"is I8 \(.*\), expected one of F32, BF16, F16; get the weights in BF16"),
    "unknown tensor": (lambda d: (change_state(d, lambda s: s.update(extra=torch.ones(1))), (d / INDEX).unlink()),
                       "'extra' is not part of a LLaMA decoder"),
    "template type": (lambda d: edit(d, file="tokenizer_config.json", chat_template=3), "chat_template must be a string"),
}  # fmt: skip


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    write(folder / "one").save_pretrained(folder / "many", max_shard_size="40KB")
    return folder / "many"


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_a_one_line_error(many_files: Path, tmp_path: Path, fault: str) -> None:
    folder = shutil.copytree(many_files, tmp_path / "model")
    damage, says = FAULTS[fault]
    damage(folder)
    with pytest.raises(LlamaError, match=says) as caught:
        check_tensors(open_checkpoint(folder))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("key", huggingface.MUST_BE)
def test_a_key_that_would_change_the_result_is_refused_unless_it_has_no_effect(many_files: Path, key: str) -> None:
    document = json.loads((many_files / "config.json").read_text())
    for value in (None, *huggingface.MUST_BE[key]):
        huggingface.read_config({**document, key: value}, "config.json")
    with pytest.raises(LlamaError, match=f"{key} is 0.5, which no LLaMA has; try transformers"):
        huggingface.read_config({**document, key: 0.5}, "config.json")
