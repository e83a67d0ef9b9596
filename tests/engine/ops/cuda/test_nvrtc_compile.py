"""Every kernel compiles, in every instantiation, for the H200's architecture, and one format's for the others; none
spills.

Needs NVRTC and no GPU. `compile_unit` itself refuses a kernel with local memory, which the last test shows.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("cuda") is None or find_spec("cupy") is None:
    pytest.skip("needs NVRTC, cuda-bindings and CuPy (extra cuda12 or cuda13)", allow_module_level=True)

from engine.ops.cuda import compile as compiler
from engine.ops.cuda.compile import CompileError, Unit, compile_unit
from engine.ops.cuda.layout import FORMATS, QuantType
from engine.ops.cuda.units import all_units

pytestmark = pytest.mark.timeout(900)
OTHERS = (80, 86, 89, 120)


def _problem(job: tuple[Unit, int]) -> str | None:
    try:
        compiled = compile_unit(*job)
    except CompileError as error:
        return str(error)
    return None if compiled.kernels else f"{job}: no kernel found in the compiler's report"


def _problems(jobs: list[tuple[Unit, int]]) -> list[str]:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return [problem for problem in pool.map(_problem, jobs) if problem]


def test_nvrtc_every_instantiation_for_sm_90() -> None:
    problems = _problems([(unit, 90) for unit in all_units()])
    assert not problems, "\n\n".join(problems)


def test_nvrtc_one_of_each_kernel_for_the_other_architectures() -> None:
    one_format = FORMATS[QuantType.Q4_K].defines().items()
    units = {
        unit.source: unit
        for unit in all_units()
        if "FMT_BITS" not in dict(unit.defines) or dict(unit.defines).items() >= {(k, str(v)) for k, v in one_format}
    }
    problems = _problems([(unit, arch) for arch in OTHERS for unit in units.values()])
    assert not problems, "\n\n".join(problems)


def test_nvrtc_refuses_a_kernel_with_a_stack_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "int a[64]; for (int i = 0; i < 999; i++) a[p[i] & 63] = i; p[0] = a[p[1] & 63];"
    source = f'extern "C" __global__ void hog(int* p) {{ {body} }}'
    (tmp_path / "hog.cu").write_text(source)
    monkeypatch.setattr(compiler, "KERNELS", tmp_path)
    with pytest.raises(CompileError, match="hog needs local memory"):
        compile_unit(Unit.of("hog.cu"), 90)


def test_nvrtc_errors_name_the_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.cu").write_text("\n\nnonsense;\n")
    monkeypatch.setattr(compiler, "KERNELS", tmp_path)
    with pytest.raises(CompileError, match=r"wrong\.cu\(3\)"):
        compile_unit(Unit.of("wrong.cu"), 90)


def test_nvrtc_cache_holds_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = next(unit for unit in all_units() if unit.source == "silu_mul.cu")
    first = compile_unit(unit, 90, tmp_path)
    monkeypatch.setattr(compiler, "_compile", None)  # a second compilation would fail
    assert compile_unit(unit, 90, tmp_path) == first
    assert next(tmp_path.iterdir()).name.startswith("silu_mul-sm90-")
