"""What a sidecar proves by itself: with which words, when there is memory, and how often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_key, proof_of

from entrypoint import headroom, proving
from entrypoint.checkpoint.finding import Complete, Finding, Rejected
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.checkpoint.proof import UNFINISHED
from entrypoint.config import resolve
from entrypoint.errors import ProofError
from entrypoint.log import Log
from entrypoint.plan import Obstacle
from entrypoint.sidecar import prove
from entrypoint.sidecar.choice import to_prove
from entrypoint.sidecar.node import Node, now
from entrypoint.sidecar.prove import Prove, words_for
from entrypoint.sidecar.view import DAMAGED, Seen
from entrypoint.state.proofs import Proofs

CPU, GPU = make_key(platform="cpu-x86_64"), make_key(platform="cuda-9.0")


def seen(name: str, created: float = 1.0, **facts: Any) -> Seen:
    base = Seen(name, "complete", content=f"content of {name}", family="f", created=created)
    return base._replace(ranks=(0, 1), world=2, made_for=CPU)._replace(**facts)


@pytest.mark.parametrize(
    ("local", "on_accelerators", "expected"),
    [
        pytest.param([seen("a")], False, ["a"], id="never proved"),
        pytest.param([seen("a", proved=True)], False, [], id="proved"),
        pytest.param([seen("a"), seen("b", 2.0)], False, ["b"], id="the newest"),
        pytest.param([seen("a"), seen("b", 2.0, proved=True)], False, [], id="an older one"),
        pytest.param(
            [seen("a"), seen("b", 2.0, made_by=("0.33", 2))], False, ["a", "b"], id="of each vLLM"
        ),
        pytest.param([seen("a"), seen("b", 2.0, state=DAMAGED)], False, ["a"], id="that is sound"),
        pytest.param([seen("a", ranks=(1,))], False, [], id="some ranks only"),
        pytest.param([seen("a", made_for=GPU)], False, [], id="of an accelerator"),
        pytest.param([seen("a", made_for=GPU)], True, ["a"], id="where that is asked for"),
        pytest.param([seen("tried")], False, [], id="tried a short time ago"),
        pytest.param([seen("a"), seen("b", family="g")], False, ["a", "b"], id="two families"),
    ],
)
def test_what_is_to_be_proved(
    local: list[Seen], on_accelerators: bool, expected: list[str]
) -> None:
    found = to_prove(local, {"content of tried"}, on_accelerators=on_accelerators)
    assert [each.name for each in found] == expected


class Vllm:
    """Stands for vLLM: what it makes of words, and of a proof."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.asked: list[Sequence[str]] = []
        self.proved: list[str] = []
        self.local: Finding = Rejected(manifest.name, "unproved", "quantized")
        self.no_save: Obstacle | None = None
        self.error: ProofError | None = None

    def assess(self, boot: Any) -> Any:
        self.asked.append(boot.words)
        situation = SimpleNamespace(local=self.local, no_save=self.no_save)
        return SimpleNamespace(situation=situation)

    def prove_here(self, boot: Any, assessment: Any, on_tick: Callable[[], None]) -> None:
        self.proved.append(assessment.situation.local.name)
        self.while_it_runs()
        on_tick()
        if self.error is not None:
            raise self.error
        Proofs(boot.settings.state_dir).add(self.manifest, proof_of(self.manifest))

    while_it_runs: Callable[[], None] = staticmethod(lambda: None)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return make_checkpoint(tmp_path / "local", key=CPU)


@pytest.fixture
def vllm(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> Vllm:
    made = Vllm(manifest)
    monkeypatch.setattr(prove, "assess", made.assess)
    monkeypatch.setattr(proving, "prove_here", made.prove_here)
    monkeypatch.setattr(headroom, "free_bytes", lambda: 1 << 40)
    return made


@pytest.fixture
def node(tmp_path: Path, manifest: Manifest) -> Node:
    flags = {"local_dir": str(tmp_path / "local"), "state_dir": str(tmp_path / "state")}
    made = Node(resolve(flags, {}), {}, Log("sidecar"))
    made.look()
    return made


def once(node: Node) -> None:
    """Run the job of a sidecar that has just begun."""
    list(Prove(node).run())


def test_what_nobody_proved_is_proved_once(node: Node, vllm: Vllm, manifest: Manifest) -> None:
    for _ in range(2):
        once(node)
        assert vllm.proved == [manifest.name]
    assert node.sight.unproved == 0
    assert [each.proved for each in node.seen("local")] == [True]


def test_where_memory_is_short_nothing_is_started_and_it_is_said_once(
    node: Node,
    vllm: Vllm,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(headroom, "free_bytes", lambda: 2 * prove.RANK_BYTES)
    job = Prove(node)
    for _ in range(3):
        list(job.run())
    assert (vllm.asked, node.sight.unproved) == ([], 1)
    assert capfd.readouterr().err.count("prove.waits") == 1
    monkeypatch.setattr(headroom, "free_bytes", lambda: 3 * prove.RANK_BYTES)
    list(job.run())
    assert vllm.proved == [manifest.name]


@pytest.mark.parametrize("reason", ["", UNFINISHED])
def test_what_fails_is_not_tried_again_the_same_day(node: Node, vllm: Vllm, reason: str) -> None:
    vllm.error = ProofError("rank 0: a tensor differs", reason=reason)
    if reason:
        with pytest.raises(ProofError):
            once(node)
    else:
        once(node)
    once(node)
    assert len(vllm.proved) == 1


def test_a_proof_is_given_up_for_who_comes_to_need_the_memory_and_tried_again(
    node: Node, vllm: Vllm, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Prove(node)
    with monkeypatch.context() as patch:
        vllm.while_it_runs = lambda: patch.setattr(headroom, "free_bytes", lambda: 1 << 20)
        with pytest.raises(ProofError, match="given up") as given_up:
            list(job.run())
        assert given_up.value.reason == UNFINISHED
    job.later.forget_all()
    vllm.while_it_runs = lambda: None
    list(job.run())
    assert vllm.proved == [manifest.name] * 2
    assert node.sight.unproved == 0


def test_what_was_tried_is_tried_again_where_somebody_asks(node: Node, vllm: Vllm) -> None:
    vllm.error = ProofError("no vLLM", reason=UNFINISHED)
    job = Prove(node)
    with pytest.raises(ProofError):
        list(job.run())
    list(job.run())
    assert len(vllm.proved) == 1
    job.ask()
    with pytest.raises(ProofError):
        list(job.run())
    assert len(vllm.proved) == 2


def test_asked_for_by_a_clock_that_was_ahead_it_is_tried_again_and_then_no_more(
    node: Node, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.error = ProofError("rank 0: a tensor differs")
    job = Prove(node)
    with monkeypatch.context() as patched:
        patched.setattr(prove, "now", lambda: now() + 365 * 86400)
        list(job.run())
        job.ask()
    for _ in range(2):
        list(job.run())
        assert len(vllm.proved) == 2


def test_what_needs_no_proof_or_cannot_have_one_is_left_alone(
    node: Node, vllm: Vllm, manifest: Manifest
) -> None:
    vllm.local = Complete.of(manifest, "", [0, 1])
    once(node)
    node.boot.memory.remember("tried", manifest.content, 1.0)
    vllm.local = Rejected(manifest.name, "unproved", "quantized")
    vllm.no_save = Obstacle("source.absent", "it is not on this machine")
    once(node)
    assert (len(vllm.asked), vllm.proved) == (2, [])


def test_a_sidecar_that_has_no_vllm_says_so_once_and_has_not_failed(
    node: Node, manifest: Manifest, capfd: pytest.CaptureFixture[str]
) -> None:
    boot = node.boot._replace(settings=node.settings._replace(vllm="no-such-vllm"))
    node.boot = boot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headroom, "free_bytes", lambda: 1 << 40)
        for _ in range(2):
            once(node)
    assert capfd.readouterr().err.count("prove.skipped: ") == 1
    assert node.sight.unproved == 0


def test_the_words_are_those_that_the_key_stands_for(manifest: Manifest) -> None:
    plain = ("test/tiny", "--max-model-len", "auto", "--dtype", "bfloat16", "-tp", "2", "-pp", "1")
    assert words_for(manifest) == plain
    key = make_key(
        quantization="fp8", kv_cache_dtype="fp8_e5m2", runner="pooling", ep=True, model_impl="vllm"
    )
    more = manifest._replace(key=key, source=manifest.source._replace(revision="abc"))
    assert words_for(more) == (
        *plain,
        *("--revision", "abc", "--runner", "pooling", "--quantization", "fp8"),
        *("--kv-cache-dtype", "fp8_e5m2", "--model-impl", "vllm", "--enable-expert-parallel"),
    )
    own = manifest._replace(key=make_key(quantization="gptq", quantization_config="digest"))
    assert words_for(own) == plain
