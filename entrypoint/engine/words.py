"""Which of the user's words may matter for weights. Pure.

Standard library alone: `vllm_plugin/resolve.py` reads this by its path, in an interpreter that may
not have our package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def kept_positions(words: Sequence[str], ignorable: Mapping[str, Any]) -> list[int]:
    """Return the positions of words that may matter.

    Left out are options known not to matter, only in their exact spelling, with as many values as
    vLLM's parser gives them; every other word counts. `ignorable` has argparse's `nargs` of each.
    """
    kept: list[int] = []
    position = 0
    while position < len(words):
        name, has_value, _ = words[position].partition("=")
        arity = ignorable.get(name)
        if words[position] == "--":
            return kept + list(range(position, len(words)))
        if arity is None:
            kept.append(position)
            position += 1
            continue
        position += 1
        if not has_value:
            position += _values(words[position:], arity)
    return kept


def _values(rest: Sequence[str], arity: Any) -> int:
    given = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    match arity:
        case int():
            return min(arity, given)
        case "?":
            return min(1, given)
        case _:
            return given
