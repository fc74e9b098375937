"""Read tensors from shard files, in parallel, straight into the memory where they will be used."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from entrypoint.errors import DamagedError
from entrypoint.vllm_plugin.memory import BLOCK_BYTES, blocks, is_direct, memory_of, populate

THREADS = 4
"""More than enough for local disks; with a buffer each, at most 64 MiB of buffers."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor to be filled with the bytes of `path` from `begin`; any device, any strides."""

    tensor: torch.Tensor
    path: Path
    begin: int


def read_all(wanted: Sequence[Wanted]) -> int:
    """Fill every tensor; return the number of bytes read.

    Header, dtypes and shapes have been compared before: only bytes are read here. If it raises,
    some tensors hold new bytes and some do not. Raises: OSError; DamagedError when a file ends
    early.
    """
    with ExitStack() as stack:
        descriptors = {path: _open(path, stack) for path in {w.path for w in wanted}}
        buffers = _Buffers()
        pool = stack.enter_context(ThreadPoolExecutor(THREADS, "shardboot-read"))
        counts = pool.map(
            lambda work: buffers.fill(descriptors[work[0]], *work), _in_file_order(wanted)
        )
        return sum(counts)


def _open(path: Path, stack: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def _in_file_order(wanted: Sequence[Wanted]) -> Iterator[tuple[Path, torch.Tensor, int]]:
    for w in sorted(wanted, key=lambda w: (str(w.path), w.begin)):
        for block, offset in blocks(w.tensor, w.begin):
            yield w.path, block, offset


class _Buffers:
    """One buffer a thread, made at need: pinned where an accelerator copies from it."""

    def __init__(self) -> None:
        self.local = threading.local()

    def fill(self, descriptor: int, path: Path, block: torch.Tensor, offset: int) -> int:
        if is_direct(block):
            populate(block)
            _read(descriptor, memory_of(block), offset, path)
            return block.nbytes
        buffer = self._buffer(max(block.nbytes, BLOCK_BYTES), pinned=block.device.type == "cuda")
        bytes_read = buffer[: block.nbytes]
        _read(descriptor, memory_of(bytes_read), offset, path)
        # copy_ from CPU memory returns when the bytes are out of the buffer.
        block.copy_(bytes_read.view(block.dtype).view(block.shape))
        return block.nbytes

    def _buffer(self, size: int, *, pinned: bool) -> torch.Tensor:
        found: torch.Tensor | None = getattr(self.local, "buffer", None)
        if found is None or found.nbytes < size:
            found = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self.local.buffer = found
        return found


def _read(descriptor: int, memory: memoryview, offset: int, path: Path) -> None:
    while memory:
        count = os.preadv(descriptor, [memory], offset)
        if count == 0:
            raise DamagedError(f"{path}: ends at byte {offset}, {len(memory)} bytes too early")
        memory = memory[count:]
        offset += count
