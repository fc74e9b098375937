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
    assert made.strays() == []


@pytest.fixture
def port(house: House) -> int:
    house.serve()  # saved, so that the boots of the tests are hits
    return free_port()


@pytest.fixture
def saved(house: House) -> House:
    """A house whose boots are hits, and whose servers answer."""
    house.serve()
    house.wait_for("serve")
    house.rules(serve={"answers": 200})
    (house.root / "calls").write_text("")
    return house


@pytest.fixture(scope="session")
def everybodys_python() -> Iterator[str]:
    with open_python() as python:
        yield python
