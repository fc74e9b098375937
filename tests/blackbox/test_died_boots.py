"""What boots died of: a checkpoint is given up, or set aside, or excused, and for whom."""

from __future__ import annotations

import os

import pytest
from blackbox.harness import House

from entrypoint.checkpoint import manifest as manifests
from entrypoint.state import stops
from entrypoint.state.ledger import Ledger
from entrypoint.state.rejections import Rejections


@pytest.mark.parametrize(("told", "reason"), [(False, "local.quarantined"), (True, "local.hit")])
def test_boots_that_died_while_loading_quarantine_unless_they_were_told_to_stop(
    house: House, told: bool, reason: str
) -> None:
    house.serve()
    three_die_loading(house, told=told)
    found = house.run("plan", "--format", "json", house.model, "-tp", 2).json
    assert found["reason"] == reason


@pytest.mark.parametrize(
    ("events", "reason"),
    [(["loading"], "local.quarantined"), (["loading", "loaded"], "local.hit")],
)
def test_a_server_that_holds_a_checkpoint_excuses_others_only_once_it_has_loaded_it(
    house: House, events: list[str], reason: str
) -> None:
    house.serve()
    house.rules(serve={"stay": True})
    beside = house.start("serve", house.model, "-tp", 2)
    house.wait_for("staying")
    for event in events:
        about = {"boot": house.attempts[-1]["boot"], "event": event}
        assert Ledger(house.state).append(about)
    house.rules()
    three_die_loading(house)
    assert house.plan()["reason"] == reason
    house.finish(beside)
    assert house.plan()["reason"] == "local.quarantined"


def three_die_loading(house: House, *, told: bool = False) -> None:
    before = len(house.attempts)
    for _ in range(3):
        # Of those that never came to loading, as these did not yet, the net is wider.
        house.serve("--port", "1", SHARDBOOT_QUARANTINE_AFTER=9)
    for entry in house.attempts[before:]:
        about = {"boot": entry["boot"], "event": "loading"}
        assert Ledger(house.state).append(about)
        note = stops.open_note(house.state, entry["boot"])
        assert note is not None
        os.write(note, b"told" if told else b"")
        os.close(note)


def test_a_checkpoint_that_no_boot_came_to_loading_takes_turns_with_the_source(
    house: House,
) -> None:
    house.serve()
    house.serve()
    house.serve("--port", "1")
    assert house.plan()["reason"] == "local.never-loaded"
    boots = [house.serve() for _ in range(4)]
    assert [house.attempts[-4 + n]["reason"] for n in range(4)] == [
        *("local.never-loaded", "local.hit", "local.never-loaded", "local.hit"),
    ]
    assert boots[0].words == [str(house.model), "-tp", "2"]
    assert "3 boots in a row died before they began to load it" in boots[0].stderr
    assert not any((house.state / "rejections").glob("*"))
    assert Ledger(house.state).append({"boot": house.attempts[-1]["boot"], "event": "loading"})
    assert house.plan()["reason"] == "local.hit"


@pytest.mark.parametrize("changed", ["words", "environment", "refusing", "no source", "elsewhere"])
def test_it_is_not_set_aside_where_that_would_not_help(house: House, changed: str) -> None:
    for _ in range(3):
        house.serve()
    checkpoint = house.local / house.attempts[-1]["checkpoint"]
    assert house.plan()["reason"] == "local.never-loaded"
    match changed:
        case "words":
            found = house.plan("--max-model-len", 7)
        case "environment":
            found = house.plan(VLLM_TARGET_DEVICE="another")
        case "refusing":
            found = house.plan(SHARDBOOT_ON_FAILURE="refuse")
            assert house.plan(SHARDBOOT_ON_MISS="refuse")["reason"] == "local.hit"
        case "no source":
            for _ in range(3):
                house.run("serve", checkpoint, "-tp", 2)
            found = house.run("plan", "--format", "json", checkpoint, "-tp", 2).json
        case _:
            house.model.rename(house.root / "moved")
            found = house.plan(SHARDBOOT_CHECKPOINT=checkpoint.name)
    assert (found["action"], found["reason"]) == ("reuse", "local.hit")


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_boots_died_on_is_not_copied_again_from_the_shared_store(
    house: House, is_kept: bool
) -> None:
    house.serve()
    house.shared_copy()
    (house.root / "local-before").rename(house.local)
    three_die_loading(house)
    if not is_kept:
        # As on a state directory that can be read and not written.
        (house.state / "rejections").write_text("")
    decided = house.plan(SHARDBOOT_SHARED=house.shared)
    boot = house.serve(SHARDBOOT_SHARED=house.shared)
    assert boot.words == [str(house.model), "-tp", "2"]
    assert (boot.events[-1], decided["reason"]) == ("local.quarantined", "local.quarantined")
    assert (decided["action"], decided["findings"]["shared"]["kind"]) == (
        "serve-source",
        "quarantined",
    )
    assert "copy.done" not in boot.events


def test_what_does_not_fit_the_engine_of_some_words_is_served_for_others(house: House) -> None:
    first = house.serve()
    (name,) = house.store.names()
    manifest = manifests.decode(house.store.read_manifest(name))
    Rejections(house.state).add(manifest.content, "unfit", "shape", first.loader["asked"])
    assert house.serve().events[-1] == "local.unfit"
    assert house.serve("--max-model-len", 9).events[-1] == "local.hit"
    assert house.calls.count("save") == 1
