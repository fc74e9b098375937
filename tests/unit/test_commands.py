"""What `shardboot --help` says of each command."""

from __future__ import annotations

import click
import pytest

from entrypoint.commands import group

CONTEXT = click.Context(group, info_name="shardboot")
HELP = " ".join(group.get_help(CONTEXT).split())


@pytest.mark.parametrize("name", group.list_commands(CONTEXT))
def test_help_says_of_each_command_a_whole_sentence(name: str) -> None:
    command = group.get_command(CONTEXT, name)
    assert command is not None
    sentence = " ".join((command.help or "").split()).partition(". ")[0].rstrip(".")
    assert f" {name} {sentence}." in HELP
