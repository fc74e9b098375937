"""Who finds lines for people on stderr, and who JSON: on a terminal, in a pipe, as asked for."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from blackbox.harness import Boot, House
from blackbox.standing_by import supervised, wait_for_server
from blackbox.terminal import shown_by


@pytest.fixture
def house(house: House) -> House:
    """A house that leaves the format to its default."""
    del house.environ["SHARDBOOT_LOG_FORMAT"]
    return house


def entries(boot: Boot) -> list[dict[str, Any]]:
    """Return all that was said, which must be JSON throughout."""
    return [json.loads(line) for line in boot.stderr.splitlines()]


def test_a_boot_tells_people_on_a_terminal(house: House) -> None:
    status, shown = shown_by(house, "serve", house.model, "-tp", 2)
    assert status == 0
    assert "shardboot: save.done: " in shown
    assert f" [boot {house.attempts[-1]['boot']}]" in shown
    assert "{" not in shown


def test_a_boot_tells_programs_in_a_pipe(house: House) -> None:
    boot = house.serve()
    said = entries(boot)
    assert all(entry.keys() >= {"time", "boot", "event", "message"} for entry in said)
    assert {entry["boot"] for entry in said} == {house.attempts[-1]["boot"]}
    decided = said[-1]
    assert (decided["event"], decided["action"]) == ("local.hit", "reuse")
    assert decided["key"] == house.attempts[-1]["key"]
    assert decided["checkpoint"] == house.store.names()[0]


def test_a_boot_that_is_stopped_says_which_one_it_was(house: House) -> None:
    house.rules(save={"hang": True})
    process = house.start("serve", house.model, "-tp", 2)
    house.wait_for("hanging")
    process.send_signal(signal.SIGTERM)
    first, *_, last = entries(house.finish(process))
    assert (last["event"], last["status"]) == ("stopped", 143)
    assert last["boot"] == first["boot"] != ""


def test_every_boot_under_a_supervisor_tells_programs_in_a_pipe(house: House) -> None:
    house.serve()
    house.wait_for("serve")
    house.rules(serve={"answers": 200})
    with supervised(house) as process:
        os.kill(wait_for_server(house), signal.SIGKILL)
        wait_for_server(house)
        process.terminate()
        said = entries(house.finish(process))
    events = [entry["event"] for entry in said]
    assert events.count("local.hit") == 2
    assert "server.ended" in events
    assert len({entry["boot"] for entry in said if entry["event"] == "local.hit"}) == 2


def test_a_sidecar_tells_people_on_a_terminal_and_programs_in_a_pipe(house: House) -> None:
    words = ("sidecar", "--listen", "127.0.0.1:0")
    status, shown = shown_by(house, *words, end_after="sidecar.listening")
    assert status == 143
    assert "shardboot: sidecar.listening: http://" in shown
    assert "shardboot: stopped by signal 15" in shown
    process = house.start(*words)
    assert process.stderr is not None
    first = json.loads(process.stderr.readline())
    assert (first["boot"], first["event"]) == ("sidecar", "sidecar.listening")
    process.terminate()
    boot = house.finish(process)
    assert boot.status == 143
    assert entries(boot)[-1]["event"] == "stopped"


def test_a_command_that_somebody_types_tells_people_wherever_its_stderr_goes(house: House) -> None:
    saved = house.run("save", house.model, "-tp", 2)
    assert saved.events[-1] == "save.done"
    refused = house.run("show", "none-such")
    assert refused.stderr.startswith("shardboot: error: store.absent: ")
    for asked in ("--log-format=json", "--log-format json"):
        (told,) = entries(house.run("pull", *asked.split(), house.model, "-tp", 1))[-1:]
        assert (told["event"], told["status"]) == ("shared.absent", 31)
    assert entries(house.run("show", "none-such", SHARDBOOT_LOG_FORMAT="json"))[0]["status"] == 31


@pytest.mark.parametrize(
    ("file", "variable", "flags", "is_json"),
    [
        ("", None, (), True),
        ("text", None, (), False),
        ("text", "json", (), True),
        ("text", "json", ("--log-format", "text"), False),
        ("json", "text", ("--log-format=json",), True),
    ],
)
def test_a_start_that_fails_says_so_in_the_format_that_was_asked_for(
    house: House, file: str, variable: str | None, flags: tuple[str, ...], *, is_json: bool
) -> None:
    config = house.root / "shardboot.toml"
    config.write_text(f'log-format = "{file}"\n' if file else "")
    more = {"SHARDBOOT_CONFIG_FILE": config, "SHARDBOOT_LOG_FORMAT": variable}
    wrong = house.run("serve", *flags, house.model, SHARDBOOT_LOCAL_DIRR="/x", **more)
    assert (wrong.status, wrong.vllm) == (10, {})
    if is_json:
        (said,) = entries(wrong)
        assert (said["event"], said["status"]) == ("config.invalid", 10)
        assert said["hint"] == "did you mean SHARDBOOT_LOCAL_DIR?"
    else:
        assert wrong.stderr.startswith("shardboot: error: config.invalid: SHARDBOOT_LOCAL_DIRR: ")


def test_a_failing_start_tells_people_on_a_terminal(house: House) -> None:
    status, shown = shown_by(house, "serve", house.model, SHARDBOOT_LOCAL_DIRR="/x")
    assert status == 10
    assert shown.startswith("shardboot: error: config.invalid: ")


def test_a_commands_failure_is_json_where_the_file_asks_for_it(house: House) -> None:
    config = house.root / "shardboot.toml"
    config.write_text('log-format = "json"\n')
    boot = house.run("show", "none-such", SHARDBOOT_CONFIG_FILE=config)
    assert entries(boot)[0]["status"] == 31


def test_in_an_image_and_switched_off_what_there_is_to_say_is_json_as_well(house: House) -> None:
    config = house.root / "shardboot.toml"
    config.write_text("vllm = ")
    off = {"SHARDBOOT": "off", "SHARDBOOT_CONFIG_FILE": config}
    said = entries(house.run("enter", "lst", **off))
    assert [entry["event"] for entry in said] == ["image.model", "config.invalid"]
