"""What people and logs see of a long step."""

from __future__ import annotations

import re

import pytest
from blackbox.harness import House
from blackbox.terminal import shown_by


def see(house: House, *words: object) -> str:
    """Pull with a terminal for stderr, and return what it shows."""
    command = ("pull", "--shared", house.shared, *words, house.model, "-tp", 2)
    status, shown = shown_by(house, *command)
    assert status == 0, shown
    return shown


@pytest.fixture
def away(house: House) -> House:
    house.serve()
    house.shared_copy()
    return house


def test_a_terminal_shows_a_bar_with_bytes_and_rate(away: House) -> None:
    shown = see(away)
    assert re.search(r"shardboot: copy: .*%\|.*\|.*B/s", shown)
    # The bar is wiped out before the line that ends the step.
    assert re.search(r"\r +\rshardboot: copy.done: ", shown)


@pytest.mark.parametrize("kind", ["text", "json"])
def test_no_bar_is_drawn_where_lines_are_wanted(away: House, kind: str) -> None:
    shown = see(away, "--log-format", kind)
    assert "%|" not in shown
    assert "copy.done" in shown
