"""A checkpoint is kept in the page cache while a server runs from it, if that is wanted."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

import pytest
from blackbox.harness import LAUNCH, House, is_gone
from blackbox.standing_by import supervised, wait_for_server
from page_cache import cached, evict, evict_all
from processes import descendants
from waiting import until

OFTEN: Final = f"from entrypoint import warm; warm.LOOK_SECONDS = 0.1; {LAUNCH}"


def keepers(supervisor: int) -> list[int]:
    """Return the processes that keep something in memory."""
    found = descendants(supervisor)
    return [p for p in found if Path(f"/proc/{p}/comm").read_text().strip() == "shardboot-ahead"]


@pytest.fixture
def shards(saved: House) -> list[Path]:
    """Return the shard files of a checkpoint that can be evicted."""
    saved.rules()
    saved.serve()  # headers are looked at, once
    saved.rules(serve={"answers": 200})
    return evict_all(saved.local.glob("*/*.safetensors"))


def test_it_is_read_again_as_long_as_a_server_runs(saved: House, shards: list[Path]) -> None:
    def all_are_cached() -> bool:
        return all(cached(path) == 1 for path in shards)

    with supervised(saved, "--keep-warm", "auto", launch=OFTEN) as process:
        server = wait_for_server(saved)
        until(all_are_cached)
        (keeper,) = keepers(process.pid)
        for path in shards:
            evict(path)
        until(all_are_cached)
        os.kill(server, signal.SIGKILL)
        wait_for_server(saved)
        assert is_gone(keeper)
        (another,) = keepers(process.pid)
        process.terminate()
        saved.finish(process)
    assert is_gone(another)


def test_it_ends_with_a_supervisor_that_is_killed(saved: House, shards: list[Path]) -> None:
    with supervised(saved, "--keep-warm", "1GB", launch=OFTEN) as process:
        server = wait_for_server(saved)
        (keeper,) = keepers(process.pid)
        process.kill()
        saved.finish(process)
        until(lambda: is_gone(keeper))
        os.kill(server, signal.SIGKILL)
    assert shards


def test_nobody_keeps_what_is_cached_where_that_is_not_wanted(saved: House) -> None:
    with supervised(saved) as process:
        wait_for_server(saved)
        assert keepers(process.pid) == []


def test_without_a_supervisor_nothing_is_kept(saved: House) -> None:
    saved.rules()
    saved.serve()
    boot = saved.serve(SHARDBOOT_KEEP_WARM="auto")
    assert boot.loader["reader"] is None
