"""Results of long runs, which topics show without repeating them; each topic names the command that made them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..figure import Data

HERE = Path(__file__).resolve().parent


def json_lines(name: str) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object per line."""
    return [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines()]


def data(name: str) -> Data:
    """The data of a figure that `study TOPIC --figure FILE.csv` wrote."""
    found = np.genfromtxt(HERE / name, delimiter=",", names=True, dtype=None, encoding="utf-8")
    columns = {column: found[column] for column in found.dtype.names or ()}
    return {column: values.astype(float) if values.dtype.kind == "i" else values for column, values in columns.items()}


def rows(name: str) -> list[list[str]]:
    """The rows of a CSV file, without the header."""
    return list(csv.reader((HERE / name).read_text(encoding="utf-8").splitlines()))[1:]
