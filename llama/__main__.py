"""`python -m llama` is the command `clearllama`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
