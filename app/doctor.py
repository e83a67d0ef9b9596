"""`ullage doctor`: what serving on this machine needs, one line each, with the mend where something is wrong.

It loads no kernels and makes no CUDA context: CuPy is asked in a child.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from app.demo_model import SMOLLM2
from app.model import read_model
from app.settings import Settings
from app.text.template import TemplateError
from engine.errors import ModelFileError
from watchdog.nvml import NvmlSource
from watchdog.snapshot import MIB
from watchdog.source import SourceError

BAD_INPUT = 2
GB = 10**9
CHILD_S = 60.0
NVIDIA = "0x10de"
CUPY = re.compile(r"cupy(-cuda\d+x|-rocm.*)?", re.IGNORECASE)

DRIVER = Path("/proc/driver/nvidia/version")
PCI = Path("/sys/bus/pci/devices")
WSL = Path("/dev/dxg")

ASK_CUPY = (
    "import cupy, sys\n"
    "count = cupy.cuda.runtime.getDeviceCount()\n"
    "print(cupy.__version__, cupy.cuda.runtime.runtimeGetVersion(), count)"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """`none`: not there, and the CPU serves without it. `bad`: serving as it was asked for would fail or be slow."""

    thing: str
    verdict: Literal["ok", "none", "bad"]
    text: str
    mend: str = ""


def doctor(settings: Settings, out: TextIO) -> int:
    """Print the findings; 2 if one of them is bad."""
    worst = 0
    for finding in findings(settings):
        mend = f"; {finding.mend}" if finding.mend else ""
        out.write(f"{finding.thing:7} {finding.verdict:4}  {finding.text}{mend}\n")
        out.flush()
        worst = max(worst, BAD_INPUT if finding.verdict == "bad" else 0)
    return worst


def findings(settings: Settings) -> Iterator[Finding]:
    driver = _driver()
    yield driver
    nvml, cuda = _nvml(driver)
    yield nvml
    yield _cupy(cuda)
    yield _caches(Path(settings.cache_dir))
    yield _model(settings)


def _driver() -> Finding:
    if DRIVER.exists():
        version = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text(encoding="utf-8", errors="replace"))
        return Finding("driver", "ok", f"NVIDIA {version[0] if version else 'of unknown version'}")
    if WSL.exists():
        return Finding("driver", "ok", "of the Windows host (WSL)")
    if any(_vendor(card) == NVIDIA for card in _pci()):
        return Finding("driver", "bad", "an NVIDIA card and no driver", "install the driver, or: modprobe nvidia")
    return Finding("driver", "none", "no NVIDIA card is seen", "in a container give it one: --gpus all")


def _pci() -> list[Path]:
    return [card for card in PCI.iterdir() if (card / "class").read_text().startswith("0x03")] if PCI.is_dir() else []


def _vendor(card: Path) -> str:
    return (card / "vendor").read_text().strip()


def _nvml(driver: Finding) -> tuple[Finding, tuple[int, int] | None]:
    """The finding, and the newest CUDA that the driver runs."""
    try:
        source = NvmlSource()
    except SourceError as error:
        verdict: Literal["none", "bad"] = "none" if driver.verdict == "none" else "bad"
        return Finding("NVML", verdict, str(error).removeprefix("NVML: ")), None
    try:
        cards = [_card(source, device) for device in range(len(source.cards))]
        major, minor = source.cuda()
        text = f"driver {source.driver()}, CUDA up to {major}.{minor}: " + "; ".join(text for _, text in cards)
        return Finding("NVML", "ok" if all(well for well, _ in cards) else "bad", text), (major, minor)
    except SourceError as error:
        return Finding("NVML", "bad", str(error).removeprefix("NVML: ")), None
    finally:
        source.close()


def _card(source: NvmlSource, device: int) -> tuple[bool, str]:
    name = source.cards[device].name
    try:
        reading = source.read(device, time.monotonic())
    except SourceError as error:
        return False, f"{device} {name}: {error}"
    by = "" if reading.source == "nvml" else f" by {reading.source}"
    return True, f"{device} {name}, {reading.free // MIB} of {reading.total // MIB} MiB free{by}"


def _cupy(cuda: tuple[int, int] | None) -> Finding:
    install = f"pip install 'cupy-cuda{min(max(cuda[0], 12), 13)}x[ctk]'" if cuda else ""
    found = sorted({dist.metadata["Name"] for dist in importlib.metadata.distributions() if _is_cupy(dist)})
    if not found:
        return Finding("CuPy", "bad" if cuda else "none", "not installed", install or "only a GPU needs it")
    if len(found) > 1:
        return Finding("CuPy", "bad", f"{' and '.join(found)} exclude each other", f"pip uninstall {found[0]}")
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", ASK_CUPY], capture_output=True, text=True, timeout=CHILD_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("CuPy", "bad", f"{found[0]} gave no answer in {CHILD_S:.0f} s", "look for Xid in dmesg")
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it died"])[-1]
        return Finding("CuPy", "bad" if cuda else "none", f"{found[0]}: {said}", install)
    version, runtime, count = done.stdout.split()
    return Finding("CuPy", "ok", f"{found[0]} {version}, CUDA {int(runtime) // 1000}, {count} devices")


def _is_cupy(distribution: importlib.metadata.Distribution) -> bool:
    return CUPY.fullmatch(distribution.metadata["Name"] or "") is not None


def _caches(folder: Path) -> Finding:
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        return Finding("caches", "bad", f"{folder} cannot be written", "give --cache-dir a folder that can")
    room = f"{folder}, {shutil.disk_usage(above).free / GB:.0f} GB of room"
    if not any((folder / "numba").rglob("*.nbi")):
        return Finding("caches", "ok", f"{room}, no kernels compiled yet", "to start at once: ullage warm")
    return Finding("caches", "ok", f"{room}, kernels are compiled")


def _model(settings: Settings) -> Finding:
    demo = Path(settings.cache_dir) / "models" / Path(SMOLLM2.member).name
    path = settings.model or str(demo)
    if settings.model is None and not demo.exists():
        fetched = f"none named: `serve` fetches the demo model, {SMOLLM2.nbytes / 1e6:.0f} MB"
        return Finding("model", "ok", fetched, "or name a GGUF file: --model")
    try:
        model = read_model(path, settings.model_id(path))
    except (ModelFileError, TemplateError) as error:
        return Finding("model", "bad", str(error), "fetch it anew, or name another file: --model")
    size = Path(path).stat().st_size / GB
    context = f", context {model.trained_context}" if model.trained_context else ""
    return Finding("model", "ok", f"{path}: {model.architecture} {model.quantisation}, {size:.2f} GB{context}")
