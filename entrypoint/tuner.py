"""Timing how a model loads in shard files of several sizes: a child in staging that is thrown away.

This room never imports torch; the child is `entrypoint.vllm_plugin.tune` in vLLM's interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from entrypoint import child
from entrypoint.checkpoint.digest import Json
from entrypoint.checkpoint.layout import model_in_name
from entrypoint.engine.executable import Executable, with_plugin
from entrypoint.engine.resolution import Resolution
from entrypoint.errors import SaveError
from entrypoint.insight import knee
from entrypoint.insight.knee import Trial, size_word
from entrypoint.insight.verdict import human_decimal
from entrypoint.state.attempts import Entry
from entrypoint.state.ledger import Ledger
from entrypoint.store import tree
from entrypoint.store.directory import DirectoryStore

TUNE_MODULE: Final = "entrypoint.vllm_plugin.tune"
SECONDS_BETWEEN_LINES: Final = 5.0

FRESH_MEMORY: Final[Mapping[str, str]] = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
"""Memory of the model before is not used again (mallopt(3)): a server's has never been touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to time. `words` are the user's, all after `vllm serve`; each of `sizes` in bytes.

    `say` hears of everything that is done.
    """

    engine: Executable
    words: Sequence[str]
    environ: Mapping[str, str]
    resolution: Resolution
    sizes: Sequence[int]
    runs: int
    file_mode: int
    log_file: Path
    timeout: float
    say: Callable[[str], None]


def tune(order: Order, store: DirectoryStore) -> list[Trial]:
    """Save and load the model in every size; return what was measured, smallest size first.

    When this returns or raises, nothing of it is in the store, and no process is left. Sizes that
    make the same files are tried once. Raises: SaveError, StagingError, SpaceError.
    """
    with store.stage(f"tune-{model_in_name(order.resolution.model_word)}") as staging:
        telling = _Telling(order, staging.path)
        with child.open_log(order.log_file) as log:
            outcome = child.ask(
                [order.engine.interpreter, "-P", "-m", TUNE_MODULE],
                {
                    "words": list(order.words),
                    "staging": str(staging.path),
                    "sizes": list[Json](sorted(set(order.sizes))),
                    "runs": order.runs,
                    "file_mode": order.file_mode,
                    "key": order.resolution.key.to_json(),
                    "name": order.resolution.model_word,
                },
                environ={**with_plugin(order.environ), **FRESH_MEMORY},
                log=log,
                timeout=order.timeout,
                on_tick=telling.tick,
            )
            last_words = child.last_lines(log)
        telling.tick()
        _require_ok(outcome, order, last_words)
        measured = knee.trials(Ledger(staging.path).entries())
    if not measured:
        msg = f"nothing was measured: {last_words}"
        raise SaveError(msg, hint=f"the child's whole log is {order.log_file}")
    return measured


def _require_ok(outcome: child.Outcome, order: Order, last_words: str) -> None:
    """Raise what kept the child from its end. Raises: SaveError."""
    answer = outcome.answer if isinstance(outcome.answer, dict) else {}
    if outcome.timed_out:
        msg = f"this took longer than {order.timeout:.0f} s and was ended"
        hint = "fewer --sizes or --runs take less, and --save-timeout allows more"
        raise SaveError(msg, reason="save.timeout", hint=hint)
    if answer.get("status") == "refused":
        raise SaveError(str(answer["message"]), reason=str(answer["reason"]))
    if answer.get("status") != "ok":
        msg = f"the child ended with status {outcome.status}: {last_words}"
        raise SaveError(msg, hint=f"its whole log is {order.log_file}")


class _Telling:
    """Says what the child has noted since the last look, and before that how far it is."""

    def __init__(self, order: Order, staging: Path) -> None:
        self.order, self.staging = order, staging
        self.heard = self.loads = 0
        self.said = time.monotonic()

    def tick(self) -> None:
        entries = [*Ledger(self.staging).entries()]
        for entry in entries[self.heard :]:
            self._tell(entry)
        self.heard = len(entries)
        if not self.loads and time.monotonic() - self.said >= SECONDS_BETWEEN_LINES:
            held = _bytes_in(self.staging)
            self._say(f"{human_decimal(held)} are written" if held else "the source is loading")

    def _tell(self, entry: Entry) -> None:
        size, _, kind = str(entry.get("boot")).partition("/")
        seconds, held = entry.get("seconds"), entry.get("bytes")
        if not (size.isdecimal() and isinstance(seconds, float) and isinstance(held, int)):
            return
        name = f"{size_word(int(size))} a file"
        if entry.get("event") == "wrote":
            self._say(f"{name}: {human_decimal(held)} written in {seconds:.1f} s")
        elif kind in knee.KINDS:
            self.loads += 1
            self._say(f"{name}: load {self.loads}, {kind}, {seconds:.2f} s")

    def _say(self, text: str) -> None:
        self.said = time.monotonic()
        self.order.say(text)


def _bytes_in(directory: Path) -> int:
    try:
        return sum(status.st_size for _, status in tree.files_beneath(directory))
    except OSError:
        # Fragments are renamed into place meanwhile.
        return 0
