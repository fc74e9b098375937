"""What servers import beyond their standby: noted by forks, imported before the next one is made.

The model's class, the kernels of a first request and the like: which they are, only a server knows.
One name a line; a name that cannot be imported any more costs nothing. One whose import does harm
is noted once more, as refused, and is not tried again.
"""

from __future__ import annotations

import importlib
import mmap
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

from entrypoint.state.files import keep_newest, open_kept

NAME: Final = re.compile(r"[A-Za-z_][\w.]*")
MAX_NAMES: Final = 5000
"""Noted by one process."""

MAX_BYTES: Final = 1 << 20
MAX_FILES: Final = 16
"""One for each model that is served with this state directory; those that served last are kept."""

APPENDED: Final = (os.O_WRONLY | os.O_APPEND, 0o640)
REFUSED: Final = "!"
"""In front of a name that must not be imported; no name itself begins so."""

HOOKS: Final = (
    "uvicorn.lifespan.on",
    "vllm.v1.engine.async_llm",
    "multiprocessing.popen_fork",
)
"""Whose import tells how far a server is (`register`): each server must import these itself."""

NEVER: Final = (*HOOKS, "entrypoint.vllm_plugin.fork_context")
"""The last one imports one of them."""

TRIAL_SECONDS: Final = 120
MAX_REFUSED: Final = 8
"""At once: each costs a trial, in which all before it are imported anew."""


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
    with suppress(OSError):
        path.parent.mkdir(mode=0o750, exist_ok=True)
        descriptor = open_kept(path, *APPENDED)
        sys.meta_path.insert(0, Noting(descriptor))
        if os.fstat(descriptor).st_size > MAX_BYTES:
            # What is still imported will be noted again.
            os.ftruncate(descriptor, 0)
        os.utime(descriptor)
        keep_newest(path.parent, "*", MAX_FILES)


def refuse(path: Path, found: Iterable[str]) -> None:
    """Note that these must not be imported; not where it cannot be kept."""
    if lines := "".join(f"{REFUSED}{name}\n" for name in found):
        with suppress(OSError), os.fdopen(open_kept(path, *APPENDED), "w") as file:
            file.write(lines)


def noted(path: Path) -> list[str]:
    """Return what was noted and not refused, each name once, in order."""
    try:
        with path.open("rb") as file:
            lines = file.read(2 * MAX_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    refused = [line.removeprefix(REFUSED) for line in lines if line.startswith(REFUSED)]
    return _without(refused, dict.fromkeys(line for line in lines if NAME.fullmatch(line)))


def _without(refused: Iterable[str], found: Iterable[str]) -> list[str]:
    """Return the names that are none of these, nor in one of these packages."""
    places = tuple(f"{name}." for name in refused)
    return [name for name in found if not f"{name}.".startswith(places)]


def names(path: Path) -> list[str]:
    """Return what was noted, and is not imported here."""
    return [name for name in noted(path) if name not in sys.modules and name not in NEVER]


def import_all(found: Iterable[str]) -> None:
    """Import modules by their names; what is not there any more is passed over."""
    for name in found:
        with suppress(ImportError):
            importlib.import_module(name)


def tried(found: Sequence[str], obstacle: str) -> tuple[list[str], list[str]]:
    """Return which modules a process may import and be forked afterwards, and which others not.

    The first that does harm is left out, with what is in it, and the others are tried once more;
    but not for ever: where too many do, or it takes too long, those before the last one are all.
    `obstacle` as for `harmless`.
    """
    left, refused, until = list(found), list[str](), time.monotonic() + TRIAL_SECONDS
    while True:
        steps = [partial(import_all, [name]) for name in left]
        done = _trial(steps, obstacle, until - time.monotonic())
        if done == len(left):
            return left, refused
        bad = left[done]
        refused.append(bad)
        if len(refused) == MAX_REFUSED or time.monotonic() > until:
            return left[:done], refused
        left = _without([bad], left)


def harmless(do: Callable[[], None], obstacle: str) -> bool:
    """Tell whether a process that does this may be forked afterwards: tried in a fork.

    `obstacle` is what stands against forking this process already.
    """
    return _trial([do], obstacle, TRIAL_SECONDS) == 1


def _trial(steps: Sequence[Callable[[], None]], obstacle: str, seconds: float) -> int:
    """Return after how many steps a process may still be forked: taken in a fork, until one fails.

    It fails as well if it has hung for as long as all of them may take.
    """
    from entrypoint.vllm_plugin import forking

    if not steps:
        return 0
    before = [name in sys.modules for name in HOOKS]
    with mmap.mmap(-1, mmap.PAGESIZE) as done:
        pid = os.fork()
        if not pid:
            try:
                # One that hangs is ended by its own clock; 0 would set none.
                signal.setitimer(signal.ITIMER_REAL, max(seconds, 1.0))
                for number, step in enumerate(steps, 1):
                    step()
                    if before != [name in sys.modules for name in HOOKS]:
                        break
                    if forking.obstacle() != obstacle:
                        break
                    done[:8] = number.to_bytes(8, "big")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        return int.from_bytes(done[:8], "big")
