"""What an image's ENTRYPOINT runs: the first word after the image's name decides."""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from entrypoint.engine.executable import find_program
from entrypoint.model.bounded import within

ROOMS: Final = {
    "operate": ("plan", "save", "pull", "push", "prove"),
    "inventory": ("list", "show", "verify", "reject", "unreject"),
    "keep": ("gc", "pin", "unpin"),
    "watch": ("status", "wait", "health"),
    "history": ("history", "timeline", "blame"),
    "measure": ("probe",),
    "sidecar.command": ("sidecar",),
    "advise": ("advise",),
    "tune": ("tune",),
}
"""Modules with a table `COMMANDS`, and what stands in it; `serve` is everybody's."""

MAGIC: Final = (b"#!", b"\x7fELF")
"""How what the kernel executes begins."""

LOOK_SECONDS: Final = 5.0
"""How long a path may take to tell whether it is a program; a cold network takes seconds."""

NEAR: Final = 0.7
"""Of 1: `lst` is `list`, and `phi` is not `pin`."""


class Entered(NamedTuple):
    """A command of ours with its words; or a `program` to become instead, with its own.

    `near` is a command that the first word may have been meant for, where it is taken for a model.
    """

    words: tuple[str, ...]
    program: str | None = None
    near: str = ""


def enter(words: Sequence[str], environ: Mapping[str, str]) -> Entered:
    """Tell what `words` ask for: a command of ours, a program on PATH, or else a model to serve.

    So `IMAGE MODEL -tp 8` and `IMAGE --model …` are what they are with vLLM's own image, and
    `IMAGE bash` is a shell. `IMAGE vllm serve --help=all` is vLLM's own help.
    """
    if tuple(words[:2]) == ("vllm", "serve") and not _is_help(words[2:3]):
        # As pod specs spell it: they mean a server, and not one without us.
        return Entered(tuple(words[1:]))
    first = words[0] if words else ""
    if first in _commands():
        return Entered(tuple(words))
    program = None if not first or first.startswith("-") else _program(first, environ)
    if program is not None:
        return Entered(tuple(words[1:]), program)
    return Entered(("serve", *words), near=_near(first))


def _program(word: str, environ: Mapping[str, str]) -> str | None:
    """Return the program that a word names, on PATH or as a path; a file of weights is none.

    On CIFS, or vfat, every file has an x bit.
    """
    if not os.path.dirname(word):
        return find_program(word, environ)
    # Most paths are models, and a model's mount may hang: who serves it knows what to do then.
    with contextlib.suppress(OSError):
        if within(LOOK_SECONDS, lambda: _is_program(word)):
            return word
    return None


def _is_program(path: str) -> bool:
    if find_program(path, {}) is None:
        return False
    try:
        with open(path, "rb") as file:
            return file.read(4).startswith(MAGIC)
    except PermissionError:
        # What may be executed and not read is no model to anybody.
        return True
    except OSError:
        return False


def _near(model: str) -> str:
    if not model.isalpha() or os.path.lexists(model):
        return ""
    import difflib  # noqa: PLC0415 - most models lie somewhere, or have a number in their names

    return next(iter(difflib.get_close_matches(model.lower(), _commands(), 1, NEAR)), "")


def _commands() -> Sequence[str]:
    return ["serve", *(name for names in ROOMS.values() for name in names)]


def _is_help(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0] in ("-h", "--help") for word in words)
