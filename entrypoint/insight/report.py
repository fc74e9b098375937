"""A probe's findings as a small table with the verdict beneath it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from entrypoint.insight.findings import FileSystem, Findings, Rate, Watched
from entrypoint.insight.verdict import IN_WORDS, Verdict, human_decimal

_WIDTH = 27
_COLD = {
    "O_DIRECT": "read, O_DIRECT",
    "posix_fadvise": "read, pages dropped",
    "as it lies": "read, as it lies",
    "memory": "read, from memory",
}


def as_text(findings: Findings, verdict: Verdict) -> str:
    """Return the table and the verdict, as lines."""
    rows = [f"  {name:<{_WIDTH}}{value}" for name, value in _rows(findings)]
    reasons = [f"  {reason.text}" for reason in verdict.reasons]
    return "\n".join([_head(findings), *rows, IN_WORDS[verdict.word], *reasons])


def _head(findings: Findings) -> str:
    system = findings.file_system
    if system is None:
        return findings.path
    return f"{findings.path}: {', '.join(_facts(system))}"


def _facts(system: FileSystem) -> Iterator[str]:
    source = f" ({system.source})" if system.source not in ("", "none", system.kind) else ""
    yield f"{system.kind}{source}"
    if system.mount_point:
        yield f"mounted at {system.mount_point}"
    if "ro" in system.options:
        yield "read-only"
    if system.free is not None and system.total is not None:
        yield f"{human_decimal(system.free)} free of {human_decimal(system.total)}"


def _rows(findings: Findings) -> Iterator[tuple[str, str]]:
    yield from _paces(findings)
    yield from _promises(findings)


def _paces(findings: Findings) -> Iterator[tuple[str, str]]:
    if findings.write:
        system = findings.file_system
        synced = "" if system is not None and system.place == "object" else " with fsync"
        yield f"write{synced}", _speeds(findings.write)
    if findings.read:
        yield _COLD.get(findings.cold, "read"), _speeds(findings.read)
    for name, rate in findings.small:
        yield f"small files: {name}", f"{_number(rate.per_second)}/s with {_workers(rate)}"
    if findings.fsync is not None:
        times = (findings.fsync.median, findings.fsync.p99)
        median, p99 = (f"{_number(seconds * 1e3)} ms" for seconds in times)
        yield "fsync of one page", f"median {median}, p99 {p99}, {findings.fsync.times} times"


def _promises(findings: Findings) -> Iterator[tuple[str, str]]:
    if findings.over is not None:
        yield "rename over", _seen(findings.over)
    if findings.into is not None:
        yield "rename into place", _seen(findings.into)
    if findings.flock:
        yield "flock", _LOCKS[findings.flock]
    if findings.inotify is not None:
        yield "inotify", _notices(findings)
    if findings.mmap is not None:
        yield "mmap", "works" if findings.mmap else "fails"
    if findings.conditional is not None:
        yield "conditional put", "honoured" if findings.conditional else "ignored"


_LOCKS = {
    "honoured": "honoured between processes, and given back by one that is killed",
    "ignored": "ignored: two processes hold it at once",
    "kept": "not given back by a process that was killed",
    "unsupported": "not there",
}


def _speeds(rates: tuple[Rate, ...]) -> str:
    return ", ".join(f"{human_decimal(r.per_second)}/s with {_workers(r)}" for r in rates)


def _workers(rate: Rate) -> str:
    return f"{rate.workers} worker{'s' if rate.workers > 1 else ''}"


def _number(value: float) -> str:
    if value >= 10:  # noqa: PLR2004 - three digits are enough
        return f"{value:.0f}"
    return f"{value:.3g}"


def _seen(watched: Watched) -> str:
    looks = f"{watched.renames} times, {watched.looks} looks of another process"
    wrong = {
        "missing": watched.missing,
        "torn": watched.torn,
        "with an error": watched.failed,
    }
    found = [f"{count} {what}" for what, count in wrong.items() if count]
    return f"{'atomic' if watched.is_atomic else 'not atomic'}: {looks}" + (
        f", {', '.join(found)}" if found else ""
    )


def _notices(findings: Findings) -> str:
    own = "own writes are told" if findings.inotify else "not even own writes are told"
    if findings.inotify_across is None:
        return own
    return f"{own}, through the other mount {'also' if findings.inotify_across else 'not'}"
