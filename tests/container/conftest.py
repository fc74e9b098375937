from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from container.harness import Host
from container.image import shared_image


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    room = tmp_path_factory.getbasetemp()
    # The base of one worker of xdist lies in that of the run.
    with shared_image(room.parent if "PYTEST_XDIST_WORKER" in os.environ else room) as tag:
        yield tag


@pytest.fixture(scope="module")
def host(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    room = tmp_path_factory.mktemp("container")
    yield Host(room, image)
    shutil.rmtree(room)
