"""How the commands ask a running service: at the address and with the key that are in its state folder."""

import http.client
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.settings import Settings
from app.state import ADMIN_KEY_FILE, OPS_FILE, read_keys
from engine.errors import ConfigError

TIMEOUT_S = 10.0


class NoAnswer(ConfigError):
    """There is no service, or it refuses. The text is one line."""


@dataclass(frozen=True)
class OpsClient:
    url: str
    host: str
    """The name by which the service answers; empty for the one in `url`."""
    key: str

    @classmethod
    def of(cls, settings: Settings) -> "OpsClient":
        """The service of this state folder. Raises ConfigError where none has ever run."""
        folder = Path(settings.state_dir)
        try:
            address = json.loads((folder / OPS_FILE).read_bytes())
        except FileNotFoundError:
            problem = f"--state-dir {folder}: no service has run here; give the --port or the --state-dir that it has"
            raise NoAnswer(problem) from None
        except (OSError, json.JSONDecodeError) as error:
            raise NoAnswer(f"{folder / OPS_FILE}: {error}") from error
        if settings.admin_key_file is not None:
            key = read_keys(Path(settings.admin_key_file), "--admin-key-file")[0]
        else:
            key = read_keys(folder / ADMIN_KEY_FILE, "--state-dir")[0]
        return cls(address["url"], address["host"], key)

    def get(self, path: str) -> bytes:
        """Raises NoAnswer."""
        address = urlsplit(self.url)
        headers = {"authorization": f"Bearer {self.key}"}
        if self.host and self.host != address.hostname:
            headers["host"] = f"{self.host}:{address.port}"
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"no service answers at {self.url}: {error}") from error
        finally:
            connection.close()
        if answer.status != http.HTTPStatus.OK:
            raise NoAnswer(f"{self.url}{path}: {_message(body) or f'status {answer.status}'}")
        return body

    def json(self, path: str) -> dict[str, Any]:
        """Raises NoAnswer."""
        return dict(json.loads(self.get(path)))


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
