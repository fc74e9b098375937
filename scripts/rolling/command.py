"""Programs that are run to their end, and what is said when one fails."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

COMMAND_SECONDS: Final = 180.0
"""Longer than a unit may take to stop."""

MOST_CHARACTERS: Final = 300
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class StepError(Exception):
    """A step failed; the message says what was found, and where."""


class Command(NamedTuple):
    """A command line, and how it is told of: without what an operator's file says, as keys."""

    words: list[str]
    told: str = ""

    @property
    def spelled(self) -> str:
        return self.told or shlex.join(self.words)


def run(
    command: Command | Sequence[str],
    *,
    seconds: float = COMMAND_SECONDS,
    environ: Mapping[str, str] = NOTHING,
) -> str:
    """Run a program to its end and return its stdout; `environ` is added to ours.

    It hears no ^C that is meant for us. Raises: StepError: with the last line that it said.
    """
    if not isinstance(command, Command):
        command = Command([*command])
    spelled = command.spelled
    try:
        done = subprocess.run(
            command.words,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env=os.environ | environ,
            start_new_session=True,
        )
    except OSError as error:
        raise StepError(f"{spelled}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise StepError(f"{spelled}: not done within {seconds:g} s") from None
    if done.returncode:
        said = one_line(last_line(done.stderr) or last_line(done.stdout))
        raise StepError(f"{spelled}: exit status {done.returncode}: {said}")
    return done.stdout


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return (text.strip().splitlines() or [""])[-1]


def one_line(text: str) -> str:
    """Return a text as one printable line of bounded length."""
    line = " ".join(text.split())
    line = "".join(each if each.isprintable() else "?" for each in line)
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}…"
