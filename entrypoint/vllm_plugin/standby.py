"""The standby: a process that has imported vLLM, and forks servers as often as it is told to.

    python -P -m entrypoint.vllm_plugin.standby SOCKET_FD NOTES yes|auto

It says on the socket when it is ready, or what stands against forking it, as one JSON object a
message; at the word `look` it says so again, or that it is not any more what is installed. At
`learn` it first imports what its servers have noted in the file NOTES, and compiles as they do, if
that is harmless. At `fork` it forks: the descriptors that came with the word are the fork's, and
the first of them is a connection, on which that says its pid, and reads what to serve. It is no
child of the standby: the nearest reaper above adopts it at once. `auto`: not where forks have not
been tried, which is then what it says.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from entrypoint.state import process
from entrypoint.vllm_plugin import compiling, forking, learned, preload

MODULES: Final = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.collect_env",
    "vllm.entrypoints.cli.run_batch",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.worker_base",
    "vllm.model_executor.model_loader",
)
"""What every server imports; names that another version has not are passed over."""

MAX_DESCRIPTORS: Final = 64
ADOPTION_SECONDS: Final = 0.001
"""Between two looks whether the process between is gone, which has nothing else to do."""

Stamp = tuple[int, int]
NEVER: Final[Stamp] = (-1, -1)
"""Of a file that was changed while it was imported: nobody knows which of the two it was."""


class Standby:
    """What has been imported, from which files, and the socket that orders come from."""

    def __init__(self, channel: socket.socket, notes: Path, before: Mapping[str, str]) -> None:
        """`before` is the environment that vLLM's imports have not yet changed."""
        self.channel, self.notes = channel, notes
        self.imported: dict[str, Stamp | None] = {}
        self.has_compiled = False
        began = time.time_ns()
        learned.import_all(MODULES)
        with suppress(ImportError):
            # It looks for its place in memory once; it is not there once the environment changed.
            importlib.import_module("setproctitle").getproctitle()
        self._learn()
        self._remember_files(began)
        # vLLM sets some when it is imported, for all its processes; a fork imports it no more.
        self.added = {n: v for n, v in os.environ.items() if before.get(n) != v}
        say(channel, forking.obstacle())

    def _learn(self) -> None:
        """Import what servers have noted, but what does harm."""
        found, refused = learned.tried(learned.names(self.notes), forking.obstacle())
        # Else the next standby would try the same.
        learned.refuse(self.notes, refused)
        learned.import_all(found)

    def _remember_files(self, began: int) -> None:
        """Remember which files all that is imported came from; what is new has come since then."""
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        for path in files - self.imported.keys():
            if isinstance(path, str):
                self.imported[path] = _stamp(path, began)
        # What is never collected is never written to: its pages stay shared with every fork. There
        # is next to no garbage in it, for which nobody looks here at all.
        gc.freeze()

    def _compile(self) -> None:
        """Have torch's compiler at hand, once, if servers use it."""
        if not self.has_compiled and compiling.is_used(learned.noted(self.notes)):
            self.has_compiled = True
            try:
                compiling.build(lambda do: learned.harmless(do, forking.obstacle()))
            except OSError as error:
                from entrypoint.vllm_plugin import compat

                compat.logger().warning("shardboot: the standby compiles nothing: %s", error)

    def wait_for_orders(self) -> list[int]:
        """Return in a fork, with the descriptors for it. Ends when nobody is left to ask."""
        while True:
            order, descriptors, _, _ = socket.recv_fds(self.channel, 16, MAX_DESCRIPTORS)
            if not order:
                os._exit(0)
            if order == b"look":
                say(self.channel, self._changed())
            elif order == b"learn":
                began = time.time_ns()
                self._compile()
                self._learn()
                self._remember_files(began)
                say(self.channel, forking.obstacle() or self._changed())
            elif _is_fork():
                self.channel.close()
                return descriptors
            for descriptor in descriptors:
                os.close(descriptor)

    def _changed(self) -> str:
        """Tell which file of what was imported is another one now, as after an upgrade."""
        for path, stamp in self.imported.items():
            if _stamp(path) != stamp:
                return f"{path} was changed since it was imported"
        return ""


def say(channel: socket.socket, obstacle: str) -> None:
    """Say, and answer an order by, whether anything stands against a fork."""
    channel.send(json.dumps({"obstacle": obstacle}).encode())


def untried() -> str:
    """Say that nobody has forked vLLM on this platform yet, if so; before all is imported."""
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    if platform.is_cpu():
        return ""
    return f"forks are untried on {platform.device_type}; --single-import yes has them"


def _stamp(path: str, began: float = math.inf) -> Stamp | None:
    """Return what tells a file from the next one of its name, if it is older than `began`."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ino) if found.st_ctime_ns <= began else NEVER


def _is_fork() -> bool:
    """Fork a process that is nobody's child here; whether this is it."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(ADOPTION_SECONDS)
    return True


def become(descriptors: list[int], notes: Path, added: Mapping[str, str]) -> None:
    """In a fork: become the server that the connection tells of, as far as vLLM's own beginning."""
    # Not a session of its own: the kernel would schedule it as a group apart (sched(7), autogroup).
    os.setpgid(0, 0)
    # The supervisor has adopted it, and nothing is to serve on when that is gone.
    process.die_with_parent(signal.SIGTERM)
    for held in descriptors[1:]:
        os.set_inheritable(held, True)
    with socket.socket(fileno=descriptors[0]) as connection:
        with suppress(OSError):
            connection.sendall(f"{os.getpid()}\n".encode())
        with connection.makefile() as file:
            line = file.readline()
    if not line.endswith("\n"):
        # Whoever wanted a server is gone.
        os._exit(1)
    request: dict[str, Any] = json.loads(line)
    os.environ.clear()
    os.environ.update({**added, **request["environ"]})
    if request["umask"] is not None:
        os.umask(request["umask"])
    sys.argv = request["argv"]
    gc.enable()
    learned.note(notes)
    forking.reseed()
    forking.fork_all()


def main() -> None:
    """Be a standby; in a fork, be vLLM."""
    preload.ensure()
    gc.disable()
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    notes, before = Path(sys.argv[2]), dict(os.environ)
    if sys.argv[3] == "auto" and (why := untried()):
        say(channel, why)
        return
    standby = Standby(channel, notes, before)
    become(standby.wait_for_orders(), notes, standby.added)
    vllm: Any = importlib.import_module("vllm.entrypoints.cli.main")
    sys.exit(vllm.main())


if __name__ == "__main__":
    main()
