"""How much of the host's memory this process may still take."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroups: Path = _CGROUPS, own_cgroup: Path = _OWN_CGROUP) -> int:
    """MemAvailable, or the room left under the tightest memory limit of our control groups (version 2) if less.

    Raises OSError or ValueError where /proc does not say.
    """
    return min([_mem_available(meminfo), *_cgroup_rooms(cgroups, own_cgroup)])


def _mem_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise ValueError(f"{meminfo}: there is no MemAvailable")


def _cgroup_rooms(cgroups: Path, own_cgroup: Path) -> list[int]:
    """Room under each limit from our own group up; in a container its group is the root that is seen."""
    if not own_cgroup.exists():
        return []
    paths = [line[3:] for line in own_cgroup.read_text().splitlines() if line.startswith("0::")]
    rooms = []
    for path in paths:
        folder = cgroups / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit = group / "memory.max"
            if group.is_relative_to(cgroups) and limit.exists() and (text := limit.read_text().strip()) != "max":
                rooms.append(max(0, int(text) - _unreclaimable(group)))
    return rooms


def _unreclaimable(group: Path) -> int:
    """Bytes charged to a group less the page cache that the kernel takes back first."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / "memory.current").read_text()) - int(stat["inactive_file"])
