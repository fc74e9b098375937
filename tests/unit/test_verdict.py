"""From measurements to words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import entrypoint.insight.verdict
from entrypoint.insight.findings import FileSystem, Findings, Latency, Rate, Watched, learn
from entrypoint.insight.report import as_text
from entrypoint.insight.verdict import Word, human_decimal, human_time, judge

ATOMIC = Watched(renames=50, looks=900, missing=0, torn=0, failed=0)
SLOW = 70 * 10**9 // 700


def found(kind: str = "ext4", place: str = "disk", **more: object) -> Findings:
    """Return what a good place gives, but for what a test says."""
    system = FileSystem(kind, place, "/mnt", "/dev/vda", ("rw",), 10**12, 2 * 10**12)  # type: ignore[arg-type]
    good = Findings(
        "/mnt/checkpoints",
        system,
        write=(Rate(1, 10**9, 1.0), Rate(4, 2 * 10**9, 1.0)),
        read=(Rate(1, 10**9, 1.0), Rate(4, 3 * 10**9, 1.5)),
        cold="O_DIRECT",
        small=(("create", Rate(4, 100, 0.5)),),
        fsync=Latency(100, 0.002, 0.009),
        over=ATOMIC,
        into=ATOMIC,
        flock="honoured",
        inotify=True,
        mmap=True,
    )
    return good._replace(**more)  # type: ignore[arg-type]


CASES: list[tuple[str, Findings, Word, str]] = [
    ("a local disk", found(), "serve", "disk speed"),
    (
        "an image",
        found("squashfs", "image", unwritable="Read-only"),
        "serve",
        "image speed read-only",
    ),
    ("NFS", found("nfs4", "network"), "copy", "network inotify speed"),
    ("FUSE", found("fuse.juicefs", "fuse"), "copy", "fuse inotify speed"),
    ("an object store", found("s3", "object", conditional=True), "copy", "object speed"),
    ("nobody knows", found("newfs", "unknown"), "copy", "unknown speed"),
    ("nothing known", Findings("/mnt"), "copy", "unknown"),
    ("memory", found("tmpfs", "memory", cold="memory"), "keep-away", "memory"),
    ("a container's layer", found("overlay", "layer"), "keep-away", "layer speed"),
    ("it hangs", found(hung="look"), "keep-away", "hung"),
    ("torn files", found(over=ATOMIC._replace(torn=1)), "keep-away", "rename disk speed"),
    ("half checkpoints", found(into=ATOMIC._replace(torn=1)), "keep-away", "rename disk speed"),
    ("missing files", found(over=ATOMIC._replace(missing=3)), "serve", "disk speed replace"),
    ("no rename", found(failures=(("rename over", "no"),)), "keep-away", "broken disk speed"),
    ("no fsync", found(failures=(("fsync", "no"),)), "keep-away", "broken disk speed"),
    ("no writing", found(failures=(("write, 4 workers", "no"),)), "keep-away", "broken disk speed"),
    ("no stat", found(failures=(("small files: stat", "no"),)), "serve", "disk speed unmeasured"),
    ("left behind", found(failures=(("clear", "no"),)), "serve", "disk speed left"),
    ("both win", found("s3", "object", conditional=False), "copy", "object speed conditional"),
    ("lying locks", found(flock="ignored"), "serve", "disk speed flock"),
    ("no locks", found(flock="unsupported"), "serve", "disk speed flock"),
    ("locks of the dead", found(flock="kept"), "serve", "disk speed flock"),
    ("locks honoured", found(flock="honoured"), "serve", "disk speed"),
    ("no events", found(inotify=False), "serve", "disk speed inotify"),
    ("no mmap", found(mmap=False), "serve", "disk speed mmap"),
    ("fsync lies", found(fsync=Latency(9, 2e-6, 3e-6)), "serve", "disk speed fsync"),
    (
        "fsync of memory need not",
        found("tmpfs", "memory", fsync=Latency(9, 2e-6, 3e-6), cold="memory"),
        "keep-away",
        "memory",
    ),
    (
        "short of space",
        found(file_system=FileSystem("xfs", "disk", free=69 * 10**9, total=10**11)),
        "serve",
        "disk speed space",
    ),
    ("nothing to read", found(read=(), unwritable="no"), "serve", "disk read-only"),
]


@pytest.mark.parametrize(
    ("findings", "word", "codes"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_verdict_is_a_word_and_its_reasons(findings: Findings, word: Word, codes: str) -> None:
    verdict = judge(findings)
    assert (verdict.word, [reason.code for reason in verdict.reasons]) == (word, codes.split())


def test_codes_are_documented() -> None:
    room = Path(entrypoint.insight.verdict.__file__)
    codes = set(re.findall(r'Reason\("([a-z-]+)"', room.read_text()))
    codes |= {reason.code for _, findings, *_ in CASES for reason in judge(findings).reasons}
    page = (room.parents[2] / "docs" / "probe.md").read_text()
    assert {code for code in codes if f"`{code}`" not in page} == set()


@pytest.mark.parametrize(
    ("findings", "says"),
    [
        (found(), "2.0 GB/s with 4 readers: a 70 GB checkpoint takes 35 s"),
        (found(read=(Rate(1, SLOW, 1.0),)), "one reader: a 70 GB checkpoint takes 12 min, which"),
        (found(cold="as it lies"), "this host's memory may have helped"),
        (found("nfs4", "network"), "a cache of the client or the server may have helped"),
        (found("nfs4", "network"), "network file system: a served file that changes or vanishes"),
        (found("nfs4", "network"), "nothing of what other hosts write"),
        (found("nfs4", "network", inotify_across=False), "nothing of a write through the other"),
        (found("overlay", "layer"), "gone with the container: mount a volume"),
        (found("tmpfs", "memory"), "memory that vLLM lacks"),
        (found(flock="ignored"), "flock is not honoured: locks will save no work"),
        (found(over=ATOMIC._replace(missing=3)), "found it 3 times missing in 900 looks"),
        (found(hung="read, 4 workers"), "no answer in time (read, 4 workers)"),
        (found(failures=(("rename over", "Not permitted"),)), "rename over: Not permitted"),
        (found(unwritable="Read-only file system", read=()), "nothing was measured"),
    ],
)  # fmt: skip
def test_reasons_say_what_was_measured(findings: Findings, says: str) -> None:
    assert any(says in reason.text for reason in judge(findings).reasons)


def test_the_table_has_a_line_for_each_measurement() -> None:
    findings = found(over=Watched(5, 90, 3, 0, 0), inotify_across=False)
    text = as_text(findings, judge(findings))
    for line in (
        "/mnt/checkpoints: ext4 (/dev/vda), mounted at /mnt, 1.0 TB free of 2.0 TB",
        "  write with fsync           1.0 GB/s with 1 worker, 2.0 GB/s with 4 workers",
        "  read, O_DIRECT             1.0 GB/s with 1 worker, 2.0 GB/s with 4 workers",
        "  small files: create        200/s with 4 workers",
        "  fsync of one page          median 2 ms, p99 9 ms, 100 times",
        "  rename over                not atomic: 5 times, 90 looks of another process, 3 missing",
        "  rename into place          atomic: 50 times, 900 looks of another process",
        "  inotify                    own writes are told, through the other mount not",
        "  mmap                       works",
        "serve from here",
    ):
        assert line in text.splitlines()


def test_a_table_of_nothing_still_has_the_verdict() -> None:
    nothing = Findings("/mnt", hung="look")
    assert as_text(nothing, judge(nothing)).splitlines()[:2] == ["/mnt", "keep away"]


def test_findings_survive_the_pipe_between_processes() -> None:
    sent = found(failures=(("mmap", "no"),), inotify_across=True)
    got = Findings(sent.path)
    for field in Findings._fields:
        got = learn(got, field, json.loads(json.dumps(getattr(sent, field))))
    assert got == sent
    assert json.loads(json.dumps(got.to_json())) == sent.to_json()


@pytest.mark.parametrize(
    ("count", "says"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (123e6, "123 MB"), (3e15, "3.0 PB")],
)
def test_bytes_are_said_in_decimal_units(count: float, says: str) -> None:
    assert human_decimal(count) == says


@pytest.mark.parametrize(("seconds", "says"), [(35, "35 s"), (700, "12 min"), (7200, "2.0 h")])
def test_times_are_said_in_one_unit(seconds: float, says: str) -> None:
    assert human_time(seconds) == says
