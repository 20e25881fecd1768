"""clearllama evaluate: the tasks of EleutherAI's lm-evaluation-harness."""

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
from typing import Any, TextIO

from ..checks import integer, positive
from ..errors import UsageError
from . import arguments, loading, streams

BATCH_SIZE = 16


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="score a model on the tasks of lm-evaluation-harness",
        description="Evaluate a model on tasks of EleutherAI's lm-evaluation-harness (lm-eval). The scores match"
        " those of lm-eval's own Hugging Face backend with the same weights. Data sets are downloaded from the"
        " Hugging Face hub; tasks with local files need no network (docs/guides/evaluate.md).",
        usage="%(prog)s --tasks NAME|FILE[,...] [options]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="NAME|FILE[,...]",
        help="comma-separated list of lm-eval task or group names, patterns such as mmlu_*, .yaml files, and folders of"
        " .yaml files",
    )
    parser.add_argument(
        "--include-path", type=Path, metavar="FOLDER", help="a folder of additional tasks that --tasks can name"
    )
    parser.add_argument(
        "--limit",
        type=float,
        metavar="N",
        help="use the first N examples of each task, or a fraction of them if N is below 1 (default: all)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=BATCH_SIZE,
        metavar="N",
        help="number of requests to run at once (default: %(default)s)",
    )
    parser.add_argument(
        "--num-fewshot", type=int, metavar="N", help="number of worked examples in each prompt (default: the task's)"
    )
    group = parser.add_argument_group("chat models")
    group.add_argument(
        "--apply-chat-template", action="store_true", help="write each prompt as a chat message with the chat template"
    )
    group.add_argument(
        "--no-fewshot-as-multiturn",
        dest="fewshot_as_multiturn",
        action="store_false",
        help="write all worked examples in one message (default: as turns of the chat)",
    )
    group.add_argument(
        "--system-instruction",
        metavar="TEXT",
        help="the system message; without --apply-chat-template, a text that is put before each prompt",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, metavar="FILE", help="write the complete results of lm-eval as JSON")
    group.add_argument(
        "--log-samples",
        action="store_true",
        help="also write each request and its answer: samples_TASK_FILE.jsonl in the folder of --output",
    )
    arguments.add_output_options(parser, json="the complete results as one JSON object, instead of the table")
    arguments.add_model_options(parser)
    arguments.add_rope_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    batch_size = integer("--batch-size", args.batch_size, 1, 4096)
    if args.limit is not None:
        limit = positive("--limit", args.limit, 1e9)
        if limit > 1 and not limit.is_integer():
            raise UsageError(f"--limit must be a whole number, or a fraction below 1, got {limit:g}")
    if args.num_fewshot is not None:
        integer("--num-fewshot", args.num_fewshot, 0)
    if not args.fewshot_as_multiturn and not args.apply_chat_template:
        raise UsageError("--no-fewshot-as-multiturn needs --apply-chat-template")
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    if not names:
        raise UsageError("--tasks is empty; name a task, such as --tasks arc_easy")
    if args.include_path is not None and not args.include_path.is_dir():
        raise UsageError(f"--include-path {args.include_path}: expected a folder")
    if args.log_samples and args.output is None:
        raise UsageError("--log-samples needs --output FILE")
    if args.output is not None:
        streams.check_file("--output", args.output)
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # `datasets` contacts a server even for local files
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the harness forks processes for standard errors
    from ..tools import harness

    with captured(args):
        tasks = harness.load_tasks(names, args.include_path)
    llm = loading.load(args)
    with captured(args) as stderr, progress(args, stderr) as show:
        results = harness.evaluate(
            llm,
            tasks,
            batch_size=batch_size,
            limit=args.limit,
            num_fewshot=args.num_fewshot,
            apply_chat_template=args.apply_chat_template,
            fewshot_as_multiturn=args.fewshot_as_multiturn,
            system_instruction=args.system_instruction,
            model_args={
                "model": args.model,
                "dtype": loading.dtype_name(llm.model),
                "quantize": args.quantize,
                "adapters": list(llm.adapters),
            },
            progress=show,
        )
    samples = results.pop("samples")
    if args.output is not None:
        for task, rows in samples.items() if args.log_samples else ():
            streams.write_file(
                args.output.with_name(f"samples_{task}_{args.output.stem}.jsonl"), harness.sample_lines(rows)
            )
        streams.write_file(args.output, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    if args.json:
        streams.write_json(results)
    else:
        streams.write(harness.tables(results))
    return 0


@contextlib.contextmanager
def captured(args: argparse.Namespace) -> Iterator[TextIO]:
    """Yield stderr, and hide the harness's own output; if stderr is a terminal, write that output to stderr.

    Log records of the harness and of this package are always written to stderr, each as one line.
    """
    stderr = sys.stderr
    shown: TextIO = stderr if stderr.isatty() and not args.quiet else io.StringIO()
    levels = {"llama": "INFO", "lm_eval": "WARNING", "datasets": "ERROR", "huggingface_hub": "ERROR"}
    before = {}
    for name, level in levels.items():
        log = logging.getLogger(name)
        before[log] = log.handlers, log.propagate
        log.handlers, log.propagate = [Lines(stderr)], False
        log.handlers[0].setLevel("ERROR" if args.quiet else level)  # the packages set their loggers' levels themselves
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            yield stderr
    finally:
        for log, (handlers, propagate) in before.items():
            log.handlers, log.propagate = handlers, propagate


class Lines(logging.Handler):
    """Write log records to a stream, each as one line."""

    def __init__(self, stream: TextIO):
        super().__init__()
        self.stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        source = "lm-eval: " * (not record.name.startswith("llama"))
        with contextlib.suppress(OSError):
            print(source + streams.one_line(record.getMessage()), file=self.stream, flush=True)


@contextlib.contextmanager
def progress(args: argparse.Namespace, stderr: TextIO) -> Iterator[Any]:
    """Yield a function that shows a progress bar for each kind of request."""
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def show(name: str, done: int, total: int) -> None:
        if name not in bars:
            off = args.quiet or not stderr.isatty()
            bars[name] = tqdm(total=total, desc=name, unit="req", file=stderr, dynamic_ncols=True, disable=off)
        bars[name].update(done - bars[name].n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()
