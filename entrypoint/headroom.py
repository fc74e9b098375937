"""How much memory is free: in the machine, and in every cgroup that this process is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple


class Names(NamedTuple):
    """What the files of a cgroup are called in one version of cgroups."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


V1: Final = Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
V2: Final = Names(("memory.max", "memory.high"), "memory.current", "inactive_file")


def free_bytes(root: Path = Path("/")) -> int:
    """Return how many bytes can be filled, page cache included, before somebody is short of them.

    What cannot be read sets no bound, but for the machine's own memory: without that it is 0.
    """
    available = 0
    with suppress(OSError, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        table = dict(line.split(":", 1) for line in lines)
        available = int(table.get("MemAvailable", "0").split()[0]) * 1024
    return max(0, min([available, *_left_in_cgroups(root)]))


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Yield what is left below each limit, from this process's own cgroup up."""
    mounts = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _left_from(mounts / "memory", path, V1)
        elif not controllers:
            yield from _left_from(mounts, path, V2)


def _left_from(mount: Path, path: str, names: Names) -> Iterator[int]:
    # A container may see its own cgroup as the root of all, under a path that is not there.
    group = mount / path.strip("/")
    for each in (group, *group.parents):
        if each.is_relative_to(mount):
            with suppress(OSError, ValueError):
                yield from _left(each, names)


def _left(group: Path, names: Names) -> Iterator[int]:
    usage = int((group / names.usage).read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = usage - int(stat.get(names.reclaimable, "0"))
    for name in names.limits:
        with suppress(OSError, ValueError):  # "max" is no limit
            yield int((group / name).read_text()) - used
