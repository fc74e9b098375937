"""Which caches stay and which go, decided from plain facts. Pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections.abc import Sequence
from typing import Final, NamedTuple

from entrypoint.store.retention import Verdict, duration

UNUSED_SECONDS: Final = 30 * 86400.0
"""What was not used for so long was compiled by a vLLM, or for words, that are no more."""


class Kept(NamedTuple):
    """The caches of one checkpoint on one platform. Times are seconds since 1970, sizes bytes.

    `used` is when a boot last was given them; `is_orphan`, whether the checkpoint is gone;
    `running` says who uses them, and `foreign` why they are not ours to touch; "" where not so.
    """

    name: str
    size: int
    used: float
    is_orphan: bool = False
    running: str = ""
    foreign: str = ""


def judge(found: Sequence[Kept], grace: float, most_bytes: int, now: float) -> list[Verdict]:
    """Return a verdict for each, in their order: `most_bytes` is what all may hold together.

    Beyond that the least recently used go first, and none that runs or is younger than `grace`.
    """
    verdicts = {each.name: _verdict(each, grace, now) for each in found}
    left = sum(each.size for each in found if not verdicts[each.name].is_collected)
    for each in sorted(found, key=lambda kept: kept.used):
        if left > most_bytes and verdicts[each.name].reason == "kept":
            text = f"all caches hold more than {most_bytes} bytes"
            verdicts[each.name] = Verdict(each.name, each.size, True, "crowded", text)
            left -= each.size
    return [verdicts[each.name] for each in found]


def _verdict(each: Kept, grace: float, now: float) -> Verdict:
    unused = now - each.used
    if each.foreign:
        decided = (False, "foreign", each.foreign)
    elif each.running:
        decided = (False, "running", each.running)
    elif unused < grace:
        decided = (False, "young", f"used less than {duration(grace)} ago")
    elif each.is_orphan:
        decided = (True, "orphan", "its checkpoint is gone")
    elif unused > UNUSED_SECONDS:
        decided = (True, "unused", f"not used for {duration(UNUSED_SECONDS)}")
    else:
        decided = (False, "kept", f"used {duration(unused)} ago")
    return Verdict(each.name, each.size, *decided)
