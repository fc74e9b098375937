"""Real vLLM in containers of the Dockerfile's image. Needs root, podman and debootstrap.

Five boots in all: one that saves, three that find what it saved, one of them twice under a standby,
and one that is stopped while saving.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from container.harness import DATA, GRACE_SECONDS, MODEL, Container, Host, zombies
from killing import wait_for_another
from processes import start_of
from serving import Answer, decision, events

from entrypoint.checkpoint.manifest import MANIFEST

pytestmark = [pytest.mark.container, pytest.mark.vllm]

SERVICE = 2000
READ_ONLY = ("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp")  # noqa: S108 - podman's
NEVER_ROOT = ("--user", f"{SERVICE}:{SERVICE}", "--cap-drop", "all")
NO_NEW_PRIVILEGES = ("--security-opt", "no-new-privileges")
PROMPT = "The first word"


@dataclass(frozen=True)
class Visit:
    """What was seen of one container, from its start until `podman stop` had ended it."""

    tier: str
    reason: str
    answer: Answer
    status: dict[str, list[str]]
    """The first process's /proc/PID/status, while vLLM answered."""
    command: list[str]
    zombies: int
    health: str
    """How the image's own HEALTHCHECK found it, in a line."""
    exit_status: int
    stop_seconds: float
    last_lines: str


def visit(host: Host, options: Sequence[str] = ()) -> Visit:
    with host.start(options=options) as container:
        healthy = container.wait_until_healthy()
        answer = container.complete(MODEL, PROMPT)
        process = Path("/proc", str(container.main_pid()))
        lines = (process / "status").read_text().splitlines()
        command = (process / "cmdline").read_text().split("\0")
        left = zombies(container.main_pid())
        health = container.health()
        stop_seconds = container.podman_stop()
    tier, reason = decision(container.log)
    print(f"{reason}: healthy after {healthy:.1f} s, stopped within {stop_seconds:.2f} s")
    return Visit(
        tier,
        reason,
        answer,
        {name: value.split() for name, _, value in (line.partition(":") for line in lines)},
        command,
        left,
        health,
        container.process.returncode,
        stop_seconds,
        container.last_lines(100),
    )


@pytest.fixture(scope="module")
def first(host: Host) -> Visit:
    return visit(host)


@pytest.fixture(scope="module")
def store_after_first(host: Host, first: Visit) -> dict[str, tuple[int, int]]:
    return snapshot(host.volume / "checkpoints")


@pytest.fixture(scope="module")
def second(host: Host, store_after_first: dict[str, tuple[int, int]]) -> Visit:
    return visit(host, options=READ_ONLY)


@pytest.fixture(scope="module")
def third(host: Host, store_after_first: dict[str, tuple[int, int]]) -> Visit:
    return visit(host, options=[*NEVER_ROOT, *NO_NEW_PRIVILEGES, *READ_ONLY])


@pytest.fixture(params=["first", "second", "third"])
def any_visit(request: pytest.FixtureRequest) -> Visit:
    found: Visit = request.getfixturevalue(request.param)
    return found


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    """Tell files that were replaced, written or removed."""
    found = [(path, path.lstat()) for path in [directory, *directory.rglob("*")]]
    return {str(path): (status.st_ino, status.st_mtime_ns) for path, status in found}


def test_an_empty_volume_is_saved_to_and_served(first: Visit) -> None:
    assert (first.tier, first.reason) == ("saved", "local.absent")
    # A model that says one token over and over would hide a wrong weight.
    assert len(set(first.answer.tokens)) > 3


def test_all_on_the_volume_is_the_service_users(host: Host, first: Visit) -> None:
    for path in host.volume.rglob("*"):
        status = path.lstat()
        assert (status.st_uid, status.st_gid) == (SERVICE, SERVICE), path
    store = host.volume / "checkpoints"
    assert len(list(store.glob(f"*/{MANIFEST}"))) == 1
    for path in [store, *store.rglob("*")]:
        wanted = 0o2750 if path.is_dir() else 0o640
        assert stat.S_IMODE(path.lstat().st_mode) == wanted, path


def test_a_second_container_finds_what_the_first_saved(first: Visit, second: Visit) -> None:
    assert (second.tier, second.reason) == ("local", "local.hit")
    assert second.answer == first.answer


def test_a_container_that_was_never_root_finds_it_too(first: Visit, third: Visit) -> None:
    assert (third.tier, third.reason) == ("local", "local.hit")
    assert third.answer == first.answer


def test_hits_change_nothing_in_the_store(
    host: Host, store_after_first: dict[str, tuple[int, int]], second: Visit, third: Visit
) -> None:
    assert snapshot(host.volume / "checkpoints") == store_after_first


def test_the_first_process_is_vllm_as_the_service_user(any_visit: Visit) -> None:
    assert any_visit.status["NSpid"][-1] == "1"
    (serve,) = [n for n, word in enumerate(any_visit.command) if word == "serve"]
    assert Path(any_visit.command[serve - 1]).name == "vllm"
    assert any_visit.command[serve + 1].startswith(f"{DATA}/checkpoints/")
    assert any_visit.status["Uid"] == [str(SERVICE)] * 4
    assert any_visit.status["Gid"] == [str(SERVICE)] * 4
    assert any_visit.status["Groups"] == [str(SERVICE)]
    assert {int(any_visit.status[name][0], 16) for name in ("CapPrm", "CapEff", "CapAmb")} == {0}


def test_a_boot_leaves_vllm_no_zombies(any_visit: Visit) -> None:
    assert any_visit.zombies == 0


def test_the_images_healthcheck_finds_that_vllm_serves(any_visit: Visit) -> None:
    assert any_visit.health.startswith("serving")


def test_podman_stop_ends_vllm_in_its_own_way(any_visit: Visit) -> None:
    assert "Application shutdown complete." in any_visit.last_lines
    assert any_visit.exit_status == 0
    assert any_visit.stop_seconds < GRACE_SECONDS


def test_podman_stop_during_a_save_ends_it_at_once(host: Host, first: Visit) -> None:
    # Another store, but the same state directory: vLLM need not be asked again.
    with host.start("--local-dir", f"{DATA}/elsewhere") as container:
        family = wait_for_save(container)
        seconds = container.podman_stop()
        print(f"stopped within {seconds:.2f} s")
        # podman's SIGKILL would be 137, when the grace is over.
        assert container.process.returncode == 143
        assert seconds < GRACE_SECONDS
    assert not [pid for pid, start in family.items() if start_of(pid) == start]
    store = host.volume / "elsewhere"
    assert [path.name for path in store.iterdir() if not path.name.startswith(".")] == []
    assert os.listdir(store / ".staging") == []
    assert "Traceback" not in container.last_lines()


def wait_for_save(container: Container) -> dict[int, str]:
    """Return all processes of the container, as this machine knows them, once a save is going.

    Each with its start time, which tells a pid's next user.
    """
    deadline = time.monotonic() + 120
    is_saving, family = False, dict[int, str]()
    while not any(saves(pid) for pid in family):
        assert container.process.poll() is None, container.last_lines()
        assert time.monotonic() < deadline, container.last_lines()
        time.sleep(0.1)
        is_saving = is_saving or any(e.get("action") == "save" for e in events(container.log))
        family = container.family() if is_saving else {}
    return family


def saves(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path("/proc", str(pid), "cmdline").read_text()
        return re.search(r"\bentrypoint\.vllm_plugin\.save\b", words) is not None
    # It has ended meanwhile.
    return False


def test_under_a_standby_a_killed_server_is_followed_in_the_same_container(
    host: Host, second: Visit
) -> None:
    with host.start(options=[*READ_ONLY, "--env", "SHARDBOOT_STANDBY=yes"]) as container:
        container.wait_until_healthy()
        first = container.main_pid()
        started = start_of(first)
        server, _ = wait_for_another(container, None, first)
        os.kill(server, signal.SIGKILL)
        wait_for_another(container, server, first)
        assert start_of(first) == started
        assert container.complete(MODEL, PROMPT) == second.answer
        assert "serving" in container.health()
        assert zombies(first) == 0
        stop_seconds = container.podman_stop()
    print(f"stopped within {stop_seconds:.2f} s")
    assert container.process.returncode == 0
    assert stop_seconds < GRACE_SECONDS
