"""Two threads even on one core: results may not depend on the split."""

from collections.abc import Iterator

import numpy as np
import pytest

from engine.ops.cpu.compiled import start_threads


@pytest.fixture(scope="session", autouse=True)
def threads() -> int:
    return min(2, start_threads())


@pytest.fixture
def rng() -> Iterator[np.random.Generator]:
    return np.random.default_rng(7)
