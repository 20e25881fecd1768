"""Tokenizers compared with independent implementations: tiktoken for byte-level BPE, sentencepiece for SentencePiece."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from llama.errors import TokenizerError, UsageError
from llama.tokenizer.gguf import BYTE_OF, from_metadata

from . import tiny

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12,345 o'clock; we'll see!",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n\n\nprint(fibonacci(10))",
    "Größe, naïve café, Ελληνικά, русский язык, العربية, עברית, 漢字とかな, 한국어",
    "👨‍👩‍👧‍👦 🏳️‍🌈 ½ ² ∑ → ﬁ  double  spaces\ttabs\r\nand   more",
    "STOP the STOP of STOP and STOP",
    "the there then these they them theory the the the hello hello help held",
] * 20

TEXTS = [
    "", " ", "  ", "\n\n", "a", " a", "Hello, world!", "  leading", "trailing  ", "1234567890", "x  1", "it'STOP",
    "[\n    1, 22,  333]",
    "a" * 60, "\t\tif (x) {\r\n}", "it's we'll THEY'RE", "é\u0301 \u200d ﬀ",
    "漢字 and かな", "שלום العربية", "👨‍👩‍👧‍👦🏳️‍🌈",
    "<|im_end|>", "</s><s>", "<0x0A>", "▁low", "\u0000\u0001\u007f", "Ä\u00a0b\u3000c",
]  # fmt: skip

# A second copy on purpose, in the parts that tiktoken gets for Llama 3.
LLAMA3_WORDS = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


# ----------------------------------------------------------------------------------------- byte-level BPE as in Llama 3
@pytest.fixture(scope="module")
def byte_level() -> tuple[Any, tiktoken.Encoding]:
    """A small vocabulary trained on the corpus, for this package and for tiktoken."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=list(BYTE_OF), show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    vocabulary = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary]
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    control = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens + control,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * len(control),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 2,
    }
    ranks = {bytes(BYTE_OF[c] for c in token): id for token, id in vocabulary}
    special = {name: len(tokens) + i for i, name in enumerate(control)}
    theirs = tiktoken.Encoding("tiny", pat_str=LLAMA3_WORDS, mergeable_ranks=ranks, special_tokens=special)
    return from_metadata(metadata, "tiny"), theirs


@pytest.mark.parametrize("text", TEXTS)
def test_llama3_ids_equal_tiktoken(byte_level: Any, text: str) -> None:
    ours, theirs = byte_level
    ids = ours.encode(text)
    assert ids == theirs.encode(text, disallowed_special=())
    assert ours.decode(ids) == text


@given(any_text)
@settings(max_examples=300)
def test_llama3_ids_equal_tiktoken_on_any_text(byte_level: Any, text: str) -> None:
    ours, theirs = byte_level
    ids = ours.encode(text)
    assert ids == theirs.encode(text, disallowed_special=())
    assert ours.decode(ids) == text


def test_llama3_bos_eos_and_stop_ids(byte_level: Any) -> None:
    ours, _ = byte_level
    assert ours.add_bos
    assert ours.encode("a", bos=True, eos=True)[0] == ours.bos_id
    assert ours.encode("a", bos=True, eos=True)[-1] == ours.eos_id
    assert ours.stop_ids == {ours.control[name] for name in ("<|end_of_text|>", "<|eot_id|>", "<|im_end|>")}
    assert ours.encode_prompt("") == [ours.bos_id]
    assert ours.decode([ours.bos_id, *ours.encode("a"), ours.eos_id]) == "a"


# ------------------------------------------------------------------------------------------------- SentencePiece
def piece_metadata(model: sentencepiece.SentencePieceProcessor, **more: Any) -> dict[str, Any]:
    ids = range(model.get_piece_size())

    def type_of(id: int) -> int:
        return 2 if model.is_unknown(id) else 3 if model.is_control(id) else 6 if model.is_byte(id) else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": [model.get_score(id) for id in ids],
        "tokenizer.ggml.token_type": [type_of(id) for id in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        **more,
    }


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, sentencepiece.SentencePieceProcessor]:
    """A small vocabulary trained like Llama 2's: BPE, byte fallback, split digits, no normalization."""
    prefix = tmp_path_factory.mktemp("spm") / "m"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.split("\n")), model_prefix=str(prefix),
        model_type="bpe", vocab_size=600, byte_fallback=True, split_digits=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, character_coverage=0.99, minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    return from_metadata(piece_metadata(theirs), "tiny"), theirs


@pytest.mark.parametrize("text", TEXTS)
def test_llama2_ids_equal_sentencepiece(pieces: Any, text: str) -> None:
    ours, theirs = pieces
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids)


@given(any_text)
@settings(max_examples=300)
def test_llama2_ids_equal_sentencepiece_on_any_text(pieces: Any, text: str) -> None:
    ours, theirs = pieces
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    if "▁" not in text:  # the vocabulary can't distinguish U+2581 from a space
        assert ours.decode(ids) == text


@pytest.fixture(scope="module")
def pieces_with_words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, sentencepiece.SentencePieceProcessor]:
    """The same with user-defined symbols, which SentencePiece matches as units."""
    prefix = tmp_path_factory.mktemp("spm") / "m"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.split("\n")), model_prefix=str(prefix),
        model_type="bpe", vocab_size=600, byte_fallback=True, normalization_rule_name="identity", minloglevel=2,
        remove_extra_whitespaces=False, character_coverage=0.99, user_defined_symbols=["[REF]", "[/REF]", "the cat"],
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    metadata = piece_metadata(theirs)
    for id, token in enumerate(metadata["tokenizer.ggml.tokens"]):
        if token in ("[REF]", "[/REF]", "the\u2581cat"):
            metadata["tokenizer.ggml.token_type"][id] = 4
    return from_metadata(metadata, "tiny"), theirs


@given(st.lists(st.sampled_from(["[REF]", "[/REF]", "the cat", "the", " ", "see", "ü", "\n", "["])).map("".join))
def test_user_defined_pieces_match_as_in_sentencepiece(pieces_with_words: Any, text: str) -> None:
    ours, theirs = pieces_with_words
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text


# ------------------------------------------------------------------------------------ text never becomes control
def test_no_control_string_in_text_becomes_its_id(byte_level: Any, pieces: Any) -> None:
    for tokenizer in (byte_level[0], pieces[0], from_metadata(tiny.byte_vocabulary(), "tiny")):
        assert tokenizer.control
        for text, id in tokenizer.control.items():
            for around in ("{}", "a{}b", " {} ", "{0}{0}", "\n{}\n"):
                ids = tokenizer.encode(around.format(text))
                assert id not in ids
                assert not set(ids) & set(tokenizer.control.values())
                assert tokenizer.decode(ids) == around.format(text)


@pytest.mark.parametrize("word", ["hello", "h"])
def test_no_text_becomes_a_control_token_spelled_as_a_word(word: str) -> None:
    metadata = tiny.byte_vocabulary()
    metadata["tokenizer.ggml.pre"] = "llama-bpe"  # a word that is a token is not merged
    metadata["tokenizer.ggml.merges"] = []
    id = metadata["tokenizer.ggml.tokens"].index(word)
    metadata["tokenizer.ggml.token_type"][id] = 3
    tokenizer = from_metadata(metadata, "tiny")
    if len(word) > 1:
        assert id not in tokenizer.encode(word)
    else:
        with pytest.raises(TokenizerError, match="character 0 of the text, 'h', has the byte 0x68, for which"):
            tokenizer.encode(word)


def test_user_defined_control_strings_are_control_tokens() -> None:
    metadata = tiny.byte_vocabulary()
    metadata["tokenizer.ggml.token_type"][2] = 4
    tokenizer = from_metadata(metadata, "tiny")
    assert "<|im_end|>" in tokenizer.control
    assert 2 not in tokenizer.encode("<|im_end|>")


# ------------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize("text", ["\ud800", "abc\udc80def"])
def test_a_lone_surrogate_is_the_same_error_in_every_vocabulary(byte_level: Any, pieces: Any, text: str) -> None:
    for tokenizer in (byte_level[0], pieces[0]):
        with pytest.raises(TokenizerError, match="lone surrogate"):
            tokenizer.encode(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported; supported: gpt2, llama"),
        ({"tokenizer.ggml.pre": "klingon"}, "klingon"),
        ({"tokenizer.ggml.tokens": None}, "array of strings"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "array of strings"),
        ({"tokenizer.ggml.token_type": [1]}, "266 tokens but 1 token types"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["h e", "l"]}, "merge 1 is 'l'"),
        ({"tokenizer.ggml.merges": ["q x"]}, "not made of tokens"),
        ({"tokenizer.ggml.bos_token_id": 266}, "outside the vocabulary"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "outside the vocabulary"),
    ],
)
def test_damaged_vocabularies_are_errors(change: dict[str, Any], message: str) -> None:
    metadata = {k: v for k, v in {**tiny.byte_vocabulary(), **change}.items() if v is not None}
    with pytest.raises(TokenizerError, match=message):
        from_metadata(metadata, "tiny.gguf")


def test_pieces_need_scores(pieces: Any) -> None:
    with pytest.raises(TokenizerError, match="3 scores"):
        from_metadata(piece_metadata(pieces[1], **{"tokenizer.ggml.scores": [0.0] * 3}), "x")


@pytest.mark.parametrize("id", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_errors(byte_level: Any, pieces: Any, id: int) -> None:
    for tokenizer in (byte_level[0], pieces[0]):
        with pytest.raises(UsageError, match="not in the vocabulary; expected"):
            tokenizer.decode([id])


@pytest.mark.parametrize("text", ["a" * 300_000, " " * 300_000, "👨" * 50_000])
def test_long_runs_take_bounded_time(byte_level: Any, text: str) -> None:
    assert byte_level[0].decode(byte_level[0].encode(text)) == text
