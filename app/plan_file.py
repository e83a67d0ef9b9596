"""What the engine of the moment was planned to have, as a file in the state folder: `ullage bundle` takes it along."""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from app.observer import NoObserver
from engine.messages import Ready

log = logging.getLogger(__name__)

FILE_NAME = "plan.json"


class PlanFile(NoObserver):
    def __init__(self, folder: Path | None, ready: Callable[[], Ready | None]) -> None:
        """`ready` is what the latest engine has told. Without a folder nothing is written."""
        self._folder = folder
        self._ready = ready

    def engine_restarted(self, reason: str) -> None:
        self.write()

    def write(self) -> None:
        """Whole or not at all; a folder that cannot be written to stops nobody."""
        if self._folder is None:
            return
        draft = self._folder / f"{FILE_NAME}.new"
        try:
            draft.write_bytes(msgspec.json.format(msgspec.json.encode(self._ready())))
            draft.rename(self._folder / FILE_NAME)
        except OSError as error:
            log.error("%s: %s", draft, error.strerror)
