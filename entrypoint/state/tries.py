"""Saves that failed: after so many in a row no boot is kept waiting for another one that day."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import time
from typing import Final, NamedTuple

from entrypoint import __version__
from entrypoint.checkpoint.digest import digest_json
from entrypoint.config import Settings
from entrypoint.state.attempts import a_time
from entrypoint.state.memory import Memory

REST_SECONDS: Final = 24 * 3600.0
"""A machine may heal, and room be made; one save in vain a day is bearable."""


class Failed(NamedTuple):
    """How the last of so many `in_row` failed: when, its reason code, in words, exit code."""

    in_row: int
    time: float
    reason: str
    text: str
    exit_code: int


class Tries:
    """The saves of one model, a key by its config, with the settings that may decide of them.

    Where nothing can be kept, each is the first one.
    """

    def __init__(self, settings: Settings, key: str) -> None:
        self._memory = Memory(settings.state_dir)
        means = [settings.on_miss, settings.prove, settings.save_timeout, settings.size_per_file]
        self._question = digest_json(["save", key, __version__, *means])

    def failed(self, reason: str, text: str, exit_code: int) -> None:
        """Remember that one failed."""
        before = self._last()
        failed = Failed(before.in_row + 1 if before else 1, time.time(), reason, text, exit_code)
        self._memory.remember("saves", self._question, failed._asdict())

    def succeeded(self) -> None:
        """Forget those that failed."""
        if self._last() is not None:
            self._memory.remember("saves", self._question, None)

    def resting(self, most: int) -> Failed | None:
        """Return how the last one failed, if it was at least the `most`th in a row, and today."""
        last = self._last()
        if last is None or last.in_row < most:
            return None
        # A clock that was ahead must not make the rest any longer.
        return last if 0 <= time.time() - last.time < REST_SECONDS else None

    def _last(self) -> Failed | None:
        answer = self._memory.recall("saves", self._question)
        if not isinstance(answer, dict):
            return None
        in_row, code = answer.get("in_row"), answer.get("exit_code")
        if type(in_row) is not int or type(code) is not int:
            return None
        at, reason, text = a_time(answer.get("time")), answer.get("reason"), answer.get("text")
        return Failed(in_row, at or 0.0, str(reason), str(text), code)
