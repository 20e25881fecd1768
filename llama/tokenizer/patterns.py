"""Check the regular expressions of a tokenizer.json without running them.

The `tokenizers` library runs them with Oniguruma, where some patterns take exponential time. This file parses the part
of the syntax that word patterns need, and refuses everything else: subexpression calls, backreferences, conditionals,
absence operators, callouts, named groups.
Syntax: kkos/oniguruma, doc/RE.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ..errors import TokenizerError

# Oniguruma's compiler takes quadratic time and much memory for some patterns. These limits apply to all patterns of a
# file together. Within them, the slowest of several hundred kinds of patterns takes 0.13 s and 40 MB.
LONGEST = 2**13  # characters; Llama 4's pattern has 300, DeepSeek's four patterns together 500
MOST_CLASSES = 256  # counted as opening brackets; Llama 4's pattern has 13

DEEPEST = 50  # nested groups
MOST_REPEATS = 1000  # largest number in a bounded repetition
MOST_PATHS = 1000  # ways through a pattern, in addition to one for each of its characters

DEEPEST_CLASS = 4  # nested classes

POSIX = "alnum|alpha|ascii|blank|cntrl|digit|graph|lower|print|punct|space|upper|word|xdigit"
IN_CLASS = re.compile(rf"\[:\^?(?:{POSIX}):\]|(?P<open>\[(?!:)\^?)|(?P<close>\])|(?P<both>&&)|[^\[\\]")
ESCAPE = re.compile(r"\\(?:[dDwWsShHbBAzZrntfv]|[pP]\{[^{}\\]*\}|x\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|\W)")
GROUP = re.compile(r"\((?:\?(?:(?P<look><?[=!])|>|[im]*(?:-[im]+)?:))?")
FLAGS = re.compile(r"\(\?[im]+\)")
REPEAT = re.compile(r"(?:(?P<sign>[*+?])|\{(?P<low>\d*)(?P<comma>,?)(?P<high>\d*)\})(?P<mode>[?+]?)")
SIGNS = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}


@dataclass
class Item:
    """A character, a class, an assertion, or a group with its alternatives; repeated from low to high times.

    look   the item is an assertion, which matches no characters
    twice  the repetition is itself repeated without a bound, as in a{1,3}+, so it may divide a text in many ways
    """

    group: list[list[Item]] | None = None
    look: bool = False
    low: float = 1
    high: float = 1
    twice: bool = False

    @property
    def fails(self) -> bool:
        """Whether the item does not match every text."""
        always = self.group is not None and not self.look and any(not any(i.fails for i in way) for way in self.group)
        return self.low > 0 and not always

    @property
    def length(self) -> float:
        """The number of characters and assertions of an item that matches in only one way; else infinity."""
        if self.low != self.high or (self.group is not None and len(self.group) > 1):
            return math.inf
        return self.low * (1 if self.group is None else sum(item.length for item in self.group[0]))


def check_sizes(patterns: list[str], where: str) -> None:
    """Raise TokenizerError if the patterns of a file are so large that compiling them may take much time or memory."""
    for found, most, what in (
        (sum(map(len, patterns)), LONGEST, "characters"),
        (sum(pattern.count("[") for pattern in patterns), MOST_CLASSES, "character classes"),
    ):
        if found > most:
            raise TokenizerError(
                f"{where}: its regular expressions have {found:,} {what} together, expected at most {most:,}; the file"
                f" is damaged or forged, download it from the model's authors"
            )


def check_pattern(pattern: str, where: str) -> None:
    """Raise TokenizerError unless matching takes at most quadratic time in the text's length.

    At each position, matching tries the ways through the pattern until one succeeds. The number of ways is at most
    `paths` times the text's length to the power of `degree`. A repetition counts in the degree only if something after
    it may fail, because otherwise matching does not return to it. The degree may be at most 1, and a text has as many
    positions as characters, so the time is at most quadratic.
    """
    items = Parser(pattern, where).read()
    paths, degree = ways(items, False)
    if degree > 1 or paths > MOST_PATHS + len(pattern):
        raise unbounded(pattern, where)


def ways(alternatives: list[list[Item]], fails_after: bool) -> tuple[float, int]:
    """Paths and degree of a group. fails_after: whether something after the group may fail."""
    total, largest = 0.0, 0
    for way in alternatives:
        paths, degree, fails = 1.0, 0, fails_after
        for item in reversed(way):
            if item.group is not None and item.high <= 1:
                inner, more = ways(item.group, fails or item.look)
                paths, degree = paths * (inner + (item.low == 0)), degree + more
            elif fails and item.high == math.inf:
                degree += 2 if item.twice else 1
            elif fails:
                paths *= item.high - item.low + 1
            fails |= item.fails
        total, largest = total + paths, max(largest, degree)
    return total, largest


def unbounded(pattern: str, where: str) -> TokenizerError:
    """The error for a pattern whose matching takes too long."""
    return TokenizerError(
        f"{where}: its regular expression {pattern[:60]!r} nests or chains repetitions, so matching some texts could"
        f" take too long; such patterns are not supported, download the file from the model's authors"
    )


class Parser:
    """Reads a pattern into alternatives of items."""

    def __init__(self, pattern: str, where: str):
        self.pattern, self.where = pattern, where

    def refuse(self, at: int) -> TokenizerError:
        """The error for a construct that is not supported."""
        return TokenizerError(
            f"{self.where}: its regular expression {self.pattern[:60]!r} has {self.pattern[at : at + 12]!r} at"
            f" character {at}, which is not supported because matching it may take too long; download the file from the"
            f" model's authors"
        )

    def read(self) -> list[list[Item]]:
        """The alternatives of the pattern. Errors that Oniguruma reports itself are ignored."""
        pattern = self.pattern
        flags = FLAGS.match(pattern)
        at = flags.end() if flags else 0
        stack: list[tuple[list[list[Item]], bool]] = []  # the open groups, and whether each is a lookaround
        current: list[list[Item]] = [[]]
        while at < len(pattern):
            character = pattern[at]
            if character == "|":
                current.append([])
                at += 1
                continue
            if character == "(":
                opened = GROUP.match(pattern, at)
                if opened is None or pattern[opened.end() : opened.end() + 1] in tuple("?*") or len(stack) == DEEPEST:
                    raise self.refuse(at)
                stack.append((current, opened["look"] is not None))
                current, at = [[]], opened.end()
                continue
            if character == ")" and stack:
                group = current
                current, look = stack.pop()
                item, at = Item(group, look), at + 1
            else:
                item, at = Item(), self.single(at)
            at = self.repeat(item, at)
            current[-1].append(item)
        while stack:
            current = stack.pop()[0]
        return current

    def single(self, at: int) -> int:
        """The position after a character, an escape or a class."""
        character = self.pattern[at]
        if character not in "[\\":
            if character in "*+?{":
                raise self.refuse(at)
            return at + 1
        if character == "[":
            return self.character_class(at)
        found = ESCAPE.match(self.pattern, at)
        if found is None:
            raise self.refuse(at)
        return found.end()

    def character_class(self, start: int) -> int:
        """The position after a class. A class matches one character, so its content does not matter.

        An empty class or operand is refused, because Oniguruma reads the first "]" of "[]a]" as a character.
        """
        at = start + (2 if self.pattern.startswith("^", start + 1) else 1)
        depth, empty = 1, True
        while depth:
            found = IN_CLASS.match(self.pattern, at) or ESCAPE.match(self.pattern, at)
            if found is None or (empty and found.lastgroup in ("close", "both")):
                raise self.refuse(start)
            depth += {"open": 1, "close": -1}.get(found.lastgroup or "", 0)
            if depth > DEEPEST_CLASS:
                raise self.refuse(start)
            at, empty = found.end(), found.lastgroup in ("open", "both")
        return at

    def repeat(self, item: Item, at: int) -> int:
        """Read how often an item is repeated; return the position after the repetition."""
        pattern = self.pattern
        found = REPEAT.match(pattern, at)
        if found is None:
            return at
        if found["sign"]:
            item.low, item.high = SIGNS[found["sign"]]
        else:
            low, high = found["low"], found["high"]
            item.low = float(low or 0)
            item.high = float(high) if high else math.inf if found["comma"] else item.low
            # Oniguruma reads {1,3}+ as a repetition of a repetition, and {3}? as an optional one.
            item.twice = found["mode"] == "+"
            wrong = (item.twice and item.group is not None) or (found["mode"] == "?" and not found["comma"])
            wrong = wrong or not (low or high)
            if wrong or item.low > item.high or max(item.low, item.high if high else 0) > MOST_REPEATS:
                raise self.refuse(at)
        if item.look or pattern[found.end() : found.end() + 1] in tuple("*+?{"):
            raise self.refuse(at)
        if item.twice:
            item.high = math.inf
        if item.high > 1 and item.group is not None:
            times = item.low if item.high == math.inf else item.high
            if Item(item.group).length * max(times, 1) > MOST_REPEATS:
                raise unbounded(pattern, self.where)
        return found.end()
