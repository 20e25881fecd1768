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
META: tuple[Defect, ...] = (
    Defect("A03", "verify reads no checksum of an archive", "llama/verify.py",
           "                    damaged.append(record.filename)\n", "                    pass\n"),
    Defect("A03", "the archive's description is taken without its checksum", "llama/checkpoint/torchfile.py",
           "                    archive.read(record)\n", "                    pass\n"),
    Defect("A12", "one shard under two names is taken twice", "llama/checkpoint/meta.py",
           "        self._refuse_copies()\n", ""),
    Defect("A13", "a tensor of the second shard alone is dropped", "llama/checkpoint/meta.py",
           "if odd := sorted(first ^ shard.keys()):", "if odd := sorted(first - shard.keys()):"),
    Defect("A14", "a missing weight stays random", "llama/checkpoint/meta.py",
           '        if "tok_embeddings.weight" not in names:\n',
           """        for layer in range(self.params["n_layers"]):
            stem, size = f"layers.{layer}.attention.wq", self.params["dim"]
            names.setdefault(f"{stem}.weight", (stem, 0))
            for shard in self.shards:
                shard.setdefault(f"{stem}.weight", torch.randn(size // len(self.shards), size))
        if "tok_embeddings.weight" not in names:
"""),
    Defect("A15", "tensors nobody knows are passed over", "llama/checkpoint/meta.py",
           "            if not match or match[2] not in NAMES:\n",
           "            if not match or match[2] not in NAMES:\n                continue\n"),
    Defect("A16", "a square matrix is read the other way round", "llama/checkpoint/meta.py",
           "        return self._spin(whole, name)\n",
           "        return self._spin(whole.T if name.endswith('wo.weight') else whole, name)\n"),
    Defect("A17", "integers are taken for fractions", "llama/checkpoint/meta.py",
           "        if weight.dtype in FLOATS:\n            return weight\n",
           "        if weight.dtype in FLOATS or source not in self._scales:\n            return weight.float()\n"),
    Defect("A18", "a number beyond float16 becomes infinity", "llama/weights.py",
           "    if dtype == torch.float16 and not bool", "    if False and not bool"),
    Defect("A19", "logits that are not finite are chosen from", "llama/generate.py",
           '    check_finite(logits, f"new token {step + 1}")\n', ""),
    Defect("A19", "the C++ attention takes NaN for nothing to see", "llama/cpp/attention.h",
           "nan && most == -INFINITY ? 0 : most", "most"),
    Defect("A19", "torch's attention answers 0 where all is NaN", "llama/attention.py",
           "k.shape[2] < FEW_KEYS", "False"),
)  # fmt: skip
CONFIG: tuple[Defect, ...] = (
    Defect("B02", "of a key that stands twice the last holds", "llama/checkpoint/documents.py",
           "        if key in out:\n", "        if False:\n"),
    Defect("B02", "NaN is a number of JSON", "llama/checkpoint/documents.py",
           ", parse_constant=_no_constants", ""),
    Defect("B02", "1e400 is infinity", "llama/checkpoint/documents.py", ", parse_float=_finite", ""),
    Defect("B06", "unknown keys of params.json are passed over", "llama/checkpoint/meta.py",
           "for key in params.keys() - KNOWN_PARAMS - set(VISION):", "for key in ():"),
    Defect("B06", "unknown keys of config.json are passed over", "llama/checkpoint/huggingface.py",
           "if unknown := [key for key in fields.unknown() if key not in NO_EFFECT]:", "if unknown := []:"),
    Defect("B07", "of two rope scalings one is taken", "llama/checkpoint/huggingface.py",
           "            if _spelled_out(theirs) != _spelled_out(old):\n", "            if False:\n"),
    Defect("B07", "llama3's ramp may run backwards", "llama/rope_scaling.py",
           "    if low >= high:\n", "    if False:\n"),
    Defect("B08", "use_scaled_rope has no effect", "llama/checkpoint/meta.py",
           "        if not scaled:\n            return None\n", "        if True:\n            return None\n"),
    Defect("B08", "llama3 scaling is taken for none", "llama/checkpoint/huggingface.py",
           'return theta, None if kind == "default" else scaling', "return theta, None"),
    Defect("B09", "every family is a LLaMA", "llama/checkpoint/huggingface.py",
           '        if kind != "llama":\n', "        if False:\n"),
    Defect("B09", "a sliding window has no effect", "llama/checkpoint/huggingface.py",
           '    "sliding_window": (None,),\n', ""),
    Defect("B12", "no word of a context beyond the trained one", "llama/cli/loading.py",
           "    if args.max_seq_len and args.max_seq_len >", "    if False and args.max_seq_len >"),
)  # fmt: skip
SAFETENSORS: tuple[Defect, ...] = ()
GGUF: tuple[Defect, ...] = ()
TOKENIZERS: tuple[Defect, ...] = ()
WRITES: tuple[Defect, ...] = ()
SAMPLING: tuple[Defect, ...] = ()
CHAT: tuple[Defect, ...] = ()
PROCESS: tuple[Defect, ...] = ()
MEMORY: tuple[Defect, ...] = ()
RANKS: tuple[Defect, ...] = ()

DEFECTS = (*META, *CONFIG, *SAFETENSORS, *GGUF, *TOKENIZERS, *WRITES, *SAMPLING, *CHAT, *PROCESS, *MEMORY, *RANKS)
