"""Tensors as bytes: their dtype words, their memory, and how to cut them into bounded blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

BLOCK_BYTES = 16 * 1024 * 1024
"""One read or write: large enough for the disk, small enough for a buffer per thread."""

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
