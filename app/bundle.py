"""`ullage bundle`: what somebody needs who is to find out what happened to the memory here. No prompts, no keys.

Plan, events and the table of requests are files of the state folder, so they are there also when nothing runs any more;
ledger and metrics come from the service, if it answers.
"""

import importlib.metadata
import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from app.boot import BOOT_FILE
from app.doctor import doctor
from app.events import FILE_NAME as EVENTS_FILE
from app.journal import older_than
from app.ops_client import NoAnswer, OpsClient
from app.plan_file import FILE_NAME as PLAN_FILE
from app.request_table import FILE_NAME as REQUESTS_FILE
from app.settings import Settings
from engine.errors import ConfigError

DRIVER = Path("/proc/driver/nvidia/version")
ASKED = {"vram.json": "/admin/vram", "history.json": "/admin/vram/history", "metrics.txt": "/metrics"}


def bundle(settings: Settings, path: str | None, out: TextIO) -> int:
    """Write the archive, which is readable by its owner alone, and say where. Raises ConfigError."""
    folder = Path(settings.state_dir)
    name = f"ullage-bundle-{time.strftime('%Y%m%d-%H%M%S')}"
    target = Path(path or f"{name}.tar.gz")
    parts = list(_parts(settings, folder))
    try:
        with open(target, "xb", opener=_private) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for part, content in parts:
                entry = tarfile.TarInfo(f"{name}/{part}")
                entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(content))
    except OSError as error:
        raise ConfigError(f"--out {target}: {error.strerror}") from error
    out.write(f"{target}: {', '.join(part for part, _ in parts)}\n")
    return 0


def _parts(settings: Settings, folder: Path) -> Iterator[tuple[str, bytes]]:
    missing: list[str] = []
    yield "versions.json", json.dumps(versions(), indent=1).encode()
    for name in _files():
        try:
            yield name, (folder / name).read_bytes()
        except FileNotFoundError:
            missing.append(f"{name}: there is none in {folder}")
        except OSError as error:
            missing.append(f"{name}: {error.strerror}")
    for name, path in ASKED.items():
        try:
            yield name, OpsClient.of(settings).get(path)
        except NoAnswer as error:
            missing.append(f"{name}: {error}")
    said = io.StringIO()
    doctor(settings, said)
    yield "doctor.txt", said.getvalue().encode()
    if missing:
        yield "missing.txt", "\n".join([*missing, ""]).encode()


def _files() -> list[str]:
    journals = [Path(EVENTS_FILE), Path(REQUESTS_FILE)]
    return [PLAN_FILE, BOOT_FILE, *(str(each) for path in journals for each in (path, older_than(path)))]


def versions() -> dict[str, str]:
    """Of everything that takes part."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    if DRIVER.exists():
        found["driver"] = DRIVER.read_text(encoding="utf-8").splitlines()[0]
    needed = [line for line in importlib.metadata.requires("ullage") or () if "extra ==" not in line]
    wanted = [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in needed]
    for name in ["ullage", *wanted, *_cuda()]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return dict(sorted(found.items()))


def _cuda() -> list[str]:
    names = [distribution.metadata["Name"] for distribution in importlib.metadata.distributions()]
    return [name for name in names if name and name.lower().startswith(("cupy", "nvidia-", "cuda-"))]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
