from pathlib import Path

import pytest

from engine.memory.host import available_bytes

GIB = 1 << 30


class Machine:
    def __init__(self, root: Path) -> None:
        self.meminfo = root / "meminfo"
        self.cgroups = root / "cgroup"
        self.own = root / "own"
        self.cgroups.mkdir()
        self.meminfo.write_text("MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable:   8388608 kB\n")

    def group(self, path: str, limit: str, current: int, inactive_file: int) -> None:
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")

    def available(self) -> int:
        return available_bytes(self.meminfo, self.cgroups, self.own)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_groups(machine: Machine) -> None:
    assert machine.available() == 8 * GIB


def test_a_container_sees_its_limit_at_the_root(machine: Machine) -> None:
    machine.own.write_text("0::/\n")
    machine.group("", str(4 * GIB), 3 * GIB, 1 * GIB)
    assert machine.available() == 2 * GIB


def test_the_tightest_limit_on_the_way_up_counts(machine: Machine) -> None:
    machine.own.write_text("1:name=systemd:/x\n0::/a/b/c\n")
    machine.group("a", str(5 * GIB), 1 * GIB, 0)
    machine.group("a/b", str(3 * GIB), 1 * GIB, 0)
    machine.group("a/b/c", "max", 1 * GIB, 0)
    assert machine.available() == 2 * GIB


def test_a_full_group_leaves_nothing(machine: Machine) -> None:
    machine.own.write_text("0::/a\n")
    machine.group("a", str(1 * GIB), 2 * GIB, 0)
    assert machine.available() == 0


def test_a_loose_limit_does_not_add_memory(machine: Machine) -> None:
    machine.own.write_text("0::/a\n")
    machine.group("a", str(100 * GIB), 2 * GIB, 0)
    assert machine.available() == 8 * GIB


def test_a_machine_that_does_not_say(machine: Machine) -> None:
    machine.meminfo.write_text("MemTotal: 1 kB\n")
    with pytest.raises(ValueError, match="MemAvailable"):
        machine.available()


def test_this_machine() -> None:
    assert available_bytes() > 0
