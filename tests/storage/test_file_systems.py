"""The store's contract on other file systems than the tests' own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from directory_contract import DirectoryContract
from lease_driver import WHAT, pace
from mounts import mounted

from entrypoint.store import lease
from entrypoint.store.directory import DirectoryStore


@pytest.fixture(scope="module", params=["tmpfs", "ext4", "xfs", "btrfs"])
def file_system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    # xfs refuses to be smaller than 300 MB.
    with mounted(request.param, tmp_path_factory.mktemp("mounts"), 400) as point:
        yield point


class TestOnOtherFileSystems(DirectoryContract):
    @pytest.fixture
    def store(self, file_system: Path, tmp_path: Path) -> DirectoryStore:
        root = file_system / tmp_path.name
        root.mkdir()
        return DirectoryStore(root)


@pytest.mark.parametrize("was_used", [False, True])
def test_in_a_store_that_cannot_be_written_nobody_waits(was_used: bool, tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path, 4) as root:
        if was_used:
            with lease.queue(root, WHAT, pace=pace()):
                pass
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        told: list[str] = []
        with lease.queue(root, WHAT, pace=pace()) as ticket:
            assert ticket.wait(1, 30, on_wait=told.append).how == "without"
        assert told == [f"{ticket.directory}: no queue (Read-only file system); going on without"]
