"""Where the golden cases lie: the committed subset, or the full set that the variable GOLDEN_DIR names."""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

COMMITTED = Path(__file__).parent / "data"
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")


class GoldenCase(NamedTuple):
    """One tiny model with its reference logits; README.md beside this file says how to read them."""

    name: str
    path: Path
    manifest: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.path / "model.gguf"

    @property
    def logits(self) -> Path:
        return self.path / "logits.npz"


def golden_dir() -> Path:
    """Folder with models/, tokenizer/ and smollm2/."""
    return Path(os.environ.get("GOLDEN_DIR") or COMMITTED)


def golden_cases(archs: Collection[str] = ARCHITECTURES) -> list[GoldenCase]:
    """Every case whose GGUF architecture is one of `archs`, by name. None at all is an error, not an empty run."""
    cases = [_case(folder) for folder in sorted((golden_dir() / "models").iterdir()) if folder.is_dir()]
    chosen = [case for case in cases if case.manifest["arch"] in archs]
    if not chosen:
        raise FileNotFoundError(f"no golden case of {', '.join(archs)} under {golden_dir()}")
    return chosen


def _case(folder: Path) -> GoldenCase:
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return GoldenCase(folder.name, folder, manifest)
