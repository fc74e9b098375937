"""The order of a tee: what boot leaves in its staging, for those who go on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.foreign import MALFORMED, read_bounded
from entrypoint.errors import StagingError
from entrypoint.store.staging import Staging

ORDER = ".teeing"
"""In the staging of a tee: what is saved there and how."""

UNCLAIMED = ".unclaimed"
"""Beside it, until whoever is to commit takes it away: nobody else can after that."""

MAX_BYTES = 16 * 1024 * 1024


def leave(staging: Staging, order: Mapping[str, Json]) -> None:
    """Leave an order in new staging. Raises: StagingError, also for one too large to be read."""
    data = json.dumps(order).encode()
    if len(data) > MAX_BYTES:
        msg = f"{staging.path}: an order of {len(data)} bytes, expected at most {MAX_BYTES}"
        raise StagingError(msg, hint="a model of fewer files, or --on-miss save")
    staging.write_file(UNCLAIMED, b"")
    staging.write_file(ORDER, data)


def read(staged: Path) -> dict[str, Any]:
    """Return the order in staging. Raises: StagingError where there is none, or no sound one."""
    path = staged / ORDER
    try:
        order = json.loads(read_bounded(path, MAX_BYTES))
    except (OSError, *MALFORMED) as error:
        raise StagingError(f"{path}: {error}") from None
    if not isinstance(order, dict):
        raise StagingError(f"{path}: expected an object, found {type(order).__name__}")
    return order
