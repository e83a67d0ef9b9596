"""The benchmark of the watchdog's cost runs and says its figures; how high they are is for `ullage bench`."""

import pytest

from benchmarks import watchdog


def test_it_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROUNDS", "CALLS", "REQUESTS"):
        monkeypatch.setattr(watchdog, name, 3)
    result = watchdog.run()
    assert {"sample_of_two_us", "sample_and_decide_us", "scrape_us"} <= result.keys()
    assert "sample of two" in capsys.readouterr().out
