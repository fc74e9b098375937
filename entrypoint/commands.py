"""All commands as click knows them, each imported when it is asked for.

Options come first; the first word that is not one of ours (or `--`) starts vLLM's own arguments,
so that `shardboot serve` is a drop-in for `vllm serve`.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import MutableMapping, Sequence
from typing import Any, Final, NamedTuple

import click

from entrypoint import __version__
from entrypoint.image import ROOMS
from entrypoint.options import WordsCommand, with_settings

SENTENCE: Final = 200
"""More characters than any first sentence has."""


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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what each command does as a whole sentence: click would write half of one."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, c.get_short_help_str(SENTENCE)) for name, c in commands if c is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shardboot")
def group() -> None:
    """Serve vLLM from pre-sharded checkpoints that are known to fit, or from the source."""


class ToServe(NamedTuple):
    """What `serve` was asked: the flags that were given, and vLLM's words."""

    flags: dict[str, Any]
    words: tuple[str, ...]


@group.command(cls=WordsCommand)
@with_settings
@click.pass_context
def serve(ctx: click.Context, /, **flags: Any) -> ToServe:
    """Make sure of a checkpoint, then become vLLM on it."""
    return ToServe(flags, ctx.obj["words"])


def run(arguments: Sequence[str], environ: MutableMapping[str, str]) -> int | ToServe:
    """Run a command, and return its exit status; `serve` is only parsed."""
    given = {"environ": environ}
    try:
        done = group.main([*arguments], prog_name="shardboot", standalone_mode=False, obj=given)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 128 + signal.SIGINT
    return done if isinstance(done, int | ToServe) else 0
