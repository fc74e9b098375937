"""One line for every decision, on stderr: for people, or as JSON.

vLLM's own output goes on after exec on the same streams; nothing is buffered here.
"""

from __future__ import annotations

import json
import os
import time

from entrypoint.checkpoint.digest import Json
from entrypoint.errors import one_line


class Log:
    """Writes lines of one boot to a descriptor, each with an event name and a sentence."""

    def __init__(
        self, boot: str, *, as_json: bool = False, has_bars: bool = False, descriptor: int = 2
    ) -> None:
        self.boot, self.as_json, self.descriptor = boot, as_json, descriptor
        # Long steps draw a bar instead of lines.
        self.has_bars = has_bars

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


def human_bytes(count: float) -> str:
    """Return a size for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:  # noqa: PLR2004 - binary units
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
