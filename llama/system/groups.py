"""The control groups of Linux, by which containers limit the memory and the CPUs of a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def limits(controller: str, root: Path, *files: str) -> Iterator[tuple[Path, int, int]]:
    """The folders of this process's group and of its ancestors, each with the two numbers in its `files`.

    `files` names the files of both cgroup versions. A group with other words there, such as "max", is left out. root
    contains proc and sys. The root of the mount is included: inside a container, the path of the group may be the one
    outside of it.
    """
    for line in read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controller in controllers.split(",") or not controllers:  # version 2 has no list of controllers
            mount = root / "sys/fs/cgroup" / (controllers and controller)
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for group in (mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)):
                words = [word for file in files for word in read(group / file).split()]
                if len(words) == 2 and all(map(str.isdecimal, words)):
                    yield group, int(words[0]), int(words[1])


def read(path: Path) -> str:
    """The text of a file; empty if it can't be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
