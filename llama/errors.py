"""The errors a user can meet. Each message is one line: what was expected, what came, the likely cause, the remedy."""


def one_line(text: str) -> str:
    """A text without line breaks and control characters; what can't be printed is written as in Python's source."""
    return "".join(c if c.isprintable() else " " if c in "\r\n\t" else repr(c)[1:-1] for c in text)


class LlamaError(Exception):
    """Base of every error this package raises on purpose; the command line prints it and exits with `exit_code`.

    Its text is one printable line, whatever a file put into it: it may end up in a terminal or a log.
    """

    exit_code = 1

    def __str__(self) -> str:
        return one_line(super().__str__())


class UsageError(LlamaError, ValueError):
    """An argument is outside its range or of the wrong kind."""

    exit_code = 2


class ConfigError(LlamaError, ValueError):
    """The description of an architecture contradicts itself or is not one this package can run."""


class CheckpointError(LlamaError):
    """A file or folder of weights is damaged, incomplete, or not what it claims to be."""


class TokenizerError(LlamaError, ValueError):
    """A vocabulary is damaged, or a text or id cannot be tokenized."""


class TemplateError(LlamaError, ValueError):
    """A chat template is missing, broken, or refused by the sandbox."""


class ContextLengthError(LlamaError, ValueError):
    """The tokens do not fit into the context."""


class ParallelError(LlamaError, RuntimeError):
    """A process that runs a part of the model is gone or out of step, so none of them can go on."""


class MemoryLimitError(LlamaError, MemoryError):
    """A run would take more memory than is free."""


class NumericalError(LlamaError, ArithmeticError):
    """The model produced a number that is not finite."""
