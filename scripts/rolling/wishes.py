"""What an upgrade is between, and how it shall be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rolling.server import Server


class Instance(NamedTuple):
    """One of the two: its name, HOST:PORT, and what listens there."""

    name: str
    address: str
    server: Server


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """How it shall be done; times are in seconds."""

    checkpoint: Literal["make", "require", "any"]
    model: str
    """A name that the new instance must serve; empty for all names of the old one."""

    check: list[str]
    """A command that says whether it works, instead of a completion; empty for none."""

    front: Server | None
    """Where clients come in, to be asked once after the move."""

    start_timeout: float
    drain_timeout: float
    quiet: float
    """How long the old one must have been without requests."""
