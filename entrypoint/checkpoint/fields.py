"""Fields of foreign JSON: each is what it must be, or refused by name. Pure.

Everything here raises ManifestError: which field, what was expected, what was found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NoReturn, cast

from entrypoint.checkpoint.digest import Json
from entrypoint.errors import ManifestError


def parse(data: bytes) -> Json:
    """Return what JSON in `data` says; of numbers only those that canonical JSON would keep."""
    try:
        return cast("Json", json.loads(data, parse_constant=_no_constant, parse_float=_no_float))
    except (ValueError, RecursionError) as error:
        msg = f"manifest: not JSON as its schema allows: {str(error)[:200]}"
        raise ManifestError(msg) from None


def _no_constant(word: str) -> NoReturn:
    msg = f"{word} is not allowed"
    raise ValueError(msg)


def _no_float(word: str) -> float:
    # Digits only a float can hold would not survive being written again in canonical form.
    value = float(word)
    if abs(value) > 2**53 or repr(value) != word:
        msg = f"number {word[:40]} is not allowed"
        raise ValueError(msg)
    return value


def refuse(field: str, expected: str, found: object) -> NoReturn:
    """Refuse what was found in a field."""
    msg = f"{field}: expected {expected}, found {str(found)[:120]!r}"
    raise ManifestError(msg)


def an_object(value: Json, field: str) -> dict[str, Json]:
    """Return the value of a field that must be an object."""
    if not isinstance(value, dict):
        refuse(field, "an object", value)
    return value


def exactly(value: Mapping[str, Json], field: str, names: set[str]) -> None:
    """Refuse an object that lacks one of these fields, or has another."""
    for name in sorted(value.keys() ^ names):
        what = "unknown" if name in value else "missing"
        msg = f"{field}.{name[:80]}: {what} field"
        raise ManifestError(msg)


def a_text(value: Json, field: str, limit: int = 4096) -> str:
    """Return the value of a field that must be a text of at most `limit` characters."""
    if not isinstance(value, str) or len(value) > limit or not _is_text(value):
        refuse(field, f"a text of at most {limit} characters", value)
    return value


def _is_text(value: str) -> bool:
    """Tell real text from what holds half of a surrogate pair, and could not be written."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def a_count(value: Json, field: str, limit: int) -> int:
    """Return the value of a field that must be a whole number from 0 to `limit`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        refuse(field, f"a whole number from 0 to {limit}", value)
    return value


def a_digest(value: Json, field: str) -> str:
    """Return the value of a field that must be 256 bits, as hex digits."""
    text = a_text(value, field, 64)
    if len(text) != 64 or not set(text) <= set("0123456789abcdef"):  # noqa: PLR2004 - 256 bits
        refuse(field, "64 hex digits", value)
    return text
