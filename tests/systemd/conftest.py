from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from systemd.harness import Machine, booted, debian


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    room = tmp_path_factory.mktemp("machine")
    debian(room / "root")
    with booted(room / "root", room) as running:
        yield running
    shutil.rmtree(room)
