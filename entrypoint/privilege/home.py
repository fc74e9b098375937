"""HOME, USER, and where vLLM and its libraries cache: set only where unset and needed."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from entrypoint.privilege.user import User
    from entrypoint.state.places import Place

NAMES: Final = ("LOGNAME", "USER", "LNAME", "USERNAME")
"""Where getpass.getuser() looks before it asks passwd, and fails where that knows nobody."""

PLACE: Final[Place] = "home"
"""In the state directory: what stands in for a home that cannot be written."""


def adapt(environ: MutableMapping[str, str], user: User) -> str:
    """Give the user its own HOME, USER and LOGNAME in place of root's; keep the hub cache.

    `HF_HOME` is fixed first, since its default hangs on HOME. Return what it was set to, if it was:
    the user has still to find out whether it gets there.
    """
    kept = ""
    old_home = environ.get("HOME")
    if not any(name in environ for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")):
        hub = Path(old_home or "/", ".cache", "huggingface")
        if old_home and hub.is_dir():
            environ["HF_HOME"] = kept = str(hub)
    environ.update(HOME=user.home, USER=user.name, LOGNAME=user.name)
    return kept


def give_up_hub(environ: MutableMapping[str, str], kept: str) -> str:
    """As the user: forget a hub cache of root's that it cannot get into; say so, or return "".

    `kept` is what `adapt` returned. vLLM's own image is run with a cache mounted in root's home,
    which only root may pass.
    """
    if not kept:
        return ""
    closed = [place for place in _way_to(f"{kept}/hub") if _is_closed(place)]
    if not closed:
        return ""
    del environ["HF_HOME"]
    usual = f"{environ['HOME'].rstrip('/')}/.cache/huggingface"
    return (
        f"{kept}: uid {os.geteuid()} may not enter {closed[0]}, so no model is looked for there: "
        f"mount that cache at {usual}, where this user may read, or run as root with --user 0"
    )


def _way_to(place: str) -> list[str]:
    return [str(each) for each in reversed([Path(place), *Path(place).parents])]


def _is_closed(place: str) -> bool:
    """Tell whether a directory that is there may not be entered; one that is not seen is not."""
    return os.path.isdir(place) and not os.access(place, os.X_OK)


def shelter(environ: MutableMapping[str, str], state_dir: Path) -> None:
    """Give whoever runs vLLM a name where there is none, and places for caches, kept over boots.

    Places are needed where the home, or the usual one in it, cannot be written. To be called as
    the user who runs vLLM. Where `state_dir` cannot be written either, none is set.
    """
    home = environ.get("HOME") or ""
    is_named = any(environ.get(name) for name in NAMES)
    if not (home and is_named):
        known_home = _home_in_passwd()
        home = home or known_home or ""
        if known_home is None and not is_named:
            environ["USER"] = environ["LOGNAME"] = str(os.geteuid())
    usual = environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    # What is mounted below .cache has had it made, as root's, where it was not there.
    if home and _may_write(home) and _may_write(usual):
        return
    place = f"{state_dir}/{PLACE}"
    try:
        # Tokens lie in a home.
        os.makedirs(place, 0o700, exist_ok=True)
    except OSError:
        return
    if not os.access(place, os.W_OK | os.X_OK):
        return
    for name, value in caches(usual, place).items():
        if not environ.get(name):
            environ[name] = value
    if not home:
        environ["HOME"] = place


def _home_in_passwd() -> str | None:
    import pwd  # noqa: PLC0415 - most environments tell

    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return None


def caches(usual: str, place: str) -> dict[str, str]:
    """Return what to set where unset: places in `usual` if that can be written, else in `place`."""
    cache = usual if _may_write(usual) else f"{place}/.cache"
    # Models may lie there, baked into an image, though nothing can be added.
    hub = f"{usual}/huggingface"
    return {
        "XDG_CACHE_HOME": cache,
        "HF_HOME": hub if os.path.isdir(hub) else f"{cache}/huggingface",
        "VLLM_CACHE_ROOT": f"{cache}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torchinductor",
        "TRITON_CACHE_DIR": f"{cache}/triton",
    }


def _may_write(path: str) -> bool:
    """Tell whether this user may write at `path`, or make it."""
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)
