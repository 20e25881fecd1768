"""Small tokenizer.json files and GGUF vocabularies, as text and metadata."""

from __future__ import annotations

import json
from typing import Any

from . import tiny

SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def tokenizer_json() -> bytes:
    """Return a byte-level BPE file with a word pattern, control tokens and a template, like Llama 3's."""
    metadata = tiny.byte_vocabulary()
    tokens = metadata["tokenizer.ggml.tokens"]
    added = [{"id": id, "content": tokens[id], **SPECIAL} for id in range(3)]
    template = [{"SpecialToken": {"id": tokens[1], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": r"\p{L}+|\p{N}{1,3}|\s+"}, "behavior": "Isolated", "invert": False}
    return json.dumps(
        {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "post_processor": {
                "type": "TemplateProcessing", "single": template, "pair": template,
                "special_tokens": {tokens[1]: {"id": tokens[1], "ids": [1], "tokens": [tokens[1]]}},
            },
            "decoder": level,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                "vocab": {token: id for id, token in enumerate(tokens)}, "merges": metadata["tokenizer.ggml.merges"],
            },
        }
    ).encode()  # fmt: skip


def pieces() -> dict[str, Any]:
    """Return GGUF metadata of a SentencePiece vocabulary."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "t", "h", "e", "th", "the", "▁the"]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 7],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_space_prefix": True,
    }  # fmt: skip
