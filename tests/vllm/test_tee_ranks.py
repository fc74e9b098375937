"""What each rank of a server does for a tee, with tensors but without vLLM around them."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from entrypoint import finisher
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.fragment import fragment_name
from entrypoint.checkpoint.proof import rank_evidence_name
from entrypoint.errors import SaveError
from entrypoint.state.ledger import Ledger
from entrypoint.state.rejections import Rejections, on_the_way
from entrypoint.store import order as orders
from entrypoint.store import staging as stagings
from entrypoint.store.order import ORDER
from entrypoint.vllm_plugin import compat, evidence, tee
from entrypoint.vllm_plugin.notes import Notes
from entrypoint.vllm_plugin.tee import Tee

pytestmark = pytest.mark.vllm

MODEL = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
KEY = "c" * 64
CONFIG: Any = SimpleNamespace(lora_config=None)
PYTHON = sys.executable
FINISHED = 'import json; print(json.dumps({"status": "ok", "name": "made"}))'


class Server:
    """The ranks of one server, and the staging that boot left it."""

    def __init__(self, room: Path, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.state = patch, room / "state"
        (room / "store").mkdir()
        with stagings.begin(room / "store", "tiny") as staging:
            order: dict[str, Json] = {
                "world": 2,
                "size_per_file": 1 << 30,
                "dir_mode": 0o750,
                "file_mode": 0o640,
                "save_timeout": 60.0,
                "key_by_config": KEY,
            }
            orders.leave(staging, order)
            staging.disown()
        self.path = staging.path
        self.lines: list[str] = []
        logger = SimpleNamespace(info=self.hear, error=self.hear, warning=self.hear)
        patch.setattr(compat, "logger", lambda: logger)
        patch.setattr(tee, "decided", lambda _: {"tied": False})
        patch.setattr("threading.Thread", SameThread)
        self.finisher(room, FINISHED)
        self.memory(1 << 40)

    def finisher(self, room: Path, program: str) -> None:
        """Have the interpreter that runs vLLM, whatever it is told, note that it ran, and this."""
        path = room / "python"
        path.write_text(
            f"#!{PYTHON}\nimport pathlib\npathlib.Path(r'{room}/ran').touch()\n{program}\n"
        )
        path.chmod(0o755)
        self.patch.setattr("sys.executable", str(path))

    def orders(self, **changes: object) -> None:
        """Have the order say something else."""
        path = self.path / ORDER
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def hear(self, text: str, *words: object) -> None:
        self.lines.append(text % words)

    def memory(self, free: int) -> None:
        self.patch.setattr(tee, "free_bytes", lambda: free)

    def is_now(self, number: int) -> None:
        """Have this process be another rank's."""
        self.patch.setattr(compat, "tp_pp_rank", lambda: (2, 1, number))

    def join(self, number: int) -> Tee | None:
        self.is_now(number)
        return Tee.join(str(self.path), Notes(self.state, "b"), 0)

    def rank(self, number: int) -> Tee:
        found = self.join(number)
        assert found is not None
        return found

    def events(self) -> list[str]:
        return [str(entry["event"]) for entry in Ledger(self.state).entries()]


class SameThread:
    """A thread that has done its work when it has started."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], **_: object) -> None:
        self.target, self.args = target, args

    def start(self) -> None:
        self.target(*self.args)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr("os.setpriority", lambda *_: None)
    return Server(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("free", "said"),
    [(1 << 40, "copied, and written while vLLM goes on"), (0, "since host memory is short")],
)
def test_the_last_rank_of_all_has_them_committed(
    server: Server, tmp_path: Path, free: int, said: str
) -> None:
    server.memory(free)
    ranks = [server.rank(0), server.rank(1)]
    ranks[1].take(MODEL, None)
    assert not (tmp_path / "ran").exists()
    assert said in server.lines[0]
    ranks[0].take(MODEL, None)
    assert (tmp_path / "ran").exists()
    assert server.events() == ["tee.done"]
    assert [(server.path / fragment_name(rank)).exists() for rank in (0, 1)] == [True, True]
    # Whoever finds all of them there afterwards has nothing more to do.
    assert not ranks[1]._is_last()


def test_a_copy_is_the_state_as_it_was_and_keeps_no_strides() -> None:
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4).t()
    (copy,) = tee.copied({"w": weight}).values()
    before = weight.clone()
    weight.zero_()
    assert copy.is_contiguous()
    assert torch.equal(copy, before)


def test_one_rank_that_fails_ends_the_tee_for_all_and_only_it_says_so(server: Server) -> None:
    first, second = server.rank(0), server.rank(1)
    first.give_up(SaveError("it cannot be", reason="save.online-quant"))
    second.take(MODEL, None)
    assert not server.path.exists()
    assert server.events() == ["tee.failed"]
    (line,) = (line for line in server.lines if "no checkpoint" in line)
    assert line.startswith("shardboot: save.online-quant: ")
    assert line.endswith("the server goes on: it cannot be")
    assert Tee.join(str(server.path), Notes(None, ""), 0) is None


def test_what_another_user_has_begun_is_left_alone(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: stranger)
    assert Tee.join(str(server.path), Notes(None, ""), 0) is None
    assert f"began it, and this is uid {stranger}" in server.lines[-1]
    assert server.path.exists()
    assert not (tmp_path / "ran").exists()


def test_no_word_in_staging_is_a_program_that_anybody_runs(server: Server, tmp_path: Path) -> None:
    server.orders(interpreter="/bin/false")
    for rank in (0, 1):
        server.rank(rank).take(MODEL, None)
    assert (tmp_path / "ran").exists()
    assert server.events() == ["tee.done"]


def test_a_finisher_that_fails_ends_the_tee(server: Server, tmp_path: Path) -> None:
    answer = {"status": "failed", "reason": "space.short", "message": "full"}
    server.finisher(tmp_path, f"import json; print(json.dumps({answer!r}))")
    for rank in (0, 1):
        server.rank(rank).take(MODEL, None)
    (line,) = Ledger(server.state).entries()
    assert (line["event"], line["reason"], line["text"]) == ("tee.failed", "space.short", "full")
    assert not server.path.exists()


def test_a_finisher_that_dies_ends_the_tee(server: Server, tmp_path: Path) -> None:
    server.finisher(tmp_path, "import os; os.abort()")
    for rank in (0, 1):
        server.rank(rank).take(MODEL, None)
    assert "ended with status" in server.lines[-1]
    assert not server.path.exists()


def test_a_finisher_that_takes_too_long_is_ended_with_the_tee(
    server: Server, tmp_path: Path
) -> None:
    server.finisher(tmp_path, "import signal; signal.pause()")
    server.orders(save_timeout=0)
    for rank in (0, 1):
        server.rank(rank).take(MODEL, None)
    (line,) = Ledger(server.state).entries()
    assert (line["event"], line["reason"]) == ("tee.failed", "save.timeout")
    assert not server.path.exists()


@pytest.mark.parametrize(
    "order", ["{", "[]", "{}", '{"dir_mode": "x"}', "9" * 5000, " " * (orders.MAX_BYTES + 1)]
)
def test_a_rank_that_cannot_take_part_ends_the_tee_and_no_server(
    server: Server, order: str
) -> None:
    (server.path / ORDER).write_text(order)
    assert server.join(1) is None
    assert server.events() == ["tee.failed"]
    assert not server.path.exists()


@pytest.mark.parametrize(
    "error", [AssertionError, AttributeError, KeyError, MemoryError, RuntimeError, ValueError]
)
def test_whatever_goes_wrong_with_a_state_ends_the_tee_and_no_server(
    server: Server, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(_: object) -> None:
        raise error("odd")

    monkeypatch.setattr(tee, "decided", fail)
    server.rank(0).take(MODEL, None)
    (line,) = Ledger(server.state).entries()
    assert (line["event"], line["reason"]) == ("tee.failed", "save.failed")
    assert error.__name__ in str(line["text"])
    assert not server.path.exists()


def test_no_rank_waits_for_a_lock(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(fcntl, "flock", lambda _, kind: asked.append(kind))
    server.rank(0)
    assert asked == [fcntl.LOCK_SH | fcntl.LOCK_NB]


def test_the_copy_is_free_before_all_are_committed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[weakref.ref[torch.Tensor]] = []
    real = tee.copied

    def copied(state: tee.State) -> tee.State:
        made = real(state)
        copies.extend(weakref.ref(tensor) for tensor in made.values())
        return made

    held: list[bool] = []
    monkeypatch.setattr(tee, "copied", copied)
    monkeypatch.setattr(
        Tee, "_finish", lambda _: held.extend(copy() is not None for copy in copies)
    )
    for rank in (0, 1):
        server.rank(rank).take(MODEL, None)
    assert held == [False, False]


def test_a_model_that_has_no_state_is_remembered_as_a_save_would(server: Server) -> None:
    rank = server.rank(0)
    rank.examine(torch.nn.Linear(2, 2, device="meta"))
    rank.take(MODEL, None)
    assert server.events() == ["tee.failed"]
    found = Rejections(server.state).find(KEY)
    assert found is not None
    assert found.kind == "save.meta-tensor"


class Real(threading.Thread):
    """A thread that a test can wait for."""

    all: ClassVar[list[Real]] = []

    def start(self) -> None:
        self.all.append(self)
        super().start()


def test_nothing_is_committed_before_every_rank_has_recorded_what_it_computes(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.Thread", Real)
    monkeypatch.setattr(Real, "all", [])
    monkeypatch.setattr(tee, "after", lambda *_: {"layer": {"digest": "d", "sketch": []}})
    server.orders(record=True)
    ranks = [server.rank(0), server.rank(1)]
    for rank in ranks:
        rank.examine(MODEL)
        rank.take(MODEL, None)
    for number, rank in enumerate(ranks):
        assert not (tmp_path / "ran").exists()
        server.is_now(number)
        rank.record(MODEL, CONFIG)
        Real.all[number].join(60)
    assert (tmp_path / "ran").exists()
    (told,) = (json.loads(path.read_text()) for path in server.path.glob(".source-rank-1.json"))
    assert told["before"].keys() == {"weight"}
    assert told["after"].keys() == {"layer"}


def test_what_no_load_alone_can_prove_is_not_saved_on_the_way_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tee, "after", lambda *_: {"layer": {"unprobed": "TypeError: no"}})
    server.orders(record=True)
    server.rank(1).record(MODEL, CONFIG)
    assert server.events() == ["tee.failed"]
    assert not server.path.exists()
    found = Rejections(server.state).find(on_the_way(KEY))
    assert found is not None
    assert found.kind == "tee.proof"
    assert Rejections(server.state).find(KEY) is None


@pytest.mark.parametrize("found", [torch.ones(2), [torch.ones(2)], {"scale": 0.5}])
def test_what_loading_leaves_loose_on_a_module_is_not_saved_on_the_way(
    server: Server, found: object
) -> None:
    server.orders(record=True)
    rank, layer = server.rank(0), torch.nn.Linear(2, 2)
    vars(layer).update(same=torch.zeros(2), folded=None)
    model = torch.nn.Sequential(layer)
    rank.examine(model)
    vars(layer).update(folded=found)
    rank.take(model, None)
    (line,) = Ledger(server.state).entries()
    assert (line["event"], line["reason"]) == ("tee.failed", "tee.proof")
    assert str(line["text"]).startswith("0.folded")
    assert Rejections(server.state).find(on_the_way(KEY)) is not None


def test_what_hangs_loose_all_the_same_is_recorded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "probe", lambda *_: ())
    model = torch.nn.Linear(2, 2)
    vars(model)["range"] = [torch.ones(2)]
    assert evidence.before(model).keys() == {"weight", "bias", "range[0]"}
    assert evidence.after(model, None).keys() == {"range[0]"}


def test_what_computes_something_else_each_time_is_not_saved_on_the_way(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.count()
    monkeypatch.setattr(tee, "after", lambda *_: {"layer": {"digest": str(next(times))}})
    server.orders(record=True)
    server.rank(1).record(MODEL, CONFIG)
    assert server.events() == ["tee.failed"]
    found = Rejections(server.state).find(on_the_way(KEY))
    assert found is not None
    assert "layer does not compute the same twice" in found.reason


def test_what_one_rank_finds_out_is_remembered_though_another_gave_up_before(
    server: Server,
) -> None:
    first, second = server.rank(0), server.rank(1)
    first.give_up(SaveError("full", reason="space.short"))
    second.give_up(SaveError("l.0 cannot be probed", reason="tee.proof"))
    assert server.events() == ["tee.failed"]
    assert Rejections(server.state).find(on_the_way(KEY)) is not None


def test_a_record_that_could_not_be_read_again_is_not_tried_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entrypoint.state.awaited.MAX_STATE_BYTES", 10)
    (server.path / rank_evidence_name("source", 0)).write_text('{"before": {}}')
    manifest: Any = SimpleNamespace(content="d" * 64, layout=SimpleNamespace(ranks=[0]))
    with pytest.raises(SaveError, match="more than 10 bytes") as caught:
        finisher._keep_evidence(stagings.join(server.path), manifest, server.state)
    assert caught.value.reason == "tee.proof"


def test_what_says_nothing_of_the_model_is_not_remembered(server: Server) -> None:
    server.rank(0).give_up(SaveError("full", reason="space.short"))
    assert Rejections(server.state).find(KEY) is None
