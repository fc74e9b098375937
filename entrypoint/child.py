"""A child program in its own process group that never outlives its use.

Requests travel by a file in memory and answers by a pipe of their own: nothing of a user's words
is in an argv, and nothing that a library prints can be taken for an answer. Secrets that it prints
are in no log when it has ended, nor in what is said of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

from entrypoint.checkpoint.digest import Json
from entrypoint.redaction import redact, secrets
from entrypoint.state.files import keep_newest

TERM_GRACE_SECONDS: Final = 0.5
"""Between SIGTERM and SIGKILL; short, so that a stop before exec takes less than two seconds."""

MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
TICK_SECONDS: Final = 0.25
MAX_LOGS: Final = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a child ended: its exit status as `subprocess` gives it, and its answer if it gave one.

    `timed_out` says that it was ended by us because its time was over.
    """

    status: int
    answer: Json
    timed_out: bool


def ask(
    argv: Sequence[str],
    request: Mapping[str, Json],
    *,
    environ: Mapping[str, str],
    log: IO[bytes],
    timeout: float,
    on_tick: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run `argv` with one more word, the descriptor to answer on; return how it ended.

    The child leads its own session. When this returns or raises, whatever raises, its whole
    process group is gone and its memory free. `timeout` in seconds. No secret of `environ`, or of
    the request's `words`, is in `log` then, nor in the answer's `message`. Raises: OSError.
    """
    hidden = secrets(environ, cast("list[str]", request["words"]))
    stdin = _in_memory(request)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as answers:
        try:
            process = subprocess.Popen(
                [*argv, str(writer)],
                stdin=stdin,
                stdout=log,
                stderr=log,
                env=dict(environ),
                pass_fds=[writer],
                start_new_session=True,
            )
        finally:
            os.close(writer)
            os.close(stdin)
        try:
            answer, timed_out = _wait(process, answers, time.monotonic() + timeout, on_tick)
        finally:
            end_group(process)
            _redact_log(log, hidden)
    return Outcome(process.returncode, _decode(answer, hidden), timed_out)


def _in_memory(request: Mapping[str, Json]) -> int:
    """Return a descriptor that gives the request: no disk, and no pipe that could fill up."""
    descriptor = os.memfd_create("request", os.MFD_CLOEXEC)
    # ASCII, so that words with bytes that are no UTF-8 arrive as they are.
    data = json.dumps(request).encode()
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _wait(
    process: subprocess.Popen[bytes],
    answers: IO[bytes],
    deadline: float,
    on_tick: Callable[[], None],
) -> tuple[bytes, bool]:
    """Gather the answer until the child ends; end of file alone would wait for its forks."""
    answer = b""
    is_open = True
    while True:
        ended = process.poll() is not None
        if is_open and select.select([answers], [], [], 0 if ended else TICK_SECONDS)[0]:
            piece = answers.read(1 << 16) or b""
            answer += piece
            is_open = bool(piece) and len(answer) <= MAX_ANSWER_BYTES
            continue
        if ended:
            return answer, False
        if time.monotonic() > deadline:
            return answer, True
        if not is_open:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TICK_SECONDS)
        on_tick()


def _decode(answer: bytes, hidden: Sequence[str]) -> Json:
    try:
        value: Json = json.loads(answer)
    except (RecursionError, ValueError):
        return None
    if isinstance(value, dict) and "message" in value:
        value["message"] = redact(str(value["message"]), hidden)
    return value


def _redact_log(log: IO[bytes], hidden: Sequence[str]) -> None:
    """Write a log again where it repeats a secret; where that fails, its rest is lost."""
    log.seek(0)
    text = os.fsdecode(log.read())
    redacted = redact(text, hidden)
    if redacted != text:
        log.seek(0)
        log.truncate()
        with contextlib.suppress(OSError):
            log.write(os.fsencode(redacted))
            log.flush()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the child's whole process group, politely first; return when nothing of it is left."""
    _signal_group(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + TERM_GRACE_SECONDS
    while _group_lives(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + TERM_GRACE_SECONDS
    while _group_lives(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    _reap_orphans(process.pid)


def _reap_orphans(group: int) -> None:
    """Reap what the child left to us: as a container's first process we inherit its children.

    vLLM would have them as zombies for as long as it lives.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether anything of the group still runs; its zombies hold no memory, and are not ours.

    A zombie waits for a parent, perhaps an init that is in no hurry, and still takes signals.
    """
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return any(_runs_in(entry, process.pid) for entry in os.listdir("/proc") if entry.isdigit())


def _runs_in(pid: str, group: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in brackets, may hold anything; state, parent, group follow (proc(5)).
            state, _, its_group, *_ = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return False
    return int(its_group) == group and state not in (b"Z", b"X")


@contextlib.contextmanager
def open_log(path: Path) -> Iterator[IO[bytes]]:
    """Open a child's log, in a file that nobody keeps where `path` cannot be written.

    It is this user's alone, since a secret may be in it until the child has ended. Of the logs
    beside it the oldest go.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            keep_newest(path.parent, "*.log", MAX_LOGS - 1)
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            log: IO[bytes] = stack.enter_context(os.fdopen(descriptor, "w+b"))
        except OSError:
            log = stack.enter_context(tempfile.TemporaryFile())
        yield log


def last_lines(log: IO[bytes], count: int = 3) -> str:
    """Return the last non-empty lines of a child's log, for the message of a failure."""
    log.seek(max(0, os.fstat(log.fileno()).st_size - 16_384))
    lines = log.read().decode(errors="replace").splitlines()
    return " | ".join([line.strip() for line in lines if line.strip()][-count:])
