"""Where NVML never worked the engine's figures are read, labelled, and only while they are new."""

import pytest

from watchdog.attribution import Ours
from watchdog.runtime import RuntimeFigure, RuntimeSource
from watchdog.sampler import Sampler
from watchdog.snapshot import GIB
from watchdog.source import Card, SourceError


def test_figures_are_labelled_and_old_ones_refused() -> None:
    figures: dict[str, RuntimeFigure] = {}
    now = [100.0]
    sampler = Sampler(RuntimeSource([Card("GPU-a", "card")], figures.get), lambda: now[0])
    sampler.attribute(Ours(frozenset({7}), "nvml"))
    assert "has told no memory figure" in str(sampler.sample().devices[0].health.error)
    figures["GPU-a"] = RuntimeFigure(at=100.5, total=8 * GIB, free=3 * GIB)
    now[0] = 102.0
    shown = sampler.sample().devices[0]
    assert shown.reading is not None
    assert (shown.reading.source, shown.reading.at, shown.reading.free) == ("runtime", 100.5, 3 * GIB)
    assert (shown.reading.used, shown.reading.reserved, shown.reading.own) == (None, None, None)
    assert shown.health.fallbacks_total == 1
    now[0] = 106.0
    assert sampler.sample().devices[0].fresh(now[0], 60.0) is None


def test_a_figure_that_cannot_be_is_none() -> None:
    source = RuntimeSource([Card("GPU-a", "card")], lambda uuid: RuntimeFigure(0.0, GIB, 2 * GIB))
    with pytest.raises(SourceError, match="a reading that is none"):
        source.read(0, 1.0)
