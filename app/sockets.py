"""The service's two listening sockets, bound before anything is loaded."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.errors import ConfigError

BACKLOG = 2048


@dataclass(frozen=True)
class Sockets:
    public: socket.socket
    ops: socket.socket


@contextmanager
def bound(host: str, port: int, ops_host: str, ops_port: int) -> Iterator[Sockets]:
    """Both sockets, closed on leaving. Raises ConfigError, one line that names the flag."""
    with bind(host, port, "--port") as public, bind(ops_host, ops_port, "--ops-port") as ops:
        yield Sockets(public, ops)


def bind(host: str, port: int, flag: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise ConfigError(f"{flag.replace('port', 'host')} {host}: {error.strerror}") from error
    except OSError as error:
        raise ConfigError(f"{flag} {port}: on {host}: {error.strerror}") from error


def url(listening: socket.socket, host: str) -> str:
    """How a client on this machine reaches the socket."""
    port = listening.getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"
