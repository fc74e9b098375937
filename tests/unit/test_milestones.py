"""What a worker of vLLM notes of its own start: a stand-in for the worker, since it needs none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoint.state.ledger import Ledger
from entrypoint.vllm_plugin import milestones
from entrypoint.vllm_plugin.milestones import descent, imports_are_done, note_steps
from entrypoint.vllm_plugin.notes import Notes


class Plain:
    def initialize_from_config(self, config: str) -> str:
        return f"cache of {config}"

    def execute_model(self) -> str:
        return "tokens"


def worker() -> type[Any]:
    class Worker(Plain):
        """As the CPU's: one step is its own, one inherited, and one is not there."""

        def determine_available_memory(self) -> int:
            return 77

    return Worker


def test_a_workers_steps_are_noted_as_they_end(tmp_path: Path) -> None:
    kind = worker()
    plain = kind.execute_model
    note_steps(kind, None, Notes(tmp_path, "b1"))
    assert kind().determine_available_memory() == 77
    assert kind().initialize_from_config("c") == "cache of c"
    noted = [*Ledger(tmp_path).entries()]
    assert [(e["boot"], e["event"], e["phase"]) for e in noted] == [
        ("b1", "phase", "profile"),
        ("b1", "phase", "kv-cache"),
    ]
    assert all(0 < e["start"] <= e["time"] for e in noted)  # type: ignore[operator]
    # What runs for every token is left alone, and so is what other workers are made of.
    assert kind.execute_model is plain
    assert not hasattr(Plain.initialize_from_config, "__wrapped__")


def test_what_vllm_counts_as_compiling_is_told_with_the_step(tmp_path: Path) -> None:
    config = SimpleNamespace(compilation_config=SimpleNamespace(compilation_time=1.0))

    class Worker:
        def determine_available_memory(self) -> None:
            config.compilation_config.compilation_time += 2.5

        def compile_or_warm_up_model(self) -> None:
            pass

    note_steps(Worker, config, Notes(tmp_path, "b1"))
    Worker().determine_available_memory()
    Worker().compile_or_warm_up_model()
    noted = [*Ledger(tmp_path).entries()]
    assert [(e["phase"], e.get("compiled")) for e in noted] == [("profile", 2.5), ("compile", None)]


def test_a_step_that_fails_fails_as_before_and_is_not_noted(tmp_path: Path) -> None:
    class Worker:
        def compile_or_warm_up_model(self) -> None:
            raise MemoryError("out of it")

    note_steps(Worker, None, Notes(tmp_path, "b1"))
    with pytest.raises(MemoryError, match="out of it"):
        Worker().compile_or_warm_up_model()
    assert [*Ledger(tmp_path).entries()] == []


@pytest.mark.parametrize("kind", [None, type("Bare", (), {"compile_or_warm_up_model": 3})])
def test_what_is_no_worker_of_ours_stays_as_it_is(kind: type[Any] | None, tmp_path: Path) -> None:
    before = dict(vars(kind)) if kind else {}
    note_steps(kind, None, Notes(tmp_path, "b1"))
    assert (dict(vars(kind)) if kind else {}) == before


def test_under_a_proof_nothing_is_touched() -> None:
    kind = worker()
    before = dict(vars(kind))
    note_steps(kind, None, Notes(None, ""))
    assert dict(vars(kind)) == before


def test_the_imports_are_done_when_vllm_calls_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milestones, "_imported", [])
    assert "imported" not in descent()
    imports_are_done()
    first = descent()
    assert first["processes"]
    assert json.loads(json.dumps(first)) == first
    monkeypatch.setattr(milestones, "_imported", [7.0])
    imports_are_done()
    assert descent()["imported"] == 7.0
