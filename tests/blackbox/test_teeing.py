"""`--on-miss tee`: what boot leaves to vLLM, who goes on with it, and who does not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blackbox.harness import House, snapshot, staged
from blackbox.sidecars import sidecar
from blackbox.watching import note
from checkpoints import TENSORS, make_key, proof_of, shards
from store_contract import deep_verify

from entrypoint.checkpoint.fragment import fragment_name
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.checkpoint.proof import rank_evidence_name
from entrypoint.state.awaited import Awaited
from entrypoint.state.ledger import Ledger
from entrypoint.state.proofs import Proofs
from entrypoint.state.rejections import Rejections, on_the_way
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import manifest_of
from entrypoint.store.order import ORDER

TEE = {"SHARDBOOT_ON_MISS": "tee"}


def write_ranks(staging: Path) -> None:
    """Leave in `staging` what the ranks of a server write there."""
    for rank in (0, 1):
        fragment, blobs = shards(make_key(model=""), rank, 2, TENSORS, 0)
        for entry, blob in zip(fragment.files, blobs, strict=True):
            (staging / entry.path).write_bytes(blob)
        (staging / fragment_name(rank)).write_bytes(fragment.encode())


def finish(house: House, staging: Path) -> Any:
    """Run what the last rank starts; return its answer."""
    command = [sys.executable, "-P", "-m", "entrypoint.finisher", str(staging), "1.5"]
    done = subprocess.run(
        command, env=house.environ, cwd=house.root, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def test_vllm_serves_the_source_and_is_told_where_to_save_it(house: House) -> None:
    boot = house.serve(**TEE, VLLM_API_KEY="secret-key")
    assert boot.events[-1:] == ["local.absent"]
    assert boot.words[:3] == [str(house.model), "-tp", "2"]
    assert boot.words[boot.words.index("--load-format") + 1] == "shardboot-tee"
    (staging,) = staged(house.local)
    assert boot.loader["staging"] == str(staging)
    # Its lock crosses exec: as long as the server lives, nobody sweeps it.
    assert str(staging) in boot.vllm["fds"].values()
    assert "secret-key" not in (staging / ORDER).read_text()
    assert house.calls == ["resolve", "serve"]
    assert house.ledger[-1]["action"] == "tee"


@pytest.mark.parametrize(("wish", "once"), [("auto", True), ("yes", True), ("no", False)])
def test_vllm_imports_once_while_it_saves_on_the_way_as_it_does_on_a_hit(
    house: House, wish: str, once: bool
) -> None:
    house.rules(resolve={"preload": "libm.so.6"})
    told = TEE | {"SHARDBOOT_SINGLE_IMPORT": wish}
    first = house.serve(**told)
    staging = Path(first.loader["staging"])
    write_ranks(staging)
    assert finish(house, staging)["status"] == "ok"
    second = house.serve(**told)
    assert (first.events[-1], second.events[-1]) == ("local.absent", "local.hit")
    for boot in (first, second):
        assert boot.loader.get("fork", False) is once
        assert ("LD_PRELOAD" in boot.vllm["environ"]) is once


def test_what_the_ranks_have_written_is_committed_and_the_next_boot_serves_it(
    house: House,
) -> None:
    staging = Path(house.serve(**TEE).loader["staging"])
    write_ranks(staging)
    answer = finish(house, staging)
    assert answer["status"] == "ok"
    deep_verify(house.store, answer["name"])
    assert not list(staged(house.local))
    again = house.serve(**TEE)
    assert again.events[-1:] == ["local.hit"]
    assert house.calls == ["resolve", "serve", "serve"]


def tee_a_moe(house: House) -> Manifest:
    """Save on the way what must be proved; return it as it waits for its proof."""
    house.rules(resolve={"change": {"kind": {"moe": True}}})
    staging = Path(house.serve(**TEE).loader["staging"])
    assert json.loads((staging / ORDER).read_text())["record"] is True
    write_ranks(staging)
    for rank in (0, 1):
        (staging / rank_evidence_name("source", rank)).write_text("{}")
    return manifest_of(house.store, finish(house, staging)["name"])


def prove(house: House, manifest: Manifest) -> None:
    """Leave what the ranks of a server leave once they agree that it is proved."""
    Proofs(house.state).add(manifest, proof_of(manifest))
    Awaited(house.state).drop(manifest.content)


def elsewhere(house: House) -> dict[str, object]:
    """Return the settings of another node that sees the same shared store."""
    return {
        "SHARDBOOT_LOCAL_DIR": house.root / "local elsewhere",
        "SHARDBOOT_STATE_DIR": house.root / "state elsewhere",
        "SHARDBOOT_SHARED": house.shared,
    }


def test_what_must_be_proved_is_proved_as_it_is_loaded_and_not_sent_before(
    house: House,
) -> None:
    made = tee_a_moe(house)
    second = house.serve(**TEE)
    assert second.events[-2:] == ["prove", "local.hit"]
    assert second.loader["prove"] is True
    pushed = house.run("push", "--shared", house.shared, house.model, "-tp", 2)
    assert pushed.status == 31
    assert "must be proved" in pushed.stderr
    assert not list(house.shared.iterdir())
    prove(house, made)
    third = house.serve(**TEE)
    assert third.events[-1:] == ["local.hit"]
    assert "prove" not in third.events
    assert "prove" not in third.loader


def test_a_proof_made_here_goes_along_and_no_other_node_makes_it_again(house: House) -> None:
    made = tee_a_moe(house)
    prove(house, made)
    before = snapshot(house.local)
    pushed = house.run("push", "--shared", house.shared, house.model, "-tp", 2)
    assert pushed.status == 0
    assert f"push.proof: {made.name}" in pushed.stderr
    assert snapshot(house.local) == before
    there = manifest_of(DirectoryStore(house.shared), made.name)
    assert there == made._replace(proof=proof_of(made))
    for words in ((), ("--nnodes", "2")):
        plan = house.plan(*words, **elsewhere(house))
        assert (plan["action"], plan["reason"]) == ("copy", "shared.hit")
    boot = house.serve(**elsewhere(house))
    assert boot.events[-1:] == ["local.hit"]
    assert "prove" not in boot.loader
    assert house.calls.count("save") == 0


def test_a_proof_that_is_none_goes_nowhere(house: House) -> None:
    made = tee_a_moe(house)
    Proofs(house.state).add(made, {"items": 1})
    pushed = house.run("push", "--shared", house.shared, house.model, "-tp", 2)
    assert pushed.status == 31
    assert "what is kept as its proof cannot go along: proof.controlled: missing" in pushed.stderr
    assert not list(house.shared.iterdir())


def test_a_sidecar_publishes_what_was_saved_on_the_way_once_it_is_proved(house: House) -> None:
    made = tee_a_moe(house)
    house.serve(**TEE)
    note(house, "loaded")
    rounds = 'shardboot_job_runs_total{job="publish"}'
    with sidecar(house, "--publish", "--scrub-interval", "never") as running:
        running.wait_until(rounds, running.wait_until(rounds, 1)[rounds] + 2)
        assert "push" not in running.said
        prove(house, made)
        running.wait_for("push.proof")
        running.wait_for("push.done")
        found = running.metrics()
        found = running.wait_until(rounds, found[rounds] + 3)
        assert found["shardboot_published_checkpoints_total"] == 1
    assert house.plan(**elsewhere(house))["reason"] == "shared.hit"


def test_a_sidecar_publishes_what_needs_no_proof_once_it_was_loaded(house: House) -> None:
    staging = Path(house.serve(**TEE).loader["staging"])
    write_ranks(staging)
    name = finish(house, staging)["name"]
    rounds = 'shardboot_job_runs_total{job="publish"}'
    with sidecar(house, "--publish", "--scrub-interval", "never") as running:
        running.wait_until(rounds, running.wait_until(rounds, 1)[rounds] + 2)
        assert "push" not in running.said
        house.serve(**TEE)
        note(house, "loaded")
        assert f"{name} committed in {house.shared}" in running.wait_for("push.done")
        assert "push.proof" not in running.said
    assert house.plan(**elsewhere(house))["reason"] == "shared.hit"


def test_without_what_its_source_gave_nothing_that_must_be_proved_is_committed(
    house: House,
) -> None:
    house.rules(resolve={"change": {"kind": {"moe": True}}})
    staging = Path(house.serve(**TEE).loader["staging"])
    write_ranks(staging)
    answer = finish(house, staging)
    assert (answer["status"], answer["reason"]) == ("failed", "save.failed")
    assert house.store.names() == []


def test_what_waits_for_its_proof_is_served_only_beside_what_its_source_gave(house: House) -> None:
    tee_a_moe(house)
    # As on a node to which somebody has copied the directory.
    shutil.rmtree(house.state / "awaited")
    plan = house.plan(**TEE)
    assert (plan["action"], plan["reason"]) == ("tee", "local.unproved")


def test_what_waits_for_its_proof_is_refused_where_it_is_the_model_itself(house: House) -> None:
    name = tee_a_moe(house).name
    assert house.plan(**TEE)["reason"] == "local.hit"
    plan = house.run("plan", "--format", "json", house.store.root / name, "-tp", 2).json
    assert plan["action"] == "refuse"
    assert "never proved to load to the source's state" in plan["text"]


def test_a_model_that_no_load_alone_can_prove_is_saved_before_vllm_starts(house: House) -> None:
    house.rules(resolve={"change": {"kind": {"moe": True}}})
    staging = Path(house.serve(**TEE).loader["staging"])
    key = json.loads((staging / ORDER).read_text())["key_by_config"]
    Rejections(house.state).add(on_the_way(key), "tee.proof", "l.0 cannot be probed")
    plan = house.plan(**TEE)
    assert (plan["action"], plan["reason"]) == ("save", "tee.proof")
    assert "l.0 cannot be probed" in plan["text"]


def test_a_source_that_changed_on_the_way_is_not_published(house: House) -> None:
    staging = Path(house.serve(**TEE).loader["staging"])
    write_ranks(staging)
    (house.model / "config.json").write_text('{"architectures": ["Other"]}')
    answer = finish(house, staging)
    assert (answer["status"], answer["reason"]) == ("failed", "save.failed")
    assert "changed while it was saved" in answer["message"]
    assert house.store.names() == []


def test_a_second_server_leaves_it_to_the_first_and_a_dead_one_is_swept(house: House) -> None:
    house.rules(serve={"stay": True})
    first = house.start("serve", house.model, "-tp", 2, **TEE)
    house.wait_for("staying")
    (staging,) = staged(house.local)
    house.rules()
    second = house.serve(**TEE, SHARDBOOT_ON_FAILURE="refuse")
    assert second.events[-1:] == ["tee.busy"]
    assert second.words == [str(house.model), "-tp", "2"]
    assert list(staged(house.local)) == [staging]
    first.kill()
    first.wait()
    third = house.serve(**TEE)
    (begun,) = staged(house.local)
    assert third.loader["staging"] == str(begun) != str(staging)


def test_where_boots_died_of_it_the_next_one_saves_before_vllm_starts(house: House) -> None:
    house.serve(**TEE)
    few = TEE | {"SHARDBOOT_QUARANTINE_AFTER": "1"}
    assert house.plan(**few)["action"] == "tee"
    Ledger(house.state).append({"boot": house.attempts[-1]["boot"], "event": "loading"})
    plan = house.plan(**few)
    assert (plan["action"], plan["reason"]) == ("save", "tee.died")
    assert house.plan(**TEE)["action"] == "tee"


def test_without_room_the_source_is_served_and_nothing_is_begun(house: House) -> None:
    boot = house.serve(**TEE, SHARDBOOT_RESERVE_BYTES="1000TiB")
    assert boot.events[-2:] == ["space.short", "space.short"]
    assert boot.words == [str(house.model), "-tp", "2"]
    assert not list(staged(house.local))


@pytest.mark.parametrize(
    ("change", "words", "settings", "action", "reason"),
    [
        ({"kind": {"custom_code": True}}, [], {}, "save", "tee.proof"),
        ({"kind": {"moe": True, "hybrid": True}}, [], {}, "save", "tee.proof"),
        ({"kind": {"moe": True}}, [], {}, "tee", "local.absent"),
        ({}, [], {"SHARDBOOT_PROVE": "always"}, "tee", "local.absent"),
        ({}, [], {"SHARDBOOT_PUBLISH": "yes"}, "save", "tee.publish"),
        ({}, ["--nnodes", "2"], {}, "serve-source", "layout.multinode"),
        ({}, [], {}, "tee", "local.absent"),
    ],
)
def test_what_cannot_be_saved_on_the_way_is_saved_before_or_not_at_all(
    house: House,
    change: dict[str, Any],
    words: list[str],
    settings: dict[str, str],
    action: str,
    reason: str,
) -> None:
    house.rules(resolve={"change": change})
    plan = house.plan(*words, **TEE, **settings, SHARDBOOT_SHARED=house.shared)
    assert (plan["action"], plan["reason"]) == (action, reason)
