"""The table of kinds: what of it a machine can try, and what came of it. Pure.

scripts/gpu-parity fills it; tests/vllm/test_evidence.py fills the same on vLLM's CPU build.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

from fp8 import FP8
from models import KINDS

FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    "bert": ("--runner", "pooling"),
    "custom": ("--trust-remote-code",),
    "moe-ep": ("--enable-expert-parallel",),
}
"""What vLLM must be told of a kind."""

ALL_KINDS: Final = (*KINDS, "moe-ep")
SIZES: Final = (1, 2)
"""Tensor parallel."""

NOTHING_RAN: Final = 77
WIDEST: Final = 200
ERROR: Final = "shardboot: error: "
REFUSALS: Final = ("engine.rejected", "save.rejected")
"""vLLM does not take this kind here: no word about checkpoints."""

Word = Literal["proved", "failed", "not run"]


class Cell(NamedTuple):
    """One kind of model at one tensor parallel size."""

    kind: str
    tp: int

    @property
    def model(self) -> str:
        """The model that it takes, as tests/models.py knows it."""
        return self.kind.removesuffix("-ep")


class Outcome(NamedTuple):
    """What came of a cell; `why` is what was proved, why it failed, or why it was not run."""

    word: Word
    why: str

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


def hidden(kind: str) -> int:
    """Return the hidden size: every rank of a block-wise model must hold whole blocks."""
    return 512 if kind == "fp8-block" else 256


def impossible(cell: Cell, *, gpus: int, on_cpu: bool) -> str:
    """Return why this machine cannot try a cell, or nothing."""
    if on_cpu:
        return "vLLM's CPU build has no kernel for FP8" if cell.kind in FP8 else ""
    return f"{gpus} GPU for {cell.tp} ranks" if gpus < cell.tp else ""


def outcome(status: int, log: str, proof: Mapping[str, Any] | None) -> Outcome:
    """Return what `shardboot save --prove always` came to: its status, its words, its proof."""
    if status == 0 and proof:
        unprobed = len(proof["unprobed"])
        return Outcome(
            "proved", f"{proof['items']} items" + (f", not {unprobed}" if unprobed else "")
        )
    if status == 0:
        return Outcome("failed", "the checkpoint came without a proof")
    said = [line for line in log.splitlines() if line.startswith(ERROR)]
    why = said[-1].removeprefix(ERROR) if said else f"exit status {status}, and no word why"
    return Outcome("not run" if why.startswith(REFUSALS) else "failed", why)


def proof_in(manifest: bytes) -> Mapping[str, Any] | None:
    """Return the proof that a manifest holds."""
    proof: Mapping[str, Any] | None = json.loads(manifest)["proof"]
    return proof


def table(outcomes: Mapping[Cell, Outcome]) -> str:
    """Return the outcomes as a table in Markdown: a line a kind, a column a size."""
    kinds = list(dict.fromkeys(cell.kind for cell in outcomes))
    sizes = sorted({cell.tp for cell in outcomes})
    rows = [["kind", *(f"TP={tp}" for tp in sizes)], ["---"] * (1 + len(sizes))]
    for kind in kinds:
        found = [outcomes.get(Cell(kind, tp)) for tp in sizes]
        rows.append([kind, *("-" if each is None else _cell(each) for each in found)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(found: Outcome) -> str:
    text = str(found)
    cut = text if len(text) <= WIDEST else f"{text[:WIDEST]} …"
    return cut.replace("|", "\\|")


def verdict(outcomes: Iterable[Outcome]) -> tuple[int, str]:
    """Return the exit status, and the sentence that says what is known now."""
    words = [found.word for found in outcomes]
    proved, failed, left = (words.count(word) for word in ("proved", "failed", "not run"))
    if not proved + failed:
        return NOTHING_RAN, "nothing was run, nothing is known"
    rest = f"; {left} not run, of which nothing is known" if left else ""
    if failed:
        return 1, f"{failed} of {proved + failed} failed{rest}"
    return 0, f"all {proved} that ran are proved{rest}"
