"""What is put off: others have their turn meanwhile, and it is tried again ever later."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from entrypoint.errors import ShardbootError
from entrypoint.sidecar.loop import rest_after

Wanted = TypeVar("Wanted")


class Later:
    """What was put off, and until when. Each time it is for longer, until it is forgotten."""

    def __init__(self) -> None:
        self._tries: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def has_come(self, what: str) -> bool:
        """Tell whether it is time to look again."""
        return time.monotonic() >= self._until.get(what, 0.0)

    def put_off(self, what: str) -> float:
        """Leave it for now; return for how many seconds."""
        tries = self._tries[what] = self._tries.get(what, 0) + 1
        seconds = rest_after(0.0, tries, random.random())  # noqa: S311 - no secret
        self._until[what] = time.monotonic() + seconds
        return seconds

    def forget(self, what: str) -> None:
        """Begin with short times again."""
        self._tries.pop(what, None)
        self._until.pop(what, None)

    def forget_all(self) -> None:
        """Have all that was put off done now."""
        self._tries.clear()
        self._until.clear()


def in_turn(
    wanted: Sequence[Wanted],
    name: Callable[[Wanted], str],
    do: Callable[[Wanted], None],
    later: Later,
) -> Iterator[float]:
    """Do one after the other of what is due. What fails is put off, and keeps no other waiting.

    Raises: when all have had it, what was raised first.
    """
    failed: ShardbootError | OSError | None = None
    for each in wanted:
        if not later.has_come(name(each)):
            continue
        yield 0.0
        try:
            do(each)
        except (ShardbootError, OSError) as error:
            later.put_off(name(each))
            failed = failed or error
    if failed is not None:
        raise failed
