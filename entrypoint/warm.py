"""Keeping a checkpoint in the page cache while a server runs from it, for the start after that.

Nothing is held there: locked, it would be others who are killed for want of memory, and a mapping
holds nothing. What was evicted is read again, when there is room for it, by a process that comes
after all others; whoever needs the memory has it at once.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from typing import Final

from entrypoint.headroom import free_bytes
from entrypoint.stretches import is_cached, order, read_all, within

LOOK_SECONDS: Final = 60.0
"""Between two looks: a crash in between finds what the last one left."""

MOST_SECONDS: Final = 3600.0


def keep(
    by_rank: Sequence[Sequence[tuple[str, int]]], limit: float, parents: tuple[int, int]
) -> None:
    """Read what is not cached, at once and again and again, while the supervisor runs.

    `limit` bounds how many bytes are kept, in the order of a load, and so does half of what is
    free. Of `parents` the second is the supervisor. Raises: OSError where the file system cannot
    tell what is cached, or files are gone.
    """
    ends, rest = os.pidfd_open(parents[1]), 0.0
    while not select.select([ends], [], [], rest)[0]:
        # What is cached counts as free, if not in use: this is how much may be, not how much more.
        kept = within(order(by_rank), min(limit, free_bytes() // 2))
        lost = [stretch for stretch in kept if not is_cached(stretch)]
        read_all(lost, parents)
        rest = next_rest(rest, was_evicted=bool(lost))


def next_rest(rest: float, *, was_evicted: bool) -> float:
    """Return the seconds to the next look: who evicts it again and again is to win."""
    return max(LOOK_SECONDS, min(2 * rest, MOST_SECONDS)) if was_evicted else LOOK_SECONDS
