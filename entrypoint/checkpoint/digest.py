"""BLAKE3, the one hash of this project, over bytes, files and canonical JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

PIECE_BYTES = 8 * 1024 * 1024
"""One read of a large file: large enough for the disk, small enough for bounded memory."""


def canonical(value: Json) -> bytes:
    """Return the one spelling of `value`: sorted keys, no blanks, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_bytes(data: bytes) -> str:
    """Return the BLAKE3 of `data` as 64 hex digits."""
    return str(blake3(data).hexdigest())


def digest_json(value: Json) -> str:
    """Return the BLAKE3 of the canonical JSON of `value`."""
    return digest_bytes(canonical(value))


def digest_file(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Return the BLAKE3 of a whole file, read once in pieces; `on_bytes` hears of each piece."""
    hasher = blake3()
    buffer = bytearray(PIECE_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            hasher.update(view[:count])
            on_bytes(count)
    return str(hasher.hexdigest())
