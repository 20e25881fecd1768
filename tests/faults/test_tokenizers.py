"""Group E: damaged and hostile tokenizer files, and invalid texts."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import json
import struct
import subprocess
import sys
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers

from llama import loader
from llama.errors import TokenizerError
from llama.text import Llama
from llama.tokenizer import Tokenizer, open_tokenizer, patterns
from llama.tokenizer.common import LLAMA3_WORDS
from llama.tokenizer.gguf import from_metadata
from llama.tokenizer.huggingface import HuggingFaceTokenizer
from llama.tokenizer.patterns import check_pattern
from llama.tokenizer.sentencepiece import SentencePieceModelTokenizer, write_field
from llama.tokenizer.steps import NORMALIZERS, PRE_TOKENIZERS, charsmap_growth

from .. import small_vocabularies, tiny
from ..scripts import make_tiny
from .conftest import Try
from .harness import cuts, flips

RUN = ("-n", "1", "--device", "cpu", "--dtype", "float32")
RAW = ("--raw", "a", *RUN)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("made")
    return {
        "llama-2-7b": make_tiny.make(root / "llama2", "llama-2-7b"),
        "llama-3-8b": make_tiny.make(root / "llama3", "llama-3-8b"),
        "hf": make_tiny.make(root / "hf", "llama-3-8b", format="hf"),
    }


def copy(source: Path, target: Path) -> Path:
    """A folder of links to another folder's files; a test replaces the files that it changes."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).symlink_to(file)
    return target


def replace(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).unlink()
    (folder / name).write_bytes(data)
    return folder


# ---------------------------------------------------------------------------------------------------------- the files
@pytest.mark.row("E01")
def test_a_tokenizer_of_another_model_is_rejected(made: dict[str, Path], tmp_path: Path, attempt: Try) -> None:
    """Both files are named tokenizer.model. The content shows the kind, the number of tokens shows the mismatch."""
    folder = copy(made["llama-2-7b"], tmp_path / "model")
    replace(folder, "tokenizer.model", (made["llama-3-8b"] / "tokenizer.model").read_bytes())
    attempt("generate", *RAW, "-m", folder).refused(
        "model", "768 tokens", "512 rows", "use the tokenizer that was published"
    )
    # The opposite case has too many rows: 32,000 tokens for 128,256 rows in the real models, the same ratio here.
    wide = dataclasses.replace(tiny.CONFIG, vocab_size=1066)
    path = tiny.write_gguf(tmp_path / "wide.gguf", wide, tiny.weights(wide))
    attempt("generate", *RAW, "-m", path).refused(
        "wide.gguf", "266 tokens", "1066 rows", "use the tokenizer that was published"
    )


@pytest.mark.row("E02")
@pytest.mark.parametrize("at", [0, 1, 300, 511])
@pytest.mark.parametrize("line", [b"", b"not base64!", b"YWJj", b"#", b"YWJjZ 7", b"\xff\xfe 7"])
def test_the_error_names_a_malformed_line(
    made: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], at: int, line: bytes
) -> None:
    """If it were skipped, all control ids would shift."""
    lines = (made["llama-3-8b"] / "tokenizer.model").read_bytes().splitlines()
    lines[at] = line
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    if at == 0:  # then the kind is not recognized
        with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
            open_tokenizer(tmp_path / "tokenizer.model")
    else:
        with pytest.raises(TokenizerError, match=rf"tokenizer\.model: line {at + 1} "):
            open_tokenizer(tmp_path / "tokenizer.model")


@pytest.mark.row("E02")
def test_a_malformed_line_ends_the_command(made: dict[str, Path], tmp_path: Path, attempt: Try) -> None:
    folder = copy(made["llama-3-8b"], tmp_path / "model")
    lines = (folder / "tokenizer.model").read_bytes().splitlines()
    replace(folder, "tokenizer.model", b"\n".join([*lines[:300], b"??? 300", *lines[301:]]))
    attempt("generate", *RAW, "-m", folder).refused("tokenizer.model", "line 301", "base64", "download it again")


@pytest.mark.row("E02")
def test_control_ids_follow_the_last_rank(made: dict[str, Path]) -> None:
    """The oracle for a skipped line: the control ids follow from the number of lines alone."""
    path = made["llama-3-8b"] / "tokenizer.model"
    lines = path.read_bytes().count(b"\n")
    tokenizer = open_tokenizer(path)
    assert sorted(tokenizer.control.values()) == [*range(lines, lines + 256)]
    assert tokenizer.control["<|eot_id|>"] == lines + 9


@pytest.mark.row("E03")
def test_repeated_ranks_and_missing_bytes_are_errors(made: dict[str, Path], tmp_path: Path, attempt: Try) -> None:
    folder = copy(made["llama-3-8b"], tmp_path / "model")
    lines = (folder / "tokenizer.model").read_bytes().splitlines()
    replace(folder, "tokenizer.model", b"\n".join([*lines[:300], lines[299], *lines[301:]]))
    attempt("generate", *RAW, "-m", folder).refused("tokenizer.model", "line 301 has rank 299, expected 300")
    twice = [*lines[:300], lines[0].split()[0] + b" 300", *lines[301:]]
    replace(folder, "tokenizer.model", b"\n".join(twice))
    attempt("generate", *RAW, "-m", folder).refused("tokenizer.model", "line 301 repeats the token of line 1")
    without = [*lines[:65], b"YWJjZGVmZ2g= 65", *lines[66:]]
    replace(folder, "tokenizer.model", b"\n".join(without))
    attempt("generate", *RAW, "-m", folder).refused("tokenizer.model", "byte 0x41 is not a token")


@pytest.mark.row("E04")
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_truncated_file_of_hugging_face(made: dict[str, Path], tmp_path: Path, attempt: Try, name: str) -> None:
    folder = copy(made["hf"], tmp_path / "model")
    data = (folder / name).read_bytes().rstrip()
    for _, cut in cuts(data, len(data) - 1, every=len(data) // 3):
        outcome = attempt("generate", *RAW, "-m", replace(folder, name, cut))
        if name == "tokenizer.json":
            outcome.refused(name)
        else:  # the model runs without it, with a warning
            assert outcome.survived()
            assert f"warning: {folder / name}" in outcome.error


@pytest.mark.row("E04")
@pytest.mark.parametrize("every", [70_001, pytest.param(499, marks=pytest.mark.slow)])
def test_a_tokenizer_json_with_a_flipped_bit(made: dict[str, Path], tmp_path: Path, attempt: Try, every: int) -> None:
    """The model runs or the file is rejected; nothing else happens."""
    folder = copy(made["hf"], tmp_path / "model")
    data = (folder / "tokenizer.json").read_bytes()
    for _, changed in flips(data, len(data), every):
        attempt("generate", *RAW, "-m", replace(folder, "tokenizer.json", changed)).survived()


@pytest.mark.row("E04")
@pytest.mark.row("E03")
@pytest.mark.parametrize("every", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_tokenizer_model_with_a_flipped_bit(made: dict[str, Path], tmp_path: Path, every: int, attempt: Try) -> None:
    """The files of SentencePiece and Llama 3 work or are rejected; the libraries' panics become errors too."""
    for model in ("llama-2-7b", "llama-3-8b"):
        folder = copy(made[model], tmp_path / f"{model}{every}")
        data = (folder / "tokenizer.model").read_bytes()
        for _, changed in flips(data, len(data), 20011 if every else 301):
            attempt("generate", *RAW, "-m", replace(folder, "tokenizer.model", changed)).survived()


@pytest.mark.row("E04")
def test_a_piece_that_is_not_utf8(made: dict[str, Path], tmp_path: Path, attempt: Try) -> None:
    """The sentencepiece library opens such a model and fails to return the piece."""
    folder = copy(made["llama-2-7b"], tmp_path / "model")
    data = (folder / "tokenizer.model").read_bytes()
    at = data.index("▁the".encode())
    replace(folder, "tokenizer.model", data[:at] + b"\xa2" + data[at + 1 :])
    attempt("generate", *RAW, "-m", folder).refused("tokenizer.model", "damaged", "download it again")


HOSTILE = [
    "(a+)+$", "(a|a)*$", "(a|ab)+?c", r"(?:\p{L}+\s?)*x", "((a*))*", "(?:a+){2,}b", "([a]|b+)+", "a*a*a*b",
    r"(\w+)++", "(a?){50}", "(a{1,50}){1,50}", r"(?i:(?:x+x+)+y)", "[[a]b]*[a]*[a]*x", r"(?:[^\]]+\])*(",
    # calls, backreferences, conditions, absence, callouts, options that change the structure
    r"(?<p>a\g<p>?\g<p>?)b", r"(a)\1", r"(?<n>a)\k<n>", r"(?(1)a|b)", "(?~ab)", "(*FAIL)", "a(?i)b|c",
    r"\X*", "(?>a+)+", "(?>a*)a*b", "(?>(?:a|a)+)b", "(?=a{1,3}+)", "a{2,}+b", "(?:ab){1,3}+", "(?<!a{0,3}+)c",
    # many ways without an unbounded repetition
    "(a|a)" * 30 + "b", "a?" * 30 + "b", "(?:(?:a|a){9}){9}b", "((a{99}){99}){99}",
    # what Onigmo reads differently: a repetition of a repetition, the end of a class
    "a{1,3}+b", "a{3}?", "a**", "[a[:" + "x" * 30 + ":](b+)+]", "[](a+)+]", "[a&&[b]](c+)+",
    "[[:foo:]]", "[a&&]](b+)+]", "[a[]b](c+)+]", "[[[[[a]]]]]", "[[a]", r"[\k<n>]",
    # cubic time, and patterns whose compilation takes seconds
    "a*a*b", "a*(?=b*c)", "a*(?!b*)", r"\s*\s*\s", "a" * 70_000, "(?i)" + "\ufb03" * 60_000, "(?i)" + r"[\p{L}]" * 1100,
]  # fmt: skip
# Word patterns of the tokenizer.json files of the LLaMA family and related models.
HARMLESS = [
    LLAMA3_WORDS,
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|\s*[\r\n]+",
    # GPT-4o's, GPT-4's with possessive repetitions, digits in groups from the right
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\s+",
    r"[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    r"\A▁(?=(?:\[REF\]|the▁cat)\z)",
    " {2,}",
    "(?i)abc",
    # BLOOM's, GPT-4's newer one, Kimi's, and rarer syntax
    " ?[^(\\s|[.,!?…。，、।۔،])]+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s",
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"(?>\s+)|\h+|[[:alpha:]_[:^space:]]+",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"\p{N}{1,3}",
    "[0-9][0-9][0-9]",
]


@pytest.mark.row("E05")
@pytest.mark.parametrize("pattern", HARMLESS)
def test_the_llama_familys_patterns_are_accepted(pattern: str) -> None:
    check_pattern(pattern, "tokenizer.json")


@pytest.mark.row("E05")
@pytest.mark.parametrize("pattern", HOSTILE)
@pytest.mark.parametrize("where", ["pre_tokenizer", "normalizer"])
def test_a_regex_that_could_run_forever_is_rejected(
    made: dict[str, Path], tmp_path: Path, attempt: Try, pattern: str, where: str
) -> None:
    folder = copy(made["hf"], tmp_path / "model")
    source = json.loads((folder / "tokenizer.json").read_text())
    regex = {"Regex": pattern}
    split = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
    step = {"type": "Replace", "pattern": regex, "content": ""} if where == "normalizer" else split
    steps = "normalizers" if where == "normalizer" else "pretokenizers"
    before = [source[where]] if source[where] else []
    source[where] = {"type": "Sequence", steps: [*before, step]}
    replace(folder, "tokenizer.json", json.dumps(source).encode())
    prompt = "a" * 40 + "b"
    if where == "normalizer" or pattern not in HOSTILE[:3]:
        with pytest.raises(
            TokenizerError, match=r"tokenizer\.json: .*( too long|characters together|classes together)"
        ):
            loader.load_tokenizer(folder)
        return
    attempt("generate", "--raw", prompt, *RUN, "-m", folder).refused("tokenizer.json", "too long", "download the file")


@pytest.mark.row("E05")
@pytest.mark.parametrize("pattern", [pattern for pattern in HARMLESS if "abc" not in pattern])
def test_an_accepted_pattern_takes_bounded_time(pattern: str) -> None:
    """The oracle is the library itself, on texts that almost match."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    for text in ("a", "1", " ", "\n ", "aA", "'", "é", "1 ", ".\n", "\u0301"):
        started = time.thread_time()
        split.pre_tokenize_str(text * 1000 + "\u3042")
        assert time.thread_time() - started < 1


# Another process compiles the patterns, because the peak of this one's memory is already higher.
COMPILE = """
import json, resource, sys, time
from tokenizers import Regex
for pattern in json.load(sys.stdin):
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    Regex(pattern)
    print(time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.row("E14")
def test_accepted_patterns_compile_in_little_time_and_memory() -> None:
    """The units are the costliest of some hundred: large classes, and characters that fold to two or three."""
    units = [
        "[a-\U0010ffff]", r"[\p{L}]", r"[\w&&\p{L}]", r"\p{L}", "ss", "\ufb03", "\u1e9e", "\u1f80",
    ]  # fmt: skip
    longest = []
    for unit in units:
        times = (patterns.LONGEST - 4) // len(unit)
        longest.append("(?i)" + unit * (min(times, patterns.MOST_CLASSES) if "[" in unit else times))
        patterns.check_sizes(longest[-1:], "f")
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, input=json.dumps(longest), capture_output=True, text=True, check=True)
    results = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    assert len(results) == len(units)
    assert max(seconds for seconds, _ in results) < 0.5, results
    assert sum(grown for _, grown in results) < 100 * 1024, results  # KiB


@pytest.mark.row("E14")
def test_many_steps_with_patterns_are_rejected() -> None:
    def source(*patterns: str) -> bytes:
        splits = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
        step = {
            "type": "Sequence",
            "pretokenizers": [*splits, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}],
        }
        return json.dumps({**json.loads(small_vocabularies.tokenizer_json()), "pre_tokenizer": step}).encode()

    HuggingFaceTokenizer(source(*HARMLESS), "tokenizer.json")
    with pytest.raises(TokenizerError, match="classes together"):
        HuggingFaceTokenizer(source(*[r"[\p{L}\p{N}]" * 20] * 20), "tokenizer.json")
    with pytest.raises(TokenizerError, match="characters together"):
        HuggingFaceTokenizer(source(*["a" * 1000] * 9), "tokenizer.json")
    with pytest.raises(TokenizerError, match="more than 64 steps"):
        HuggingFaceTokenizer(source(*["a"] * 64), "tokenizer.json")


class_parts = st.recursive(
    st.lists(st.sampled_from(["a", "b", "&", "&&", "^", ":", "]", "[", r"\]", r"\h", "[:alpha:]"]), max_size=4).map(
        "".join
    ),
    lambda inner: st.tuples(st.sampled_from(["[{}", "[^{}]", "[{}]", "a{}", "{}&&b"]), inner).map(
        lambda pair: pair[0].format(pair[1])
    ),
    max_leaves=4,
)
TRIPLES = "".join(map("".join, itertools.product("ab]&[:^", repeat=3)))


@pytest.mark.row("E05")
@given(inside=class_parts)
@settings(max_examples=100)
def test_a_class_ends_where_the_library_ends_it(inside: str) -> None:
    """A class matches single characters. If it ended later than the parser finds, the library would refuse it."""
    pattern = f"[{inside}]"
    try:
        end = patterns.Parser(pattern, "f").character_class(0)
    except TokenizerError:
        return
    replaced = normalizers.Replace(Regex(pattern[:end]), "")
    assert replaced.normalize_str(TRIPLES) == "".join(replaced.normalize_str(character) for character in TRIPLES)


# ---------------------------------------------------------------------------------------------- the length of a text
def replace_step(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


LONGER: dict[str, Any] = {
    "twelve replacements": {"type": "Sequence", "normalizers": [replace_step("a", "a" * 10)] * 12},
    "replacements of nothing": {"type": "Sequence", "normalizers": [replace_step("", "yy")] * 20},
    "one long replacement": replace_step("a", "a" * 1000),
    "a replacement of a pattern": {"type": "Replace", "pattern": {"Regex": "a"}, "content": "b" * 1000},
    "a long prefix": {"type": "Prepend", "prepend": "▁" * 1000},
    "compatibility forms": {"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 3},
    "sequences in sequences": {"type": "Sequence", "normalizers": [
        {"type": "Sequence", "normalizers": [replace_step("a", "aa")] * 3}] * 3},
}  # fmt: skip


@pytest.mark.row("E13")
@pytest.mark.parametrize("name", LONGER)
def test_a_tokenizer_that_lengthens_texts_is_rejected(name: str) -> None:
    source = {**json.loads(small_vocabularies.tokenizer_json()), "normalizer": LONGER[name]}
    started = time.thread_time()
    with pytest.raises(TokenizerError, match="may write more than 256 characters for one character of a text"):
        HuggingFaceTokenizer(json.dumps(source).encode(), "tokenizer.json")
    assert time.thread_time() - started < 1


@pytest.mark.row("E13")
@pytest.mark.parametrize(
    "step",
    [
        {"pattern": {"String": "a"}, "content": "a" * 1000},  # without a type, the library guesses it
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
        {"type": "ByteLevel"},
        {**replace_step("a", "a" * 1000), "normalizers": []},  # not a sequence: the library reads the type
        {"type": "Sequence", "normalizers": [replace_step("a", "a" * 1000)], "decoders": []},
    ],
)
def test_steps_of_unknown_types_and_disguised_ones_are_rejected(step: dict[str, Any]) -> None:
    source = {**json.loads(small_vocabularies.tokenizer_json()), "normalizer": step}
    with pytest.raises(TokenizerError, match=r"has a step of the type|may write more than 256|must have one list"):
        HuggingFaceTokenizer(json.dumps(source).encode(), "tokenizer.json")


@pytest.fixture(scope="module")
def changed() -> list[str]:
    """Every character that has a decomposition or a lower case."""
    return [one for one in map(chr, range(0x110000)) if unicodedata.decomposition(one) or one.lower() != one]


@pytest.mark.row("E13")
@pytest.mark.parametrize("name", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "ByteLevel", "Metaspace"])
def test_the_bound_of_a_step_holds_for_every_character(name: str, changed: list[str]) -> None:
    """The oracle is the library, run on every character that has a decomposition or a lower case."""
    if name in NORMALIZERS:
        step, bound = getattr(normalizers, name)(), NORMALIZERS[name]({})
        largest = max(len(step.normalize_str(character)) for character in changed)
    else:
        step, bound = getattr(pre_tokenizers, name)(), PRE_TOKENIZERS[name]({})
        largest = max(sum(len(word) for word, _ in step.pre_tokenize_str(one)) for one in (*changed[::50], "😀", "é"))
    assert largest <= bound
    assert name in ("NFC", "Lowercase", "ByteLevel") or largest == bound


def charsmap(units: dict[int, int], texts: bytes, size: int = 256) -> bytes:
    """Return a table of replacements: units of its trie by position, the others 0."""
    trie = [units.get(i, 0) for i in range(size)]
    return struct.pack(f"<I{size}I", 4 * size, *trie) + texts


# "a" -> "xyz": the root's offset is 1, so "a" is at 1 ^ 97 = 96; its offset is 3, so its value is at 96 ^ 3 = 99.
TRIE = {0: 1 << 10, 96: 97 | 0x100 | 3 << 10, 99: 2**31 | 0}


@pytest.mark.row("E13")
@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0\0\0", struct.pack("<I", 2**32 - 1) + bytes(64), struct.pack("<I", 1024) + bytes(100),
        charsmap(TRIE, b"xyz"), charsmap(TRIE, b"xy\xff\0"), charsmap({**TRIE, 0: 2**31 - 1}, b"xyz\0"),
        charsmap({**TRIE, 0: 2**31 | 1 << 20}, b"xyz\0"), charsmap({**TRIE, 99: 2**31 | 4}, b"xyz\0"),
        charsmap({**TRIE, 99: 2**31 | 1}, "éyz\0".encode()), charsmap({**TRIE, 96: 97 | 0x100 | 1 << 18}, b"xyz\0"),
    ],
)  # fmt: skip
def test_a_damaged_table_of_replacements_is_rejected(data: bytes) -> None:
    """Its offsets lead outside the table, where the libraries read without a check."""
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
    source = {**json.loads(small_vocabularies.unigram_json()), "normalizer": step}
    with pytest.raises(TokenizerError, match=r"tokenizer.json: .*its table of replacements \(charsmap\) is damaged"):
        HuggingFaceTokenizer(json.dumps(source).encode(), "tokenizer.json")
    model = make_tiny.sentencepiece_model(340)
    if data:
        with pytest.raises(TokenizerError, match=r"x: .*its table of replacements \(charsmap\) is damaged"):
            open_model(model + write_field(3, write_field(2, data)))


def open_model(data: bytes) -> Tokenizer:
    return SentencePieceModelTokenizer(data, "x")


@pytest.mark.row("E13")
def test_a_table_of_replacements_is_measured() -> None:
    """The oracle is the library: the bound of a table is the length of its longest replacement in characters."""
    model = make_tiny.sentencepiece_model(340)
    for text in ("xyz", "漢", "é" * 60):
        data = charsmap(TRIE, text.encode() + b"\0")
        assert charsmap_growth(data) == len(text)
        tokenizer = open_model(model + write_field(3, write_field(2, data)))
        assert tokenizer.decode(tokenizer.encode("abab")) == f"{text}b" * 2
    with pytest.raises(TokenizerError, match="its normalizer may write more than 256 characters for one"):
        open_model(model + write_field(3, write_field(2, charsmap(TRIE, b"x" * 70 + b"\0"))))


@pytest.mark.row("E13")
def test_what_the_library_reads_differently_is_rejected() -> None:
    """A group of protobuf hides fields from a reader that takes it for bytes."""
    model = make_tiny.sentencepiece_model(340)
    hidden = write_field(3, write_field(2, charsmap(TRIE, b"x" * 70 + b"\0")))
    group = bytes([9 << 3 | 3, 9 << 3 | 4]) + hidden
    for data in (model + group, model + b"\x08" + b"\x80" * 11 + b"\0", model + b"\x0a\x7fa"):
        with pytest.raises(TokenizerError, match="x: not a SentencePiece model"):
            open_model(data)


@pytest.mark.row("E13")
def test_a_vocabulary_that_splits_in_many_ways_is_rejected() -> None:
    """Each of n pieces of one letter is split in up to n ways, so memory would grow with the square of the file."""
    metadata = small_vocabularies.pieces()
    metadata["tokenizer.ggml.tokens"] += ["a" * length for length in range(1, 500)]
    for name, value in (("scores", -1.0), ("token_type", 1)):
        metadata[f"tokenizer.ggml.{name}"] += [value] * 499
    with pytest.raises(
        TokenizerError, match=r"x: its .* tokens can be split into two other tokens in more than 32 ways"
    ):
        from_metadata(metadata, "x")


# --------------------------------------------------------------------------------------------------- vocabulary and ids
@pytest.mark.row("E06")
def test_a_vocabulary_with_more_tokens_than_rows(tmp_path: Path, attempt: Try) -> None:
    metadata = tiny.byte_vocabulary()
    extra = [f"extra{i}" for i in range(320 - len(metadata["tokenizer.ggml.tokens"]) + 1)]
    tokens = metadata["tokenizer.ggml.tokens"] + extra
    path = tiny.write_gguf(
        tmp_path / "t.gguf",
        metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens)},
    )
    assert attempt("generate", *RAW, "-m", path).survived()


@pytest.mark.row("E06")
@pytest.mark.row("E12")
@pytest.mark.parametrize("options", [{}, {"temperature": 5.0, "seed": 1}, {"draft": "ngram"}, {"logprobs": True}])
def test_rows_without_a_token_are_never_sampled(tiny_llm: Llama, options: dict[str, Any]) -> None:
    """The embedding has 320 rows and the vocabulary 266 tokens. The extra rows are made by far the likeliest."""
    n_vocab = tiny_llm.tokenizer.n_vocab
    model = tiny.model()
    head = model.output.weight
    assert n_vocab < head.shape[0]
    head.data[n_vocab:] = 50 * torch.sign(head.data[n_vocab:])
    assert (model(torch.tensor([[5, 6]]))[0].argmax(-1) >= n_vocab).any()  # without the mask, they would be sampled
    llm = Llama(model, tiny_llm.tokenizer)
    done = llm.generate("hello", max_new_tokens=40, **options)
    assert len(done.tokens) > 0
    assert max(done.tokens) < n_vocab


@pytest.mark.row("E07")
@pytest.mark.parametrize("id", [266, 2**31, 2**32 - 1])
@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom"])
def test_special_ids_out_of_range_are_errors(tmp_path: Path, attempt: Try, name: str, id: int) -> None:
    key = f"tokenizer.ggml.{name}_token_id"
    path = tiny.write_gguf(tmp_path / "t.gguf", metadata={key: id})
    attempt("generate", *RAW, "-m", path).refused("t.gguf", key, str(id), "outside the vocabulary of 266 tokens")


@pytest.mark.row("E07")
@pytest.mark.parametrize("missing", [("bos",), ("eos",), ("bos", "eos")])
def test_missing_special_ids_are_none(tmp_path: Path, missing: tuple[str, ...]) -> None:
    """No id is invented: without bos a prompt begins with its text; stop ids are found by name."""
    path = tiny.write_gguf(tmp_path / "t.gguf", metadata={f"tokenizer.ggml.{name}_token_id": None for name in missing})
    tokenizer = loader.load_tokenizer(path)
    assert (tokenizer.bos_id is None, tokenizer.eos_id is None) == ("bos" in missing, "eos" in missing)
    assert tokenizer.control["<|im_end|>"] in tokenizer.stop_ids
    if "bos" in missing:
        assert tokenizer.encode_prompt("a") == tokenizer.encode("a")
        with pytest.raises(TokenizerError, match="no begin-of-text id"):
            tokenizer.encode("a", bos=True)


# ---------------------------------------------------------------------------------------------------------------- text
SURROGATES = ["\ud800", "a\udcffb", "\udfff\ud800", "x" * 1000 + "\udc80"]


@pytest.fixture(scope="module")
def kinds(made: dict[str, Path], tiny_gguf: Path) -> dict[str, Tokenizer]:
    """A vocabulary of every reader: two with tokenizers, one with sentencepiece, one with tiktoken."""
    paths = {"gguf": tiny_gguf, **made}
    return {name: loader.load_tokenizer(path) for name, path in paths.items()}


@pytest.mark.row("E08")
@pytest.mark.parametrize("text", SURROGATES)
def test_lone_surrogates_are_one_error_in_every_vocabulary(kinds: dict[str, Tokenizer], text: str) -> None:
    """It does not become U+FFFD, as in tiktoken: the model would silently answer another text."""
    messages = set()
    for tokenizer in kinds.values():
        for encode in (tokenizer.encode, tokenizer.encode_prompt):
            with pytest.raises(TokenizerError, match="not valid Unicode: a lone surrogate") as caught:
                encode(text)
            messages.add(str(caught.value))
    assert len(messages) == 1


@pytest.mark.row("E08")
@pytest.mark.parametrize(
    ("line", "key"),
    [('{"id": "\\ud800", "prompt": "a"}', "id"), ('{"prompt": "a", "stop": "\\udfff"}', "stop"),
     ('{"prompt": "a", "stop": ["b", "c\\ud83d"]}', "stop")],
)  # fmt: skip
def test_lone_surrogates_in_a_file_of_prompts(
    tiny_gguf: Path, tmp_path: Path, attempt: Try, line: str, key: str
) -> None:
    (tmp_path / "in.jsonl").write_text(line + "\n")
    args = ("generate", "--prompts", tmp_path / "in.jsonl", *RUN, "-m", tiny_gguf)
    attempt(*args).refused("in.jsonl line 1", key, "surrogate", code=2)


@pytest.mark.row("E09")
@pytest.mark.parametrize(
    ("bytes_", "at"), [(b"\xff", 0), (b"abc\x80", 3), ("é".encode() + b"\xc3", 2), (b"\xed\xa0\x80", 0)]
)
def test_bytes_that_are_not_utf8(tiny_gguf: Path, tmp_path: Path, attempt: Try, bytes_: bytes, at: int) -> None:
    found = f"byte {at} is 0x{bytes_[at]:02x}"
    attempt("generate", *RUN, "-m", tiny_gguf, stdin=bytes_).refused("standard input", found, "convert", code=2)
    argument = bytes_.decode(errors="surrogateescape")
    attempt("generate", "--raw", argument, *RUN, "-m", tiny_gguf).refused("prompt", found, "convert", code=2)
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "' + bytes_ + b'"}\n')
    args = ("generate", "--prompts", tmp_path / "in.jsonl", *RUN, "-m", tiny_gguf)
    attempt(*args).refused("in.jsonl line 1", "UTF-8", code=2)


LONG = {
    "NUL": "\0" * 20_000,
    "spaces": " " * 100_000,
    "one letter": "a" * 100_000,
    "right to left": "שלום العربية \u202e\u2067" * 5_000,
    "combining": "e" + "\u0301" * 20_000,
    "joined emoji": "👨‍👩‍👧‍👦🏳️‍🌈" * 4_000,
    "ten megabytes": "the quick brown fox jumps over the lazy dog, 12345. " * 200_000,
}


@pytest.mark.row("E10")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "ten megabytes" else ()) for n in LONG]
)
def test_unusual_and_long_texts_round_trip(kinds: dict[str, Tokenizer], name: str) -> None:
    """Every vocabulary decodes what it encoded, in bounded time."""
    for kind, tokenizer in kinds.items():
        started = time.thread_time()
        ids = tokenizer.encode(LONG[name])
        assert tokenizer.decode(ids) == LONG[name], kind
        assert max(ids) < tokenizer.n_vocab
        assert time.thread_time() - started < 2 + len(LONG[name]) / 100_000, kind


@pytest.mark.row("E11")
@pytest.mark.parametrize("name", ["gguf", "llama-2-7b", "llama-3-8b", "hf"])
@pytest.mark.parametrize("written", ["{{ bos_token }}", ""])
def test_only_the_template_writes_bos(kinds: dict[str, Tokenizer], name: str, written: str) -> None:
    """The oracle: the ids contain bos as often as the template writes it, whatever add_bos is."""
    from llama.chat import encode_chat

    tokenizer = kinds[name]
    template = written + "{{ messages[0].content }}"
    ids = encode_chat(tokenizer, template, [{"role": "user", "content": "hello there"}])
    text = tokenizer.encode("hello there")
    assert tokenizer.bos_id is not None
    assert ids == [tokenizer.bos_id] * bool(written) + text
