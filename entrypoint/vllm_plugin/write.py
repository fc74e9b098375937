"""Write one rank's tensors as safetensors files, hashed on the way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from blake3 import blake3

from entrypoint.checkpoint import header
from entrypoint.checkpoint.entry import FileEntry
from entrypoint.checkpoint.fragment import Fragment, fragment_name
from entrypoint.checkpoint.index import TensorEntry
from entrypoint.checkpoint.layout import Layout
from entrypoint.errors import SaveError
from entrypoint.state.files import fsync_directory, write_atomically
from entrypoint.store import writeback
from entrypoint.store.staging import write_all
from entrypoint.vllm_plugin.memory import blocks, dtype_word, is_direct, memory_of

Heard = Callable[[int], None]


def write_rank(
    state: Mapping[str, torch.Tensor],
    staging: Path,
    *,
    layout: Layout,
    rank: int,
    size_per_file: int,
    file_mode: int,
    decisions: Mapping[str, bool],
    on_bytes: Heard,
) -> Fragment:
    """Write `state` (rank-local, any device, any strides) to `staging`, its fragment last.

    `on_bytes` hears of every piece of a tensor that is written.

    When it returns, files, fragment and names are durable. If it raises, there is no fragment, and
    shard files of this rank may be partly written. No existing file is touched.
    Raises: OSError; SaveError for a dtype that safetensors has no word for.
    """
    started = time.monotonic()
    files: list[FileEntry] = []
    tensors: list[TensorEntry] = []
    for part, names in enumerate(_parts(state, size_per_file)):
        name = layout.shard_name(rank, part)
        chosen = {n: state[n] for n in names}
        head, slices = header.encode(
            [(n, _word(n, t), tuple(t.shape), t.nbytes) for n, t in chosen.items()]
        )
        size, digest = _write_file(staging / name, head, chosen.values(), file_mode, on_bytes)
        files.append(
            FileEntry(
                path=name,
                size=size,
                blake3=digest,
                role="weights",
                rank=rank,
                part=part,
                tensors=len(chosen),
            )
        )
        tensors += [
            TensorEntry(n, rank, name, s.dtype, s.shape, s.begin, s.end)
            for n, s in zip(chosen, slices, strict=True)
        ]
    fsync_directory(staging)
    fragment = Fragment(
        rank=rank,
        files=tuple(files),
        tensors=tuple(tensors),
        decisions=decisions,
        seconds=time.monotonic() - started,
    )
    write_atomically(staging / fragment_name(rank), fragment.encode())
    return fragment


def _parts(state: Mapping[str, torch.Tensor], size_per_file: int) -> Iterator[Sequence[str]]:
    """Cut the names, in order, into files of at most `size_per_file` bytes or one tensor."""
    part: list[str] = []
    size = 0
    for name, tensor in state.items():
        if part and size + tensor.nbytes > size_per_file:
            yield part
            part, size = [], 0
        part.append(name)
        size += tensor.nbytes
    # A rank may hold nothing; a checkpoint still has a file for it.
    yield part


def _word(name: str, tensor: torch.Tensor) -> str:
    word = dtype_word(tensor.dtype)
    if word not in header.BITS:
        raise SaveError(f"{name}: safetensors has no word for {word}", reason="save.dtype")
    return word


def _write_file(
    path: Path, head: bytes, tensors: Collection[torch.Tensor], file_mode: int, on_bytes: Heard
) -> tuple[int, str]:
    """Write a whole shard file and fsync it; return its size and BLAKE3."""
    size = len(head) + sum(tensor.nbytes for tensor in tensors)
    hasher = blake3()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        # The umask must not decide who can read it.
        os.fchmod(descriptor, file_mode)
        # A full disk shows before the writing.
        writeback.preallocate(descriptor, size)
        hasher.update(head)
        write_all(descriptor, head)
        offset = len(head)
        for piece in _pieces(tensors):
            hasher.update(piece)
            write_all(descriptor, piece)
            writeback.start(descriptor, offset, len(piece))
            offset += len(piece)
            on_bytes(len(piece))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, str(hasher.hexdigest())


def _pieces(tensors: Collection[torch.Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of all tensors; those elsewhere than in plain CPU memory come in copies."""
    for tensor in tensors:
        for block, _ in blocks(tensor):
            here = block if is_direct(block) else block.cpu().contiguous()
            yield memory_of(here)
