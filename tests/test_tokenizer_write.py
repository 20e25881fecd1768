"""Tokenizers written in other formats have the same ids in this package and in the libraries of these formats."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import tiktoken

import llama
from llama.config import ModelConfig
from llama.errors import TokenizerError
from llama.tokenizer import Tokenizer, open_tokenizer
from llama.tokenizer.gguf import BYTE_OF, from_metadata
from llama.tokenizer.huggingface import HuggingFaceTokenizer
from llama.tokenizer.sentencepiece import SentencePieceModelTokenizer
from llama.tokenizer.tiktoken import LLAMA3_WORDS, TiktokenTokenizer, recognizes
from llama.tokenizer.write import gguf_metadata, tokenizer_config, tokenizer_json

from . import tiny
from .scripts import make_tiny
from .test_tokenizer import CORPUS, TEXTS
from .wheels import wheel_member

LLAMA3_FILE = ("llama-models==0.3.0", "llama_models/llama3/tokenizer.model")
MISTRAL_FILE = ("mistral-common==1.13.1", "mistral_common/data/tokenizer.model.v1")
INFILL = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]

SNIPPETS = [
    " ", "  ", "   ", "\t", "\n", "\r\n\r\n", "\u3000", "\u00a0", "1", "2345678", "word", " word", "bites", " the man",
    "WE'LL", "it's", "é", "e\u0301", "漢字と", "한국어", "שלום", "العربية", "👨‍👩‍👧‍👦", "😀", "½", "ﬀ", "▁", "\u0000",
    "\u0004", "\ufffd", "\U000f0000", "<|eot_id|>", "<|begin_of_text|>", "<|im_end|>", "<|", "</s>", "<s>", "<unk>",
    "<0x0A>", "[INST]", "[REF]", "the cat", "▁<PRE>", " <PRE>", "<SUF>", " <MID>", "<unused3>", " <unused3>",
    "[PAD7]", "def f(x):\n    return x", "...", "==",
]  # fmt: skip


# User-defined pieces; a text that is exactly one of them has other ids in a tokenizer.json.
USER_DEFINED = ["[REF]", "the▁cat"]


def texts(count: int, seed: int = 0) -> list[str]:
    """Random strings: one half made of snippets, the other of random code points."""
    dice = random.Random(seed)
    anywhere = [range(0x20, 0x7F), range(0xD800), range(0xE000, 0x110000)]
    out = [*TEXTS]
    for i in range(count):
        if i % 2:
            out.append("".join(dice.choices(SNIPPETS, k=dice.randint(1, 12))))
        else:
            out.append("".join(chr(dice.choice(dice.choice(anywhere))) for _ in range(dice.randint(1, 12))))
    return [text for text in out if text not in USER_DEFINED]


# -------------------------------------------------------------------------------------------- writing and reading back
def as_json(tokenizer: Tokenizer) -> Tokenizer:
    config = json.loads(json.dumps(tokenizer_config(tokenizer)))
    return HuggingFaceTokenizer(tokenizer_json(tokenizer).encode(), "tokenizer.json", config)


def as_gguf(tokenizer: Tokenizer) -> Tokenizer:
    return from_metadata(gguf_metadata(tokenizer, tokenizer.n_vocab + 3), "model.gguf")


FORMS: dict[str, Callable[[Tokenizer], Tokenizer]] = {"json": as_json, "gguf": as_gguf}


def same(ours: Tokenizer, other: Tokenizer, strings: Sequence[str]) -> None:
    """Assert that two tokenizers have the same attributes, ids and texts."""
    for name in ("control", "bos_id", "eos_id", "stop_ids", "add_bos", "strips_leading_space"):
        assert getattr(other, name) == getattr(ours, name), name
    ids = [id for id in range(ours.n_vocab) if ours.token_bytes(id) != " \u2047 ".encode()]
    assert [other.token_bytes(id) for id in ids] == [ours.token_bytes(id) for id in ids]
    assert set(range(ours.n_vocab, other.n_vocab)) <= set(range(ours.n_vocab, ours.n_vocab + 6))  # padding
    infill = set(INFILL) <= ours.control.keys() and ours.bos_id is not None
    for text in strings:
        expected = ours.encode(text)
        assert other.encode(text) == expected, text
        assert other.decode(expected) == ours.decode(expected), text
        assert other.encode_prompt(text) == ours.encode_prompt(text)
        if infill and len(text) < 20:
            assert other.encode_infill(text, text[::-1]) == ours.encode_infill(text, text[::-1]), text


# --------------------------------------------------------------------------------------------------------- vocabularies
def trained(folder: Path, **options: Any) -> SentencePieceModelTokenizer:
    """A model trained like Llama 2's."""
    defaults = {
        "model_type": "bpe", "vocab_size": 620, "byte_fallback": True, "split_digits": True, "minloglevel": 2,
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False, "character_coverage": 0.99,
    }  # fmt: skip
    lines = [line for text in CORPUS for line in text.split("\n")]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "m"), **{**defaults, **options}
    )
    return SentencePieceModelTokenizer((folder / "m.model").read_bytes(), "m.model")


@pytest.fixture(scope="module")
def tiktoken_512() -> TiktokenTokenizer:
    return TiktokenTokenizer(make_tiny.tiktoken_model(512), "tiny")


@pytest.fixture(
    scope="module", params=["tiktoken", "pieces", "infill", "marks are control", "user-defined", "no prefix"]
)
def source(request: pytest.FixtureRequest, tiktoken_512: Tokenizer, tmp_path_factory: Any) -> Tokenizer:
    """Small vocabularies in Meta's file formats."""
    marks = [*INFILL, "<step>"]
    made: dict[str, Callable[[Path], Tokenizer]] = {
        "tiktoken": lambda folder: tiktoken_512,
        "pieces": trained,
        "infill": lambda folder: SentencePieceModelTokenizer(make_tiny.sentencepiece_model(528), "tiny"),
        "marks are control": lambda folder: trained(folder, control_symbols=marks, vocab_size=640),
        "user-defined": lambda folder: trained(folder, user_defined_symbols=["[REF]", "the▁cat", *marks], bos_id=-1),
        "no prefix": lambda folder: trained(folder, add_dummy_prefix=False, user_defined_symbols=["[REF]", "the▁cat"]),
    }
    return made[request.param](tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def llama3() -> Tokenizer:
    return open_tokenizer(wheel_member(*LLAMA3_FILE))


@pytest.fixture(scope="module")
def smollm(default_gguf: Path) -> Tokenizer:
    return llama.load_tokenizer(default_gguf)


# ------------------------------------------------------------------------------------------------ read by this package
@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_two_conversions_preserve_the_tokenizer(source: Tokenizer, first: str, second: str) -> None:
    if source.bos_id is None and "model" not in (first, second):
        same(source, as_model(FORMS[second](FORMS[first](source))), texts(20))
    same(source, FORMS[second](FORMS[first](source)), texts(200, seed=len(first + second)))


@pytest.mark.slow
def test_a_real_vocabulary_of_32000_pieces_survives_all_formats(tmp_path: Path) -> None:
    source = open_tokenizer(wheel_member(*MISTRAL_FILE))
    for other in (as_json(source), as_gguf(as_json(source)), as_model(as_gguf(source)), as_model(as_json(source))):
        same(source, other, texts(3000))
    theirs = auto(as_gguf(source), tmp_path)
    for text in texts(3000, seed=1):
        assert theirs(text, split_special_tokens=True).input_ids == source.encode(text, bos=True)


# -------------------------------------------------------------------------------------------- read by other libraries
def auto(tokenizer: Tokenizer, folder: Path, **config: Any) -> Any:
    """The tokenizer that transformers loads from a folder with the two files, and a config.json if given."""
    from transformers import AutoTokenizer

    (folder / "tokenizer.json").write_text(tokenizer_json(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(tokenizer)))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}], ids=["tokenizer alone", "with a config.json"])
def test_transformers_has_the_same_ids(source: Tokenizer, config: Any, tmp_path: Path) -> None:
    theirs = auto(source, tmp_path, **config)
    assert theirs.bos_token_id == source.bos_id
    assert theirs.eos_token_id == source.eos_id
    for text in texts(200):
        encoded = theirs(text, split_special_tokens=True)
        assert encoded.input_ids == source.encode(text, bos=source.add_bos), text
        assert theirs(text, split_special_tokens=True, add_special_tokens=False).input_ids == source.encode(text)
        if "▁" not in text:
            assert theirs.decode(encoded.input_ids, skip_special_tokens=True) == text
    assert "token_type_ids" not in encoded
    for name, id in source.control.items():
        assert theirs.convert_tokens_to_ids(name) == id
        assert (
            theirs(name, add_special_tokens=False).input_ids[-1] == id
        )  # transformers matches control strings in a text


@pytest.mark.parametrize("add_bos", [True, False])
def test_transformers_adds_bos_where_we_do(tiktoken_512: Tokenizer, add_bos: bool, tmp_path: Path) -> None:
    metadata = {**gguf_metadata(tiktoken_512, 768), "tokenizer.ggml.add_bos_token": add_bos}
    ours = from_metadata(metadata, "x")
    assert auto(ours, tmp_path)("a").input_ids == ours.encode_prompt("a")
    assert as_json(ours).add_bos is as_gguf(as_json(ours)).add_bos is add_bos


def test_the_gguf_package_reads_the_metadata(source: Tokenizer, tmp_path: Path) -> None:
    rows = source.n_vocab + 2
    config = ModelConfig(64, 1, 4, 4, 16, 96, rows)
    metadata = {"tokenizer.chat_template": None, "tokenizer.ggml.merges": None, **gguf_metadata(source, rows)}
    if source.bos_id is None:
        metadata["tokenizer.ggml.bos_token_id"] = None
    path = tiny.write_gguf(tmp_path / "x.gguf", config, metadata=metadata)
    fields = gguf.GGUFReader(path).fields
    for key, value in metadata.items():
        if value is not None:
            assert np.array_equal(fields[key].contents(), value), key
    read = llama.load_tokenizer(path)
    same(source, read, texts(50))
    assert gguf_metadata(read, rows) == {key: value for key, value in metadata.items() if value is not None}


# ----------------------------------------------------------------------------------------- differences between formats
def changed(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], None], **config: Any) -> HuggingFaceTokenizer:
    """The tokenizer as a tokenizer.json that `change` has edited."""
    document = json.loads(tokenizer_json(tokenizer))
    change(document)
    return HuggingFaceTokenizer(
        json.dumps(document).encode(), "tokenizer.json", {**tokenizer_config(tokenizer), **config}
    )


def renamed(document: dict[str, Any]) -> None:
    """Hugging Face names some of Llama 3's reserved ids differently from Meta."""
    for token in document["added_tokens"]:
        token["content"] = token["content"].replace("step_id", "reserved_special_token_900")


def test_plain_added_tokens_and_gaps_between_ids_survive(tiktoken_512: Tokenizer, tmp_path: Path) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    extra = [{"id": 770, "content": "[REF]", **flags}, {"id": 771, "content": "é x", **flags}]
    ours = changed(tiktoken_512, lambda document: document["added_tokens"].extend(extra))
    strings = [*texts(300), "a[REF] é x", "[REF][REF]"]
    assert ours.encode("a[REF]")[-1] == 770
    file = as_gguf(ours)
    assert file.metadata["tokenizer.ggml.tokens"][768:772] == ["[PAD768]", "[PAD769]", "[REF]", "é x"]
    for other in (file, as_json(file), as_gguf(as_json(file))):
        assert other.control == ours.control
        assert [other.encode(text) for text in strings] == [ours.encode(text) for text in strings]
    theirs = auto(file, tmp_path)
    assert [theirs(text, split_special_tokens=True).input_ids[1:] for text in strings] == [*map(ours.encode, strings)]


def test_a_text_that_is_one_user_defined_piece_gets_no_prefix_in_tokenizer_json(tmp_path: Path) -> None:
    ours = trained(tmp_path, user_defined_symbols=["[REF]"])
    assert as_json(ours).encode("[REF]") == ours.encode("[REF]")[1:]
    for text in (" [REF]", "[REF] ", "[REF][REF]", "a[REF]"):
        assert as_json(ours).encode(text) == ours.encode(text)


def test_interleaved_merges_get_one_score_if_the_ids_stay_the_same(tmp_path: Path) -> None:
    """An older converter sorts pairs whose unions have the same score by the ids of their parts."""
    source = trained(tmp_path)
    merges = json.loads(tokenizer_json(source))["model"]["merges"]
    by_union: dict[str, list[Any]] = {}
    for pair in merges:
        by_union.setdefault("".join(pair), []).append(pair)
    double = [pairs for pairs in by_union.values() if len(pairs) > 1 and all(pair[0][0] == "▁" for pair in pairs)][:2]
    rest = [pair for pair in merges if pair not in double[0] + double[1]]

    def mix(document: dict[str, Any]) -> None:
        document["model"]["merges"] = [*rest, double[0][0], double[1][0], double[0][1], double[1][1]]
        document["model"]["merges"] += double[0][2:] + double[1][2:]

    ours = changed(source, mix)
    scores = dict(
        zip(*(gguf_metadata(ours, 620)[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores")), strict=True)
    )
    assert scores["".join(double[0][0])] == scores["".join(double[1][0])] < scores["".join(rest[-1])]
    file = as_gguf(ours)
    assert [file.encode(text) for text in texts(300)] == [ours.encode(text) for text in texts(300)]


# ---------------------------------------------------------------------------------- what other formats can't express
def edit(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """A function that changes one value in a document."""

    def change(document: dict[str, Any]) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


def no_merge(document: dict[str, Any]) -> None:
    del document["model"]["merges"][40]


def interleaved(document: dict[str, Any]) -> None:
    merges = document["model"]["merges"]
    i = next(i for i in range(len(merges)) if "".join(merges[i]) == "".join(merges[i + 1]))
    other = next(pair for pair in merges[i + 2 :] if pair[0] == merges[i][1] or pair[1] == merges[i][0])
    merges.remove(other)
    merges.insert(i + 1, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            edit("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex", value=r"\w+"),
            "splits text into words by Split and Byte",
        ),
        (edit("pre_tokenizer", "pretokenizers", 1, "add_prefix_space", value=True), "no name in GGUF"),
        (edit("normalizer", value={"type": "NFC"}), "with ignore_merges after NFC in a way that has no name"),
        (edit("normalizer", value={"type": "NFKC"}), "normalizes text"),
    ],
)
def test_a_byte_level_tokenizer_json_that_no_format_can_express_is_an_error(
    tiktoken_512: Tokenizer, change: Any, message: str
) -> None:
    ours = changed(tiktoken_512, change)
    assert as_json(ours).encode("a b 12") == ours.encode("a b 12")
    for write in (tokenizer_model, lambda tokenizer: gguf_metadata(tokenizer, tokenizer.n_vocab)):
        with pytest.raises(TokenizerError, match=message):
            write(ours)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            edit("pre_tokenizer", value={"type": "Metaspace", "replacement": "▁"}),
            "replace it with the published tokenizer.json",
        ),
        (edit("normalizer", "normalizers", 0, "prepend", value="▁▁"), "handles spaces"),
        (edit("decoder", "decoders", 3, "content", value="x"), "handles spaces"),
        (no_merge, "never merges"),
        (interleaved, "interleaves the merges"),
    ],
)
def test_a_piece_tokenizer_json_that_no_format_can_express_is_an_error(
    tmp_path: Path, change: Any, message: str
) -> None:
    ours = changed(trained(tmp_path), change)
    for write in (tokenizer_model, lambda tokenizer: gguf_metadata(tokenizer, tokenizer.n_vocab)):
        with pytest.raises(TokenizerError, match=message):
            write(ours)


def test_a_plain_added_token_with_lstrip_is_an_error(tiktoken_512: Tokenizer) -> None:
    token = {"id": 768, "content": "<tool>", "single_word": False, "lstrip": True, "rstrip": False, "special": False}
    ours = changed(tiktoken_512, lambda document: document["added_tokens"].append({**token, "normalized": False}))
    with pytest.raises(TokenizerError, match="matches '<tool>' with lstrip"):
        gguf_metadata(ours, 800)


def test_an_embedding_with_too_few_rows_is_an_error(tiktoken_512: Tokenizer) -> None:
    for tokenizer in (tiktoken_512, as_gguf(tiktoken_512)):
        with pytest.raises(TokenizerError, match="tokens and the embedding 700 rows"):
            gguf_metadata(tokenizer, 700)


def test_a_token_with_two_ids_is_an_error(tiktoken_512: Tokenizer) -> None:
    metadata = copy.deepcopy(gguf_metadata(tiktoken_512, 768))
    metadata["tokenizer.ggml.tokens"][700] = metadata["tokenizer.ggml.tokens"][701]
    with pytest.raises(TokenizerError, match="is the token of more than one id"):
        tokenizer_json(from_metadata(metadata, "x"))


def test_an_unknown_kind_of_tokenizer_is_an_error() -> None:
    class Other(TiktokenTokenizer.__base__):
        kind = "home-made"
        _encode = token_bytes = None

    with pytest.raises(TokenizerError, match="kind 'home-made' can't be written"):
        tokenizer_json(Other())


# ---------------------------------------------------------------------------------------------- no byte is dropped
def test_a_byte_without_a_token_is_an_error(smollm: Tokenizer) -> None:
    assert set(smollm._missing) >= {0x04, 0x06, 0xF1, 0xF2}
    with pytest.raises(
        TokenizerError, match=r"character 3 of the text, '\\x04', has the byte 0x04.* remove the character"
    ):
        smollm.encode("abc\u0004def")
    with pytest.raises(TokenizerError, match=r"character 1 of the text, '\\U00040000', has the byte 0xF1"):
        smollm.encode("é\U00040000")
    assert smollm.decode(smollm.encode("é 漢 😀")) == "é 漢 😀"


def test_a_missing_byte_inside_a_longer_token_is_encoded(tiktoken_512: Tokenizer) -> None:
    metadata = gguf_metadata(tiktoken_512, 768)
    at = next(id for id, token in enumerate(metadata["tokenizer.ggml.tokens"]) if BYTE_OF.get(token) == 4)
    metadata["tokenizer.ggml.tokens"][at] = "\u0004\u0004"
    metadata["tokenizer.ggml.token_type"][at] = 4
    file = from_metadata(metadata, "x")
    for tokenizer in (file, as_json(file)):
        assert tokenizer.encode("\u0004\u0004") == [at]
        assert tokenizer.decode(tokenizer.encode("a\u0004\u0004b")) == "a\u0004\u0004b"
        with pytest.raises(TokenizerError, match="has the byte 0x04"):
            tokenizer.encode("a\u0004\u0004\u0004b")
