"""Fixtures of the study's tests: the C++ kernels, and a headless Chromium, which pip does not install."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from llama.engine import kernels

from .. import tiny


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> Iterator[None]:
    """Remove the C++ kernel from tiny.FUNCTIONS on machines where it cannot be built."""
    with pytest.MonkeyPatch.context() as patch:
        if not kernels.ready():
            patch.delitem(tiny.FUNCTIONS, "kernel")
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium on this machine: apt install chromium")
    root = os.name == "posix" and os.geteuid() == 0  # Chromium's sandbox does not run as the superuser
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"] if root else [])
        yield chromium
        chromium.close()
