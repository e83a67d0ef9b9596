"""Identity of the code that a process runs, so that two processes notice when they do not run the same."""

import hashlib
from pathlib import Path

_ROOT = Path(__file__).parent
_SUFFIXES = {".py", ".cu", ".cuh"}


def build_id(root: Path = _ROOT) -> str:
    """SHA-256 over names and contents of every source file under `root`, the first 16 hex digits.

    The service takes it once, as it starts; an engine takes it as it starts. They differ when the files were upgraded
    in between, and then the messages, the arithmetic or both may have changed. Only `engine/` counts: it holds
    everything that the two share, so an edit elsewhere does not keep a service from respawning its engine.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]
