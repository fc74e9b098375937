"""All that a probe does in a directory: one measurement after the other, told as they come.

Runs in a process of its own: any call here may hang with its mount.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from entrypoint.checkpoint.digest import PIECE_BYTES
from entrypoint.errors import ConfigError, OwnershipError, ShardbootError, SpaceError, StoreError
from entrypoint.insight import mount, pace, promises
from entrypoint.insight.findings import FileSystem, Rate
from entrypoint.insight.overseer import Claim
from entrypoint.insight.pace import Lane
from entrypoint.insight.telling import LOOK_SECONDS, NO_ROOM, Teller
from entrypoint.store import tree
from entrypoint.store.space import HINT, Limits, require_room

SCRATCH: Final = ".shardboot-probe-"

_STALE_SECONDS: Final = 3600.0
_SWEEP_SECONDS: Final = 30.0
_MEMORY_BYTES: Final = 64 * 1024 * 1024
"""Written at most where files are memory: it may be all that a container has."""

_PART: Final = 8
"""Of the bytes to write, three eighths go into each round of large files, one of small ones."""

_MOST_ENTRIES: Final = 1000


class Order(NamedTuple):
    """How much to measure: bytes to write at most, seconds, workers, bytes that must stay free."""

    size: int
    seconds: float
    workers: int
    reserve: int


class Spot(NamedTuple):
    """A directory to probe, what is made in it, and the directory as another mount shows it."""

    path: Path
    scratch: Path
    also: Path | None


def examine(spot: Spot, order: Order, teller: Teller, claim: Claim) -> None:
    """Do all that touches the mount; tell what comes out."""
    try:
        file_system = _look(spot.path)
        teller.found("file_system", file_system)
        if file_system.place == "memory":
            order = order._replace(size=min(order.size, _MEMORY_BYTES))
        # A large directory, or much that was left, takes a while.
        teller.begin("sweep", _SWEEP_SECONDS)
        _sweep(spot.path)
        teller.begin("make a directory", LOOK_SECONDS)
        unwritable = _make(spot, order, claim)
        if unwritable:
            teller.found("unwritable", unwritable)
            _read_existing(spot.path, order, teller)
        else:
            _measure(spot, order, teller, in_memory=file_system.place == "memory")
    except ShardbootError as error:
        teller.refuse(error)
    except OSError as error:
        text = f"{spot.path}: {error.strerror}"
        full = error.errno in NO_ROOM
        teller.refuse(SpaceError(text, hint=HINT) if full else StoreError(text))
    else:
        teller.end()


def _look(path: Path) -> FileSystem:
    """Say what the directory lies on. Raises: StoreError, OwnershipError."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            raise StoreError(f"{path}: expected a directory, found a file")
        found = mount.look(path)
        os.scandir(path).close()
    except PermissionError as error:
        hint = "run it as the user who is to serve"
        raise OwnershipError(f"{path}: {error.strerror}", hint=hint) from None
    except OSError as error:
        hint = "make it, or name a directory on the mount that is meant"
        raise StoreError(f"{path}: {error.strerror}", hint=hint) from None
    return found


def _make(spot: Spot, order: Order, claim: Claim) -> str:
    """Make the scratch directory, or return why nothing can be made. Raises: SpaceError."""
    claim()
    try:
        spot.scratch.mkdir(mode=0o700)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        return error.strerror or str(error)
    require_room(spot.path, order.size, Limits(order.reserve))
    return ""


def _sweep(path: Path) -> None:
    """Delete what probes of ours have left that were killed with all their processes."""
    with os.scandir(path) as entries:
        left = [entry for entry in entries if entry.name.startswith(SCRATCH)]
    for entry in left:
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            is_stale = time.time() - status.st_mtime > _STALE_SECONDS
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and is_stale:
                tree.remove(Path(entry.path))


def _measure(spot: Spot, order: Order, teller: Teller, *, in_memory: bool) -> None:
    """Write, read, and see what holds; `seconds` are shared out among the steps."""
    scratch, there = spot.scratch, _through(spot)
    large = _measure_large(scratch, order, teller, in_memory=in_memory)
    _measure_small(scratch / "small", order, teller)
    share = order.seconds * 0.1
    with teller.step("fsync", share):
        teller.found("fsync", pace.sync_latency(scratch / "synced", share))
    share = order.seconds * 0.06
    with teller.step("rename over", share + promises.SEEN_SECONDS):
        teller.found("over", promises.rename_over(scratch, there, share))
    with teller.step("rename into place", share + promises.SEEN_SECONDS):
        teller.found("into", promises.rename_into(scratch, there, share))
    with teller.step("flock", promises.SEEN_SECONDS):
        teller.found("flock", promises.lock(scratch, there))
    with teller.step("inotify", promises.SEEN_SECONDS):
        teller.found("inotify", promises.notices(scratch, (scratch / "news").touch))
        if spot.also is not None:
            seen = promises.notices(there, (scratch / "more-news").touch)
            teller.found("inotify_across", seen)
    if large is not None:
        with teller.step("mmap", promises.SEEN_SECONDS):
            teller.found("mmap", promises.can_map(large))


def _through(spot: Spot) -> Path:
    """Return the scratch directory as the other mount shows it. Raises: ConfigError."""
    if spot.also is None:
        return spot.scratch
    there = spot.also / spot.scratch.name
    deadline = time.monotonic() + LOOK_SECONDS / 2
    while not there.is_dir():
        if time.monotonic() > deadline:
            msg = f"{spot.also}: does not show what is written to {spot.path}"
            raise ConfigError(msg, hint="--also takes the same directory through another mount")
        time.sleep(0.05)
    return there


def _measure_large(scratch: Path, order: Order, teller: Teller, *, in_memory: bool) -> Path | None:
    """Write and read large files, with one worker and with all; return one, if there is any."""
    share = order.seconds * 0.12
    one = [scratch / "one"]
    many = [scratch / f"of-many-{number}" for number in range(order.workers)]
    rates: list[Rate] = []
    for paths in (one, many):
        with teller.step(_named("write", len(paths)), share):
            rates.append(pace.write(paths, 3 * order.size // _PART // len(paths), share))
            teller.found("write", rates)
    lanes = [
        [Lane(path, 0, size) for path in paths if (size := _size(path))] for paths in (one, many)
    ]
    _read(lanes, share, teller, "ours, in memory" if in_memory else "ours")
    return one[0] if lanes[0] else None


def _size(path: Path) -> int:
    """Return the bytes of a file, 0 where writing it failed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read(
    lanes: Sequence[Sequence[Lane]],
    share: float,
    teller: Teller,
    whose: Literal["ours", "ours, in memory", "others"],
) -> None:
    rates: list[Rate] = []
    for each in lanes:
        if not each:
            continue
        with teller.step(_named("read", len(each)), share):
            rate, way = pace.read_cold(each, share, is_ours=whose != "others")
            rates.append(rate)
            teller.found("read", rates)
            teller.found("cold", "memory" if whose == "ours, in memory" else way)


def _named(what: str, workers: int) -> str:
    return f"{what}, {workers} worker{'s' if workers > 1 else ''}"


def _measure_small(directory: Path, order: Order, teller: Teller) -> None:
    share = order.seconds * 0.06
    synced, count = directory / "synced", order.workers
    most = order.size // _PART // pace.SMALL_BYTES
    steps: tuple[tuple[str, Callable[[], Rate]], ...] = (
        ("create", lambda: pace.make_small(directory, count, most, share, synced=False)),
        ("create+fsync", lambda: pace.make_small(synced, count, most, share, synced=True)),
        ("stat", lambda: pace.visit_small(directory, count, share, Path.stat)),
        ("read", lambda: pace.visit_small(directory, count, share, Path.read_bytes)),
        ("unlink", lambda: pace.visit_small(directory, count, share, Path.unlink)),
    )
    rates: list[tuple[str, Rate]] = []
    for name, measure in steps:
        with teller.step(f"small files: {name}", share):
            rates.append((name, measure()))
            teller.found("small", rates)


def _read_existing(path: Path, order: Order, teller: Teller) -> None:
    """Read what lies there already, where nothing can be written: never twice, and no more."""
    found: Lane | None = None
    with teller.step("finding checkpoints", LOOK_SECONDS):
        found = largest_shard(path)
    if found is None:
        return
    end = min(found.end, order.size)
    half = end // 2 // PIECE_BYTES * PIECE_BYTES
    lanes = [[Lane(found.path, 0, half)], pace.lanes_of(found.path, half, end, order.workers)]
    share = order.seconds * 0.3
    _read([each for each in lanes if each and each[0].end], share, teller, "others")
    with teller.step("mmap", promises.SEEN_SECONDS):
        teller.found("mmap", promises.can_map(found.path))


def largest_shard(path: Path) -> Lane | None:
    """Return the largest weight file in a checkpoint, or in a store of some, whole."""
    best: Lane | None = None
    for directory in (path, *(d for d in _entries(path) if d.is_dir())):
        for file in _entries(directory):
            with contextlib.suppress(OSError):
                status = file.stat()
                is_shard = file.suffix == ".safetensors" and stat.S_ISREG(status.st_mode)
                if is_shard and status.st_size > (best.end if best else 0):
                    best = Lane(file, 0, status.st_size)
    return best


def _entries(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return [Path(entry.path) for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False)]
    return []
