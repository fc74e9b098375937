"""Tensors as bytes: their dtype words, their memory, and how to cut them into bounded blocks."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import torch

BLOCK_BYTES = 16 * 1024 * 1024
"""One read or write: large enough for the disk, small enough for a buffer per thread."""

HUGE_PAGE_BYTES = 2 * 1024 * 1024
HUGE_PAGES = 4
"""So many at least, or a tensor is left as it is."""

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_WORDS = {getattr(torch, name): word for word, name in _NAMES.items() if hasattr(torch, name)}


def dtype_word(dtype: torch.dtype) -> str:
    """Return the safetensors word for `dtype`; torch's own name for one that safetensors lacks."""
    return _WORDS.get(dtype, str(dtype))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the writable memory of a contiguous, non-empty CPU tensor, without a copy.

    The tensor must outlive the view.
    """
    array = ctypes.c_char * tensor.nbytes
    return memoryview(array.from_address(tensor.data_ptr())).cast("B")


def populate(tensor: torch.Tensor) -> None:
    """Have the kernel map the pages of a contiguous CPU tensor, all in one call.

    Else a read into fresh memory faults page by page: a third more time. Advice only: an older
    kernel, or memory it does not suit, leaves all as it was.
    """
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    length = (tensor.data_ptr() + tensor.nbytes) // page * page - begin
    if length > 0:
        _advise(begin, length, _MADV_POPULATE_WRITE)


def want_huge_pages(tensor: torch.Tensor) -> None:
    """Have the pages of a fresh, contiguous CPU tensor be large ones, as far as they lie within.

    A fault for each 4 KiB costs as much as the copying. Advice only, as `populate`.
    """
    begin = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - begin
    # Each piece with advice of its own may be one more mapping, and a process has 65530.
    if length >= HUGE_PAGES * HUGE_PAGE_BYTES:
        _advise(begin, length, mmap.MADV_HUGEPAGE)


def _advise(begin: int, length: int, advice: int) -> None:
    _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)


_LIBC = ctypes.CDLL(None)
_MADV_POPULATE_WRITE = 23  # mmap has no name for it before Python 3.13


def is_direct(tensor: torch.Tensor) -> bool:
    """Tell whether the bytes of a shard file can be the bytes of the tensor's own memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def blocks(
    tensor: torch.Tensor, offset: int = 0, limit: int = BLOCK_BYTES
) -> Iterator[tuple[torch.Tensor, int]]:
    """Cut `tensor` into views of at most `limit` bytes, each with where its bytes begin in a file.

    Files are row-major whatever the strides in memory. A single element may exceed the limit.
    """
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    if tensor.nbytes <= limit or tensor.dim() == 0:
        yield tensor, offset
        return
    row = tensor.nbytes // tensor.shape[0]
    if row > limit:
        for i in range(tensor.shape[0]):
            yield from blocks(tensor[i], offset + i * row, limit)
        return
    step = limit // row
    for i in range(0, tensor.shape[0], step):
        yield tensor[i : i + step], offset + i * row
