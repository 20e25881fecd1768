"""Defects to plant, at least one for every silent fault, to prove that its cases can fail.

A defect is a small edit of the library's source. `test_planted.py` applies it to a copy of the repository, runs the
cases of the row there, and requires at least one of them to fail.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Defect:
    row: str  # key of rows.ROWS, such as A13
    what: str  # the defect in a few words, for docs/evidence/reliability.md
    file: str  # path from the repository's root
    old: str  # occurs in the file exactly once
    new: str


# One tuple per group of tests.
SAFETENSORS: tuple[Defect, ...] = (
    Defect(
        "C02",
        "of two tensors with one name, the last wins",
        "llama/checkpoint/safetensors_header.py",
        'document = parse_json(raw, where, "")',
        "document = __import__('json').loads(raw)",
    ),
    Defect(
        "C05",
        "a tensor in two files is read from the last",
        "llama/checkpoint/huggingface.py",
        "            if name in self._sources:\n",
        "            if False:\n",
    ),
    Defect(
        "C05",
        "a tensor missing from the index is accepted",
        "llama/checkpoint/huggingface.py",
        "if extra := sorted(present - listed):",
        "if extra := []:",
    ),
    Defect(
        "C08",
        "the rows of q and k are read in Meta's order",
        "llama/checkpoint/huggingface.py",
        'layout: Layout = "half"',
        'layout: Layout = "interleaved"',
    ),
)
GGUF: tuple[Defect, ...] = (
    Defect(
        "D06",
        "tensors may overlap",
        "llama/checkpoint/gguf.py",
        "        if offset != expected:\n",
        "        if False:\n",
    ),
    Defect(
        "D10",
        "the architecture is not checked",
        "llama/checkpoint/gguf.py",
        "if not isinstance(architecture, str) or architecture not in LAYOUTS:",
        "if False:",
    ),
    Defect(
        "D12",
        "the rows of q and k are read in Hugging Face's order",
        "llama/checkpoint/gguf.py",
        'self.layout = LAYOUTS[self.metadata["general.architecture"]]',
        'self.layout = "half"',
    ),
    Defect(
        "D12",
        "rope_freqs.weight is ignored",
        "llama/checkpoint/gguf.py",
        "                    tables[file_name] = part.tensor(file_name).double().flatten().tolist()\n",
        "",
    ),
)
META: tuple[Defect, ...] = (
    Defect("A03", "verify ignores an archive's checksums", "llama/tools/verify.py",
           "                    damaged.append(name)\n", "                    pass\n"),
    Defect("A03", "the archive's pickle is read without its checksum", "llama/checkpoint/torchfile.py",
           "if pickle.crc and zlib.crc32(content) != pickle.crc:", "if False:"),
    Defect("A12", "one shard under two names is read twice", "llama/checkpoint/meta.py",
           "        self._refuse_copies()\n", ""),
    Defect("A13", "a tensor that only the second shard has is dropped", "llama/checkpoint/meta.py",
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
    Defect("A15", "unknown tensors are ignored", "llama/checkpoint/meta.py",
           "            if not match or match[2] not in NAMES:\n",
           "            if not match or match[2] not in NAMES:\n                continue\n"),
    Defect("A16", "a square matrix is read transposed", "llama/checkpoint/meta.py",
           "        return hadamard(weight) if self._is_spun(name) else weight\n",
           "        return weight.T if name.endswith('wo.weight') else weight\n"),
    Defect("A17", "integer weights are converted to floating point", "llama/checkpoint/meta.py",
           "        if weight.dtype in FLOATS:\n            return weight\n",
           "        if weight.dtype in FLOATS or source not in self._scales:\n            return weight.float()\n"),
    Defect("A18", "a value beyond float16's range becomes infinity", "llama/weights.py",
           "    if dtype == torch.float16 and not bool", "    if False and not bool"),
    Defect("A19", "a token is chosen from nonfinite logits", "llama/generate.py",
           '            check_extreme(top, f"new token {step + 1}", text, diagnose)\n', ""),
    Defect("A19", "the C++ attention treats NaN as a masked key", "llama/engine/cpp/attention.h",
           "nan && most == -INFINITY ? 0 : most", "most"),
    Defect("A19", "torch's attention returns 0 if all scores are NaN", "llama/engine/cpu_attention.py",
           "k.shape[2] < FEW_KEYS", "False"),
    Defect("A26", "a record may be shorter than its tensors", "llama/checkpoint/torchfile.py",
           "record is None or record.size != storage.nbytes:", "record is None:"),
    Defect("A26", "a tensor begins 64 bytes before its record", "llama/checkpoint/torchfile.py",
           "offset=record.start)", "offset=record.start - 64)"),
    Defect("A26", "of two records with one name, the last wins", "llama/checkpoint/torch_archive.py",
           'or ("present twice" if name in found else "")', ""),
)  # fmt: skip
CONFIG: tuple[Defect, ...] = (
    Defect("B02", "of a duplicate key, the last value wins", "llama/checkpoint/documents.py",
           "        if key in out:\n", "        if False:\n"),
    Defect("B02", "JSON may contain NaN", "llama/checkpoint/documents.py",
           ", parse_constant=_no_constants", ""),
    Defect("B02", "1e400 is read as infinity", "llama/checkpoint/documents.py", ", parse_float=_finite", ""),
    Defect("B06", "unknown keys of params.json are ignored", "llama/checkpoint/meta.py",
           "for key in params.keys() - KNOWN_PARAMS - set(VISION):", "for key in ():"),
    Defect("B06", "unknown keys of config.json are ignored", "llama/checkpoint/huggingface.py",
           "if unknown := [key for key in fields.unknown() if key not in NO_EFFECT]:", "if unknown := []:"),
    Defect("B07", "of two RoPE scalings, one is used", "llama/checkpoint/huggingface.py",
           "            if _spelled_out(theirs) != _spelled_out(old):\n", "            if False:\n"),
    Defect("B07", "llama3's ramp may be reversed", "llama/rope_scaling.py",
           "    if low >= high:\n", "    if False:\n"),
    Defect("B08", "use_scaled_rope has no effect", "llama/checkpoint/meta.py",
           "        if not scaled:\n            return None\n", "        if True:\n            return None\n"),
    Defect("B08", "llama3 scaling is ignored", "llama/checkpoint/huggingface.py",
           'return theta, None if kind == "default" else scaling', "return theta, None"),
    Defect("B09", "every model family is accepted", "llama/checkpoint/huggingface.py",
           "        if not isinstance(kind, str) or kind not in FAMILIES:\n",
           '        if kind not in FAMILIES:\n            kind = "llama"\n        if False:\n'),
    Defect("B09", "a sliding window is ignored", "llama/checkpoint/huggingface.py",
           "sliding_window=sliding_window(fields, kind, n_layers),", "sliding_window=None,"),
    Defect("B12", "no warning about a context beyond the trained one", "llama/cli/loading.py",
           "    if args.max_seq_len and args.max_seq_len >", "    if False and args.max_seq_len >"),
)  # fmt: skip
WRITES = (
    Defect(
        "F03",
        "a file is written in place",
        "llama/system/temporary.py",
        """    path = target.resolve() if follow else target
""",
        """    path = target.resolve() if follow else target
    path.write_bytes(content)
    return
""",
    ),
    Defect(
        "F03",
        "files left by a killed process are never removed",
        "llama/system/temporary.py",
        """        shutil.rmtree(stale, ignore_errors=True)
""",
        """        pass
""",
    ),
)
MADE_WITH = (
    Defect(
        "F09",
        "the settings of a resumed output are not compared",
        "llama/cli/record.py",
        "        if fresh or not done:\n",
        "        if fresh or done:\n",
    ),
    Defect(
        "F09",
        "the record of a resumed output is not bound to its answers",
        "llama/cli/record.py",
        '        if self.kept.get("first") != self.content["first"]:\n',
        "        if False:\n",
    ),
    Defect(
        "F09",
        "for a link to the output, the record is next to the link",
        "llama/cli/record.py",
        "        target = os.path.realpath(output) if os.path.islink(output) else output\n",
        "        target = output\n",
    ),
    Defect(
        "F09",
        "the record of an output does not contain the weights",
        "llama/generation/session.py",
        ', "weights": sample(model)}',
        "}",
    ),
    Defect(
        "F09",
        "a session in memory accepts every model",
        "llama/generation/session.py",
        "        if owner() is model and theirs == settings:\n",
        "        if True:\n",
    ),
    Defect(
        "F09",
        "the record of an output does not contain stop ids from other files than the tokenizer's",
        "llama/cli/record.py",
        '        "stop_ids": sorted(llm.tokenizer.stop_ids),\n',
        "",
    ),
    Defect(
        "F09",
        "the hash of the weights is constant",
        "llama/generation/session.py",
        "            digest.update(raw_bytes(end.cpu()).data)\n",
        "            pass\n",
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
        "an answer continues beyond the context",
        "llama/generate.py",
        "    room = min(params.max_new_tokens, context - len(prompt))\n",
        "    room = min(params.max_new_tokens, context - len(prompt) + 1)\n",
    ),
    Defect(
        "G05",
        "a negative temperature inverts the distribution",
        "llama/sampling.py",
        'checks.number("temperature", self.temperature, 0.0, 1e6)',
        'checks.number("temperature", self.temperature, -1e6, 1e6)',
    ),
    Defect(
        "G07",
        "a top_p above 1 is ignored",
        "llama/sampling.py",
        'checks.number("top_p", self.top_p, 0.0, 1.0)',
        'checks.number("top_p", self.top_p, 0.0, 2.0)',
    ),
    Defect(
        "G10",
        "the error names the layer after the one where NaN begins",
        "llama/engine/nonfinite.py",
        'number, leaf = int(rest[0]), ".".join(rest[1:])',
        'number, leaf = int(rest[0]) + 1, ".".join(rest[1:])',
    ),
    Defect(
        "G10",
        "a token is chosen from NaN logits",
        "llama/generate.py",
        "    if not -LARGEST_LOGIT < top < LARGEST_LOGIT:\n",
        "    if top >= LARGEST_LOGIT:\n",
    ),
    Defect(
        "G18",
        "a session keeps the NaN that an error left in its cache",
        "llama/generation/session.py",
        "        if nonfinite:\n",
        "        if nonfinite and False:\n",
    ),
    Defect(
        "G18",
        "a thread replaces freqs_cis by a shorter table",
        "llama/rope.py",
        "                if len(table[0]) >= len(self.table[0]):\n",
        "                if table:\n",
    ),
    Defect(
        "G18",
        "an abandoned stream keeps its session locked",
        "llama/generation/session.py",
        "            self.cache, self.tokens = None, []\n        self.busy = False\n",
        "            self.cache, self.tokens = None, []\n            self.busy = False\n",
    ),
    Defect(
        "G19",
        "a single query after a cache sees only the first key",
        "llama/attention.py",
        "q.view(*k.shape[:2], -1, q.shape[-1]), k, v, mask)",
        "q.view(*k.shape[:2], -1, q.shape[-1]), k, v, is_causal=True)",
    ),
    Defect(
        "G21",
        "positions beyond the freqs_cis table use its last row",
        "llama/rope.py",
        "            table = self._table(min(max(seq_len, 2 * len(table[0])), self.max_seq_len))\n",
        "            positions = positions.clamp(max=len(table[0]) - 1)\n",
    ),
)
PROCESS = (
    Defect(
        "I02",
        "output is discarded if standard output is closed",
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
        "an error while writing an answer is ignored",
        "llama/cli/streams.py",
        """        error.filename = "standard output"
        raise
""",
        """        pass
""",
    ),
    Defect(
        "I05",
        "a character that can't be encoded ends the answer",
        "llama/cli/__init__.py",
        """            stream.reconfigure(errors="backslashreplace")
""",
        """            pass
""",
    ),
    Defect(
        "I05",
        "a character that can't be encoded is left out",
        "llama/cli/__init__.py",
        """stream.reconfigure(errors="backslashreplace")""",
        """stream.reconfigure(errors="ignore")""",
    ),
    Defect(
        "I11",
        "a check is an assert, which -O removes",
        "llama/checks.py",
        """    if not low <= found <= high:  # also false for NaN
        raise error(f"{name} must be a number from {low:g} to {high:g}, got {shown(value)}")
""",
        """    assert low <= found <= high, name
""",
    ),
)
MEMORY: tuple[Defect, ...] = (
    Defect(
        "J07",
        "compiled steps are never used",
        "llama/engine/compiled.py",
        "            if len(tokens) == 1 and positions.dim() == 1:\n",
        "            if len(tokens) == 0 and positions.dim() == 1:\n",
    ),
    Defect(
        "J07",
        "a compiled step swaps cos and sin",
        "llama/engine/compiled.py",
        "step([h, *angles, mask,",
        "step([h, *angles[::-1], mask,",
    ),
)
RANKS: tuple[Defect, ...] = (
    Defect(
        "K04",
        "ranks with different weights work together",
        "llama/loader.py",
        "weights with sample hash {sample_hash(checkpoint)}{checkpoint.adapters_hash}",
        "weights",
    ),
    Defect(
        "K04",
        "ranks don't compare their settings",
        "llama/engine/parallel.py",
        """        if other["fingerprint"] != reports[0]["fingerprint"]:""",
        """        if other["fingerprint"] is None:""",
    ),
    Defect(
        "K04",
        "a rank changes the tokens it receives",
        "llama/engine/parallel.py",
        """        tokens = torch.tensor(order["tokens"], device=device)  # (B, T)""",
        """        tokens = torch.tensor(order["tokens"], device=device) + 1  # (B, T)""",
    ),
)
TOKENIZERS: tuple[Defect, ...] = (
    Defect(
        "E02",
        "a malformed line of the tokenizer file is skipped, which shifts all control ids",
        "llama/tokenizer/tiktoken.py",
        """        if not (match and token):
            raise""",
        """        if not (match and token):
            continue
            raise""",
    ),
    Defect(
        "E08",
        "a lone surrogate becomes U+FFFD",
        "llama/tokenizer/base.py",
        "        text.encode()\n",
        "        return text.encode(errors='surrogatepass').decode(errors='replace')\n",
    ),
    Defect(
        "E11",
        "begin-of-text is added although the template contains it",
        "llama/chat/template.py",
        "    return tokenizer.encode_pieces(",
        "    return tokenizer.encode('', bos=True) + tokenizer.encode_pieces(",
    ),
    Defect(
        "E12",
        "ids without a token are sampled",
        "llama/text.py",
        "            n_vocab=self.tokenizer.n_vocab,\n",
        "            n_vocab=None,\n",
    ),
    Defect(
        "E05",
        "the number of ways to match a pattern is not limited if no repetition is unbounded",
        "llama/tokenizer/patterns.py",
        "degree > 1 or paths > MOST_PATHS + len(pattern)",
        "degree > 1",
    ),
    Defect(
        "E05",
        "a backreference is parsed as a character",
        "llama/tokenizer/patterns.py",
        "(?:[dDwWsShHbBAzZrntfv]|",
        "(?:[a-zA-Z0-9]|",
    ),
    Defect(
        "E05",
        "a repetition of a repetition counts as one",
        "llama/tokenizer/patterns.py",
        "degree += 2 if item.twice else 1",
        "degree += 1",
    ),
    Defect(
        "E14",
        "the limit is per pattern, not for all patterns of a file",
        "llama/tokenizer/steps.py",
        "check_sizes(patterns, where)",
        "check_sizes(patterns[-1:], where)",
    ),
    Defect(
        "E13",
        "a step's growth is not limited",
        "llama/tokenizer/steps.py",
        "            if factor > LARGEST_GROWTH:\n",
        "            if factor > 1000 * LARGEST_GROWTH:\n",
    ),
    Defect(
        "E13",
        "a step is a sequence if it has a list of steps, whatever its type",
        "llama/tokenizer/steps.py",
        'if isinstance(step, dict) and step.get("type") == "Sequence":',
        "if isinstance(step, dict) and any(name in step for name in LISTS):",
    ),
    Defect(
        "E13",
        "offsets of a table of replacements are not checked",
        "llama/tokenizer/steps.py",
        "    if (first[inner] >= len(units)).any():\n        raise damaged\n",
        "    first %= len(units)\n",
    ),
    Defect(
        "E14",
        "the length of a token is not limited",
        "llama/tokenizer/common.py",
        "    if len(token) > LONGEST_TOKEN:\n",
        "    if False:\n",
    ),
    Defect(
        "E14",
        "an integer of a protobuf may have any length",
        "llama/tokenizer/sentencepiece.py",
        "        if shift == 63:\n",
        "        if False:\n",
    ),
    Defect(
        "G23",
        "a text after a prompt loses its leading space",
        "llama/tokenizer/base.py",
        "tokenizer.strips_leading_space and not tail",
        "tokenizer.strips_leading_space",
    ),
)
CHAT: tuple[Defect, ...] = (
    Defect(
        "H02",
        "the CPU time of a template is not limited",
        "llama/chat/sandbox.py",
        "        signal.setitimer(signal.ITIMER_PROF, seconds)",
        "        pass",
    ),
    Defect(
        "H05",
        "a control string in a user's text becomes a control id",
        "llama/chat/sandbox.py",
        "    own = controls.texts\n",
        "    marked = substituted = rendered(str)\n    own = controls.texts\n",
    ),
)

FOLDERS: tuple[Defect, ...] = (
    Defect("I13", "the owners of folders and files are not checked", "llama/system/folders.py",
           "    if not trusted:\n", "    if False:\n"),
    Defect("I13", "any path may belong to users outside of the namespace", "llama/system/folders.py",
           "trusted = parent if _is_outside", "trusted = True if _is_outside"),
    Defect("I13", "users with the group as primary group are not counted as members", "llama/system/folders.py",
           "all(other.pw_uid == user.pw_uid for", "all(True for"),
    Defect("I13", "a later library has the name of an earlier one", "llama/system/folders.py",
           "    loaded = LOADED.setdefault((path.name, found.st_dev, found.st_ino), handle)",
           "    loaded = LOADED.setdefault((path.suffix, 0, 0), handle)"),
    Defect("F03", "a file of another, longer name is removed", "llama/system/folders.py",
           "{'[0-9a-f]' * 16}", "*"),
    Defect("I13", "only two folders are checked", "llama/system/folders.py",
           "for path in (*reversed(folder.parents), folder):  # from", "for path in (folder.parent, folder):  # from"),
    Defect("I13", "folders and files may be writable by everybody", "llama/system/folders.py",
           "(found.st_mode & stat.S_IWOTH or by_group)", "by_group"),
    Defect("I13", "folders and files may be writable by a group", "llama/system/folders.py",
           "(found.st_mode & stat.S_IWOTH or by_group)", "found.st_mode & stat.S_IWOTH"),
    Defect("I13", "every group of the user's name is trusted", "llama/system/folders.py",
           " and set(group.gr_mem) <= {user.pw_name}", ""),
    Defect("I13", "access lists are ignored", "llama/system/folders.py",
           "return alone and not _has_access_list(path)", "return alone"),
    Defect("I13", "a file system without access lists is refused", "llama/system/folders.py",
           "return error.errno not in NO_ACCESS_LISTS", "return True"),
    Defect("I13", "sticky folders are refused", "llama/system/folders.py", " and not sticky:", ":"),
    Defect("I13", "others may put files next to the code", "llama/system/folders.py",
           "sticky = parent and ", "sticky = "),
    Defect("I13", "a link to the folder is not resolved", "llama/system/folders.py",
           "    folder = Path(os.path.realpath(folder))  # checked", "    folder = folder.absolute()  # checked"),
    Defect("I13", "a link in place of the file is followed", "llama/system/folders.py",
           ' | getattr(os, "O_NOFOLLOW", 0)', ""),
    Defect("I13", "the file's owner and mode are not checked", "llama/system/folders.py",
           " and _distrust(path, found) is None\n", "\n"),
    Defect("I13", "a file that is not regular is read", "llama/system/folders.py",
           "stat.S_ISREG(found.st_mode) and ", ""),
    Defect("I13", "the file is loaded by its name", "llama/system/folders.py",
           "    return f\"/proc/self/fd/{loaded}\"\n", "    return str(path)\n"),
    Defect("I13", "a file is kept before it is loaded", "llama/system/folders.py",
           "        loaded = load(str(made))\n        keep(made, folder, name)\n        return loaded\n",
           "        return load(str(keep(made, folder, name)))\n"),
    Defect("I13", "a kept file that does not load is not removed", "llama/system/folders.py",
           "            path.unlink(missing_ok=True)\n", "            raise\n"),
    Defect("I13", "a kept file is writable by others", "llama/system/folders.py", "    made.chmod(0o644)\n", ""),
    Defect("I13", "a library without the operators is accepted", "llama/engine/kernels.py",
           "if missing := [name for name in OPERATORS if not hasattr(torch.ops.clearllama, name)]:",
           "if missing := []:"),
    Defect("I13", "a lock follows a link", "llama/system/temporary.py",
           ' | getattr(os, "O_NOFOLLOW", 0), 0o666)', ", 0o666)"),
    Defect("I13", "pip is imported from the current folder", "llama/hub/named.py",
           'sys.executable, "-P", ', "sys.executable, "),
    Defect("I13", "Inductor's cache may belong to anybody", "llama/engine/compiled.py",
           "contextlib.nullcontext() if is_private(Path(cache_dir())) else", "contextlib.nullcontext() if True else"),
)  # fmt: skip
SERVER: tuple[Defect, ...] = (
    Defect("L01", "the number of answers is not compared with the queue", "llama/server/app.py",
           "if len(call.prompts) > (most := server.engine.queue.maxsize):", "if (most := 0):"),
    Defect("L02", "a body may have any size", "llama/server/app.py",
           "if len(body) > self.limits.body:", "if False:"),
    Defect("L02", "an unknown field is ignored", "llama/server/requests.py",
           "if unknown := [name for name in body if name not in known]:", "if unknown := []:"),
    Defect("L02", "a part of content may be a number", "llama/server/requests.py",
           'if not isinstance(part["text"], str):', "if False:"),
    Defect("L03", "an answer continues after its client has disconnected", "llama/server/engine.py",
           "            prompt.request.cancelled.set()\n", ""),
    Defect("L03", "a request stays in the queue after its client has disconnected", "llama/server/engine.py",
           "                    self.queue.queue.remove(prompt)\n", "                    pass\n"),
    Defect("L03", "a second request hides that the client has disconnected", "llama/server/connections.py",
           "            self.flow.resume_reading()\n", "            pass\n"),
    Defect("L04", "a request's template is ignored", "llama/server/requests.py",
           'CHAT_FIELDS = (*CHAT, ', 'CHAT_FIELDS = (*CHAT, "chat_template", '),
    Defect("L04", "a function may have any name", "llama/server/requests.py",
           " or not re.fullmatch(TOOL_NAME, name):", ":"),
    Defect("L05", "scores of a prompt begin after the prefix in the cache", "llama/generation/batch.py",
           "cached = 0 if request.prompt_logprobs else source.shares(prompt)", "cached = source.shares(prompt)"),
    Defect("L06", "an idle row of the batch loses its first key", "llama/generation/batch.py",
           "([*slot.ids, 0][0], 0)", "(0, 0)"),
    Defect("L06", "every key opens the endpoints", "llama/server/app.py",
           "right = self.key is None or hmac.compare_digest(given.encode(), self.key.encode())", "right = True"),
    Defect("L06", "every name of a host is accepted", "llama/server/app.py", "if hosts is not None:", "if False:"),
    Defect("L07", "a panic ends the engine", "llama/server/engine.py",
           "            except BaseException as error:", "            except Exception as error:"),
    Defect("L08", "only the first request of a connection has a deadline", "llama/server/connections.py",
           "        self.deadline = self.loop.call_later(Limits.receive, self._late)\n        super().on_response",
           "        super().on_response"),
    Defect("L08", "of two different lengths, one is used", "llama/server/app.py",
           'if {b"content-length", b"transfer-encoding"} <=', "if {None} <="),
    Defect("L09", "SIGTERM ends answers in progress", "llama/server/connections.py",
           'lifespan="off",', 'lifespan="off",\n        timeout_graceful_shutdown=0,'),
)  # fmt: skip
DEFECTS = (
    *META,
    *CONFIG,
    *SAFETENSORS,
    *GGUF,
    *TOKENIZERS,
    *WRITES,
    *MADE_WITH,
    *SAMPLING,
    *CHAT,
    *PROCESS,
    *MEMORY,
    *RANKS,
    *FOLDERS,
    *SERVER,
)
