"""What the kinds of vocabulary share: names, spellings of bytes, reading a file, failures of the libraries."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import TokenizerError

# The word pattern of Llama 3's tokenizer (meta-llama/llama3 llama/tokenizer.py)
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Code Llama's marks around prefix, suffix and middle, and behind the middle (meta-llama/codellama llama/tokenizer.py)
PRE, SUF, MID, EOT = "\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>"

# Control in every SentencePiece vocabulary that has them, whatever type the file gives them; <step> parts the messages
# of Code Llama 70B Instruct.
CODE_LLAMA_CONTROL = frozenset({PRE, SUF, MID, EOT, "<step>"})

# Control strings that end an answer whether or not the file also names their id; llama.cpp goes by the same names.
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

# Llama 3's tokenizer.json, the largest in the family, has 17 MB.
MAX_FILE_BYTES = 256 * 2**20


def looks_control(token: str) -> bool:
    """True for <|this|>, <s> and </s>: control strings, even where a converter marked them as user-defined."""
    return re.fullmatch(r"<\|.*\|>|</?s>", token) is not None


def stop_ids(control: Mapping[str, int], named: Collection[int | None]) -> frozenset[int]:
    """The ids that end an answer: those that the file names, and those whose control string is known for it."""
    return frozenset({id for id in named if id is not None} | {control[name] for name in END_NAMES if name in control})


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character of each byte, inverted: a byte that prints is itself, the others follow U+0100."""
    prints = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


BYTE_OF = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token written in GPT-2's byte alphabet; a token that leaves it stands for its own characters."""
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def missing_bytes(tokens: Container[str]) -> bytes:
    """The bytes that have no token of their own; the `tokenizers` library drops them from a text in silence."""
    return bytes(byte for character, byte in BYTE_OF.items() if character not in tokens)


def check_kept(text: str, written: Callable[[], bytes], missing: bytes, where: str) -> None:
    """Raise TokenizerError if the text has bytes that are missing and what was written does not hold as many."""
    raw = text.encode()
    if not missing or len(raw.translate(None, missing)) == len(raw):
        return
    kept = written()  # a token that is matched whole may hold such a byte
    lost = {byte for byte in missing if raw.count(byte) > kept.count(byte)}
    for at, character in enumerate(text):
        if found := lost.intersection(character.encode()):
            raise TokenizerError(
                f"{where}: character {at} of the text, {character!a}, has the byte 0x{min(found):02X}, for which this"
                f" vocabulary has no token; the model can't be told of it, so remove it from the text"
            )


def piece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece, in which U+2581 stands for a space."""
    return piece.replace("\u2581", " ").encode()


def byte_piece(piece: str) -> int | None:
    """The byte that a piece like <0x0A> stands for, or None."""
    return int(piece[3:5], 16) if re.fullmatch(r"<0x[0-9A-F]{2}>", piece) else None


@contextmanager
def library_errors(where: str, what: str) -> Iterator[None]:
    """Turn whatever a tokenizer library raises into a TokenizerError of one line: `where`: `what`: its own words."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:  # the libraries panic on some damage, and their PanicException is no Exception
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            words = " ".join(str(error).split()) or type(error).__name__
            words = f"{words} is missing" if isinstance(error, KeyError) else words
            raise TokenizerError(f"{where}: {what}: {words}") from error
        raise


def read_file(path: Path) -> bytes:
    """All bytes of a tokenizer file. Raises TokenizerError where there is none, or one too large to be one."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise TokenizerError(f"{path} is a folder; name the tokenizer.model or tokenizer.json in it")
        if not stat.S_ISREG(status.st_mode):
            raise TokenizerError(f"{path} is not a regular file")
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror or error}") from None
    except TokenizerError:
        raise
    except ValueError as error:  # a NUL byte in the path
        raise TokenizerError(f"{str(path)!r} is not a path: {error}") from None
    if not data:
        raise TokenizerError(f"{path} is empty; the download probably never finished, so fetch it again")
    if len(data) > MAX_FILE_BYTES:
        raise TokenizerError(
            f"{path} has {status.st_size:,} bytes, expected at most {MAX_FILE_BYTES:,} of a tokenizer file;"
            f" is it a file of weights?"
        )
    return data
