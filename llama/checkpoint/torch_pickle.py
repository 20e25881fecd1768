"""Interpreter of the pickles that torch.save writes for a state dict. It calls nothing that a pickle names.

A pickle is a program for a stack machine. This machine knows strings, numbers, lists, dicts, names of functions, and
the few functions that describe a tensor. Time and memory are linear in the number of operations, which is limited: no
nested value is compared, displayed or copied, and keys of dicts are strings.
"""

from __future__ import annotations

import io
import pickletools
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..checks import is_integer
from ..errors import CheckpointError

# The names and shapes of a model of 405B parameters take 60,000 operations in 0.2 million bytes.
LARGEST_PICKLE = 2**23  # bytes
MOST_OPERATIONS = 200_000
LONGEST_NAME = 1000  # characters
MOST_AXES = 16  # axes of a tensor
LARGEST = 2**63  # sizes and strides must be smaller
PROTOCOL = 2  # the default of torch.save
REMEDY = "the file is forged or damaged, download it again"

DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32,
        torch.int32, torch.uint64, torch.int64, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
STORAGES = {
    "torch.DoubleStorage": torch.float64, "torch.FloatStorage": torch.float32, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.ByteStorage": torch.uint8, "torch.CharStorage": torch.int8,
    "torch.ShortStorage": torch.int16, "torch.IntStorage": torch.int32, "torch.LongStorage": torch.int64,
    "torch.BoolStorage": torch.bool, "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128, "torch.UntypedStorage": torch.uint8,
    "torch.storage.UntypedStorage": torch.uint8,
}  # fmt: skip
ORDERED_DICT = "collections.OrderedDict"
TENSOR, TENSOR_3 = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"  # 3: for newer dtypes
PARAMETERS = {
    "torch._utils._rebuild_parameter": 3,
    "torch._utils._rebuild_parameter_with_state": 4,
}  # number of arguments
KNOWN = {ORDERED_DICT, TENSOR, TENSOR_3, *PARAMETERS, *STORAGES, *DTYPES}
OTHER_TENSORS = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_qtensor": "a tensor quantized by torch",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without values (on the device 'meta')",
}

LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Global(NamedTuple):
    """The name of a function or class, which is never imported."""

    name: str


class Storage(NamedTuple):
    """A block of values outside the pickle, which one or more tensors use."""

    key: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Described(NamedTuple):
    """A tensor as a pickle describes it. offset and strides count elements, as in torch."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_pickle(file: io.BytesIO, path: Path) -> object:
    """The value of the next pickle in `file`. Raises CheckpointError with a message that begins with `path`."""
    machine = _Machine(path)
    try:
        for done, (operation, argument, _) in enumerate(pickletools.genops(file)):
            if done > MOST_OPERATIONS:
                raise CheckpointError(f"{path}: its pickle has more than {MOST_OPERATIONS:,} operations; {REMEDY}")
            machine.run(operation.name, argument)
        if len(machine.stack) != 1 or machine.marks:
            raise ValueError("it leaves values on the stack")
    except (ValueError, IndexError, KeyError) as error:  # from genops, an empty stack or the memo
        why = "ends early" if "exhausted" in str(error) or "not enough" in str(error) else "is malformed"
        raise CheckpointError(f"{path} is truncated or damaged: its pickle {why}; download it again") from None
    return machine.stack[0]


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self, path: Path):
        self.path = path
        self.stack: list[Any] = []
        self.marks: list[int] = []  # the height of the stack at each mark
        self.memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        """Run one operation. Raises ValueError, IndexError or KeyError if it does not fit the stack or the memo."""
        if name in LITERALS:
            self.stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            if argument > MOST_OPERATIONS:
                raise ValueError("an index of the memo beyond the number of operations")
            self.memo[argument] = self.top()
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name in TUPLES:
            self.stack.append(tuple(self.pop(TUPLES[name])))
        elif name in CONSTANTS:
            self.stack.append(CONSTANTS[name])
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name == "TUPLE":
            self.stack.append(tuple(self.to_mark()))
        elif name == "GLOBAL":
            self.stack.append(self.known(argument.replace(" ", ".", 1)))
        elif name == "BINPERSID":
            self.stack.append(self.storage(*self.pop(1)))
        elif name == "REDUCE":
            function, arguments = self.pop(2)
            self.stack.append(self.call(function, arguments))
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            self.stack.append({} if name == "EMPTY_DICT" else [])
        elif name in ("SETITEM", "SETITEMS"):
            self.set_items(self.pop(2) if name == "SETITEM" else self.to_mark())
        elif name in ("APPEND", "APPENDS"):
            items = self.pop(1) if name == "APPEND" else self.to_mark()
            self.top(list).extend(items)
        elif name == "BUILD":  # sets attributes, such as the versions of a state dict's modules, which change no weight
            self.pop(1)
            self.top(dict)
        elif name == "PROTO" and argument != PROTOCOL:
            raise CheckpointError(
                f"{self.path}: its pickle has protocol {argument}, expected {PROTOCOL}, torch.save's default; save it"
                f" again with pickle_protocol={PROTOCOL}"
            )
        elif name not in ("STOP", "PROTO"):
            raise CheckpointError(
                f"{self.path}: its pickle has the operation {name}, which torch.save does not write with"
                f" pickle_protocol={PROTOCOL}, its default; {REMEDY}"
            )

    def pop(self, count: int) -> list[Any]:
        """Remove and return the topmost values. Raises ValueError if they are not all above the last mark."""
        height = len(self.stack) - count
        if height < (self.marks[-1] if self.marks else 0):
            raise ValueError("the stack is empty")
        values = self.stack[height:]
        del self.stack[height:]
        return values

    def to_mark(self) -> list[Any]:
        """Remove the last mark and the values above it; return the values."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def top(self, kind: type[Any] = object) -> Any:
        """The topmost value, which stays on the stack. Raises ValueError if it is not an instance of `kind`."""
        (value,) = self.pop(1)
        if not isinstance(value, kind):
            raise ValueError(f"a {type(value).__name__} instead of a {kind.__name__}")
        self.stack.append(value)
        return value

    def known(self, name: str) -> Global:
        """A function or class that state dicts need. Raises CheckpointError for all others."""
        if name in OTHER_TENSORS:
            owner = next((value for value in reversed(self.stack) if isinstance(value, str)), "an entry")
            raise CheckpointError(
                f"{self.path}: {owner:.80} is {OTHER_TENSORS[name]}; expected a dense tensor with its values"
                " in the file; convert it with to_dense(), dequantize() or to('cpu'), and save it again"
            )
        if name not in KNOWN:
            raise CheckpointError(
                f"{self.path}: it holds objects other than tensors (it imports {name:.80}), which could run code;"
                " expected only tensors; get a file with only the weights"
            )
        return Global(name)

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values to the dict on top of the stack.

        Raises CheckpointError if a key is not a name, or is there already.
        """
        target = self.top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str) or len(key) > LONGEST_NAME or not key.isprintable():
                shown = repr(key) if isinstance(key, str | int) else f"a {type(key).__name__}"
                raise CheckpointError(f"{self.path} holds an entry whose key is {shown:.60}; expected names of tensors")
            if key in target:
                raise CheckpointError(f"{self.path} holds two entries named {key!r:.80}; {REMEDY}")
            target[key] = value

    def storage(self, reference: Any) -> Storage:
        """The storage that a persistent id refers to. The device that it was saved from is ignored."""
        kind, form, key, place, numel, *view = reference if type(reference) is tuple else ()
        dtype = STORAGES[form.name] if isinstance(form, Global) else None
        if kind != "storage" or dtype is None or not isinstance(key, str) or not isinstance(place, str):
            raise ValueError("a reference to something other than a storage")
        if not is_integer(numel) or not 0 <= numel < LARGEST or view not in ([], [None]):
            raise ValueError("a storage without a size")
        return Storage(key, dtype, numel)

    def call(self, function: Any, arguments: Any) -> Any:
        """What a known function returns: an empty dict, or the description of a tensor."""
        if not isinstance(function, Global) or type(arguments) is not tuple:
            raise ValueError("a call of something other than a function")
        if function.name == ORDERED_DICT and not arguments:
            return {}
        if PARAMETERS.get(function.name) == len(arguments) and isinstance(arguments[0], Described):
            return arguments[0]  # the other arguments are flags and attributes, which change no weight
        storage, offset, shape, strides, flag, hooks, *rest = arguments
        dtype = storage.dtype if isinstance(storage, Storage) else None
        if function.name == TENSOR_3:
            form, *rest = rest
            dtype = DTYPES[form.name] if isinstance(form, Global) and dtype == torch.uint8 else None
        elif function.name != TENSOR:
            raise ValueError("a call of a name that is not a function")
        if dtype is None or not are_sizes((offset,)) or not are_sizes(shape) or not are_sizes(strides):
            raise ValueError("a tensor without a storage or a size")
        if len(shape) != len(strides) or not isinstance(flag, bool) or hooks not in (None, {}) or len(rest) > 1:
            raise ValueError("a tensor with other arguments")
        if rest and rest[0]:
            raise CheckpointError(
                f"{self.path}: a tensor is stored as the negative or the conjugate of its values; save it again after"
                " resolve_neg() and resolve_conj()"
            )
        return Described(storage, dtype, offset, shape, strides)


def are_sizes(value: Any) -> bool:
    """Whether a value is a tuple of a tensor's sizes or strides."""
    short = type(value) is tuple and len(value) <= MOST_AXES
    return short and all(is_integer(number) and 0 <= number < LARGEST for number in value)
