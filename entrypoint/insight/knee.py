"""How large shard files must be: the smallest size that loads as fast as any larger one. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from entrypoint.checkpoint.digest import Json
from entrypoint.insight.plot import Drawing, Row, chart
from entrypoint.insight.verdict import human_decimal
from entrypoint.state.attempts import Entry

NO_GAIN: Final = 0.05
"""What is gained by less than that share of the time is not worth a larger file."""

KINDS: Final = ("cold", "warm")
_UNITS: Final = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))


class Trial(NamedTuple):
    """One size: the most files that a rank has, bytes of all ranks, and seconds of every load."""

    size: int
    files: int
    held: int
    written: float
    cold: tuple[float, ...] = ()
    warm: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return the stable fields."""
        return {
            "size_per_file": size_word(self.size),
            "files_per_rank": self.files,
            "bytes": self.held,
            "write_seconds": self.written,
            "cold_seconds": list[Json](self.cold),
            "warm_seconds": list[Json](self.warm),
        }


def trials(entries: Iterable[Entry]) -> list[Trial]:
    """Return what a tuning child has noted so far, smallest size first."""
    found: dict[str, Trial] = {}
    for entry in entries:
        size, _, kind = str(entry.get("boot")).partition("/")
        event, taken = entry.get("event"), entry.get("seconds")
        if not isinstance(taken, (int, float)):
            continue
        if event == "wrote" and size.isdecimal():
            found[size] = Trial(int(size), _count(entry, "files"), _count(entry, "bytes"), taken)
        elif event == "loaded" and size in found and kind == "cold":
            found[size] = found[size]._replace(cold=(*found[size].cold, taken))
        elif event == "loaded" and size in found and kind == "warm":
            found[size] = found[size]._replace(warm=(*found[size].warm, taken))
    return sorted(found.values())


def _count(entry: Entry, name: str) -> int:
    value = entry.get(name)
    return value if isinstance(value, int) else 0


def knee(measured: Sequence[Trial]) -> Trial:
    """Return the smallest size from which none larger gains more than runs differ, or 5 %."""
    return next(
        trial
        for at, trial in enumerate(measured)
        if not any(_gains(trial, larger) for larger in measured[at + 1 :])
    )


def _gains(one: Trial, other: Trial) -> bool:
    """Tell whether `other` loads really faster, cold or warm."""
    for here, there in ((one.cold, other.cold), (one.warm, other.warm)):
        if here and there:
            chance = max(_spread(here), _spread(there), NO_GAIN * statistics.median(here))
            if statistics.median(here) - statistics.median(there) > chance:
                return True
    return False


def _spread(times: Sequence[float]) -> float:
    return max(times) - min(times)


def size_word(size: int) -> str:
    """Return a size as a setting, exactly, in the largest unit that it is whole in."""
    for unit, length in _UNITS:
        if size >= length and size % length == 0:
            return f"{size // length}{unit}"
    return f"{size}B"


def report(measured: Sequence[Trial], best: Trial) -> list[str]:
    """Return the table, and in words which size does."""
    rows = [("size per file", "files a rank", "written", *KINDS)]
    rows += [
        (
            size_word(t.size),
            f"{t.files}",
            f"{t.written:.2f} s",
            _times(t, t.cold),
            _times(t, t.warm),
        )
        for t in measured
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [*lines, f"{size_word(best.size)} a file: {_why(measured, best)}"]


def _why(measured: Sequence[Trial], best: Trial) -> str:
    if len(measured) == 1:
        return "each rank is one file of any of the sizes"
    if best is measured[-1]:
        return "no smaller ones load as fast"
    return f"larger ones gain less than {NO_GAIN:.0%}, or than runs differ"


def _times(trial: Trial, times: Sequence[float]) -> str:
    if not times:
        return "-"
    middle = statistics.median(times)
    rate = f"{human_decimal(trial.held / middle)}/s" if middle else ""
    return f"{middle:.2f} s ({min(times):.2f} to {max(times):.2f}), {rate}"


def draw(measured: Sequence[Trial], best: Trial, model: str) -> Drawing:
    """Decide what a picture shows: the middle time of each size, the one that does in dark."""
    panels = [
        (
            f"{title}, seconds",
            [
                Row(size_word(t.size), middle, f"{middle:.2f}", is_dark=t is best)
                for t in measured
                if (middle := statistics.median(getattr(t, kind) or (0.0,)))
            ],
        )
        for kind, title in (("cold", "Load, cold page cache"), ("warm", "Load, warm page cache"))
    ]
    return chart(f"{model}: size per file", report(measured, best)[-1], panels)
