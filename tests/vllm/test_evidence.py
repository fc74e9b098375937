"""What a proof records of a checkpoint is what it records of the source; a wrong bit shows.

`lab` is conftest's `Lab`; conftest cannot be imported, so it goes by Any.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from parity import FLAGS
from serving import cores

from entrypoint.checkpoint import header, proof
from entrypoint.checkpoint.digest import digest_file
from entrypoint.checkpoint.manifest import MANIFEST, Manifest
from entrypoint.checkpoint.proof import Evidence, Side

pytestmark = pytest.mark.vllm

PERTURB = {"source": "85", "control": "85", "checkpoint": "170"}
WORDS = ("--dtype", "bfloat16", "--max-model-len", "256")
LONG = (
    *("bias", "gptq", "wna16", "int8-static", "mla", "gemma3", "mamba2", "hybrid"),
    *("bert", "custom", "vision"),
)
CASES = [
    *(("dense", 1), ("int8", 1), ("moe", 2)),
    *[pytest.param(kind, 1, marks=pytest.mark.long) for kind in ("tied", "moe", "awq", *LONG)],
    *[
        pytest.param(kind, 2, marks=pytest.mark.long)
        for kind in ("dense", "tied", "int8", "awq", "moe-ep", *LONG)
    ],
]
PROMPTS = 4
LOWEST_EXPONENT_BIT = 0x01
"""Of the upper byte of a bf16: the value becomes four times as large, or a fourth."""


@dataclass
class Bench:
    """One model, its checkpoint, and the evidence of every side loaded so far."""

    lab: Any
    kind: str
    tp: int
    model: Path
    checkpoint: Path
    manifest: Manifest
    seconds: dict[Side, float] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        return [str(self.model), *WORDS, "-tp", str(self.tp), *FLAGS.get(self.kind, ())]

    def load(self, side: Side) -> dict[str, Any]:
        request = {
            "words": self.words,
            "side": side,
            "record": str(self.checkpoint),
            "checkpoint": str(self.checkpoint),
            "manifest": self.manifest.digest,
        }
        started = time.monotonic()
        answer: dict[str, Any] = ask(self.lab, "prove", request, side, self.tp)
        self.seconds[side] = time.monotonic() - started
        return answer

    def evidence(self, side: Side) -> Evidence:
        names = [proof.rank_evidence_name(side, rank) for rank in range(self.tp)]
        ranks = [(self.checkpoint / name).read_bytes() for name in names]
        return proof.read(ranks, (self.checkpoint / proof.answers_name(side)).read_bytes())


def ask(lab: Any, program: str, request: Any, side: Side, tp: int) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", f"entrypoint.vllm_plugin.{program}"]
    environ = {"MALLOC_PERTURB_": PERTURB[side], "VLLM_CPU_OMP_THREADS_BIND": cores(tp)}
    found: dict[str, Any] = lab.ask(command, request, environ)
    return found


def saved(lab: Any, kind: str, tp: int) -> Bench:
    model = lab.model(kind.removesuffix("-ep"))
    staging = lab.room / f"{kind}-tp{tp}-recorded"
    staging.mkdir()
    request = {
        "words": [str(model), *WORDS, "-tp", str(tp), *FLAGS.get(kind, ())],
        "staging": str(staging),
        "size_per_file": 1_500_000,
        "file_mode": 0o640,
        "record": True,
    }
    started = time.monotonic()
    answer = ask(lab, "save", request, "source", tp)
    seconds = time.monotonic() - started
    assert answer["status"] == "ok", answer
    manifest = lab.assemble(model, staging, tp=tp)
    return Bench(lab, kind, tp, model, staging, manifest, {"source": seconds})


def differing(source: Evidence, found: Evidence, word: str) -> list[str]:
    names = {name for name in source.keys() | found.keys() if f" {word}" in f" {name}"}
    return sorted(name for name in names if source.get(name) != found.get(name))


def row(bench: Bench, source: Evidence, found: Evidence) -> str:
    """Return the case as a line of the table of kinds."""
    equal = {
        word: "differ" if differing(source, found, word) else "equal"
        for word in ("before", "after", "tokens", "logprobs", "pooled")
    }
    unprobed = sorted(name for name, item in source.items() if item.unprobed)
    words = {word for name in source for word in name.split() if not name.startswith("rank ")}
    said = [word for word in ("tokens", "logprobs", "pooled") if word in words]
    cells = [bench.kind, str(bench.tp), equal["before"], equal["after"], str(len(unprobed))]
    cells += [", ".join(f"{word} {equal[word]}" for word in said) or "cannot be asked"]
    cells += [f"{bench.seconds[side]:.0f} s" for side in ("source", "checkpoint")]
    return f"| {' | '.join(cells)} |"


@pytest.fixture(scope="module")
def benches(lab: Any) -> Callable[[str, int], Bench]:
    """Return what saves a kind of model, with evidence, once."""
    return cache(partial(saved, lab))


@pytest.mark.parametrize(("kind", "tp"), CASES)
def test_checkpoint_records_what_its_source_records(kind: str, tp: int, benches: Any) -> None:
    bench: Bench = benches(kind, tp)
    answer = bench.load("checkpoint")
    assert answer["status"] == "ok", answer
    source, found = bench.evidence("source"), bench.evidence("checkpoint")
    print(f"\n{row(bench, source, found)}")

    for rank in range(tp):
        for stage in ("before", "after"):
            assert any(name.startswith(f"rank {rank} {stage} ") for name in source)
    answers = json.loads((bench.checkpoint / proof.answers_name("source")).read_bytes())
    if kind == "moe-ep":
        # Stock vLLM crashes when it generates so on a CPU; it loads, and that is proved.
        assert answers["unanswered"]
    elif kind == "bert":
        digests = {pooled["digest"] for pooled in answers["pooled"]}
        assert len(digests) == PROMPTS
    else:
        assert len(answers["answers"]) == PROMPTS
        # A model that says one token over and over would hide a wrong weight.
        assert all(len(set(told["tokens"])) > 2 for told in answers["answers"])
    verdict = proof.compare(source, found)
    if not verdict.proves:
        print(verdict.discrepancies)
        assert bench.load("control")["status"] == "ok"
        verdict = proof.compare(source, found, bench.evidence("control"))
    if not verdict.proves:
        # Once more, as `prover.prove` does: this process may have been the one that differs.
        print(verdict.discrepancies)
        assert bench.load("checkpoint")["status"] == "ok"
        found = bench.evidence("checkpoint")
        verdict = proof.compare(source, found, bench.evidence("control"))
    assert verdict.proves, verdict.discrepancies


def test_source_loaded_again_records_the_same_and_writes_no_weights(benches: Any) -> None:
    bench: Bench = benches("dense", 1)
    before = {path.name for path in bench.checkpoint.iterdir()}
    assert bench.load("control") == {"status": "ok"}
    verdict = proof.compare(bench.evidence("source"), bench.evidence("control"))
    # Recomputed tables were seen to differ between processes of one source, and nothing else.
    assert all("cos_sin_cache" in said for said in verdict.discrepancies), verdict
    after = {path.name for path in bench.checkpoint.iterdir()}
    names = {proof.answers_name("control"), proof.rank_evidence_name("control", 0)}
    assert after - before == names


def test_one_wrong_bit_shows_before_post_processing_and_after(benches: Any) -> None:
    bench: Bench = benches("dense", 1)
    wrong = replace(bench, checkpoint=bench.checkpoint.with_name("one-bit"), seconds={})
    shutil.copytree(bench.checkpoint, wrong.checkpoint)
    wrong.manifest = flip_bit(wrong.checkpoint, bench.manifest, "model.layers.1.mlp.down_proj")
    assert wrong.load("checkpoint") == {"status": "ok"}
    source, found = bench.evidence("source"), wrong.evidence("checkpoint")
    before = differing(source, found, "before")
    # Recomputed tables differ between processes now and then, whatever the weights are.
    assert [name for name in before if "cos_sin_cache" not in name] == [
        "rank 0 before model.layers.1.mlp.down_proj.weight"
    ]
    assert differing(source, found, "after") == ["rank 0 after model.layers.1.mlp.down_proj"]
    assert differing(source, found, "logprobs")
    assert not proof.compare(source, found).proves


def flip_bit(checkpoint: Path, manifest: Manifest, module: str) -> Manifest:
    """Change one value of a module's weight; return a manifest that fits, and write it."""
    for entry in manifest.files:
        path = checkpoint / entry.path
        found = header.read(path).get(f"{module}.weight") if entry.role == "weights" else None
        if found is None:
            continue
        data = bytearray(path.read_bytes())
        data[found.begin + 1] ^= LOWEST_EXPONENT_BIT
        path.write_bytes(data)
        files = [e for e in manifest.files if e is not entry]
        files.append(entry._replace(blake3=digest_file(path)))
        fitting = manifest._replace(files=tuple(sorted(files, key=lambda e: e.path)))
        (checkpoint / MANIFEST).write_bytes(fitting.encode())
        return fitting
    raise AssertionError(module)


def test_what_the_strict_loader_refuses_arrives_with_its_reason(benches: Any) -> None:
    bench: Bench = benches("moe", 2)
    broken = replace(bench, checkpoint=bench.checkpoint.with_name("broken"), seconds={})
    shutil.copytree(bench.checkpoint, broken.checkpoint)
    last = max(entry.path for entry in bench.manifest.files if entry.rank == 1)
    with (broken.checkpoint / last).open("r+b") as file:
        file.truncate(100)
    answer = broken.load("checkpoint")
    assert answer["status"] == "refused"
    assert answer["reason"] == "proof.load"
    assert last in answer["message"]
    # What the save had left of this side is gone: nobody takes it for this load's.
    assert not list(broken.checkpoint.glob(".checkpoint-*"))


@pytest.mark.long
def test_source_is_read_with_its_own_names_after_a_checkpoint_was_refused(
    lab: Any, benches: Any
) -> None:
    # For GPTQ vLLM reads off the files' names which layers are quantized, once, at its start.
    bench: Bench = benches("gptq", 1)
    broken = bench.checkpoint.with_name("gptq-broken")
    shutil.copytree(bench.checkpoint, broken)
    last = max(entry.path for entry in bench.manifest.files if entry.role == "weights")
    with (broken / last).open("r+b") as file:
        file.truncate((broken / last).stat().st_size - 1)
    extra = {"manifest": bench.manifest.digest, "source": str(bench.model)}
    arguments = {"load_format": "shardboot", "model_loader_extra_config": extra}
    found = lab.engine(broken, "gptq-fallback", **arguments)
    assert "Loading the source instead" in found.said
    assert found.done, found.said[-4000:]
    assert found.tokens == lab.engine(bench.model, "gptq-plain").tokens
