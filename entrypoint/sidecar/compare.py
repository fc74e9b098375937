"""Which checkpoints lie in which store, and how they differ from what runs. Pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from entrypoint.checkpoint.key import Key, differences
from entrypoint.sidecar.view import Seen


class Row(NamedTuple):
    """One checkpoint, and how it was seen in the local store and in the shared one.

    `differs` says how it differs from the one that runs here and is most like it, in words.
    """

    one: Seen
    here: Seen | None
    there: Seen | None
    differs: str


def rows(local: Sequence[Seen], shared: Sequence[Seen]) -> list[Row]:
    """Return all checkpoints, newest first; one that lies in both stores is one row."""
    running = [each for each in local if each.running]
    here, there = _by_identity(local), _by_identity(shared)
    found = [
        Row(one, here.get(identity), there.get(identity), differs(one, running))
        for identity, one in (there | here).items()
    ]
    return sorted(found, key=lambda row: (row.one.created, row.one.name), reverse=True)


def _by_identity(store: Sequence[Seen]) -> dict[tuple[str, int], Seen]:
    """Return each by what it has in common with the same bytes in another store.

    Of unreadable ones only a name is known. The same bytes twice, as without a proof and with it,
    are told apart by their order.
    """
    found: dict[tuple[str, int], Seen] = {}
    times: Counter[str] = Counter()
    for each in store:
        identity = each.content or f"named {each.name}"
        found[identity, times[identity]] = each
        times[identity] += 1
    return found


def differs(seen: Seen, running: Sequence[Seen]) -> str:
    """Say how a checkpoint differs from the nearest of those that run."""
    key = seen.made_for
    if key is None:
        return ""
    if any(each.content == seen.content for each in running):
        return "runs here"
    near = [
        (_in_words(each.made_for, each.source, key, seen.source), each)
        for each in running
        if each.made_for
    ]
    if not near:
        return "nothing runs here from a checkpoint"
    words, nearest = min(near, key=lambda pair: len(pair[0]))
    age = "newer" if seen.created > nearest.created else "older"
    return (
        f"{age} than {nearest.name}, which runs: {', '.join(words) or 'another save of the same'}"
    )


def _in_words(running: Key, its_source: str, key: Key, source: str) -> list[str]:
    words = [
        f"{each.field.replace('_', ' ')} {_shown(each.found)} instead of {_shown(each.wanted)}"
        for each in differences(running, key)
    ]
    if running.model != key.model:
        words.insert(0, "other content of the model" if its_source == source else f"of {source}")
    return words


def _shown(value: object) -> str:
    return str(value) if value not in ("", None) else "none"
