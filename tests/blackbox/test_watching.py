"""`status`, `wait` and `health` beside boots of every kind; a stub answers HTTP in vLLM's place."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from blackbox import stub_http
from blackbox.harness import House, staged
from blackbox.stub_vllm import parser
from blackbox.watching import ANSWERS, STAYS, files, health, note, rewrite, serving
from serving import free_port


def test_health_follows_a_boot_from_its_start_to_its_end(house: House, port: int) -> None:
    with serving(house, "--port", port, **STAYS) as process:
        status, found = health(house)
        assert (status, found["healthy"], found["phase"]) == (1, False, "starting")
        assert (found["pid"], found["tier"], found["reason"]) == (process.pid, "local", "local.hit")
        assert found["checkpoint"] == house.store.names()[0]
        note(house, "loading")
        assert health(house)[1]["phase"] == "loading"
        note(house, "loaded", seconds=1.5)
        status, found = health(house)
        assert (status, found["phase"]) == (1, "loaded")
        assert "in 1.5 s" in found["text"]
    status, found = health(house)
    assert (status, found["phase"]) == (1, "failed")
    assert found["text"] == "exited after loading, before it served"


def test_health_is_that_of_vllm_and_the_first_answer_is_noted_once(house: House, port: int) -> None:
    with serving(house, "--port", port):
        answers = [health(house) for _ in range(3)]
        assert {(s, f["phase"], f["healthy"]) for s, f in answers} == {(0, "serving", True)}
        (noted,) = [entry for entry in house.ledger if entry["event"] == "healthy"]
        assert noted["boot"] == answers[0][1]["boot"]
        assert 0 < noted["seconds"] < 60
        house.rules(serve={"answers": 503})
        status, found = health(house)
        assert (status, found["phase"]) == (1, "unhealthy")
        assert "answers 503" in found["text"]
        house.rules(serve=ANSWERS)
        assert health(house)[0] == 0
        assert house.run("health").stdout == f"serving: local on http://*:{port}\n"
    assert health(house)[1]["phase"] == "stopped"


def pem(house: House) -> tuple[Path, Path]:
    cert, key = house.root / "cert.pem", house.root / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def on_a_socket(house: House, port: int) -> list[object]:
    return ["--uds", "v.sock"]  # relative to where serve was started


def over_tls(house: House, port: int) -> list[object]:
    cert, key = pem(house)
    return [f"--port={port}", "--ssl-certfile", cert, "--ssl-keyfile", key]


def tls_on_a_socket(house: House, port: int) -> list[object]:
    cert, key = pem(house)
    return ["--uds", house.root / "v.sock", f"--ssl-certfile={cert}", f"--ssl-keyfile={key}"]


@pytest.mark.parametrize(
    "words",
    [
        lambda _, port: ["--port", port],
        lambda _, port: ["--host", "127.0.0.1", "--port", 1, f"--port={port}"],
        lambda _, port: ["--host", "0.0.0.0", "--port", port],  # noqa: S104
        on_a_socket,
        over_tls,
        tls_on_a_socket,
    ],
)
def test_vllm_is_asked_where_its_words_put_it(
    house: House, port: int, words: Callable[[House, int], list[object]]
) -> None:
    with serving(house, *words(house, port)):
        assert health(house)[0] == 0
    # The address is none of what decides how vLLM reads the words.
    assert house.calls.count("resolve") == 1


def test_an_address_that_is_in_no_word_is_the_one_that_vllm_told(house: House) -> None:
    port = free_port()
    # As a YAML file that the words name would have it.
    house.rules(resolve={"change": {"server": {"port": port}}})
    house.serve("--max-model-len", 7)
    with serving(house, "--max-model-len", 7, **STAYS):
        assert health(house)[1]["address"] == f"http://*:{port}"


def test_a_remembered_answer_holds_no_port_of_an_earlier_boot(house: House) -> None:
    house.serve("--port", 1234)
    house.serve()
    assert health(house)[1]["address"] == "http://*:8000"
    assert house.calls.count("resolve") == 1


def test_a_node_without_http_is_healthy_once_its_weights_are_loaded(
    house: House, port: int
) -> None:
    house.serve("--headless")
    with serving(house, "--headless", **STAYS):
        assert health(house)[0] == 1
        note(house, "loading")
        assert health(house)[1]["phase"] == "loading"
        note(house, "loaded", seconds=1.0)
        assert health(house)[0] == 0
        assert house.ledger[-1]["event"] == "healthy"
    assert health(house)[0] == 1


def test_somebody_else_on_the_port_is_not_our_health(house: House, port: int) -> None:
    stub_http.listen(parser().parse_args(["m", "--port", str(port)]), lambda: 200)
    with serving(house, "--port", port, **STAYS):
        status, found = health(house)
        assert (status, found["phase"]) == (1, "starting")
        assert f"another process answers on http://*:{port}" in found["text"]
    assert "healthy" not in {entry["event"] for entry in house.ledger}


def test_a_save_is_told_while_it_runs(house: House) -> None:
    house.rules(save={"hang": True})
    process = house.start("serve", house.model, "-tp", 2)
    house.wait_for("hanging")
    status, found = health(house)
    assert (status, found["phase"], found["tier"]) == (1, "saving", "saved")
    assert (found["pid"], found["reason"]) == (process.pid, "local.absent")
    house.end_hanging()
    boot = house.finish(process)
    assert boot.events[-1] == "save.failed"
    assert health(house)[1]["action"] == "serve-source"


def test_how_far_a_save_is_is_told_within_seconds(house: House) -> None:
    began = time.time()
    house.rules(save={"hang": True})
    process = house.start("serve", house.model, "-tp", 2)
    house.wait_for("hanging")
    (staging,) = staged(house.local)
    (staging / "model-rank-0-part-0.safetensors").write_bytes(bytes(512))
    found = health(house)[1]
    while not found["done"] and time.time() - began < 20:
        found = health(house)[1]
    assert 512 <= found["done"] < found["total"]
    assert found["eta"] > 0
    assert found["text"].endswith(f"B of 1.1 KiB, {found['eta']:.0f} s to go")
    assert (found["phase"], found["tier"], found["pid"]) == ("saving", "saved", process.pid)
    assert began - 1 < found["started"] < time.time()
    house.end_hanging()
    house.finish(process)


def test_waiting_for_another_boot_is_told(house: House) -> None:
    house.serve()
    (house.local / house.store.names()[0]).rename(house.root / "away")
    (lock,) = house.local.glob(".*.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = house.start("serve", house.model, "-tp", 2)
        assert process.stderr is not None
        line = next(line for line in process.stderr if "lock.wait" in line)
        found = health(house)[1]
        assert found["phase"] == "waiting"
        assert found["text"] in line
    house.finish(process)


def test_a_refusal_is_a_failure_with_its_reason(house: House) -> None:
    boot = house.run("serve", "--on-miss", "refuse", house.model, "-tp", 2)
    assert boot.status == 31
    status, found = health(house)
    assert (status, found["phase"]) == (1, "failed")
    assert found["text"].startswith("local.absent: ")


def test_vllm_that_died_is_a_failure_with_how_far_it_came(house: House, port: int) -> None:
    house.rules(serve={"kill": signal.SIGKILL})
    house.serve()
    assert house.run("health").stdout == "failed: exited while starting\n"
    note(house, "loading")
    assert house.run("health").stdout == "failed: exited while loading the weights\n"


@pytest.mark.parametrize("rules", [{"exit": 1}, {"say": "no"}])
def test_a_boot_that_could_not_ask_vllm_is_watched_all_the_same(
    house: House, rules: dict[str, object]
) -> None:
    port = free_port()
    house.rules(resolve=rules, serve=ANSWERS)
    process = house.start("serve", house.model, "-tp", 2, "--port", port)
    house.wait_for("listening")
    status, found = health(house)
    assert (status, found["tier"], found["reason"]) == (0, "source", "engine.failed")
    assert "vLLM was not asked for its address" in found["text"]
    house.finish(process)
    (attempt,) = [entry for entry in house.ledger if entry["event"] == "attempt"]
    assert (attempt["action"], attempt["reason"]) == ("serve-source", "engine.failed")


def test_a_pid_that_another_process_has_by_now_is_no_life(house: House, port: int) -> None:
    with serving(house, "--port", port, **STAYS) as process:
        path = files(house)[-1]
        server = json.loads(path.read_text())["server"]
        assert server["pid"] == process.pid
        rewrite(path, server=server | {"pid": os.getpid()})
        assert health(house)[1]["phase"] == "failed"
        rewrite(path, server=server | {"host_boot": "another"})
        assert health(house)[1]["phase"] == "failed"


def test_a_process_of_another_container_is_not_taken_for_dead(house: House, port: int) -> None:
    with serving(house, "--port", port):
        path = files(house)[-1]
        server = json.loads(path.read_text())["server"]
        rewrite(path, server=server | {"pid": 1, "start": 1, "namespace": "pid:[1]"})
        assert health(house)[0] == 0
        house.rules(serve={"answers": 503})
        assert health(house)[1]["phase"] == "unhealthy"


@pytest.mark.parametrize("data", ["", "{", '{"boot": 3}', "\0" * 100])
def test_a_torn_status_is_as_good_as_none(house: House, data: str) -> None:
    house.serve()
    (path,) = files(house)
    path.write_text(data)
    assert "vLLM's default" in house.run("health").stdout
    assert house.run("status").stdout == f"{house.state}: no boot left a status\n"
    assert house.serve().events[-1] == "local.hit"


def test_without_a_state_directory_vllms_default_address_is_asked_and_that_is_said(
    house: House,
) -> None:
    house.state.write_text("")
    boot = house.serve()
    assert boot.events.count("state.unwritable") == 1
    for more in ({}, {"SHARDBOOT": "off"}):
        found = house.run("health", **more)
        assert "vLLM's default http://*:8000" in found.stdout
        assert found.stderr == ""


def test_switched_off_an_earlier_boot_is_not_meant(house: House) -> None:
    house.serve()
    assert health(house)[1]["phase"] == "failed"
    assert "vLLM's default" in health(house, SHARDBOOT="off")[1]["text"]


def test_the_server_that_runs_is_meant_and_status_shows_all(house: House, port: int) -> None:
    with serving(house, "--port", port) as first, serving(house, **STAYS) as second:
        house.rules(serve=ANSWERS)
        house.serve("--max-model-len", "x")
        assert health(house)[1]["pid"] == second.pid
        found = house.run("status", "--format", "json").json
        assert [each["pid"] for each in found] == [second.pid, first.pid]
        assert [each["phase"] for each in found] == ["starting", "serving"]
        rows = house.run("status").stdout.splitlines()
        assert len(rows) == 2
        assert rows[1].endswith(f"serving: local on http://*:{port}")
        assert str(first.pid) in rows[1]
    (row,) = house.run("status").stdout.splitlines()
    assert row.endswith("failed: exited while starting")


@pytest.mark.parametrize(
    "words", [["health", "--timeout", "soon"], ["wait", "--timeout"], ["status", "x"]]
)
def test_words_that_are_wrong_are_exit_2(house: House, words: list[str]) -> None:
    assert house.run(*words).status == 2


def test_health_does_not_wait_for_one_that_hangs(house: House, port: int) -> None:
    with serving(house, "--port", port) as process:
        process.send_signal(signal.SIGSTOP)
        status, found = health(house, "--timeout", "0.3s")
        process.send_signal(signal.SIGCONT)
    assert (status, found["phase"]) == (1, "unhealthy")
    assert found["text"].endswith("no answer within 0.3 s")
