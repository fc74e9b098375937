"""Commands that watch boots: `status`, `wait` and `health`. They import little, and often run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

import click

from entrypoint import spelling
from entrypoint.health.check import Report, check, check_default, check_meant, check_shown
from entrypoint.health.standing import OVER, Standing
from entrypoint.options import emit, with_format, with_settings
from entrypoint.start import is_off, settings_as_user
from entrypoint.state import status as statuses
from entrypoint.state.status import Status
from entrypoint.supervise.notify import PATIENCE, STALL_SECONDS, notify

ASK_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.3
SAY_SECONDS: Final = 5.0
SLACK_SECONDS: Final = 2.0
"""A boot may have begun that much before the `wait` that was started beside it, and be over."""

GRACE_SECONDS: Final = 10.0
"""Time for a boot to leave its first status; then what else is there counts."""


def _seconds(_ctx: click.Context, _parameter: click.Parameter, word: str) -> float:
    try:
        return spelling.seconds(word) if word else math.inf
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def timeout(default: str, meaning: str) -> Callable[..., Any]:
    """Give a command a bound."""
    return click.option(
        "--timeout",
        default=default,
        callback=_seconds,
        metavar="TIME",
        show_default=bool(default),
        help=meaning,
    )


def for_state(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the state directory, and a choice of how to print."""
    return with_format(with_settings(command, only=("state_dir",)))


def _state_dir(flags: Mapping[str, Any], environ: MutableMapping[str, str]) -> Path:
    """Return the state directory; a look fails for no secret that it does not need."""
    return settings_as_user(flags, environ, opens_stores=False).state_dir


@click.command()
@for_state
@timeout("5s", "how long vLLM may take to answer")
@click.pass_context
def health(ctx: click.Context, /, output: str, timeout: float, **flags: Any) -> int:
    """Exit 0 if vLLM serves, else 1; say what it is at. For HEALTHCHECK and probes."""
    environ = ctx.obj["environ"]
    root = _state_dir(flags, environ)
    report = check_meant(root, timeout, is_off=is_off(environ))
    emit(output, report.to_json(), report.standing.line)
    return 0 if report.standing.is_healthy else 1


@click.command()
@for_state
@click.pass_context
def status(ctx: click.Context, /, output: str, **flags: Any) -> None:
    """Show what boots are at: all that run here, else the last one."""
    root = _state_dir(flags, ctx.obj["environ"])
    reports = check_shown(root, ASK_SECONDS)
    lines = [_row(report) for report in reports]
    emit(
        output,
        [report.to_json() for report in reports],
        *(lines or [f"{root}: no boot left a status"]),
    )


def _row(report: Report) -> str:
    boot = report.status or Status()
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(boot.started))
    what = ", ".join(fact for fact in (boot.checkpoint or "-", boot.ranks) if fact)
    facts = f"pid {boot.server.pid:<8}{boot.tier or '-':<7} {what}"
    return f"{begun}  {facts}  {report.standing.line}"


@click.command()
@for_state
@timeout("", "how long to wait; for ever if it is not given")
@click.pass_context
def wait(ctx: click.Context, /, output: str, timeout: float, **flags: Any) -> int:
    """Wait until vLLM serves. Exit 1 when the boot failed, or at the timeout.

    For scripts and for ExecStartPost; may be started before `serve` is.
    """
    environ = ctx.obj["environ"]
    vigil = Vigil(_state_dir(flags, environ), environ)
    teller = Teller(environ, is_silent=output == "json")
    deadline = time.monotonic() + timeout
    report = vigil.look(min(ASK_SECONDS, timeout))
    while not report.standing.is_healthy and report.standing.phase not in OVER:
        left = deadline - time.monotonic()
        if left <= 0:
            text = f"{report.standing.text}; gave up after {timeout:g} s"
            report = report._replace(standing=report.standing._replace(text=text))
            break
        teller.tell(report)
        time.sleep(min(POLL_SECONDS, left))
        report = vigil.look(min(ASK_SECONDS, left))
    # Else the last thing that systemd shows would be what came before.
    tell_systemd(environ, report.standing.line, is_moving=False)
    emit(output, report.to_json(), report.standing.line)
    return 0 if report.standing.is_healthy else 1


class Vigil:
    """Finds the boot that a `wait` was started beside, and looks at it."""

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self.root = root
        self.is_off = is_off(environ)
        # systemd tells ExecStartPost whom it has just started.
        self.main_pid = environ.get("MAINPID", "")
        self.begun = time.time()

    def look(self, seconds: float) -> Report:
        """Find out what the boot is at; nobody knows which one it is before it left a status."""
        if self.is_off:
            return check_default(self.root, seconds)
        found = self._found(statuses.read_all(self.root))
        if found is not None:
            return check(self.root, found, seconds)
        if time.time() - self.begun > GRACE_SECONDS:
            return check_default(self.root, seconds)
        return Report(None, Standing("unknown", f"no boot has left a status in {self.root} yet"))

    def _found(self, boots: list[Status]) -> Status | None:
        """Return the boot that is meant; one that was over before this began is another one."""
        started = [boot for boot in boots if str(boot.server.pid) == self.main_pid]
        if started or (self.main_pid and time.time() - self.begun < GRACE_SECONDS):
            boots = started
        found = statuses.meant(boots)
        if found is None or found.started > self.begun - SLACK_SECONDS:
            return found
        return None if found.server.life == "gone" or found.phase in OVER else found


class Teller:
    """Says what a boot is at when its phase changes, else every few seconds."""

    def __init__(self, environ: Mapping[str, str], *, is_silent: bool) -> None:
        self.environ, self.is_silent = environ, is_silent
        self.phase = self.line = ""
        self.place: tuple[str, int] = ("", 0)
        self.told = self.moved = time.monotonic()

    def tell(self, report: Report) -> None:
        """Tell people, and systemd where it listens, that there is more to wait for."""
        now, standing = time.monotonic(), report.standing
        place = (standing.phase, report.status.done if report.status else 0)
        if place != self.place:
            self.place, self.moved = place, now
        if standing.phase == self.phase and now - self.told < SAY_SECONDS:
            return
        self.phase, self.told = standing.phase, now
        if standing.line != self.line and not self.is_silent:
            click.echo(standing.line)
        self.line = standing.line
        tell_systemd(self.environ, standing.line, is_moving=now - self.moved < STALL_SECONDS)


def tell_systemd(environ: Mapping[str, str], line: str, *, is_moving: bool) -> None:
    """Tell systemd the line, and while things move, to be patient."""
    notify(environ, STATUS=line, **(PATIENCE if is_moving else {}))


COMMANDS: Final[dict[str, click.Command]] = {
    command.name or "": command for command in (status, wait, health)
}
