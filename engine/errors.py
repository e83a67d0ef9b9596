"""Every exception the engine raises on purpose.

EngineError
├── ModelFileError      the GGUF file is unreadable, damaged, foreign or not supported (exit code 2)
├── DoesNotFit          the model, context or batch does not fit the memory there is (exit code 2)
├── OutOfMemory         a device refused one allocation; what was held before is untouched
├── ConfigError         a setting contradicts the model or another setting (exit code 2)
├── HandshakeError      service and engine are not of the same build, or the peer spoke out of turn
├── LoadRefused         seen by the service: its engine refused to load, for one of the reasons above
├── EngineDied          seen by the service: the engine process ended or stopped answering
└── ServiceGone         seen by the engine: the service ended or stopped reading (exit code 1)

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


class OutOfMemory(EngineError):
    """One allocation was refused by its device; nothing was taken, and what is held stays as it was."""

    def __init__(self, device: int, owner: str, asked: int, free: int) -> None:
        super().__init__(f"device {device}: {owner} asked for {asked} bytes, {free} are free")
        self.device = device
        self.owner = owner
        self.asked = asked
        self.free = free


class ConfigError(EngineError):
    """A setting that cannot be honoured, named as the user wrote it."""


class HandshakeError(EngineError):
    """The two processes do not agree on build or message schema."""


class LoadRefused(EngineError):
    """What a child engine said instead of Ready; `kind` is the class name of its error, the message its one line."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EngineDied(EngineError):
    """The engine process is gone; running requests are replayed from their records."""


class ServiceGone(EngineError):
    """Nobody is left to work for."""
