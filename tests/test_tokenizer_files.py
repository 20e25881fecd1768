"""Tokenizer files: what they name, tokens added to them, infill tokens, files that are damaged or could fill the memory."""

from __future__ import annotations

import base64
import json
import random
import re
import struct
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from llama.errors import LlamaError, TokenizerError, UsageError
from llama.tokenizer import Named, Tokenizer, open_tokenizer
from llama.tokenizer.common import BYTE_OF, NOTHING
from llama.tokenizer.gguf import from_metadata
from llama.tokenizer.growth import GROWTH, LARGEST_GROWTH, growth, longest_replacement
from llama.tokenizer.huggingface import HuggingFaceTokenizer
from llama.tokenizer.sentencepiece import SentencePieceModelTokenizer, write_field
from llama.tokenizer.tiktoken import TiktokenTokenizer
from llama.tokenizer.words import RULES
from llama.tokenizer.write import check_equal, gguf_metadata, huggingface_files

from . import tiny
from .scripts import make_tiny
from .test_tokenizer import INFILL, piece_metadata, pieces_json, tiktoken_lines, train, transformers_llama

TOKENS = [bytes([byte]) for byte in range(256)]
N = 340
MODEL = make_tiny.sentencepiece_model(N)
LIBRARY = sentencepiece.SentencePieceProcessor(model_proto=MODEL)


def added(id: int, content: str, special: bool = False, **more: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": content, "special": special, **flags, **more}


def source(**changes: Any) -> dict[str, Any]:
    """A byte-level tokenizer.json with two control tokens; the first one begins every text."""
    backend = Backend(models.BPE({c: id for id, c in enumerate([*BYTE_OF, "th", "the"])}, [("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    bos = {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [258], "tokens": ["<|begin_of_text|>"]}}
    post = {"type": "TemplateProcessing", "single": [bos, text], "pair": [bos, text], "special_tokens": special}
    tokens = [added(258 + i, name, True) for i, name in enumerate(("<|begin_of_text|>", "<|eot_id|>", "<|image|>"))]
    return {**json.loads(backend.to_str()), "added_tokens": tokens, "post_processor": post, **changes}


def opened(found: dict[str, Any], settings: dict[str, Any] | None = None, named: Named = NOTHING) -> Any:
    return HuggingFaceTokenizer(json.dumps(found).encode(), "tokenizer.json", settings, named)


# ----------------------------------------------------------------------------------------------- what the files name
@pytest.mark.parametrize(
    ("settings", "bos", "eos", "add_bos"),
    [
        ({}, 258, None, True), ({"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, 258, 259, True),
        ({"add_bos_token": False}, 258, None, False),
        ({"bos_token": "<|image|>", "add_bos_token": True, "eos_token": None}, 260, None, True),
        ({"eos_token": "the"}, 258, 257, True), ({"eos_token": "new"}, 258, 261, True),
    ],
)  # fmt: skip
def test_settings_name_bos_and_eos(settings: dict[str, Any], bos: int, eos: int | None, add_bos: bool) -> None:
    ours = opened(source(), settings)
    assert (ours.bos_id, ours.eos_id, ours.add_bos) == (bos, eos, add_bos)
    assert ours.encode_prompt("a") == ([bos] if add_bos else []) + ours.encode("a")
    assert ours.stop_ids == {259, eos} - {None} <= set(ours.control.values())
    assert not set(ours.encode("the new <|eot_id|>")) & set(ours.control.values())
    with_stop = opened(source(), settings, Named([257], [259, 999]))
    assert with_stop.eos_id == (eos or (None if "eos_token" in settings and eos else 259))
    assert opened(source(post_processor=None, added_tokens=[]), {}, Named([257])).bos_id == 257


def test_merges_and_whole_words_never_become_a_control_token() -> None:
    for ignore_merges in (False, True):
        found = source()
        found["model"]["ignore_merges"] = ignore_merges
        assert opened(found).encode("the thx") == [257, *opened(found).encode(" thx")]
        found["added_tokens"].append(added(257, "the", special=True))
        ours = opened(found)
        assert ours.encode("the thx") == [256, *ours.encode("e thx")]
        assert ours.control["the"] == 257
        assert ours.token_bytes(257) == b""
        found["model"]["unk_token"] = "th"
        assert opened(found).encode("th") == [*opened(found).encode("t"), *opened(found).encode("h")]


def test_unknown_characters_follow_the_library() -> None:
    found = json.loads(pieces_json(LIBRARY, legacy=True))
    found["model"]["byte_fallback"] = False
    ours, theirs = opened(found), Backend.from_str(json.dumps(found))
    ids = ours.encode("the 𝄞𝄞 dog")
    assert ids == theirs.encode("the 𝄞𝄞 dog", add_special_tokens=False).ids
    assert ids.count(0) == 1
    assert ours.decode(ids) == "the  dog"
    unknown = source()  # as in GPT-2's files, where an unknown byte ends the text
    unknown["model"]["unk_token"] = "<|eot_id|>"
    unknown["model"]["vocab"]["<|eot_id|>"] = unknown["model"]["vocab"].pop(chr(0x100 + 4))
    with pytest.raises(TokenizerError, match="the text has the byte 0x04, which has no token"):
        opened(unknown).encode("a\x04b")


def test_unigram_models() -> None:
    letters = [[c, -3.0] for c in "</s>abunk[]"]
    pieces = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], ["▁", -2.0], *letters, ["▁ab", -1]]
    meta = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    tokens = [added(1, "<s>", True), added(2, "</s>", True), added(16, "<pad>", True), added(17, "[REF]")]
    model = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    found = {"version": "1.0", "added_tokens": tokens, "pre_tokenizer": meta, "decoder": meta, "model": model}
    ours, theirs = opened(found), Backend.from_str(json.dumps(found))
    assert ours.control == {"<s>": 1, "</s>": 2, "<pad>": 16}
    for text in ("ab", "ab ab [REF] b", "a  b", "x"):
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text).ids).replace("<unk>", "")
    for text in ("</s>", "a</s>b <s>", "<pad>"):
        assert not set(ours.encode(text)) & {1, 2, 16}
    with pytest.raises(TokenizerError, match=r"U\+FFFF"):  # the library's ids are those of three unknown characters
        ours.encode("\uffff<unk>")


# ----------------------------------------------------------------------------- tokens added to a SentencePiece model
@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("listed", ["added_tokens.json", "added_tokens_decoder"])
def test_a_sidecar_adds_tokens_as_in_transformers(tmp_path: Path, legacy: bool, listed: str) -> None:
    theirs = transformers_llama(LIBRARY, legacy=legacy)
    special = {"<|im_end|>": True, "<|im_start|>": True, "[TOOL]": False}
    theirs.add_tokens([AddedToken(name, special=flag, normalized=False) for name, flag in special.items()])
    settings: dict[str, Any] = {"eos_token": "<|im_end|>", "tokenizer_class": "LlamaTokenizer", "legacy": legacy}
    if listed == "added_tokens.json":
        (tmp_path / listed).write_text(json.dumps({name: N + i for i, name in enumerate(special)}))
    else:
        settings[listed] = {str(N + i): added(N + i, *entry) for i, entry in enumerate(special.items())}
    (tmp_path / "tokenizer.model").write_bytes(MODEL)
    ours = open_tokenizer(tmp_path / "tokenizer.model", settings, Named([1], [2, N]))
    assert (ours.eos_id, ours.stop_ids, ours.bos_id, ours.add_bos) == (N, {2, N}, 1, True)
    assert ours.n_vocab == len(theirs) == N + 3
    assert ours.control == {"<s>": 1, "</s>": 2, "<|im_end|>": N, "<|im_start|>": N + 1}
    assert ours.decode([N + 1, N + 2, N]) == "[TOOL]"
    dice = random.Random(0)
    for _ in range(200):
        text = "".join(dice.choices([*special, "the dog", "bites ", "\n", "<s>", "é", "a"], k=dice.randint(0, 7)))
        assert ours.encode(text, parse_special=True) == theirs.encode(text, add_special_tokens=False), text
        assert not set(ours.encode(text)) & set(ours.control.values())


BASE = {"<unk>": 0, "<s>": 1, "</s>": 2}
LISTED = {
    "Llama 2": (BASE, {"added_tokens_decoder": {str(id): added(id, name, True) for name, id in BASE.items()}}),
    "pad": (BASE | {"[PAD]": N}, {"added_tokens_decoder": {"0": added(0, "<unk>", True)}, "pad_token": "[PAD]"}),
    "gap": (BASE | {"<|im_end|>": N + 9}, {"added_tokens_decoder": {str(N + 9): added(N + 9, "<|im_end|>", True)}}),
    "piece": (BASE | {"it": LIBRARY["it"]}, {"added_tokens_decoder": {str(LIBRARY["it"]): added(LIBRARY["it"], "it")}}),
    "sidecars": (BASE | {"[PAD]": N}, None),
}


@pytest.mark.parametrize(
    "spaces", [{"legacy": True}, {"legacy": None}, {}, {"legacy": False}, {"add_prefix_space": True}]
)
@pytest.mark.parametrize("name", LISTED)
def test_listed_tokens_of_a_model_keep_their_ids(tmp_path: Path, name: str, spaces: dict[str, Any]) -> None:
    """The texts between the tokens have SentencePiece's ids. After a token, `legacy` decides whether a space is added.

    As in transformers' LlamaTokenizer in Python (version 4), where a missing or null `legacy` counts as true.
    """
    ids, settings = LISTED[name]
    special = BASE.keys() | {"[PAD]", "<|im_end|>"}
    if settings is None:
        (tmp_path / "added_tokens.json").write_text(json.dumps({"[PAD]": N}))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "[PAD]"}}))
    (tmp_path / "tokenizer.model").write_bytes(MODEL)
    ours = open_tokenizer(tmp_path / "tokenizer.model", {"unk_token": "<unk>", **(settings or {}), **spaces})
    assert (ours.bos_id, ours.eos_id, ours.add_bos, ours.n_vocab) == (
        1,
        2,
        True,
        max(N, *(id + 1 for id in ids.values())),
    )
    assert ours.control == {token: id for token, id in ids.items() if token in special - {"<unk>"}}
    assert all(ours.decode([id]) == "" for id in ours.control.values())
    space = spaces.get("legacy") is not False
    dice = random.Random(name)
    for _ in range(100):
        text = "".join(dice.choices([*ids, "the dog", " bites", "  ", "\n", "é", "a", "𝄞"], k=dice.randint(0, 7)))
        expected: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, ids))})", text):
            if part in ids:
                expected.append(ids[part])
            elif part:
                joined = LIBRARY.encode("☺" + part)[len(LIBRARY.encode("☺")) :]
                expected += LIBRARY.encode(part) if space or not expected else joined
        assert ours.encode(text, parse_special=True) == expected, text
        plain = ours.encode(text)
        assert not set(plain) & set(ours.control.values())
        assert name == "piece" or plain == LIBRARY.encode(text)


@pytest.mark.parametrize("special", [False, True])
def test_added_tokens_of_a_model_drop_white_space_as_in_transformers(tmp_path: Path, special: bool) -> None:
    """As in transformers' LlamaTokenizer in Python (version 4)."""
    (tmp_path / "tokenizer.model").write_bytes(MODEL)
    tokens = [added(N, "[A]", special, lstrip=True), added(N + 1, "[B]", special, rstrip=True)]
    settings = {"added_tokens_decoder": {str(token["id"]): token for token in tokens}, "legacy": True}
    ours = open_tokenizer(tmp_path / "tokenizer.model", settings)
    dog, bites = LIBRARY.encode("the dog"), LIBRARY.encode("bites")
    for text in ("the dog [A]bites", "the dog \n[A]bites"):
        assert ours.encode(text, parse_special=True) == [*dog, N, *bites]
    assert ours.encode("the dog[B] bites", parse_special=True) == [*dog, N + 1, *bites]
    assert ours.encode(" [B] [A] ", parse_special=True) == [*LIBRARY.encode(" "), N + 1, N, *LIBRARY.encode(" ")]
    assert (ours.encode("the dog [A]bites") == [*dog, N, *bites]) is not special


def test_add_prefix_space_false_adds_no_space_to_a_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(MODEL)
    for legacy, text in ((False, "the dog"), (True, " the dog")):  # true ignores the setting, as transformers does
        ours = open_tokenizer(tmp_path / "tokenizer.model", {"legacy": legacy, "add_prefix_space": False})
        assert ours.encode("the dog") == LIBRARY.encode("☺" + text)[len(LIBRARY.encode("☺")) :]
        assert ours.decode(ours.encode("the dog")) == "the dog"
        assert ours.decode(ours.encode(" the")) == " the"


# --------------------------------------------------------------------------------------------------------------- infill
FORMS = {  # as in the models' own examples: {p} is the prefix, {s} the suffix
    "Qwen2.5-Coder": ("<|fim_prefix|>{p}<|fim_suffix|>{s}<|fim_middle|>", "<|file_sep|>"),
    "StarCoder": ("<fim_prefix>{p}<fim_suffix>{s}<fim_middle>", "<file_sep>"),
    "DeepSeek-Coder": ("<｜fim▁begin｜>{p}<｜fim▁hole｜>{s}<｜fim▁end｜>", "<|endoftext|>"),
    "Seed-Coder": ("<[fim-suffix]>{s}<[fim-prefix]>{p}<[fim-middle]>", "<|endoftext|>"),
    "Codestral": ("[SUFFIX]{s}[PREFIX]{p}", "</s>"),
}
PARTS = [
    ("def f(x):\n    return ", "\n\nprint()"),
    ("", ""),
    ("the", "the's"),
    ("a\n", ")\n  "),
    ("", "<|fim_prefix|>p"),
]


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("special", [True, False])
def test_infill_prompts_are_those_of_the_models_examples(family: str, special: bool) -> None:
    """In a tokenizer.json and as GGUF; the library encodes the example, and text alone."""
    form, end = FORMS[family]
    marks = re.findall(r"<[^{}>]+>|\[[A-Z]+\]", form)
    found = source(post_processor=None, pre_tokenizer=json.loads(RULES["deepseek-r1-qwen"].words.__getstate__()))
    found["added_tokens"] = [added(258 + i, one, special or one == end) for i, one in enumerate((*marks, end))]
    found["model"]["merges"].append(["º", "the"])  # the last byte of U+263A and a text that follows it
    found["model"]["vocab"]["ºthe"] = 258 + len(marks) + 1
    hf = opened(found)
    kinds = [hf, from_metadata(gguf_metadata(hf, hf.n_vocab), "x.gguf")]
    library, alone = Backend.from_str(json.dumps(found)), Backend.from_str(json.dumps({**found, "added_tokens": []}))
    for ours in kinds:
        for prefix, suffix in PARTS:
            ids = [
                [library.token_to_id(part)] if part in marks
                else alone.encode({"{p}": prefix, "{s}": suffix}.get(part, part)).ids
                for part in re.split(r"({.}|<[^{}>]+>|\[[A-Z]+\])", form)
            ]  # fmt: skip
            assert ours.encode_prompt(prefix, suffix=suffix) == [id for part in ids for id in part]
            if suffix != PARTS[-1][1]:
                assert ours.encode_prompt(prefix, suffix=suffix) == library.encode(form.format(p=prefix, s=suffix)).ids
        assert {*marks} <= ours.control.keys()
        assert not {*ours.encode(form)} & {*ours.control.values()}
        assert library.token_to_id(end) in ours.stop_ids
        with pytest.raises(UsageError, match="parse_special"):
            ours.encode_prompt("a", parse_special=True, suffix="b")


@pytest.mark.parametrize("keys", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_gguf_keys_name_the_infill_ids(keys: tuple[str, str, str]) -> None:
    metadata = tiny.byte_vocabulary()
    n = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "hello!", "B", "C", "SEP"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1, 4, 3, 4]
    metadata |= {f"tokenizer.ggml.{key}_token_id": n + i for i, key in enumerate((*keys, "fim_sep"))}
    ours = from_metadata({**metadata, "tokenizer.ggml.add_bos_token": True}, "x.gguf")
    a, b = ours.encode("hello "), ours.encode("hello!")
    assert ours.encode_prompt("hello ", suffix="hello!") == [1, n, *a, n + 1, *b, n + 2]
    assert {*range(n, n + 4)} <= {*ours.control.values()}
    assert ours.stop_ids >= {n + 3}
    again = from_metadata(gguf_metadata(ours, ours.n_vocab), "x.gguf")
    assert again.encode_prompt("hello ", suffix="hello!") == ours.encode_prompt("hello ", suffix="hello!")
    text, settings = huggingface_files(ours)
    written = HuggingFaceTokenizer(text.encode(), "x", settings, Named((), [n + 3]))
    with pytest.raises(TokenizerError, match=r"its infill .* would become None"):  # no key of tokenizer.json names them
        check_equal(ours, written)
    metadata[f"tokenizer.ggml.{keys[2]}_token_id"] = n + 4
    with pytest.raises(TokenizerError, match=f"is {n + 4}, outside the vocabulary"):
        from_metadata(metadata, "x.gguf")


@pytest.fixture(scope="module", params=["user_defined_symbols", "control_symbols"])
def code_llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Any]:
    """A vocabulary whose infill pieces have one of two types in the file, in every kind of file; and the library."""
    marks = {request.param: [*INFILL, "<step>"]}
    path = train(tmp_path_factory.mktemp("code"), vocab_size=640, required_chars="☺", **marks)
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    found = json.loads(pieces_json(library, legacy=True))
    found["added_tokens"] += [added(library.piece_to_id(piece), piece, True) for piece in INFILL]
    return [
        open_tokenizer(path),
        from_metadata(piece_metadata(library), "tiny"),
        opened(found, {"add_bos_token": True}),
    ], library


def test_infill_ids_are_those_of_code_llamas_formula(code_llama: tuple[list[Any], Any]) -> None:
    kinds, library = code_llama
    pre, suf, mid, eot = map(library.piece_to_id, INFILL)
    for prefix, suffix in (("def f(x):\n    return ", "\n\nprint()"), ("", ""), ("  a", "  b"), ("naïve", "漢")):
        after = library.encode("☺" + suffix)[len(library.encode("☺")) :]
        for ours in kinds:
            assert ours.encode_prompt(prefix, suffix=suffix) == [1, pre, *library.encode(prefix), suf, *after, mid]
            assert {library.eos_id(), eot} <= ours.stop_ids
    for ours in kinds:
        assert set(INFILL) <= ours.control.keys()
        for text in ("<PRE>", "a <SUF> b", " <MID><MID>", "x<step>", "▁<PRE>", "the quick  <SUF>", "<step> <step>"):
            ids = ours.encode(text)
            assert not set(ids) & set(ours.control.values()), text
            assert ours.decode(ids) == text.replace("▁", " ")


# ------------------------------------------------------------------------------------------------------- bad files
def test_the_kind_is_detected_by_content(tmp_path: Path) -> None:
    lines = b"\r\n".join(tiktoken_lines(TOKENS))  # Windows line ends, and none at the end
    for data, kind in ((lines, "tiktoken"), (MODEL, "SentencePiece"), (json.dumps(source()).encode(), "BPE")):
        for name in ("tokenizer.model", "tokenizer.json", "x"):
            (tmp_path / name).write_bytes(data)
            assert kind in open_tokenizer(tmp_path / name).kind
    assert TiktokenTokenizer(lines, "x").n_vocab == 512


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"), (b"xyz", "begins with b'xyz'"), (b"{}", "'model' is missing"), (b'{"a":' * 100_000, "not valid JSON"),
        (b"\n\x09\n\x05<unk>\x18\x02" b"\n\x03\n\x01a", "ends after 2 pieces"),
        (MODEL + bytes([9 << 3 | 3, 9 << 3 | 4]), "not a SentencePiece model"),  # a group, which hides what follows
        (MODEL.replace("▁the".encode(), b"\xa2\x96\x81the"), "not a SentencePiece model"),
        (b"\n".join(tiktoken_lines([*TOKENS, *(b"%d" % i for i in range(1000, 1000 + 200_000 - 256))])), "of Llama 4"),
    ],
    ids=range(8),
)  # fmt: skip
def test_files_that_are_not_tokenizers_are_rejected(data: bytes, message: str, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(LlamaError, match=message) as caught:
        open_tokenizer(tmp_path / "tokenizer.model")
    assert "tokenizer.model" in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("line", [b"not base64! 3", b"", b"YWJj -3", b"YWJj 3 1", b" 3", b"YWJj 4", b"AA== 3", None])
def test_damaged_lines_of_llama3_are_named(line: bytes | None) -> None:
    lines = tiktoken_lines(TOKENS)
    lines[3:4] = [] if line is None else [line]
    with pytest.raises(TokenizerError, match=r"^x: line 4 is .*, expected a new token in base64 and the rank 3"):
        TiktokenTokenizer(b"\n".join(lines), "x")
    with pytest.raises(TokenizerError, match="b'A' is not a token"):
        TiktokenTokenizer(b"\n".join([*tiktoken_lines(TOKENS)[:65], b"YWJjZGVm 65", *tiktoken_lines(TOKENS)[66:]]), "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merges": [["q", "xyzzyq"]]}, "out of vocabulary"), ({"merges": ["a b c"]}, "too many values"),
        ({"vocab": {"zz": -1}}, "not a usable"), ({"decoder": None, "pre_tokenizer": None}, "decoder"),
        ({"added_tokens": [{"id": 1}]}, "'content' is missing"),
        ({"added_tokens": [{"content": 5, "special": True}]}, "content of an added token is 5, expected a string"),
        ({"added_tokens": [{"content": "a", "special": "false"}]}, "special of the added token 'a' must be true or false"),
    ],
)  # fmt: skip
def test_a_damaged_tokenizer_json_is_rejected(change: dict[str, Any], message: str, capfd: Any) -> None:
    found = source()
    place = found["model"] if change.keys() & {"vocab", "merges"} else found
    place.update(change)
    with pytest.raises(TokenizerError, match=f"^tokenizer.json: .*{message}"):
        opened(found)
    assert capfd.readouterr().err == ""
    wrong = {"content": 5, "special": True}
    for settings in (
        {"eos_token": 5}, {"pad_token": wrong}, {"add_bos_token": "yes"}, {"additional_special_tokens": "ab"},
        *({"added_tokens_decoder": one} for one in ({"x": {}}, {"5": wrong}, [wrong])),
    ):  # fmt: skip
        with pytest.raises(TokenizerError):
            opened(source(), settings)
        with pytest.raises(TokenizerError):
            SentencePieceModelTokenizer(MODEL, "x", settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "no tokenizer"), ({"model": "bert"}, "'bert', expected gpt2 or llama"),
        ({"pre": "klingon"}, "klingon"), ({"tokens": None}, "tokens' is missing"), ({"token_type": [1]}, "can't be built"),
        ({"merges": ["q x"]}, "out of vocabulary"), ({"bos_token_id": 266}, "outside the vocabulary of 266 tokens"),
        ({"eom_token_id": "2"}, "outside the vocabulary"), ({"add_bos_token": 1}, "add_bos_token must be true or false"),
        ({"model": "llama", "scores": [float("nan")] * 266}, "not finite"), ({"model": "llama", "scores": [0.0] * 3}, "can't"),
    ],
)  # fmt: skip
def test_damaged_gguf_metadata_is_rejected(change: dict[str, Any], message: str) -> None:
    changed = {**tiny.byte_vocabulary(), **{f"tokenizer.ggml.{key}": value for key, value in change.items()}}
    with pytest.raises(TokenizerError, match=message):
        from_metadata({key: value for key, value in changed.items() if value is not None}, "tiny.gguf")


def test_a_vocabulary_without_begin_or_end() -> None:
    """No id is invented: without bos a prompt begins with its text; stop ids are found by name."""
    metadata = tiny.byte_vocabulary()
    for name in ("bos", "eos"):
        metadata.pop(f"tokenizer.ggml.{name}_token_id")
    ours: Tokenizer = from_metadata(metadata, "x")
    assert ours.bos_id is ours.eos_id is None
    assert ours.stop_ids == {ours.control["<|endoftext|>"], ours.control["<|im_end|>"]}
    assert ours.encode_prompt("a") == ours.encode("a")
    assert ours.encode_prompt("") == []
    with pytest.raises(TokenizerError, match="no begin-of-text id"):
        ours.encode("a", bos=True)


LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


REFUSED: dict[str, dict[str, Any]] = {
    "twelve replacements": sequence(*[replace("a", "a" * 10)] * 12),
    "replacements of nothing": sequence(*[replace("", "yy")] * 20),
    "a prefix": {"type": "Prepend", "prepend": "▁" * 256},
    "sequences in sequences": sequence(*[sequence(*[replace("a", "aa")] * 3)] * 3),
    "a step that looks like a list": {**replace("a", "a" * 1000), "normalizers": []},
}


@pytest.mark.parametrize("name", REFUSED)
def test_steps_that_lengthen_a_text_are_refused(name: str) -> None:
    found = source(normalizer=REFUSED[name])
    found["added_tokens"].append(added(261, "aab", normalized=True))  # normalized when it is added
    with pytest.raises(TokenizerError, match="characters for one character of a text"):
        HuggingFaceTokenizer(json.dumps(found).encode(), "tokenizer.json")
    levels = {"type": "Sequence", "pretokenizers": [LEVEL] * 3}
    with pytest.raises(TokenizerError, match="may write 512 characters for one character of a text"):
        HuggingFaceTokenizer(json.dumps(source(pre_tokenizer=levels)).encode(), "tokenizer.json")


@pytest.mark.parametrize("name", [name for name in GROWTH if name != "BertNormalizer"])
def test_the_bound_holds_for_every_character(name: str) -> None:
    """The oracle is the library, run on every character that has a decomposition or a lower case."""
    changed = [one for one in map(chr, range(0x110000)) if unicodedata.decomposition(one) or one.lower() != one]
    if hasattr(normalizers, name) and name != "ByteLevel":
        largest = max(len(getattr(normalizers, name)().normalize_str(character)) for character in changed)
    else:
        step = getattr(pre_tokenizers, name)()
        largest = max(sum(len(word) for word, _ in step.pre_tokenize_str(one)) for one in (*changed[::50], "😀", "é"))
    assert largest <= GROWTH[name] < 2.5 * largest


def test_a_table_of_replacements_is_measured() -> None:
    """The oracle is the library: "a" -> text. The root's offset is 1, so "a" is at 1 ^ 97 = 96, its value at 96 ^ 3."""
    trie = [{0: 1 << 10, 96: 97 | 0x100 | 3 << 10, 99: 2**31}.get(i, 0) for i in range(256)]
    for text in ("xyz", "漢", "é" * 256, "x" * 257):
        table = struct.pack("<257I", 1024, *trie) + text.encode() + b"\0"
        assert longest_replacement(table) == len(text)
        model = MODEL + write_field(3, write_field(2, table))
        step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
        assert growth(step) == len(text)
        if len(text) > LARGEST_GROWTH:
            with pytest.raises(TokenizerError, match="may write 257 characters for one character of a text"):
                SentencePieceModelTokenizer(model, "x")
        else:
            ours = SentencePieceModelTokenizer(model, "x")
            assert ours.decode(ours.encode("abab")) == f"{text}b" * 2
