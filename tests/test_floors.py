"""The minimum versions of the dependencies: each has a reason, and the installed versions satisfy them."""

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
ALL = [Requirement(text) for text in (*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra))]

# The first release without a known vulnerability, written a second time.
SAFE = {
    "torch": "2.10", "sentencepiece": "0.2.2", "jinja2": "3.1.6", "safetensors": "0.8.0", "tiktoken": "0.13",
    "tqdm": "4.66.3", "transformers": "5.3",
}  # fmt: skip


def floor(requirement: Requirement) -> Version:
    (minimum,) = (clause.version for clause in requirement.specifier if clause.operator == ">=")
    return Version(minimum)


@pytest.mark.parametrize("requirement", ALL, ids=str)
def test_installed_versions_satisfy_the_requirements(requirement: Requirement) -> None:
    if requirement.marker is not None and not requirement.marker.evaluate():
        pytest.skip("not required on this system")
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        if requirement.name in {Requirement(text).name for text in (*PROJECT["dependencies"], *EXTRAS["test"])}:
            raise
        pytest.skip("the extra is not installed")
    assert requirement.specifier.contains(found, prereleases=True), f"{found} is installed"
    assert Version(found) >= floor(requirement)


def test_no_minimum_version_has_a_known_vulnerability() -> None:
    floors = {requirement.name: floor(requirement) for requirement in ALL}
    assert floors.keys() >= SAFE.keys()
    for name, minimum in SAFE.items():
        assert floors[name] >= Version(minimum), name


def test_every_minimum_version_has_a_reason() -> None:
    for text in PROJECT["dependencies"]:
        lines = re.findall(rf'^.*"{re.escape(text)}".*$', TEXT, re.MULTILINE)
        assert any(len(line.partition("#")[2].strip()) > 12 for line in lines), text
