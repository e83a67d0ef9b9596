"""The one place where CUDA C++ becomes machine code: NVRTC, a cache on disk, and a look at what came out.

`compile_unit` needs no GPU. The key of the cache is the hash of the source and of every header it includes, the
macros, the architecture, the options and NVRTC's version. A kernel that spills registers or keeps a stack frame is
refused: the driver would set memory aside for it on every multiprocessor at its first launch, out of the room that
the plan has given away.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

KERNELS = Path(__file__).parent / "kernels"

_OPTIONS = ("-std=c++17", "-default-device", "-fmad=false", "--ptxas-options=-v")
"""No fused multiply-add behind our back: whether one is made could differ between two rows of one kernel."""
_INCLUDE = re.compile(r'^#include "([\w.]+)"', re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


class CompileError(RuntimeError):
    """NVRTC refused a source, or a kernel needs local memory. The message is the compiler's."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One compilation: a `.cu` file under kernels/ and its macros."""

    source: str
    defines: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, source: str, defines: Mapping[str, object] | None = None) -> "Unit":
        return cls(source, tuple(sorted((name, str(value)) for name, value in (defines or {}).items())))


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says of one kernel."""

    registers: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code of one unit; `kernels` names every `extern "C"` kernel in it."""

    cubin: bytes
    kernels: dict[str, Resources]


def nvrtc_version() -> str:
    """For example "13.0". Raises CompileError when the library cannot be loaded."""
    try:
        code, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:
        raise CompileError(f"NVRTC cannot be loaded: {error}; install the cuda12 or cuda13 extra") from error
    _check(code)
    return f"{major}.{minor}"


def compile_unit(unit: Unit, arch: int, cache_dir: Path | None = None) -> Compiled:
    """Machine code of `unit` for compute capability `arch` (for example 90), from the cache when it is there.

    Raises CompileError: the source does not compile, or a kernel spills or has a stack frame.
    """
    stored = cache_dir / f"{_key(unit, arch)}.cubin" if cache_dir else None
    if stored is not None and stored.is_file():
        return _read(stored)
    compiled = _compile(unit, arch)
    if stored is not None:
        _write(stored, compiled)
    return compiled


@cache
def _sources(folder: Path, name: str) -> tuple[Path, ...]:
    """A source and the headers of its own folder that it includes, at any depth."""
    found = {folder / name}
    for included in _INCLUDE.findall((folder / name).read_text(encoding="utf-8")):
        found.update(_sources(folder, included))
    return tuple(sorted(found))


def _key(unit: Unit, arch: int) -> str:
    digest = hashlib.sha256(repr((unit, arch, nvrtc_version(), _OPTIONS)).encode())
    for path in _sources(KERNELS, unit.source):
        digest.update(path.name.encode() + path.read_bytes())
    return f"{Path(unit.source).stem}-sm{arch}-{digest.hexdigest()[:24]}"


def _compile(unit: Unit, arch: int) -> Compiled:
    path = KERNELS / unit.source
    options = [*_OPTIONS, f"-arch=sm_{arch}", f"-I{KERNELS}", *(f"-D{name}={value}" for name, value in unit.defines)]
    program = _result(nvrtc.nvrtcCreateProgram(path.read_bytes(), str(path).encode(), 0, None, None))
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = (
            _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace").rstrip("\0")
        )
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{unit.source} {dict(unit.defines)} for sm_{arch}:\n{log}")
        compiled = Compiled(_text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), _resources(log))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    for name, used in compiled.kernels.items():
        if used.stack_bytes or used.spill_bytes:
            raise CompileError(f"{unit.source} {dict(unit.defines)} for sm_{arch}: {name} needs local memory: {used}")
    return compiled


def _resources(log: str) -> dict[str, Resources]:
    kernels: dict[str, Resources] = {}
    name, frame = "", (0, 0, 0)
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name, frame = entry[1], (0, 0, 0)
        elif found := _FRAME.search(line):
            frame = int(found[1]), int(found[2]), int(found[3])
        elif name and (used := _REGISTERS.search(line)):
            kernels[name] = Resources(int(used[1]), frame[0], frame[1] + frame[2])
            name = ""
    return kernels


def _read(stored: Path) -> Compiled:
    head, _, cubin = stored.read_bytes().partition(b"\n")
    return Compiled(cubin, {name: Resources(**used) for name, used in json.loads(head).items()})


def _write(stored: Path, compiled: Compiled) -> None:
    """Whole or not at all: other engines may read the same folder."""
    stored.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({name: asdict(used) for name, used in compiled.kernels.items()}).encode()
    descriptor, name = tempfile.mkstemp(dir=stored.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(head + b"\n" + compiled.cubin)
    Path(name).replace(stored)


def _text(size_of: Any, read: Any, program: Any) -> bytes:
    buffer = b" " * int(_result(size_of(program)))
    _check(read(program, buffer)[0])
    return buffer


def _result(answer: tuple[Any, ...]) -> Any:
    _check(answer[0])
    return answer[1]


def _check(code: Any) -> None:
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {nvrtc.nvrtcGetErrorString(code)[1].decode()}")
