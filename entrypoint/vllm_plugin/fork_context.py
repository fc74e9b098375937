"""Processes by fork whose end is seen at once, whatever they have forked themselves.

The standard library's hand the descriptor by which a process is seen to live down to its own forks:
who waits for an engine's end would wait for that of its workers.
"""

from __future__ import annotations

import os
from multiprocessing import popen_fork
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.util import Finalize
from typing import Any

from entrypoint.vllm_plugin import forking


class _Popen(popen_fork.Popen):
    """As the standard library's, but that the child remembers its descriptor (`forking.held`)."""

    def _launch(self, process_obj: Any) -> None:
        parent_r, child_w = os.pipe()
        child_r, parent_w = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                forking.held[:] = [child_w]
                os.close(parent_r)
                os.close(parent_w)
                status = process_obj._bootstrap(parent_sentinel=child_r)
            finally:
                os._exit(status)
        os.close(child_w)
        os.close(child_r)
        self.finalizer = Finalize(self, _close, (parent_r, parent_w))
        self.sentinel = parent_r


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Process(ForkProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:  # noqa: N802 - the standard library's name
        return _Popen(process_obj)


class Forks(ForkContext):
    """The standard library's context of forks, with such processes."""

    Process = _Process
