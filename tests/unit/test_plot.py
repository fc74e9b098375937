from __future__ import annotations

import struct
import xml.etree.ElementTree as ET

import pytest

from entrypoint.insight.findings import Findings, Latency, Rate
from entrypoint.insight.plot import WIDTH, Bar, Text, as_png, as_svg, draw
from entrypoint.insight.verdict import judge

FINDINGS = Findings(
    "/mnt/<a & b>\x07" + "x" * 100,
    read=(Rate(1, 10**9, 1.0), Rate(4, 2 * 10**9, 1.0)),
    small=(("create", Rate(4, 100, 1.0)), ("stat", Rate(4, 0, 1.0))),
    fsync=Latency(9, 0.001, 0.004),
)
SVG = "{http://www.w3.org/2000/svg}"


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    shapes = draw(FINDINGS, judge(FINDINGS)).shapes
    widths = [shape.width for shape in shapes if isinstance(shape, Bar)]
    longest = max(widths)
    assert widths == [longest / 2, longest, longest, 1.0, longest / 4, longest]
    texts = [shape.text for shape in shapes if isinstance(shape, Text)]
    assert {"1.0 GB/s", "2.0 GB/s", "100", "1 ms", "4 ms", "read, 4 workers"} <= set(texts)


def test_what_was_not_measured_takes_no_room() -> None:
    nothing = Findings("/mnt", hung="look")
    drawing = draw(nothing, judge(nothing))
    assert all(isinstance(shape, Text) for shape in drawing.shapes)
    assert drawing.height < draw(FINDINGS, judge(FINDINGS)).height


def test_an_svg_can_be_read_whatever_the_path_is_called() -> None:
    drawing = draw(FINDINGS, judge(FINDINGS))
    root = ET.fromstring(as_svg(drawing))  # noqa: S314 - our own
    assert (root.get("width"), root.get("height")) == (str(WIDTH), str(drawing.height))
    titles = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert titles[0].startswith("/mnt/<a & b>xxx")
    assert titles[0].endswith("…")
    bars = [shape for shape in drawing.shapes if isinstance(shape, Bar)]
    assert len([*root.iter(f"{SVG}rect")]) == len(bars) + 1


def test_a_png_shows_the_same_twice_as_large() -> None:
    pytest.importorskip("PIL")
    drawing = draw(FINDINGS, judge(FINDINGS))
    data = as_png(drawing)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (2 * WIDTH, 2 * drawing.height)
