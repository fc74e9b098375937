"""What servers import beyond their standby: noted by forks, imported before the next one is made.

The model's class, the kernels of a first request and the like: which they are, only a server knows.
One name a line; a name that cannot be imported any more costs nothing.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

NAME: Final = re.compile(r"[A-Za-z_][\w.]*")
MAX_NAMES: Final = 5000
"""Noted by one process."""

MAX_BYTES: Final = 1 << 20
HOOKS: Final = (
    "uvicorn.lifespan.on",
    "vllm.v1.engine.async_llm",
    "multiprocessing.popen_fork",
)
"""Whose import tells how far a server is (`register`): each server must import these itself."""

NEVER: Final = (*HOOKS, "entrypoint.vllm_plugin.fork_context")
"""The last one imports one of them."""

TRIAL_SECONDS: Final = 120


class Noting(MetaPathFinder):
    """Finds no module, and notes the name of each that is looked for."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.left = descriptor, MAX_NAMES

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if self.left:
            self.left -= 1
            with suppress(OSError):
                os.write(self.descriptor, f"{fullname}\n".encode())
        return None


def note(path: Path) -> None:
    """From now on, note what this process and its forks import; not where it cannot be kept."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(OSError):
        path.parent.mkdir(mode=0o750, exist_ok=True)
        descriptor = os.open(path, flags, 0o640)
        if os.fstat(descriptor).st_size > MAX_BYTES:
            os.close(descriptor)
            return
        sys.meta_path.insert(0, Noting(descriptor))


def noted(path: Path) -> list[str]:
    """Return what was noted, each name once, in order."""
    try:
        with path.open("rb") as file:
            text = file.read(2 * MAX_BYTES).decode(errors="replace")
    except OSError:
        return []
    return list(dict.fromkeys(line for line in text.splitlines() if NAME.fullmatch(line)))


def names(path: Path) -> list[str]:
    """Return what was noted, and is not imported here."""
    return [name for name in noted(path) if name not in sys.modules and name not in NEVER]


def import_all(found: Iterable[str]) -> None:
    """Import modules by their names; what is not there any more is passed over."""
    for name in found:
        with suppress(ImportError):
            importlib.import_module(name)


def harmless(do: Callable[[], None], obstacle: str) -> bool:
    """Tell whether a process that does this may be forked afterwards: tried in a fork.

    `obstacle` is what stands against forking this process already.
    """
    from entrypoint.vllm_plugin import forking

    before = [name in sys.modules for name in HOOKS]
    pid = os.fork()
    if not pid:
        status = 1
        try:
            # One that hangs is ended by its own clock.
            signal.alarm(TRIAL_SECONDS)
            do()
            is_hooked = before != [name in sys.modules for name in HOOKS]
            status = int(is_hooked or forking.obstacle() != obstacle)
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0
