"""Reader of Meta's folders: params.json, consolidated.00.pth, .01.pth, ..., and tokenizer.model, there or one level up.

A model of several shards was split for as many GPUs: some matrices by columns, others by rows (fairscale's
ColumnParallelLinear and RowParallelLinear). Any number of shards can be read. Each weight is merged when it is read, so
memory holds the model and one more weight. Sources: meta-llama/llama, llama3 and llama-models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..checks import integer
from ..config import LARGEST_SIZE, ModelConfig
from ..errors import CheckpointError, ConfigError, DamagedError
from ..system.documents import Fields, read_json, start_of
from ..tokenizer import Tokenizer
from . import base
from .architectures import SCALED_ROPE
from .base import EMBEDDING, META_NAMES, OUTPUT, Checkpoint, to_file_name
from .torchfile import read_torch
from .weight import FLOATS, Weight

PARAMS = "params.json"
TENSOR = re.compile(r"(layers\.[0-9]{1,6}\.)?([\w.]+?)(\.weight|\.scales|\.adaptor\.[AB]\.weight)")
# Tables in the files of LLaMA 1, Llama 2 and Code Llama; not read, since they follow from the configuration.
TABLES = re.compile(r"(layers\.\d+\.attention\.inner_attention\.)?rope\.freqs")
SPLIT_BY_COLUMNS = ("attention.wo", "feed_forward.w_down")  # other matrices are split by rows; vectors are not split
QUANTIZED = {torch.float8_e4m3fn: "float8 with row scales", torch.int8: "integers with group scales"}
NORM = "norm.weight"
WQ, WK, GATE = (f"layers.0.{name}.weight" for name in ("attention.wq", "attention.wk", "feed_forward.w_gate"))

# Keys of params.json without effect here: the width of the feed-forward network follows from the weights, and a vision
# model has further tensors, which are refused.
NO_EFFECT = {"max_batch_size", "lora_args", "multiple_of", "ffn_dim_multiplier", "vision_chunk_size",
             "vision_max_num_chunks", "vision_model", "vision_num_cross_attention_layers"}  # fmt: skip
# (dim, n_layers) of Llama 3.2 1B and 3B, whose scaled RoPE has the factor 32 instead of 8
SMALL_32 = {(2048, 16), (3072, 28)}
CONTEXTS = {500000.0: 8192, 1000000.0: 16384}  # by theta: Llama 3, Code Llama
ALL = slice(None)
# The scheme of Llama 3.2's 4-bit files (QLoRA and SpinQuant), and the suffixes of the tensors that store a weight there
SCHEME = "int4_weight_int8_dynamic_activation"
SUFFIXES = (".weight", ".scales", ".adaptor.A.weight", ".adaptor.B.weight")
SOME_ROWS = 256  # rows of embedding and output to compare at once: in most models the first ones differ


def recognizes(folder: Path) -> bool:
    return (folder / PARAMS).is_file()


class MetaWeight(Weight):
    """A weight that is split over the shards along `axis`; None: every shard has the complete weight.

    copies  how often each key/value head is stored: more than once if there are more shards than heads
    """

    def __init__(self, checkpoint: MetaCheckpoint, key: str, axis: int | None, copies: int = 1):
        """key: the model's name for the weight."""
        name = to_file_name(key, META_NAMES)
        self.checkpoint, self.axis, self.copies = checkpoint, axis, copies
        self.parts = [shard[name] for shard in checkpoint.shards]
        shape = list(self.parts[0].shape)
        if axis is not None:
            shape[axis] *= len(self.parts)
        shape[0] //= copies
        super().__init__(name, shape, {**FLOATS, **QUANTIZED}[self.parts[0].dtype])

    def mapped(self) -> list[Tensor]:
        keys = [self.name.removesuffix(".weight") + suffix for suffix in SUFFIXES]
        return [shard[key] for shard in self.checkpoint.shards for key in keys if key in shard]

    def floats(self) -> Tensor:
        # SpinQuant's code multiplies the input of w2 by a Hadamard matrix. Multiplying the weight has the same effect.
        spun = self.checkpoint.spun and self.name.endswith("w2.weight")
        if self.copies == 1 and not spun:
            return self._merged(*self.part).contiguous()
        weight = self._merged()
        if self.copies > 1:
            heads = weight.unflatten(0, (-1, self.copies, self.checkpoint.config.head_dim))  # (KV, copies, D, C)
            if not bool((heads == heads[:, :1]).all()):
                raise DamagedError(f"{self.checkpoint.path}: the copies of the key/value heads in {self.name} differ")
            weight = heads[:, 0].flatten(0, 1)  # (KV * D, C)
        return (hadamard(weight) if spun else weight)[self.part].contiguous()

    def _merged(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Part of a weight, with copies of heads, from the shards that have it."""
        if self.axis is None:
            return self._shard(0)[rows]
        cut, other = (rows, columns) if self.axis == 0 else (columns, rows)
        size = self.parts[0].shape[self.axis]  # the length of one shard along `axis`
        first, last, _ = cut.indices(size * len(self.parts))
        pieces = []
        for rank in range(first // size, -(-last // size)):
            own = slice(max(first - rank * size, 0), min(last - rank * size, size))
            pieces.append(self._shard(rank)[(own, other) if self.axis == 0 else (other, own)])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.axis)

    def _shard(self, rank: int) -> Tensor:
        """One shard's part, in floating point."""
        weight, checkpoint, source = self.parts[rank], self.checkpoint, self.name.removesuffix(".weight")
        if weight.dtype in FLOATS:
            return weight
        if weight.dtype == torch.int8:
            return dequantize(checkpoint.shards[rank], source, checkpoint.params, str(checkpoint.files[rank]))
        scale = checkpoint.scales[rank].get(re.sub(r"^layers\.(\d+)\.", r"\1_", f"{source}_{rank}"))
        if scale is None or scale.numel() not in (1, len(weight)):
            raise DamagedError(f"{checkpoint.path}: fp8_scales_{rank}.pt has no scales for the rows of {source}")
        return weight.float() * scale.float().reshape(-1, 1)  # one scale a row


class MetaCheckpoint(Checkpoint):
    """A folder in Meta's format. See Checkpoint for the members."""

    format = "Meta"
    names = META_NAMES

    def __init__(self, folder: Path):
        self.path = folder
        values = read_json(folder / PARAMS)
        inner = values.get("model")  # some releases put the entries into an object
        self.params = Fields(inner if isinstance(inner, dict) else values, PARAMS)
        self.files = find_shards(folder)
        self.parts = {file.name: file.stat().st_size for file in self.files}
        self.shards = [read_torch(file) for file in self.files]
        self.scales: list[dict[str, Tensor]] = []  # the row scales of a float8 checkpoint, one file for each shard
        if any(tensor.dtype == torch.float8_e4m3fn for tensor in self.shards[0].values()):
            self.scales = [read_torch(folder / f"fp8_scales_{rank}.pt") for rank in range(len(self.shards))]
        self.spun = bool(self.params.get("quantization_args", dict, {}).get("spinquant"))
        axes = self._match_names()  # by the model's names: the axis along which a weight is split
        self._check_shards()
        stored = {key: MetaWeight(self, key, axis) for key, axis in axes.items()}
        self.config, copies, self.notes = self._read_config(stored)
        if copies > 1:
            heads = [key for key in axes if key.endswith((".wk.weight", ".wv.weight"))]
            stored |= {key: MetaWeight(self, key, axes[key], copies) for key in heads}
        if self.config.tie_embeddings:
            del stored[OUTPUT]
        self._weights = stored
        self.warnings = base.unknown_keys(self.params, NO_EFFECT)

    def own_tokenizer(self) -> Tokenizer:
        from ..tokenizer import open_tokenizer

        path = base.find_tokenizer(self.path, ("tokenizer.model", "tokenizer.json"))
        tokenizer = open_tokenizer(path)
        rows = self.config.vocab_size
        # Llama 3's control ids follow the last line of the file, so one missing line shifts all of them.
        if tokenizer.n_vocab != rows and tokenizer.kind.startswith("tiktoken"):
            raise DamagedError(f"{path} has {tokenizer.n_vocab} tokens, but the embedding has {rows} rows")
        return tokenizer

    # ----------------------------------------------------------------------------------------------------- tensors
    def _match_names(self) -> dict[str, int | None]:
        where, shard = self.files[0], self.shards[0]
        axes: dict[str, int | None] = {}
        for name, tensor in shard.items():
            if TABLES.fullmatch(name):
                continue
            match = TENSOR.fullmatch(name)
            if not match or match[2] not in META_NAMES:
                raise CheckpointError(f"{where}: {name:.80} is not part of a LLaMA decoder, so this model can't be run")
            layer, ours = match[1] or "", META_NAMES[match[2]]
            if match[3] == ".weight":
                axis = None if ours.endswith("norm") else 1 if ours in SPLIT_BY_COLUMNS else 0
                axes[f"{layer}{ours}.weight"] = axis
                fits = tensor.dim() == (1 if axis is None else 2) and tensor.dtype in (*FLOATS, *QUANTIZED)
            else:  # a part of a quantized weight
                whole = shard.get(f"{layer}{match[2]}.weight")
                fits = whole is not None and whole.dtype == torch.int8
            if not fits:
                found = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise CheckpointError(f"{where}: {name} is {found}, which no LLaMA has; get the weights in bfloat16")
        if missing := [name for name in (EMBEDDING, OUTPUT, NORM, WQ, WK, GATE) if name not in axes]:
            raise DamagedError(f"{where}: {to_file_name(missing[0], META_NAMES)} is missing")
        # the embedding is split by columns up to Code Llama, by rows since Llama 3
        axes[EMBEDDING] = int(shard[to_file_name(EMBEDDING, META_NAMES)].shape[1] < self.params.get("dim", int))
        return axes

    def _check_shards(self) -> None:
        """Raise CheckpointError unless the shards agree in names, shapes and norm, and differ in wq."""
        first = {name: (tensor.shape, tensor.dtype) for name, tensor in self.shards[0].items()}
        norm, rows = self.shards[0][NORM].float(), set()
        near = 0.02 * float(norm.abs().nan_to_num().max())
        for file, shard in zip(self.files, self.shards, strict=True):
            fits = first == {name: (tensor.shape, tensor.dtype) for name, tensor in shard.items()}
            if not fits or not torch.allclose(norm, shard[NORM].float(), 0, near, True):
                raise CheckpointError(f"{file} and {self.files[0].name} differ, so they are not shards of one model")
            rows.add(tuple(shard[WQ][:1].flatten().tolist()))
        if len(rows) < len(self.shards):
            raise CheckpointError(f"{self.path}: two shards have the same weights; one is a copy under another name")

    # ----------------------------------------------------------------------------------------------- configuration
    def _read_config(self, stored: Mapping[str, MetaWeight]) -> tuple[ModelConfig, int, list[str]]:
        """The architecture, how often each key/value head is stored, and notes on what params.json does not state."""
        params = self.params
        dim, n_layers, n_heads = (
            integer(f"{PARAMS}: {key}", params.get(key, int), 1, LARGEST_SIZE, ConfigError)
            for key in ("dim", "n_layers", "n_heads")
        )
        head_dim = max(dim // n_heads, 1)
        if (rows := stored[WQ].shape[0]) < n_heads * head_dim:
            found = f"{len(self.shards)} shards have {rows:,} of {n_heads * head_dim:,} rows of wq"
            raise ConfigError(f"{found}; download the other shards")
        expected = params.get("n_kv_heads", int, n_heads)
        kv_heads = stored[WK].shape[0] // head_dim
        copies = _find_copies(stored[WK], kv_heads, expected, head_dim)
        vocab_size = params.get("vocab_size", int, -1)  # Llama 2 has -1: the embedding's rows count
        scaled, theta = params.get("use_scaled_rope", bool, False), params.get("rope_theta", float, 1e4)
        tied = _is_tied(stored[EMBEDDING], stored[OUTPUT])
        factor = 32.0 if tied or (dim, n_layers) in SMALL_32 else 8.0
        # LLaMA 1 is stored in float16; its context is half that of Llama 2
        context = CONTEXTS.get(theta, 2048 if stored[EMBEDDING].stored == "F16" else 4096)
        config = ModelConfig(
            dim=dim,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=kv_heads // copies if expected == kv_heads else expected,
            head_dim=head_dim,
            hidden_dim=stored[GATE].shape[0],
            vocab_size=stored[EMBEDDING].shape[0] if vocab_size == -1 else vocab_size,
            norm_eps=params.get("norm_eps", float, 1e-5),
            rope_theta=theta,
            rope_scaling={**SCALED_ROPE, "factor": factor} if scaled else None,
            max_seq_len=131072 if scaled else context,
            tie_embeddings=tied,
        )
        assumed = [f"a context of {config.max_seq_len} tokens", *[f"a RoPE scaling by the factor {factor:g}"] * scaled]
        return config, copies, [f"{one} is assumed, since {PARAMS} does not state it" for one in assumed]


def _find_copies(wk: MetaWeight, stored: int, expected: int, head_dim: int) -> int:
    """How often each key/value head is stored: a model of more shards than key/value heads repeats them."""
    if len(wk.parts) == 1:
        return 1
    if stored != expected or stored != len(wk.parts):  # heads are repeated until every shard has one
        return stored // expected if 0 < expected < stored else 1
    heads = wk.floats().unflatten(0, (-1, head_dim))  # (stored, D, C)
    copies = 1
    while stored % (2 * copies) == 0 and torch.equal(heads[:: 2 * copies], heads[copies :: 2 * copies]):
        copies *= 2
    return copies


def _is_tied(embedding: MetaWeight, output: MetaWeight) -> bool:
    """Whether the output matrix equals the embedding. Meta's files store both, even for Llama 3.2 1B and 3B."""
    if embedding.shape != output.shape:
        return False
    parts = (slice(row, row + SOME_ROWS) for row in range(0, output.shape[0], SOME_ROWS))
    pairs = ((embedding[rows].floats(), output[rows].floats()) for rows in parts)
    # Usually the first rows differ, or both are the same storage, which need not be read.
    tied = all(one.data_ptr() == other.data_ptr() or torch.equal(one, other) for one, other in pairs)
    embedding.release()
    output.release()
    return tied


def find_shards(folder: Path) -> list[Path]:
    """The shards of a model in order. Other files in the folder are not read."""
    count = sum(re.fullmatch(r"consolidated\.\d+\.pth", file.name) is not None for file in folder.iterdir())
    shards = [folder / f"consolidated.{i:02d}.pth" for i in range(max(count, 1))]
    for file in shards:
        start_of(file)  # raises CheckpointError if it is missing
    return shards


# ------------------------------------------------------------------------------------------------- quantized weights
# Linear layers of the blocks are 4-bit integers in int8 with a scale per group of a row; embedding and output are int8
# with a scale per row. QLoRA adds a low-rank product. Meta's code also quantizes the activations to 8 bits; this code
# does not, so its results are closer to the unquantized model. Source: llama-models, quantization/loader.py.
def dequantize(shard: Mapping[str, Tensor], name: str, params: Fields, where: str) -> Tensor:
    """quants * scales + lora_scale * B A, for the layer `name` of a shard: (out, in) float32."""
    if (scheme := params.get("quantization_args", dict, {}).get("scheme")) != SCHEME:
        raise CheckpointError(f"{where}: {name} is int8, but quantization_args.scheme is {scheme!r:.60}, not {SCHEME}")
    quants, scales, down, up = (shard.get(name + suffix) for suffix in SUFFIXES)
    if quants is None or scales is None or (down is None) != (up is None):
        raise DamagedError(f"{where}: the scales of {name} or one of its two adaptors are missing")
    try:
        out, width = quants.shape
        groups = quants.float().reshape(out, scales.numel() // out, -1)  # (out, groups, width / groups)
        weight = (groups * scales.float().reshape(out, -1, 1)).reshape(out, width)
        if down is None or up is None:
            return weight
        scale = Fields(params.get("lora_args", dict, {}), f"{where}: lora_args").get("scale", float)
        return weight + scale * (up.float() @ down.float())
    except (RuntimeError, ZeroDivisionError):
        raise DamagedError(f"{where}: the shapes of the parts of {name} do not match") from None


def hadamard(x: Tensor) -> Tensor:
    """Multiply the last axis, whose length must be a power of two, by Sylvester's orthonormal Hadamard matrix."""
    n = x.shape[-1]
    if n & (n - 1):
        raise CheckpointError(f"SpinQuant needs a feed-forward width that is a power of two, got {n}")
    y, half = x.float(), 1
    while half < n:
        a, b = y.unflatten(-1, (-1, 2, half)).unbind(-2)  # neighbouring blocks
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return y / n**0.5
