"""Becoming vLLM: its words, its environment, its seat, and the exec that never returns."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn

from entrypoint.checkpoint.digest import Json
from entrypoint.engine.executable import Executable
from entrypoint.engine.resolution import Resolution
from entrypoint.errors import ExecError

UNCOLLECTED: Final = os.path.join(os.path.dirname(__file__), "vllm_plugin", "uncollected.py")
LOAD_FORMAT: Final = "shardboot"
TEE_FORMAT: Final = "shardboot-tee"
IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)
"""From its start, whatever its parent wanted; and what is ignored stays ignored across exec."""


def checkpoint_words(
    resolution: Resolution,
    words: Sequence[str],
    checkpoint: str,
    loader: Mapping[str, Json],
) -> list[str]:
    """Return vLLM's words for serving `checkpoint`: the user's, with only the model replaced.

    `loader` tells our load format which manifest is meant, and where to note what becomes of it.
    The clients' model name stays the user's own, else every request would get a 404.
    """
    kept = [word for i, word in enumerate(words) if i not in resolution.drop]
    named = [] if resolution.gives_served_name else ["--served-model-name", resolution.model_word]
    return [checkpoint, *kept, *_loading(LOAD_FORMAT, loader), *named, *resolution.append]


def tee_words(
    resolution: Resolution, words: Sequence[str], loader: Mapping[str, Json]
) -> list[str]:
    """Return vLLM's words for serving the source through our loader, which saves it on the way."""
    return [*words, *_loading(TEE_FORMAT, loader), *resolution.append]


def preloading(resolution: Resolution | None) -> dict[str, str]:
    """Return the variables of a vLLM whose other processes are forks: they preload as it does."""
    libraries = resolution.preload if resolution else None
    return {"LD_PRELOAD": libraries} if libraries else {}


def quickly(engine: Executable) -> list[str]:
    """Return the command that runs vLLM's script with quicker imports, if our plugin is loaded."""
    return [engine.interpreter, *engine.flags, UNCOLLECTED]


def _loading(load_format: str, loader: Mapping[str, Json]) -> list[str]:
    config = json.dumps(loader, separators=(",", ":"))
    return ["--load-format", load_format, "--model-loader-extra-config", config]


def become(
    path: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    umask: int | None = None,
    through: Sequence[str] = (),
) -> NoReturn:
    """Replace this process by `path`: same pid, no shell, signals as a fresh program expects them.

    `through` is the command that runs it, where it is a script; none leaves that to the kernel.

    Only descriptors made inheritable on purpose cross; our handlers do not (execve(2)).
    `umask` is the one that vLLM shall have. Raises: ExecError.
    """
    if umask is not None:
        os.umask(umask)
    for number in IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A handler would only note it, and exec forget the note.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    words = [*through, path, *arguments]
    try:
        if through:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        os.execve(words[0], words, dict(environ))
    except OSError as error:
        found = os.path.exists(path)
        raise ExecError(f"{path}: cannot be executed: {error.strerror}", found=found) from None


class Seat:
    """The process that is to be vLLM: this very one, by exec. Under a standby it is another.

    `heir` is who adopts what a boot leaves running, 0 where that stays vLLM's own child.
    """

    heir: int = 0

    def take(self, waits: Callable[[str], None]) -> int:
        """Return the pid that vLLM will have, so that it can be noted before anything begins.

        `waits` is told what for, where that takes a while.
        """
        del waits
        return os.getpid()

    def become(
        self,
        path: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        umask: int | None,
        through: Sequence[str],
    ) -> NoReturn:
        """Have vLLM begin there. As `become`."""
        become(path, arguments, environ, umask, through)
