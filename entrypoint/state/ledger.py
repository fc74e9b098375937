"""The ledger: one JSON line for every boot and what became of it. Bounded; a torn end is tolerated.

After exec shardboot sees nothing: what must be known later is written here before.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from entrypoint.checkpoint.digest import Json, canonical
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.state.files import open_kept

MAX_LEDGER_BYTES = 4 * 1024 * 1024
RECENT_BYTES = 64 * 1024
"""Some twenty boots, each with its phases and what was noted of it: where to look first."""

SEARCHED_BYTES = 512 * 1024
"""Where to look when that tells of too few: the ledger is one for all servers of a node."""

ENOUGH = 32
"""So many lines about one thing are enough, and no older ones are looked for."""


class Ledger:
    """Append-only lines under `root`, in `ledger.jsonl` and one older `ledger.1.jsonl`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def path(self) -> Path:
        """The current file."""
        return self.root / "ledger.jsonl"

    @property
    def older(self) -> Path:
        """The file before it; between a rotation and the next line there is no other."""
        return self.root / "ledger.1.jsonl"

    def append(self, entry: dict[str, Json]) -> bool:
        """Add one line in one write; return False where nothing can be written.

        No fsync: a power loss may lose the last lines, and a hit must not wait for the disk.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = open_kept(self.path, os.O_RDWR | os.O_APPEND, 0o640)
            try:
                size = os.fstat(descriptor).st_size
                # The line that a crash tore must not swallow this one.
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                line = (b"\n" if torn else b"") + canonical(entry) + b"\n"
                # A disk that is nearly full takes a part of it.
                is_whole = os.write(descriptor, line) == len(line)
                if size > MAX_LEDGER_BYTES:
                    self._rotate(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            return False
        return is_whole

    def _rotate(self, descriptor: int) -> None:
        """Begin a new file, unless another process just did so with the one that was written to."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(self.path)):
                self.path.replace(self.older)

    def recent_about(self, what: str) -> list[dict[str, Json]]:
        """Return the latest whole lines that name `what`, and those about the boots of these.

        Oldest first. A hit pays for this: no line about anything else is parsed.
        """
        name = what.encode(errors="replace")
        data = self._tail(RECENT_BYTES)
        if data.count(name) < ENOUGH:
            data = self._tail(SEARCHED_BYTES)
        lines: list[bytes] = []
        boots: list[bytes] = []
        for line in reversed(data.splitlines()):
            lines.append(line)
            if name in line:
                boots.append(_boot_in(line))
                if len(boots) == ENOUGH:
                    break
        meant = {*boots} - {b""}
        about = [line for line in reversed(lines) if name in line or _boot_in(line) in meant]
        return list(_whole(b"\n".join(about)))

    def recent_of(self, boot: str) -> list[dict[str, Json]]:
        """Return the latest whole lines about one boot, oldest first; no other one is parsed.

        Nor is more than a line held: a supervisor asks, which is small and stays so.
        """
        name, lines = boot.encode(errors="replace"), list[bytes]()
        for count in (RECENT_BYTES, SEARCHED_BYTES):
            lines = [line for line in self._last_lines(count) if name in line]
            if any(b'"attempt"' in line for line in lines):
                # Nothing is noted of a boot before that.
                break
        return [entry for entry in _whole(b"\n".join(lines)) if entry.get("boot") == boot]

    def _tail(self, count: int) -> bytes:
        return b"".join(self._last_lines(count))

    def _last_lines(self, count: int) -> Iterator[bytes]:
        """Yield the last so many bytes, by lines; the first may be the end of one."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as files:
            # This one first: should it be the older one by now, none of it is missed.
            newer = files.enter_context(_opened(self.path))
            left = count - min(count, os.fstat(newer.fileno()).st_size)
            older = files.enter_context(_opened(self.older))
            for file, length in ((older, left), (newer, count)):
                file.seek(max(0, os.fstat(file.fileno()).st_size - length))
                yield from file

    def entries(self) -> Iterator[dict[str, Json]]:
        """Yield every whole line, oldest first; what is torn or foreign is skipped."""
        for path in (self.older, self.path):
            try:
                data = read_bounded(path, 4 * MAX_LEDGER_BYTES)
            except (OSError, ValueError):
                continue
            yield from _whole(data)


def _boot_in(line: bytes) -> bytes:
    """Return what a line says of which boot it is about, as `canonical` writes it."""
    return line.partition(b'"boot":"')[2].partition(b'"')[0]


def _opened(path: Path) -> IO[bytes]:
    """Open a file to read; an empty one where there is none."""
    try:
        return path.open("rb")
    except OSError:
        return open(os.devnull, "rb")


def _whole(data: bytes) -> Iterator[dict[str, Json]]:
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            yield entry
