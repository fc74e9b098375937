"""The command that says whether checkpoints pay on this host: `advise`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import click

from entrypoint import spelling
from entrypoint.assess import Assessment, assess
from entrypoint.checkpoint.layout import family_name
from entrypoint.checkpoint.manifest import Manifest
from entrypoint.errors import ManifestError, NotFoundError, RefusedError, StoreError
from entrypoint.insight import advice, past
from entrypoint.insight.advice import Figures
from entrypoint.options import WordsCommand, emit, with_format, with_settings
from entrypoint.start import new_boot, settings_as_user
from entrypoint.state.ledger import Ledger
from entrypoint.store.directory import DirectoryStore
from entrypoint.store.look import find_by_name


def _rate(_ctx: click.Context, _parameter: click.Parameter, word: str | None) -> float | None:
    if word is None:
        return None
    try:
        rate = spelling.byte_count(word.removesuffix("/s"))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if not rate:
        msg = f"expected more than nothing, found {word}"
        raise click.BadParameter(msg)
    return rate


@click.command(cls=WordsCommand, options_metavar="[OPTIONS] [MODEL [VLLM ARGS]]")
@click.option(
    "--source-rate",
    callback=_rate,
    metavar="RATE",
    help="what `shardboot probe` says the source is read at (500MB/s), where no save has timed it",
)
@with_format
@with_settings
@click.pass_context
def advise(ctx: click.Context, /, source_rate: float | None, output: str, **flags: Any) -> None:
    """Say after how many boots a checkpoint pays here, and for which models it never will.

    From what the ledger says of this host's boots: of all models, or of the one named.
    """
    words, environ = ctx.obj["words"], ctx.obj["environ"]
    meant = None
    if words:
        this = new_boot(flags, words, environ, touches_store=False)
        settings, meant = this.settings, _figures_of(assess(this))
    else:
        settings = settings_as_user(flags, environ)
    store = DirectoryStore(settings.local_dir)
    entries = Ledger(settings.state_dir).entries()
    found = past.figures(entries, _manifests(store), os.uname().nodename, source_rate)
    if meant is not None:
        found = [each for each in found if each.family == meant.family] or [meant]
    advices = [advice.advise(each) for each in found]
    nothing = f"no boot is known here: {Ledger(settings.state_dir).path}"
    lines = advice.table(advices) if advices else [nothing]
    emit(output, [each.to_json() for each in advices], *lines)


def _figures_of(assessment: Assessment) -> Figures:
    """Return the deployment that the words name, with nothing known of it.

    Raises: RefusedError where vLLM does not take them.
    """
    resolution, why = assessment.resolution, assessment.situation.no_checkpoint
    if resolution is None:
        text = why.text if why else "vLLM does not take these words"
        raise RefusedError(text, reason="engine.rejected", code=2)
    key, word = resolution.key, resolution.model_word
    return Figures(key.family(word), family_name(word, key))


def _manifests(store: DirectoryStore) -> Iterator[Manifest]:
    """Yield what can be read; a store that is not there has nothing to tell."""
    names: list[str] = []
    with suppress(StoreError):
        names = [*store.names()]
    for name in names:
        with suppress(ManifestError, NotFoundError, StoreError):
            yield find_by_name(store, name)


COMMANDS: Final[dict[str, click.Command]] = {"advise": advise}
