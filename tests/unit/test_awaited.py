"""What waits for its proof: only where all of it is there, and bounded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrypoint.state.awaited import MAX_CHECKPOINTS, Awaited

CONTENT = "a" * 64


def test_what_each_rank_recorded_is_found_by_the_manifests_content(tmp_path: Path) -> None:
    awaited = Awaited(tmp_path)
    assert not awaited.waits(CONTENT, [0, 1])
    awaited.add(CONTENT, {0: {"rank": 0}, 1: {"rank": 1}})
    assert awaited.waits(CONTENT, [0, 1])
    assert awaited.find(CONTENT, 1) == {"rank": 1}
    assert awaited.find(CONTENT, 2) is None
    assert not awaited.waits("b" * 64, [0, 1])


def test_without_what_one_rank_recorded_nothing_waits(tmp_path: Path) -> None:
    awaited = Awaited(tmp_path)
    awaited.add(CONTENT, {0: {}, 1: {}})
    (lost,) = tmp_path.glob("awaited/*/rank-1.json")
    lost.unlink()
    assert not awaited.waits(CONTENT, [0, 1])


def test_another_version_may_record_otherwise_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Awaited(tmp_path).add(CONTENT, {0: {}})
    monkeypatch.setattr("entrypoint.state.awaited.__version__", "99.0")
    assert not Awaited(tmp_path).waits(CONTENT, [0])


def test_what_could_not_be_read_again_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entrypoint.state.awaited.MAX_STATE_BYTES", 10)
    with pytest.raises(ValueError, match="rank 1 recorded more than 10 bytes"):
        Awaited(tmp_path).add(CONTENT, {0: {}, 1: {"before": {}}})
    assert not Awaited(tmp_path).waits(CONTENT, [0])


def test_the_oldest_go_each_with_all_its_ranks(tmp_path: Path) -> None:
    awaited = Awaited(tmp_path)
    contents = [f"{number:064}" for number in range(MAX_CHECKPOINTS + 1)]
    for age, content in enumerate(contents):
        awaited.add(content, {rank: {} for rank in range(64)})
        for path in tmp_path.glob(f"awaited/{content}-*"):
            os.utime(path, (age, age))
    assert [awaited.waits(content, range(64)) for content in contents] == [False] + [True] * 16
    assert len(list((tmp_path / "awaited").iterdir())) == MAX_CHECKPOINTS
    assert awaited.find(contents[0], 63) is None


def test_one_boot_may_leave_it_open(tmp_path: Path) -> None:
    awaited = Awaited(tmp_path)
    awaited.add(CONTENT, {0: {}})
    assert not awaited.was_put_off(CONTENT, "b1")
    awaited.put_off(CONTENT, "b1")
    assert not awaited.was_put_off(CONTENT, "b1")
    assert awaited.was_put_off(CONTENT, "b2")
    assert awaited.waits(CONTENT, [0])


def test_what_waits_no_longer_is_gone_and_cannot_be_put_off(tmp_path: Path) -> None:
    awaited = Awaited(tmp_path)
    awaited.add(CONTENT, {0: {}})
    awaited.drop(CONTENT)
    awaited.put_off(CONTENT, "b1")
    assert not awaited.waits(CONTENT, [0])
    assert not awaited.was_put_off(CONTENT, "b2")
    assert list((tmp_path / "awaited").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_where_nobody_may_look_nothing_waits(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    awaited = Awaited(tmp_path / "state")
    awaited.add(CONTENT, {0: {}})
    os.seteuid(2000)
    try:
        assert not awaited.waits(CONTENT, [0])
        awaited.put_off(CONTENT, "boot")
    finally:
        os.seteuid(0)
