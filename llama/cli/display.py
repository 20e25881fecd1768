"""Progress on stderr and tables on stdout, alike in all commands. JSON is written by `streams.write_json`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


@contextlib.contextmanager
def progress(quiet: bool, unit: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar if stderr is a terminal. Yields the function that updates it: show(what, done, total)."""
    from tqdm import tqdm

    with tqdm(unit=unit, unit_scale=True, leave=False, disable=quiet or None) as bar:  # None: only at a terminal

        def show(what: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_description(what, refresh=False)
            bar.update(done - bar.n)

        yield show


def heading(columns: Sequence[str]) -> str:
    """The first line of a table."""
    return row(columns, dict(zip(columns, columns, strict=True)))


def row(columns: Sequence[str], values: Mapping[str, Any]) -> str:
    """A line of a table. The columns are keys of the values, as in --json; a missing value is empty."""
    cells = []
    for name in columns:
        value = values.get(name)
        text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        cells.append(text.rjust(max(8, len(name))))
    return "  ".join(cells).rstrip() + "\n"
