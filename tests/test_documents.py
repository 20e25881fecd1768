"""The entries of a JSON document: a value of another type is an error that names the key, and is never converted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from llama.errors import CheckpointError, ConfigError
from llama.system.documents import Fields, read_json

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
        with pytest.raises(ConfigError, match=rf"the key {missing} is missing"):
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
