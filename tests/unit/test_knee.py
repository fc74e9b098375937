"""Which size of shard files does, by loads that were timed, and how it is told."""

from __future__ import annotations

from typing import Any

import pytest

from entrypoint.insight.knee import Trial, draw, knee, report, size_word, trials
from entrypoint.insight.plot import Text

GIB = 1024**3


def timed(*cold: tuple[float, ...], warm: tuple[float, ...] = ()) -> list[Trial]:
    """Return trials of 1, 2, 4 … GiB with these cold times, and the same warm ones for all."""
    return [Trial(GIB << at, 8 >> at, 3 * 10**9, 1.0, times, warm) for at, times in enumerate(cold)]


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        (timed((2.0,)), 1),
        (timed((2.0, 2.0), (2.0, 2.0)), 1),
        # Less than 5 % is no gain, more is one.
        (timed((2.0,), (1.91,)), 1),
        (timed((2.0,), (1.89,)), 2),
        # What runs of one size differ by is chance.
        (timed((1.8, 2.0, 2.2), (1.7, 1.7, 1.7)), 1),
        (timed((2.0, 2.0, 2.0), (1.5, 1.7, 1.9)), 1),
        (timed((2.0, 2.0, 2.1), (1.6, 1.7, 1.7)), 2),
        (timed((4.0,), (3.0,), (2.0,), (2.0,)), 4),
        # Small steps add up.
        (timed((2.0,), (1.92,), (1.84,)), 2),
        (timed((3.0,), (2.0,), (5.0,)), 2),
    ],
)
def test_the_smallest_size_that_no_larger_one_beats_does(measured: list[Trial], best: int) -> None:
    assert knee(measured).size == best * GIB


@pytest.mark.parametrize(("warm", "best"), [((1.0, 1.0), 1), ((1.0, 0.5), 2)])
def test_a_gain_with_a_warm_cache_counts_as_well(warm: tuple[float, float], best: int) -> None:
    measured = [
        each._replace(warm=(time,)) for each, time in zip(timed((2.0,), (2.0,)), warm, strict=True)
    ]
    assert knee(measured).size == best * GIB


def wrote(size: int, **more: Any) -> dict[str, Any]:
    line = {"event": "wrote", "boot": f"{size}", "seconds": 1.5, "files": 2, "bytes": 100}
    return line | more


def loaded(what: str, seconds: Any) -> dict[str, Any]:
    return {"event": "loaded", "boot": what, "seconds": seconds, "bytes": 50}


def test_what_the_child_noted_comes_together_by_size() -> None:
    entries = [
        *(wrote(2048), wrote(1024), loaded("2048/first", 9.0)),
        *(loaded("1024/cold", 3.0), loaded("1024/warm", 1.0), loaded("2048/cold", 2.0)),
        *(loaded("1024/cold", 4.0), {"event": "loading", "boot": "1024/cold"}),
        *({}, loaded("4096/cold", 1.0), loaded("1024/cold", None), wrote(0, boot="x")),
    ]
    assert trials(entries) == [
        Trial(1024, 2, 100, 1.5, (3.0, 4.0), (1.0,)),
        Trial(2048, 2, 100, 1.5, (2.0,), ()),
    ]


@pytest.mark.parametrize(
    ("size", "word"),
    [
        (GIB, "1GiB"),
        (3 * GIB, "3GiB"),
        (1536 * 1024**2, "1536MiB"),
        (1024, "1KiB"),
        (1000, "1000B"),
        (4 * 10**9, "3906250KiB"),
    ],
)
def test_a_size_is_spelled_exactly(size: int, word: str) -> None:
    assert size_word(size) == word


def test_the_table_has_a_line_a_size_and_says_which_does_and_why() -> None:
    measured = timed((2.0, 2.5, 3.0), (1.0, 1.0, 1.0), warm=(0.5,))
    head, *lines, last = report(measured, knee(measured))
    at = head.index("warm")
    assert head[:at].split() == ["size", "per", "file", "files", "a", "rank", "written", "cold"]
    assert [line[:at].split() for line in lines] == [
        ["1GiB", "8", "1.00", "s", "2.50", "s", "(2.00", "to", "3.00),", "1.2", "GB/s"],
        ["2GiB", "4", "1.00", "s", "1.00", "s", "(1.00", "to", "1.00),", "3.0", "GB/s"],
    ]
    assert {line[at:] for line in lines} == {"0.50 s (0.50 to 0.50), 6.0 GB/s"}
    assert last == "2GiB a file: no smaller ones load as fast"
    assert report(measured[:1], measured[0])[-1].startswith("1GiB a file: each rank is one file")
    assert "larger ones gain less than 5%" in report(measured, measured[0])[-1]


def test_a_picture_has_a_panel_only_for_what_was_timed() -> None:
    measured = timed((2.0,), (1.0,))
    shapes = draw(measured, measured[1], "llama").shapes
    texts = [shape.text for shape in shapes if isinstance(shape, Text)]
    assert texts[0] == "llama: size per file"
    assert "Load, cold page cache, seconds" in texts
    assert "Load, warm page cache, seconds" not in texts
