from collections.abc import Iterator

import pytest

from tests.app.ops.chromium import Chromium, browser
from tests.app.ops.scripted_admin import Scripted, serving
from tests.app.ops.signed_in import OPENED, Shared, sign_in


@pytest.fixture(scope="package")
def chrome() -> Iterator[Chromium]:
    """One browser for all, ended with the last of them."""
    with browser() as running:
        yield running


@pytest.fixture(scope="package")
def shared(chrome: Chromium) -> Iterator[Shared]:
    """One page with the key given: to begin one for each test would take most of the time."""
    with serving() as admin, chrome.page(admin.url) as page:
        sign_in(page)
        page.until(OPENED)
        yield admin, page


@pytest.fixture
def admin(shared: Shared) -> Scripted:
    """The shared page's API, as if nothing had happened."""
    shared[0].begin()
    return shared[0]
