"""Units on a machine that systemd has booted: starts, crashes, stops and reboots.

vLLM is a stub: what matters is what systemd, signals and shardboot do to each other. All share one
machine, and one file, since a Debian to boot takes half a minute to make.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from container.image import podman
from serving import free_port
from systemd.harness import (
    DATA,
    INSTALL,
    MODEL,
    OPT,
    SECONDS,
    SHARED,
    SIDECAR,
    START,
    START_SIDECAR,
    UNIT,
    Machine,
    binary,
)
from systemd.images import SERVICE, as_quadlet, composed, imported

MOST_EXPOSURE = {"shardboot@.service": 2.7, "shardboot-sidecar.service": 1.8}
"""What `systemd-analyze security` may say at most; 10 is no sandbox at all."""

SLOW_READS = """\
import os, time
real = os.preadv
def preadv(descriptor, *words):
    if "/model-rank-7-" in os.readlink(f"/proc/self/fd/{descriptor}"):
        time.sleep(1000)
    return real(descriptor, *words)
os.preadv = preadv
"""


@pytest.fixture(scope="module")
def installed(machine: Machine) -> Machine:
    machine.type(INSTALL)
    return machine


@pytest.fixture(scope="module")
def quadlet(installed: Machine) -> str:
    """The unit that quadlet makes of our file."""
    made = installed.type(f"""
        mkdir -p {DATA}/quadlet
        cp scripts/systemd/shardboot@.container {DATA}/quadlet
        QUADLET_UNIT_DIRS={DATA}/quadlet /usr/libexec/podman/quadlet -dryrun 2>/dev/null
    """)
    return made.partition("---shardboot@.service---\n")[2]


@pytest.fixture(scope="module")
def image(machine: Machine) -> Iterator[str]:
    with imported(machine) as tag:
        yield tag


@pytest.fixture
def node(installed: Machine) -> Iterator[Machine]:
    yield installed
    installed.rules()
    installed.type(f"""
        systemctl stop 'shardboot@*' {SIDECAR}
        systemctl disable --quiet {UNIT} {UNIT}-2 {SIDECAR}
        systemctl reset-failed
        rm -rf /etc/systemd/system/{UNIT}.service.d {DATA}/* {DATA}/.??* {SHARED}/*
        systemctl daemon-reload
    """)


def start(node: Machine, *more: str, check: bool = True) -> int:
    """Start a server as the README says, on a port of its own, with more lines in its file."""
    port = free_port()
    text = START.replace("-tp 8\n", "\n".join([f"-tp 8 --port {port}", *more, ""]))
    assert text != START
    node.type(text, check=check)
    return port


def drop_in(node: Machine, *lines: str) -> None:
    text = "\\n".join(["[Service]", *lines])
    node.type(f"""
        mkdir -p /etc/systemd/system/{UNIT}.service.d
        printf '{text}\\n' >/etc/systemd/system/{UNIT}.service.d/test.conf
        systemctl daemon-reload
    """)


@pytest.mark.parametrize("unit", [UNIT, SIDECAR])
def test_the_units_are_what_systemd_expects_and_sandboxed(installed: Machine, unit: str) -> None:
    assert installed.run("systemd-analyze", "verify", f"/etc/systemd/system/{unit}.service") == ""
    # The file itself, without what these tests need.
    file = f"{unit.replace('llama', '')}.service"
    words = ("security", "--no-pager", "--offline=yes", f"scripts/systemd/{file}")
    said = installed.run("systemd-analyze", *words)
    (exposure,) = re.findall(r"Overall exposure level.*: (\d+\.\d)", said)
    print(f"exposure {exposure}")
    assert float(exposure) <= MOST_EXPOSURE[file]


def test_started_means_that_vllm_serves_and_status_says_so(node: Machine) -> None:
    port = start(node)
    shown = node.show()
    assert (shown["ActiveState"], shown["SubState"]) == ("active", "running")
    assert shown["StatusText"] == f"serving: saved on http://*:{port}"
    assert f'Status: "{shown["StatusText"]}"' in node.run("systemctl", "status", UNIT)
    assert "save.done" in node.events()
    process = dict(
        line.split(":\t")
        for line in node.run("cat", f"/proc/{shown['MainPID']}/status").splitlines()
    )
    assert node.run("id", "-u", "vllm").split() == process["Uid"].split()[:1]
    assert int(process["CapBnd"], 16) == 0
    assert (process["NoNewPrivs"], process["Seccomp"]) == ("1", "2")


def test_after_a_reboot_it_serves_the_same_checkpoint(node: Machine) -> None:
    start(node)
    node.reboot()
    node.wait_until(ActiveState="active")
    assert node.attempts() == ["save: local.absent", "local.hit"]


@pytest.mark.parametrize("victim", ["vllm", "worker"])
def test_a_crash_is_a_local_hit_a_moment_later(node: Machine, victim: str) -> None:
    start(node)
    before = node.processes()
    main, worker = before
    node.type(f"kill -KILL {main if victim == 'vllm' else worker}")
    killed = time.monotonic()
    shown = node.wait_until(ActiveState="active", NRestarts="1")
    print(f"{victim}: {time.monotonic() - killed:.1f} s until it serves again")
    assert node.attempts() == ["save: local.absent", "local.hit"]
    assert shown["StatusText"].startswith("serving: local on ")
    assert not set(before) & set(node.processes())


def test_with_a_standby_a_crash_is_no_business_of_systemds(node: Machine) -> None:
    node.type(f"""
        install -m 644 -D scripts/systemd/standby.conf /etc/systemd/system/{UNIT}.service.d/a.conf
        systemctl daemon-reload
    """)
    start(node)
    supervisor = node.show()["MainPID"]
    for command in ("kill -KILL {}", f"systemctl reload {UNIT}"):
        before = node.server()
        node.type(command.format(before))
        node.server(but=before)
        shown = node.wait_until(StatusText="serving: local on ")
        assert (shown["MainPID"], shown["NRestarts"]) == (supervisor, "0")
        assert before not in node.processes()
    stopping = time.monotonic()
    node.type(f"systemctl stop {UNIT}")
    print(f"stopped within {time.monotonic() - stopping:.1f} s")
    shown = node.show()
    assert (shown["ActiveState"], shown["Result"]) == ("inactive", "success")
    assert node.processes() == []
    assert node.attempts() == ["save: local.absent", "local.hit", "local.hit"]


@pytest.fixture
def standby(node: Machine) -> Machine:
    """A machine whose servers have a standby, and whose systemd wants to hear of them."""
    node.type(f"""
        install -m 644 -D scripts/systemd/standby.conf /etc/systemd/system/{UNIT}.service.d/a.conf
    """)
    drop_in(node, "WatchdogSec=3s")
    return node


def test_with_a_standby_a_server_that_hangs_is_replaced_and_a_reboot_serves_again(
    standby: Machine,
) -> None:
    start(standby, "SHARDBOOT_HANG_TIMEOUT=1s")
    supervisor = standby.show()["MainPID"]
    hangs = standby.server()
    standby.type(f"kill -STOP {hangs}")
    standby.server(but=hangs)
    shown = standby.wait_until(StatusText="serving: local on ")
    assert (shown["MainPID"], shown["NRestarts"]) == (supervisor, "0")
    assert hangs not in standby.processes()
    assert "(it hung)" in standby.log()
    standby.reboot()
    standby.wait_until(ActiveState="active")
    assert standby.attempts() == ["save: local.absent", "local.hit", "local.hit"]


def test_with_a_standby_what_hangs_is_systemds_to_start_again_if_nobody_else_is_to(
    standby: Machine,
) -> None:
    start(standby)
    before = standby.processes()
    standby.type(f"kill -STOP {standby.server()}")
    shown = standby.wait_until(ActiveState="active", NRestarts="1", StatusText="serving: local on ")
    assert "Watchdog timeout" in standby.log()
    assert not set(before) & set(standby.processes())
    assert shown["Result"] == "success"


def test_a_stop_during_a_copy_is_a_clean_end_and_the_next_start_goes_on(node: Machine) -> None:
    start(node)
    node.type(f"chown vllm {SHARED}; {OPT}/bin/shardboot push --shared {SHARED} {MODEL} -tp 8")
    node.type(f"systemctl stop {UNIT}; rm -rf {DATA}/checkpoints")
    (node.data / "sitecustomize.py").write_text(SLOW_READS)
    drop_in(node, f"Environment=PYTHONPATH={DATA}")
    node.type(f"systemctl start --no-block {UNIT}")
    node.wait_until(StatusText="copying: ")
    stopping = time.monotonic()
    node.type(f"systemctl stop {UNIT}")
    assert time.monotonic() - stopping < 10
    shown = node.show()
    assert (shown["ActiveState"], shown["Result"]) == ("inactive", "success")
    assert node.processes() == []
    assert len(list((node.data / "checkpoints" / ".staging").iterdir())) == 1
    (node.data / "sitecustomize.py").unlink()
    node.type(f"systemctl start {UNIT}")
    assert "copy.resumed" in node.events()
    assert node.attempts() == ["save: local.absent", "copy: shared.hit"]


def test_what_dies_again_and_again_while_it_loads_is_given_up_for_the_source(
    node: Machine,
) -> None:
    node.rules(dies_loading=True)
    start(node, "SHARDBOOT_QUARANTINE_AFTER=2", check=False)
    shown = node.wait_until(ActiveState="active")
    assert shown["NRestarts"] == "2"
    assert shown["StatusText"].startswith("serving: source on ")
    assert node.attempts() == ["save: local.absent", "local.hit", "local.quarantined"]


def test_what_starting_again_cannot_mend_is_not_started_again(node: Machine) -> None:
    start(node, "SHARDBOOT_LOCL_DIR=/x", check=False)
    shown = node.wait_until(ActiveState="failed")
    assert (shown["ExecMainStatus"], shown["NRestarts"]) == ("10", "0")
    assert "did you mean SHARDBOOT_LOCAL_DIR?" in node.log()


def test_a_slow_start_has_time_as_long_as_it_is_under_way(node: Machine) -> None:
    drop_in(node, "TimeoutStartSec=6s")
    node.rules(warm_up=9)
    start(node)
    assert node.show()["NRestarts"] == "0"


HOOK = f"""\
#!/bin/sh
[ "$1" = where ] || echo "$2" >{DATA}/where
cat {DATA}/where
"""


def upgrade(node: Machine, old: str, new: str, port: int, *lines: str) -> str:
    """Upgrade from one server to another, which has more lines in its file; return what it said."""
    file = f"/etc/shardboot/{new.partition('=')[0]}.env"
    words = "\\n".join([f"WORDS={MODEL} -tp 8 --port {port}", *lines])
    program = f"{binary('python')} scripts/rolling-upgrade systemd {old} {new}={port}"
    return node.type(
        f"printf '{words}\\n' >{file}; {program} --hook {DATA}/hook --quiet 0.2s", check=False
    )


def test_an_upgrade_is_a_hit_beside_the_old_unit_which_then_stops_for_good(node: Machine) -> None:
    (node.data / "hook").write_text(HOOK)
    (node.data / "hook").chmod(0o755)
    old, new, third = start(node), free_port(), free_port()
    (node.data / "where").write_text(f"127.0.0.1:{old}\n")
    said = upgrade(node, f"llama={old}", "llama-2", new)
    assert "1/4 checkpoint: local.hit: " in said
    assert said.endswith("rolling-upgrade: done: llama-2 serves, llama has stopped\n")
    shown = [node.show(unit) for unit in (UNIT, f"{UNIT}-2")]
    states = [(each["ActiveState"], each["UnitFileState"]) for each in shown]
    assert states == [("inactive", "disabled"), ("active", "enabled")]
    assert node.attempts() == ["save: local.absent", "local.hit"]

    node.rules(dies_loading=True)
    said = upgrade(node, f"llama-2={new}", "llama", third, "SHARDBOOT_QUARANTINE_AFTER=9")
    assert "failed at 2/4 start: llama has ended, and was started again" in said
    assert said.endswith("; requests go to llama-2 as before, llama was stopped\n")
    shown = [node.show(unit) for unit in (UNIT, f"{UNIT}-2")]
    states = [(each["ActiveState"], each["UnitFileState"]) for each in shown]
    assert states == [("inactive", "disabled"), ("active", "enabled")]
    assert (node.data / "where").read_text() == f"127.0.0.1:{new}\n"


def test_the_sidecar_looks_after_the_servers_stores_as_their_user(node: Machine) -> None:
    start(node)
    port = free_port()
    line = f"echo SHARDBOOT_LISTEN=127.0.0.1:{port} >>/etc/shardboot/sidecar.env"
    node.type(START_SIDECAR.replace("systemctl", f"{line}\nsystemctl"))
    assert answer(port, "/healthz") == "ok\n"
    told = status(port)
    (checkpoint,) = told["stores"]["local"]["checkpoints"]
    assert (checkpoint["state"], checkpoint["running"]) == ("complete", True)
    assert [boot["phase"] for boot in told["boots"]] == ["serving"]
    assert not [name for name, job in told["jobs"].items() if job["error"]]
    shown = node.show(SIDECAR)
    fields = node.run("cat", f"/proc/{shown['MainPID']}/stat").rpartition(")")[2].split()
    assert fields[16] == "19"
    assert node.run("stat", "-c", "%U", f"/proc/{shown['MainPID']}").strip() == "vllm"
    node.type(f"systemctl stop {SIDECAR}")
    shown = node.show(SIDECAR)
    assert (shown["ActiveState"], shown["Result"]) == ("inactive", "success")


def answer(port: int, path: str) -> str:
    """Return what the sidecar answers, once its first look is over."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz").close()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as got:
                return str(got.read().decode())
        except urllib.error.URLError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def status(port: int) -> Any:
    return json.loads(answer(port, "/status"))


def test_quadlet_makes_a_unit_that_systemd_expects(node: Machine, quadlet: str) -> None:
    (node.data / "shardboot@.service").write_text(quadlet)
    # Only the generator of units is here.
    node.type("ln -sf /bin/true /usr/bin/podman")
    assert node.run("systemd-analyze", "verify", f"{DATA}/shardboot@.service") == ""


def test_quadlets_container_serves_as_the_images_user(
    node: Machine, quadlet: str, image: str
) -> None:
    start(node)
    node.type(f"systemctl stop {UNIT}; rm -rf {DATA}/*")
    with as_quadlet(node, quadlet, image) as container:
        assert "serving: saved on " in container.run("wait")
        assert container.is_healthy()
        process = container.status()
        assert process["Uid"] == [SERVICE.partition(":")[0]] * 4
        assert (process["NoNewPrivs"], process["CapPrm"]) == (["1"], ["0" * 16])


def test_composes_container_is_started_again_on_a_local_hit(node: Machine, image: str) -> None:
    port = free_port()
    container, _ = composed(node, image, f"{MODEL} -tp 8 --port {port}")
    with container:
        assert f"serving: saved on http://*:{port}" in container.run("wait")
        os.kill(container.pid(), signal.SIGKILL)
        container.wait_until_restarted()
        assert f"serving: local on http://*:{port}" in container.run("wait")
        assert container.status()["Uid"] == [SERVICE.partition(":")[0]] * 4


def test_composes_sidecar_looks_after_the_servers_stores(node: Machine, image: str) -> None:
    listen = free_port()
    settings = {"SHARDBOOT_LISTEN": f"127.0.0.1:{listen}", "SHARDBOOT_WATCH_INTERVAL": "1s"}
    words = f"{MODEL} -tp 8 --port {free_port()}"
    server, sidecar = composed(node, image, words, "--profile", "sidecar", **settings)
    with server, sidecar:
        assert "serving: saved on " in server.run("wait")
        deadline = time.monotonic() + SECONDS
        told = status(listen)
        while not (is_serving(told) and told["stores"]["local"]["checkpoints"]):
            # That look was from before.
            assert time.monotonic() < deadline, told
            time.sleep(0.1)
            told = status(listen)
        (checkpoint,) = told["stores"]["local"]["checkpoints"]
        assert (checkpoint["state"], checkpoint["running"]) == ("complete", True)
        assert not [name for name, job in told["jobs"].items() if job["error"]]
        who = podman("top", sidecar.name, "user").stdout.split()
        assert who == ["USER", SERVICE.partition(":")[0]]


def is_serving(told: dict[str, Any]) -> bool:
    return any(boot["phase"] == "serving" for boot in told["boots"])
