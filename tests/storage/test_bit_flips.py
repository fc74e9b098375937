"""One flipped bit, anywhere in a checkpoint: always found by a deep look, mostly at boot."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from entrypoint.checkpoint.entry import INDEX
from entrypoint.checkpoint.inspect import examine, read_manifest, verify_deep
from entrypoint.checkpoint.manifest import MANIFEST, Manifest
from entrypoint.errors import ManifestError

FLIPS = 1000


def found_at_boot(directory: Path) -> bool:
    try:
        manifest = read_manifest(directory)
    except ManifestError:
        return True
    return bool(examine(directory, manifest, manifest.layout.ranks, {}).discrepancies)


def found_by_deep_look(directory: Path) -> bool:
    try:
        manifest = read_manifest(directory)
    except ManifestError:
        return True
    return bool(verify_deep(directory, manifest, manifest.layout.ranks))


def is_header(directory: Path, name: str, offset: int) -> bool:
    if not name.endswith(".safetensors"):
        return False
    with (directory / name).open("rb") as file:
        return offset < 8 + int.from_bytes(file.read(8), "little")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    root = tmp_path_factory.mktemp("flips")
    manifest = make_checkpoint(root)
    return root / manifest.name, manifest


def test_a_thousand_flipped_bits_are_a_thousand_found(checkpoint: tuple[Path, Manifest]) -> None:
    directory, manifest = checkpoint
    assert not found_by_deep_look(directory)
    seed = random.randrange(1 << 32)  # noqa: S311 - places, not secrets
    places = random.Random(seed)  # noqa: S311 - places, not secrets
    names = [MANIFEST, *(entry.path for entry in manifest.files)]
    where: dict[str, int] = {"at boot": 0, "by a deep look": 0}
    for _ in range(FLIPS):
        name = places.choice(names)
        data = (directory / name).read_bytes()
        offset, bit = places.randrange(len(data)), places.randrange(8)
        header = is_header(directory, name, offset)
        flipped = bytearray(data)
        flipped[offset] ^= 1 << bit
        (directory / name).write_bytes(flipped)
        place = f"{name}, byte {offset}, bit {bit}, seed {seed}"
        assert found_by_deep_look(directory), place
        where["by a deep look"] += 1
        at_boot = found_at_boot(directory)
        where["at boot"] += at_boot
        if name in (MANIFEST, INDEX) or (header and not is_blank(data, offset)):
            assert at_boot, place
        (directory / name).write_bytes(data)
    print(f"{where} of {FLIPS}, seed {seed}")
    assert not found_by_deep_look(directory)


def is_blank(data: bytes, offset: int) -> bool:
    """Tell the header's padding and its free-text metadata: no tensor hangs on them."""
    length = int.from_bytes(data[:8], "little")
    start = data.find(b"__metadata__")
    end = data.find(b"}", start)
    return data[offset : 8 + length].strip() == b"" or start <= offset <= end
