"""These tests need an NVIDIA GPU, CuPy and cuda-bindings; without them each is skipped with the reason."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def _missing() -> str | None:
    for module in ("cupy", "cuda.bindings"):
        if find_spec(module.split(".")[0]) is None:
            return f"{module} is not installed (extra cuda12 or cuda13)"
    import cupy as cp

    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        return f"no GPU: {error}"
    return None if count else "no GPU"


REASON = _missing()


class _Skipped(pytest.Module):
    """A module of this folder where its imports would fail: one skip, with the reason."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"needs an NVIDIA GPU: {REASON}")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _Skipped.from_parent(parent, path=module_path) if REASON else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def kernels() -> Any:
    from engine.ops.cuda.launch import Kernels

    cache = os.environ.get("ULLAGE_CACHE_DIR")
    return Kernels(0, Path(cache) / "kernels" if cache else None)


@pytest.fixture
def stream() -> Iterator[Any]:
    import cupy as cp

    with cp.cuda.Stream(non_blocking=True) as stream:
        yield stream
        stream.synchronize()
