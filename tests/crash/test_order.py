"""The order of what reaches the disk, as the kernel saw it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import store_driver
from checkpoints import make_checkpoint
from store_driver import BIG

from entrypoint.checkpoint.manifest import decode

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

CALLS = "write,pwrite64,fsync,fdatasync,rename,renameat,renameat2"
LINE = re.compile(r"(?P<pid>\d+) +(?P<call>\w+)\((?P<rest>.*)")
RESUMED = re.compile(r"(?P<pid>\d+) +<\.\.\. (?P<call>\w+) resumed>")


@dataclass
class Event:
    """One system call: on which paths, and the lines it began and ended at."""

    call: str
    paths: list[str]
    began: int
    ended: int


def events_of(text: str) -> list[Event]:
    events: list[Event] = []
    open_calls: dict[str, Event] = {}
    for number, line in enumerate(text.splitlines()):
        if resumed := RESUMED.match(line):
            open_calls.pop(resumed["pid"]).ended = number
        elif match := LINE.match(line):
            # The first descriptor's path; both names of a rename.
            if match["call"].startswith("rename"):
                paths = re.findall(r'"([^"]*)"', match["rest"])
            else:
                paths = re.findall(r"^\d+<([^>]*)>", match["rest"])
            event = Event(match["call"], paths, number, number)
            events.append(event)
            if line.endswith("<unfinished ...>"):
                open_calls[match["pid"]] = event
    return events


@pytest.mark.parametrize("act", ["save", "copy", "push", "commit"])
def test_files_then_directories_then_the_manifest_then_the_name(tmp_path: Path, act: str) -> None:
    shared, local = tmp_path / "shared", tmp_path / "local"
    shared.mkdir()
    local.mkdir()
    if act in ("copy", "push"):
        make_checkpoint(shared if act == "copy" else local, tensors=BIG)
    root = shared if act == "push" else local
    trace = tmp_path / "trace"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    strace = ["strace", "-f", "-y", "-s", "4", "-o", str(trace), "-e", f"trace={CALLS}"]
    driver = [sys.executable, store_driver.__file__, act, str(local), str(shared)]
    subprocess.run([*strace, *driver], env=environ, check=True)
    events = events_of(trace.read_text(errors="replace"))
    (published,) = (p.name for p in root.iterdir() if not p.name.startswith("."))
    manifest = decode((root / published / "manifest.json").read_bytes())

    (into_place,) = (e for e in events if e.paths[1:] == [str(root / published)])
    staged = Path(into_place.paths[0])
    assert staged.parent == root / ".staging"
    new = str(staged / ".manifest.json")
    (manifest_named,) = (e for e in events if e.paths == [new, str(staged / "manifest.json")])

    def writes(path: Path | str) -> list[Event]:
        return [e for e in events if "write" in e.call and e.paths == [str(path)]]

    def synced(path: Path | str, after: int, before: int) -> bool:
        return any(
            e.call == "fsync" and e.paths == [str(path)] and e.began > after and e.ended < before
            for e in events
        )

    manifest_begun = writes(new)[0].began
    for entry in manifest.files:
        file = staged / entry.path
        written = max(e.ended for e in writes(file))
        assert synced(file, written, manifest_begun), file
        for directory in file.relative_to(staged).parents:
            assert synced(staged / directory, written, manifest_begun), directory
    assert synced(new, writes(new)[-1].ended, manifest_named.began)
    assert synced(staged, manifest_named.ended, into_place.began)
    assert synced(root, into_place.ended, len(trace.read_text(errors="replace")))
    assert not [
        e
        for e in events
        if "write" in e.call
        and e.began > manifest_named.began
        and any(str(root) in path for path in e.paths)
    ]
