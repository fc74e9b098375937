"""Waiting for what nobody tells of."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 30.0


def until(is_so: Callable[[], object]) -> None:
    """Look again and again until it is so. Raises: AssertionError after `SECONDS`."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
