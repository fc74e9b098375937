"""What the sidecar has done with checkpoints, and when: kept over restarts, where it can be."""

from __future__ import annotations

from entrypoint.sidecar.node import now
from entrypoint.state.memory import Deed, Memory


class Done:
    """When one thing was done, by a digest of the checkpoint; in seconds since 1970."""

    def __init__(self, memory: Memory, deed: Deed) -> None:
        self._memory, self._deed = memory, deed
        self._known: dict[str, float] = {}

    def when(self, digest: str) -> float:
        """Return when it was done last; 0 for never, see `gone_by`."""
        return gone_by(self._noted(digest))

    def ever(self, digest: str) -> bool:
        """Tell whether it was done at all, by whatever clock."""
        return self._noted(digest) > 0

    def note(self, digest: str, time: float) -> None:
        """Note that it was done; where nothing can be written, for this process alone."""
        self._known[digest] = time
        self._memory.remember(self._deed, digest, time)

    def put_off(self, digest: str, time: float) -> None:
        """Take it as done for as long as this process lives."""
        self._known[digest] = time

    def _noted(self, digest: str) -> float:
        if digest not in self._known:
            answer = self._memory.recall(self._deed, digest)
            self._known[digest] = answer if isinstance(answer, float) and answer > 0 else 0.0
        return self._known[digest]


def gone_by(time: float) -> float:
    """Return a time that has gone by; 0, as for never, for one that is yet to come.

    Who noted that had a clock that was ahead. Nothing is to wait until this one has caught up.
    """
    return time if time <= now() else 0.0
