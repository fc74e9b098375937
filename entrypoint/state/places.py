"""The directories below the state directory. Root that stays root looks that none is a link."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Place = Literal[
    "awaited",
    "caches",
    "home",
    "imports",
    "logs",
    "memory",
    "proofs",
    "rejections",
    "status",
    "stops",
]
"""All that there are: what is not in this list cannot be asked for."""


def below(state_dir: Path, place: Place) -> Path:
    """Return where a directory of ours lies."""
    return state_dir / place
