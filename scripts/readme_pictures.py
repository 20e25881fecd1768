"""Make the pictures of README.md: photographs of two pages in Chromium, for light and dark pages.

usage: python scripts/readme_pictures.py        (CHROMIUM=path to use that browser)

docs/pictures/rope-page-*.png shows the top of `clearllama study --html`, trace-page-*.png that of `trace --html`.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from llama import cli

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
# picture -> the command, and how many pixels of its page are shown
PAGES = {"rope-page": (["study"], 440), "trace-page": (["trace", "The capital of France is", "--quiet"], 268)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM") or shutil.which("chromium"))
        for name, (command, height) in PAGES.items():
            file = Path(folder) / f"{name}.html"
            with redirect_stdout(io.StringIO()):
                failed = cli.main([*command, "--html", str(file)])
            if failed:
                sys.exit(f"clearllama {command[0]} failed")
            for theme in ("light", "dark"):
                page = browser.new_page(
                    viewport={"width": 1100, "height": height},
                    color_scheme=theme,
                    reduced_motion="reduce",
                    device_scale_factor=2,
                )
                page.goto(file.as_uri())
                page.wait_for_timeout(1000)
                page.screenshot(path=f"{folder}/shot.png")
                picture = Image.open(f"{folder}/shot.png").convert("RGB").quantize(256)
                picture.save(PICTURES / f"{name}-{theme}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
