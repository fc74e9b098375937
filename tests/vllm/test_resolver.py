"""How real vLLM reads words: spellings, what is another key, what is not, what is kept of them.

All cases are answered in forks of one child that has imported vLLM once; one test asks the way a
boot does, and gets the same.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entrypoint.checkpoint.key import FORMAT, Key
from entrypoint.engine import resolution
from entrypoint.engine.address import address
from entrypoint.engine.executable import find, with_plugin
from entrypoint.engine.question import question
from entrypoint.engine.resolution import RESOLVE_PROGRAM, Rejected, Resolution
from entrypoint.engine.words import kept_positions
from entrypoint.model.identity import Identity
from entrypoint.state.memory import Memory
from entrypoint.state.status import Address

pytestmark = pytest.mark.vllm

MODELS = Path(__file__).parents[1] / "models.py"
SECRET = "sk-0123-very-secret"  # noqa: S105 - a stand-in
SMALL = "--dtype bfloat16 --max-model-len 256"
PLAIN = f"{{dense}} {SMALL} -tp 2"
EXPERTS = f"{{moe}} {SMALL} -tp 2"

BATCH = """
import importlib.util, json, os, sys
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

Case = tuple[Sequence[str], Mapping[str, str]]


def case(words: str, **environ: str) -> Case:
    """Return words as a shell cuts them; `{dense}` and the like stand for places of the `Room`."""
    return tuple(shlex.split(words)), environ


# The same engine, spelled differently; and the words that spell the model.
SPELLINGS: dict[str, tuple[Case, str]] = {
    **{
        size: (case(f"{{dense}} {SMALL} {size}"), "{dense}")
        for size in (
            *("-tp 2", "-tp=2", "--tensor-parallel-size 2", "--tensor-parallel-size=2"),
            *("--tensor_parallel_size 2", "--tensor_parallel_size=2", "-tp 1 -tp 2"),
            *("-tp 4 --tensor-parallel-size=2", "--tokenizer {dense} -tp 2"),
        )
    },
    "options before the model": (case(f"{SMALL} -tp 2 {{dense}}"), "{dense}"),
    "--model X": (case(f"--model {{dense}} {SMALL} -tp 2"), "--model {dense}"),
    "--model X last": (case(f"{SMALL} -tp 2 --model {{dense}}"), "--model {dense}"),
    "--model=X": (case(f"{SMALL} --model={{dense}} -tp 2"), "--model={dense}"),
    "--config": (case("{dense} --config {yaml}"), "{dense}"),
    "--config with the model": (case("--config {model_yaml}"), ""),
    "words over --config": (case("{dense} --config {tp4_yaml} -tp 2"), "{dense}"),
    "served name": (case(f"{PLAIN} --served-model-name a b"), "{dense}"),
    "served name =": (case(f"{PLAIN} --served-model-name=a"), "{dense}"),
    "served_name": (case(f"{PLAIN} --served_model_name a"), "{dense}"),
    "the model as served name": (case(f"{PLAIN} --served-model-name {{dense}}"), "{dense}"),
}

# What decides nothing about weights.
NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
NEUTRAL: dict[str, Case] = {
    "host and port": case(f"{PLAIN} --host 127.0.0.1 --port 1234"),
    "api key": case(f"{PLAIN} --api-key {SECRET} {SECRET}2"),
    "log options": case(f"{PLAIN} --disable-log-stats --uvicorn-log-level warning"),
    "log level": case(PLAIN, VLLM_LOGGING_LEVEL="ERROR"),
    "context": case("{dense} --dtype bfloat16 --max-model-len 128 -tp 2"),
    "batch": case(f"{PLAIN} --max-num-seqs 3 --seed 7"),
    "eager": case(f"{PLAIN} --enforce-eager"),
    "memory": case(PLAIN, VLLM_CPU_KVCACHE_SPACE="2"),
    "port of vLLM's own": case(PLAIN, VLLM_PORT="4567", VLLM_HOST_IP="127.0.0.1"),
    "ngram": case(f"{PLAIN} --speculative-config '{NGRAM}'"),
    "replicas of a dense model": case(f"{PLAIN} -dp 2"),
}

# What does, and in which fields of the key.
OVERRIDE = """--hf-overrides '{"rope_theta": 20000.0}'"""
ANOTHER: dict[str, tuple[Case, set[str]]] = {
    "tp": (case(f"{{dense}} {SMALL} -tp 1"), {"tp"}),
    "tp by default": (case(f"{{dense}} {SMALL}"), {"tp"}),
    "pp": (case(f"{PLAIN} -pp 2"), {"pp"}),
    "dtype": (case("{dense} -tp 2 --dtype float16"), {"dtype"}),
    "dtype float": (case("{dense} -tp 2 --dtype float32"), {"dtype"}),
    "overrides": (case(f"{PLAIN} {OVERRIDE}"), {"hf_overrides"}),
    "kernel": (case(PLAIN, VLLM_CPU_INT4_W4A8="1"), {"backends"}),
    "layers by stage": (case(f"{PLAIN} -pp 2", VLLM_PP_LAYER_PARTITION="1,3"), {"backends", "pp"}),
    "another architecture": (case(EXPERTS), {"architecture"}),
    "implementation": (case(f"{PLAIN} --model-impl transformers"), {"model_impl"}),
    "pooling": (case(f"{PLAIN} --runner pooling"), {"runner"}),
    # vLLM reads a config file only after a blank; whatever it does, we follow.
    "config that vLLM passes over": (case("{dense} --config={yaml}"), {"tp"}),
}
MOE: dict[str, tuple[Case, set[str]]] = {
    "ep": (case(f"{EXPERTS} --enable-expert-parallel"), {"ep"}),
    "dp": (case(f"{EXPERTS} -dp 2"), {"dp"}),
    "ep and dp": (case(f"{EXPERTS} -dp 2 --enable-expert-parallel"), {"ep", "dp"}),
    "placement": (
        case(f"{EXPERTS} --enable-expert-parallel --expert-placement-strategy round_robin"),
        {"ep", "expert_placement"},
    ),
}

# Two spellings of one JSON.
DRAFT = '{"model": "{draft}", "num_speculative_tokens": 2}'
TWINS: dict[str, tuple[Case, Case]] = {
    "overrides": (
        case(f"{PLAIN} {OVERRIDE}"),
        case(f"{PLAIN} --hf-overrides.rope_theta 20000.0"),
    ),
    "overrides =": (
        case(f"{PLAIN} {OVERRIDE}"),
        case(f"""{PLAIN} '--hf_overrides={{ "rope_theta" :20000.0}}'"""),
    ),
    "draft": (
        case(f"{PLAIN} --speculative-config '{DRAFT}'"),
        case(
            f"{PLAIN} --speculative-config.model {{draft}}"
            " --speculative-config.num_speculative_tokens 2"
        ),
    ),
}

REJECTED: dict[str, Case] = {
    "unknown option": case(f"{PLAIN} --api-keyy={SECRET}"),
    "unknown option with a value": case(f"{PLAIN} --no-such-option {SECRET}"),
    "dtype": case("{dense} --dtype bfloat17"),
    "number": case("{dense} -tp two"),
    "heads": case(f"{{dense}} {SMALL} -tp 3"),
    "no such model": case(f"/none/such/model {SMALL}"),
    "no such config": case("{dense} --config /none/such.yaml"),
    "broken json": case(f"{PLAIN} --hf-overrides '{{'"),
    "zero": case(f"{{dense}} {SMALL} -tp 0"),
}
LOADERS: dict[str, Case] = {
    "auto": case(PLAIN),
    "safetensors": case(f"{PLAIN} --load-format safetensors"),
    "dummy": case(f"{PLAIN} --load-format dummy"),
    "extra": case(f"{PLAIN} --model-loader-extra-config '{{\"enable_multithread_load\": true}}'"),
}
REPLICAS = "-dp 2 --data-parallel-size-local 2 --data-parallel-multi-port-external-lb"
SERVERS: dict[str, tuple[Case, dict[str, Any]]] = {
    "defaults": (case(PLAIN), {}),
    "words": (case(f"{PLAIN} --host ::1 --port=1234"), {"host": "::1", "port": 1234}),
    "last word": (case(f"{PLAIN} --port 1 --port 2"), {"port": 2}),
    "cut short": (case(f"{PLAIN} --por 1234"), {"port": 1234}),
    "_ for -": (
        case(f"{PLAIN} --ssl_certfile /c --ssl_keyfile=/k"),
        {"certfile": "/c", "keyfile": "/k"},
    ),
    "socket": (case(f"{PLAIN} --uds /run/v.sock"), {"uds": "/run/v.sock"}),
    "file": (case("{dense} --config {server_yaml}"), {"port": 1234, "mutual": True}),
    "words over a file": (
        case("{dense} --config {server_yaml} --port 2 --ssl-cert-reqs 0"),
        {"port": 2},
    ),
    "no HTTP": (case(f"{PLAIN} --headless"), {"headless": True}),
    "no HTTP servers": (case(f"{PLAIN} --api-server-count 0"), {"headless": True}),
    "another node's rank": (
        case(f"{{dense}} {SMALL} -tp 2 --nnodes 2 --node-rank 1 --headless"),
        {"headless": True},
    ),
    "one port a replica": (case(f"{PLAIN} {REPLICAS} --port 2000"), {"port": 9256}),
}
PLUGINS: dict[str, Case] = {
    "unset": case(PLAIN),
    "theirs only": case(PLAIN, VLLM_PLUGINS="other"),
    "ours added": case(PLAIN, **with_plugin({"VLLM_PLUGINS": "other"})),
    "none": case(PLAIN, VLLM_PLUGINS=""),
}


def all_cases() -> list[Case]:
    return [
        *(spelled for spelled, _ in (*SPELLINGS.values(), *ANOTHER.values(), *MOE.values())),
        *(twin for twins in TWINS.values() for twin in twins),
        *(asked for asked, _ in SERVERS.values()),
        *(*NEUTRAL.values(), *REJECTED.values(), *LOADERS.values(), *PLUGINS.values()),
        case(EXPERTS),
    ]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "SHARDBOOT"))}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_NO_USAGE_STATS": "1",
    }


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
                env=environment(),
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
    environ = environment() | {"HF_TOKEN": SECRET, "VLLM_PLUGINS": "other"}
    engine = find("vllm", environ | {"PATH": os.path.dirname(sys.executable)})
    memory = Memory(tmp_path)
    words = room.words(case(f"{PLAIN} --api-key {SECRET} --host secret.example")[0])
    source = Identity({"config.json": "0" * 64}, {})

    def ask(words: Sequence[str]) -> Resolution | Rejected:
        return resolution.resolve(engine, words, environ, memory, lambda *_: source)

    first = ask(words)
    assert isinstance(first, Resolution)
    assert first.key.digest == room.digest(case(PLAIN))
    assert first.plugin is not None
    assert first.drop == (0,)
    monkeypatch.setattr(resolution, "_ask", lambda *_: pytest.fail("asked again"))
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
    environ = environment()
    engine = find("vllm", environ | {"PATH": os.path.dirname(sys.executable)})
    memory = Memory(tmp_path)
    draft = {"model": room.places["draft"], "num_speculative_tokens": 2}
    words = room.words(case(f"{PLAIN} --speculative-config '{DRAFT}'")[0])

    def ask(words: Sequence[str]) -> Resolution | Rejected:
        source = Identity({"config.json": "0" * 64}, {})
        return resolution.resolve(engine, words, environ, memory, lambda *_: source)

    first = ask(words)
    assert isinstance(first, Resolution)
    assert first.append[0] == "--speculative-config"
    told = json.loads(first.append[1])
    assert told == draft | {"draft_load_config": {"load_format": "auto"}}
    monkeypatch.setattr(resolution, "_ask", lambda *_: pytest.fail("asked again"))
    assert ask(["--port", "1", *words]) == first._replace(drop=(2,), server=Address(port=1))
    at_rest = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"num_speculative_tokens" not in at_rest
