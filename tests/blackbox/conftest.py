from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from blackbox.harness import House
from blackbox.openhouse import open_python
from serving import free_port


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.close()


@pytest.fixture
def port(house: House) -> int:
    house.serve()  # saved, so that the boots of the tests are hits
    return free_port()


@pytest.fixture(scope="session")
def everybodys_python() -> Iterator[str]:
    with open_python() as python:
        yield python
