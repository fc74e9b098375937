"""When no boot waits for a save, since so many before came to nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from entrypoint import __version__
from entrypoint.config import Settings, resolve
from entrypoint.state import tries
from entrypoint.state.memory import Memory
from entrypoint.state.tries import REST_SECONDS, Tries


def settings(root: Path, **more: str) -> Settings:
    return resolve({"state_dir": str(root), **more}, {})


@pytest.fixture
def tried(tmp_path: Path) -> Tries:
    """Return what three saves have left that failed."""
    found = Tries(settings(tmp_path), "key")
    for _ in range(3):
        found.failed("save.failed", "no reason", 50)
    return found


def test_only_so_many_in_a_row_are_too_many(tried: Tries) -> None:
    assert tried.resting(4) is None
    found = tried.resting(3)
    assert found is not None
    assert (found.in_row, found.reason, found.text, found.exit_code) == (
        *(3, "save.failed", "no reason", 50),
    )


def test_one_that_went_well_forgets_them(tried: Tries) -> None:
    tried.succeeded()
    tried.failed("save.failed", "", 50)
    assert tried.resting(2) is None
    assert tried.resting(1) is not None


@pytest.mark.parametrize("hours", [-1, 25])
def test_a_day_later_or_by_a_clock_put_right_one_more_is_tried(
    tried: Tries, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    now = time.time() + hours * 3600
    monkeypatch.setattr(time, "time", lambda: now)
    assert tried.resting(3) is None
    tried.failed("save.timeout", "", 50)
    found = tried.resting(3)
    assert found is not None
    assert found.in_row == 4
    monkeypatch.setattr(time, "time", lambda: now + REST_SECONDS - 1)
    assert tried.resting(3) == found


def test_others_and_other_means_count_for_themselves(
    tried: Tries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Tries(settings(tmp_path), "another").resting(3) is None
    assert Tries(settings(tmp_path, save_timeout="2h"), "key").resting(3) is None
    assert Tries(settings(tmp_path, prove="never"), "key").resting(3) is None
    assert Tries(settings(tmp_path, read_threads="2"), "key").resting(3) is not None
    monkeypatch.setattr(tries, "__version__", __version__ + ".1")
    assert Tries(settings(tmp_path), "key").resting(3) is None


@pytest.mark.parametrize("odd", [[], {}, {"in_row": 9}, {"in_row": "9", "reason": 1}, 9])
def test_what_cannot_be_understood_is_as_good_as_forgotten(tmp_path: Path, odd: object) -> None:
    fresh = Tries(settings(tmp_path), "key")
    fresh.failed("save.failed", "", 50)
    (file,) = (tmp_path / "memory" / "saves").iterdir()
    assert Memory(tmp_path).remember("saves", file.stem, odd)  # type: ignore[arg-type] # whatever
    assert fresh.resting(1) is None
