"""Finding the `vllm` to become, and the Python behind it."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import os
import shlex
from collections.abc import Mapping
from typing import Final, NamedTuple

from entrypoint.errors import EngineError, ExecError

PLUGIN: Final = "shardboot"


class Executable(NamedTuple):
    """The `vllm` to become, and the Python that its first line names, with its flags there."""

    path: str
    interpreter: str
    flags: tuple[str, ...] = ()


def locate(word: str, environ: Mapping[str, str]) -> str:
    """Return the absolute path of an executable, on PATH or as given. Raises: ExecError."""
    path = find_program(word, environ)
    if path is None:
        found = os.path.exists(word)
        missing = "is not there" if os.path.dirname(word) else "is not on PATH"
        what = "is not executable" if found else missing
        msg = f"{word}: {what}"
        raise ExecError(msg, found=found, hint="name it with --vllm PATH")
    return os.path.abspath(path)


def find_program(word: str, environ: Mapping[str, str]) -> str | None:
    """Return what a shell would run, or None; as `shutil.which`, which is dearer to import."""
    if os.path.dirname(word):
        candidates = [word]
    else:
        candidates = [os.path.join(place, word) for place in os.get_exec_path(dict(environ))]
    runnable = (c for c in candidates if os.path.isfile(c) and os.access(c, os.X_OK))
    return next(runnable, None)


def find(word: str, environ: Mapping[str, str]) -> Executable:
    """Find vLLM's console script and its interpreter. Raises: ExecError, EngineError."""
    path = locate(word, environ)
    interpreter, *flags = _command(path, environ)
    return Executable(path, interpreter, tuple(flags))


def _command(path: str, environ: Mapping[str, str]) -> list[str]:
    """Return what runs a console script: its first line, or the one that /bin/sh is to exec."""
    try:
        with open(path, "rb") as script:
            first, second = script.readline(4096), script.readline(4096)
    except OSError as error:
        raise EngineError(f"{path}: cannot be read: {error.strerror}") from None
    words = _words(first.removeprefix(b"#!")) if first.startswith(b"#!") else []
    if words and os.path.basename(words[0]) == "sh" and second.startswith(b"'''exec'"):
        # pip writes this where the interpreter's path is too long, or has blanks, for "#!".
        words = [word for word in _words(second.removeprefix(b"'''exec'")) if word[:1] != "$"]
    if words and os.path.basename(words[0]) == "env":
        words = [find_program(word, environ) or word for word in words[1:] if "=" not in word]
    if not words or "python" not in os.path.basename(words[0]):
        msg = f"{path}: not a Python console script, so vLLM cannot be asked how it reads the words"
        raise EngineError(msg, reason="engine.opaque")
    return words


def _words(line: bytes) -> list[str]:
    try:
        return shlex.split(line.decode())
    except ValueError:
        return []


def with_plugin(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for vLLM: our load format stays allowed where VLLM_PLUGINS is set."""
    adapted = dict(environ)
    allowed = adapted.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        adapted["VLLM_PLUGINS"] = f"{allowed},{PLUGIN}" if allowed else PLUGIN
    return adapted
