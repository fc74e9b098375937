"""Ways into tensors that no read can fill: bytes go through a buffer, and are copied from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from entrypoint.vllm_plugin.memory import memory_of

Read = Callable[[memoryview], None]
"""Fills memory with the next bytes of a file."""


class Detour:
    """Through one plain buffer: for other strides, and for devices that nothing here is known of.

    One belongs to one thread.
    """

    def __init__(self, size: int) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8, device="cpu")

    def fill(self, blocks: Sequence[torch.Tensor], size: int, read: Read) -> None:
        """Read `size` bytes, and copy them to the blocks that they are of."""
        read(memory_of(self.buffer[:size]))
        for block, part in _shares(self.buffer, blocks):
            # From plain memory it returns when the bytes are out of the buffer.
            block.copy_(part)

    def finish(self) -> None:
        """Return when all bytes are where they belong."""


class PinnedDetour(Detour):
    """Through two pinned buffers: one is read into while a stream of its own empties the other.

    `cuda` is `torch.cuda`. Not yet run on an accelerator.
    """

    def __init__(self, size: int, device: torch.device, cuda: Any) -> None:
        # A thread begins with the first device, and would make itself at home there.
        cuda.set_device(device)
        # What still writes to fresh parameters, in whichever stream, is no part of this one.
        cuda.synchronize(device)
        self.cuda, self.stream = cuda, cuda.Stream(device)
        self.turns = itertools.cycle([(self._buffer(size), cuda.Event()) for _ in range(2)])

    @staticmethod
    def _buffer(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def fill(self, blocks: Sequence[torch.Tensor], size: int, read: Read) -> None:
        """Read `size` bytes, and have them copied; the copies may be under way on return."""
        buffer, emptied = next(self.turns)
        emptied.synchronize()
        read(memory_of(buffer[:size]))
        with self.cuda.stream(self.stream):
            for block, part in _shares(buffer, blocks):
                block.copy_(part, non_blocking=True)
            emptied.record(self.stream)

    def finish(self) -> None:
        """Return when all bytes are where they belong."""
        self.stream.synchronize()


def _shares(
    buffer: torch.Tensor, blocks: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each block with its bytes, as a tensor of its kind, in the buffer's own memory.

    Each begins where its kind may: what is copied later must not be a passing copy.
    """
    begin = 0
    for block in blocks:
        share = buffer[begin : begin + block.nbytes]
        yield block, share.view(block.dtype).view(block.shape)
        begin += block.nbytes
