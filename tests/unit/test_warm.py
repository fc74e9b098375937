"""Keeping a checkpoint in the page cache: what is read again, how much, and until when."""

from __future__ import annotations

import errno
import math
import os
import select
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from page_cache import cached, evict

from entrypoint import stretches, warm
from entrypoint.stretches import PIECE_BYTES, Stretch, is_cached

Files = list[tuple[str, int]]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Return two shard files, with nothing of them in memory."""
    found = [(str(tmp_path / name), 8 * PIECE_BYTES) for name in ("a", "b")]
    for path, size in found:
        Path(path).write_bytes(b"x" * size)
        evict(Path(path))
    if any(cached(Path(path)) for path, _ in found):
        pytest.skip("files stay in memory here")
    return found


class Looks:
    """Stands for the time between looks, and tells how long each was to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rests: list[float] = []
        self.between: list[Callable[[], object]] = []
        monkeypatch.setattr(select, "select", self._wait)

    def _wait(self, ends: list[int], _w: object, _x: object, rest: float) -> tuple[list[int]]:
        self.rests.append(rest)
        if not self.between:
            return (ends,)
        self.between.pop(0)()
        return ([],)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


@pytest.fixture
def parents() -> Iterator[tuple[int, int]]:
    """Return who has started us, and who is to be outlived."""
    with subprocess.Popen(["sleep", "1000"]) as supervisor:
        yield os.getppid(), supervisor.pid
        supervisor.kill()


def shares(files: Files) -> list[float]:
    return [round(cached(Path(path)), 1) for path, _ in files]


def test_what_is_evicted_is_read_again(
    files: Files, looks: Looks, parents: tuple[int, int]
) -> None:
    seen: list[list[float]] = []

    def look() -> None:
        seen.append(shares(files))

    def look_and_evict() -> None:
        look()
        evict(Path(files[1][0]))

    looks.between = [look, look_and_evict, look]
    warm.keep([[file] for file in files], math.inf, parents)
    assert seen == [[0, 0], [1, 1], [1, 1]]


def test_no_more_is_kept_than_was_told_and_the_first_to_be_loaded_first(
    files: Files, looks: Looks, parents: tuple[int, int]
) -> None:
    looks.between = [lambda: None]
    warm.keep([files], 10 * PIECE_BYTES, parents)
    first, second = shares(files)
    assert first == 1
    # The kernel reads a bit beyond what it is asked for.
    assert 0.2 <= second < 0.7


def test_no_more_is_kept_than_half_of_what_is_free(
    files: Files, looks: Looks, parents: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "free_bytes", lambda: 4 * PIECE_BYTES)
    looks.between = [lambda: None]
    warm.keep([files], math.inf, parents)
    first, second = shares(files)
    assert 0.2 <= first < 0.7
    assert second == 0


def test_who_evicts_it_again_and_again_wins(
    files: Files, looks: Looks, parents: tuple[int, int]
) -> None:
    def lose() -> None:
        evict(Path(files[0][0]))

    looks.between = [*[lose] * 9, lambda: None, lambda: None]
    warm.keep([files], math.inf, parents)
    minutes = [rest / 60 for rest in looks.rests]
    assert minutes == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 1, 1]


def test_it_ends_with_the_supervisor(files: Files) -> None:
    with subprocess.Popen(["true"]) as gone:
        # A process that has ended, and was not reaped, is gone, too.
        os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
        warm.keep([files], math.inf, (os.getppid(), gone.pid))
    assert shares(files) == [0, 0]


def test_where_nobody_can_tell_what_is_cached_nothing_is_kept(
    files: Files, parents: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "preadv", cannot)
    with pytest.raises(OSError, match="not supported"):
        warm.keep([files], math.inf, parents)


def test_a_hole_in_the_middle_of_a_stretch_is_seen(files: Files) -> None:
    path, size = files[0]
    whole = Stretch(path, 0, size)
    assert not is_cached(whole)
    stretches.read_all([whole], [os.getppid()])
    assert is_cached(whole)
    with Path(path).open("rb") as file:
        os.posix_fadvise(file.fileno(), size // 2, size // 4, os.POSIX_FADV_DONTNEED)
    assert not is_cached(whole)
