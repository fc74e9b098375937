"""vLLM's own processes by fork, from the memory that is there already, where nothing forbids it.

vLLM spawns its engine, and that its workers: each imports everything once more, 7 s a level. A
fork of a process that has imported it all needs none of that. But threads do not survive a fork,
nor does what an accelerator's driver holds, and what a fresh process reads from its environment
when it starts (OpenMP's cores, libraries to preload) a fork has read long ago. So all of that is
looked at right before each of vLLM's processes is made; where anything is in the way, it is
spawned, as ever.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import re
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Final

from entrypoint.vllm_plugin.stop import loader_settings

SELF: Final = Path("/proc/self")
HARMLESS_THREADS: Final = re.compile(r"ZMQbg/.*|shardboot-reap")
"""Of ZeroMQ's contexts, which a fork makes anew for itself; ours waits for a process to end."""

ACCELERATORS: Final = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/", "/dev/davinci")
"""What the drivers of CUDA, ROCm, oneAPI and Ascend open for their contexts."""

METHOD: Final = "VLLM_WORKER_MULTIPROC_METHOD"
AT_START: Final = ("LD_PRELOAD",)
"""What counts only when a program starts: vLLM sets it for those that it spawns."""

PLACES: Final = ("GOMP_CPU_AFFINITY", "OMP_PLACES", "KMP_AFFINITY")
"""Where OpenMP's libraries are told a worker's cores, which they read when they are loaded."""

held: Final[list[int]] = []
"""The descriptor by which this process is seen to live, where it is a fork (`fork_context`)."""

Spawning = Callable[[], BaseContext]


def _environ_at_start() -> dict[str, str]:
    """Return the environment that this process's program was started with (proc(5))."""
    pairs = (SELF / "environ").read_bytes().split(b"\0")
    named = (os.fsdecode(pair).partition("=") for pair in pairs if pair)
    return {name: value for name, _, value in named}


STARTED_WITH: Final = _environ_at_start()
"""Read at once: a process that gives itself a title writes over it."""


def fork_if_told() -> None:
    """In the process that boot became: fork from now on, if boot has said so; elsewhere nothing."""
    settings = loader_settings(sys.argv)
    is_first = multiprocessing.parent_process() is None
    if settings is not None and settings.get("fork") and is_first:
        fork_all()


def fork_all() -> None:
    """From now on vLLM forks its processes, wherever `obstacle` finds nothing against it.

    A second call changes nothing, and so does the first where this vLLM has no such place.
    """
    system_utils = importlib.import_module("vllm.utils.system_utils")
    own: Spawning | None = getattr(system_utils, "get_mp_context", None)
    if own is None or own.__module__ == __name__:
        return
    chosen: dict[int, BaseContext] = {}

    def get_mp_context() -> BaseContext:
        # vLLM prepares the environment of its processes there, whatever it chooses.
        context = own()
        pid = os.getpid()
        if pid not in chosen:
            # Once for each process: what it makes for one way does not fit the other.
            reason = obstacle()
            chosen[pid] = context if reason else _forks()
            if reason:
                _warn(f"vLLM's processes are spawned, and import everything again: {reason}")
        return chosen[pid]

    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("get_mp_context") is own:
            names["get_mp_context"] = get_mp_context
    os.register_at_fork(after_in_child=_begin_anew)


def _forks() -> BaseContext:
    # Not before: `register` takes its import for the start of vLLM's first process.
    from entrypoint.vllm_plugin.fork_context import Forks

    return Forks()


def obstacle() -> str:
    """Say why this process must not be forked now; nothing where it may."""
    if threads := _lasting_threads():
        return f"there are threads: {', '.join(sorted(set(threads)))}"
    if device := next(_devices(), ""):
        return f"{device} is open, so an accelerator is in use already"
    if STARTED_WITH.get(METHOD) == "spawn":
        return f"{METHOD}=spawn"
    if "--numa-bind" in sys.argv:
        return "--numa-bind has processes started anew"
    for name in AT_START:
        wanted = os.environ.get(name, "")
        if wanted != STARTED_WITH.get(name, ""):
            return f"{name} is {wanted!r} for them, and counts only when a program starts"
    return ""


def _lasting_threads() -> list[str]:
    """Return the names of the threads that would be missed in a fork.

    Libraries that know about forks, as OpenBLAS does (pthread_atfork(3)), end theirs before one,
    and start them again when they need some: a first fork, which ends at once, tells which.
    """
    if any(_threads()):
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
    return list(_threads())


def _threads() -> Iterator[str]:
    """Yield the names of this process's other threads, but for harmless ones."""
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in os.listdir(SELF / "task"):
        if int(task) == threading.get_native_id():
            continue
        with contextlib.suppress(OSError):
            name = named.get(int(task)) or (SELF / "task" / task / "comm").read_text().strip()
            if not HARMLESS_THREADS.fullmatch(name):
                yield name


def _devices() -> Iterator[str]:
    """Yield the devices that are open since a driver was initialized in this process.

    Asking torch whether there is an accelerator would do just that. NVML, which looks at GPUs and
    survives a fork, opens others than these.
    """
    for name in os.listdir(SELF / "fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(SELF / "fd" / name)
            if path.startswith(ACCELERATORS):
                yield path


def _begin_anew() -> None:
    """In a fork: let go of what a fresh process would not have, and read what it would read."""
    for descriptor in held:
        os.close(descriptor)
    held.clear()
    with contextlib.suppress(ValueError):
        # The parent's, into which a signal to this one would be written.
        signal.set_wakeup_fd(-1)
    _close_listeners()
    reseed()
    _bind_threads()


def _close_listeners() -> None:
    """Close the server's own sockets: a port must be free once the server is gone, and no later.

    Those that are bound to a port of this host and have no peer: spawned processes get none.
    """
    for name in os.listdir(SELF / "fd"):
        descriptor = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if _is_listener(found):
                    os.close(descriptor)
        except OSError:
            continue


def _is_listener(found: socket.socket) -> bool:
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        return False
    try:
        found.getpeername()
    except OSError:
        return bool(found.getsockname()[1])
    return False


def reseed() -> None:
    """Draw what a fresh process draws when it imports: forks would all draw the same."""
    import random

    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _bind_threads() -> None:
    """Give a worker the cores and number of threads that OpenMP would have read at its start."""
    for name in PLACES:
        told = os.environ.get(name, "")
        if told and told != STARTED_WITH.get(name):
            places = re.search(r"proclist=\[([^]]*)\]", told)
            cores = {int(core) for core in re.findall(r"\d+", places[1] if places else told)}
            os.sched_setaffinity(0, cores)
    count = os.environ.get("OMP_NUM_THREADS", "")
    torch: Any = sys.modules.get("torch")
    if torch is not None and count.isdigit() and count != STARTED_WITH.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(count))


def _warn(text: str) -> None:
    from entrypoint.vllm_plugin import compat

    compat.logger().warning("shardboot: %s", text)
