"""What a probe has found out: one value, from which verdict, table, JSON and plot are made. Pure.

Bytes are bytes, times are seconds. What was not measured is empty or None.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from entrypoint.checkpoint.digest import Json

Place = Literal["disk", "image", "network", "fuse", "memory", "layer", "object", "unknown"]
"""Where bytes lie: this host's disk, a read-only image of one, another host, a program's file
system, memory, a container's own layer, an object store, or nobody knows."""


class FileSystem(NamedTuple):
    """What a path lies on; `kind` is the kernel's word, or an object store's scheme."""

    kind: str
    place: Place
    mount_point: str = ""
    source: str = ""
    options: tuple[str, ...] = ()
    free: int | None = None
    total: int | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the stable fields."""
        return {
            "kind": self.kind,
            "place": self.place,
            "mount_point": self.mount_point,
            "source": self.source,
            "options": list(self.options),
            "free_bytes": self.free,
            "total_bytes": self.total,
        }


class Rate(NamedTuple):
    """What so many workers did at once: bytes or operations, in so many seconds."""

    workers: int
    amount: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Bytes or operations a second, of all workers together."""
        return self.amount / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Json]:
        """Return the stable fields."""
        return {
            "workers": self.workers,
            "amount": self.amount,
            "seconds": round(self.seconds, 6),
            "per_second": round(self.per_second, 1),
        }


class Latency(NamedTuple):
    """How long each of so many like operations took."""

    times: int
    median: float
    p99: float

    def to_json(self) -> dict[str, Json]:
        """Return the stable fields, in milliseconds."""
        return {
            "times": self.times,
            "median_ms": round(self.median * 1e3, 4),
            "p99_ms": round(self.p99 * 1e3, 4),
        }


class Watched(NamedTuple):
    """What a reader saw who looked at a name all the time while it was renamed to."""

    renames: int
    looks: int
    missing: int
    torn: int
    failed: int

    @property
    def is_atomic(self) -> bool:
        """Whether the reader always saw the old or the new, and all of it."""
        return not self.missing and not self.torn

    def to_json(self) -> dict[str, Json]:
        """Return the stable fields."""
        return {**self._asdict(), "atomic": self.is_atomic}


class Findings(NamedTuple):
    """Everything about one place.

    `hung` names the step that got no answer, `failures` those that ended with an error. `flock`
    is `honoured`, `ignored`, `kept` (not given back by a process that died) or `unsupported`.
    `inotify` is about own writes, `inotify_across` about those through another mount.
    `conditional` is an object store's: whether it refuses to put over what is there.
    """

    path: str
    file_system: FileSystem | None = None
    also: str = ""
    unwritable: str = ""
    write: tuple[Rate, ...] = ()
    read: tuple[Rate, ...] = ()
    cold: str = ""
    small: tuple[tuple[str, Rate], ...] = ()
    fsync: Latency | None = None
    over: Watched | None = None
    into: Watched | None = None
    flock: str = ""
    inotify: bool | None = None
    inotify_across: bool | None = None
    mmap: bool | None = None
    conditional: bool | None = None
    failures: tuple[tuple[str, str], ...] = ()
    hung: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return the stable fields."""
        return {
            "path": self.path,
            "also": self.also or None,
            "file_system": self.file_system and self.file_system.to_json(),
            "unwritable": self.unwritable or None,
            "write": [rate.to_json() for rate in self.write],
            "read": [rate.to_json() for rate in self.read],
            "cold": self.cold or None,
            "small": {name: rate.to_json() for name, rate in self.small},
            "fsync": self.fsync and self.fsync.to_json(),
            "rename": {
                "over": self.over and self.over.to_json(),
                "into_place": self.into and self.into.to_json(),
            },
            "flock": self.flock or None,
            "inotify": {"own": self.inotify, "across": self.inotify_across},
            "mmap": self.mmap,
            "conditional_put": self.conditional,
            "failures": dict(self.failures),
            "hung": self.hung or None,
        }


def learn(findings: Findings, field: str, value: Any) -> Findings:
    """Return the findings with one more, as the measuring process sent it through its pipe."""
    match field:
        case "file_system":
            found = FileSystem(*value)
            value = found._replace(options=tuple(found.options))
        case "write" | "read":
            value = tuple(Rate(*row) for row in value)
        case "small" | "failures":
            value = tuple((name, Rate(*what) if field == "small" else what) for name, what in value)
        case "fsync":
            value = Latency(*value)
        case "over" | "into":
            value = Watched(*value)
    return findings._replace(**{field: value})
