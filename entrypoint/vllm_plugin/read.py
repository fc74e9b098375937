"""Read tensors from shard files, in parallel, straight into the memory where they will be used."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from entrypoint.errors import DamagedError
from entrypoint.vllm_plugin.detour import Detour, PinnedDetour
from entrypoint.vllm_plugin.memory import blocks, is_direct, memory_of
from entrypoint.vllm_plugin.pages import Pages

MAX_VECTORS = 1024
"""IOV_MAX: so many places can one call fill."""


@dataclass(frozen=True, slots=True)
class Reads:
    """How many threads read at once, and the most bytes of one read.

    More or fewer are no faster from a local disk (docs/measured.md). Where a tensor's memory cannot
    be read into, each thread has a buffer of that size, for an accelerator two: 64 MiB at most.
    """

    threads: int = 4
    size: int = 8 * 1024 * 1024


DEFAULT: Final = Reads()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor to be filled with the bytes of `path` from `begin`; any device, any strides."""

    tensor: torch.Tensor
    path: Path
    begin: int


@dataclass(slots=True)
class Piece:
    """Neighbouring bytes of one file, and the blocks that they fill, in order: one read."""

    path: Path
    begin: int
    blocks: list[torch.Tensor]
    size: int

    def takes(self, path: Path, offset: int, block: torch.Tensor, most: int) -> bool:
        """Tell whether `block` comes right behind, goes the same way, and there is room."""
        last = self.blocks[-1]
        return (
            (path, offset) == (self.path, self.begin + self.size)
            and (is_direct(block), block.device) == (is_direct(last), last.device)
            # A view of a buffer's bytes must be aligned: behind odd ones another read begins.
            and (is_direct(block) or self.size % block.element_size() == 0)
            and self.size + block.nbytes <= most
            and len(self.blocks) < MAX_VECTORS
        )


def read_all(
    wanted: Sequence[Wanted],
    on_bytes: Callable[[int], None] = lambda _: None,
    reads: Reads = DEFAULT,
) -> int:
    """Fill every tensor; return the number of bytes read.

    Header, dtypes and shapes have been compared before: only bytes are read here. `on_bytes` hears
    of each piece, in this thread. If it raises, some tensors hold new bytes and some do not.
    Raises: OSError; DamagedError when a file ends early.
    """
    total = 0
    with ExitStack() as stack:
        descriptors = {path: _open(path, stack) for path in {w.path for w in wanted}}
        readers = _Readers(descriptors, reads.size)
        # Also when a read has failed: buffers must not go while they are copied from.
        stack.callback(readers.finish)
        pool = stack.enter_context(ThreadPoolExecutor(reads.threads, "shardboot-read"))
        for size in pool.map(readers.read, pieces(wanted, reads.size)):
            total += size
            on_bytes(size)
    return total


def pieces(wanted: Sequence[Wanted], most: int) -> Iterator[Piece]:
    """Cut what is wanted into reads of at most `most` bytes, in the order of the files.

    A large tensor is several; small ones that lie side by side are one.
    """
    piece: Piece | None = None
    for w in sorted(wanted, key=lambda w: (str(w.path), w.begin)):
        for block, offset in blocks(w.tensor, w.begin, most):
            if not block.nbytes:
                continue
            if piece is not None and piece.takes(w.path, offset, block, most):
                piece.blocks.append(block)
                piece.size += block.nbytes
                continue
            if piece is not None:
                yield piece
            piece = Piece(w.path, offset, [block], block.nbytes)
    if piece is not None:
        yield piece


def detour_to(device: torch.device, size: int) -> Detour:
    """Return a way to a device: the fast one, where there is pinned memory for it.

    `size` is that of a buffer, in bytes.
    """
    if device.type == "cuda":
        # torch has no narrower word for memory that the driver does not give (limits, WSL).
        with suppress(RuntimeError):
            return PinnedDetour(size, device, torch.cuda)
    return Detour(size)


def _open(path: Path, stack: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


class _Readers:
    """What the threads read with: the open files, and for each thread the detours that it needs."""

    def __init__(self, descriptors: Mapping[Path, int], buffer_bytes: int) -> None:
        self.descriptors, self.buffer_bytes = descriptors, buffer_bytes
        self.pages = Pages()
        self.mine = threading.local()
        self.detours: list[Detour] = []

    def read(self, piece: Piece) -> int:
        """Bring a piece to its place, or under way to it; return its size."""
        if is_direct(piece.blocks[0]):
            for block in piece.blocks:
                self.pages.make(block)
            self._fill(piece, [memory_of(block) for block in piece.blocks])
        else:
            detour = self._detour(piece.blocks[0].device)
            detour.fill(piece.blocks, piece.size, lambda memory: self._fill(piece, [memory]))
        return piece.size

    def finish(self) -> None:
        """Return when nothing is under way any more."""
        for detour in self.detours:
            detour.finish()

    def _fill(self, piece: Piece, memory: list[memoryview]) -> None:
        descriptor, offset, left = self.descriptors[piece.path], piece.begin, piece.size
        while left:
            count = os.preadv(descriptor, memory, offset)
            if count == 0:
                raise DamagedError(f"{piece.path}: ends at byte {offset}, {left} bytes too early")
            offset, left = offset + count, left - count
            memory = _behind(memory, count)

    def _detour(self, device: torch.device) -> Detour:
        by_device: dict[torch.device, Detour] = self.mine.__dict__.setdefault("detours", {})
        found = by_device.get(device)
        if found is None:
            found = by_device[device] = detour_to(device, self.buffer_bytes)
            self.detours.append(found)
        return found


def _behind(memory: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of `memory` when its first `count` bytes are filled."""
    for at, part in enumerate(memory):
        if count < len(part):
            return [part[count:], *memory[at + 1 :]]
        count -= len(part)
    return []
