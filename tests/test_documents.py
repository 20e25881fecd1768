"""The fields of a JSON document: a value of another type is an error that names the key, and is never converted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llama.checkpoint.documents import Fields
from llama.errors import ConfigError

VALUES = {
    "a string": "0.5", "true": True, "false": False, "a list": [0.5], "an object": {"a": 0.5}, "an integer": 2,
    "a float": 0.5, "infinity": math.inf, "less than all": -math.inf,
}  # fmt: skip
# the method -> the values that it accepts
ACCEPTED = {
    "number": {"an integer", "a float"},
    "integer": {"an integer"},
    "boolean": {"true", "false"},
    "mapping": {"an object"},
}


@pytest.mark.parametrize("method", ACCEPTED)
@pytest.mark.parametrize("default", [(), (None,), (1.5,)])
def test_a_field_accepts_the_values_of_its_type_only(method: str, default: tuple[Any, ...]) -> None:
    for name, value in VALUES.items():
        read = getattr(Fields({"key": value}, "params.json"), method)
        arguments = () if method == "mapping" else default
        if name in ACCEPTED[method]:
            assert read("key", *arguments) is value, name
        else:
            with pytest.raises(ConfigError, match=r"^params\.json: key must be "):
                pytest.fail(f"{name}: {read('key', *arguments)}")
