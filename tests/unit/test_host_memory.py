"""What memory is free to take: the least that the kernel and any group around us leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.vllm_plugin.host_memory import free_bytes

GB = 1_000_000_000


class Host:
    """A /proc with 10 GB available, and a /sys/fs/cgroup."""

    def __init__(self, root: Path, group: str) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {10 * GB // 1024} kB\n")
        (self.proc / "self" / "cgroup").write_text(f"{group}\n")

    def limit(self, group: str, **files: object) -> None:
        directory = self.groups / group
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name.replace("__", ".")).write_text(f"{text}\n")

    @property
    def free(self) -> float:
        return round(free_bytes(self.proc, self.groups) / GB, 2)


def test_without_limits_the_kernel_says(tmp_path: Path) -> None:
    host = Host(tmp_path, "0::/")
    host.limit("", memory__max="max", memory__current=GB)
    assert host.free == 10


@pytest.mark.parametrize("mounted", ["a/b", "a", ""])
def test_the_closest_limit_counts_and_what_is_cached_in_it_is_free(
    tmp_path: Path, mounted: str
) -> None:
    # In a container the group itself may be mounted where its path says another.
    host = Host(tmp_path, "0::/a/b")
    files = {"memory__max": 4 * GB, "memory__current": 3 * GB}
    host.limit(mounted, **files, memory__stat=f"anon 1\ninactive_file {GB}")
    assert host.free == 2


def test_the_first_version_of_groups_has_limits_as_well(tmp_path: Path) -> None:
    host = Host(tmp_path, "5:cpu:/x\n4:memory,other:/x")
    usage = {"memory__usage_in_bytes": 3 * GB, "memory__stat": f"total_inactive_file {GB}"}
    host.limit("memory/x", memory__limit_in_bytes=5 * GB, **usage)
    host.limit("memory", memory__limit_in_bytes=2**63 - 4096, **usage)
    assert host.free == 3


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    host = Host(tmp_path, "0::/")
    host.limit("", memory__max=GB, memory__current=2 * GB)
    assert host.free == 0


def test_where_nothing_can_be_read_nothing_is_free(tmp_path: Path) -> None:
    assert free_bytes(tmp_path, tmp_path) == 0
