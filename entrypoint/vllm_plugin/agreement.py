"""What all ranks of a model agree on while they load it: whoever objects, objects for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import KeyMismatchError, ProofError, ShardbootError
from entrypoint.vllm_plugin import compat

MEET_SECONDS: Final = 60.0
"""How long workers of other nodes may be behind: they found each other a moment ago."""

OPEN: Final = "open"
"""Of a proof that came to nothing."""

STALE: Final = "stale"
"""Of boot, which went by an answer of vLLM's that does not hold any more."""


class Objection(Exception):  # noqa: N818 - raised alike on every rank, and answered in one place
    """What the first rank with an objection says.

    `fault` is what the checkpoint is to be rejected for: `unfit`, another model's; `unproven`, it
    does not load to its source's state. `OPEN` where that could not be found out, `STALE` where it
    is another engine's, and "" for whatever else is no fault of its own.
    """

    def __init__(self, message: str, fault: str = "") -> None:
        super().__init__(message)
        self.fault = fault


@contextmanager
def agreeing(mismatch: str = "unfit") -> Iterator[None]:
    """Run the block on every rank; raise on all what the first rank that failed says.

    `mismatch` is the fault where something does not fit.
    Every rank must come here, and does: nothing but the block's own failures can part them.
    """
    verdict: tuple[str, str] | None = None
    try:
        yield
    except (ShardbootError, OSError, ValueError) as error:
        verdict = (_fault(error, mismatch), str(error))
    for rank, found in enumerate(compat.gather(verdict)):
        if found is not None:
            fault, message = found
            raise Objection(f"worker {rank} objects: {message}", fault)


def _fault(error: Exception, mismatch: str) -> str:
    match error:
        case KeyMismatchError():
            return mismatch
        case ProofError(reason=ProofError.reason):
            return "unproven"
        case ProofError():
            return OPEN
        case _:
            return ""


def all_load_a_checkpoint() -> None:
    """Raise on every rank that came where another node's workers were told to load the source."""
    if not compat.all_come(MEET_SECONDS):
        raise Objection("workers of another node load no checkpoint")


def same_everywhere(manifest: Manifest) -> None:
    """Raise on every rank alike where one of them has other weights than rank 0.

    Paths, names, and who saved it when may differ between nodes; what is loaded may not.
    """
    found = compat.gather((manifest.name, manifest.state))
    for rank, (name, state) in enumerate(found):
        if state != found[0][1]:
            text = f"worker {rank} has {name} and worker 0 {found[0][0]}, which hold other weights"
            raise Objection(text)
