"""The standby's own end of things: starting it, asking how it is, and having it fork."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from entrypoint.launch import Seat
from entrypoint.log import Log
from entrypoint.supervise import offspring

PROGRAM: Final = "entrypoint.vllm_plugin.standby"
FORK: Final = b"fork"
LOOK: Final = b"look"
LEARN: Final = b"learn"
MAX_ANSWER: Final = 64 * 1024
TAKE_SECONDS: Final = 300.0
"""For all imports, on a disk that is slow; then a server is started as ever."""

AT_ONCE_SECONDS: Final = 0.2
"""One that has imported vLLM forks within milliseconds."""


class Standby:
    """A process that has imported vLLM, or is at it; `ready` once it says so.

    `is_busy` while it owes an answer: it is at its imports, or has not heard an order yet.
    """

    def __init__(
        self, interpreter: str, environ: Mapping[str, str], notes: Path, wish: str
    ) -> None:
        """Start one; its servers note in `notes` what it should import, too.

        `wish`: whether to fork where that is untried (`yes`), or not (`auto`). Raises: OSError.
        """
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [interpreter, "-P", "-m", PROGRAM, str(theirs.fileno()), str(notes), wish],
                pass_fds=[theirs.fileno()],
                env=dict(environ),
                process_group=0,
            )
        self.ready, self.is_busy = False, True

    def hear(self) -> str:
        """Read what it says of itself; return why it shall fork no more, if that is so."""
        try:
            told = self.channel.recv(MAX_ANSWER, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return ""
        except ConnectionResetError:
            # It ended with an order unread: told once, and before what it had said until then.
            return self.hear()
        except OSError as error:
            return str(error)
        if not told:
            return "it has ended"
        self.ready, self.is_busy = True, False
        return str(json.loads(told)["obstacle"])

    def look(self) -> None:
        """Have it look whether it is still what is installed, which it tells with any answer."""
        self._order(LOOK)

    def learn(self) -> None:
        """Have it import what its servers needed beyond it; it says when it is ready again."""
        self._order(LEARN)

    def _order(self, word: bytes) -> None:
        """Give an order, but to one that is at another: an answer is owed from then on."""
        if not self.is_busy:
            self.is_busy = True
            # One that has ended is heard of.
            with contextlib.suppress(OSError):
                self.channel.send(word)

    def end(self) -> None:
        """Let it go, with what it may just be trying in forks of it: they are of its group."""
        self.channel.close()
        # Once it was reaped, its number may be another's.
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        # Whoever supervises reaps it.
        self.process.returncode = 0


class StandbySeat(Seat):
    """A fork of the standby: taken as soon as that has imported vLLM.

    Where it cannot be had, vLLM runs in this very process after all, started as without a standby.
    """

    def __init__(self, channel: socket.socket | None, told: int, log: Log) -> None:
        """`told` is the descriptor on which the supervisor is told the server's pid."""
        self.channel, self.told, self.log = channel, told, log
        self.connection: socket.socket | None = None
        self.pid = 0
        # What a boot leaves behind the supervisor adopts.
        self.heir = os.getppid()

    def take(self, waits: Callable[[str], None]) -> int:
        """Have the standby fork, and wait until it has; it may still be importing."""
        if self.channel is None:
            return super().take(waits)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.channel, [FORK], [theirs.fileno(), *_kept()])
            except OSError:
                # It has ended; the supervisor says so, and why.
                return super().take(waits)
        if not select.select([ours], [], [], AT_ONCE_SECONDS)[0]:
            waits("for the standby, which imports vLLM")
        ours.settimeout(TAKE_SECONDS)
        try:
            line = ours.recv(offspring.MAX_PID_BYTES)
        except OSError as error:
            self.log.line("standby.lost", f"vLLM is started as without a standby: {error}")
            return super().take(waits)
        ours.settimeout(None)
        if not line.strip().isdigit():
            return super().take(waits)
        self.connection, self.pid = ours, int(line)
        return self.pid

    def become(
        self,
        path: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        umask: int | None,
        through: Sequence[str],
    ) -> NoReturn:
        """Tell the fork what to serve, and end: the server is there. Raises: ExecError."""
        if self.connection is None:
            os.write(self.told, f"{os.getpid()}\n".encode())
            super().become(path, arguments, environ, umask, through)
        request = {"argv": [path, *arguments], "environ": dict(environ), "umask": umask}
        os.write(self.told, f"{self.pid}\n".encode())
        self.connection.sendall(json.dumps(request).encode() + b"\n")
        os._exit(0)


def _kept() -> list[int]:
    """Return the descriptors that are to cross into vLLM: those that exec would keep."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):
            if descriptor > 2 and os.get_inheritable(descriptor):  # noqa: PLR2004 - stderr
                found.append(descriptor)
    return found
