"""Many nodes over one shared file system, all missing at once."""

from __future__ import annotations

from pathlib import Path

from blackbox.harness import House, make_source
from juicefs import Nodes, stores
from store_contract import deep_verify

COUNT = 8


def test_of_eight_nodes_that_all_miss_one_saves(nodes: Nodes, tmp_path: Path) -> None:
    shared = [str(store.root) for store in stores(nodes, "eight")]
    make_source(tmp_path / "model")
    houses = [House(tmp_path / f"node-{number}") for number in range(COUNT)]
    try:
        processes = [
            house.start(
                *("serve", tmp_path / "model", "-tp", 2),
                SHARDBOOT_SHARED=shared[number % 2],
                SHARDBOOT_PUBLISH="yes",
            )
            for number, house in enumerate(houses)
        ]
        boots = [house.finish(process) for house, process in zip(houses, processes, strict=True)]
        assert [boot.events[-1] for boot in boots] == ["local.hit"] * COUNT, boots
        for house in houses:
            deep_verify(house.store, house.store.names()[0])
        assert sum(house.calls.count("save") for house in houses) == 1
    finally:
        for house in houses:
            house.close()
