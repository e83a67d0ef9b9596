"""NVML as a Source. The only file that imports pynvml, and one place, `_ask`, through which every call goes.

What the figures mean. The v2 memory struct tells used, free and reserved apart, and only a reading in which they add
up to total counts. The v1 struct counts the driver's reserve as used, so of it only total and free are taken. A card
without memory of its own supports neither: then the host's available memory is read if the card shares it, else the
CUDA runtime's figure as the engine tells it. What a card can do is found out at its first good reading and kept: a
call that worked and fails later is a loss, and is never papered over by another figure.

NVML calls take microseconds and some hold a lock of the whole driver, so one thread makes them all (sampler.py).
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pynvml

from watchdog.runtime import Figures, runtime_reading
from watchdog.snapshot import Reading
from watchdog.source import Card, Holders, SourceError, sane

LONGEST_PAUSE_S = 60.0

MENDS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "install the NVIDIA driver; in a container ask for the capability `utility`",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the kernel module: modprobe nvidia",
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not open /dev/nvidia*",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the driver was upgraded while its old module is loaded: reboot",
    pynvml.NVML_ERROR_GPU_IS_LOST: "the card fell off the bus: look for Xid in dmesg, then reset it or reboot",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the card must be reset: nvidia-smi --gpu-reset",
    pynvml.NVML_ERROR_UNKNOWN: "a container that lost its devices (systemd daemon-reload) must be made anew",
}
NO_V2 = frozenset(
    {
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_UNKNOWN,  # WSL
    }
)
ABSENT = frozenset(
    {
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
    }
)
"""How the library says that a card, or this driver, has no such thing."""


class NvmlError(SourceError):
    """One call failed with `code` (NVML_ERROR_*)."""

    def __init__(self, call: str, code: int, text: str) -> None:
        mend = MENDS.get(code)
        super().__init__(f"NVML: {call.removeprefix('nvml')}: {text}" + (f" ({mend})" if mend else ""))
        self.code = code


Route = Callable[[Any, str, float], Reading]


class NvmlSource:
    """Readings of the cards found at the start; a card that is lost is looked for again by its UUID."""

    def __init__(self, figures: Figures | None = None) -> None:
        """Starts NVML and lists the cards. Raises SourceError with the reason when that does not work."""
        self._figures = figures
        self._routes: dict[str, Route] = {}
        self._handles: dict[str, Any] = {}
        self._failing: set[str] = set()
        self._pause_s = 1.0
        self._retry_at = 0.0
        _ask(pynvml.nvmlInit)
        self._running = True
        try:
            self._cards = tuple(self._listed())
        except SourceError:
            self.close()
            raise
        if not self._cards:
            self.close()
            raise SourceError("NVML: no device; in a container give it one (--gpus all)")

    @property
    def cards(self) -> tuple[Card, ...]:
        return self._cards

    def keep(self, cards: Sequence[Card]) -> None:
        """Read these of the cards from now on, in this order (visible.py finds them)."""
        assert set(cards) <= set(self._cards)
        self._cards = tuple(cards)
        self._failing.clear()

    def driver(self) -> str:
        """Version of the driver. Raises SourceError."""
        return str(_ask(pynvml.nvmlSystemGetDriverVersion))

    def cuda(self) -> tuple[int, int]:
        """Newest CUDA that the driver can run, major and minor. Raises SourceError."""
        version = int(_ask(pynvml.nvmlSystemGetCudaDriverVersion))
        return version // 1000, version % 1000 // 10

    def read(self, device: int, at: float) -> Reading:
        card = self._cards[device]
        self._revive(at)
        try:
            handle = self._handle(card.uuid)
            route = self._routes.get(card.uuid)
            reading = route(handle, card.uuid, at) if route else self._first(handle, card.uuid, at)
        except SourceError:
            self._handles.pop(card.uuid, None)
            self._failing.add(card.uuid)
            raise
        self._failing.discard(card.uuid)
        self._pause_s = 1.0
        return reading

    def holders(self, device: int) -> Holders | None:
        """Processes with a context or graphics on the device, by the ids that the driver gives them.

        A context never weighs 0 bytes: where 0 is said (inside a container, by some drivers) nothing is known.
        """
        try:
            handle = self._handle(self._cards[device].uuid)
            compute = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
            graphics = _ask(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3, handle, default=[])
        except SourceError:
            return None
        held: dict[int, int | None] = {}
        for process in (*compute, *graphics):
            held[process.pid] = max(held.get(process.pid) or 0, process.usedGpuMemory or 0) or None
        return held

    def close(self) -> None:
        if self._running:
            self._running = False
            _ask(pynvml.nvmlShutdown, default=None, unless=frozenset({pynvml.NVML_ERROR_UNINITIALIZED}))

    def _listed(self) -> Iterator[Card]:
        for index in range(_ask(pynvml.nvmlDeviceGetCount)):
            handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
            card = _card(handle, None)
            instances = list(_instances(handle, card))
            for instance, its_handle in instances or [(card, handle)]:
                self._handles[instance.uuid] = its_handle
                yield instance

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            self._handles[uuid] = _ask(pynvml.nvmlDeviceGetHandleByUUID, uuid)
        return self._handles[uuid]

    def _revive(self, at: float) -> None:
        """Start NVML anew once no card at all answers. While one does, a restart would put that one at risk."""
        if len(self._failing) < len(self._cards) or at < self._retry_at:
            return
        self._retry_at = at + self._pause_s
        self._pause_s = min(2.0 * self._pause_s, LONGEST_PAUSE_S)
        self.close()
        self._handles.clear()
        _ask(pynvml.nvmlInit)
        self._running = True

    def _first(self, handle: Any, uuid: str, at: float) -> Reading:
        """The first good reading of a card settles by which route all later ones come."""
        route: Route = _read_v2
        try:
            reading = route(handle, uuid, at)
        except NvmlError as error:
            if error.code not in NO_V2:
                raise
            route = self._without_v2(handle, error)
            reading = route(handle, uuid, at)
        self._routes[uuid] = route
        return reading

    def _without_v2(self, handle: Any, v2: NvmlError) -> Route:
        try:
            _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
        except NvmlError as v1:
            if v1.code != pynvml.NVML_ERROR_NOT_SUPPORTED:
                raise v2 from v1
        else:
            return _read_v1
        if _shares_memory(handle):
            return _read_system
        if self._figures is None:
            raise v2
        return self._read_runtime

    def _read_runtime(self, handle: Any, uuid: str, at: float) -> Reading:
        assert self._figures is not None
        return runtime_reading(self._figures(uuid), at)


def _ask(call: Callable[..., Any], *arguments: Any, default: Any = ..., unless: frozenset[int] = ABSENT) -> Any:
    """What a call of pynvml answers; `default`, if given, for an error code in `unless`. Else raises NvmlError."""
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        if default is not ... and error.value in unless:
            return default
        raise NvmlError(call.__name__, error.value, str(error)) from error
    except UnicodeDecodeError as error:
        raise NvmlError(call.__name__, pynvml.NVML_ERROR_UNKNOWN, "an answer that is no text") from error


def _card(handle: Any, parent: Card | None) -> Card:
    pci = _ask(pynvml.nvmlDeviceGetPciInfo_v3, handle, default=None) if parent is None else None
    return Card(
        uuid=_ask(pynvml.nvmlDeviceGetUUID, handle),
        name=_ask(pynvml.nvmlDeviceGetName, handle),
        bus_id=parent.bus_id if parent else pci.busId if pci else None,
        parent=parent.uuid if parent else None,
    )


def _instances(handle: Any, card: Card) -> Iterator[tuple[Card, Any]]:
    """The MIG instances of a card; none unless it is in MIG mode. They are devices, their card is none."""
    if _ask(pynvml.nvmlDeviceGetMigMode, handle, default=(0, 0))[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return
    for index in range(_ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
        instance = _ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index, default=None)
        if instance is not None:
            yield _card(instance, card), instance


def _read_v2(handle: Any, uuid: str, at: float) -> Reading:
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    return sane(lambda: Reading(at, memory.total, memory.free, memory.used, memory.reserved))


def _read_v1(handle: Any, uuid: str, at: float) -> Reading:
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if memory.used + memory.free != memory.total:
        raise SourceError(f"NVML: used + free = {memory.used + memory.free} bytes, but total = {memory.total}")
    return sane(lambda: Reading(at, memory.total, memory.free, source="nvml_v1"))


def _read_system(handle: Any, uuid: str, at: float) -> Reading:
    _ask(pynvml.nvmlDeviceGetUUID, handle)  # the card must still be there
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return sane(lambda: Reading(at, total, free, source="system"))


def _shares_memory(handle: Any) -> bool:
    name = str(_ask(pynvml.nvmlDeviceGetName, handle))
    mode = _ask(pynvml.nvmlDeviceGetAddressingMode, handle, default=None)
    return bool(name.endswith("(nvgpu)") or mode == pynvml.NVML_DEVICE_ADDRESSING_MODE_ATS)
