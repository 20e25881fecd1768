"""Tokenizers written in other formats have the same ids in this package and in the libraries of these formats."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import llama
from llama.errors import TokenizerError
from llama.tokenizer import Tokenizer, open_tokenizer
from llama.tokenizer.gguf import from_metadata
from llama.tokenizer.huggingface import HuggingFaceTokenizer
from llama.tokenizer.sentencepiece import SentencePieceModelTokenizer
from llama.tokenizer.tiktoken import TiktokenTokenizer
from llama.tokenizer.write import check_equal, gguf_metadata, huggingface_files

from .scripts import make_tiny
from .test_tokenizer import INFILL, TEXTS, train
from .wheels import wheel_member

LLAMA3_FILE = ("llama-models==0.3.0", "llama_models/llama3/tokenizer.model")
MISTRAL_FILE = ("mistral-common==1.13.1", "mistral_common/data/tokenizer.model.v1")
SNIPPETS = [
    " ", "   ", "\t", "\r\n\r\n", "\u3000", "2345678", " word", "bites", " the man", "WE'LL", "e\u0301", "漢字と", "👨‍👩‍👧‍👦",
    "½", "▁", "\u0000", "\ufffd", "<|eot_id|>", "<|", "</s>", "<unk>", "<0x0A>", "[REF]", "the cat", "▁<PRE>", " <PRE>",
    " <unused3>", "[PAD7]", "def f(x):\n    return x", "==",
]  # fmt: skip
# User-defined pieces; a text that is exactly one of them has other ids in a tokenizer.json.
USER_DEFINED = ["[REF]", "the▁cat"]


def texts(count: int, seed: int = 0) -> list[str]:
    """Random strings: one half made of snippets, the other of random code points."""
    dice = random.Random(seed)
    anywhere = [range(0x20, 0x7F), range(0xD800), range(0xE000, 0x110000)]
    out = [*TEXTS]
    for i in range(count):
        size = dice.randint(1, 12)
        points = [chr(dice.choice(dice.choice(anywhere))) for _ in range(size)]
        out.append("".join(dice.choices(SNIPPETS, k=size) if i % 2 else points))
    return [text for text in out if text not in USER_DEFINED]


def as_json(tokenizer: Tokenizer) -> Any:
    text, config = huggingface_files(tokenizer)
    return HuggingFaceTokenizer(text.encode(), "tokenizer.json", json.loads(json.dumps(config)))


def as_gguf(tokenizer: Tokenizer) -> Any:
    return from_metadata(gguf_metadata(tokenizer, tokenizer.n_vocab + 3), "model.gguf")


FORMS: dict[str, Callable[[Tokenizer], Tokenizer]] = {"json": as_json, "gguf": as_gguf}


def same(ours: Tokenizer, other: Tokenizer, strings: Sequence[str]) -> None:
    """Assert that two tokenizers have the same attributes, ids and texts."""
    check_equal(ours, other)
    for name in ("control", "bos_id", "eos_id", "stop_ids", "add_bos", "strips_leading_space", "infill"):
        assert getattr(other, name) == getattr(ours, name), name
    infill = ours.infill is not None
    for text in strings:
        expected = ours.encode(text)
        assert other.encode(text) == expected, text
        assert other.decode(expected) == ours.decode(expected), text
        assert other.encode_prompt(text) == ours.encode_prompt(text)
        if infill and len(text) < 20:
            assert other.encode_prompt(text, suffix=text[::-1]) == ours.encode_prompt(text, suffix=text[::-1]), text


# --------------------------------------------------------------------------------------------------------- vocabularies
def trained(folder: Path, **options: Any) -> SentencePieceModelTokenizer:
    """A model trained like Llama 2's."""
    return SentencePieceModelTokenizer(train(folder, character_coverage=0.99, **options).read_bytes(), "m.model")


def changed(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], object], **config: Any) -> HuggingFaceTokenizer:
    """The tokenizer as a tokenizer.json that `change` has edited."""
    text, settings = huggingface_files(tokenizer)
    document = json.loads(text)
    change(document)
    return HuggingFaceTokenizer(json.dumps(document).encode(), "tokenizer.json", {**settings, **config})


def added(*tokens: str, **flags: bool) -> Callable[[dict[str, Any]], None]:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    entries = [{"id": 768 + i, "content": token, **off, **flags} for i, token in enumerate(tokens)]
    return lambda document: document["added_tokens"].extend(entries)


def beside(folder: Path, legacy: bool = True) -> Tokenizer:
    """A SentencePiece model of ChatML: its control tokens are in other files."""
    pieces = trained(folder)
    listed = {str(pieces.n_vocab + i): {"content": token, "special": True} for i, token in enumerate(CHATML)}
    settings = {"added_tokens_decoder": listed, "eos_token": CHATML[1], "legacy": legacy}
    return SentencePieceModelTokenizer(pieces.data, "pieces", settings=settings)


MARKS = [*INFILL, "<step>"]
CHATML = ["<|im_start|>", "<|im_end|>"]
TIKTOKEN = TiktokenTokenizer(make_tiny.tiktoken_model(512), "tiny")
SOURCES: dict[str, Callable[[Path], Tokenizer]] = {
    "tiktoken": lambda _: TIKTOKEN,
    "plain added": lambda _: changed(TIKTOKEN, added("[REF]", "é x")),
    "pieces": trained,
    "beside": beside,
    "infill": lambda folder: SentencePieceModelTokenizer(make_tiny.sentencepiece_model(528), "tiny"),
    "marks are control": lambda folder: trained(folder, control_symbols=MARKS, vocab_size=640),
    "user-defined": lambda folder: trained(folder, user_defined_symbols=[*USER_DEFINED, *MARKS], bos_id=-1),
    "no prefix": lambda folder: trained(folder, add_dummy_prefix=False, user_defined_symbols=USER_DEFINED),
}


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return SOURCES[request.param](tmp_path_factory.mktemp("source"))


# ----------------------------------------------------------------------------------------------------------- equal ids
@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_two_conversions_preserve_the_tokenizer(source: Tokenizer, first: str, second: str) -> None:
    same(source, FORMS[second](FORMS[first](source)), texts(60, seed=len(first + second)))


def auto(tokenizer: Tokenizer, folder: Path) -> Any:
    """The tokenizer that transformers loads from a folder with the two files and a config.json."""
    from transformers import AutoTokenizer

    text, config = huggingface_files(tokenizer)
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return AutoTokenizer.from_pretrained(folder)


def test_transformers_has_the_same_ids(source: Tokenizer, tmp_path: Path) -> None:
    theirs = auto(as_gguf(source), tmp_path)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (source.bos_id, source.eos_id)
    for text in texts(60):
        encoded = theirs(text, split_special_tokens=True)
        assert encoded.input_ids == source.encode(text, bos=source.add_bos), text
        if "▁" not in text:
            assert theirs.decode(encoded.input_ids, skip_special_tokens=True) == text
    pair = theirs("a", "b").input_ids
    assert pair == source.encode("a", bos=source.add_bos) + source.encode("b", bos=source.add_bos)
    for name, id in source.control.items():
        assert theirs.convert_tokens_to_ids(name) == theirs(name, add_special_tokens=False).input_ids[-1] == id


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama 3", "mistral", "default"])
def test_real_vocabularies_survive_all_formats(default_gguf: Path, tmp_path: Path, name: str) -> None:
    files = {"llama 3": LLAMA3_FILE, "mistral": MISTRAL_FILE}
    source = open_tokenizer(wheel_member(*files[name])) if name in files else llama.load_tokenizer(default_gguf)
    if name == "llama 3":
        assert len(as_gguf(source).metadata["tokenizer.ggml.merges"]) == 280_147  # as in the published tokenizer.json
    missing = set(getattr(source, "_missing", b""))
    strings = [text for text in texts(1500) if not missing & set(text.encode())]
    assert len(strings) > 1000
    for other in (as_json(source), as_gguf(as_json(source)), as_json(as_gguf(as_json(source)))):
        same(source, other, strings)
    theirs = auto(as_gguf(source), tmp_path)
    for text in strings:
        assert theirs(text, split_special_tokens=True).input_ids == source.encode(text, bos=source.add_bos)


def test_the_format_that_was_read_is_copied() -> None:
    text = "\ufeff" + json.dumps(json.loads(huggingface_files(TIKTOKEN)[0]), indent=3)
    settings = {"pad_token": "<pad>", "padding_side": "left", "legacy": True}
    ours = HuggingFaceTokenizer(text.encode(), "x", {**settings, "chat_template": "x"})
    assert huggingface_files(ours) == (text[1:], settings)
    metadata = {**gguf_metadata(TIKTOKEN, 768), "tokenizer.ggml.padding_token_id": 3, "llama.x": 1}
    expected = {key: value for key, value in metadata.items() if key != "llama.x"}
    assert gguf_metadata(from_metadata(metadata, "x"), 768) == expected


def test_ids_that_end_an_answer_without_a_known_name_are_ggufs_eot_and_eom() -> None:
    def without_names(document: dict[str, Any]) -> None:
        document.update(json.loads(json.dumps(document).replace("eot_id", "enough").replace("eom_id", "wait")))

    ours = changed(TIKTOKEN, without_names)
    ends = [ours.control[f"<|{name}|>"] for name in ("enough", "wait", "image")]
    for count in (0, 2, 3):
        ours.stop_ids |= set(ends[:count])
        if count < 3:
            same(ours, as_gguf(ours), texts(5))
    with pytest.raises(TokenizerError, match=r"its stop_ids .* would become"):
        check_equal(ours, as_gguf(ours))


# ---------------------------------------------------------------------------------- what other formats can't express
def edit(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """A function that changes one value in a document."""

    def change(document: dict[str, Any]) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


def without_a_merge(document: dict[str, Any]) -> None:
    del document["model"]["merges"][40]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("tiktoken", edit("normalizer", value={"type": "NFC"}), "splits text into words in a way that has no name"),
        ("tiktoken", edit("model", "ignore_merges", value=False), None),
        ("tiktoken", added("<tool>", lstrip=True), "the ids of 'a <tool> b<tool>c' would change"),
        ("pieces", edit("pre_tokenizer", value={"type": "Metaspace", "replacement": "▁"}), "handles spaces"),
        ("pieces", edit("model", "byte_fallback", value=False), "the ids of"),
        ("pieces", edit("model", "fuse_unk", value=False), None),
        ("pieces", without_a_merge, "merges of tokenizer.json do not follow"),
    ],
)
def test_a_changed_tokenizer_json_is_an_error_or_has_equal_ids_in_gguf(
    tmp_path: Path, kind: str, change: Any, message: str | None
) -> None:
    ours = changed(SOURCES[kind](tmp_path), change)
    check_equal(ours, as_json(ours))
    if message is None:
        same(ours, as_gguf(ours), texts(50))
        return
    with pytest.raises(TokenizerError, match=message):
        check_equal(ours, as_gguf(ours))


UNLIKE_LLAMA2: list[tuple[Callable[[Path], Tokenizer], str]] = [
    (lambda folder: trained(folder, model_type="unigram", vocab_size=370), "is not BPE"),
    (lambda folder: trained(folder, normalization_rule_name="nmt_nfkc"), "or replaces characters"),
    (lambda folder: trained(folder, remove_extra_whitespaces=True), "the ids of ' ' would change"),
    (lambda folder: beside(folder, legacy=False), "the ids of a text after .* would change"),
]


@pytest.mark.parametrize(("make", "message"), UNLIKE_LLAMA2)
@pytest.mark.parametrize("form", FORMS)
def test_a_sentencepiece_model_unlike_llama2s_is_an_error(tmp_path: Path, make: Any, message: str, form: str) -> None:
    source = make(tmp_path)
    with pytest.raises(TokenizerError, match=message):
        check_equal(source, FORMS[form](source))
    with pytest.raises(TokenizerError, match="but the embedding only 700 rows"):
        gguf_metadata(TIKTOKEN, 700)
