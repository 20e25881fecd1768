"""The control groups of Linux, by which containers limit the memory and the CPUs of a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """The folders of this process's group and of its ancestors, each with its version of the interface, 1 or 2.

    The root of the mount is included: inside a container, the path of the group may be the one outside of it. The
    argument root contains proc and sys.
    """
    for line in read_lines(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controller in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup" / controller
        elif controllers == "":
            version, mount = 2, root / "sys/fs/cgroup"
        else:
            continue
        parts = [part for part in path.strip().split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield version, mount.joinpath(*parts[:depth])


def read_lines(path: Path) -> list[str]:
    """The lines of a file; none if it can't be read."""
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []
