"""Convert a checkpoint to another format or quantize it, with one weight in memory at a time.

The new files have a temporary name at first. They are opened like any checkpoint, and every weight, the configuration
and the tokenizer are compared with those of the source. Then they get the name of the target.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..chat.formats import TEMPLATES, check_format, check_template, says_chat
from ..checkpoint import Checkpoint, gguf_write, huggingface_write, open_checkpoint, quantized
from ..checkpoint.adapters import Adapters, with_adapters
from ..checkpoint.base import EMBEDDING
from ..checkpoint.weight import DTYPES, Weight
from ..checkpoint.write import Model, raw_bytes
from ..config import ModelConfig
from ..engine.packing import to_floats, to_tiles
from ..errors import CheckpointError, ConfigError, TokenizerError, UsageError
from ..hub import resolve
from ..quant import gguf_types
from ..quant.gguf_types import MIXES
from ..quant.groups import GroupFormat
from ..quant.schemes import Scheme, pick_scheme, scheme_for
from ..rope import to_layout
from ..rope_scaling import reach
from ..system.temporary import own_temporary, replace
from ..tokenizer import Tokenizer
from ..tokenizer.write import check_equal
from ..weights import AGAIN, check_tensors

# (the step, number of weights done, number of weights)
Progress = Callable[[str, int, int], object]


@dataclasses.dataclass(frozen=True)
class Proof:
    """The result of a conversion that was read back and compared with its source.

    path      the new folder or file
    tensors   number of weights that were compared
    sha256    one hash of the names and bytes of all weights, in the interleaved layout
    warnings  sentences about what could not be converted
    bytes     total size of the files of weights, (of the source, of the target)
    """

    path: Path
    tensors: int
    sha256: str
    warnings: list[str]
    bytes: tuple[int, int]


def convert(  # many parameters, since each is a choice of the user
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    shards: int = 0,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    adapters: Adapters = (),
    tokenizer: str | os.PathLike[str] | None = None,
    chat_template: str = "auto",
    progress: Progress = lambda what, done, total: None,
) -> Proof:
    """Write the model at `source` to `target` in another format. The parameters are the options of the command.

    source         a path or a name, as for `llama.load`
    dtype          dtype of the matrices in the target; None keeps the stored dtype
    quantize       how to quantize the matrices: for GGUF an entry of gguf_types.MIXES, else a scheme as in `quantize`
    chat_template  "auto" for the source's template; "none"; a name of chat.TEMPLATES; or Jinja source

    Raises UsageError for a bad argument, ConfigError if the format can't express the model or its tokenizer,
    CheckpointError if a weight can't be quantized or differs when it is read back, or if the target can't be written.
    After an error, the target does not exist.
    """
    checks.choice("format", to, ("hf", "gguf"))
    is_folder = to == "hf"
    checks.integer("shards", shards, 0, None if is_folder else 1)
    if quantize is not None:
        checks.choice("quantization of GGUF files", quantize, MIXES) if not is_folder else pick_scheme(quantize)
        if dtype is not None:
            raise UsageError(
                f"quantize (--quantize {quantize}) decides how the weights are stored: leave dtype (--dtype) out"
            )
    source, target = resolve(source), Path(target)
    if os.path.lexists(target):
        raise UsageError(f"{target} exists already; name another target, or remove it first")
    if not target.parent.is_dir():
        raise UsageError(f"{target} is not in an existing folder")
    if is_folder and target.suffix == ".gguf":
        raise UsageError(
            f"{target} would be a folder: give it another name, or use to='gguf' (--to gguf) for a GGUF file"
        )
    checkpoint = with_adapters(open_checkpoint(source, tokenizer), adapters)
    check_tensors(checkpoint)
    weights = {name: checkpoint.weight(name) for name in checkpoint.shapes}
    stored = {name: DTYPES.get(weight.stored) for name, weight in weights.items()}
    formats: dict[str, Any] = {}  # of the quantized matrices
    if quantize is None:
        dtypes: dict[str, Any] = {name: dtype or kind for name, kind in stored.items()}
    elif is_folder:
        tied = checkpoint.config.tie_embeddings
        scheme = pick_scheme(quantize)
        formats = {name: format for name in weights if (format := format_for(name, weights[name], scheme, tied))}
        # for a weight that the source stores quantized: bfloat16 to compute with, or float32 if it is dequantized here
        dtypes = {name: kind or (torch.bfloat16 if name in formats else torch.float32) for name, kind in stored.items()}
    else:
        formats = gguf_types.types_of(checkpoint.shapes, checkpoint.config, quantize)
        dtypes = dict.fromkeys(stored, torch.float32)
    if not is_folder:  # llama.cpp requires vectors in float32
        dtypes |= {name: torch.float32 for name, shape in checkpoint.shapes.items() if len(shape) == 1}
    if None in dtypes.values():
        raise UsageError(
            f"{checkpoint.path}: the weights are quantized; choose the dtype (--dtype) to write: float32 is exact,"
            " bfloat16 takes half the space"
        )
    again = sorted({
        weights[name].stored for name, format in formats.items()
        if stored[name] is None and not (is_folder and weights[name].is_stored_as(format))
    })  # fmt: skip
    hashes: dict[str, str] = {}

    def read(name: str) -> Tensor:
        if hashes:
            weights[next(reversed(hashes))].release()  # the writer no longer needs the previous weight
        if name in formats and is_folder:
            try:
                values = to_tiles(weights[name], formats[name])
            except CheckpointError as error:
                raise CheckpointError(f"{checkpoint.path}: {weights[name].name}: {error}") from error
        else:
            values = to_floats(weights[name], torch.device("cpu"), dtypes[name])
            values = gguf_types.quantize(values, formats[name]) if name in formats else values
        hashes[name] = tensor_hash(values)
        progress("writing", len(hashes), len(stored))
        return values

    model, warnings = model_of(checkpoint, dtypes, read, chat_template)
    try:
        with own_temporary(target.parent, ".convert") as work:
            path = work / target.name
            if not is_folder:
                gguf_write.write(path, model, formats, MIXES[quantize].file_type if quantize else None)
            else:
                path.mkdir()
                if quantize:
                    quantized.write(path, model, formats, quantize, shards)
                else:
                    huggingface_write.write(path, model, shards)
            written = open_checkpoint(path)
            check_written(written, model, formats, hashes, progress)
            replace(path, target)
    except OSError as error:
        raise CheckpointError(f"{error.filename or target}: {error.strerror or error}; nothing was changed") from error
    except (ConfigError, TokenizerError, OverflowError) as error:  # OverflowError: a number is too large for float32
        raise ConfigError(f"{target} can't be written: {error}") from error
    total = hashlib.sha256("".join(f"{name} {hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()
    sizes = sum(checkpoint.parts.values()), sum(written.parts.values())
    if again:
        larger = f", and the weights grow by {(sizes[1] - sizes[0]) / 1e6:,.1f} MB" if sizes[1] > sizes[0] else ""
        warnings.append(f"the source is already quantized ({', '.join(again)}); {AGAIN}{larger}")
    return Proof(target, len(hashes), total, warnings, sizes)


def quantize(
    source: str | os.PathLike[str], target: str | os.PathLike[str], scheme: str = "int4", **options: Any
) -> Proof:
    """Quantize the linear layers of a model and write it to the folder `target`, as `clearllama quantize` does.

    The source is a path or a name, as for `llama.load`. Weights that the source stores quantized are copied if their
    format is that of the scheme; otherwise they are quantized again, with a warning. All other weights are unchanged.

    scheme   a name from `clearllama quantize --list`
    options  adapters, shards, tokenizer, chat_template and progress, as for convert.convert
    """
    return convert(source, target, "hf", quantize=scheme, **options)


def format_for(name: str, weight: Weight, scheme: Scheme, tied: bool) -> GroupFormat | None:
    """The quantized format to save a weight in; None for floating point.

    Linear layers are quantized by the scheme. An embedding that is not tied to the output layer keeps the format of the
    source: floating point, or 4 or 8 bits.
    """
    if len(weight.shape) != 2:
        return None
    if name == EMBEDDING and not tied:
        return weight.format and weight.format.simple
    return scheme_for(name, scheme).format


def model_of(
    checkpoint: Checkpoint, dtypes: Mapping[str, Any], read: Callable[[str], Tensor], chat_template: str
) -> tuple[Model, list[str]]:
    """The model of a checkpoint in the form that the writers need, and warnings."""
    warnings, tokenizer = [*checkpoint.warnings], None
    try:
        tokenizer = checkpoint.tokenizer()
    except TokenizerError as error:  # it is missing or damaged; that of another model would raise CheckpointError
        warnings.append(f"no tokenizer was written: {error}")
    template = pick_template(checkpoint, tokenizer, chat_template)
    if tokenizer and template is None and chat_template == "auto" and checkpoint.format == "Meta":
        warnings.append(
            "wrote no chat template; for a model that was trained to chat, name a chat_template (--chat-template)"
        )
    model = Model(
        config=checkpoint.config,
        shapes=checkpoint.shapes,
        dtypes=dtypes,
        read=read,
        tokenizer=tokenizer,
        chat_template=template,
        sampling=checkpoint.sampling,
        name=checkpoint.about.get("name", checkpoint.path.name.removesuffix(".gguf")),
    )
    return model, warnings


def pick_template(checkpoint: Checkpoint, tokenizer: Tokenizer | None, choice: str) -> str | Mapping[str, str] | None:
    """The chat template to write, as `convert` describes it. Raises TemplateError if it does not fit the vocabulary."""
    if choice == "none" or tokenizer is None:
        return None
    if choice == "auto":
        format = checkpoint.chat_format(tokenizer) if says_chat(checkpoint.path) else None
        return checkpoint.chat_template or TEMPLATES.get(format or "")
    if choice in TEMPLATES:
        check_format(choice, tokenizer)
        return TEMPLATES[choice]
    check_template(choice, tokenizer)
    return choice


# -------------------------------------------------------------------------------------------------------- the proof
def check_written(
    written: Checkpoint, model: Model, formats: Mapping[str, Any], hashes: Mapping[str, str], progress: Progress
) -> None:
    """Compare new files with the model and with the hashes of its weights.

    Raises CheckpointError if a weight differs, ConfigError if the model would compute something else.
    """
    check_tensors(written)
    check_config(model.config, written.config)
    if model.tokenizer is not None:
        check_equal(model.tokenizer, written.tokenizer())
    for done, name in enumerate(model.shapes, 1):
        weight = written.weight(name, written.layout)
        if name not in formats:
            values = weight.floats()
        else:
            (values,) = weight.mapped()
        values = to_layout(name, values, model.config.head_dim, written.layout, "interleaved")
        if tensor_hash(values) != hashes[name]:
            raise CheckpointError(f"{name} differs after it was written; check the disk, or report a bug")
        del values  # so that memory holds one weight
        weight.release()
        progress("checking", done, len(hashes))


def tensor_hash(tensor: Tensor) -> str:
    """The sha256 of a tensor's bytes. A vector is hashed in float32, so that the hash is the same in every format."""
    return hashlib.sha256(raw_bytes(tensor.float() if tensor.dim() == 1 else tensor).data).hexdigest()


def check_config(source: ModelConfig, written: ModelConfig) -> None:
    """Raise ConfigError unless two configurations are equal, except for the form of the RoPE scaling.

    Numbers may differ by the rounding to float32. The RoPE scaling need not be compared: the writers refuse a scaling
    that their format can't express.
    """
    fields, others = (
        {**dataclasses.asdict(config), "max_seq_len": reach(config), "rope_scaling": None}
        for config in (source, written)
    )
    for name, value in fields.items():
        close = isinstance(value, float) and math.isclose(value, others[name], rel_tol=1e-6)
        if value != others[name] and not close:
            raise ConfigError(f"its {name} {value} would become {others[name]}; choose another format")
