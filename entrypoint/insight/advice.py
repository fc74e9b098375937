"""After how many boots a checkpoint pays, from the figures of one deployment. Pure.

Without a checkpoint, a boot costs what vLLM takes to load the source. With one, the first boot of a
release pays for a save or a copy, and every boot for loading the checkpoint. vLLM's own start is in
both, and counts for neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from entrypoint.checkpoint.digest import Json

Word = Literal["pays", "never", "unknown"]
Step = Literal["save", "copy", "tee", ""]

TO_MAKE: Final = "none was made yet; `shardboot save` makes one and times it"
TO_LOAD: Final = "no boot has loaded one yet; the next boot from it is timed"
TO_READ: Final = (
    "no save has timed the source; the next one does, "
    "or --source-rate with what `shardboot probe` says of it"
)
TO_TIME: Final = "nobody timed how it got here; the next save or copy is timed"


class Figures(NamedTuple):
    """What is known of one model and layout on this host. Times are seconds, None if unknown.

    `source`: what vLLM takes to load the source; `at_least` says that it is not measured, but its
    bytes over the rate of reading. `step` is what was paid for a checkpoint the last time, and
    `paid` its seconds: of a tee, the most that it can have held up the boot. `releases` counts the
    boots of each, oldest first; none where no checkpoint tells them apart. `span` is the time from
    the first boot to the last.
    """

    family: str
    name: str
    boots: int = 0
    releases: tuple[int, ...] = ()
    span: float = 0.0
    source: float | None = None
    at_least: bool = False
    load: float | None = None
    step: Step = ""
    paid: float | None = None

    @property
    def boots_a_release(self) -> float | None:
        """How often a release is booted; None while only one was seen, which may go on for ever."""
        *over, latest = self.releases or (0,)
        return max(sum(over) / len(over), latest) if over else None


class Advice(NamedTuple):
    """What the figures come to: from which boot of a release a checkpoint pays, and in words."""

    figures: Figures
    word: Word
    boot: int | None
    text: str

    def to_json(self) -> dict[str, Json]:
        """Return the stable fields."""
        figures = self.figures
        return {
            "family": figures.family,
            "name": figures.name,
            "boots": figures.boots,
            "boots_by_release": list[Json](figures.releases),
            "span_seconds": round(figures.span),
            "source_seconds": _rounded(figures.source),
            "source_is_estimate": figures.at_least,
            "load_seconds": _rounded(figures.load),
            "step": figures.step or None,
            "step_seconds": _rounded(figures.paid),
            "verdict": self.word,
            "pays_from_boot": self.boot,
            "text": self.text,
        }


def advise(figures: Figures) -> Advice:
    """Return whether, and from which boot of a release, a checkpoint of this deployment pays."""
    source, load, paid = figures.source, figures.load, figures.paid
    if source is None or load is None or paid is None:
        return Advice(figures, "unknown", None, f"not known: {_missing(figures)}")
    gain = source - load
    if gain <= 0 and figures.at_least:
        text = f"not known: reading alone makes it no slower than the checkpoint; {TO_READ}"
        return Advice(figures, "unknown", None, text)
    if gain <= 0:
        text = "never pays: a checkpoint loads no faster than the source"
        return Advice(figures, "never", None, text)
    # A tee's own boot waits for the source as well.
    boot, seen = max(1, math.ceil(paid / gain) + (figures.step == "tee")), figures.boots_a_release
    if seen is not None and boot > seen and not figures.at_least:
        text = f"never pays: only from boot {boot}, and a release is booted {seen:.3g} times"
        return Advice(figures, "never", boot, text)
    latest = " at the latest" if figures.at_least else ""
    return Advice(figures, "pays", boot, f"pays from boot {boot}{latest}")


def _missing(figures: Figures) -> str:
    """Say what to do about the first thing that is missing."""
    if figures.load is None:
        return TO_LOAD if figures.step else TO_MAKE
    return TO_READ if figures.source is None else TO_TIME


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


HEAD: Final = ("model and layout", "source", "checkpoint", "made by", "boots", "releases", "")


def table(advices: Sequence[Advice]) -> list[str]:
    """Return one line for each, under one that names the columns."""
    rows = [HEAD, *map(_row, advices)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return [line.rstrip() for line in lines]


def _row(advice: Advice) -> tuple[str, ...]:
    figures = advice.figures
    return (
        figures.name,
        ("at least " if figures.at_least else "") + _time(figures.source),
        _time(figures.load),
        f"{figures.step}, {_time(figures.paid)}" if figures.step else "-",
        f"{figures.boots} in {_long(figures.span)}" if figures.boots > 1 else f"{figures.boots}",
        f"{len(figures.releases)}" if figures.releases else "?",
        advice.text,
    )


def _time(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.1f} s"


def _long(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
