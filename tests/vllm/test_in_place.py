"""What one rank does for a proof in place, with tensors but without vLLM around them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.proof import UNFINISHED
from entrypoint.errors import ProofError
from entrypoint.state.rejections import Rejections
from entrypoint.vllm_plugin import compat, evidence
from entrypoint.vllm_plugin.agreement import OPEN, Objection, agreeing
from entrypoint.vllm_plugin.in_place import InPlace, recording, unwritten_shown
from entrypoint.vllm_plugin.notes import Notes

pytestmark = [
    pytest.mark.vllm,
    # Importing vLLM warns of whatever this machine lacks.
    pytest.mark.filterwarnings("ignore"),
]

CONTENT = "c" * 64
CONFIG: Any = SimpleNamespace(lora_config=None)
MANIFEST: Any = SimpleNamespace(
    content=CONTENT,
    name="tiny",
    key=SimpleNamespace(vllm="0.32.0"),
    layout=SimpleNamespace(ranks=(0, 1)),
    save={"plugin": "0.1.0"},
)


def layer(fill: float = 1.0) -> torch.nn.Module:
    made = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(made.weight, fill)
    torch.nn.init.zeros_(made.bias)
    made.register_buffer("table", torch.full((2,), fill), persistent=False)
    return made


class Node:
    """A node whose source was recorded by two ranks of a server."""

    def __init__(self, state: Path, patch: pytest.MonkeyPatch) -> None:
        self.state = state
        self.lines: list[str] = []
        logger = SimpleNamespace(warning=lambda text, *words: self.lines.append(text % words))
        patch.setattr(compat, "logger", lambda: logger)
        patch.setattr(compat, "tp_pp_rank", lambda: (2, 1, 1))
        patch.setattr(evidence, "probe", lambda *_: ())
        told: dict[str, Json] = {"before": evidence.before(layer()), "after": {}}
        told["circumstances"] = evidence.circumstances(CONFIG)
        ranks = {rank: {"rank": rank, **told} for rank in (0, 1)}
        self.boot("b0").awaited.add(CONTENT, ranks)

    def boot(self, name: str) -> InPlace:
        return InPlace(self.state, name)

    def load(self, boot: str, model: torch.nn.Module) -> InPlace:
        """Load a model as a checkpoint, and compare. Raises: ProofError."""
        proof = self.boot(boot)
        proof.before(model)
        proof.compare(model, CONFIG, MANIFEST)
        return proof

    def waits(self) -> bool:
        return self.boot("").awaited.waits(CONTENT, [0, 1])


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def only_table_differs() -> torch.nn.Module:
    made = layer()
    made.get_buffer("table").add_(1)
    return made


def test_what_is_proved_waits_no_longer_and_another_replica_goes_by_the_proof(node: Node) -> None:
    node.load("b1", layer()).keep(MANIFEST)
    kept = node.boot("b1").proofs.find(MANIFEST)
    assert kept is not None
    # Of two ranks: a weight, a bias and a table.
    assert (kept["items"], kept["in_place"]) == (6, True)
    assert not node.waits()
    node.load("b1", layer())


def test_another_weight_is_the_checkpoints_fault(node: Node) -> None:
    wrong = layer()
    torch.nn.init.ones_(wrong.get_parameter("bias"))
    with pytest.raises(ProofError, match="rank 1 before bias: differs by") as caught:
        node.load("b1", wrong)
    assert caught.value.reason == ProofError.reason


def test_a_tensor_that_hangs_loose_on_one_side_only_is_the_checkpoints_fault(node: Node) -> None:
    odd = layer()
    vars(odd)["folded"] = {"scale": torch.ones(2)}
    with pytest.raises(ProofError, match=r"folded\[scale\]: only the checkpoint") as caught:
        node.load("b1", odd)
    assert caught.value.reason == ProofError.reason


def test_a_recomputed_table_is_left_to_one_more_boot_and_then_rejects(node: Node) -> None:
    for _ in range(2):
        # Two replicas of one boot.
        with pytest.raises(ProofError) as caught:
            node.load("b1", only_table_differs())
        assert caught.value.reason == UNFINISHED
        node.boot("b1").leave_open(MANIFEST)
    assert node.waits()
    with pytest.raises(ProofError) as caught:
        node.load("b2", only_table_differs())
    assert caught.value.reason == ProofError.reason


def test_what_was_recorded_under_other_circumstances_tells_nothing_here(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr("torch.get_num_threads", lambda: threads + 1)
    with pytest.raises(ProofError, match=f"'threads': {threads + 1}") as caught:
        node.load("b1", layer())
    assert caught.value.reason == UNFINISHED
    assert not node.waits()


def test_a_module_that_does_not_answer_is_no_fault_of_the_checkpoint(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "probe", lambda *_: [("l", "OutOfMemoryError: none left")])
    with pytest.raises(ProofError, match="l: OutOfMemoryError") as caught:
        node.load("b1", layer())
    assert caught.value.reason == UNFINISHED
    assert node.waits()


def objecting(node: Node, boot: str, fault: str) -> None:
    """Have the loader of a boot keep in mind what a rank objects."""
    from entrypoint.vllm_plugin.load_format import ShardbootLoader

    loader: Any = object.__new__(ShardbootLoader)
    loader.manifest, loader.proof = MANIFEST, node.boot(boot)
    loader.notes = Notes(node.state, boot)
    loader._keep_in_mind(Objection("no", fault))


def test_what_says_nothing_of_the_proof_takes_none_of_its_tries(node: Node) -> None:
    for boot in ("b1", "b2", "b3"):
        objecting(node, boot, "")
    assert node.waits()
    assert not node.boot("b4").awaited.was_put_off(CONTENT, "b4")
    objecting(node, "b4", OPEN)
    assert node.waits()
    objecting(node, "b5", "unproven")
    assert not node.waits()
    assert Rejections(node.state).find(CONTENT) is not None


@pytest.mark.parametrize("error", [AssertionError, AttributeError, MemoryError, RuntimeError])
def test_what_cannot_be_recorded_is_left_open_and_said_to_all_ranks(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    monkeypatch.setattr(compat, "gather", lambda found: [None, found])
    said = pytest.raises(Objection, match=f"worker 1 objects: .*{error.__name__}: odd")
    with said as caught, agreeing(), recording():
        raise error("odd\nand long")
    assert caught.value.fault == OPEN


@pytest.mark.parametrize(("was_on", "only_warned"), [(False, False), (True, False), (True, True)])
def test_what_is_not_written_shows_and_determinism_is_as_before(
    was_on: bool, only_warned: bool
) -> None:
    def settings() -> tuple[bool, bool]:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.are_deterministic_algorithms_enabled(), warns

    torch._C._set_deterministic_algorithms(was_on, warn_only=only_warned)
    before = settings()
    try:
        with suppress(KeyError), unwritten_shown():
            assert torch.empty(4).isnan().all()
            assert (torch.empty(4, dtype=torch.int8) == 127).all()
            raise KeyError
        assert settings() == before
    finally:
        torch._C._set_deterministic_algorithms(False)


def test_what_two_boots_could_not_find_out_is_rejected(node: Node) -> None:
    objecting(node, "b1", OPEN)
    objecting(node, "b1", OPEN)
    assert node.waits()
    assert Rejections(node.state).find(CONTENT) is None
    objecting(node, "b2", OPEN)
    assert not node.waits()
    found = Rejections(node.state).find(CONTENT)
    assert found is not None
    assert found.kind == "unproven"


@pytest.mark.parametrize("spoilt", [None, "", "{}", '{"rank": 1, "before": 3, "after": {}}'])
def test_a_record_that_cannot_be_read_rejects_nothing_and_waits_no_longer(
    node: Node, spoilt: str | None
) -> None:
    (record,) = node.state.glob("awaited/*/rank-1.json")
    if spoilt is None:
        record.unlink()
    else:
        record.write_text(spoilt)
    with pytest.raises(ProofError, match="is not all there") as caught:
        node.load("b1", layer())
    assert caught.value.reason == UNFINISHED
    assert not node.waits()
