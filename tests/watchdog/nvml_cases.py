"""What the real pynvml adapter makes of a library: run in a child that loads the stub (see test_nvml.py).

`python -m tests.watchdog.nvml_cases` runs every case in a fork of its own, since pynvml and the stub keep state, and
prints one JSON object: the traceback of each case, "" for one that passed.
"""

import ctypes
import json
import os
import tempfile
import threading
import time
import traceback

import pytest

from watchdog.attribution import Ours
from watchdog.nvml import NvmlSource
from watchdog.runtime import RuntimeFigure
from watchdog.sampler import Sampler
from watchdog.snapshot import GIB, MIB
from watchdog.source import SourceError
from watchdog.visible import by_uuid

UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND = 1, 3, 4, 9, 13
GPU_IS_LOST, RM_VERSION_MISMATCH, UNKNOWN = 15, 18, 999
ANY, ALWAYS = -1, -1
NOT_AVAILABLE = 2**64 - 1
ATS = 2
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Stub:
    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libnvidia-ml.so.1")

    def device(self, uuid: str, name: str = "NVIDIA H200", bus: str = "00000000:01:00.0", parent: int = -1) -> int:
        return self.lib.stub_device(uuid.encode(), name.encode(), bus.encode(), parent)

    def memory(self, device: int, total: int, reserved: int, free: int, used: int | None = None) -> None:
        used = total - reserved - free if used is None else used
        self.lib.stub_memory(device, *map(ctypes.c_ulonglong, (total, reserved, free, used)))

    def card(self, uuid: str, free: int = GIB, **rest) -> int:
        device = self.device(uuid, **rest)
        self.memory(device, 16 * GIB, 600 * MIB, free)
        return device

    def process(self, device: int, pid: int, size: int) -> None:
        self.lib.stub_process(device, pid, ctypes.c_ulonglong(size))

    def fault(self, call: str, code: int, device: int = ANY, seconds: float = 0.0, times: int = ALWAYS) -> None:
        self.lib.stub_fault(call.encode(), device, code, ctypes.c_double(seconds), times)


def opened(uuid: str = "GPU-a") -> tuple[Stub, NvmlSource]:
    stub = Stub()
    stub.card(uuid)
    return stub, NvmlSource()


@case
def the_v2_figures_are_read_as_they_are() -> None:
    _, source = opened()
    reading = source.read(0, 5.0)
    assert (reading.at, reading.total, reading.reserved, reading.free) == (5.0, 16 * GIB, 600 * MIB, GIB)
    assert reading.used == 15 * GIB - 600 * MIB
    assert (reading.source, reading.own, reading.own_source) == ("nvml", None, "none")
    assert source.cards[0].name == "NVIDIA H200"
    assert source.cards[0].bus_id == "00000000:01:00.0"
    assert source.driver() == "580.159.01"
    assert source.cuda() == (13, 2)
    source.close()


@case
def figures_that_do_not_add_up_are_no_reading() -> None:
    stub, source = opened()
    stub.memory(0, 16 * GIB, 0, GIB, used=GIB)
    with pytest.raises(SourceError, match="total"):
        source.read(0, 0.0)
    stub.memory(0, 0, 0, 0)
    with pytest.raises(SourceError, match="no memory reading"):
        source.read(0, 0.0)
    stub.memory(0, 16 * GIB, 0, GIB)
    assert source.read(0, 0.0).free == GIB


def _older_struct(code: int) -> None:
    stub, source = opened()
    stub.fault("nvmlDeviceGetMemoryInfo_v2", code)
    reading = source.read(0, 0.0)
    assert (reading.source, reading.free, reading.total) == ("nvml_v1", GIB, 16 * GIB)
    assert reading.used is None, "the driver's reserve is in it"
    assert reading.reserved is None
    stub.lib.stub_no_faults()
    assert source.read(0, 1.0).source == "nvml_v1", "what was found out at the first reading is kept"


@case
def an_old_driver_tells_the_older_struct() -> None:
    _older_struct(FUNCTION_NOT_FOUND)


@case
def wsl_tells_the_older_struct() -> None:
    _older_struct(UNKNOWN)


@case
def a_card_that_once_spoke_v2_never_falls_back() -> None:
    stub, source = opened()
    source.read(0, 0.0)
    stub.fault("nvmlDeviceGetMemoryInfo_v2", UNKNOWN)
    with pytest.raises(SourceError, match="must be made anew"):
        source.read(0, 1.0)


@case
def shared_memory_is_the_hosts_available_memory() -> None:
    stub, source = opened()
    stub.fault("nvmlDeviceGetMemoryInfo_v2", NOT_SUPPORTED)
    stub.fault("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)
    with pytest.raises(SourceError, match="Not Supported"):
        source.read(0, 0.0)
    stub.lib.stub_addressing(0, ATS)
    reading = source.read(0, 0.0)
    assert reading.source == "system"
    assert reading.total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < reading.free < reading.total


@case
def without_figures_of_its_own_the_runtimes_are_taken() -> None:
    stub = Stub()
    stub.card("GPU-a")
    stub.fault("nvmlDeviceGetMemoryInfo_v2", NOT_SUPPORTED)
    stub.fault("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)
    figures = {}
    source = NvmlSource(figures.get)
    with pytest.raises(SourceError, match="engine has told"):
        source.read(0, 0.0)
    figures["GPU-a"] = RuntimeFigure(at=9.0, total=8 * GIB, free=3 * GIB)
    reading = source.read(0, 10.0)
    assert (reading.source, reading.total, reading.free, reading.used) == ("runtime", 8 * GIB, 3 * GIB, None)
    with pytest.raises(SourceError, match="engine has told"):
        source.read(0, 20.0)


@case
def cards_are_found_by_uuid_in_the_engines_order() -> None:
    stub = Stub()
    for number in range(3):
        stub.card(f"GPU-{number}", free=(number + 1) * GIB, bus=f"00000000:0{number}:00.0")
    source = NvmlSource()
    source.keep(by_uuid(source.cards, ["GPU-2", "GPU-0"]))
    assert [source.read(device, 0.0).free for device in range(2)] == [3 * GIB, GIB]
    with pytest.raises(SourceError, match="GPU-7, which is not among"):
        by_uuid(source.cards, ["GPU-7"])


@case
def mig_instances_are_devices_and_their_card_is_none() -> None:
    stub = Stub()
    parent = stub.card("GPU-a")
    for number in range(2):
        instance = stub.device(f"MIG-{number}", "NVIDIA H200 MIG 1g.18gb", "", parent)
        stub.memory(instance, 16 * GIB, 0, (number + 1) * GIB)
        stub.process(instance, 100 + number, MIB * 300)
    stub.card("GPU-b", free=5 * GIB)
    stub.fault("nvmlDeviceGetMemoryInfo_v2", NO_PERMISSION, device=parent)
    source = NvmlSource()
    assert [card.uuid for card in source.cards] == ["MIG-0", "MIG-1", "GPU-b"]
    assert [card.parent for card in source.cards] == ["GPU-a", "GPU-a", None]
    assert [source.read(device, 0.0).free for device in range(3)] == [GIB, 2 * GIB, 5 * GIB]
    assert source.holders(1) == {101: 300 * MIB}


@case
def who_holds_what_and_what_is_not_told() -> None:
    stub, source = opened()
    assert source.holders(0) == {}
    stub.process(0, 10, 2 * GIB)
    stub.process(0, 11, NOT_AVAILABLE)  # WSL
    stub.process(0, 12, 0)  # in a container, by some drivers: a context never weighs nothing
    assert source.holders(0) == {10: 2 * GIB, 11: None, 12: None}
    for code in (NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND):
        stub.lib.stub_no_faults()
        stub.fault("nvmlDeviceGetComputeRunningProcesses_v3", code)
        assert source.holders(0) is None
    assert source.read(0, 0.0).free == GIB, "memory is read all the same"


@case
def unknown_processes_leave_own_bytes_unknown() -> None:
    stub, source = opened()
    stub.process(0, 10, 2 * GIB)
    stub.process(0, 11, NOT_AVAILABLE)
    sampler = Sampler(source)
    sampler.attribute(Ours(frozenset({10}), "nvml"))
    reading = sampler.sample().devices[0].reading
    assert (reading.own, reading.own_source) == (2 * GIB, "nvml")
    assert reading.other == reading.used - 2 * GIB
    sampler.attribute(Ours(frozenset({11}), "nvml"))
    reading = sampler.sample().devices[0].reading
    assert (reading.own, reading.other, reading.own_source) == (None, None, "none")


@case
def a_start_that_fails_says_why() -> None:
    stub = Stub()
    for code, text in (
        (DRIVER_NOT_LOADED, "Driver Not Loaded .*modprobe"),
        (RM_VERSION_MISMATCH, "reboot"),
        (UNKNOWN, "must be made anew"),
        (NO_PERMISSION, "this user may not"),
        (77, "an error of the stub"),
    ):
        stub.lib.stub_no_faults()
        stub.fault("nvmlInitWithFlags", code)
        with pytest.raises(SourceError, match=text):
            NvmlSource()
    stub.lib.stub_no_faults()
    with pytest.raises(SourceError, match="no device"):
        NvmlSource()
    stub.card("GPU-a")
    assert len(NvmlSource().cards) == 1


@case
def one_lost_card_is_blind_and_the_other_is_left_alone() -> None:
    stub = Stub()
    for uuid in ("GPU-a", "GPU-b"):
        stub.card(uuid)
    source = NvmlSource()
    stub.fault("nvmlDeviceGetMemoryInfo_v2", GPU_IS_LOST, device=0)
    stub.fault("nvmlDeviceGetHandleByUUID", GPU_IS_LOST, device=0)
    for at in range(100):
        with pytest.raises(SourceError, match="fell off the bus"):
            source.read(0, float(at))
        assert source.read(1, float(at)).free == GIB
    assert stub.lib.stub_inits() == 1, "while one card answers nothing is started anew"
    stub.lib.stub_no_faults()
    assert source.read(0, 100.0).free == GIB


@case
def when_all_are_lost_it_starts_anew_ever_less_often() -> None:
    stub, source = opened()
    source.read(0, 0.0)
    stub.fault("nvmlDeviceGetMemoryInfo_v2", UNINITIALIZED)
    for at in range(300):
        with pytest.raises(SourceError):
            source.read(0, float(at))
    assert 6 <= stub.lib.stub_inits() - 1 <= 11, "1, 2, 4 … 60 s apart"
    stub.lib.stub_no_faults()
    assert source.read(0, 1000.0).free == GIB


@case
def a_new_start_that_fails_is_tried_again() -> None:
    stub, source = opened()
    source.read(0, 0.0)
    stub.fault("nvmlDeviceGetMemoryInfo_v2", UNKNOWN)
    stub.fault("nvmlInitWithFlags", UNKNOWN)
    for at in range(10):
        with pytest.raises(SourceError):
            source.read(0, float(at))
    stub.lib.stub_no_faults()
    stub.fault("nvmlShutdown", UNINITIALIZED)
    assert source.read(0, 100.0).free == GIB


@case
def a_call_that_hangs_is_seen_from_outside_and_starts_no_second_thread() -> None:
    stub = Stub()
    for uuid in ("GPU-a", "GPU-b"):
        stub.card(uuid)
    stub.fault("nvmlDeviceGetMemoryInfo_v2", 0, device=0, seconds=3.0, times=1)
    sampler = Sampler(NvmlSource())
    threads = threading.active_count()
    sampler.start()
    time.sleep(2.4)
    during = sampler.snapshot().devices
    assert threading.active_count() == threads + 1
    assert "a call has taken" in during[0].health.error
    assert during[0].fresh(time.monotonic(), 5.0) is None
    while sampler.snapshot().sequence == 0:
        time.sleep(0.02)
    after = sampler.snapshot().devices
    assert "a call took 3.0 s" in after[0].health.error
    assert after[0].reading is None
    assert after[1].reading.free == GIB
    assert sampler.stop()


def _forked(function) -> str:
    with tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if child == 0:
            try:
                function()
            except BaseException:  # noqa: BLE001 - whatever it was is the result of the case
                told.write(traceback.format_exc())
                told.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        return told.read() or ("" if status == 0 else f"died: status {status}")


if __name__ == "__main__":
    print(json.dumps({name: _forked(function) for name, function in CASES.items()}))  # noqa: T201
