"""A queue in a store that many nodes share: only so many are at a thing at once, first come first.

    ROOT/.leases/WHAT/NUMBER.HOST.PID.NONCE      the ticket of one who waits, or whose turn it is

A ticket's content changes every few seconds while its process lives. One that stays as it is for
long, by the clock of whoever waits behind it, is dead and deleted: no two clocks are compared, and
no file times. Leases save work and never carry correctness: one who was stopped goes on when
another has its turn already, and two who come in the same moment may both be first.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import contextlib
import errno
import itertools
import math
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from entrypoint.checkpoint.entry import check_path
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.model.bounded import within
from entrypoint.state import process
from entrypoint.state.status import Server
from entrypoint.store import tree
from entrypoint.store.staging import host
from entrypoint.store.tree import DIR_MODE, FILE_MODE

LEASES: Final = ".leases"

_LEAVE_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 5.0
_WATCHED: Final = 8
"""So many more than those whose turn it is are watched: not all, where hundreds wait."""
_TRIES: Final = 4
_MOST_NAMES: Final = 10_000
_TICKET_BYTES: Final = 256
_TICKET: Final = re.compile(r"(\d{6,9})\.([\w-]{0,40})\.(\d{1,10})\.([0-9a-f]{8})", re.ASCII)

Found = TypeVar("Found")


class Pace(NamedTuple):
    """How often things are done, in seconds. A beat is late where the store is busy: nine a ttl."""

    beat: float = 5.0
    ttl: float = 45.0
    settle: float = 1.0
    poll: float = 1.0


PACE: Final = Pace()

_SEEN: Final[dict[Path, dict["_Place", tuple[bytes, float, float]]]] = {}
"""By line: what each ticket held, since when, and when that was last looked at."""


class Waited(NamedTuple, Generic[Found]):
    """How a wait ended: our turn, something `found`, the bound passed, or no queue is here."""

    how: Literal["turn", "found", "late", "without"]
    found: Found | None = None


class _Place(NamedTuple):
    """A place in the line; they sort as they stand. Number 0 has only just come."""

    number: int
    nonce: str
    host: str
    pid: int

    @property
    def name(self) -> str:
        return f"{self.number:06}.{self.host}.{self.pid}.{self.nonce}"


@contextlib.contextmanager
def queue(
    root: Path, what: str, dir_mode: int = DIR_MODE, file_mode: int = FILE_MODE, pace: Pace = PACE
) -> Iterator["Ticket"]:
    """Stand in line for `what` in the store `root`; the ticket and its thread end with the block.

    Where no ticket can be written, the block runs all the same, and `wait` says so. Killed, the
    ticket stays until somebody waits behind it. Raises: ManifestError for a `what` with a path.
    """
    check_path(what, "what")
    ticket = Ticket(root, what, (dir_mode, file_mode), pace)
    stop = threading.Event()
    heart = threading.Thread(target=ticket.beat, args=(stop,), name="lease", daemon=True)
    try:
        try:
            ticket.line_up()
            heart.start()
        except (OSError, RuntimeError) as error:
            # Where no thread is to be had, nobody would see that we live.
            ticket.obstacle = error if isinstance(error, OSError) else OSError(str(error))
            ticket.leave()
        yield ticket
    finally:
        stop.set()
        if heart.ident is not None:
            heart.join(_LEAVE_SECONDS)
        # One that hangs in a dead mount tells that the ticket cannot be given back either.
        if not heart.is_alive():
            ticket.leave()


class Ticket:
    """A place in the line for one thing; see `queue`."""

    def __init__(self, root: Path, what: str, modes: tuple[int, int], pace: Pace) -> None:
        self.directory = root / LEASES / what
        self.obstacle: OSError | None = None
        self._root, self._modes, self._pace = root, modes, pace
        me = Server.this()
        self._process = [str(me.start), me.namespace, me.host_boot]
        self._place = _Place(0, os.urandom(4).hex(), host(), me.pid)
        self._beats, self._settled = 0, 0.0
        # Who comes for moments only, again and again, must see a ticket die as well.
        self._seen = _SEEN.setdefault(self.directory, {})

    def wait(
        self,
        limit: int,
        seconds: float,
        meanwhile: Callable[[], Found | None] = lambda: None,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> Waited[Found]:
        """Wait until fewer than `limit` are ahead, or `meanwhile` finds something, or `seconds`.

        It is looked for at every poll, and once more after those ahead are gone. `on_wait` hears
        one line: who is ahead, or why there is no queue. Shorter than the settling is always late.
        """
        deadline, told = time.monotonic() + seconds, False
        while True:
            try:
                self._require_an_answer()
                ahead = self._ahead(limit)
            except OSError as error:
                on_wait(f"{self.directory}: no queue ({error.strerror or error}); going on without")
                return Waited("without")
            is_turn = ahead is not None and len(ahead) < limit
            if is_turn:
                # What those before us left behind must be seen: an NFS client shows a directory as
                # it was up to a minute ago (acdirmax), unless it has changed it itself.
                with contextlib.suppress(OSError):
                    os.utime(self._root)
            found = meanwhile()
            if found is not None:
                return Waited("found", found)
            if is_turn:
                return Waited("turn")
            left = deadline - time.monotonic()
            if left <= 0:
                return Waited("late")
            if ahead and not told:
                told = True
                who = f"{ahead[0].host}, process {ahead[0].pid}"
                more = f" and {len(ahead) - 1} more" if ahead[1:] else ""
                on_wait(f"{self.directory}: waiting for {who}{more}")
            time.sleep(min(left, self._pace.poll * random.uniform(0.5, 1.0)))  # noqa: S311

    def line_up(self) -> None:
        """Take a ticket at the end. Raises: OSError; half of one may be there."""
        self._require_an_answer()
        for _ in range(_TRIES):
            # Whoever leaves last takes the directory away.
            with contextlib.suppress(FileNotFoundError):
                return self._line_up()
        return self._line_up()

    def _require_an_answer(self) -> None:
        """Look at the store in a child first: its mount may hang. Raises: OSError."""
        if within(_ANSWER_SECONDS, self._look) is None:
            raise OSError(errno.ETIMEDOUT, "the store does not answer")

    def _look(self) -> bool:
        """Look as is about to be done; whoever may not, or finds nothing, has had an answer."""
        with contextlib.suppress(OSError, ValueError):
            os.listdir(self.directory)
            # What else was looked at lately the kernel tells by itself, as NFS does for a minute
            # after its server has died; to open a file it must ask.
            read_bounded(self.directory / self._place.name, _TICKET_BYTES)
        return os.path.isdir(self._root)

    def _line_up(self) -> None:
        tree.make_hidden(self._root, LEASES, self._modes[0])
        tree.make_hidden(self._root / LEASES, self.directory.name, self._modes[0])
        self._place = self._place._replace(number=0, nonce=os.urandom(4).hex())
        # Made before the line is looked at: having changed a directory itself, an NFS client lists
        # it anew (nfs4_update_changeattr in fs/nfs/nfs4proc.c). By a list of a minute ago this one
        # would stand before those whose turn it is.
        self._write(os.O_CREAT | os.O_EXCL)
        last = max((place.number for place in self._line()), default=0)
        numbered = self._place._replace(number=min(last + 1, 999_999_999))
        os.rename(self.directory / self._place.name, self.directory / numbered.name)
        self._place = numbered
        # Another may have listed before us and be numbered after us; this makes that rare.
        self._settled = time.monotonic() + self._pace.settle * random.uniform(1.0, 1.5)  # noqa: S311

    def leave(self) -> None:
        """Give the ticket back, if it is still there; take away a line that nobody stands in."""
        with contextlib.suppress(OSError):
            (self.directory / self._place.name).unlink()
            self.directory.rmdir()

    def beat(self, stop: threading.Event) -> None:
        """Change the ticket's content every beat until told to stop; never make one."""
        # The main thread's wait must be what a signal interrupts.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not stop.wait(self._pace.beat):
            self._beats += 1
            with contextlib.suppress(OSError):
                self._write()

    def _write(self, flags: int = 0) -> None:
        # Opened and closed each time: that is when NFS sends, and asks for, what was written. The
        # length never changes, so that nobody reads half of it.
        flags |= os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.directory / self._place.name, flags, 0o600)
        try:
            if flags & os.O_CREAT:
                tree.set_mode(descriptor, self._modes[1])
            tree.write_all(descriptor, f"{self._beats:010} {' '.join(self._process)}\n".encode())
        finally:
            os.close(descriptor)

    def _line(self) -> list[_Place]:
        """Return all who stand here, the first one first; no ticket, no place. Raises: OSError."""
        with os.scandir(self.directory) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MOST_NAMES)]
        if len(names) == _MOST_NAMES:
            raise OSError(f"{_MOST_NAMES} names or more")
        tickets = filter(None, map(_TICKET.fullmatch, names))
        return sorted(_Place(int(t[1]), t[4], t[2], int(t[3])) for t in tickets)

    def _ahead(self, limit: int) -> list[_Place] | None:
        """Return who is alive ahead of us; None when that cannot be told yet. Raises: OSError."""
        if self.obstacle is not None:
            raise self.obstacle
        if time.monotonic() < self._settled:
            return None
        line = self._line()
        if self._place not in line:
            # Stopped for so long that it was taken for dead, or somebody has tidied up.
            self.line_up()
            return None
        for gone in self._seen.keys() - set(line):
            self._seen.pop(gone, None)
        ahead: list[_Place] = []
        for place in line[: line.index(self._place)]:
            if len(ahead) >= limit + _WATCHED or not self._is_dead(place):
                ahead.append(place)
        return ahead

    def _is_dead(self, place: _Place) -> bool:
        """Look at a ticket, at most once a beat, and delete it when it is dead."""
        now = time.monotonic()
        before, since, looked = self._seen.get(place, (None, now, -math.inf))
        if now < looked + self._pace.beat:
            return False
        try:
            content = read_bounded(self.directory / place.name, _TICKET_BYTES)
        except FileNotFoundError:
            return True
        except (OSError, ValueError):
            content = b""
        since = since if content == before else now
        # A pid tells something only on the host that it is of, and in its namespace.
        _, start, *where = [*content.decode("ascii", "replace").split(), "", ""]
        is_here = start.isdecimal() and where[:2] == self._process[1:]
        has_ended = is_here and not process.is_alive(place.pid, int(start))
        if now - since < self._pace.ttl and not has_ended:
            self._seen[place] = (content, since, now)
            return False
        with contextlib.suppress(OSError):
            (self.directory / place.name).unlink()
        return True
