"""What a figure draws, as numbers."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Wedge

from llama.study import figure

from .by_hand import Array

# figure -> columns whose numbers it shows as places, signs or texts instead
NOT_DRAWN: dict[str, set[str]] = {}


def draw(drawn: figure.Figure) -> Canvas:
    canvas = Canvas(figsize=drawn.size)
    drawn.draw(drawn.data(), canvas)
    return canvas


def check_drawn(name: str, data: figure.Data, canvas: Canvas) -> None:
    """Check that every number of a figure's table is a coordinate or a value of what it draws."""
    parts: list[Array] = []
    for axes in canvas.axes:
        for line in axes.lines:
            parts += [
                np.ravel(part) for part in (line.get_data_3d() if hasattr(line, "get_data_3d") else line.get_data())
            ]
        parts += [np.ravel(image.get_array()) for image in axes.images]
        for shape in axes.collections:
            parts += [np.ravel(shape.get_offsets()), *(np.ravel(path.vertices) for path in shape.get_paths())]
            parts += [] if shape.get_array() is None else [np.ravel(shape.get_array())]
        parts += [np.radians((patch.theta1, patch.theta2)) for patch in axes.patches if isinstance(patch, Wedge)]
        for patch in axes.patches:
            parts.append(np.ravel(patch.get_path().vertices if not hasattr(patch, "get_height") else patch.get_bbox()))
    drawn = np.sort(np.concatenate([np.asarray(part, dtype=float) for part in parts]))
    for column, values in data.items():
        if values.dtype.kind in "fiu" and column not in NOT_DRAWN.get(name, ()):
            finite = values[np.isfinite(values)].astype(float)
            at = np.searchsorted(drawn, finite)
            near = [np.abs(drawn[np.clip(i, 0, len(drawn) - 1)] - finite) for i in (at, at - 1)]
            assert (np.minimum(*near) <= 1e-9 + 1e-6 * np.abs(finite)).all(), column
