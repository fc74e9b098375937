"""What systemd is told, and where."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from entrypoint.watch import notify


@pytest.mark.parametrize("name", ["run/a@b", "@shardboot@{pid}"])
def test_systemd_is_told_where_it_listens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    address = name.format(pid=os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(5)
        channel.bind("\0" + address[1:] if name.startswith("@") else address)
        notify({"NOTIFY_SOCKET": address}, "loading: x", is_moving=False)
        assert channel.recv(99) == b"STATUS=loading: x\n"
