"""The control groups of Linux, by which containers limit the memory and the CPUs of a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's group and of its ancestors, in both versions. root contains proc and sys.

    The root of the mount is included: inside a container, the path of the group may be the one outside of it.
    """
    for line in read_lines(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controller in controllers.split(",") or not controllers:  # version 2 has no list of controllers
            mount = root / "sys/fs/cgroup" / (controllers and controller)
            parts = [part for part in path.split("/") if part not in ("", "..")]
            yield from (mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def read_lines(path: Path) -> list[str]:
    """The lines of a file; none if it can't be read."""
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []


def read_number(path: Path) -> int | None:
    """The number in a file; None if there is none, as in "max"."""
    text = "".join(read_lines(path)).strip()
    return int(text) if text.isdecimal() else None
