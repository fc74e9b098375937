"""scripts/rolling-upgrade behind a real nginx, with the example that is shipped, under load."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from answers import NAME
from blackbox.upgrading import World
from steady_load import Load

TOKENS = 20
PAUSE = {"pause": 0.03}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path / "systemd", "systemd", behind_nginx=True) as made:
        made.rules("a", **PAUSE)
        made.rules("b", **PAUSE)
        yield made


def load_on(world: World) -> Load:
    assert world.front
    return Load(world.front.port, NAME, TOKENS, fresh=2, kept=2, stream=2)


def test_no_request_is_lost_on_an_upgrade(world: World) -> None:
    with load_on(world) as load:
        load.wait_for(20)
        done = world.upgrade("--front", f"http://127.0.0.1:{load.port}")
        load.wait_for(20)
    print(f"answered {dict(load.answered)}, lost {len(load.lost)}")
    assert done.status == 0, done.said
    assert load.lost == []
    assert world.is_upgraded()


@pytest.mark.parametrize("step", ["3/4 check", "4/4 drain"])
def test_no_request_is_lost_on_the_way_back(step: str, world: World) -> None:
    pid = world.pid("a")
    with load_on(world) as load:
        load.wait_for(20)
        if step == "3/4 check":
            world.rules("b", **PAUSE, completion=500)
            done = world.upgrade()
        else:
            # It answers, but is not well, once requests go there.
            world.rules("a", **PAUSE, load=1)
            process = world.begin()
            world.wait_for_act("reload nginx")
            world.rules("b", **PAUSE, health=500)
            done = world.finish(process)
        load.wait_for(20)
    print(f"answered {dict(load.answered)}, lost {len(load.lost)}")
    assert done.status == 1, done.said
    assert done.last.startswith(f"rolling-upgrade: failed at {step}: ")
    assert load.lost == []
    assert world.is_as_before(pid)


def test_a_long_stream_ends_where_it_began(world: World) -> None:
    assert world.front
    world.rules("a", pause=0.15)
    with Load(world.front.port, NAME, TOKENS, stream=1) as load:
        load.wait_for(1)
        load.begun.clear()
        load.begun.wait(30)
        done = world.upgrade()
        load.stop()
    assert done.status == 0, done.said
    assert load.lost == []


def test_a_request_that_is_still_being_sent_is_waited_for(world: World) -> None:
    assert world.front
    body = json.dumps({"model": NAME, "prompt": "long", "max_tokens": TOKENS}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", world.front.port)) as client:
        # Some worker has begun to read it, and no server knows of it yet.
        client.sendall(head + body[:9])
        process = world.begin()
        world.wait_for_act("reload nginx")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        client.sendall(body[9:])
        answer = b"".join(iter(lambda: client.recv(65_536), b""))
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    assert world.finish(process).status == 0
    assert world.is_upgraded()


@pytest.mark.parametrize("act", ["test", "reload"])
def test_what_nginx_does_not_take_leaves_all_as_before(act: str, world: World) -> None:
    pid = world.pid("a")
    process = world.begin()
    world.wait_for_act("start b")
    world.fail(act)
    done = world.finish(process)
    assert done.status == (1 if act == "test" else 3), done.said
    assert "failed at 4/4 move: nginx " in done.last
    assert f"{act} failed" in done.last
    world.fail()
    world.rules("b", completion=500)
    assert world.upgrade().status == 1
    assert world.is_as_before(pid)


@pytest.mark.parametrize("moment", ["before test", "before reload", "after reload"])
def test_killed_while_requests_move_it_goes_on_with_the_next_run(moment: str, world: World) -> None:
    with load_on(world) as load:
        load.wait_for(10)
        process = world.begin()
        world.wait_for_act("start b")
        world.kill_at(moment)
        killed = world.finish(process)
        assert killed.status == -signal.SIGKILL, killed.said
        load.wait_for(10)
        done = world.upgrade()
        load.wait_for(10)
    assert done.status == 0, done.said
    assert load.lost == []
    assert world.is_upgraded()


def test_a_file_that_nginx_does_not_read_is_refused(world: World) -> None:
    assert world.front
    other = world.home / "other"
    other.write_text(world.front.file.read_text())
    world.front.file = other
    done = world.upgrade()
    assert done.status == 2
    assert f"nginx does not read {other}" in done.last
    assert world.acts == ["test nginx"]
