"""Why a worker will not go on, left as a file: its exception arrives as another one."""

from __future__ import annotations

from pathlib import Path

from entrypoint.errors import SaveError
from entrypoint.state.files import read_json, write_json

PATTERN = ".refused-*.json"


def leave(directory: Path, rank: int, reason: str, message: str) -> None:
    """Leave in `directory` that `rank` refuses. Raises: OSError."""
    name = PATTERN.replace("*", str(rank))
    write_json(directory / name, {"reason": reason, "message": message})


def forget(directory: Path) -> None:
    """Remove what an earlier attempt left."""
    for path in directory.glob(PATTERN):
        path.unlink(missing_ok=True)


def raise_left(directory: Path) -> None:
    """Raise what the first rank to refuse has left in `directory`; nothing left, nothing raised.

    Raises: SaveError with that rank's reason code.
    """
    for path in sorted(directory.glob(PATTERN)):
        said = read_json(path)
        if isinstance(said, dict):
            raise SaveError(str(said.get("message")), reason=str(said.get("reason")))
