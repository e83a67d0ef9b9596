"""One load at a time on each card of this machine, over all services that run on it.

Two engines that plan at the same moment would both count the same free memory. The locks are files that every user may
lock, one for each card, named by its UUID; the kernel drops them with their holder.
"""

import asyncio
import fcntl
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

log = logging.getLogger(__name__)

RUNTIME_FOLDERS = ("/run/lock", "/var/lock")
POLL_S = 0.1


def shared_folder() -> Path:
    """A folder in which services of every user meet."""
    for folder in RUNTIME_FOLDERS:
        if os.access(folder, os.W_OK):
            return Path(folder)
    return Path(tempfile.gettempdir())


class CardLocks:
    def __init__(self, folder: Path, patience_s: float = 300.0) -> None:
        """Whoever holds a lock for longer than `patience_s` is taken to be stuck: then it is said and ignored."""
        self._folder = folder
        self._patience_s = patience_s

    @asynccontextmanager
    async def held(self, uuids: Iterable[str]) -> AsyncIterator[None]:
        """Hold the locks of these cards within the block; all take them in one order, so nobody waits in a ring."""
        with ExitStack() as stack:
            for uuid in sorted(set(uuids)):
                descriptor = self._open(uuid)
                if descriptor is not None:
                    stack.callback(os.close, descriptor)
                    await self._take(descriptor, uuid)
            yield

    def _open(self, uuid: str) -> int | None:
        path = self._folder / f"ullage-{uuid.replace('/', '-')}.lock"
        try:
            return _open_or_create(path)
        except OSError as error:
            log.warning("%s: %s: another service may load onto this card at the same time", path, error.strerror)
            return None

    async def _take(self, descriptor: int, uuid: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        said = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not said:
                    log.warning("another service is loading onto card %s: waiting for it", uuid)
                    said = True
                if loop.time() >= deadline:
                    log.error("the load of another service onto card %s takes too long: not waiting any more", uuid)
                    return
                await asyncio.sleep(POLL_S)
            else:
                return


def _open_or_create(path: Path) -> int:
    """For reading only, which is all that a lock needs: the file may be another user's.

    Not with O_CREAT at once: in a folder such as /tmp the kernel refuses that for a file that is another user's.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        pass
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return os.open(path, flags)
