"""How commands take settings and vLLM's words from argv, and print what they found."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import click

from entrypoint.checkpoint.digest import Json
from entrypoint.errors import one_line
from entrypoint.surface import OPTIONS

WORDS_HELP: Final = (
    "Everything from the first word that is not an option above goes to `vllm serve` as it is; "
    "see `vllm serve --help=all` for those."
)


with_format = click.option(
    "--format", "output", type=click.Choice(["text", "json"]), default="text", help="how to print"
)


def emit(output: str, value: Json, *lines: str) -> None:
    """Print a result for programs or for people; no foreign name in it ends a line of ours."""
    text = json.dumps(value, indent=2) if output == "json" else "\n".join(map(one_line, lines))
    click.echo(text)


class WordsCommand(click.Command):
    """A command whose own options come first, and whose other words are vLLM's, untouched."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("options_metavar", "[OPTIONS] MODEL [VLLM ARGS]")
        kwargs.setdefault("epilog", WORDS_HELP)
        super().__init__(*args, **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Cut the words where vLLM's begin; `--` is ours and is dropped."""
        count = self._count_own(ctx, args)
        words = args[count:]
        ctx.obj["words"] = tuple(words[1:] if words[:1] == ["--"] else words)
        return super().parse_args(ctx, args[:count])

    def _count_own(self, ctx: click.Context, args: Sequence[str]) -> int:
        arity = {
            spelling: 0 if getattr(option, "is_flag", False) else 1
            for option in self.get_params(ctx)
            for spelling in (*option.opts, *option.secondary_opts)
        }
        count = 0
        while count < len(args):
            name, has_value, _ = args[count].partition("=")
            if name not in arity or name == "--":
                break
            count += 1 if has_value else 1 + arity[name]
        return min(count, len(args))


def with_settings(
    command: Callable[..., Any], only: Collection[str] | None = None
) -> Callable[..., Any]:
    """Give a command settings as flags; unset flags stay None, so that others can decide."""
    for option in reversed(OPTIONS):
        if option.is_sidecars if only is None else option.name not in only:
            continue
        shown = f"{option.help}  [{option.variable}; default: {option.default or 'none'}]"
        if option.is_switch:
            spelling = f"{option.flag}/--no-{option.flag.removeprefix('--')}"
            add = click.option(spelling, option.name, default=None, help=shown)
        else:
            add = click.option(option.flag, option.name, metavar=option.metavar, help=shown)
        command = add(command)
    return command
