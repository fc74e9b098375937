"""Whatever breaks of ours, vLLM still starts, with the user's own words, and the reason is said."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from blackbox.harness import House, make_source
from mounts import hung

Breakage = Callable[[House], dict[str, object]]


def shared_is_not_there(house: House) -> dict[str, object]:
    return {"SHARDBOOT_SHARED": house.root / "not-mounted", "SHARDBOOT_ON_MISS": "source"}


def state_is_a_file(house: House) -> dict[str, object]:
    house.state.write_text("")
    return {"SHARDBOOT_ON_MISS": "source"}


def local_is_a_file(house: House) -> dict[str, object]:
    house.local.write_text("")
    return {}


def local_is_below_a_file(house: House) -> dict[str, object]:
    (house.root / "file").write_text("")
    return {"SHARDBOOT_LOCAL_DIR": house.root / "file" / "below"}


def manifest_is_garbage(house: House) -> dict[str, object]:
    house.serve()
    [name] = house.store.names()
    (house.store.path(name) / "manifest.json").write_bytes(b"\x00\xff{")
    return {"SHARDBOOT_ON_MISS": "source"}


def disk_is_full(house: House) -> dict[str, object]:
    return {"SHARDBOOT_RESERVE_BYTES": "1000TB"}


def budget_is_spent(house: House) -> dict[str, object]:
    return {"SHARDBOOT_MAX_BYTES": "10"}


def source_is_not_here(house: House) -> dict[str, object]:
    shutil.rmtree(house.model)
    return {}


def answering(**rule: object) -> Breakage:
    def breakage(house: House) -> dict[str, object]:
        house.rules(resolve=rule)
        return {}

    return breakage


def vllm_is_opaque(house: House) -> dict[str, object]:
    # As `vllm` would be if it were compiled, or a shell wrapper.
    interpreter = house.bin / "python3-stub"
    (house.bin / "vllm").write_text(f'#!/bin/sh\nexec {interpreter} {house.bin}/vllm "$@"\n')
    return {}


CASES: list[tuple[str, Breakage, str]] = [
    ("shared not mounted", shared_is_not_there, "shared.unreachable"),
    ("state is a file", state_is_a_file, "state.unwritable"),
    ("local is a file", local_is_a_file, "local.unwritable"),
    ("local below a file", local_is_below_a_file, "local.unwritable"),
    ("garbage manifest", manifest_is_garbage, "local.damaged"),
    ("full disk", disk_is_full, "space.short"),
    ("budget spent", budget_is_spent, "space.short"),
    ("no source", source_is_not_here, "source.absent"),
    ("no plugin", answering(change={"engine": {"plugin": None}}), "engine.noplugin"),
    ("old plugin", answering(change={"engine": {"plugin": "0.0.1"}}), "engine.plugin-version"),
    (
        "doubtful words",
        answering(change={"words": {"verified": False, "why": "x"}}),
        "engine.words",
    ),
    ("asking dies", answering(exit=1, print="ImportError: no vllm"), "engine.failed"),
    ("asking is killed", answering(kill=9), "engine.failed"),
    ("answer is no JSON", answering(say="nonsense"), "engine.failed"),
    ("answer is a list", answering(say="[]"), "engine.failed"),
    ("answer is empty", answering(say="{}"), "engine.failed"),
    ("opaque vllm", vllm_is_opaque, "engine.opaque"),
    # Odd enough that some room stumbles: whatever is raised, vLLM starts.
    ("answer lacks all", answering(say='{"status": "ok"}'), ""),
    ("key is odd", answering(change={"key": {"tp": "two"}}), ""),
    ("model is odd", answering(change={"model": {"word": 7}}), ""),
    ("layout is odd", answering(change={"layout": {"nnodes": None}}), ""),
    ("ranks are odd", answering(change={"layout": {"nnodes": 2, "ranks": [7]}}), "engine.failed"),
    ("drop is odd", answering(change={"words": {"drop": [99]}}), ""),
]


@pytest.mark.parametrize(
    ("breakage", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_vllm_starts_on_the_source_whatever_breaks(
    house: House, breakage: Breakage, reason: str
) -> None:
    environ = breakage(house)
    boot = house.serve("--port", 8000, **environ)
    assert boot.status == 0, boot.stderr
    assert boot.words == [str(house.model), "-tp", "2", "--port", "8000"]
    assert boot.vllm["pid"] == boot.pid
    assert boot.vllm["signals"]["SigIgn"] == 0
    if reason:
        assert reason in boot.events
        assert "Traceback" not in boot.stderr
    else:
        assert boot.events


@pytest.mark.parametrize(
    ("breakage", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_vllm_does_not_start_where_the_policy_is_to_refuse(
    house: House, breakage: Breakage, reason: str
) -> None:
    environ = breakage(house)
    starts = house.calls.count("serve")
    boot = house.run("serve", "--on-failure", "refuse", house.model, "-tp", 2, **environ)
    tolerated = reason in ("state.unwritable", "shared.unreachable", "local.damaged")
    # These were told to serve the source on a miss, which is no failure.
    assert (house.calls.count("serve") > starts) is tolerated, boot.stderr
    if not tolerated:
        assert boot.status != 0


def test_a_local_store_that_is_a_dangling_link_is_said_by_its_name(house: House) -> None:
    house.local.symlink_to(house.root / "not-mounted")
    boot = house.serve()
    assert boot.words == [str(house.model), "-tp", "2"]
    assert "Traceback" not in boot.stderr
    assert "internal.error" not in boot.events


def test_a_state_directory_that_cannot_be_written_costs_only_time(house: House) -> None:
    house.state.write_text("")
    first, second = house.serve(), house.serve()
    assert "state.unwritable" in second.events
    assert first.lasting_words == second.lasting_words
    assert house.calls.count("save") == 1
    assert house.calls.count("resolve") > 1


def test_memory_that_was_torn_is_as_good_as_forgotten(house: House) -> None:
    house.serve()
    for path in (house.state / "memory").rglob("*.json"):
        path.write_bytes(path.read_bytes()[:-20])
    boot = house.serve()
    assert boot.events[-1] == "local.hit"
    assert house.calls.count("save") == 1


@pytest.mark.parametrize("text", ["null", "[]", "{}", '{"x": 1}', "3"])
def test_memory_of_another_shape_never_stops_a_boot(house: House, text: str) -> None:
    house.serve()
    for path in (house.state / "memory").rglob("*.json"):
        path.write_text(text)
    boot = house.serve()
    assert boot.status == 0
    assert boot.vllm, boot.stderr


def test_a_source_that_only_the_hub_has_is_served_from_there(house: House) -> None:
    boot = house.run("serve", "org/model", "-tp", 2)
    assert boot.words == ["org/model", "-tp", "2"]
    assert boot.events[-1] == "source.absent"
    assert not (Path(house.local) / "org").exists()


def test_a_source_whose_mount_hangs_never_blocks_a_local_hit(house: House) -> None:
    house.serve()
    with hung(house.model):
        boot = house.serve(**house.hung_after(1))
    assert boot.events[-2:] == ["source.hung", "local.hit"]
    assert boot.seconds < 10


def test_nor_does_it_block_an_image_that_is_given_the_model_alone(house: House) -> None:
    house.serve()
    with hung(house.model):
        boot = house.run("enter", house.model, "-tp", 2, **house.hung_after(1))
    assert boot.events[-2:] == ["source.hung", "local.hit"]
    assert boot.seconds < 20


def test_a_source_that_is_only_slow_is_not_taken_for_what_it_was(house: House) -> None:
    house.serve()
    shutil.rmtree(house.model)
    make_source(house.model, seed=7)
    boot = house.serve(SHARDBOOT_ON_MISS="source", **house.hung_after(1, each_file=0.4))
    assert boot.events[-2:] == ["source.read", "local.foreign"]
    assert boot.words == [str(house.model), "-tp", "2"]


def test_a_shared_store_whose_mount_hangs_is_not_waited_for(house: House) -> None:
    with hung(house.root / "far") as far:
        boot = house.serve(SHARDBOOT_SHARED=far)
        decided = house.run("plan", "--format", "json", house.model, "-tp", 1, SHARDBOOT_SHARED=far)
    assert boot.events[-2:] == ["save.done", "local.hit"]
    assert "did not answer" in boot.stderr
    assert decided.json["findings"]["shared"]["finding"] == "unreachable"
    assert boot.seconds < 30


SILENT_LISTINGS = """\
import os, time
real = os.scandir
def scandir(path="."):
    if str(path).endswith("/shared"):
        time.sleep(1000)
    return real(path)
os.scandir = scandir
"""


def test_a_shared_store_that_is_there_and_cannot_be_listed_is_not_waited_for(house: House) -> None:
    # As NFS, whose client remembers that the directory is there when its server has gone.
    silent = house._inject(SILENT_LISTINGS)
    boot = house.serve(SHARDBOOT_SHARED=house.shared, SHARDBOOT_ON_MISS="source", **silent)
    assert boot.words == [str(house.model), "-tp", "2"]
    assert boot.events[-1] == "shared.unreachable"
    assert "shared did not answer within 5 s" in boot.stderr


def test_a_model_that_cannot_be_saved_is_tried_once(house: House) -> None:
    house.rules(save={"refuse": ["save.online-quant", "meta tensors"]})
    assert house.serve().events.count("save.online-quant") == 2
    again = house.serve()
    assert again.events[-1] == "save.online-quant"
    assert "meta tensors" in again.stderr
    assert house.calls.count("save") == 1
    # An operator may know better, and what then goes well counts from now on.
    house.rules()
    assert house.run("save", house.model, "-tp", 2).status == 0
    shutil.rmtree(house.local)
    assert house.serve().events[-2:] == ["save.done", "local.hit"]


def test_saves_that_fail_again_and_again_are_tried_once_a_day(house: House) -> None:
    house.rules(save={"exit": 3})
    assert [house.serve().events.count("save.failed") for _ in range(3)] == [2, 2, 2]
    resting = house.serve()
    assert resting.words == [str(house.model), "-tp", "2"]
    assert resting.events.count("save.failed") == 1
    assert "3 saves in a row failed, the next is tried in a day" in resting.stderr
    assert house.calls.count("save") == 3
    # What may decide of it has changed, or a person says so.
    assert house.serve(SHARDBOOT_SAVE_TIMEOUT="2h").events.count("save.failed") == 2
    house.rules()
    assert house.run("save", house.model, "-tp", 2).status == 0
    shutil.rmtree(house.local)
    assert house.serve().events[-2:] == ["save.done", "local.hit"]


def test_saves_that_were_told_to_stop_did_not_fail(house: House) -> None:
    house.rules(save={"hang": True})
    for _ in range(4):
        process = house.start("serve", house.model, "-tp", 2)
        house.wait_for("hanging")
        process.send_signal(signal.SIGTERM)
        assert house.finish(process).status == 128 + signal.SIGTERM
    assert house.plan()["action"] == "save"


def test_a_save_that_only_failed_is_tried_again(house: House) -> None:
    house.rules(save={"exit": 3})
    house.serve()
    house.rules()
    assert house.serve().events[-2:] == ["save.done", "local.hit"]


def test_a_save_by_an_answer_that_holds_no_more_comes_to_nothing_and_vllm_is_asked_anew(
    house: House,
) -> None:
    house.rules(save={"reads": {"kv_cache_dtype": "fp8"}})
    boot = house.serve()
    assert boot.words == [str(house.model), "-tp", "2"]
    assert "save.failed" in boot.events
    assert "kv_cache_dtype fp8, not auto" in boot.stderr
    assert house.calls.count("resolve") == 1
    house.rules()
    assert house.serve().events[-2:] == ["save.done", "local.hit"]
    assert house.calls.count("resolve") == 2
