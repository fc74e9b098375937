"""A sidecar with nothing to do, for hours that pass as fast as they can.

Takes LOCAL SHARED STATE HOURS. Prints one JSON line for each hour: what the process has, and the
seconds of a processor so far.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from unittest import mock

from entrypoint.config import resolve
from entrypoint.log import Log
from entrypoint.sidecar import daemon, loop
from entrypoint.sidecar.listener import Listener
from entrypoint.sidecar.node import Node

HOUR = 3600.0


class Hours(threading.Event):
    """Time that passes when it is waited for, and no hint ever."""

    def __init__(self, node: Node, hours: int) -> None:
        super().__init__()
        self.began = self.now = time.time()
        self.node, self.told, self.hours = node, 0, hours

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        while self.now - self.began >= self.told * HOUR:
            self.tell()
            if self.told > self.hours:
                sys.exit()
        return False

    def tell(self) -> None:
        # As somebody scrapes it.
        self.node.metrics.text()
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        told = {
            "hour": self.told,
            "resident": pages * os.sysconf("SC_PAGESIZE"),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "cpu": time.process_time(),
        }
        print(json.dumps(told), flush=True)
        self.told += 1


def main() -> None:
    local, shared, state, hours = sys.argv[1:]
    flags = {"local_dir": local, "shared": shared, "state_dir": state, "prove_idle": "no"}
    settings = resolve(flags | {"listen": "127.0.0.1:0", "reserve_bytes": "0"}, {})
    node = Node(settings, {}, Log("sidecar"))
    passing = Hours(node, int(hours))
    jobs = daemon.jobs_of(node, passing)
    node.metrics.watch(lambda: node.sight, jobs)
    with mock.patch.multiple(time, time=lambda: passing.now, monotonic=lambda: passing.now):
        Listener(settings.listen, daemon.pages_of(node, jobs)).start()
        node.before_looking_far = daemon.watch_of(node, passing)
        loop.run(jobs, lambda text: print(text, file=sys.stderr), passing)


main()
