"""Pictures of what was measured: a few bars, as SVG, or as PNG where Pillow is installed.

vLLM brings Pillow. What is drawn is decided once (`draw`); then it is spelled in one of two ways.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from entrypoint.insight.findings import Findings
from entrypoint.insight.verdict import IN_WORDS, Verdict, human_decimal

WIDTH: Final = 640
_BAR_LEFT: Final = 190
_BAR_RIGHT: Final = 530
_ROW: Final = 22
_INK: Final = "#222222"
_LIGHT: Final = "#7aa6c2"
_DARK: Final = "#2f6690"


class Bar(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str


class Text(NamedTuple):
    """A line of text; `y` is its baseline, and `at_end` says that `x` is its right end."""

    x: float
    y: float
    text: str
    size: int = 12
    at_end: bool = False


class Drawing(NamedTuple):
    """Shapes on white paper, `WIDTH` wide."""

    height: int
    shapes: tuple[Bar | Text, ...]


class Row(NamedTuple):
    """One bar of a panel: what it is of, how long, what is written at its end, how dark."""

    label: str
    value: float
    shown: str
    is_dark: bool = True


def draw(findings: Findings, verdict: Verdict) -> Drawing:
    """Decide what a picture of a probe shows."""
    said = f"{IN_WORDS[verdict.word]}: {verdict.reasons[0].text}"
    return chart(findings.path, said, _panels(findings))


def chart(heading: str, said: str, panels: Iterable[tuple[str, Sequence[Row]]]) -> Drawing:
    """Lay out titled rows of bars under a heading; each panel has a scale of its own."""
    shapes: list[Bar | Text] = [Text(16, 26, _cut(heading, 70), 15), Text(16, 46, _cut(said, 90))]
    y = 60
    for title, rows in panels:
        if not rows:
            continue
        y += 20
        shapes.append(Text(16, y, title, 13))
        y += 8
        most = max(row.value for row in rows) or 1.0
        for row in rows:
            width = max(1.0, round((_BAR_RIGHT - _BAR_LEFT) * row.value / most, 1))
            shapes.append(Text(_BAR_LEFT - 8, y + 14, row.label, at_end=True))
            colour = _DARK if row.is_dark else _LIGHT
            shapes.append(Bar(_BAR_LEFT, y + 3, width, _ROW - 8, colour))
            shapes.append(Text(_BAR_LEFT + width + 6, y + 14, row.shown))
            y += _ROW
    return Drawing(y + 16, tuple(shapes))


def _panels(findings: Findings) -> Iterator[tuple[str, list[Row]]]:
    rows = []
    for name, rates in (("write", findings.write), ("read", findings.read)):
        for rate in rates:
            shown = f"{human_decimal(rate.per_second)}/s"
            label = f"{name}, {rate.workers} worker{'s' if rate.workers > 1 else ''}"
            rows.append(Row(label, rate.per_second, shown, rate.workers > 1))
    yield "Large files", rows
    yield (
        "Small files, a second",
        [Row(name, r.per_second, f"{r.per_second:.0f}") for name, r in findings.small],
    )
    if findings.fsync is not None:
        times = (("median", findings.fsync.median), ("p99", findings.fsync.p99))
        yield "fsync", [Row(name, t, f"{t * 1e3:.3g} ms", is_dark=False) for name, t in times]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def as_svg(drawing: Drawing) -> str:
    """Spell a drawing as SVG."""
    size = f'width="{WIDTH}" height="{drawing.height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    paper = f'<rect {size} fill="white"/>'
    return "\n".join([head, paper, *map(_svg, drawing.shapes), "</svg>", ""])


def _svg(shape: Bar | Text) -> str:
    if isinstance(shape, Bar):
        x, y, width, height, colour = shape
        return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}"/>'
    place = f'x="{shape.x}" y="{shape.y}" font-size="{shape.size}" fill="{_INK}"'
    anchor = ' text-anchor="end"' if shape.at_end else ""
    printable = "".join(c for c in shape.text if c.isprintable())
    return f"<text {place}{anchor}>{escape(printable)}</text>"


def as_png(drawing: Drawing) -> bytes:
    """Paint a drawing, twice as large. Raises: ImportError without Pillow."""
    from PIL import Image, ImageDraw, ImageFont  # noqa: PLC0415 - vLLM brings it

    scale = 2
    image = Image.new("RGB", (WIDTH * scale, drawing.height * scale), "white")
    brush = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        x, y = shape.x * scale, shape.y * scale
        if isinstance(shape, Bar):
            corner = (x + shape.width * scale, y + shape.height * scale)
            brush.rectangle((x, y, *corner), fill=shape.colour)
        else:
            font = ImageFont.load_default(shape.size * scale)
            anchor = "rs" if shape.at_end else "ls"
            brush.text((x, y), shape.text, fill=_INK, font=font, anchor=anchor)
    told = io.BytesIO()
    image.save(told, "PNG")
    return told.getvalue()
