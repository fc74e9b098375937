"""How long a proof may take, however many loads it needs."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import make_checkpoint

from entrypoint import child, prover
from entrypoint.checkpoint.proof import Verdict
from entrypoint.child import Outcome
from entrypoint.engine.executable import Executable
from entrypoint.errors import ProofError


@pytest.mark.parametrize("from_save", [True, False], ids=["as a save ends", "on its own"])
def test_all_loads_of_a_proof_share_one_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_save: bool
) -> None:
    now, given = 1000.0, list[float]()

    def ask(*_: object, timeout: float, **__: object) -> Outcome:
        nonlocal now
        now += 40
        given.append(timeout)
        return Outcome(0, {"status": "ok"}, timed_out=False)

    monkeypatch.setattr(child, "ask", ask)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(prover, "read_evidence", lambda *_: None)
    monkeypatch.setattr(prover, "compare", lambda *_: Verdict(("it differs",), excusable=False))
    resolution: Any = SimpleNamespace(append=())
    bench = prover.Bench(
        engine=Executable("vllm", "python"),
        words=(),
        environ={},
        resolution=resolution,
        work=tmp_path,
        logs=tmp_path,
        deadline=1100,
        say=lambda _: None,
    )
    evidence: Any = object()
    with pytest.raises(ProofError, match="it differs"):
        prover.prove(
            bench, tmp_path, make_checkpoint(tmp_path / "store"), evidence if from_save else None
        )
    assert given == ([100, 60] if from_save else [100, 60, 20])
