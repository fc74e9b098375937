"""What sends requests to a server: nginx, by a file with one line, or whatever a hook speaks to."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from rolling.command import StepError, run
from rolling.reading import text_of

LINE: Final = "server {address} max_fails=0;\n"
SERVER: Final = re.compile(r"^\s*server\s+([^\s;]+)", re.MULTILINE)
PID: Final = re.compile(r"^\s*pid\s+([^\s;]+)\s*;", re.MULTILINE)
READ: Final = re.compile(r"^# configuration file (.*):$", re.MULTILINE)
DEFAULT_PID: Final = "/run/nginx.pid"
WORKER: Final = "nginx: worker process"
LEAVING: Final = "is shutting down"
RELOAD_SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.1


class Traffic(Protocol):
    """Where new requests go. Moving to where they go already changes nothing."""

    def where(self) -> str:
        """Return the HOST:PORT that new requests are meant to go to. Raises: StepError."""
        ...

    def check(self) -> None:
        """Look whether traffic could be moved at all. Raises: StepError."""
        ...

    def move(self, address: str) -> None:
        """Send all requests that begin from now on to `address`. Raises: StepError."""
        ...

    def is_settled(self) -> bool:
        """Tell whether nobody is left who may still send to an earlier address."""
        ...


class Nginx:
    """An nginx of this machine, and the file that its upstream includes."""

    def __init__(self, file: Path) -> None:
        self.file = Path(os.path.realpath(file))
        self._pid_file = Path(DEFAULT_PID)

    def where(self) -> str:
        found = SERVER.findall(self._read())
        if len(found) != 1:
            raise StepError(f"{self.file}: expected one line `server HOST:PORT;`, not {len(found)}")
        return str(found[0])

    def check(self) -> None:
        """Have nginx read its configuration, without any effect; our file must be a part of it."""
        told = run(["nginx", "-T"])
        if str(self.file) not in map(os.path.realpath, READ.findall(told)):
            raise StepError(f"nginx does not read {self.file}: no upstream includes it")
        self._pid_file = Path((PID.findall(told) or [DEFAULT_PID])[-1])

    def move(self, address: str) -> None:
        before = self._read()
        self._write(LINE.format(address=address))
        try:
            self.check()
        except BaseException:
            self._write(before)
            raise
        self._reload()

    def is_settled(self) -> bool:
        # Workers from before a reload finish what they began, and take nothing new.
        return not any(self._workers().values())

    def _reload(self) -> None:
        """Have nginx take up its configuration, which it does on its own time."""
        before = self._workers()
        run(["nginx", "-s", "reload"])
        deadline = time.monotonic() + RELOAD_SECONDS
        while any(pid in before and not leaves for pid, leaves in self._workers().items()):
            if time.monotonic() > deadline:
                raise StepError("nginx has not taken up its configuration; its error log says why")
            time.sleep(POLL_SECONDS)

    def _workers(self) -> dict[int, bool]:
        """Return the workers that run, and of each whether it only finishes what it began."""
        try:
            master = self._pid_file.read_text().strip()
            children = Path(f"/proc/{master}/task/{master}/children").read_text().split()
        except OSError as error:
            raise StepError(f"nginx does not run: {error.filename}: {error.strerror}") from None
        titles = {int(pid): _title(pid) for pid in children}
        return {pid: LEAVING in title for pid, title in titles.items() if title.startswith(WORKER)}

    def _read(self) -> str:
        return text_of(self.file)

    def _write(self, text: str) -> None:
        """Replace the file in one step; a reader sees one text or the other."""
        # nginx overlooks names that begin with a dot, should it include all that lies there.
        draft = self.file.with_name(f".{self.file.name}.new")
        try:
            with draft.open("w") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            draft.chmod(0o644)
            draft.replace(self.file)
        except OSError as error:
            raise StepError(f"{self.file}: {error.strerror}") from None


class Hook:
    """A command for any other load balancer.

    `COMMAND where` prints the HOST:PORT that new requests go to; `COMMAND move HOST:PORT` returns
    once they go there. Both may be repeated.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = [*words]

    def where(self) -> str:
        return run([*self.words, "where"]).strip()

    def check(self) -> None:
        """Nothing can be tried without effect."""

    def move(self, address: str) -> None:
        run([*self.words, "move", address])

    def is_settled(self) -> bool:
        return True  # `move` has returned


def _title(pid: str) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""
