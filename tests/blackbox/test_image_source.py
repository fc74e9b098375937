"""A source on a read-only image: all times as its builder set them, inodes numbered alike."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from blackbox.harness import House, make_source
from mounts import image_mounted

EPOCH = 1_700_000_000


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """Return the contents of two images, of one size, with other weights."""
    made = []
    for seed in (0, 7):
        directory = tmp_path / f"contents-{seed}"
        make_source(directory, seed)
        for path in (*directory.iterdir(), directory):
            os.utime(path, (EPOCH, EPOCH))
        made.append(directory)
    return made


@contextlib.contextmanager
def source(house: House, contents: Path) -> Iterator[None]:
    shutil.rmtree(house.model, ignore_errors=True)
    with image_mounted(contents, house.model, EPOCH):
        yield


def stamp(house: House) -> tuple[int, ...]:
    [weights] = house.model.glob("*.safetensors")
    found = weights.stat()
    return (found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)


def test_the_next_image_is_another_model_whatever_its_times(
    house: House, images: list[Path]
) -> None:
    with source(house, images[0]):
        house.serve()
        before, hit = stamp(house), house.serve()
    assert hit.events[-1] == "local.hit"
    assert "source.read" not in hit.events
    with source(house, images[1]):
        assert stamp(house) == before
        boot = house.serve(SHARDBOOT_ON_MISS="source")
    assert boot.events[-2:] == ["source.read", "local.foreign"]
    assert "may be the next one's" in boot.stderr


def test_the_same_image_mounted_anew_is_read_once(house: House, images: list[Path]) -> None:
    with source(house, images[0]):
        house.serve()
    with source(house, images[0]):
        assert house.serve().events[-2:] == ["source.read", "local.hit"]
        assert "source.read" not in house.serve().events
