"""Checkpoints spoilt after they were committed, so that only what looks closer can notice."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from entrypoint.checkpoint import header, index
from entrypoint.checkpoint import manifest as manifests
from entrypoint.checkpoint.digest import digest_bytes, digest_file
from entrypoint.checkpoint.entry import INDEX
from entrypoint.checkpoint.manifest import MANIFEST, Manifest


def reshape_one_tensor(checkpoint: Path) -> Manifest:
    """Give one tensor another shape, everywhere alike: manifest, index and header are right.

    Only the model itself can tell. Returns the manifest that now stands there.
    """
    manifest = manifests.decode((checkpoint / MANIFEST).read_bytes())
    tensors = index.decode((checkpoint / INDEX).read_bytes())
    victim = next(t for t in tensors if t.rank == 0 and len(t.shape) == 2)
    shape = (victim.shape[0] * 2, victim.shape[1] // 2)
    changed = [replace(t, shape=shape) if t == victim else t for t in tensors]
    _rewrite_header(checkpoint / victim.file, victim.name, shape)
    (checkpoint / INDEX).write_bytes(index.encode(changed))
    return _reseal(checkpoint, manifest)


def _rewrite_header(path: Path, name: str, shape: tuple[int, ...]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    table[name]["shape"] = list(shape)
    text = json.dumps(table, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length, "the padding takes up what a longer shape needs"
    path.write_bytes(data[:8] + text + data[8 + length :])
    assert name in header.read(path)


def _reseal(checkpoint: Path, manifest: Manifest) -> Manifest:
    files = tuple(
        entry._replace(
            size=(checkpoint / entry.path).stat().st_size,
            blake3=digest_file(checkpoint / entry.path),
        )
        for entry in manifest.files
    )
    sealed = manifest._replace(files=files)
    (checkpoint / MANIFEST).write_bytes(sealed.encode())
    assert digest_bytes((checkpoint / INDEX).read_bytes()) in {entry.blake3 for entry in files}
    return sealed


def truncate_one_file(checkpoint: Path) -> Path:
    """Cut the last byte off a shard file."""
    victim = max(checkpoint.glob("model-*.safetensors"))
    with victim.open("r+b") as file:
        file.truncate(victim.stat().st_size - 1)
    return victim


def flip_one_value(checkpoint: Path, ending: str) -> Manifest:
    """Change one value of the first tensor whose name ends so; the manifest is right.

    Returns the manifest that now stands there.
    """
    manifest = manifests.decode((checkpoint / MANIFEST).read_bytes())
    tensors = index.decode((checkpoint / INDEX).read_bytes())
    victim = next(t for t in tensors if t.name.endswith(ending))
    path = checkpoint / victim.file
    data = bytearray(path.read_bytes())
    # The highest byte of the first value: a bit of its exponent, if it has one.
    data[victim.begin + (victim.end - victim.begin) // math.prod(victim.shape) - 1] ^= 1
    path.write_bytes(data)
    return _reseal(checkpoint, manifest)
