"""Files that somebody else put there are read within bounds, and left as they were found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from entrypoint.checkpoint.foreign import read_bounded
from entrypoint.engine import question

LIMIT = 10


def link(path: Path) -> None:
    path.with_name("target").write_bytes(b"secret")
    path.symlink_to(path.with_name("target"))


NO_FILES: dict[str, Callable[[Path], object]] = {
    "directory": Path.mkdir,
    "fifo": os.mkfifo,
    "link": link,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "nothing": lambda path: None,
    "too large": lambda path: path.write_bytes(bytes(LIMIT + 1)),
}


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(LIMIT)))
    before = open_descriptors()
    assert read_bounded(path, LIMIT) == bytes(range(LIMIT))
    assert open_descriptors() == before


@pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_such_file_is_refused_and_nothing_stays_open(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    make(tmp_path / "x")
    before = open_descriptors()
    with pytest.raises((OSError, ValueError), match="x"):
        read_bounded(tmp_path / "x", LIMIT)
    assert open_descriptors() == before


def test_a_directory_that_a_word_names_does_not_stay_open(tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(ValueError, match="no small file"):
        question._read(str(tmp_path))
    assert open_descriptors() == before
