"""What one rank compares before its checkpoint is served, with tensors but without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint

from entrypoint.checkpoint import proof
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import ProofError
from entrypoint.state.awaited import Awaited
from entrypoint.state.proofs import Proofs
from entrypoint.vllm_plugin import compat, evidence, in_place
from entrypoint.vllm_plugin.in_place import InPlace

pytestmark = pytest.mark.vllm


def model() -> torch.nn.Module:
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.weight.data.fill_(1.0)
    layer.register_buffer("table", torch.ones(4), persistent=False)
    return layer


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """Return a checkpoint of two ranks that waits for its proof; this is the second one."""
    probed: evidence.Entries = {"layer": {"digest": "d", "sketch": []}}
    monkeypatch.setattr(compat, "tp_pp_rank", lambda: (2, 1, 1))
    monkeypatch.setattr(evidence, "after", lambda *_: probed)
    manifest = make_checkpoint(tmp_path / "store")
    before = evidence.before(model())
    ranks: dict[int, Json] = {
        rank: {"rank": rank, "before": before, "after": probed} for rank in (0, 1)
    }
    Awaited(tmp_path).add(manifest.content, ranks)
    return manifest


def load(state: Path, manifest: Manifest, loaded: torch.nn.Module) -> InPlace:
    found = InPlace(state)
    found.before(loaded)
    found.compare(loaded, None, manifest)
    return found


def test_what_loads_to_its_sources_state_is_proved(tmp_path: Path, waiting: Manifest) -> None:
    load(tmp_path, waiting, model()).keep(waiting)
    kept = Proofs(tmp_path).find(waiting.content)
    assert kept is not None
    # Of two ranks: a weight, a table, and what their layer computes.
    assert (kept["items"], kept["in_place"]) == (6, True)


def test_another_weight_is_a_fault_at_once(tmp_path: Path, waiting: Manifest) -> None:
    loaded = model()
    loaded.get_parameter("weight").data[0, 0] = 2.0
    with pytest.raises(ProofError, match=r"rank 1 before weight: differs by 1 ") as caught:
        load(tmp_path, waiting, loaded)
    assert caught.value.reason == ProofError.reason


def test_a_table_that_every_process_recomputes_may_differ_once(
    tmp_path: Path, waiting: Manifest
) -> None:
    loaded = model()
    loaded.get_buffer("table")[0] = 2.0
    for reason in (proof.UNFINISHED, ProofError.reason):
        with pytest.raises(ProofError, match="rank 1 before table: differs") as caught:
            load(tmp_path, waiting, loaded)
        assert caught.value.reason == reason
        InPlace(tmp_path).leave_open(waiting)


def test_without_evidence_nothing_is_proved_and_it_is_not_tried_for_ever(
    tmp_path: Path, waiting: Manifest
) -> None:
    next((tmp_path / "awaited").glob("*-rank-1.json")).unlink()
    for reason in (proof.UNFINISHED, ProofError.reason):
        with pytest.raises(ProofError, match="nothing is left") as caught:
            load(tmp_path, waiting, model())
        assert caught.value.reason == reason
        InPlace(tmp_path).leave_open(waiting)


@pytest.fixture
def shown() -> Iterator[None]:
    in_place.show_unwritten(True)
    yield
    in_place.show_unwritten(False)


def test_what_nobody_has_written_does_not_pass_for_zeros(shown: None) -> None:
    assert torch.empty(3).isnan().all()
    assert (torch.empty(3, dtype=torch.int8) == 127).all()
