"""What of a boot took longest, and how much longer than in the best one of its kind. Pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections.abc import Sequence
from typing import Final, NamedTuple

from entrypoint.checkpoint.digest import Json
from entrypoint.insight.timeline import Timeline

HEAD: Final = ("phase", "took", "best", "more")


class Share(NamedTuple):
    """What one phase took, and what the best boot took for it; None where that had no such."""

    label: str
    seconds: float
    best: float | None

    @property
    def more(self) -> float:
        """Seconds beyond the best."""
        return self.seconds - (self.best or 0.0)


class Blame(NamedTuple):
    """The phases of a boot, the longest first, beside those of the best boot, if there is one."""

    timeline: Timeline
    best: Timeline | None
    shares: tuple[Share, ...]

    def to_json(self) -> dict[str, Json]:
        """Return it as scripts rely on it."""
        return {
            "boot": self.timeline.boot,
            "seconds": round(self.timeline.seconds, 3),
            "best_boot": self.best.boot if self.best else None,
            "best_seconds": round(self.best.seconds, 3) if self.best else None,
            "phases": [
                {
                    "phase": share.label,
                    "seconds": round(share.seconds, 3),
                    "best_seconds": None if share.best is None else round(share.best, 3),
                }
                for share in self.shares
            ],
        }


def blame(timeline: Timeline, every: Sequence[Timeline]) -> Blame:
    """Say what of a boot took longest, against the best of `every` boot of its kind."""
    best = best_of(timeline, every)
    mine, theirs = _by_label(timeline), _by_label(best) if best else {}
    shares = [Share(label, seconds, theirs.get(label)) for label, seconds in mine.items()]
    shares.sort(key=lambda share: share.seconds, reverse=True)
    return Blame(timeline, best, tuple(shares))


def best_of(timeline: Timeline, every: Sequence[Timeline]) -> Timeline | None:
    """Return the fastest other boot that served the same key, else the same model and layout."""
    others = [t for t in every if t.boot != timeline.boot and t.outcome == "served" and t.phases]
    same_key = [t for t in others if timeline.key and t.key == timeline.key]
    same_family = [t for t in others if timeline.family and t.family == timeline.family]
    return min(same_key or same_family, key=lambda t: t.seconds, default=None)


def _by_label(timeline: Timeline) -> dict[str, float]:
    found: dict[str, float] = {}
    for phase in timeline.phases:
        found[phase.label] = found.get(phase.label, 0.0) + phase.seconds
    return found


def lines(found: Blame) -> list[str]:
    """Return a table for people, under what it is of."""
    timeline, best = found.timeline, found.best
    said = f"{timeline.boot}: {timeline.seconds:.1f} s, {timeline.outcome}"
    if best is None:
        said += "; no other boot of its kind has served"
    else:
        by = timeline.seconds - best.seconds
        than = f"{abs(by):.1f} s {'more' if by > 0 else 'less'} than the best other one"
        said += f", {than}, {best.boot}"
    rows = [HEAD, *map(_row, found.shares)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [said, *(_line(row, widths) for row in rows)]


def _row(share: Share) -> tuple[str, ...]:
    best = "-" if share.best is None else f"{share.best:.2f} s"
    return share.label, f"{share.seconds:.2f} s", best, f"{share.more:+.2f} s"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    label, *times = (
        cell.rjust(width) if at else cell.ljust(width)
        for at, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([label, *times])
