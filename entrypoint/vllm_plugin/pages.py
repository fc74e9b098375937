"""The pages under fresh memory: made before a read needs them, and of the size that comes faster.

A read into memory without pages faults at each of them. Huge pages are one fault for 512, but some
machines have none at hand: they must be made by moving others, or, where the host of a virtual
machine took free memory back, be asked for there. Nobody tells, so it is tried.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from dataclasses import dataclass
from typing import Final

import torch

HUGE_BYTES: Final = 2 * 1024 * 1024
TRIAL_BYTES: Final = 32 * 1024 * 1024
"""So much is made of each size before they are compared."""

_LIBC = ctypes.CDLL(None)
_MADV_POPULATE_WRITE: Final = 23  # mmap has no name for it before Python 3.13


@dataclass(slots=True)
class Spent:
    """Processor time that pages of one size have cost, of all threads."""

    seconds: float = 0.0
    count: int = 0

    @property
    def by_byte(self) -> float:
        """Seconds a byte; nothing, as long as too little was tried to tell."""
        return self.seconds / self.count if self.count >= TRIAL_BYTES else 0.0


class Pages:
    """Makes pages, from several threads. Advice only: where the kernel cannot, faults do it."""

    def __init__(self) -> None:
        self.small, self.huge = Spent(), Spent()
        self.lock = threading.Lock()

    def make(self, block: torch.Tensor) -> None:
        """Have pages under all of a contiguous CPU tensor."""
        spent = self.huge if self.huge.by_byte <= self.small.by_byte else self.small
        if block.nbytes < HUGE_BYTES:
            populate(block)
            return
        if spent is self.huge:
            want_huge(block)
        began = time.thread_time()
        populate(block)
        seconds = time.thread_time() - began
        with self.lock:
            spent.seconds += seconds
            spent.count += block.nbytes


def populate(block: torch.Tensor) -> None:
    """Make the pages that lie within, all in one call."""
    begin, end = _span(block)
    page = mmap.PAGESIZE
    _advise(-(-begin // page) * page, end // page * page, _MADV_POPULATE_WRITE)


def want_huge(block: torch.Tensor) -> None:
    """Have pages that are not made yet be huge, as far as they lie within the tensor's memory."""
    begin, end = _span(block)
    storage = block.untyped_storage()
    first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    # Two blocks may share one: it is wanted with either.
    begin = max(begin // HUGE_BYTES, -(-first // HUGE_BYTES))
    end = min(-(-end // HUGE_BYTES), last // HUGE_BYTES)
    _advise(begin * HUGE_BYTES, end * HUGE_BYTES, mmap.MADV_HUGEPAGE)


def _span(block: torch.Tensor) -> tuple[int, int]:
    return block.data_ptr(), block.data_ptr() + block.nbytes


def _advise(begin: int, end: int, advice: int) -> None:
    if end > begin:
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
