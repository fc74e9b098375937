"""Changing JSON without spoiling it: what a fuzzer that flips bytes seldom manages."""

from __future__ import annotations

import json
import random
from typing import Any

NESTED = "a list in a list in a list …"
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 1.0, 1.5, 1e16, float("nan"), float("inf")),
    *(2**16, 2**31, 2**32, 2**48, 2**53 + 1, 2**63, 10**400, 10**4000),
    *("", "a", "a\nb", "\ud800", "\x1b[31m", "../x", "/etc/passwd", ".hidden", "0", "x" * 300),
    *([], {}, [0], [[]], {"a": {}}, NESTED),
)
"""Values that readers are known to trip over."""


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Change one value, entry or name in one line of JSON; a few bytes where there is none."""
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    try:
        document = [json.loads(lines[at])]
        _change(document, chance)
        depth = chance.choice((2, 100, chance.randrange(800, 1000), 100_000))
        nested = b"[" * depth + b"]" * depth
        text = json.dumps(document[0], separators=(",", ":")).encode()
        lines[at] = text.replace(json.dumps(NESTED).encode(), nested)
    except (RecursionError, ValueError):
        begin = chance.randrange(len(data) + 1)
        return data[:begin] + chance.randbytes(4) + data[begin + chance.randrange(8) :]
    return b"\n".join(lines)


def _change(document: list[Any], chance: random.Random) -> None:
    places = list(_places(document))
    container, key = chance.choice(places)
    match chance.randrange(6):
        case 0 | 1:
            container[key] = chance.choice(ODD)
        case 2:
            other, its = chance.choice(places)
            container[key] = other[its]
        case 3 if container is not document:
            del container[key]
        case 4 if isinstance(container, dict):
            container[str(chance.choice(ODD))] = container.pop(key)
        case 5 if isinstance(container[key], list):
            container[key] = container[key] * 2
        case _ if isinstance(container[key], dict):
            container[key][str(chance.choice(ODD))] = chance.choice(ODD)
        case _:
            container[key] = [container[key]]


def _places(document: list[Any]) -> list[tuple[Any, Any]]:
    """Return every value of a document, as what holds it and where."""
    found: list[tuple[Any, Any]] = []
    todo: list[Any] = [document]
    while todo:
        container = todo.pop()
        keys = container if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], list | dict):
                todo.append(container[key])
    return found
