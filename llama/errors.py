"""The errors a user can meet. Each message is one line: what was expected, what came, the likely cause, the remedy."""


class LlamaError(Exception):
    """Base of every error this package raises on purpose; the command line prints it and exits with `exit_code`."""

    exit_code = 1


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
