"""Programs that never outlive their use, nor anything that they started.

The standard library alone, so that scripts/demo can import it before anything is installed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

RUN_SECONDS: Final = 600.0
STOP_SECONDS: Final = 15.0


class ProgramError(Exception):
    """A program failed, or took too long; the message has its last lines."""


class Program:
    """A process in its own session; leaving the `with` block ends it and all its descendants."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        said: Path | None = None,
    ) -> None:
        """Start `command`; stderr goes to `log`, and so does stdout unless `said` is given."""
        self.log = log
        self.started = time.monotonic()
        with log.open("wb") as err, (said or log).open("ab") as out:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out if said else err,
                stderr=err,
                env=dict(environ),
                start_new_session=True,
            )
        # Not even kill -9 of this process leaves the program behind. PR_SET_PDEATHSIG would not do:
        # vLLM misses a SIGTERM while it starts, and a SIGKILL reaches only the first of its tree.
        self.watcher = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, str(self.process.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def last_lines(self, count: int = 30) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def stop(self) -> None:
        """End the process, politely first; nothing that it started lives afterwards."""
        family = descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        if self.process.poll() is None:
            family |= descendants(self.process.pid)
            self.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        end(family)
        self.process.wait()
        self.watcher.kill()
        self.watcher.communicate()


def run(command: Sequence[str], environ: Mapping[str, str], log: Path) -> tuple[int, str]:
    """Run a command to its end; return its exit status and stdout. Raises: ProgramError."""
    said = log.with_suffix(".out")
    with Program(command, environ, log, said) as program:
        try:
            status = program.process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            raise ProgramError(f"not done in {RUN_SECONDS:.0f} s: {command}") from None
    text = said.read_text()
    said.unlink()
    return status, text


def descendants(pid: int) -> dict[int, str]:
    """Return every live descendant of `pid` with its start time, which tells a pid's next user."""
    parents: dict[int, int] = {}
    starts: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name, in brackets, may hold anything; state, parent, … follow (proc(5)).
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(entry.name)], starts[int(entry.name)] = int(fields[1]), fields[19]
    found: dict[int, str] = {}
    wanted = [pid]
    while wanted:
        parent = wanted.pop()
        children = [child for child, its in parents.items() if its == parent]
        found |= {child: starts[child] for child in children}
        wanted += children
    return found


def end(family: Mapping[int, str]) -> None:
    """Kill the processes that `descendants` found, and wait until they are gone."""
    deadline = time.monotonic() + STOP_SECONDS
    left = dict(family)
    while left and time.monotonic() < deadline:
        left = {pid: start for pid, start in left.items() if start_of(pid) == start}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def start_of(pid: int) -> str | None:
    """Return the start time of a process that runs, None for others."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def watch(pid: int) -> None:
    """Wait until whoever started `pid` is gone, then end it with all its descendants."""
    start = start_of(pid)
    sys.stdin.read()
    if start is not None:
        end({pid: start} | descendants(pid))


if __name__ == "__main__":
    watch(int(sys.argv[1]))
