"""The command line: the only reader of argv and os.environ, the only place that exits.

Options come first; the first word that is not one of ours (or `--`) starts vLLM's own arguments,
so that `shardboot serve` is a drop-in for `vllm serve`.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from entrypoint import __version__
from entrypoint.config import SWITCH
from entrypoint.errors import Interrupted, RefusedError, ShardbootError, exit_code_of
from entrypoint.options import WordsCommand, is_off, new_boot, with_settings

if TYPE_CHECKING:
    from entrypoint.assess import Boot

STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

ROOMS: Final = {
    "operate": ("plan", "save", "pull", "push", "prove"),
    "inventory": ("list", "show", "verify", "reject", "unreject"),
    "keep": ("gc", "pin", "unpin"),
    "watch": ("status", "wait", "health"),
    "measure": ("probe",),
}
"""Modules with a table `COMMANDS`, and what stands in it."""


class LazyGroup(click.Group):
    """Imports a command when it is asked for: a hit needs no other one, and a probe is no boot."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all commands, in the order in which a newcomer meets them."""
        return [*super().list_commands(ctx), *(name for names in ROOMS.values() for name in names)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by name."""
        for room, names in ROOMS.items():
            if cmd_name in names:
                commands: dict[str, click.Command]
                commands = importlib.import_module(f"entrypoint.{room}").COMMANDS
                return commands[cmd_name]
        return super().get_command(ctx, cmd_name)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shardboot")
@click.pass_context
def cli(ctx: click.Context, /) -> None:
    """Serve vLLM from pre-sharded checkpoints that are known to fit, or from the source."""
    ctx.obj = {"environ": os.environ}


@cli.command(cls=WordsCommand)
@with_settings
@click.pass_context
def serve(ctx: click.Context, /, **flags: Any) -> None:
    """Make sure of a checkpoint, then become vLLM on it."""
    from entrypoint import boot, launch  # noqa: PLC0415 - other commands need neither
    from entrypoint.engine.executable import locate  # noqa: PLC0415

    words = ctx.obj["words"]
    if is_off(os.environ):
        vllm = flags["vllm"] or os.environ.get(f"{SWITCH}_VLLM") or "vllm"
        boot.become_user(flags["user"] or os.environ.get(f"{SWITCH}_USER"), os.environ)
        launch.become(locate(vllm, os.environ), ["serve", *words], os.environ)
    this = new_boot(flags, words, os.environ, reports=True)
    try:
        boot.serve(this)
    except Exception as error:  # noqa: BLE001 - the one guard: a server must not stay down for us
        _survive(error, this)


def _survive(error: Exception, this: Boot) -> NoReturn:
    """Serve the source where the policy allows; else let the error end the process."""
    from entrypoint import boot  # noqa: PLC0415 - it is there by now

    code = exit_code_of(error) if isinstance(error, ShardbootError) else 1
    is_final = isinstance(error, RefusedError) or code in boot.NEVER_FAIL_OPEN
    reason = error.reason if isinstance(error, ShardbootError) else "internal.error"
    if is_final or code in (126, 127) or this.settings.on_failure == "refuse":
        this.status.phase("failed", str(error), reason=reason)
        raise error
    if reason == "internal.error":
        import traceback  # noqa: PLC0415 - milliseconds, and a hit needs none

        traceback.print_exception(error)
    boot.fall_back(this, reason, f"serving the source as if shardboot were not there: {error}")


def main() -> NoReturn:
    """Run a command; print our errors as one line and a hint, and exit with their code."""
    for number in STOPPING:
        # What a parent ignores stays ignored, as nohup wants it.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        status = cli.main(prog_name="shardboot", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(128 + signal.SIGINT)
    except Interrupted as error:
        click.echo(f"shardboot: {error}", err=True)
        sys.exit(exit_code_of(error))
    except ShardbootError as error:
        click.echo(f"shardboot: error: {error.reason}: {error}", err=True)
        if error.hint:
            click.echo(f"shardboot: hint: {error.hint}", err=True)
        sys.exit(exit_code_of(error))
    sys.exit(status if isinstance(status, int) else 0)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    # Only the first one interrupts: cleaning up must not be interrupted itself.
    for each in STOPPING:
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)


if __name__ == "__main__":
    main()
