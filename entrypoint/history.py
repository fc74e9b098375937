"""Commands about boots that were: `history`, `timeline` and `blame`. They only read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from entrypoint.errors import NotFoundError, OwnershipError
from entrypoint.insight import blame as blaming
from entrypoint.insight import waterfall
from entrypoint.insight.plot import as_svg
from entrypoint.insight.timeline import Timeline, timelines
from entrypoint.options import emit, with_format, with_settings
from entrypoint.start import settings_as_user
from entrypoint.state import process, stops
from entrypoint.state import status as statuses
from entrypoint.state.attempts import Entry
from entrypoint.state.ledger import Ledger

HEAD: Final = ("boot", "model and layout", "tier", "reason", "outcome", "before", "weights", "all")
_TIMES: Final = 3
"""How many columns at the end are times."""


def _for_state(command: Callable[..., Any]) -> Callable[..., Any]:
    return with_format(with_settings(command, only=("state_dir",)))


_with_boot: Final = click.argument("boot", required=False, default="")


def _boots(flags: Mapping[str, Any], environ: MutableMapping[str, str]) -> list[Timeline]:
    """Return every boot that the state directory tells of, the latest one last."""
    root = settings_as_user(flags, environ, opens_stores=False).state_dir
    left = statuses.read_all(root)
    lives = {status.boot: status.server.life for status in left}
    host_boot = process.host_boot()

    def is_alive(attempt: Entry) -> bool:
        # Another container's process is not seen from here, and not known to be gone.
        life = lives.get(str(attempt.get("boot")))
        if life is not None:
            return life != "gone"
        is_here = attempt.get("host_boot") == host_boot
        return is_here and process.is_alive(attempt.get("pid"), attempt.get("pid_start"))

    entries = [*Ledger(root).entries(), *stops.told(root)]
    return timelines(entries, left, is_alive, time.time())


def _meant(boots: Sequence[Timeline], word: str) -> Timeline:
    """Return the latest boot whose name begins with a word. Raises: NotFoundError."""
    found = [each for each in boots if each.boot.startswith(word)]
    if not found:
        msg = f"{word}: no such boot is known here" if word else "no boot is known here"
        raise NotFoundError(msg, hint="`shardboot history` lists those that are")
    return found[-1]


@click.command()
@click.option(
    "--last", type=click.IntRange(min=1), default=20, show_default=True, help="how many boots"
)
@_for_state
@click.pass_context
def history(ctx: click.Context, /, last: int, output: str, **flags: Any) -> None:
    """List boots, the latest one last: where the weights came from, and what took how long."""
    boots = _boots(flags, ctx.obj["environ"])[-last:]
    rows = [HEAD, *map(_row, boots)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows] if boots else ["no boot is known here"]
    emit(output, [each.to_json() for each in boots], *lines)


def _row(boot: Timeline) -> tuple[str, ...]:
    weights = boot.took("weights")
    return (
        boot.boot,
        boot.name or "-",
        boot.tier,
        boot.reason or "-",
        boot.outcome,
        f"{boot.before:.1f} s",
        "-" if weights is None else f"{weights:.1f} s",
        f"{boot.seconds:.1f} s",
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)][:-_TIMES]
    times = [cell.rjust(width) for cell, width in zip(row[-_TIMES:], widths[-_TIMES:], strict=True)]
    return "  ".join([*cells, *times])


@click.command()
@_with_boot
@click.option("--svg", type=click.Path(dir_okay=False), help="draw it into a file as well")
@click.option("--html", type=click.Path(dir_okay=False), help="make a page of it as well")
@_for_state
@click.pass_context
def timeline(
    ctx: click.Context,
    /,
    boot: str,
    svg: str | None,
    html: str | None,
    output: str,
    **flags: Any,
) -> None:
    """Show what a boot did when: the latest whose name begins with BOOT."""
    found = _meant(_boots(flags, ctx.obj["environ"]), boot)
    if svg is not None:
        _write(Path(svg), as_svg(waterfall.draw(found)))
    if html is not None:
        _write(Path(html), waterfall.page(found))
    emit(output, found.to_json(), *waterfall.bars(found))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OwnershipError(f"{path}: {error.strerror}", hint="name another file") from None


@click.command()
@_with_boot
@_for_state
@click.pass_context
def blame(ctx: click.Context, /, boot: str, output: str, **flags: Any) -> None:
    """Say what of a boot took longest, against the best other one of its kind."""
    boots = _boots(flags, ctx.obj["environ"])
    found = blaming.blame(_meant(boots, boot), boots)
    emit(output, found.to_json(), *blaming.lines(found))


COMMANDS: Final[dict[str, click.Command]] = {
    command.name or "": command for command in (history, timeline, blame)
}
