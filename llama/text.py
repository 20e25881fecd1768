"""Llama: a model with its tokenizer; text in, text out."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from . import checks
from .chat import TEMPLATES, encode_chat
from .chat.functions import Tools
from .chat.messages import Message, check_messages, check_tools, continues_answer
from .chat.thoughts import Thoughts, find_thoughts
from .checkpoint import huggingface_write
from .checkpoint.write import Model
from .engine.linears import describe_quantization
from .engine.nonfinite import locate
from .engine.placement import describe_devices
from .errors import ContextLengthError, LlamaError, UsageError
from .generate import Progress, generate
from .generation.answer import Answer, Completion, Job, Piece, Stats, StopText, ThinkingBudget, exclude_until
from .generation.batch import Batch, Ended, PromptScored, Source, Started, TokenEvent
from .generation.session import Session
from .generation.speculative import Draft, make_draft, speculate
from .generation.structured import CallConstraint, after_thought, compile_grammar, forced_call
from .model import Transformer
from .rope import to_layout
from .sampling import LARGEST_SEED, Constraint, SamplingParams, option_names
from .system.temporary import own_temporary, replace
from .tokenizer import Tokenizer, token_ids
from .weights import expected_shapes

__all__ = ["Completion", "Llama", "Piece", "Session", "Stats", "StopText"]

BATCH_SIZE = 16  # answers in progress at once

ALONE = ("draft", "draft_tokens", "session")  # options for a single prompt only
LONGEST_TOKEN = 128  # characters; text longer than this times the context is rejected before it is encoded

Dicts = Sequence[Mapping[str, Any]]  # messages of a chat


class Llama:
    """A model and its tokenizer, created by `llama.load`.

    model          the `Transformer`; its linear layers may be quantized
    tokenizer      the `Tokenizer`
    chat_template  the Jinja source of the chat template, or {name: source} for several (tool_use, default), or None
    chat_format    a built-in chat format that is used in place of the template, such as "llama3", or None; may be set
    template_options  variables of the chat template, such as {"enable_thinking": False}; may be set
    thinking_budget  the thinking_budget of answers whose options give none; None: no limit; may be set
    sampling       sampling options that the checkpoint's generation_config.json asks for; they replace the defaults
    adapters       descriptions of the merged LoRA adapters
    warnings       what a user should know about the checkpoint, one line each

    Methods that generate accept the options of `SamplingParams`, whose defaults `sampling` may replace, and these:

    draft         "ngram", or a smaller Llama or Transformer with the same vocabulary. Generation is faster if the
                  draft predicts the text well; generation/speculative.py explains how
    draft_tokens  the maximum number of drafted tokens per pass
    session       a `Session`, which keeps the KV cache for the next call

    Several threads may use a Llama at once, and each gets the answer that it would get alone. A Session or a Draft
    serves one stream at a time; a second stream raises UsageError.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        chat_template: str | Mapping[str, str] | None = None,
        *,
        chat_format: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        adapters: Sequence[str] = (),
        warnings: Sequence[str] = (),
    ):
        self.model, self.tokenizer, self.chat_template = model, tokenizer, chat_template
        self.chat_format = chat_format
        self.template_options: dict[str, Any] = {}
        self.thinking_budget: int | None = None
        self.sampling = dict(sampling or {})
        self.adapters, self.warnings = tuple(adapters), tuple(warnings)

    def __repr__(self) -> str:
        quantized = describe_quantization(self.model)
        weights = f", {quantized} weights" if quantized else ""
        chat = self.chat_format or ("template" if self.chat_template else "none")
        where = describe_devices(self.model)
        return f"Llama({self.model.extra_repr()}{weights}, {where}, {self.tokenizer}, chat: {chat})"

    @overload
    def generate(self, prompt: str, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompt: Sequence[str], **options: Any) -> list[Completion]: ...
    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        parse_special: bool = False,
        suffix: str | None = None,
        batch_size: int = BATCH_SIZE,
        progress: Progress | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Continue raw text; a begin-of-text id is added if the model was trained with one.

        parse_special=True encodes control strings in the text, such as <|im_end|>, as control tokens. Use it only for
        text that you wrote. Without it, text never becomes a control token.

        With a suffix, a model with infill tokens generates the text between prompt and suffix.

        For a list of prompts, the result is a list of completions, the same as from a call for each prompt. batch_size
        prompts run at once; draft and session are not allowed. The first error ends all of them; its message gives the
        prompt's number. progress gets the numbers of finished and of all prompts; for one prompt, see `stream_ids`.
        """
        checks.instance("progress", progress, Callable | None, "a function")
        if isinstance(prompt, str):
            return _last(self.stream(prompt, parse_special=parse_special, suffix=suffix, progress=progress, **options))
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise UsageError(f"prompt must be a string or a list of strings, got {type(prompt).__name__}")
        if alone := [name for name in ALONE if options.pop(name, None) is not None]:
            raise UsageError(f"{alone[0]} can't be combined with a list of prompts: call generate once for each prompt")
        jobs: list[Job] = []
        for text in prompt:
            with _named(len(jobs), len(prompt)):
                jobs += self.prepare(self.tokenizer.encode_prompt(_text(text), parse_special, suffix), options)
        done: dict[Job, Completion] = {}
        for one, piece in self.answers(jobs, batch_size=batch_size):
            if isinstance(piece, LlamaError):
                with _named(jobs.index(one), len(prompt)):
                    raise piece
            if piece.completion is not None:
                done[one] = piece.completion
                if progress is not None:
                    progress(len(done), len(prompt))
        return [done[one] for one in jobs]

    def stream(
        self, prompt: str, *, parse_special: bool = False, suffix: str | None = None, **options: Any
    ) -> Generator[Piece]:
        """`generate` as a stream of pieces. Their texts, joined, are the completion's text.

        str(piece) is the piece's text: `for piece in llm.stream(prompt): print(piece, end="", flush=True)`.
        """
        return self.stream_ids(self.tokenizer.encode_prompt(_text(prompt), parse_special, suffix), **options)

    def chat(self, messages: str | Dicts, **options: Any) -> Completion:
        """The assistant's answer to messages [{"role": "user", "content": "..."}, ...], or to one text of the user.

        The model's template, or the built-in format named by `chat_format`, formats the messages. If the last message
        is the assistant's, the answer continues it. Besides the options of the class, these are accepted:

        tools        functions that the assistant may call: Python functions, or their JSON schemas. The calls are part
                     of the text; `llama.chat.parse_tool_calls` finds them
        tool_choice  "auto" (default), "none", "required" (the answer is a call), or the name of the function to call
        template_options  further variables of the template, such as {"enable_thinking": False}
        """
        return _last(self.stream_chat(messages, **options))

    def stream_chat(
        self,
        messages: str | Dicts,
        *,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Generator[Piece]:
        """`chat` as a stream of pieces."""
        messages, grammar = _messages(messages), forced_call(tool_choice, check_tools(tools) or [])
        if grammar is not None:
            if any(options.get(name) is not None for name in option_names("grammar")):
                raise UsageError("a tool_choice that requires a call can't be combined with a schema, regex or grammar")
            options["grammar"] = grammar
        tools = None if tool_choice == "none" else check_tools(tools)
        ids = self.encode_chat(messages, tools, template_options, forced=grammar is not None)
        options |= {"continues": continues_answer(messages), "thoughts": self.thoughts(ids, messages), "calls": tools}
        return self.stream_ids(ids, **options)

    def encode_chat(
        self,
        messages: str | Dicts,
        tools: Tools | None = None,
        template_options: Mapping[str, Any] | None = None,
        *,
        forced: bool = False,
    ) -> list[int]:
        """The ids that `chat` feeds for a conversation. They end where the assistant's answer begins or continues."""
        given = checks.instance("template_options", template_options, Mapping | None, "a mapping from names")
        messages = _messages(messages)
        return encode_chat(
            self.tokenizer,
            self.chat_template,
            messages,
            format=self.chat_format,
            tools=tools,
            forced=forced,
            variables={**self.template_options, **(given or {})},
            max_chars=LONGEST_TOKEN * self.model.max_seq_len,
            continues=continues_answer(messages),
        )

    def thoughts(self, ids: Sequence[int], messages: Dicts = ()) -> Thoughts:
        """How the answer to the conversation in `ids` begins, inside a thought or not. Pass it to `stream_ids`."""
        template = TEMPLATES.get(self.chat_format or "", self.chat_template)
        answer = messages[-1]["content"] if continues_answer(messages) else ""
        return find_thoughts(self.tokenizer, template, ids, answer)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model and its tokenizer to a new folder in Hugging Face's format, with the weights as they are now.

        Merged adapters and edited weights are included; quantized weights are dequantized to the model's dtype
        (`llama.quantize` keeps them quantized). Raises UsageError if the path exists or several processes share the
        model, ConfigError if the format can't express the model.
        """
        target, config, shapes = Path(path), self.model.config, expected_shapes(self.model.config)
        if os.path.lexists(target) or self.model.world is not None:
            raise UsageError(f"{target}: save needs a path that does not exist yet, and a model in one process")
        stored = dict(self.model.named_parameters())
        if more := stored.keys() - shapes.keys():  # a new bias, or an output that is no longer tied
            raise UsageError(
                f"{target}: config.json can't express the model's parameters {', '.join(sorted(more))[:200]}"
            )
        dtypes = {name: stored.get(name, self.model.norm.weight).dtype for name in shapes}

        def read(name: str) -> Tensor:
            module, _, kind = name.rpartition(".")
            weight = getattr(self.model.get_submodule(module), kind).detach().to("cpu", dtypes[name])
            return to_layout(name, weight, config.head_dim, self.model.rope.layout, "interleaved")

        template = TEMPLATES.get(self.chat_format or "", self.chat_template)
        model = Model(config, shapes, dtypes, read, self.tokenizer, template, self.sampling)
        with own_temporary(target.parent, ".save") as work:
            (folder := work / target.name).mkdir()
            huggingface_write.write(folder, model)
            replace(folder, target)

    def stream_ids(
        self,
        prompt: Sequence[int],
        *,
        session: Session | None = None,
        draft: str | Llama | Transformer | Draft | None = None,
        draft_tokens: int | None = None,
        continues: bool = True,
        progress: Progress | None = None,
        **options: Any,
    ) -> Generator[Piece]:
        """Stream the pieces of text that follow the ids of a prompt; `stream` and `stream_chat` use it.

        session    as in the class. `draft` may also be a speculative.Draft, which keeps a cache of its own
        continues  True (default): the answer continues the prompt's text. False: the answer is a text of its own, as in
                   a chat, and the space that SentencePiece adds before every text is left out
        thoughts   the result of `Llama.thoughts`, if the answer may begin with a thought
        progress   called while the prompt is processed: progress(number of tokens done, number of all these tokens)

        Invalid options raise UsageError here, not at the first piece.
        """
        checks.instance("session", session, Session | None, "a Session")
        checks.instance("progress", progress, Callable | None, "a function")
        guesses = make_draft(draft.model if isinstance(draft, Llama) else draft, draft_tokens)
        (prepared,) = self.prepare(prompt, {"continues": continues, **options})
        if prepared.params.prompt_logprobs and (session, guesses, progress) != (None, None, None):
            raise UsageError("prompt_logprobs can't be combined with a session, a draft or progress: leave these out")
        return self._stream(prepared, session, guesses, progress)

    def _stream(
        self, job: Job, session: Session | None, draft: Draft | None, progress: Progress | None
    ) -> Generator[Piece]:
        if job.params.prompt_logprobs:  # only a batch computes the prompt's
            for _, piece in self.answers([job], batch_size=1):
                if isinstance(piece, LlamaError):
                    raise piece
                yield piece
            return
        ids = job.ids
        cache = None if session is None else session.reuse(self.model, ids, self.tokenizer)
        answer = Answer(self.tokenizer, job, 0 if cache is None else cache.length)
        plain = partial(generate, diagnose=partial(locate, self.model))
        tokens = (plain if draft is None else partial(speculate, draft=draft))(
            self.model,
            ids,
            job.params,
            stop_ids=self.tokenizer.stop_ids,
            n_vocab=self.tokenizer.n_vocab,
            cache=cache,
            constraint=job.constraint,
            progress=progress,
        )
        nonfinite = False
        try:
            for token in tokens:
                if (fed := answer.feed(token)) and (fed.text or fed.reasoning):
                    yield fed
                if answer.done:
                    break
        except Exception as error:
            nonfinite = not isinstance(error, UsageError | ContextLengthError)  # NaN can cause any other error
            raise
        finally:
            tokens.close()  # type: ignore[attr-defined]
            if session is not None:
                session.give_back([*ids, *answer.ids], nonfinite)
        yield answer.end() if draft is None else answer.end(draft.drafted, draft.accepted)

    def prepare(self, prompt: Sequence[int], options: Mapping[str, Any], n: int = 1) -> list[Job]:
        """Prepare n jobs for `answers`, with the seeds seed, seed + 1, ... It accepts the class's options but draft.

        The option calls has schemas of functions, which limit the calls' arguments. Raises UsageError for a bad option.
        """
        ids, continues = token_ids(prompt), checks.boolean("continues", options.get("continues", True))
        thoughts = checks.instance("thoughts", options.get("thoughts", Thoughts()), Thoughts, "from Llama.thoughts")
        given = {name: value for name, value in options.items() if name not in ("continues", "thoughts", "calls")}
        checks.known_options(given, SamplingParams, "llama.SamplingParams")
        params = SamplingParams(**{**self.sampling, **given})
        sources = {name: source for name in option_names("grammar") if (source := getattr(params, name)) is not None}
        grammar = compile_grammar(self.tokenizer, *sources.popitem()) if sources else None
        grammar = grammar and after_thought(grammar, self.tokenizer, thoughts)
        budget = self.thinking_budget if params.thinking_budget is None else params.thinking_budget
        if params.thinking_budget is not None and not thoughts.closing:
            raise UsageError("thinking_budget needs a chat whose template has marks such as </think>: leave it out")
        before, tools = ids if continues else (), options.get("calls") if grammar is None else None
        if shortest := 2**31 if params.ignore_eos else params.min_tokens:
            known = sum(id < self.tokenizer.n_vocab for id in ids)  # the ids that processors see
            ends = [id for id in (*self.tokenizer.stop_ids, *params.stop_token_ids) if id < self.tokenizer.n_vocab]
            params = dataclasses.replace(params, processors=[*params.processors, exclude_until(known + shortest, ends)])
        seed = secrets.randbelow(LARGEST_SEED) if params.seed is None else params.seed
        jobs = []
        for i in range(n):
            seeded = dataclasses.replace(params, seed=(seed + i) % (LARGEST_SEED + 1))
            constraint: Constraint | None = None if grammar is None else grammar.constraint(before)
            if tools:
                constraint = CallConstraint(self.tokenizer, tools, thoughts, before)
            if budget is not None and thoughts.state != "closed":
                constraint = ThinkingBudget(self.tokenizer, thoughts, budget, constraint)
            jobs.append(Job(ids, seeded, constraint, continues=continues, thoughts=thoughts))
        return jobs

    def answers(
        self,
        jobs: Iterable[Job] | Source,
        *,
        batch_size: int = BATCH_SIZE,
        between: Callable[[], object] = lambda: None,
    ) -> Iterator[tuple[Job, Piece | LlamaError]]:
        """Answer many prompts at once, each as `stream_ids` does. Yields (a job, the next piece of its answer).

        jobs come from `prepare`, in an iterable or a Source, such as a queue. At most batch_size answers are in
        progress; when one ends, the next job is read and uses its row (generation/batch.py). There is a piece for each
        token, so its text may be empty. A job that can't be run, or whose logits are not finite, gets its error in
        place of the last piece. Other threads may put jobs into a queue while the answers are read, and None at the
        end. Setting job.cancelled ends an answer before its next token. `between` is called between passes of the
        model.
        """
        stop_ids, n_vocab = self.tokenizer.stop_ids, self.tokenizer.n_vocab
        running: dict[int, Answer] = {}  # by the number of the request
        batch = Batch(self.model, jobs, slots=batch_size, stop_ids=stop_ids, n_vocab=n_vocab, between=between)
        for event in batch:
            if isinstance(event, Started):
                running[event.number] = Answer(self.tokenizer, event.request, event.cached)
                continue
            answer = running[event.number]
            match event:
                case PromptScored():
                    answer.prompt = event.tokens
                    yield answer.job, Piece("", prompt=event.tokens)
                case TokenEvent():
                    fed = answer.feed(event.token)
                    if answer.done:
                        answer.job.cancelled.set()
                    if fed is not None:
                        yield answer.job, fed
                case Ended():
                    del running[event.number]
                    yield answer.job, answer.end() if event.error is None else event.error


def _messages(messages: str | Dicts) -> list[Message]:
    return check_messages([{"role": "user", "content": messages}] if isinstance(messages, str) else messages)


def _text(prompt: object) -> str:
    """The prompt, if it is a string. Raises UsageError if it is not, for example if it is a list of messages."""
    return checks.instance("prompt", prompt, str, "a string (chat and stream_chat take messages)")


def _last(pieces: Iterable[Piece]) -> Completion:
    """The completion, which is in the last piece."""
    (completion,) = (piece.completion for piece in pieces if piece.completion is not None)
    return completion


@contextmanager
def _named(number: int, count: int) -> Iterator[None]:
    """Prefix errors with the prompt's number if there are several. `number` counts from 0, the message from 1."""
    try:
        yield
    except LlamaError as error:
        if count == 1:
            raise
        raise type(error)(f"prompt {number + 1} of {count}: {error}") from error
