"""`python -m llama` and the command `clearllama` start here."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> int:
    """Import the command line and run it. An interrupt during the import ends quietly; from then on main sees to it."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        os.write(2, b"\nclearllama: interrupted\n")
        os._exit(130)

    previous = signal.signal(signal.SIGINT, leave)
    from .cli import main as run

    signal.signal(signal.SIGINT, previous)
    try:
        return run()
    except KeyboardInterrupt:  # a second one, where the first had just been told of
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left that it could end


if __name__ == "__main__":
    sys.exit(main())
