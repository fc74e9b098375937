"""What crosses exec, and what does not."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest
from blackbox.harness import House

from entrypoint.checkpoint.inspect import read_manifest


def only_checkpoint(house: House) -> Path:
    [name] = house.store.names()
    return house.store.path(name)


def only_caches(house: House) -> Path:
    [place] = (house.state / "caches").iterdir()
    return place


def test_vllm_gets_the_checkpoint_then_the_users_words_then_ours(house: House) -> None:
    boot = house.serve("--port", 8001, "--max-model-len", 64)
    checkpoint = only_checkpoint(house)
    assert boot.lasting_words == [
        str(checkpoint),
        *("-tp", "2", "--port", "8001", "--max-model-len", "64"),
        *("--load-format", "shardboot"),
        *("--served-model-name", str(house.model)),
    ]
    assert boot.loader["manifest"] == read_manifest(checkpoint).digest


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["{model}", "-tp", "2"], ["-tp", "2"]),
        (["-tp", "2", "{model}"], ["-tp", "2"]),
        (["-tp=2", "--model", "{model}"], ["-tp=2"]),
        (["--model={model}", "-tp", "2"], ["-tp", "2"]),
        (["--", "{model}", "-tp", "2"], ["-tp", "2"]),
        (["{model}", "-tp", "1", "-tp", "2", "--host", ""], ["-tp", "1", "-tp", "2", "--host", ""]),
        (
            ["{model}", "-tp", "2", "--host", "a b;$(x)\n'\""],
            ["-tp", "2", "--host", "a b;$(x)\n'\""],
        ),
    ],
    ids=["first", "last", "--model", "--model=", "after --", "last one wins", "odd letters"],
)
def test_users_words_reach_vllm_untouched_wherever_the_model_stands(
    house: House, words: list[str], kept: list[str]
) -> None:
    boot = house.run("serve", *(word.format(model=house.model) for word in words))
    assert boot.status == 0, boot.stderr
    got = boot.words
    assert got[: 1 + len(kept)] == [str(only_checkpoint(house)), *kept]
    assert got[1 + len(kept)] == "--load-format"


def test_a_served_name_of_the_users_is_not_followed_by_ours(house: House) -> None:
    boot = house.serve("--served-model-name", "mine", "yours")
    assert boot.words.count("--served-model-name") == 1
    again = house.serve()
    assert again.words[-2:] == ["--served-model-name", str(house.model)]
    assert house.calls.count("resolve") == 2


def test_a_draft_keeps_its_own_loader(house: House) -> None:
    boot = house.serve("--speculative-config", '{"model": "draft"}', SHARDBOOT_PROVE="never")
    assert boot.words[-2:] == ["--draft-load-format", "auto"]


def test_the_process_itself_becomes_vllm(house: House) -> None:
    boot = house.serve()
    assert boot.vllm["pid"] == boot.pid
    assert boot.vllm["cwd"] == str(house.root)
    assert boot.stdout == "this is vllm\n"


def test_its_imports_are_quicker_on_a_hit_and_as_ever_on_the_source(house: House) -> None:
    assert not house.serve("--load-format", "dummy").vllm["is_quick"]
    assert house.serve().vllm["is_quick"]


@pytest.mark.parametrize("status", [0, 1, 3, 255])
def test_the_exit_status_is_vllms_own(house: House, status: int) -> None:
    house.rules(serve={"status": status})
    assert house.serve().status == status


def test_a_death_of_vllm_by_a_signal_is_seen_as_such(house: House) -> None:
    house.rules(serve={"kill": signal.SIGKILL})
    assert house.serve().status == -signal.SIGKILL


def test_signals_are_as_a_fresh_program_expects_them(house: House) -> None:
    signals = house.serve().vllm["signals"]
    assert signals["SigIgn"] == 0
    assert signals["SigBlk"] == 0


@pytest.mark.parametrize("action", ["reuse", "source"])
def test_only_the_standard_descriptors_and_the_locks_cross(house: House, action: str) -> None:
    words = [] if action == "reuse" else ["--load-format", "dummy"]
    fds = house.serve(*words).vllm["fds"]
    extra = [target for number, target in fds.items() if int(number) > 2]
    locked = []
    if action == "reuse":
        locked = [str(only_checkpoint(house) / "manifest.json"), str(only_caches(house))]
    assert extra == locked


def test_the_checkpoint_is_locked_for_as_long_as_vllm_lives(house: House) -> None:
    house.rules(serve={"stay": True})
    process = house.start("serve", house.model, "-tp", 2)
    house.wait_for("staying")
    manifest = only_checkpoint(house) / "manifest.json"
    with manifest.open("rb") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert house.finish(process).status == 0
    with manifest.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_environment_is_the_users(house: House) -> None:
    boot = house.serve(HF_HOME="/hf", ODD="a\nb")
    shells_own = {"PWD", "OLDPWD", "SHLVL", "_"}
    wanted = house.environ | {"HF_HOME": "/hf", "ODD": "a\nb"}
    got = {k: v for k, v in boot.vllm["environ"].items() if k not in shells_own}
    assert got == wanted | {
        "VLLM_CACHE_ROOT": f"{only_caches(house)}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{only_caches(house)}/inductor",
        "TRITON_CACHE_DIR": f"{only_caches(house)}/triton",
    }


@pytest.mark.parametrize(
    ("given", "got"),
    [(None, None), ("other", "other,shardboot"), ("", "shardboot"), ("shardboot", "shardboot")],
)
def test_our_plugin_is_added_to_those_that_the_user_allows(
    house: House, given: str | None, got: str | None
) -> None:
    assert house.serve(VLLM_PLUGINS=given).vllm["environ"].get("VLLM_PLUGINS") == got


def test_a_vllm_that_is_not_there_is_exit_127_and_one_that_may_not_run_126(house: House) -> None:
    missing = house.run("serve", "--vllm", house.root / "nothing", house.model)
    assert missing.status == 127
    assert "--vllm" in missing.stderr
    plain = house.root / "plain"
    plain.write_text("")
    assert house.run("serve", "--vllm", plain, house.model).status == 126


def test_vllm_may_be_named_by_path(house: House) -> None:
    elsewhere = house.root / "elsewhere"
    os.rename(house.bin, elsewhere)
    (elsewhere / "vllm").write_text(f"#!{elsewhere}/python3-stub\n")
    boot = house.run("serve", "--vllm", elsewhere / "vllm", house.model)
    assert boot.vllm["argv"][0] == str(elsewhere / "vllm")
