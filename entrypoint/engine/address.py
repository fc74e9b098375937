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
    facts: dict[str, Any] = {"assumed": told is None, "headless": _has_no_http(words)}
    facts |= {name: value for name, value in (told or {}).items() if name in Address._fields}
    takes_port = told is None or told["takes_port"]
    facts |= {n: v for n, v in _given(words) if n != "port" or takes_port}
    # Who asks there later may be anywhere.
    facts |= {n: os.path.abspath(facts[n]) for n in PATHS if facts.get(n)}
    return Address(**facts)


def _given(words: Sequence[str]) -> Iterator[tuple[str, str | int | bool]]:
    """Yield what the words say of the address, in order."""
    for spelled, given in _options(words):
        name = TAKING.get(spelled, "")
        if name == "port" and given.isdecimal():
            yield name, int(given)
        elif name == "mutual":
            yield name, given == CERT_REQUIRED
        elif name and name != "port":
            yield name, given


def _has_no_http(words: Sequence[str]) -> bool:
    """Tell by the words alone: told so, or one of several nodes and not the first.

    Of replicas over several nodes, others than the very first node answer as well.
    """
    given = dict(_options(words))
    rank = given.get("--node-rank", given.get("-r", ""))
    replicas = given.get("--data-parallel-size", given.get("-dp", "1"))
    follows = rank.isdecimal() and int(rank) > 0 and replicas == "1"
    return follows or "--headless" in given or given.get("--api-server-count") == "0"


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word as an option would be, with its value; vLLM takes _ for - in names."""
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word == "--":
            return
        name, has_value, value = word.partition("=")
        yield name.replace("_", "-"), value if has_value else following
