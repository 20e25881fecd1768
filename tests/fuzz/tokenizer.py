"""Tokenizer files of all four kinds, detected by content; then encode and decode texts with them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

from llama.checkpoint.gguf_header import read_header
from llama.tokenizer import Tokenizer, open_tokenizer
from llama.tokenizer.gguf import from_metadata

from .. import tiny
from ..scripts import make_tiny
from . import law

TEXTS = (
    "", "the dog bites the man", " two  spaces\n\n", "é漢😀", "\x00", "<|eot_id|><s></s>", "3.14 it's", "a" * 300,
    " " * 300,
)  # fmt: skip

SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


class Harness(law.Harness):
    words = tuple(
        word.encode()
        for word in ('"ByteLevel"', '"Metaspace"', '"ByteFallback"', '"Replace"', '"Split"', '"Regex"', '"Unigram"',
                     '"WordPiece"', '"TemplateProcessing"', '"special"', '"added_tokens"', '"unk_token"',
                     '"merges"', '"ignore_merges"', '"byte_fallback"', '"Precompiled"', '"Sequence"', "<0x0A>",
                     '"FixedLength"', "Ġ", "▁", "<s>", "<unk>",
                     "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "gpt2", "llama",
                     "(a+)+$", "IQ== 0\n")
    )  # fmt: skip

    def seeds(self) -> Iterable[bytes]:
        yield make_tiny.tiktoken_model(260)
        yield make_tiny.sentencepiece_model(340)
        yield make_tiny.sentencepiece_model(368)  # with Code Llama's pieces
        yield tokenizer_json()
        yield unigram_json()
        yield vocabulary(self.folder / "seed.gguf", tiny.byte_vocabulary())
        yield vocabulary(self.folder / "seed.gguf", pieces())

    def calls(self, data: bytes) -> Iterator[law.Call]:
        if data[:4] == b"GGUF":
            yield lambda: use(from_metadata(read_header(data, "file.gguf").metadata, "file.gguf"))
        else:
            yield partial(use_file, self.put("tokenizer", data))


def use_file(path: Path) -> None:
    """Open a tokenizer file and use the tokenizer."""
    use(open_tokenizer(path))


def use(tokenizer: Tokenizer) -> None:
    """Encode and decode texts. Raises Finding if a text becomes a control id or an id is out of range."""
    control = set(tokenizer.control.values())
    for text in (*TEXTS, *list(tokenizer.control)[:20]):
        ids = tokenizer.encode(text)
        if not control.isdisjoint(ids):
            raise law.Finding(f"the text {text!r:.40} became a control id")
        if not all(0 <= id < tokenizer.n_vocab for id in ids):
            raise law.Finding(f"the text {text!r:.40} became an id outside the vocabulary")
        tokenizer.decode(ids)
    for id in range(min(tokenizer.n_vocab, 1000)):
        tokenizer.token_bytes(id)
    tokenizer.decode(range(min(tokenizer.n_vocab, 1000)))
    for id in (tokenizer.bos_id, tokenizer.eos_id, *tokenizer.stop_ids):
        if id is not None and not 0 <= id < tokenizer.n_vocab:
            raise law.Finding(f"the id {id} is outside the vocabulary")


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


def unigram_json() -> bytes:
    """Return a Unigram file with byte fallback and a normalizer, as converted from SentencePiece."""
    vocab = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], *([f"<0x{i:02X}>", 0.0] for i in range(256))]
    vocab += [[piece, -float(i)] for i, piece in enumerate(("▁the", "▁", "e", "t", "h", "▁dog"))]
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return json.dumps(
        {
            "version": "1.0", "added_tokens": [{"id": 1, "content": "<s>", **SPECIAL}],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "pre_tokenizer": None, "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}]},
            "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": True, "vocab": vocab},
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


def vocabulary(path: Path, metadata: dict[str, Any]) -> bytes:
    """Return a GGUF file that contains only a vocabulary."""
    writer = GGUFWriter(str(path), "llama")
    tiny.add_metadata(writer, metadata)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    data = path.read_bytes()
    path.unlink()
    return data
