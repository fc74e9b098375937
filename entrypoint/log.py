"""One line for every decision, on stderr: for people, or as JSON.

vLLM's own output goes on after exec on the same streams; nothing is buffered here.
"""

from __future__ import annotations

import json
import os
import time
from typing import Literal

from entrypoint.checkpoint.digest import Json
from entrypoint.errors import one_line

Form = Literal["bars", "text", "json"]
"""Lines for people, with bars for long steps or without, or lines of JSON."""


def form_of(setting: str, *, is_daemon: bool, is_terminal: bool) -> Form:
    """Return what lines look like: as `setting` asks, else (`auto`) as who reads them needs it.

    Off a terminal a daemon's lines are collected by programs; a command's are still read by whoever
    typed it, as with `2>err.txt` or through ssh.
    """
    if setting == "text":
        return "text"
    if setting == "json" or (is_daemon and not is_terminal):
        return "json"
    return "bars" if is_terminal else "text"


class Log:
    """Writes lines of one boot to a descriptor, each with an event name and a sentence."""

    def __init__(self, boot: str, form: Form = "text", *, descriptor: int = 2) -> None:
        self.boot, self.descriptor = boot, descriptor
        self.as_json, self.has_bars = form == "json", form == "bars"

    def line(self, event: str, text: str, **fields: Json) -> None:
        """Write one line: the event's dotted name, and what a tired reader needs to know."""
        if self.as_json:
            entry = {"time": round(time.time(), 3), "boot": self.boot, "event": event}
            self._write(json.dumps(entry | {"message": text} | fields))
        else:
            self._write(f"shardboot: {event}: {one_line(text)}")

    def decided(self, reason: str, text: str, **fields: Json) -> None:
        """Write the line of a boot's decision, for people with the name that the ledger has."""
        said = text if self.as_json else f"{text} [boot {self.boot}]"
        self.line(reason, said, **fields)

    def _write(self, line: str) -> None:
        # One write, so that lines of several processes never mix; a closed stderr is no failure.
        try:
            os.write(self.descriptor, line.encode(errors="replace") + b"\n")
        except OSError:
            return


def stderr_log(boot: str, setting: str, *, is_daemon: bool) -> Log:
    """Return the log of a boot, on stderr, as `setting` and what stderr is ask for."""
    return Log(boot, form_of(setting, is_daemon=is_daemon, is_terminal=os.isatty(2)))


def human_bytes(count: float) -> str:
    """Return a size for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:  # noqa: PLR2004 - binary units
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
