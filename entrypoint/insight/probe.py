"""Probing a directory from a process that touches nothing there, and waits for nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from entrypoint.insight import mount
from entrypoint.insight.examine import SCRATCH, Order, Spot, examine
from entrypoint.insight.findings import Findings
from entrypoint.insight.overseer import Claim, Overseer, Tell
from entrypoint.insight.telling import Teller, listen
from entrypoint.store import tree


def probe(path: Path, also: Path | None, order: Order, say: Callable[[str], None]) -> Findings:
    """Measure a directory; return what was found. `say` hears of each step.

    What was made there is gone when this returns or raises, and so are all processes, as far as
    the mount answers. A hang is a finding. Raises: StoreError, OwnershipError, SpaceError,
    ConfigError when `also` is another directory.
    """
    spot = Spot(path, path / f"{SCRATCH}{os.urandom(8).hex()}", also)
    # Syncing some megabytes may take that long on a slow disk that does not hang.
    patience = min(max(3.0, order.seconds / 2), 15.0)

    def work(tell: Tell, claim: Claim) -> None:
        examine(spot, order, Teller(tell, patience), claim)

    overseer = Overseer(work, lambda: tree.remove(spot.scratch), order.seconds + 10)
    with overseer:
        findings = listen(Findings(str(path), also=str(also or "")), overseer, say)
    if not overseer.is_clear:
        text = f"{spot.scratch} could not be removed: delete it once the mount answers"
        findings = findings._replace(failures=(*findings.failures, ("clear", text)))
    if findings.hung and findings.file_system is None:
        findings = findings._replace(file_system=mount.as_text(findings.path))
    return findings
