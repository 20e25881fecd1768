"""Shared by all kinds of vocabulary: token names, byte spellings, file reading, library errors."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import TokenizerError

# The word pattern of Llama 3's tokenizer (meta-llama/llama3 llama/tokenizer.py)
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Code Llama's infill tokens: before the prefix, the suffix and the middle, and after the middle
# (meta-llama/codellama llama/tokenizer.py)
PRE, SUF, MID, EOT = "\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>"

# Control tokens in every SentencePiece vocabulary that has them, whatever their type in the file. <step> separates the
# messages of Code Llama 70B Instruct.
CODE_LLAMA_CONTROL = frozenset({PRE, SUF, MID, EOT, "<step>"})

# Control strings that end an answer even if the file does not name their ids; llama.cpp uses the same names.
END_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "</s>",
    EOT,
    "<step>",
)

# The largest tokenizer file of the family, Llama 3's tokenizer.json, has 17 MB.
MAX_FILE_BYTES = 256 * 2**20


# Most characters of a token. The longest token of Llama 3 has 128, that of SentencePiece models 16.
LONGEST_TOKEN = 1024

# Most ways to split a token into two others, on average over a vocabulary. Llama 3's vocabulary has 2.2 per token.
MOST_SPLITS = 32


def check_length(token: str | bytes, id: int, where: str) -> None:
    """Raise TokenizerError if a token is so long that splitting it at every character would take too long."""
    if len(token) > LONGEST_TOKEN:
        raise TokenizerError(
            f"{where}: token {id} begins with {token[:20]!r} and has {len(token):,} characters, expected at most"
            f" {LONGEST_TOKEN:,}; the file is damaged or forged, download it from the model's authors"
        )


@dataclass(frozen=True)
class Named:
    """What the other files of a checkpoint say about its tokens.

    bos_ids   bos ids of config.json and generation_config.json; the first is used if the vocabulary names none
    stop_ids  ids of these files that end an answer
    template  the chat template

    These ids, and the tokens that the template writes (see `written_by`), are control ids: no text becomes one.
    """

    bos_ids: Sequence[int] = ()
    stop_ids: Sequence[int] = ()
    template: str = ""


NOTHING = Named()

# The methods by which a template searches for a string in a message
SEARCH = r"(?:split|strip|startswith|endswith|replace|find|index|count)\(\s*"


def written_by(template: str, tokens: Iterable[str]) -> set[str]:
    """The tokens with punctuation, such as <start_of_turn>, that a chat template writes.

    A token that the template searches for in messages, such as </think>, is excluded, because messages may contain it.
    """
    found = set()
    for token in tokens:
        if token in template and re.search(r"[^\w\s]", token):
            literal = rf"(?P<quote>['\"]){re.escape(token)}"
            if not re.search(
                rf"{SEARCH}{literal}|{literal.replace('quote', 'other')}(?P=other)\s+(?:not\s+)?in\b", template
            ):
                found.add(token)
    return found


def looks_control(token: str) -> bool:
    """Whether a token is written like <|this|>, <s> or </s>: a control string, even if a file marks it user-defined."""
    return re.fullmatch(r"<\|.*\|>|</?s>", token) is not None


def stop_ids(control: Mapping[str, int], named: Collection[int | None]) -> frozenset[int]:
    """The ids that end an answer: those named by the file, and those of the control strings in END_NAMES."""
    return frozenset({id for id in named if id is not None} | {control[name] for name in END_NAMES if name in control})


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character -> byte. A printable byte is written as itself, the others as U+0100 and up."""
    prints = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


BYTE_OF = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token in GPT-2's byte alphabet. A token with any other character is plain text."""
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def missing_bytes(tokens: Container[str]) -> bytes:
    """The bytes without a token of their own; the `tokenizers` library silently drops them from a text."""
    return bytes(byte for character, byte in BYTE_OF.items() if character not in tokens)


def check_no_byte_lost(text: str, encoded: Callable[[], bytes], missing: bytes, where: str) -> None:
    """Raise TokenizerError if encoding dropped bytes of the text.

    encoded  returns the bytes of the ids; called only if the text has missing bytes
    missing  the bytes without a token of their own
    """
    raw = text.encode()
    if not missing or len(raw.translate(None, missing)) == len(raw):
        return
    result = encoded()  # a longer token may contain such a byte
    lost = {byte for byte in missing if raw.count(byte) > result.count(byte)}
    for at, character in enumerate(text):
        if found := lost.intersection(character.encode()):
            raise TokenizerError(
                f"{where}: character {at} of the text, {character!a}, has the byte 0x{min(found):02X}, for which this"
                f" vocabulary has no token; remove the character from the text"
            )


def piece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece, where U+2581 stands for a space."""
    return piece.replace("\u2581", " ").encode()


def byte_piece(piece: str) -> int | None:
    """The byte of a piece such as <0x0A>, or None."""
    return int(piece[3:5], 16) if re.fullmatch(r"<0x[0-9A-F]{2}>", piece) else None


def splits(token: str, known: Container[str]) -> Iterator[tuple[str, str]]:
    """All ways to split a token into two known tokens, the shortest left part first.

    The time is quadratic in the token's length, which `check_length` limits.
    """
    for cut in range(1, len(token)):
        if token[:cut] in known and token[cut:] in known:
            yield token[:cut], token[cut:]


def all_splits(tokens: Iterable[str], known: Collection[str], where: str) -> list[tuple[str, str]]:
    """`splits` of all tokens. Raises TokenizerError if there are so many that a small file would fill the memory."""
    found: list[tuple[str, str]] = []
    for token in tokens:
        found.extend(splits(token, known))
        if len(found) > MOST_SPLITS * len(known) + LONGEST_TOKEN:
            raise TokenizerError(
                f"{where}: its {len(known):,} tokens can be split into two other tokens in more than {MOST_SPLITS} ways"
                f" on average, expected about 2; the file is damaged or forged, download it from the model's authors"
            )
    return found


@contextmanager
def library_errors(where: str, what: str) -> Iterator[None]:
    """Turn an exception of a tokenizer library into a TokenizerError: `where`: `what`: the library's message."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:  # PanicException of the Rust libraries is not an Exception
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            message = " ".join(str(error).split()) or type(error).__name__
            message += " is missing" * isinstance(error, KeyError)
            raise TokenizerError(f"{where}: {what}: {message}") from error
        raise


def read_file(path: Path) -> bytes:
    """The bytes of a tokenizer file. Raises TokenizerError if it is missing, empty, not a file or too large."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise TokenizerError(f"{path} is a folder; name the tokenizer.model or tokenizer.json in it")
        if not stat.S_ISREG(status.st_mode):
            raise TokenizerError(f"{path} is not a regular file; expected a tokenizer.model or tokenizer.json")
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror or error}") from None
    except TokenizerError:
        raise
    except ValueError as error:  # a NUL byte in the path
        raise TokenizerError(f"{str(path)!r} is not a path: {error}") from None
    if not data:
        raise TokenizerError(f"{path} is empty; the download was probably interrupted, download it again")
    if len(data) > MAX_FILE_BYTES:
        raise TokenizerError(
            f"{path} has {status.st_size:,} bytes, expected a tokenizer file of at most {MAX_FILE_BYTES:,};"
            f" is it a weights file?"
        )
    return data
