"""What is done for the page cache while vLLM starts, and who clears up after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from blackbox.harness import House, is_gone
from page_cache import cached, evict_all
from waiting import until


def children(pid: int) -> list[str]:
    """Return the children of a process, those that wait to be reaped among them."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [child for task in tasks for child in (task / "children").read_text().split()]


@pytest.fixture
def shards(house: House) -> list[Path]:
    """Return the shard files of a checkpoint, with nothing of them in memory."""
    house.serve()
    house.serve()  # headers are looked at, once
    return evict_all(house.local.glob("*/*.safetensors"))


def test_what_is_not_in_memory_is_read_while_vllm_starts(house: House, shards: list[Path]) -> None:
    house.rules(serve={"stay": True, "plugin": True})
    process = house.start("serve", house.model, "-tp", 2)
    house.wait_for("staying")
    until(lambda: not children(process.pid))
    boot = house.finish(process)
    reader = boot.loader["reader"]
    assert boot.vllm["children"] == [str(reader)]
    assert is_gone(reader)
    assert [cached(path) for path in shards] == [1.0] * len(shards)


def test_what_is_in_memory_is_left_alone(house: House) -> None:
    house.serve()
    boot = house.serve()
    assert boot.loader["reader"] is None
    assert boot.vllm["children"] == []


def test_the_loader_is_told_how_to_read(house: House) -> None:
    house.serve()
    told = house.serve().loader
    assert (told["threads"], told["read_bytes"]) == (4, 8 << 20)
    told = house.serve(SHARDBOOT_READ_THREADS="16", SHARDBOOT_READ_BYTES="1MiB").loader
    assert (told["threads"], told["read_bytes"]) == (16, 1 << 20)


def test_nothing_is_read_where_that_is_not_wanted(house: House, shards: list[Path]) -> None:
    boot = house.run("serve", "--no-prefetch", house.model, "-tp", 2)
    assert "reader" not in boot.loader
    assert boot.vllm["children"] == []
    assert max(map(cached, shards)) < 1
