"""`history`, `timeline` and `blame`: what boots have left, told afterwards."""

from __future__ import annotations

import json
import signal
from typing import Any

from blackbox.harness import House
from blackbox.watching import STAYS, health, note, serving


def timeline(house: House, *words: object) -> Any:
    return house.run("timeline", "--format", "json", *words).json


def phases(found: Any) -> list[str]:
    return [phase["phase"] for phase in found["phases"]]


def test_a_boot_has_one_name_in_log_loader_ledger_status_and_timeline(house: House) -> None:
    boot = house.serve(SHARDBOOT_LOG_FORMAT="json")
    names = {json.loads(line)["boot"] for line in boot.stderr.splitlines()}
    names |= {boot.loader["boot"], house.attempts[-1]["boot"]}
    names |= {found["boot"] for found in house.run("status", "--format", "json").json}
    names |= {found["boot"] for found in house.run("history", "--format", "json").json}
    names |= {timeline(house)["boot"], house.run("blame", "--format", "json").json["boot"]}
    assert len(names) == 1
    assert {entry["boot"] for entry in house.ledger} == names


def test_a_boot_that_saves_leaves_what_it_did_in_one_line(house: House) -> None:
    house.serve()
    [attempt] = house.attempts
    assert [phase["phase"] for phase in attempt["phases"]] == ["deciding", "saving"]
    found = timeline(house)
    assert phases(found)[:2] == ["decide", "save"]
    assert found["phases"][1]["bytes"] > 0
    assert (found["tier"], found["reason"]) == ("saved", "local.hit")


def test_a_hit_leaves_no_more_lines_than_before(house: House) -> None:
    house.serve()
    before = len(house.ledger)
    house.serve()
    assert len(house.ledger) == before + 1
    assert [phase["phase"] for phase in house.attempts[-1]["phases"]] == ["deciding"]


def test_a_copy_is_told_with_its_bytes(house: House) -> None:
    house.serve()
    house.shared_copy()
    house.run("serve", "--shared", house.shared, house.model, "-tp", 2)
    found = timeline(house)
    assert phases(found)[:2] == ["decide", "copy"]
    assert found["phases"][1]["bytes"] > 0


def test_a_boot_that_is_under_way_goes_on_and_one_that_was_killed_does_not(
    house: House, port: int
) -> None:
    with serving(house, "--port", port, **STAYS) as process:
        assert timeline(house)["outcome"] == "under-way"
        note(house, "loading")
        process.send_signal(signal.SIGKILL)
    assert timeline(house)["outcome"] == "died"


def test_who_asks_for_health_ends_the_last_phase(house: House, port: int) -> None:
    with serving(house, "--port", port):
        note(house, "serving")
        health(house)
        assert phases(timeline(house))[-1] == "health"
    assert timeline(house)["outcome"] == "served"


def test_a_refusal_is_listed_with_its_reason(house: House) -> None:
    house.run("serve", "--on-miss", "refuse", house.model, "-tp", 2)
    [found] = house.run("history", "--format", "json").json
    assert (found["outcome"], found["reason"]) == ("refused", "local.absent")
    head, row = house.run("history").stdout.splitlines()
    assert head.startswith("boot ")
    assert {found["boot"], "refused", "local.absent"} <= set(row.split())


def test_a_boot_may_be_named_by_how_it_begins(house: House) -> None:
    for _ in range(2):
        house.serve()
    first, last = (found["boot"] for found in house.run("history", "--format", "json").json)
    assert timeline(house)["boot"] == last
    assert timeline(house, first)["boot"] == first
    assert timeline(house, last[:4])["boot"] == last
    [found] = house.run("history", "--last", 1, "--format", "json").json
    assert found["boot"] == last


def test_what_is_not_known_is_said(house: House) -> None:
    assert house.run("history").stdout == "no boot is known here\n"
    assert house.run("history", "--format", "json").json == []
    for command in ("timeline", "blame"):
        found = house.run(command)
        assert found.status == 31
        assert "no boot is known here" in found.stderr
    house.serve()
    found = house.run("timeline", "1999")
    assert (found.status, "1999: no such boot" in found.stderr) == (31, True)


def test_pictures_and_pages_go_where_they_are_told(house: House) -> None:
    house.serve()
    svg, html = house.root / "boot.svg", house.root / "boot.html"
    said = house.run("timeline", "--svg", svg, "--html", html).stdout
    assert "save " in said
    assert "#" in said
    assert svg.read_text().startswith("<svg ")
    assert "</svg>" in html.read_text()
    found = house.run("timeline", "--svg", house.root / "none" / "x.svg")
    assert (found.status, found.stdout) == (60, "")


def test_looking_back_changes_nothing(house: House) -> None:
    house.serve()
    before = {path: path.stat().st_mtime_ns for path in house.state.rglob("*")}
    for command in ("history", "timeline", "blame"):
        assert house.run(command).status == 0
    assert {path: path.stat().st_mtime_ns for path in house.state.rglob("*")} == before
