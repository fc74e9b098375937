"""How a boot's timeline looks: in a terminal, in a picture, on a page."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from entrypoint.insight.phases import Phase
from entrypoint.insight.plot import WIDTH, Bar, as_png, as_svg
from entrypoint.insight.timeline import Timeline
from entrypoint.insight.waterfall import COLUMNS, bars, draw, page

BOOT = Timeline(
    boot="b1",
    began=100.0,
    became=110.0,
    outcome="served",
    name="tiny <&> tp2",
    family="f",
    key="k",
    tier="shared",
    reason="local.hit",
    checkpoint="c",
    phases=(
        Phase("copy", 100.0, 110.0, size=5 << 30),
        Phase("imports", 110.0, 115.0, "server"),
        Phase("vLLM", 115.0, 120.0),
    ),
)
EMPTY = BOOT._replace(phases=(), name="", checkpoint="")


def test_bars_in_a_terminal_are_as_long_as_what_they_stand_for() -> None:
    head, said, *rows = bars(BOOT)
    assert head == "b1: tiny <&> tp2"
    assert said == "shared, local.hit: served after 20.0 s"
    assert [row.count("#") for row in rows] == [COLUMNS // 2, COLUMNS // 4, COLUMNS // 4]
    assert [row.index("#") for row in rows] == sorted(row.index("#") for row in rows)
    assert rows[0].endswith("5.0 GiB")
    assert rows[1].startswith("imports (server)     10.00 s      5.00 s")


@pytest.mark.parametrize("seconds", [0.001, 0.3, 20.0, 4000.0, 1e6])
def test_a_boot_of_any_length_fits_the_picture(seconds: float) -> None:
    phase = Phase("decide", 100.0, 100.0 + seconds, size=123 << 30)
    shapes = draw(BOOT._replace(phases=(phase,))).shapes
    found = [shape for shape in shapes if isinstance(shape, Bar)]
    assert all(bar.x >= 0 and bar.x + bar.width < WIDTH for bar in found)
    assert len(found) < 12


def test_what_boot_does_looks_other_than_what_vllm_does() -> None:
    last = [shape for shape in draw(BOOT).shapes if isinstance(shape, Bar)][-3:]
    assert last[0].colour != last[1].colour == last[2].colour
    beside = draw(BOOT._replace(beside=(Phase("tee", 120.0, 140.0),)))
    assert len({s.colour for s in beside.shapes if isinstance(s, Bar)}) == 4


@pytest.mark.parametrize("boot", [BOOT, EMPTY], ids=["boot", "empty"])
def test_picture_and_page_can_be_read(boot: Timeline) -> None:
    root = ET.fromstring(as_svg(draw(boot)))  # noqa: S314 - our own
    assert root.get("width") == str(WIDTH)
    assert "<script" not in page(boot)
    assert page(boot).count("<tr>") == 1 + len(boot.phases)


def test_no_foreign_name_is_markup() -> None:
    text = page(BOOT._replace(name="<script>x</script>\x1b"))
    assert "<script" not in text
    assert "\x1b" not in text


def test_a_png_is_drawn_alike() -> None:
    pytest.importorskip("PIL")
    assert as_png(draw(BOOT)).startswith(b"\x89PNG")
