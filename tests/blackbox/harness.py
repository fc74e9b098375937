"""A house for the real command line: stores, a source, and a stub `vllm` that tells what it got."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entrypoint.checkpoint import header
from entrypoint.privilege.ownership import SUBDIRECTORIES
from entrypoint.store.directory import DirectoryStore

HERE = Path(__file__).parent
SECONDS = 60.0
LAUNCH = "import sys; sys.argv[0] = 'shardboot'; from entrypoint.cli import main; main()"

PYTHON_STUB = """\
#!/bin/sh
# Looked at here: a shell reaps children that it never had, and Python changes signals of its own.
read -r STUB_CHILDREN </proc/$$/task/$$/children
STUB_STATUS=$(grep '^Sig[BIC]' /proc/$$/status) export STUB_CHILDREN STUB_STATUS
exec {python} {stub} {house} "$@"
"""

SLOW_READS = """\
import itertools, os, time
if os.environ.get("SLOW_READS"):
    real, calls = os.preadv, itertools.count()
    def preadv(*words):
        if next(calls) < 4:
            return real(*words)
        with open(os.environ["SLOW_READS"], "w") as events:
            events.write("reading\\n")
        time.sleep(1000)
    os.preadv = preadv
"""

SLOW_AHEAD = """\
import os, time
if os.environ.get("SLOW_AHEAD"):
    real = os.preadv
    def preadv(*words):
        with open("/proc/self/comm") as name:
            if name.read().strip() == "shardboot-ahead":
                time.sleep(1000)
        return real(*words)
    os.preadv = preadv
"""

SLOW_SOURCE = """\
import os, time
if os.environ.get("HUNG_AFTER"):
    from entrypoint.model import bounded
    bounded.HUNG_SECONDS = float(os.environ["HUNG_AFTER"])
    from entrypoint.model import contents
    real = contents._stat
    def stat(*words):
        time.sleep(float(os.environ["EACH_FILE"]))
        return real(*words)
    contents._stat = stat
"""


SILENT_SHELF = """\
import os, time
if os.environ.get("SILENT_SHELF"):
    from entrypoint.store import transfer
    transfer.SILENCE_SECONDS = 0.5
    from entrypoint.caches import shelf
    shelf.read_bounded = lambda *_: time.sleep(1000)
"""

SILENT_STAGE = """\
import os, time
if os.environ.get("SILENT_STAGE"):
    from entrypoint import publishing
    from entrypoint.store import directory, transfer
    publishing.SPARE_SECONDS = 1 - transfer.STALL_SECONDS
    real = directory.DirectoryStore.stage
    def stage(store, *words):
        if str(store.root) == os.environ["SILENT_STAGE"]:
            time.sleep(1000)
        return real(store, *words)
    directory.DirectoryStore.stage = stage
"""


@dataclass(frozen=True)
class Boot:
    """How one run of the command line ended."""

    status: int
    stdout: str
    stderr: str
    pid: int
    seconds: float
    vllm: dict[str, Any] = field(default_factory=dict)
    """What the stub that this process became has seen; empty when it became none."""

    @property
    def events(self) -> list[str]:
        return re.findall(r"(?m)^shardboot: (?!error:|hint:)([\w.-]+):", self.stderr)

    @property
    def words(self) -> list[str]:
        """What vLLM got after `serve`."""
        assert self.vllm, self.stderr
        assert self.vllm["argv"][1] == "serve"
        words: list[str] = self.vllm["argv"][2:]
        return words

    @property
    def loader(self) -> Any:
        """What our loader is told; it names this boot, so no two are alike."""
        return json.loads(self.words[self.words.index("--model-loader-extra-config") + 1])

    @property
    def lasting_words(self) -> list[str]:
        """The words without that."""
        at = self.words.index("--model-loader-extra-config")
        return self.words[:at] + self.words[at + 2 :]

    @property
    def json(self) -> Any:
        assert self.status == 0, self.stderr
        return json.loads(self.stdout)


class House:
    """One node: its local store, its state, the shared store it sees, and its `vllm`."""

    def __init__(self, root: Path, python: str = sys.executable) -> None:
        # Tests under nohup, or in a shell's background, would hand down that these are ignored.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.root = root
        self.python = python
        self.local, self.state, self.shared = root / "local", root / "state", root / "shared"
        self.bin, self.model = root / "bin", root / "model"
        for directory in (self.bin, root / "dumps", root / "home", self.shared):
            directory.mkdir(parents=True)
        make_source(self.model)
        interpreter = self.bin / "python3-stub"
        stub = HERE / "stub_vllm.py"
        _write_program(
            interpreter, PYTHON_STUB.format(python=python, stub=stub, house=shlex.quote(str(root)))
        )
        _write_program(self.bin / "vllm", f"#!{interpreter}\n# a console script\n")
        (root / "calls").touch()
        os.mkfifo(root / "events")
        # Read and write: no end of file when the last writer leaves, and no wait for the first.
        self._events = os.open(root / "events", os.O_RDWR | os.O_NONBLOCK)
        self._heard = b""
        self.rules()
        self.environ = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(root / "home"),
            "LANG": "C.UTF-8",
            "PYTHONPATH": f"{HERE.parent}:{HERE.parents[1]}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "SHARDBOOT_LOCAL_DIR": str(self.local),
            "SHARDBOOT_STATE_DIR": str(self.state),
            "SHARDBOOT_RESERVE_BYTES": "0",
            # Most tests read sentences; those of the format itself take this away.
            "SHARDBOOT_LOG_FORMAT": "text",
        }
        self._running: list[subprocess.Popen[str]] = []

    def rules(self, **rules: Mapping[str, object]) -> None:
        """Say how the stub behaves from now on: `resolve`, `save`, `serve`."""
        (self.root / "rules.json").write_text(json.dumps(rules))

    @property
    def calls(self) -> list[str]:
        """What the stub was started for, in order."""
        return [line.split()[0] for line in (self.root / "calls").read_text().splitlines()]

    @property
    def callers(self) -> dict[str, int]:
        """The uid that each kind of call ran as, last one counts."""
        lines = (self.root / "calls").read_text().splitlines()
        return {name: int(uid) for name, uid in (line.split() for line in lines)}

    @property
    def store(self) -> DirectoryStore:
        return DirectoryStore(self.local)

    @property
    def ledger(self) -> list[dict[str, Any]]:
        path = self.state / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The one line of each boot."""
        return [entry for entry in self.ledger if entry["event"] == "attempt"]

    def start(
        self,
        *words: object,
        prefix: Sequence[str] = (),
        launch: str = LAUNCH,
        stdout: Any = subprocess.PIPE,
        stderr: Any = subprocess.PIPE,
        **more: Any,
    ) -> subprocess.Popen[str]:
        """Start the command line; `more` are environment variables, None to leave one out."""
        environ = {k: str(v) for k, v in (self.environ | more).items() if v is not None}
        process = subprocess.Popen(
            [*prefix, self.python, "-c", launch, *map(str, words)],
            env=environ,
            cwd=self.root,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )
        self._running.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], seconds: float = SECONDS) -> Boot:
        started = time.monotonic()
        out, err = process.communicate(timeout=seconds)
        path = self.root / "dumps" / f"{process.pid}.json"
        vllm = json.loads(path.read_text()) if path.exists() else {}
        took = time.monotonic() - started
        return Boot(process.returncode, out, err, process.pid, took, vllm)

    def run(self, *words: object, **more: Any) -> Boot:
        return self.finish(self.start(*words, **more))

    def serve(self, *words: object, **more: Any) -> Boot:
        """Boot on the house's model at TP=2, with more words."""
        return self.run("serve", self.model, "-tp", 2, *words, **more)

    def plan(self, *words: object, **more: Any) -> Any:
        return self.run("plan", "--format", "json", self.model, "-tp", 2, *words, **more).json

    def wait_for(self, event: str, seconds: float = 20.0) -> None:
        """Wait until the stub tells of `event`."""
        deadline = time.monotonic() + seconds
        while (found := self._heard.find(f"{event}\n".encode())) < 0:
            left = deadline - time.monotonic()
            ready = select.select([self._events], [], [], max(0, left))[0]
            assert ready, f"no {event} within {seconds} s; heard {self._heard!r}"
            self._heard += os.read(self._events, 65_536)
        self._heard = self._heard[found + len(event) + 1 :]

    def strays(self) -> list[str]:
        """Return the directories below the state directory that nobody looks at for links."""
        names = [path.name for path in self.state.glob("*") if path.is_dir()]
        return [name for name in names if name not in SUBDIRECTORIES]

    def close(self) -> None:
        os.close(self._events)
        for process in self._running:
            if process.poll() is None:
                process.kill()
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()
        self.end_hanging()

    def end_hanging(self) -> None:
        """End the stub that hangs, if one does, with all that it started."""
        hanging = self.root / "hanging"
        if hanging.exists():
            with contextlib.suppress(ProcessLookupError):
                # Its first process leads a session of its own.
                os.killpg(int(hanging.read_text().split()[0]), signal.SIGKILL)

    def slow_reads(self) -> dict[str, str]:
        """Return variables that make a copy tell `reading` after a while, and hang."""
        return self._inject(SLOW_READS) | {"SLOW_READS": str(self.root / "events")}

    def slow_ahead(self) -> dict[str, str]:
        """Return variables that make what reads ahead hang."""
        return self._inject(SLOW_AHEAD) | {"SLOW_AHEAD": "yes"}

    def hung_after(self, seconds: float, *, each_file: float = 0) -> dict[str, str]:
        """Return variables: a source hangs once silent for `seconds`; each file of it takes some.

        Without, a boot waits for half a minute.
        """
        told = {"HUNG_AFTER": str(seconds), "EACH_FILE": str(each_file)}
        return self._inject(SLOW_SOURCE) | told

    def silent_shelf(self) -> dict[str, str]:
        """Return variables that make whoever looks for caches in a shared store hang."""
        return self._inject(SILENT_SHELF) | {"SILENT_SHELF": "yes"}

    def silent_stage(self) -> dict[str, str]:
        """Return variables that make whoever builds something in the shared store hang."""
        return self._inject(SILENT_STAGE) | {"SILENT_STAGE": str(self.shared)}

    def _inject(self, code: str) -> dict[str, str]:
        """Return variables that have every Python run this at its start."""
        injected = self.root / "injected"
        injected.mkdir(exist_ok=True)
        (injected / "sitecustomize.py").write_text(code)
        return {"PYTHONPATH": f"{injected}:{self.environ['PYTHONPATH']}"}

    def shared_copy(self) -> None:
        """Put the checkpoint of this house into the shared store, and forget it here."""
        boot = self.run("push", "--shared", self.shared, self.model, "-tp", 2)
        assert boot.status == 0, boot.stderr
        self.local.rename(self.root / "local-before")


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def make_source(directory: Path, seed: int = 0) -> None:
    """Write a model directory that a stub can save."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (directory / "tokenizer.json").write_text("{}")
    head, _ = header.encode([("lm_head.weight", "BF16", (64, 8), 1024)])
    (directory / "model.safetensors").write_bytes(head + bytes([seed]) * 1024)


def snapshot(root: Path) -> dict[str, tuple[int, ...]]:
    """Return everything that a mutating call below `root` would move."""
    return {str(path): _facts(path.lstat()) for path in [root, *sorted(root.rglob("*"))]}


def _facts(status: os.stat_result) -> tuple[int, ...]:
    return (
        *(status.st_mode, status.st_uid, status.st_gid, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns, status.st_ino),
    )


def is_gone(pid: int) -> bool:
    """Whether a process runs no more; one that only waits to be reaped has gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def staged(store: Path) -> Iterator[Path]:
    """Yield what is still being built in a store."""
    if (store / ".staging").is_dir():
        yield from (store / ".staging").iterdir()
