"""The ids and texts of every kind of vocabulary equal the reference's: tiktoken, sentencepiece, tokenizers, Meta's class."""

from __future__ import annotations

import base64
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from llama.errors import TokenizerError, UsageError
from llama.tokenizer import Decoder, Tokenizer, open_tokenizer
from llama.tokenizer.common import BYTE_OF, LLAMA3_WORDS
from llama.tokenizer.gguf import from_metadata
from llama.tokenizer.huggingface import HuggingFaceTokenizer
from llama.tokenizer.tiktoken import NAMED, RUN, UNNAMED, pieces

from .wheels import wheel_member

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

CONTROL = [f"<|{name}|>" for name in (*NAMED, *UNNAMED)]
INFILL = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
snippets = st.lists(
    st.sampled_from(
        [*TEXTS, "2345678", "\u3000", "WE'LL", "the", " hello", "<|eot_id|>", "<|begin_of_text|>", "<|", "|>", "<unk>",
         "[INST]", *INFILL, "<PRE>", "\ufffd"]
    ),
    max_size=10,
).map("".join)  # fmt: skip
texts = st.one_of(any_text, snippets)


def check(ours: Tokenizer, text: str, expected: list[int], lossy: bool = False) -> None:
    """Assert that the ids are the expected ones, that no control id is among them, and that they decode to the text."""
    ids = ours.encode(text)
    assert ids == expected, ours
    assert not set(ids) & set(ours.control.values())
    decoder = Decoder(ours)
    streamed = "".join([*(decoder.feed(id) for id in ids), decoder.end()])
    assert streamed == ours.decode(ids)
    assert lossy or streamed == text


# ------------------------------------------------------------------- one byte-level vocabulary in every kind of file
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


def tiktoken_lines(tokens: list[bytes]) -> list[bytes]:
    return [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]


@pytest.fixture(scope="session")
def byte_files(byte_tokens: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The vocabulary as a tiktoken file, as a tokenizer.json from transformers, and as GGUF metadata."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    folder = tmp_path_factory.mktemp("byte")
    (folder / "tokenizer.model").write_bytes(b"\n".join(tiktoken_lines(byte_tokens)) + b"\n")
    converter = TikTokenConverter(str(folder / "tokenizer.model"), LLAMA3_WORDS, extra_special_tokens=CONTROL)
    converted = converter.converted()
    bos = (CONTROL[0], len(byte_tokens))
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
def byte_kinds(byte_files: dict[str, Any]) -> list[Tokenizer]:
    files = [open_tokenizer(byte_files[kind]) for kind in ("tiktoken", "json")]
    return [*files, from_metadata(byte_files["gguf"], "tiny")]


@given(texts)
def test_byte_level_ids_are_tiktokens(byte_kinds: list[Tokenizer], byte_tokens: list[bytes], text: str) -> None:
    ranks = {token: rank for rank, token in enumerate(byte_tokens)}
    special = {name: len(ranks) + i for i, name in enumerate(CONTROL)}
    theirs = tiktoken.Encoding("tiny", pat_str=LLAMA3_WORDS, mergeable_ranks=ranks, special_tokens=special)
    for ours in byte_kinds:
        check(ours, text, theirs.encode(text, disallowed_special=()))
        assert ours.encode(text, parse_special=True) == theirs.encode(text, allowed_special="all")


def same_attributes(kinds: list[Tokenizer]) -> None:
    first = kinds[0]
    assert len({ours.kind for ours in kinds}) == len(kinds)
    for ours in kinds:
        for name in ("control", "n_vocab", "bos_id", "eos_id", "stop_ids", "strips_leading_space"):
            assert getattr(ours, name) == getattr(first, name), (ours, name)
        for id in range(first.n_vocab):
            assert ours.token_bytes(id) == first.token_bytes(id) or id == 0  # SentencePiece shows <unk> as U+2047
        for id in range(first.n_vocab + 1):
            name, shown = ours.name(id), ours.shown(id)
            assert ours.control[name] == id if name is not None else id not in ours.control.values()
            data = b"" if id == first.n_vocab else ours.token_bytes(id)
            spelled = re.sub(rb"<0x(..)>", lambda found: bytes.fromhex(found[1].decode()), shown.encode())
            assert spelled == data if data else shown == (name or f"<{id}>")
        with pytest.raises(UsageError, match=f"not in the vocabulary; expected 0 to {first.n_vocab - 1}"):
            ours.decode([first.n_vocab])
        with pytest.raises(TokenizerError, match="no infill ids"):
            ours.encode_prompt("a", suffix="b")
        with pytest.raises(TokenizerError, match="lone surrogate U\\+DC80 at character 3"):
            ours.encode("abc\udc80def")


def test_byte_level_kinds_have_the_same_attributes(byte_kinds: list[Tokenizer], byte_tokens: list[bytes]) -> None:
    same_attributes(byte_kinds)
    n = len(byte_tokens)
    for ours in byte_kinds:
        assert list(ours.control) == CONTROL
        assert (ours.bos_id, ours.eos_id, ours.stop_ids, ours.add_bos) == (n, n + 1, {n + 1, n + 8, n + 9}, True)
        assert ours.encode("a", True, True) == [n, *ours.encode("a"), n + 1]
        assert ours.encode_prompt("") == [n]
        assert ours.encode_prompt(f"{CONTROL[0]}a", parse_special=True) == [n, *ours.encode("a")]
        assert ours.decode([n, *ours.encode("a"), n + 9]) == "a"


# ---------------------------------------------------------------- one SentencePiece vocabulary in every kind of file
def train(folder: Path, **options: Any) -> Path:
    """Train a model like Llama 2's: BPE, byte fallback, split digits, no normalization."""
    defaults = {
        "model_type": "bpe", "vocab_size": 620, "byte_fallback": True, "split_digits": True, "minloglevel": 2,
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False, "character_coverage": 0.99,
    }  # fmt: skip
    lines = [line for text in CORPUS for line in text.split("\n")]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "tokenizer"), **{**defaults, **options}
    )
    return folder / "tokenizer.model"


def piece_metadata(model: sentencepiece.SentencePieceProcessor, **more: Any) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece model without user-defined pieces."""
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


def transformers_llama(library: sentencepiece.SentencePieceProcessor, **options: Any) -> Any:
    """The model in transformers. Its Metaspace adds no space before a text that begins with one."""
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    vocab = {library.id_to_piece(id): id for id in range(library.get_piece_size())}
    merges = generate_merges(vocab, {piece: library.get_score(id) for piece, id in vocab.items()})
    return LlamaTokenizer(vocab=vocab, merges=merges, **options)


def pieces_json(library: sentencepiece.SentencePieceProcessor, legacy: bool) -> bytes:
    """A tokenizer.json from transformers; legacy is the form of the published Llama 2."""
    source = json.loads(transformers_llama(library).backend_tokenizer.to_str())
    if legacy:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        source["normalizer"] = json.loads(normalizers.Sequence(steps).__getstate__())
        source["pre_tokenizer"] = None
        source["model"]["unk_token"] = "<unk>"
    return json.dumps(source).encode()


@pytest.fixture(scope="session")
def piece_kinds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    path = train(tmp_path_factory.mktemp("pieces"))
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    metaspace, legacy = (HuggingFaceTokenizer(pieces_json(library, legacy), "json") for legacy in (False, True))
    return library, [open_tokenizer(path), from_metadata(piece_metadata(library), "tiny"), legacy, metaspace]


@given(texts)
def test_piece_ids_are_sentencepieces(piece_kinds: tuple[Any, list[Any]], text: str) -> None:
    library, (*exact, metaspace) = piece_kinds
    for ours in exact:
        check(ours, text, library.encode(text), lossy="▁" in text)  # U+2581 can't be distinguished from a space
    text = text.lstrip(" ▁")
    check(metaspace, text, library.encode(text), lossy="▁" in text)


def test_piece_kinds_have_the_same_attributes(piece_kinds: tuple[Any, list[Any]]) -> None:
    library, kinds = piece_kinds
    for ours in kinds:
        ours.control = {name: id for name, id in ours.control.items() if id}  # transformers marks <unk> as special
        assert (ours.bos_id, ours.eos_id, ours.stop_ids, ours.strips_leading_space) == (1, 2, {2}, True)
    same_attributes(kinds[:3])
    assert kinds[0].control == {"<s>": 1, "</s>": 2}
    assert [ours.add_bos for ours in kinds[:2]] == [True, True]
    ids = library.encode(" a")
    assert all(ours.decode([1, *ids, 2]) == " a" for ours in kinds)


OPTIONS: list[dict[str, Any]] = [
    {"user_defined_symbols": ["[REF]", "[/REF]", "the cat"]}, {"add_dummy_prefix": False},
    {"byte_fallback": False, "vocab_size": 300}, {"model_type": "unigram", "vocab_size": 400},
    {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_other_models_have_the_ids_and_texts_of_sentencepiece(tmp_path: Path, options: dict[str, Any]) -> None:
    path = train(tmp_path, hard_vocab_limit=False, **options)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    kinds = [open_tokenizer(path)]
    if len(options) == 1:
        metadata = piece_metadata(theirs, **{"tokenizer.ggml.add_space_prefix": options.get("add_dummy_prefix", True)})
        for id, token in enumerate(metadata["tokenizer.ggml.tokens"]):
            if token in ("[REF]", "[/REF]", "the\u2581cat"):
                metadata["tokenizer.ggml.token_type"][id] = 4
        kinds.append(from_metadata(metadata, "x"))
    for ours in kinds:
        for text in (*TEXTS, *CORPUS[:6], "[REF]the cat[/REF] see", "x the cat 𝄞", "[REF] [REF"):
            assert ours.encode(text) == theirs.encode(text)
            assert ours.decode(ours.encode(text)).strip() == theirs.decode(theirs.encode(text)).strip()


# ------------------------------------------------------------------------------------------------- real vocabularies
@pytest.fixture(scope="session")
def llama3_file() -> Path:
    return wheel_member("llama-models==0.3.0", "llama_models/llama3/tokenizer.model")


@pytest.fixture(scope="session")
def llama3(llama3_file: Path) -> Tokenizer:
    return open_tokenizer(llama3_file)


@pytest.fixture(scope="session")
def meta(llama3_file: Path) -> Any:
    """Meta's own tokenizer class, from the same wheel."""
    root = wheel_member("llama-models==0.3.0", "llama_models/tokenizer_utils.py").parent.parent
    wheel_member("llama-models==0.3.0", "llama_models/llama3/tokenizer.py")
    sys.path.insert(0, str(root))
    try:
        return importlib.import_module("llama_models.llama3.tokenizer").Tokenizer(llama3_file)
    finally:
        sys.path.remove(str(root))


def test_llama3_golden_ids(llama3: Tokenizer, meta: Any) -> None:
    sentence = [2028, 374, 264, 1296, 11914, 13]
    assert llama3.encode("This is a test sentence.", bos=True, eos=True) == [128000, *sentence, 128001]
    assert llama3.encode("<|eot_id|>") == [27, 91, 68, 354, 851, 91, 29]
    assert llama3.control == meta.special_tokens
    assert (llama3.bos_id, llama3.eos_id, llama3.n_vocab) == (meta.bos_id, meta.eos_id, meta.n_words)
    assert llama3.stop_ids == set(meta.stop_tokens)


@given(texts)
def test_llama3_ids_are_metas(llama3: Tokenizer, meta: Any, text: str) -> None:
    check(llama3, text, meta.encode(text, bos=False, eos=False))


LONG = [
    "a" * 60_000, "ab " * 150_000, "x" * 25_001, "x" * 25_000 + " " * 25_001 + "y" * 50_000,
    "\u3000\u2028\x1c\x85" * 7_000, "w" * 399_990 + " " * 20 + "v" * 30_000,
]  # fmt: skip


def test_long_texts_are_cut_where_meta_cuts_them(llama3: Tokenizer, meta: Any, piece_kinds: Any) -> None:
    split = meta._split_whitespaces_or_nonwhitespaces
    for text in LONG:
        parts = (text[at : at + 400_000] for at in range(0, len(text), 400_000))
        assert list(pieces(text)) == [piece for part in parts for piece in split(part, 25_000)]
        assert len(text) > 100_000 or llama3.encode(text) == meta.encode(text, bos=False, eos=False)
    assert piece_kinds[1][1].decode(piece_kinds[1][1].encode(LONG[0])) == LONG[0]
    everything = "".join(chr(c) for c in range(sys.maxunicode + 1))
    assert all(run[0].isspace() == any(c.isspace() for c in run[0]) for run in RUN.finditer(everything))


def test_a_real_vocabulary_of_32000_pieces() -> None:
    path = wheel_member("mistral-common==1.13.1", "mistral_common/data/tokenizer.model.v1")
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for ours in (open_tokenizer(path), from_metadata(piece_metadata(theirs), "x")):
        assert (ours.n_vocab, ours.bos_id, ours.eos_id, ours.add_bos, ours.stop_ids) == (32000, 1, 2, True, {2})
        for text in [*TEXTS, *CORPUS[:6]]:
            check(ours, text, theirs.encode(text), lossy="▁" in text)
        assert ours.encode("\n")[1:] == [13]
