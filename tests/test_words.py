"""The words of byte-level vocabularies equal those of the expressions in llama.cpp and in the published tokenizers."""

from __future__ import annotations

import random
import unicodedata

import pytest
import regex
from transformers import Qwen2Tokenizer

from llama.tokenizer.common import BYTE_OF
from llama.tokenizer.gguf import from_metadata
from llama.tokenizer.words import RULES

TEXTS = {
    "Latin": "The fox's jumps, DON'T iPhone McDonald naïve Ünïcödé Straße ǅ «Oui» l'été O'Neill I'M µm ªº",
    "Cyrillic, Greek": "ПриветМир Москва-река ёлка Їжак об'єм ЪЫЬ ΑΒΓδεζ Ὀδυσσεύς ᾠδή ΚαλημέραΚόσμε",
    "Arabic, Hebrew": 'الثعلب البني مُحَمَّدٌ سلامٌ عليكم لا، نعم؟ ـــ שָׁלוֹם עֲלֵיכֶם צה"ל ג׳ירפה א־ב',
    "Devanagari": "तेज भूरी लोमड़ी नमस्ते दुनिया हिन्दी क्षत्रिय है। श्री",
    "Han": "敏捷的狐狸跳过懒狗。你好，世界！「测试」２０２４年《书》 龥龦鿿㐀",
    "Kana, Hangul": "茶色のキツネ、こんにちは世界。ｶﾀｶﾅ ガギグ ー〜 ゝ々〆ヶ 빠른 갈색 여우 세계 ㄱㄴㄷ ㅏㅑ 힣",
    "digits": "0 12 123 1234 12345 3.14 1,000,000 2024-01-31 ½ ² Ⅻ ٣٤ ५६ x1y22z333 v1.2.3 0x1F",
    "emoji": "🦊 👨‍👩‍👧‍👦 ❤️ 🇯🇵 👍🏽 :-) ☺︎ 1️⃣",
    "spaces": " a  b   c    d\te\t\tf\n g\n\nh\r\ni \n \n j\u00a0k\u2003l\u200b m\u2028n\u0085o   \n   ",
    "contractions": "I'm you're he'd she'll we've it's CAN'T YOU'RE 's 't x's'y 'S' ''s you’re s'",
    "code": 'def f(x): return x**2 + a[i]//3 != ~c|d^e; // a/b\n    if (a<=b) {`x`}\n\treturn "$a@b#%";/\r\n/',
}


def mixtures(count: int) -> list[str]:
    """The texts, and random sequences of their words and of single characters."""
    dice = random.Random(0)
    words = [word for text in TEXTS.values() for word in text.split(" ")]
    single = [*" '\"\n\t/.,-_sStA1é中かカ한", "  ", "\r\n", "\u00a0", "\u0301", "्", "Ж", "ω", "🦊"]
    return [*TEXTS.values(), *("".join(dice.choices([*words, *single], k=dice.randint(1, 12))) for _ in range(count))]


LETTERS = "".join(one for one in map(chr, range(0x20000)) if unicodedata.category(one) in ("Lu", "Ll", "Lt"))
MERGED = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0")  # names that ignore merges and add bos
# As in llama.cpp 0.3.36 (src/llama-vocab.cpp), or as in the published file where llama.cpp approximates it
ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = ENGLISH + r"|\p{N}{1,3}" + REST, ENGLISH + r"|\p{N}" + REST
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}"
    r"\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}"
    r"\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters with case (U+0295 was one until Unicode 16), without those that DeepSeek LLM's expression does not list
CASED = (
    r"[[\p{Lu}\p{Ll}\p{Lt}\u0295]--[\u0560-\u0588\u10C7\u10CD\u10D0-\u10FF\u1C80-\u1C8A\u2D00-\u2D2D\uA790-\uAB68"
    r"\U00010570-\U000105BC\U00010D50-\U00010D85\U00016E40-\U00016E7F\U0001D400-\U0001DF2A]]"
)
CJK = "[一-龥ࠀ-一가-퟿]+"
EXPRESSIONS = {
    **{name: [GPT2] for name in ("gpt-2", "phi-2", "mellum", "trillion", "granite-docling", "a.x-4.0")},
    **{name: [r"\p{N}", GPT2] for name in ("smollm", "starcoder", "refact", "exaone", "minerva-7b")},
    **{name: [LLAMA3] for name in (*MERGED, "smaug-bpe", "dbrx")},
    **{name: [QWEN2] for name in ("qwen2", "deepseek-r1-qwen", "megrez")},
    "tekken": [TEKKEN],
    "gpt-4o": [GPT4O],
    "seed-coder": [ENGLISH + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "viking": [r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"],
    "deepseek-llm": [
        r"[\r\n]", rf"\s?{CASED}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK, r"\p{N}+"
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"],
    "default": [r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}  # fmt: skip


def words_by_regex(text: str, expressions: list[str]) -> list[str]:
    """Split the text by each expression in turn, into matches and the text between them."""
    words = [text]
    for expression in expressions:
        parts = []
        for word in words:
            at = 0
            for match in regex.finditer(expression, word, regex.V1):
                parts += [word[at : match.start()], match[0]]
                at = match.end()
            parts.append(word[at:])
        words = [part for part in parts if part]
    return words


@pytest.mark.parametrize("name", RULES)
def test_words_are_those_of_the_regular_expressions(name: str) -> None:
    splitter = RULES[name].words
    assert RULES[name].add_bos == RULES[name].ignore_merges == (name in ("tekken", *MERGED))
    for text in [*mixtures(200), LETTERS]:
        found = [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]
        assert found == words_by_regex(text, EXPRESSIONS[name]), text


def test_qwen2_has_the_ids_of_its_tokenizer_in_transformers() -> None:
    """It composes characters before it splits a text."""
    vocab = {character: id for id, character in enumerate(BYTE_OF)}
    kinds = {"model": "gpt2", "pre": "qwen2", "tokens": list(vocab), "merges": []}
    ours = from_metadata({f"tokenizer.ggml.{key}": value for key, value in kinds.items()}, "x.gguf")
    theirs = Qwen2Tokenizer(vocab=vocab, merges=[])
    for text in [*mixtures(200), "e\u0301te\u0301", "\u1112\u1161\u11ab", "\u0958"]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
