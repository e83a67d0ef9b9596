"""What the status page does when somebody presses a button, in a browser: it asks first, does it, and tells."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.app.ops.scripted_admin import MIB, Scripted
from tests.app.ops.signed_in import Shared, answer, asked_by, opened, outcome


def test_a_question_is_asked_and_no_is_no(shared: Shared, admin: Scripted) -> None:
    page = opened(shared)
    for button in ("#trim button", "#reload button", "#mode button"):
        asked_by(page, button)
        assert page.run("document.activeElement.innerText") == "Cancel"
        answer(page, yes=False)
        asked_by(page, button)
        page.press("Escape", 27)
        page.until("!document.querySelector('#confirm').open")
        asked_by(page, button)
        page.press("Enter", 13, "\r")
        page.until("!document.querySelector('#confirm').open")
    assert admin.asked == []
    assert page.text("#outcome") == ""


def test_trim(shared: Shared, admin: Scripted) -> None:
    done = {"device": 1, "seconds": 0.0213, "message": ""}
    admin.results = [
        {**done, "rung": "pools", "result": "ok", "returned_bytes": 12 * MIB},
        {**done, "rung": "graph_cache", "result": "ok", "returned_bytes": None},
        {**done, "rung": "stack_limit", "result": "noop", "returned_bytes": 0},
        {**done, "rung": "elastic", "result": "failed", "returned_bytes": None, "message": "no answer"},
    ]
    page = opened(shared)
    page.choose("#rung", "elastic")
    page.choose("#trim-device", "1")
    assert asked_by(page, "#trim button").startswith("Trim elastic on device 1?")
    answer(page, yes=True)
    assert outcome(page).split("\n\n") == [
        "pools on device 1: 12 MiB returned, 0.021 s.",
        "graph_cache on device 1: an unknown amount returned, 0.021 s.",
        "stack_limit on device 1: nothing to return, 0.021 s.",
        "elastic on device 1: failed, 0.021 s; no answer.",
    ]
    assert admin.asked == [("POST /admin/trim", {"rung": "elastic", "device": 1})]


def test_trim_of_all(shared: Shared, admin: Scripted) -> None:
    page = opened(shared)
    assert asked_by(page, "#trim button").startswith("Trim every rung on all devices?")
    answer(page, yes=True)
    assert outcome(page) == "There was nothing to trim."
    assert admin.asked == [("POST /admin/trim", {"rung": None, "device": None})]


@pytest.mark.parametrize(
    ("status", "words"), [(202, "The reload has begun: generation 3."), (409, "One is in progress already: prepare.")]
)
def test_reload(shared: Shared, admin: Scripted, status: int, words: str) -> None:
    admin.reload_status = status
    page = opened(shared)
    assert "go on where they were" in asked_by(page, "#reload button")
    answer(page, yes=True)
    assert outcome(page) == words
    assert admin.asked == [("POST /admin/reload", b"")]


def test_mode_for_a_time(shared: Shared, admin: Scripted) -> None:
    page = opened(shared)
    page.choose("#mode-name", "dry-run")
    page.choose("#mode-for", "3600")
    assert asked_by(page, "#mode button").startswith("Set the watchdog to dry-run?")
    answer(page, yes=True)
    assert outcome(page).startswith("The watchdog is set to dry-run until ")
    [(what, body)] = admin.asked
    assert (what, body["mode"]) == ("PUT /admin/watchdog", "dry-run")
    ahead = datetime.fromisoformat(body["until"]) - datetime.now(UTC)
    assert timedelta(minutes=55) < ahead <= timedelta(hours=1)


def test_mode_for_good(shared: Shared, admin: Scripted) -> None:
    page = opened(shared)
    page.choose("#mode-name", "off")
    asked_by(page, "#mode button")
    answer(page, yes=True)
    assert outcome(page) == "The watchdog is set to off."
    assert admin.asked == [("PUT /admin/watchdog", {"mode": "off", "until": None})]


def test_a_refusal_is_shown(shared: Shared, admin: Scripted) -> None:
    admin.refusal = "The engine ended meanwhile."
    page = opened(shared)
    asked_by(page, "#trim button")
    answer(page, yes=True)
    assert outcome(page) == "The engine ended meanwhile."
