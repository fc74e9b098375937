"""Save, hit, copy, the source or a refusal: what is done, what is said, what it exits with."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from blackbox.harness import House, make_source, snapshot, staged

from entrypoint.checkpoint.digest import canonical, digest_json


def test_the_first_boot_saves_and_the_second_finds_it(house: House) -> None:
    first = house.serve()
    assert first.status == 0, first.stderr
    assert first.events[-4:] == ["engine.asked", "local.absent", "save.done", "local.hit"]
    before = snapshot(house.local)
    second = house.serve()
    assert second.events[-1:] == ["local.hit"]
    assert "engine.asked" not in second.events
    assert second.lasting_words == first.lasting_words
    assert house.calls == ["resolve", "save", "serve", "serve"]
    # A hit makes no mutating call inside a store.
    assert snapshot(house.local) == before
    assert not list(staged(house.local))


def test_a_copy_from_the_shared_store_serves_the_very_checkpoint(house: House) -> None:
    saved = house.serve()
    house.shared_copy()
    before = snapshot(house.shared)
    copied = house.serve(SHARDBOOT_SHARED=house.shared)
    assert copied.events[-3:] == ["shared.hit", "copy.done", "local.hit"]
    assert copied.lasting_words == saved.lasting_words
    assert house.calls.count("save") == 1
    assert snapshot(house.shared) == before
    again = house.serve(SHARDBOOT_SHARED=f"file://{house.shared}")
    assert again.events[-1] == "local.hit"
    assert "copy.done" not in again.events


def test_publish_puts_a_fresh_save_into_the_shared_store(house: House) -> None:
    boot = house.run("serve", "--shared", house.shared, "--publish", house.model, "-tp", 2)
    assert "push.done" in boot.events
    assert boot.events[-1] == "local.hit"
    assert sorted(p.name for p in house.shared.iterdir() if p.name[0] != ".") == house.store.names()


def test_a_publish_that_fails_is_said_and_costs_nothing_else(house: House) -> None:
    blocked = house.root / "blocked"
    blocked.write_text("a file")
    boot = house.run("serve", "--shared", blocked, "--publish", house.model, "-tp", 2)
    assert "publish.failed" in boot.events
    assert boot.words[0].startswith(str(house.local))


def test_a_shared_store_that_falls_silent_as_one_publishes_is_not_waited_for(house: House) -> None:
    words = ("--shared", house.shared, "--publish", house.model, "-tp", 2)
    boot = house.run("serve", *words, **house.silent_stage())
    assert "has been silent for 1 s" in boot.stderr
    assert boot.events[-2:] == ["publish.failed", "local.hit"]
    assert boot.words[0].startswith(str(house.local))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--load-format", "dummy"], "load-format.user"),
        (["--model-loader-extra-config", "{}"], "load-format.user"),
        (["--nnodes", "2"], "layout.multinode"),
        (["--nnodes", "8"], "layout.multinode"),
        (["--no-such-option"], "engine.rejected"),
    ],
)
def test_words_that_no_checkpoint_can_serve_reach_vllm_as_they_are(
    house: House, words: list[str], reason: str
) -> None:
    boot = house.serve(*words)
    assert boot.events[-1] == reason
    assert boot.words == [str(house.model), "-tp", "2", *words]
    assert not house.local.exists() or not house.store.names()


def test_a_file_of_an_odd_name_keeps_no_model_from_being_saved(house: House) -> None:
    (house.model / "a\xa0b.txt").write_text("a note")
    assert house.serve().events[-1] == "local.hit"


def test_weights_that_only_vllm_looks_for_are_left_to_it(house: House) -> None:
    house.rules(resolve={"change": {"load": {"elsewhere": True}}})
    boot = house.serve()
    assert boot.events[-1] == "source.redirected"
    assert boot.words == [str(house.model), "-tp", "2"]


def test_a_model_whose_path_leads_nowhere_is_called_that(house: House) -> None:
    nowhere = str(house.root / "not-mounted")
    told = house.run("plan", nowhere, "--no-such-option").stdout
    assert f"{nowhere} is not there (a container sees only what is mounted)" in told
    assert "is not there (" not in house.run("plan", house.model, "--no-such-option").stdout


@pytest.mark.parametrize(("version", "warnings"), [("0.26.3", 1), ("0.31.0", 0), ("0.33.0", 1)])
def test_a_vllm_that_was_never_tried_is_warned_of_in_one_line(
    house: House, version: str, warnings: int
) -> None:
    house.rules(resolve={"change": {"key": {"vllm": version}}})
    boot = house.serve(SHARDBOOT_ON_MISS="source")
    assert boot.events.count("engine.untried") == warnings
    decided = house.run("plan", "--format", "json", house.model, "-tp", 2)
    assert json.loads(decided.stdout)["key"]["vllm"] == version


def absent(_: House) -> None:
    """Leave the stores as they are: nothing was ever saved."""


def foreign(house: House) -> None:
    assert house.run("save", house.model, "-tp", 1).status == 0


def foreign_dtype(house: House) -> None:
    assert house.run("save", house.model, "-tp", 2, "--dtype", "float16").status == 0


def another_model(house: House) -> None:
    other = house.root / "other" / "model"
    make_source(other, seed=1)
    assert house.run("save", other, "-tp", 2).status == 0


def damaged(house: House) -> None:
    assert house.run("save", house.model, "-tp", 2).status == 0
    [name] = house.store.names()
    os.truncate(house.store.path(name) / "model-rank-1-part-0.safetensors", 100)


Scene = Callable[[House], None]


@pytest.mark.parametrize("policy", ["refuse", "source"])
@pytest.mark.parametrize(
    ("scene", "reason", "code"),
    [
        (absent, "local.absent", 31),
        (foreign, "local.foreign", 22),
        (foreign_dtype, "local.foreign", 22),
        (another_model, "local.foreign", 22),
        (damaged, "local.damaged", 21),
    ],
)
def test_on_miss_decides_where_no_checkpoint_fits(
    house: House, scene: Scene, reason: str, code: int, policy: str
) -> None:
    scene(house)
    boot = house.run("serve", "--on-miss", policy, house.model, "-tp", 2)
    if policy == "refuse":
        assert (boot.status, boot.vllm) == (code, {})
        assert f"error: {reason}: " in boot.stderr
    else:
        assert boot.events[-1] == reason
        assert boot.words == [str(house.model), "-tp", "2"]


@pytest.mark.parametrize(
    ("scene", "fields"),
    [(foreign, ["tp"]), (foreign_dtype, ["dtype"]), (another_model, ["model"])],
)
def test_plan_names_the_field_in_which_a_checkpoint_is_foreign(
    house: House, scene: Scene, fields: list[str]
) -> None:
    scene(house)
    plan = house.plan()
    assert plan["findings"]["local"]["finding"] == "foreign"
    assert [d["field"] for d in plan["differences"]] == fields
    assert plan["action"] == "save"


def test_what_is_damaged_is_saved_again_under_the_same_name_or_the_next(house: House) -> None:
    damaged(house)
    boot = house.serve()
    assert boot.status == 0, boot.stderr
    assert boot.events[-1] == "local.hit"
    assert house.calls.count("save") == 2
    assert house.run("verify", "--deep", Path(boot.words[0]).name).status == 0


def test_a_flipped_bit_is_found_with_verify_deep_and_never_served(house: House) -> None:
    house.serve()
    [name] = house.store.names()
    shard = house.store.path(name) / "model-rank-0-part-1.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    boot = house.run("serve", "--verify", "deep", "--on-miss", "refuse", house.model, "-tp", 2)
    assert boot.status == 21
    assert "model-rank-0-part-1" in boot.stderr
    again = house.run("serve", "--verify", "deep", house.model, "-tp", 2)
    assert "verify.deep" in again.events
    assert again.status == 0
    assert Path(again.words[0]).name != name or house.run("verify", "--deep").status == 0


def test_damage_in_the_shared_store_is_found_while_copying(house: House) -> None:
    house.serve()
    house.shared_copy()
    [shared] = [p for p in house.shared.iterdir() if p.name[0] != "."]
    shard = shared / "model-rank-0-part-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    boot = house.serve(SHARDBOOT_SHARED=house.shared)
    assert boot.events[-4] == "checkpoint.damaged"
    assert boot.events[-2:] == ["save.done", "local.hit"]
    assert not list(staged(house.local))


@pytest.mark.parametrize(
    ("rule", "reason", "code"),
    [
        ({"exit": 3, "print": "torch said no\nOOM at last"}, "save.failed", 50),
        ({"refuse": ["save.online-quant", "meta tensors"]}, "save.online-quant", 50),
        ({"skip_rank": 1}, "save.failed", 50),
        ({"fragment": "{}"}, "save.failed", 50),
        ({"cut": 10}, "staging.failed", 40),
        ({"say": "[]"}, "save.failed", 50),
        ({"say": "not json"}, "save.failed", 50),
        ({"kill": 11}, "save.failed", 50),
    ],
    ids=["dies", "refuses", "rank missing", "fragment odd", "short", "list", "garbage", "SEGV"],
)
def test_a_save_that_fails_serves_the_source_or_refuses_by_its_code(
    house: House, rule: dict[str, object], reason: str, code: int
) -> None:
    house.rules(save=rule)
    boot = house.serve()
    assert boot.events[-2:] == [reason, reason]
    assert boot.words == [str(house.model), "-tp", "2"]
    assert "serving the source" in boot.stderr.splitlines()[-1]
    assert house.store.names() == []
    assert not list(staged(house.local))
    refused = house.run("serve", "--on-failure", "refuse", house.model, "-tp", 2)
    assert (refused.status, refused.vllm) == (code, {})


def test_what_a_newer_shardboot_saved_is_foreign_and_stays(house: House) -> None:
    house.serve()
    [name] = house.store.names()
    path = house.local / name / "manifest.json"
    document = json.loads(path.read_bytes()) | {"schema": 2, "new": True}
    del document["blake3"]
    document["blake3"] = digest_json(document)
    path.chmod(0o640)
    path.write_bytes(canonical(document))
    decided = house.run("plan", "--format", "json", house.model, "-tp", 2).json
    assert decided["reason"] == "local.foreign"
    assert decided["differences"] == [{"field": "schema", "wanted": 1, "found": 2}]
    assert house.serve().events[-2:] == ["save.done", "local.hit"]
    assert json.loads(path.read_bytes())["schema"] == 2


def test_the_log_of_a_failed_save_is_kept_and_its_end_is_shown(house: House) -> None:
    house.rules(save={"exit": 3, "print": "torch said no\nOOM at last"})
    boot = house.serve()
    assert "torch said no | OOM at last" in boot.stderr
    [log] = (house.state / "logs").iterdir()
    assert log.read_text() == "torch said no\nOOM at last\n"


def test_every_boot_leaves_one_line_that_outlives_exec(house: House) -> None:
    house.serve()
    house.serve()
    house.run("serve", "--on-miss", "refuse", house.model, "-tp", 1)
    assert [(e["action"], e["reason"]) for e in house.attempts] == [
        ("reuse", "local.hit"),
        ("reuse", "local.hit"),
        ("refuse", "local.foreign"),
    ]
    assert all(e["pid"] and e["boot"] for e in house.attempts)


def test_a_checkpoint_may_be_served_by_its_own_path(house: House) -> None:
    house.serve()
    shutil.rmtree(house.model)
    [name] = house.store.names()
    checkpoint = house.store.path(name)
    boot = house.run("serve", checkpoint, "-tp", 2)
    assert boot.words[:3] == [str(checkpoint), "-tp", "2"]
    assert "--load-format" in boot.words
    wrong = house.run("serve", checkpoint, "-tp", 1)
    assert (wrong.status, wrong.vllm) == (22, {})


def test_only_the_named_checkpoint_is_considered(house: House) -> None:
    house.serve()
    boot = house.run(
        *("serve", "--checkpoint", "none-such", "--on-miss", "refuse"), house.model, "-tp", 2
    )
    assert boot.status == 31
    [name] = house.store.names()
    assert house.run("serve", "--checkpoint", name, house.model, "-tp", 2).events[-1] == "local.hit"


def test_json_lines_are_json_and_carry_the_boot(house: House) -> None:
    boot = house.serve(SHARDBOOT_LOG_FORMAT="json")
    entries = [json.loads(line) for line in boot.stderr.splitlines()]
    assert len({entry["boot"] for entry in entries}) == 1
    (noted,) = house.attempts
    decided = entries[-1]
    assert decided["event"] == noted["reason"] == "local.hit"
    assert decided["action"] == "reuse"
    for name in ("boot", "key", "checkpoint"):
        assert decided[name] == noted[name]


def test_people_are_told_a_boots_name_as_the_ledger_has_it(house: House) -> None:
    house.serve()
    boot = house.serve()
    assert boot.stderr.endswith(f" [boot {house.attempts[-1]['boot']}]\n")
    house.rules(resolve={"exit": 1})
    source = house.serve("--max-model-len", 9)
    assert source.stderr.endswith(f" [boot {house.attempts[-1]['boot']}]\n")


@pytest.mark.parametrize(
    ("words", "more", "event", "status"),
    [
        (("--on-miss", "refuse"), {}, "local.absent", 31),
        ((), {"SHARDBOOT_LOCL_DIR": "/x"}, "config.invalid", 10),
        (("--vllm", "/none"), {}, "exec.failed", 127),
    ],
)
def test_in_json_an_end_is_an_event_as_well(
    house: House, words: tuple[str, ...], more: dict[str, str], event: str, status: int
) -> None:
    boot = house.run("serve", "--log-format", "json", *words, house.model, "-tp", 2, **more)
    last = [json.loads(line) for line in boot.stderr.splitlines()][-1]
    assert (boot.status, last["event"], last["status"]) == (status, event, status)
    assert last["message"]
