"""Fuzzing of everything that reads a file or a text from outside: one file a kind of input, one law for all of them.

    python -m tests.fuzz [NAME ..] --seconds 20      fuzz, two at once; exit code 1 and a saved input for each finding
    python -m tests.fuzz NAME --repeat FILE          one input again

With the extra `fuzz` (Linux) atheris guides the mutations by the code they reach; without it they are random, by a
seed. An input that was once a finding stays in found/NAME and is tried by the default tests ever after.
"""

# A new harness is a file of this folder with a class Harness, and its name here.
NAMES = ("gguf", "config", "safetensors", "checklist", "tokenizer", "template", "prompts", "session")
