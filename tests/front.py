"""A real nginx, configured by the very example that is shipped, on a port of its own."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Final

import pytest
from processes import Program
from serving import free_port

EXAMPLE: Final = Path(__file__).parents[1] / "scripts" / "nginx"
PATH: Final = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
KINDS: Final = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
START_SECONDS: Final = 20.0

MAIN: Final = """\
user root;
worker_processes 2;
worker_shutdown_timeout 15m;
pid {room}/nginx.pid;
events {{}}
http {{
    access_log off;
{temporary}
    include {room}/llama.conf;
}}
"""


class Front:
    """An nginx that sends requests to one address; the `nginx` in `programs` is this one."""

    def __init__(self, room: Path, address: str) -> None:
        """Write its files. Skips where there is no nginx."""
        nginx = shutil.which("nginx", path=PATH)
        if nginx is None:
            pytest.skip("nginx is not installed (scripts/packages)")
        if os.geteuid() != 0:
            pytest.skip("needs root: nginx's workers would be somebody else")
        self.room, self.port = room, free_port()
        self.file, self.programs = room / "llama.server", room / "bin"
        self.programs.mkdir(parents=True, exist_ok=True)
        text = (EXAMPLE / "llama.conf").read_text()
        places = {
            "include /etc/nginx/upstreams/llama.server": f"include {self.file}",
            "    listen 80": f"    listen 127.0.0.1:{self.port}",
        }
        for theirs, ours in places.items():
            assert text.count(theirs) == 1
            text = text.replace(theirs, ours)
        (room / "llama.conf").write_text(text)
        line = (EXAMPLE / "llama.server").read_text()
        self.file.write_text(line.replace("127.0.0.1:8001", address))
        temporary = "\n".join(f"    {kind}_temp_path {room}/{kind};" for kind in KINDS)
        (room / "nginx.conf").write_text(MAIN.format(room=room, temporary=temporary))
        program = self.programs / "nginx"
        words = f"-e {room}/error.log -p {room} -c {room}/nginx.conf"
        program.write_text(f'#!/bin/sh\nexec {nginx} {words} "$@"\n')
        program.chmod(0o755)

    def start(self) -> Program:
        """Start it; it ends with the block."""
        command = [str(self.programs / "nginx"), "-g", "daemon off;"]
        program = Program(command, os.environ, self.room / "nginx.log")
        pid = self.room / "nginx.pid"
        deadline = time.monotonic() + START_SECONDS
        while not pid.exists() or not pid.read_text().strip():
            if program.process.poll() is not None or time.monotonic() > deadline:
                said = program.last_lines()
                program.stop()
                pytest.fail(f"nginx does not start: {said}")
            time.sleep(0.05)
        return program

    def target(self) -> str:
        """Return the address in the file that the upstream includes."""
        return self.file.read_text().split()[1]
