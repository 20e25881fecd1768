"""Entry point of `python -m llama` and of the command `clearllama`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> int:
    """Import the command line and run it. An interrupt during the import exits at once, without a traceback."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        os.write(2, b"\nclearllama: interrupted\n")
        os._exit(130)

    previous = signal.signal(signal.SIGINT, leave)
    from .cli import main as run

    signal.signal(signal.SIGINT, previous)
    try:
        return run()
    except KeyboardInterrupt:  # a second interrupt, after the first one was reported
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is done; ignore interrupts during shutdown


if __name__ == "__main__":
    sys.exit(main())
