"""The end of a tee: what all ranks have written becomes a checkpoint, and is committed.

    python -P -m entrypoint.finisher STAGING SECONDS

A process of its own beside the server, of the lowest priority, that ends with it. One JSON answer
on stdout: `ok` and the name, or `failed` with a reason code; nothing is published then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Final

from entrypoint import assembly
from entrypoint.assembly import Subject
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.foreign import MALFORMED
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.checkpoint.proof import rank_evidence_name
from entrypoint.errors import SaveError, ShardbootError
from entrypoint.model.identity import read_in_full
from entrypoint.state import process
from entrypoint.state.awaited import Awaited
from entrypoint.state.memory import Memory
from entrypoint.state.rejections import UNPROBED
from entrypoint.store import order as orders
from entrypoint.store import staging as stagings
from entrypoint.store.staging import Staging

LOWEST_PRIORITY: Final = 19


def finish(staged: Path, seconds: float) -> str:
    """Commit what lies in `staged`, `seconds` after its ranks began; return its published name.

    Raises: SaveError, also when the source has changed; StoreError; StagingError; SpaceError.
    """
    started = time.monotonic()
    order = orders.read(staged)
    subject, state = Subject.from_json(order["of"]), Path(order["state"])
    modes = {"dir_mode": int(order["dir_mode"]), "file_mode": int(order["file_mode"])}
    with stagings.join(staged, **modes) as staging:
        identity = read_in_full(subject.source, subject.identity, Memory(state))
        seconds += time.monotonic() - started
        manifest = assembly.assemble(subject, staging, identity, os.environ, seconds)
        if order.get("record"):
            _keep_evidence(staging, manifest, state)
        result = staging.commit(manifest)
    assembly.forget_refusals(subject, manifest, state)
    return result.name


def _keep_evidence(staging: Staging, manifest: Manifest, state: Path) -> None:
    """Keep what the ranks recorded of the source: the next load proves by it. Raises: SaveError."""
    found: dict[int, Json] = {}
    try:
        for rank in manifest.layout.ranks:
            data = (staging.path / rank_evidence_name("source", rank)).read_bytes()
            found[rank] = json.loads(data)
        Awaited(state).add(manifest.content, found)
    except (OSError, *MALFORMED) as error:
        msg = f"what the source gave cannot be kept for the proof: {error}"
        # Another try records the same, but may find the disk well.
        reason = "" if isinstance(error, OSError) else UNPROBED
        raise SaveError(msg, reason=reason) from None


def main() -> None:
    process.die_with_parent()
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
    answer: dict[str, Json]
    try:
        answer = {"status": "ok", "name": finish(Path(sys.argv[1]), float(sys.argv[2]))}
    except ShardbootError as error:
        answer = {"status": "failed", "reason": error.reason, "message": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
