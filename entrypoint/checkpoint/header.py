"""The safetensors header: reading it from a file, writing it, and what it must satisfy.

Format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}},
then the bytes of all tensors without gaps (safetensors README, "Format").
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from entrypoint.checkpoint.foreign import MALFORMED
from entrypoint.checkpoint.index import MAX_HEADER_BYTES
from entrypoint.errors import DamagedError

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


MAX_DIMENSIONS = 64
MAX_COUNT = 1 << 63
"""Torch's own bounds of a shape; multiplying endless ones would take for ever."""


class Slice(NamedTuple):
    """One tensor of a shard file: dtype word, shape, and [begin, end) counted in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def encode(tensors: Sequence[tuple[str, str, tuple[int, ...], int]]) -> tuple[bytes, list[Slice]]:
    """Lay out `(name, dtype, shape, bytes)` in order; return the file's head and every slice.

    The head is padded with blanks to a multiple of 64 bytes, so that tensors start aligned.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, size in tensors:
        table[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    start = 8 + len(text)
    slices = []
    for _, dtype, shape, size in tensors:
        slices.append(Slice(dtype, shape, start, start + size))
        start += size
    return len(text).to_bytes(8, "little") + text, slices


def read(path: Path) -> dict[str, Slice]:
    """Return every tensor that the header of `path` declares, checked against the file's size.

    Raises: DamagedError saying what the file is instead.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8) or b""
        length = int.from_bytes(head, "little")
        if len(head) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):  # noqa: PLR2004 - format
            raise DamagedError(f"{path}: not a safetensors file: {describe(head, size)}")
        text = file.read(length) or b""
    return parse(text, size, str(path))


def parse(text: bytes, size: int, where: str) -> dict[str, Slice]:
    """Check a header's JSON against a file of `size` bytes: known dtypes, no gap, no overlap.

    Raises: DamagedError naming the tensor.
    """
    try:
        entries = sorted(_entries(json.loads(text)), key=lambda entry: (entry[3], entry[4]))
    except MALFORMED as error:
        raise DamagedError(f"{where}: header is not safetensors: {str(error)[:80]}") from None
    start = 8 + len(text)
    slices: dict[str, Slice] = {}
    offset = 0
    for name, dtype, shape, begin, end in entries:
        if dtype not in BITS or begin != offset:
            raise DamagedError(f"{where}: header entry {name!r} is odd or leaves a gap")
        if (end - begin) * 8 != math.prod(shape) * BITS[dtype]:
            raise DamagedError(f"{where}: {name!r} takes {end - begin} bytes for {dtype} {shape}")
        slices[name] = Slice(dtype, shape, start + begin, start + end)
        offset = end
    if start + offset != size:
        raise DamagedError(f"{where}: header declares {start + offset} bytes, the file has {size}")
    return slices


def _entries(table: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        odd = not all(type(n) is int and 0 <= n < MAX_COUNT for n in (*shape, begin, end))
        if odd or len(shape) > MAX_DIMENSIONS:
            msg = f"{name[:80]!r} has an odd shape or offset"
            raise ValueError(msg)
        yield name, str(entry["dtype"]), shape, begin, end


_SIGNS = (
    (b"PK\x03\x04", "a zip archive, perhaps a PyTorch pickle"),
    (b"\x80\x02", "a pickle"),
    (b"GGUF", "a GGUF file"),
    (b"version ", "a Git LFS pointer: the real file was never fetched"),
    (b"\x89HDF", "an HDF5 file"),
    (b"<!DOCTYP", "an HTML page, perhaps a saved error page"),
    (b"<html", "an HTML page, perhaps a saved error page"),
    (b"\x1f\x8b", "a gzip archive"),
)


def describe(head: bytes, size: int) -> str:
    """Say in words what a file that is not safetensors begins like."""
    if size == 0:
        return "an empty file"
    if head and not any(head):
        return "zeros, as a crash before fsync leaves"
    for sign, words in _SIGNS:
        if head.startswith(sign):
            return words
    return f"{size} bytes, header length {int.from_bytes(head, 'little')}"
