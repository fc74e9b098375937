"""From measurements to words: serve from there, copy from there, or keep away, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from entrypoint.checkpoint.digest import Json
from entrypoint.insight.findings import FileSystem, Findings, Place, Watched

Word = Literal["serve", "copy", "keep-away"]

IN_WORDS: Final[dict[Word, str]] = {
    "serve": "serve from here",
    "copy": "copy from here",
    "keep-away": "keep away",
}

EXAMPLE_BYTES: Final = 70 * 10**9
"""A checkpoint of 35 thousand million parameters in bfloat16, for a sense of what a rate means."""

_SLOW_SECONDS: Final = 600.0
_NO_SYNC_SECONDS: Final = 10e-6
"""No disk has anything in that time; the fastest with a safe cache take twice as long."""


_ELSEWHERE: Final = ("network", "fuse", "object")
_NEEDED: Final = ("write", "fsync", "rename", "put", "small files: create", "small files: put")
"""Steps without which no checkpoint can be made."""


class Reason(NamedTuple):
    """One sentence of a verdict, and the stable word for it."""

    code: str
    text: str


class Verdict(NamedTuple):
    """What to do with a place: the causes first, then what else to know."""

    word: Word
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, Json]:
        """Return the stable fields."""
        return {
            "verdict": self.word,
            "reasons": [{"code": code, "text": text} for code, text in self.reasons],
        }


def judge(findings: Findings) -> Verdict:
    """Say what to do with a place, by what was found there."""
    if findings.hung:
        text = f"no answer in time ({findings.hung}): what reads there hangs as well"
        return Verdict("keep-away", (Reason("hung", text),))
    obstacles = (*_obstacles(findings),)
    first, *rest = _by_place(findings)
    cautions = (*rest, *_cautions(findings))
    if obstacles:
        return Verdict("keep-away", (*obstacles, first, *cautions))
    place = findings.file_system.place if findings.file_system else "unknown"
    return Verdict(_WORDS[place], (first, *cautions))


_WORDS: Final[dict[Place, Word]] = {
    "disk": "serve",
    "image": "serve",
    "network": "copy",
    "fuse": "copy",
    "object": "copy",
    "unknown": "copy",
    "memory": "keep-away",
    "layer": "keep-away",
}


def _by_place(findings: Findings) -> list[Reason]:
    """Return what follows from where it lies alone; the cause of the verdict comes first."""
    system = findings.file_system or FileSystem("unknown", "unknown")
    kind = system.kind
    match system.place:
        case "disk":
            return [Reason("disk", f"{kind}, a disk of this host: what is served stays as it is")]
        case "image":
            return [Reason("image", f"{kind}, a read-only image on this host: nothing changes it")]
        case "memory":
            text = "checkpoints there are memory that vLLM lacks, and gone with the host"
            return [Reason("memory", f"{kind}: {text}")]
        case "layer":
            text = (
                "container layer, gone with the container: mount a volume "
                "(what the image itself brought may be served)"
            )
            return [Reason("layer", f"{kind}: {text}")]
        case "object":
            text = "an object store: vLLM cannot open files there"
            return [Reason("object", f"{kind}, {text}")]
        case "network" | "fuse":
            what = "network file system" if system.place == "network" else "a program's file system"
            text = "a served file that changes or vanishes there kills vLLM (SIGBUS with mmap)"
            return [Reason(system.place, f"{kind}, {what}: {text}"), *_elsewhere(findings)]
        case _:
            text = "not known here; on a disk that is known, a copy is safe"
            return [Reason("unknown", f"{kind}: {text}")]


def _elsewhere(findings: Findings) -> Iterator[Reason]:
    if findings.inotify_across is None:
        text = "inotify tells nothing of what other hosts write: poll"
    elif findings.inotify_across:
        text = "inotify told of a write through the other mount; do not rely on it: poll"
    else:
        text = "inotify told nothing of a write through the other mount: poll"
    yield Reason("inotify", text)


def _obstacles(findings: Findings) -> Iterator[Reason]:
    """Yield what a store cannot live with: then nothing can be built or published there."""
    for step, text in findings.failures:
        if step.startswith(_NEEDED):
            yield Reason("broken", f"{step}: {text}: checkpoints cannot be made there")
    if findings.over is not None and findings.over.torn:
        yield Reason("rename", f"rename over a file is not atomic: {_seen(findings.over)}")
    if findings.into is not None and not findings.into.is_atomic:
        text = "a checkpoint could be seen half"
        yield Reason("rename", f"rename into place is not atomic: {_seen(findings.into)}: {text}")


def _seen(watched: Watched) -> str:
    wrong = (("missing", watched.missing), ("torn", watched.torn))
    found = " and ".join(f"{times} times {what}" for what, times in wrong if times)
    return f"a reader found it {found} in {watched.looks} looks"


def _cautions(findings: Findings) -> Iterator[Reason]:
    """Yield what changes no verdict, and should be known."""
    yield from _speed(findings)
    if findings.unwritable:
        what = "so reading is all that was measured"
        if not findings.read:
            what = "and no checkpoint lies there to read: nothing was measured"
        yield Reason("read-only", f"not writable ({findings.unwritable}), {what}")
    yield from _broken_promises(findings)
    system = findings.file_system
    if system is not None and system.total and (system.free or 0) < EXAMPLE_BYTES:
        text = f"{human_decimal(system.free or 0)} free: a 70 GB checkpoint does not fit"
        yield Reason("space", text)
    for step, text in findings.failures:
        if step == "clear":
            yield Reason("left", text)
        elif not step.startswith(_NEEDED):
            yield Reason("unmeasured", f"{step}: {text}")


def _broken_promises(findings: Findings) -> Iterator[Reason]:
    if findings.conditional is False:
        text = "puts over what is there when told not to: of two pushes of a name the later stays"
        yield Reason("conditional", text)
    if findings.over is not None and findings.over.missing and not findings.over.torn:
        text = "no published file is ever replaced, but keep the state directory elsewhere"
        yield Reason("replace", f"rename over a file shows: {_seen(findings.over)}; {text}")
    if findings.flock in _LOCKS:
        yield Reason("flock", _LOCKS[findings.flock])
    if findings.inotify is False:
        yield Reason("inotify", "inotify tells nothing, not even of this host's own writes: poll")
    if findings.mmap is False:
        yield Reason("mmap", "files cannot be mapped: vLLM's own loaders will fail there")
    system, latency = findings.file_system, findings.fsync
    is_disk = system is not None and system.place == "disk"
    if is_disk and latency is not None and latency.median < _NO_SYNC_SECONDS:
        text = f"fsync returns in {latency.median * 1e6:.0f} µs, before any disk can have the data"
        yield Reason("fsync", f"{text}: a power loss may take back what was committed")


_LOCKS: Final = {
    "ignored": "flock is not honoured: locks will save no work",
    "unsupported": "there is no flock: locks will save no work",
    "kept": "flock outlives a process that was killed: boots will wait for nobody",
}


def _speed(findings: Findings) -> Iterator[Reason]:
    rates = [rate for rate in findings.read if rate.per_second]
    if not rates or findings.cold == "memory":
        return
    rate = rates[-1]
    seconds = EXAMPLE_BYTES / rate.per_second
    readers = "one reader" if rate.workers == 1 else f"{rate.workers} readers"
    text = f"{human_decimal(rate.per_second)}/s with {readers}: a 70 GB checkpoint takes"
    slow = ", which is slow" if seconds > _SLOW_SECONDS else ""
    yield Reason("speed", f"{text} {human_time(seconds)}{slow}{_doubt(findings)}")


def _doubt(findings: Findings) -> str:
    """Say what may have flattered a read."""
    if findings.cold == "as it lies":
        return "; this host's memory may have helped"
    system = findings.file_system
    if not findings.unwritable and system is not None and system.place in _ELSEWHERE:
        return "; a cache of the client or the server may have helped with what was just written"
    return ""


def human_decimal(count: float) -> str:
    """Return bytes for people, in the decimal units that disks and models are sold in."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:  # noqa: PLR2004 - decimal units
            return f"{count:.{0 if count >= 100 or unit == 'B' else 1}f} {unit}"  # noqa: PLR2004
        count /= 1000
    return f"{count:.1f} PB"


def human_time(seconds: float) -> str:
    """Return a time for people, of two units at most."""
    if seconds < 90:  # noqa: PLR2004 - for people
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"  # noqa: PLR2004
