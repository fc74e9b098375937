"""Who listens, and where: vLLM, or whoever had the port before. By /proc (proc(5))."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from entrypoint.state.status import Address

LOOPBACK: Final = "127.0.0.1"
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


def numeric(pid: int, address: Address) -> Address:
    """Return where `pid` listens, as a number where its host is a name: none must be looked up.

    Where nobody listens on its port, nobody does on any host. A name where that cannot be seen.
    """
    # As vLLM binds: a name is an IPv4 one.
    is_name = bool(address.host.strip("0123456789.")) and ":" not in address.host
    if address.uds or not is_name:
        return address
    held: set[str] = set()
    with suppress(OSError):
        held.update(_held(pid))
    try:
        rows = [row for row in _rows(pid, "tcp") if _listens_on(row, "tcp", address.port)]
    except OSError:
        return address
    places = [(f"socket:[{row[9]}]" in held, _number(row[1])) for row in rows]
    return address._replace(host=max(places, default=(False, LOOPBACK))[1])


def _number(place: str) -> str:
    """Return the address of a row's place, which is written as a number of this machine."""
    return socket.inet_ntoa(int(place.partition(":")[0], 16).to_bytes(4, sys.byteorder))


def _listens_on(fields: list[str], table: str, port: int) -> bool:
    return fields[3] == LISTENING[table] and fields[1].endswith(f":{port:04X}")


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
            if _listens_on(fields, table, address.port):
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
