"""How real vLLM reads words: spellings, what is another key, what is not, what is kept of them.

All cases are answered in forks of one child that has imported vLLM once; one test asks the way a
boot does, and gets the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import environment
from spellings import (
    ANOTHER,
    DRAFT,
    EXPERTS,
    LOADERS,
    MOE,
    NEUTRAL,
    PLAIN,
    PLUGINS,
    REJECTED,
    SECRET,
    SERVERS,
    SPELLINGS,
    TWINS,
    Case,
    all_cases,
    case,
)

from entrypoint.checkpoint.key import FORMAT, Key
from entrypoint.engine import resolve as resolving
from entrypoint.engine.address import address
from entrypoint.engine.executable import find
from entrypoint.engine.question import question
from entrypoint.engine.resolution import Resolution, WordsRefused
from entrypoint.engine.resolve import RESOLVE_PROGRAM
from entrypoint.engine.words import kept_positions
from entrypoint.model.identity import Identity
from entrypoint.state.memory import Memory
from entrypoint.state.status import Address

pytestmark = pytest.mark.vllm

MODELS = Path(__file__).parents[1] / "models.py"

BATCH = """
import importlib.util, json, os, signal, sys
spec = importlib.util.spec_from_file_location("resolve", sys.argv[1])
resolve = importlib.util.module_from_spec(spec)
sys.modules["resolve"] = resolve
spec.loader.exec_module(resolve)
# Imported, but no plugin loaded yet: each case says which are allowed.
import vllm.engine.arg_utils, vllm.entrypoints.cli.serve, vllm.plugins
out = os.fdopen(int(sys.argv[2]), "w")
for words, environ in json.load(sys.stdin):
    pid = os.fork()
    if pid == 0:
        # A lock that another thread held at the fork would be waited for without end.
        signal.alarm(120)
        os.environ.update(environ)
        try:
            found = resolve.answer(words)
        except BaseException as error:
            found = {"status": "failed", "message": repr(error)}
        out.write(json.dumps(found) + "\\n")
        out.flush()
        os._exit(0)
    os.waitpid(pid, 0)
"""


class Room:
    """The models and files that the cases name, and vLLM's answers to all of them."""

    def __init__(self, root: Path) -> None:
        self.places = {name: str(root / name) for name in ("dense", "moe", "draft")}
        for kind in ("dense", "moe"):
            command = [sys.executable, str(MODELS), kind, str(root / kind)]
            subprocess.run(command, check=True, capture_output=True)
        shutil.copytree(root / "dense", root / "draft")
        options = "dtype: bfloat16\nmax-model-len: 256\ntensor-parallel-size: "
        for name, text in {
            "yaml": options + "2\n",
            "model_yaml": f"model: {root / 'dense'}\n{options}2\n",
            "tp4_yaml": options + "4\n",
            "server_yaml": options + "2\nport: 1234\nssl-cert-reqs: 2\n",
        }.items():
            (root / f"{name}.yaml").write_text(text)
            self.places[name] = str(root / f"{name}.yaml")
        self.answers = self._ask(all_cases())

    def words(self, words: Sequence[str]) -> list[str]:
        found = list(words)
        for name, place in self.places.items():
            found = [word.replace(f"{{{name}}}", place) for word in found]
        return found

    def _ask(self, cases: Sequence[Case]) -> dict[str, Any]:
        unique = {repr(each): each for each in cases}
        request = [[self.words(words), environ] for words, environ in unique.values()]
        reading, writing = os.pipe()
        with os.fdopen(reading) as pipe:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", BATCH, RESOLVE_PROGRAM, str(writing)],
                env=environment(tp=2),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[writing],
            )
            os.close(writing)
            with child:
                assert child.stdin is not None
                child.stdin.write(json.dumps(request).encode())
                child.stdin.close()
                lines = [json.loads(line) for line in pipe]
        return dict(zip(unique, lines, strict=True))

    def answer(self, asked: Case) -> Any:
        return self.answers[repr(asked)]

    def key(self, asked: Case) -> dict[str, Any]:
        answer = self.answer(asked)
        assert answer["status"] == "ok", answer
        found: dict[str, Any] = answer["key"]
        return found

    def digest(self, asked: Case) -> str:
        beside: dict[str, Any] = {"model": "", "engine": "vllm", "format": FORMAT}
        return Key.from_json(beside | self.key(asked)).digest


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    return Room(tmp_path_factory.mktemp("resolver"))


def differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> set[str]:
    return {name for name in left if left[name] != right[name]}


@pytest.mark.parametrize("name", SPELLINGS)
def test_all_spellings_of_one_engine_have_one_key(room: Room, name: str) -> None:
    spelled, model_words = SPELLINGS[name]
    answer = room.answer(spelled)
    assert differing(room.key(spelled), room.key(case(PLAIN))) == set()
    assert room.digest(spelled) == room.digest(case(PLAIN))
    recipe = answer["words"]
    assert (recipe["verified"], recipe["why"]) == (True, "")
    words = room.words(spelled[0])
    assert [words[position] for position in recipe["drop"]] == room.words(model_words.split())
    assert recipe["served_name"] is ("served" in name)
    assert answer["model"]["word"] == room.places["dense"]


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_decides_nothing_about_weights_is_not_in_the_key(room: Room, name: str) -> None:
    assert differing(room.key(NEUTRAL[name]), room.key(case(PLAIN))) == set()


@pytest.mark.parametrize("name", ANOTHER)
def test_what_decides_about_weights_is_another_key(room: Room, name: str) -> None:
    asked, fields = ANOTHER[name]
    assert differing(room.key(asked), room.key(case(PLAIN))) >= fields
    assert room.digest(asked) != room.digest(case(PLAIN))


@pytest.mark.parametrize("name", MOE)
def test_who_holds_which_expert_is_another_key(room: Room, name: str) -> None:
    asked, fields = MOE[name]
    assert differing(room.key(asked), room.key(case(EXPERTS))) == fields


@pytest.mark.parametrize("name", TWINS)
def test_json_and_dotted_words_are_the_same(room: Room, name: str) -> None:
    left, right = TWINS[name]
    assert room.key(left) == room.key(right)
    assert room.digest(left) != room.digest(case(PLAIN))
    assert room.answer(left)["words"]["verified"], room.answer(left)["words"]
    assert room.answer(right)["words"]["verified"], room.answer(right)["words"]


def test_a_draft_is_told_to_keep_its_own_loader(room: Room) -> None:
    for twin in TWINS["draft"]:
        answer = room.answer(twin)
        assert answer["kind"]["draft"] == "separate"
        told = answer["words"]
        # Either constant words, or which of the user's own to make them of.
        assert told["draft_in"] is not None or told["speculative"][-1] == "auto"


@pytest.mark.parametrize("name", REJECTED)
def test_what_vllm_rejects_is_rejected_in_its_words_without_the_users_values(
    room: Room, name: str
) -> None:
    answer = room.answer(REJECTED[name])
    assert answer["status"] == "rejected", answer
    assert answer["message"]
    assert SECRET not in json.dumps(answer)


def test_a_loader_of_the_users_own_is_seen(room: Room) -> None:
    loads = {name: room.answer(asked)["load"] for name, asked in LOADERS.items()}
    assert [loads[name]["format"] for name in ("auto", "safetensors", "dummy")] == [
        *("auto", "safetensors", "dummy")
    ]
    assert [name for name, load in loads.items() if load["extra_config"]] == ["extra"]
    # Where the model is a directory, vLLM heeds no other one.
    assert not any(load["elsewhere"] for load in loads.values())


@pytest.mark.parametrize("name", SERVERS)
def test_where_vllm_will_answer_is_known(room: Room, name: str) -> None:
    asked, expected = SERVERS[name]
    answer = room.answer(asked)
    assert answer["status"] == "ok", answer
    assert address(room.words(asked[0]), answer["server"]) == Address(**expected)


def test_an_answer_is_remembered_without_the_address_of_one_boot(room: Room) -> None:
    told = [room.answer(SERVERS[name][0])["server"] for name in ("defaults", "words", "socket")]
    assert told == [told[0]] * 3


def test_our_load_format_is_there_where_our_plugin_is_allowed(room: Room) -> None:
    found = {name: room.answer(asked)["engine"]["plugin"] for name, asked in PLUGINS.items()}
    assert found["unset"] == found["ours added"] is not None
    assert found["theirs only"] is found["none"] is None


def test_no_answer_holds_a_secret(room: Room) -> None:
    assert SECRET not in json.dumps(list(room.answers.values()))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_ignorable_words_anywhere_ask_the_same_question(room: Room, data: st.DataObject) -> None:
    about = room.answer(case(PLAIN))["engine"]
    engine = find("vllm", {"PATH": os.path.dirname(sys.executable)})
    options = [option for option in about["ignorable"] if "served" not in option]
    words = room.words(case(PLAIN)[0])
    for option in data.draw(st.lists(st.sampled_from(options), max_size=4)):
        arity = about["ignorable"][option]
        count = arity if isinstance(arity, int) else data.draw(st.integers(1, 3))
        joined = arity == 1 and data.draw(st.booleans())
        spelled = [f"{option}={SECRET}"] if joined else [option, *[SECRET] * count]
        # After the model, before an option, or at the end.
        place = data.draw(st.sampled_from([words.index(w) for w in ("--dtype", "-tp")]))
        place = data.draw(st.sampled_from([place, len(words)]))
        words[place:place] = spelled
    kept = [words[position] for position in kept_positions(words, about["ignorable"])]
    assert kept == room.words(case(PLAIN)[0])
    assert question(engine, words, {}, about) == question(engine, kept, {}, about)


def test_a_boot_asks_once_remembers_and_keeps_no_word(
    room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = environment(tp=2) | {"HF_TOKEN": SECRET, "VLLM_PLUGINS": "other"}
    engine = find("vllm", environ | {"PATH": os.path.dirname(sys.executable)})
    memory = Memory(tmp_path)
    words = room.words(case(f"{PLAIN} --api-key {SECRET} --host secret.example")[0])
    source = Identity({"config.json": "0" * 64}, {})

    def ask(words: Sequence[str]) -> Resolution | WordsRefused:
        return resolving.resolve(engine, words, environ, memory, lambda *_: source)

    first = ask(words)
    assert isinstance(first, Resolution)
    assert first.key.digest == room.digest(case(PLAIN))
    assert first.plugin is not None
    assert first.drop == (0,)
    monkeypatch.setattr(resolving, "_ask", lambda *_: pytest.fail("asked again"))
    assert ask(words) == first
    assert first.server == Address(host="secret.example")
    again = ask(room.words(case(f"--port 1 {PLAIN}")[0]))
    assert again == first._replace(drop=(2,), server=Address(port=1))
    at_rest = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert at_rest
    for word in (SECRET, "secret.example"):
        assert word.encode() not in at_rest


def test_a_drafts_config_is_made_of_the_users_words_and_kept_nowhere(
    room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = environment(tp=2)
    engine = find("vllm", environ | {"PATH": os.path.dirname(sys.executable)})
    memory = Memory(tmp_path)
    draft = {"model": room.places["draft"], "num_speculative_tokens": 2}
    words = room.words(case(f"{PLAIN} --speculative-config '{DRAFT}'")[0])

    def ask(words: Sequence[str]) -> Resolution | WordsRefused:
        source = Identity({"config.json": "0" * 64}, {})
        return resolving.resolve(engine, words, environ, memory, lambda *_: source)

    first = ask(words)
    assert isinstance(first, Resolution)
    assert first.append[0] == "--speculative-config"
    told = json.loads(first.append[1])
    assert told == draft | {"draft_load_config": {"load_format": "auto"}}
    monkeypatch.setattr(resolving, "_ask", lambda *_: pytest.fail("asked again"))
    assert ask(["--port", "1", *words]) == first._replace(drop=(2,), server=Address(port=1))
    at_rest = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"num_speculative_tokens" not in at_rest
