"""The command that looks after a node: `sidecar`."""

from __future__ import annotations

import functools
from typing import Any, Final

import click

from entrypoint.options import with_settings
from entrypoint.start import settings_as_user

SETTINGS: Final = (
    *("vllm", "save_timeout", "prove_idle"),
    *("local_dir", "state_dir", "shared", "user", "dir_mode", "file_mode", "max_bytes", "prove"),
    *("reserve_bytes", "grace", "publish", "shared_readers", "cache_bytes", "trust_caches"),
    *("log_format", "listen", "token_file", "watch_interval", "follow", "collect_interval"),
    *("scrub_interval", "scrub_rate"),
)


@click.command()
@functools.partial(with_settings, only=SETTINGS)
@click.pass_context
def sidecar(ctx: click.Context, /, **flags: Any) -> None:
    """Look after this node beside its servers: prefetch, scrub, collect; answer over HTTP.

    Runs until a signal ends it.
    """
    settings = settings_as_user(flags, ctx.obj["environ"], is_daemon=True)
    # Only this command needs a library for metrics, and a server.
    from entrypoint.sidecar import daemon  # noqa: PLC0415

    daemon.run(settings, ctx.obj["environ"])


COMMANDS: Final[dict[str, click.Command]] = {"sidecar": sidecar}
