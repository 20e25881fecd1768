"""The least versions of what is built upon: each has its reason, and what is installed is not below it."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

TEXT = (Path(__file__).parents[1] / "pyproject.toml").read_text()
PROJECT = tomllib.loads(TEXT)["project"]
EXTRAS = PROJECT["optional-dependencies"]
ALL = [Requirement(text) for text in (*PROJECT["dependencies"], *(one for some in EXTRAS.values() for one in some))]

# The first release without a published hole, written down a second time.
SAFE = {
    "torch": "2.10", "sentencepiece": "0.2.1", "jinja2": "3.1.6", "safetensors": "0.8.0", "tiktoken": "0.13",
    "tqdm": "4.66.3", "transformers": "5.3",
}  # fmt: skip


def floor(requirement: Requirement) -> Version:
    (least,) = (one.version for one in requirement.specifier if one.operator == ">=")
    return Version(least)


@pytest.mark.parametrize("requirement", ALL, ids=str)
def test_what_is_installed_is_not_below_its_floor(requirement: Requirement) -> None:
    if requirement.marker is not None and not requirement.marker.evaluate():
        pytest.skip("not for this system")
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        if requirement.name in {Requirement(text).name for text in (*PROJECT["dependencies"], *EXTRAS["test"])}:
            raise
        pytest.skip("an extra that is not installed")
    assert requirement.specifier.contains(found, prereleases=True), f"{found} is installed"
    assert Version(found) >= floor(requirement)


def test_no_floor_lets_a_published_hole_in() -> None:
    floors = {requirement.name: floor(requirement) for requirement in ALL}
    assert floors.keys() >= SAFE.keys()
    for name, least in SAFE.items():
        assert floors[name] >= Version(least), name


def test_every_floor_of_the_package_has_its_reason() -> None:
    for text in (*PROJECT["dependencies"], *EXTRAS["hub"], *EXTRAS["fuzz"]):
        lines = re.findall(rf'^.*"{re.escape(text)}".*$', TEXT, re.MULTILINE)
        assert any(len(line.partition("#")[2].strip()) > 12 for line in lines), text
