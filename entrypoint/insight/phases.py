"""The phases of one boot, from its lines in the ledger. Pure.

Lines may be torn, odd, of another version, or by a clock that was set back. Whatever they say,
phases neither overlap nor leave a gap, and none takes less than no time.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from entrypoint.checkpoint.digest import Json
from entrypoint.state.attempts import Entry, a_time, time_in

OWN: Final[Mapping[str, str]] = {
    "deciding": "decide",
    "waiting": "wait",
    "copying": "copy",
    "verifying": "verify",
    "saving": "save",
    "proving": "prove",
    "publishing": "publish",
}
"""What boot does before exec, by the phases of its status."""

STEPS: Final[Mapping[str, str]] = {
    "profile": "profile",
    "kv-cache": "KV cache",
    "compile": "compile",
}
"""What the plugin times inside a worker of vLLM, by the names that it notes."""

PROCESSES: Final = ("server", "engine", "workers")
"""Whose imports follow one another: each process starts the next when it has its own."""

UNKNOWN: Final = "vLLM"
"""What vLLM does and nobody notes."""

NOW: Final = "now"
"""The moment until which goes on what is under way."""

MOMENT_SECONDS: Final = 0.005
"""What takes no longer is no phase, but parts two others."""

NO_GAP_SECONDS: Final = 0.02
FIRST_HEALTH_SECONDS: Final = 10.0
"""Who sees it healthy later than that after it began to serve had not been asking."""

_MAX_BYTES: Final = 1 << 60


class Phase(NamedTuple):
    """A part of a boot; times are seconds since 1970. `detail` tells apart what is named alike.

    `size` is in bytes, 0 where none are counted.
    """

    name: str
    start: float
    end: float
    detail: str = ""
    size: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def label(self) -> str:
        """Name and detail."""
        return f"{self.name} ({self.detail})" if self.detail else self.name


def own(attempt: Entry, lines: Iterable[Entry]) -> Iterator[Phase]:
    """Yield what boot did before exec, which it tells itself; older lines only tell of steps."""
    told = attempt.get("phases")
    if not isinstance(told, list):
        yield from done(lines, "copy.done", "copy")
        yield from done(lines, "save.done", "save")
        return
    for each in told:
        if isinstance(each, dict) and isinstance(name := each.get("phase"), str):
            start, end = time_in(each, "start"), time_in(each, "end")
            if start and end:
                yield Phase(OWN.get(name, name), start, end, size=_bytes(each))


def done(lines: Iterable[Entry], event: str, name: str) -> Iterator[Phase]:
    """Yield what was noted at its end, with the seconds that it had taken."""
    for line in lines:
        end, seconds = time_in(line, "time"), time_in(line, "seconds")
        if line.get("event") == event and end and seconds and seconds < end:
            yield Phase(name, end - seconds, end)


def of_vllm(at: float, lines: Sequence[Entry]) -> Iterator[Phase]:
    """Yield what is known of vLLM, from exec until it served; a moment is a phase of no length.

    Of several replicas each notes its own: the first one's beginning and the last one's end count.
    """
    yield Phase("exec", at, at)
    serving = next((n for n, line in enumerate(lines) if line.get("event") == "serving"), None)
    # What is noted later, such as weights that are loaded anew, is no part of the boot.
    boot = lines if serving is None else lines[: serving + 1]
    loading = _of(boot, "loading")
    loaded = _of(boot, "loaded")
    if begun := _times(loading):
        yield from _imports(at, loading[0])
        size = sum(_bytes(line) for line in loaded)
        yield Phase("weights", min(begun), max([*_times(loaded), min(begun)]), size=size)
    for time in _times(_of(boot, "objection")) if _of(boot, "fell-back") else ():
        yield Phase("fell-back", time, time)
    yield from _steps(_of(boot, "phase"))
    yield from _ends(_times(_of(boot, "serving")), _times(_of(lines, "healthy")))


def _imports(at: float, loading: Entry) -> Iterator[Phase]:
    """Yield the imports of each process down to a worker's, with whose end the model is begun."""
    imported, told = time_in(loading, "imported"), loading.get("processes")
    if not imported:
        return
    starts = [time for each in told if (time := a_time(each))] if isinstance(told, list) else []
    cuts = [at, *sorted(time for time in starts if at < time < imported), imported]
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        detail = PROCESSES[min(number, len(PROCESSES) - 1)]
        yield Phase("imports", start, end, detail if cuts[1] != imported else "")


def _steps(lines: Iterable[Entry]) -> Iterator[Phase]:
    """Yield what was noted inside a worker; what of it was compiling comes first, by its length."""
    found: dict[str, Phase] = {}
    compiled: dict[str, float] = {}
    for line in lines:
        name, start, end = line.get("phase"), time_in(line, "start"), time_in(line, "time")
        if isinstance(name, str) and start and end:
            known = found.get(name, Phase(STEPS.get(name, name), start, end))
            found[name] = known._replace(start=min(start, known.start), end=max(end, known.end))
            compiled[name] = max(compiled.get(name, 0.0), time_in(line, "compiled") or 0.0)
    for name, phase in found.items():
        until = min(phase.start + compiled[name], phase.end)
        yield Phase("compile", phase.start, until)
        yield phase._replace(start=until)


def _ends(serving: Sequence[float], healthy: Sequence[float]) -> Iterator[Phase]:
    """Yield when it served, and when somebody first saw it healthy."""
    if serving:
        yield Phase("serving", serving[0], serving[0])
        if healthy and serving[0] < healthy[0] <= serving[0] + FIRST_HEALTH_SECONDS:
            yield Phase("health", serving[0], healthy[0])
    elif healthy:
        yield Phase("serving", healthy[0], healthy[0])


def laid(known: Iterable[Phase]) -> tuple[Phase, ...]:
    """Return phases in order, cut where they overlap, and what lies between them named as well."""
    found: list[Phase] = []
    cursor, before, is_vllm = 0.0, "", False
    sound = (phase for phase in known if phase.start <= phase.end)
    for phase in sorted(sound, key=lambda each: (each.start, each.end)):
        cursor = cursor or phase.start
        start, end = max(phase.start, cursor), max(phase.end, cursor)
        if start - cursor > NO_GAP_SECONDS:
            between = _between if is_vllm else _before_vllm
            _add(found, Phase(between(before, phase.name), cursor, start))
            cursor = start
        # A tiny model's weights come faster, and are what one looks for first.
        if end - start > (0 if phase.name == "weights" else MOMENT_SECONDS):
            _add(found, phase._replace(start=cursor, end=end))
            cursor = end
        before, is_vllm = phase.name, is_vllm or phase.name == "exec"
    return tuple(found)


def _add(found: list[Phase], phase: Phase) -> None:
    """Add one more phase; one that goes on is the same."""
    if found and found[-1].label == phase.label:
        last = found.pop()
        phase = last._replace(end=phase.end, size=last.size + phase.size)
    found.append(phase)


def _before_vllm(before: str, after: str) -> str:
    return before if before and after == NOW else "decide"


def _between(before: str, after: str) -> str:
    """Name what lies between two phases of vLLM, which is known by both."""
    steps = STEPS.values()
    if (before, after) == ("imports", "weights"):
        return "build"
    if before == "fell-back":
        return "source"
    if before == "weights" and after in steps:
        return "process"
    return "server" if before in steps and after == "serving" else UNKNOWN


def _of(lines: Iterable[Entry], event: str) -> list[Entry]:
    return [line for line in lines if line.get("event") == event]


def _times(lines: Iterable[Entry]) -> list[float]:
    return [time for line in lines if (time := time_in(line, "time"))]


def _bytes(line: Mapping[str, Json]) -> int:
    value = line.get("bytes")
    return value if type(value) is int and 0 <= value < _MAX_BYTES else 0
