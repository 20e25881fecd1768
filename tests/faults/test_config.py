"""Group B: params.json and config.json: damaged, misspelt, and of other models."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

import llama
from llama.checkpoint import open_checkpoint
from llama.errors import LlamaError
from llama.weights import check_tensors

from ..scripts import make_tiny
from .conftest import Try

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = ("--raw", "a", "-n", "3", "--device", "cpu", "--dtype", "float32", "--temperature", "0")
DOCUMENT = {"meta": "params.json", "hf": "config.json"}
DIM = {"meta": "dim", "hf": "hidden_size"}


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


# ---------------------------------------------------------------------------------------------------------- the text
TEXTS: dict[str, tuple[Callable[[bytes], bytes], tuple[str, ...], str]] = {
    "empty": (lambda t: b"", ("is empty",), "B01"),
    "spaces": (lambda t: b" \n", ("is empty",), "B01"),
    "cut": (lambda t: t[: len(t) // 2], ("is not valid JSON",), "B01"),
    "more": (lambda t: t + b"\n}", ("is not valid JSON",), "B01"),
    "byte order mark": (lambda t: b"\xef\xbb\xbf" + t, ("begins with a byte order mark", "save it without"), "B01"),
    "UTF-16": (lambda t: t.decode().encode("utf-16"), ("byte 0 is not UTF-8",), "B01"),
    "a list": (lambda t: b"[" + t + b"]", ("expected an object {...}, got a list",), "B01"),
    "null": (lambda t: b"null", ("expected an object {...}, got null",), "B01"),
    "NaN": (lambda t: t.replace(b"1e-05", b"NaN"), ("NaN is not a JSON number",), "B02"),
    "Infinity": (lambda t: t.replace(b"1e-05", b"-Infinity"), ("-Infinity is not a JSON number",), "B02"),
    "too large": (lambda t: t.replace(b"1e-05", b"1e400"), ("the number 1e400 is too large",), "B02"),
    "too large, unread": (lambda t: t.replace(b"{", b'{"mine": 1e999, ', 1), ("the number 1e999",), "B02"),
    "twice": (lambda t: t.replace(b"{", b'{"vocab_size": 9, ', 1), ("'vocab_size' occurs twice",), "B02"),
    "twice inside": (lambda t: t.replace(b"{", b'{"mine": {"a": 1, "a": 1}, ', 1), ("'a' occurs twice",), "B02"),
    "deep": (
        lambda t: t.replace(b"{", b'{"mine": ' + b"[" * 100_000 + b"]" * 100_000 + b", ", 1),
        ("too deep",),
        "B02",
    ),
    "digits": (lambda t: t.replace(b"1e-05", b"1" + b"0" * 5000), ("thousands of digits",), "B02"),
}


B01, B02 = pytest.mark.row("B01"), pytest.mark.row("B02")
FIRST = ("empty", "cut", "byte order mark", "NaN")  # enough for config.json, since both documents have the same reader


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param(
            form,
            name,
            marks=[B01 if row == "B01" else B02, *([pytest.mark.slow] * (form == "hf" and name not in FIRST))],
        )
        for form in DOCUMENT
        for name, (_, _, row) in TEXTS.items()
    ],
)
def test_anything_but_a_json_object_is_refused(document: Path, attempt: Try, name: str) -> None:
    """For B02, Python's own reader accepts silently what is refused here."""
    change, words, row = TEXTS[name]
    before = document.read_bytes()
    document.write_bytes(change(before))
    assert document.read_bytes() != before
    if row == "B02" and name not in ("deep", "digits"):
        assert isinstance(json.loads(document.read_text()), dict)
    error = attempt("generate", *RUN, "-m", document.parent).refused(document.name, *words)
    assert name not in ("cut", "more") or re.search(
        rf"{document.name} is not valid JSON: .* \((line \d+, )?column \d+\); ", error
    )
    assert "Exceeds" not in error
    assert "Unexpected" not in error


# ------------------------------------------------------------------------------------------------ values, one by one
SIZES = {"meta": ("dim", "n_layers", "n_heads", "n_kv_heads"),
         "hf": ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "intermediate_size")}  # fmt: skip
WRONG = {'"4096"': "'4096' (a string)", "4096.0": "4096.0 (a float)", "true": "true", "[4096]": "[4096] (a list)",
         "{}": "{} (an object)"}  # fmt: skip


@pytest.mark.row("B03")
@pytest.mark.parametrize("value", WRONG)
def test_a_size_of_another_type_is_refused(document: Path, form: str, value: str) -> None:
    for key in SIZES[form]:
        before = document.read_text()
        edit(document, **{key: json.loads(value)})
        with pytest.raises(LlamaError) as caught:
            open_checkpoint(document.parent)
        assert f"{key} must be an integer, got {WRONG[value]}" in str(caught.value)
        assert document.name in str(caught.value)
        document.write_text(before)


@pytest.mark.row("B03")
def test_a_missing_size_stops_the_run(document: Path, form: str, attempt: Try) -> None:
    edit(document, **{DIM[form]: None})
    attempt("generate", *RUN, "-m", document.parent).refused(document.name, f"the key {DIM[form]} is missing")


@pytest.mark.row("B04")
@pytest.mark.parametrize(
    "value",
    [0, -1, 2**40, 10**400, *(pytest.param(n, marks=pytest.mark.slow) for n in (2**31 + 1, 2**63, 2**64 - 1))],
    ids=lambda value: str(value)[:25],
)
def test_a_size_out_of_range_allocates_nothing(document: Path, form: str, attempt: Try, value: int) -> None:
    keys = SIZES[form] if value == 2**40 else [SIZES[form][value % 4]]
    for key in keys:
        before = document.read_text()
        edit(document, **{key: value})
        attempt("generate", *RUN, "-m", document.parent).refused(document.parent.name, word_for(key))
        document.write_text(before)


def word_for(key: str) -> str:
    """A word that occurs in all messages about a key."""
    words = {"hidden_size": "dim", "dim": "dim", "num_hidden_layers": "layers", "n_layers": "layers"}
    return {**words, "intermediate_size": "hidden_dim"}.get(key, "heads")


@pytest.mark.row("B04")
def test_the_vocabulary_size_of_llama_2_comes_from_the_weights(tmp_path: Path) -> None:
    folder = make_tiny.make(tmp_path / "meta", "llama-2-7b")
    assert json.loads((folder / "params.json").read_text())["vocab_size"] == -1
    assert open_checkpoint(folder).config.vocab_size == 512


@pytest.mark.row("B05")
@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        ("meta", {"n_heads": 7}, ("dim must be a multiple of n_heads", "64 and 7")),
        ("hf", {"num_attention_heads": 7, "head_dim": None}, ("hidden_size 64", "num_attention_heads 7")),
        ("meta", {"n_kv_heads": 3}, ("3 key/value heads", "have 2")),
        ("hf", {"num_key_value_heads": 3}, ("multiple of n_kv_heads", "4 and 3")),
        ("hf", {"head_dim": 15}, ("head_dim must be even", "15")),
        ("meta", {"n_heads": 64, "n_kv_heads": 32}, ("head_dim must be even", "1")),
    ],
)
def test_both_numbers_of_a_contradiction_are_reported(
    document: Path, attempt: Try, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    edit(document, **changes)
    attempt("generate", *RUN, "-m", document.parent).refused(document.parent.name, *words)


VALUES = ('"4096"', "4096.0", "true", "null", "[4096]", "{}", "0", "-1", str(2**31), str(2**40), str(2**63),
          str(2**64 - 1), "NaN", "1e400", "1" + "0" * 5000)  # fmt: skip


def misspelt(key: str) -> Iterator[str]:
    yield key[0] + key  # a letter twice
    yield key[:-1]  # one forgotten
    yield key[: len(key) // 2] + key[len(key) // 2 + 1] + key[len(key) // 2] + key[len(key) // 2 + 2 :]  # two swapped


def mutations(text: str) -> Iterator[tuple[str, str]]:
    """The object with each value replaced, and each key removed, duplicated or misspelt."""
    pairs = list(json.loads(text).items())

    def written(entries: list[tuple[str, str]]) -> str:
        return "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in entries) + "}"

    plain = [(key, json.dumps(value)) for key, value in pairs]
    for i, (key, value) in enumerate(plain):
        for new in VALUES:
            yield f"{key}: {new[:20]}", written([*plain[:i], (key, new), *plain[i + 1 :]])
        yield f"without {key}", written(plain[:i] + plain[i + 1 :])
        yield f"{key} twice", written([*plain, (key, value)])
        for odd in misspelt(key):
            yield f"{odd} for {key}", written([*plain[:i], (odd, value), *plain[i + 1 :]])


def survive(document: Path, attempt: Try, every: int) -> tuple[int, int]:
    tried = ran = 0
    found = mutations(document.read_text())
    for what, text in itertools.islice(found, random.Random(every).randrange(every), None, every):
        document.write_text(text)
        outcome = attempt("generate", *RUN, "-m", document.parent)
        try:
            ran += outcome.survived()
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from None
        assert not any(word in outcome.error for word in ("None", "True", "False", "Exceeds")), outcome.error
        tried += 1
    return tried, ran


@pytest.mark.row("B03")
def test_any_other_value_is_refused_or_harmless(document: Path, attempt: Try) -> None:
    tried, ran = survive(document, attempt, 39)
    assert tried >= 5
    assert ran < tried


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.row("B03")
def test_any_other_value_is_refused_or_harmless_at_length(document: Path, attempt: Try) -> None:
    tried, ran = survive(document, attempt, 1)
    assert tried >= 200
    assert ran < tried


# ------------------------------------------------------------------------------------------------- keys and meanings
@pytest.mark.row("B06")
def test_a_misspelt_key_is_never_ignored_silently(document: Path, form: str) -> None:
    """Removing an optional key changes what is computed, so a misspelt key must be an error or a warning."""
    text, tried = document.read_text(), 0
    for key, value in json.loads(text).items():
        if key.startswith("_") or key in ("architectures", "transformers_version"):
            continue
        rest = {k: v for k, v in json.loads(text).items() if k != key}
        for odd in misspelt(key):
            document.write_text(json.dumps({**rest, odd: value}))
            tried += 1
            try:
                checkpoint = open_checkpoint(document.parent)
                check_tensors(checkpoint)
            except LlamaError:
                continue
            assert any(odd in warning for warning in checkpoint.warnings), odd
    assert tried > 20


@pytest.mark.row("B06")
@pytest.mark.parametrize(("form", "odd", "meant"), [("meta", "rope_thetta", "rope_theta"),
                                                    ("hf", "rms_norm_esp", "rms_norm_eps")])  # fmt: skip
def test_a_misspelt_key_is_refused_with_a_suggestion(document: Path, attempt: Try, odd: str, meant: str) -> None:
    edit(document, **{odd: 1e-3})
    attempt("generate", *RUN, "-m", document.parent).refused(document.name, repr(odd), f"did you mean {meant!r}?")


@pytest.mark.row("B06")
@pytest.mark.parametrize("form", ["meta"])
def test_a_vision_model_is_refused(document: Path, attempt: Try) -> None:
    edit(document, vision_chunk_size=448)
    attempt("generate", *RUN, "-m", document.parent).refused("vision_chunk_size", "vision model", "text model")


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}  # fmt: skip
ROPES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    *(("meta", {"rope_theta": theta}, ("rope_theta must be a",)) for theta in (0, -1, -1e9, "10000", True)),
    *(("hf", {"rope_parameters": {**ROPE, "rope_theta": t}}, ("rope_theta must be a",)) for t in (0, -1, "1e4", [1])),
    ("meta", {"use_scaled_rope": 1}, ("use_scaled_rope must be true or false", "1 (an integer)")),
    ("meta", {"rope_scaling_factor": 0}, ("factor", "above 0")),
    (
        "hf",
        {"rope_parameters": {**ROPE, "rope_theta": 1e4, "rope_type": "spiral"}},
        ("'spiral'", "expected one of default"),
    ),
    ("hf", {"rope_parameters": {**ROPE, "rope_theta": 1e4, "factor": 0}}, ("'factor'", "above 0", "got 0")),
    ("hf", {"rope_parameters": {**ROPE, "rope_theta": 1e4, "low_freq_factor": 4.0}}, ("must be below", "4.0 and 4.0")),
    ("hf", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ("rope_scaling and rope_parameters", "remove one")),
    ("hf", {"rope_theta": 7.0}, ("rope_theta is 7.0", "500000.0 in rope_parameters", "remove one")),
]


def use_rope_parameters(document: Path) -> dict[str, Any]:
    """Move theta and scaling to rope_parameters, as in transformers 5, and return them."""
    settings = json.loads(document.read_text())
    rope = {**settings.pop("rope_scaling"), "rope_theta": settings.pop("rope_theta")}
    document.write_text(json.dumps({**settings, "rope_parameters": rope}))
    return rope


@pytest.mark.row("B07")
@pytest.mark.parametrize(("form", "changes", "words"), ROPES, ids=lambda value: str(value)[:60])
def test_an_invalid_rope_is_refused(
    document: Path, attempt: Try, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    if document.name == "config.json":
        use_rope_parameters(document)
    edit(document, **changes)
    attempt("generate", *RUN, "-m", document.parent).refused(document.parent.name, *words)


@pytest.mark.row("B07")
@pytest.mark.parametrize("form", ["hf"])
def test_rope_scaling_and_rope_parameters_may_agree(document: Path) -> None:
    """The logits equal those with only one of the two."""
    tokens = torch.arange(40)[None]
    expected = llama.load_model(document.parent, dtype="float32", device="cpu")(tokens)
    rope = use_rope_parameters(document)
    assert torch.equal(llama.load_model(document.parent, dtype="float32", device="cpu")(tokens), expected)
    theta = rope["rope_theta"]
    edit(document, rope_scaling={key: value for key, value in rope.items() if key != "rope_theta"}, rope_theta=theta)
    assert "rope_parameters" in json.loads(document.read_text())
    assert torch.equal(llama.load_model(document.parent, dtype="float32", device="cpu")(tokens), expected)


@pytest.mark.row("B08")
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


# ------------------------------------------------------------------------------------------------------ other models
BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "pad_token_id": None, "head_dim": 16,
}  # fmt: skip
# (family in transformers, changes of its configuration)
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"attention_bias": True}),
    ("Llama", {"mlp_bias": True}),
    ("Llama", {"hidden_act": "gelu"}),
    ("Mistral", {"sliding_window": 8}),
    ("Mistral", {"sliding_window": None}),
    ("Qwen2", {}),
    ("Gemma", {"hidden_activation": "silu", "hidden_act": "silu"}),
    ("Helium", {}),
]


@pytest.mark.row("B09")
@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=str)
def test_another_family_is_refused_or_computed_as_in_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**BASE, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        parameter.copy_(0.2 * noise + 1 if "norm" in name else noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(320, (1, 30), generator=torch.Generator().manual_seed(1))
    try:
        ours = llama.load_model(tmp_path, dtype="float32", device="cpu")
    except LlamaError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert family in ("Gemma", "Helium") or changes.get("hidden_act"), refused
        assert "can be run" in refused or "but a LLaMA has" in refused
        return
    tokens = tokens[:, : ours.max_seq_len]
    assert float((ours(tokens) - model(tokens).logits).abs().max()) < 5e-4


@pytest.mark.row("B09")
@pytest.mark.parametrize("form", ["hf"])
@pytest.mark.parametrize("changes", [{"model_type": "qwen3"}, {"model_type": None, "architectures": None},
                                     {"sliding_window": 4096}, {"layer_types": ["sliding_attention"] * 2}],
                         ids=str)  # fmt: skip
def test_the_key_of_another_architecture_is_named(document: Path, attempt: Try, changes: dict[str, Any]) -> None:
    edit(document, **changes)
    attempt("generate", *RUN, "-m", document.parent).refused("config.json", next(iter(changes)))


@pytest.mark.row("B10")
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
    done = attempt("generate", *RUN, "-m", document.parent)
    assert done.survived()
    assert done.stdout == expected.stdout


@pytest.mark.row("B11")
@pytest.mark.parametrize("form", ["hf"])
@pytest.mark.parametrize(
    "method",
    ["hqq", None, *(pytest.param(m, marks=pytest.mark.slow) for m in ("aqlm", "exl2", "new", 5))],
)
def test_an_unsupported_quantization_is_named(document: Path, attempt: Try, method: Any) -> None:
    edit(document, quantization_config={"quant_method": method, "bits": 4})
    words = "quantized" if method in (None, "new", 5) else f"quantized ({method!r}"
    attempt("generate", *RUN, "-m", document.parent).refused("config.json", words, "get the model in BF16")


@pytest.mark.row("B12")
def test_a_context_beyond_the_trained_one_is_a_warning(document: Path, attempt: Try) -> None:
    for length, warned in ((131072, False), (131073, True), (200_000, True)):
        done = attempt("generate", *RUN, "--max-seq-len", length, "-m", document.parent)
        assert done.survived()
        warnings = [line for line in done.error.splitlines() if "warning" in line and "trained for" in line]
        assert len(warnings) == warned
        assert all(str(length) in line and "131072" in line for line in warnings)


# ------------------------------------------------------------------------------------------------ generation settings
@pytest.mark.row("B13")
@pytest.mark.parametrize("form", ["hf"])
def test_stop_ids_are_the_union_of_those_in_both_files(document: Path) -> None:
    own = llama.load_tokenizer(document.parent).stop_ids
    generation = document.with_name("generation_config.json")
    for theirs, ours in itertools.product((5, [5, 6], None, [], "absent"), (7, [7, 8], None, "absent")):
        rest = {key: value for key, value in json.loads(document.read_text()).items() if key != "eos_token_id"}
        document.write_text(json.dumps(rest if ours == "absent" else {**rest, "eos_token_id": ours}))
        generation.write_text(json.dumps({} if theirs == "absent" else {"eos_token_id": theirs}))
        lists = [ids if isinstance(ids, list) else [ids] for ids in (theirs, ours) if ids not in (None, "absent")]
        wanted = {id for ids in lists for id in ids}
        assert llama.load_tokenizer(document.parent).stop_ids >= wanted
        assert llama.load_tokenizer(document.parent).stop_ids <= wanted | own


@pytest.mark.row("B13")
@pytest.mark.parametrize("form", ["hf"])
@pytest.mark.parametrize("text", ['{"eos_token_id": 1,', "", "[]", "\ufeff{}", '{"eos_token_id": "2"}',
                                  '{"eos_token_id": [true, -1, 2.0, null]}'])  # fmt: skip
def test_an_invalid_generation_config_is_a_warning(document: Path, attempt: Try, text: str) -> None:
    document.with_name("generation_config.json").write_text(text)
    done = attempt("generate", *RUN, "-m", document.parent)
    assert done.survived()
    assert any("warning: " in line and "generation_config.json" in line for line in done.error.splitlines()), done.error


@pytest.mark.row("B04")
@pytest.mark.parametrize(
    ("format", "file", "key", "value"),
    [
        ("meta", "params.json", "ffn_dim_multiplier", 1e308),
        ("meta", "params.json", "ffn_dim_multiplier", -1),
        ("meta", "params.json", "norm_eps", 2**64),
        ("hf", "config.json", "rms_norm_eps", 2**64),
        ("hf", "config.json", "rms_norm_eps", 1.5),
    ],
)
def test_a_number_out_of_range_is_refused(
    tmp_path: Path, attempt: Try, format: str, file: str, key: str, value: float
) -> None:
    make_tiny.make(tmp_path / "m", "llama-3-8b", format=format)
    document = json.loads((tmp_path / "m" / file).read_text())
    (tmp_path / "m" / file).write_text(json.dumps({**document, key: value}))
    for command in (("inspect",), ("generate", "--raw", "a", "-n", "1", "--device", "cpu", "-m")):
        attempt(*command, tmp_path / "m").refused(key.removeprefix("rms_"), "must")
