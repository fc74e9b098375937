"""Whether a checkpoint's files for one rank are exactly the model's own logical state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from entrypoint.checkpoint import header, index
from entrypoint.checkpoint.digest import digest_bytes
from entrypoint.checkpoint.entry import INDEX
from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.checkpoint.header import Slice
from entrypoint.checkpoint.index import MAX_INDEX_BYTES, TensorEntry
from entrypoint.checkpoint.layout import Layout
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import DamagedError, KeyMismatchError
from entrypoint.vllm_plugin.memory import dtype_word


class Shape(NamedTuple):
    """What must be equal of a tensor: its safetensors dtype word and its rank-local shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def compare(
    directory: Path,
    manifest: Manifest,
    state: Mapping[str, torch.Tensor],
    *,
    layout: Layout,
    rank: int,
) -> dict[str, TensorEntry]:
    """Return where in `directory` the bytes of every tensor of `state` are; nothing is written.

    `state` is this rank's logical state, fresh. Raises: KeyMismatchError when the checkpoint is
    sound but made for another model; DamagedError when its parts contradict each other.
    """
    if manifest.layout != layout:
        raise KeyMismatchError(
            f"{directory}: made for tp {manifest.layout.tp}, pp {manifest.layout.pp}; "
            f"this engine has tp {layout.tp}, pp {layout.pp}"
        )
    entries = _index_of(directory, manifest, rank)
    _same_names(directory, state, entries, rank)
    for name, tensor in state.items():
        expected = Shape(dtype_word(tensor.dtype), tuple(tensor.shape))
        found = Shape(entries[name].dtype, entries[name].shape)
        if found != expected:
            raise KeyMismatchError(f"{directory}: {name}: the model has {expected}, found {found}")
    _headers_agree(directory, manifest, entries, rank)
    return entries


def _index_of(directory: Path, manifest: Manifest, rank: int) -> dict[str, TensorEntry]:
    data = read_bounded(directory / INDEX, MAX_INDEX_BYTES)
    listed = next((entry for entry in manifest.files if entry.role == "index"), None)
    digest = digest_bytes(data)
    if listed is None or digest != listed.blake3:
        expected = listed.blake3 if listed else "an entry in the manifest"
        raise DamagedError(f"{directory / INDEX}: expected BLAKE3 {expected}, found {digest}")
    return {entry.name: entry for entry in index.decode(data) if entry.rank == rank}


def _same_names(
    directory: Path, state: Mapping[str, torch.Tensor], found: Mapping[str, TensorEntry], rank: int
) -> None:
    missing, extra = _few(state.keys() - found.keys()), _few(found.keys() - state.keys())
    if missing or extra:
        said = [f"the model has {missing}, which it lacks"] if missing else []
        said += [f"it has {extra}, which the model lacks"] if extra else []
        raise KeyMismatchError(f"{directory}: rank {rank}: {'; '.join(said)}")


def _few(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""  # noqa: PLR2004 - enough to see
    return ", ".join(names[:3]) + more


def _headers_agree(
    directory: Path, manifest: Manifest, entries: Mapping[str, TensorEntry], rank: int
) -> None:
    by_file = index.by_file(entries.values())
    listed = {entry.path: entry for entry in manifest.files_for([rank]) if entry.role == "weights"}
    for name in sorted(by_file.keys() - listed.keys()):
        raise DamagedError(f"{directory / name}: in the index, not in the manifest")
    for name, entry in listed.items():
        path = directory / name
        try:
            size = path.stat().st_size
            slices = header.read(path)
        except FileNotFoundError:
            raise DamagedError(f"{path}: listed in the manifest, not there") from None
        if size != entry.size:
            raise DamagedError(f"{path}: expected {entry.size} bytes, found {size}")
        expected = {
            e.name: Slice(e.dtype, e.shape, e.begin, e.end) for e in by_file.get(name, {}).values()
        }
        for tensor in sorted(expected.keys() | slices.keys()):
            if expected.get(tensor) != slices.get(tensor):
                raise DamagedError(
                    f"{path}: {tensor}: the index says {expected.get(tensor)}, "
                    f"the header {slices.get(tensor)}"
                )
