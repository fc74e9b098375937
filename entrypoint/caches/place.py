"""Where vLLM keeps what it compiles and tunes for one checkpoint.

    STATE-DIR/caches/
        NAME-PLATFORM/     NAME of the checkpoint, 12 digits of the platform's digest
            vllm/          VLLM_CACHE_ROOT: compiled graphs, model infos, autotuning
            inductor/      TORCHINDUCTOR_CACHE_DIR: what torch compiles beside those graphs
            triton/        TRITON_CACHE_DIR: kernels
            .checkpoint    the path of the checkpoint
        .staging/ .trash/  being fetched; moved away, and about to be deleted

Beside the checkpoint and never inside, whose bytes do not change. NAME tells key and path, by which
vLLM finds its graphs; it looks at neither the flags of the processor that they were compiled for
nor all of the cards: these are the platform.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from entrypoint.checkpoint.digest import digest_json
from entrypoint.engine.question import machine
from entrypoint.errors import ShardbootError
from entrypoint.privilege import home
from entrypoint.state.places import Place, below
from entrypoint.store import lock

CACHES: Final[Place] = "caches"
PLATFORM_DIGITS: Final = 12

CHECKPOINT: Final = ".checkpoint"

MODE: Final = 0o700
"""What lies there is code: nobody else may write it, and nobody else needs it."""

_LOCK_SECONDS: Final = 1.0
"""Whoever looks whether caches are in use holds them for an instant; who mends them, for longer."""

ROOT_VARIABLE: Final = "VLLM_CACHE_ROOT"
VARIABLES: Final = {
    ROOT_VARIABLE: "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}


def root_of(state_dir: Path) -> Path:
    """Return the directory that holds the caches of all checkpoints."""
    return below(state_dir, CACHES)


def platform() -> str:
    """Return what tells machines apart for which other code is compiled, in 12 hex digits."""
    return digest_json([*machine()])[:PLATFORM_DIGITS]


def place_of(state_dir: Path, checkpoint: str) -> Path:
    """Return where the caches of a checkpoint lie on this platform; nothing is touched."""
    return root_of(state_dir) / f"{checkpoint}-{platform()}"


def checkpoint_of(place: str) -> str:
    """Return the name of the checkpoint that a place is for; "" for what is none."""
    name, _, digits = place.rpartition("-")
    return name if len(digits) == PLATFORM_DIGITS else ""


def platform_of(place: str) -> str:
    """Return the platform that a place is for."""
    return place.rpartition("-")[2]


def is_asked_for(environ: Mapping[str, str], state_dir: Path) -> bool:
    """Tell whether the place is ours to choose: the user has named none for vLLM's caches."""
    return not _is_users(environ.get(ROOT_VARIABLE), state_dir)


def _is_users(value: str | None, state_dir: Path) -> bool:
    """Tell the user's own word from what stands in for a home that cannot be written."""
    return bool(value) and not str(value).startswith(f"{state_dir}/{home.PLACE}/")


def give(
    environ: Mapping[str, str], state_dir: Path, place: Path, checkpoint: str
) -> Mapping[str, str]:
    """Return the environment in which vLLM keeps its caches in `place`, made if it is not there.

    `checkpoint` is the path of what is served. A shared lock on the place crosses exec, so that
    nobody takes it away while vLLM runs, and it is as new as this boot. Where it cannot be made or
    locked, or is not this user's alone, nothing is set.
    """
    if not _hold(place, checkpoint, environ):
        return environ
    ours = {
        name: f"{place}/{directory}"
        for name, directory in VARIABLES.items()
        if not _is_users(environ.get(name), state_dir)
    }
    return {**environ, **ours}


def _hold(place: Path, checkpoint: str, environ: Mapping[str, str]) -> bool:
    try:
        descriptor = _open(place, checkpoint, environ)
    except OSError:
        return False
    try:
        require_own(descriptor)
        _lock(descriptor, place)
        os.utime(descriptor)
    except (OSError, ShardbootError):
        os.close(descriptor)
        return False
    # Never closed: it crosses exec on purpose.
    os.set_inheritable(descriptor, True)
    return True


def _lock(descriptor: int, place: Path) -> None:
    """Lock what is open and still lies there. Raises: OSError; LockTimeoutError; StoreError.

    Where there are no locks, who collects finds none to be had, and takes nothing.
    """
    lock.acquire(descriptor, place, fcntl.LOCK_SH, _LOCK_SECONDS)
    if not os.path.samestat(os.fstat(descriptor), place.lstat()):
        raise FileNotFoundError


def _open(place: Path, checkpoint: str, environ: Mapping[str, str]) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(place, flags)
    except FileNotFoundError:
        from entrypoint.caches.seed import seed  # noqa: PLC0415 - once for each checkpoint

        place.parent.mkdir(MODE, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            place.mkdir(MODE)
            (place / CHECKPOINT).write_bytes(os.fsencode(checkpoint))
            seed(place / VARIABLES[ROOT_VARIABLE], environ)
        return os.open(place, flags)


def require_own(descriptor: int) -> None:
    """Raise OSError where somebody else could put code there, or this user nothing."""
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError
