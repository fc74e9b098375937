"""Boots as waterfalls: for each phase a bar that begins where the one before it ended. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from entrypoint.insight.timeline import Timeline
from entrypoint.log import human_bytes
from entrypoint.sidecar.markup import Markup, element

STYLE: Final = """
details { border-bottom: 1px solid var(--line); padding: .35rem 0 }
summary { cursor: pointer }
.phase { display: grid; grid-template-columns: 7rem 1fr 8.5rem; gap: .6rem; align-items: center;
  font-size: .85rem }
.phase :last-child { text-align: right }
.bar { height: .8rem; min-width: 1px; background: #7aa6c2 }
.own { background: #2f6690 }
.beside { background: #b8b8b8 }
"""

LEAST_SECONDS: Final = 1e-3
"""The least that a whole waterfall is wide."""


def waterfalls(boots: Iterable[tuple[str, Timeline]]) -> Iterator[Markup]:
    """Yield each boot, with a title, folded up; the first one is open."""
    opened = {"open": ""}
    for title, timeline in boots:
        said = f"{title} · {timeline.seconds:.1f} s"
        yield element("details", element("summary", said), *_rows(timeline), **opened)
        opened = {}


def _rows(timeline: Timeline) -> Iterator[Markup]:
    phases = [(phase, "own" if timeline.is_own(phase) else "") for phase in timeline.phases]
    phases += [(phase, "beside") for phase in timeline.beside]
    span = max([LEAST_SECONDS, *(phase.end - timeline.began for phase, _ in phases)])
    for phase, kind in phases:
        left = min(100.0, max(0.0, (phase.start - timeline.began) / span * 100))
        width = min(100.0 - left, phase.seconds / span * 100)
        place = f"margin-left:{left:.2f}%;width:{width:.2f}%"
        size = f", {human_bytes(phase.size)}" if phase.size else ""
        yield element(
            "div",
            element("span", phase.label),
            element("div", element("div", class_=f"bar {kind}".strip(), style=place)),
            element("span", f"{phase.seconds:.2f} s{size}"),
            class_="phase",
        )
