"""Pictures of the lessons: matplotlib's SVG made small and stable, a dark version of it, and a comparison of two."""

from __future__ import annotations

import base64
import colorsys
import hashlib
import io
import re
from collections import Counter

import matplotlib
import numpy as np
from PIL import Image

from llama.study.figure import Data, Figure, image

DARK, LIGHT = 0.08, 0.92  # lightness of a dark page, and that of its text
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
DRAWN_BY = re.compile(r"<!-- matplotlib ([\d.]+), data (\w+) -->\n")
TAG = re.compile(r"<[^>]*>")
FAMILY = re.compile(r"(?<=font-family: )'DejaVu Sans',[^;\"]*|(?<=px )'DejaVu Sans',[^;\"]*")
RASTER = re.compile(r'data:image/png;base64,\s*([^"]*)"')


def light(figure: Figure) -> str:
    """The figure without its caption, on a transparent background. The same data gives the same text."""
    data = figure.data()
    text = image(figure, data, "svg", caption=False).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = RASTER.sub(lambda m: f'data:image/png;base64,{"".join(m[1].split())}"', text)
    whole, rasters = _without_rasters(text)
    whole = TAG.sub(lambda m: re.sub(r"-?\d+\.\d+(?:e-?\d+)?", _rounded, m[0]), whole)
    whole = FAMILY.sub("'DejaVu Sans', Verdana, sans-serif", whole)
    whole = re.sub(
        r'(<g id="(?:figure|axes)_\d+">\s*<g id="patch_\d+">\s*<path [^>]*?style=")fill: #ffffff',
        r"\1fill: none",
        whole,
    )
    whole = re.sub(r'<g id="figure_1">', '<g fill="#000000">', whole)
    names: dict[str, str] = {}
    for name in re.findall(r'id="([^"]+)"', whole):
        used = f"#{name}" in whole
        new = names.setdefault(name, f"i{len(names)}") if used else ""
        whole = whole.replace(f' id="{name}"', f' id="{new}"' if used else "")
        whole = re.sub(rf"#{re.escape(name)}(?=[\")])", f"#{new}", whole) if used else whole
    whole = "\n".join(line.strip() for line in whole.splitlines() if line.strip())
    whole = re.sub(r"(?<=[\d.z])\s+(?=[MLCQz])|(?<=[MLCQ])\s+(?=[-\d.])", "", whole)  # white space in a path
    drawn_by = f"<!-- matplotlib {'.'.join(matplotlib.__version__.split('.')[:2])}, data {_fingerprint(data)} -->"
    return f"{drawn_by}\n{_with_rasters(_classes(whole), rasters)}\n"


def dark(text: str) -> str:
    """The same picture with the lightness of every colour reversed, for a dark page."""
    whole, rasters = _without_rasters(text)
    whole = re.sub(r"#[0-9a-f]{6}\b", lambda m: _reversed_hex(m[0]), whole)
    return _with_rasters(whole, [_reversed_png(raster) for raster in rasters])


def same(one: str, other: str) -> bool:
    """Whether two files are one picture: equal text, coordinates within 0.15 points, pixels within 3 of 255 levels.

    If two versions of matplotlib drew them, their data must agree to a thousandth.
    """
    made, wanted_made = (DRAWN_BY.match(text) for text in (one, other))
    if not made or not wanted_made or made[2] != wanted_made[2]:
        return False
    if made[1] != wanted_made[1]:
        return True
    (one, pixels), (other, expected) = _without_rasters(one), _without_rasters(other)
    if _without_numbers(one) != _without_numbers(other) or len(pixels) != len(expected):
        return False
    numbers, wanted = (np.array([float(n) for n in NUMBER.findall("".join(TAG.findall(t)))]) for t in (one, other))
    if np.abs(numbers - wanted).max() > 0.15:
        return False
    return all(
        a.shape == b.shape and np.abs(a - b).max() <= 3
        for a, b in zip(map(_pixels, pixels), map(_pixels, expected), strict=True)
    )


def _fingerprint(data: Data) -> str:
    """A hash of the data, in which numbers are rounded to a thousandth of the largest of their column."""
    digest = hashlib.sha256()
    for name, column in data.items():
        values = np.asarray(column)
        if values.dtype.kind in "fc":
            finite = np.abs(values[np.isfinite(values)])
            values = np.round(values / (finite.max(initial=0.0) or 1.0), 3) + 0.0  # no -0
        digest.update(f"{name} {values.tolist()}\n".encode())
    return digest.hexdigest()[:12]


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


def _without_numbers(text: str) -> str:
    """The text with "0" for every number inside a tag."""
    return TAG.sub(lambda m: NUMBER.sub("0", m[0]), text)


def _without_rasters(text: str) -> tuple[str, list[str]]:
    """The text with "@" for each embedded PNG file, and these files in base64."""
    return RASTER.sub('data:image/png;base64,@"', text), RASTER.findall(text)


def _with_rasters(text: str, rasters: list[str]) -> str:
    rest = iter(rasters)
    return re.sub(r"base64,@", lambda m: f"base64,{next(rest)}", text)


def _classes(text: str) -> str:
    """Write each style that occurs several times once, as a class."""
    rules = []
    for number, (style, count) in enumerate(Counter(re.findall(r' style="([^"]*)"', text)).most_common()):
        if count > 1:
            text = text.replace(f' style="{style}"', f' class="s{number}"')
            rules.append(f".s{number}{{{style}}}")
    return text.replace("</style>", "\n" + "\n".join(rules) + "</style>", 1)


def _reversed(rgb: np.ndarray) -> np.ndarray:
    """Colours (.., 3) in 0 .. 1, with reversed lightness between DARK and LIGHT."""
    flat = [colorsys.rgb_to_hls(*colour) for colour in rgb.reshape(-1, 3)]
    new = [colorsys.hls_to_rgb(h, LIGHT - (LIGHT - DARK) * lightness, s) for h, lightness, s in flat]
    return np.array(new).reshape(rgb.shape)


def _reversed_hex(colour: str) -> str:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return "#" + "".join(f"{round(255 * part):02x}" for part in _reversed(rgb))


def _pixels(raster: str) -> np.ndarray:
    """(height, width, 4), 0 to 255."""
    return np.array(Image.open(io.BytesIO(base64.b64decode(raster))).convert("RGBA")).astype(int)


def _reversed_png(raster: str) -> str:
    pixels = _pixels(raster)
    colours, which = np.unique(pixels[..., :3].reshape(-1, 3), axis=0, return_inverse=True)
    new = np.round(255 * _reversed(colours / 255))[which.reshape(-1)].reshape(*pixels.shape[:2], 3)
    file = io.BytesIO()
    Image.fromarray(np.concatenate((new, pixels[..., 3:]), -1).astype(np.uint8)).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
