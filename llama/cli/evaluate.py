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

from ..checks import integer, number
from ..errors import LlamaError, UsageError
from . import arguments, loading, streams


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "evaluate",
        description="Evaluate a model on tasks of EleutherAI's lm-evaluation-harness (lm-eval). The scores match"
        " those of lm-eval's own Hugging Face backend with the same weights. Data sets are downloaded from the"
        " Hugging Face hub; tasks with local files need no network (docs/guides/evaluate.md).",
        usage="%(prog)s --tasks NAME|FILE[,...] [options]",
    )
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="NAME|FILE[,...]",
        help="lm-eval tasks or groups, patterns such as mmlu_*, .yaml files, and folders of .yaml files",
    )
    parser.add_argument("--limit", type=float, metavar="N", help="first N examples of each task; below 1, a fraction")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="requests at once (default: 16)")
    parser.add_argument(
        "--num-fewshot", type=int, metavar="N", help="worked examples in a prompt (default: the task's)"
    )
    group = parser.add_argument_group("chat models")
    group.add_argument("--apply-chat-template", action="store_true", help="write each prompt as a chat message")
    group.add_argument(
        "--no-fewshot-as-multiturn",
        dest="fewshot_as_multiturn",
        action="store_false",
        help="write all worked examples in one message (default: as turns of the chat)",
    )
    group.add_argument("--system-instruction", metavar="TEXT", help="the system message, or a text before each prompt")
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, metavar="FILE", help="write the complete results of lm-eval as JSON")
    group.add_argument("--log-samples", action="store_true", help="also write samples_TASK_FILE.jsonl beside --output")
    arguments.add_output_options(parser, json="the complete results as one JSON object, instead of the table")
    arguments.add_model_options(parser)
    arguments.add_rope_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    integer("--batch-size", args.batch_size, 1, 4096)
    if args.limit is not None and number("--limit", args.limit, 0, 1e9, above=True) > 1 and not args.limit.is_integer():
        raise UsageError(f"--limit must be a whole number, or a fraction below 1, got {args.limit:g}")
    if not args.fewshot_as_multiturn and not args.apply_chat_template:
        raise UsageError("--no-fewshot-as-multiturn needs --apply-chat-template")
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
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    with captured(args.quiet):
        tasks = harness.load_tasks(names)
    llm = loading.load(args)
    about = {"model": args.model, "dtype": loading.dtype_name(llm.model), "quantize": args.quantize}
    about["adapters"] = list(llm.adapters)
    names = ["batch_size", "limit", "num_fewshot", "apply_chat_template", "fewshot_as_multiturn", "system_instruction"]
    options = {name: getattr(args, name) for name in names}
    with captured(args.quiet), streams.progress(args.quiet, "req") as show:
        results = harness.evaluate(llm, tasks, model_args=about, progress=show, **options)
    samples = results.pop("samples")
    if args.output is not None:
        for task, rows in samples.items() if args.log_samples else ():
            file = args.output.with_name(f"samples_{task}_{args.output.stem}.jsonl")
            streams.write_file(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        streams.write_file(args.output, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    if args.json:
        streams.write_json(results)
    else:
        streams.write(make_table(results))
        if results.get("groups"):
            streams.write("\n" + make_table(results, "groups"))
    return 0


@contextlib.contextmanager
def captured(quiet: bool) -> Iterator[None]:
    """Send what lm-eval prints to stderr if it is a terminal, and drop it otherwise. Warnings are always written."""
    shown = sys.stderr if sys.stderr.isatty() and not quiet else io.StringIO()
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR if quiet else logging.WARNING)  # the packages set their loggers' levels themselves
    with contextlib.ExitStack() as stack:
        for name in ("llama", "lm_eval"):
            log = logging.getLogger(name)
            stack.callback(setattr, log, "handlers", log.handlers)
            log.handlers = [handler]
        stack.enter_context(contextlib.redirect_stdout(shown))
        stack.enter_context(contextlib.redirect_stderr(shown))
        yield
