"""Make the pictures of README.md: two runs of `clearllama generate`, the memory of an 8B model, and two pages.

usage: python scripts/readme_pictures.py [generate] [memory] [pages]        (without a name: all)

generate.svg is an animation in one SVG file: each piece of the output appears at the time at which the program wrote
it. Record it on a quiet machine. memory-*.svg shows what `clearllama plan` computes. rope-page-*.png and
trace-page-*.png are photographs of pages in Chromium (CHROMIUM=path). All are written to docs/pictures, for light and
dark pages.
"""

from __future__ import annotations

import argparse
import html
import io
import json
import os
import shutil
import sys
import tempfile
import textwrap
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import lesson_svg
import numpy as np
import pexpect
from PIL import Image
from playwright.sync_api import sync_playwright

from llama import cli
from llama.study.figure import Data, Figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
QUESTIONS = ("What is the capital of Japan?", "Why is the sky blue? Answer in one sentence.")
COLUMNS, CELL, LINE, MARGIN = 108, 7.8, 20, 20  # characters; width and height of one, and the margin, in pixels
PAUSE = 1.0  # seconds before the next command

STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre }
text { fill: #1f2328 }
rect { fill: #f6f8fa; stroke: #d0d7de }
.note { fill: #636c76 } .command { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } rect { fill: #161b22; stroke: #30363d } .note { fill: #8d96a0 }
}
@media (prefers-reduced-motion: no-preference) {
  text { animation: appear 1ms backwards } @keyframes appear { from { opacity: 0 } }
}
"""


def record(question: str) -> list[tuple[float, str]]:
    """What `clearllama generate` writes to a terminal: pieces of text, each with its time in seconds."""
    child = pexpect.spawn("clearllama", ["generate", question], dimensions=(40, COLUMNS), encoding="utf8", timeout=120)
    start, pieces = time.monotonic(), []
    while True:
        try:
            text = child.read_nonblocking(4096, 120)
        except pexpect.EOF:
            return pieces
        pieces.append((time.monotonic() - start, text.replace("\r\n", "\n")))


def animation(sessions: list[tuple[str, list[tuple[float, str]]]]) -> str:
    """The sessions, one below the other, as an animated SVG."""
    texts, row, begin = [], 0, 0.0

    def put(text: str, column: int, at: float, kind: str) -> None:
        x, y = MARGIN + column * CELL, MARGIN + (row + 0.75) * LINE
        texts.append(
            f'<text x="{x:.1f}" y="{y:.0f}" textLength="{len(text) * CELL:.1f}" class="{kind}"'
            f' style="animation-delay:{at:.2f}s">{html.escape(text, quote=False)}</text>'
        )

    for question, pieces in sessions:
        put(f'$ clearllama generate "{question}"', 0, begin, "command")
        row += 1
        for line in _lines(pieces):
            kind = "note" if "".join(text for _, text in line).startswith("clearllama:") else "answer"
            column = 0
            for at, text in line:
                if column and column + len(text.rstrip()) > COLUMNS:
                    row, column, text = row + 1, 0, text.lstrip()
                for number, part in enumerate(textwrap.wrap(text, COLUMNS, drop_whitespace=False)):
                    row += number > 0
                    column = 0 if number else column
                    put(part, column, begin + at, kind)
                    column += len(part)
            row += 1
        row, begin = row + 1, begin + pieces[-1][0] + PAUSE
    width, height = 2 * MARGIN + COLUMNS * CELL, 2 * MARGIN + (row - 1) * LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="6"/>\n'
        + "\n".join(texts)
        + "\n</svg>\n"
    )


def _lines(pieces: list[tuple[float, str]]) -> list[list[tuple[float, str]]]:
    """The pieces, divided into lines."""
    lines: list[list[tuple[float, str]]] = [[]]
    for at, text in pieces:
        first, *more = text.split("\n")
        lines[-1] += [(at, first)] if first else []
        lines += [[(at, part)] if part else [] for part in more]
    return lines[:-1] if not lines[-1] else lines


def generate() -> None:
    record(QUESTIONS[0])  # the first run after an update compiles the kernels
    (PICTURES / "generate.svg").write_text(animation([(question, record(question)) for question in QUESTIONS]))


def memory_data() -> Data:
    """GB of each part of Llama 3.1 8B with 8,192 tokens on one GPU, by `clearllama plan`; one row per format."""
    columns: dict[str, list[str | float]] = {"format": [], "weights": [], "kv_cache": [], "activations": []}
    for quantize in (None, "int8", "int4"):
        option = ["--quantize", quantize] if quantize else []
        with redirect_stdout(io.StringIO()) as out:
            cli.main(["plan", "-m", "llama-3.1-8b", "--gpus", "1xL4", "--context", "8192", "--json", *option])
        parts = json.loads(out.getvalue())["memory"]
        for name, column in columns.items():
            column.append(parts[name] / 1e9 if name in parts else quantize or "bfloat16")
    return {name: np.array(column) for name, column in columns.items()}


def memory_draw(data: Data, canvas: Canvas) -> None:
    axes = canvas.subplots()
    rows = np.arange(len(data["format"]))
    left = np.zeros(len(rows))
    names = {"weights": "weights", "kv_cache": "keys and values of 8,192 tokens", "activations": "activations"}
    for (name, label), colour in zip(names.items(), ("#2166ac", "#e08214", "#1b7837"), strict=True):
        axes.barh(rows, data[name], 0.55, left, color=colour, label=label)
        left += data[name]
    for row, total in enumerate(left):
        axes.text(total + 0.2, row, f"{total:.1f} GB", va="center")
    for size in (8, 16, 24):
        axes.axvline(0.9 * size, color="#000000", linestyle=":", linewidth=1)
        axes.text(0.9 * size, -0.62, f"{size} GB", ha="center")
    axes.set_yticks(rows, data["format"])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 24)
    axes.set_xlabel("memory, GB")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=3)


MEMORY = Figure(
    "memory",
    "Llama 3.1 8B on one GPU. A dotted line is 90% of the memory of a GPU; the rest is for CUDA.",
    memory_data,
    memory_draw,
    (7.0, 2.5),
)


def memory() -> None:
    drawn = lesson_svg.light(MEMORY)
    (PICTURES / "memory-light.svg").write_text(drawn)
    (PICTURES / "memory-dark.svg").write_text(lesson_svg.dark(drawn))


def photograph() -> None:
    """The top of the RoPE page and of a trace, light and dark."""
    pages = {"rope-page": (["study"], 440), "trace-page": (["trace", "The capital of France is", "--quiet"], 268)}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM") or shutil.which("chromium"))
        for name, (command, height) in pages.items():
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


KINDS = {"generate": generate, "memory": memory, "pages": photograph}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *KINDS], metavar="NAME", help=", ".join(KINDS))
    names = parser.parse_args().names or KINDS
    PICTURES.mkdir(exist_ok=True)
    for name in names:
        KINDS[name]()


if __name__ == "__main__":
    main()
