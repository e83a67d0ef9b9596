"""What is told to several observers is told to each, with everything that was said."""

import inspect
from typing import Any

import pytest

from app.observer import NoObserver, Observer
from app.observers import Observers

EVENTS = [name for name in vars(Observer) if not name.startswith("_")]


class Recorder(NoObserver):
    def __init__(self, heard: list[tuple[Any, ...]]) -> None:
        self._heard = heard

    def __getattribute__(self, name: str) -> Any:
        if name not in EVENTS:
            return super().__getattribute__(name)
        return lambda *said: self._heard.append((self, name, *said))


@pytest.mark.parametrize("name", EVENTS)
def test_everybody_hears_everything(name: str) -> None:
    heard: list[tuple[Any, ...]] = []
    first, second = Recorder(heard), Recorder(heard)
    said = [object() for _ in list(inspect.signature(getattr(NoObserver, name)).parameters)[1:]]
    getattr(Observers(first, second), name)(*said)
    assert heard == [(first, name, *said), (second, name, *said)]
