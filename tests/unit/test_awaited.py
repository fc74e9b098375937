"""What waits for its proof: known once all of it is there, and bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.state.awaited import MAX_FILES, Awaited

CONTENT = "a" * 64


def test_what_each_rank_recorded_is_found_by_the_manifests_content(tmp_path: Path) -> None:
    awaited = Awaited(tmp_path)
    assert not awaited.waits(CONTENT)
    awaited.add(CONTENT, {0: {"rank": 0}, 1: {"rank": 1}})
    assert awaited.waits(CONTENT)
    assert awaited.find(CONTENT, 1) == {"rank": 1}
    assert awaited.find(CONTENT, 2) is None
    assert not awaited.waits("b" * 64)


def test_another_version_may_record_otherwise_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Awaited(tmp_path).add(CONTENT, {0: {}})
    monkeypatch.setattr("entrypoint.state.awaited.__version__", "99.0")
    assert not Awaited(tmp_path).waits(CONTENT)


def test_a_rank_that_cannot_be_written_leaves_nothing_to_go_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def full(path: Path, _: object) -> None:
        written.append(path)
        if len(written) > 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("entrypoint.state.awaited.write_json", full)
    with pytest.raises(OSError, match="No space"):
        Awaited(tmp_path).add(CONTENT, {0: {}, 1: {}, 2: {}})
    assert [path.name.partition("-rank-")[2] for path in written] == ["2.json", "1.json"]


def test_the_oldest_go(tmp_path: Path) -> None:
    awaited = Awaited(tmp_path)
    for number in range(MAX_FILES // 64 + 2):
        awaited.add(f"{number:064}", {rank: {} for rank in range(64)})
    assert len(list((tmp_path / "awaited").iterdir())) == MAX_FILES
    assert awaited.waits(f"{MAX_FILES // 64 + 1:064}")


def test_a_load_may_leave_it_open_once(tmp_path: Path) -> None:
    awaited = Awaited(tmp_path)
    awaited.add(CONTENT, {0: {}})
    assert not awaited.was_put_off(CONTENT)
    awaited.put_off(CONTENT)
    assert awaited.was_put_off(CONTENT)
    assert awaited.waits(CONTENT)
