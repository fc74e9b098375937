"""The command that finds out how large shard files must be on this host: `tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from entrypoint import spelling, surface, tuner
from entrypoint.assess import Assessment, Boot, assess
from entrypoint.checkpoint.digest import Json
from entrypoint.errors import RefusedError, StagingError
from entrypoint.insight import knee, setting
from entrypoint.insight.knee import Trial, size_word
from entrypoint.insight.verdict import human_decimal
from entrypoint.options import WordsCommand, emit, with_format, with_settings
from entrypoint.picture import paint, with_plot
from entrypoint.plan import step
from entrypoint.start import CONFIG_FILE, DEFAULT_CONFIG_FILE, new_boot
from entrypoint.state.places import below
from entrypoint.store import space

KEY: Final = "size-per-file"


def _sizes(_ctx: click.Context, _parameter: click.Parameter, word: str) -> list[int]:
    try:
        sizes = sorted({spelling.byte_count(each) for each in word.split(",")})
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if not sizes[0]:
        msg = f"expected at least one byte, found {word!r}"
        raise click.BadParameter(msg)
    return sizes


@click.command(cls=WordsCommand)
@click.option(
    "--sizes",
    default="1GiB,2GiB,4GiB,8GiB",
    callback=_sizes,
    show_default=True,
    metavar="SIZE,…",
    help="how many bytes a shard file may have, each of which is tried",
)
@click.option(
    "--runs",
    default=3,
    type=click.IntRange(1, 50),
    show_default=True,
    help="how often each is loaded from a cold page cache, and from a warm one",
)
@click.option("--write", is_flag=True, help="write what was found into the TOML file")
@with_plot
@with_format
@with_settings
@click.pass_context
def tune(
    ctx: click.Context,
    /,
    sizes: list[int],
    runs: int,
    write: bool,
    picture: Path | None,
    output: str,
    **flags: Any,
) -> None:
    """Save and load the model in shard files of several sizes; say which is large enough.

    All of it lies in the local store's staging meanwhile, once for each size, and goes again.
    """
    environ = ctx.obj["environ"]
    this = new_boot(flags, ctx.obj["words"], environ)
    path = Path(environ.get(CONFIG_FILE) or DEFAULT_CONFIG_FILE)
    if write:
        setting.require_writable(path)
    measured = _measured(this, assess(this), sizes, runs)
    best = knee.knee(measured)
    word = size_word(best.size)
    written = setting.write_setting(path, KEY, word) if write else None
    value: dict[str, Json] = {
        "sizes": [trial.to_json() for trial in measured],
        "size_per_file": word,
        "in_force": size_word(this.settings.size_per_file),
        "written": str(written) if written else None,
    }
    lines = [*knee.report(measured, best), *_the_same(sizes, measured)]
    emit(output, value, *lines, _what_next(this, word, written))
    if picture is not None:
        paint(picture, knee.draw(measured, best, " ".join(this.words[:1])))


def _measured(boot: Boot, assessment: Assessment, sizes: list[int], runs: int) -> list[Trial]:
    """Measure, with room for it. Raises: RefusedError, and as `tuner.tune`."""
    action = step(assessment.situation, "save")
    if action.kind == "refuse" or assessment.resolution is None:
        raise RefusedError(action.text, reason=action.reason, code=action.exit_code)
    store, settings, log = assessment.local_store, boot.settings, boot.log
    try:
        store.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"{store.root}: cannot be made: {error.strerror}"
        raise StagingError(msg, hint="mount a directory there, or name another one") from None
    one = sum(file.size for file in assessment.source.here.weights)
    text = f"{len(sizes)} times {human_decimal(one)}, as the source has, at most"
    log.line("tune.space", f"{text}, for a while, in {store.root}")
    space.require_room(
        store.root, one * len(sizes), space.Limits(settings.reserve_bytes, settings.max_bytes)
    )
    log.line(
        "tune.start",
        f"vLLM starts once, and loads each size {runs} times cold and {runs} times warm",
    )
    order = tuner.Order(
        engine=assessment.engine,
        words=boot.words,
        environ=boot.environ,
        resolution=assessment.resolution,
        sizes=sizes,
        runs=runs,
        file_mode=settings.file_mode,
        log_file=below(settings.state_dir, "logs") / f"tune-{log.boot}.log",
        timeout=settings.save_timeout,
        say=lambda said: log.line("tune.progress", said),
    )
    return tuner.tune(order, store)


def _the_same(sizes: list[int], measured: list[Trial]) -> list[str]:
    """Say which sizes were not tried, since they make the files that another one makes."""
    left = sorted({*sizes} - {trial.size for trial in measured})
    largest = size_word(measured[-1].size)
    return [f"{', '.join(map(size_word, left))} would make the files of {largest}"] if left else []


def _what_next(boot: Boot, word: str, written: Path | None) -> str:
    """Say what becomes of it: the next save goes by it, what is saved stays as it is."""
    wanted = f'{KEY} = "{word}"'
    if written is None:
        now = size_word(boot.settings.size_per_file)
        return f"now it is {now}; --write puts {wanted} into the TOML file"
    variable = f"{surface.ENV_PREFIX}SIZE_PER_FILE"
    if variable in boot.environ:
        return f"{written}: {wanted}, but {variable} is set, and wins"
    return f"{written}: {wanted}; the next save goes by it"


COMMANDS: Final[dict[str, click.Command]] = {"tune": tune}
