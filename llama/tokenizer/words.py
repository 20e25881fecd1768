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

# DeepSeek's letters with case, as ranges of an older Unicode; then its punctuation, and East Asian scripts
CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
EAST_ASIAN = "\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff"


def split(*steps: str | PreTokenizer) -> PreTokenizer:
    """Apply steps, such as patterns, in order. Each splits both the matches of the last one and the text between."""
    made = [Split(Regex(step), "isolated") if isinstance(step, str) else step for step in steps]
    return Sequence([*made, ByteLevel(add_prefix_space=False, use_regex=False)])


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


DIGITS = Digits(individual_digits=True)
GPT2 = ByteLevel(add_prefix_space=False, use_regex=True)
LLAMA3 = Rule(split(LLAMA3_WORDS), ignore_merges=True, add_bos=True)
DEFAULT = "default"  # llama.cpp's rule for files without a name

# tokenizer.ggml.pre -> rule. Of several names for one rule, the first is written.
RULES = {
    "gpt-2": Rule(GPT2),
    "smollm": Rule(Sequence([DIGITS, GPT2])),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "smaug-bpe": Rule(split(LLAMA3_WORDS)),  # SmolLM3
    "qwen2": Rule(split(QWEN2_WORDS), normalizer=NFC()),
    "deepseek-r1-qwen": Rule(split(QWEN2_WORDS)),
    "tekken": Rule(split(TEKKEN_WORDS), ignore_merges=True, add_bos=True),
    "deepseek-llm": Rule(
        split(r"[\r\n]", rf"\s?[{CASED}]+", rf"\s?[{PUNCTUATION}]+", r"\s+$", f"[{EAST_ASIAN}]+", DIGITS)
    ),
    "deepseek-coder": Rule(split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"[{EAST_ASIAN}]+", DIGITS)),
    DEFAULT: Rule(split(r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
}
