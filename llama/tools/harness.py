"""EleutherAI's lm-evaluation-harness (the package lm-eval) on any model that loads: its tasks, prompts and metrics.

The results are those of the harness's own class for Hugging Face models, HFLM, with the same weights. Two of HFLM's
rules differ from the rest of this package: control strings in a text become control tokens, and a text that begins with
the begin-of-text string does not get a second one.
Interface: lm_eval/api/model.py; rules: lm_eval/models/huggingface.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window

from ..chat.formats import TEMPLATES
from ..chat.template import choose_template, render
from ..checks import integer
from ..errors import LlamaError, TemplateError, UsageError
from ..text import Llama
from .likelihood import log_likelihoods

SEED = 1234  # the harness's default for PyTorch; request n is sampled with seed SEED + n
MAX_NEW_TOKENS = 256  # HFLM's, for tasks that set no limit
SAMPLED = {"temperature": 1.0, "top_k": 50}  # transformers' defaults when it samples
TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of the last message, as in transformers

LOG = logging.getLogger(__name__)

# Called with the kind of request, the number of requests done, and the total number.
Progress = Callable[[str, int, int], object]


class LanguageModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A model for the harness's own functions, such as lm_eval.simple_evaluate(model=...).

    TemplateLM encodes each pair of context and continuation. Trailing spaces of the context belong to the continuation.
    The ids of the continuation are those that follow the context's ids in the encoded pair.

    batch_size  number of requests to run at once
    """

    def __init__(self, llm: Llama, batch_size: int, progress: Progress = lambda what, done, total: None):
        super().__init__()
        self.llm, self.batch_size, self.progress = llm, integer("the batch size", batch_size), progress
        self.truncated = 0  # requests that were longer than the context
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
        without = tokenizer.bos_id is None or settings.get("bos_token", "") is None
        id = tokenizer.eos_id if without else tokenizer.bos_id
        if id is None:
            raise UsageError("a text without context needs a begin-of-text or end-of-text token; there is neither")
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
            marks = [text for text, id in tokenizer.control.items() if id == tokenizer.bos_id]
            add_special_tokens = not string.startswith(tuple(marks))
        return [tokenizer.bos_id, *ids] if add_special_tokens else ids

    # ---------------------------------------------------------------------------------------------------------- chat
    def chat_template(self, chat_template: bool | str = False) -> str:
        """The Jinja source of the model's chat template, or of its built-in format."""
        template = choose_template(self.llm.chat_template) or TEMPLATES.get(self.llm.chat_format or "")
        if template is None:
            raise TemplateError("this model has no chat template: leave out --apply-chat-template")
        return template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Without a generation prompt it ends inside the last message."""
        *before, last = chat_history
        if not add_generation_prompt:
            last = {**last, "content": last["content"] + TAG}
        write = functools.partial(
            render, self.chat_template(), tokenizer=self.llm.tokenizer, add_generation_prompt=add_generation_prompt
        )
        try:
            text = write([*before, last])
        except TemplateError:  # some templates reject system messages; lm-eval leaves them out
            text = write([message for message in (*before, last) if message["role"] != "system"])
        if add_generation_prompt:
            return text
        text, tag, after = text.rpartition(TAG.strip())
        if not tag:
            raise TemplateError("the chat template does not write the last message, so it can't be continued")
        return text if after.startswith(" ") else text.rstrip()

    # ------------------------------------------------------------------------------------------------ log-likelihoods
    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """For each pair, (log p of the continuation, whether it is greedy)."""
        pairs = []
        for (context, continuation), context_ids, ids in requests:
            if not ids:
                raise UsageError(
                    f"the continuation {continuation!r:.80} adds no token to the context that ends in {context[-40:]!r}"
                )
            pairs.append((context_ids or [self.prefix_token_id], ids))
        return self._score(pairs, "loglikelihood")

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """log p of each text, in windows of the model's context; each id is predicted once."""
        windows: list[list[tuple[list[int], list[int]]]] = []
        for request in requests:
            rolling = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            windows.append([make_disjoint_window(window) for window in rolling])
        found = iter(self._score([pair for text in windows for pair in text], "loglikelihood_rolling"))
        return [math.fsum(next(found)[0] for _ in text) for text in windows]

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]], name: str) -> list[tuple[float, bool]]:
        self.truncated += sum(len(context) + len(ids) > self.max_length + 1 for context, ids in pairs)
        return [*log_likelihoods(self.llm.model, pairs, self.batch_size, functools.partial(self.progress, name))]

    # ----------------------------------------------------------------------------------------------------- generation
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """The text that continues each context, up to the first stop string."""
        prompts = []
        for number, request in enumerate(requests):
            context, settings = request.args
            options = {**generation_options(settings, self.llm.sampling), "seed": SEED + number}
            room = self.max_length - options["max_new_tokens"]
            if room < 1:
                raise UsageError(f"max_gen_toks of a task leaves no room in the context of {self.max_length} tokens")
            ids = self.tok_encode(context)
            self.truncated += len(ids) > room
            prompts.append((ids[-room:], options))
        order = sorted(range(len(prompts)), key=lambda i: prompts[i][0])  # equal prefixes share their keys and values
        texts: dict[int, str] = {}
        number_of = {self.llm.prepare(*prompts[i])[0]: i for i in order}
        for prompt, piece in self.llm.answers([*number_of], batch_size=self.batch_size):
            if isinstance(piece, LlamaError):
                raise piece
            if piece.completion is not None:
                texts[number_of[prompt]] = piece.completion.text
                self.progress("generate_until", len(texts), len(requests))
        return [texts[number] for number in range(len(requests))]


def generation_options(settings: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_kwargs of a task as options of Llama.stream_ids, which refuses unknown ones."""
    values: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), MAX_NEW_TOKENS))
    length, stop, is_sampled = (values.pop(name) for name in ("max_gen_toks", "until", "do_sample"))
    if values.get("num_beams") == 1:
        del values["num_beams"]
    if is_sampled:
        values = {**SAMPLED, **sampling, **values}
    else:
        values["temperature"] = 0.0
    return {**values, "max_new_tokens": length, "stop": stop, "continues": False}


# -------------------------------------------------------------------------------------------------------- evaluation
@contextlib.contextmanager
def errors_of_the_harness() -> Iterator[None]:
    """Raise errors of lm-eval, of its data sets and of task files, which have any type, as a LlamaError."""
    try:
        yield
    except LlamaError:
        raise
    except Exception as error:
        raise LlamaError(f"lm-eval: {type(error).__name__}: {error}") from error


def load_tasks(names: Sequence[str]) -> list[Any]:
    """Tasks and groups of the harness with their data sets.

    names  of tasks, groups, patterns such as mmlu_*, .yaml files of tasks, and folders of such files

    Raises UsageError for an unknown name, LlamaError if a task can't be loaded.
    """
    specs: dict[str, list[str]] = {}
    with errors_of_the_harness():
        folders = {
            name: TaskManager(include_path=name, include_defaults=False) for name in names if Path(name).is_dir()
        }
        own = all(name in folders or name.endswith(".yaml") for name in names)
        manager = TaskManager(include_path=[*folders], include_defaults=not own)
        for name in names:
            known = folders[name].all_subtasks if name in folders else manager.match_tasks([name])
            specs[name] = [name] if name.endswith(".yaml") else known
        if missing := [name for name in names if not specs[name]]:
            raise UsageError(f"--tasks {missing[0]}: found no task, no file and no folder of tasks with this name")
        loaded = manager.load([spec for found in specs.values() for spec in found])
    inside = {name for names in loaded["group_map"].values() for name in names}
    return [task for kind in ("groups", "tasks") for name, task in loaded[kind].items() if name not in inside]


def evaluate(
    llm: Llama,
    tasks: Sequence[Any],
    *,
    batch_size: int,
    model_args: Mapping[str, Any] | None = None,
    progress: Progress = lambda what, done, total: None,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate a model on tasks of `load_tasks`: the results of lm_eval.simple_evaluate, as plain JSON values.

    model_args  what the results say about the model; "model" is its name
    options     further arguments of simple_evaluate: limit, num_fewshot, apply_chat_template, ...

    Raises UsageError for a request that can't be run, TemplateError if a chat template is needed and there is none.
    """
    model = LanguageModel(llm, batch_size, progress)
    with errors_of_the_harness():
        results = simple_evaluate(
            model=model,
            model_args=dict(model_args or {}),
            tasks=list(tasks),
            batch_size=batch_size,
            task_manager=TaskManager(include_defaults=False),  # the default reads all 14,000 task files
            **options,
        )
    if model.truncated:
        LOG.warning(f"{model.truncated} requests were longer than the context of {model.max_length}; they were cut")
    text = json.dumps(results, default=handle_non_serializable)
    plain: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)  # NaN and infinity are not JSON
    return plain
