"""Whole boots: the real command line in front of real `vllm serve`, and what `plan` says instead.

`vllm serve` starts only where a server's answer matters; the rest asks `plan`, the same code.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from models import fine_tune, make_model
from processes import run
from serving import FLAGS, Boot, boot, environment

from entrypoint.checkpoint import manifest as manifests
from entrypoint.checkpoint.layout import checkpoint_name
from entrypoint.checkpoint.manifest import MANIFEST
from entrypoint.state.ledger import Ledger

pytestmark = pytest.mark.vllm

PROMPT = "The first word"
TP2 = ("-tp", "2")
HUB_ID = "shardboot-test/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

BRIEF = ("profile", "KV cache", "compile")
"""Phases that may be too short to be told."""


class Field:
    """A model, and nodes to boot it on: each with its own disk, all with one shared store."""

    def __init__(self, room: Path) -> None:
        self.room = room
        self.model = room / "model"
        make_model("dense", self.model)
        (room / "shared").mkdir()
        self.count = 0

    def node(self, name: str, **more: str) -> dict[str, str]:
        return environment(tp=2) | {
            "SHARDBOOT_LOCAL_DIR": str(self.store(name)),
            "SHARDBOOT_STATE_DIR": str(self.state(name)),
            "SHARDBOOT_LOG_FORMAT": "json",
            **{f"SHARDBOOT_{key.upper()}": value for key, value in more.items()},
        }

    def store(self, name: str) -> Path:
        return self.room / name / "checkpoints"

    def state(self, name: str) -> Path:
        return self.room / name / "state"

    def checkpoint(self, name: str) -> Path:
        (found,) = self.store(name).glob(f"*/{MANIFEST}")
        return found.parent

    def log(self) -> Path:
        self.count += 1
        return self.room / f"{self.count}.log"

    def boot(self, program: str, environ: dict[str, str], model: object, *words: str) -> Boot:
        command = [binary(program), "serve", str(model), *FLAGS, *words]
        return boot(command, environ, self.log(), model=str(model), prompt=PROMPT)

    def ask(
        self, command: str, environ: dict[str, str], model: object, *words: str
    ) -> dict[str, Any]:
        log = self.log()
        line = [binary("shardboot"), command, "--format", "json", str(model), *FLAGS, *words]
        status, said = run(line, environ, log)
        assert status == 0, log.read_text()
        answer: dict[str, Any] = json.loads(said)
        return answer


def binary(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    directory = tmp_path_factory.mktemp("boots")
    yield Field(directory)
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def plain(field: Field) -> Boot:
    return field.boot("vllm", environment(tp=2), field.model, *TP2)


@pytest.fixture(scope="module")
def saved(field: Field) -> Boot:
    return field.boot("shardboot", field.node("one"), field.model, *TP2)


@dataclass(frozen=True)
class Hit:
    """A boot, and what the store was before it."""

    boot: Boot
    before: dict[str, tuple[int, int]]


@pytest.fixture(scope="module")
def hit(field: Field, saved: Boot) -> Hit:
    before = inodes(field.store("one"))
    return Hit(field.boot("shardboot", field.node("one"), field.model, *TP2), before)


def test_first_boot_saves_and_answers_as_vllm_alone(field: Field, plain: Boot, saved: Boot) -> None:
    assert (saved.tier, saved.reason) == ("saved", "local.absent")
    assert saved.answer == plain.answer
    # A model that says one token over and over would hide a wrong weight.
    assert len(set(plain.answer.tokens)) > 3
    # exec: the process that decided is the one that serves.
    attempts = [e for e in Ledger(field.state("one")).entries() if e.get("event") == "attempt"]
    assert attempts[-1]["pid"] == saved.pid


def test_second_boot_is_a_local_hit(field: Field, plain: Boot, hit: Hit) -> None:
    assert (hit.boot.tier, hit.boot.reason) == ("local", "local.hit")
    assert hit.boot.answer == plain.answer
    assert inodes(field.store("one")) == hit.before


def test_a_hits_timeline_has_a_name_for_every_second(field: Field, hit: Hit) -> None:
    attempts = [e for e in Ledger(field.state("one")).entries() if e.get("event") == "attempt"]
    (boot,) = [str(e["boot"]) for e in attempts if e["pid"] == hit.boot.pid]
    log = field.log()
    line = [binary("shardboot"), "timeline", "--format", "json", boot]
    status, said = run(line, field.node("one"), log)
    assert status == 0, log.read_text()
    found = json.loads(said)
    # From a Python that has just started to the first answer; nobody else asked for its health.
    assert hit.boot.healthy - 2 < found["seconds"] < hit.boot.healthy + 0.1
    # Each process may import by itself, or one for all. With --enforce-eager there is next to
    # nothing to profile, to compile or to warm up.
    phases = [name for name, _ in groupby(phase["phase"] for phase in found["phases"])]
    assert [name for name in phases if name not in (*BRIEF, "vLLM")] == [
        *["decide", "imports", "build", "weights", "process", "server"],
    ]
    unknown = [phase["seconds"] for phase in found["phases"] if phase["phase"] == "vLLM"]
    assert sum(unknown) < 1, found
    (weights,) = [phase for phase in found["phases"] if phase["phase"] == "weights"]
    assert weights["bytes"] > 0


def inodes(store: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in store.rglob("*")}


def test_another_node_copies_from_the_shared_store(field: Field, plain: Boot, saved: Boot) -> None:
    shared = str(field.room / "shared")
    pushed = field.ask("push", field.node("one", shared=shared), field.model, *TP2)
    found = field.boot("shardboot", field.node("two", shared=shared), field.model, *TP2)
    assert (found.tier, found.reason) == ("shared", "shared.hit")
    assert found.answer == plain.answer
    assert field.checkpoint("two").name == pushed["checkpoint"]["name"]


@pytest.mark.long
def test_checkpoint_directory_serves_as_the_model(field: Field, plain: Boot, saved: Boot) -> None:
    found = field.boot("shardboot", field.node("three"), field.checkpoint("one"), *TP2)
    assert (found.tier, found.reason) == ("local", "local.hit")
    assert found.answer == plain.answer
    assert not field.store("three").exists()


@pytest.mark.parametrize(
    ("words", "name", "wanted", "found"),
    [(("-tp", "1"), "tp", 1, 2), ((*TP2, "--dtype=float16"), "dtype", "float16", "bfloat16")],
)
def test_checkpoint_for_other_words_is_foreign(
    words: tuple[str, ...], name: str, wanted: object, found: object, field: Field, saved: Boot
) -> None:
    plan = field.ask("plan", field.node("one"), field.model, *words)
    assert plan["findings"]["local"]["finding"] == "foreign"
    assert plan["differences"] == [{"field": name, "wanted": wanted, "found": found}]
    assert (plan["action"], plan["reason"]) == ("save", "local.foreign")


def test_checkpoint_of_another_vllm_is_foreign(field: Field, saved: Boot) -> None:
    ours = manifests.decode((field.checkpoint("one") / MANIFEST).read_bytes())
    key = ours.key._replace(vllm="0.31.0+cpu")
    theirs = ours._replace(key=key, name=checkpoint_name(ours.source.name, key))
    directory = field.store("old") / theirs.name
    shutil.copytree(field.checkpoint("one"), directory)
    (directory / MANIFEST).write_bytes(theirs.encode())
    environ = field.node("one", local_dir=str(field.store("old")))
    plan = field.ask("plan", environ, field.model, *TP2)
    assert plan["findings"]["local"]["finding"] == "foreign"
    assert plan["differences"] == [
        {"field": "vllm", "wanted": ours.key.vllm, "found": "0.31.0+cpu"}
    ]


def test_fine_tune_with_one_other_row_is_another_model(field: Field, saved: Boot) -> None:
    tuned = field.room / "tuned" / "model"
    fine_tune(field.model, tuned)
    plan = field.ask("plan", field.node("one"), tuned, *TP2)
    assert plan["findings"]["local"]["finding"] == "foreign"
    assert [difference["field"] for difference in plan["differences"]] == ["model"]


def test_same_files_elsewhere_are_the_same_model(field: Field, saved: Boot) -> None:
    elsewhere = field.room / "elsewhere" / "model"
    here = field.ask("plan", field.node("one"), field.model, *TP2)
    for keeps_times in (False, True):
        copy = shutil.copy2 if keeps_times else shutil.copyfile
        shutil.copytree(field.model, elsewhere, copy_function=copy)
        there = field.ask("plan", field.node("one"), elsewhere, *TP2)
        assert (there["action"], there["reason"]) == ("reuse", "local.hit")
        assert there["key"] == here["key"]
        assert there["checkpoint"] == here["checkpoint"]
        shutil.rmtree(elsewhere)


@dataclass(frozen=True)
class Hub:
    """A cache with a model, and a node that has it and has saved its checkpoint."""

    cache: Path
    environ: dict[str, str]
    made: dict[str, Any]


@pytest.fixture(scope="module")
def hub(field: Field) -> Hub:
    cache = field.room / "hub"
    fill_hub_cache(cache, field.model)
    (field.room / "hub-shared").mkdir()
    environ = field.node("with", shared=str(field.room / "hub-shared"))
    environ |= {"HF_HUB_CACHE": str(cache)}
    return Hub(cache, environ, field.ask("save", environ, HUB_ID, *TP2))


def test_hub_id_in_the_cache_is_saved_and_hit(field: Field, saved: Boot, hub: Hub) -> None:
    assert hub.made["outcome"] == "made"
    again = field.ask("plan", hub.environ, HUB_ID, *TP2)
    assert (again["action"], again["reason"]) == ("reuse", "local.hit")
    assert again["checkpoint"] == hub.made["checkpoint"]
    source = manifests.decode((field.checkpoint("with") / MANIFEST).read_bytes()).source
    assert (source.name, source.revision) == (HUB_ID, COMMIT)
    # The plain directory holds the same model: each side takes the other's checkpoint.
    plain = field.ask("plan", hub.environ, field.model, *TP2)
    assert (plain["action"], plain["checkpoint"]) == ("reuse", hub.made["checkpoint"])
    here = field.node("one") | {"HF_HUB_CACHE": str(hub.cache)}
    other = field.ask("plan", here, HUB_ID, *TP2)
    assert (other["action"], other["key"]) == ("reuse", plain["key"])


def test_node_without_the_source_serves_the_checkpoint_of_its_very_commit(
    field: Field, plain: Boot, hub: Hub
) -> None:
    field.ask("push", hub.environ, HUB_ID, *TP2)
    without = field.node("without", shared=hub.environ["SHARDBOOT_SHARED"])
    without |= {"HF_HUB_CACHE": str(field.room / "no-hub")}
    unpinned = field.ask("plan", without, HUB_ID, *TP2)
    assert (unpinned["action"], unpinned["reason"]) == ("serve-source", "engine.rejected")
    found = field.boot("shardboot", without, HUB_ID, "--revision", COMMIT, *TP2)
    assert (found.tier, found.reason) == ("shared", "shared.hit")
    assert found.answer == plain.answer
    again = field.ask("plan", without, HUB_ID, "--revision", COMMIT, *TP2)
    assert (again["action"], again["reason"]) == ("reuse", "local.hit")


def fill_hub_cache(hub: Path, model: Path) -> None:
    """Lay out `model` as huggingface_hub's cache does; large files' blobs have sha256 names."""
    repository = hub / f"models--{HUB_ID.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    blobs = repository / "blobs"
    for directory in (snapshot, blobs, repository / "refs"):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for path in sorted(model.iterdir()):
        data = path.read_bytes()
        is_large = path.suffix == ".safetensors"
        as_git = b"blob %d\0" % len(data) + data
        blob = (hashlib.sha256(data) if is_large else hashlib.sha1(as_git)).hexdigest()  # noqa: S324 - git's
        (blobs / blob).write_bytes(data)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", blob))


@pytest.fixture(scope="module")
def rejection(field: Field) -> tuple[int, str]:
    log = field.log()
    status, _ = run([binary("vllm"), *bad_words(field)], environment(), log)
    return status, last_line(log)


@pytest.mark.parametrize("switch", ["on", "off"])
def test_words_that_vllm_rejects_get_vllms_own_message(
    switch: str, field: Field, rejection: tuple[int, str]
) -> None:
    assert "--no-such-flag" in rejection[1]
    environ, log = field.node(switch), field.log()
    environ |= {"SHARDBOOT": "off"} if switch == "off" else {}
    status, _ = run([binary("shardboot"), *bad_words(field)], environ, log)
    assert (status, last_line(log)) == rejection
    assert ("engine.rejected" in log.read_text()) == (switch == "on")
    assert field.state(switch).exists() == (switch == "on")


def bad_words(field: Field) -> list[str]:
    return ["serve", str(field.model), "--no-such-flag"]


def last_line(log: Path) -> str:
    return log.read_text().splitlines()[-1]
