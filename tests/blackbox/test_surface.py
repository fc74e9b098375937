"""Settings from everywhere, the switch, and the operator commands."""

from __future__ import annotations

import os

import pytest
from blackbox.harness import House, snapshot


@pytest.mark.parametrize("word", ["off", "OFF", "0", "no", "false"])
def test_switched_off_it_becomes_vllm_with_the_users_words(house: House, word: str) -> None:
    boot = house.serve("--no-such", SHARDBOOT=word, SHARDBOOT_NONSENSE="x")
    assert boot.words == [str(house.model), "-tp", "2", "--no-such"]
    assert boot.stderr == ""
    assert boot.vllm["pid"] == boot.pid
    assert house.calls == ["serve"]
    assert not house.state.exists()
    assert boot.vllm["signals"]["SigIgn"] == 0


def test_switched_off_the_vllm_that_the_file_names_is_still_meant(house: House) -> None:
    config = house.root / "shardboot.toml"
    config.write_text(f'on_mis = "save"\nvllm = "{house.bin}/vllm"\n')
    boot = house.serve(SHARDBOOT="off", SHARDBOOT_CONFIG_FILE=config, PATH="/usr/bin:/bin")
    assert boot.words == [str(house.model), "-tp", "2"]
    assert boot.stderr == ""


def test_switched_off_a_broken_file_is_said_and_keeps_nothing_from_serving(house: House) -> None:
    config = house.root / "shardboot.toml"
    config.write_text("vllm = ")
    boot = house.serve(SHARDBOOT="off", SHARDBOOT_CONFIG_FILE=config)
    assert boot.words == [str(house.model), "-tp", "2"]
    assert boot.events == ["config.invalid"]
    assert boot.stderr.count("\n") == 1


@pytest.mark.parametrize("word", ["on", "1", ""])
def test_switched_on_it_is_there(house: House, word: str) -> None:
    assert house.serve(SHARDBOOT=word).events[-1] == "local.hit"


def test_flags_win_over_variables_and_these_over_the_file(house: House) -> None:
    config = house.root / "shardboot.toml"
    config.write_text('on_miss = "refuse"\nlog-format = "json"\n')
    boot = house.serve(SHARDBOOT_CONFIG_FILE=config, SHARDBOOT_LOG_FORMAT=None)
    assert boot.status == 31
    assert boot.stderr.startswith("{")
    boot = house.serve(SHARDBOOT_CONFIG_FILE=config, SHARDBOOT_LOG_FORMAT="text")
    assert boot.events
    boot = house.serve(SHARDBOOT_CONFIG_FILE=config, SHARDBOOT_ON_MISS="source")
    assert boot.words == [str(house.model), "-tp", "2"]
    boot = house.run(
        *("serve", "--on-miss", "save", house.model, "-tp", 2),
        SHARDBOOT_CONFIG_FILE=config,
        SHARDBOOT_ON_MISS="source",
        SHARDBOOT_LOG_FORMAT="text",
    )
    assert boot.events[-1] == "local.hit"


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"SHARDBOOT_LOCAL_DIRR": "/x"}, "did you mean SHARDBOOT_LOCAL_DIR?"),
        ({"SHARDBOOT_LOCAL_DIR": "relative"}, "absolute"),
        ({"SHARDBOOT_ON_MISS": "never"}, "SHARDBOOT_ON_MISS"),
        ({"SHARDBOOT_FILE_MODE": "0666"}, "lets everybody write"),
        ({"SHARDBOOT_PUBLISH": "yes"}, "no shared store"),
        ({"SHARDBOOT_SHARED": "ftp://host/x"}, "not a kind of store"),
        ({"SHARDBOOT_SHARED": "relative"}, "absolute"),
        ({"SHARDBOOT_CONFIG_FILE": "/none/such.toml"}, "/none/such.toml"),
    ],
    ids=lambda value: next(iter(value.items())) if isinstance(value, dict) else None,
)
def test_a_setting_that_is_wrong_is_exit_10_and_vllm_does_not_start(
    house: House, environ: dict[str, str], says: str
) -> None:
    boot = house.serve(**environ)
    assert (boot.status, boot.vllm) == (10, {})
    assert says in boot.stderr
    assert "Traceback" not in boot.stderr


@pytest.mark.parametrize("text", ["on_miss = ", "\xff\xfe", "on_mis = 'save'", "[a]\nb = 1"])
def test_a_config_file_that_is_wrong_is_exit_10(house: House, text: str) -> None:
    path = house.root / "shardboot.toml"
    path.write_bytes(text.encode("latin-1"))
    boot = house.serve(SHARDBOOT_CONFIG_FILE=path)
    assert (boot.status, boot.vllm) == (10, {})
    assert "Traceback" not in boot.stderr


def test_an_operator_sees_what_there_is(house: House) -> None:
    assert house.run("list").stdout == f"{house.local}: not there yet, so no checkpoints\n"
    # This one may not be mounted.
    assert house.run("list", "--shared", SHARDBOOT_SHARED=house.root / "away").status == 30
    saved = house.run("save", "--format", "json", house.model, "-tp", 2).json
    name = saved["checkpoint"]["name"]
    assert saved["outcome"] == "made"
    assert house.run("save", "--format", "json", house.model, "-tp", 2).json["outcome"] == "existed"
    assert [row["name"] for row in house.run("list", "--format", "json").json] == [name]
    assert house.run("show", name, "--format", "json").json["key"]["tp"] == 2
    assert house.run("verify", "--deep", "--format", "json").json == [
        {"name": name, "discrepancies": []}
    ]
    assert house.run("show", "none-such").status == 31
    assert house.run("push", house.model, "-tp", 2).status == 10
    assert house.run("pull", house.model, "-tp", 1).status == 31
    (house.store.path(name) / "config.json").write_text("")
    assert house.run("verify", name).status == 21


def test_no_foreign_name_speaks_to_the_terminal_in_an_error(house: House) -> None:
    planted = house.local / "\x1b]0;owned\x07"
    planted.mkdir(parents=True)
    (planted / "manifest.json").write_text("{}")
    boot = house.run("show", "none-such")
    assert boot.status == 31
    assert r"it has \x1b]0;owned\x07" in boot.stderr
    assert all(line.isprintable() for line in boot.stderr.split("\n"))


def test_pull_copies_once(house: House) -> None:
    assert house.run("pull", "--shared", house.shared, house.model, "-tp", 2).status == 31
    house.serve()
    house.shared_copy()
    words = ("pull", "--format", "json", "--shared", house.shared, house.model, "-tp", 2)
    assert house.run(*words).json["outcome"] == "made"
    assert house.run(*words).json["outcome"] == "existed"
    assert house.run("push", "--shared", house.shared, house.model, "-tp", 2).status == 0
    assert len([p for p in house.shared.iterdir() if p.name[0] != "."]) == 1


@pytest.mark.parametrize("is_saved", [False, True])
def test_plan_changes_nothing_but_memory(house: House, is_saved: bool) -> None:
    if is_saved:
        house.serve()
    house.local.mkdir(exist_ok=True)
    before = {name: snapshot(getattr(house, name)) for name in ("local", "shared", "model")}
    plan = house.plan(SHARDBOOT_SHARED=house.shared)
    assert plan["action"] == ("reuse" if is_saved else "save")
    assert before == {name: snapshot(getattr(house, name)) for name in before}
    beside = {p.name for p in house.state.iterdir()}
    assert beside == (
        {"caches", "memory", "ledger.jsonl", "logs", "status"} if is_saved else {"memory"}
    )


def test_plan_says_what_serve_then_does(house: House) -> None:
    assert house.plan()["reason"] == "local.absent"
    saved = house.serve()
    plan = house.plan()
    assert (plan["action"], plan["reason"]) == ("reuse", "local.hit")
    assert plan["checkpoint"]["path"] == saved.words[0]
    assert plan["key"]["tp"] == 2
    house.shared_copy()
    plan = house.plan(SHARDBOOT_SHARED=house.shared)
    assert (plan["action"], plan["reason"]) == ("copy", "shared.hit")
    assert plan["findings"]["shared"]["finding"] == "complete"
    text = house.run("plan", house.model, "-tp", 2)
    assert text.stdout.startswith("action  save")


def test_a_reader_that_has_gone_is_no_error_of_ours(house: House) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        process = house.start("serve", "--help", stdout=gone)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, "")


@pytest.mark.parametrize("words", [["--no-such"], ["no-such-command"], ["verify", "--nonsense"]])
def test_usage_errors_are_exit_2(house: House, words: list[str]) -> None:
    assert house.run(*words).status == 2


def test_in_an_image_a_model_is_served(house: House) -> None:
    assert house.run("enter", house.model, "-tp", 2).events[-1] == "local.hit"
    assert house.run("enter", "--model", house.model, "-tp", 2).events[-1] == "local.hit"
    assert house.run("enter", "list").stdout.count("\n") == 1


def test_in_an_image_a_slip_in_a_command_is_said_and_then_served_as_a_model(house: House) -> None:
    boot = house.run("enter", "lst", SHARDBOOT="off")
    assert boot.words == ["lst"]
    said = "'lst' is taken for a model's name; if a command was meant, it is 'list'"
    assert boot.stderr == f"shardboot: image.model: {said}\n"


def test_in_an_image_a_program_takes_the_place_of_ours(house: House) -> None:
    run = house.run("enter", "sh", "-c", "echo $$; exit 7")
    assert (run.status, run.stdout, run.stderr) == (7, f"{run.pid}\n", "")
