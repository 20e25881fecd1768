"""Import the repository's scripts as modules, for the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import compare_peers
import gpu_check
import make_tiny
import train_tiny

__all__ = ["compare_peers", "gpu_check", "make_tiny", "train_tiny"]
