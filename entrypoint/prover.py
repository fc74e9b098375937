"""Proving that a checkpoint loads to the very state that the source gives.

Children load both sides with vLLM and record evidence; `checkpoint.proof` compares it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from entrypoint import child
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.checkpoint.proof import (
    UNFINISHED,
    Evidence,
    Side,
    Verdict,
    answers_name,
    compare,
    rank_evidence_name,
    read,
    summary,
)
from entrypoint.engine.executable import Executable, with_plugin
from entrypoint.engine.resolution import Resolution
from entrypoint.errors import ProofError

PROVE_MODULE: Final = "entrypoint.vllm_plugin.prove"
ATTEMPTS: Final = 2
"""One retry before rejecting: a machine under load has hiccups, wrong weights do not go away."""

PERTURB: Final[Mapping[Side, str]] = {"source": "85", "control": "85", "checkpoint": "170"}
"""MALLOC_PERTURB_ by side (mallopt(3)), so that memory nobody wrote differs and shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and with what both sides are loaded. `words` are the user's, after `vllm serve`.

    `work` is a directory for evidence; `logs` is where the children's logs stay. Whatever runs at
    `deadline`, by the monotonic clock, is ended. `on_tick` is called while one runs; what it raises
    ends that one.
    """

    engine: Executable
    words: Sequence[str]
    environ: Mapping[str, str]
    resolution: Resolution
    work: Path
    logs: Path
    deadline: float
    say: Callable[[str], None]
    on_tick: Callable[[], None] = lambda: None


def environ_for(environ: Mapping[str, str], side: Side) -> dict[str, str]:
    """Return the environment that one side is loaded in."""
    return with_plugin(environ) | {"MALLOC_PERTURB_": PERTURB[side]}


def prove(
    bench: Bench, checkpoint: Path, manifest: Manifest, source: Evidence | None
) -> dict[str, Json]:
    """Load the checkpoint and compare it with the source; return what a manifest keeps of it.

    `source` is the evidence that the save recorded; None loads the source for it.
    Raises: ProofError naming what differs first, or which side could not be loaded.
    """
    ranks = manifest.layout.ranks
    if source is None:
        source = _load(bench, "control", ranks, None)
    control: Evidence | None = None
    verdict = Verdict((), excusable=False)
    for attempt in range(1, ATTEMPTS + 1):
        bench.say(f"{manifest.name}: loading it as a server would (attempt {attempt})")
        found = _load(bench, "checkpoint", ranks, (checkpoint, manifest.digest))
        verdict = compare(source, found, control)
        if verdict.excusable and verdict.discrepancies:
            bench.say(f"{verdict.discrepancies[0]}; loading the source again for comparison")
            control = _load(bench, "control", ranks, None)
            verdict = compare(source, found, control)
        if verdict.proves:
            return summary(
                source,
                controlled=control is not None,
                vllm=bench.resolution.key.vllm,
                plugin=bench.resolution.plugin or "",
            )
    first, count = verdict.discrepancies[0], len(verdict.discrepancies)
    msg = f"{manifest.name} does not load to the source's state: {first} (one of {count})"
    raise ProofError(msg, hint=f"see {bench.logs}; the source is served as it is")


def read_evidence(directory: Path, side: Side, ranks: Sequence[int]) -> Evidence:
    """Return what one side recorded in `directory`. Raises: ProofError."""
    try:
        per_rank = [(directory / rank_evidence_name(side, rank)).read_bytes() for rank in ranks]
        return read(per_rank, (directory / answers_name(side)).read_bytes())
    except OSError as error:
        msg = f"the {side} side left no evidence: {error}"
        raise ProofError(msg, reason=UNFINISHED) from None


def _load(
    bench: Bench, side: Side, ranks: Sequence[int], checkpoint: tuple[Path, str] | None
) -> Evidence:
    log_file = bench.logs / f"prove-{side}.log"
    path, digest = checkpoint or (None, None)
    with child.open_log(log_file) as log:
        outcome = child.ask(
            [bench.engine.interpreter, "-P", "-m", PROVE_MODULE],
            {
                "words": list(bench.words),
                "side": side,
                "record": str(bench.work),
                "checkpoint": str(path) if path else None,
                "append": list(bench.resolution.append),
                "manifest": digest,
            },
            environ=environ_for(bench.environ, side),
            log=log,
            timeout=max(0.0, bench.deadline - time.monotonic()),
            on_tick=bench.on_tick,
        )
        last = child.last_lines(log)
    answer = outcome.answer if isinstance(outcome.answer, dict) else {}
    if answer.get("status") == "ok":
        return read_evidence(bench.work, side, ranks)
    if answer.get("status") == "refused":
        msg = f"the {side} side: {answer.get('message')}"
        # What our loader refuses is a difference; what vLLM refuses says nothing about weights.
        is_verdict = answer.get("reason") == "proof.load"
        raise ProofError(msg, reason="" if is_verdict else UNFINISHED)
    what, hint = f"ended with status {outcome.status}", f"its whole log is {log_file}"
    if outcome.timed_out:
        what, hint = "took too long", f"{hint}; or raise --save-timeout"
    msg = f"loading the {side} side {what}: {last}"
    raise ProofError(msg, reason=UNFINISHED, hint=hint)
