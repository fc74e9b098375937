"""How much of the host's memory is free: by the kernel, and by every limit on this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

_NO_LIMIT = 1 << 60
"""cgroup v1 says a limit near 2^63 where there is none."""


def free_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes that this process can take without anybody's being pushed out; 0 if unknown.

    The page cache counts as free, in a container's limit as well as on the host.
    """
    return max(0, min([_on_host(proc), *_in_groups(proc, cgroups)]))


def _on_host(proc: Path) -> int:
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 0


def _in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield what is free in each group that limits this process: its own, and those around it."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            names = ("memory.max", "memory.current", "inactive_file")
            root = cgroups
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = cgroups / "memory"
        else:
            continue
        # In a container the path may be the host's, and what is mounted the group itself.
        group = Path(path.lstrip("/"))
        for each in {root / group, *(root / parent for parent in group.parents), root}:
            yield from _in_group(each, *names)


def _in_group(group: Path, limit: str, usage: str, cached: str) -> Iterator[int]:
    most, used = _read(group / limit).strip(), _read(group / usage).strip()
    if not most.isdigit() or not used.isdigit() or int(most) >= _NO_LIMIT:
        return
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    yield int(most) - int(used) + int(stat.get(cached, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
