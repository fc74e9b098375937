"""The libraries that vLLM's CPU platform preloads into the processes that it spawns.

A fork has only what its standby was started with, so that is started with them. What is found here
is no more than a guess: before each fork it is compared with what vLLM itself has chosen.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from importlib import metadata


def wanted() -> str:
    """Return the LD_PRELOAD that vLLM 0.32 sets on a CPU (`CpuPlatform`), empty for none."""
    try:
        if "cpu" not in metadata.version("vllm"):
            return ""
    except metadata.PackageNotFoundError:
        return ""
    torch, vllm = _directory("torch"), _directory("vllm")
    openmp = _first(f"{torch}.libs/libgomp*.so*", f"{torch}/lib/libgomp*.so*")
    allocator = _first(f"{vllm}/libs/libtcmalloc_minimal*.so*", f"{vllm}/libs/libtcmalloc.so*")
    return ":".join(library for library in (allocator, openmp) if library)


def _directory(package: str) -> str:
    """Return where a package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return next(iter(places), "") if places else ""


def _first(*patterns: str) -> str:
    return next((path for pattern in patterns for path in glob.glob(pattern)), "")


def ensure() -> None:
    """Start this program anew with these libraries, unless a preload is set already (ld.so(8))."""
    import sys

    libraries = "" if os.environ.get("LD_PRELOAD") else wanted()
    if libraries:
        os.environ["LD_PRELOAD"] = libraries
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
