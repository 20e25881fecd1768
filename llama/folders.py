"""Where the program keeps what it made or fetched and can make or fetch again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """CLEARLLAMA_CACHE, or the user's cache folder as the operating system has it."""
    import platformdirs

    return Path(os.environ.get("CLEARLLAMA_CACHE") or platformdirs.user_cache_dir("clearllama")).expanduser()
