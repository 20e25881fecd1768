"""EleutherAI's lm-evaluation-harness (the package lm-eval) on any model that loads: its tasks, prompts and metrics.

The results are those of the harness's own class for Hugging Face models, HFLM, with the same weights. `Requests`
implements the harness's interface with likelihood.py and Llama.stream_batch. Two of HFLM's rules differ from the rest
of this package: control strings in a text become control tokens, and a text that begins with the begin-of-text string
does not get a second one. lm-eval is imported only by the functions that need it.
Interface: lm_eval/api/model.py; rules: lm_eval/models/huggingface.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import spelling
from ..chat import TEMPLATES, choose_template, render
from ..checks import integer
from ..errors import LlamaError, TemplateError, UsageError
from ..text import Llama
from .likelihood import log_likelihoods

OLDEST = (0, 4, 13)  # the oldest version of lm-eval that is tested
SEED = 1234  # the harness's default for PyTorch; request n is sampled with seed SEED + n
MAX_NEW_TOKENS = 256  # HFLM's, for tasks that set no limit
TOP_K = 50  # transformers' default when it samples
# generation_kwargs of a task, besides those that set the length and the end -> the options of Llama.stream_ids
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of the last message, as in transformers

LOG = logging.getLogger(__name__)

# Called with the kind of request, the number of requests done, and the total number.
Progress = Callable[[str, int, int], object]


class Requests:
    """Answers the requests of the harness. `language_model` combines it with the harness's class TemplateLM.

    TemplateLM encodes each pair of context and continuation. Trailing spaces of the context belong to the continuation.
    The ids of the continuation are those that follow the context's ids in the encoded pair.
    """

    cache_hook: Any  # of TemplateLM; it stores answers if the harness keeps a cache
    backend = "causal"
    max_gen_toks = MAX_NEW_TOKENS

    def __init__(self, llm: Llama, batch_size: int, progress: Progress | None = None):
        super().__init__()
        self.llm, self.batch_size, self.progress = llm, batch_size, progress
        self.truncated = 0  # requests that were longer than the context
        self.no_system = False  # the chat template rejected a system message
        self._encode = functools.lru_cache(4096)(functools.partial(llm.tokenizer.encode, parse_special=True))

    # ------------------------------------------------------------------------------------------------------ tokenizer
    @property
    def eot_token_id(self) -> int | None:
        return self.llm.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context: begin of text, or end of text if the tokenizer has no other."""
        tokenizer = self.llm.tokenizer
        settings = getattr(tokenizer, "settings", {})  # of Qwen2: bos_token is null, and config.json names an id
        own = settings.get("bos_token", "") is not None
        id = tokenizer.bos_id if own and tokenizer.bos_id is not None else tokenizer.eos_id
        if id is None:
            raise UsageError(
                "a text without context needs a begin-of-text or end-of-text token, and the vocabulary has neither;"
                " use a task whose prompts have a context, or name another --tokenizer"
            )
        return id

    @property
    def max_length(self) -> int:
        return self.llm.model.max_seq_len

    @property
    def tokenizer_name(self) -> str:
        return self.llm.tokenizer.digest()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text. None adds begin of text if the model was trained with it, unless the text begins with it."""
        tokenizer = self.llm.tokenizer
        ids: list[int] = self._encode(string)
        if not tokenizer.add_bos or tokenizer.bos_id is None:
            return ids
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(token_string(self.llm, tokenizer.bos_id) or "\0")
        return [tokenizer.bos_id, *ids] if add_special_tokens else ids

    # ---------------------------------------------------------------------------------------------------------- chat
    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The Jinja source of the chat template."""
        return template_of(self.llm) if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Without a generation prompt it ends inside the last message."""
        written = functools.partial(render, template_of(self.llm), tokenizer=self.llm.tokenizer)
        messages = [dict(message) for message in chat_history]
        if not add_generation_prompt:
            messages[-1]["content"] += TAG
        try:
            text = written(messages, add_generation_prompt=add_generation_prompt)
        except TemplateError:
            without = [message for message in messages if message["role"] != "system"]
            if len(without) == len(messages):
                raise
            if not self.no_system:
                LOG.warning(
                    "clearllama: the chat template rejects system messages, so they are left out, as lm-eval does"
                )
            self.no_system = True
            text = written(without, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        before, tag, after = text.rpartition(TAG.strip())
        if not tag:
            raise TemplateError("the chat template does not write the last message, so it can't be continued")
        return before if after.startswith(" ") else before.rstrip()

    # ------------------------------------------------------------------------------------------------ log-likelihoods
    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """For each pair, (log p of the continuation, whether it is greedy). An empty continuation has log p 0."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        asked = [
            i for i, request in enumerate(requests) if request.args[1] or request.args[0] != request.args[0].rstrip()
        ]
        answers = super().loglikelihood([requests[i] for i in asked], disable_tqdm=True)  # type: ignore[misc]
        for i, answer in zip(asked, answers, strict=True):
            found[i] = answer
        return found

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        pairs = []
        for (context, continuation), context_ids, ids in requests:
            if not ids:
                raise UsageError(
                    f"the continuation {continuation!r:.80} adds no token to the context that ends in"
                    f" {context[-40:]!r}; separate them by a space or a newline (target_delimiter of the task)"
                )
            pairs.append((context_ids or [self.prefix_token_id], ids))
        found = self._score(pairs, "loglikelihood")
        for (text, _, _), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", text, answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """log p of each text, in windows of the model's context; each id is predicted once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows: list[tuple[list[int], list[int]]] = []
        ends = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows += map(
                make_disjoint_window, get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            )
            ends.append(len(windows))
        found = self._score(windows, "loglikelihood_rolling")
        answers = []
        for request, first, end in zip(requests, [0, *ends], ends, strict=False):
            answers.append(math.fsum(logprob for logprob, _ in found[first:end]))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
        return answers

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]], name: str) -> list[tuple[float, bool]]:
        self.truncated += sum(len(context) + len(ids) > self.max_length + 1 for context, ids in pairs)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if self.progress is not None:
                self.progress(name, done, len(pairs))

        found = log_likelihoods(self.llm.model, pairs, batch_size=self.batch_size, progress=advance)
        return [(one.logprob, one.greedy) for one in found]

    # ----------------------------------------------------------------------------------------------------- generation
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """The text that continues each context, up to the first stop string."""
        prompts = []
        for number, request in enumerate(requests):
            context, settings = request.args
            options = generation_options(self.llm, settings, SEED + number)
            room = self.max_length - options["max_new_tokens"]
            if room < 1:
                raise UsageError(
                    f"a task generates up to {options['max_new_tokens']} tokens, but the model's context of"
                    f" {self.max_length} tokens has no room for a prompt; use a task with a smaller max_gen_toks, or"
                    " extend the context (--rope-scaling)"
                )
            ids = self.tok_encode(context)
            self.truncated += len(ids) > room
            prompts.append((ids[-room:], options))
        order = sorted(range(len(prompts)), key=lambda i: prompts[i][0])  # equal prefixes share their keys and values
        texts = [""] * len(prompts)
        done = 0
        for position, piece in self.llm.stream_batch([prompts[i] for i in order], batch_size=self.batch_size):
            request = requests[order[position]]
            if isinstance(piece, LlamaError):
                raise type(piece)(f"request {order[position] + 1} of {len(requests)}: {piece}") from piece
            if piece.completion is not None:
                marks = control_stops(self.llm, request.args[1].get("until"))
                ids = piece.completion.tokens
                cut = next((i for i, id in enumerate(ids) if id in marks), None)
                text = piece.completion.text
                texts[order[position]] = text if cut is None else self.llm.tokenizer.decode(ids[:cut])
                self.cache_hook.add_partial("generate_until", request.args, texts[order[position]])
                done += 1
                if self.progress is not None:
                    self.progress("generate_until", done, len(requests))
        return texts

    def get_model_info(self) -> dict[str, Any]:
        """Properties of the model for the results."""
        weights = self.llm.model.norm.weight
        return {"model_dtype": str(weights.dtype).removeprefix("torch."), "model_device": str(weights.device)}


def language_model(llm: Llama, batch_size: int, progress: Progress | None = None) -> Any:
    """A model for the harness's own functions, such as lm_eval.simple_evaluate(model=...).

    batch_size is the number of requests to run at once. progress is called as described at `Progress`.
    """
    check_package()
    from lm_eval.api.model import TemplateLM

    return type("Clearllama", (Requests, TemplateLM), {})(llm, integer("the batch size", batch_size), progress)


def check_package() -> None:
    """Raise UsageError if lm-eval is missing or too old."""
    try:
        found = version("lm_eval")
    except PackageNotFoundError:
        found = "none"
    if found == "none" or tuple(map(int, re.findall(r"[0-9]+", found)[:3])) < OLDEST:
        raise UsageError(
            f"evaluation needs lm-eval {'.'.join(map(str, OLDEST))} or newer, found {found}; run: pip install"
            " 'clearllama[eval]'"
        )


# ------------------------------------------------------------------------------------------------------------- texts
def token_string(llm: Llama, id: int | None) -> str:
    """The control string of an id; empty if it has none."""
    return next((name for name, other in llm.tokenizer.control.items() if other == id), "")


def template_of(llm: Llama) -> str:
    """The model's chat template, or that of its built-in format. Raises TemplateError if it has neither."""
    template = choose_template(llm.chat_template) or TEMPLATES.get(llm.chat_format or "")
    if template is None:
        raise TemplateError(
            "this model has no chat template, so it is probably a base model: leave out --apply-chat-template"
        )
    return template


# ------------------------------------------------------------------------------------------------------- generation
def generation_options(llm: Llama, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The generation_kwargs of a task as options of Llama.stream_ids. Raises UsageError for an unsupported one."""
    from lm_eval.models.utils import normalize_gen_kwargs

    values = dict(normalize_gen_kwargs(dict(settings), MAX_NEW_TOKENS))
    options = {"max_new_tokens": values.pop("max_gen_toks"), "seed": seed, "continues": False}
    end = token_string(llm, llm.tokenizer.eos_id)
    options["stop"] = list(dict.fromkeys([*values.pop("until"), *([end] if end else [])]))
    sample = values.pop("do_sample")
    if values.get("num_beams") == 1:
        del values["num_beams"]
    if unknown := values.keys() - set(SAMPLING):
        raise UsageError(
            f"the task's generation_kwargs have {min(unknown)}, which is not supported; supported: until, max_gen_toks,"
            f" do_sample, {', '.join(SAMPLING)}"
        )
    if not sample:
        return options | {key: values[key] for key in values if key == "repetition_penalty"} | {"temperature": 0.0}
    if not values.get("temperature"):
        raise UsageError("the task's generation_kwargs have do_sample: true, which needs a temperature above 0")
    return {"top_k": llm.sampling.get("top_k", TOP_K)} | options | values


def control_stops(llm: Llama, until: str | Sequence[str] | None) -> set[int]:
    """The control ids among the stop strings of a task. They have no text, so answers are searched for their ids."""
    stops = [until] if isinstance(until, str) else until or ()
    return {llm.tokenizer.control[stop] for stop in stops if stop in llm.tokenizer.control}


# -------------------------------------------------------------------------------------------------------- evaluation
def load_tasks(names: Sequence[str], include_path: Path | None = None) -> list[Any]:
    """Tasks and groups of the harness with their data sets, by names, YAML files and folders of YAML files.

    names         a name may be a pattern, such as mmlu_*
    include_path  a folder of additional tasks and groups, which names may refer to

    Raises UsageError for an unknown name or a task that can't be loaded, LlamaError if a download fails.
    """
    check_package()
    from lm_eval.tasks import TaskManager

    files: dict[str, dict[Path, dict[str, Any]]] = {}  # name -> YAML files and their content
    for name in names:
        if Path(name).is_dir():
            read = {path: read_yaml(path) for path in sorted(Path(name).glob("*.yaml"))}
            files[name] = {path: config for path, config in read.items() if config.keys() & {"task", "group"}}
            if not files[name]:
                raise UsageError(f"--tasks {name}: expected a folder with .yaml files of tasks, found none")
        elif Path(name).is_file():
            files[name] = {Path(name): read_yaml(Path(name))}
        elif name.endswith((".yaml", ".yml")) or "/" in name:
            raise UsageError(f"--tasks {name}: there is no such file or folder")
    every = {path: config for read in files.values() for path, config in read.items()}
    groups = {path: config["group"] for path, config in every.items() if "group" in config}
    if files.keys() != set(names):
        LOG.info("clearllama: reading lm-eval's list of tasks")
    folders = dict.fromkeys([*(path.parent for path in groups), *([include_path] if include_path else [])])
    manager = TaskManager(include_path=list(folders), include_defaults=files.keys() != set(names))
    found: list[Any] = []
    for name in names:
        specs = [groups.get(path, str(path)) for path in files.get(name, ())] or manager.match_tasks([name])
        if not specs:
            meant = spelling.did_you_mean(spelling.nearest(name, manager.all_tasks, cutoff=0.6))
            why = f"--tasks {name}: lm-eval has no task with this name, and there is no such file"
            raise UsageError(f"{why}; {meant}".rstrip("; "))
        found += [one for spec in specs for one in load_task(manager, spec)]
    outer = [one for one in found if hasattr(one, "get_all_tasks")]
    inside = {one.task_name for group in outer for one in group.get_all_tasks()}  # a folder or pattern matches both
    inside |= {one.name for group in outer for one in group.get_all_groups()}
    unique = {getattr(one, "task_name", None) or one.name: one for one in found}
    return [one for name, one in unique.items() if name not in inside]


def read_yaml(path: Path) -> dict[str, Any]:
    """The content of a YAML file, without loading its functions. Raises UsageError if it is not a YAML mapping."""
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        config: dict[str, Any] = load_yaml(path, resolve_func=False)
    except Exception as error:  # of the YAML parser, or of the file that it includes
        raise UsageError(f"{path}: not a task of lm-eval: {error}") from error
    return config


def load_task(manager: Any, spec: str) -> list[Any]:
    """Load the group with a name, or the tasks of a name or a YAML file.

    Raises UsageError, or LlamaError if a download fails.
    """
    try:
        loaded = manager.load([spec])
    except Exception as error:  # lm-eval, datasets and the user's own files raise errors of any type
        if isinstance(error, ConnectionError) or "Offline" in type(error).__name__:
            raise LlamaError(
                f"task {spec}: its data set can't be downloaded: {error}; check the network, or use a task with local"
                " data files (docs/guides/evaluate.md)"
            ) from error
        raise UsageError(f"task {spec}: {type(error).__name__}: {error}") from error
    for name, task in loaded["tasks"].items():
        for attribute, what in (("UNSAFE_CODE", "runs code that the model writes"), ("MULTIMODAL", "has images")):
            if getattr(task, attribute, False):
                raise UsageError(f"task {name} {what}, which this command does not support; use lm-eval itself")
    groups = list(loaded["groups"].values())
    return groups[:1] or list(loaded["tasks"].values())


def evaluate(
    llm: Llama,
    tasks: Sequence[Any],
    *,
    batch_size: int,
    model_args: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate a model on tasks of `load_tasks`: the harness's own results, with "samples", as plain JSON values.

    model_args  what the results say about the model; "model" is its name
    options     further arguments of lm_eval.simple_evaluate: limit, num_fewshot, apply_chat_template, ...

    Raises UsageError for a request that can't be run, TemplateError if a chat template is needed and there is none.
    """
    if options.get("apply_chat_template"):
        template_of(llm)
    for task in tasks:
        if options.get("num_fewshot") and hasattr(task, "task_name") and task.get_config("num_fewshot") == 0:
            LOG.warning(
                "clearllama: --num-fewshot has no effect on the task %s: lm-eval does not override its num_fewshot: 0",
                task.task_name,
            )
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, hash_string, sanitize_model_name

    model, tracker = language_model(llm, batch_size, progress), EvaluationTracker()
    results = simple_evaluate(
        model=model,
        tasks=list(tasks),
        batch_size=batch_size,
        evaluation_tracker=tracker,
        task_manager=TaskManager(include_defaults=False),  # the default reads all 14,000 task files
        **options,
    )
    if model.truncated:
        LOG.warning(
            "clearllama: %d requests were longer than the context of %d tokens; their beginning was cut",
            model.truncated,
            model.max_length,
        )
    tracker.general_config_tracker.log_end_time()
    name = str((model_args or {}).get("model"))
    results |= dataclasses.asdict(tracker.general_config_tracker)
    results |= {"model_source": "clearllama", "model_name": name, "model_name_sanitized": sanitize_model_name(name)}
    results["config"] |= {"model": "clearllama", "model_args": dict(model_args or {})}
    results["task_hashes"] = {
        task: hash_string("".join(one["doc_hash"] + one["prompt_hash"] + one["target_hash"] for one in samples))
        for task, samples in results["samples"].items()
    }
    text = json.dumps(results, default=handle_non_serializable)
    return json.loads(text, parse_constant=lambda _: None)  # NaN and infinity are not JSON


def sample_lines(samples: Sequence[Mapping[str, Any]]) -> str:
    """The samples of a task as the harness writes them: JSON lines, with the arguments of each request by name."""
    from lm_eval.utils import sanitize_list

    lines = []
    for sample in samples:
        arguments = {
            f"gen_args_{i}": {f"arg_{j}": value for j, value in enumerate(values)}
            for i, values in enumerate(sample["arguments"])
        }
        texts = {key: sanitize_list(sample[key]) for key in ("resps", "filtered_resps")}
        row = {**sample, **texts, "arguments": arguments, "target": str(sample["target"])}
        lines.append(json.dumps(row, ensure_ascii=False))
    return "".join(line + "\n" for line in lines)


def tables(results: Mapping[str, Any]) -> str:
    """The scores of tasks and groups as the harness prints them."""
    from lm_eval.utils import make_table

    parts = [make_table(results), *([make_table(results, "groups")] if results.get("groups") else [])]
    return "\n".join(parts)
