"""The command that measures a place before it is trusted: `probe`."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from entrypoint import spelling
from entrypoint.errors import StoreError
from entrypoint.insight import plot
from entrypoint.insight.examine import Order
from entrypoint.insight.findings import Findings
from entrypoint.insight.probe import probe as probe_directory
from entrypoint.insight.report import as_text
from entrypoint.insight.verdict import judge
from entrypoint.options import emit, with_format, with_settings
from entrypoint.picture import paint, with_plot
from entrypoint.privilege.stepping_down import become_user
from entrypoint.start import read_settings, take_credentials, tighten_umask
from entrypoint.store.base import open_store
from entrypoint.store.directory import DirectoryStore

LEAST_BYTES: Final = 1024 * 1024
LEAST_SECONDS: Final = 0.1
MOST_SECONDS: Final = 600.0


def _quantity(
    parse: Callable[[str], float], least: float, most: float = math.inf
) -> Callable[..., float]:
    def callback(_ctx: click.Context, _parameter: click.Parameter, word: str) -> float:
        try:
            value = parse(word)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
        if not least <= value <= most:
            bounds = f"at least {least:g}" if most == math.inf else f"{least:g} to {most:g}"
            msg = f"expected {bounds}, found {word}"
            raise click.BadParameter(msg)
        return value

    return callback


@click.command()
@click.argument("place", metavar="PATH|URL")
@click.option(
    "--also",
    metavar="PATH",
    help="the same directory through another mount: renames, locks and inotify are seen from there",
)
@click.option(
    "--size",
    default="1GiB",
    callback=_quantity(spelling.byte_count, LEAST_BYTES),
    show_default=True,
    metavar="SIZE",
    help="most bytes to write",
)
@click.option(
    "--seconds",
    default="20s",
    callback=_quantity(spelling.seconds, LEAST_SECONDS, MOST_SECONDS),
    show_default=True,
    metavar="TIME",
    help="how long to measure",
)
@click.option(
    "--workers",
    default=4,
    type=click.IntRange(2, 64),
    show_default=True,
    help="how many read and write at once, beside one alone",
)
@with_plot
@with_format
@functools.partial(with_settings, only=("user", "reserve_bytes"))
@click.pass_context
def probe(
    ctx: click.Context,
    /,
    place: str,
    also: str | None,
    size: float,
    seconds: float,
    workers: int,
    picture: Path | None,
    output: str,
    **flags: Any,
) -> None:
    """Measure a directory or bucket; say whether to serve from there, copy, or keep away.

    Works in a directory of its own there, and takes it away again. Exit 30 if it hangs.
    """
    take_credentials(ctx.obj["environ"])
    settings = read_settings(flags, ctx.obj["environ"])
    tighten_umask()
    become_user(settings.user, ctx.obj["environ"])
    order = Order(int(size), seconds, workers, settings.reserve_bytes)
    findings = _measured(place, also, order)
    verdict = judge(findings)
    emit(output, findings.to_json() | verdict.to_json(), *as_text(findings, verdict).splitlines())
    if picture is not None:
        paint(picture, plot.draw(findings, verdict))
    if findings.hung:
        msg = f"{findings.path}: no answer ({findings.hung})"
        raise StoreError(msg, hint="see whether its server runs; `dmesg` may name it")


def _measured(place: str, also: str | None, order: Order) -> Findings:
    store = open_store(place if "://" in place else os.path.abspath(place))
    if isinstance(store, DirectoryStore):
        through = Path(os.path.abspath(also)) if also is not None else None
        return probe_directory(store.root, through, order, _say)
    from entrypoint.insight import bucket  # noqa: PLC0415 - most probes are of directories
    from entrypoint.store.objects import ObjectStore  # noqa: PLC0415

    if also is not None or not isinstance(store, ObjectStore):
        msg = f"{store.where}: --also is for directories"
        raise click.UsageError(msg)
    return bucket.probe(store, order, _say)


def _say(step: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"shardboot: probe: {step}", err=True)


COMMANDS: Final[dict[str, click.Command]] = {"probe": probe}
