"""Fuzz everything that reads untrusted files or text: one file per kind of input, the same law for all (law.py).

    python -m tests.fuzz [NAME ..] --seconds 20      fuzz, two harnesses at once; save the input of each finding, exit 1
    python -m tests.fuzz NAME --repeat FILE          try one input again

With the extra `fuzz` (Linux), atheris guides the mutations by code coverage. Without it they are random, from a seed.
Inputs of past findings are kept in found/NAME; the default tests try them again.
"""

# To add a harness, add a file with a class Harness to this folder, and its name here.
READERS = ("gguf", "config", "safetensors", "torchfile", "checklist", "tokenizer", "template", "prompts", "session")
NAMES = (*READERS, "requests")
