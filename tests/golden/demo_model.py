"""Where the demo model lies on this machine; `ullage serve` fetches it, tests do not."""

import os
from pathlib import Path

import pytest

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model() -> str:
    """Path of the file; skips the test when it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ullage"
    path = Path(os.environ.get("ULLAGE_DEMO_MODEL") or cache / "models" / NAME)
    if not path.is_file():
        pytest.skip(f"the demo model is not at {path}: `make serve` fetches it, ULLAGE_DEMO_MODEL names another place")
    return str(path)
