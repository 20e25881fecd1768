"""The errors this package raises. Each message is one line: what was expected, what was found, cause, remedy."""


def one_line(text: str) -> str:
    """Replace line breaks and tabs with spaces, and write other unprintable characters as escapes."""
    return "".join(c if c.isprintable() else " " if c in "\r\n\t" else repr(c)[1:-1] for c in text)


class LlamaError(Exception):
    """Base class of the errors this package raises on purpose. The command prints them and exits with `exit_code`.

    The message is always one printable line, because parts of it may come from a file and it may go to a terminal.
    """

    exit_code = 1

    def __str__(self) -> str:
        return one_line(super().__str__())


class UsageError(LlamaError, ValueError):
    """An argument has the wrong type or is out of range."""

    exit_code = 2


class ConfigError(LlamaError, ValueError):
    """An architecture contradicts itself, or this package does not support it."""


class CheckpointError(LlamaError):
    """A checkpoint is damaged, incomplete or of another format than expected."""


class DamagedError(CheckpointError):
    """A file contradicts itself or is truncated. `args` lack the remedy, since pickle makes a new error from `args`."""

    def __str__(self) -> str:
        return f"{super().__str__()}; the file is damaged or incomplete, download it again"


class TokenizerError(LlamaError, ValueError):
    """A vocabulary is damaged, or a text or id cannot be tokenized."""


class TemplateError(LlamaError, ValueError):
    """A chat template is missing or broken, or the sandbox refused it."""


class ContextLengthError(LlamaError, ValueError):
    """The tokens do not fit into the context."""


class MemoryLimitError(LlamaError, MemoryError):
    """A run needs more memory than is free."""


class NumericalError(LlamaError, ArithmeticError):
    """The model computed a number that is not finite."""
