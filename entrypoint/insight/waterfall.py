"""A boot's timeline for people: bars in a terminal, a picture, or a page around the picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from entrypoint.insight.phases import Phase
from entrypoint.insight.plot import WIDTH, Bar, Drawing, Text, as_svg
from entrypoint.insight.timeline import Timeline
from entrypoint.log import human_bytes

COLUMNS: Final = 40
_LEFT: Final = 150
_RIGHT: Final = 520
_ROW: Final = 20
_TICKS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 14400, 86400)
_MOST_TICKS: Final = 8
_OWN: Final = "#2f6690"
_VLLM: Final = "#7aa6c2"
_BESIDE: Final = "#b8b8b8"
_GRID: Final = "#e4e4e4"


def heading(timeline: Timeline) -> str:
    """Return which boot it is, of what."""
    what = timeline.name or timeline.checkpoint
    return f"{timeline.boot}: {what}" if what else timeline.boot


def said(timeline: Timeline) -> str:
    """Return where the weights came from and why, what it came to, and when."""
    tier = "" if timeline.tier == "none" else timeline.tier
    why = ", ".join(word for word in (tier, timeline.reason) if word)
    return f"{why}{why and ': '}{timeline.outcome} after {timeline.seconds:.1f} s"


def bars(timeline: Timeline) -> list[str]:
    """Return a line for each phase: when it began, what it took, and a bar."""
    width = max([len(phase.label) for phase in _rows(timeline)], default=0)
    lines = [heading(timeline), said(timeline)]
    for phase in _rows(timeline):
        start, count = _place(timeline, phase, COLUMNS)
        bar = f"{' ' * start}{'#' * count}".ljust(COLUMNS)
        at = phase.start - timeline.began
        line = f"{phase.label:<{width}}  {at:8.2f} s  {phase.seconds:8.2f} s  {bar}  {_size(phase)}"
        lines.append(line.rstrip())
    return lines


def _rows(timeline: Timeline) -> Sequence[Phase]:
    return [*timeline.phases, *timeline.beside]


def _place(timeline: Timeline, phase: Phase, columns: int) -> tuple[int, int]:
    """Return where a bar of characters begins, and how many there are: one at least."""
    scale = columns / _span(timeline)
    start = min(columns - 1, max(0, int((phase.start - timeline.began) * scale)))
    return start, max(1, min(columns - start, round(phase.seconds * scale)))


def _span(timeline: Timeline) -> float:
    """Return the seconds that are drawn; what went on beside may have ended later."""
    ends = [phase.end - timeline.began for phase in _rows(timeline)]
    return max([*ends, 1e-3])


def _size(phase: Phase) -> str:
    return human_bytes(phase.size) if phase.size else ""


def draw(timeline: Timeline) -> Drawing:
    """Decide what a picture of a boot shows: a bar for each phase, over a scale of seconds."""
    rows, scale = _rows(timeline), (_RIGHT - _LEFT) / _span(timeline)
    top = 76
    bottom = top + _ROW * len(rows) + 4
    shapes: list[Bar | Text] = [
        Text(16, 26, _cut(heading(timeline), 68), 15),
        Text(16, 46, _cut(said(timeline), 90)),
    ]
    for seconds in _ticks(_span(timeline)):
        x = round(_LEFT + seconds * scale, 1)
        shapes.append(Bar(x, top - 6, 1, bottom - top + 6, _GRID))
        shapes.append(Text(x, top - 10, f"{seconds:g} s", 10))
    for number, phase in enumerate(rows):
        y = top + _ROW * number
        x = round(_LEFT + max(0.0, phase.start - timeline.began) * scale, 1)
        width = max(1.0, round(phase.seconds * scale, 1))
        colour = _VLLM
        if number >= len(timeline.phases):
            colour = _BESIDE
        elif timeline.is_own(phase):
            colour = _OWN
        took = ", ".join(text for text in (f"{phase.seconds:.2f} s", _size(phase)) if text)
        shapes.append(Text(_LEFT - 8, y + 14, _cut(phase.label, 22), at_end=True))
        shapes.append(Bar(x, y + 3, width, _ROW - 6, colour))
        shapes.append(Text(round(x + width + 5, 1), y + 14, took, 11))
    return Drawing(bottom + 12, tuple(shapes))


def _ticks(span: float) -> Iterator[float]:
    step = next((tick for tick in _TICKS if span / tick <= _MOST_TICKS), span)
    count = 0
    while count * step <= span:
        yield count * step
        count += 1


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def page(timeline: Timeline) -> str:
    """Return a page that needs nothing else: the picture, and its figures as a table."""
    rows = "".join(_table_row(timeline, phase) for phase in _rows(timeline))
    style = "body{font-family:sans-serif;margin:1em}td,th{padding:0 1em 0 0;text-align:left}"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><meta charset="utf-8">',
            f'<meta name="viewport" content="width={WIDTH}">',
            f"<title>{_text(heading(timeline))}</title><style>{style}</style>",
            as_svg(draw(timeline)).rstrip(),
            "<table><tr><th>phase<th>began<th>took<th>bytes",
            rows,
            "</table></html>",
            "",
        ]
    )


def _table_row(timeline: Timeline, phase: Phase) -> str:
    start = f"{phase.start - timeline.began:.2f} s"
    cells = (_text(phase.label), start, f"{phase.seconds:.2f} s", _size(phase))
    return "<tr>" + "".join(f"<td>{cell}" for cell in cells)


def _text(text: str) -> str:
    return escape("".join(c for c in text if c.isprintable()))
