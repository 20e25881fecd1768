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
TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(*patterns: str) -> PreTokenizer:
    """Apply patterns in order. Each splits both the matches of the last one and the text between."""
    steps = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])


class Rule(NamedTuple):
    """How text becomes words, and words become tokens.

    words          the pre-tokenizer
    ignore_merges  a word that is itself a token is used directly, without merges
    add_bos        the default of tokenizer.ggml.add_bos_token
    normalizer     the step before the words, if there is one; llama.cpp does without it
    """

    words: PreTokenizer
    ignore_merges: bool = False
    add_bos: bool = False
    normalizer: Normalizer | None = None


GPT2 = ByteLevel(add_prefix_space=False, use_regex=True)
LLAMA3 = Rule(split(LLAMA3_WORDS), ignore_merges=True, add_bos=True)
DEFAULT = "default"  # llama.cpp's rule for files without a name

# tokenizer.ggml.pre -> rule. Of several names for one rule, the first is written.
RULES = {
    "gpt-2": Rule(GPT2),
    "smollm": Rule(Sequence([Digits(individual_digits=True), GPT2])),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "smaug-bpe": Rule(split(LLAMA3_WORDS)),  # SmolLM3
    "qwen2": Rule(split(QWEN2_WORDS), normalizer=NFC()),
    "deepseek-r1-qwen": Rule(split(QWEN2_WORDS)),
    "tekken": Rule(split(TEKKEN_WORDS), ignore_merges=True, add_bos=True),
    DEFAULT: Rule(split(r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
}
