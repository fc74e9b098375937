"""Telling systemd how the service is (sd_notify(3)); nothing where it did not ask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

SEND_SECONDS: Final = 0.3
STALL_SECONDS: Final = 1800.0
"""What does not move for so long makes no progress; compiling a large model takes minutes."""

EXTENSION_SECONDS: Final = 60
PATIENCE: Final = {"EXTEND_TIMEOUT_USEC": str(EXTENSION_SECONDS * 1_000_000)}


def notify(environ: Mapping[str, str], **state: str) -> None:
    """Send assignments such as `STATUS` and `READY` to the socket that systemd listens on."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    import socket  # noqa: PLC0415 - only under systemd

    lines = "".join(f"{name}={value}\n" for name, value in state.items())
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(SEND_SECONDS)
        # In front, "@" stands for the NUL that begins an abstract name.
        place = "\0" + address[1:] if address[0] == "@" else address
        channel.sendto(lines.encode(), place)


def be_patient(environ: Mapping[str, str], line: str) -> float:
    """Tell systemd that nothing hangs; return after how many seconds it must hear so again."""
    notify(environ, STATUS=line, WATCHDOG="1", **PATIENCE)
    return patience(environ)


def patience(environ: Mapping[str, str]) -> float:
    """Return for how many seconds systemd may hear nothing; infinity where it never listens."""
    if not environ.get("NOTIFY_SOCKET"):
        return math.inf
    word = environ.get("WATCHDOG_USEC", "")
    watchdog = int(word) / 1e6 if word.isdigit() and int(word) else math.inf
    return min(EXTENSION_SECONDS, watchdog) / 3
