"""The state folder of one instance: its lock, and the key of the operator."""

import fcntl
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from engine.errors import ConfigError

ADMIN_KEY_FILE = "admin.key"
OPS_FILE = "ops.json"


class StateFolder:
    """A folder that belongs to one running service. Raises ConfigError when it cannot, or another one has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--state-dir {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"--state-dir {path}: another ullage is running with it") from error

    def admin_key(self) -> tuple[Path, str]:
        """The key for /admin and the 0600 file it is in; made on the first start and kept over later ones."""
        path = self.path / ADMIN_KEY_FILE
        if not path.exists():
            self._write_private(path, secrets.token_urlsafe(32) + "\n")
        path.chmod(0o600)
        return path, read_keys(path, "--state-dir")[0]

    def tell_ops(self, url: str, hosts: Sequence[str]) -> None:
        """Where the ops listener is, and by which name it answers: for the commands that ask it."""
        address = {"url": url, "host": hosts[0] if hosts else ""}
        self._write_private(self.path / OPS_FILE, json.dumps(address) + "\n")

    def _write_private(self, path: Path, text: str) -> None:
        """Whole or not at all, and never readable by others, not even for a moment."""
        draft = path.with_suffix(".new")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
        draft.rename(path)

    def close(self) -> None:
        os.close(self._lock)


def read_keys(path: Path, written: str) -> list[str]:
    """One key a line; blank lines and those that begin with # do not count. Raises ConfigError naming the line."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise ConfigError(f"{written} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{written} {path}: is not plain ASCII text") from error
    keys = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not key.isprintable() or " " in key:
            raise ConfigError(f"{written} {path}: line {number}: a key has no spaces or control characters")
        keys.append(key)
    if not keys:
        raise ConfigError(f"{written} {path}: holds no key")
    return keys
