"""Whether it is vLLM that listens, and not whoever had the port before: by /proc (proc(5))."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from entrypoint.state.status import Address

LISTENING: Final = {"tcp": "0A", "tcp6": "0A", "unix": "00010000"}


def is_another(pid: int, address: Address) -> bool:
    """Tell whether somebody listens on the address of `pid`, and neither it nor a child of it does.

    False where that cannot be seen.
    """
    try:
        sockets = set(_listening(pid, address))
        return bool(sockets) and sockets.isdisjoint(_held(pid))
    except OSError:
        return False


def _listening(pid: int, address: Address) -> Iterator[str]:
    """Yield the sockets that listen there, seen from `pid`, as descriptors name them."""
    if address.uds:
        name = os.path.basename(address.uds)
        for fields in _rows(pid, "unix"):
            if fields[3] == LISTENING["unix"] and os.path.basename(fields[-1]) == name:
                yield f"socket:[{fields[6]}]"
        return
    for table in ("tcp", "tcp6"):
        for fields in _rows(pid, table):
            if fields[3] == LISTENING[table] and fields[1].endswith(f":{address.port:04X}"):
                yield f"socket:[{fields[9]}]"


def _rows(pid: int, table: str) -> Iterator[list[str]]:
    with open(f"/proc/{pid}/net/{table}", encoding="utf-8", errors="replace") as file:
        next(file)
        for line in file:
            yield line.split()


def _held(pid: int) -> Iterator[str]:
    """Yield what the descriptors of a process are, and those of all that it started."""
    directory = f"/proc/{pid}/fd"
    for descriptor in os.listdir(directory):
        with suppress(FileNotFoundError):
            yield os.readlink(f"{directory}/{descriptor}")
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text("ascii").split():
                yield from _held(int(child))
