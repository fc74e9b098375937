"""What becomes of a load, noted in the ledger: after exec nobody else sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrypoint.checkpoint.digest import Json
from entrypoint.state.ledger import Ledger
from entrypoint.state.memory import Memory
from entrypoint.state.rejections import Rejections


@dataclass(frozen=True, slots=True)
class Notes:
    """Notes of one boot; without a state directory, as under a proof, there are none.

    `asked` tells what vLLM was asked for it, as in `engine.resolution`.
    """

    state: Path | None
    boot: str
    asked: str = ""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Notes:
        """Return the notes that the loader's settings ask for."""
        state = settings.get("state")
        texts = (str(settings.get(name, "")) for name in ("boot", "asked"))
        return cls(Path(str(state)) if state else None, *texts)

    def line(self, event: str, **fields: Json) -> None:
        """Add one line; a state directory that cannot be written costs nothing else."""
        if self.state is not None:
            about: dict[str, Json] = {"boot": self.boot, "event": event}
            Ledger(self.state).append(about | {"time": round(time.time(), 3)} | fields)

    def refuse(self, key: str, reason: str, text: str) -> None:
        """Remember why a model cannot be saved, where it is the model's own: none tries in vain."""
        if self.state is not None:
            Rejections(self.state).refuse(key, reason, text)

    def forget_answers(self) -> None:
        """Have the next boot ask vLLM how it reads the words, whatever they are."""
        if self.state is not None:
            Memory(self.state).forget("resolutions")

    def reject(self, digest: str, kind: str, reason: str) -> None:
        """Remember that no boot is to try it again, and for what: one of `KINDS`, or a code.

        What is unfit may fit where vLLM is asked something else.
        """
        if self.state is not None:
            asked = self.asked if kind == "unfit" else ""
            Rejections(self.state).add(digest, kind, reason, asked)
