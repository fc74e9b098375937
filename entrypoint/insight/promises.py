"""What a directory's file system keeps of POSIX's promises: rename, flock, inotify, mmap.

A second process looks on, through another mount of the same files where one is given. Without
one, all this is true of this host alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from entrypoint.insight.crew import Channel, Member
from entrypoint.insight.findings import Watched
from entrypoint.store import tree

_RECORD_BYTES: Final = 16 * 1024
_PARTS: Final = ("a", "b", "manifest")
SEEN_SECONDS: Final = 5.0
"""How long a renamed name may take to show; caches of absent names live a second or two."""

_EVENT_SECONDS: Final = 1.0
_FREED_SECONDS: Final = 2.0

_IN_CREATE: Final = 0x100
_IN_MOVED_TO: Final = 0x80
"""inotify(7)"""


def record(number: int) -> bytes:
    """Return a file's content that shows whether a reader got all of one version."""
    return number.to_bytes(8, "little") * (_RECORD_BYTES // 8)


def is_whole(data: bytes) -> bool:
    """Tell whether these bytes are one `record`."""
    return len(data) == _RECORD_BYTES and data == data[:8] * (_RECORD_BYTES // 8)


def rename_over(here: Path, there: Path, seconds: float) -> Watched:
    """Rename over a file again and again while another process reads it all the time.

    Raises: OSError.
    """
    current, following = here / "current", here / "following"
    current.write_bytes(record(0))

    def look_on(channel: Channel) -> None:
        looks = missing = torn = failed = 0
        channel.tell("ready")
        while not looks or not channel.is_over():
            looks += 1
            try:
                torn += not is_whole((there / "current").read_bytes())
            except FileNotFoundError:
                missing += 1
            except OSError:
                failed += 1
        channel.tell([looks, missing, torn, failed])

    with Member(look_on) as reader:
        _hear(reader)
        deadline = time.monotonic() + seconds
        renames = 0
        while not renames or time.monotonic() < deadline:
            renames += 1
            following.write_bytes(record(renames))
            following.rename(current)
        reader.channel.tell("stop")
        return Watched(renames, *_hear(reader))


def rename_into(here: Path, there: Path, seconds: float) -> Watched:
    """Rename directories into place while another process waits for each, and reads all of it.

    Raises: OSError.
    """

    def look_on(channel: Channel) -> None:
        looks = torn = failed = 0
        channel.tell("ready")
        for number in itertools.count():
            while True:
                looks += 1
                try:
                    names = sorted(os.listdir(there / f"done-{number}"))
                except FileNotFoundError:
                    if channel.is_over():
                        channel.tell([looks, 0, torn, failed])
                        return
                    continue
                except OSError:
                    failed += 1
                    continue
                break
            torn += not _is_complete(there / f"done-{number}", names)
            channel.tell("seen")

    with Member(look_on) as reader:
        _hear(reader)
        deadline = time.monotonic() + seconds
        renames = 0
        while not renames or time.monotonic() < deadline:
            being_made = here / "being-made"
            being_made.mkdir()
            for part in _PARTS:
                (being_made / part).write_bytes(record(renames))
            being_made.rename(here / f"done-{renames}")
            _hear(reader)
            tree.remove(here / f"done-{renames}")
            renames += 1
        reader.channel.tell("stop")
        return Watched(renames, *_hear(reader))


def _is_complete(directory: Path, names: list[str]) -> bool:
    try:
        return names == sorted(_PARTS) and all(
            is_whole((directory / name).read_bytes()) for name in names
        )
    except FileNotFoundError:
        return False


def _hear(reader: Member) -> list[int]:
    """Return what the reader says. Raises: OSError when it does not."""
    try:
        said: list[int] = reader.channel.hear(SEEN_SECONDS)
    except TimeoutError:
        msg = f"another process does not see it within {SEEN_SECONDS:g} s"
        raise OSError(None, msg) from None
    except EOFError:
        raise OSError(None, "the process that looked on was killed") from None
    return said


def lock(here: Path, there: Path) -> str:
    """Say whether a flock of one process keeps another out, and ends with it. Raises: OSError."""
    path = here / "lock"
    path.touch()

    def hold(channel: Channel) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        channel.tell(_try_lock(descriptor))
        channel.hear()

    with Member(hold) as holder:
        if not _hear(holder):
            return "unsupported"
        descriptor = os.open(there / "lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            answer = _try_lock(descriptor)
            if answer is not False:
                return "ignored" if answer else "unsupported"
            holder.kill()
            deadline = time.monotonic() + _FREED_SECONDS
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    return "kept"
                time.sleep(0.01)
        finally:
            os.close(descriptor)
    return "honoured"


def _try_lock(descriptor: int) -> bool | None:
    """Return whether the lock was had; None where there are none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def notices(watched: Path, change: Callable[[], object]) -> bool:
    """Tell whether inotify says a word of `change` in the directory `watched`. Raises: OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    with _closing(library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)) as descriptor:
        mask = ctypes.c_uint32(_IN_CREATE | _IN_MOVED_TO)
        if library.inotify_add_watch(descriptor, os.fsencode(watched), mask) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        change()
        return bool(select.select([descriptor], [], [], _EVENT_SECONDS)[0])


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def can_map(path: Path) -> bool:
    """Tell whether a file can be mapped and read there; a SIGBUS kills nobody but a child."""

    def read(channel: Channel) -> None:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            channel.tell([mapped[0], mapped[-1]])

    with Member(read) as reader:
        try:
            reader.channel.hear(SEEN_SECONDS)
        except (EOFError, TimeoutError):
            return False
    return True
