"""The key to the status page, in a browser: given once, out of every script's reach, asked for again."""

from collections.abc import Iterator

import pytest

from tests.app.ops.chromium import Chromium, Page
from tests.app.ops.scripted_admin import KEY, Scripted, serving
from tests.app.ops.signed_in import OPENED, card, sign_in


@pytest.fixture
def own(chrome: Chromium) -> Iterator[tuple[Scripted, Page]]:
    """A page in a profile of its own, at the form for the key."""
    with serving() as admin, chrome.page(admin.url) as page:
        page.until("!document.querySelector('#login').hidden")
        yield admin, page


def test_nothing_is_shown_without_it(own: tuple[Scripted, Page]) -> None:
    _, page = own
    assert page.run("document.querySelector('#status').hidden")
    assert "MiB" not in page.text()
    assert page.run("document.activeElement.id") == "key"


def test_it_is_given_once_and_kept_where_no_script_reads_it(own: tuple[Scripted, Page]) -> None:
    admin, page = own
    sign_in(page)
    page.until(OPENED)
    assert page.complaints == []
    assert page.run("document.cookie") == ""
    assert page.run("document.querySelector('#key').value") == ""
    assert page.run("JSON.stringify([{...localStorage}, {...sessionStorage}])") == "[{},{}]"
    page.go(admin.url)
    page.until(OPENED)
    assert page.run("document.querySelector('#login').hidden")
    assert not [url for url in page.urls if KEY in url]
    page.click("#logout")
    page.until("!document.querySelector('#login').hidden")
    assert page.run("document.querySelector('#status').hidden")


def test_a_wrong_one_is_refused_in_words(own: tuple[Scripted, Page]) -> None:
    _, page = own
    sign_in(page, "wrong")
    page.until("document.querySelector('#login-error').innerText !== ''")
    assert "API key" in page.text("#login-error")
    page.type(KEY)
    page.press("Enter", 13, "\r")
    page.until(OPENED)


def test_a_session_that_has_ended_asks_again_and_a_service_that_is_gone_is_said(own: tuple[Scripted, Page]) -> None:
    admin, page = own
    sign_in(page)
    page.until(OPENED)
    page.send("Network.clearBrowserCookies")
    page.run("refresh()")
    page.until("!document.querySelector('#login').hidden")
    assert page.run("document.querySelector('#status').hidden")
    sign_in(page)
    page.until(OPENED)
    admin.stop()
    page.run("refresh()")
    page.until("document.querySelector('#contact').dataset.live === 'no'")
    assert "No answer; figures are of" in page.text("#contact")
    assert "98 MiB" in card(page, 1)
