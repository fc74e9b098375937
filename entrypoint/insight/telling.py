"""The tongue between the process that measures and the one that never waits for it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Any, Final

from entrypoint.errors import (
    ConfigError,
    NotFoundError,
    OwnershipError,
    ShardbootError,
    SpaceError,
    StoreError,
)
from entrypoint.insight.findings import Findings, learn
from entrypoint.insight.overseer import Overseer, Tell

LOOK_SECONDS: Final = 3.0
"""What does not even say what it is in that time counts as hung."""

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)

_ERRORS: Final = (ConfigError, NotFoundError, OwnershipError, SpaceError, StoreError)


class Teller:
    """Tells steps, findings and failures from the worker; a step that fails is no end."""

    def __init__(self, tell: Tell, patience: float) -> None:
        self._tell, self._patience = tell, patience
        self._failures: dict[str, str] = {}

    def found(self, field: str, value: Any) -> None:
        """Tell one field of the findings."""
        self._tell({"found": field, "value": value})

    def begin(self, name: str, seconds: float) -> None:
        """Tell that a step begins, which ends in about so long."""
        self._tell({"step": name, "patience": seconds + self._patience})

    @contextlib.contextmanager
    def step(self, name: str, seconds: float) -> Iterator[None]:
        """Tell that a step begins, and how it failed if it does; then others go on.

        Raises: OSError where there is no room.
        """
        self.begin(name, seconds)
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            self._failures[name] = error.strerror or str(error)
            self.found("failures", list(self._failures.items()))

    def refuse(self, error: ShardbootError) -> None:
        """Tell an error that ends it all."""
        self._tell({"refused": type(error).__name__, "text": str(error), "hint": error.hint})

    def end(self) -> None:
        """Tell that this is all."""
        self._tell("end")


def listen(findings: Findings, overseer: Overseer, say: Callable[[str], None]) -> Findings:
    """Gather what the worker tells, until it has ended or hangs. Raises: what it was refused."""
    step, patience = "look", LOOK_SECONDS
    while True:
        try:
            told = overseer.hear(patience)
        except TimeoutError:
            return findings._replace(hung=step)
        except EOFError:
            failures = (*findings.failures, (step, "the measuring process was killed"))
            return findings._replace(failures=failures)
        match told:
            case {"step": step, "patience": patience}:
                say(step)
            case {"found": field, "value": value}:
                findings = learn(findings, field, value)
            case {"refused": kind, "text": text, "hint": hint}:
                raise next(each for each in _ERRORS if each.__name__ == kind)(text, hint=hint)
            case {"bug": trace}:
                raise RuntimeError(trace)
            case _:
                return findings
