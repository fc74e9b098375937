"""What operators have written, files and command lines, and what is said of one that is none."""

from __future__ import annotations

import shlex
from pathlib import Path

from rolling.command import StepError


def text_of(path: Path) -> str:
    """Return what a file says. Raises: StepError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StepError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise StepError(f"{path}: not UTF-8, at byte {error.start}") from None


def split(text: str, where: str) -> list[str]:
    """Split a command line as a shell does. Raises: StepError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise StepError(f"{where}: {str(error).lower()}") from None
