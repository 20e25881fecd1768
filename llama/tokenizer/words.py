"""The rules by which byte-level vocabularies split text into words, under the names of the key tokenizer.ggml.pre.

Each rule is that of the model's own tokenizer.json, so text is split as in training. llama.cpp approximates some of
the rules; docs/reference/formats.md lists the differences.
Sources: llama.cpp 0.3.36 in llama-cpp-python, src/llama-vocab.cpp, with the expressions of the published files in its
comments; mistral-common's tekken files; transformers' tokenization_qwen2.py; HuggingFaceTB/SmolLM2, tokenizer.json.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from .common import LLAMA3_WORDS

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
# Upper-case letters, then lower-case letters; letters without case and marks belong to both
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE, OTHERS = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN_WORDS = rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}{OTHERS}"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_WORDS = rf"{BEFORE}{UPPER}*{LOWER}+{ENDING}|{BEFORE}{UPPER}+{LOWER}*{ENDING}|\p{{N}}{{1,3}}{OTHERS}"
CASED = (  # DeepSeek LLM's letters with case, without those of later versions of Unicode
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽ"
    "ᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
CJK = "[一-龥ࠀ-一가-퟿]+"


def split(*patterns: str) -> PreTokenizer:
    """Apply patterns in order. Each splits both the matches of the previous one and the text between them."""
    steps = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])


class Rule(NamedTuple):
    """How text becomes words, and words become tokens.

    words          the pre-tokenizer
    ignore_merges  a word that is itself a token is used directly, without merges
    add_bos        the default of tokenizer.ggml.add_bos_token
    normalizer     the step before the words, if there is one; llama.cpp leaves this step out
    """

    words: PreTokenizer
    ignore_merges: bool = False
    add_bos: bool = False
    normalizer: Normalizer | None = None


GPT2 = ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = Rule(Sequence([Digits(individual_digits=True), GPT2]))
LLAMA3 = Rule(split(LLAMA3_WORDS), ignore_merges=True, add_bos=True)
DEFAULT = "default"  # llama.cpp's rule for files that name no rule

# tokenizer.ggml.pre -> rule. Of several names for one rule, the first is written.
RULES = {
    **dict.fromkeys(("gpt-2", "phi-2", "mellum", "trillion", "granite-docling", "a.x-4.0"), Rule(GPT2)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), Rule(split(LLAMA3_WORDS))),  # SmolLM3; Granite 4, Phi-4
    "qwen2": Rule(split(QWEN2_WORDS), normalizer=NFC()),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), Rule(split(QWEN2_WORDS))),
    "tekken": Rule(split(TEKKEN_WORDS), ignore_merges=True, add_bos=True),
    "gpt-4o": Rule(split(GPT4O_WORDS)),  # Phi-4-mini
    "seed-coder": Rule(split(QWEN2_WORDS.replace(r"[\r\n]*|", "|"))),
    "viking": Rule(split(" ?[^(\\s|.,!?…。，、।۔،)]+", r"\p{N}")),
    "deepseek-llm": Rule(
        split(r"[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK, r"\p{N}+")
    ),
    "deepseek-coder": Rule(split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}")),
    DEFAULT: Rule(split(r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
}
