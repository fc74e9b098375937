"""The store's contract on other file systems than the tests' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from directory_contract import DirectoryContract
from mounts import mounted

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
