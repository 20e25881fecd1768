"""The child process that checks a grammar: `python grammar_check.py FOLDER`, started by structured.py.

Grammars may come from untrusted authors, and llguidance compiles them in native code. A few take minutes or gigabytes,
or overflow the stack, which ends the process. llguidance's own limits do not cover {"multipleOf": 299999967} or a chain
of 5,000 rules. So each grammar is first compiled here, under limits of the operating system. The main process compiles
it only if that succeeds.

The request and the answer are JSON, on standard input and output. This file imports nothing from the package, so that
the process starts in less than 0.1 s.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, cast

MIB = 2**20
SECONDS = 2.0  # of CPU time; large schemas in use take less than 1 s
SPACE = 768 * MIB  # address space beyond that of the started process
STACK = 4 * MIB  # half of what threads usually have on Linux

# Limits of llguidance that differ from its defaults. 2,000 items allow an object about 500 optional properties; 250,000
# states take 250 to 500 MB. Verbose errors repeat the grammar.
LIMITS: dict[str, Any] = {"max_items_in_row": 20_000, "max_lexer_states": 50_000, "verbose_errors": False}

# The keywords of JSON Schema, from draft 4 to 2020-12 (json-schema.org), and of OpenAPI 3 (spec.openapis.org)
KEYWORDS = frozenset(
    """
    $anchor $comment $defs $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref $schema $vocabulary
    additionalItems additionalProperties allOf anyOf const contains contentEncoding contentMediaType contentSchema
    default definitions dependencies dependentRequired dependentSchemas deprecated description discriminator else
    enum example examples exclusiveMaximum exclusiveMinimum externalDocs format id if items maxContains maxItems
    maxLength maxProperties maximum minContains minItems minLength minProperties minimum multipleOf not oneOf
    pattern patternProperties prefixItems properties propertyNames readOnly required then title type
    unevaluatedItems unevaluatedProperties uniqueItems writeOnly xml
    """.split()  # noqa: SIM905
)
# The keywords whose value is a schema or a list of schemas, and those whose value maps names to schemas
INNER = (
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf",
    "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


# ------------------------------------------------------------------------------------------------- JSON schemas
def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all schemas in it that are objects."""
    if isinstance(schema, dict):
        yield schema
        for key in INNER:
            value = schema.get(key)
            for inner in value if isinstance(value, list) else [value]:
                yield from subschemas(inner)
        for key in NAMED:
            value = schema.get(key)
            for inner in value.values() if isinstance(value, dict) else ():
                yield from subschemas(inner)


def unknown_keywords(schema: Any) -> list[str]:
    """The keywords that JSON Schema does not define, and therefore ignores, except those that begin with "x-"."""
    return sorted({key for inner in subschemas(schema) for key in inner if not known(key)})


def known(keyword: str) -> bool:
    """Whether a keyword has a meaning, or is an extension by its name."""
    return keyword in KEYWORDS or keyword.startswith("x-")


def is_endless(schema: Any) -> bool:
    """Whether a schema allows only infinite values, such as an object that requires a property {"$ref": "#"}.

    Only references within the schema are followed. The references that have a finite value are a least fixed point:
    none at first, and each round finds more.
    """
    targets = {}
    for inner in subschemas(schema):
        if isinstance(ref := inner.get("$ref"), str) and ref.startswith("#"):
            targets[ref] = resolved(schema, ref)
    finite: set[str] = set()
    while found := {ref for ref in targets.keys() - finite if has_finite(targets[ref], targets.keys() - finite)}:
        finite |= found
    return not has_finite(schema, targets.keys() - finite)


def resolved(schema: Any, ref: str) -> Any:
    """The value of a reference such as #/$defs/node (RFC 6901); True, the schema that allows all, if there is none."""
    value = schema
    for part in ref[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return True
    return value if ref == "#" or "/" in ref else True  # "#name" is an anchor


def has_finite(schema: Any, endless: Any) -> bool:
    """Whether a schema may allow a finite value if the references in `endless` allow none. If in doubt, True."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    if schema.get("$ref") in endless:
        return False
    inner = list(_lists(schema, "allOf"))
    for key in ("anyOf", "oneOf"):
        options = list(_lists(schema, key))
        if options and not any(has_finite(option, endless) for option in options):
            return False
    if schema.get("type") == "object":
        properties = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
        required = [name for name in _lists(schema, "required") if isinstance(name, str)]
        inner += [properties.get(name, schema.get("additionalProperties")) for name in required]
    if schema.get("type") == "array" and isinstance(least := schema.get("minItems"), int):
        first: list[Any] = list(_lists(schema, "prefixItems"))[:least]
        inner += [*first, *([schema.get("items")] if least > len(first) else [])]
    return all(has_finite(one, endless) for one in inner)


def _lists(schema: Mapping[str, Any], key: str) -> Iterator[Any]:
    value = schema.get(key)
    yield from value if isinstance(value, list) else ()


# --------------------------------------------------------------------------------------------------- the process
def check(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the error in a grammar, or an empty one, and the keywords of its schema that have no effect.

    grammar  llguidance's JSON form of a grammar
    schema   the JSON schema, or None
    control  control string -> id, for grammars that name control tokens
    """
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    size = 1 + max(request["control"].values(), default=-1)
    tokens = [b""] * size + [bytes([byte]) for byte in range(255)] + [b"\xff<end>"]
    for name, id in request["control"].items():
        tokens[id] = b"\xff" + name.encode()
    end = len(tokens) - 1
    matcher = LLMatcher(
        LLTokenizer(cast(Any, Vocabulary(tokens, end)), slices=[]),
        json.dumps(request["grammar"]),
        log_level=0,
        limits=LLParserLimits(**LIMITS),
    )
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return {"error": matcher.get_error(), "ignored": []}
    if is_endless(request["schema"]):
        return {"error": "Unsatisfiable schema: each value would contain another one without end", "ignored": []}
    return {"error": "", "ignored": unknown_keywords(request["schema"])}


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


def limit() -> None:
    """Limit the CPU time and the address space of this process, where the system can."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
    try:
        import resource

        with open("/proc/self/statm") as file:
            base = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (base + SPACE, base + SPACE))
    except (ImportError, OSError):  # Windows and macOS have no such limit
        pass


def main() -> None:
    """Answer one request."""
    sys.path.append(sys.argv[1])
    import llguidance  # noqa: F401  before the limits

    limit()
    request = json.load(sys.stdin)
    threading.stack_size(STACK)
    thread = threading.Thread(target=lambda: print(json.dumps(check(request)), flush=True))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
