from collections.abc import Iterator

import pytest

from tests.app.running import Running, service


@pytest.fixture(scope="module")
def hello() -> Iterator[Running]:
    """A service that answers everything with "Hello there."."""
    with service() as running:
        yield running
