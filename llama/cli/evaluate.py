"""Evaluate a model on tasks of EleutherAI's lm-evaluation-harness (lm-eval).

The scores match those of lm-eval's own Hugging Face backend with the same weights. Data sets are downloaded from the
Hugging Face hub; tasks with local files need no network (docs/guides/evaluate.md).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..checks import integer, number
from ..errors import LlamaError, UsageError
from . import arguments, loading, streams

OPTIONS = ("batch_size", "limit", "num_fewshot", "apply_chat_template", "system_instruction")  # of lm-eval


def add_options(parser: argparse.ArgumentParser) -> None:
    tasks = "lm-eval tasks or groups, patterns such as mmlu_*, .yaml files, and folders of .yaml files"
    arguments.add(
        parser,
        ("--tasks", "NAME|FILE[,...]", tasks, {"required": True}),
        ("--limit", "N", "first N examples of each task; below 1, a fraction", {"type": float}),
        ("--batch-size", "N", "requests at once (default: 16)", {"default": 16}),
        ("--num-fewshot", "N", "worked examples in a prompt (default: the task's)"),
        ("--apply-chat-template", None, "write each prompt as a chat message, and worked examples as turns"),
        ("--system-instruction", "TEXT", "the system message, or a text before each prompt"),
        ("--output", "FILE", "write the complete results of lm-eval as JSON", {"type": Path}),
        ("--log-samples", None, "also write samples_TASK_FILE.jsonl beside --output"),
    )
    arguments.add_output_options(parser, json="the complete results as one JSON object, instead of the table")
    arguments.add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    integer("--batch-size", args.batch_size, 1, 4096)
    if args.limit is not None and number("--limit", args.limit, 0, 1e9, above=True) > 1 and not args.limit.is_integer():
        raise UsageError(f"--limit must be a whole number, or a fraction below 1, got {args.limit:g}")
    if args.log_samples and args.output is None:
        raise UsageError("--log-samples needs --output FILE")
    if args.output is not None:
        streams.check_file("--output", args.output)
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # `datasets` contacts a server even for local files
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the harness forks processes for standard errors
    try:
        from lm_eval.utils import make_table

        from ..tools import harness
    except ImportError as error:
        raise LlamaError(f"evaluation needs {error.name}: pip install 'clearllama[eval]'") from None
    with captured(args.quiet):
        tasks = harness.load_tasks([name.strip() for name in args.tasks.split(",") if name.strip()])
    llm = loading.load(args)
    about = {"model": args.model, "dtype": loading.dtype_name(llm.model), "quantize": args.quantize}
    about["adapters"] = list(llm.adapters)
    options = {name: getattr(args, name) for name in OPTIONS}
    with captured(args.quiet), streams.progress(args.quiet, "req") as show:
        results = harness.evaluate(llm, tasks, model_args=about, progress=show, fewshot_as_multiturn=True, **options)
    samples = results.pop("samples")
    if args.output is not None:
        for task, rows in samples.items() if args.log_samples else ():
            file = args.output.with_name(f"samples_{task}_{args.output.stem}.jsonl")
            streams.write_file(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        streams.write_file(args.output, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    groups = "\n" + make_table(results, "groups") if results.get("groups") else ""
    streams.show(args, results, make_table(results) + groups)
    return 0


@contextlib.contextmanager
def captured(quiet: bool) -> Iterator[None]:
    """Send what lm-eval prints to stderr if it is a terminal, and drop it otherwise. Warnings are always written."""
    shown = sys.stderr if sys.stderr.isatty() and not quiet else io.StringIO()
    warnings, log = logging.StreamHandler(sys.stderr), logging.getLogger("lm_eval")
    warnings.setLevel(logging.ERROR if quiet else logging.WARNING)  # lm-eval sets the level of its log itself
    log.handlers = [warnings]
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        yield
