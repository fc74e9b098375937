"""The processes of a real server, by what they do, and waiting for those that replace them."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from processes import ProgramError, descendants
from serving import Server

LIMIT_SECONDS: Final = 300.0
POLL_SECONDS: Final = 0.02
LISTENS: Final = "0A"
"""The state of a socket that listens, in /proc/net/tcp (proc(5))."""

PARTS: Final = {"API server": "", "engine core": "EngineCore", "worker": "Worker"}
"""What a server is made of, and what vLLM calls each part; the first listens."""


def listener(root: int, port: int) -> int | None:
    """Return which one of a process and its descendants listens on a port, if one does."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    ours = [row for row in rows if row[1].endswith(f":{port:04X}") and row[3] == LISTENS]
    sockets = {f"socket:[{row[9]}]" for row in ours}
    for pid in (root, *descendants(root)):
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                if os.readlink(descriptor) in sockets:
                    return pid
    return None


def part(root: int, title: str, listens: int) -> int:
    """Return a process by vLLM's title for it; the one that listens has none.

    Raises: ProgramError.
    """
    if not title:
        return listens
    for pid in sorted(descendants(root)):
        if f"VLLM::{title}" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
            return pid
    raise ProgramError(f"no process is called VLLM::{title}")


def wait_for_another(
    server: Server, before: int | None, root: int | None = None
) -> tuple[int, float]:
    """Return who serves, when it is another one than before, and when that was.

    `root` is the process above it, where `server` runs in a container. Raises: ProgramError.
    """
    above = root or server.process.pid
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        healthy, now = server.is_healthy(), time.monotonic()
        found = listener(above, server.port) if healthy else None
        if found is not None and found != before:
            return found, now
        time.sleep(POLL_SECONDS)
    raise ProgramError(f"nobody serves:\n{server.last_lines()}")
