"""Where vLLM will answer: what it said itself, and the words that its answer leaves out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from entrypoint.checkpoint.digest import Json
from entrypoint.state.status import Address

TAKING: Final = {
    "--host": "host",
    "--port": "port",
    "--uds": "uds",
    "--ssl-certfile": "certfile",
    "--ssl-keyfile": "keyfile",
    "--ssl-cert-reqs": "mutual",
}
PATHS: Final = ("uds", "certfile", "keyfile")
CERT_REQUIRED: Final = "2"
"""As `ssl.CERT_REQUIRED`, which is dear to import."""


def address(words: Sequence[str], told: Mapping[str, Json] | None) -> Address:
    """Return the address that vLLM makes of `words` in this working directory.

    `told` is what vLLM reads in the words without those that are known not to matter. These are
    read here: the last one counts, and all of them win over a config file, as for vLLM. None is
    for a vLLM that could not be asked: its defaults are assumed.
    """
    facts: dict[str, Any] = {"assumed": told is None, "headless": "--headless" in words}
    facts |= {name: value for name, value in (told or {}).items() if name in Address._fields}
    takes_port = told is None or told["takes_port"]
    facts |= {n: v for n, v in _given(words) if n != "port" or takes_port}
    # Who asks there later may be anywhere.
    facts |= {n: os.path.abspath(facts[n]) for n in PATHS if facts.get(n)}
    return Address(**facts)


def _given(words: Sequence[str]) -> Iterator[tuple[str, str | int | bool]]:
    """Yield what the words say of the address, in order; vLLM takes _ for - in names."""
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word == "--":
            return
        spelled, has_value, value = word.partition("=")
        name = TAKING.get(spelled.replace("_", "-"), "")
        given = value if has_value else following
        if name == "port" and given.isdecimal():
            yield name, int(given)
        elif name == "mutual":
            yield name, given == CERT_REQUIRED
        elif name and name != "port":
            yield name, given
