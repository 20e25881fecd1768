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
        "            if name in self._sources:\n",
        "            if False:\n",
    ),
    Defect(
        "C05",
        "a tensor that the index does not name is taken all the same",
        "llama/checkpoint/huggingface.py",
        "if extra := sorted(present - listed):",
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
META: tuple[Defect, ...] = (
    Defect("A03", "verify reads no checksum of an archive", "llama/tools/verify.py",
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
           "        return hadamard(weight) if self._is_spun(name) else weight\n",
           "        return weight.T if name.endswith('wo.weight') else weight\n"),
    Defect("A17", "integers are taken for fractions", "llama/checkpoint/meta.py",
           "        if weight.dtype in FLOATS:\n            return weight\n",
           "        if weight.dtype in FLOATS or source not in self._scales:\n            return weight.float()\n"),
    Defect("A18", "a number beyond float16 becomes infinity", "llama/weights.py",
           "    if dtype == torch.float16 and not bool", "    if False and not bool"),
    Defect("A19", "logits that are not finite are chosen from", "llama/generate.py",
           '    check_finite(logits, f"new token {step + 1}", where)\n', ""),
    Defect("A19", "the C++ attention takes NaN for nothing to see", "llama/engine/cpp/attention.h",
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
WRITES = (
    Defect(
        "F03",
        "a file is written in its place",
        "llama/system/temporary.py",
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
        "llama/system/temporary.py",
        """        shutil.rmtree(stale, ignore_errors=True)
""",
        """        pass
""",
    ),
    Defect(
        "F04",
        "two conversions work at one target",
        "llama/tools/convert.py",
        """        with alone(target, PREFIX):
""",
        """        with contextlib.nullcontext():
""",
    ),
)
SAMPLING: tuple[Defect, ...] = (
    Defect(
        "G02",
        "a prompt that fills the context gets an empty answer",
        "llama/generate.py",
        "    if len(prompt) >= context:\n",
        "    if len(prompt) > context:\n",
    ),
    Defect(
        "G03",
        "an answer goes on beyond the context",
        "llama/generate.py",
        "    room = min(params.max_new_tokens, context - len(prompt))\n",
        "    room = min(params.max_new_tokens, context - len(prompt) + 1)\n",
    ),
    Defect(
        "G05",
        "a negative temperature turns the distribution around",
        "llama/sampling.py",
        '_real("temperature", self.temperature, 0.0, 1e6)',
        '_real("temperature", self.temperature, -1e6, 1e6)',
    ),
    Defect(
        "G07",
        "a top_p above 1 is taken for none",
        "llama/sampling.py",
        '_real("top_p", self.top_p, 0.0, 1.0)',
        '_real("top_p", self.top_p, 0.0, 2.0)',
    ),
    Defect(
        "G10",
        "the layer where NaN begins is one too far",
        "llama/engine/nonfinite.py",
        'number, leaf = int(rest[0]), ".".join(rest[1:])',
        'number, leaf = int(rest[0]) + 1, ".".join(rest[1:])',
    ),
    Defect(
        "G10",
        "logits that are NaN choose some token",
        "llama/generate.py",
        "    if not -LARGEST_LOGIT < top < LARGEST_LOGIT:\n",
        "    if top >= LARGEST_LOGIT:\n",
    ),
    Defect(
        "G18",
        "a session keeps the NaN that an error left in its cache",
        "llama/generation/session.py",
        "        if spoilt:\n",
        "        if spoilt and False:\n",
    ),
    Defect(
        "G18",
        "one thread replaces the table of turns by a shorter one",
        "llama/rope.py",
        "                if len(table[0]) >= len(self.table[0]):\n",
        "                if table:\n",
    ),
    Defect(
        "G18",
        "a stream given up halfway keeps its session",
        "llama/generation/session.py",
        "            self.cache, self.tokens = None, []\n        self.busy = False\n",
        "            self.cache, self.tokens = None, []\n            self.busy = False\n",
    ),
    Defect(
        "G19",
        "a single query behind a cache sees the first key only",
        "llama/attention.py",
        "q.view(*k.shape[:2], -1, q.shape[-1]), k, v, mask).view(q.shape)",
        "q.view(*k.shape[:2], -1, q.shape[-1]), k, v, is_causal=True).view(q.shape)",
    ),
    Defect(
        "G21",
        "positions beyond the table of turns take its last row",
        "llama/rope.py",
        "            table = self._table(min(max(end, 2 * len(table[0])), self.max_seq_len))\n",
        "            positions = positions.clamp(max=len(table[0]) - 1)\n",
    ),
)
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
        raise UsageError(f"{name} must be a number from {low:g} to {high:g}, got {value!r:.80}")
""",
        """    assert low <= number <= high, name
""",
    ),
)
MEMORY: tuple[Defect, ...] = (
    Defect(
        "J07",
        "compiled steps are never taken",
        "llama/engine/compiled.py",
        "        if h.shape[0] == 1 and mask.dim() == 2:\n",
        "        if h.shape[0] == 0 and mask.dim() == 2:\n",
    ),
    Defect(
        "J07",
        "a compiled step reads the wrong turn",
        "llama/engine/compiled.py",
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
        "llama/engine/parallel.py",
        """        if other["told"] != heard[0]["told"]:""",
        """        if other["told"] is None:""",
    ),
    Defect(
        "K04",
        "a rank feeds itself",
        "llama/engine/parallel.py",
        """        tokens = torch.tensor(order["tokens"], device=device)  # (B, T)""",
        """        tokens = torch.tensor(order["tokens"], device=device) + 1  # (B, T)""",
    ),
)
TOKENIZERS: tuple[Defect, ...] = (
    Defect(
        "E02",
        "a malformed line of the tokenizer file is skipped, and all control ids shift",
        "llama/tokenizer/tiktoken.py",
        """        if not (match and token):
            raise""",
        """        if not (match and token):
            continue
            raise""",
    ),
    Defect(
        "E08",
        "half a surrogate pair becomes U+FFFD",
        "llama/tokenizer/base.py",
        "        text.encode()\n",
        "        return text.encode(errors='surrogatepass').decode(errors='replace')\n",
    ),
    Defect(
        "E11",
        "begin-of-text is put in front of what a template wrote",
        "llama/chat/template.py",
        "    ids: list[int] = []\n",
        "    ids: list[int] = tokenizer.encode('', bos=True)\n",
    ),
    Defect(
        "E12",
        "rows of the embedding without a token are drawn",
        "llama/text.py",
        "            n_vocab=self.tokenizer.n_vocab,\n",
        "            n_vocab=None,\n",
    ),
)
CHAT: tuple[Defect, ...] = (
    Defect(
        "H02",
        "a loop's turns are not counted",
        "llama/chat/bounded.py",
        '        node.iter = self._hook("a turn", node.iter)\n',
        "",
    ),
    Defect(
        "H05",
        "a control string in a user's text becomes its id",
        "llama/chat/template.py",
        "    ids: list[int] = []\n",
        "    sparse = full = cut(str)\n    ids: list[int] = []\n",
    ),
)

DEFECTS = (*META, *CONFIG, *SAFETENSORS, *GGUF, *TOKENIZERS, *WRITES, *SAMPLING, *CHAT, *PROCESS, *MEMORY, *RANKS)
