"""The entries of a JSON document: a value of another type is an error that names the key, and is never converted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from llama.errors import CheckpointError, ConfigError, UsageError
from llama.system.documents import Fields, Required, by_id, check_unicode, checked, read_json

VALUES = {
    "a string": "0.5", "true": True, "false": False, "a list": [0.5], "an object": {"a": 0.5}, "an integer": 2,
    "a float": 0.5, "infinity": math.inf, "less than all": -math.inf, "no number": math.nan, "many digits": 10**400,
}  # fmt: skip
ACCEPTED: dict[type, set[str]] = {
    float: {"an integer", "a float", "many digits"}, int: {"an integer", "many digits"}, bool: {"true", "false"},
    str: {"a string"}, list: {"a list"}, dict: {"an object"}, object: set(VALUES),
}  # fmt: skip


@pytest.mark.parametrize("type", ACCEPTED)
def test_a_field_accepts_the_values_of_its_type_only(type: type) -> None:
    fields = Fields({**VALUES, "null": None}, "params.json")
    for name, value in VALUES.items():
        if name in ACCEPTED[type]:
            assert fields.get(name, type) is value
        else:
            with pytest.raises(ConfigError, match=rf"^params\.json: {name} must be .*, got "):
                fields.get(name, type, 0)
    for missing in ("null", "absent"):
        assert fields.get(missing, type, 7) == 7
        with pytest.raises(ConfigError, match=rf"^params\.json: {missing} is missing$"):
            fields.get(missing, type)
    assert fields.unknown() == []
    assert Fields({"b": 1, "a": 2}, "").unknown() == ["a", "b"]


def test_a_file_is_refused_by_its_size_and_its_kind(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, null]}')
    assert read_json(tmp_path / "a.json") == read_json(tmp_path / "a.json", 16) == {"a": [1, None]}
    for path, largest, words in ((tmp_path / "a.json", 15, "16 bytes, expected at most 15"), (tmp_path, 99, "regular"),
                                 (tmp_path / "b.json", 99, "is missing")):  # fmt: skip
        with pytest.raises(CheckpointError, match=words):
            read_json(path, largest)


INNER = {"name": Required(str), "count": (1, 3), "type": "function"}
TABLE = {"items": [INNER], "inner": INNER, "any": object, "bias": by_id}
# An object -> what the error says about it, or None
OBJECTS: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"items": [], "any": [None], "bias": {"0": 1, "17": "x"}, "inner": None}, None),
    ({"items": [{"name": "a", "count": 3}, {"name": "b", "type": "function", "count": None}]}, None),
    ({"Items": []}, "unknown key 'Items'; known: items, inner, any, bias"),
    ({"items": {}}, "items must be a list, got {}"),
    ({"items": [5]}, "items[0] must be an object, got 5"),
    ({"items": [{"name": "a"}, {"count": 1}]}, "items[1].name is missing"),
    ({"inner": {"name": None}}, "inner.name is missing"),
    ({"inner": {"name": "a", "nam": 1}}, "unknown key 'inner.nam'; known: name, count, type"),
    ({"inner": {"name": "a", "count": True}}, "inner.count must be an integer from 1 to 3, got True"),
    ({"inner": {"name": "a", "type": "tool"}}, "inner.type must be 'function', got 'tool'"),
    ({"bias": {"01": 1}}, "the keys of bias must be token ids, got {'01': 1}"),
]


def test_an_object_is_checked_by_a_table() -> None:
    """Valid objects come back without their nulls; an error names the path of the value, wherever it is."""
    for values, message in OBJECTS:
        for path in ("", "a", "a.b[0]"):
            where = f"{path}." if path else ""
            if message is None:
                text = json.dumps(values).replace(', "inner": null', "").replace(', "count": null', "")
                assert json.loads(json.dumps(checked(values, TABLE, path))) == json.loads(text)
                continue
            with pytest.raises(UsageError) as error:
                checked(values, TABLE, path)
            quoted = message.replace("unknown key '", f"unknown key '{where}").replace("keys of ", f"keys of {where}")
            assert str(error.value) == (quoted if quoted != message else where + message)
    with pytest.raises(ConfigError, match=r"^x\[1\] must be an integer"):
        checked([1, "a"], [int], "x", ConfigError)
    with pytest.raises(UsageError, match=r"^b must be valid Unicode"):
        check_unicode({"a": "x", "b": ["\ud800"]})
