"""Who may come in on the ops listener: its own names only, /admin/* with the key or a browser with a session.

A page of a foreign origin gets nothing: its requests carry no key, its cookies are not sent (SameSite=Strict), and what
names another origin is refused whatever else it has. A key is never taken from a URL, where logs would keep it.
"""

import hashlib
import hmac
import time
from collections import deque
from collections.abc import Callable, Sequence
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl

from starlette.types import Scope

from app.access import Keyring, check_host, header
from app.errors import CrossOrigin, InvalidApiKey, KeyInUrl, TooManyLogins

SESSION_S = 7 * 86400
SAFE = ("GET", "HEAD")
KEY_NAMES = ("key", "api_key", "apikey", "admin_key", "token", "access_token", "authorization")
LOGIN = "/admin/login"
MOST_FAILURES, WITHIN_S = 10, 60.0

HEADERS = (
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)
"""Of every answer that has none of its own: what the listener says is data, for whoever asked, now."""


class Sessions:
    """Cookies in place of the key, good for a week, also over restarts and until the key is another one.

    A cookie says when it ends and is signed with the key, so nothing has to be kept of it.
    """

    def __init__(self, key: str, clock: Callable[[], float] = time.time) -> None:
        self._secret = hashlib.sha256(b"ullage session\0" + key.encode()).digest()
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=MOST_FAILURES)

    def cookie(self, scope: Scope) -> str:
        """A new session, as the value of Set-Cookie."""
        end = str(int(self._clock()) + SESSION_S)
        return f"{_name(scope)}={end}.{self._sign(end)}; Max-Age={SESSION_S}; {_ATTRIBUTES}"

    def no_cookie(self, scope: Scope) -> str:
        """The end of a session, as the value of Set-Cookie."""
        return f"{_name(scope)}=; Max-Age=0; {_ATTRIBUTES}"

    def known(self, scope: Scope) -> bool:
        """Whether the request comes with a session."""
        end, _, signature = _cookie(scope, _name(scope)).partition(".")
        right = hmac.compare_digest(signature.encode(), self._sign(end).encode())
        return right and int(end) > self._clock()

    def may_try(self) -> None:
        """Raises TooManyLogins after a row of failed ones within a minute."""
        if len(self._failures) == MOST_FAILURES:
            rest = self._failures[0] + WITHIN_S - self._clock()
            if rest > 0:
                raise TooManyLogins(retry_after_s=rest)

    def failed(self) -> None:
        self._failures.append(self._clock())

    def _sign(self, end: str) -> str:
        return hmac.new(self._secret, end.encode(), hashlib.sha256).hexdigest()


_ATTRIBUTES = "Path=/; HttpOnly; SameSite=Strict"


class OpsGuard:
    """The guard of the ops listener. Raises ApiError for what may not come in."""

    def __init__(self, keys: Keyring, sessions: Sessions, hosts: Sequence[str]) -> None:
        self._keys = keys
        self._sessions = sessions
        self._hosts = hosts

    def __call__(self, scope: Scope) -> None:
        check_host(scope, self._hosts)
        self._refuse_key_in_url(scope)
        if not scope["path"].startswith("/admin"):
            return
        origin = header(scope, b"origin")
        if origin and not _is_own(scope, origin):
            raise CrossOrigin
        if scope["path"] == LOGIN:
            return
        if header(scope, b"authorization"):
            self._keys.check(scope)
        elif not self._sessions.known(scope):
            raise InvalidApiKey
        elif scope["method"] not in SAFE and not origin:
            raise CrossOrigin

    def _refuse_key_in_url(self, scope: Scope) -> None:
        for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
            if name.lower() in KEY_NAMES or self._keys.has(value.encode()):
                raise KeyInUrl


def _is_own(scope: Scope, origin: bytes) -> bool:
    """A page of this listener; behind a proxy that adds TLS its scheme is not ours."""
    host = header(scope, b"host").lower()
    return bool(host) and origin.lower() in (b"http://" + host, b"https://" + host)


def _name(scope: Scope) -> str:
    """Browsers keep cookies by host and not by port, and on one host there may be several of us."""
    return f"ullage_admin_{scope['server'][1]}"


def _cookie(scope: Scope, name: str) -> str:
    try:
        found = SimpleCookie(header(scope, b"cookie").decode("latin-1")).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value
