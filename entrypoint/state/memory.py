"""Remembered answers, one small file each, named by the digest of the question.

Only ever a short cut: without a writable state directory all works, slower.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

from entrypoint.checkpoint.digest import Json
from entrypoint.state.files import keep_newest, read_json, write_json
from entrypoint.state.places import below

Deed = Literal["prefetched", "published", "repaired", "scrubbed", "tried"]
"""What the sidecar did with a checkpoint; the answer is when."""

Subject = Literal["engines", "resolutions", "identities", "inspections", "saves", Deed]
MAX_ENTRIES = 256
"""Per subject; the oldest are forgotten beyond that."""


class Memory:
    """Answers under `root`; bounded in number, whole or absent each."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def recall(self, subject: Subject, question: str) -> Json:
        """Return the remembered answer, or None."""
        return read_json(self._path(subject, question))

    def remember(self, subject: Subject, question: str, answer: Json) -> bool:
        """Keep `answer`, unless it is known already; return False where nothing can be kept."""
        path = self._path(subject, question)
        if read_json(path) == answer:
            return True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, answer)
            keep_newest(path.parent, "[!.]*.json", MAX_ENTRIES)
        except OSError:
            return False
        return True

    def forget(self, subject: Subject) -> None:
        """Forget all answers of a kind; what may not be deleted stays."""
        for path in (below(self.root, "memory") / subject).glob("[!.]*.json"):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _path(self, subject: Subject, question: str) -> Path:
        return below(self.root, "memory") / subject / f"{question}.json"
