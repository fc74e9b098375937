"""What root does before it is gone: make directories ready, and become the service user."""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableMapping
from pathlib import Path

from entrypoint.config import Settings
from entrypoint.log import Log
from entrypoint.privilege import home

STATE_MODE = 0o750


def step_down(
    settings: Settings, environ: MutableMapping[str, str], log: Log, *, touches_store: bool = True
) -> None:
    """As root: give the service user its directories and become it. Then see to its environment.

    Without `touches_store` only the state directory is made ready.
    Raises: PrivilegeError, OwnershipError.
    """
    places = [(settings.local_dir, settings.dir_mode)] if touches_store else []
    places.append((settings.state_dir, STATE_MODE))

    said: set[str] = set()

    def say(text: str) -> None:
        # Both may lie in one directory.
        if text not in said:
            said.add(text)
            log.line("user.directory", text)

    if os.geteuid() != 0:
        _stay(settings.user, log)
    elif settings.user is None:
        from entrypoint.privilege import ownership  # noqa: PLC0415 - root's business

        log.line("user.root", "running as root: no --user given, so vLLM runs as root too")
        for directory, _ in places:
            ownership.check(directory, say)
    else:
        from entrypoint.privilege import ownership, user  # noqa: PLC0415 - root's business

        service = user.resolve_user(settings.user)
        user.require_mapped(service)
        for directory, mode in places:
            ownership.prepare(directory, service, mode, say)
        kept = home.adapt(environ, service)
        user.become(service)
        if text := home.give_up_hub(environ, kept):
            log.line("user.hub", text)
    home.shelter(environ, settings.state_dir)


def _stay(named: str | None, log: Log) -> None:
    """Say so, where another user was named."""
    if named is not None:
        from entrypoint.privilege import user  # noqa: PLC0415 - few name one in vain

        if user.resolve_user(named).uid != os.geteuid():
            log.line("user.kept", f"not root, so this stays uid {os.geteuid()}")


def become_reader(settings: Settings, environ: MutableMapping[str, str]) -> None:
    """As root: become whom the state directory belongs to, so as to read and note what it could.

    Where it is root's, or not there: the user that is named.
    """
    word = settings.user
    with contextlib.suppress(OSError):
        owner = os.stat(settings.state_dir).st_uid
        word = str(owner) if owner else word
    become_user(word, environ)


def look_after(settings: Settings) -> None:
    """Before root looks after stores in its own name: refuse links that others have put there.

    Raises: OwnershipError.
    """
    if os.geteuid() == 0:
        from entrypoint.privilege import ownership  # noqa: PLC0415 - root's business

        for directory in (settings.local_dir, settings.state_dir):
            ownership.check(directory, lambda _: None)


def become_user(
    word: str | None, environ: MutableMapping[str, str], *, caches_in: Path | None = None
) -> None:
    """As root with a service user: become it, without a look at any store.

    Who goes on to run vLLM has its caches, where it needs places for them, in the state directory
    `caches_in`; nothing is made ready there, so they are those that a boot has had before.
    Raises: PrivilegeError.
    """
    if word and os.geteuid() == 0:
        from entrypoint.privilege import user  # noqa: PLC0415 - root's business

        service = user.resolve_user(word)
        user.require_mapped(service)
        kept = home.adapt(environ, service)
        user.become(service)
        home.give_up_hub(environ, kept)
        if caches_in is not None and caches_in.is_absolute():
            home.shelter(environ, caches_in)
