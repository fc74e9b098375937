"""gc, pins and evictions of the real command line, beside servers that run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from blackbox.harness import House, make_source, snapshot

LYING_LOCKS = "import fcntl; fcntl.flock = lambda *_: None\n"
"""What some network file systems do."""


DENYING = """
import os, pathlib
def rename(path, target):
    raise PermissionError(13, os.strerror(13))
pathlib.Path.rename = rename
"""
"""Another user's store, where this one is root."""


def release(house: House, seed: int) -> str:
    """Put a new release of the model in the place of the old one, boot on it, return its name."""
    if house.model.exists():
        house.model.rename(house.root / f"before-{seed}")
    make_source(house.model, seed)
    before = set(house.store.names()) if house.local.exists() else set()
    boot = house.serve()
    assert boot.events[-1] == "local.hit", boot.stderr
    (name,) = set(house.store.names()) - before
    return name


def gc(house: House, *words: object, **more: object) -> dict[str, str]:
    """Collect; return each checkpoint's reason."""
    done = house.run("gc", "--format", "json", "--grace", 0, *words, **more).json
    return {each["name"]: each["reason"] for each in done["checkpoints"]}


def staying(house: House) -> subprocess.Popen[str]:
    """Start a server that stays until its stdin is closed."""
    house.rules(serve={"stay": True})
    process = house.start("serve", house.model, "-tp", 2)
    house.wait_for("staying")
    house.rules()
    return process


def bytes_used(house: House) -> int:
    return sum(row["bytes"] for row in house.run("list", "--format", "json").json)


def test_what_is_superseded_goes_once_it_is_old_enough(house: House) -> None:
    old, new = release(house, 1), release(house, 2)
    text = house.run("gc").stdout
    assert f"kept  {new}" in text
    assert f"kept  {old}" in text
    assert text.count("young: made") == text.count("young: used") == 2
    before = snapshot(house.local)
    assert gc(house, "--dry-run") == {new: "newest", old: "superseded"}
    assert snapshot(house.local) == before
    assert f"would go  {old}" in house.run("gc", "--dry-run", "--grace", 0).stdout
    assert gc(house) == {new: "newest", old: "superseded"}
    assert house.store.names() == [new]
    assert house.serve().events[-1] == "local.hit"


@pytest.mark.parametrize("locks", ["true", "lying"])
def test_a_running_server_keeps_its_checkpoint(house: House, locks: str) -> None:
    old = release(house, 1)
    server = staying(house)
    new = release(house, 2)
    environ: dict[str, object] = {}
    if locks == "lying":
        site = house.root / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(LYING_LOCKS)
        environ["PYTHONPATH"] = f"{site}:{house.environ['PYTHONPATH']}"
    assert gc(house, **environ) == {new: "newest", old: "running"}
    rows = house.run("list", "--format", "json").json
    assert {row["name"]: row["running"] for row in rows} == {old: True, new: False}
    house.finish(server)
    assert gc(house, **environ) == {new: "newest", old: "superseded"}
    assert house.store.names() == [new]


def test_a_server_that_was_killed_keeps_nothing(house: House) -> None:
    old = release(house, 1)
    server = staying(house)
    new = release(house, 2)
    server.send_signal(signal.SIGKILL)
    server.wait(10)
    assert gc(house) == {new: "newest", old: "superseded"}


def test_a_pin_holds_against_gc_and_eviction(house: House) -> None:
    assert house.run("pin", "none-such").status == 31
    old, new = release(house, 1), release(house, 2)
    assert house.run("pin", "none-such").status == 31
    assert house.run("pin", old, "--format", "json").json == {"name": old, "pinned": True}
    assert gc(house) == {new: "newest", old: "pinned"}
    assert f"{old}" in house.run("list").stdout
    rows = house.run("list", "--format", "json").json
    assert {row["name"]: row["pinned"] for row in rows} == {old: True, new: False}
    boot = house.serve("--dtype", "float16", SHARDBOOT_MAX_BYTES=bytes_used(house))
    assert boot.events.count("space.evicted") == 1
    assert old in house.store.names()
    assert new not in house.store.names()
    assert house.run("unpin", old).stdout.endswith("not pinned any more\n")
    assert "was not pinned" in house.run("unpin", old).stdout


def test_a_save_that_would_not_fit_evicts_what_was_served_least_recently(house: House) -> None:
    first, second = release(house, 1), release(house, 2)
    served_again = house.run("serve", house.root / "before-2", "-tp", 2)
    assert served_again.words[0].endswith(first)
    boot = house.serve("--dtype", "float16", SHARDBOOT_MAX_BYTES=bytes_used(house))
    assert boot.events.count("space.evicted") == 1
    assert boot.events[-1] == "local.hit"
    assert f"space.evicted: {second}: " in boot.stderr
    assert first in house.store.names()
    assert second not in house.store.names()


def test_what_runs_is_not_evicted_and_the_source_is_served(house: House) -> None:
    running = release(house, 1)
    server = staying(house)
    used = bytes_used(house)
    boot = house.serve("--dtype", "float16", SHARDBOOT_MAX_BYTES=used)
    assert "space.evicted" not in boot.events
    assert boot.events[-1] == "space.short"
    assert f"{used} of at most {used} in use; evicting all that may go would free 0" in boot.stderr
    assert boot.words[0] == str(house.model)
    assert house.store.names() == [running]
    house.finish(server)


def test_a_copy_that_would_not_fit_evicts_and_is_served(house: House) -> None:
    wanted = release(house, 1)
    house.shared_copy()
    other = house.serve("--dtype", "float16").words[0]
    boot = house.serve(SHARDBOOT_SHARED=house.shared, SHARDBOOT_MAX_BYTES=bytes_used(house))
    assert boot.events.count("space.evicted") == 1
    assert boot.words[0].endswith(wanted)
    assert house.store.names() == [wanted]
    assert not Path(other).exists()


def test_the_shared_store_is_collected_only_when_told_and_after_a_longer_grace(
    house: House,
) -> None:
    names = []
    for seed in (1, 2):
        names.append(release(house, seed))
        push = ("push", "--shared", house.shared, house.model, "-tp", 2)
        # The bound is the local store's.
        assert house.run(*push, SHARDBOOT_MAX_BYTES=1).status == 0
    old, new = names
    shared = {"SHARDBOOT_SHARED": house.shared}
    assert gc(house, **shared) == {new: "newest", old: "superseded"}
    assert gc(house, "--shared", **shared) == {new: "young", old: "young"}
    assert gc(house, "--shared", "--shared-grace", 0, **shared) == {
        new: "newest",
        old: "superseded",
    }
    assert [p.name for p in house.shared.iterdir() if p.name[0] != "."] == [new]


def test_gc_has_nothing_to_collect_where_no_boot_has_been_and_says_what_is_away(
    house: House,
) -> None:
    assert house.run("gc").stdout == f"{house.local}: nothing to collect\n"
    assert not house.local.exists()
    assert house.run("gc", "--shared").status == 10
    assert house.run("gc", "--shared", SHARDBOOT_SHARED=house.root / "away").status == 30


def test_a_user_who_may_not_collect_is_told_so(house: House) -> None:
    old, _ = release(house, 1), release(house, 2)
    (house.local / ".trash").write_text("no directory")
    boot = house.run("gc", "--grace", 0)
    assert boot.status == 0
    assert f"kept  {old}" in boot.stdout
    assert "busy" in boot.stdout


def test_staging_that_this_user_may_not_move_is_not_said_to_be_gone(house: House) -> None:
    house.serve()
    with house.store.stage("killed") as staged:
        staged.disown()
    name = staged.path.name
    then = time.time() - 7200
    os.utime(staged.path, (then, then))
    injected = house.root / "injected"
    injected.mkdir()
    (injected / "sitecustomize.py").write_text(DENYING)
    boot = house.run("gc", PYTHONPATH=f"{injected}:{house.environ['PYTHONPATH']}")
    assert boot.status == 60, boot.stderr
    assert f"kept  {name}  denied: {staged.path}: Permission denied" in boot.stdout
    assert "gone" not in boot.stdout
    assert f"gone  {name}" in house.run("gc").stdout
    assert not staged.path.exists()
