"""What an error says is fit for a log, whatever it was made of."""

from __future__ import annotations

import os

import pytest

from entrypoint.errors import LONGEST_LINE, ManifestError, ShardbootError
from entrypoint.log import Log


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("key.tp: missing field", "key.tp: missing field"),
        ("größer als 4 → 5", "größer als 4 → 5"),
        ("key.a\nshardboot: local.hit: served", r"key.a\nshardboot: local.hit: served"),
        ("key.\x1b[31mred", r"key.\x1b[31mred"),
        ("key.\ud800", r"key.\ud800"),
        ("key.\u202etxt", r"key.\u202etxt"),
    ],
)
def test_a_message_is_one_printable_line(text: str, shown: str) -> None:
    assert str(ManifestError(text)) == shown


def test_an_endless_message_is_cut() -> None:
    said = str(ShardbootError("x" * 10**6))
    assert len(said) < LONGEST_LINE + 10
    assert said.endswith("…")


def test_no_foreign_word_begins_a_line_of_the_log() -> None:
    reading, writing = os.pipe()
    Log("boot", descriptor=writing).line("local.foreign", "found \nshardboot: local.hit: x")
    os.close(writing)
    with os.fdopen(reading) as said:
        assert said.read() == "shardboot: local.foreign: found \\nshardboot: local.hit: x\n"
