"""Suggestions for unknown options: typing errors, and the option names of other programs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence

from .. import spelling

CUTOFF = 0.8  # similarity of difflib; below it, suggestions are mostly other options

# Options of llama.cpp, ollama, vLLM, transformers, mlx-lm and litgpt, by the option of this program
ALSO_CALLED = {
    "--max-new-tokens": "--n-predict --predict --num-predict --max-tokens --max-completion-tokens --max-length",
    "--max-seq-len": "-c --ctx-size --n-ctx --num-ctx --max-model-len --max-kv-size --context-length",
    "--gpu-layers": "-ngl --n-gpu-layers --num-gpu",
    "--threads": "-t --n-threads --num-thread --num-threads",
    "--seed": "-s --random-seed",
    "--repetition-penalty": "--repeat-penalty",
    "--model": "-hf --hf-repo --model-path --model-name --model-id --model-name-or-path --pretrained",
    "--adapter": "--lora --lora-path --lora-modules --adapter-path",
    "--draft": "-md --model-draft --draft-model --speculative-model --assistant-model",
    "--draft-tokens": "--draft-max --draft-n --num-draft-tokens --num-speculative-tokens --num-assistant-tokens",
    "--stop": "-r --reverse-prompt --stop-strings --stop-sequences --stop-words",
    "--system": "-sys --sys-prompt --system-prompt --system-message",
    "--raw": "-no-cnv --no-conversation --ignore-chat-template --no-chat-template",
    "--chat-format": "--chat-template",
    "--file": "--prompt-file --input-file",
    "--kv-cache": "-ctk -ctv --cache-type-k --cache-type-v --kv-cache-dtype --kv-bits",
    "--load-session": "--prompt-cache --prompt-cache-file",
    "--rope-theta": "--rope-freq-base",
    "--rope-factor": "--rope-scale",
    "--tensor-parallel": "-tp --tp --tensor-parallel-size",
    "--pipeline-parallel": "-pp --pp --pipeline-parallel-size",
    "--quantize": "--quantization --load-in-4bit --load-in-8bit",
    "--dtype": "--torch-dtype --precision",
    "--device": "--device-map",
    "--quiet": "--log-disable --silent",
}
OURS = {theirs: ours for ours, names in ALSO_CALLED.items() for theirs in names.split()}


def long_form(option: str) -> str:
    """An option in its long form, without a value: '-top_p=1' -> '--top-p'."""
    return "--" + option.partition("=")[0].lstrip("-").replace("_", "-").lower()


def exact(option: str, known: Collection[str]) -> str | None:
    """The option of `known` that `option` is another spelling of, or another program's name for; None if none is."""
    for name in (long_form(option), OURS.get(option.partition("=")[0], ""), OURS.get(long_form(option), "")):
        if name in known:
            return name
    return None


def suggest(option: str, known: Collection[str]) -> str | None:
    """The option of `known` that was probably meant, or None."""
    import difflib

    close = difflib.get_close_matches(long_form(option), [name for name in known if len(name) > 2], 1, CUTOFF)
    return exact(option, known) or next(iter(close), None)


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of the commands, by name."""
    (action,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    commands: dict[str, argparse.ArgumentParser] = action.choices
    return commands


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a parser, without those of its commands."""
    return set(parser._option_string_actions)


def unrecognized(words: Sequence[str], known: Collection[str]) -> str | None:
    """What to report about arguments that argparse does not know; None if no option can be suggested."""
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    meant = [name for option in options if (name := suggest(option, known))]
    if not meant:
        return None
    return f"unrecognized arguments: {', '.join(options)}; did you mean {' and '.join(dict.fromkeys(meant))}?"


def check(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Report mistakes for which argparse's own message is misleading.

    These are options such as -ngl, which argparse reads as -n with the value gl, an option before the command, and a
    misspelled command.
    """
    commands, first = commands_of(parser), next(iter(words), "").partition("=")[0]
    if first.startswith("-") and first not in options_of(parser):
        if any(first in options_of(command) for command in commands.values()):
            parser.error(f"{first} belongs after a command, as in: clearllama generate {first} ...")
        if message := unrecognized([first], options_of(parser)):
            parser.error(message)
    elif first in commands:
        known = options_of(commands[first])
        for word in words[1 : words.index("--") if "--" in words else None]:
            long = re.fullmatch(r"-[A-Za-z][A-Za-z_-]+(=.*)?", word, re.DOTALL)
            if long and exact(word, known):
                commands[first].error(f"{unrecognized([word], known)}")
    elif first and (near := spelling.nearest(first, commands, 1, CUTOFF)):
        parser.error(f"unknown command {first!r:.80}; {spelling.did_you_mean(near).rstrip()}")
