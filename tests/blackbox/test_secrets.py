"""Secrets: given by files, and in nothing that shardboot writes, prints, or starts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from blackbox.harness import Boot, House
from blackbox.watching import ANSWERS, health
from processes import descendants
from serving import free_port

MARK: Final = "HUSHHUSH"
"""In every secret of these tests."""

WORDS: Final = ("--api-key", f"sk-{MARK}", f"sk-other-{MARK}", "--hf-token", f"hf_{MARK}")
STATUS: Final = {"health": 1, "prove": 51}
"""What commands end with here: no server runs, and a stub proves nothing."""

FILES: Final = ("VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_KEY")


@pytest.fixture
def kept(house: House) -> House:
    """A house with secrets in files, and one in a variable."""
    (house.root / "secrets").mkdir()
    for name in FILES:
        path = house.root / "secrets" / name
        path.write_text(f"{name}-{MARK}\n")
        house.environ[f"SHARDBOOT_{name}_FILE"] = str(path)
    house.environ |= {"HF_TOKEN": f"hf_variable_{MARK}", "SHARDBOOT_SHARED": str(house.shared)}
    return house


def at_rest(house: House) -> dict[str, bytes]:
    """Return all that lies in the state directory and in the stores."""
    roots = (house.state, house.local, house.shared)
    paths = [path for root in roots for path in root.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in paths}


def holders(house: House) -> list[str]:
    return [path for path, data in at_rest(house).items() if MARK.encode() in data]


def argvs(pid: int) -> Iterator[str]:
    """Yield the words of every process that this one has started, and they in turn."""
    for child in descendants(pid):
        yield Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")


def run(house: House, *words: object) -> Boot:
    """Run a command, whatever comes of it, and see that it says no secret."""
    boot = house.run(*words)
    assert MARK not in boot.stdout + boot.stderr, words
    return boot


def commands(house: House, name: str) -> Iterator[list[object]]:
    """Yield every command but `serve` and `wait`, as they follow after a first boot."""
    model = [house.model, "-tp", 2, *WORDS]
    for command in ("plan", "save", "push"):
        yield [command, "--format", "json", *model]
    for words in (["list", "--shared"], ["show", name], ["verify", "--deep"], ["pin", name]):
        yield [*words, "--format", "json"]
    for words in (["unpin", name], ["reject", name], ["unreject", name], ["gc"], ["status"]):
        yield [*words, "--format", "json"]
    yield ["health", "--format", "json"]
    yield ["advise", "--format", "json", *model]
    yield ["tune", "--format", "json", *model]
    yield ["probe", "--format", "json", "--size", "1MiB", "--seconds", "0.1", house.shared]
    house.local.rename(house.root / "another node's")
    yield ["pull", "--format", "json", *model]
    yield ["prove", "--format", "json", *model]


def test_no_command_says_or_keeps_a_secret(kept: House) -> None:
    boot = run(kept, "serve", "--publish", kept.model, "-tp", 2, *WORDS)
    assert boot.events[-1] == "local.hit"
    (name,) = kept.store.names()
    for words in commands(kept, name):
        assert run(kept, *words).status == STATUS.get(str(words[0]), 0), words
    assert len(at_rest(kept)) > 20
    assert holders(kept) == []


def test_a_server_that_answers_is_watched_without_a_secret(kept: House) -> None:
    kept.rules(serve=ANSWERS)
    words = ("serve", kept.model, "-tp", 2, "--port", free_port(), *WORDS)
    process = kept.start(*words)
    kept.wait_for("listening")
    for command in ("status", "wait", "health"):
        found = run(kept, command, "--format", "json")
        assert '"serving"' in found.stdout
    assert MARK not in kept.finish(process).stderr
    assert holders(kept) == []


@pytest.mark.parametrize(
    ("command", "child"), [("serve", "resolve"), ("serve", "save"), ("prove", "prove")]
)
def test_no_child_has_a_secret_among_its_words(kept: House, command: str, child: str) -> None:
    if command == "prove":
        kept.serve()
    kept.rules(**{"resolve" if child == "resolve" else "save": {"hang": True}})
    process = kept.start(command, kept.model, "-tp", 2, *WORDS)
    kept.wait_for("hanging")
    found = list(argvs(process.pid))
    assert any(child in words for words in found)
    assert [words for words in found if MARK in words] == []
    assert health(kept)[0] == 1
    assert holders(kept) == []
    kept.end_hanging()
    assert MARK not in kept.finish(process).stderr
    assert holders(kept) == []


@pytest.mark.parametrize("rules", [{"exit": 1}, {"say": "no"}])
@pytest.mark.parametrize("stage", ["resolve", "save"])
def test_no_failure_says_a_secret(kept: House, stage: str, rules: dict[str, object]) -> None:
    kept.rules(**{stage: rules})
    boot = run(kept, "serve", kept.model, "-tp", 2, *WORDS)
    assert boot.words == [str(kept.model), "-tp", "2", *WORDS]
    assert holders(kept) == []


@pytest.mark.parametrize("way", ["printed", "answered"])
@pytest.mark.parametrize("stage", ["resolve", "save", "prove"])
def test_what_a_child_tells_of_secrets_when_it_fails_is_nowhere(
    kept: House, stage: str, way: str
) -> None:
    values = [f"{name}-{MARK}" for name in FILES] + [word for word in WORDS if MARK in word]
    text = f"401: {' '.join([*values, kept.environ['HF_TOKEN']])}"
    status = "rejected" if stage == "resolve" else "refused"
    answer = {"status": status, "reason": "save.dtype", "message": text}
    rules = {"print": text, **({"exit": 3} if way == "printed" else {"say": json.dumps(answer)})}
    command = "serve"
    if stage == "prove":
        command = "prove"
        kept.serve()
    kept.rules(**{"resolve" if stage == "resolve" else "save": rules})
    boot = run(kept, command, kept.model, "-tp", 2, *WORDS)
    assert f"401: {' '.join(['***'] * (len(values) + 1))}" in boot.stderr
    assert holders(kept) == []


def test_vllm_gets_the_secrets_of_files_in_its_environment_and_in_no_word(kept: House) -> None:
    for more in ({}, {"SHARDBOOT": "off"}):
        boot = kept.run("serve", kept.model, "-tp", 2, **more)
        assert MARK not in " ".join(boot.vllm["argv"])
        environ = boot.vllm["environ"]
        assert {name: environ[name] for name in FILES} == {n: f"{n}-{MARK}" for n in FILES}
        assert environ["HF_TOKEN"] == f"hf_variable_{MARK}"
        assert [name for name in environ if re.fullmatch("SHARDBOOT_.*_FILE", name)] == []


@pytest.mark.parametrize("switch", ["", "off"])
def test_no_server_starts_without_the_key_that_it_was_to_have(kept: House, switch: str) -> None:
    os.unlink(kept.environ["SHARDBOOT_VLLM_API_KEY_FILE"])
    boot = kept.serve(SHARDBOOT=switch)
    assert (boot.status, kept.calls) == (10, [])
    path = kept.root / "secrets" / "VLLM_API_KEY"
    error, hint = boot.stderr.splitlines()
    named = f"SHARDBOOT_VLLM_API_KEY_FILE: {path}"
    assert error == f"shardboot: error: config.invalid: {named}: No such file or directory"
    assert hint.startswith("shardboot: hint: ")


def test_a_look_at_a_boot_needs_no_secret(kept: House) -> None:
    kept.serve()
    os.unlink(kept.environ["SHARDBOOT_VLLM_API_KEY_FILE"])
    assert health(kept)[1]["phase"] == "failed"
    assert kept.run("status").status == 0
    assert kept.run("list").status == 10
