"""Who may ask what: keys in constant time, and the host names of the ops listener."""

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from starlette.types import Scope

from app.errors import HostNotAllowed, InvalidApiKey


class Keyring:
    """A set of bearer keys. Every key is compared, whichever matches, and only digests of equal length are."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, scope: Scope) -> None:
        """Raises InvalidApiKey unless the request carries one of the keys."""
        given = _digest(bearer(scope))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if True not in matches:
            raise InvalidApiKey


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def header(scope: Scope, name: bytes) -> bytes:
    """The first header of that (lower-case) name, or nothing."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return b""


def bearer(scope: Scope) -> bytes:
    scheme, _, key = header(scope, b"authorization").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def check_host(scope: Scope, allowed: Sequence[str]) -> None:
    """A browser page of a foreign name that resolves to us must get nothing. Raises HostNotAllowed."""
    host = header(scope, b"host").decode("latin-1").lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name not in allowed:
        raise HostNotAllowed
