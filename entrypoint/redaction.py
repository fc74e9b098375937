"""Secrets that vLLM or a library may print, and that nothing of ours may repeat. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from entrypoint.config import CREDENTIALS

ENDS: Final = ("_TOKEN", "_KEY", "_SECRET", "_PASSWORD")
"""What the name of a variable with a secret ends with, whoever's it is."""

TAKING: Final = {"--api-key": None, "--hf-token": 1}
"""vLLM's words that a secret follows, with the most that may."""

SHORTEST: Final = 8
"""Less would be found where it is none."""

STANDS_FOR_ONE: Final = "***"


def secrets(environ: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return what must not be repeated, each in one line; longest first, so that no end is left."""
    held = (v for n, v in environ.items() if n in CREDENTIALS or n.upper().endswith(ENDS))
    lines = (line.strip() for value in (*held, *_given(words)) for line in value.splitlines())
    return sorted({line for line in lines if len(line) >= SHORTEST}, key=len, reverse=True)


def _given(words: Sequence[str]) -> Iterator[str]:
    """Yield the secrets among vLLM's words; vLLM takes _ for - in names."""
    for position, word in enumerate(words):
        name, has_value, value = word.partition("=")
        spelled = name.replace("_", "-")
        if spelled not in TAKING:
            continue
        if has_value:
            yield value
        following = itertools.takewhile(lambda w: not w.startswith("-"), words[position + 1 :])
        yield from itertools.islice(following, 0 if has_value else TAKING[spelled])


def redact(text: str, hidden: Iterable[str]) -> str:
    """Return `text` with *** in the place of each secret."""
    pattern = "|".join(map(re.escape, hidden))
    return re.sub(pattern, STANDS_FOR_ONE, text) if pattern else text
