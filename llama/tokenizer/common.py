"""Shared by all kinds of vocabulary: names of tokens, spellings of bytes, errors of the libraries."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TokenizerError

# The word pattern of Llama 3's tokenizer (meta-llama/llama3 llama/tokenizer.py)
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Infill prompts, with their parts in the order of training: (token before a part, part, ..., token before the middle)
PREFIX, SUFFIX = "prefix", "suffix"
INFILL = (
    ("\u2581<PRE>", PREFIX, "\u2581<SUF>", SUFFIX, "\u2581<MID>"),  # Code Llama
    ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),  # Qwen2.5-Coder, Granite 4
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),  # StarCoder, Granite Code
    ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("<[fim-suffix]>", SUFFIX, "<[fim-prefix]>", PREFIX, "<[fim-middle]>"),  # Seed-Coder
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),  # Codestral: the prefix is the last part, the middle continues it
)
EOT = "\u2581<EOT>"  # ends the middle in Code Llama

# Control tokens in every vocabulary that has them, whatever their type in the file. <step> separates the messages of
# Code Llama 70B Instruct.
MARKS = frozenset({EOT, "<step>"}.union(*INFILL) - {PREFIX, SUFFIX})

FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # flags of an added token, besides "special"

# Control strings that end an answer even if the file does not name their ids. Most are llama.cpp's names.
END_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "</s>", EOT, "<step>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>", "<reponame>", "<file_sep>",  # after a file of code
)  # fmt: skip


@dataclass(frozen=True)
class Named:
    """What the other files of a checkpoint say about its tokens.

    bos_ids   bos ids of config.json and generation_config.json; the first is used if the vocabulary names none
    stop_ids  ids of these files that end an answer
    template  the chat template; several are joined to one text

    These ids, and the tokens that the template writes (see `written_by`), are control ids: no text becomes one.
    """

    bos_ids: Sequence[int] = ()
    stop_ids: Sequence[int] = ()
    template: str = ""


NOTHING = Named()


def joined_templates(template: str | Mapping[str, str] | None) -> str:
    """The source of a chat template, or of several by name; empty if there is none."""
    return "\n".join(template.values()) if isinstance(template, Mapping) else template or ""


# The methods by which a template searches for a string in a message
SEARCH = r"(?:split|strip|startswith|endswith|replace|find|index|count)\(\s*"


def written_by(template: str, tokens: Iterable[str]) -> set[str]:
    """The tokens with punctuation, such as <start_of_turn>, that a chat template writes.

    A token that the template searches for in messages, such as </think>, is excluded, because messages may contain it.
    """
    found = set()
    for token in tokens:
        if token in template and re.search(r"[^\w\s]", token):
            name = re.escape(token)
            searched = rf"{SEARCH}['\"]{name}|(['\"]){name}\1\s+(?:not\s+)?in\b"
            if not re.search(searched, template):
                found.add(token)
    return found


CONTROL_LIKE = re.compile(r"<\|.*\|>|</?s>")


def looks_control(token: str) -> bool:
    """Whether a token is written like <|this|>, <s> or </s>: a control string, even if a file marks it user-defined."""
    return CONTROL_LIKE.fullmatch(token) is not None


def number_tokens(vocabulary: Mapping[str, int], added: Iterable[str]) -> dict[str, int]:
    """{token: id} of a vocabulary and its added tokens, numbered as by the `tokenizers` library."""
    ids, last = dict(vocabulary), -1
    for token in filter(None, added):
        last = max(last, ids.setdefault(token, max(len(vocabulary), last + 1)))
    return ids


def stop_ids(control: Mapping[str, int], named: Collection[int | None]) -> frozenset[int]:
    """The ids that end an answer: those named by the file, and those of the control strings in END_NAMES."""
    return frozenset({id for id in named if id is not None} | {control[name] for name in END_NAMES if name in control})


def added_by_settings(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tokens that tokenizer_config.json adds to a vocabulary, as entries of added_tokens in a tokenizer.json.

    In the order of transformers: first those of added_tokens_decoder, by id, then those that are only named.
    """
    listed = settings.get("added_tokens_decoder") or {}
    found = added_tokens({**listed[id], "id": int(id)} for id in sorted(listed, key=int))
    names = [named_token(settings, f"{name}_token") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key) or []
        if not isinstance(more, list | Mapping):
            raise TypeError(f"{key} of tokenizer_config.json is {more!r:.80}, expected a list of tokens")
        names += [named_token({key: one}, key) for one in (more.values() if isinstance(more, Mapping) else more)]
    for name in filter(None, names):
        found.setdefault(name, {"content": name})["special"] = True
    return found


def added_tokens(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The entries of added tokens by their text. Raises TypeError if a value has a wrong type."""
    found = {}
    for entry in entries:
        if not isinstance(content := entry["content"], str):
            raise TypeError(f"the content of an added token is {content!r:.80}, expected a string")
        if wrong := [flag for flag in ("special", *FLAGS) if not isinstance(entry.get(flag), bool | None)]:
            raise TypeError(f"{wrong[0]} of the added token {content!r:.80} must be true or false")
        found[content] = dict(entry)
    return found


def named_token(settings: Mapping[str, Any], key: str) -> str | None:
    """The token under a key of tokenizer_config.json, written as a string or as an object with a content."""
    value = settings.get(key)
    value = value["content"] if isinstance(value, Mapping) else value
    if not isinstance(value, str | None):
        raise TypeError(f"{key} of tokenizer_config.json is {value!r}, expected a token")
    return value


# GPT-2's character -> byte. A printable byte is written as itself, the others as U+0100 and up.
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(OTHERS)}


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token in GPT-2's byte alphabet. A token with any other character is plain text."""
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def byte_piece(piece: str) -> int | None:
    """The byte of a piece such as <0x0A>, or None."""
    return int(piece[3:5], 16) if re.fullmatch(r"<0x[0-9A-F]{2}>", piece) else None


def piece_bytes(piece: str, byte_fallback: bool) -> bytes:
    """The bytes of a SentencePiece piece, where U+2581 stands for a space, and <0x0A> for a byte if byte_fallback."""
    byte = byte_piece(piece) if byte_fallback else None
    return piece.replace("\u2581", " ").encode() if byte is None else bytes([byte])


@contextlib.contextmanager
def library_errors(where: str, what: str) -> Iterator[None]:
    """Turn an exception of a tokenizer library into a TokenizerError: "where: what: the library's message"."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of the Rust libraries
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        raise TokenizerError(f"{where}: {what}: {message}{' is missing' * isinstance(error, KeyError)}") from error
