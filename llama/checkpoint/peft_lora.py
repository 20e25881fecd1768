"""Reader of PEFT's LoRA folders: adapter_config.json, and adapter_model.safetensors or adapter_model.bin.

Each tensor is a matrix A or B, or a complete weight or bias that was trained too. The files must contain exactly the
tensors that the configuration calls for: an adapter that is applied in part is another model.
Source: huggingface/peft, src/peft/tuners/lora.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import integer, is_integer, number
from ..errors import CheckpointError, ConfigError, TokenizerError
from ..tokenizer.patterns import Parser, ways
from . import huggingface
from .adapters import EMBEDDING, OUTPUT, Adapter, LowRank, describe_ranks
from .base import FLOATS, Checkpoint, to_file_name, to_model_name
from .documents import LARGEST, Fields, describe, read_json
from .huggingface import LAYERS, NAMES

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."
MERGE = "merge it into its base with peft (merge_and_unload, save_pretrained) and load the result"

# Keys that do not change the merged weights
NO_EFFECT = {
    "auto_mapping", "peft_version", "revision", "inference_mode", "task_type", "lora_dropout", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "megatron_core", "ensure_weight_tying",
    "runtime_config",
}  # fmt: skip
# Keys that, if set, change the result in a way that can't be merged here
REFUSED = {
    "use_dora": "is a DoRA adapter, which also rescales every row of the merged weights",
    "fan_in_fan_out": "stores transposed weights (fan_in_fan_out), which no LLaMA has",
    "use_qalora": "is a QALoRA adapter, whose matrices belong to quantization groups",
    "alora_invocation_tokens": "is an activated LoRA, which applies only after certain tokens",
    "layer_replication": "repeats layers of its base (layer_replication), which makes another architecture",
    "lora_bias": "adds a bias to B (lora_bias), which LLaMA's layers have no place for",
    "target_parameters": "changes single parameters (target_parameters), as in mixtures of experts",
    "trainable_token_indices": "trains single rows of the embedding (trainable_token_indices)",
    "arrow_config": "chooses among adapters for each token (Arrow)",
    "megatron_config": "was trained in Megatron's layers (megatron_config)",
}
# Initializations that also change the base's weights. The adapter then belongs to the changed base.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
UNCHANGED_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# Types that do not change weights, but add tokens to the prompt or to the keys
PROMPTS = (
    "PROMPT_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "ADAPTION_PROMPT",
    "CPT",
    "CARTRIDGE",
)

# A tensor's key, without the prefix: (the module, what the tensor is)
KEY = re.compile(r"(.+?)\.(?:(lora_[AB])\.weight|(lora_embedding_[AB])|((?:base_layer\.)?(?:weight|bias)))")
LARGEST_RANK, LARGEST_ALPHA = 2**16, 2.0**24
MOST_STEPS, SECONDS = 2**23, 2.0  # of regular expressions: steps for one name, seconds of CPU time for all names
SLOW = "matching it could take too long"


def read(folder: Path, base: Checkpoint) -> Adapter:
    """The adapter in a folder. Raises CheckpointError if it is damaged, not a plain LoRA, or does not fit the base."""
    if not (folder / CONFIG).is_file():
        found = ", ".join(sorted(file.name for file in folder.iterdir())[:4]) or "nothing"
        raise CheckpointError(f"adapter {folder} is not a PEFT adapter: expected {CONFIG}, found {found}")
    where = f"adapter {folder / CONFIG}"
    fields = Fields(read_json(folder / CONFIG), where)
    try:
        _check_kind(fields, folder)
        modules = _modules(base)
        targets = _targets(fields, modules, base.config.tie_embeddings)
        scales = _Scales(fields, modules)
        kept, biases = _names(fields, "modules_to_save") or [], _biases(fields, targets, base)
        _check_keys(fields, folder)
    except ConfigError as error:
        raise CheckpointError(f"{error}; download the adapter again") from None
    pairs, complete = _sorted_tensors(folder)
    if pairs.keys() != set(targets):
        missing, extra = sorted(set(targets) - pairs.keys()), sorted(pairs.keys() - set(targets))
        what = f"has no matrices for {missing[0]}" if missing else f"has matrices for {extra[0]:.80}"
        asked = "which its configuration names" if missing else "which its configuration or its base does not have"
        raise CheckpointError(
            f"adapter {folder} {what}, {asked} ({len(missing)} missing, {len(extra)} unexpected); it is incomplete or"
            f" belongs to another model; download it again"
        )
    low_rank = {}
    for module, pair in pairs.items():
        low_rank[_weight(module)] = _low_rank(pair, *scales.of(module), f"adapter {folder}: {module}")
    replaced = _replaced(folder, complete, kept, biases, set(pairs), base)
    trained_on = fields.values.get("base_model_name_or_path")
    about = describe_ranks(low_rank, trained_on if isinstance(trained_on, str) else None)
    if replaced:
        about += f", {len(replaced)} complete tensors"
    return Adapter(folder, "half", low_rank, replaced, about, _unused(folder, base))


# ------------------------------------------------------------------------------------------------ the configuration
def _check_kind(fields: Fields, folder: Path) -> None:
    """Raise CheckpointError unless the adapter is a LoRA that can be merged by adding B A."""
    kind = fields.get("peft_type", object, None)
    if kind != "LORA":
        if not isinstance(kind, str):
            hint = "peft_type is missing" if kind is None else f"peft_type is {describe(kind)}"
            raise CheckpointError(
                f"adapter {folder} is not a PEFT adapter: {hint} in {CONFIG}; adapters of other programs must be saved"
                f" by peft or merged by the program that wrote them"
            )
        why = (
            "it adds tokens to the prompt instead of changing weights"
            if kind in PROMPTS
            else "only LoRA is merged here"
        )
        remedy = "run it with peft" if kind in PROMPTS else MERGE
        raise CheckpointError(f"adapter {folder} has the PEFT type {kind:.40}: {why}; {remedy}")
    for key, what in REFUSED.items():
        if fields.get(key, object, None) not in (None, False, [], {}):
            raise CheckpointError(f"adapter {folder} {what}; {MERGE}")
    start = fields.get("init_lora_weights", object, None)
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise CheckpointError(
            f"adapter {folder} was initialized by {start:.40}, which also changes the weights of its base; {MERGE}, or"
            f" save it with path_initial_model_for_weight_conversion"
        )
    if not (isinstance(start, bool | str | None) and start in UNCHANGED_BASE):
        raise ConfigError(f"{fields.where}: init_lora_weights is {describe(start)}, which is unknown")


def _check_keys(fields: Fields, folder: Path) -> None:
    """Raise CheckpointError for a key that is set, unknown, and may change the result."""
    fields.get("base_model_name_or_path", object, None)
    odd = [
        key for key in fields.unknown() if key not in NO_EFFECT and fields.values[key] not in (None, False, [], {}, "")
    ]
    if odd:
        raise CheckpointError(
            f"adapter {folder}: {CONFIG} sets {odd[0]:.60}, which is unknown and may change the result; {MERGE}"
        )


def _modules(base: Checkpoint) -> list[str]:
    """Hugging Face's names of the modules that may have a LoRA: embedding, linear layers, output."""
    matrices = [name for name, shape in base.shapes.items() if len(shape) == 2]
    return [_module(name) for name in dict.fromkeys([*matrices, OUTPUT])]


def _module(name: str) -> str:
    """Hugging Face's name of the module that has a tensor of the model."""
    return to_file_name(name, NAMES, LAYERS).rsplit(".", 1)[0]


def _weight(module: str) -> str:
    """The model's name of a module's weight."""
    name = to_model_name(f"{module}.weight", NAMES, LAYERS)
    if name is None:
        raise CheckpointError(f"{module!r:.80} is not a module of a LLaMA decoder")
    return name


def _names(fields: Fields, key: str) -> list[str] | None:
    """A list of names, or None."""
    value = fields.get(key, object, None)
    if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise ConfigError(f"{fields.where}: {key} must be a list of names, got {describe(value)}")
    return value


def _targets(fields: Fields, modules: list[str], tied: bool) -> list[str]:
    """The modules that have a LoRA, from target_modules, exclude_modules, layers_to_transform and modules_to_save."""
    chosen, excluded = fields.get("target_modules", object, None), fields.get("exclude_modules", object, None)
    layers, saved = fields.get("layers_to_transform", object, None), _names(fields, "modules_to_save") or []
    pattern = fields.get("layers_pattern", object, None)
    matches = _matcher(fields, "target_modules", modules)
    excludes = _matcher(fields, "exclude_modules", modules) if excluded else lambda module: False
    numbers = [layers] if is_integer(layers) else layers
    if not isinstance(numbers, list | None) or not all(is_integer(n) for n in numbers or ()):
        raise ConfigError(f"{fields.where}: layers_to_transform must be a list of integers, got {describe(layers)}")
    if numbers and isinstance(chosen, str):
        raise ConfigError(f"{fields.where}: layers_to_transform needs a list of target_modules, got {describe(chosen)}")
    if pattern not in (None, "", [], "layers", ["layers"], LAYERS, [LAYERS]):
        raise ConfigError(f"{fields.where}: layers_pattern is {describe(pattern)}; LLaMA's layers are named 'layers'")

    def wanted(module: str) -> bool:
        if excludes(module) or any(name in _prefixes(module) for name in saved) or not matches(module):
            return False
        layer = re.match(rf"{re.escape(LAYERS)}\.(\d+)\.", module)
        return not numbers or (layer is not None and int(layer[1]) in numbers)

    found = [module for module in modules if wanted(module)]
    if tied and fields.get("ensure_weight_tying", bool, False) and _module(EMBEDDING) in found:
        found.append(_module(OUTPUT))  # peft then gives the output the same change, and saves it
    return list(dict.fromkeys(found))


def _matcher(fields: Fields, key: str, modules: list[str]) -> Callable[[str], bool]:
    """Whether a key selects a module (a function): 'all-linear', a regular expression or a list of suffixes."""
    value = fields.get(key, object, None)
    if isinstance(value, str) and value.lower() == "all-linear":
        return lambda module: _weight(module) not in (EMBEDDING, OUTPUT)
    if isinstance(value, str):
        return _matches([value], modules, fields.where).__contains__
    names = _names(fields, key)
    if names is None:
        raise ConfigError(f"{fields.where}: the key {key} is missing")
    ends = set(names)
    return lambda module: any(module == end or module.endswith(f".{end}") for end in ends)


def _prefixes(module: str) -> set[str]:
    """All names by which modules_to_save may name a module or a part that contains it."""
    parts = module.split(".")
    return {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}


def _matches(patterns: Iterable[str], modules: list[str], where: str, before: str = "") -> dict[str, str]:
    """{module: the first regular expression that matches its name}; modules without a match are left out.

    Raises CheckpointError if matching could take long: tokenizer/patterns.py bounds the steps for one name, and the
    time for all names is limited.
    """
    longest, steps = max(map(len, modules)), 0.0
    compiled: dict[str, re.Pattern[str]] = {}
    for pattern in patterns:
        try:
            if re.search(r"\\[\[\]]|\[[^\]]*\[", pattern):  # Python and the parser read such classes differently
                raise ValueError("a class contains a bracket")
            complete = f"{before}(?:{pattern})" if before else pattern
            paths, degree = ways(Parser(complete, where).read(), True)
            steps += paths * float(longest) ** degree / math.factorial(degree)
            if steps > MOST_STEPS:
                raise ValueError(SLOW)
            with warnings.catch_warnings(action="ignore"):  # Python warns about unusual classes
                compiled[pattern] = re.compile(complete)
        except (TokenizerError, ValueError, re.error, RecursionError, OverflowError) as error:
            raise _unusable(pattern, where, str(error)) from None
    found, end = {}, time.process_time() + SECONDS
    for module in modules:
        key = next((key for key, pattern in compiled.items() if pattern.fullmatch(module)), None)
        if key is not None:
            found[module] = key
        if time.process_time() > end:
            raise _unusable(next(iter(compiled)), where, SLOW)
    return found


def _unusable(pattern: str, where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: the regular expression {pattern[:60]!r} can't be used ({why[:100]}); write the names of the modules"
        f" as a list"
    )


class _Scales:
    """Rank and scale of each module, from r, lora_alpha, rank_pattern, alpha_pattern and use_rslora."""

    def __init__(self, fields: Fields, modules: list[str]):
        self.rank, self.alpha = fields.get("r", int, 8), fields.get("lora_alpha", float, 8)
        self.root = fields.get("use_rslora", bool, False)
        self.ranks, self.alphas = (
            fields.get("rank_pattern", dict, None) or {},
            fields.get("alpha_pattern", dict, None) or {},
        )
        for rank in (self.rank, *self.ranks.values()):
            integer(f"{fields.where}: a rank", rank, 1, LARGEST_RANK, ConfigError)
        for alpha in (self.alpha, *self.alphas.values()):
            number(f"{fields.where}: an alpha", alpha, -LARGEST_ALPHA, LARGEST_ALPHA, ConfigError)
        self.rank_keys, self.alpha_keys = (
            _matches(keys, modules, fields.where, r"(?:.*\.)?") for keys in (self.ranks, self.alphas)
        )

    def of(self, module: str) -> tuple[int, float]:
        """(r, alpha / r); alpha / sqrt(r) with use_rslora."""
        rank = self.ranks[self.rank_keys[module]] if module in self.rank_keys else self.rank
        alpha = self.alphas[self.alpha_keys[module]] if module in self.alpha_keys else self.alpha
        return rank, alpha / (math.sqrt(rank) if self.root else rank)


def _biases(fields: Fields, targets: list[str], base: Checkpoint) -> set[str]:
    """The biases that were trained, by the model's names."""
    kind = fields.get("bias", object, None)
    if kind not in (None, "none", "all", "lora_only"):
        raise ConfigError(f"{fields.where}: bias is {describe(kind)}; expected 'none', 'all' or 'lora_only'")
    found = {name for name in base.shapes if name.endswith(".bias")}
    return set() if kind in (None, "none") else {n for n in found if kind == "all" or _module(n) in targets}


# ------------------------------------------------------------------------------------------------------- the tensors
def _sorted_tensors(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """{module: {"A" or "B": its matrix}}, as for a linear layer, and {key without prefix: a complete tensor}."""
    path = next((folder / name for name in WEIGHTS if (folder / name).exists() or (folder / name).is_symlink()), None)
    if path is None:
        raise CheckpointError(f"adapter {folder} has {CONFIG} but no {WEIGHTS[0]}; download that file")
    pairs: dict[str, dict[str, Tensor]] = {}
    complete: dict[str, Tensor] = {}
    for key, stored in huggingface.open_file(path).items():
        found = KEY.fullmatch(key.removeprefix(PREFIX)) if key.startswith(PREFIX) else None
        if found is None:
            what = "belongs to a DoRA adapter" if "lora_magnitude_vector" in key else "is not a part of a LoRA"
            raise CheckpointError(f"adapter {path}: {key!r:.100} {what} that can be merged; {MERGE}")
        if stored.dtype not in FLOATS.values():
            raise CheckpointError(
                f"adapter {path}: {key} is stored as {stored.dtype}; expected one of {', '.join(FLOATS.values())}"
            )
        module, linear, embedding, rest = found.groups()
        tensor = stored.read()
        if linear:
            pairs.setdefault(module, {})[linear[-1]] = tensor
        elif embedding:  # the embedding maps ids to rows, so A (r, V) is its up matrix
            pairs.setdefault(module, {})["BA"["AB".index(embedding[-1])]] = tensor.T if tensor.dim() == 2 else tensor
        else:
            complete[f"{module}.{rest.removeprefix('base_layer.')}"] = tensor
    if any(pair.keys() != {"A", "B"} for pair in pairs.values()):
        module = next(module for module, pair in pairs.items() if pair.keys() != {"A", "B"})
        raise CheckpointError(f"adapter {path} has only one of the two matrices of {module:.80}; download it again")
    return pairs, complete


def _low_rank(pair: Mapping[str, Tensor], rank: int, scale: float, where: str) -> LowRank:
    """A module's change. Raises CheckpointError if the matrices do not have the rank of the configuration."""
    down, up = pair["A"], pair["B"]
    if down.dim() != 2 or up.dim() != 2 or len(down) != rank or up.shape[1] != rank:
        raise CheckpointError(
            f"{where} has A {tuple(down.shape)} and B {tuple(up.shape)}, but {CONFIG} states rank {rank}; the files"
            f" belong to different adapters; download both again"
        )
    return LowRank(down, up, scale)


def _replaced(
    folder: Path, complete: Mapping[str, Tensor], kept: list[str], biases: set[str], changed: set[str], base: Checkpoint
) -> dict[str, Tensor]:
    """The complete tensors by the model's names. Raises CheckpointError unless they are those that were trained.

    kept     modules_to_save
    changed  the modules that have a LoRA
    """

    def is_kept(name: str) -> bool:
        parts = _module(name).split(".")
        return any(".".join(parts[:i]).endswith(end) for end in kept for i in range(1, len(parts) + 1))

    names = {*base.shapes, OUTPUT}
    expected = {name for name in names if is_kept(name)} | biases
    replaced: dict[str, Tensor] = {}
    for key, tensor in complete.items():
        name = to_model_name(key, NAMES, LAYERS)
        # peft saves the embedding and the output too if the vocabulary was resized or one of them has a LoRA
        if name is None or name not in names or (name not in expected and name not in (EMBEDDING, OUTPUT)):
            raise CheckpointError(
                f"adapter {folder} contains the tensor {key!r:.80}, which its configuration and its base do not have;"
                f" the adapter belongs to another model, pass that model with --model"
            )
        if name in expected or not _is_equal(tensor, base, name):
            replaced[name] = tensor
    if missing := sorted(expected - replaced.keys()):
        raise CheckpointError(
            f"adapter {folder} lacks {to_file_name(missing[0], NAMES, LAYERS)}, which was trained according to {CONFIG}"
            f" ({len(missing)} missing); download it again, or save it with a newer peft"
        )
    tied = base.config.tie_embeddings and EMBEDDING in replaced and OUTPUT not in replaced
    if tied and not is_kept(EMBEDDING):  # saved as the tied weight itself, not trained as a copy
        replaced[OUTPUT] = replaced[EMBEDDING]
    return replaced


def _is_equal(tensor: Tensor, base: Checkpoint, name: str) -> bool:
    """Whether a tensor is the base's own, which then need not be replaced."""
    own = name if name in base.shapes else EMBEDDING
    equal = tuple(tensor.shape) == base.shapes[own] and torch.equal(tensor.float(), base.tensor(own).float())
    base.release(own)
    return equal


def _unused(folder: Path, base: Checkpoint) -> list[str]:
    """A warning if the adapter has a chat template that differs from its base's."""
    template: Any = None
    with contextlib.suppress(CheckpointError, OSError):  # the template is not used, so a damaged file does not matter
        if (folder / "chat_template.jinja").is_file():
            with open(folder / "chat_template.jinja", encoding="utf-8", errors="replace") as file:
                template = file.read(LARGEST)
        elif (folder / "tokenizer_config.json").is_file():
            template = read_json(folder / "tokenizer_config.json").get("chat_template")
    if not isinstance(template, str) or template.strip() == (base.chat_template or "").strip():
        return []
    return [f"{folder} has a chat template that differs from the model's; the model's is used"]
