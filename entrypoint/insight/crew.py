"""Processes that measure side by side: Python's threads would measure each other.

Each dies with the process that made it, and not even a SIGBUS of one harms another.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Final, NoReturn, Self

from entrypoint.errors import ShardbootError
from entrypoint.insight.findings import Rate
from entrypoint.state import process

_LINE: Final = 1 << 16


class Channel:
    """The two pipes between a member and whoever made it; lines of JSON."""

    def __init__(self, reader: int, writer: int) -> None:
        self.reader, self.writer = reader, writer
        self._heard = b""

    def tell(self, value: Any) -> None:
        """Send a line; nobody left to hear it is no failure."""
        data = json.dumps(value).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self.writer, data) :]
        except BrokenPipeError:
            return

    def hear(self, seconds: float | None = None) -> Any:
        """Return the next line. Raises: EOFError when there will be none; TimeoutError."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._heard:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self.reader], [], [], left)[0]:
                raise TimeoutError
            piece = os.read(self.reader, _LINE)
            if not piece:
                raise EOFError
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def is_over(self) -> bool:
        """Tell whether the other side has closed, or sent something."""
        return bool(select.select([self.reader], [], [], 0)[0])

    def close(self) -> None:
        """Close both pipes; the other side hears an end of file."""
        os.close(self.reader)
        os.close(self.writer)


class Member:
    """A process that does `act` and ends; leaving the `with` block kills it."""

    def __init__(self, act: Callable[[Channel], object]) -> None:
        to_it, from_me = os.pipe()
        to_me, from_it = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(from_me)
            os.close(to_me)
            die_with(parent)
            become(lambda: act(Channel(to_it, from_it)))
        os.close(to_it)
        os.close(from_it)
        self.channel = Channel(to_me, from_me)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.kill()

    def kill(self) -> None:
        """End it at once, and wait for that."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def become(act: Callable[[], object], on_bug: Callable[[str], None] = lambda _: None) -> NoReturn:
    """In a forked process: do `act` and end, without anything of the parent's exit."""
    status = 1
    try:
        act()
        status = 0
    finally:
        error = sys.exception()
        if error is not None and not isinstance(error, (EOFError, OSError)):
            on_bug("".join(traceback.format_exception(error)))
        os._exit(status)


def die_with(parent: int) -> None:
    """Have the kernel kill this process once its parent is gone, however that ends."""
    process.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def together(count: int, work: Callable[[int, Callable[[], None]], int]) -> Rate:
    """Have `count` members work at once; return what they did altogether.

    Each is given its number and a function that it calls when it is ready: that waits until all
    have been started. It returns what it did. Raises: OSError, the first of any member.
    """

    def act(number: int, channel: Channel) -> None:
        begun = 0.0

        def begin() -> None:
            nonlocal begun
            channel.hear()
            begun = time.monotonic()

        try:
            done = work(number, begin)
        except OSError as error:
            channel.tell({"errno": error.errno, "text": error.strerror or str(error)})
        except ShardbootError as error:
            channel.tell({"errno": None, "text": str(error)})
        else:
            channel.tell([done, begun, time.monotonic()])

    with contextlib.ExitStack() as stack:
        members = [
            stack.enter_context(Member(functools.partial(act, number))) for number in range(count)
        ]
        for member in members:
            member.channel.tell("begin")
        answers = [_answer(member) for member in members]
    amount = sum(done for done, _, _ in answers)
    seconds = max(end for *_, end in answers) - min(begun for _, begun, _ in answers)
    return Rate(count, amount, seconds)


def _answer(member: Member) -> tuple[int, float, float]:
    try:
        answer = member.channel.hear()
    except EOFError:
        raise OSError(errno.EIO, "a measuring process was killed") from None
    if isinstance(answer, dict):
        raise OSError(answer["errno"], answer["text"])
    done, begun, end = answer
    return done, begun, end
