"""Each boot that the ledger tells of: what it was of, what it came to, and its phases. Pure."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple

from entrypoint.checkpoint.digest import Json
from entrypoint.insight.phases import NOW, Phase, done, laid, of_vllm, own
from entrypoint.state.attempts import Entry, tier_of, time_in
from entrypoint.state.status import Status

Outcome = Literal["served", "fell-back", "refused", "under-way", "stopped", "died"]
SERVES: Final = ("reuse", "tee", "serve-source")


class Timeline(NamedTuple):
    """A boot: its phases in order, each beginning where the one before it ends.

    `became` is when it became vLLM, 0 where it did not. `name` and `family` are of the model and
    layout, `key` is a digest; "" where unknown. `beside` went on while it served already.
    """

    boot: str
    began: float
    became: float
    outcome: Outcome
    name: str
    family: str
    key: str
    tier: str
    reason: str
    checkpoint: str
    phases: tuple[Phase, ...]
    beside: tuple[Phase, ...] = ()

    @property
    def seconds(self) -> float:
        """From its beginning to the end of its last phase."""
        return self.phases[-1].end - self.began if self.phases else 0.0

    @property
    def before(self) -> float:
        """Seconds before it became vLLM."""
        return max(0.0, self.became - self.began) if self.became else self.seconds

    def took(self, name: str) -> float | None:
        """Seconds of all phases of that name; None where there is none."""
        found = [phase.seconds for phase in self.phases if phase.name == name]
        return sum(found) if found else None

    def is_own(self, phase: Phase) -> bool:
        """Whether boot did it, and not vLLM."""
        return not self.became or phase.end <= self.became

    def to_json(self) -> dict[str, Json]:
        """Return it as scripts rely on it; what is not known is null, `start` counts from 0."""
        facts = ("name", "family", "key", "tier", "reason", "checkpoint")
        return {
            "boot": self.boot,
            "outcome": self.outcome,
            **{fact: getattr(self, fact) or None for fact in facts},
            "began": round(self.began, 3),
            "became_vllm": round(self.became, 3) or None,
            "seconds": round(self.seconds, 3),
            "phases": [self._json(phase) for phase in self.phases],
            "beside": [self._json(phase) for phase in self.beside],
        }

    def _json(self, phase: Phase) -> dict[str, Json]:
        return {
            "phase": phase.name,
            "detail": phase.detail or None,
            "start": round(phase.start - self.began, 3),
            "seconds": round(phase.seconds, 3),
            "bytes": phase.size or None,
        }


def timelines(
    entries: Iterable[Entry],
    statuses: Iterable[Status],
    is_alive: Callable[[Entry], bool],
    now: float,
) -> list[Timeline]:
    """Return the timeline of every boot, the latest one last.

    `entries` are lines of the ledger, oldest first. `statuses` tell of boots that have not come to
    a decision yet, or never did. `is_alive` tells whether the process of an attempt still runs,
    and is asked only where that matters.
    """
    lines: dict[str, list[Entry]] = {}
    decided: set[str] = set()
    for entry in entries:
        boot = entry.get("boot")
        if isinstance(boot, str):
            lines.setdefault(boot, []).append(entry)
            decided |= {boot} if entry.get("event") == "attempt" else set()
    for status in statuses:
        if status.boot not in decided:
            lines.setdefault(status.boot, []).append(_attempt_of(status))
            decided.add(status.boot)
    found = [_timeline(boot, lines[boot], is_alive, now) for boot in lines if boot in decided]
    return sorted(found, key=lambda timeline: timeline.began)


def _attempt_of(status: Status) -> Entry:
    """Return what the line of a boot would be that has left none: it was ended, or goes on."""
    phases: list[Json] = [{"phase": "deciding", "start": status.started, "end": status.since}]
    is_over = status.phase in ("starting", "failed")
    if not is_over:
        doing: dict[str, Json] = {"phase": status.phase, "bytes": status.done}
        phases.append(doing | {"start": status.since, "end": status.updated})
    return {
        "event": "attempt",
        "time": status.since if is_over else status.updated,
        "action": "refuse" if status.phase == "failed" else status.action,
        "reason": status.reason,
        "checkpoint": status.checkpoint,
        "phases": phases,
        "pid": status.server.pid,
        "pid_start": status.server.start,
        "host_boot": status.server.host_boot,
    }


def _timeline(
    boot: str, lines: Sequence[Entry], is_alive: Callable[[Entry], bool], now: float
) -> Timeline:
    # Where vLLM could not be executed another way was tried: the last one counts.
    attempt = next(line for line in reversed(lines) if line.get("event") == "attempt")
    events = {str(line.get("event")) for line in lines}
    if any(line.get("event") == "ended" and line.get("told") is True for line in lines):
        # A supervisor saw its end, and had been told.
        events.add("stopped")
    outcome = _outcome(attempt, events, is_alive)
    at = time_in(attempt, "time") or 0.0
    became = at if attempt.get("action") in SERVES else 0.0
    known = [*own(attempt, lines), *(of_vllm(became, lines) if became else ())]
    if outcome == "under-way":
        known.append(Phase(NOW, now, now))
    phases = laid(known)
    return Timeline(
        boot=boot,
        began=phases[0].start if phases else at,
        became=became,
        outcome=outcome,
        name=_text(attempt, "family_name"),
        family=_text(attempt, "family"),
        key=_text(attempt, "key"),
        tier=tier_of(attempt),
        reason=_text(attempt, "reason"),
        checkpoint=_text(attempt, "checkpoint"),
        phases=phases,
        beside=tuple(done(lines, "tee.done", "tee")),
    )


def _outcome(attempt: Entry, events: set[str], is_alive: Callable[[Entry], bool]) -> Outcome:
    if attempt.get("action") == "refuse":
        return "refused"
    if events & {"serving", "healthy"}:
        return "fell-back" if "fell-back" in events else "served"
    if "stopped" in events:
        return "stopped"
    return "under-way" if is_alive(attempt) else "died"


def _text(line: Entry, field: str) -> str:
    value = line.get(field)
    return value if isinstance(value, str) else ""
