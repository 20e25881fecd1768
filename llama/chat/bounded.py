"""A sandbox for templates with limits on time and memory.

Jinja's own sandbox blocks access to the machine, but a template can still loop 10**10 times or write a string of that
length. This sandbox adds two limits per rendering:

    time   SECONDS of CPU time. The clock is read in every loop iteration, call, filter, test, comparison, operator and
           output; the work between two readings is short.
    space  SPACE bytes for all values that a template creates, in total. The largest possible size of a value is
           computed from the sizes of its inputs before the value is created.

The second limit must know every operation, so only listed filters and methods are allowed. The lists omit those that no
chat needs (filesizeformat, forceescape, pprint, random, striptags, urlize, wordwrap, xmlattr, lipsum), and all methods
of numbers and types. A list inside a list counts as often as it would be written: sixty lines of {% set x = [x, x] %}
need little memory, but writing or comparing the result would never end.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

SECONDS = 2.0  # a conversation of 1000 turns takes about 0.02
SPACE = 256 * 2**20  # bytes; room for a dozen copies of the longest prompts
LARGEST_TEMPLATE = 60_000  # characters; the longest templates in use have 20,000
LARGEST_NUMBER = 100_000  # an argument of a filter or string method, such as a width or a count
LARGEST_BITS = 100_000  # of an integer
LARGEST_INDENT = 16  # of tojson


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FILTERS = _words(
    "abs attr batch capitalize center count d default dictsort e escape first float format groupby indent int items"
    " join last length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort"
    " string sum title tojson trim truncate unique upper urlencode wordcount"
)
METHODS: dict[type | tuple[type, ...], frozenset[str]] = {
    str: _words(
        "capitalize casefold center count encode endswith find format format_map index isalnum isalpha isascii"
        " isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip"
        " partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines"
        " startswith strip swapcase title upper zfill"
    ),
    bytes: frozenset(["decode"]),
    (int, float, complex, type): frozenset(),
    (list, tuple): frozenset(["copy", "count", "index"]),
    dict: frozenset(["copy", "get", "items", "keys", "values"]),
}

# How many times longer a text can become; 3 is enough for all others ("ΐ".upper() has three characters).
GROWTH = {"tojson": 6, "escape": 5, "e": 5, "urlencode": 9, "encode": 4}
SPLIT_PIECE = 60  # bytes of a short string and its reference in a list
CHARACTER = 84  # bytes of a one-character string and its reference in a list


class Bounded(ImmutableSandboxedEnvironment):
    """An environment for one rendering; spent time and space are not returned. Raises SecurityError at a limit."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self, **options: Any):
        super().__init__(optimized=False, finalize=self._write, **options)  # compiling evaluates nothing
        self.filters = {name: self._filter(name, self.filters[name]) for name in FILTERS}
        self.tests = {name: self._test(test) for name, test in self.tests.items()}
        self.filters |= {"an iteration": self.iterated, "an operand": self.operand, "a result": self.spent}  # by Hooked
        del self.globals["lipsum"]
        self.end = time.thread_time() + SECONDS
        self.left = SPACE
        self._calls = 0
        self._weights: dict[int, tuple[Any, int, int]] = {}

    def add_filter(self, name: str, filter: Callable[..., Any]) -> None:
        """Replace a filter of FILTERS."""
        self.filters[name] = self._filter(name, filter)

    # ------------------------------------------------------------------------------------------------------ the limits
    def spend(self, size: int = 0) -> None:
        """Spend `size` bytes; every few calls, check the limits."""
        self._calls += 1
        if size > 1000 or not self._calls % 32:
            self.require(size)
            if time.thread_time() > self.end:
                raise SecurityError(f"it ran for more than {SECONDS:g} seconds and was stopped")
        self.left -= size

    def require(self, size: int) -> None:
        """Raise SecurityError if fewer than `size` bytes are left."""
        if size > self.left:
            raise SecurityError(f"its values would take more than {SPACE >> 20} MiB, so it was stopped")

    def weigh(self, value: Any) -> int:
        """The bytes of a value including its items; an item that occurs twice counts twice."""
        return self._weigh(value)[0]

    def _weigh(self, value: Any) -> tuple[int, int]:
        """Bytes and depth of nesting. Lists, tuples and mappings are immutable here, so each is measured only once."""
        if isinstance(value, str | bytes):
            return sys.getsizeof(value), 0
        if isinstance(value, Namespace):
            self.spend()
            return self._add(value._Namespace__attrs.values())  # vars() does not work
        if not isinstance(value, list | tuple | Mapping):
            if isinstance(value, type({}.keys()) | type({}.values()) | type({}.items())):
                return self._add(value)
            return (sys.getsizeof(value) if isinstance(value, int) else 32), 0
        known = self._weights.get(id(value))
        if known is None:
            weight, depth = self._add([*value, *value.values()] if isinstance(value, Mapping) else value)
            known = self._weights[id(value)] = value, weight, depth
        return known[1:]

    def _add(self, values: Iterable[Any]) -> tuple[int, int]:
        weight, depth = 64, 0
        for value in values:
            self.spend()
            inner, levels = self._weigh(value)
            weight, depth = weight + 8 + inner, max(depth, levels)
        return weight, depth + 1

    def spent(self, value: Any) -> Any:
        """A new value, after spending its size; the items of a generator are spent one by one."""
        if isinstance(value, GeneratorType):
            return self._spend_each(value)
        self.spend(sys.getsizeof(value))
        return value

    def _spend_each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.spend(sys.getsizeof(value))
            yield value

    # ----------------------------------------------------------------------------------------- hooks inserted by Hooked
    def iterated(self, values: Any) -> Any:
        """The iterable of a loop, with a check of the limits in every iteration."""
        return _Iterated(self, values) if hasattr(values, "__len__") else self._iterate(values)

    def _iterate(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.spend()
            yield value

    def operand(self, value: Any) -> Any:
        """A value that will be compared, searched or joined with ~."""
        self.require(self.weigh(value))
        self.spend()
        return value

    @pass_context
    def _write(self, context: Any, value: Any) -> Any:
        self.spend(self.weigh(value))
        return value

    # ----------------------------------------------------------------------------------------- what templates can call
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        if attribute.startswith("_"):  # Jinja would write it as an empty string; a real template never needs it
            raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe")
        return super().unsafe_undefined(obj, attribute)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, LoopContext):  # a recursive loop
            args = (self.iterated(args[0]), *args[1:]) if args else args
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | bytes):
            args = tuple(list(a) if isinstance(a, Iterator) else a for a in args)
            if obj.__name__ == "join" and args:
                self._check_size("join", args[0], (owner,), kwargs)
            else:
                self._check_size(obj.__name__, owner, args, kwargs)
        else:
            self.require(sum(map(self.weigh, (*args, *kwargs.values()))))
        return self.spent(super().call(context, obj, *args, **kwargs))

    def _filter(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        first = int(hasattr(filter, "jinja_pass_arg"))  # the context or environment precedes the value

        @functools.wraps(filter)
        def checked(*passed: Any, **kwargs: Any) -> Any:
            value, args = passed[first], passed[first + 1 :]
            if name == "join" and isinstance(value, Iterator):
                value = list(value)
            self._check_size(name, value, args, kwargs)
            return self.spent(filter(*passed[:first], value, *args, **kwargs))

        return checked

    def _test(self, test: Any) -> Callable[..., Any]:
        @functools.wraps(test)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.spend()
            self.require(sum(map(self.weigh, (*args, *kwargs.values()))))
            return test(*args, **kwargs)

        return checked

    def _check_size(self, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise SecurityError if the result of a filter or string method could be too large."""
        rest = (*args, *kwargs.values())
        for number in rest:
            if isinstance(number, int) and abs(number) > LARGEST_NUMBER:
                raise SecurityError(f"{name} was given a number above {LARGEST_NUMBER}, so it was stopped")
        weight, depth = self._weigh(value)
        size = GROWTH.get(name, 3) * weight + sum(map(self.weigh, rest))
        texts = max([self.weigh(text) for text in rest if isinstance(text, str)], default=0)
        if name == "replace":
            counted = args and isinstance(args[0], str) and isinstance(value, str)
            size += 4 * (value.count(args[0]) + 1 if counted else weight) * texts
        elif name == "join":
            size = 4 * (weight + (len(value) if hasattr(value, "__len__") else 0) * texts)
        elif name == "indent":
            width = max([n if isinstance(n, int) else self.weigh(n) for n in rest], default=4)
            size += max(width, 4) * weight + SPLIT_PIECE * len(str(value))
        elif name == "tojson":
            indents = [n if isinstance(n, int) else len(n) if isinstance(n, str) else 0 for n in rest]
            if any(n > LARGEST_INDENT for n in indents):
                raise SecurityError(f"tojson was given an indent above {LARGEST_INDENT}, so it was stopped")
            size += sum(indents) * depth * weight
        elif name == "format":
            if not isinstance(value, str):
                raise SecurityError("format was given a value that is not a string, so it was stopped")
            size += self.printf_size(value, tuple(rest))
        elif name in ("split", "rsplit"):
            mark = args[0] if args else kwargs.get("sep")
            size += SPLIT_PIECE * (value.count(mark) if isinstance(mark, str) and mark else len(value))
        elif name in ("splitlines", "title", "wordcount") and isinstance(value, str):
            size += SPLIT_PIECE * len(value)
        elif name in ("list", "sort", "unique", "batch", "slice", "groupby") and isinstance(value, str):
            size += CHARACTER * len(value)
        elif name == "sum" and not all(isinstance(n, int | float | str | None) for n in rest):
            raise SecurityError("sum was used to join lists, so it was stopped")
        self.require(size)
        self.spend()

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for factor, many in ((left, right), (right, left)):
                if isinstance(many, int) and not isinstance(factor, int | float):
                    self.require(max(many, 0) * sys.getsizeof(factor))
        elif operator == "%" and isinstance(left, str | bytes):
            self.require(self.printf_size(left, right if isinstance(right, tuple) else (right,)))
        elif operator == "+" and not isinstance(left, int | float):
            self.require(4 * (sys.getsizeof(left) + sys.getsizeof(right)))
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > LARGEST_BITS:
                raise SecurityError("it computed a number of more than 30000 digits and was stopped")
        return self.spent(super().call_binop(context, operator, left, right))

    def printf_size(self, form: Any, values: tuple[Any, ...]) -> int:
        """An upper bound on the bytes of form % values: every field counts as the widest one possible."""
        text = form if isinstance(form, str) else str(form, "latin-1") if isinstance(form, bytes) else ""
        stars = max([abs(n) for n in values if isinstance(n, int)], default=0) if "*" in text else 0
        widths = sum(int(digits[:20]) for digits in re.findall("[0-9]+", text))
        field = 400 + stars + 10 * sum(map(self.weigh, values))  # a float has up to 309 digits, an escape 10
        return 4 * (len(text) + widths + text.count("%") * field)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format with the limits, instead of Jinja's replacement for it."""
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__

        def format(*args: Any, **kwargs: Any) -> str:
            named = dict(args[0]) if value.__name__ == "format_map" else kwargs
            return type(text)(_Formatter(self).vformat(str(text), () if named is not kwargs else args, named))

        return format

    # ------------------------------------------------------------------------------------------------------- compiling
    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        Hooked().visit(source)
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)


class _Iterated:
    """An iterable with a length, for a loop."""

    def __init__(self, environment: Bounded, values: Any):
        self.environment, self.values = environment, values

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return self.environment._iterate(self.values)


class _Formatter(SandboxedFormatter):
    def __init__(self, environment: Bounded):
        super().__init__(environment)
        self.environment = environment

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self.environment.require(10 * self.environment.weigh(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        widths = sum(int(digits[:20]) for digits in re.findall("[0-9]+", format_spec))
        self.environment.require(4 * widths + 10 * self.environment.weigh(value))
        return self.environment.spent(super().format_field(value, format_spec))


class Hooked(NodeTransformer):
    """Wraps each expression that Jinja evaluates without its environment in a hook.

    A hook is a filter whose name contains a space, so no template can write it.
    """

    def _hook(self, name: str, node: Any) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # counts text like the output of {{ }}

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._hook("an iteration", node.iter)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._hook("an operand", node.expr)
        for operand in node.ops:
            operand.expr = self._hook("an operand", operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self._hook("an operand", part) for part in node.nodes]
        return self._hook("a result", node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return self._hook("a result", node)
        if not isinstance(node.arg, nodes.Const):
            node.arg = self._hook("an operand", node.arg)  # the lookup hashes it
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._hook("a result", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = self._hook("an operand", pair.key)
        return self._hook("a result", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._hook("a result", node) if node.ctx == "load" else node
