"""scripts/rolling-upgrade between two stubs: what it does, and how it goes back from every step."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from blackbox.upgrading import World

STEPS = ["1/4 checkpoint", "2/4 start", "3/4 check", "4/4 move", "4/4 drain", "4/4 stop"]
ACTS = ("save", "start", "enable", "move", "stop", "disable")
ENDING = {
    "systemd": "systemctl stop shardboot-checkpoint-b.service",
    "podman": "podman stop --ignore --time 30 b-checkpoint",
}
MOMENTS = [f"{when} {act}" for act in ACTS for when in ("before", "after")]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path / "systemd", "systemd") as made:
        yield made


@pytest.fixture(params=["systemd", "podman"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with World(tmp_path / request.param, request.param) as made:
        yield made


def test_the_new_one_starts_beside_the_old_one_which_stops_last(either: World) -> None:
    done = either.upgrade()
    assert done.status == 0, done.said
    assert done.steps == STEPS
    assert done.last == "rolling-upgrade: done: b serves, a has stopped"
    enabling, disabling = (["enable b"], ["disable a"]) if either.kind == "systemd" else ([], [])
    moving = f"move {either.address('b')}"
    assert either.acts == ["save b", "start b", *enabling, moving, "stop a", *disabling]
    assert either.is_upgraded()


def test_an_upgrade_that_is_done_is_found_done(either: World) -> None:
    assert either.upgrade().status == 0
    pid = either.pid("b")
    either.forget()
    again = either.upgrade()
    assert again.status == 0, again.said
    assert either.pid("b") == pid
    assert not [act for act in either.acts if act.split()[0] in {"save", "start", "enable"}]
    assert either.is_upgraded()


def test_what_is_in_the_shared_store_is_copied(world: World) -> None:
    world.rules("b", plan="copy")
    assert world.upgrade().status == 0
    assert world.acts[0] == "pull b"


def test_a_checkpoint_that_is_there_is_not_made_again(world: World) -> None:
    (world.home / "checkpoint").touch()
    done = world.upgrade("--checkpoint", "require")
    assert done.status == 0
    assert world.acts[0] == "start b"
    assert "1/4 checkpoint: local.hit: so it is" in done.said


FAILURES: dict[str, tuple[list[str], dict[str, object], list[str], str, str]] = {
    "plan": (["plan"], {}, [], "1/4 checkpoint", "this plan failed"),
    "required": ([], {}, ["--checkpoint", "require"], "1/4 checkpoint", "local.absent"),
    "save": (["save"], {}, [], "1/4 checkpoint", "save failed"),
    "nothing saved": ([], {"makes": False}, [], "1/4 checkpoint", "local.absent"),
    "start": (["start"], {}, [], "2/4 start", "start failed"),
    "ends": ([], {"dies": 3}, [], "2/4 start", "b has ended: "),
    "never healthy": ([], {"health": 503}, ["--start-timeout", "1s"], "2/4 start", "within 1 s"),
    "other name": ([], {"names": ["other"]}, [], "3/4 check", "does not serve ['tiny'], but"),
    "completion": ([], {"completion": 500}, [], "3/4 check", 'status 500: {"error": {"message": '),
    "no text": ([], {"text": ""}, [], "3/4 check", "no text: "),
    "check": ([], {}, ["--check", "false"], "3/4 check", "false: exit status 1"),
    "move": (["move"], {}, [], "4/4 move", "move failed"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_what_fails_leaves_all_as_before_and_says_where_and_why(
    failure: str, either: World
) -> None:
    fails, rules, words, step, why = FAILURES[failure]
    pid = either.pid("a")
    either.fail(*fails)
    either.rules("b", **rules)
    done = either.upgrade(*words)
    assert done.status == 1, done.said
    assert done.last.startswith(f"rolling-upgrade: failed at {step}: ")
    assert why in done.last
    assert "; requests go to a as before, b " in done.last
    assert either.is_as_before(pid)
    assert "stop a" not in either.acts

    either.fail()
    either.rules("b")
    again = either.upgrade()
    assert again.status == 0, again.said
    assert either.is_upgraded()


def test_requests_go_back_when_the_new_one_falls_ill_before_the_old_one_has_stopped(
    either: World,
) -> None:
    pid = either.pid("a")
    either.rules("a", load=1)
    process = either.begin()
    either.wait_for_act(f"move {either.address('b')}")
    either.rules("b", health=500)
    done = either.finish(process)
    assert done.status == 1
    assert "failed at 4/4 drain: " in done.last
    assert done.last.endswith("; requests go to a again, b was stopped")
    assert either.is_as_before(pid)


def test_requests_go_back_when_they_get_no_answer_where_clients_come_in(world: World) -> None:
    pid = world.pid("a")
    done = world.upgrade("--front", "http://127.0.0.1:1")
    assert done.status == 1
    assert "failed at 4/4 move: http://127.0.0.1:1/v1/completions: " in done.last
    assert world.is_as_before(pid)


def test_nobody_is_stopped_when_there_is_no_way_back(world: World) -> None:
    world.start("b")
    os.kill(world.pid("a"), signal.SIGKILL)
    (world.home / "where").write_text(world.address("b"))
    world.rules("b", completion=500)
    done = world.upgrade()
    assert done.status == 3
    assert "and the way back failed: a does not answer" in done.last
    assert world.lives("b")
    assert world.where() == "b"


def test_the_old_one_stops_only_when_its_requests_are_answered(either: World) -> None:
    looks = either.home / "looks"
    either.rules("a", load=1, looks=str(looks))
    process = either.begin()
    either.wait_for_act(f"move {either.address('b')}")
    seen = either.count(looks)
    # Without that request two would do.
    either.wait_for_lines(looks, seen + 5)
    assert process.poll() is None
    assert either.lives("a")
    either.rules("a")
    assert either.finish(process).status == 0
    assert either.is_upgraded()


def test_an_old_one_that_is_never_idle_stops_at_last(world: World) -> None:
    world.rules("a", load=2)
    done = world.upgrade("--drain-timeout", "1s")
    assert done.status == 0
    assert "4/4 drain: time is over; a stops with requests left: 2\n" in done.said
    assert world.is_upgraded()


def test_an_old_one_that_does_not_stop_is_told_of_and_stopped_by_the_next_run(
    world: World,
) -> None:
    world.fail("stop")
    done = world.upgrade()
    assert done.status == 3
    assert "failed at 4/4 stop: " in done.last
    assert done.last.endswith("; b serves; run this again")
    assert (world.where(), world.lives("a"), world.lives("b")) == ("b", True, True)
    world.fail()
    assert world.upgrade().status == 0
    assert world.is_upgraded()


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_it_goes_on_with_the_next_run(moment: str, world: World) -> None:
    world.kill_at(moment)
    killed = world.upgrade()
    assert killed.status == -signal.SIGKILL, killed.said
    # Whoever has the requests is there for them.
    assert world.lives(world.where())
    done = world.upgrade()
    assert done.status == 0, done.said
    assert world.is_upgraded()


@pytest.mark.parametrize("moment", ["before move", "after move", "before stop", "after stop"])
def test_killed_on_the_way_back_it_goes_back_with_the_next_run(moment: str, world: World) -> None:
    pid = world.pid("a")
    world.rules("b", completion=500)
    world.start("b")
    (world.home / "where").write_text(world.address("b"))
    world.kill_at(moment)
    assert world.upgrade().status == -signal.SIGKILL
    assert world.lives(world.where())
    assert world.upgrade().status == 1
    assert world.is_as_before(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_a_way_back(number: signal.Signals, world: World) -> None:
    pid = world.pid("a")
    world.rules("b", health=503)
    process = world.begin()
    world.wait_until_it_lives("b")
    process.send_signal(number)
    done = world.finish(process)
    assert done.status == 1
    assert f"failed at 2/4 start: signal {int(number)}; " in done.last
    assert world.is_as_before(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_on_the_way_back_is_heard_and_ends_nothing(
    number: signal.Signals, world: World
) -> None:
    pid = world.pid("a")
    world.rules("a", load=1)
    process = world.begin()
    world.wait_for_act(f"move {world.address('b')}")
    # Unwell, and with a request that holds the way back up.
    world.rules("b", health=500, load=1)
    world.wait_for_act(f"move {world.address('a')}")
    process.send_signal(number)
    world.rules("b")
    done = world.finish(process)
    assert done.status == 1, done.said
    assert f"signal {int(number)}: heard, " in done.said
    assert "failed at 4/4 drain: " in done.last
    assert world.is_as_before(pid)


def test_a_save_is_stopped_on_the_way_back(either: World) -> None:
    pid = either.pid("a")
    either.rules("b", endless=True)
    process = either.begin()
    either.wait_until_it_lives(either.errand)
    process.send_signal(signal.SIGINT)
    done = either.finish(process)
    assert done.status == 1, done.said
    assert "failed at 1/4 checkpoint: signal 2; " in done.last
    assert not either.lives(either.errand)
    assert either.is_as_before(pid)


@pytest.mark.parametrize("checkpoint", ["make", "any"])
def test_a_save_of_a_killed_upgrade_is_stopped_by_the_next_one(
    checkpoint: str, either: World
) -> None:
    either.rules("b", endless=True)
    process = either.begin()
    either.wait_until_it_lives(either.errand)
    process.kill()
    either.finish(process)
    assert either.lives(either.errand)
    assert f"would run: {ENDING[either.kind]}" in either.upgrade("--dry-run").said
    assert either.lives(either.errand)
    either.rules("b")
    done = either.upgrade("--checkpoint", checkpoint)
    assert done.status == 0, done.said
    assert "1/4 checkpoint: what an upgrade that was killed had begun was stopped" in done.said
    assert not either.lives(either.errand)
    assert either.is_upgraded()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"# M\xfcnchen", "not UTF-8, at byte "),
        (b"WORDS=/models/llama 'x", "WORDS: no closing quotation"),
        (b"PODMAN='", "PODMAN: no closing quotation"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(line: bytes, why: str, tmp_path: Path) -> None:
    with World(tmp_path / "podman", "podman") as world:
        pid = world.pid("a")
        path = world.home / "env" / "b.env"
        path.write_bytes(path.read_bytes() + line + b"\n")
        done = world.upgrade()
        assert done.status == 1
        assert f"failed at 1/4 checkpoint: {path}: {why}" in done.last
        assert world.is_as_before(pid)


def test_of_two_at_once_one_is_refused(world: World) -> None:
    world.rules("b", health=503)
    process = world.begin()
    world.wait_for_act("start b")
    world.forget()
    second = world.upgrade()
    assert second.status == 41
    assert second.last.startswith("rolling-upgrade: refused: another upgrade is under way")
    assert world.acts == []
    world.rules("b")
    assert world.finish(process).status == 0


def test_a_dry_run_tells_the_steps_and_takes_none(either: World) -> None:
    pid = either.pid("a")
    told = either.upgrade("--dry-run")
    assert told.status == 0, told.said
    assert told.steps == STEPS
    assert "would run: " in told.said
    assert either.acts == []
    assert either.is_as_before(pid)


def test_what_others_need_is_not_touched(world: World) -> None:
    pid = world.pid("a")
    with socket.create_server(("127.0.0.1", world.ports["b"])):
        taken = world.upgrade()
    other = world.finish(world.begin(ends=[f"c={world.ports['a']}", f"b={world.ports['b']}"]))
    (world.home / "where").write_text("127.0.0.1:9")
    elsewhere = world.upgrade()
    for done, why in (
        (taken, "b does not run, but somebody listens at"),
        (other, "c does not run, but somebody listens at"),
        (elsewhere, "wrong words?"),
    ):
        assert done.status == 2
        assert why in done.last
    assert world.acts == []
    assert world.pid("a") == pid


@pytest.mark.parametrize(
    "words", [("a=1", "b"), ("a=1", "a=2"), ("a=1", "b=1"), ("a=1", "-b=2"), ("a=1", "b=65536")]
)
def test_words_that_cannot_be_meant_are_refused(words: tuple[str, str], world: World) -> None:
    done = world.finish(world.begin(ends=words))
    assert done.status == 2, done.said
    assert world.acts == []


def test_other_words_that_cannot_be_meant_are_refused_and_named(world: World) -> None:
    file = world.home / "key"
    file.write_text("do-not-tell\nthis")
    key = {"SHARDBOOT_VLLM_API_KEY_FILE": str(file)}
    for done, why in (
        (world.upgrade("--check", "'"), "--check: no closing quotation"),
        (world.upgrade(**key), f"{file}: expected a key that a header can bring"),
        (world.upgrade("--lock", str(world.home)), f"{world.home}: Is a directory"),
    ):
        assert done.status == 2, done.said
        assert done.last == f"rolling-upgrade: refused: {why}"
    assert world.acts == []


def test_a_key_is_sent_and_never_shown(world: World) -> None:
    file = world.home / "key"
    file.write_text("do-not-tell\n")
    world.rules("b", key="do-not-tell")
    assert world.upgrade().status == 1
    done = world.upgrade(SHARDBOOT_VLLM_API_KEY_FILE=str(file))
    assert done.status == 0, done.said
    assert "do-not-tell" not in done.said
