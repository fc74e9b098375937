"""How far a long step is: in the status, and in a bar on a terminal, else in lines now and then."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from entrypoint.log import Log, human_bytes
from entrypoint.state.reporter import Reporter

if TYPE_CHECKING:
    from tqdm import tqdm

PROGRESS_SECONDS: Final = 5.0
"""Between two lines."""


class Progress:
    """Tells of one step, whose `total` bytes may be a guess. A bar is gone when the block ends.

    What was `there` before counts as done when it is heard of, and not as moved. `first` says what
    goes on as long as nothing is done.
    """

    def __init__(
        self,
        log: Log,
        status: Reporter,
        verb: str,
        total: int,
        there: int = 0,
        first: str = "nothing is done yet",
    ) -> None:
        self._log, self._status, self._verb, self._total = log, status, verb, total
        self._done, self._there, self._first = 0, there, first
        self._started = self._said = time.monotonic()
        self._bar: tqdm | None = None

    def __enter__(self) -> Self:
        if self._log.has_bars:
            self._bar = _bar(self._verb, self._total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, count: int) -> None:
        """Hear of `count` more bytes."""
        self.at(self._done + count)

    def at(self, done: int) -> None:
        """Hear that `done` bytes are done."""
        self._done = done
        self._status.progress(done, self._total)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._said >= PROGRESS_SECONDS:
            self._said = time.monotonic()
            self._log.line(f"{self._verb}.progress", self._line())

    def _line(self) -> str:
        rate = self._done / (self._said - self._started)
        if not rate:
            return self._first
        left = max(0, self._total - self._done) / rate
        text = f"{human_bytes(self._done)} of {human_bytes(self._total)}"
        return f"{text}, {human_bytes(rate)}/s, {left:.0f} s to go"

    @property
    def summary(self) -> str:
        """How much was moved, and how long it took."""
        seconds, moved = time.monotonic() - self._started, self._done - self._there
        rate = human_bytes(moved / seconds if seconds else moved)
        return f"{human_bytes(moved)} in {seconds:.1f} s, {rate}/s"


def _bar(verb: str, total: int) -> tqdm:
    from tqdm import tqdm  # noqa: PLC0415 - nobody watches most boots

    # Its monitor is a thread, and nothing here forks well with one.
    tqdm.monitor_interval = 0
    return tqdm(
        total=total,
        desc=f"shardboot: {verb}",
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        leave=False,
        file=sys.stderr,
        # A terminal that nobody told its size says 0, and tqdm would draw nothing there.
        ncols=os.get_terminal_size(2).columns or 80,
        nrows=os.get_terminal_size(2).lines or 24,
    )
