"""How much memory can be filled: the machine's own word, and every cgroup's limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.headroom import free_bytes

MACHINE = 16 << 20
MEMINFO = "MemTotal:       32768 kB\nMemFree:         100 kB\nMemAvailable:   16384 kB\n"


def group(limit: str, usage: int, file: int, *, high: str = "max") -> dict[str, str]:
    stat = f"anon 5\ninactive_file {file}\n"
    return {
        "memory.max": limit,
        "memory.high": high,
        "memory.current": str(usage),
        "memory.stat": stat,
    }


def group_v1(limit: int, usage: int, file: int) -> dict[str, str]:
    stat = f"inactive_file 1\ntotal_inactive_file {file}\n"
    return {
        "memory.limit_in_bytes": str(limit),
        "memory.usage_in_bytes": str(usage),
        "memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("line", "groups", "expected"),
    [
        ("", {}, MACHINE),
        ("0::/a", {"a": group("max", 500, 0)}, MACHINE),
        ("0::/a", {"a": group("1000", 300, 0)}, 700),
        # Page cache that nobody uses makes room.
        ("0::/a", {"a": group("1000", 900, 600)}, 700),
        ("0::/a", {"a": group("1000", 300, 0, high="500")}, 200),
        ("0::/a", {"a": group("1000", 1200, 0)}, 0),
        # A limit above counts as well.
        ("0::/a/b", {"a": group("1000", 800, 0), "a/b": group("900", 100, 0)}, 200),
        # In a container the path is the host's, and its own cgroup is the root.
        ("0::/kube/pod", {".": group("1000", 400, 0)}, 600),
        ("3:cpu,memory:/a", {"memory/a": group_v1(1000, 300, 100)}, 800),
        ("3:memory:/docker/x", {"memory": group_v1(1000, 300, 100)}, 800),
        ("3:memory:/a", {"memory/a": group_v1(9223372036854771712, 300, 100)}, MACHINE),
        ("3:cpu:/a\n0::/", {"a": group("1000", 300, 0)}, MACHINE),
        ("0::/a", {"a": {"memory.max": "1000"}}, MACHINE),
    ],
)
def test_the_lowest_bound_counts(
    line: str, groups: dict[str, dict[str, str]], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    (tmp_path / "proc/self/cgroup").write_text(line)
    for name, files in groups.items():
        directory = tmp_path / "sys/fs/cgroup" / name
        directory.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (directory / file).write_text(f"{text.strip()}\n")
    assert free_bytes(tmp_path) == expected


def test_nothing_is_free_where_nobody_tells(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) == 0


def test_this_machine_tells() -> None:
    assert free_bytes() > 0
