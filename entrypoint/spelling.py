"""Values as a user writes them: sizes, times, modes, addresses. Pure.

Each function takes a word and returns its value, or raises ValueError with what was expected.
"""

# No `from __future__ import annotations`: a NamedTuple compiles the text of each annotation.

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """Where to listen: a host and a port, 0 for any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def text(word: str) -> str:
    """Return any text but an empty one."""
    if not word:
        msg = "expected a value, found nothing"
        raise ValueError(msg)
    return word


def optional(word: str) -> str | None:
    """Return a text, None for an empty one."""
    return word or None


def path(word: str) -> Path:
    """Return a path."""
    return Path(text(word))


def mode(word: str) -> int:
    """Return a mode, written in octal."""
    if not re.fullmatch(r"0?o?[0-7]{3,4}", word):
        msg = f"expected an octal mode such as 2750, found {word!r}"
        raise ValueError(msg)
    return int(word.replace("o", ""), 8)


_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTES |= {f"{unit}i": 1024**power for power, unit in enumerate(("", "k", "m", "g", "t")) if unit}
_BYTES |= {f"{unit}b": size for unit, size in _BYTES.items()}
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def _quantity(word: str, units: Mapping[str, int], example: str) -> float:
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]*)\s*", word.lower())
    if match is None or match[2] not in units:
        msg = f"expected {example}, found {word!r}"
        raise ValueError(msg)
    return float(match[1]) * units[match[2]]


def byte_count(word: str) -> int:
    """Return the bytes of a size such as 4GiB or 500MB."""
    return int(_quantity(word, _BYTES, "a size such as 4GiB or 500MB"))


def optional_bytes(word: str) -> int | None:
    """Return the bytes of a size, None for an empty text."""
    return byte_count(word) if word else None


def file_bytes(word: str) -> int:
    """Return the bytes of a size of one byte at least."""
    size = byte_count(word)
    if size < 1:
        msg = f"expected at least one byte, found {word!r}"
        raise ValueError(msg)
    return size


def kept_bytes(word: str) -> float:
    """Return the bytes of a size, infinity for auto and 0 for off."""
    if word in ("auto", "off"):
        return math.inf if word == "auto" else 0
    return _quantity(word, _BYTES, "a size such as 4GiB, auto, or off")


_READ_BYTES = (64 * 1024, 1024**3)
"""Smaller reads are slow on any disk, and larger ones only take memory."""


def read_bytes(word: str) -> int:
    """Return the bytes of one read."""
    size, (least, most) = byte_count(word), _READ_BYTES
    if not least <= size <= most:
        msg = f"expected 64KiB to 1GiB, found {word!r}"
        raise ValueError(msg)
    return size


_MOST_THREADS = 256


def threads(word: str) -> int:
    """Return how many threads."""
    found = count(word)
    if found > _MOST_THREADS:
        msg = f"expected 1 to {_MOST_THREADS}, found {word!r}"
        raise ValueError(msg)
    return found


def count(word: str) -> int:
    """Return a whole number from 1."""
    if not (word.isascii() and word.isdigit() and int(word) > 0):
        msg = f"expected a whole number from 1, found {word!r}"
        raise ValueError(msg)
    return int(word)


def limit(word: str) -> int:
    """Return a whole number, 0 for no limit."""
    if not (word.isascii() and word.isdigit()):
        msg = f"expected a whole number, 0 for no limit, found {word!r}"
        raise ValueError(msg)
    return int(word)


def seconds(word: str) -> float:
    """Return the seconds of a time such as 90s or 1h."""
    return _quantity(word, _SECONDS, "a time such as 90s or 1h")


LEAST_PERIOD = 1.0
"""Seconds: what is done again and again without a rest leaves nothing to others."""


def period(word: str) -> float:
    """Return the seconds of a time of one second at least."""
    return _at_least(LEAST_PERIOD, seconds(word), word)


def interval(word: str) -> float:
    """Return the seconds of a time of one second at least, infinity for never."""
    if word == "never":
        return math.inf
    found = _quantity(word, _SECONDS, "a time such as 90s or 1h, or never")
    return _at_least(LEAST_PERIOD, found, word)


def _at_least(least: float, found: float, word: str) -> float:
    if found < least:
        msg = f"expected {least:g} s or more, found {word!r}"
        raise ValueError(msg)
    return found


_MOST_PORTS = 65535


def place(word: str) -> Place:
    """Return where to listen."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+)):(\d{1,5})", word, re.ASCII)
    if match is None or int(match[3]) > _MOST_PORTS:
        msg = f"expected HOST:PORT, found {word!r}"
        raise ValueError(msg)
    return Place(match[1] or match[2], int(match[3]))


def switch(word: str) -> bool:
    """Return a yes or no."""
    match word.lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off":
            return False
        case _:
            msg = f"expected yes or no, found {word!r}"
            raise ValueError(msg)


def one_of(*choices: str) -> Callable[[str], str]:
    """Return what takes one of these words, and no other."""

    def parse(word: str) -> str:
        if word not in choices:
            msg = f"expected one of {', '.join(choices)}, found {word!r}"
            raise ValueError(msg)
        return word

    return parse
