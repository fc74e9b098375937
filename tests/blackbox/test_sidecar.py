"""The sidecar as a process: what it does on real stores, what it tells, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest
from blackbox.harness import House, snapshot, staged
from blackbox.sidecars import HASTY, POWERLESS, sidecar
from blackbox.watching import note
from checkpoints import make_checkpoint, make_key
from releases import serve

from entrypoint.checkpoint.digest import digest_bytes
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.steps import lock_file
from entrypoint.store import lock

NOT_RUNNING = {"pid": 1, "pid_start": 0}
BAD = "model-rank-1-part-0.safetensors"
OTHER_JOBS_REST = ("--scrub-interval", "never")


def release(root: Path, month: int) -> Manifest:
    """Publish one release of a deployment in a store."""
    key = make_key(model=digest_bytes(f"release {month}".encode()))
    created_at = f"2026-{month:02}-01T00:00:00Z"
    return make_checkpoint(root, key=key, name=f"of-{month}", seed=month, created_at=created_at)


def flip(directory: Path) -> None:
    path = directory / BAD
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.fixture
def served(house: House) -> Manifest:
    """A checkpoint of the local store that boots of this node have served."""
    made = release(house.local, 1)
    serve(house.state, made, **NOT_RUNNING)
    return made


def test_a_new_release_is_here_before_anybody_restarts(house: House, served: Manifest) -> None:
    with sidecar(house) as running:
        assert running.wait_until('shardboot_checkpoints{state="complete",store="local"}', 1)
        new = release(house.shared, 2)
        assert f"{new.name} committed in {house.local}" in running.wait_for("copy.done")
        assert house.store.names() == [new.name, served.name]
        found = running.wait_until('shardboot_checkpoints{state="complete",store="local"}', 2)
        assert found["shardboot_prefetched_checkpoints_total"] == 1
        assert found["shardboot_prefetched_bytes_total"] == new.size
        assert found['shardboot_checkpoint_bytes{store="local"}'] == served.size + new.size
        assert found['shardboot_store_up{store="shared"}'] == 1
        assert found['shardboot_boots{outcome="started",tier="local"}'] == 1
        assert found["shardboot_local_free_bytes"] > 0
        assert running.get("/healthz") == (200, "ok\n")
        assert running.get("/readyz") == (200, "ready\n")
        status, text = running.get("/status?x")
        assert (status, running.get("/x")[0]) == (200, 404)
        assert new.name in running.get("/")[1]
        told = json.loads(text)
        names = [each["name"] for each in told["stores"]["local"]["checkpoints"]]
        assert names == [new.name, served.name]
        assert told["jobs"]["prefetch"]["failures"] == 0


def test_what_an_upgrade_of_vllm_will_want_is_here_before_it(
    house: House, served: Manifest
) -> None:
    with sidecar(house) as running:
        assert running.wait_until('shardboot_checkpoints{state="complete",store="local"}', 1)
        # Of the same release, and saved before it.
        key = served.key._replace(vllm=f"{served.key.vllm}.post1")
        made = make_checkpoint(
            house.shared, key=key, name="next", created_at="2025-01-01T00:00:00Z"
        )
        assert f"{made.name} committed in {house.local}" in running.wait_for("copy.done")
    assert {*house.store.names()} == {made.name, served.name}


def test_what_another_pushes_is_here_without_waiting_for_the_interval(
    house: House, served: Manifest
) -> None:
    words = ("--watch-interval", "1h", *OTHER_JOBS_REST)
    with sidecar(house, *words) as running:
        if "news come at once" not in running.wait_for("watch"):
            pytest.skip(f"inotify tells nothing here: {running.said}")
        running.wait_until('shardboot_job_runs_total{job="prefetch"}', 1)
        new = release(house.shared, 2)
        assert new.name in running.wait_for("copy.done")
        found = running.metrics()
        assert found['shardboot_job_runs_total{job="look"}'] == 1
        # One that another thread has taken may be lost where the loop's own is in a fork.
        assert running.threads_given(signal.SIGTERM) == 1


def test_without_watchdog_it_looks_at_its_interval(house: House, served: Manifest) -> None:
    launch = f"import sys; sys.modules['watchdog'] = None; {HASTY}"
    with sidecar(house, *OTHER_JOBS_REST, launch=launch) as running:
        assert "only looks tell of news: no watchdog here" in running.wait_for("watch")
        new = release(house.shared, 2)
        assert new.name in running.wait_for("copy.done")


def test_a_flipped_bit_is_found_told_and_known_to_boots(house: House, served: Manifest) -> None:
    flip(house.local / served.name)
    assert house.run("verify").status == 0
    with sidecar(house, SHARDBOOT_SHARED=None) as running:
        assert "model-rank-1-part-0" in running.wait_for("scrub.damaged")
        found = running.wait_until('shardboot_checkpoints{state="damaged",store="local"}', 1)
        assert found["shardboot_scrub_damaged_checkpoints_total"] == 1
        assert found["shardboot_scrubbed_bytes_total"] == served.size
    assert house.run("verify").status == 21


def test_what_is_damaged_is_repaired_from_the_shared_store_under_its_server(
    house: House, served: Manifest
) -> None:
    release(house.shared, 1)
    flip(house.local / served.name)
    held = lock.hold_manifest(house.local / served.name, served.digest)
    with sidecar(house) as running:
        running.wait_for("scrub.damaged")
        running.wait_for("repair.done")
        found = running.wait_until('shardboot_checkpoints{state="complete",store="local"}', 1)
        assert found['shardboot_checkpoints{state="damaged",store="local"}'] == 0
        assert found["shardboot_repaired_checkpoints_total"] == 1
        (bad,) = [each for each in served.files if each.path == BAD]
        assert found["shardboot_repaired_bytes_total"] == bad.size
    assert house.run("verify", "--deep").status == 0
    assert house.store.names() == [served.name]
    assert not lock.is_free(house.local / served.name)
    os.close(held)


def test_what_is_damaged_in_both_stores_stays_known_to_be_so(
    house: House, served: Manifest
) -> None:
    flip(house.shared / release(house.shared, 1).name)
    flip(house.local / served.name)
    with sidecar(house) as running:
        running.wait_for("scrub.damaged")
        assert f"repair: checkpoint.damaged: {house.shared}" in running.wait_for("job.failed")
        runs = running.metrics()['shardboot_job_runs_total{job="repair"}']
        found = running.wait_until('shardboot_job_runs_total{job="repair"}', runs + 2)
        assert found['shardboot_checkpoints{state="damaged",store="local"}'] == 1
        assert found['shardboot_job_failures_total{job="repair"}'] == 1
    assert house.run("verify").status == 21


def test_what_is_damaged_stays_while_nothing_better_can_come(
    house: House, served: Manifest
) -> None:
    release(house.shared, 1)
    flip(house.local / served.name)
    with sidecar(house, "--reserve-bytes", "1000TiB") as running:
        running.wait_for("scrub.damaged")
        assert "1099511627776000 kept in reserve" in running.wait_for("job.failed")
        assert house.store.names() == [served.name]


def test_a_release_evicts_nothing_that_would_not_be_collected(
    house: House, served: Manifest
) -> None:
    new = release(house.shared, 2)
    bound = ("--max-bytes", served.size + new.size - 1, "--grace", "0")
    with sidecar(house, *bound, *OTHER_JOBS_REST) as running:
        assert "would free 0" in running.wait_for("job.failed")
        assert house.store.names() == [served.name]


def test_what_a_boot_is_making_is_left_to_it(house: House, served: Manifest) -> None:
    new = release(house.shared, 2)
    runs = 'shardboot_job_runs_total{job="prefetch"}'
    path = lock_file(house.local, new.key.subject(new.source.name))
    with lock.exclusive(path, 0.0), sidecar(house, *OTHER_JOBS_REST) as running:
        found = running.wait_until("shardboot_prefetch_waiting", 1)
        found = running.wait_until(runs, found[runs] + 3)
        assert found['shardboot_job_failures_total{job="prefetch"}'] == 0
        assert house.store.names() == [served.name]


def test_what_is_damaged_in_the_shared_store_is_not_read_again_and_again(
    house: House, served: Manifest
) -> None:
    flip(house.shared / release(house.shared, 2).name)
    with sidecar(house, *OTHER_JOBS_REST) as running:
        assert "BLAKE3 expected" in running.wait_for("job.failed")
        found = running.wait_until('shardboot_job_runs_total{job="prefetch"}', 2)
        assert found['shardboot_job_failures_total{job="prefetch"}'] == 1
    assert house.store.names() == [served.name]


def test_a_save_that_was_loaded_is_published_once(house: House) -> None:
    house.serve()
    note(house, "loaded")
    (name,) = house.store.names()
    with sidecar(house, "--publish", *OTHER_JOBS_REST) as running:
        assert f"{name} committed in {house.shared}" in running.wait_for("push.done")
        # What an operator takes away afterwards, stays away.
        (house.shared / name).rename(house.root / "taken")
        rounds = running.metrics()['shardboot_job_runs_total{job="publish"}']
        running.wait_until('shardboot_job_runs_total{job="publish"}', rounds + 3)
    assert not (house.shared / name).exists()


def test_a_save_that_is_damaged_is_known_to_be_so_once_it_was_to_be_published(
    house: House,
) -> None:
    house.serve()
    note(house, "loaded")
    (name,) = house.store.names()
    flip(house.local / name)
    with sidecar(house, "--publish", *OTHER_JOBS_REST) as running:
        assert "BLAKE3 expected" in running.wait_for("job.failed")
        found = running.wait_until('shardboot_checkpoints{state="damaged",store="local"}', 1)
        rounds = found['shardboot_job_runs_total{job="publish"}']
        found = running.wait_until('shardboot_job_runs_total{job="publish"}', rounds + 2)
        assert found['shardboot_job_failures_total{job="publish"}'] == 1
    assert not (house.shared / name).exists()
    assert house.run("verify").status == 21


def test_nothing_is_read_for_a_shared_store_that_takes_no_names(house: House) -> None:
    house.serve()
    note(house, "loaded")
    # Staging alone could be written.
    (house.shared / ".staging").mkdir(mode=0o777)
    house.shared.chmod(0o555)
    with sidecar(house, "--publish", *OTHER_JOBS_REST, prefix=POWERLESS) as running:
        assert "may not write there" in running.wait_for("job.failed")
    assert "push" not in running.said
    assert not list(staged(house.shared))
    house.shared.chmod(0o755)


def test_a_store_that_may_not_be_written_is_looked_at_and_told_of(
    house: House, served: Manifest
) -> None:
    release(house.shared, 2)
    house.local.chmod(0o555)
    before = snapshot(house.local)
    words = ("--collect-interval", "0", "--grace", "0")
    with sidecar(house, *words, prefix=POWERLESS) as running:
        assert "only looking" in running.wait_for("local.unwritable")
        found = running.wait_until('shardboot_job_runs_total{job="collect"}', 2)
        found = running.wait_until('shardboot_job_runs_total{job="prefetch"}', 2)
        assert found["shardboot_prefetch_waiting"] == 1
        assert found['shardboot_job_failures_total{job="prefetch"}'] == 0
        assert found['shardboot_job_failures_total{job="collect"}'] == 0
    assert snapshot(house.local) == before
    house.local.chmod(0o755)


def test_a_store_that_is_away_fails_its_own_job_alone_and_is_caught_up_with(
    house: House, served: Manifest
) -> None:
    house.shared.rename(house.root / "away")
    with sidecar(house, *OTHER_JOBS_REST) as running:
        assert running.wait_for("job.failed").startswith("shardboot: job.failed: look-far: ")
        found = running.wait_until('shardboot_job_runs_total{job="look"}', 3)
        assert found['shardboot_store_up{store="shared"}'] == 0
        assert found['shardboot_job_failures_total{job="look"}'] == 0
        assert running.get("/readyz")[0] == 200
        (house.root / "away").rename(house.shared)
        release(house.shared, 2)
        running.wait_for("copy.done")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_at_once(house: House, number: int, status: int) -> None:
    with sidecar(house, "--watch-interval", "1h") as running:
        ended, seconds = running.stop(number)
    assert ended == status
    assert seconds < 5
    assert running.said.endswith(f"stopped by signal {number}\n")


def test_a_signal_during_a_copy_ends_it_at_once_and_the_next_one_goes_on(
    house: House, served: Manifest
) -> None:
    release(house.shared, 2)
    with sidecar(house, *OTHER_JOBS_REST, **house.slow_reads()) as running:
        house.wait_for("reading")
        ended, seconds = running.stop()
    assert (ended, seconds < 5) == (143, True)
    assert "Traceback" not in running.said
    assert len(list(staged(house.local))) == 1
    with sidecar(house, *OTHER_JOBS_REST) as running:
        running.wait_for("copy.resumed")
        running.wait_for("copy.done")
    assert not list(staged(house.local))


def test_a_job_is_done_when_somebody_with_the_token_asks_for_it(
    house: House, served: Manifest
) -> None:
    token = house.root / "token"
    token.write_text("0123456789abcdef\n")
    words = ("--watch-interval", "1h", "--scrub-interval", "30d", "--token-file", token)
    with sidecar(house, *words) as running:
        running.wait_for("scrub.done")
        assert running.post("/scrub", "0123456789abcdeX") == 401
        assert running.post("/publish", "0123456789abcdef") == 404
        # What says that it is done is said while it is under way.
        while (told := running.post("/scrub", "0123456789abcdef")) == 429:
            pass
        assert told == 202
        # Nothing was due.
        running.wait_for("scrub.done")
        found = running.metrics()
        assert found['shardboot_job_runs_total{job="look"}'] == 1
        assert running.get("/scrub")[0] == 405
    assert "0123456789" not in running.said


def test_a_token_that_cannot_be_read_is_a_matter_of_settings(house: House) -> None:
    ended = house.run("sidecar", "--token-file", house.root / "none", "--listen", "127.0.0.1:0")
    assert ended.status == 10
    assert "No such file" in ended.stderr


def test_a_port_that_is_taken_is_one_line_and_a_matter_of_settings(house: House) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = house.run("sidecar", "--listen", f"127.0.0.1:{port}")
    assert ended.status == 10
    error, hint = ended.stderr.splitlines()
    assert f"config.invalid: listen: 127.0.0.1:{port}: Address already in use" in error
    assert "--listen" in hint


def test_a_loop_without_rests_is_refused_in_one_line(house: House) -> None:
    ended = house.run("sidecar", "--watch-interval", "0")
    assert ended.status == 10
    assert "--watch-interval: expected 1 s or more, found '0'" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_it_keeps_neither_descriptors_nor_threads_over_many_rounds(
    house: House, served: Manifest
) -> None:
    release(house.shared, 1)
    always = ("--watch-interval", "0", "--scrub-interval", "0", "--collect-interval", "0")
    rounds = 'shardboot_job_runs_total{job="collect"}'
    with sidecar(house, *always) as running:
        before = running.wait_until(rounds, 20)
        kept = running.keeps()
        after = running.wait_until(rounds, before[rounds] + 60)
        running.wait_until_it_has(*kept)
        grown = after["process_resident_memory_bytes"] - before["process_resident_memory_bytes"]
        print(f"{after[rounds] - before[rounds]:.0f} rounds, {grown / 1024:.0f} KiB more")
        failed = {name: n for name, n in after.items() if "job_failures" in name and n}
        assert not failed, running.said
