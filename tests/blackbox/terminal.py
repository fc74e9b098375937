"""What people see of a command: its stderr is a terminal."""

from __future__ import annotations

import os
import pty
from typing import Any

from blackbox.harness import House

END_SECONDS = 20.0


def shown_by(house: House, *words: object, end_after: str = "", **more: Any) -> tuple[int, str]:
    """Run a command in a format of its own choice; return its exit status and what it has shown.

    It is told to end once it has shown `end_after`.
    """
    ours, theirs = pty.openpty()
    more.setdefault("SHARDBOOT_LOG_FORMAT", None)
    process = house.start(*words, stderr=theirs, **more)
    os.close(theirs)
    shown = b""
    with open(ours, "rb", buffering=0) as terminal:
        while piece := _read(terminal.fileno()):
            shown += piece
            if end_after and end_after.encode() in shown:
                process.terminate()
                end_after = ""
    return process.wait(END_SECONDS), shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # what Linux answers when nobody holds the other end any more
        return b""
