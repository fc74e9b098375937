"""What tells of news in a shared store, on a real file system and a real kernel."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, make_key

pytest.importorskip("watchdog", reason="the extra `watch` is not installed")

from entrypoint.insight.findings import FileSystem
from entrypoint.sidecar import watch
from entrypoint.sidecar.watch import Watch

BOUND = 20.0
A_MOMENT = 1.0


class Heard:
    """A watch of one directory, and what it said."""

    def __init__(self, root: Path) -> None:
        self.hint, self.said = threading.Event(), list[str]()
        self.watch = Watch(root, self.hint, self.said.append)

    def has_news(self, seconds: float = BOUND) -> bool:
        found = self.hint.wait(seconds)
        self.hint.clear()
        return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def heard(root: Path) -> Iterator[Heard]:
    made = Heard(root)
    yield made
    made.watch.close()


def test_a_checkpoint_that_comes_or_goes_is_news_and_how_it_is_built_is_not(
    root: Path, heard: Heard
) -> None:
    heard.watch.renew()
    assert heard.said == [f"{root}: news come at once"]
    (root / ".staging").mkdir()
    (root / ".leases").mkdir()
    (root / ".staging" / "x").mkdir()
    assert not heard.has_news(A_MOMENT)
    made = make_checkpoint(root)
    assert heard.has_news()
    (root / ".trash").mkdir()
    (root / made.name).rename(root / ".trash" / "x")
    assert heard.has_news()


def test_what_is_mounted_or_made_anew_is_watched_from_the_next_look_on(
    root: Path, heard: Heard
) -> None:
    heard.watch.renew()
    root.rename(root.with_name("before"))
    heard.watch.renew()
    root.mkdir()
    heard.watch.renew()
    heard.hint.clear()
    make_checkpoint(root)
    assert heard.has_news()
    assert len(heard.said) == 1


def test_nothing_is_watched_twice(root: Path, heard: Heard) -> None:
    heard.watch.renew()
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        heard.watch.renew()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
    heard.watch.close()
    heard.watch.close()


def test_where_others_write_unseen_only_looks_tell(
    root: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entrypoint.insight.mount.look", lambda _: FileSystem("nfs4", "network"))
    heard.watch.renew()
    assert heard.said == [
        f"{root}: only looks tell of news: of what others do on nfs4 no kernel tells"
    ]
    make_checkpoint(root, key=make_key())
    assert not heard.has_news(A_MOMENT)
    heard.watch.renew()
    assert len(heard.said) == 1


def test_a_kernel_that_takes_a_watch_and_tells_nothing_is_found_out(
    root: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(watch, "_touch", lambda _: True)
    heard.watch.renew()
    assert "nothing was told of a change" in heard.said[0]


def test_where_no_watch_is_left_only_looks_tell(
    root: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "inotify watch limit reached")

    before = threading.active_count()
    monkeypatch.setattr("entrypoint.sidecar.watch.Observer.start", full)
    heard.watch.renew()
    assert threading.active_count() == before
    assert heard.said == [f"{root}: only looks tell of news: inotify watch limit reached"]
