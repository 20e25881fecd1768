"""Defects to plant, one for every fault that used to pass in silence, to prove that its case can fail.

A defect is a small edit of the library's source. `test_planted.py` makes it in a copy of the repository, runs the
cases of the row there, and wants at least one of them to fail.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Defect:
    row: str  # A13
    what: str  # what goes wrong with it, in a few words, for docs/reliability.md
    file: str  # below the repository's root
    old: str  # stands in the file once
    new: str


# A tuple for each group.
META: tuple[Defect, ...] = ()
CONFIG: tuple[Defect, ...] = ()
SAFETENSORS: tuple[Defect, ...] = (
    Defect(
        "C02",
        "of two tensors of one name the last is taken",
        "llama/checkpoint/safetensors_header.py",
        "document = parse_json(raw, where)",
        "document = __import__('json').loads(raw)",
    ),
    Defect(
        "C05",
        "of a tensor in two files the last is taken",
        "llama/checkpoint/huggingface.py",
        "            if name in self._places:\n",
        "            if False:\n",
    ),
    Defect(
        "C05",
        "a tensor that the index does not name is taken all the same",
        "llama/checkpoint/huggingface.py",
        "if extra := sorted(held - told):",
        "if extra := []:",
    ),
    Defect(
        "C08",
        "rows of q and k are taken as Meta orders them",
        "llama/checkpoint/huggingface.py",
        'layout: Layout = "half"',
        'layout: Layout = "interleaved"',
    ),
)
GGUF: tuple[Defect, ...] = (
    Defect(
        "D06",
        "tensors may lie on the same bytes",
        "llama/checkpoint/gguf.py",
        "        if offset != expected:\n",
        "        if False:\n",
    ),
    Defect(
        "D10",
        "the architecture is not looked at",
        "llama/checkpoint/gguf.py",
        'if architecture != "llama":',
        "if False:",
    ),
    Defect(
        "D12",
        "rows of q and k are taken as Hugging Face orders them",
        "llama/checkpoint/gguf.py",
        'layout = "interleaved"',
        'layout = "half"',
    ),
    Defect(
        "D12",
        "rope_freqs.weight is left out",
        "llama/checkpoint/gguf.py",
        "                    tables[file_name] = part.tensor(file_name).double().flatten().tolist()\n",
        "",
    ),
)
TOKENIZERS: tuple[Defect, ...] = ()
WRITES = (
    Defect(
        "F03",
        "a file is written in its place",
        "llama/temporary.py",
        """    place = target if new else target.resolve()
""",
        """    place = target if new else target.resolve()
    place.write_bytes(content)
    return
""",
    ),
    Defect(
        "F03",
        "what a killed process left is never removed",
        "llama/temporary.py",
        """        shutil.rmtree(stale, ignore_errors=True)
""",
        """        pass
""",
    ),
    Defect(
        "F04",
        "two conversions work at one target",
        "llama/convert.py",
        """        with alone(target, PREFIX):
""",
        """        with contextlib.nullcontext():
""",
    ),
)
SAMPLING: tuple[Defect, ...] = ()
CHAT: tuple[Defect, ...] = ()
PROCESS = (
    Defect(
        "I02",
        "output goes nowhere when standard output is closed",
        "llama/cli/__init__.py",
        """        return 1
    for stream in (sys.stdout, sys.stderr):
""",
        """        sys.stdout = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
""",
    ),
    Defect(
        "I02",
        "an answer that can't be written is dropped",
        "llama/cli/streams.py",
        """        error.filename = "standard output"
        raise
""",
        """        pass
""",
    ),
    Defect(
        "I05",
        "a character that the encoding lacks ends the answer",
        "llama/cli/__init__.py",
        """            stream.reconfigure(errors="backslashreplace")
""",
        """            pass
""",
    ),
    Defect(
        "I05",
        "a character that the encoding lacks is left out",
        "llama/cli/__init__.py",
        """stream.reconfigure(errors="backslashreplace")""",
        """stream.reconfigure(errors="ignore")""",
    ),
    Defect(
        "I11",
        "a check is an assert, which -O takes away",
        "llama/sampling.py",
        """    if not low <= number <= high:  # also false for NaN
        raise UsageError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")
""",
        """    assert low <= number <= high, name
""",
    ),
)
MEMORY: tuple[Defect, ...] = (
    Defect(
        "J07",
        "compiled steps are never taken",
        "llama/compiled.py",
        "        if h.shape[0] == 1 and mask.dim() == 2:\n",
        "        if h.shape[0] == 0 and mask.dim() == 2:\n",
    ),
    Defect(
        "J07",
        "a compiled step reads the wrong turn",
        "llama/compiled.py",
        "return step([h, *turns, mask, positions, *cache.buffers, *weights])",
        "return step([h, *turns[::-1], mask, positions, *cache.buffers, *weights])",
    ),
)
RANKS: tuple[Defect, ...] = (
    Defect(
        "K04",
        "ranks with other weights work together",
        "llama/loader.py",
        '        world.told.append(f"weights whose sample has the hash {sample_hash(checkpoint)}")\n',
        "",
    ),
    Defect(
        "K04",
        "ranks don't compare what they have",
        "llama/parallel.py",
        """        if other["told"] != heard[0]["told"]:""",
        """        if other["told"] is None:""",
    ),
    Defect(
        "K04",
        "a rank feeds itself",
        "llama/parallel.py",
        """        tokens = torch.tensor(order["tokens"], device=device)  # (B, T)""",
        """        tokens = torch.tensor(order["tokens"], device=device) + 1  # (B, T)""",
    ),
)

DEFECTS = (*META, *CONFIG, *SAFETENSORS, *GGUF, *TOKENIZERS, *WRITES, *SAMPLING, *CHAT, *PROCESS, *MEMORY, *RANKS)
