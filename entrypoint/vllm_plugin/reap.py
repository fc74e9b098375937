"""Waiting for the process that reads ahead: after exec it is a child of vLLM's first process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading

from entrypoint.vllm_plugin.stop import loader_settings


def reap_reader() -> None:
    """In the process that boot became: have no zombie left when the reader is done.

    A thread waits for it; vLLM knows of no such child, and as a container's first process nobody
    else reaps there. Elsewhere, and where boot started none, nothing happens.
    """
    settings = loader_settings(sys.argv)
    if settings is None or multiprocessing.parent_process() is not None:
        return
    pid = settings.get("reader")
    if isinstance(pid, int):
        threading.Thread(target=_wait, args=(pid,), name="shardboot-reap", daemon=True).start()


def _wait(pid: int) -> None:
    # A process that inherited the words from vLLM's first one has no such child.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
