"""The core is pure: it reads no clock, no file, no device and no environment, so a trace replays the same anywhere."""

import ast
from pathlib import Path

import pytest

import watchdog

FOLDER = Path(watchdog.__file__).parent
CORE = (
    "snapshot",
    "config",
    "floors",
    "idle_floor",
    "robust",
    "shape",
    "trend",
    "actions",
    "ladder",
    "state",
    "sense",
    "reload_rules",
    "table",
    "policy",
    "watch",
)
ALLOWED = {"bisect", "collections", "dataclasses", "enum", "math", "numpy", "typing"}


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_only_itself_and_arithmetic(name: str) -> None:
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= ALLOWED
        elif isinstance(node, ast.ImportFrom):
            package, _, module = (node.module or "").partition(".")
            assert module in CORE if package == "watchdog" else package in ALLOWED, f"{name} imports {node.module}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input", "eval", "exec"}
