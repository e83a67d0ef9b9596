"""Every exception the engine raises on purpose.

EngineError
├── ModelFileError      the GGUF file is unreadable, damaged, foreign or not supported (exit code 2)
├── DoesNotFit          the model, context or batch does not fit the memory there is (exit code 2)
├── ConfigError         a setting contradicts the model or another setting (exit code 2)
├── HandshakeError      service and engine are not of the same build, or the peer spoke out of turn
└── EngineDied          the engine process ended or stopped answering

Each message is one line that names the thing, the place and, where there is one, the mend.
"""


class EngineError(Exception):
    """Root of the tree; never raised itself."""


class ModelFileError(EngineError):
    """`path: field: what is wrong` for a GGUF file that cannot be served."""

    def __init__(self, path: str, field: str, problem: str) -> None:
        super().__init__(f"{path}: {field}: {problem}")
        self.path = path
        self.field = field
        self.problem = problem


class DoesNotFit(EngineError):
    """More memory is needed than there is; the message carries both figures and the mend."""


class ConfigError(EngineError):
    """A setting that cannot be honoured, named as the user wrote it."""


class HandshakeError(EngineError):
    """The two processes do not agree on build or message schema."""


class EngineDied(EngineError):
    """The engine process is gone; running requests are replayed from their records."""
