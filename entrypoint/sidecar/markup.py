"""HTML in which nothing that is shown can speak: what was not made here is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from entrypoint.errors import one_line

_ALONE: Final = ("meta",)


class Markup(str):
    """Text that is HTML already. Whatever is made of one by other means is plain text again."""

    __slots__ = ()


def element(tag: str, /, *children: str, **attributes: str) -> Markup:
    """Return one element; all children that are no Markup, and all attributes, are escaped.

    `class_` is the attribute `class`, and `data_label` is `data-label`.
    """
    named = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    opening = tag + "".join(f' {key}="{_plain(value)}"' for key, value in named)
    if tag in _ALONE:
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{together(children)}</{tag}>")


def together(children: Iterable[str]) -> Markup:
    """Return pieces one after the other; those that are no Markup are escaped."""
    return Markup("".join(c if isinstance(c, Markup) else _plain(c) for c in children))


def _plain(text: str) -> str:
    # One printable line, too: what foreign files hold may change the direction of what follows.
    return escape(one_line(text))
