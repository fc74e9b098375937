from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from container.harness import Host, base_image


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with base_image(tmp_path_factory.mktemp("image")) as tag:
        yield tag


@pytest.fixture(scope="module")
def host(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    room = tmp_path_factory.mktemp("container")
    yield Host(room, image)
    shutil.rmtree(room)
