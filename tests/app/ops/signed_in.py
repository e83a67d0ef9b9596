"""The status page as somebody has it who has given the key."""

from tests.app.ops.chromium import Page
from tests.app.ops.scripted_admin import KEY, Scripted

OPENED = "timer !== null"
"""True in the page once it shows figures and listens."""
Shared = tuple[Scripted, Page]


def sign_in(page: Page, key: str = KEY) -> None:
    page.until("!document.querySelector('#login').hidden")
    page.complaints.clear()  # of the one look without a session
    page.click("#key")
    page.type(key)
    page.press("Enter", 13, "\r")


def opened(shared: Shared, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
    """The page, begun anew."""
    admin, page = shared
    page.size(width, height)
    page.look(dark)
    page.go(admin.url)
    page.until(OPENED)
    page.complaints.clear()
    return page


def card(page: Page, number: int) -> str:
    """What is shown of a device."""
    return page.text(f"#device-{number}")


def rows_of(page: Page, table: str, count: int) -> None:
    """Wait for so many rows."""
    page.until(f"document.querySelectorAll('#{table} tbody tr').length === {count}")


def asked_by(page: Page, button: str) -> str:
    """Press a button; returns the question that follows."""
    page.click(button)
    page.until("document.querySelector('#confirm').open")
    return page.text("#confirm")


def answer(page: Page, *, yes: bool) -> None:
    page.click("#confirm-yes" if yes else "#confirm button[value='']")
    page.until("!document.querySelector('#confirm').open")


def outcome(page: Page) -> str:
    """What came of it, once it is told."""
    page.until("document.querySelector('#outcome').innerText !== ''")
    return page.text("#outcome")
