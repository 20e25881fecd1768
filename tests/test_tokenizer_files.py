"""Tokenizer files of three kinds, compared with Meta's own class, with the libraries and with each other."""

from __future__ import annotations

import base64
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from llama.errors import TokenizerError, UsageError
from llama.tokenizer import Decoder, Tokenizer, open_tokenizer
from llama.tokenizer.gguf import BYTE_OF, from_metadata
from llama.tokenizer.huggingface import HuggingFaceTokenizer
from llama.tokenizer.sentencepiece import SentencePieceModelTokenizer
from llama.tokenizer.tiktoken import RUN, TiktokenTokenizer, pieces

from .test_tokenizer import CORPUS, LLAMA3_WORDS, TEXTS, any_text, piece_metadata
from .wheels import wheel_member

META = "llama-models==0.3.0"
BOS, EOS, HEADER, END_HEADER, EOM, EOT = 128000, 128001, 128006, 128007, 128008, 128009
INFILL = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]

# A second copy on purpose. The reserved ones are numbered from 2 because the file uses 0 and 1 by name.
CONTROL = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>", "<|image|>", *(f"<|reserved_special_token_{i}|>" for i in range(2, 246)),
]  # fmt: skip

snippets = st.lists(
    st.sampled_from(
        ["👨‍👩‍👧‍👦", "🏳️‍🌈", "漢字とかな", "한국어", "1", "2345678", " ", "   ", "\n", "\r\n\r\n", "\t", "\u3000",
         "it's", "WE'LL", "the", " hello", "é", "e\u0301", "שלום", "العربية", "<|eot_id|>", "<|begin_of_text|>",
         "<|reserved_special_token_99|>", "<|", "|>", "</s>", "<s>", "<unk>", "<0x0A>", "[INST]",
         "def f(x):\n    return", "\u0000", "\u00a0", "ﬀ", "½", "."]
    ),
    max_size=14,
).map("".join)  # fmt: skip
texts = st.one_of(any_text, snippets)
many = settings(max_examples=150)


def same_stream(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """Whether streaming decoding produces the same text as decoding all ids at once."""
    decoder = Decoder(tokenizer)
    return "".join([*(decoder.feed(id) for id in ids), decoder.end()]) == tokenizer.decode(ids)


# ------------------------------------------------------------------------------------------------- Meta's Llama 3 file
@pytest.fixture(scope="session")
def llama3_file() -> Path:
    return wheel_member(META, "llama_models/llama3/tokenizer.model")


@pytest.fixture(scope="session")
def llama3(llama3_file: Path) -> Tokenizer:
    return open_tokenizer(llama3_file)


@pytest.fixture(scope="session")
def meta(llama3_file: Path) -> Any:
    """Meta's own tokenizer class, from the same wheel."""
    root = wheel_member(META, "llama_models/tokenizer_utils.py").parent.parent
    wheel_member(META, "llama_models/llama3/tokenizer.py")
    sys.path.insert(0, str(root))
    try:
        return importlib.import_module("llama_models.llama3.tokenizer").Tokenizer(llama3_file)
    finally:
        sys.path.remove(str(root))


def test_llama3_golden_ids(llama3: Tokenizer) -> None:
    sentence = [2028, 374, 264, 1296, 11914, 13]
    assert llama3.encode("This is a test sentence.", bos=True, eos=True) == [BOS, *sentence, EOS]
    assert llama3.encode("This is a response.") == [2028, 374, 264, 2077, 13]
    assert [llama3.encode(word) for word in ("user", "system", "assistant", "ipython", "\n\n")] == [
        [882], [9125], [78191], [23799, 4690], [271],
    ]  # fmt: skip
    assert llama3.encode("<|eot_id|>") == [27, 91, 68, 354, 851, 91, 29]
    assert llama3.decode([BOS, *sentence, EOS]) == "This is a test sentence."
    assert llama3.encode_prompt("") == [BOS]
    assert llama3.encode_prompt("user") == [BOS, 882]


def test_llama3_control_ids_are_metas(llama3: Tokenizer, meta: Any) -> None:
    assert list(llama3.control) == CONTROL
    assert llama3.control == meta.special_tokens
    assert (llama3.bos_id, llama3.eos_id, llama3.n_vocab) == (meta.bos_id, meta.eos_id, meta.n_words)
    assert llama3.stop_ids == set(meta.stop_tokens) == {EOS, EOM, EOT}
    assert [llama3.control[f"<|{n}|>"] for n in ("start_header_id", "end_header_id")] == [HEADER, END_HEADER]


@given(texts)
@many
def test_llama3_ids_are_metas(llama3: Tokenizer, meta: Any, text: str) -> None:
    ids = llama3.encode(text, bos=True)
    assert ids == meta.encode(text, bos=True, eos=False)
    assert llama3.decode(ids) == text
    assert same_stream(llama3, ids)
    assert not set(ids[1:]) & set(llama3.control.values())


LONG = [
    "a" * 60_000, " " * 60_000, "ab " * 150_000, "x" * 25_000, "x" * 25_001, "x" * 25_000 + " " * 25_001 + "y" * 50_000,
    " " * 25_000 + "z", "\u3000\u2028\x1c\x85" * 7_000, "\u200b" * 26_000, "ab" * 12_499 + " c" + "d" * 25_000,
    "w" * 399_990 + " " * 20 + "v" * 30_000, "\u0000" * 30_000,
]  # fmt: skip


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_long_texts_are_cut_where_meta_cuts_them(meta: Any, text: str) -> None:
    theirs = [
        piece
        for at in range(0, len(text), 400_000)
        for piece in meta._split_whitespaces_or_nonwhitespaces(text[at : at + 400_000], 25_000)
    ]
    assert list(pieces(text)) == theirs


def test_runs_alternate_between_white_space_and_other_characters() -> None:
    everything = "".join(chr(c) for c in range(sys.maxunicode + 1))
    assert all(run[0].isspace() == all(c.isspace() for c in run[0]) for run in RUN.finditer(everything))
    assert all(run[0].isspace() or not any(c.isspace() for c in run[0]) for run in RUN.finditer(everything))


@pytest.mark.parametrize("text", [LONG[5], LONG[10], "漢" * 30_000])
def test_long_texts_have_metas_ids(llama3: Tokenizer, meta: Any, text: str) -> None:
    assert llama3.encode(text) == meta.encode(text, bos=False, eos=False)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 10**6,
        pytest.param(" " * 10**6, marks=pytest.mark.slow),
        pytest.param("\u0000" * 10**6, marks=pytest.mark.slow),
        pytest.param("👨‍👩‍👧‍👦é\u0301 שלום " * 20_000, marks=pytest.mark.slow),
    ],
)
def test_a_million_characters_take_bounded_time(llama3: Tokenizer, code_llama: Any, text: str) -> None:
    for tokenizer in (llama3, code_llama[0]):
        assert tokenizer.decode(tokenizer.encode(text)) == text


# ------------------------------------------------------------------- one byte-level vocabulary in every kind of file
def tiktoken_lines(tokens: list[bytes]) -> list[bytes]:
    return [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]


@pytest.fixture(scope="session")
def byte_tokens() -> list[bytes]:
    """The tokens of a small Llama-3-like vocabulary, by rank."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=list(BYTE_OF), show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    ranked = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    return [bytes(BYTE_OF[c] for c in token) for token, _ in ranked]


@pytest.fixture(scope="session")
def byte_files(byte_tokens: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The vocabulary as a tiktoken file, as a tokenizer.json from transformers, and as GGUF metadata."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    folder = tmp_path_factory.mktemp("byte")
    (folder / "tokenizer.model").write_bytes(b"\n".join(tiktoken_lines(byte_tokens)) + b"\n")
    converter = TikTokenConverter(str(folder / "tokenizer.model"), LLAMA3_WORDS, extra_special_tokens=CONTROL)
    converted = converter.converted()
    bos = ("<|begin_of_text|>", len(byte_tokens))
    template = processors.TemplateProcessing(
        single=f"{bos[0]} $A", pair=f"{bos[0]} $A {bos[0]} $B", special_tokens=[bos]
    )
    converted.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    converted.save(str(folder / "tokenizer.json"))
    source = json.loads((folder / "tokenizer.json").read_text())["model"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [*sorted(source["vocab"], key=source["vocab"].get), *CONTROL],
        "tokenizer.ggml.token_type": [1] * len(byte_tokens) + [3] * len(CONTROL),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in source["merges"]],
        "tokenizer.ggml.bos_token_id": len(byte_tokens),
        "tokenizer.ggml.eos_token_id": len(byte_tokens) + 1,
    }
    return {"tiktoken": folder / "tokenizer.model", "json": folder / "tokenizer.json", "gguf": metadata}


@pytest.fixture(scope="session")
def byte_kinds(byte_files: dict[str, Any]) -> dict[str, Tokenizer]:
    return {
        "tiktoken": open_tokenizer(byte_files["tiktoken"]),
        "json": open_tokenizer(byte_files["json"]),
        "gguf": from_metadata(byte_files["gguf"], "tiny"),
    }


def test_byte_level_kinds_have_the_same_attributes(byte_kinds: dict[str, Tokenizer]) -> None:
    first, *others = byte_kinds.values()
    assert isinstance(first, TiktokenTokenizer)
    for other in others:
        assert other.control == first.control
        assert (other.n_vocab, other.bos_id, other.eos_id) == (first.n_vocab, first.bos_id, first.eos_id)
        assert (other.stop_ids, other.add_bos) == (first.stop_ids, True)
        assert [other.token_bytes(id) for id in range(first.n_vocab)] == [
            first.token_bytes(id) for id in range(first.n_vocab)
        ]
    assert len({tokenizer.kind for tokenizer in byte_kinds.values()}) == 3


@given(texts)
@many
def test_byte_level_kinds_agree(
    byte_kinds: dict[str, Tokenizer], byte_files: dict[str, Any], byte_tokens: list[bytes], text: str
) -> None:
    ranks = {token: rank for rank, token in enumerate(byte_tokens)}
    theirs = tiktoken.Encoding("tiny", pat_str=LLAMA3_WORDS, mergeable_ranks=ranks, special_tokens={})
    expected = theirs.encode(text, disallowed_special=())
    for tokenizer in byte_kinds.values():
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text
        assert same_stream(tokenizer, expected)


@pytest.mark.slow
@given(texts)
def test_llama3_as_tokenizer_json_agrees(llama3: Tokenizer, llama3_json: HuggingFaceTokenizer, text: str) -> None:
    assert llama3_json.encode(text) == llama3.encode(text)


@pytest.fixture(scope="session")
def llama3_json(llama3_file: Path, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    path = tmp_path_factory.mktemp("llama3") / "tokenizer.json"
    TikTokenConverter(str(llama3_file), LLAMA3_WORDS, extra_special_tokens=CONTROL).converted().save(str(path))
    return HuggingFaceTokenizer(path.read_bytes(), path.name)


# ---------------------------------------------------------------- one SentencePiece vocabulary in every kind of file
Train = Callable[..., Path]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train a model like Llama 2's: BPE, byte fallback, split digits, no normalization."""

    def run(extra: list[str] | None = None, **options: Any) -> Path:
        prefix = tmp_path_factory.mktemp("spm") / "tokenizer"
        lines = [line for text in CORPUS + (extra or []) for line in text.split("\n")]
        defaults = {
            "model_type": "bpe", "vocab_size": 620, "byte_fallback": True, "split_digits": True, "minloglevel": 2,
            "normalization_rule_name": "identity", "remove_extra_whitespaces": False, "character_coverage": 0.99,
        }  # fmt: skip
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_prefix=str(prefix), **{**defaults, **options}
        )
        return Path(f"{prefix}.model")

    return run


def pieces_json(library: sentencepiece.SentencePieceProcessor, legacy: bool, infill: bool = False) -> dict[str, Any]:
    """A tokenizer.json of SentencePiece BPE from transformers; legacy is the form of the published Llama 2."""
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    vocab = {library.id_to_piece(id): id for id in range(library.get_piece_size())}
    merges = generate_merges(vocab, {piece: library.get_score(id) for piece, id in vocab.items()})
    theirs = LlamaTokenizer(vocab=vocab, merges=merges).backend_tokenizer
    if infill:
        theirs.add_special_tokens([AddedToken(piece, normalized=False) for piece in INFILL])
    source = json.loads(theirs.to_str())
    if legacy:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        source["normalizer"] = json.loads(normalizers.Sequence(steps).__getstate__())
        source["pre_tokenizer"] = None
        source["model"]["unk_token"] = "<unk>"
    return source


@pytest.fixture(scope="session")
def piece_kinds(train: Train, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The vocabulary as a model, as two forms of tokenizer.json and as GGUF metadata; "library" is the reference."""
    path = train()
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    folder = tmp_path_factory.mktemp("pieces")
    kinds: dict[str, Any] = {"library": library, "model": open_tokenizer(path), "folder": folder}
    for name in ("legacy", "metaspace"):
        (folder / f"{name}.json").write_text(json.dumps(pieces_json(library, legacy=name == "legacy")))
        kinds[name] = open_tokenizer(folder / f"{name}.json")
    return {**kinds, "gguf": from_metadata(piece_metadata(library), "tiny")}


@given(texts)
@many
def test_piece_kinds_agree(piece_kinds: dict[str, Any], text: str) -> None:
    expected = piece_kinds["library"].encode(text)
    for name in ("model", "legacy", "gguf"):
        tokenizer = piece_kinds[name]
        assert tokenizer.encode(text) == expected, name
        assert same_stream(tokenizer, expected)
        if "▁" not in text:  # the vocabulary can't distinguish U+2581 from a space
            assert tokenizer.decode(expected) == text
        assert not set(expected) & set(tokenizer.control.values())


@given(texts.map(lambda text: text.lstrip(" ▁")))
@many
def test_metaspace_agrees_except_on_leading_spaces(piece_kinds: dict[str, Any], text: str) -> None:
    assert piece_kinds["metaspace"].encode(text) == piece_kinds["library"].encode(text)


def test_piece_kinds_have_the_same_attributes(piece_kinds: dict[str, Any]) -> None:
    model = piece_kinds["model"]
    assert isinstance(model, SentencePieceModelTokenizer)
    assert model.control == {"<s>": 1, "</s>": 2}
    for name in ("model", "legacy", "metaspace", "gguf"):
        other = piece_kinds[name]
        assert (other.n_vocab, other.bos_id, other.eos_id, other.stop_ids) == (model.n_vocab, 1, 2, {2})
        assert other.strips_leading_space
        assert {**other.control, "<unk>": 0} == {**model.control, "<unk>": 0}
        assert [other.token_bytes(id) for id in range(1, model.n_vocab)] == [
            model.token_bytes(id) for id in range(1, model.n_vocab)
        ]
        with pytest.raises(TokenizerError, match="no infill ids"):
            other.encode_infill("a", "b")
    assert (model.add_bos, piece_kinds["gguf"].add_bos) == (True, True)


def test_a_real_vocabulary_of_32000_pieces() -> None:
    path = wheel_member("mistral-common==1.13.1", "mistral_common/data/tokenizer.model.v1")
    ours, theirs = open_tokenizer(path), sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert (ours.n_vocab, ours.bos_id, ours.eos_id, ours.add_bos, ours.stop_ids) == (32000, 1, 2, True, {2})
    for text in [*TEXTS, *CORPUS[:6]]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert not {1, 2} & set(ids)
    assert ours.encode("\n")[1:] == [13]
    assert len(ours.encode("</s>")) > 1


def test_unknown_characters_without_byte_fallback_decode_as_in_the_library(train: Train) -> None:
    path = train(byte_fallback=False, vocab_size=300)
    ours, theirs = open_tokenizer(path), sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = ours.encode("the 𝄞 fox")
    assert theirs.unk_id() in ids
    assert ids == theirs.encode("the 𝄞 fox")
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("model_type", ["unigram", "word", "char"])
def test_models_of_other_types_have_the_librarys_ids(train: Train, model_type: str) -> None:
    path = train(model_type=model_type, vocab_size=400, byte_fallback=model_type == "unigram", hard_vocab_limit=False)
    ours, theirs = open_tokenizer(path), sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_a_model_without_a_space_prefix(train: Train) -> None:
    tokenizer = open_tokenizer(train(add_dummy_prefix=False))
    assert not tokenizer.strips_leading_space
    for text in (" a", "a", "  ", "the"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


# ----------------------------------------------------------------------------------------------------------- Code Llama
MARKED = [
    "<PRE>", " <PRE>", "a <SUF> b", " <MID><MID>", "<EOT> <EOT>", "x<step>", "<step>", "▁<PRE>", "the <PRE>fox",
    "the quick <PRE>", "the quick  <SUF>", "the quick <step> <step>",
]  # fmt: skip


@pytest.fixture(scope="session", params=["user_defined_symbols", "control_symbols", "normal"])
def code_llama(request: pytest.FixtureRequest, train: Train) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    """A vocabulary whose infill pieces have one of three types in the file."""
    marks = [*INFILL, "<step>"]
    if request.param == "normal":  # so frequent that training merges them
        path = train(
            [" <PRE> <SUF> <MID> <EOT> <step>" * 60] * 40,
            vocab_size=600,
            required_chars="☺",
            split_by_unicode_script=False,
        )
    else:
        path = train(vocab_size=640, required_chars="☺", **{request.param: marks})
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert library.piece_to_id("▁<PRE>") != library.unk_id()
    return open_tokenizer(path), library


def test_no_infill_mark_in_a_text_becomes_a_control_id(code_llama: Any) -> None:
    ours, library = code_llama
    kinds = [ours, from_metadata(piece_metadata(library), "tiny")]
    kinds += [HuggingFaceTokenizer(json.dumps(pieces_json(library, True, infill=True)).encode(), "tiny")]
    for tokenizer in kinds:
        assert set(INFILL) <= tokenizer.control.keys()
        for text in MARKED:
            ids = tokenizer.encode(text)
            assert not set(ids) & set(tokenizer.control.values()), text
            assert tokenizer.decode(ids) == text.replace("▁", " ")
            assert ids == ours.encode(text)


@given(texts.map(lambda text: text.replace("<", "")))
@settings(max_examples=60)
def test_text_without_marks_has_the_librarys_ids(code_llama: Any, text: str) -> None:
    ours, library = code_llama
    assert ours.encode(text) == library.encode(text)


def test_code_llama_stops_at_its_marks(code_llama: Any) -> None:
    ours, library = code_llama
    assert {library.eos_id(), library.piece_to_id("▁<EOT>")} <= ours.stop_ids
    if library.piece_to_id("<step>") != library.unk_id():
        assert ours.control["<step>"] in ours.stop_ids
    assert ours.stop_ids == from_metadata(piece_metadata(library), "tiny").stop_ids


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [
        ("def f(x):\n    return ", "\n\nprint(f(1))"),
        ("", ""),
        ("the", " lazy dog"),
        ("  a", "  b"),
        ("naïve", "漢字"),
        ("", "x"),
    ],
)
def test_infill_ids_are_those_of_code_llamas_formula(code_llama: Any, prefix: str, suffix: str) -> None:
    ours, library = code_llama
    mark = {piece: library.piece_to_id(piece) for piece in INFILL}
    after = library.encode("☺" + suffix)
    assert after[:2] == library.encode("☺")[:2]
    assert len(library.encode("☺")) == 2
    expected = [1, mark["▁<PRE>"], *library.encode(prefix), mark["▁<SUF>"], *after[2:], mark["▁<MID>"]]
    assert ours.encode_infill(prefix, suffix) == expected
    assert from_metadata(piece_metadata(library), "tiny").encode_infill(prefix, suffix) == expected
    for legacy in (True, False):
        source = pieces_json(library, legacy, infill=True)
        tokenizer = HuggingFaceTokenizer(json.dumps(source).encode(), "tiny")
        if legacy or not prefix.startswith(" "):
            assert tokenizer.encode_infill(prefix, suffix) == expected


def test_infill_texts_add_no_control_ids(code_llama: Any) -> None:
    ours, _ = code_llama
    ids = ours.encode_infill("a <SUF> b", " <MID>")
    assert len([id for id in ids if id in ours.control.values()]) == 4
    with pytest.raises(TokenizerError, match="lone surrogate"):
        ours.encode_infill("a", "\udc80")


# ---------------------------------------------------------------------------- tokenizer.json compared with the library
def byte_level_source(byte_files: dict[str, Any]) -> dict[str, Any]:
    return json.loads(byte_files["json"].read_text())


def opened(source: dict[str, Any], **config: Any) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(json.dumps(source).encode(), "tokenizer.json", config or None)


def added(id: int, content: str, special: bool = False, **more: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": content, "special": special, **flags, **more}


@pytest.fixture(scope="session")
def with_plain_added(byte_files: dict[str, Any]) -> dict[str, Any]:
    """Plain added tokens after the control tokens."""
    source = byte_level_source(byte_files)
    last = max(token["id"] for token in source["added_tokens"])
    source["added_tokens"] += [
        added(last + 1, "[REF]"),
        added(last + 2, "é️ x"),
        added(last + 3, "<tool>", lstrip=True),
        added(last + 4, "éÿ"),
    ]
    return source


@given(
    texts.map(lambda text: text.replace("<|", ""))
    | st.lists(st.sampled_from(["[REF]", "é️ x", " ", "<tool>", "a", "éÿ"])).map("".join)
)
@many
def test_plain_added_tokens_equal_the_librarys(with_plain_added: dict[str, Any], text: str) -> None:
    ours, theirs = opened(with_plain_added), Backend.from_str(json.dumps(with_plain_added))
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    if "<tool>" not in text:  # its lstrip removes spaces
        assert ours.decode(ids) == text


def test_added_tokens_keep_their_ids(with_plain_added: dict[str, Any]) -> None:
    ours = opened(with_plain_added)
    for token in with_plain_added["added_tokens"]:
        if not token["special"]:
            assert ours.encode(token["content"]) == [token["id"]]
            assert token["content"] not in ours.control
    gap = {**with_plain_added, "added_tokens": [*with_plain_added["added_tokens"], added(5000, "[FAR]")]}
    assert opened(gap).encode("a[FAR]")[-1] == 5000
    assert opened(gap).n_vocab == 5001
    assert opened(gap).decode([4999, 5000]) == "[FAR]"


@pytest.mark.parametrize("name", ["legacy", "metaspace"])
@given(text=texts.map(lambda text: re.sub("</?s>|<unk>", "", text)).filter(lambda text: "s>" not in text))
@settings(max_examples=80)
def test_llama2_json_ids_equal_the_librarys(piece_kinds: dict[str, Any], name: str, text: str) -> None:
    theirs = Backend.from_file(str(piece_kinds["folder"] / f"{name}.json"))
    ours = piece_kinds[name]
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode([1, *ids, 2]) == theirs.decode([1, *ids, 2])


@given(texts)
@settings(max_examples=80)
def test_llama3_json_decodes_like_the_library(
    byte_kinds: dict[str, Tokenizer], byte_files: dict[str, Any], text: str
) -> None:
    theirs = Backend.from_file(str(byte_files["json"]))
    ids = byte_kinds["json"].encode(text, bos=True)
    assert byte_kinds["json"].decode(ids) == theirs.decode(ids) == text


@pytest.mark.parametrize("ignore_merges", [True, False])
def test_merges_into_a_control_token_are_removed(byte_files: dict[str, Any], ignore_merges: bool) -> None:
    source = byte_level_source(byte_files)
    n = max(token["id"] for token in source["added_tokens"])
    source["model"]["ignore_merges"] = ignore_merges
    source["model"]["vocab"] |= {"<~": n + 1, "<~>": n + 2}
    source["model"]["merges"] += [["<", "~"], ["<~", ">"]]
    assert opened(source).encode("<~>") == [n + 2]
    source["added_tokens"].append(added(n + 2, "<~>", special=True))
    ours, theirs = opened(source), Backend.from_str(json.dumps(source))
    assert theirs.encode("<~>", add_special_tokens=False).ids == [n + 2]
    assert ours.encode("<~>") == [n + 1, *ours.encode(">")]
    assert ours.encode("<~ <~") == theirs.encode("<~ <~", add_special_tokens=False).ids


def test_no_text_becomes_the_unknown_token_by_its_name(byte_files: dict[str, Any], piece_kinds: dict[str, Any]) -> None:
    source = byte_level_source(byte_files)  # has ignore_merges: a word that is a token is not merged
    source["model"]["unk_token"] = "xyz"
    source["model"]["vocab"]["xyz"] = 9999
    assert 9999 not in opened(source).encode("xyz")
    for name in ("model", "legacy", "metaspace", "gguf"):
        assert 0 not in piece_kinds[name].encode("<unk>")


def test_unknown_characters_become_the_unknown_token(piece_kinds: dict[str, Any]) -> None:
    source = json.loads((piece_kinds["folder"] / "legacy.json").read_text())
    source["model"]["byte_fallback"] = False
    ours, theirs = opened(source), Backend.from_str(json.dumps(source))
    ids = ours.encode("the 𝄞𝄞 fox")
    assert ids == theirs.encode("the 𝄞𝄞 fox", add_special_tokens=False).ids
    assert ids.count(0) == 1
    assert ours.decode(ids) == "the  fox"


def test_an_unknown_character_does_not_end_the_text(byte_files: dict[str, Any]) -> None:
    source = byte_level_source(byte_files)
    eot = next(token["id"] for token in source["added_tokens"] if token["content"] == "<|end_of_text|>")
    source["model"]["unk_token"] = "<|end_of_text|>"
    source["model"]["vocab"]["<|end_of_text|>"] = eot
    del source["model"]["vocab"][next(c for c, byte in BYTE_OF.items() if byte == 4)]
    assert eot in Backend.from_str(json.dumps(source)).encode("a\x04b", add_special_tokens=False).ids
    assert opened(source).control["<|end_of_text|>"] == eot
    with pytest.raises(TokenizerError, match=r"character 1 of the text, '\\x04', has the byte 0x04, for which"):
        opened(source).encode("a\x04b")


def test_truncation_padding_and_dropout_are_ignored(byte_files: dict[str, Any]) -> None:
    source = byte_level_source(byte_files)
    plain = opened(source)
    backend = Backend.from_str(json.dumps(source))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    changed = json.loads(backend.to_str())
    changed["model"]["dropout"] = 0.5
    assert opened(changed).encode(CORPUS[0]) == plain.encode(CORPUS[0])


UNIGRAM = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], ["▁", -2.0], *([c, -3.0] for c in "</s>abunk[]"), ["▁ab", -1.0]]


def test_unigram_models(tmp_path: Path) -> None:
    backend = Backend(models.Unigram([(piece, score) for piece, score in UNIGRAM], unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<pad>")])
    backend.add_tokens(["[REF]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = open_tokenizer(tmp_path / "tokenizer.json")
    assert ours.control == {"<s>": 1, "</s>": 2, "<pad>": backend.token_to_id("<pad>")}
    for text in ("ab", "ab ab [REF] b", "a  b"):
        assert ours.encode(text) == backend.encode(text, add_special_tokens=False).ids
    assert ours.decode(ours.encode("ab ab [REF] b")) == backend.decode(backend.encode("ab ab [REF] b").ids)
    for text in ("</s>", "a</s>b <s>", "<pad>", "<unk>"):
        assert not set(ours.encode(text)) & {1, 2, backend.token_to_id("<pad>")}
    assert set(ours.encode("</s>")) & {0} == set()


@pytest.mark.parametrize(
    ("config", "bos", "eos", "add_bos"),
    [
        (None, "<|begin_of_text|>", "<|end_of_text|>", True),
        ({"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, "<|begin_of_text|>", "<|eot_id|>", True),
        (
            {"bos_token": {"content": "<|begin_of_text|>", "lstrip": False}},
            "<|begin_of_text|>",
            "<|end_of_text|>",
            True,
        ),
        ({"add_bos_token": False}, "<|begin_of_text|>", "<|end_of_text|>", False),
        ({"bos_token": "<|image|>", "add_bos_token": True, "eos_token": None}, "<|image|>", None, True),
    ],
)
def test_settings_name_bos_and_eos(byte_files: Any, config: Any, bos: str, eos: str | None, add_bos: bool) -> None:
    ours = open_tokenizer(byte_files["json"], config)
    assert (ours.bos_id, ours.eos_id) == (ours.control[bos], ours.control[eos] if eos else None)
    assert ours.add_bos is add_bos
    assert ours.encode_prompt("a") == ([ours.bos_id] if add_bos else []) + ours.encode("a")
    assert {ours.control["<|eot_id|>"], ours.control["<|eom_id|>"]} <= ours.stop_ids


def test_control_strings_marked_plain_are_control_tokens(byte_files: dict[str, Any], train: Train) -> None:
    source = byte_level_source(byte_files)
    id = max(token["id"] for token in source["added_tokens"]) + 1
    source["added_tokens"].append(added(id, "<|im_end|>"))
    path = train(user_defined_symbols=["<|im_end|>", "[REF]"])
    metadata = piece_metadata(sentencepiece.SentencePieceProcessor(model_file=str(path)))
    for at, piece in enumerate(metadata["tokenizer.ggml.tokens"]):
        if piece in ("<|im_end|>", "[REF]"):
            metadata["tokenizer.ggml.token_type"][at] = 4
    for tokenizer in (opened(source), open_tokenizer(path), from_metadata(metadata, "tiny")):
        assert tokenizer.control["<|im_end|>"] in tokenizer.stop_ids
        assert tokenizer.control["<|im_end|>"] not in tokenizer.encode("a<|im_end|>")
        assert tokenizer.decode(tokenizer.encode("a<|im_end|>[REF]")) == "a<|im_end|>[REF]"
        assert "[REF]" not in tokenizer.control


def test_a_plain_token_named_in_the_settings_is_control(byte_files: dict[str, Any]) -> None:
    source = byte_level_source(byte_files)
    ours = opened(source, eos_token="the")
    assert ours.eos_id == source["model"]["vocab"]["the"]
    assert ours.eos_id not in ours.encode("the")


def test_without_a_post_processor_no_bos_is_added(byte_files: dict[str, Any]) -> None:
    ours = opened({**byte_level_source(byte_files), "post_processor": None})
    assert (ours.add_bos, ours.bos_id) == (False, ours.control["<|begin_of_text|>"])
    assert ours.encode_prompt("") == [ours.bos_id]


# ------------------------------------------------------------------------------------ text never becomes control
def test_no_control_string_in_text_becomes_its_id(byte_kinds: Any, piece_kinds: Any, llama3: Tokenizer) -> None:
    named = ("model", "legacy", "metaspace", "gguf")
    for tokenizer in (*byte_kinds.values(), llama3, *(piece_kinds[name] for name in named)):
        forbidden = set(tokenizer.control.values())
        for text in (*CONTROL, *tokenizer.control, "<|im_end|>", *INFILL):
            for around in ("{}", "a{}b", " {} ", "{0}{0}", "\n{}\n"):
                assert not forbidden & set(tokenizer.encode(around.format(text))), (tokenizer.kind, text)


@pytest.mark.parametrize("text", ["\ud800", "abc\udc80def"])
def test_a_lone_surrogate_is_the_same_error_in_every_vocabulary(byte_kinds: Any, piece_kinds: Any, text: str) -> None:
    for tokenizer in (*byte_kinds.values(), piece_kinds["model"], piece_kinds["legacy"]):
        with pytest.raises(TokenizerError, match="lone surrogate"):
            tokenizer.encode(text)


@pytest.mark.parametrize("id", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_errors(byte_kinds: Any, piece_kinds: Any, id: int) -> None:
    for tokenizer in (*byte_kinds.values(), piece_kinds["model"], piece_kinds["legacy"]):
        with pytest.raises(UsageError, match="not in the vocabulary; expected"):
            tokenizer.decode([id])


# ------------------------------------------------------------------------------------------------------- bad files
def rejected(path: Path, message: str, capfd: pytest.CaptureFixture[str], config: Any = None) -> None:
    """Assert that the file is rejected in one line that names it, and that no library writes to stderr."""
    with pytest.raises(TokenizerError, match=message) as caught:
        open_tokenizer(path, config)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    assert capfd.readouterr().err == ""


def test_the_kind_is_detected_by_content(byte_files: Any, train: Train, tmp_path: Path) -> None:
    for source, kind in ((byte_files["tiktoken"], "tiktoken"), (train(), "SentencePiece"), (byte_files["json"], "BPE")):
        for name in ("tokenizer.model", "tokenizer.json", "x"):
            (tmp_path / name).write_bytes(source.read_bytes())
            assert kind in open_tokenizer(tmp_path / name).kind


def test_each_reader_rejects_the_other_kinds(byte_files: Any, train: Train) -> None:
    with pytest.raises(TokenizerError, match=r"line 1 is .*expected a token in base64"):
        TiktokenTokenizer(train().read_bytes(), "x")
    with pytest.raises(TokenizerError, match="not a SentencePiece model"):
        SentencePieceModelTokenizer(byte_files["tiktoken"].read_bytes(), "x")
    with pytest.raises(TokenizerError, match="not valid JSON"):
        HuggingFaceTokenizer(byte_files["tiktoken"].read_bytes(), "x")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2183982\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html><body>404</body></html>", "a web page"),
        (b"GGUF\x03\x00\x00\x00", "pass it with --model"),
        (b"PK\x03\x04aaaa", "zip archive"),
        (b"hello there", "begins with b'hello th'"),
        (b"{", "not valid JSON"),
        (b'{"model": {"type": "BPE"', "not valid JSON"),
        (b"[" * 10, "begins with"),
        (b"{}", "expected the key 'model'"),
        (b'{"add_bos_token": true, "model": "x"}', "expected the key 'model'"),
        (b'{"model": {}}', "vocab must be an object or a list"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b"\n\x0e\n\x05<unk>", "not a SentencePiece model"),
        (b"\n\x09\n\x05<unk>\x18\x02" b"\n\x03\n\x01a", "ends after 2 pieces"),
    ],
)  # fmt: skip
def test_files_that_are_not_tokenizers_are_rejected(data: bytes, message: str, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    rejected(tmp_path / "tokenizer.model", message, capfd)


def test_missing_files_folders_and_invalid_paths_are_errors(tmp_path: Path, capfd: Any) -> None:
    rejected(tmp_path / "absent.model", "No such file", capfd)
    rejected(tmp_path, "is a folder; name the tokenizer.model", capfd)
    with pytest.raises(TokenizerError, match="is not a path"):
        open_tokenizer(Path("a\0b"))


def edited(lines: list[bytes], *edits: tuple[int, bytes | None]) -> bytes:
    for at, line in sorted(edits, reverse=True):
        lines = lines[:at] + ([] if line is None else [line]) + lines[at + 1 :]
    return b"\n".join(lines)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ([(300, b"not base64! 300")], "line 301 is b'not base64! 300', expected a token in base64"),
        ([(300, b"")], "line 301 is b''"),
        ([(300, b"YWJj")], "line 301 is b'YWJj'"),
        ([(300, b"YWJjZ 300")], "line 301"),
        ([(300, b"YWJj -300")], "line 301"),
        ([(300, b"YWJj 300 1")], "line 301"),
        ([(300, None)], "line 301 has rank 301, expected 300"),
        ([(300, b"YWJj 299")], "line 301 has rank 299, expected 300"),
        ([(301, b"IQ== 301")], "line 302 repeats the token of line 1,"),
        ([(0, b"YWJjZGVm 0")], r"byte 0x21 is not a token \(1 of the 256"),
    ],
)  # fmt: skip
def test_damaged_lines_are_named(byte_tokens: Any, edits: Any, message: str, tmp_path: Path, capfd: Any) -> None:
    assert byte_tokens[0] == b"!"
    (tmp_path / "tokenizer.model").write_bytes(edited(tiktoken_lines(byte_tokens), *edits))
    rejected(tmp_path / "tokenizer.model", message, capfd)


def test_windows_line_endings_and_a_missing_last_one_are_accepted(byte_tokens: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\r\n".join(tiktoken_lines(byte_tokens)))
    assert open_tokenizer(tmp_path / "t").n_vocab == len(byte_tokens) + 256


def test_llama4s_file_is_rejected(tmp_path: Path, capfd: Any) -> None:
    tokens = [bytes([b]) for b in range(256)] + [b"%d" % i for i in range(1000, 1000 + 200_000 - 256)]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(tiktoken_lines(tokens)))
    rejected(tmp_path / "tokenizer.model", "tokenizer of Llama 4", capfd)


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_a_truncated_sentencepiece_model_is_rejected(train: Train, byte_fallback: bool) -> None:
    data = train(byte_fallback=byte_fallback, vocab_size=600 if byte_fallback else 300).read_bytes()
    for cut in [*range(1, 20), *range(2000, 2040), *range(len(data) - 80, len(data))]:
        with pytest.raises(TokenizerError, match=r"^cut: (not a SentencePiece model|the model ends after)"):
            SentencePieceModelTokenizer(data[:cut], "cut")


def damage(source: dict[str, Any], change: str) -> dict[str, Any]:
    model = source["model"]
    vocab = model["vocab"]
    bos = {"SpecialToken": {"id": "<|absent|>", "type_id": 0}}
    known = {"SpecialToken": {"id": "<|image|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    post = {"type": "TemplateProcessing", "single": [bos, text], "pair": [text], "special_tokens": {}}
    changes: dict[str, Callable[[], dict[str, Any]]] = {
        "merge of unknown tokens": lambda: {"model": {**model, "merges": [["q", "xyzzyq"]]}},
        "merge longer than any key": lambda: {"model": {**model, "merges": [["a" * 999, "b" * 999]]}},
        "merge of three": lambda: {"model": {**model, "merges": ["a b c"]}},
        "merge of numbers": lambda: {"model": {**model, "merges": [[1, 2]]}},
        "suffix": lambda: {"model": {**model, "end_of_word_suffix": "</w>"}},
        "model of words": lambda: {"model": {**model, "type": "WordLevel"}},
        "decoder that replaces": lambda: {"decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}, {"type": "ByteFallback"}]}},
        "two lists": lambda: {"pre_tokenizer": {"type": "Sequence", "normalizers": [], "pretokenizers": []}},
        "words of length 0": lambda: {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "absent special token": lambda: {"post_processor": post},
        "broken regex": lambda: {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated",
                                                   "invert": False}},
        "unknown step": lambda: {"normalizer": {"type": "Klingon"}},
        "no vocabulary": lambda: {"model": {**model, "vocab": {}, "merges": []}, "added_tokens": []},
        "vocabulary is text": lambda: {"model": {**model, "vocab": "abc"}},
        "id is text": lambda: {"model": {**model, "vocab": {**vocab, "zz": "7"}}},
        "id below 0": lambda: {"model": {**model, "vocab": {**vocab, "zz": -1}}},
        "id given twice": lambda: {"model": {**model, "vocab": {**vocab, "zz": 3}}},
        "token with two ids": lambda: {"added_tokens": [*source["added_tokens"], added(7777, "<|eot_id|>")]},
        "added without content": lambda: {"added_tokens": [{"id": 1}]},
        "other decoder": lambda: {"decoder": {"type": "WordPiece", "prefix": "##"}, "pre_tokenizer": None},
        "two in front": lambda: {"post_processor": {**post, "single": [known, known, text]}},
    }  # fmt: skip
    return {**source, **changes[change]()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("merge of unknown tokens", "merge 0, 'q' .* is not made of the vocabulary's tokens"),
        ("merge longer than any key", "merge 0, "),
        ("merge of three", "merge 0 is 'a b c', expected two tokens"),
        ("merge of numbers", "merge 0 is"),
        ("suffix", "its model is 'BPE' with end_of_word_suffix; expected BPE or Unigram without affixes"),
        ("model of words", "its model is 'WordLevel'; expected BPE or Unigram"),
        ("decoder that replaces", "its decoder replaces 'a' with 'b', expected U.2581 with a space"),
        ("two lists", "a Sequence must have one list of steps, found 2"),
        (
            "words of length 0",
            "its pre_tokenizer has a step of the type 'FixedLength', which the LLaMA family does not",
        ),
        ("absent special token", "adds '<|absent|>', which is not in the vocabulary".replace("|", r"\|")),
        ("broken regex", "not a usable tokenizer.json: "),
        ("unknown step", "its normalizer has a step of the type 'Klingon'"),
        ("no vocabulary", "vocabulary is empty"),
        ("vocabulary is text", "found str"),
        ("id is text", "'zz' has the id '7'"),
        ("id below 0", "'zz' has the id -1"),
        ("id given twice", "id 3 has two tokens"),
        ("token with two ids", "has two ids"),
        ("added without content", "'content' is missing"),
        ("other decoder", "its decoder has a step of the type 'WordPiece'"),
        ("two in front", "set add_bos_token"),
    ],
)
def test_a_damaged_tokenizer_json_is_rejected(
    byte_files: Any, change: str, message: str, tmp_path: Path, capfd: Any
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(damage(byte_level_source(byte_files), change)))
    rejected(tmp_path / "tokenizer.json", message, capfd)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": "<|absent|>"}, r"names '<\|absent\|>' as bos_token"),
        ({"eos_token": 5}, "names 5 as eos_token"),
        ({"eos_token": ["a"]}, "as eos_token"),
        ({"add_bos_token": "yes"}, "add_bos_token of tokenizer_config.json must be true or false, got 'yes'"),
    ],
)
def test_settings_that_contradict_the_vocabulary_are_rejected(
    byte_files: Any, config: Any, message: str, capfd: Any
) -> None:
    rejected(byte_files["json"], message, capfd, config)


def test_a_library_panic_becomes_a_tokenizer_error(byte_files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    PanicException = type("PanicException", (BaseException,), {})

    def panic(*_: Any, **__: Any) -> None:
        raise PanicException("called `Option::unwrap()`\n on a None value")

    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary", panic)
    with pytest.raises(TokenizerError, match=r"can't be encoded: called `Option::unwrap.*` on a None value"):
        open_tokenizer(byte_files["tiktoken"]).encode("a")
    monkeypatch.setattr(tiktoken, "Encoding", panic)
    with pytest.raises(TokenizerError, match="can't be built"):
        open_tokenizer(byte_files["tiktoken"])
