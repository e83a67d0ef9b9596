"""What each request left behind on each device: the last 1,000 in memory, all of them in a journal."""

import csv
import io
import logging
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from app.journal import Journal

log = logging.getLogger(__name__)

KEPT = 1000
FILE_NAME = "requests.jsonl"


class DeviceRow(msgspec.Struct, frozen=True):
    """One device over one request, in bytes; None is unknown.

    `change` is idle free memory after less before: below 0 something was lost. By owner it is what the engine holds
    after less before: above 0 the owner has grown. Both are None when others ran at the same time.
    """

    device: int
    idle_free_before: int | None
    idle_free_after: int | None
    change: int | None
    change_by_owner: dict[str, int] | None


class Row(msgspec.Struct, frozen=True):
    """One request, in the shape that /admin/vram/requests and the journal have."""

    id: str
    finished_at: str
    prompt_tokens: int
    cached_tokens: int | None
    generated_tokens: int
    overlap: int
    """How many others ran at some time while it did."""
    devices: list[DeviceRow]


class RequestTable:
    def __init__(self, journal: Journal | None = None) -> None:
        """Begins with the journal's last rows. Without a journal nothing outlives the service."""
        self._journal = journal
        self._rows: deque[Row] = deque(_read(journal) if journal else (), maxlen=KEPT)

    @property
    def rows(self) -> list[Row]:
        """Oldest first."""
        return list(self._rows)

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if self._journal is not None:
            self._journal.append(msgspec.json.encode(row))

    def close(self) -> None:
        """Write what is not in the journal yet. May block."""
        if self._journal is not None:
            self._journal.close()


def _read(journal: Journal) -> Iterator[Row]:
    for line in journal.read(KEPT):
        try:
            yield msgspec.json.decode(line, type=Row)
        except msgspec.DecodeError as error:
            log.warning("a line of the earlier requests is left out: %s", error)


OF_REQUEST = ("id", "finished_at", "prompt_tokens", "cached_tokens", "generated_tokens", "overlap")
OF_DEVICE = ("device", "idle_free_before", "idle_free_after", "change")


def as_csv(rows: Iterable[Row]) -> str:
    """One line for each request and device, and one for a request on no device. Unknown is empty."""
    rows = list(rows)
    owners = list(
        dict.fromkeys(owner for row in rows for device in row.devices for owner in device.change_by_owner or ())
    )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*OF_REQUEST, *OF_DEVICE, *(f"change_{owner}" for owner in owners)])
    for row in rows:
        request = [getattr(row, name) for name in OF_REQUEST]
        for device in row.devices:
            changes = device.change_by_owner or {}
            writer.writerow(
                [*request, *(getattr(device, name) for name in OF_DEVICE), *(changes.get(owner) for owner in owners)]
            )
        if not row.devices:
            writer.writerow([*request, *[None] * (len(OF_DEVICE) + len(owners))])
    return text.getvalue()
