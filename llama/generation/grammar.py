"""The work of a child process (system/child.py): it compiles each grammar before this process does.

llguidance's own limits stop neither {"multipleOf": 299999967}, which takes minutes, nor a chain of 5,000 rules, which
overflows the stack and ends the process. The main process compiles a grammar only if compiling succeeds here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Limits of llguidance that differ from its defaults. 2,000 items allow an object about 500 optional properties; 250,000
# lexer states would take 250 to 500 MB. Verbose errors repeat the grammar.
LIMITS: dict[str, Any] = {"max_items_in_row": 20_000, "max_lexer_states": 50_000, "verbose_errors": False}


def answer(request: Mapping[str, Any]) -> str:
    """The error in a request's grammar, or "" if it has none. The request is {"grammar": llguidance's JSON form}."""
    with contextlib.suppress(ImportError):  # Windows
        import resource

        # Half of what threads usually have, since part of the main process's stack is in use when it compiles
        resource.setrlimit(resource.RLIMIT_STACK, (4 * 2**20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    tokens = [*(bytes([byte]) for byte in range(255)), b"\xff<end>"]
    tokenizer = LLTokenizer(cast(Any, Vocabulary(tokens, len(tokens) - 1)), slices=[])
    matcher = LLMatcher(tokenizer, request["grammar"], log_level=0, limits=LLParserLimits(**LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


class Vocabulary:
    """The interface that llguidance expects of a tokenizer. The bytes of control tokens begin with 0xFF."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokens: list[bytes], eos: int):
        self.tokens, self.eos_token_id = tokens, eos

    def __call__(self, text: str) -> list[int]:
        """Not called: grammars are compiled with no_forcing."""
        raise NotImplementedError
