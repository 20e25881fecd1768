"""Make the pictures of README.md and of pages in docs/: photographs in Chromium, for light and dark pages.

usage: python scripts/readme_pictures.py        (CHROMIUM=path to use that browser)

docs/pictures/rope-page-*.png shows the top of `clearllama study --html`, look-*.png the page of `clearllama serve` on
the default model.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from llama.study import page as rope_page

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
QUESTION, WORD = "What is the capital of Japan?", "Tokyo"


def look(browser: Browser, folder: str) -> None:
    """The server's page: a word with its alternatives, and the head that adds most to it."""
    command = [sys.executable, "-m", "llama", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        address = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+", line)))
        for theme in ("light", "dark"):
            page = opened(browser, theme, 1200, 720, address)
            page.click("#open-settings")
            page.fill("#set-seed", "5")
            page.click("#apply")
            page.click(f"#samples >> text={QUESTION}")
            page.wait_for_selector("text=The answer is complete.")
            page.click(f".t >> text={WORD}")
            page.wait_for_selector("#sentence >> text=matters most")
            shoot(page, folder, f"look-words-{theme}", height=470)
            for tab in ("head", "lens"):
                page.click(f"#tab-{tab}")
                page.evaluate(f"id('panel').scrollTop += id('{tab}').getBoundingClientRect().top - 70")
                shoot(page, folder, f"look-{tab}-{theme}")
        server.terminate()


def opened(browser: Browser, theme: Any, width: int, height: int, address: str) -> Page:
    look = {"color_scheme": theme, "reduced_motion": "reduce", "device_scale_factor": 2}
    page = browser.new_page(viewport={"width": width, "height": height}, **look)
    page.goto(address)
    return page


def shoot(page: Page, folder: str, name: str, height: int = 720) -> None:
    """Save the top of a page, at most `height` pixels."""
    page.wait_for_timeout(1000)
    page.screenshot(path=f"{folder}/shot.png")
    picture = Image.open(f"{folder}/shot.png")
    picture = picture.crop((0, 0, picture.width, min(2 * height, picture.height))).convert("RGB").quantize(256)
    picture.save(PICTURES / f"{name}.png", optimize=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM") or shutil.which("chromium"))
        file = Path(folder, "rope.html")
        file.write_text(rope_page.html())
        for theme in ("light", "dark"):
            shoot(opened(browser, theme, 1100, 440, file.as_uri()), folder, f"rope-page-{theme}")
        look(browser, folder)
        browser.close()


if __name__ == "__main__":
    main()
