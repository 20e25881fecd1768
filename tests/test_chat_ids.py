"""The ids of a chat compared with those of transformers, for the options of a tokenizer.json that affect them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from llama.chat import encode_chat
from llama.errors import TokenizerError
from llama.tokenizer import open_tokenizer

MARKS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }} <|im_end|> \x85\n{% endfor %} \x1c<|im_start|>a\n"
)
MESSAGES = [
    {"role": ("user", "assistant")[i % 2], "content": text}
    for i, text in enumerate(("hello us", "he\u2003", " us\x1c"))
]


def write(folder: Path, scheme: str, strip: dict[str, bool]) -> Path:
    """Write a tokenizer.json with a Metaspace of this scheme, and the settings beside it."""
    vocab = {token: id for id, token in enumerate(("<unk>", *MARKS, *(f"<0x{byte:02X}>" for byte in range(256))))}
    for token in ("▁", *"abcdefghijklmnopqrstuvwxyz", "▁u", "▁us", "he", "▁h"):
        vocab[token] = len(vocab)
    merges = [("▁", "u"), ("▁u", "s"), ("h", "e"), ("▁", "h")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False, **strip) for mark in MARKS])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder


@pytest.mark.parametrize("strip", [{}, {"lstrip": True}, {"rstrip": True}])
@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("before", ["", "us "])
def test_chat_ids_are_those_of_transformers(tmp_path: Path, scheme: str, strip: dict[str, bool], before: str) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write(tmp_path, scheme, strip)
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(MESSAGES, chat_template=before + TEMPLATE, tokenize=True, return_dict=False)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    ours = open_tokenizer(folder / "tokenizer.json", settings)
    assert encode_chat(ours, before + TEMPLATE, MESSAGES) == expected


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("setting", [True, False])
def test_add_prefix_space_is_followed_or_rejected(tmp_path: Path, name: str, scheme: str, setting: bool) -> None:
    from transformers import AutoTokenizer

    folder = write(tmp_path, scheme, {})
    settings = {"tokenizer_class": name, "add_prefix_space": setting, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    if name.startswith("Llama") and setting != (scheme != "never"):
        with pytest.raises(TokenizerError, match="add_prefix_space"):
            open_tokenizer(folder / "tokenizer.json", settings)
    else:
        ours = open_tokenizer(folder / "tokenizer.json", settings)
        assert ours.encode("hello us") == theirs("hello us", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"5": {"content": "he"}}}, {"added_tokens_decoder": {"999": {"content": "new"}}},
        {"additional_special_tokens": ["new"]}, {"extra_special_tokens": {"he_token": "he"}},
    ],
)  # fmt: skip
def test_tokens_that_only_the_settings_name_have_the_ids_of_transformers(tmp_path: Path, settings: Any) -> None:
    from transformers import AutoTokenizer

    folder = write(tmp_path, "never", {})
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    ours = open_tokenizer(folder / "tokenizer.json", settings)
    assert ours.n_vocab == len(theirs)
    for text in ("hello new us", "newhe", "<s>new", "he"):
        assert ours.encode(text, parse_special=True) == theirs(text, add_special_tokens=False)["input_ids"]
        assert not set(ours.encode(text)) & set(ours.control.values())
