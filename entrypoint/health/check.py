"""Looking at boots: their files, their lines in the ledger, their processes, and vLLM's answer."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import contextlib
import time
from pathlib import Path
from typing import NamedTuple

from entrypoint.checkpoint.digest import Json
from entrypoint.health.ask import ask
from entrypoint.health.listener import is_another, numeric
from entrypoint.health.standing import Standing, answered, followed, stand
from entrypoint.state import status as statuses
from entrypoint.state import stops
from entrypoint.state.ledger import Ledger
from entrypoint.state.status import Address, Status


class Report(NamedTuple):
    """A boot, None where none left a status, and what it has come to."""

    status: Status | None
    standing: Standing

    def to_json(self) -> dict[str, Json]:
        """Return it as scripts rely on it; what is not known is null."""
        status, standing = self.status or Status(), self.standing
        named = ("boot", "action", "tier", "reason", "checkpoint", "ranks")
        counted = ("started", "total", "eta")
        facts = status._asdict()
        return {
            "healthy": standing.is_healthy,
            "phase": standing.phase,
            "text": standing.text,
            **{name: facts[name] or None for name in named + counted},
            "done": status.done if status.total else None,
            "pid": status.server.pid or None,
            "address": str(status.address) if self.status else None,
        }


def check(root: Path, status: Status, seconds: float) -> Report:
    """Find out what a boot has come to, asking vLLM for at most `seconds` where that can tell.

    When it is healthy for the first time, that is noted: in its file and in the ledger.
    """
    stopped = [note for note in stops.told(root) if note["boot"] == status.boot]
    notes = [*Ledger(root).recent_of(status.boot), *stopped]
    life = status.server.life
    standing = stand(status, notes, life, time.time())
    if life == "gone" and status.supervisor.life == "here":
        standing = followed(standing)
    if standing.is_asked:
        here = life == "here"
        address = numeric(status.server.pid, status.address) if here else status.address
        answer = ask(address, seconds)
        is_news = answer.is_there and not status.healthy
        if is_news and here and is_another(status.server.pid, status.address):
            text = f"{standing.text}; another process answers on {status.address}"
            standing = standing._replace(text=text)
        else:
            standing = answered(standing, status, answer)
    if standing.is_healthy and not status.healthy:
        _note_healthy(root, status)
    statuses.touch(root, status.boot)
    return Report(status, standing)


def _note_healthy(root: Path, status: Status) -> None:
    """Note the first answer; where nothing can be kept, it is the first one again next time."""
    now = round(time.time(), 3)
    with contextlib.suppress(OSError):
        statuses.write(root, status._replace(healthy=now))
        seconds = round(now - status.started, 3)
        entry: dict[str, Json] = {"boot": status.boot, "event": "healthy", "time": now}
        Ledger(root).append(entry | {"seconds": seconds})


def check_default(root: Path, seconds: float) -> Report:
    """Ask where vLLM answers by default: all that is left where no boot left a status."""
    address = Address(assumed=True)
    answer = ask(address, seconds)
    if answer.is_ok:
        standing = Standing("serving", f"vLLM's default {address}", is_healthy=True)
    else:
        text = f"no boot left a status in {root}; vLLM's default {address}: {answer.text}"
        standing = Standing("unknown", text)
    return Report(None, standing)


def check_shown(root: Path, seconds: float) -> list[Report]:
    """Check the boots that people want to see: all that run here, else the one that is meant."""
    boots = statuses.read_all(root)
    running = [boot for boot in boots if boot.server.life == "here"]
    last = statuses.meant(boots)
    shown = running or ([last] if last else [])
    return [check(root, boot, seconds) for boot in shown]


def check_meant(root: Path, seconds: float, *, is_off: bool) -> Report:
    """Check the boot that is meant where several left a status; `is_off`: shardboot keeps none."""
    status = None if is_off else statuses.meant(statuses.read_all(root))
    return check_default(root, seconds) if status is None else check(root, status, seconds)
