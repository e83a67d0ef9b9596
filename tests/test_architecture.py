"""The import rules, the sizes and the names of the tree, as tests."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("app", "engine", "watchdog")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

SERVICE_MAY_IMPORT = {
    "engine.messages",
    "engine.errors",
    "engine.config",
    "engine.client",
    "engine.fake",
    "engine.plan",
    "engine.gguf",
}
"""What `app` may import of the engine; whatever these pull in must stay free of CuPy and numba."""

CUDA_HOMES = ("engine/ops/cuda", "engine/memory", "engine/kv_cache/storage.py", "engine/worker.py")
CUDA_MODULES = {"cupy", "cupy_backends", "cuda"}
OWNED_MODULES = {
    "pynvml": ("watchdog/nvml.py",),
    "prometheus_client": ("app/metrics.py", "app/ops", "watchdog/metrics.py"),
    "numba": ("engine/ops/cpu",),
    "tokenizers": ("app/text",),
    "jinja2": ("app/text",),
    "rich": ("app/vram_command.py",),
}
LONG_FILES: dict[str, str] = {}
"""Files over 400 lines, each with its reason."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file; `from a import b` gives both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def within(name: str, roots: set[str]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


@pytest.mark.parametrize("package", PACKAGES)
def test_layers(package: str) -> None:
    others = {"app": {"app"}, "engine": {"app", "watchdog"}, "watchdog": {"app", "engine"}}[package]
    edges = []
    for path in (ROOT / package).rglob("*.py"):
        for line, name in imports(path):
            if package == "app":
                broken = within(name, {"engine"}) and name != "engine" and not within(name, SERVICE_MAY_IMPORT)
            else:
                broken = within(name, others)
            if broken:
                edges.append(f"{relative(path)}:{line} imports {name}")
    assert not edges, "\n".join(edges)


def test_hardware_and_libraries_have_one_home() -> None:
    edges = []
    for path in SOURCES:
        name_of_file = relative(path)
        for line, name in imports(path):
            root = name.split(".")[0]
            homes = CUDA_HOMES if root in CUDA_MODULES else OWNED_MODULES.get(root)
            if homes is not None and not name_of_file.startswith(homes):
                edges.append(f"{name_of_file}:{line} imports {name}; its home is {', '.join(homes)}")
    assert not edges, "\n".join(edges)


def test_service_side_never_loads_numba_or_cupy() -> None:
    program = (
        "import sys, importlib\n"
        f"for name in {sorted(SERVICE_MAY_IMPORT)!r} + ['app.factory']:\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        if error.name != name: raise\n"
        "loaded = {m.split('.')[0] for m in sys.modules} & {'numba', 'llvmlite', 'cupy', 'cuda'}\n"
        "sys.exit(f'loaded: {sorted(loaded)}' if loaded else 0)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_only_settings_reads_the_environment() -> None:
    readers = []
    for path in SOURCES:
        if relative(path) == "app/settings.py":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(r"\bos\.(environ\.get|getenv)\b|\benviron\[", line):
                readers.append(f"{relative(path)}:{number}")
    assert not readers, f"read app.settings instead: {readers}"


def test_sizes() -> None:
    found = []
    for path in SOURCES + sorted((ROOT / "benchmarks").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        if lines > 400 and relative(path) not in LONG_FILES:
            found.append(f"{relative(path)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 80:
                    found.append(f"{relative(path)}:{node.lineno} {node.name}: {length} lines")
    assert not found, "\n".join(found)


def test_names_say_what_a_thing_is() -> None:
    bad = [relative(path) for path in SOURCES if re.search(r"util|helper|manager|misc|common", path.stem)]
    assert not bad
    classes = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Manager", "Helper", "Util", "Utils"))
    ]
    assert not classes


def test_foreign_watchdog_package_stays_out() -> None:
    """PyPI's `watchdog` (file watching) would shadow ours; nothing we depend on may bring it in."""
    installed = {dist.metadata["Name"].lower() for dist in importlib.metadata.distributions()}
    assert "watchdog" not in installed


def test_children_are_started_away_from_the_users_folder(tmp_path: Path) -> None:
    """A folder of the user's that is named engine/ is never taken for ours."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit('the wrong engine')\n")
    program = "import engine.messages, sys; print(engine.messages.__file__)"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "engine" / "messages.py"


def test_every_child_is_started_with_safe_path() -> None:
    starts = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"sys\.executable", text):
            if '"-P"' not in text[match.start() : match.start() + 60]:
                starts.append(f"{relative(path)}:{text.count(chr(10), 0, match.start()) + 1}")
    assert not starts, f"sys.executable without -P: {starts}"
