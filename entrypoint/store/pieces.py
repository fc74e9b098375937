"""One file on a shared file system, read to its last byte, in pieces.

The one place where reads of a file system are tried again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Generator

from entrypoint.checkpoint.digest import PIECE_BYTES
from entrypoint.errors import DamagedError, NotFoundError, StoreError

_TRIES = 4
_FLAKY = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOENT)
"""What a shared file system may answer once and not again; ENOENT from a directory it remembers."""

_PATIENCE_SECONDS = 0.2


def read(
    opening: Callable[[], int], size: int, where: str, start: int = 0
) -> Generator[memoryview]:
    """Yield the bytes from `start` of the file that `opening` gives a descriptor of.

    Each piece is good until the next one is asked for; then its pages are given back, since
    nobody here reads them again.
    Raises: what `opening` does; DamagedError when the file is not of `size` bytes; StoreError.
    """
    buffer = memoryview(bytearray(min(size, PIECE_BYTES)))
    file = _File(opening, size, where)
    try:
        offset = start
        while offset < size:
            count = file.read(buffer[: size - offset], offset)
            yield buffer[:count]
            file.drop(offset, count)
            offset += count
    finally:
        file.close()


class _File:
    """An open file that is opened again when its server was away."""

    def __init__(self, opening: Callable[[], int], size: int, where: str) -> None:
        self.opening, self.size, self.where = opening, size, where
        self.descriptor = -1
        self._trying(self._open)

    def read(self, buffer: memoryview, offset: int) -> int:
        """Read into `buffer` from `offset`; return the count, at least 1."""
        return self._trying(lambda: self._read_once(buffer, offset))

    def _read_once(self, buffer: memoryview, offset: int) -> int:
        if self.descriptor < 0:
            self._open()
        count = os.preadv(self.descriptor, [buffer], offset)
        if count == 0:
            # Some file systems end a read early while a server is away.
            raise OSError(errno.EIO, f"ends after {offset} bytes")
        return count

    def _open(self) -> int:
        self.descriptor = self.opening()
        found = os.fstat(self.descriptor).st_size
        if found != self.size:
            self.close()
            raise DamagedError(f"{self.where}: expected {self.size} bytes, found {found}")
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return 0

    def _trying(self, action: Callable[[], int]) -> int:
        for attempt in range(1, _TRIES):
            try:
                return action()
            except (OSError, StoreError, NotFoundError) as error:
                cause = error if isinstance(error, OSError) else error.__cause__
                if not isinstance(cause, OSError) or cause.errno not in _FLAKY:
                    raise self._failure(error) from error
            # A stale handle stays stale: only opening again helps.
            self.close()
            time.sleep(_PATIENCE_SECONDS * attempt)
        try:
            return action()
        except (OSError, StoreError, NotFoundError) as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError | StoreError | NotFoundError) -> StoreError | NotFoundError:
        self.close()
        if isinstance(error, NotFoundError):
            return NotFoundError(f"{error}: looked for {_TRIES} times")
        reason = error.strerror or error if isinstance(error, OSError) else error
        return StoreError(f"{self.where}: {reason}")

    def drop(self, offset: int, count: int) -> None:
        """Give the pages of what was read back."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self.descriptor, offset, count, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            # A dead mount answers even this with an error; nothing read can be lost by it.
            with contextlib.suppress(OSError):
                os.close(descriptor)
