"""params.json and config.json: texts that are not JSON, and keys whose meaning transformers confirms."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

import llama
from llama.checkpoint import open_checkpoint
from llama.errors import LlamaError

from ..scripts import make_tiny
from .conftest import Try

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = ("--raw", "a", "-n", "3", "--device", "cpu", "--dtype", "float32", "--temperature", "0")
DOCUMENT = {"meta": "params.json", "hf": "config.json"}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("originals")
    return {form: make_tiny.make(root / form, "llama-3.1-8b", format=form) for form in DOCUMENT}


@pytest.fixture(params=["meta", "hf"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def document(originals: dict[str, Path], tmp_path: Path, form: str) -> Path:
    """The params.json or config.json of a complete checkpoint."""
    return Path(shutil.copytree(originals[form], tmp_path / form)) / DOCUMENT[form]


def edit(document: Path, **changes: Any) -> None:
    document.write_text(json.dumps({**json.loads(document.read_text()), **changes}))


def logits(folder: Path, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    return llama.load_model(folder, dtype="float32", device="cpu", **options)(tokens)


TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda t: b"",
    "cut": lambda t: t[: len(t) // 2],
    "more": lambda t: t + b"\n}",
    "not UTF-8": lambda t: t.replace(b"{", b'{"a": "\xff", ', 1),
    "a list": lambda t: b"[" + t + b"]",
    "null": lambda t: b"null",
    "NaN": lambda t: t.replace(b"1e-05", b"NaN"),
    "infinity": lambda t: t.replace(b"1e-05", b"1e400"),
    "twice": lambda t: t.replace(b"{", b'{"vocab_size": 9, ', 1),
    "twice inside": lambda t: t.replace(b"{", b'{"mine": {"a": 1, "a": 1}, ', 1),
    "deep": lambda t: t.replace(b"{", b'{"mine": ' + b"[" * 100_000 + b"]" * 100_000 + b", ", 1),
    "digits": lambda t: t.replace(b"1e-05", b"1" + b"0" * 5000),
    "git-lfs": lambda t: b"version https://git-lfs.github.com/spec/v1\n",
    "larger than any": lambda t: t + b" " * 2**22,
}


@pytest.mark.parametrize("name", TEXTS)
def test_anything_but_a_json_object_of_finite_numbers_is_refused(document: Path, attempt: Try, name: str) -> None:
    before = document.read_bytes()
    document.write_bytes(TEXTS[name](before))
    assert document.read_bytes() != before
    attempt("inspect", document.parent).refused(document.name)


@pytest.mark.parametrize(("form", "odd", "meant"), [("meta", "rope_thetta", "rope_theta"),
                                                    ("hf", "rms_norm_esp", "rms_norm_eps")])  # fmt: skip
def test_a_misspelt_key_is_refused_with_a_suggestion(document: Path, odd: str, meant: str) -> None:
    edit(document, **{odd: 1e-3})
    with pytest.raises(LlamaError, match=f"{odd!r}; did you mean {meant!r}"):
        open_checkpoint(document.parent)


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 1e4}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        *(("meta", {"rope_theta": theta}, "rope_theta must be a") for theta in (0, -1, "10000", True)),
        *(("hf", {"rope_parameters": {**ROPE, "rope_theta": t}}, "rope_theta must be a") for t in (0, "1e4", [1])),
        ("meta", {"use_scaled_rope": 1}, "use_scaled_rope must be true or false"),
        ("meta", {"rope_scaling_factor": 0}, "factor.* above 0"),
        ("meta", {"vision_chunk_size": 448}, "vision_chunk_size belongs to a vision model"),
        ("meta", {"ffn_dim_multiplier": -1}, "ffn_dim_multiplier must be"),
        ("meta", {"multiple_of": 0}, "multiple_of must be"),
        ("hf", {"rope_parameters": {**ROPE, "rope_type": "spiral"}}, "'spiral', expected one of default"),
        ("hf", {"rope_parameters": {**ROPE, "factor": 0}}, "'factor'.*above 0.*got 0"),
        ("hf", {"rope_parameters": {**ROPE, "low_freq_factor": 4.0}}, "must be below.*4.0 and 4.0"),
        ("hf", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "contradict each other"),
        ("hf", {"rope_theta": 7.0}, "contradict each other"),
        ("hf", {"rms_norm_eps": 1.5}, "norm_eps must"),
        ("hf", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_value_out_of_range_is_refused(document: Path, changes: dict[str, Any], words: str) -> None:
    if document.name == "config.json":
        use_rope_parameters(document)
    edit(document, **changes)
    with pytest.raises(LlamaError, match=words):
        open_checkpoint(document.parent)


def use_rope_parameters(document: Path) -> dict[str, Any]:
    """Move theta and scaling to rope_parameters, as in transformers 5, and return them."""
    settings = json.loads(document.read_text())
    rope = {**settings.pop("rope_scaling"), "rope_theta": settings.pop("rope_theta")}
    document.write_text(json.dumps({**settings, "rope_parameters": rope}))
    return rope


@pytest.mark.parametrize("form", ["hf"])
def test_rope_scaling_and_rope_parameters_may_agree(document: Path) -> None:
    """The logits equal those with only one of the two."""
    tokens = torch.arange(40)[None]
    expected = logits(document.parent, tokens)
    rope = use_rope_parameters(document)
    assert torch.equal(logits(document.parent, tokens), expected)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    edit(document, rope_scaling=scaling, rope_theta=rope["rope_theta"])
    assert torch.equal(logits(document.parent, tokens), expected)


def test_scaled_rope_equals_that_of_transformers_up_to_position_100_000(originals: dict[str, Path], form: str) -> None:
    """The test also checks that the logits differ without the scaling."""
    positions = torch.tensor([0, 1, 50, 8191, 8192, 9000, 20_000, 65_000, 99_999])
    tokens = torch.arange(300, 300 + len(positions))[None]
    theirs = LlamaForCausalLM.from_pretrained(originals["hf"], dtype=torch.float32).eval()
    expected = theirs(tokens, position_ids=positions[None]).logits
    ours = llama.load_model(originals[form], dtype="float32", device="cpu", rope="real")
    assert float((ours(tokens, positions) - expected).abs().max()) < 5e-3  # transformers computes angles in float32
    plain = llama.load_model(originals[form], dtype="float32", device="cpu", rope_scaling={"rope_type": "default"},
                             max_seq_len=131072)  # fmt: skip
    assert float((plain(tokens, positions) - expected).abs().max()) > 0.05


BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "pad_token_id": None, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes", "runs"),
    [("Llama", {}, True), ("Llama", {"attention_bias": True}, True), ("Llama", {"mlp_bias": True}, True),
     ("Llama", {"hidden_act": "gelu"}, False), ("Gemma", {"hidden_act": "silu"}, False), ("Helium", {}, False)],
    ids=str,
)  # fmt: skip
def test_another_family_is_refused_or_computed_as_in_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any], runs: bool
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**BASE, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        parameter.copy_(0.2 * noise + 1 if "norm" in name else noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(320, (1, 30), generator=torch.Generator().manual_seed(1))
    if runs:
        assert float((logits(tmp_path, tokens) - model(tokens).logits).abs().max()) < 5e-4
        return
    with pytest.raises(LlamaError, match=r"can be run|but a LLaMA has"):
        logits(tmp_path, tokens)


@pytest.mark.parametrize("form", ["hf"])
def test_code_that_a_configuration_names_is_not_run(document: Path, attempt: Try) -> None:
    evil = "import os\nopen(os.environ['CANARY'], 'w').close()\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "evil.py", "__init__.py"):
        (document.parent / name).write_text(evil)
    expected = attempt("generate", *RUN, "-m", document.parent)
    assert expected.survived()
    edit(document, auto_map={"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"},
         trust_remote_code=True, _attn_implementation_internal="evil/evil", _attn_implementation="evil/evil",
         custom_pipelines={"text-generation": {"impl": "evil.Evil"}})  # fmt: skip
    assert attempt("generate", *RUN, "-m", document.parent).stdout == expected.stdout != b""


@pytest.mark.parametrize("form", ["hf"])
def test_stop_ids_are_the_union_of_those_in_both_files(document: Path) -> None:
    own = llama.load_tokenizer(document.parent).stop_ids
    generation = document.with_name("generation_config.json")
    for theirs, ours in itertools.product((5, [5, 6], None, []), (7, [7, 8], None)):
        edit(document, eos_token_id=ours)
        generation.write_text(json.dumps({"eos_token_id": theirs}))
        wanted = {id for ids in (theirs, ours) if ids for id in (ids if isinstance(ids, list) else [ids])}
        assert wanted <= llama.load_tokenizer(document.parent).stop_ids <= wanted | own


@pytest.mark.parametrize("form", ["hf"])
@pytest.mark.parametrize("text", ['{"eos_token_id": 1,', "[]", '{"eos_token_id": [true, -1, 2.0, null]}'])
def test_an_invalid_generation_config_is_refused(document: Path, text: str) -> None:
    document.with_name("generation_config.json").write_text(text)
    with pytest.raises(LlamaError, match=r"generation_config\.json"):
        llama.load(document.parent, device="cpu", dtype="float32")
