"""Run the tests with the minimum versions that pyproject.toml declares, in a fresh environment and the newest torch.

usage: python scripts/lowest.py [PYTEST_OPTIONS]

If another package excludes one of these versions, pip reports it and the script fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def lowest(project: dict) -> dict[str, str]:
    """The minimum of each package that the project or an extra requires."""
    extras = project["optional-dependencies"].values()
    needs = [Requirement(text) for texts in (project["dependencies"], *extras) for text in texts]
    return {
        need.name: part.version
        for need in needs
        for part in need.specifier
        if need.name != "torch" and part.operator == ">="
    }


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as work:
        constraints = Path(work, "constraints.txt")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in lowest(project).items()))
        venv.create(Path(work, "venv"), with_pip=True)
        python = [Path(work, "venv", "bin", "python"), "-m"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*python, "pip", "install", "-q", "-c", constraints, "-e", f"{ROOT}[test]"], check=True)
        return subprocess.run([*python, "pytest", *sys.argv[1:]], cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
