"""What the status page and docs/vram.md say of states, classes, owners, rungs and floors is what the product has."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from engine.memory.owners import Owner
from tests.app.process import ROOT
from watchdog.actions import TRIMS
from watchdog.floors import floors_of
from watchdog.snapshot import MIB
from watchdog.state import State
from watchdog.trend import TrendClass

PAGE = Path(ROOT, "app/ops/page")
GUIDE = Path(ROOT, "docs/vram.md").read_text(encoding="utf-8")


class Options(HTMLParser):
    """Values of the options of each select, and terms of each list of definitions, by id."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[str]] = {}
        self._at = ""
        self._term = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("select", "dl"):
            self._at = given.get("id") or ""
            self.found[self._at] = []
        elif tag == "option":
            self.found[self._at].append(given.get("value") or "")
        self._term = tag == "dt"

    def handle_data(self, data: str) -> None:
        if self._term:
            self.found[self._at].append(data)
            self._term = False


@pytest.fixture(scope="module")
def page() -> dict[str, list[str]]:
    options = Options()
    options.feed((PAGE / "index.html").read_text(encoding="utf-8"))
    return options.found


def first_column(after: str) -> list[str]:
    """Names in the first column of the table that begins with this head."""
    table = GUIDE.partition(f"| {after} |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)


def test_every_state_is_explained(page: dict[str, list[str]]) -> None:
    assert set(page["states"]) == set(State)
    assert set(first_column("state")) == set(State)


def test_every_class_is_explained(page: dict[str, list[str]]) -> None:
    assert set(page["classes"]) == set(TrendClass)
    assert set(first_column("class")) == set(TrendClass)


def test_every_rung_can_be_chosen(page: dict[str, list[str]]) -> None:
    assert page["rung"] == ["", *TRIMS]
    assert page["mode-name"] == ["on", "dry-run", "off"]


def test_every_owner_has_a_colour_and_a_row() -> None:
    script = (PAGE / "page.js").read_text(encoding="utf-8")
    [named] = re.findall(r"const OWNERS = \[(.*?)\];", script)
    assert set(re.findall(r'"(\w+)"', named)) == set(Owner)
    style = (PAGE / "page.css").read_text(encoding="utf-8")
    assert [owner for owner in Owner if f".{owner} {{ background: var(--{owner}); }}" not in style] == []
    assert first_column("owner") == list(Owner)


def test_the_floors_of_the_guide_are_those_of_the_watchdog() -> None:
    rows = {
        row[0]: list(map(int, row[1].split(" | ")))
        for row in re.findall(r"^\| (warn|trim|reload) \|.*?\| (\d[\d |]+\d) \|$", GUIDE, re.M)
    }
    reserves = (256, 512, 700, 1024)
    for name, given in rows.items():
        assert given == [round(getattr(floors_of(size * MIB, size * MIB), name) / MIB) for size in reserves]
    assert list(rows) == ["warn", "trim", "reload"]
    assert floors_of(4096 * MIB, 4096 * MIB).warn == floors_of(1024 * MIB, 1024 * MIB).warn
