"""The standby as the supervisor keeps it: fresh, and only as long as it can be trusted."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from entrypoint.assess import Boot
from entrypoint.checkpoint.digest import digest_json
from entrypoint.engine.executable import find
from entrypoint.errors import ShardbootError
from entrypoint.state.places import below
from entrypoint.supervise.restart import End
from entrypoint.supervise.standby import Standby, StandbySeat

BUSY_SECONDS: Final = 20.0
"""For one that is busy when a server is due: by then, one that imports all itself would serve."""

LEARN_SECONDS: Final = 20.0
"""After a server is healthy: by then its first requests have imported what they need."""


class Spare:
    """Has a standby, another one where that is gone, or none where servers are better without."""

    def __init__(self, first: Boot) -> None:
        self.settings, self.environ, self.log = first.settings, first.environ, first.log
        self.notes = notes_for(first.settings.state_dir, first.words)
        self.standby: Standby | None = None
        self.distrusted, self.is_proved, self.is_passed_over = "", False, False
        self.learning_at = math.inf
        if self.settings.single_import == "no":
            self._lose("--single-import no")

    @property
    def channels(self) -> list[int]:
        """The descriptor on which there is something to hear, if it says something."""
        return [self.standby.channel.fileno()] if self.standby else []

    @property
    def pids(self) -> set[int]:
        """The standby's pid, if there is one."""
        return {self.standby.process.pid} if self.standby else set()

    def seat(self, boot: Boot, told: int) -> StandbySeat:
        """Return where a boot has vLLM begin; `told` is where it tells the server's pid."""
        standby = None if self.is_passed_over else self.standby
        return StandbySeat(standby.channel if standby else None, told, boot.log)

    @property
    def is_awaited(self) -> bool:
        """Whether it has been ready, and will soon tell whether it still is.

        One at its first imports is not waited for here: a boot has something to do meanwhile.
        """
        return self.standby is not None and self.standby.ready and self.standby.is_busy

    def look(self) -> None:
        """Have the standby tell whether it is still what is installed; let it go if not trusted."""
        if self.distrusted and self.standby:
            self.log.line("standby.given-up", f"servers are started without: {self.distrusted}")
            self.end()
        if self.is_passed_over and self.is_awaited:
            self.log.line("standby.renewed", "it has said nothing since the last start")
            self.end()
        if self.standby:
            self.standby.look()

    def prepare(self) -> None:
        """Have a standby where there is none; one that is busy for too long is passed over."""
        self.is_passed_over = self.is_awaited
        if self.is_passed_over:
            text = f"it has been busy for {BUSY_SECONDS:.0f} s; this server is started without it"
            self.log.line("standby.busy", text)
        if self.standby or self.distrusted:
            return
        try:
            engine = find(self.settings.vllm, self.environ)
            wish = self.settings.single_import
            self.standby = Standby(engine.interpreter, self.environ, self.notes, wish)
        except (ShardbootError, OSError) as error:
            self.log.line("standby.lost", f"servers are started without one: {error}")

    def hear(self, *, is_stopping: bool) -> None:
        """Hear that it is ready, or why it can be none."""
        if self.standby is None:
            return
        was_ready = self.standby.ready
        if why := self.standby.hear():
            self.end()
            if is_stopping:
                return
            if was_ready:
                text = f"{why}; the next start makes another one"
                self.log.line("standby.renewed", text)
            else:
                self._lose(why)

    def judge(self, end: End, *, is_told: bool) -> None:
        """Trust it once one of its servers has served; not if the first one ends before that.

        One that was told to is no failure.
        """
        self.is_proved = self.is_proved or end.served is not None
        if not self.is_proved and not is_told:
            self.distrusted = "its first server died before it served"

    def learn_later(self) -> None:
        """Have it import in a while what its server will have needed by then."""
        self.learning_at = time.monotonic() + LEARN_SECONDS

    def learn(self) -> None:
        """Have it import what its servers needed beyond it, if it is time."""
        if time.monotonic() > self.learning_at:
            self.learning_at = math.inf
            if self.standby:
                self.standby.learn()

    def end(self) -> None:
        """Let it go."""
        if self.standby:
            self.standby.end()
        self.standby = None

    def _lose(self, why: str) -> None:
        self.log.line("standby.lost", f"servers are started without one: {why}")
        self.distrusted = why


def notes_for(state_dir: Path, words: Sequence[str]) -> Path:
    """Return where servers note what they import, by vLLM's first word: the model, as a rule."""
    return below(state_dir, "imports") / digest_json(list(words[:1]))[:12]
