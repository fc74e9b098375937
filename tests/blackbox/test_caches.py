"""Where vLLM is told to keep what it compiles, and what becomes of that after a boot that died."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from blackbox.harness import Boot, House

from entrypoint.state.ledger import Ledger

OURS = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def places(boot: Boot) -> list[str]:
    """Return the variables that name a place of ours, without the house's own path."""
    environ: dict[str, str] = boot.vllm["environ"]
    return [environ[name] for name in OURS if name in environ]


def only_place(house: House) -> Path:
    [found] = [path for path in (house.state / "caches").iterdir() if path.name[0] != "."]
    return found


def said(boot: Boot) -> list[str]:
    """Return the boot's lines by their codes, but for the one that is about root."""
    return [event for event in boot.events if event != "user.root"]


def note(house: House, boot: Boot, *events: str) -> None:
    """Add to the ledger what vLLM's processes would have noted of a boot."""
    [attempt] = [e for e in house.ledger if e["event"] == "attempt" and e["pid"] == boot.pid]
    for event in events:
        assert Ledger(house.state).append({"boot": attempt["boot"], "event": event})


def test_every_boot_of_a_checkpoint_has_the_same_place_for_caches(house: House) -> None:
    saved = house.serve()
    [name] = house.store.names()
    place = only_place(house)
    assert place.name.startswith(f"{name}-")
    assert places(saved) == [f"{place}/{part}" for part in ("vllm", "inductor", "triton")]
    assert places(house.serve()) == places(saved)


def test_a_users_own_place_stays_and_none_is_made(house: House) -> None:
    boot = house.serve(VLLM_CACHE_ROOT="/mine")
    assert places(boot) == ["/mine"]
    assert not (house.state / "caches").exists()


def test_a_boot_that_serves_the_source_keeps_vllms_own_places(house: House) -> None:
    boot = house.serve(SHARDBOOT_ON_MISS="source")
    assert places(boot) == []


def test_where_nothing_can_be_kept_vllm_is_told_no_place(house: House) -> None:
    house.serve()
    shutil.rmtree(house.state / "caches")
    (house.state / "caches").write_text("in the way")
    boot = house.serve()
    assert places(boot) == []
    assert "caches" not in boot.stderr


def test_after_a_boot_that_died_before_it_served_the_caches_go_once(house: House) -> None:
    died = house.serve()
    compiled = only_place(house) / "vllm" / "model"
    compiled.parent.mkdir()
    compiled.write_text("bad")
    note(house, died, "loading", "loaded")
    boot = house.serve()
    assert not compiled.exists()
    assert said(boot) == ["caches.mended", "local.hit"]
    compiled.parent.mkdir(parents=True)
    compiled.write_text("as bad")
    note(house, boot, "loading", "loaded")
    assert said(house.serve()) == ["local.hit"]
    assert compiled.exists()


def test_after_a_boot_that_served_they_stay_whatever_it_died_of(house: House) -> None:
    served = house.serve()
    compiled = only_place(house) / "vllm" / "model"
    compiled.parent.mkdir()
    compiled.write_text("good")
    note(house, served, "loading", "loaded", "serving")
    assert said(house.serve()) == ["local.hit"]
    assert compiled.read_text() == "good"


def test_after_a_power_loss_what_is_empty_goes(house: House) -> None:
    house.serve()
    place = only_place(house) / "vllm"
    place.mkdir()
    (place / "torn").touch()
    (place / "whole").write_text("graph")
    ledger = house.state / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"host_boot":"', '"host_boot":"before-'))
    assert said(house.serve()) == ["caches.mended", "local.hit"]
    assert os.listdir(place) == ["whole"]
    (place / "torn").touch()
    assert said(house.serve()) == ["local.hit"]


def compile_something(house: House, boot: Boot, *events: str) -> Path:
    """Leave what vLLM would have compiled, and what its processes would have noted."""
    compiled = only_place(house) / "vllm" / "model"
    compiled.parent.mkdir()
    compiled.write_text("graph")
    note(house, boot, *events)
    return compiled


def another_node(house: House) -> None:
    """Forget all that this node has: another one, with the same settings."""
    shutil.rmtree(house.local)
    shutil.rmtree(house.state)


def test_what_a_node_has_compiled_comes_along_where_the_store_is_trusted(house: House) -> None:
    shared = {"SHARDBOOT_SHARED": str(house.shared)}
    boot = house.serve()
    push = ("push", "--publish-caches", house.model, "-tp", 2)
    compiled = compile_something(house, boot, "loading", "loaded")
    unserved = house.run(*push, **shared)
    assert unserved.status == 31
    assert "no caches that a boot has served with" in unserved.stderr
    note(house, boot, "serving")
    assert "caches.published" in house.run(*push, **shared).events
    another_node(house)
    assert "caches.fetched" not in house.serve(**shared).events
    assert not compiled.exists()
    another_node(house)
    fetched = house.serve(**shared, SHARDBOOT_TRUST_CACHES="yes")
    assert "caches.fetched" in fetched.events
    assert compiled.read_text() == "graph"
    assert only_place(house) == compiled.parents[1]


def test_caches_that_are_damaged_there_cost_a_copy_nothing(house: House) -> None:
    shared = {"SHARDBOOT_SHARED": str(house.shared)}
    compile_something(house, house.serve(), "loading", "loaded", "serving")
    house.run("push", "--publish-caches", house.model, "-tp", 2, **shared)
    [archive] = (house.shared / ".caches").glob("*.tar")
    archive.write_bytes(b"torn")
    another_node(house)
    boot = house.run("pull", "--trust-caches", house.model, "-tp", 2, **shared)
    assert boot.status == 0
    assert "caches.unfetched" in boot.events
    assert [path for path in (house.state / "caches").iterdir() if path.name[0] != "."] == []


def test_a_store_that_falls_silent_over_caches_costs_a_boot_nothing_else(house: House) -> None:
    shared = {"SHARDBOOT_SHARED": str(house.shared)}
    compile_something(house, house.serve(), "loading", "loaded", "serving")
    house.run("push", "--publish-caches", house.model, "-tp", 2, **shared)
    another_node(house)
    boot = house.serve(**shared, SHARDBOOT_TRUST_CACHES="yes", **house.silent_shelf())
    assert boot.vllm["argv"][2].startswith(str(house.local))
    assert "caches.unfetched" in boot.events
    assert f"{house.shared} did not answer" in boot.stderr


def test_gc_takes_caches_whose_checkpoint_is_gone(house: House) -> None:
    compile_something(house, house.serve(), "loading", "loaded", "serving")
    place = only_place(house)
    [name] = house.store.names()

    def verdicts() -> dict[str, str]:
        done = house.run("gc", "--format", "json", "--grace", 0).json
        return {each["name"]: each["reason"] for each in done["caches"]}

    assert verdicts() == {place.name: "kept"}
    house.store.retire(name)
    assert verdicts() == {place.name: "orphan"}
    assert not place.exists()
