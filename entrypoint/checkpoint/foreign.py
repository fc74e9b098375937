"""Reading what somebody else may have put there: files bounded, regular, no link followed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

MALFORMED: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What Python raises at JSON that is not what a reader takes for granted."""


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes; a link is not followed.

    Raises: OSError; ValueError when it is larger or no regular file.
    """
    # O_NONBLOCK: opening a FIFO planted under that name must not hang.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            msg = f"{path}: expected a regular file of at most {limit} bytes"
            raise ValueError(msg)
        # Not before: for a directory it raises, and leaves the descriptor open.
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit + 1)
    finally:
        os.close(descriptor)
